"""Who hangs: decided from what each rank last said of itself.

A rank that hangs says nothing, or says that it is somewhere else than in the collective where the others wait for it.
Long collectives alone are no sign: inside a step, and for a rank that loads its data, the limit follows the job's own
step time; a rank that is outside of one (a validation, a callback of the first rank) is granted the general limit, also
by those that wait for it in their next step already.

[Note: clocks] No clock of another machine is read. A heartbeat carries a number that counts up, and a reader measures
by its own monotonic clock for how long it has seen that number unchanged; see `BeatAges`.
"""

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from types import FrameType
from typing import Any, Self

from hyperpod_plugins.errors import ConfigError

HEARTBEATS_MISSED_S = 5.0
"""Longest silence of a process that counts as alive."""
_PART_HEARD = 0.5
"""Longest silence, as a part of the limit, of a rank that is believed to be where it said."""
_LOOK_S = 1.0
_PART_OF_LIMIT = 0.125
_LOOKS_A_SECOND = 200.0
"""Of all ranks together, each at the heartbeats of all."""
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
class Heartbeat:
    """What one rank says of itself, about once a second."""

    incarnation: int
    generation: int
    committed: int
    activity: str
    """Where its main thread is, in words."""
    in_step: bool
    """Whether that is inside a step."""
    is_loading: bool
    """Whether it fetches its next batch."""
    waits_for: str
    """Process group in whose collective it waits, by itself or on its device, or nothing."""
    waited_s: float
    """Seconds it has waited in this one collective."""
    collective: int = 0
    """Number of that collective among those of the group in this generation; 0 where it is not known."""
    number: int
    """Counts the heartbeats of this process: while it stays the same, nothing new was said."""
    world: int = 0
    """Number of the world it is in."""
    in_world_s: float = 0.0
    """Seconds for which it has been a member of that world."""

    def to_dict(self) -> dict[str, Any]:
        """For the job store."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`."""
        return cls(**values)

    @property
    def is_outside(self) -> bool:
        """Whether it is in code of the program outside of a step: a hook, a save, a validation."""
        return not (self.in_step or self.is_loading or self.waits_for)

    def is_alive(self, incarnation: int, silent_s: float, limit_s: float = HEARTBEATS_MISSED_S) -> bool:
        """Whether that process said it, and has said something new within the last `limit_s` seconds."""
        return self.incarnation == incarnation and silent_s <= limit_s


class HeartbeatAges:
    """For how long each rank has said nothing new, by this process's own clock; for one thread."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[tuple[int, int], float]] = {}

    def look(self, heartbeats: Mapping[int, Heartbeat], now_s: float) -> dict[int, float]:
        """Compare what is said now with what was said at the last look.

        Args:
            heartbeats: the last heartbeat of each rank that has left one.
            now_s: time of the look on this process's monotonic clock.

        Returns:
            Seconds of silence of each of them: a lower bound, for what is new may have been said just after the last
            look, and what was there at the first look may be old already.
        """
        for rank, heartbeat in heartbeats.items():
            said = heartbeat.incarnation, heartbeat.number
            if rank not in self._seen or self._seen[rank][0] != said:
                self._seen[rank] = said, now_s
        return {rank: now_s - self._seen[rank][1] for rank in heartbeats}


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


def look_every_s(limit_s: float, world_size: int) -> float:
    """Seconds between two looks at the heartbeats of all ranks, for one that waits and has not reached its limit.

    Silence is measured from the first look at the same heartbeat, so some looks must come before the limit; they are
    seldom enough that thousands of ranks can wait for one that computes for long.
    """
    return max(_LOOK_S, limit_s * _PART_OF_LIMIT, world_size / _LOOKS_A_SECOND)


def furthest_behind(
    heartbeats: Mapping[int, Heartbeat], own: Heartbeat, silent_s: Mapping[int, float], limit_s: float
) -> frozenset[int]:
    """Ranks in the oldest collective that is incomplete somewhere, of the group in whose later one this rank waits.

    None while a rank waits for no other: those that are behind may wait for it. One that was stopped a moment after it
    said that it waits is such a rank, so none either while one has been silent for half of the limit: since before this
    rank began to wait, that is, for it has looked since an eighth.
    """
    heard_s = _PART_HEARD * limit_s
    if any(not heartbeat.waits_for or silent_s.get(rank, 0.0) > heard_s for rank, heartbeat in heartbeats.items()):
        return frozenset()
    behind = {
        rank: heartbeat.collective
        for rank, heartbeat in heartbeats.items()
        if heartbeat.generation == own.generation
        and heartbeat.waits_for == own.waits_for
        and 0 < heartbeat.collective < own.collective
    }
    oldest = min(behind.values(), default=0)
    return frozenset(rank for rank, number in behind.items() if number == oldest)


def diagnose(
    heartbeats: Mapping[int, Heartbeat],
    own: Heartbeat,
    limit_s: float,
    policy: HangPolicy,
    silent_s: Mapping[int, float],
) -> list[Suspicion]:
    """Ranks to be replaced, if this rank has waited too long for somebody.

    Args:
        heartbeats: what each rank said last, this one included.
        own: this rank now.
        limit_s: longest wait inside a step.
        policy: limits outside of one.
        silent_s: for how long each of them has said nothing new, as `BeatAges` tells.
    """
    limit_s = limit_s if own.in_step else policy.outside_s
    if not own.waits_for or own.waited_s <= limit_s:
        return []
    behind = furthest_behind(heartbeats, own, silent_s, limit_s)
    found: list[Suspicion] = []
    for rank, heartbeat in sorted(heartbeats.items()):
        silence_s = silent_s.get(rank, 0.0)
        is_granted_more = not (heartbeat.in_step or heartbeat.is_loading) and own.waited_s <= policy.outside_s
        if silence_s > limit_s and silence_s > HEARTBEATS_MISSED_S:
            cause = f"has not been heard of for {silence_s:.0f} s; it was {heartbeat.activity}"
        elif rank in behind:
            cause = (
                f"waits in collective {heartbeat.collective} of the {own.waits_for} group, which this rank has "
                f"completed; it is {heartbeat.activity}"
            )
        elif is_granted_more or heartbeat.waits_for or heartbeat.generation != own.generation:
            continue
        elif silence_s <= HEARTBEATS_MISSED_S:
            cause = (
                f"did not come to the {own.waits_for} collective for {own.waited_s:.0f} s; it is {heartbeat.activity}"
            )
        else:
            continue
        found.append(Suspicion(rank=rank, incarnation=heartbeat.incarnation, cause=cause))
    return found
