"""The steps of a loop as transactions where an agent replaces lost processes, and as plain steps elsewhere."""

import logging
from collections.abc import Callable
from typing import TypeVar

from hyperpod_plugins.comm import abandon_broken, breaker
from hyperpod_plugins.elastic import Ledger
from hyperpod_plugins.elastic.ledger import ARMED_KEY
from hyperpod_plugins.loops.position import Position
from hyperpod_plugins.loops.seat import Seat
from hyperpod_plugins.loops.trained import Trained
from hyperpod_plugins.recovery import (
    Member,
    RecoveryOptions,
    Repair,
    SavedCheckpoints,
    Snapshot,
    Snapshots,
    StepTransaction,
)
from hyperpod_plugins.recovery.moving import follow
from hyperpod_plugins.recovery.preview import Preview

log = logging.getLogger(__name__)
T = TypeVar("T")


class Transactions:
    """Of one process; a new transaction each time that the loop is entered."""

    def __init__(
        self,
        member: Member | None,
        seat: Seat,
        trained: Trained,
        options: RecoveryOptions,
        repairs: list[Repair],
    ) -> None:
        """Begin with none.

        Args:
            member: this process in a job that recovers; None for one that does not.
            seat: of this process.
            trained: what the loop trains.
            options: how faults are repaired.
            repairs: to which each repair is added.
        """
        self.member = member
        self._seat = seat
        self._trained = trained
        self._options = options
        self._repairs = repairs
        self._snapshots: Snapshots | None = None
        self._transaction: StepTransaction | None = None
        self._preview: Preview | None = None
        self._has_moved = False
        self._trained.saving = seat.saving_group
        self.saved = None if member is None or seat.rank else SavedCheckpoints(Ledger.connect(member.job))
        """Where rank 0 writes down which checkpoints there are."""
        if member is not None:
            self._renew(member)

    @property
    def is_newcomer(self) -> bool:
        """Whether this process takes the place of a lost one, or comes to a job that grows."""
        return self.member is not None and self.member.job.is_newcomer

    def begin_at(self, committed: int) -> None:
        """Count steps from where a checkpoint has brought the loop."""
        member = self.member
        if member is not None:
            member.committed = committed
            if self.saved is not None and member.job.resume_from:
                self.saved.add(member.job.resume_from, committed)

    def arm(self) -> None:
        """Have lost processes replaced from now on."""
        if self.member is not None:
            self.member.ledger.put(ARMED_KEY, b"1")

    def leave(self) -> None:
        """The loop has ended: nobody needs a replacement any more."""
        member, self.member = self.member, None
        if member is not None:
            member.ledger.forget(ARMED_KEY)
            member.leave()

    def run(self, compute: Callable[[], T], commit: Callable[[T], T]) -> T:
        """One step."""
        if self._transaction is None or self._preview is None:
            return commit(compute())
        result = self._transaction.run(compute, commit)
        self._preview.leave()
        return result

    def join(self) -> None:
        """Meet the others where no step begins, if this process is apart from them.

        Raises:
            PeerLost: somebody was lost just now.
        """
        if self._transaction is not None:
            self._transaction.join()

    def state_of_peers(self) -> Position:
        """Where a newcomer begins, once the others have stopped."""
        assert self.member is not None
        self.member.whereabouts = "waiting for the state of the loop"
        assert self._preview is not None
        self._preview.take()
        halt = self.member.wait_for_stops()
        return self._entering(Position.from_bytes(halt.trainer), halt.step)

    def reenter(self) -> Position:
        """After a fault outside of a step: be apart from the others, and learn where all go on.

        Raises:
            SystemExit: the job goes on without this process.
        """
        member, transaction = self.member, self._transaction
        assert member is not None
        assert transaction is not None
        member.end_generation()
        returned = None if self._snapshots is None else self._snapshots.take_returned()
        description = self._stopped_at(returned, transaction)
        self._trained.train_again()
        breaker.part()
        self._move(member)
        self._renew(member)
        halt = member.wait_for_stops(stopped=lambda number: member.stop(number, in_step=False, trainer=description))
        is_ours = returned is not None and halt.step == returned.step  # parts of it are this rank's alone
        return self._entering(Position.from_bytes(description if is_ours else halt.trainer), halt.step)

    def _stopped_at(self, returned: Snapshot | None, transaction: StepTransaction) -> bytes:
        if returned is not None:
            return returned.trainer
        if transaction.left_with is not None:
            return transaction.left_with  # what it said when it stopped in the step still holds
        return self._trained.describe()

    def _entering(self, position: Position, step: int) -> Position:
        assert self._transaction is not None
        self._trained.entered_with, self._transaction.entered_at = position, step
        return position

    def _move(self, member: Member) -> None:
        """Belong to the next world, if there is another one."""
        if follow(member):
            self._has_moved, self._snapshots = True, None
        if self._has_moved:
            abandon_broken()
            self._seat.lay_out(has_moved=True)
            self._trained.saving = self._seat.saving_group
            if self._seat.rank == 0 and self.saved is None:
                self.saved = SavedCheckpoints(Ledger.connect(member.job))

    def _renew(self, member: Member) -> None:
        """Make a transaction that begins outside of a step."""
        seat, policy = self._seat, self._options.snapshots(self._seat.topology)
        if self._snapshots is None and seat.snapshot_group is not None:
            self._snapshots = Snapshots(policy, self._trained.tensors, seat.topology, seat.snapshot_group)
        self._preview = Preview(member, self._trained.tensors, seat.topology)
        self._transaction = StepTransaction(
            member,
            self._trained,
            seat.topology,
            policy=self._options.retries,
            device=seat.device,
            on_repair=self._repaired,
            snapshots=self._snapshots,
        )

    def _repaired(self, repair: Repair) -> None:
        assert self.member is not None
        self._trained.entered_with, self._has_moved = None, False
        self._repairs.append(repair)
        if repair.is_told_by(self.member.rank, self.member.world.size):
            log.warning("%s", repair)
