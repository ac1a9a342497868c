"""`NodeStatus`: the state of a node's agent, its present round, and why its job restarts or ends."""

import contextlib
import time
from dataclasses import replace

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.utils.logging import get_logger

from hyperpod_plugins.elastic.launcher.agent_policy import AgentState
from hyperpod_plugins.elastic.launcher.local_workers import WorkerSlot, process_failure
from hyperpod_plugins.elastic.launcher.round import RestartRound
from hyperpod_plugins.elastic.membership.restart_policy import JobRestart, JobRestartBudget
from hyperpod_plugins.elastic.rendezvous.handler import HyperPodRendezvousHandler
from hyperpod_plugins.elastic.store.entries import EntryRecords
from hyperpod_plugins.elastic.store.job_store import JobStore
from hyperpod_plugins.elastic.store.records import FailureRecord

logger = get_logger(__name__)
STOPPED_KEY = "agent/stopped"  # value: the FailureRecord for which the whole job ends


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
