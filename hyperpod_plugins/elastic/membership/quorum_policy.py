"""When the quorum of the next generation is complete, and how long to wait: pure decisions, without I/O."""

import enum
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from hyperpod_plugins.errors import ConfigError

BETWEEN_CALLS = "between two calls of the program"
"""The activity that a process reports while no call of its program trains or evaluates, also after the last call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumPolicy:
    """How long members wait for each other."""

    replacement_timeout_s: float = 300.0
    """Longest wait of the survivors for replacements of lost processes, in seconds."""

    def __post_init__(self) -> None:
        """Check the values."""
        if self.replacement_timeout_s <= 0:
            raise ConfigError(f"replacement_timeout_s must be positive, but is {self.replacement_timeout_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumView:
    """What one process sees of a generation that is being formed."""

    expected: Mapping[int, int]
    """The incarnation of each rank that its agent started last."""
    arrived: Mapping[int, int]
    """The incarnation of each rank that has arrived."""
    waited_s: float
    """Seconds since this process began to wait."""

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks whose present incarnation has not arrived."""
        return tuple(rank for rank, number in self.expected.items() if self.arrived.get(rank) != number)


class QuorumAction(enum.Enum):
    """What to do next in forming a generation."""

    WAIT = "a rank is missing and may still arrive"
    FORM = "all ranks have arrived: propose the plan"
    GIVE_UP = "a rank has been missing for too long"


def next_action(view: QuorumView, policy: QuorumPolicy) -> QuorumAction:
    """Decide what to do next; an arrived process that has been replaced since does not count."""
    if not view.missing:
        return QuorumAction.FORM
    return QuorumAction.GIVE_UP if view.waited_s > policy.replacement_timeout_s else QuorumAction.WAIT


class GenerationBudget:
    """Limit of consecutive generations that are formed without committing a step, as counted by one process.

    Each way in which a generation can fail has a limit of its own. This one covers all of them together: groups that
    form and break again, state that cannot be copied, members that are lost as soon as they have arrived.
    """

    def __init__(self, max_generations: int = 20) -> None:
        """Allow `max_generations` generations for one step, and more within the first `replacement_timeout_s`."""
        self._max_rounds = max_generations
        self._began: tuple[int, int, float] | None = None

    def why_not_another(self, committed: int, number: int, now_s: float, policy: QuorumPolicy) -> str | None:
        """Return why no further generation should be tried; None to try this one.

        Args:
            committed: steps that this process has committed.
            number: of the generation.
            now_s: time on this process's monotonic clock, in seconds.
            policy: its `replacement_timeout_s` is how long the job tries at least.
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
    """An agent's wait for the other nodes to finish; the time limit restarts whenever one of them makes progress."""

    def __init__(self, limit_s: float, now_s: float) -> None:
        """Begin to wait.

        Args:
            limit_s: longest time without progress of any node, in seconds.
            now_s: time on a monotonic clock, in seconds.
        """
        self._limit_s = limit_s
        self._since_s = now_s
        self._left: AbstractSet[int] = frozenset()
        self._numbers: dict[int, int] = {}

    def is_over(self, left: AbstractSet[int], heartbeats: Mapping[int, Mapping[str, Any]] | None, now_s: float) -> bool:
        """Whether the limit has passed without progress.

        Args:
            left: nodes that have not finished.
            heartbeats: the last heartbeats of the workers of those nodes; None if the program takes no part in
                recovery and sends none. Progress is unknown then, and the wait continues.
            now_s: time on the same clock, in seconds.
        """
        found = {} if heartbeats is None else heartbeats
        numbers = {worker_id: int(heartbeat["sequence"]) for worker_id, heartbeat in found.items()}
        is_at_work = any(
            heartbeat["activity"] != BETWEEN_CALLS and self._numbers.get(worker_id) != numbers[worker_id]
            for worker_id, heartbeat in found.items()
        )
        if heartbeats is None or left != self._left or is_at_work:
            self._since_s = now_s
        self._left, self._numbers = frozenset(left), numbers
        return now_s - self._since_s > self._limit_s
