"""Runs the steps of a loop: as `Transactions` in a job with recovery, and as `PlainSteps` otherwise."""

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn, TypeVar

from torch.distributed import DistError
from typing_extensions import override

from hyperpod_plugins.comm import group_health
from hyperpod_plugins.comm.runtime import runtime
from hyperpod_plugins.elastic.membership.admission import arm
from hyperpod_plugins.elastic.membership.elastic_spec import ElasticSpec, publish_elastic_spec
from hyperpod_plugins.elastic.membership.restart_policy import NOT_NEEDED
from hyperpod_plugins.elastic.process import program_end
from hyperpod_plugins.env import events_folder
from hyperpod_plugins.errors import DeviceHung, LoopError, PeerLost, RecoveryError, StateLost
from hyperpod_plugins.ledger import TimeCategory, ledger
from hyperpod_plugins.recovery import Member, RecoveryOptions, Repair, SavedCheckpoints, Snapshot
from hyperpod_plugins.recovery.attributes import ATTRIBUTES
from hyperpod_plugins.recovery.buffer_states import BufferStates
from hyperpod_plugins.recovery.engine import RecoveryEngine
from hyperpod_plugins.recovery.local_state import BUFFERS, LocalStates
from hyperpod_plugins.recovery.plan import NO_STATE
from hyperpod_plugins.recovery.rehearsal import Rehearsal
from hyperpod_plugins.recovery.stop_reports import REPEATED_BODY
from hyperpod_plugins.session.loop_context import LoopContext
from hyperpod_plugins.session.state import Position, SessionState, rank_local_name

log = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")


def end_process(why: str) -> NoReturn:
    """End a process in the middle of its loop, so that it is replaced as one that was killed.

    Used where an exception would not end it: the program might catch it, or a generator is being closed.
    """
    log.error("%s", why)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def ends_only_this_process(error: BaseException | None) -> bool:
    """Whether this error ends only this process: the job continues in a smaller world, or with a replacement.

    After any other error the process leaves its loop, and what follows depends on the program: whether it catches the
    error, and whether the other ranks leave the loop, too.
    """
    return isinstance(error, RecoveryError | DeviceHung) or (isinstance(error, SystemExit) and error.code == NOT_NEEDED)


class PlainSteps:
    """Steps of a process that takes no part in recovery: computed, then committed."""

    elastic_spec: ElasticSpec | None = None
    """Spec to publish as soon as lost processes are replaced; None for a job that does not change its size."""
    has_left = False
    """Whether this process has left the job for good: its later steps are plain ones."""
    _num_committed = 0
    """Committed steps of the loop; not counted with recovery."""
    _books = False
    """Whether these steps are in the ledger, which recovery would write otherwise."""

    @property
    def recovers(self) -> bool:
        """Whether a step that a fault interrupts is run again."""
        return False

    @property
    def is_joining(self) -> bool:
        """Whether this process is a joiner: it replaces a lost process or grows the job."""
        return False

    @property
    def saved(self) -> SavedCheckpoints | None:
        """Where rank 0 records which checkpoints exist; None on other ranks."""
        return None

    @property
    def rehearsal(self) -> Rehearsal | None:
        """Rehearsal of this process's steps; None if none are rehearsed."""
        return None

    def enter(self, entry: int, *, training_index: int, is_complete: bool) -> None:
        """Begin a loop.

        Args:
            entry: number of the loop among the entries of the program.
            training_index: number of the loop among the loops of the program.
            is_complete: whether the state after all earlier entries was kept, so that a replacement can join.
        """

    def begin_at(self, committed: int, resumed_from: str) -> None:
        """Set the number of committed steps, and record the checkpoint that the loop was resumed from, if any."""
        self._num_committed = committed

    @contextmanager
    def booked(self, context: LoopContext) -> Generator[None]:
        """Context of a loop in which the ledger books the time of this process, if HYPERPOD_EVENTS is set."""
        is_wanted = events_folder() is not None
        self._books = is_wanted and ledger.open_without_recovery(context.rank, waited_s=lambda: runtime.waiting.total_s)
        if not self._books:
            yield
            return
        replicas = context.topology.replicate_degree
        ledger.note_world(rank=context.rank, world_size=context.world_size, replicas=replicas, generation=0)
        try:
            yield
        finally:
            self._books = False
            ledger.close()

    def arm(self) -> None:
        """Have lost processes replaced from now on, and then let the job change its size."""

    must_await_others = False
    """Whether the other ranks may still be in the loop, which this one has left early."""

    def leave(self) -> None:
        """End the loop after its last step: take no part in recovery until the next, or for good if the job is elastic.

        Lost processes are not replaced until the next loop. If a rank was lost in this one, where the others wait for
        this process, all processes restart.
        """

    def leave_early(self, error: BaseException | None, num_bodies: int) -> None:
        """End the loop on this rank alone: the program has left it before its end.

        Args:
            num_bodies: number of steps whose body this process has run to its end.
            error: that the loop was left by, as far as it is known; None for `break`, too.
        """

    def await_others(self) -> None:
        """After `leave_early`, before the first collective: wait until all other ranks have left the loop, too.

        Otherwise the collectives of this rank would meet those of the others in their steps. Does not return if they
        lose a rank in the loop: then this process ends, or all restart.
        """

    def run(self, compute: Callable[[], T], commit: Callable[[T], R]) -> R:
        """Run one step."""
        if not self._books:
            return commit(compute())
        ledger.enter(TimeCategory.STEP)
        result = commit(compute())
        self._num_committed += 1
        ledger.commit(self._num_committed)
        return result

    def join(self) -> None:
        """Join the other ranks between two steps, if this process is not connected to them.

        Raises:
            PeerLost: a peer has just been lost.
        """

    def join_in_body(self) -> None:
        """In a process without a state (a joiner, or one whose state was torn), get one before a step's body."""

    def lose_state(self, why: str) -> PeerLost:
        """Give up this rank's state, since what follows cannot be repeated; return the error that interrupts the body.

        Only a member of a job with recovery repeats anything.
        """
        raise LoopError(why)

    def share_first_state(self, committed: int) -> None:
        """Send the rank-local state to the buddy before the first step, and wait until all ranks have received theirs.

        So the replacement of a rank that is lost in that step has its state, which an earlier loop or a checkpoint has
        left.

        Raises:
            PeerLost: a peer has just been lost.
        """

    def await_peers_position(self) -> Position:
        """In a joiner, wait until the other ranks have stopped; return the position from which to start."""
        raise LoopError("only a member of a job with recovery joins a loop")

    def reenter(self) -> Position:
        """After a fault outside a step, detach from the other ranks; return the position from which all continue.

        Raises:
            SystemExit: the job continues without this process.
        """
        raise LoopError("only a member of a job with recovery re-enters a loop")


class Transactions(PlainSteps):
    """Steps of a member of a job as transactions; a new transaction is created each time the loop is entered."""

    def __init__(
        self,
        member: Member,
        context: LoopContext,
        trained: SessionState,
        options: RecoveryOptions,
        repairs: list[Repair],
    ) -> None:
        """Create no transaction yet.

        Args:
            member: this process as a member of a job with recovery.
            context: rank and groups of this process.
            trained: what the loop trains.
            options: recovery options.
            repairs: list to which each repair is appended.
        """
        self._context = context
        self._trained = trained
        self._engine = RecoveryEngine(member, options, repairs, on_repair=self._repaired)
        self._is_complete = True
        self._raised = ""
        """First line of the exception that has left the present loop; empty if none is known."""

    @property
    @override
    def recovers(self) -> bool:
        return not self.has_left

    @property
    @override
    def is_joining(self) -> bool:
        return not self.has_left and self._engine.member.is_joining

    @property
    @override
    def saved(self) -> SavedCheckpoints | None:
        return self._engine.saved

    @property
    @override
    def rehearsal(self) -> Rehearsal | None:
        return self._engine.rehearsal

    @override
    def enter(self, entry: int, *, training_index: int, is_complete: bool) -> None:
        engine = self._engine
        self._is_complete, self._raised, self.must_await_others = is_complete, "", False
        engine.begin_entry(entry, training_index=training_index, is_complete=is_complete)
        engine.member.collectives.end_set_up()
        self._attach()

    @override
    def begin_at(self, committed: int, resumed_from: str) -> None:
        self._engine.begin_at(committed, resumed_from)

    @override
    def arm(self) -> None:
        """As in `PlainSteps`.

        In this order: a left-over process that finds the spec becomes a spare if it would be replaced, and ends if not.
        """
        if self._is_complete:
            job_store = self._engine.member.job_store
            arm(job_store)
            if self.elastic_spec is not None:
                publish_elastic_spec(job_store, self.elastic_spec)

    @override
    def leave(self) -> None:
        self.has_left = self._engine.member.is_elastic
        self._engine.end_entry(has_ended=True, leaves=self.has_left)
        self._engine.check_left()

    @override
    def leave_early(self, error: BaseException | None, num_bodies: int) -> None:
        engine, committed = self._engine, self._trained.get_position().committed
        if ends_only_this_process(error):
            self.has_left = True
            engine.end_entry(has_ended=False, leaves=True)
            return
        if not (error is None or isinstance(error, PeerLost) or (isinstance(error, SystemExit) and not error.code)):
            self._raised = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        self.has_left, self.must_await_others = engine.member.is_elastic, True
        program_end.watch()
        atexit.unregister(self._await_others_at_exit)  # of an earlier loop: once is enough
        atexit.register(self._await_others_at_exit)
        engine.leave_early(committed, self._raised, num_bodies=num_bodies, leaves=self.has_left)

    @override
    def await_others(self) -> None:
        if not self.must_await_others:
            return
        failure = self._engine.await_loop_exits()
        if failure is not None and (self._raised or failure.kind == "hang"):
            how = f"by an exception that the program has caught ({self._raised})" if self._raised else "early"
            end_process(
                f"this rank has left a loop {how}, and others have not: {failure.cause}. This process ends, to be "
                "replaced. A program must leave a loop on all ranks, or catch the exception inside of it."
            )
        if failure is not None:
            self._engine.restart_left(failure)
        self.must_await_others = False

    def _await_others_at_exit(self) -> None:
        """Do not let the program succeed while the other ranks wait for this one in the loop.

        Python ignores an exception of a function that is called at exit, and would end with code 0.
        """
        if program_end.has_failed:
            return
        try:
            with contextlib.suppress(DistError):  # the job has ended
                self.await_others()
        except (RuntimeError, ValueError, KeyError, OSError, KeyboardInterrupt, SystemExit) as error:
            end_process(f"waiting for the other ranks to leave the loop failed ({type(error).__name__}: {error})")

    @override
    def run(self, compute: Callable[[], T], commit: Callable[[T], R]) -> R:
        result = self._transaction.run(compute, commit)
        self._engine.publish_layout()
        return result

    @override
    def join(self) -> None:
        self._transaction.join()

    @override
    def join_in_body(self) -> None:
        if self._engine.member.committed == NO_STATE:
            self._trained.join_in_body(self._transaction.join_step)

    @override
    def lose_state(self, why: str) -> PeerLost:
        lost = self._transaction.mark_state_lost(why)
        self._engine.member.fail("collective", str(lost))
        return lost

    @override
    def share_first_state(self, committed: int) -> None:
        try:
            self._trained.share_first_state(committed)
            self._transaction.barrier()
        except PeerLost:
            if committed:  # a replacement reads no checkpoint
                self._engine.member.restart_all(StateLost("a process was lost while a checkpoint was being loaded"))
            raise

    @override
    def await_peers_position(self) -> Position:
        self._engine.restart_if_left(self._engine.member.end_generation())
        resume_point = self._engine.wait_for_peers("waiting for the state of the loop")
        position = replace(Position.from_bytes(resume_point.trainer), is_begun=False)
        return self._set_entry(position, resume_point.step)

    @override
    def reenter(self) -> Position:
        engine, trained = self._engine, self._trained
        activity = "waiting for the other ranks to stop, outside a step"
        failure = engine.member.end_generation()
        engine.restart_if_left(failure)
        engine.member.activity = activity
        returned = engine.take_returned()
        is_in_body = returned is None and (trained.entry_position or trained.get_position()).after_commit
        description = self._capture_stop_state(returned)
        trained.restore_training_modes()
        group_health.detach()
        local = trained.local
        if engine.move():
            trained.local = None
        if engine.has_moved:
            self._context.build_groups(has_moved=True)
            trained.saving = self._context.saving_group
        self._attach(former=local)
        resume_point = engine.wait_for_peers(
            activity,
            lambda number: engine.member.publish_stop(
                number, in_step=False, trainer=description, part=REPEATED_BODY if is_in_body else 0
            ),
        )
        is_ours = returned is not None and resume_point.step == returned.step  # parts of it are rank-local
        position = Position.from_bytes(description if is_ours else resume_point.trainer)
        if not is_ours:
            position = replace(position, is_begun=trained.was_begun and not position.after_commit)
        if is_ours and position.local and trained.local is not None:
            trained.local.load(position.local, begins_epoch=False)
            position = replace(position, local={})
        elif not is_ours and not trained.undo_body(position, local):
            self._transaction.mark_state_lost("the body of the step wrote to parameters for the first time")
        return self._set_entry(position, resume_point.step)

    def _capture_stop_state(self, returned: Snapshot | None) -> bytes:
        transaction, trained = self._transaction, self._trained
        is_known = returned is not None or transaction.state_on_leaving_step is not None
        is_known = is_known or self._engine.member.has_torn_state
        if not is_known and trained.is_within_step and not trained.can_undo:
            transaction.mark_state_lost("the program has written to parameters for the first time")
        return self._engine.stop_state(
            trained, returned, is_within_step=trained.is_within_step, capture=trained.capture_state
        )

    def _set_entry(self, position: Position, step: int) -> Position:
        self._trained.entry_position, self._transaction.entered_at = position, step
        return position

    def _attach(self, *, former: LocalStates | None = None) -> None:
        """Create a transaction that begins outside a step; `former` are the rank-local states before a move."""
        context, trained = self._context, self._trained
        if trained.local is None:
            ranks = self._engine.former_ranks
            trained.local = LocalStates(context.topology, context.rank, former=former, former_ranks=ranks)
            if former is not None:
                trained.local.begun = former.begun
            buffers = BufferStates(trained.model)
            # The same on all ranks. A module of the program may register its first buffer in a step.
            if not (buffers.is_empty and trained.attributes.is_empty):
                trained.local.register(BUFFERS, buffers)
            if not trained.attributes.is_marked:
                trained.attributes.mark_own()
            if not trained.attributes.is_empty:
                trained.local.register(ATTRIBUTES, trained.attributes)
        for name, state in trained.rank_local.items():
            trained.local.register(rank_local_name(name), state)
        self._transaction = self._engine.attach(
            trained, trained.tensors, context.topology, device=context.device, snapshot_group=context.snapshot_group
        )

    def _repaired(self, _: Repair) -> None:
        self._trained.entry_position = None
