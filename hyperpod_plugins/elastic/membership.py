"""Who belongs to the next generation: decided from what the ledger says, and from nothing else."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from hyperpod_plugins.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipPolicy:
    """How long to wait for whom."""

    replacement_timeout_s: float = 300.0
    """Longest wait of the survivors for the processes that replace lost ones."""

    def __post_init__(self) -> None:
        """Check the values."""
        if self.replacement_timeout_s <= 0:
            raise ConfigError(f"replacement_timeout_s must be positive, but is {self.replacement_timeout_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What one process sees of a generation that is being formed."""

    expected: Mapping[int, int]
    """Incarnation that each rank's agent has started last."""
    arrived: Mapping[int, int]
    """Incarnation that has arrived in each rank's place."""
    waited_s: float
    """Seconds since this process began to wait."""

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks whose present process has not arrived."""
        return tuple(rank for rank, number in self.expected.items() if self.arrived.get(rank) != number)


class Action(enum.Enum):
    """What to do now."""

    WAIT = "somebody is missing and may still come"
    FORM = "all are here: propose the plan"
    GIVE_UP = "somebody is missing for too long"


def next_action(view: View, policy: MembershipPolicy) -> Action:
    """Decide; a process that another one has replaced does not count as arrived."""
    if not view.missing:
        return Action.FORM
    return Action.GIVE_UP if view.waited_s > policy.replacement_timeout_s else Action.WAIT
