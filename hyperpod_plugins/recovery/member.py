"""This process as a member of the job: how it joins generations and reports failures.

Two threads run beside training: that of `GenerationWatcher` breaks the groups when the generation ends, and that of
`Watchdog` (`watchdog.py`) sends heartbeats and looks for hangs.
"""

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store

from hyperpod_plugins.comm import Reconfiguration, break_groups, group_health, release_broken
from hyperpod_plugins.comm.runtime import runtime
from hyperpod_plugins.elastic import FailureRecord, JobStore
from hyperpod_plugins.elastic.membership.admission import await_turn, pending_world, publish_initial_world
from hyperpod_plugins.elastic.membership.quorum_policy import BETWEEN_CALLS, GenerationBudget, QuorumPolicy
from hyperpod_plugins.elastic.membership.reshard import poll_requests
from hyperpod_plugins.elastic.process import exit_with_agent
from hyperpod_plugins.elastic.store.job_store import GAVE_UP_KEY
from hyperpod_plugins.elastic.store.records import FailureKind
from hyperpod_plugins.elastic.store.world import WorldPlan
from hyperpod_plugins.env import JobEnv, events_folder
from hyperpod_plugins.errors import PeerLost, RecoveryError, StateLost
from hyperpod_plugins.ledger import TimeCategory, ledger
from hyperpod_plugins.recovery.plan import NO_STATE, Arrival
from hyperpod_plugins.recovery.program_collectives import ProgramCollectives
from hyperpod_plugins.recovery.quorum import FormedGeneration, PlanWatcher, QuorumJoiner, WorldChanged
from hyperpod_plugins.recovery.restart_all import follow_final_save, restart_all
from hyperpod_plugins.recovery.snapshot import Snapshots
from hyperpod_plugins.recovery.stop_reports import ResumePoint, StopReports, Survivors, members_before
from hyperpod_plugins.recovery.watchdog import (
    HangPolicy,
    Status,
    StepTimes,
    Watchdog,
)
from hyperpod_plugins.recovery.world_view import WorldView

log = logging.getLogger(__name__)
_RECONFIGURE_TIMEOUT_S = 20.0
_MAX_FAILURES = 10
"""Consecutive failures to form groups after which a member gives up."""
_FIRST_PAUSE_S = 0.005
_FOREVER_S = 365 * 86400.0  # waiting costs nothing, while torch logs a warning for each wait that times out


class GenerationWatcher:
    """A thread that breaks the groups, or cancels their reconfiguration, when the generation ends.

    Its methods are for the main thread.
    """

    def __init__(self, connect: Callable[[], JobStore], on_lost_store: Callable[[Exception], None]) -> None:
        """Call `connect` and `on_lost_store` in the thread."""
        self._connect = connect
        self._on_lost_store = on_lost_store
        self._changed = threading.Condition()
        self._is_stopped = self._is_forming = False
        self._watched = 0
        self._attempt: Reconfiguration | None = None
        self.failure: FailureRecord | None = None
        """The first failure known to this process since the generation was formed; replaced as a whole."""

    def start(self) -> None:
        """Start the thread, which watches generation 0."""
        threading.Thread(target=self._run, name="hyperpod_watch_generation", daemon=True).start()

    def stop(self) -> None:
        """Tell the thread to end; it may still be waiting in the store."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def begin_forming(self) -> None:
        """From here on, the end of an old generation does not break the groups."""
        with self._changed:
            self._is_forming = True

    def watch(self, generation: int, attempt: Reconfiguration) -> None:
        """Watch another generation, and cancel `attempt` if it ends before `end_forming`."""
        with self._changed:
            self._watched, self._attempt = generation, attempt
            self._changed.notify_all()

    def end_forming(self) -> None:
        """From here on, the end of the watched generation breaks the groups."""
        with self._changed:
            self.failure, self._is_forming, self._attempt = None, False, None
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            job_store = self._connect()
            while not self._is_stopped:
                generation = self._watched
                failure = job_store.wait_ended(generation, timeout_s=_FOREVER_S)
                if failure is not None:
                    self._on_end(generation, failure)
        except dist.DistError as error:
            if not self._is_stopped:
                self._on_lost_store(error)

    def _on_end(self, generation: int, failure: FailureRecord) -> None:
        """React to the end of a generation; return once there is another one to watch."""
        with self._changed:
            heard = generation, self._attempt
            if generation == self._watched:
                if self._attempt is not None:
                    self._attempt.cancel(str(failure))
                elif not self._is_forming:
                    self.failure = self.failure or failure
                    break_groups(str(failure))
            self._changed.wait_for(lambda: self._is_stopped or (self._watched, self._attempt) != heard)


class NullMember:
    """A process of a program without recovery, in the place of a `Member`: its world never changes."""

    recovers = is_joining = is_elastic = False

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world = rank, WorldPlan.initial(world_size)
        self.job_store = JobStore(HashStore())
        """Of this process alone."""
        self.activity = ""


class Member:
    """One worker process as a member of the job; its methods are for the main thread."""

    recovers = True
    """Whether lost processes are replaced, and interrupted steps run again."""

    def __init__(
        self,
        job: JobEnv,
        *,
        worker_id: int,
        world: WorldPlan,
        policy: QuorumPolicy,
        hangs: HangPolicy,
    ) -> None:
        self.job = job
        self.worker_id = worker_id
        """Stable identity of this worker slot in the job store; unlike the rank, it never changes."""
        self.policy = policy
        self.hangs = hangs
        self.step_times = StepTimes()
        self.status = Status()
        """Only the main thread replaces it, as a whole; other threads may read it."""
        self.is_joining = job.is_joining
        """Whether this process joined a running job; reset at the end of the first call in which it trains."""
        self.has_torn_state = False
        """Whether this process has no state because a commit was interrupted, not because it is a joiner."""
        self.job_store = JobStore.connect(job)
        self.collectives = ProgramCollectives(self.job_store, worker_id, lambda: self.world.number, self.restart_all)
        """Results of the program's own collectives in its set-up."""
        self._reports = JobStore.connect(job)
        self._reporting = threading.Lock()
        self._generation_budget = GenerationBudget()
        self._worlds = WorldView(self.job_store, world)
        self.is_elastic = False
        """Whether the job may change its size; the watchdog polls for new worlds only then."""
        self.wants_resize = False
        """Whether the next world is ready to take over, as far as this process knows."""
        self.stopped_s = 0.0
        """When this process stopped for the end of its generation, by its wall clock; 0 before it first did."""
        self._stopped_in = -1
        """That generation."""
        survivors = Survivors(self.job_store, patience_s=self._patience_s, outside_s=hangs.outside_s)
        self._stop_reports = StopReports(
            self.job_store,
            self._worlds,
            worker_id=worker_id,
            incarnation=job.incarnation,
            policy=policy,
            survivors=survivors,
        )
        self._quorum = QuorumJoiner(
            self.job_store,
            self._worlds,
            PlanWatcher(lambda: JobStore.connect(job)),
            worker_id=worker_id,
            policy=policy,
            survivors=survivors,
        )
        self._watcher = GenerationWatcher(lambda: JobStore.connect(job), self.on_lost_store)
        self._watchdog = Watchdog(self, self._reports)
        self._group_store = JobStore.connect(job)

    def note(self, **changes: Any) -> None:
        """Change several fields of `status` at once."""
        self.status = self.status._replace(**changes)

    @property
    def activity(self) -> str:
        """What the main thread is doing, in words; sent with each heartbeat, about once a second."""
        return self.status.activity

    @activity.setter
    def activity(self, activity: str) -> None:
        self.status = self.status._replace(activity=activity)

    @property
    def in_step(self) -> bool:
        """Whether the main thread is inside a step."""
        return self.status.in_step

    @in_step.setter
    def in_step(self, in_step: bool) -> None:
        self.status = self.status._replace(in_step=in_step)

    @property
    def committed(self) -> int:
        """Number of steps that this process has committed; `NO_STATE` if it has no state."""
        return self.status.committed

    @committed.setter
    def committed(self, committed: int) -> None:
        self.status = self.status._replace(committed=committed)

    @property
    def generation(self) -> int:
        """Number of the last generation that this process formed, or tried to connect."""
        return self.status.generation

    @generation.setter
    def generation(self, generation: int) -> None:
        self.status = self.status._replace(generation=generation)

    @property
    def world(self) -> WorldPlan:
        """The world for which this process has been set up."""
        return self._worlds.current

    @property
    def rank(self) -> int:
        """Rank in the present world.

        Raises:
            RecoveryError: This process is not part of it.
        """
        rank = self.world.rank_of(self.worker_id)
        if rank is None:
            raise RecoveryError(f"worker {self.worker_id} is not part of world {self.world}")
        return rank

    def start(self) -> None:
        """Start the threads. The groups of a joiner stay detached until it has joined."""
        if self.job.agent_pid:
            exit_with_agent(self.job.agent_pid)
        if self.is_joining:
            group_health.detach()
        else:
            publish_initial_world(self.job_store, self.world)
            self.status = self.status._replace(entered_s=time.monotonic())
        group_health.add_listener(self._report)
        self.collectives.start()
        folder = events_folder()
        if folder is not None:
            ledger.open(
                Path(
                    folder,
                    f"worker-{self.worker_id}-{self.job.restart_count}.{self.job.incarnation}-{os.getpid()}.jsonl",
                ),
                {
                    "run_id": self.job.run_id,
                    "worker_id": self.worker_id,
                    "incarnation": self.job.incarnation,
                    "restart": self.job.restart_count,
                },
                waited_s=lambda: runtime.waiting.total_s,
            )
        self._watcher.start()
        self._watchdog.start()
        atexit.register(self.leave)

    def leave(self) -> None:
        """Stop the threads and leave the job, which continues without this process or has ended."""
        self._watcher.stop()
        self._watchdog.stop()
        group_health.remove_listener(self._report)
        self.collectives.leave()

    def end_entry(self, *, has_trained: bool) -> None:
        """Reset what belongs to an entry of the program (a call that trains or evaluates) after it has ended.

        Args:
            has_trained: Whether the entry trained, so that this process no longer counts as joining.
        """
        if has_trained:
            self.is_joining = False
        self.has_torn_state = False
        self.status = self.status._replace(committed=NO_STATE, in_step=False, activity=BETWEEN_CALLS)

    def fail(self, kind: FailureKind, cause: str) -> None:
        """End the generation because of a failure of this rank, and break its groups."""
        failure = FailureRecord(
            kind=kind, cause=cause, worker_id=self.worker_id, incarnation=self.job.incarnation, step=self.committed
        )
        self._watcher.failure = failure
        if not group_health.is_unavailable:  # report the cause before a peer notices the break
            self.end(self.generation, failure)
        break_groups(cause)

    def yield_to_next_world(self) -> None:
        """End the generation so that the next world takes over, if the joiners of that world are ready."""
        number = pending_world(self._reports)
        self.wants_resize = False
        planned = self.job_store.world(number) if number > self.world.number else None
        if planned is not None:
            failure = FailureRecord(kind="resize", cause=planned.cause, step=self.committed, world=number)
            break_groups(str(self.end(self.generation, failure)))

    def next_world(self) -> WorldPlan:
        """The world of the generation that is being formed or comes next."""
        return self._worlds.at(self.job_store.generation(at_least=self.generation))

    def move(self, world: WorldPlan) -> None:
        """Become part of another world, perhaps with another rank."""
        self._worlds.current, self.status = world, self.status._replace(entered_s=None)

    def give_up(self, cause: str) -> None:
        """Tell the agents to replace no more processes; the first cause that is reported ends the job."""
        log.error("rank %d gives up: %s", self.rank, cause)
        mine = FailureRecord(kind="exception", cause=cause, worker_id=self.worker_id, incarnation=self.job.incarnation)
        self.job_store.set_if_absent(GAVE_UP_KEY, mine.to_json().encode())

    def follow_final_save(self, patience_s: float = 10.0) -> NoReturn:
        """Exit after the process that gives up, waiting up to `patience_s` seconds for it; raises `RecoveryError`."""
        follow_final_save(self.job_store, patience_s)

    def connect_survivors(self, number: int, group: str, ranks: Sequence[int]) -> None:
        """Connect some members of one group for a final save; all other groups stay without connections.

        Args:
            number: Generation number of the new connections.
            group: Name of the group's key.
            ranks: Members to connect.

        Raises:
            PeerLost: One of them did not come.
        """
        Reconfiguration(
            number,
            store=self.group_store(),
            timeout_s=_RECONFIGURE_TIMEOUT_S,
            members={group: ranks},
            only_listed_groups=True,
        ).run()

    def restart_all(self, lost: StateLost, *, loses_steps: bool = True) -> NoReturn:
        """Ask the agents to restart all processes from the last checkpoint; see `restart_all.restart_all`."""
        restart_all(self.job_store, self.job, self.rank, lost, loses_steps=loses_steps)

    def join_next(self, arrival: Arrival, stopped: Callable[[int], None]) -> FormedGeneration:
        """Wait for all members of the next generation, connect to them, and reconfigure the groups.

        If a member is lost meanwhile, all members try again with a higher generation number.

        Args:
            arrival: What this process brings.
            stopped: Called with the number of each generation that is tried, before this process arrives there.

        Raises:
            ReplacementTimeout: Lost ranks were not replaced in time.
            MustReenterLoop: This process waits inside a step, and another rank was outside one.
            WorldChanged: The generation is formed for another world.
            RecoveryError: Another process has given up, or groups could not be formed many times in a row.
            StateLost: Many generations were formed without a step being committed, and no agent restarted the job.
        """
        began_s = time.monotonic()
        num_failures = 0
        self.in_step = False
        self._watcher.begin_forming()
        while True:
            number = self.job_store.generation(at_least=self.generation)
            why_not = self._generation_budget.why_not_another(self.committed, number, time.monotonic(), self.policy)
            if why_not is not None:
                self.restart_all(StateLost(why_not))
            stopped(number)
            release_broken()
            world = self._worlds.at(number)
            if world.number != self.world.number:
                raise WorldChanged(number, world)
            formed = self._quorum.join(number, arrival, began_s)
            if formed is None:
                continue
            attempt = Reconfiguration(number, store=self.group_store(), timeout_s=_RECONFIGURE_TIMEOUT_S)
            self._watcher.watch(number, attempt)
            try:
                attempt.run()
            except PeerLost:
                self.generation = number
                self._report(group_health.cause or "")
                if attempt.is_cancelled:  # its thread may still be using this connection to the store
                    self._group_store = JobStore.connect(self.job)
                num_failures += 1
                self._refuse_more(num_failures, time.monotonic() - began_s)
                continue
            entered_s = self.status.entered_s or time.monotonic()
            self.status = self.status._replace(generation=number, entered_s=entered_s)
            self._watcher.end_forming()
            return formed

    def _refuse_more(self, num_failures: int, lasted_s: float) -> None:
        """Pause before the next attempt to form groups, or give up after too many."""
        if num_failures >= _MAX_FAILURES and lasted_s > self.policy.replacement_timeout_s:
            cause = (
                f"groups could not be formed {num_failures} times in {lasted_s:.0f} s, though all ranks were there "
                f"each time: {group_health.cause}"
            )
            self.give_up(cause)
            raise RecoveryError(f"{cause}. Check whether the ranks can reach each other over the network.")
        time.sleep(min(1.0, _FIRST_PAUSE_S * 2**num_failures))

    def publish_stop(
        self, number: int, *, in_step: bool, trainer: bytes, part: int = 0, committed: int | None = None
    ) -> None:
        """Publish this process's stop report for a generation: that it has stopped, and its trainer state.

        Joiners wait for a report from every survivor, even one without state or whose state cannot be captured. Only
        the first call for a generation counts.

        Args:
            number: Generation to be formed.
            in_step: Whether this process waits inside a step.
            trainer: Captured trainer state; empty if there is none.
            part: See `StopReport.part`.
            committed: Steps of which it holds the state, if these are not those that it has committed.
        """
        if committed is None:
            committed = self.committed
        self._stop_reports.tell(number, committed=committed, in_step=in_step, trainer=trainer, part=part)

    def wait_for_stops(
        self,
        number: int | None = None,
        stopped: Callable[[int], None] | None = None,
        snapshots: Snapshots | None = None,
    ) -> ResumePoint:
        """Wait until every process that has state has stopped. A joiner that grows the job first waits for its turn.

        Args:
            number: The generation being formed; None for the first one that does not end meanwhile.
            stopped: Called with the number of each generation tried, if this process must report its own stop.
            snapshots: Snapshots of this process; some may have been left in shared memory by its predecessor.

        Returns:
            The point at which the job resumes.

        Raises:
            RecoveryTimeout: The other processes did not stop in time.
            PeerLost: The generation ended meanwhile (only if `number` is given).
            StateLost: All processes are new, none has state, and no agent restarted them.
        """
        if self.is_joining and number is None:
            await_turn(self.job_store, self.world, self.worker_id, self.job.incarnation)
        try:
            return self._stop_reports.wait(number, self.generation, stopped, snapshots)
        except StateLost as lost:
            self.restart_all(lost)

    def group_store(self) -> Store:
        """The store in which members of a generation exchange addresses."""
        return self._group_store.sub_store("groups")

    def end_generation(self) -> FailureRecord:
        """End the present generation unless it has ended, and return what ended it; the ledger books what follows."""
        if self._stopped_in != self.generation:  # else it has waited since, perhaps for another world
            self._stopped_in, self.stopped_s = self.generation, time.time()
        failure = self._end_generation()
        is_resize = failure.kind == "resize"
        ledger.interrupt(time.time() - failure.at_s, TimeCategory.RESIZE if is_resize else TimeCategory.ASSEMBLE)
        return failure

    def _end_generation(self) -> FailureRecord:
        if self.committed == NO_STATE and self.generation == 0 and self.is_joining:
            known = self.job_store.exit_of(self.worker_id, self.job.incarnation - 1)  # why this process is here
            return known or FailureRecord(kind="request", cause="a new process joins", reporter=f"rank {self.rank}")
        return self.end(
            self.generation, FailureRecord(kind="collective", cause=group_health.cause or "", step=self.committed)
        )

    def unrepaired_loss(self) -> FailureRecord | None:
        """What ended the present generation; None if it lasts, or if only connections have ended.

        Connections also end when the process at their other end is done.
        """
        failure, worker_ids = self.job_store.ended(self.generation), self.world.worker_ids
        if failure is None or failure.kind != "collective":
            return failure
        known = members_before(self.job_store, self.generation + 1)
        now = zip(worker_ids, self.job_store.incarnations(worker_ids), strict=True)
        lost = [rank for rank, (worker_id, number) in enumerate(now) if number != known.get(worker_id, 0)]
        return self.root_cause(failure, lost) if lost else None

    def root_cause(self, failure: FailureRecord, lost: Iterable[int]) -> FailureRecord:
        """Prefer an agent's record of how a lost process ended to a peer's report of a failed collective.

        Args:
            failure: What ended the generation.
            lost: Ranks that were lost.
        """
        if failure.kind != "collective":
            return failure
        worker_ids = [self.world.worker_ids[rank] for rank in sorted(lost)]
        exits = [
            self.job_store.exit_of(worker_id, self.job_store.incarnation(worker_id) - 1) for worker_id in worker_ids
        ]
        return next((replace(known, at_s=min(known.at_s, failure.at_s)) for known in exits if known), failure)

    def _report(self, cause: str) -> None:
        """Report a break to the other members; called in the thread that noticed it."""
        told = self._watcher.failure or FailureRecord(kind="collective", cause=cause, step=self.committed)
        with contextlib.suppress(dist.DistError):  # the store itself may be lost
            self.end(self.generation, told)

    def end(self, generation: int, failure: FailureRecord) -> FailureRecord:
        """End a generation, reported by this rank; return what ended it first. Any thread may call this."""
        with self._reporting:
            return self._reports.end(generation, replace(failure, reporter=f"rank {self.rank}"))

    def poll_worlds(self) -> None:
        """Poll for requests and new worlds; called in the watchdog's thread."""
        is_asked = self.rank == 0 and poll_requests(self._reports, self.world)
        self.wants_resize = is_asked or pending_world(self._reports) > self.world.number

    def _patience_s(self) -> float:
        limit_s = max(self.step_times.limit_s(self.hangs), self.hangs.floor_s)
        return min(limit_s, self.policy.replacement_timeout_s / 2)

    def on_lost_store(self, error: Exception) -> None:
        """Break the groups, because the job store is gone; called in the thread that noticed it."""
        log.error("rank %d lost the job store, which an agent or etcd serves: %s", self.rank, error)
        break_groups(f"the job store is gone: {error}")
