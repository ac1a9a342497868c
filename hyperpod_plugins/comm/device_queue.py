"""Tracks the collectives that the host has queued on a device, and how far the device has come.

A wait for an nccl collective returns at once, and the host blocks elsewhere: in `loss.item()`, in a copy, in the
driver. So the host of a rank whose device waits for a peer is not itself waiting in a collective. The queue shows
what the device waits for: the oldest collective that it has not completed, if it has reached it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hyperpod_plugins.comm.options import GroupKey

EventQuery = Callable[[], bool]
"""Returns whether the device has reached a point in its queue; any thread may call it."""
_MAX_LENGTH = 4096


def _record_event(device: torch.device) -> EventQuery:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.query


RECORDERS: dict[str, Callable[[torch.device], EventQuery]] = {"cuda": _record_event}
"""For each device type that has a queue: function that records the present end of the queue."""


def record_event(device: torch.device) -> EventQuery | None:
    """Record the present end of a device's queue; None for a device without one, and during CUDA graph capture."""
    recorder = RECORDERS.get(device.type)
    if recorder is None or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return None
    return recorder(device)


@dataclass(frozen=True, slots=True)
class QueuedCollective:
    """A collective that is queued on a device, and whose `wait` the host has called."""

    key: GroupKey
    number: int
    """Number of the collective in its group and generation, counted from 1; 0 if it is not known."""
    is_reached: EventQuery
    """Whether the device has completed everything queued before the collective."""
    is_done: EventQuery


class DeviceQueue:
    """Collectives in the order of the host's waits. The step's thread adds them; any thread may query."""

    def __init__(self) -> None:
        self._collectives: deque[QueuedCollective] = deque(maxlen=_MAX_LENGTH)
        self._lock = threading.Lock()
        self._seen: tuple[QueuedCollective, float] | None = None

    def add(self, collective: QueuedCollective) -> None:
        """Add a collective for which the device's current stream will wait."""
        with self._lock:
            self._drop_done()
            self._collectives.append(collective)

    @property
    def is_empty(self) -> bool:
        """Whether the device has completed all queued collectives."""
        with self._lock:
            self._drop_done()
            return not self._collectives

    def clear(self) -> None:
        """Drop all collectives, because their groups were aborted."""
        with self._lock:
            self._collectives.clear()

    def oldest_wait(self, now_s: float | None = None) -> tuple[GroupKey, int, float] | None:
        """Return the oldest collective in which the device waits: group key, number, and time waited in seconds.

        The time counts from the first call that found the device in this collective. None if the queue is empty, and
        if the device has not reached its oldest collective: then it is computing, or hangs on its own. Always call
        this from the same thread.

        Args:
            now_s: monotonic time; by default the present.
        """
        now_s = time.monotonic() if now_s is None else now_s
        with self._lock:
            self._drop_done()
            oldest = self._collectives[0] if self._collectives else None
        if oldest is None or not oldest.is_reached():
            self._seen = None
            return None
        if self._seen is None or self._seen[0] is not oldest:
            self._seen = oldest, now_s
        return oldest.key, oldest.number, now_s - self._seen[1]

    def _drop_done(self) -> None:
        while self._collectives and self._collectives[0].is_done():
            self._collectives.popleft()
