"""`WorkerExits`: what the agent does when a worker ends."""

import contextlib
import signal
import time
from dataclasses import replace

from torch.distributed import DistError
from torch.distributed.elastic.utils.logging import get_logger

from hyperpod_plugins.elastic.launcher.agent_state import AgentState, NodeStatus
from hyperpod_plugins.elastic.launcher.departure import DONE_KEY
from hyperpod_plugins.elastic.launcher.local_workers import LocalWorkers, WorkerSlot, describe_exit, error_of
from hyperpod_plugins.elastic.launcher.signal_queue import SignalQueue
from hyperpod_plugins.elastic.membership.admission import uses_recovery, world_or_none
from hyperpod_plugins.elastic.membership.restart_policy import (
    NOT_NEEDED,
    JobRestart,
    Remedy,
    RestartBudget,
    RestartPolicy,
    WorkerExit,
)
from hyperpod_plugins.elastic.rendezvous.expiry import record_worker_exit
from hyperpod_plugins.elastic.rendezvous.keep_alive import MALFORMED
from hyperpod_plugins.elastic.store.entry_records import restart_from_newest
from hyperpod_plugins.elastic.store.job_store import BEGUN_KEY, GAVE_UP_KEY, RAISED_KEY, RESTART_KEY
from hyperpod_plugins.elastic.store.records import FailureRecord

logger = get_logger(__name__)
_FINISHED = "agent/finished"  # key .../WORKER_ID: that worker has succeeded


class WorkerExits:
    """Records exits in the job store, then replaces the worker, restarts all, or ends the job; for the main thread."""

    def __init__(self, node: NodeStatus, workers: LocalWorkers, inbox: SignalQueue, policy: RestartPolicy) -> None:
        """Handle the exits of `workers` within the limits of `policy`."""
        self._node, self._workers, self._inbox, self._policy = node, workers, inbox, policy
        self._budgets: dict[int, RestartBudget] = {}
        self._generation = 0
        self._is_proven = False
        """Whether a worker of this node ran past the time for early faults before it ended."""

    def begin_round(self) -> None:
        """Forget the replacements of the last round."""
        self._budgets.clear()
        self._generation = 0

    def handle(self, slot: WorkerSlot, code: int) -> None:
        """Record the exit of a worker, and do what follows from it."""
        node = self._node
        try:
            if code == 0:
                node.job_store.set(f"{_FINISHED}/{slot.worker_id}", b"1")
            elif node.state.counts_exits:
                self._is_proven |= slot.uptime_s >= self._policy.early_s
                if node.state is AgentState.STOPPING:
                    node.record_failure(slot, code)
                elif not self.is_void(slot):
                    self._handle_failure(slot, code)
        except (DistError, *MALFORMED) as error:
            self._stop_on_store_error(slot, code, error)

    def _handle_failure(self, slot: WorkerSlot, code: int) -> None:
        failure, node = self.record(slot, code), self._node
        # Another node may have taken the slot over just now.
        is_taken_over = node.job_store.incarnation(slot.worker_id) != failure.incarnation + 1
        if is_taken_over or node.state is AgentState.DRAINING:
            return
        loss = self._look(slot, code)
        budget = self._budgets.setdefault(slot.worker_id, RestartBudget(self._policy))
        remedy, why = loss.decide(budget.why_not_replace(loss, slot.uptime_s, time.monotonic()))
        if remedy is Remedy.REPLACE:
            self._replace(slot, code, failure)
        elif remedy is Remedy.RESTART_ALL:
            self._request_restart(slot, loss, failure)
        else:
            node.record_failure(slot, code)
            if remedy is Remedy.EXCLUDE:
                self._exclude_node(failure, why)
            else:
                node.stop_job(failure, why)

    def is_void(self, slot: WorkerSlot) -> bool:
        """Whether another node considered this one lost and took over its slot."""
        return self._node.job_store.incarnation(slot.worker_id) != slot.incarnation

    def record(self, slot: WorkerSlot, code: int) -> FailureRecord:
        """Record a failure in the job store, which ends the generation if the worker is part of the world."""
        failure = FailureRecord(
            kind="process",
            cause=describe_exit(slot, code),
            worker_id=slot.worker_id,
            incarnation=slot.incarnation,
            reporter=self._node.reporter,
        )
        self._generation = record_worker_exit(self._node.job_store, failure, self._generation)
        return failure

    def _look(self, slot: WorkerSlot, code: int) -> WorkerExit:
        node, job_store, worker_id = self._node, self._node.job_store, slot.worker_id
        given_up, is_armed = job_store.try_get(GAVE_UP_KEY), job_store.is_armed
        error = error_of(slot) if code > 0 else ""
        raised = job_store.try_get(f"{RAISED_KEY}/{worker_id}") if error else None
        node.uses_recovery |= uses_recovery(job_store)
        world = world_or_none(job_store)
        others = set(range(node.round.world_size) if world is None else world.worker_ids) - {worker_id}
        return WorkerExit(
            code=code,
            error=error,
            is_final=raised is not None and raised.decode(errors="replace") == error,
            is_armed=is_armed,
            has_begun=job_store.try_get(BEGUN_KEY) is not None,
            uses_recovery=node.uses_recovery,
            is_needed=world is None or worker_id in world.worker_ids,
            can_all_start=is_armed or not self._has_any_node_left(),
            may_restart=self._policy.max_restarts > 0,
            has_slots=node.handler is not None,
            is_unproven=node.round.job.incarnation > 0 and not self._is_proven,
            given_up=None if given_up is None else FailureRecord.from_json(given_up),
            are_others_finished=bool(others) and job_store.has_all([f"{_FINISHED}/{each}" for each in sorted(others)]),
        )

    def _has_any_node_left(self) -> bool:
        """Whether a node whose workers are done has left, or may have left."""
        if self._node.handler is not None:
            return self._node.handler.is_any_gone
        nodes = range(self._node.round.num_nodes)
        return bool(self._node.job_store.try_get_all([f"{DONE_KEY}/{node}" for node in nodes]))

    def _request_restart(self, slot: WorkerSlot, loss: WorkerExit, failure: FailureRecord) -> None:
        """Request a restart of all workers; the job ends if restarts have not helped before."""
        node = self._node
        wanted = restart_from_newest(node.job_store, node.round.job, failure)
        wanted = replace(wanted, is_own_fault=loss.is_own_fault)
        node.job_store.set_if_absent(RESTART_KEY, wanted.to_json().encode())
        node.restart_all(JobRestart.from_json(node.job_store.try_get(RESTART_KEY) or wanted.to_json()))
        if node.stopped is not None:
            node.record_failure(slot, loss.code)

    def _replace(self, slot: WorkerSlot, code: int, failure: FailureRecord) -> None:
        was = f"pid {slot.pid}, incarnation {slot.incarnation}) ended after {slot.uptime_s:.1f} s: {failure.cause}"
        then = "another process waits until the job grows" if code == NOT_NEEDED else "another process takes its place"
        logger.warning("worker %d (%s; %s", slot.worker_id, was, then)
        self._workers.replace(slot, failure.incarnation + 1)

    def _exclude_node(self, failure: FailureRecord, why: str) -> None:
        """Give up the slot of this node and leave; a node that serves the store stays to serve it."""
        handler = self._node.handler
        assert handler is not None
        stays = "this node only serves the job's store from now on" if handler.serves_store else "this node leaves"
        logger.error("%s; the job goes on without the workers of this node, and %s: %s", failure, stays, why)
        self._node.state = AgentState.EXCLUDED
        self._workers.stop(signal.SIGKILL, 0.0, self._inbox)
        with contextlib.suppress(DistError):
            handler.withdraw(f"its workers fail at startup: {failure.cause}")

    def _stop_on_store_error(self, slot: WorkerSlot, code: int, error: Exception) -> None:
        """End the job when the exit of a worker cannot be handled: the store is gone or holds malformed values."""
        if isinstance(error, DistError):
            self._node.lose_store(error)
        else:
            self._node.record_failure(slot, code)
            cause = f"worker {slot.worker_id} has ended"
            failure = FailureRecord(kind="agent", cause=cause, reporter=self._node.reporter)
            self._node.stop_job(failure, f"a value in the job's store is malformed ({error})")
