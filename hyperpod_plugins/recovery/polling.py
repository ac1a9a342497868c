"""How often a process polls the store: rarely enough that thousands can poll at the same time."""

import time
from collections.abc import Callable
from typing import TypeVar

V = TypeVar("V")

_POLLS_A_SECOND = 2000.0
"""Limit for all processes of a job together."""
_SHORTEST_S = 0.005
_LONGEST_S = 1.0
"""Longest interval after a long wait, in seconds; with many processes it may be longer."""
_PART_OF_WAIT = 0.05
_LOOK_S = 1.0
"""Approximate time between two scans, by any of the waiting processes, in seconds."""
_GOLDEN = 0.6180339887


def poll_interval_s(rank: int, world_size: int, waited_s: float) -> float:
    """Seconds until this process polls again: a small part of its wait so far, or longer if the store needs it.

    The interval differs slightly between ranks, so that they do not all poll at once.
    """
    fair_s = max(_SHORTEST_S, world_size / _POLLS_A_SECOND, min(_LONGEST_S, waited_s * _PART_OF_WAIT))
    return fair_s * (0.75 + 0.5 * (rank * _GOLDEN % 1.0))


def scan_interval_s(rank: int, num_waiting: int) -> float:
    """Seconds until this process scans without a hint from the count: a few of all that wait scan each second."""
    return _LOOK_S * (1 + rank % max(1, num_waiting))


def poll_until(look: Callable[[], V], is_done: Callable[[V], bool], *, limit_s: float, every_s: float) -> V | None:
    """Look every `every_s` seconds, for at most `limit_s`, until `is_done`; return the last view, None if none."""
    deadline_s, view = time.monotonic() + limit_s, None
    while time.monotonic() < deadline_s:
        view = look()
        if is_done(view):
            break
        time.sleep(every_s)
    return view
