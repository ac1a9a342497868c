"""The life of a step and of a fault. This is the story; everything else in this folder is a word in it.

    compute -> vote -> commit                       the healthy step
    compute -> fault -> re-form -> restore -> retry  the same step, again

Inside a step the groups are tolerant (see `comm.breaker`): once one is broken, collectives do nothing, the rest of
the step runs on garbage, and no exception crosses autograd or a hook of FSDP2. The vote at the end, one small
all-reduce, completes only if every rank got that far with valid gradients. Only then does the optimizer write.
"""

import contextlib
import logging
import time
from collections.abc import Callable
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from hyperpod_plugins.comm import breaker, vote
from hyperpod_plugins.elastic.ledger import BEGUN_KEY
from hyperpod_plugins.errors import PeerLost, RecoveryError, StateLost
from hyperpod_plugins.observability import record
from hyperpod_plugins.parallel.topology import Topology
from hyperpod_plugins.recovery import returning
from hyperpod_plugins.recovery.assembly import Generation, NobodyCame, PeersOutside
from hyperpod_plugins.recovery.assign import (
    NO_STATE,
    Arrival,
    RecoveryPlan,
    newest_snapshot,
    plan_farewell,
    plan_recovery,
)
from hyperpod_plugins.recovery.attempts import Attempts
from hyperpod_plugins.recovery.ending import Ending
from hyperpod_plugins.recovery.gpu import GpuHangs, come_to_rest
from hyperpod_plugins.recovery.member import Member
from hyperpod_plugins.recovery.repair import Repair, RetryPolicy, Returned, Subject
from hyperpod_plugins.recovery.resharding import reshard_if_asked, start_again_without
from hyperpod_plugins.recovery.snapshot import Snapshots

log = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")


class StepTransaction:
    """Runs steps so that each is committed exactly once, whoever is lost in between."""

    def __init__(
        self,
        member: Member,
        subject: Subject,
        topology: Topology,
        *,
        policy: RetryPolicy,
        device: torch.device,
        on_repair: Callable[[Repair], None],
        snapshots: Snapshots | None = None,
    ) -> None:
        self._member = member
        self._subject = subject
        self._topology = topology
        self._policy = policy
        self._device = device
        self._on_repair = on_repair
        self._snapshots = snapshots
        self._ending = Ending(member, subject)
        self._prepared = NO_STATE
        self._has_begun = self._has_told = self._must_resize = False
        self._attempts = Attempts(policy, member.place)
        self._has_reentered = member.committed != NO_STATE
        self.left_with: bytes | None = None
        """What describes the trainer, where this rank gave up its place in a step, for others were outside of one."""
        self.entered_at: int | None = None
        """Step at which this rank entered the loops, until it is among the others."""
        self._passed_on = b""
        self.owes = ""
        """Path of a checkpoint of this step that was interrupted; it is written when all ranks are there again."""
        if member.committed == NO_STATE and not member.job.is_newcomer:
            member.committed = 0

    @property
    def step(self) -> int:
        """Number of the step that comes next, from 0: how many this rank has committed."""
        return max(self._member.committed, 0)

    def begin(self) -> None:
        """Begin a step whose `compute` comes in parts.

        A newcomer joins here, a fault between steps is repaired, and a world of another size takes over.
        """
        if self._must_resize and not breaker.is_open:
            self._make_way()
        if breaker.is_open:
            self._recover(None)
        if not self._has_told:
            self._member.ledger.put(BEGUN_KEY, b"1")
            self._has_told = True
        self._offer()
        self._subject.begin(self.step)
        self._has_begun = True

    def advance(self, part: Callable[[], object]) -> None:
        """Compute a part of the step before `run`; after a fault, all parts that came so far.

        Whoever accumulates gradients needs each part's result before it gives the next: this cannot wait for `run`.

        Args:
            part: computes what has been given so far and not computed, or not since the step was undone.

        Raises:
            RecoveryError: no rung of the ladder worked.
            Exception: `part` raised the same on this rank too often.
        """
        while True:
            _, error = (None, None) if breaker.cause else self._attempt(part)
            if error is None and breaker.cause is None:
                return
            self._recover(error, _commit_nothing)
            self._offer()

    def join(self) -> None:
        """Meet the others where no step begins, such as before a validation, if this rank is apart from them.

        Raises:
            PeerLost: it is not, and somebody was lost just now; the way back leads through the loops.
        """
        if not breaker.is_open:
            return
        if self._member.committed != NO_STATE and not self._has_reentered:
            raise PeerLost(f"a rank was lost outside of a step: {breaker.cause}")
        self._recover(None)

    def run(self, compute: Callable[[], T], commit: Callable[[T], R]) -> R:
        """One step: call `compute` until all ranks agree that it went well, then `commit` once with its result.

        Args:
            compute: forward, backward, clipping; may be called again, and must not change what `Subject` cannot undo.
            commit: the optimizer's step; local, and not to be interrupted.

        Raises:
            RecoveryError: no rung of the ladder worked.
            Exception: `compute` raised the same on this rank too often.
        """
        if not self._has_begun:
            self.begin()
        self._has_begun = False
        while True:
            result, error = (None, None) if breaker.cause else self._attempt(compute)
            if error is None and self._vote():
                return self._finish(lambda done=result: commit(done))  # type: ignore[misc]
            committed = self._recover(error, lambda done=result: commit(done))  # type: ignore[misc]
            if committed is not None:
                return committed[0]
            self._offer()

    def _offer(self) -> None:
        """Offer a snapshot, once in each generation: where a newcomer takes one, those that try again do so too."""
        if self._snapshots is not None:
            self._snapshots.offer(self.step, self._subject.describe)

    def _attempt(self, compute: Callable[[], T]) -> tuple[T | None, Exception | None]:
        """Compute in tolerant mode; an exception in healthy groups is this rank's own."""
        self._member.whereabouts, self._member.in_step = f"computing step {self.step}", True
        try:
            with breaker.tolerant():
                result = compute()
                self._synchronize()
        except GpuHangs:
            raise
        except Exception as error:
            is_own = breaker.cause is None
            if is_own:
                self._member.fail("exception", f"{type(error).__name__}: {error}".splitlines()[0])
            if not self._subject.can_undo_exceptions:
                raise  # this process ends, and another takes its place
            return None, error if is_own else None  # garbage does what garbage does
        return result, None

    def _vote(self) -> bool:
        """Whether every rank has valid gradients. From here on this rank can commit, if anybody else has."""
        self._member.whereabouts = f"voting for step {self.step}"
        if breaker.is_open:
            return False
        self._prepared = self.step + 1
        with breaker.tolerant():
            wish = vote(int(self._member.wants_resize))
        if breaker.cause is not None:
            return False
        self._must_resize = self._member.is_elastic and bool(wish)
        return True

    def _make_way(self) -> None:
        """End the generation for the sake of the next world, when all stand between the same two steps."""
        self._must_resize = False
        with contextlib.suppress(PeerLost):
            dist.all_reduce(torch.zeros(1, device=self._device))  # nobody is in the hooks of the step before any more
            self._synchronize()
            reshard_if_asked(self._member, self._ending, self.step)
            self._member.make_way()

    def _finish(self, commit: Callable[[], R]) -> R:
        """Let the optimizer write. Nothing may fail between its first write and the count."""
        self._member.whereabouts = f"committing step {self.step}"
        result = commit()
        self._synchronize()
        self._member.committed, self._prepared = self.step + 1, NO_STATE
        self._member.in_step = False
        self._member.step_times.committed(time.monotonic())
        self._attempts.succeeded()
        self._member.whereabouts = f"between steps {self.step - 1} and {self.step}"
        return result

    def _recover(self, error: Exception | None, commit: Callable[[], R] | None = None) -> tuple[R] | None:
        """Meet the others in the next generation, and come to one common step with them.

        A fault on the way begins this again, with whoever is left; nobody throws away what it holds.

        Args:
            error: what this rank's own `compute` raised.
            commit: the step that this rank computed; None between two steps.

        Returns:
            The result of `commit` if that step turned out to be committed elsewhere.
        """
        member = self._member
        outcome: tuple[R] | None = None
        must_undo = commit is not None
        if error is not None:
            self._attempts.failed()
        while True:
            began_s = time.time()
            incident = member.end_generation()
            ends = self._attempts.why_end(incident, error, self.step)
            if self._snapshots is not None:
                self._snapshots.settle()
            member.whereabouts = f"waiting for the members of the next generation, at step {self.step}"
            description = self._describe(is_in_commit=outcome is not None)
            arrival = Arrival(
                incarnation=member.job.incarnation,
                committed=member.committed,
                prepared=NO_STATE if commit is None else self._prepared,
                in_step=not self._has_reentered,
                snapshots=() if self._snapshots is None else self._snapshots.own_steps,
                ward_snapshots=() if self._snapshots is None else self._snapshots.ward_steps,
                ends=ends,
                owes=self.owes,
            )
            formed = self._join(arrival, description, error, commit)
            if formed is None:
                continue
            assembled_s = time.time()
            plan = self._plan(formed)
            self._check_entry(plan)
            incident = member.first_cause(incident, plan.sources)
            member.whereabouts = f"restoring step {plan.step}"
            if member.rank in plan.roll_forward:
                assert commit is not None
                self._passed_on = self._description_of(formed, plan.step)
                outcome, commit, must_undo = (self._finish(commit),), None, False
            elif must_undo:
                self._subject.undo()
            try:
                self._restore(plan, formed)
                self._settle(plan, ends, error)
            except PeerLost:
                continue
            break
        member.committed, self._prepared, self._has_reentered, self.owes = plan.step, NO_STATE, False, ""
        self.entered_at, self._passed_on = None, b""
        repair = Repair(
            incident=incident,
            step=plan.step,
            generation=formed.number,
            rung=plan.rung,
            newcomers=tuple(plan.sources),
            rolled_forward=outcome is not None,
            noticed_s=max(0.0, began_s - incident.at_s),
            assembled_s=assembled_s - began_s,
            restored_s=time.time() - assembled_s,
            steps_lost=plan.steps_lost,
        )
        record(repair.event())
        self._on_repair(repair)
        if plan.is_return:
            assert self._snapshots is not None
            returning.end_generation(plan, self._snapshots, member, self._policy.max_losses)
            raise Returned(plan)
        return outcome

    def _join(
        self, arrival: Arrival, description: bytes, error: Exception | None, commit: Callable[[], R] | None
    ) -> Generation | None:
        """Come into the next generation; None where that ended while this rank was to leave its step for it."""
        try:
            return self._member.join_next(arrival, lambda number: self._tell(number, description))
        except PeersOutside as outside:
            if self._leave_step(outside, commit, description):
                raise
            return None
        except NobodyCame as late:
            self._part(late, error, commit)

    def _restore(self, plan: RecoveryPlan, formed: Generation) -> None:
        """Bring this rank to the plan's step. A `PeerLost` leaves it where it was."""
        snapshots = self._snapshots
        self._subject.end_iteration()
        if not plan.is_return:
            self._subject.restore(plan, self._member.rank)
        # Nobody goes on before all have their state. Those that wait here are outside of a step, where waits are long.
        dist.all_reduce(torch.zeros(1, device=self._device))
        self._synchronize()
        if breaker.cause is not None:
            raise PeerLost(breaker.cause)
        if snapshots is None:
            return
        snapshots.keep(newest_snapshot(formed.arrivals, self._topology))
        if plan.is_return:
            returning.take_back(plan, snapshots, self._member, formed.number)

    def _describe(self, *, is_in_commit: bool) -> bytes:
        """What a newcomer needs to know of the trainer; within a commit, what one said that had it behind it."""
        if is_in_commit:
            return self._passed_on
        return self._subject.describe() if self._member.committed != NO_STATE else b""

    def _description_of(self, formed: Generation, step: int) -> bytes:
        """What a member that had committed `step` steps when it arrived has said of its trainer."""
        ranks = [rank for rank, arrival in sorted(formed.arrivals.items()) if arrival.committed == step]
        return next(filter(None, (self._member.said(formed.number, rank) for rank in ranks)), b"")

    def _check_entry(self, plan: RecoveryPlan) -> None:
        """The loops were entered where one member stood; it may have been lost since, and its last step with it."""
        entered_at, self.entered_at = self.entered_at, None
        if plan.is_return or entered_at in (None, plan.step):
            return
        cause = f"rank {self._member.rank} entered the loops at step {entered_at}, and the others are at {plan.step}"
        self._member.fail("collective", cause)
        if self._member.committed == NO_STATE:
            raise RecoveryError(f"{cause}; its replacement enters them there")
        raise PeerLost(cause)

    def _tell(self, number: int, description: bytes) -> None:
        # Of those without a description, too: a newcomer waits for the word of everybody who is not new.
        self._member.stop(number, in_step=not self._has_reentered, trainer=description)

    def _leave_step(self, outside: PeersOutside, commit: Callable[[], object] | None, description: bytes) -> bool:
        """Commit what others have committed, before this rank enters the loops again.

        False where the generation ended before all had stopped: perhaps nobody is outside of a step in the next one.
        """
        try:
            halt = self._member.wait_for_stops(outside.number)
        except PeerLost:
            return False
        self.left_with = description
        if commit is not None and halt.step == self._prepared:
            self._finish(commit)
            self.left_with = halt.trainer
        elif commit is not None:
            self._subject.undo()
        return True

    def _plan(self, formed: Generation) -> RecoveryPlan:
        try:
            return plan_recovery(formed.arrivals, self._topology)
        except StateLost as lost:
            self._member.begin_again(lost)

    def _part(self, late: NobodyCame, error: Exception | None, commit: Callable[[], R] | None) -> NoReturn:
        """End, since nobody comes for those that are lost; those that are left have their common step before."""
        plan = plan_farewell(late.formed.arrivals, self._topology)
        if self._member.rank in plan.roll_forward:
            assert commit is not None
            self._finish(commit)
        elif commit is not None:
            self._subject.undo()
        if late.starts_again:
            start_again_without(late, plan, self._member, self._ending, self._topology, self._snapshots)
        self._ending.part(late, plan, error)

    def _settle(self, plan: RecoveryPlan, ends: str, error: Exception | None) -> None:
        """Write the checkpoint that was interrupted, and end where the job must not go on."""
        if plan.owes and not plan.is_return:
            self._ending.save(plan.step, plan.owes)
        if plan.ends:
            self._ending.end(plan, ends, error)

    def _synchronize(self) -> None:
        come_to_rest(self._device)


def _commit_nothing() -> NoReturn:
    raise RecoveryError("a step was to be committed for which this rank has not voted; please report this")
