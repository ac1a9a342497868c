"""The state of an agent, what it does next (a pure function), and `NodeStatus`, which holds what its parts share."""

import contextlib
import enum
import time
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.utils.logging import get_logger

from hyperpod_plugins.elastic.launcher.local_workers import WorkerSlot, WorkerStatus, process_failure
from hyperpod_plugins.elastic.launcher.round import RestartRound
from hyperpod_plugins.elastic.membership.restart_policy import JobRestart, JobRestartBudget
from hyperpod_plugins.elastic.rendezvous.handler import HyperPodRendezvousHandler
from hyperpod_plugins.elastic.store.entry_records import EntryRecords
from hyperpod_plugins.elastic.store.job_store import JobStore
from hyperpod_plugins.elastic.store.records import FailureRecord

logger = get_logger(__name__)
STOPPED_KEY = "agent/stopped"  # value: the FailureRecord for which the whole job ends


class AgentState(enum.Enum):
    """State of an agent, which determines what may happen to its workers."""

    RUNNING = "lost workers are replaced"
    DRAINING = "the node leaves: exits are recorded, lost workers are not replaced, the job continues without them"
    RELEASED = "the job needs no worker of this node: they are ended, and their exits do not count"
    EXCLUDED = "the workers of this node fail at startup and are not replaced, but it may still serve the store"
    RESTARTING = "all workers of the job restart: those of this node are killed, and their exits do not count"
    STOPPING = "the whole job ends: exits are reported to the user only"

    @property
    def counts_exits(self) -> bool:
        """Whether the failure of a worker matters to the job or to the user."""
        return self in (AgentState.RUNNING, AgentState.DRAINING, AgentState.STOPPING)

    @property
    def may_restart(self) -> bool:
        """Whether the agent follows another node's request to restart all workers."""
        return self in (AgentState.RUNNING, AgentState.DRAINING, AgentState.RELEASED)


class AgentAction(enum.Enum):
    """What an agent does next: it waits, changes its state, or gives torch's loop a result (the last three)."""

    WAIT = "workers run, or this node serves the store of a running job"
    RELEASE = "the job has succeeded while the workers of this node waited to be taken in: kill them"
    STOP = "another node has ended the job: end it here too"
    RESTART = "another node has requested a restart of all workers: take part"
    FAIL = "this node has failed"
    SUCCEED = "the workers of this node are done, or no longer needed"
    BEGIN_ROUND = "all workers are to be started again"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentView:
    """What an agent sees."""

    state: AgentState
    statuses: AbstractSet[WorkerStatus] = frozenset({WorkerStatus.RUNNING})
    """The statuses that occur among the workers of this node."""
    is_stop_requested: bool = False
    is_restart_requested: bool = False
    ended_without_this_node: bool = False
    """Whether the job has succeeded while the workers of this node waited to be taken in."""
    serves_store: bool = False
    is_over: bool = False
    """Whether the job has ended or its store is lost."""
    is_success: bool = False
    """Whether the job has ended with success."""


_RELEASED = (AgentState.RELEASED, AgentState.EXCLUDED, AgentState.RESTARTING)
"""States in which the workers of this node are ended already, or are about to be."""


def next_agent_action(view: AgentView) -> AgentAction:
    """Decide what to do next."""
    state = view.state
    if state is AgentState.STOPPING:
        return AgentAction.FAIL
    if view.ended_without_this_node and state not in _RELEASED:
        return AgentAction.RELEASE
    if view.is_stop_requested:
        return AgentAction.STOP
    if view.is_restart_requested and state.may_restart:
        return AgentAction.RESTART
    if state is AgentState.RESTARTING:
        return AgentAction.BEGIN_ROUND
    if state is AgentState.EXCLUDED:
        if view.serves_store and not view.is_over:
            return AgentAction.WAIT
        return AgentAction.SUCCEED if view.serves_store and view.is_success else AgentAction.FAIL
    final = {WorkerStatus.DONE, WorkerStatus.LOST} if state is AgentState.RELEASED else {WorkerStatus.DONE}
    return AgentAction.SUCCEED if view.statuses <= final else AgentAction.WAIT


class NodeStatus:
    """What the parts of an agent share. Use it from the main thread."""

    round: RestartRound
    """The present round; there is none before the first `begin_round`."""
    job_store: JobStore
    """Connection to the job store of that round."""

    def __init__(self, handler: HyperPodRendezvousHandler | None) -> None:
        """Begin without a round; `handler` is None if torch's own rendezvous is used."""
        self.handler = handler
        self.state = AgentState.RUNNING
        self.reporter = ""
        """The name of this agent in its reports; empty before the first round."""
        self.leave_by_s: float | None = None
        """When this node leaves at the latest, if it does, by `time.monotonic()`."""
        self.restart: JobRestart | None = None
        """The restart of all workers that is under way."""
        self.stopped: FailureRecord | None = None
        """Why the whole job ends early; None if it does not."""
        self.stopped_s = 0.0
        self.failures: dict[int, ProcessFailure] = {}
        """Failures to report to the user, by worker_id."""
        self.uses_recovery = False
        """Whether the program takes part in recovery; once known, this holds for later rounds."""
        self._records: EntryRecords | None = None
        self._job_restarts = JobRestartBudget()

    def records_of_last_round(self, restart: JobRestart | None) -> tuple[EntryRecords | None, int]:
        """Records of ended entries to pass to the next round, and how many entries count as ended before it."""
        if not self.reporter:
            return None, 0
        if restart is not None and self._records is not None:
            return self._records, restart.entry
        with contextlib.suppress(DistError):  # the round ended for another reason; its store may be gone
            self._records = EntryRecords.read(self.job_store)
        records = self._records or EntryRecords()
        return records, len(records.ended)

    def begin_round(self, settled: RestartRound, job_store: JobStore) -> None:
        """Enter a round, in which the workers are started; a notice that the node leaves stays in force."""
        self.round, self.job_store = settled, job_store
        self.reporter = f"agent of node {settled.node}"
        if self.state is AgentState.RESTARTING:
            self.state = AgentState.RUNNING if self.leave_by_s is None else AgentState.DRAINING

    def drain(self, leave_by_s: float) -> None:
        """Leave the job by `leave_by_s`."""
        self.leave_by_s = leave_by_s
        if self.state is AgentState.RUNNING:
            self.state = AgentState.DRAINING

    def restart_all(self, restart: JobRestart) -> None:
        """Have torch's loop restart all workers; end the job if restarts have not helped before."""
        refusal = self._job_restarts.why_not_restart(restart)
        if refusal is not None:
            self.stop_job(restart.failure, refusal)
            return
        logger.warning("%s", restart)
        self._records = EntryRecords.read(self.job_store)
        self.restart, self.state = restart, AgentState.RESTARTING
        self.uses_recovery = True  # only programs that take part in recovery request restarts

    def stop(self, failure: FailureRecord) -> None:
        """End the job on this node; the first reason counts."""
        if self.stopped is None:
            self.stopped, self.stopped_s, self.state = failure, time.monotonic(), AgentState.STOPPING

    def stop_job(self, failure: FailureRecord, why: str) -> None:
        """End the job on all nodes after a failure that is not mended, for the reason `why`."""
        reason = replace(failure, cause=f"{failure.cause}; it is not replaced, for {why}")
        self.stop(reason)
        with contextlib.suppress(DistError):
            self.job_store.set(STOPPED_KEY, reason.to_json().encode())

    def lose_store(self, error: Exception) -> None:
        """End the job on this node, as its store no longer answers."""
        cause = f"the store of the job (served by an agent or etcd) no longer answers ({error})"
        self.stop(FailureRecord(kind="agent", cause=cause, reporter=self.reporter))

    def record_failure(self, slot: WorkerSlot, code: int) -> None:
        """Keep the failure of a worker for the report to the user."""
        self.failures[slot.worker_id] = process_failure(slot, code)
