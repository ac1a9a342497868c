"""The agent of a node: torch's elastic agent, except that it replaces a lost worker while the others keep running.

The exit of a worker is handled within milliseconds. The kernel notifies the fork server, which notifies the agent.
The agent writes to the job store that the worker slot has a new incarnation, then how the old one ended, then that
the generation has ended, if it was formed. The fork server then forks the replacement. Other workers may notice the
loss earlier; the first to write the end of a generation determines its recorded cause.

All agents use a store that one of them serves, or etcd, so the loss of a worker never takes the store with it. The
rendezvous decides whether a lost node can be replaced; see `rendezvous/handler.py`.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import LogsDest, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.utils.logging import get_logger

from hyperpod_plugins.elastic.launcher.local_workers import (
    KILLED_S,
    LocalWorkers,
    WorkerSlot,
    WorkerStatus,
    describe_exit,
    error_of,
    process_failure,
)
from hyperpod_plugins.elastic.launcher.logs import Sink
from hyperpod_plugins.elastic.launcher.round import AgentOptions, RoundStarter, worker_slots
from hyperpod_plugins.elastic.launcher.signal_queue import SignalQueue
from hyperpod_plugins.elastic.membership.admission import announce_preemption, is_in_world, uses_recovery, world_or_none
from hyperpod_plugins.elastic.membership.elastic_spec import elastic_spec_of
from hyperpod_plugins.elastic.membership.quorum_policy import ExitWait
from hyperpod_plugins.elastic.membership.restart_policy import (
    GAVE_UP,
    NOT_NEEDED,
    JobRestart,
    JobRestartBudget,
    Remedy,
    RestartBudget,
    WorkerExit,
)
from hyperpod_plugins.elastic.rendezvous.expiry import record_worker_exit
from hyperpod_plugins.elastic.rendezvous.handler import HyperPodRendezvousHandler
from hyperpod_plugins.elastic.rendezvous.keep_alive import MALFORMED
from hyperpod_plugins.elastic.store.entries import EntryRecords, existing_folder, restart_from_newest
from hyperpod_plugins.elastic.store.job_store import BEGUN_KEY, GAVE_UP_KEY, RAISED_KEY, RESTART_KEY, JobStore
from hyperpod_plugins.elastic.store.records import FailureRecord

logger = get_logger(__name__)

_POLL_S = 0.05
"""Interval at which the job store is polled for processes to kill and for the end of the job."""
_POLL_PER_NODE_S = 0.0005
"""Minimum of that interval per node, as all nodes share one job store: each of 1,000 nodes polls twice a second."""
_LEAVE_S = 5.0
"""How long nodes whose workers are done wait for each other to leave; also the time from SIGTERM to SIGKILL for
workers that the job no longer needs."""
_REPORT_S = 30.0
"""How often a node whose workers are done reports the nodes it waits for."""
_OUTSIDE_S = 900.0
"""How long a worker outside of a step may show no progress before the node that serves the store stops waiting."""
_PART_FOR_LEAVING = 1 / 3
"""Fraction of the time from SIGTERM to SIGKILL that an elastic job gets to continue without this node."""
_END_S = 4.0
"""How long this process may live after a signal that ends it, once no worker runs here."""
_STUCK_S = 2.0
"""How long the main thread may take to pass that signal on to the workers."""
_STOP_LINGER_S = 0.5
"""How long the store outlives the decision to stop, so that the other nodes can read the reason."""
_STOPPED = "agent/stopped"  # value: the FailureRecord for which the whole job ends
_DONE = "agent/done"  # key .../NODE: all workers of that node have succeeded
_LEFT = "agent/left"  # key .../NODE: that node no longer needs the rendezvous
_FINISHED = "agent/finished"  # key .../WORKER_ID: that worker has succeeded


def longest_stop_s(shutdown_timeout_s: float) -> float:
    """Longest time in seconds that workers may run after a signal that ends the agent.

    It covers the wait for the job to continue without them, the time to SIGKILL, and the exit of killed processes.

    Args:
        shutdown_timeout_s: from SIGTERM to SIGKILL.
    """
    return shutdown_timeout_s * (1 + _PART_FOR_LEAVING) + KILLED_S + _STUCK_S


class HyperPodAgent(SimpleElasticAgent):
    """torch's elastic agent with replacement of single workers. Use it from the main thread."""

    def __init__(self, spec: WorkerSpec, options: AgentOptions) -> None:
        """Start the fork server.

        Args:
            spec: torch's worker spec. Its `max_restarts`, which counts restarts of all workers, must be 0, and its
                `monitor_interval` short.
            options: what the spec does not hold.
        """
        super().__init__(spec)
        self._options = options
        self._inbox = SignalQueue(options.ending_signals)
        self._inbox.on_ending(self._enforce_end)
        self._is_stopping = False
        self._workers = LocalWorkers(options.program, options.fork_server, dict(options.environ))
        self._rounds = RoundStarter()
        self._budgets: dict[int, RestartBudget] = {}
        self._job_restarts = JobRestartBudget()
        self._restart: JobRestart | None = None
        self._records: EntryRecords | None = None
        self._failures: dict[int, ProcessFailure] = {}
        self._reporter = ""
        self._generation, self._next_poll_s = 0, 0.0
        self._has_left = self._has_job_store = False
        self._leave_by_s: float | None = None
        self._next_signal, self._next_signal_s = signal.SIGTERM, 0.0
        self._is_needed = True
        self._stopped_s = 0.0
        self._uses_recovery = False
        """Whether the program takes part in recovery; once known, this holds for later rounds."""
        self._is_proven = False
        """Whether a worker of this node ran past the time for early faults before it ended."""
        self._excluded: FailureRecord | None = None
        """Why the job continues without the workers of this node, if it does."""
        self.stopped: FailureRecord | None = None
        """Why the whole job ends early; None if it does not."""

    # -- torch's loop and the methods it calls -----------------------------------------------------------------------

    def _invoke_run(self, role: str = "default") -> RunResult:
        """Run torch's loop; run it again when another node requests a restart after the workers here are done."""
        while True:
            result = super()._invoke_run(role)
            if result.is_failed() or self._restart is None or self.stopped is not None:
                return result

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        restart, self._restart = self._restart, None
        records, num_before = self._records_of_last_round(restart)
        self._round = self._rounds.begin(worker_group, restart.resume_from if restart is not None else "")
        handler = worker_group.spec.rdzv_handler
        rendezvous = handler if isinstance(handler, HyperPodRendezvousHandler) else None
        job = self._round.job
        self._job_store = (
            JobStore.connect(job) if rendezvous is None else JobStore.from_store(job.run_id, rendezvous.connect())
        )
        if records is not None and rendezvous is None:  # else the rendezvous hands them over
            records.hand_over(self._job_store, num_before)
        self._has_job_store, self._generation = True, 0
        self._reporter = f"agent of node {self._round.node}"
        self._budgets.clear()
        with self._inbox.deferred():
            slots, destination = worker_slots(worker_group, self._round, self._options)
            self._workers.start(slots, self._sinks(destination))
            for slot, code in self._workers.wait_started(
                self._inbox, lambda: rendezvous is not None and rendezvous.is_over
            ):
                self._on_end(slot, code)
            if self._leave_by_s is not None:  # the notice given in the round before does not carry over
                self._announce_preemption()
            return {slot.local_rank: slot.pid for slot in slots}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        until_s = time.monotonic() + self._options.monitor_interval_s
        with self._inbox.deferred():
            while True:
                for slot, code in self._workers.wait(min(until_s, self._next_poll_s), self._inbox):
                    self._on_end(slot, code)
                self._inbox.raise_pending()
                for notice in self._inbox.take_notices():
                    self._announce_leaving(notice)
                self._poll_job_store()
                result = self._outcome()
                if result is not None:
                    return result
                if time.monotonic() >= until_s:
                    for slot in self._workers.slots:
                        worker_group.workers[slot.local_rank].id = slot.pid
                    return RunResult(state=WorkerState.HEALTHY)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._stop(signal.SIGTERM if self._restart is None else signal.SIGKILL)
        self._inbox.raise_pending()  # before the rendezvous, which may take a long time

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Shut this node down; `timeout` is ignored, as `AgentOptions.shutdown_timeout_s` has the same value."""
        self._is_stopping = True
        with self._inbox.deferred():  # another signal must not interrupt the shutdown
            self._end_node(death_sig)

    def _end_node(self, death_sig: signal.Signals) -> None:
        if self.stopped is None:
            with contextlib.suppress(DistError):
                self._announce_preemption()
                if death_sig == signal.SIGTERM:
                    self._leave_between_steps()
        for slot, code in self._stop(death_sig):
            if code != 0 and self.stopped is None and self._round.num_nodes > 1:
                with contextlib.suppress(DistError):
                    if not self._is_void(slot):
                        self._record_exit(slot, code)  # the other nodes stay, and need not detect the loss themselves
        self._workers.close()
        if self.stopped is not None and (self._worker_group.group_world_size or 1) > 1:
            time.sleep(max(0.0, self._stopped_s + _STOP_LINGER_S - time.monotonic()))

    def _exit_barrier(self) -> None:
        """Wait until the workers of all nodes are done, as the stores are needed until then; then leave together."""
        handler = self._worker_group.spec.rdzv_handler
        num_nodes, kept = self._round.num_nodes, None
        if isinstance(handler, HyperPodRendezvousHandler):
            with contextlib.suppress(DistError):  # the node that serves the store ended it, as no node needs it
                handler.finish(stays=True)
                if handler.is_done or handler.serves_store:  # otherwise the others continue without this node
                    self._await_members(handler)
                    if handler.is_done and self._restart is not None:
                        return
            self.leave_rendezvous()
            return
        with contextlib.suppress(DistError):  # the node that serves the store may have timed out and left first
            if self._await_all_nodes(_DONE, self._exit_barrier_timeout) and self._round.node == 0:
                kept = existing_folder(self._job_store) if self.stopped is None else None
            self.leave_rendezvous()
            self._await_all_nodes(_LEFT, _LEAVE_S)
        if kept is not None:  # the state after each entry of the program, which has succeeded
            shutil.rmtree(kept, ignore_errors=True)
        if self._round.node == 0 and num_nodes > 1:
            time.sleep(2 * self._options.monitor_interval_s)  # the others still poll for the last `_LEFT`

    def _await_members(self, handler: HyperPodRendezvousHandler) -> None:
        """Wait until the workers of all nodes that train are done; the slots of silent nodes expire meanwhile.

        The wait is limited, as no other rank would notice a worker that hangs after the program's last call.
        """
        now_s, limit_s = time.monotonic(), self._exit_barrier_timeout
        if handler.serves_store:
            limit_s = max(limit_s, _OUTSIDE_S)  # the remaining nodes cannot continue without the store
        wait, look_s = ExitWait(limit_s, now_s), min(_REPORT_S, limit_s / 4)
        next_look_s, next_report_s = now_s, now_s + _REPORT_S
        while self._job_store.try_get(_STOPPED) is None and not handler.is_closed() and (left := handler.unfinished()):
            now_s = time.monotonic()
            if handler.is_done and self._follows_restart():
                return
            if now_s >= next_look_s:
                next_look_s = now_s + look_s
                if wait.is_over(left, self._heartbeats_of(handler, left), now_s) and not self._follows_restart():
                    logger.warning(
                        "the workers of this node are done, and it stops waiting for nodes %s: their workers have "
                        "shown no progress for %.0f s",
                        *(sorted(left), limit_s),
                    )
                    return
            if now_s > next_report_s:
                next_report_s = now_s + _REPORT_S
                logger.warning("the workers of this node are done; waiting for nodes %s", sorted(left))
            time.sleep(self._options.monitor_interval_s)

    def _follows_restart(self) -> bool:
        """Whether a restart of all workers is requested. It includes those that are done: they skip what they ran."""
        wanted = self._job_store.try_get(RESTART_KEY)
        if wanted is not None:
            with contextlib.suppress(*MALFORMED):  # the keep-alive thread reports such values
                self._restart_all(JobRestart.from_json(wanted))
        return self._restart is not None

    def _heartbeats_of(self, handler: HyperPodRendezvousHandler, left: set[int]) -> dict[int, dict[str, Any]] | None:
        """Last heartbeats of the workers of other nodes; None if unknown while a new round still needs the store."""
        if handler.has_new_round:
            return None if handler.serves_store else {}
        return handler.heartbeats_of(left)

    def _await_all_nodes(self, what: str, timeout_s: float) -> bool:
        self._job_store.set(f"{what}/{self._round.node}", b"1")
        deadline_s = time.monotonic() + timeout_s
        there = set[int]()
        while time.monotonic() < deadline_s and self._job_store.try_get(_STOPPED) is None:
            nodes = range(self._round.num_nodes)
            there |= {
                node for node in nodes if node not in there and self._job_store.try_get(f"{what}/{node}") is not None
            }
            if there.issuperset(nodes):
                return True
            time.sleep(self._options.monitor_interval_s)
        return False

    def leave_rendezvous(self) -> None:
        """Leave the rendezvous for good; only the first call has an effect."""
        if not self._has_left:
            self._has_left = True
            self._worker_group.spec.rdzv_handler.shutdown()

    # -- exits of workers -----------------------------------------------------------------------------------------

    def _on_end(self, slot: WorkerSlot, code: int) -> None:
        """Record the exit of a worker in the job store, then replace it, restart all workers, or end the job."""
        try:
            if code == 0:
                self._job_store.set(f"{_FINISHED}/{slot.worker_id}", b"1")
                return
            if self._restart is not None or not self._is_needed or self._excluded is not None:
                return
            self._is_proven |= slot.uptime_s >= self._options.restarts.early_s
            if self.stopped is not None:
                self._record_failure(slot, code)
                return
            if self._is_void(slot):
                return
            failure = self._record_exit(slot, code)
            # Another node may have taken the slot over just now.
            is_taken_over = self._job_store.incarnation(slot.worker_id) != failure.incarnation + 1
            if is_taken_over or self._leave_by_s is not None:
                return
            is_new, loss = self._is_unproven_node(slot, code), self._loss(slot, code)
            if not is_new and self._request_restart(slot, loss, failure):
                return
            refusal = self._refusal(slot, loss)
            is_on_trial = refusal is not None and is_new
        except (DistError, *MALFORMED) as error:
            self._stop_on_store_error(slot, code, error)
            return
        if refusal is not None:
            self._record_failure(slot, code)
            if is_on_trial:
                self._exclude_node(failure, refusal)
            else:
                self._stop_job(failure, refusal)
            return
        was = f"pid {slot.pid}, incarnation {slot.incarnation}) ended after {slot.uptime_s:.1f} s: {failure.cause}"
        then = "another process waits until the job grows" if code == NOT_NEEDED else "another process takes its place"
        logger.warning("worker %d (%s; %s", slot.worker_id, was, then)
        self._workers.replace(slot, failure.incarnation + 1)

    def _is_unproven_node(self, slot: WorkerSlot, code: int) -> bool:
        """Whether a failure is blamed on this node, not the job: the node joined later and has not proven itself."""
        if self._job_store.try_get(GAVE_UP_KEY) is not None or not self._job_store.is_armed:
            return False
        if not isinstance(self._worker_group.spec.rdzv_handler, HyperPodRendezvousHandler):
            return False
        if not is_in_world(self._job_store, slot.worker_id):
            return True
        return self._round.job.incarnation > 0 and not self._is_proven and code != GAVE_UP

    def _exclude_node(self, failure: FailureRecord, why: str) -> None:
        """Give up the slot of this node and leave; a node that serves the store stays to serve it."""
        handler = self._worker_group.spec.rdzv_handler
        assert isinstance(handler, HyperPodRendezvousHandler)
        stays = "this node only serves the job's store from now on" if handler.serves_store else "this node leaves"
        logger.error("%s; the job goes on without the workers of this node, and %s: %s", failure, stays, why)
        self._excluded = replace(failure, cause=f"{failure.cause}; {why}")
        self._workers.stop(signal.SIGKILL, 0.0, self._inbox)
        with contextlib.suppress(DistError):
            handler.withdraw(f"its workers fail at startup: {failure.cause}")

    def _is_void(self, slot: WorkerSlot) -> bool:
        """Whether another node considered this one lost and took over its slot."""
        return self._job_store.incarnation(slot.worker_id) != slot.incarnation

    def _record_exit(self, slot: WorkerSlot, code: int) -> FailureRecord:
        failure = FailureRecord(
            kind="process",
            cause=describe_exit(slot, code),
            worker_id=slot.worker_id,
            incarnation=slot.incarnation,
            reporter=self._reporter,
        )
        self._generation = record_worker_exit(self._job_store, failure, self._generation)
        return failure

    def _loss(self, slot: WorkerSlot, code: int) -> WorkerExit:
        job_store = self._job_store
        is_armed, error = job_store.is_armed, error_of(slot) if code > 0 else ""
        raised = job_store.try_get(f"{RAISED_KEY}/{slot.worker_id}") if error else None
        self._uses_recovery |= uses_recovery(job_store)
        return WorkerExit(
            code=code,
            error=error,
            is_final=raised is not None and raised.decode(errors="replace") == error,
            is_armed=is_armed,
            has_begun=job_store.try_get(BEGUN_KEY) is not None,
            uses_recovery=self._uses_recovery,
            is_needed=is_in_world(job_store, slot.worker_id),
            can_all_start=is_armed or not self._has_any_node_left(),
            may_restart=self._options.restarts.max_restarts > 0,
        )

    def _has_any_node_left(self) -> bool:
        """Whether a node whose workers are done has left, or may have left."""
        handler = self._worker_group.spec.rdzv_handler
        if isinstance(handler, HyperPodRendezvousHandler):
            return handler.is_any_gone
        return bool(self._job_store.try_get_all([f"{_DONE}/{node}" for node in range(self._round.num_nodes)]))

    def _request_restart(self, slot: WorkerSlot, loss: WorkerExit, failure: FailureRecord) -> bool:
        """Request a restart of all workers if the others cannot take a replacement in and a restart may help.

        Returns:
            Whether the loss is handled: by that restart, or by the end of the job if restarts have not helped before.
        """
        if loss.remedy is not Remedy.RESTART_ALL or self._job_store.try_get(GAVE_UP_KEY) is not None:
            return False
        found = restart_from_newest(self._job_store, self._round.job, failure)
        wanted = replace(found, is_own_fault=loss.is_own_fault)
        self._job_store.set_if_absent(RESTART_KEY, wanted.to_json().encode())
        self._restart_all(JobRestart.from_json(self._job_store.try_get(RESTART_KEY) or wanted.to_json()))
        if self.stopped is not None:
            self._record_failure(slot, loss.code)
        return True

    def _refusal(self, slot: WorkerSlot, loss: WorkerExit) -> str | None:
        budget, code = self._budgets.setdefault(slot.worker_id, RestartBudget(self._options.restarts)), loss.code
        refusal = budget.why_not_replace(loss, slot.uptime_s, time.monotonic())
        given_up = self._job_store.try_get(GAVE_UP_KEY)
        if given_up is not None:
            return f"the job has given up: {FailureRecord.from_json(given_up)}"
        if loss.remedy is Remedy.END and code > 0 and loss.uses_recovery:
            return "it failed on its own outside of the program's steps"
        if not loss.is_armed:
            return (
                "no worker takes part in recovery: the program does not use it, has nothing to recover yet, or is "
                "past its last step"
            )
        if refusal is None:
            world = world_or_none(self._job_store)
            worker_ids = range(self._worker_group.workers[0].world_size) if world is None else world.worker_ids
            others = set(worker_ids) - {slot.worker_id}
            if others and self._job_store.has_all([f"{_FINISHED}/{worker_id}" for worker_id in sorted(others)]):
                return "all others have finished, and a replacement would hang"
        return refusal

    def _poll_job_store(self) -> None:
        """Kill workers on request, and act on a stop, a restart or the end of the job that another node decided."""
        if time.monotonic() < self._next_poll_s:
            return
        self._next_poll_s = time.monotonic() + max(_POLL_S, self._round.num_nodes * _POLL_PER_NODE_S)
        try:
            for wanted in self._job_store.new_kills():
                here = [slot for slot in self._workers.slots if (slot.worker_id, slot.incarnation) == wanted]
                self._workers.send(here, signal.SIGKILL)
            stopped, restart = self._job_store.try_get(_STOPPED), self._job_store.try_get(RESTART_KEY)
            if self._leave_by_s is not None:
                self._end_superfluous_workers(self._leave_by_s)
            stop = None if stopped is None else FailureRecord.from_json(stopped)
            wanted = None if restart is None else JobRestart.from_json(restart)
            may_begin = stop is None and self._restart is None and self._excluded is None
            if wanted is not None and may_begin and not self._is_superfluous():
                self._restart_all(wanted)
        except DistError as error:
            if not self._is_superfluous():
                self._lose_store(error)
            return
        except MALFORMED:  # the keep-alive thread reports such values
            return
        if self._is_superfluous():
            logger.warning("the job is done without this node: its workers end")
            self._is_needed = False
            self._workers.stop(signal.SIGKILL, 0.0, self._inbox)
        elif stop is not None:
            self._end_job(stop)

    def _is_superfluous(self) -> bool:
        """Whether the job has succeeded while the workers of this node still wait to be taken in."""
        handler = self._worker_group.spec.rdzv_handler
        return isinstance(handler, HyperPodRendezvousHandler) and self._is_needed and handler.ended_without_this_node

    # -- leaving while the job continues --------------------------------------------------------------------------

    def _announce_leaving(self, notice: signal.Signals) -> None:
        """Request that the job shrink, so that this node can leave between two steps.

        A job that cannot change its size gets the notice instead: it is passed on to the workers.
        """
        if self._leave_by_s is not None:
            return
        handler = self._worker_group.spec.rdzv_handler
        try:
            spec = elastic_spec_of(self._job_store)
            if spec is None or not isinstance(handler, HyperPodRendezvousHandler):
                self._workers.send(self._workers.slots, notice)
                return
            if handler.serves_store:
                logger.warning("%s: this node serves the store of the job, and cannot leave it", notice.name)
                return
            self._announce_preemption()
        except DistError as error:
            self._lose_store(error)
            return
        timeout_s = spec.policy.graceful_shutdown_timeout_s
        logger.warning("%s: this node leaves the job, between two steps, within %.0f s", notice.name, timeout_s)
        self._leave_by_s = time.monotonic() + timeout_s

    def _leave_between_steps(self) -> None:
        """Wait for an elastic job to continue without this node; a timeout or another signal ends the wait."""
        handler = self._worker_group.spec.rdzv_handler
        own = {slot.worker_id for slot in self._workers.slots if slot.status is WorkerStatus.RUNNING}
        if not own or not isinstance(handler, HyperPodRendezvousHandler) or handler.serves_store:
            return
        spec, world = elastic_spec_of(self._job_store), world_or_none(self._job_store)
        if spec is None or world is None or own.issuperset(world.worker_ids):
            return
        grace_s = min(spec.policy.graceful_shutdown_timeout_s, self._options.shutdown_timeout_s * _PART_FOR_LEAVING)
        self._leave_by_s = time.monotonic() + grace_s
        with self._inbox.deferred(), contextlib.suppress(SignalException):
            while self._outcome() is None and any(slot.status is WorkerStatus.RUNNING for slot in self._workers.slots):
                for slot, code in self._workers.wait(self._next_poll_s, self._inbox):
                    self._on_end(slot, code)
                self._inbox.raise_pending()
                self._poll_job_store()

    def _announce_preemption(self) -> None:
        for slot in self._workers.slots:  # none before the first round
            if slot.status is not WorkerStatus.DONE:
                announce_preemption(self._job_store, slot.worker_id, slot.incarnation)

    def _end_superfluous_workers(self, leave_by_s: float) -> None:
        """End the workers of this node that are no longer part of the world.

        Raises:
            SignalException: the job did not continue without this node by `leave_by_s`; the node leaves anyway.
        """
        if time.monotonic() > leave_by_s:
            cause = f"process {os.getpid()} got notice, and the job did not continue without it in time"
            raise SignalException(cause, signal.SIGTERM)
        world = world_or_none(self._job_store)
        if world is None:
            return
        aside = [slot for slot in self._workers.slots if slot.worker_id not in world.worker_ids]
        self._is_needed = len(aside) < len(self._workers.slots)
        if aside and time.monotonic() >= self._next_signal_s:
            self._workers.send(aside, self._next_signal, last=True)
            self._next_signal, self._next_signal_s = signal.SIGKILL, time.monotonic() + _LEAVE_S

    # -- restarts of all workers, and the end of the job ----------------------------------------------------------

    def _restart_all(self, restart: JobRestart) -> None:
        """Have torch's loop restart all workers; end the job if restarts have not helped before."""
        refusal = self._job_restarts.why_not_restart(restart)
        if refusal is not None:
            self._stop_job(restart.failure, refusal)
            return
        logger.warning("%s", restart)
        self._records = EntryRecords.read(self._job_store)
        self._restart, self._uses_recovery = restart, True  # only programs that take part in recovery request restarts

    def _records_of_last_round(self, restart: JobRestart | None) -> tuple[EntryRecords | None, int]:
        """Records of ended entries to pass to the next round, and how many entries count as ended before it."""
        if not self._has_job_store:
            return None, 0
        if restart is not None and self._records is not None:
            return self._records, restart.entry
        with contextlib.suppress(DistError):  # the round ended for another reason; its store may be gone
            self._records = EntryRecords.read(self._job_store)
        records = self._records or EntryRecords()
        return records, len(records.ended)

    def _outcome(self) -> RunResult | None:
        self._remaining_restarts = int(self._restart is not None and self.stopped is None)  # torch's: of all workers
        if self.stopped is not None:
            return RunResult(state=WorkerState.FAILED, failures=self._failures)
        if self._excluded is not None:
            return self._outcome_without_workers()
        if self._restart is not None:
            return RunResult(state=WorkerState.UNHEALTHY)
        final = {WorkerStatus.DONE} if self._is_needed else {WorkerStatus.DONE, WorkerStatus.LOST}
        if any(slot.status not in final for slot in self._workers.slots):
            return None
        return RunResult(
            state=WorkerState.SUCCEEDED, return_values={slot.worker_id: None for slot in self._workers.slots}
        )

    def _outcome_without_workers(self) -> RunResult | None:
        """Outcome for an excluded node: None while it serves the store of a running job, else success or failure."""
        handler = self._worker_group.spec.rdzv_handler
        assert isinstance(handler, HyperPodRendezvousHandler)
        if handler.serves_store and not handler.is_over:
            return None
        is_success = handler.serves_store and handler.closing is not None and handler.closing.is_success
        self._is_needed = False
        failures = {} if is_success else self._failures
        return RunResult(state=WorkerState.SUCCEEDED if is_success else WorkerState.FAILED, failures=failures)

    def _stop_job(self, failure: FailureRecord, why: str) -> None:
        reason = replace(failure, cause=f"{failure.cause}; it is not replaced, for {why}")
        self._end_job(reason)
        with contextlib.suppress(DistError):
            self._job_store.set(_STOPPED, reason.to_json().encode())

    def _stop_on_store_error(self, slot: WorkerSlot, code: int, error: Exception) -> None:
        """End the job when the exit of a worker cannot be handled: the store is gone or holds malformed values."""
        if isinstance(error, DistError):
            self._lose_store(error)
        else:
            self._record_failure(slot, code)
            failure = FailureRecord(kind="agent", cause=f"worker {slot.worker_id} has ended", reporter=self._reporter)
            self._stop_job(failure, f"a value in the job's store is malformed ({error})")

    def _lose_store(self, error: Exception) -> None:
        cause = f"the store of the job (served by an agent or etcd) no longer answers ({error})"
        self._end_job(FailureRecord(kind="agent", cause=cause, reporter=self._reporter))

    def _end_job(self, failure: FailureRecord) -> None:
        if self.stopped is None:
            self.stopped, self._stopped_s = failure, time.monotonic()

    def _enforce_end(self, number: signal.Signals) -> None:
        """End this process after a signal if its main thread, blocked in C, does not; runs in a thread of its own."""
        began_s = last_s = time.monotonic()
        is_passed_on = False
        handler = self._worker_group.spec.rdzv_handler
        end_s = _END_S + (
            handler.closing_s if isinstance(handler, HyperPodRendezvousHandler) and handler.serves_store else 0.0
        )
        stop_s = longest_stop_s(self._options.shutdown_timeout_s)
        while time.monotonic() < last_s + end_s:
            time.sleep(_POLL_S)
            running = [slot.pid for slot in self._workers.slots if slot.status is WorkerStatus.RUNNING and slot.pid > 0]
            running = [pid for pid in running if Path(f"/proc/{pid}").exists()]
            age_s = time.monotonic() - began_s
            if running and age_s < stop_s:
                last_s = time.monotonic()
            if not (is_passed_on or self._is_stopping) and age_s > _STUCK_S:
                is_passed_on = True
                for pid in running:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
        age_s = time.monotonic() - began_s
        print(  # noqa: T201
            f"hyperpodrun: {number.name}: this process did not end by itself within {age_s:.0f} s and exits now",
            file=sys.stderr,
        )
        os._exit(128 + number)  # the fork server ends with this process, and the workers with the fork server

    def _stop(self, number: signal.Signals) -> list[tuple[WorkerSlot, int]]:
        with self._inbox.deferred():
            ended = self._workers.stop(number, self._options.shutdown_timeout_s, self._inbox)
            for slot, code in ended:
                if self.stopped is not None and (code > 0 or error_of(slot)):  # not ended by our signal
                    self._record_failure(slot, code)
            return ended

    def _record_failure(self, slot: WorkerSlot, code: int) -> None:
        self._failures[slot.worker_id] = process_failure(slot, code)

    def _sinks(self, destination: LogsDest) -> list[Sink]:
        sinks = [Sink("stdout", sys.stdout), Sink("stderr", sys.stderr)]
        for sink, path, needles in (
            (sinks[0], destination.filtered_stdout, self._options.stdout_filters),
            (sinks[1], destination.filtered_stderr, self._options.stderr_filters),
        ):
            if needles:
                sinks.append(Sink(sink.stream, open(path, "w"), needles))  # noqa: SIM115  (open until the agent ends)
        return sinks
