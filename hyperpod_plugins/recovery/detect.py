"""Who hangs: decided from what each rank last said of itself.

A rank that hangs says nothing, or says that it is somewhere else than in the collective where the others wait for it.
Long collectives alone are no sign: inside a step, and for a rank that loads its data, the limit follows the job's own
step time; a rank that is outside of one (a validation, a callback of the first rank) is granted the general limit, also
by those that wait for it in their next step already.
"""

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from types import FrameType
from typing import Any, Self

from hyperpod_plugins.errors import ConfigError

_BEATS_MISSED_S = 5.0
_LOADING = re.compile(r"/torch/utils/data/|/loops/fetchers\.py$|/hyperpod_plugins/data/loader\.py$")


@dataclass(frozen=True, slots=True, kw_only=True)
class HangPolicy:
    """How long is too long."""

    floor_s: float = 30.0
    """Shortest wait in a collective of a step, in seconds, that counts as a hang."""
    factor: float = 10.0
    """The same as a multiple of the job's median step time; the longer of the two holds."""
    early_s: float = 300.0
    """The same before the step time is known, if that is longer than `floor_s`: the first steps compile and warm up."""
    outside_s: float = 900.0
    """Wait for a rank that is outside of a step that counts as a hang."""

    def __post_init__(self) -> None:
        """Check the values."""
        for name, value in asdict(self).items():
            if value <= 0:
                raise ConfigError(f"{name} of HangPolicy must be positive, but is {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What one rank says of itself, about once a second."""

    incarnation: int
    generation: int
    committed: int
    place: str
    """Where its main thread is, in words."""
    in_step: bool
    """Whether that is inside a step."""
    is_loading: bool
    """Whether it fetches its next batch."""
    waits_for: str
    """Process group in whose collective it waits, or nothing."""
    waited_s: float
    """Seconds it has waited in this one collective."""
    at_s: float
    """Unix time."""

    def to_dict(self) -> dict[str, Any]:
        """For the ledger."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`."""
        return cls(**values)

    def is_alive(self, incarnation: int, now_s: float) -> bool:
        """Whether it is the last word of that process, and not old."""
        return self.incarnation == incarnation and now_s - self.at_s <= _BEATS_MISSED_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    """A rank that the others wait for."""

    rank: int
    incarnation: int
    cause: str


class StepTimes:
    """The job's own pace, from its last steps."""

    def __init__(self, num_steps: int = 20, num_before: int = 3) -> None:
        """Look at the last `num_steps`, and say nothing before the first `num_before`, which warm up."""
        self._durations_s: deque[float] = deque(maxlen=num_steps)
        self._before = num_before
        self._last_s: float | None = None

    def committed(self, now_s: float) -> None:
        """A step has been committed."""
        if self._last_s is not None:
            if self._before > 0:
                self._before -= 1
            else:
                self._durations_s.append(now_s - self._last_s)
        self._last_s = now_s

    def limit_s(self, policy: HangPolicy) -> float:
        """Longest wait inside a step that is not a hang yet."""
        if not self._durations_s:
            return max(policy.floor_s, policy.early_s)
        return max(policy.floor_s, policy.factor * median(self._durations_s))


def is_loading(frame: FrameType | None) -> bool:
    """Whether a thread, whose innermost frame is given, is in a data loader: torch's, or the loop that fetches."""
    while frame is not None:
        if _LOADING.search(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


def diagnose(beats: Mapping[int, Beat], own: Beat, limit_s: float, policy: HangPolicy, now_s: float) -> list[Suspicion]:
    """Ranks to be replaced, if this rank has waited too long for somebody.

    Args:
        beats: what each rank said last, this one included.
        own: this rank now.
        limit_s: longest wait inside a step.
        policy: limits outside of one.
        now_s: Unix time; the ranks' clocks may differ by less than a few seconds.
    """
    limit_s = limit_s if own.in_step else policy.outside_s
    if not own.waits_for or own.waited_s <= limit_s:
        return []
    found: list[Suspicion] = []
    for rank, beat in sorted(beats.items()):
        silent_s = now_s - beat.at_s
        is_granted_more = not (beat.in_step or beat.is_loading) and own.waited_s <= policy.outside_s
        if silent_s > limit_s and silent_s > _BEATS_MISSED_S:
            cause = f"has not been heard of for {silent_s:.0f} s; it was {beat.place}"
        elif is_granted_more or beat.waits_for or beat.generation != own.generation:
            continue
        elif silent_s <= _BEATS_MISSED_S:
            cause = f"did not come to the {own.waits_for} collective for {own.waited_s:.0f} s; it is {beat.place}"
        else:
            continue
        found.append(Suspicion(rank=rank, incarnation=beat.incarnation, cause=cause))
    return found
