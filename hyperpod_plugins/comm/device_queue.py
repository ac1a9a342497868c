"""What is queued on a device: which collectives the host has handed over, and how far the device has come.

A wait for an nccl collective returns at once, and the host blocks somewhere else: in `loss.item()`, in a copy, in the
driver. So a rank whose device waits for a peer shows no wait of its own. What tells is the queue: the oldest collective
that the device has not completed, and whether the device has reached it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hyperpod_plugins.comm.api import GroupKey

Query = Callable[[], bool]
"""Whether the device has come to a point of its queue; any thread may ask."""
_MAX_LENGTH = 4096


def _record_event(device: torch.device) -> Query:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.query


RECORDERS: dict[str, Callable[[torch.device], Query]] = {"cuda": _record_event}
"""Of each type of device that has a queue: how to mark the point up to which the host has filled it."""


def record(device: torch.device) -> Query | None:
    """Mark the end of a device's queue as it is now; None for a device that works while the host waits."""
    recorder = RECORDERS.get(device.type)
    if recorder is None or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return None
    return recorder(device)


@dataclass(frozen=True, slots=True)
class QueuedCollective:
    """A collective that the host has handed to the device and waited for."""

    role: GroupKey
    number: int
    """How many collectives of the group this process has issued in this generation, this one included; 0 where that is
    not known.
    """
    is_reached: Query
    """Whether the device has done all that was queued before."""
    is_done: Query


class DeviceQueue:
    """Collectives in the order of their waits. The thread of the step adds them, and any thread may look."""

    def __init__(self) -> None:
        self._collectives: deque[QueuedCollective] = deque(maxlen=_MAX_LENGTH)
        self._lock = threading.Lock()
        self._seen: tuple[QueuedCollective, float] | None = None

    def add(self, collective: QueuedCollective) -> None:
        """Take one that the device's present stream is to wait for."""
        with self._lock:
            self._drop_done()
            self._collectives.append(collective)

    @property
    def is_empty(self) -> bool:
        """Whether the device has completed all collectives that it was given."""
        with self._lock:
            self._drop_done()
            return not self._collectives

    def clear(self) -> None:
        """Forget all: their group has been aborted."""
        with self._lock:
            self._collectives.clear()

    def oldest_wait(self, now_s: float | None = None) -> tuple[GroupKey, int, float] | None:
        """The oldest collective in which the device waits: its role, its number, and for how long, in seconds.

        The time counts from the first look that found the device there. None where the queue is empty, and where the
        device has not come to its oldest collective: it computes then, or hangs by itself.

        Args:
            now_s: monotonic time.
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
        return oldest.role, oldest.number, now_s - self._seen[1]

    def _drop_done(self) -> None:
        while self._collectives and self._collectives[0].is_done():
            self._collectives.popleft()


device_queue = DeviceQueue()
"""The one of this process, which uses one device."""
