"""Runs the steps of a loop as transactions in a job with recovery, and as plain steps otherwise."""

import logging
from collections.abc import Callable
from typing import TypeVar

from hyperpod_plugins.comm import group_health, release_broken
from hyperpod_plugins.elastic import JobStore
from hyperpod_plugins.elastic.membership.admission import arm
from hyperpod_plugins.elastic.membership.restart_policy import NOT_NEEDED
from hyperpod_plugins.elastic.store.entries import ended_entries
from hyperpod_plugins.elastic.store.job_store import RAISED_KEY
from hyperpod_plugins.errors import DeviceHung, RecoveryError
from hyperpod_plugins.recovery import (
    Member,
    RecoveryOptions,
    Repair,
    SavedCheckpoints,
    Snapshot,
    Snapshots,
    StepTransaction,
)
from hyperpod_plugins.recovery.local_state import BUFFERS, BufferStates, LocalStates
from hyperpod_plugins.recovery.moving import move_to_next_world
from hyperpod_plugins.recovery.rehearsal import Rehearsal
from hyperpod_plugins.recovery.snapshot_memory import shared_memory
from hyperpod_plugins.recovery.state_layout import StateLayout
from hyperpod_plugins.session.context import LoopContext
from hyperpod_plugins.session.state import Position, TrainedState, rank_local_name

log = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")


def ends_only_this_process(error: BaseException | None) -> bool:
    """Whether this error ends only this process: the job continues in a smaller world, or with a replacement.

    Any other error is a mistake of the program, and ends the job.
    """
    return isinstance(error, RecoveryError | DeviceHung) or (isinstance(error, SystemExit) and error.code == NOT_NEEDED)


class Transactions:
    """Step transactions of one process; a new one is created each time the loop is entered."""

    def __init__(
        self,
        member: Member | None,
        context: LoopContext,
        trained: TrainedState,
        options: RecoveryOptions,
        repairs: list[Repair],
    ) -> None:
        """Create no transaction yet.

        Args:
            member: this process as a member of a job with recovery; None without recovery.
            context: rank and groups of this process.
            trained: what the loop trains.
            options: recovery options.
            repairs: list to which each repair is appended.
        """
        self.member = member
        self._context = context
        self._trained = trained
        self._options = options
        self._repairs = repairs
        self.rehearsal: Rehearsal | None = None
        """Rehearsal of this process's steps; None if none are rehearsed."""
        self._snapshots: Snapshots | None = None
        self._transaction: StepTransaction | None = None
        self._state_layout: StateLayout | None = None
        self._has_moved, self._is_complete, self._entry = False, True, 0
        self._trained.saving = context.saving_group
        self.saved: SavedCheckpoints | None = None
        """Where rank 0 records which checkpoints exist; None on other ranks."""

    @property
    def is_joining(self) -> bool:
        """Whether this process is a joiner: it replaces a lost process or grows the job."""
        return self.member is not None and self.member.is_joining

    def enter(self, entry: int, *, is_complete: bool) -> None:
        """Begin a loop.

        Args:
            entry: number of the loop among the entries of the program.
            is_complete: whether the state after all earlier entries was kept, so that a replacement can join.
        """
        member, self._is_complete = self.member, is_complete
        if member is None:
            return
        keeps = self._context.rank == 0 and is_complete
        self._entry = entry
        self.saved = SavedCheckpoints(JobStore.connect(member.job), entry) if keeps else None
        self._snapshots = None
        self._create_transaction(member)

    def begin_at(self, committed: int, resumed_from: str) -> None:
        """Set the number of committed steps, and record the checkpoint that the loop was resumed from, if any."""
        member = self.member
        if member is not None:
            member.committed = committed
            if self.saved is not None and resumed_from:
                self.saved.add(resumed_from, committed)

    def arm(self) -> None:
        """Have lost processes replaced from now on."""
        if self.member is not None and self._is_complete:
            arm(self.member.job_store)

    def leave(self, *, is_over: bool, error: BaseException | None = None) -> None:
        """Take no part until the next loop; if the loop `is_over`, lost processes are not replaced until then.

        If it is not over, only this process leaves, and the others continue without it. If the process ends with
        `error`, which the loop's body raised, the job ends with it.
        """
        member, self.saved = self.member, None
        if member is None:
            return
        if error is not None:
            told = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
            member.job_store.set(f"{RAISED_KEY}/{member.worker_id}", told.encode(errors="replace"))
        if is_over:
            member.job_store.disarm()
        if member.is_elastic or not is_over:
            self.member = None
            member.leave()
        else:
            member.end_entry(has_trained=True)

    def run(self, compute: Callable[[], T], commit: Callable[[T], R]) -> R:
        """Run one step."""
        if self._transaction is None or self._state_layout is None:
            return commit(compute())
        result = self._transaction.run(compute, commit)
        self._state_layout.publish()
        return result

    def join(self) -> None:
        """Join the other ranks outside a step, if this process has not joined them yet.

        Raises:
            PeerLost: a rank was lost just now.
        """
        if self._transaction is not None:
            self._transaction.join()

    def await_peers_position(self) -> Position:
        """Wait until the other ranks have stopped, and return the position at which this joiner begins."""
        assert self.member is not None
        self.member.activity = "waiting for the state of the loop"
        assert self._state_layout is not None
        self._state_layout.preallocate()
        resume_point = self.member.wait_for_stops(snapshots=self._snapshots)
        return self._set_entry(Position.from_bytes(resume_point.trainer), resume_point.step)

    def reenter(self) -> Position:
        """After a fault outside a step, leave the other ranks, and return the position at which all resume.

        Raises:
            SystemExit: the job continues without this process.
        """
        member, transaction = self.member, self._transaction
        assert member is not None
        assert transaction is not None
        member.end_generation()
        member.activity = "waiting for the other ranks to stop, outside a step"
        returned = None if self._snapshots is None else self._snapshots.take_returned()
        description = self._capture_stop_state(returned, transaction)
        self._trained.restore_training_modes()
        group_health.leave_others()
        self._move(member)
        self._create_transaction(member)
        resume_point = member.wait_for_stops(
            stopped=lambda number: member.publish_stop(number, in_step=False, trainer=description)
        )
        is_ours = returned is not None and resume_point.step == returned.step  # parts of it are rank-local
        position = Position.from_bytes(description if is_ours else resume_point.trainer)
        if is_ours and position.local and self._trained.local is not None:
            self._trained.local.load(position.local, begins_epoch=False)
        return self._set_entry(position, resume_point.step)

    def _capture_stop_state(self, returned: Snapshot | None, transaction: StepTransaction) -> bytes:
        if returned is not None:
            return returned.trainer
        if transaction.state_on_leaving_step is None and self._trained.is_within_step and not self._trained.can_undo:
            transaction.mark_state_lost("the program has written to parameters for the first time")
        if self.member is not None and self.member.has_torn_state:
            self._trained.undo_step()  # as far as possible, gradients above all
            return b""
        if transaction.state_on_leaving_step is not None:
            return transaction.state_on_leaving_step  # captured when it left the step, and still valid
        if self._trained.is_within_step:
            self._trained.undo_step()  # drop what was computed of it so far
        return self._trained.capture_state()

    def _set_entry(self, position: Position, step: int) -> Position:
        assert self._transaction is not None
        self._trained.entry_position, self._transaction.entered_at = position, step
        return position

    def _move(self, member: Member) -> None:
        """Move to the next world, if there is one."""
        if move_to_next_world(member):
            self._has_moved, self._snapshots, self._trained.local = True, None, None
        if self._has_moved:
            release_broken()
            self._context.build_groups(has_moved=True)
            self._trained.saving = self._context.saving_group
            if self._context.rank == 0 and self.saved is None and self._is_complete:
                self.saved = SavedCheckpoints(JobStore.connect(member.job), self._entry)

    def _create_transaction(self, member: Member) -> None:
        """Create a transaction that begins outside a step."""
        context, policy = self._context, self._options.snapshots(self._context.topology)
        if self._snapshots is None and context.snapshot_group is not None:
            memory = shared_memory(
                member.job,
                member.worker_id,
                member.world,
                context.topology,
                num_ended=len(ended_entries(member.job_store)),
                is_joining=member.is_joining,
            )
            self._snapshots = Snapshots(policy, self._trained.tensors, context.topology, context.snapshot_group, memory)
        self._state_layout = StateLayout(member, self._trained.tensors, context.topology)
        self.rehearsal = Rehearsal.create(
            self._trained.tensors,
            context.topology,
            context.device,
            steps=self._options.rehearse,
            compare_every=self._options.compare_replicas_every,
            give_up=member.give_up,
        )
        if self._trained.local is None:
            self._trained.local = LocalStates(context.topology, context.rank)
            buffers = BufferStates(self._trained.model)
            if not buffers.is_empty:  # the same on all ranks
                self._trained.local.register(BUFFERS, buffers)
        for name, state in self._trained.rank_local.items():
            self._trained.local.register(rank_local_name(name), state)
        self._transaction = StepTransaction(
            member,
            self._trained,
            context.topology,
            policy=self._options.retries,
            device=context.device,
            on_repair=self._repaired,
            snapshots=self._snapshots,
            rehearsal=self.rehearsal,
        )

    def _repaired(self, repair: Repair) -> None:
        assert self.member is not None
        self._trained.entry_position, self._has_moved = None, False
        self._repairs.append(repair)
        if repair.is_reported_by(self.member.rank, self.member.world.size):
            log.warning("%s", repair)
