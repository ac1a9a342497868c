"""The step as a transaction: compute, vote and commit, and recovery when a fault interrupts it. Read this file first.

    compute -> vote -> commit                            a healthy step
    compute -> fault -> reconfigure -> restore -> retry  the same step, run again

Inside a step the groups are tolerant (see `comm.health`): once one is broken, collectives do nothing, the rest of
the step computes garbage values, and no exception propagates through autograd or an FSDP2 hook. The vote at the end
of the step, a small all-reduce, completes only if every rank has reached it with valid gradients. Only then does
the optimizer write.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Container
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, NoReturn, TypeVar

import torch
import torch.distributed as dist

from hyperpod_plugins.comm import break_groups, commit_vote, group_health
from hyperpod_plugins.comm.runtime import RECORDERS
from hyperpod_plugins.elastic import FailureRecord
from hyperpod_plugins.elastic.store.entry_records import ended_entries
from hyperpod_plugins.elastic.store.job_store import BEGUN_KEY
from hyperpod_plugins.errors import ConfigError, DeviceHung, HyperPodError, PeerLost, RecoveryError, StateLost
from hyperpod_plugins.events import record
from hyperpod_plugins.ledger import TimeCategory, ledger
from hyperpod_plugins.parallel.topology import Topology
from hyperpod_plugins.recovery.member import Member
from hyperpod_plugins.recovery.plan import (
    NO_STATE,
    Arrival,
    RecoveryPlan,
    newest_restorable_step,
    plan_final_save,
    plan_recovery,
)
from hyperpod_plugins.recovery.protocols import (
    Attempts,
    Repair,
    RetryPolicy,
    ReturnedToSnapshot,
    StepFailed,
    TrainingLoop,
    cause_of_return,
)
from hyperpod_plugins.recovery.quorum import FormedGeneration, MustReenterLoop, ReplacementTimeout
from hyperpod_plugins.recovery.rehearsal import Rehearsal
from hyperpod_plugins.recovery.replica_comparison import ReplicaComparison
from hyperpod_plugins.recovery.restart_all import check_no_newer_checkpoint
from hyperpod_plugins.recovery.shutdown import JobShutdown, reshard_if_asked, restart_without_missing
from hyperpod_plugins.recovery.snapshot import Snapshots
from hyperpod_plugins.recovery.watchdog import synchronize_or_raise

log = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")
_DIFFERS, _WANTS_RESIZE = 1, 2
"""Flags of a vote: the rank-local state may differ from that of the source rank; the job is to change its size."""


@dataclass(frozen=True, slots=True)
class Pending(Generic[R]):
    """A step that has been computed, or interrupted, and is now to be committed or undone."""

    commit: Callable[[], R]
    """Commits the computed step; raises if it was interrupted."""
    error: Exception | None = None
    """Raised by this rank's own `compute`."""


@dataclass(frozen=True, slots=True)
class Committed(Generic[R]):
    """Another rank had committed the step, so this rank has committed it during recovery."""

    value: R
    """Result of `Pending.commit`."""


@dataclass(frozen=True, slots=True)
class Retry:
    """All ranks are at the beginning of one step, which none has committed yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """What interrupted a generation, as seen from this rank."""

    failure: FailureRecord
    began_s: float
    """When this rank stopped for it, by its wall clock."""
    abort_reason: str
    """Why the job must end instead of trying the step again; may be empty."""
    error: Exception | None
    """Raised by this rank's own `compute`."""


class StepTransaction:
    """Runs steps so that each is committed exactly once, even if ranks are lost meanwhile.

    Call it from the main thread only.
    """

    def __init__(
        self,
        member: Member,
        training_loop: TrainingLoop,
        topology: Topology,
        *,
        policy: RetryPolicy,
        device: torch.device,
        on_repair: Callable[[Repair], None],
        snapshots: Snapshots | None = None,
        rehearsal: Rehearsal | None = None,
        comparison: ReplicaComparison | None = None,
    ) -> None:
        self._rehearsal = rehearsal
        self._comparison = comparison
        self._member = member
        self._training_loop = training_loop
        self._topology = topology
        self._policy = policy
        self._device = device
        self._on_repair = on_repair
        self._snapshots = snapshots
        self._shutdown = JobShutdown(member, training_loop)
        self._voted_step = NO_STATE
        self._committing: int | None = None
        """Step whose commit is in progress, while this rank counts as one without a state."""
        self._has_begun = self._has_reported_begin = self._must_resize = self._has_joined_step = False
        self._attempts = Attempts(policy, member.worker_id)
        self._has_reentered = member.committed != NO_STATE
        self.state_on_leaving_step: bytes | None = None
        """Trainer state captured in the step, if this rank left its step because other ranks were outside one."""
        self.entered_at: int | None = None
        """Step at which this rank entered the loops; None once it has joined the other ranks."""
        self.entered_part: int | None = None
        """Part of the program at which this rank entered the loops; see `StopReport.part`."""
        if member.committed == NO_STATE and not (member.is_joining or member.has_torn_state):
            member.committed = 0

    @property
    def step(self) -> int:
        """Number of the present or next step, from 0: until its commit ends, the number of steps committed before."""
        return max(self._member.committed, 0) if self._committing is None else self._committing

    def begin(self) -> None:
        """Begin a step whose `compute` is split into parts.

        This is where a joiner joins, a fault between steps is repaired, and a world of another size takes over.
        """
        if self._rehearsal is not None and not self._has_reported_begin:
            self._rehearsal.at("setup", self.step)
        if self._snapshots is not None:
            self._snapshots.load_again(self.step)
        if self._must_resize and not group_health.is_unavailable:
            self._yield_to_next_world()
        has_recovered, self._has_joined_step = self._has_joined_step or group_health.is_unavailable, False
        if group_health.is_unavailable:
            self._recover()
        if not self._has_reported_begin:
            self._member.job_store.set(BEGUN_KEY, b"1")
            self._has_reported_begin = True
            self._note_world()
        if self._rehearsal is not None:
            self._begin_rehearsal(self._rehearsal, is_compared=not has_recovered)
        if self._comparison is not None:
            self._comparison.begin(self.step)
        self._maybe_snapshot()
        self._training_loop.begin(self.step)
        if self._rehearsal is not None:
            self._rehearsal.before_compute(self.step)
        self._has_begun = True
        ledger.enter(TimeCategory.STEP)

    def compute_part(self, part: Callable[[], object]) -> None:
        """Compute a part of the step before `run`; after a fault, compute all parts so far again.

        For gradient accumulation, where the loop needs the result of each micro-step before it provides the next.

        Args:
            part: Computes whatever was provided but not yet computed, or not yet since the step was undone.

        Raises:
            RecoveryError: No recovery level worked.
            Exception: `part` raised too often on this rank.
        """
        while True:
            pending = self._attempt(part, _commit_nothing)
            if pending.error is None and group_health.cause is None:
                return
            self._recover(pending)
            self._restart_step()

    def join(self) -> None:
        """Join the other ranks outside a step, such as before a validation, if this rank has not joined them yet.

        Raises:
            PeerLost: This rank had joined already, and a rank was lost just now. Re-enter the loops to recover.
        """
        if not group_health.is_unavailable:
            return
        if self._member.committed != NO_STATE and not self._has_reentered:
            raise PeerLost(f"a rank was lost outside a step: {group_health.cause}")
        self._recover()

    def join_step(self) -> None:
        """In a process without a state, join the other ranks before it begins the step in which they are."""
        if group_health.is_unavailable and self._member.committed == NO_STATE:
            self._recover()
            self._has_joined_step = True

    def barrier(self) -> None:
        """Wait outside a step until all ranks have called this: a barrier.

        Raises:
            PeerLost: A rank was lost before or in the barrier. Other ranks may have passed it.
        """
        if group_health.is_unavailable:
            self.join()  # safe: this rank has not communicated since it entered the loops
        where = f"between steps {self.step - 1} and {self.step}" if self.step > 0 else "before the first step"
        self._member.activity = f"waiting for the other ranks {where}"
        with group_health.tolerate_breaks():
            commit_vote(0)
        if group_health.cause is not None:
            raise PeerLost(f"a rank was lost outside a step: {group_health.cause}")

    def run(self, compute: Callable[[], T], commit: Callable[[T], R]) -> R:
        """Run one step: call `compute` until all ranks vote for its result, then call `commit` once with it.

        Args:
            compute: Forward, backward and clipping; may be called again. If it changes anything that the
                `TrainingLoop` cannot undo, a fault makes this rank's state count as lost.
            commit: The optimizer step; it must not communicate. An optimizer that communicates must step in
                `compute`; see `recovery.optimizer_copy`.

        Returns:
            The result of `commit`.

        Raises:
            RecoveryError: No recovery level worked.
            ReplicasDiffer: Replicas of a shard differ.
            Exception: `compute` raised too often on this rank.
        """
        if not self._has_begun:
            self.begin()
        self._has_begun = False
        while True:
            pending = self._attempt(compute, commit)
            if pending.error is None and group_health.cause is None and self._comparison is not None:
                self._comparison.compare(self.step)
            if pending.error is None and group_health.cause is None and self._rehearsal is not None:
                pending = self._rehearse(self._rehearsal, compute, commit, pending)
            if pending.error is None and self._vote():
                return self._finish(pending)
            outcome = self._recover(pending)
            if isinstance(outcome, Committed):
                return outcome.value
            self._restart_step()

    def _restart_step(self) -> None:
        """Prepare to compute the step again after it was undone."""
        if self._rehearsal is not None:
            self._rehearsal.after_undo(self.step)
        self._maybe_snapshot()

    def _maybe_snapshot(self) -> None:
        """Take a snapshot if one is due; on a retry too, so that survivors take one wherever a joiner does."""
        if self._snapshots is not None:
            self._snapshots.maybe_snapshot(self.step, self._training_loop.capture_own_state)

    def _attempt(self, compute: Callable[[], T], commit: Callable[[T], R]) -> Pending[R]:
        """Compute in tolerant mode. An exception while the groups are healthy is this rank's own."""
        if group_health.cause is not None:
            return Pending(_commit_nothing)
        self._member.note(activity=f"computing step {self.step}", in_step=True)
        try:
            with group_health.tolerate_breaks(), self._computing():
                result = compute()
                self._synchronize()
        except DeviceHung:
            raise
        except Exception as error:
            is_own = group_health.cause is None
            if is_own:
                self._member.fail("exception", f"{type(error).__name__}: {error}".splitlines()[0])
            if not self._training_loop.can_undo_exceptions:
                if isinstance(error, HyperPodError):
                    raise  # it would be raised again
                raise self._failure(error, is_own=is_own) from error
            # After a break, errors caused by garbage values are expected.
            return Pending(_commit_nothing, error if is_own else None)
        return Pending(partial(commit, result))

    def _failure(self, error: Exception, *, is_own: bool) -> RecoveryError:
        """Return the error that ends this process, because it cannot run the step again."""
        what = f"step {self.step} raised {type(error).__name__}: {error}"
        why = "FSDP2 in this version of torch cannot reset its modules after an exception (torch 2.13 can)"
        if is_own:
            return StepFailed(f"{what}. This process exits and will be replaced: {why}.")
        return RecoveryError(f"{what}, after peers were lost ({group_health.cause}). This process exits: {why}.")

    def _begin_rehearsal(self, rehearsal: Rehearsal, *, is_compared: bool) -> None:
        """Compare the state at the start of a step between ranks, except after a fault: some are in the step then."""
        while True:
            try:
                rehearsal.begin(self.step, is_compared=is_compared)
            except PeerLost:
                self._recover()
                is_compared = False
            else:
                return

    def _rehearse(
        self, rehearsal: Rehearsal, compute: Callable[[], T], commit: Callable[[T], R], pending: Pending[R]
    ) -> Pending[R]:
        """Discard the step and compute it again, if it is one of the rehearsed steps."""

        def again() -> bool:
            nonlocal pending
            self._training_loop.undo_step()
            self._training_loop.end_iteration()
            rehearsal.after_undo(self.step, is_compared=True)
            pending = self._attempt(compute, commit)
            return pending.error is None and group_health.cause is None

        try:
            rehearsal.after_compute(self.step, again)
        except PeerLost:
            return Pending(_commit_nothing)  # the vote fails, and the step is undone like any other
        return pending

    def _vote(self) -> bool:
        """Vote; return whether the vote completed, and so whether every rank has valid gradients.

        From here on, this rank can commit the step if another rank has committed it.
        """
        step = self.step
        self._member.activity = f"voting for step {step}"
        if self._rehearsal is not None:
            self._rehearsal.at("vote", step)
        if group_health.is_unavailable:
            return False
        if self._snapshots is not None:
            self._snapshots.wait_before_commit()
            if group_health.is_unavailable:
                return False
        try:
            may_differ = self._training_loop.share_rank_local_state(step + 1)
        except PeerLost:
            return False
        except ConfigError as error:  # the same on all ranks, and in each attempt
            self._member.give_up(str(error))
            raise
        self._voted_step = step + 1
        mine = _WANTS_RESIZE * self._member.wants_resize | _DIFFERS * may_differ
        with group_health.tolerate_breaks():
            flags = commit_vote(mine, self._on_vote_passed)
        if flags is None:
            return False
        self._training_loop.note_equal_local_state(step + 1, is_equal=not flags & _DIFFERS)
        self._must_resize = self._member.is_elastic and bool(flags & _WANTS_RESIZE)
        return True

    def _on_vote_passed(self) -> None:
        """Called once another rank knows that the vote passed."""
        if self._rehearsal is not None:
            self._rehearsal.at("vote_result", self.step)

    def _yield_to_next_world(self) -> None:
        """End the generation so that the next world takes over, with all ranks between the same two steps."""
        self._must_resize = False
        with contextlib.suppress(PeerLost):
            dist.all_reduce(torch.zeros(1, device=self._device))  # all ranks have left the hooks of the previous step
            self._synchronize()
            reshard_if_asked(self._member, self._shutdown, self.step)
            self._member.yield_to_next_world()

    def _finish(self, pending: Pending[R]) -> R:
        """Commit the step: let the optimizer write, then count it. In between, this rank has no state.

        Raises:
            PeerLost: `pending.commit` communicated, although it must not, and a rank was lost meanwhile.
            StepFailed: `pending.commit` raised.
        """
        member, step = self._member, self.step
        if self._rehearsal is not None:
            self._rehearsal.at("commit", step)
        self._discard_state(activity=f"committing step {step}")
        self._committing = step
        try:
            result = pending.commit()
            self._synchronize()
        except PeerLost as error:
            raise self._state_lost(step, f"its optimizer was interrupted: {error}") from error
        except BaseException as error:
            lost = self._state_lost(step, f"its commit raised {type(error).__name__}: {error}".splitlines()[0])
            member.fail("exception", str(lost))  # without connections, no checkpoint of this state can be written
            if isinstance(error, HyperPodError) or not isinstance(error, Exception):
                raise  # it would be raised again, or ends the process in any case
            raise StepFailed(f"{lost} This process exits and will be replaced.") from error
        finally:
            self._committing = None
        member.note(committed=step + 1, in_step=False, activity=f"between steps {step} and {step + 1}")
        member.has_torn_state = False
        if self._snapshots is not None:
            self._snapshots.record_committed(step + 1)
        member.step_times.record_commit(time.monotonic())
        self._attempts.succeeded()
        ledger.commit(step + 1)
        return result

    def _discard_state(self, **status: str) -> None:
        """From here on, this rank holds no state that may be sent, saved or continued from; `status`: see `Member`."""
        self._member.note(committed=NO_STATE, **status)
        self._member.has_torn_state, self._voted_step = True, NO_STATE

    def mark_state_lost(self, why: str) -> PeerLost:
        """Mark this rank's state as lost, since it is inconsistent and must not be sent to other ranks."""
        return self._state_lost(self.step, why)

    def _state_lost(self, step: int, why: str) -> PeerLost:
        cause = f"rank {self._member.rank} holds only part of step {step}: {why}"
        log.warning("%s", cause)
        self._discard_state()
        return PeerLost(f"{cause}. Another rank's state takes its place.")

    def _mark_not_undoable(self) -> PeerLost:
        return self.mark_state_lost(
            "it cannot be undone, because the program wrote to parameters for the first time or communicates between "
            "micro-steps"
        )

    @property
    def _has_voted(self) -> bool:
        """Whether this rank has voted for its present step: it can commit it if another rank has."""
        return self._voted_step == self.step + 1

    def _recover(self, pending: Pending[R] | None = None) -> Committed[R] | Retry:
        """Join the next generation, and reach one common step with its members.

        A fault during recovery restarts it with the remaining ranks; no rank discards state that it holds. A rank
        that committed the step during recovery first returns to run what follows the step (hooks), as the other ranks
        have already done.

        Args:
            pending: The interrupted step; None between two steps.
        """
        error, is_in_step = None if pending is None else pending.error, pending is not None
        if error is not None:
            self._attempts.failed()
        if pending is not None and not self._training_loop.can_undo and not self._has_voted:
            raise error or self._mark_not_undoable()
        while True:
            fault = self._end_generation(error)
            formed = self._join(fault, pending)
            if formed is None:
                continue
            if isinstance(formed, Committed):
                return formed
            assembled_s = time.time()
            plan = self._decide(formed)
            fault = replace(fault, failure=self._member.root_cause(fault.failure, plan.senders))
            outcome = self._apply(plan, formed, pending)
            pending = None  # committed or undone, whatever comes next
            try:
                self._restore(plan, formed)
                self._save_or_end(plan, fault)
            except PeerLost:
                if isinstance(outcome, Committed):
                    return outcome
                continue
            self._complete(plan, formed, fault, assembled_s, rolled_forward=isinstance(outcome, Committed))
            ledger.enter(TimeCategory.STEP if is_in_step and isinstance(outcome, Retry) else TimeCategory.OTHER)
            return outcome

    def _end_generation(self, error: Exception | None) -> Interruption:
        """End the present generation, and decide whether this rank may try the step again."""
        failure = self._member.end_generation()
        ends = self._attempts.abort_reason(failure, error, self.step)
        return Interruption(failure=failure, began_s=self._member.stopped_s, abort_reason=ends, error=error)

    def _join(self, fault: Interruption, pending: Pending[R] | None) -> FormedGeneration | Committed[R] | None:
        """Join the next generation; None if it ended while this rank was about to leave its step for it.

        If the other ranks have committed the step and are outside one, this rank commits it too and gets the result:
        it must run what follows the step (hooks) before it is outside a step as well.
        """
        if self._snapshots is not None:
            self._member.activity = "waiting for a snapshot exchange to end"
            self._snapshots.wait()
        self._member.activity = f"waiting for the members of the next generation, at step {self.step}"
        arrival = self._arrival(fault, pending)
        description = self._training_loop.capture_state() if arrival.has_state else b""
        try:
            return self._member.join_next(
                arrival, lambda number: self._publish_stop_report(number, arrival.committed, description)
            )
        except MustReenterLoop as outside:
            try:
                resume_point = self._member.wait_for_stops(outside.number)
            except PeerLost:
                return None  # in the next generation, perhaps all ranks are inside a step
            if pending is not None and resume_point.step == self._voted_step:
                return Committed(self._finish(pending))
            if pending is not None:
                self._undo()
            self.state_on_leaving_step = description
            raise
        except ReplacementTimeout as late:
            final = plan_final_save(late.formed.arrivals, self._topology)
            with contextlib.suppress(PeerLost):  # this rank's state is lost
                self._commit_or_undo(final.roll_forward, pending)
            if self._member.has_torn_state:
                final = replace(final, savers=tuple(each for each in final.savers if each != self._member.rank))
            if late.restarts_all:
                restart_without_missing(late, final, self._member, self._shutdown, self._topology, self._snapshots)
            self._shutdown.end_without_missing(late, final, fault.error)

    def _arrival(self, fault: Interruption, pending: Pending[R] | None) -> Arrival:
        """Build this rank's arrival for the next generation."""
        snapshots, local = self._snapshots, self._training_loop.rank_local_states
        has_state = pending is None or self._training_loop.can_undo  # else only if the step was committed
        return Arrival(
            incarnation=self._member.job.incarnation,
            committed=self._member.committed if has_state else NO_STATE,
            voted_step=NO_STATE if pending is None else self._voted_step,
            in_step=not self._has_reentered,
            entered_part=self.entered_part,
            snapshots=() if snapshots is None else snapshots.own_steps,
            source_snapshots=() if snapshots is None else snapshots.source_steps,
            last_committed=NO_STATE if snapshots is None else snapshots.last_committed,
            rank_local_steps=self._training_loop.local_steps,
            unshared_ranks=() if local is None else local.unshared_ranks,
            equal_local_step=self._training_loop.equal_local_step,
            needs_rank_local_state=self._policy.needs_rank_local_state,
            abort_reason=fault.abort_reason,
            pending_saves=self._training_loop.pending_saves,
        )

    def _publish_stop_report(self, number: int, committed: int, description: bytes) -> None:
        # Report even without a description: joiners wait for a report from every survivor.
        self._member.publish_stop(
            number,
            in_step=not self._has_reentered,
            trainer=description,
            part=self.entered_part or 0,
            committed=committed,
        )

    def _decide(self, formed: FormedGeneration) -> RecoveryPlan:
        """Plan the recovery; every member of the generation decides the same."""
        try:
            plan = plan_recovery(formed.arrivals, self._topology)
            if plan.is_return and not any(each.has_state for each in formed.arrivals.values()):
                check_no_newer_checkpoint(plan.step, self._member.job_store)
            return plan
        except StateLost as lost:
            self._member.restart_all(lost)

    def _apply(self, plan: RecoveryPlan, formed: FormedGeneration, pending: Pending[R] | None) -> Committed[R] | Retry:
        """Commit the computed step or undo it, as the plan says."""
        if not plan.hooks_first:
            self._check_entry(plan, formed)
        self._member.activity = f"restoring step {plan.step}"
        if ledger.category is not TimeCategory.RESIZE:
            ledger.enter(TimeCategory.RESTORE)
        return self._commit_or_undo(plan.roll_forward, pending)

    def _commit_or_undo(self, roll_forward: Container[int], pending: Pending[R] | None) -> Committed[R] | Retry:
        if self._member.rank in roll_forward:
            assert pending is not None
            return Committed(self._finish(pending))
        if pending is not None:
            self._undo()
        return Retry()

    def _undo(self) -> None:
        """Undo the step.

        Raises:
            PeerLost: It cannot be undone; this rank's state is lost.
        """
        if not self._training_loop.can_undo:
            raise self._mark_not_undoable()
        self._voted_step = NO_STATE
        self._training_loop.undo_step()

    def _check_entry(self, plan: RecoveryPlan, formed: FormedGeneration) -> None:
        """Check that this rank entered the loops where the plan resumes.

        It entered where one survivor stood. That survivor may have been lost since, along with its progress, and
        ranks that asked later may have been given another resume point.

        Raises:
            PeerLost: It entered at another step or an earlier part of the program, and must re-enter the loops.
            RecoveryError: The same, but this rank has no state; its replacement enters at the right place.
        """
        entered_at, self.entered_at = self.entered_at, None
        parts = [each.entered_part for each in formed.arrivals.values() if each.entered_part is not None]
        is_behind = self.entered_part is not None and self.entered_part < max(parts)
        if plan.is_return or (entered_at in (None, plan.step) and not is_behind):
            return
        cause = (
            f"rank {self._member.rank} entered the loops at step {entered_at}, but the other ranks are at {plan.step}"
        )
        if is_behind:
            cause += ", in a later part of the program"
        self._member.fail("collective", cause)
        if self._member.committed == NO_STATE:
            raise RecoveryError(f"{cause}; its replacement will enter them there")
        raise PeerLost(cause)

    def _restore(self, plan: RecoveryPlan, formed: FormedGeneration) -> None:
        """Bring this rank to the plan's step. On `PeerLost`, its state is unchanged."""
        if plan.hooks_first:
            cause = f"ranks {list(plan.roll_forward)} are running the hooks of the step they have just committed"
            wish = FailureRecord(kind="request", cause=cause, step=plan.step, reporter=f"rank {self._member.rank}")
            self._member.job_store.end(formed.number, wish)
            break_groups(str(wish))
            raise PeerLost(cause)
        snapshots = self._snapshots
        if plan.is_return and snapshots is not None and not snapshots.is_intact(plan.step):
            cause = f"the snapshots of step {plan.step} in the memory of rank {self._member.rank} are damaged"
            self._member.fail("collective", cause)
            raise PeerLost(cause)
        self._training_loop.end_iteration()
        if not plan.is_return:
            try:
                self._training_loop.restore(plan, self._member.rank)
            except StateLost as lost:
                self._member.restart_all(lost)
        # A barrier: no rank continues before all have their state. Ranks wait here outside a step: limits are long.
        dist.all_reduce(torch.zeros(1, device=self._device))
        self._synchronize()
        if group_health.cause is not None:
            raise PeerLost(group_health.cause)
        if snapshots is None:
            return
        snapshots.resume_at(newest_restorable_step(formed.arrivals, self._topology))
        if plan.is_return:
            try:
                return_to_snapshot(plan, snapshots, self._member, formed.number)
            except StateLost as lost:
                self._member.restart_all(lost)

    def _save_or_end(self, plan: RecoveryPlan, fault: Interruption) -> None:
        """Make the saves that were interrupted, if any, and end if the job must not continue."""
        if plan.pending_saves and not plan.is_return:
            self._shutdown.finish_saves(plan)
        if plan.abort_reason:
            self._shutdown.end_job(plan, fault.abort_reason, fault.error)

    def _complete(
        self,
        plan: RecoveryPlan,
        formed: FormedGeneration,
        fault: Interruption,
        assembled_s: float,
        *,
        rolled_forward: bool,
    ) -> None:
        """Note that all ranks are at the plan's step, and report the repair.

        Raises:
            ReturnedToSnapshot: They are at an earlier step, where all re-enter the loops.
        """
        self._member.committed, self._member.has_torn_state = plan.step, False
        if self._snapshots is not None:
            self._snapshots.record_committed(plan.step)
        self._has_reentered = self._must_resize = False
        self.entered_at = self.entered_part = None
        repair = Repair(
            failure=fault.failure,
            step=plan.step,
            generation=formed.number,
            level=plan.level,
            receivers=tuple(plan.senders),
            rolled_forward=rolled_forward,
            noticed_s=max(0.0, fault.began_s - fault.failure.at_s),
            quorum_s=assembled_s - fault.began_s,
            restored_s=time.time() - assembled_s,
            steps_lost=plan.steps_lost,
        )
        record(repair.event())
        self._note_world()
        self._on_repair(repair)
        if plan.is_return:
            end_generation_for_return(plan, self._member, self._policy.max_losses)
            raise ReturnedToSnapshot(plan)

    def _note_world(self) -> None:
        """Tell the ledger which rank this is now, and of how many."""
        if not ledger.is_active:
            return
        member, topology = self._member, self._topology
        ledger.note_world(
            rank=member.rank,
            world_size=member.world.size,
            replicas=topology.replicate_degree,
            generation=member.generation,
        )

    def _computing(self) -> AbstractContextManager[None]:
        return nullcontext() if self._rehearsal is None else self._rehearsal.computing(self.step)

    def _synchronize(self) -> None:
        if self._device.type in RECORDERS:  # a device without a queue is done when the host is
            synchronize_or_raise(self._device)


def _commit_nothing(*_: object) -> NoReturn:
    raise RecoveryError("recovery tried to commit a step that this rank did not vote for; please report this")


def return_to_snapshot(plan: RecoveryPlan, snapshots: Snapshots, member: Member, generation: int) -> None:
    """Redistribute the snapshots so that each rank has its own, and load it.

    Raises:
        PeerLost: A rank was lost before all ranks had their snapshots.
        ModelsDiffer: The snapshot is of another model than this process has.
    """
    try:
        snapshots.redistribute(plan.step, plan.senders)
    except PeerLost:
        # A rank that ends the generation for this return knows that all ranks have their snapshots.
        ended = member.job_store.ended(generation)
        if ended is None or ended.cause != cause_of_return(plan.step):
            raise
    snapshots.load(plan.step)


def end_generation_for_return(plan: RecoveryPlan, member: Member, max_losses: int) -> None:
    """End the generation so that all ranks re-enter the loops.

    Raises:
        RecoveryError: The same state was lost `max_losses` times; returning again would not help.
    """
    # All ranks count together, in the job store, because after each return all processes may be new. The key includes
    # the entry, because a program with several fits reaches the same step number in each. A return from an unknown
    # step is none from the step of its snapshot.
    number, is_known = len(ended_entries(member.job_store)), plan.steps_lost is not None
    lost_at = plan.step + (plan.steps_lost or 0)
    place = str(lost_at) if is_known else f"unknown/{plan.step}"
    if member.job_store.count(f"returns/{number}/{place}", 1) >= max_losses * member.world.size:
        what = f"the state after step {lost_at}" if is_known else f"the state of a step after {plan.step}"
        cause = f"{what} was lost {max_losses} times"
        member.give_up(cause)
        raise RecoveryError(f"{cause}. Check the logs of the lost ranks; the step itself may be killing them.")
    wish = FailureRecord(
        kind="request", cause=cause_of_return(plan.step), step=plan.step, reporter=f"rank {member.rank}"
    )
    member.job_store.end(member.generation, wish)
