"""One process's recovery, as Lightning's Trainer and a loop written by hand share it.

    engine = RecoveryEngine(join_job(...), options, repairs, on_repair=...)    before the groups are created
    engine.begin_entry(...)                                                    at the beginning of each entry
    transaction = engine.attach(loop, state, ...)                              each time that the loop is entered
    engine.wait_for_peers(...)                                                 in a joiner, before its first step

    member.end_generation()                                                    after a fault outside a step
    engine.take_returned(); engine.stop_state(...)
    group_health.detach(); engine.move()
    engine.attach(...); engine.wait_for_peers(...)

    engine.end_entry(...)                                                      when the entry ends

An entry is a call of the program, such as a fit or a loop; see `entries.py`. The adapter captures and restores the
position of its loop, and leaves and re-enters it. A fault in a step is handled by the `StepTransaction` that `attach`
returns.
"""

import logging
import os
import time
from collections.abc import Callable
from typing import NoReturn

import torch
import torch.distributed as dist

from hyperpod_plugins.comm import release_broken
from hyperpod_plugins.elastic import FailureRecord, JobStore
from hyperpod_plugins.elastic.membership.admission import find_world
from hyperpod_plugins.elastic.membership.quorum_policy import BETWEEN_CALLS
from hyperpod_plugins.elastic.membership.restart_policy import NOT_NEEDED
from hyperpod_plugins.elastic.process import exit_with_agent
from hyperpod_plugins.elastic.store.entry_records import ended_entries, ended_entry
from hyperpod_plugins.elastic.store.job_store import poll_interval_s, poll_until
from hyperpod_plugins.elastic.store.loop_exits import LoopExit, LoopExits
from hyperpod_plugins.elastic.store.world import WorldPlan
from hyperpod_plugins.env import JobEnv, snapshot_folder
from hyperpod_plugins.errors import StateLost
from hyperpod_plugins.ledger import ledger
from hyperpod_plugins.parallel.topology import Topology
from hyperpod_plugins.recovery.config import RecoveryOptions, log_once
from hyperpod_plugins.recovery.member import Member
from hyperpod_plugins.recovery.plan import NO_STATE
from hyperpod_plugins.recovery.protocols import Repair, TrainingLoop
from hyperpod_plugins.recovery.rehearsal import Rehearsal
from hyperpod_plugins.recovery.rehearsal_jobs import RehearsedCall
from hyperpod_plugins.recovery.replica_comparison import Interval, ReplicaComparison
from hyperpod_plugins.recovery.restart_all import SavedCheckpoints
from hyperpod_plugins.recovery.snapshot import Snapshot, Snapshots
from hyperpod_plugins.recovery.snapshot_memory import shared_memory
from hyperpod_plugins.recovery.state_transfer import TrainingState
from hyperpod_plugins.recovery.step import StepTransaction
from hyperpod_plugins.recovery.stop_reports import ResumePoint
from hyperpod_plugins.recovery.watchdog import Heartbeat

log = logging.getLogger(__name__)
_ENDING_S = 3.0
"""Longest wait for an agent to record that a process has ended, which has left its loop: it may have been left by an
exception that no record tells of yet."""


def join_job(job: JobEnv, options: RecoveryOptions, *, worker_id: int, world_size: int, is_elastic: bool) -> Member:
    """Make this process a member of a job whose agents replace lost processes.

    Args:
        job: of the process.
        options: how faults are repaired.
        worker_id: of the process, from its launcher.
        world_size: of the initial world.
        is_elastic: whether the job may change its size.

    Raises:
        RecoveryError: this process joins a job whose initial world does not include it, and that does not change its
            size.
        SystemExit: this process joins a job that has ended.
    """
    world = WorldPlan.initial(world_size)
    if job.agent_pid:
        exit_with_agent(job.agent_pid)  # from here on this process may wait for a long time
    if job.is_joining:
        world = find_world(JobStore.connect(job), worker_id, job.incarnation)
    member = Member(job, worker_id=worker_id, world=world, policy=options.membership, hangs=options.hangs)
    member.is_elastic = is_elastic
    member.start()
    return member


class StateLayout:
    """The layout of this rank's shard, published in the job store so that joiners can preallocate memory for it.

    A joiner that waits for its turn has time to spare; when its turn comes, all others wait for it. Allocating the
    optimizer's tensors and touching their memory for the first time may take longer than filling them.
    """

    def __init__(self, member: Member, state: TrainingState, topology: Topology, entry: int) -> None:
        here = topology.coordinates(member.rank)
        self._member = member
        self._state = state
        self._key = f"preview/{entry}/{here.shard}/{here.tensor}"  # another entry may train another model
        self._is_published = here.replicate > 0  # only the first replica publishes it

    def publish(self) -> None:
        """Publish the layout once; call this after the first step, which creates the optimizer state."""
        if not self._is_published:
            self._member.job_store.set(self._key, self._state.header())
            self._is_published = True

    def preallocate(self) -> None:
        """In a joiner, allocate memory for the published layout, if there is one."""
        header = self._member.job_store.try_get(self._key) if self._member.committed == NO_STATE else None
        if header is not None:
            self._state.preallocate(header)


class RecoveryEngine:
    """Recovery of one process, for all entries of one adapter. Use it in the main thread only."""

    def __init__(
        self, member: Member, options: RecoveryOptions, repairs: list[Repair], *, on_repair: Callable[[Repair], object]
    ) -> None:
        """Create it without a transaction; see `attach`.

        Args:
            member: this process.
            options: how faults are repaired.
            repairs: list to which each repair is appended.
            on_repair: called after each repair; `has_moved` still tells whether it has brought another world.
        """
        self.member = member
        self.options = options
        self._repairs = repairs
        self._on_repair = on_repair
        self.transaction: StepTransaction | None = None
        """Of the present entry into the loop; None before `attach`."""
        self.snapshots: Snapshots | None = None
        """Of the present world; None without snapshots."""
        self.rehearsal: Rehearsal | None = None
        """Of this rank's steps; None if none are rehearsed."""
        self._layout: StateLayout | None = None
        self.saved: SavedCheckpoints | None = None
        """Record of the existing checkpoints, on rank 0 within an entry; None if a restart could not use them."""
        self.has_moved = False
        """Whether this process has moved to another world since the last generation was formed."""
        self.former_ranks: dict[int, int] = {}
        """After a move: for each rank that was part of the former world, its rank there."""
        self.begins_at = NO_STATE
        """Committed steps at the beginning of the entry; NO_STATE until they are known."""
        self._entry, self._training_index, self._may_record = 0, 0, False
        self._loop_exits = LoopExits(member.job_store, 0)

    def begin_entry(self, entry: int, *, training_index: int, is_complete: bool) -> None:
        """Begin an entry, without snapshots of an earlier one.

        Args:
            entry: its number.
            training_index: its number among the entries that train, if it does.
            is_complete: whether the state after each earlier entry is kept. Otherwise a restart begins with an earlier
                entry, and checkpoints of this one are of no use to it.
        """
        self._entry, self._training_index, self._may_record = entry, training_index, is_complete
        ledger.write("entry", entry=entry)
        self._loop_exits = LoopExits(self.member.job_store, entry)
        self.saved, self.snapshots, self.begins_at = None, None, NO_STATE
        self._record_checkpoints()

    def begin_at(self, committed: int, resumed_from: str) -> None:
        """Set the number of committed steps, and record the checkpoint that the entry was resumed from, if any."""
        self.begins_at = self.member.committed = committed
        if self.rehearsal is not None:
            self.rehearsal.begin_at(committed)
        if self.saved is not None and resumed_from:
            self.saved.add(resumed_from, committed)

    def attach(
        self,
        loop: TrainingLoop,
        state: TrainingState,
        topology: Topology,
        *,
        device: torch.device,
        snapshot_group: dist.ProcessGroup | None,
    ) -> StepTransaction:
        """Create the step transaction for one entry into a loop.

        Args:
            loop: that trains.
            state: its tensors.
            topology: of the present world.
            device: of this rank.
            snapshot_group: group of all ranks, used for snapshots only; None for no snapshots.
        """
        member = self.member
        if loop.rank_local_states is not None:
            loop.rank_local_states.is_exact = self.options.rank_local_state == "exact"
        job = RehearsedCall.create(member.rank, self._entry, training_index=self._training_index)
        restarts_node = bool(member.job.agent_pid)
        if member.rank == 0 and not member.is_joining:
            outlives = snapshot_folder() is not None
            log_once(self.options.cost_of_loss(topology, restarts_node=restarts_node, outlives=outlives))
        if self.snapshots is None and snapshot_group is not None:
            memory = shared_memory(
                member.job,
                member.worker_id,
                member.world,
                topology,
                num_ended=len(ended_entries(member.job_store)),
                is_joining=member.is_joining,
            )
            policy = self.options.snapshots(topology, restarts_node=restarts_node)
            if job is not None:
                policy = job.snapshots(policy)
            self.snapshots = Snapshots(policy, state, topology, snapshot_group, memory)
        self._layout = StateLayout(member, state, topology, self._entry)
        self.rehearsal = Rehearsal.create(
            loop,
            state,
            topology,
            device,
            steps=self.options.rehearse,
            job=job,
            give_up=member.give_up,
        )
        if self.rehearsal is not None:
            self.rehearsal.watch_transfers(self.snapshots)
            self.rehearsal.at_set_up()
        self.transaction = StepTransaction(
            member,
            loop,
            topology,
            policy=self.options.retries,
            device=device,
            on_repair=self._repaired,
            snapshots=self.snapshots,
            rehearsal=self.rehearsal,
            comparison=ReplicaComparison.create(state, topology, device, self._comparisons(job), member.give_up),
        )
        return self.transaction

    def _comparisons(self, job: RehearsedCall | None) -> Interval:
        """Steps from one comparison of replicas to the next; a rehearsed job compares more, and says more about it."""
        every = self.options.compare_replicas_every
        return 0 if job is not None and every == "auto" else every

    def publish_layout(self) -> None:
        """Let joiners allocate memory for this rank's shard; call it after each step, of which the first one counts."""
        if self._layout is not None:
            self._layout.publish()

    # -- after a fault outside a step -----------------------------------------------------------------------------

    def take_returned(self) -> Snapshot | None:
        """The snapshot to which all ranks return, if this rank has just been put back to one."""
        return None if self.snapshots is None else self.snapshots.take_returned()

    def stop_state(
        self, loop: TrainingLoop, returned: Snapshot | None, *, is_within_step: bool, capture: Callable[[], bytes]
    ) -> bytes:
        """Undo what this rank has computed of a step, and describe where its loop stands; empty without a valid state.

        Args:
            loop: that has been left.
            returned: see `take_returned`.
            is_within_step: whether a part of a step has been computed.
            capture: describes the loop outside a step.
        """
        if returned is not None:
            return returned.trainer
        if self.member.has_torn_state:
            loop.undo_step()  # as far as possible, gradients above all
            return b""
        if self.transaction is not None and self.transaction.state_on_leaving_step is not None:
            return self.transaction.state_on_leaving_step  # the description from when it stopped in the step
        if is_within_step:
            loop.undo_step()
        return capture()

    def move(self) -> bool:
        """Move this process to the next world; returns whether that differs from the present one.

        Raises:
            SystemExit: This process is not part of the next world, or had not yet joined the present one.
        """
        member = self.member
        member.collectives.begin_again()
        world = member.next_world()
        is_new = world.number != member.world.number
        if is_new:
            if member.is_joining and member.committed == NO_STATE:
                log.warning(
                    "the world changed before this process joined it; another process starts in its worker slot"
                )
                raise SystemExit(NOT_NEEDED)
            if world.rank_of(member.worker_id) is None:
                log.warning("%s; the job continues without this process", world.cause)
                member.leave()
                raise SystemExit(NOT_NEEDED)
            before = [member.world.rank_of(worker_id) for worker_id in world.worker_ids]
            self.former_ranks = {rank: former for rank, former in enumerate(before) if former is not None}
            member.move(world)
            self.has_moved, self.snapshots = True, None
            self._record_checkpoints()
        if self.has_moved:
            release_broken()
        return is_new

    def wait_for_peers(self, activity: str, stopped: Callable[[int], None] | None = None) -> ResumePoint:
        """Wait until all ranks that hold state have stopped, and return where the job stands.

        Args:
            activity: what this process waits for, shown to the other ranks.
            stopped: see `Member.wait_for_stops`.

        Raises:
            RecoveryTimeout: they did not stop in time.
            SystemExit: all processes restart, or the job has ended.
        """
        assert self._layout is not None
        self.member.activity = activity
        self._layout.preallocate()
        return self.member.wait_for_stops(stopped=stopped, snapshots=self.snapshots)

    def end_entry(self, *, has_ended: bool, leaves: bool, disarms: bool = True) -> None:
        """End the entry.

        Args:
            has_ended: whether it has trained to its end, so that lost processes are no longer replaced.
            leaves: whether this process no longer takes part in recovery.
            disarms: whether it has ended for all ranks, if for this one.
        """
        self.saved = None
        if has_ended and disarms:
            self.member.job_store.disarm()
        if leaves:
            self.member.leave()
        else:
            self.member.end_entry(has_trained=has_ended)

    def check_left(self) -> None:
        """After `end_entry`, restart all processes if a rank was lost in the entry: the others wait there for this one.

        An agent records a loss before it looks whether a replacement can join the entry, and a rank that stops for a
        fault ends the generation before it calls `restart_if_left`. So they notice that this rank has left if it does
        not see the loss here.
        """
        self.member.job_store.set(self._left_key, b"1")
        failure = self.member.unrepaired_loss()
        if failure is not None:
            self.restart_left(failure)

    def restart_if_left(self, failure: FailureRecord) -> None:
        """After a fault outside steps, restart all processes if another rank has left the entry for good."""
        if self.member.job_store.try_get(self._left_key) is not None or self._has_any_departed():
            self.restart_left(failure)

    def _has_any_departed(self) -> bool:
        """Whether another rank has left the entry early, and does not come back.

        One that has left by an exception that its loop knows of is about to end, or notices this fault in
        `await_loop_exits`; a rank that has state can wait for its replacement.
        """
        has_state = self.member.committed != NO_STATE

        def departed() -> bool:
            return any(not (left.error and has_state) for left in self._loop_exits.present().values())

        return poll_until(departed, lambda is_any: not is_any, limit_s=_ENDING_S, every_s=self._poll_s)

    def leave_early(self, committed: int, error: str, *, num_bodies: int, leaves: bool) -> None:
        """End the entry on this rank alone, whose program has left it before its end.

        Whether lost processes are still replaced depends on the other ranks: until all have left the entry, too, they
        can go on with a replacement of this one.

        Args:
            committed: steps that it has committed.
            num_bodies: see `LoopExit`.
            error: first line of the exception that it was left by, with its class; empty if none is known.
            leaves: whether this process no longer takes part in recovery.
        """
        member = self.member
        LoopExit(
            worker_id=member.worker_id,
            incarnation=member.job.incarnation,
            entry=self._entry,
            committed=committed,
            generation=member.generation,
            num_bodies=num_bodies,
            error=error,
        ).publish(member.job_store)
        is_over = self._have_all_left()
        self.end_entry(has_ended=True, leaves=leaves, disarms=is_over)
        failure = None if is_over or error else member.unrepaired_loss()
        if failure is not None:
            self.restart_left(failure)

    def _have_all_left(self) -> bool:
        member = self.member
        if member.job_store.try_get(self._left_key) is not None:
            return True  # a rank has left after the last step, which all have committed
        return self._loop_exits.have_all_left(member.generation, member.world.worker_ids)

    def _poll_s(self, waited_s: float) -> float:
        return poll_interval_s(self.member.rank, self.member.world.size, waited_s)

    def await_loop_exits(self) -> FailureRecord | None:
        """After `leave_early`, wait until all ranks have left the entry, for at most `HangPolicy.outside_s`.

        Returns:
            A loss that they met in it; or that they wait there for this rank, so that they will not leave it.
        """
        member = self.member
        member.activity = "waiting for the other ranks to leave the loop, too"
        began_s = time.monotonic()
        while not self._have_all_left():
            waited_s = time.monotonic() - began_s
            failure, is_late = member.unrepaired_loss(), waited_s > member.hangs.outside_s
            if failure is None and (is_late or (waited_s > member.hangs.floor_s and self._is_awaited())):
                cause = f"the other ranks wait in the loop for rank {member.rank}, which has left it"
                failure = FailureRecord(kind="hang", cause=cause, worker_id=member.worker_id, reporter=cause)
            if failure is not None:
                return failure
            time.sleep(self._poll_s(waited_s))
        member.activity = BETWEEN_CALLS
        return None

    def _is_awaited(self) -> bool:
        """Whether all ranks that have not left the entry have been in a collective for a long time."""
        member = self.member
        others = set(member.world.worker_ids) - self._loop_exits.present().keys()
        heard = [Heartbeat.from_dict(each) for each in member.job_store.heartbeats(sorted(others)).values()]
        return len(heard) == len(others) and all(each.waited_s > member.hangs.floor_s for each in heard)

    def restart_left(self, failure: FailureRecord) -> NoReturn:
        """Restart all processes after a fault that some ranks met in the entry, while others had left it."""
        member = self.member
        is_kept = ended_entry(member.job_store, self._entry) is not None
        try:
            member.restart_all(StateLost(f"{failure}. Other ranks have left the loop already"), loses_steps=not is_kept)
        finally:  # no agent has ended this process, and a loop that is left cannot raise
            os._exit(1)

    @property
    def _left_key(self) -> str:
        """Name of the value that says that a rank has left the entry, as its program wanted."""
        return f"left/{self._entry}"

    def _record_checkpoints(self) -> None:
        if self.member.rank == 0 and self._may_record and self.saved is None:
            self.saved = SavedCheckpoints(JobStore.connect(self.member.job), self._entry)

    def _repaired(self, repair: Repair) -> None:
        self._repairs.append(repair)
        self._on_repair(repair)
        self.has_moved = False
        if repair.is_reported_by(self.member.rank, self.member.world.size):
            log.warning("%s", repair)
