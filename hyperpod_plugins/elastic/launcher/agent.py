"""The agent of a node: torch's elastic agent, except that it replaces a lost worker while the others keep running.

The exit of a worker is handled within milliseconds. The kernel notifies the fork server, which notifies the agent.
The agent writes to the job store that the worker slot has a new incarnation, then how the old one ended, then that
the generation has ended, if it was formed (`WorkerExits`). The fork server then forks the replacement. Other workers
may notice the loss earlier; the first to write the end of a generation determines its recorded cause.

All agents use a store that one of them serves, or etcd, so the loss of a worker never takes the store with it. The
rendezvous decides whether a lost node can be replaced; see `rendezvous/handler.py`.
"""

import contextlib
import os
import signal
import socket
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
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.utils.logging import get_logger

from hyperpod_plugins.elastic.launcher.agent_state import (
    STOPPED_KEY,
    AgentAction,
    AgentState,
    AgentView,
    NodeStatus,
    next_agent_action,
)
from hyperpod_plugins.elastic.launcher.departure import DONE_KEY, PART_FOR_LEAVING, ExitBarrier, NodeDeparture
from hyperpod_plugins.elastic.launcher.local_workers import (
    KILLED_S,
    LocalWorkers,
    WorkerSlot,
    WorkerStatus,
    describe_exit,
    error_of,
    oom_kills,
)
from hyperpod_plugins.elastic.launcher.logs import open_sinks
from hyperpod_plugins.elastic.launcher.round import AgentOptions, RoundStarter, worker_slots
from hyperpod_plugins.elastic.launcher.signal_queue import STUCK_S, SignalQueue, exit_in_time
from hyperpod_plugins.elastic.membership.admission import uses_recovery, world_or_none
from hyperpod_plugins.elastic.membership.restart_policy import (
    NOT_NEEDED,
    ExitAction,
    JobRestart,
    RestartBudget,
    RestartPolicy,
    WorkerExit,
    is_of_peer,
)
from hyperpod_plugins.elastic.rendezvous.handler import HyperPodRendezvousHandler
from hyperpod_plugins.elastic.rendezvous.keep_alive import MALFORMED, record_worker_exit
from hyperpod_plugins.elastic.store.entry_records import restart_from_newest
from hyperpod_plugins.elastic.store.job_store import BEGUN_KEY, GAVE_UP_KEY, RESTART_KEY, JobStore
from hyperpod_plugins.elastic.store.loop_exits import LoopExit
from hyperpod_plugins.elastic.store.records import FailureRecord
from hyperpod_plugins.env import events_folder
from hyperpod_plugins.ledger import ledger

logger = get_logger(__name__)

_POLL_S = 0.05
"""Interval at which the job store is polled for processes to kill and for the end of the job."""
_POLL_PER_NODE_S = 0.0005
"""Minimum of that interval per node, as all nodes share one job store: each of 1,000 nodes polls twice a second."""
_STOP_LINGER_S = 0.5
"""How long the store outlives the decision to stop, so that the other nodes can read the reason."""
_FINISHED = "agent/finished"  # key .../WORKER_ID: that worker has succeeded


class HyperPodAgent(SimpleElasticAgent):
    """torch's elastic agent with replacement of single workers. Use it from the main thread.

    It looks (`AgentView`), decides (`next_agent_action`) and acts. What follows from the exit of a worker is decided
    by `WorkerExit.decide`.
    """

    def __init__(self, spec: WorkerSpec, options: AgentOptions) -> None:
        """Start the fork server.

        Args:
            spec: torch's worker spec. Its `max_restarts`, which counts restarts of all workers, must be 0, and its
                `monitor_interval` short.
            options: what the spec does not hold.
        """
        super().__init__(spec)
        handler = spec.rdzv_handler
        self._options = options
        self.node = NodeStatus(handler if isinstance(handler, HyperPodRendezvousHandler) else None)
        self._inbox = SignalQueue(options.ending_signals)
        self._is_stopping = False
        self._workers = LocalWorkers(options.program, options.fork_server, dict(options.environ))
        self._inbox.on_ending(self._exit_in_time)
        self._exits = WorkerExits(self.node, self._workers, self._inbox, options.restarts)
        self._departure = NodeDeparture(self.node, self._workers)
        self.exit = ExitBarrier(
            self.node, handler, limit_s=self._exit_barrier_timeout, poll_interval_s=options.monitor_interval_s
        )
        self._rounds = RoundStarter()
        self._next_poll_s = 0.0
        folder = events_folder()
        if folder is not None:
            path = Path(folder, f"agent-{socket.gethostname()}-{os.getpid()}.jsonl")
            ledger.open(path, {"run_id": spec.rdzv_handler.get_run_id()}, waited_s=lambda: 0.0)

    # -- torch's loop and the methods it calls -----------------------------------------------------------------------

    def _invoke_run(self, role: str = "default") -> RunResult:
        """Run torch's loop; run it again when another node requests a restart after the workers here are done."""
        while True:
            try:
                result = super()._invoke_run(role)
            except DistError as error:  # in what torch's loop asks of the store as it starts workers
                if self.node.handler is None:
                    raise
                raise self.node.handler.loss(error) from error
            if result.is_failed() or self.node.state is not AgentState.RESTARTING:
                return result

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        node, options = self.node, self._options
        restart, node.restart = node.restart, None
        records, num_before = node.records_of_last_round(restart)
        settled = self._rounds.begin(worker_group, restart.resume_from if restart is not None else "")
        if node.handler is not None:
            job_store = JobStore.from_store(settled.job.run_id, node.handler.connect())
        else:
            job_store = JobStore.connect(settled.job)
            if records is not None:  # otherwise the rendezvous hands them over
                records.hand_over(job_store, num_before)
        node.begin_round(settled, job_store)
        self._exits.begin_round()
        with self._inbox.deferred():
            slots, destination = worker_slots(worker_group, settled, options)
            self._workers.start(slots, open_sinks(destination, options.stdout_filters, options.stderr_filters))
            for slot, code in self._workers.wait_started(
                self._inbox, lambda: node.handler is not None and node.handler.is_over
            ):
                self._exits.handle(slot, code)
            if node.leave_by_s is not None:  # the notice given in the round before does not carry over
                self._departure.announce_preemption()
            return {slot.local_rank: slot.pid for slot in slots}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        until_s = time.monotonic() + self._options.monitor_interval_s
        with self._inbox.deferred():
            while True:
                self._await_exits(until_s)
                for notice in self._inbox.take_notices():
                    self._departure.announce(notice)
                result = self._advance()
                if result is not None:
                    return result
                if time.monotonic() >= until_s:
                    for slot in self._workers.slots:
                        worker_group.workers[slot.local_rank].id = slot.pid
                    return RunResult(state=WorkerState.HEALTHY)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._stop(signal.SIGTERM if self.node.restart is None else signal.SIGKILL)
        self._inbox.raise_pending()  # before the rendezvous, which may take a long time

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Shut this node down; `timeout` is ignored, as `AgentOptions.shutdown_timeout_s` has the same value."""
        self._is_stopping = self._exits.is_agent_leaving = True
        node = self.node
        with self._inbox.deferred():  # another signal must not interrupt the shutdown
            if node.stopped is None:
                with contextlib.suppress(DistError):
                    self._departure.announce_preemption()
                    if death_sig == signal.SIGTERM:
                        self._leave_between_steps()
            for slot, code in self._stop(death_sig):
                if code != 0 and node.stopped is None and node.round.num_nodes > 1:
                    with contextlib.suppress(DistError):
                        if not self._exits.is_void(slot):
                            self._exits.record(slot, code)  # the other nodes need not detect the loss themselves
            self._workers.close()
            if node.stopped is not None and (self._worker_group.group_world_size or 1) > 1:
                time.sleep(max(0.0, node.stopped_s + _STOP_LINGER_S - time.monotonic()))

    def _exit_barrier(self) -> None:
        self.exit.wait()

    # -- look, decide, act --------------------------------------------------------------------------------------------

    def _await_exits(self, until_s: float) -> None:
        """Wait for exits of workers until it is time to look again, and handle them; raise for a pending signal."""
        for slot, code in self._workers.wait(min(until_s, self._next_poll_s), self._inbox):
            self._exits.handle(slot, code)
        self._inbox.raise_pending()

    def _advance(self) -> RunResult | None:
        """Do what is to be done next; returns the result for torch's loop, or None while workers run."""
        node = self.node
        stop, restart = self._poll_job_store()
        action = next_agent_action(self._look(stop, restart))
        if action is AgentAction.STOP and stop is not None:
            node.stop(stop)
        elif action is AgentAction.RELEASE:
            logger.warning("the job is done without this node: its workers end")
            node.state = AgentState.RELEASED
            self._workers.stop(signal.SIGKILL, 0.0, self._inbox)
        elif action is AgentAction.RESTART and restart is not None:
            try:
                node.restart_all(restart)
            except DistError as error:
                node.lose_store(error)
            except MALFORMED:
                return None
        if action in (AgentAction.STOP, AgentAction.RELEASE, AgentAction.RESTART):
            action = next_agent_action(self._look(None, None))
        self._remaining_restarts = int(action is AgentAction.BEGIN_ROUND)  # torch's: of all workers
        match action:
            case AgentAction.FAIL:
                return RunResult(state=WorkerState.FAILED, failures=node.failures)
            case AgentAction.BEGIN_ROUND:
                return RunResult(state=WorkerState.UNHEALTHY)
            case AgentAction.SUCCEED:
                values = {slot.worker_id: None for slot in self._workers.slots}
                return RunResult(state=WorkerState.SUCCEEDED, return_values=values)
            case _:
                return None

    def _look(self, stop: FailureRecord | None, restart: JobRestart | None) -> AgentView:
        handler = self.node.handler
        closing = None if handler is None else handler.closing
        return AgentView(
            state=self.node.state,
            statuses=frozenset(slot.status for slot in self._workers.slots),
            is_stop_requested=stop is not None,
            is_restart_requested=restart is not None,
            ended_without_this_node=handler is not None and handler.ended_without_this_node,
            serves_store=handler is not None and handler.serves_store,
            is_over=handler is not None and handler.is_over,
            is_success=closing is not None and closing.is_success,
        )

    def _poll_job_store(self) -> tuple[FailureRecord | None, JobRestart | None]:
        """Kill workers on request; returns a stop and a restart that another node decided. Nothing if it is too early.

        Raises:
            SignalException: this node leaves, and its time is over.
        """
        node = self.node
        if time.monotonic() < self._next_poll_s:
            return None, None
        oom_kills.look()
        self._next_poll_s = time.monotonic() + max(_POLL_S, node.round.num_nodes * _POLL_PER_NODE_S)
        try:
            for wanted in node.job_store.new_kills():
                here = [slot for slot in self._workers.slots if (slot.worker_id, slot.incarnation) == wanted]
                self._workers.send(here, signal.SIGKILL)
            stopped, restart = node.job_store.try_get(STOPPED_KEY), node.job_store.try_get(RESTART_KEY)
            self._departure.advance()
            return (
                None if stopped is None else FailureRecord.from_json(stopped),
                None if restart is None else JobRestart.from_json(restart),
            )
        except DistError as error:
            is_superfluous = node.handler is not None and node.handler.ended_without_this_node
            if not is_superfluous or node.state is AgentState.RELEASED:
                node.lose_store(error)
        except MALFORMED:  # the keep-alive thread reports such values
            pass
        return None, None

    # -- the end ------------------------------------------------------------------------------------------------------

    def _leave_between_steps(self) -> None:
        """Wait for an elastic job to continue without this node; a timeout or another signal ends the wait."""
        if not self._departure.begin(self._options.shutdown_timeout_s):
            return
        with self._inbox.deferred(), contextlib.suppress(SignalException):
            while self._advance() is None and any(slot.status is WorkerStatus.RUNNING for slot in self._workers.slots):
                self._await_exits(self._next_poll_s)

    def _stop(self, number: signal.Signals) -> list[tuple[WorkerSlot, int]]:
        with self._inbox.deferred():
            ended = self._workers.stop(number, self._options.shutdown_timeout_s, self._inbox)
            for slot, code in ended:
                book_exit(slot, code, is_requested=True)
                if self.node.stopped is not None and (code > 0 or error_of(slot)):  # not ended by our signal
                    self.node.record_failure(slot, code)
            return ended

    def _exit_in_time(self, number: signal.Signals) -> None:
        """End this process after a signal if its main thread does not; runs in a thread of its own."""
        handler = self.node.handler
        # The job may continue without the workers, then they get the time to SIGKILL, and killed ones the time to end.
        longest_s = self._options.shutdown_timeout_s * (1 + PART_FOR_LEAVING) + KILLED_S + STUCK_S
        exit_in_time(
            number,
            self._workers.running_pids,
            lambda: self._is_stopping,
            workers_s=longest_s,
            closing_s=handler.closing_s if handler is not None and handler.serves_store else 0.0,
        )


def book_exit(slot: WorkerSlot, code: int, *, is_requested: bool = False) -> None:
    """Write how a worker ended to the ledger; `is_requested`: this agent has ended it."""
    ledger.write(
        "exit",
        worker_id=slot.worker_id,
        incarnation=slot.incarnation,
        pid=slot.pid,
        code=code,
        cause=describe_exit(slot, code) if code else "finished",
        is_requested=is_requested,
    )


class WorkerExits:
    """Records exits in the job store, then replaces the worker, restarts all, or ends the job; for the main thread."""

    def __init__(self, node: NodeStatus, workers: LocalWorkers, inbox: SignalQueue, policy: RestartPolicy) -> None:
        """Handle the exits of `workers` within the limits of `policy`."""
        self._node, self._workers, self._inbox, self._policy = node, workers, inbox, policy
        self._budgets: dict[int, RestartBudget] = {}
        self._generation = 0
        self.is_agent_leaving = False
        """Whether the agent itself is about to end, and ends its workers by signals."""
        self._is_proven = False
        """Whether a worker of this node ran past the time for early faults before it ended."""

    def begin_round(self) -> None:
        """Forget the replacements of the last round."""
        self._budgets.clear()
        self._generation = 0

    def handle(self, slot: WorkerSlot, code: int) -> None:
        """Record the exit of a worker, and do what follows from it."""
        node = self._node
        book_exit(slot, code, is_requested=self.is_agent_leaving and code < 0)
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
        exit_action, why = loss.decide(budget.why_not_replace(loss, slot.uptime_s, time.monotonic()))
        if exit_action is ExitAction.REPLACE:
            self._replace(slot, code, failure)
        elif exit_action is ExitAction.RESTART_ALL:
            self._request_restart(slot, loss, failure)
        else:
            node.record_failure(slot, code)
            if exit_action is ExitAction.EXCLUDE:
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
        left = LoopExit.of_process(job_store, worker_id, slot.incarnation)
        # A kill after `break` is no failed attempt at the loop.
        is_attempt = left is not None and not is_of_peer(error) and (code > 0 or left.error != "")
        node.uses_recovery |= uses_recovery(job_store)
        world = world_or_none(job_store)
        others = set(range(node.round.world_size) if world is None else world.worker_ids) - {worker_id}
        return WorkerExit(
            code=code,
            error=error,
            has_left_loop=left is not None,
            num_attempts=left.count_attempts(job_store) if left is not None and is_attempt else 0,
            made_progress=left is not None and left.num_bodies > 0,
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
