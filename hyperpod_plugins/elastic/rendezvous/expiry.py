"""What is written down when processes or nodes are gone, in an order that nobody can misread.

First that the places of processes are void, then how they ended, then that the generation is over: a reader of `exit`
or `end` finds the place void already.
"""

from collections.abc import Sequence
from dataclasses import replace

from hyperpod_plugins.elastic.membership.admission import takes_part
from hyperpod_plugins.elastic.membership.restart_policy import JobRestart, JobRestartBudget, no_further
from hyperpod_plugins.elastic.rendezvous.slots import LeaseState, NodeAssignment
from hyperpod_plugins.elastic.rendezvous.store import RendezvousClosing, RendezvousStore, RoundEnd
from hyperpod_plugins.elastic.store.entries import next_beginning
from hyperpod_plugins.elastic.store.job_store import GAVE_UP_KEY, RESTART_KEY, JobStore
from hyperpod_plugins.elastic.store.records import FailureRecord


def can_absorb(job_store: JobStore) -> bool:
    """Whether the members of a job take newcomers in: they say so, and have not given up since."""
    return job_store.is_armed and not any(map(job_store.try_get, (GAVE_UP_KEY, RESTART_KEY)))


def end_running(job_store: JobStore, failure: FailureRecord, at_least: int = 0) -> int:
    """End the generation that is running, unless somebody has; returns the first that has not ended, or that one.

    One that is still being formed is left alone: those who form it know already.
    """
    generation = job_store.generation(at_least)
    if generation == 0 or job_store.plan(generation) is not None:
        job_store.end(generation, failure)
    return generation


def register_workers(job_store: JobStore, worker_ids: Sequence[int]) -> int:
    """Count the first processes of a node that comes to a running job; returns the number that all of them get."""
    return max((job_store.next_incarnation(worker_id) for worker_id in worker_ids), default=0)


def record_worker_exit(job_store: JobStore, failure: FailureRecord, at_least: int = 0) -> int:
    """Void the place of the process that `failure` is about; returns what `end_running` does."""
    job_store.next_incarnation(failure.worker_id)
    job_store.record_exit(failure)
    return end_running(job_store, failure, at_least) if takes_part(job_store, failure.worker_id) else at_least


def record_node_exit(job_store: JobStore, ranks: Sequence[int], failure: FailureRecord) -> int:
    """Void the places of all processes of a node; returns the number that all their successors get.

    Args:
        job_store: of the round.
        ranks: of the node.
        failure: what happened to it; the incarnation is filled in, and the rank where it is none of the node's.
    """
    before = job_store.incarnations(ranks)
    now, number = list(before), max(before) + 1
    while min(now) < number:
        now = [
            each if each >= number else job_store.next_incarnation(rank) for rank, each in zip(ranks, now, strict=True)
        ]
        number = max(number, *now)  # the node that was silent may have counted one of its own just now
    for rank, incarnation in zip(ranks, before, strict=True):
        for gone in range(incarnation, number):
            job_store.record_exit(replace(failure, worker_id=rank, incarnation=gone))
    first = ranks.index(failure.worker_id) if failure.worker_id in ranks else 0
    if any(takes_part(job_store, worker_id) for worker_id in ranks):
        end_running(job_store, replace(failure, worker_id=ranks[first], incarnation=before[first]))
    return number


def expire_slot(
    rdzv_store: RendezvousStore, job_store: JobStore, assignment: NodeAssignment, cause: str, reporter: str
) -> bool:
    """Let others have a slot, and wake those who wait for its workers; False if the lease was no longer the last.

    The places of its ranks are void when somebody comes for them, so a node that was only slow loses nothing but the
    attempt at one step.
    """
    if not rdzv_store.swap(
        assignment.number, assignment.slot, assignment.lease, assignment.lease.with_state(LeaseState.VACANT)
    ):
        return False
    size = rdzv_store.agreed_size(assignment.number) or 0
    worker_ids = range(assignment.slot * size, (assignment.slot + 1) * size)
    if not can_absorb(job_store):
        return True
    if any(takes_part(job_store, worker_id) for worker_id in worker_ids):
        end_running(job_store, FailureRecord(kind="agent", cause=cause, worker_id=worker_ids.start, reporter=reporter))
    else:
        register_workers(job_store, worker_ids)  # nobody is to count on processes that only waited
    return True


def end_unasked(rdzv_store: RendezvousStore, job_store: JobStore, number: int, cause: str) -> None:
    """End a round though no member wants all to begin again; they go on from the newest checkpoint that there is.

    Args:
        rdzv_store: of the agents.
        job_store: of the round.
        number: of it.
        cause: why.
    """
    before = rdzv_store.round_end(number - 1) or RoundEnd(cause="")
    path, _ = next_beginning(job_store, before.resume_from)
    end = RoundEnd(
        cause=f"{cause}; all begin again from {path or 'the beginning'}",
        resume_from=path,
        shard_degree=before.shard_degree,  # what somebody has asked for holds on
        tensor_degree=before.tensor_degree,
    )
    rdzv_store.end_round(number, end)


def request_new_round(rdzv_store: RendezvousStore, job_store: JobStore, number: int, node: str) -> None:
    """End a round: a member wants all to begin again, or `node` wants to take part and cannot do so otherwise.

    Where beginning again from the same checkpoint has not helped, the job ends. Where members can take the node in, by
    now, nothing happens.
    """
    wanted = job_store.try_get(RESTART_KEY)
    if wanted is None:
        if job_store.try_get(GAVE_UP_KEY) is not None or job_store.end_unarmed():
            end_unasked(rdzv_store, job_store, number, f"the agent {node} is to take part")
        return
    restart, most = JobRestart.from_json(wanted), JobRestartBudget().max_restarts
    end = RoundEnd.of(restart, rdzv_store.round_end(number - 1))
    if end.count <= most:
        rdzv_store.end_round(number, end)
    else:
        cause = f"{no_further(end.step, most)}; {restart.failure.cause}"
        rdzv_store.close(RendezvousClosing(cause=cause, is_success=False))
