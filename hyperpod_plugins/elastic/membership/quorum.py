"""Who belongs to the next generation, and how long others are waited for: pure decisions on what the job store says."""

import enum
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from hyperpod_plugins.errors import ConfigError

BETWEEN_CALLS = "between two calls of the program"
"""Where a process says it is when no call of its program trains or evaluates: it may be past the last one."""


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
class QuorumView:
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


def next_action(view: QuorumView, policy: MembershipPolicy) -> Action:
    """Decide; a process that another one has replaced does not count as arrived."""
    if not view.missing:
        return Action.FORM
    return Action.GIVE_UP if view.waited_s > policy.replacement_timeout_s else Action.WAIT


class RoundBudget:
    """How often a job comes together without getting a step further; what one process knows of it.

    Each way in which a round can fail has a limit of its own. This one holds for all of them together: for groups that
    form and break again, for state that cannot be copied, for members that are lost as soon as they have come.
    """

    def __init__(self, max_rounds: int = 20) -> None:
        """Allow so many generations for one step, and more within the first `replacement_timeout_s`."""
        self._max_rounds = max_rounds
        self._began: tuple[int, int, float] | None = None

    def refusal(self, committed: int, number: int, now_s: float, policy: MembershipPolicy) -> str | None:
        """Why a generation is not to be tried any more; None to try it.

        Args:
            committed: steps that this process has committed.
            number: of the generation.
            now_s: time on this process's monotonic clock.
            policy: says for how long at least the job is to try.
        """
        if self._began is None or self._began[0] != committed:
            self._began = committed, number, now_s
        _, first, began_s = self._began
        if number - first < self._max_rounds or now_s - began_s <= policy.replacement_timeout_s:
            return None
        return (
            f"the job came together {number - first} times in {now_s - began_s:.0f} s without getting further than "
            f"step {committed}"
        )


class ExitWait:
    """The wait for others to finish, whose limit begins again whenever one of them gets on."""

    def __init__(self, limit_s: float, now_s: float) -> None:
        """Begin to wait.

        Args:
            limit_s: longest wait in which nobody gets on.
            now_s: the clock.
        """
        self._limit_s = limit_s
        self._since_s = now_s
        self._left: AbstractSet[int] = frozenset()
        self._numbers: dict[int, int] = {}

    def is_over(self, left: AbstractSet[int], heartbeats: Mapping[int, Mapping[str, Any]] | None, now_s: float) -> bool:
        """Whether it has been in vain for too long.

        Args:
            left: nodes that have not finished.
            heartbeats: the last ones of the workers of those nodes; None where they send none because the program takes
                no part in recovery. Their progress is unknown then, and the wait goes on.
            now_s: the clock.
        """
        found = {} if heartbeats is None else heartbeats
        numbers = {worker_id: int(heartbeat["number"]) for worker_id, heartbeat in found.items()}
        is_at_work = any(
            heartbeat["activity"] != BETWEEN_CALLS and self._numbers.get(worker_id) != numbers[worker_id]
            for worker_id, heartbeat in found.items()
        )
        if heartbeats is None or left != self._left or is_at_work:
            self._since_s = now_s
        self._left, self._numbers = frozenset(left), numbers
        return now_s - self._since_s > self._limit_s
