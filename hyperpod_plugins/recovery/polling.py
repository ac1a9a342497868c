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


def poll_until(
    look: Callable[[], V],
    is_done: Callable[[V], bool],
    *,
    limit_s: Callable[[], float] | float,
    every_s: Callable[[float], float] | float,
) -> V:
    """Look until a view is done, and a last time after the limit; return the last view.

    Args:
        look: Returns what there is to see.
        is_done: Whether that is enough.
        limit_s: Seconds to wait, at most; a function if `look` may extend it.
        every_s: Seconds between two looks; a function if they depend on the seconds waited so far.
    """
    began_s = time.monotonic()
    while True:
        waited_s = time.monotonic() - began_s
        view = look()
        if is_done(view) or waited_s >= (limit_s() if callable(limit_s) else limit_s):
            return view
        time.sleep(every_s(waited_s) if callable(every_s) else every_s)
