"""Keep-alive thread: renews this node's slot and expires those of silent peers.

Lost workers and nodes are recorded in an order that readers cannot misinterpret: the new incarnation, which voids the
lost process; how the process ended; the end of the generation. So a reader of an exit or of an ended generation already
sees the lost process as void.
"""

import atexit
import math
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.utils.logging import get_logger

from hyperpod_plugins.elastic.membership.admission import is_in_world, world_or_none
from hyperpod_plugins.elastic.membership.restart_policy import JobRestart, JobRestartBudget, no_progress_message
from hyperpod_plugins.elastic.rendezvous.backends import StoreBackend
from hyperpod_plugins.elastic.rendezvous.control import Controller
from hyperpod_plugins.elastic.rendezvous.slots import (
    LeaseState,
    LivenessTracker,
    NodeAssignment,
    SlotLease,
    SlotPolicy,
    members_of,
    watched_peers,
)
from hyperpod_plugins.elastic.rendezvous.store import RendezvousClosing, RendezvousStore, RoundEnd, name_of_round
from hyperpod_plugins.elastic.rendezvous.torchrun_workers import FailedWorker, WorkerMonitor
from hyperpod_plugins.elastic.store.entry_records import ended_entries, resume_point
from hyperpod_plugins.elastic.store.job_store import GAVE_UP_KEY, RESTART_KEY, JobStore
from hyperpod_plugins.elastic.store.records import FailureRecord

logger = get_logger(__name__)

KEEPING_ALIVE = "hyperpod-slots"
"""Name of the thread of `KeepAlive`."""
_CUT_OFF_BEATS = 4
"""A node that gets no answer ends after this many times the silence that costs a node its slot, at the earliest."""
_REPORT_S = 10
"""Seconds between two reports of the same problem."""
MALFORMED = (ValueError, TypeError, KeyError, IndexError, RecursionError)
"""Errors of parsing a value that was not written by an agent."""
_AT_EXIT_S = 1.0
_GRACE_S = 5.0


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


class KeepAlive:
    """A thread that sends heartbeats, watches those of other nodes, and acts on requests that concern this node."""

    def __init__(self, node: str, endpoint: StoreBackend, policy: SlotPolicy, run_id: str) -> None:
        """Create the thread; `start` starts it."""
        self.node = node
        self.assignment: NodeAssignment | None = None
        """The slot of this node, set by the main thread; None while it has none."""
        self.error: Exception | None = None
        """Why the store can no longer be reached."""
        self._endpoint = endpoint
        self._policy = policy
        self._run_id = run_id
        self._liveness = LivenessTracker(policy.max_missed_heartbeats)
        self._ended_assignment: NodeAssignment | None = None
        self._worker_monitor = WorkerMonitor()
        self._failed: FailedWorker | None = None
        self._controller: Controller | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name=KEEPING_ALIVE, daemon=True)
        self._num_looks = 0
        self._next_report_s = 0.0
        self.round_number = 0
        """The round that is running or about to start, as of the last look."""
        self.closing: RendezvousClosing | None = None
        """Why the job has ended, as of the last look."""
        self.ended_without_this_node = False
        """Whether it succeeded while the workers of this node waited to be taken in, as of the last look."""

    def start(self) -> None:
        """Connect to the store and start the heartbeats."""
        self._rdzv_store = RendezvousStore(self._endpoint.connect())
        self._rdzv_store.heartbeat(self.node)
        self._switch_round(self._rdzv_store.round())
        if self._endpoint.takes_requests:
            try:
                self._controller = Controller(self._endpoint.job(self._run_id))
            except OSError as error:
                logger.warning("`hyperpod` commands cannot reach this job: its ticket cannot be written: %s", error)
        self._thread.start()
        atexit.register(self._halt, _AT_EXIT_S)
        if not self._endpoint.answers_in_time:
            threading.Thread(target=self._end_when_cut_off, name="hyperpod-cut-off", daemon=True).start()

    def stop(self) -> None:
        """Stop the heartbeats and the thread."""
        self._halt(2 * self._policy.heartbeat_s)
        atexit.unregister(self._halt)
        if self._controller is not None:
            self._controller.close()

    def _halt(self, timeout_s: float) -> None:
        """End the thread: one that is in torch's store client while the interpreter shuts down aborts the process."""
        self._end.set()
        self._worker_monitor.wake()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def is_lost(self, node: str) -> bool:
        """Whether another node has fallen silent."""
        return node != self.node and self._liveness.is_lost(node)

    def failure(self, assignment: NodeAssignment) -> FailedWorker | None:
        """The first failed worker of an assignment; None if none is known."""
        return self._failed if self._failed is not None and self._failed.assignment is assignment else None

    @property
    def must_restart(self) -> bool:
        """Whether the workers of this node must end, and the node join the rendezvous again."""
        return self.assignment is not None and (self.error is not None or self._ended_assignment is self.assignment)

    def _run(self) -> None:
        try:
            while not self._end.is_set():
                self._watch(time.monotonic() + self._policy.heartbeat_s)
                try:
                    self._look()
                except MALFORMED as error:
                    self._report_malformed(error)
                self._num_looks += 1
        except (DistError, RendezvousConnectionError) as error:
            self.error = error

    def _report_malformed(self, error: Exception) -> None:
        """Report a malformed value in the store at most every `_REPORT_S` seconds; the job continues."""
        if time.monotonic() >= self._next_report_s:
            self._next_report_s = time.monotonic() + _REPORT_S
            logger.error("a value in the job's store is malformed, and is ignored: %s", error)

    def _end_when_cut_off(self) -> None:
        """End this node when the store no longer answers: a pending request would block until TCP gives up.

        It counts seconds rather than measure them, so that a process that was stopped for a while does not end.
        """
        silence_s = self._policy.heartbeat_s * max(1.0, self._policy.max_missed_heartbeats)
        limit_s = math.ceil(max(self._policy.answer_s, _CUT_OFF_BEATS * silence_s))
        num_looks, silent_s = -1, 0
        while self.error is None and not self._end.wait(1.0):
            if num_looks != self._num_looks and silent_s >= _REPORT_S:
                logger.warning("the store answers again after %d s, and this node continues", silent_s)
            silent_s = silent_s + 1 if num_looks == self._num_looks else 0
            num_looks = self._num_looks
            if silent_s and silent_s % _REPORT_S == 0:
                logger.warning(
                    "the store has not answered for %d s: its machine may be frozen, or this one cut off. This node "
                    "waits for %d s at most (read_timeout of --rdzv-conf)",
                    *(silent_s, limit_s),
                )
            if silent_s >= limit_s:
                logger.error("the store has not answered for %d s: this node is cut off and ends", silent_s)
                os.kill(os.getpid(), signal.SIGTERM)
                if not self._end.wait(_GRACE_S):  # the main thread is blocked by the store, too
                    self._worker_monitor.kill_all()
                    os._exit(1)

    def _watch(self, until_s: float) -> None:
        """Watch torchrun's workers until `until_s`; without any, just wait."""
        while time.monotonic() < until_s and not self._end.is_set():
            failed = self._worker_monitor.watch(until_s)
            if failed is None:
                continue
            before = self.failure(failed.assignment)
            if before is None and can_take_joiners(self._job_store):
                self._worker_monitor.kill_after_grace()
            if before is None or not before.how:
                self._failed = failed

    def _look(self) -> None:
        rdzv_store, assignment = self._rdzv_store, self.assignment
        rdzv_store.heartbeat(self.node)
        number = rdzv_store.round(at_least=self.round_number)
        if number != self.round_number:
            self._switch_round(number)
        self._endpoint.keep_alive(number, rdzv_store)
        leases = rdzv_store.leases(number)
        self._liveness.update(rdzv_store.heartbeats(watched_peers(self._expected(number, leases), self.node)))
        if leases is not None:
            self._expire_silent(number, leases)
        if self._controller is not None:
            self._controller.poll(name_of_round(self._run_id, number), self._job_store)
        self.closing = closing = rdzv_store.closing()
        if assignment is None:
            return
        is_over = (number > assignment.round_number and self._is_overtaken(assignment)) or (
            closing is not None and not closing.is_success
        )
        if closing is not None and closing.is_success and assignment.worker_ids:
            self.ended_without_this_node = not any(
                is_in_world(self._job_store, worker_id) for worker_id in assignment.worker_ids
            )
            if self.ended_without_this_node and self._worker_monitor.adopt(assignment):
                is_over = True
                self._worker_monitor.kill_after_grace()
        if leases is not None and closing is None and not is_over and self._has_no_world_left(assignment, leases):
            cause = "all nodes that trained are lost, and the remaining nodes were only waiting"
            logger.warning("round %d ends: %s", number, cause)
            end_round_without_request(rdzv_store, self._job_store, number, cause)
        if is_over or (leases is not None and not self._renew(assignment, leases[assignment.slot])):
            self._ended_assignment = assignment
        elif assignment.worker_ids:
            self._act_on_requests(assignment)

    def _expected(self, number: int, leases: tuple[SlotLease, ...] | None) -> list[str]:
        """The members of a round; before it has started, its candidates and the members of the previous round."""
        if leases is not None:
            return members_of(leases)
        former = members_of(self._rdzv_store.leases(number - 1))
        return list(dict.fromkeys((*self._rdzv_store.candidates(number), *former)))

    def _is_overtaken(self, assignment: NodeAssignment) -> bool:
        """Whether the round has ended for this node: at a worker's request, or otherwise if no node is done yet."""
        end = self._rdzv_store.round_end(assignment.round_number)
        if end is None or end.step >= 0:
            return end is not None
        leases = self._rdzv_store.leases(assignment.round_number) or ()
        return not any(lease.state.is_done for lease in leases)

    def _switch_round(self, number: int) -> None:
        self.round_number = number
        self._job_store = JobStore.from_store(name_of_round(self._run_id, number), self._endpoint.connect())

    def _expire_silent(self, number: int, leases: tuple[SlotLease, ...]) -> None:
        """Expire the slots of silent nodes; if the workers of one were done, its slot becomes `DONE` instead."""
        for slot, lease in enumerate(leases):
            if lease.state is LeaseState.DONE_RESTARTABLE and self.is_lost(lease.node):
                self._rdzv_store.swap(number, slot, lease, lease.with_state(LeaseState.DONE))
            if lease.state is LeaseState.HELD and self.is_lost(lease.node):
                assignment = NodeAssignment(round_number=number, slot=slot, num_slots=len(leases), lease=lease)
                cause = f"the agent {lease.node} is silent"
                if expire_slot(self._rdzv_store, self._job_store, assignment, cause, f"agent {self.node}"):
                    logger.warning("slot %d is vacant: %s", slot, cause)

    def _has_no_world_left(self, assignment: NodeAssignment, leases: tuple[SlotLease, ...]) -> bool:
        """Whether the workers of this node wait to be taken in, but no node of the world is left to do so."""
        held = {slot for slot, lease in enumerate(leases) if lease.state is not LeaseState.VACANT}
        if not assignment.worker_ids or len(held) == len(leases):
            return False
        world = world_or_none(self._job_store)
        return world is not None and not any(
            worker_id // len(assignment.worker_ids) in held for worker_id in world.worker_ids
        )

    def _renew(self, assignment: NodeAssignment, last: SlotLease) -> bool:
        """Keep the slot, taking it back if others vacated it; False if another node holds it."""
        if (last.node, last.number) != (assignment.lease.node, assignment.lease.number):
            if self.assignment is assignment:
                logger.warning("slot %d went to %s, as this node was silent for too long", assignment.slot, last.node)
            return False
        if last.state is LeaseState.VACANT and self.assignment is assignment:
            return self._rdzv_store.swap(
                assignment.round_number, assignment.slot, last, last.with_state(LeaseState.HELD)
            )
        return True

    def _act_on_requests(self, assignment: NodeAssignment) -> None:
        """Act on requests to kill a worker or restart all, for torchrun's agent; `HyperPodAgent` does so itself."""
        self._worker_monitor.adopt(assignment)
        for worker_id, incarnation in self._job_store.new_kills():
            if worker_id in assignment.worker_ids and incarnation == assignment.incarnation:
                self._worker_monitor.kill(assignment, worker_id)
        if self._ended_assignment is not assignment and self._job_store.try_get(RESTART_KEY) is not None:
            request_new_round(self._rdzv_store, self._job_store, assignment.round_number, self.node)
            self._worker_monitor.kill_after_grace()
            self._ended_assignment = assignment
