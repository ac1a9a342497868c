"""How often to take snapshots: as often as they cost little; measured on each rank, and the same on all."""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

COST = 0.005
"""Part of the time of a step that snapshots may cost."""
_NUM_STEPS = 20
_NUM_BEFORE = 3
_CHANGE = 2
"""How many times more or less often they must be wanted before the interval changes again."""


class SnapshotPace:
    """Steps from one snapshot to the next, of one rank.

    Each rank says in an exchange what it wants, and all hear the same numbers. What follows from them holds from the
    next snapshot that is due on, when the exchange is known to have ended on all ranks. After a fault, of which some
    may have heard before it ended and some not, all tell each other where they are, and begin with the first interval
    again where that is not the same.
    """

    def __init__(self, every_steps: int, *, is_measured: bool) -> None:
        """Begin with an interval, 0 for no snapshots; keep it where nothing `is_measured`."""
        self.every_steps = every_steps
        self._first, self._is_measured = every_steps, is_measured
        self._agreed = every_steps
        self._is_known = self._is_told = False
        self._last: tuple[int, float] | None = None
        self._num_before = _NUM_BEFORE
        self._steps_s: deque[float] = deque(maxlen=_NUM_STEPS)
        self._copies_s: deque[float] = deque(maxlen=_NUM_STEPS)
        self._exchanges_s: deque[float] = deque(maxlen=_NUM_STEPS)
        self._busy_s: deque[float] = deque(maxlen=_NUM_STEPS)

    def is_due(self, step: int) -> bool:
        """Whether there is to be a snapshot of a step."""
        return self.every_steps > 0 and step % self.every_steps == 0

    @property
    def is_every_step(self) -> bool:
        """Whether it is known that a snapshot of every step costs little, or somebody asked for that."""
        return self.every_steps == 1 and (self._is_told or not self._is_measured)

    @property
    def told_steps(self) -> int:
        """The interval that all agreed upon and with which this rank goes on; 0 while it knows of none."""
        return self.every_steps if self._is_told else 0

    def tick(self, step: int, now_s: float) -> None:
        """A step begins."""
        last, self._last = self._last, (step, now_s)
        if last is not None and last[0] == step - 1:
            if self._num_before:
                self._num_before -= 1
            else:
                self._steps_s.append(now_s - last[1])

    def copied(self, duration_s: float) -> None:
        """Training has waited so long for a copy."""
        self._copies_s.append(duration_s)

    def exchanged(self, duration_s: float, busy_s: float) -> None:
        """An exchange took so long, and its thread computed for a part of it."""
        self._exchanges_s.append(duration_s)
        self._busy_s.append(busy_s)

    def wanted_steps(self) -> int:
        """What this rank wants; 0 while it does not know."""
        if not (self._is_measured and self._steps_s and self._exchanges_s):
            return 0
        cost_s = median(self._copies_s) + median(self._busy_s)
        return interval(cost_s, median(self._exchanges_s), median(self._steps_s))

    def hear(self, wanted: Sequence[int]) -> None:
        """What all ranks want, in the order of the ranks; called when the exchange has ended."""
        if self._is_measured and any(wanted):
            self._is_known = True
            self._agreed = agree(self.every_steps, wanted, is_first=self.every_steps == self._first)

    def adopt(self) -> bool:
        """Go on with what was agreed upon; whether that is news."""
        former, self.every_steps = self.every_steps, self._agreed
        is_news = self._is_known and (former != self.every_steps or not self._is_told)
        self._is_told |= is_news
        return is_news

    def begin_again(self, told: Sequence[int]) -> None:
        """After a fault; all ranks hear the same.

        Args:
            told: `told_steps` of each rank. Those that are new know of none, and go on with that of the others.
        """
        known = set(told) - {0}
        self._is_known = self._is_told = len(known) == 1
        self.every_steps = self._agreed = known.pop() if self._is_told else self._first

    def __str__(self) -> str:
        """One line for people."""
        if not (self._steps_s and self._copies_s and self._busy_s):
            return f"buddy snapshots: every {self.every_steps} steps"
        cost_ms, step_ms = 1000 * (median(self._copies_s) + median(self._busy_s)), 1000 * median(self._steps_s)
        return (
            f"buddy snapshots: every {self.every_steps} steps, so that they cost less than {100 * COST:g} % (one takes "
            f"{cost_ms:.1f} ms, a step {step_ms:.1f} ms); set snapshot_every_steps for another interval"
        )


def interval(cost_s: float, exchange_s: float, step_s: float) -> int:
    """Steps from one snapshot to the next at which they cost less than `COST` of a step, and no exchange is waited for.

    Args:
        cost_s: what one snapshot takes from training.
        exchange_s: how long its exchange lasts beside the training.
        step_s: how long a step takes.
    """
    return max(1, math.ceil(cost_s / (COST * step_s)), math.ceil(exchange_s / step_s))


def agree(now: int, wanted: Sequence[int], *, is_first: bool) -> int:
    """The interval of all ranks: what the slowest wants; as it is now where that is about the same.

    Args:
        now: the present interval.
        wanted: by each rank, 0 if it does not know.
        is_first: whether `now` was not agreed upon, so that any other one takes its place.
    """
    most = max(wanted, default=0)
    if most == 0 or (not is_first and now / _CHANGE < most < now * _CHANGE):
        return now
    return most
