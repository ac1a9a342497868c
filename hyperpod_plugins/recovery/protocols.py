"""The words of the story in `step.py`: what is trained, when to stop trying, what was repaired, what calls back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from hyperpod_plugins.elastic import FailureRecord
from hyperpod_plugins.errors import ConfigError, PeerLost, RecoveryError
from hyperpod_plugins.events import Event
from hyperpod_plugins.recovery.plan import RecoveryLevel, RecoveryPlan
from hyperpod_plugins.recovery.snapshot import Snapshot

SAVING_GROUP = "checkpoint"
"""Name of the role of the group that checkpoints are written over."""
RESHARD = "hyperpod:reshard"
"""Stands for the path of a checkpoint from which all processes start again with other degrees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """When to stop trying."""

    max_attempts: int = 3
    """Attempts at one step that may end with the same rank's exception before it counts as the program's mistake."""
    max_losses: int = 8
    """Processes that may be lost in one step before it counts as the program's mistake."""
    needs_local: bool = False
    """Whether all go back to a checkpoint where no rank has what a lost one had alone; else on, with a replica's."""

    def __post_init__(self) -> None:
        """Check the values."""
        for name, value in (("max_attempts", self.max_attempts), ("max_losses", self.max_losses)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, but is {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """A fault that was repaired, with the seconds that each stage took on this rank."""

    failure: FailureRecord
    step: int
    """Steps committed when the job went on."""
    generation: int
    level: RecoveryLevel
    """How far down the ladder the fault led."""
    joiners: tuple[int, ...]
    """Ranks that a new process took."""
    rolled_forward: bool
    """Whether this rank committed a step that it had only voted for."""
    noticed_s: float
    """From the failure's report until this rank stopped computing; clocks of different machines may differ."""
    assembled_s: float
    """Until all members were there and connected; the start of new processes is in this."""
    restored_s: float
    """Until all members had their state."""
    steps_lost: int = 0
    """Committed steps that are run again, because the state after them was lost with its last holder."""

    @property
    def total_s(self) -> float:
        """From the failure's report until the step could begin again."""
        return self.noticed_s + self.assembled_s + self.restored_s

    def is_told_by(self, rank: int, world_size: int) -> bool:
        """Whether a rank is the one that says what happened: the first that has seen it."""
        return rank == min(set(range(world_size)) - set(self.joiners), default=0)

    def event(self) -> Event:
        """The rung of the ladder as an event."""
        return Event(
            name=self.level.event,
            at_s=self.failure.at_s,
            duration_s=self.total_s,
            details={
                "cause": str(self.failure),
                "step": self.step,
                "steps_lost": self.steps_lost,
                "generation": self.generation,
                "newcomers": " ".join(map(str, self.joiners)),
                "noticed_s": self.noticed_s,
                "assembled_s": self.assembled_s,
                "restored_s": self.restored_s,
            },
        )

    def __str__(self) -> str:
        """One line for people."""
        done = "changed" if self.failure.kind == "resize" else "repaired"
        return (
            f"{self.failure}; {done} in {self.total_s:.2f} s (noticed {self.noticed_s:.2f}, assembled "
            f"{self.assembled_s:.2f}, restored {self.restored_s:.2f}), {self.steps_lost} steps lost, "
            f"going on after step {self.step}"
        )


class Returned(PeerLost):
    """All ranks have returned to a snapshot: their tensors are those of an earlier step, the loop's position is not."""

    def __init__(self, plan: RecoveryPlan) -> None:
        super().__init__(
            f"a part of the training state was lost with its last holder. All ranks have returned to the snapshot of "
            f"step {plan.step}, and {plan.steps_lost} steps are to be run again. The strategy enters the loops again "
            "from there; a loop of your own goes on with the data of that step."
        )


class StepFailed(RecoveryError):
    """The program raised in a step that this process cannot run again: it ends, and others go on with a replacement."""


class TrainingLoop(Protocol):
    """What is trained, as far as a transaction must know it."""

    def begin(self, step: int) -> None:
        """Remember, until the step is committed, whatever `compute` changes beside gradients."""
        ...

    @property
    def can_undo(self) -> bool:
        """Whether `undo` puts back all that `compute` has changed; where not, this rank's state counts as lost."""
        ...

    def undo_step(self) -> None:
        """Drop gradients, and put back what `begin` remembered: as if `compute` had never run."""
        ...

    def end_iteration(self) -> None:
        """Let what computes forget its last iteration, as a newcomer's knows of none; called before any state moves."""
        ...

    def share(self, step: int) -> None:
        """Before a vote: put in safety what is of this rank alone, as it is when `step` steps are committed.

        Raises:
            PeerLost: another rank is gone; the groups are broken then.
        """
        ...

    def capture_state(self) -> bytes:
        """What newcomers need before they can come: loops, schedulers, the data position."""
        ...

    @property
    def local_steps(self) -> tuple[int, ...] | None:
        """Steps of which this rank keeps what its ward has alone; None where nothing was kept yet in this world."""
        ...

    def capture_own_state(self) -> bytes:
        """What a snapshot of this rank holds beside tensors: `describe`, and what is of this rank alone."""
        ...

    def restore(self, plan: RecoveryPlan, rank: int) -> None:
        """Give this rank's state to those whose source it is, or take it from one's own source."""
        ...

    can_undo_exceptions: bool
    """Whether `undo` also helps where an exception has left `compute` in the middle."""

    saving_group: str
    """Name of the role of the group over which `save` works."""

    def save(self, path: str, *, is_alone: bool, snapshots: Mapping[int, Snapshot] | None = None) -> str:
        """Write a persistent checkpoint, on all ranks together.

        Args:
            path: empty for the place of a checkpoint that is written before the job ends; `RESHARD` for one that is
                written before all processes start again.
            is_alone: only some ranks are left, and no group but `saving_group` works.
            snapshots: what to write of one step, in place of the present state, by the ranks whose it is: this one, its
                ward, or both.

        Returns:
            The path.
        """
        ...
