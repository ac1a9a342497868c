"""Records of lost workers and nodes, written in an order that readers cannot misinterpret.

The order is: the new incarnation, which voids the lost process; how the process ended; the end of the generation. So
a reader of an exit or of an ended generation already sees the lost process as void.
"""

from collections.abc import Sequence
from dataclasses import replace

from hyperpod_plugins.elastic.membership.admission import is_in_world
from hyperpod_plugins.elastic.membership.restart_policy import JobRestart, JobRestartBudget, no_progress_message
from hyperpod_plugins.elastic.rendezvous.slots import LeaseState, NodeAssignment
from hyperpod_plugins.elastic.rendezvous.store import RendezvousClosing, RendezvousStore, RoundEnd
from hyperpod_plugins.elastic.store.entry_records import ended_entries, resume_point
from hyperpod_plugins.elastic.store.job_store import GAVE_UP_KEY, RESTART_KEY, JobStore
from hyperpod_plugins.elastic.store.records import FailureRecord


def can_take_joiners(job_store: JobStore) -> bool:
    """Whether the workers of a job can take joiners in: they are armed, and neither gave up nor request a restart."""
    return job_store.is_armed and not any(map(job_store.try_get, (GAVE_UP_KEY, RESTART_KEY)))


def end_running_generation(job_store: JobStore, failure: FailureRecord, at_least: int = 0) -> int:
    """End the running generation, unless it has ended; returns its number.

    A generation after 0 that is still being formed is not ended: the workers that form it know of the loss already.

    Args:
        job_store: job store of the round.
        failure: what ends the generation.
        at_least: first generation to consider.
    """
    generation = job_store.generation(at_least)
    if generation == 0 or job_store.plan(generation) is not None:
        job_store.end(generation, failure)
    return generation


def register_workers(job_store: JobStore, worker_ids: Sequence[int]) -> int:
    """Register the first workers of a node that joins a running job; returns the incarnation of all of them."""
    return max((job_store.next_incarnation(worker_id) for worker_id in worker_ids), default=0)


def record_worker_exit(job_store: JobStore, failure: FailureRecord, at_least: int = 0) -> int:
    """Record the exit of the worker in `failure`, and end the running generation if the worker is part of the world.

    Returns:
        The first generation to consider in the next call.
    """
    job_store.next_incarnation(failure.worker_id)
    job_store.record_exit(failure)
    return (
        end_running_generation(job_store, failure, at_least) if is_in_world(job_store, failure.worker_id) else at_least
    )


def record_node_exit(job_store: JobStore, worker_ids: Sequence[int], failure: FailureRecord) -> int:
    """Record the exit of all workers of a node; returns the incarnation of all their replacements.

    Args:
        job_store: job store of the round.
        worker_ids: of the node.
        failure: what happened to the node. The incarnation is filled in, and the worker_id if it is not of this node.
    """
    before = job_store.incarnations(worker_ids)
    now, number = list(before), max(before) + 1
    while min(now) < number:
        now = [
            each if each >= number else job_store.next_incarnation(worker_id)
            for worker_id, each in zip(worker_ids, now, strict=True)
        ]
        number = max(number, *now)  # the silent node may have registered a replacement of its own just now
    for worker_id, incarnation in zip(worker_ids, before, strict=True):
        for gone in range(incarnation, number):
            job_store.record_exit(replace(failure, worker_id=worker_id, incarnation=gone))
    first = worker_ids.index(failure.worker_id) if failure.worker_id in worker_ids else 0
    if any(is_in_world(job_store, worker_id) for worker_id in worker_ids):
        end_running_generation(job_store, replace(failure, worker_id=worker_ids[first], incarnation=before[first]))
    return number


def expire_slot(
    rdzv_store: RendezvousStore, job_store: JobStore, assignment: NodeAssignment, cause: str, reporter: str
) -> bool:
    """Make a slot vacant, and end the generation if its workers are part of it; False if the lease is not the last.

    Workers of the world are voided only when another node takes the slot over, so a node that was merely slow loses
    no more than the attempt at one step.
    """
    if not rdzv_store.swap(
        assignment.round_number, assignment.slot, assignment.lease, assignment.lease.with_state(LeaseState.VACANT)
    ):
        return False
    size = rdzv_store.workers_per_node(assignment.round_number) or 0
    worker_ids = range(assignment.slot * size, (assignment.slot + 1) * size)
    if not can_take_joiners(job_store):
        return True
    if any(is_in_world(job_store, worker_id) for worker_id in worker_ids):
        end_running_generation(
            job_store, FailureRecord(kind="agent", cause=cause, worker_id=worker_ids.start, reporter=reporter)
        )
    else:
        register_workers(job_store, worker_ids)  # voids the waiting workers, so that no plan includes them
    return True


def end_round_without_request(rdzv_store: RendezvousStore, job_store: JobStore, number: int, cause: str) -> None:
    """End a round without a worker's request; the next one resumes from the newest checkpoint.

    Args:
        rdzv_store: rendezvous store.
        job_store: job store of the round.
        number: number of the round.
        cause: why the round ends.
    """
    before = rdzv_store.round_end(number - 1) or RoundEnd(cause="")
    path, _ = resume_point(job_store, before.resume_from)
    end = RoundEnd(
        cause=f"{cause}; all processes start again from {path or 'the beginning'}",
        resume_from=path,
        entry=len(ended_entries(job_store)),
        shard_degree=before.shard_degree,  # requested degrees stay in effect
        tensor_degree=before.tensor_degree,
    )
    rdzv_store.end_round(number, end)


def request_new_round(rdzv_store: RendezvousStore, job_store: JobStore, number: int, node: str) -> None:
    """End a round because a worker requests a restart of all, or because `node` can join only in a new round.

    If restarts from the same checkpoint have not helped, the job ends. If the workers can take the node in by now,
    nothing happens.
    """
    wanted = job_store.try_get(RESTART_KEY)
    if wanted is None:
        if job_store.try_get(GAVE_UP_KEY) is not None or job_store.claim_restart_all():
            end_round_without_request(rdzv_store, job_store, number, f"the agent {node} joins")
        return
    restart, most = JobRestart.from_json(wanted), JobRestartBudget().max_restarts
    end = RoundEnd.of(restart, rdzv_store.round_end(number - 1))
    if end.count <= most:
        rdzv_store.end_round(number, end)
    else:
        cause = f"{no_progress_message(end.step, most)}; {restart.failure.cause}"
        rdzv_store.close(RendezvousClosing(cause=cause, is_success=False))
