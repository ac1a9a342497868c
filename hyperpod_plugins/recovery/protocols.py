"""Interfaces and records of `step.py`: the training loop, the retry policy, the report of a repair, and errors."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch.distributed.checkpoint.stateful import Stateful

from hyperpod_plugins.elastic import FailureRecord
from hyperpod_plugins.errors import ConfigError, PeerLost, RecoveryError
from hyperpod_plugins.events import Event
from hyperpod_plugins.recovery.local_state import LocalStates
from hyperpod_plugins.recovery.plan import RecoveryLevel, RecoveryPlan
from hyperpod_plugins.recovery.snapshot import Snapshot

SAVING_GROUP = "checkpoint"
"""Name of the key of the group that is used to write checkpoints."""
RESHARD = "hyperpod:reshard"
"""Stands for the path of a checkpoint from which all processes restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """When to stop retrying a step."""

    max_attempts: int = 3
    """Attempts at one step that may end with the same rank's exception before it counts as a bug in the program."""
    max_losses: int = 8
    """Times that the same worker may be lost in one step before it counts as a bug in the program."""
    needs_rank_local_state: bool = True
    """Whether to return to a checkpoint, rather than use a replica's, if a lost rank's rank-local state is gone."""

    def __post_init__(self) -> None:
        """Check the values."""
        for name, value in (("max_attempts", self.max_attempts), ("max_losses", self.max_losses)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, but is {value}")


class Attempts:
    """Counts the failures that this process has seen since the last commit.

    If the same step keeps failing, the fault is the program's, not the machine's, and the job ends.
    """

    def __init__(self, policy: RetryPolicy, worker_id: int) -> None:
        self._policy = policy
        self._own = ("exception", worker_id)
        self._failures: Counter[tuple[str, int]] = Counter()

    def failed(self) -> None:
        """Count an exception from this process's own `compute`."""
        self._failures[self._own] += 1

    def succeeded(self) -> None:
        """Reset the counts after a commit."""
        self._failures.clear()

    def abort_reason(self, failure: FailureRecord, error: Exception | None, step: int) -> str:
        """Count the failure that ended a generation, and return why the job must end, or an empty string.

        Args:
            failure: What ended the generation.
            error: Exception raised by this process's own `compute`.
            step: Number of the step.
        """
        if (failure.kind, failure.worker_id) != self._own:  # `failed` has counted this rank's own exceptions already
            self._failures[failure.kind, failure.worker_id] += 1
        if error is not None and self._failures[self._own] >= self._policy.max_attempts:
            return f"{type(error).__name__} in step {step}, {self._policy.max_attempts} times"
        if failure.kind == "process" and self._failures["process", failure.worker_id] >= self._policy.max_losses:
            return (
                f"worker {failure.worker_id} was lost {self._policy.max_losses} times in step {step}, the last time "
                f"because: {failure.cause}"
            )
        return ""


def cause_of_return(step: int) -> str:
    """Why a generation ends once all ranks have loaded the snapshot of `step`."""
    return f"all ranks return to the snapshot of step {step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """A fault that was repaired, and how many seconds each stage took on this rank."""

    failure: FailureRecord
    step: int
    """Number of committed steps when the job resumed."""
    generation: int
    level: RecoveryLevel
    """Recovery level that was used."""
    receivers: tuple[int, ...]
    """Ranks that received state from another rank, such as replacements."""
    rolled_forward: bool
    """Whether this rank committed, during recovery, a step that it had only voted for."""
    noticed_s: float
    """From the failure report until this rank stopped computing; the clocks of two machines may differ."""
    quorum_s: float
    """Until all members had arrived and connected; includes the start of new processes."""
    restored_s: float
    """Until all members had their state."""
    steps_lost: int | None = 0
    """Committed steps that are run again, because the last copy of the state after them was lost. None if no process
    knows how many there were."""

    @property
    def total_s(self) -> float:
        """Seconds from the failure report until the step could begin again."""
        return self.noticed_s + self.quorum_s + self.restored_s

    def is_reported_by(self, rank: int, world_size: int) -> bool:
        """Whether `rank` is the one that reports this repair: the first rank that is not a joiner.

        Re-entering the loops at a snapshot ends one more generation, which belongs to the repair before it: none does.
        """
        if self.failure.kind == "request" and self.failure.cause == cause_of_return(self.step):
            return False
        return rank == min(set(range(world_size)) - set(self.receivers), default=0)

    def event(self) -> Event:
        """The repair as an event, named after its recovery level."""
        return Event(
            name=self.level.event,
            at_s=self.failure.at_s,
            duration_s=self.total_s,
            details={
                "cause": str(self.failure),
                "kind": self.failure.kind,
                "worker_id": self.failure.worker_id,
                "incarnation": self.failure.incarnation,
                "reporter": self.failure.reporter,
                "step": self.step,
                "steps_lost": "unknown" if self.steps_lost is None else self.steps_lost,
                "generation": self.generation,
                "receivers": " ".join(map(str, self.receivers)),
                "noticed_s": self.noticed_s,
                "assembled_s": self.quorum_s,
                "restored_s": self.restored_s,
            },
        )

    def __str__(self) -> str:
        """A one-line summary for logs."""
        done = "changed" if self.failure.kind == "resize" else "repaired"
        how = f": {cause_of_return(self.step)}" if self.level is RecoveryLevel.SNAPSHOT else ""
        return (
            f"{self.failure}; {done} in {self.total_s:.2f} s (noticed {self.noticed_s:.2f}, assembled "
            f"{self.quorum_s:.2f}, restored {self.restored_s:.2f}), {_number_of_steps(self.steps_lost)} lost, "
            f"going on after step {self.step}{how}"
        )


def _number_of_steps(number: int | None) -> str:
    return "an unknown number of steps" if number is None else f"{number} steps"


class ReturnedToSnapshot(PeerLost):
    """All ranks have returned to a snapshot: their tensors are of an earlier step, the loop's position is not yet."""

    def __init__(self, plan: RecoveryPlan) -> None:
        super().__init__(
            f"the last copy of a part of the training state was lost. All ranks have returned to the snapshot of "
            f"step {plan.step}, and {_number_of_steps(plan.steps_lost)} will be run again. The strategy re-enters the "
            "loops there; a custom loop must continue with the data of that step."
        )


class StepFailed(RecoveryError):
    """The program raised in a step that this process cannot run again: it exits and is replaced."""


class TrainingLoop(Protocol):
    """What a `StepTransaction` must know about the training loop and its state."""

    def begin(self, step: int) -> None:
        """Begin a step: save whatever `compute` changes other than gradients, until the step is committed."""
        ...

    @property
    def can_undo(self) -> bool:
        """Whether `undo_step` can restore all that `compute` changed; if not, this rank's state counts as lost."""
        ...

    def undo_step(self) -> None:
        """Drop gradients and restore what `begin` saved, as if `compute` had never run."""
        ...

    def end_iteration(self) -> None:
        """Reset the modules' iteration state to that of a new process; called before state is sent or received."""
        ...

    def share_rank_local_state(self, step: int) -> bool:
        """Before a vote: give the buddy this rank's rank-local state as it will be when `step` steps are committed.

        Returns:
            Whether it may differ from that of the source rank.

        Raises:
            PeerLost: Another rank is gone; the groups are broken.
        """
        ...

    def note_equal_local_state(self, step: int, *, is_equal: bool) -> None:
        """After a vote: note whether the rank-local states of all ranks are equal after `step` committed steps."""
        ...

    @property
    def equal_local_step(self) -> int:
        """Number of steps after which they were, if no code has written to this rank's since; else -1."""
        ...

    def capture_state(self) -> bytes:
        """Capture what a joiner needs before it can join: loops, schedulers and the data position."""
        ...

    @property
    def local_steps(self) -> tuple[int, ...] | None:
        """Steps of which this rank keeps its source rank's rank-local state; None if none was kept in this world."""
        ...

    @property
    def rank_local_states(self) -> LocalStates | None:
        """This rank's rank-local state; None if none is kept."""
        ...

    def captured_values(self) -> dict[str, Any]:
        """What `capture_state` captures, by names that begin with their kind."""
        ...

    def present_values(self) -> dict[str, Any]:
        """All but tensors and rank-local state, as this rank holds it now, named likewise.

        Unlike `capture_state`, it does not describe the beginning of a part that is under way. It leaves out what may
        have changed since the present step began and stays as it is when the step is undone.
        """
        ...

    def own_objects(self) -> Mapping[str, Stateful]:
        """The program's own objects, other than registered ones, whose state a replacement loads; named likewise."""
        ...

    def capture_own_state(self) -> bytes:
        """Capture what a snapshot holds besides tensors: `capture_state` and this rank's rank-local state."""
        ...

    def restore(self, plan: RecoveryPlan, rank: int) -> None:
        """Send this rank's state to the ranks whose source it is in `plan.senders`, or receive it from its source.

        Raises:
            PeerLost: A rank was lost meanwhile.
            StateLost: What this rank has done before it had a state depends on that state.
        """
        ...

    can_undo_exceptions: bool
    """Whether `undo_step` also works after an exception in the middle of `compute`."""

    saving_group: str
    """Name of the key of the group that `save` communicates over."""

    @property
    def pending_saves(self) -> tuple[str, ...]:
        """What is left to do of the saving that followed the last committed step, in terms of this loop."""
        ...

    def finish_saves(self, pending: tuple[str, ...]) -> None:
        """Do what is left of it; a collective call of all ranks, connected again, with what all of them had pending.

        Raises:
            PeerLost: Another rank is gone; the same is pending again.
        """
        ...

    def save(self, path: str, *, is_alone: bool, snapshots: Mapping[int, Snapshot] | None = None) -> str:
        """Write a persistent checkpoint; a collective call of all participating ranks.

        Args:
            path: Path of the checkpoint. Empty for the default path of a checkpoint before the job ends; `RESHARD`
                for one before all processes restart.
            is_alone: Whether only some ranks remain, so that no group except `saving_group` works.
            snapshots: Snapshots of one step to write instead of the present state, by owner: this rank, its source
                rank, or both.

        Returns:
            The path.
        """
        ...
