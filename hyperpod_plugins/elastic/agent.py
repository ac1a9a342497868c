"""The agent of one node: torch's elastic agent, except that a lost worker is replaced and the others go on.

A death takes this path, within milliseconds: the kernel tells the zygote, the zygote the agent, the agent the ledger
(first that the place has a new incarnation, then how the old one ended, then that the generation is over if it had
been formed), and the zygote forks the replacement. Workers are free to notice earlier; whoever writes the end
of a generation first is believed.

All agents talk to a store that one of them serves, or to etcd, so no worker's death takes it along. A lost node is
another matter: whether its place can be filled depends on the rendezvous; see `rendezvous.py`.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
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

from hyperpod_plugins.elastic.crew import Crew, Phase, Post
from hyperpod_plugins.elastic.failures import cause, failure
from hyperpod_plugins.elastic.incident import Incident
from hyperpod_plugins.elastic.joining import give_notice, world_or_none
from hyperpod_plugins.elastic.ledger import ARMED_KEY, BEGUN_KEY, GAVE_UP_KEY, RESTART_KEY, Ledger
from hyperpod_plugins.elastic.logs import Sink
from hyperpod_plugins.elastic.options import AgentOptions
from hyperpod_plugins.elastic.rendezvous import SlotRendezvous
from hyperpod_plugins.elastic.restarts import JobRestart, JobRestartBudget, RestartBudget
from hyperpod_plugins.elastic.rounds import Meeting, posts_of
from hyperpod_plugins.elastic.signals import SignalInbox
from hyperpod_plugins.elastic.succession import write_up
from hyperpod_plugins.elastic.terms import terms_of

logger = get_logger(__name__)

_POLL_S = 0.05
"""How often the ledger is asked for processes to kill, and whether the job is over."""
_POLL_PER_NODE_S = 0.0005
"""The same where there are many nodes, which share one ledger: 1,000 ask twice a second each."""
_LEAVE_S = 5.0
"""How long nodes wait for each other's farewell when all their workers are done."""
_PART_FOR_LEAVING = 1 / 3
"""Of the time from SIGTERM to SIGKILL, in which an elastic job may go on without this node."""
_NEWS_S = 0.5
"""How long the store outlives the decision to stop, for the other nodes to read why."""
_STOPPED = "agent/stopped"  # value: the Incident for which the whole job ends
_DONE = "agent/done"  # value NODE: all workers of that node have come to a good end
_LEFT = "agent/left"  # value NODE: it needs the rendezvous no more
_FINISHED = "agent/finished"  # value RANK: that worker has


class HyperPodAgent(SimpleElasticAgent):
    """Replaces lost workers one by one."""

    def __init__(self, spec: WorkerSpec, options: AgentOptions) -> None:
        """Start the zygote.

        Args:
            spec: torch's; its restarts are of all workers together and must be 0, its interval short.
            options: ours.
        """
        super().__init__(spec)
        self._options = options
        self._inbox = SignalInbox(options.ending_signals)
        self._crew = Crew(options.program, options.zygote, dict(options.environ))
        self._meeting = Meeting()
        self._budgets: dict[int, RestartBudget] = {}
        self._job_restarts = JobRestartBudget()
        self._restart: JobRestart | None = None
        self._failures: dict[int, ProcessFailure] = {}
        self._reporter = ""
        self._generation, self._next_poll_s = 0, 0.0
        self._has_left = False
        self._leave_by_s: float | None = None
        self._next_signal, self._next_signal_s = signal.SIGTERM, 0.0
        self._is_needed = True
        self._stopped_s = 0.0
        self.stopped: Incident | None = None
        """Why the whole job ends, where it does before its work is done."""

    # -- what torch's loop calls ----------------------------------------------------------------------------------

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        restart, self._restart = self._restart, None
        self._round = self._meeting.begin(worker_group, restart.resume_from if restart is not None else "")
        self._ledger = Ledger.connect(self._round.job)
        self._generation = 0
        self._reporter = f"agent of node {self._round.node}"
        self._budgets.clear()
        with self._inbox.deferred():
            posts, destination = posts_of(worker_group, self._round, self._options)
            self._crew.man(posts, self._sinks(destination))
            for post, code in self._crew.wait_started(self._inbox):
                self._on_end(post, code)
            if self._leave_by_s is not None:  # what it said in the round before is forgotten
                self._give_notice()
            return {post.local_rank: post.pid for post in posts}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        until_s = time.monotonic() + self._options.monitor_interval_s
        with self._inbox.deferred():
            while True:
                for post, code in self._crew.wait(min(until_s, self._next_poll_s), self._inbox):
                    self._on_end(post, code)
                self._inbox.raise_pending()
                for notice in self._inbox.take_notices():
                    self._heed_notice(notice)
                self._poll_ledger()
                result = self._outcome()
                if result is not None:
                    return result
                if time.monotonic() >= until_s:
                    for post in self._crew.posts:
                        worker_group.workers[post.local_rank].id = post.pid
                    return RunResult(state=WorkerState.HEALTHY)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._stop(signal.SIGTERM if self._restart is None else signal.SIGKILL)
        self._inbox.raise_pending()  # before the rendezvous, which may take long

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """`timeout` is torch's idea; ours is in the options, and the same."""
        if self.stopped is None:
            with contextlib.suppress(DistError):
                self._give_notice()
                if death_sig == signal.SIGTERM:
                    self._leave_between_steps()
        for post, code in self._stop(death_sig):
            if code != 0 and self.stopped is None and self._round.num_nodes > 1:
                with contextlib.suppress(DistError):
                    if not self._is_void(post):
                        self._write_up(post, code)  # this node leaves and the others stay: they need not find out
        self._crew.close()
        if self.stopped is not None and (self._worker_group.group_world_size or 1) > 1:
            time.sleep(max(0.0, self._stopped_s + _NEWS_S - time.monotonic()))

    def _exit_barrier(self) -> None:
        """Wait until the workers of all nodes are done, for the stores are needed until then, and leave together."""
        handler = self._worker_group.spec.rdzv_handler
        num_nodes = self._round.num_nodes
        with contextlib.suppress(DistError):  # a node that has waited long enough may leave first, with its store
            num_nodes = len(self._nodes())
            if isinstance(handler, SlotRendezvous):
                handler.finish()
                if self._round.node not in handler.nodes():
                    self.leave_rendezvous()  # the others go on without this one
                    return
            self._await_all_nodes(_DONE, self._exit_barrier_timeout)
            self.leave_rendezvous()
            self._await_all_nodes(_LEFT, _LEAVE_S)
        if self._round.node == 0 and num_nodes > 1:
            time.sleep(2 * self._options.monitor_interval_s)  # the others still look for the last `_LEFT`

    def _await_all_nodes(self, what: str, timeout_s: float) -> None:
        self._ledger.put(f"{what}/{self._round.node}", b"1")
        deadline_s = time.monotonic() + timeout_s
        there = set[int]()
        while time.monotonic() < deadline_s and self._ledger.find(_STOPPED) is None:
            nodes = self._nodes()
            there |= {node for node in nodes if node not in there and self._ledger.find(f"{what}/{node}") is not None}
            if there.issuperset(nodes):
                return
            time.sleep(self._options.monitor_interval_s)

    def _nodes(self) -> Sequence[int]:
        """Those that take part now, or are done."""
        handler = self._worker_group.spec.rdzv_handler
        return handler.nodes() if isinstance(handler, SlotRendezvous) else range(self._round.num_nodes)

    def leave_rendezvous(self) -> None:
        """Close the rendezvous, once: nobody is to join any more."""
        if not self._has_left:
            self._has_left = True
            self._worker_group.spec.rdzv_handler.shutdown()

    # -- the life of a worker -------------------------------------------------------------------------------------

    def _on_end(self, post: Post, code: int) -> None:
        """Tell the ledger that a process has ended, and replace it unless that is pointless."""
        try:
            if code == 0:
                self._ledger.put(f"{_FINISHED}/{post.global_rank}", b"1")
                return
            if self._restart is not None:
                return
            if self.stopped is not None:
                self._blame(post, code)
                return
            if self._is_void(post):
                return
            incident = self._write_up(post, code)
            if self._ledger.incarnation(post.global_rank) != incident.incarnation + 1:
                return  # another node has taken the slot over just now
            if self._leave_by_s is not None:
                return
            refusal = self._refusal(post, code)
        except DistError as error:
            self._lose_store(error)
            return
        if refusal is not None:
            self._stop_job(incident, refusal)
            self._blame(post, code)
            return
        logger.warning(
            "rank %d (pid %d, incarnation %d) ended after %.1f s: %s; another takes its place",
            *(post.global_rank, post.pid, post.incarnation, post.uptime_s, incident.cause),
        )
        self._crew.replace(post, incident.incarnation + 1)

    def _is_void(self, post: Post) -> bool:
        """Whether another node has taken this one for lost, and its slot."""
        return self._ledger.incarnation(post.global_rank) != post.incarnation

    def _write_up(self, post: Post, code: int) -> Incident:
        incident = Incident(
            kind="process",
            cause=cause(post, code),
            rank=post.global_rank,
            incarnation=post.incarnation,
            reporter=self._reporter,
        )
        self._generation = write_up(self._ledger, incident, self._generation)
        return incident

    def _refusal(self, post: Post, code: int) -> str | None:
        budget = self._budgets.setdefault(post.global_rank, RestartBudget(self._options.restarts))
        refusal = budget.refusal(code, post.uptime_s, time.monotonic())
        given_up = self._ledger.find(GAVE_UP_KEY)
        if given_up is not None:
            return f"the job has given up: {Incident.from_json(given_up)}"
        if self._ledger.find(ARMED_KEY) is None:
            return (
                "no worker takes part in recovery: the program does not use it, had nothing to recover yet, or is past "
                "its fit"
            )
        if code > 0 and self._ledger.find(BEGUN_KEY) is None:
            return "it failed by itself before the first step"
        if refusal is None:
            world = world_or_none(self._ledger)
            places = range(self._worker_group.workers[0].world_size) if world is None else world.places
            others = set(places) - {post.global_rank}
            if others and all(self._ledger.find(f"{_FINISHED}/{rank}") is not None for rank in sorted(others)):
                return "all others have finished, and a new process would wait for them in vain"
        return refusal

    def _poll_ledger(self) -> None:
        """Kill whom others want killed, and hear whether another node has ended the job."""
        if time.monotonic() < self._next_poll_s:
            return
        self._next_poll_s = time.monotonic() + max(_POLL_S, self._round.num_nodes * _POLL_PER_NODE_S)
        try:
            for wanted in self._ledger.new_kills():
                here = [post for post in self._crew.posts if (post.global_rank, post.incarnation) == wanted]
                self._crew.send(here, signal.SIGKILL)
            stopped, restart = self._ledger.find(_STOPPED), self._ledger.find(RESTART_KEY)
            if self._leave_by_s is not None:
                self._take_leave(self._leave_by_s)
        except DistError as error:
            self._lose_store(error)
            return
        if stopped is not None:
            self._end_with(Incident.from_json(stopped))
        elif restart is not None and self._restart is None:
            self._begin_again(JobRestart.from_json(restart))

    # -- this node leaves, and the job goes on --------------------------------------------------------------------

    def _heed_notice(self, notice: signal.Signals) -> None:
        """Have the job shrink, so that this node can leave between two steps; where it cannot, tell the workers."""
        if self._leave_by_s is not None:
            return
        handler = self._worker_group.spec.rdzv_handler
        try:
            terms = terms_of(self._ledger)
            if terms is None or not isinstance(handler, SlotRendezvous):
                self._crew.send(self._crew.posts, notice)
                return
            if handler.serves_store:
                logger.warning("%s: this node serves the store of the job, and cannot leave it", notice.name)
                return
            self._give_notice()
        except DistError as error:
            self._lose_store(error)
            return
        timeout_s = terms.policy.graceful_shutdown_timeout_s
        logger.warning("%s: this node leaves the job, between two steps, within %.0f s", notice.name, timeout_s)
        self._leave_by_s = time.monotonic() + timeout_s

    def _leave_between_steps(self) -> None:
        """Wait a while for the job to go on without this node, if it can; another signal ends the wait."""
        handler = self._worker_group.spec.rdzv_handler
        own = {post.global_rank for post in self._crew.posts if post.phase is Phase.RUNNING}
        if not own or not isinstance(handler, SlotRendezvous) or handler.serves_store:
            return
        terms, world = terms_of(self._ledger), world_or_none(self._ledger)
        if terms is None or world is None or own.issuperset(world.places):
            return
        grace_s = min(terms.policy.graceful_shutdown_timeout_s, self._options.shutdown_timeout_s * _PART_FOR_LEAVING)
        self._leave_by_s = time.monotonic() + grace_s
        with self._inbox.deferred(), contextlib.suppress(SignalException):
            while self._outcome() is None and any(post.phase is Phase.RUNNING for post in self._crew.posts):
                for post, code in self._crew.wait(self._next_poll_s, self._inbox):
                    self._on_end(post, code)
                self._inbox.raise_pending()
                self._poll_ledger()

    def _give_notice(self) -> None:
        for post in self._crew.posts:  # none before the first round
            if post.phase is not Phase.DONE:
                give_notice(self._ledger, post.global_rank, post.incarnation)

    def _take_leave(self, leave_by_s: float) -> None:
        """End those of this node's processes that the job has done without.

        Raises:
            SignalException: it has not within the time that its policy grants; then this node leaves as it is.
        """
        if time.monotonic() > leave_by_s:
            cause = f"process {os.getpid()} got notice, and the job has not gone on without it in time"
            raise SignalException(cause, signal.SIGTERM)
        world = world_or_none(self._ledger)
        if world is None:
            return
        aside = [post for post in self._crew.posts if post.global_rank not in world.places]
        self._is_needed = len(aside) < len(self._crew.posts)
        if aside and time.monotonic() >= self._next_signal_s:
            self._crew.send(aside, self._next_signal, last=True)
            self._next_signal, self._next_signal_s = signal.SIGKILL, time.monotonic() + _LEAVE_S

    # -- the end of the job ---------------------------------------------------------------------------------------

    def _begin_again(self, restart: JobRestart) -> None:
        """Have torch's loop start all workers again, unless that has not helped before."""
        refusal = self._job_restarts.refusal(restart)
        if refusal is not None:
            self._stop_job(restart.incident, refusal)
            return
        logger.warning("%s", restart)
        self._restart = restart

    def _outcome(self) -> RunResult | None:
        self._remaining_restarts = int(self._restart is not None and self.stopped is None)  # of all workers together
        if self.stopped is not None:
            return RunResult(state=WorkerState.FAILED, failures=self._failures)
        if self._restart is not None:
            return RunResult(state=WorkerState.UNHEALTHY)
        final = {Phase.DONE} if self._is_needed else {Phase.DONE, Phase.LOST}
        if any(post.phase not in final for post in self._crew.posts):
            return None
        return RunResult(
            state=WorkerState.SUCCEEDED, return_values={post.global_rank: None for post in self._crew.posts}
        )

    def _stop_job(self, incident: Incident, why: str) -> None:
        reason = replace(incident, cause=f"{incident.cause}; it is not replaced, for {why}")
        self._end_with(reason)
        with contextlib.suppress(DistError):
            self._ledger.put(_STOPPED, reason.to_json().encode())

    def _lose_store(self, error: Exception) -> None:
        cause = f"the store of the job, which an agent serves or etcd, does not answer any more ({error})"
        self._end_with(Incident(kind="agent", cause=cause, reporter=self._reporter))

    def _end_with(self, incident: Incident) -> None:
        if self.stopped is None:
            self.stopped, self._stopped_s = incident, time.monotonic()

    def _stop(self, number: signal.Signals) -> list[tuple[Post, int]]:
        with self._inbox.deferred():
            ended = self._crew.stop(number, self._options.shutdown_timeout_s, self._inbox)
            for post, code in ended:
                if self.stopped is not None and code > 0:  # not by our signal: it may be why others failed
                    self._blame(post, code)
            return ended

    def _blame(self, post: Post, code: int) -> None:
        self._failures[post.global_rank] = failure(post, code)

    def _sinks(self, destination: LogsDest) -> list[Sink]:
        sinks = [Sink("stdout", sys.stdout), Sink("stderr", sys.stderr)]
        for sink, path, needles in (
            (sinks[0], destination.filtered_stdout, self._options.stdout_filters),
            (sinks[1], destination.filtered_stderr, self._options.stderr_filters),
        ):
            if needles:
                sinks.append(Sink(sink.stream, open(path, "w"), needles))  # noqa: SIM115  (open while this process is)
        return sinks
