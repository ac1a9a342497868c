"""State of communication that lives as long as the process: `runtime`, the only `CommRuntime`.

c10d's default group is one per process too. What belongs to one generation of a group ends with its `InnerGroup`.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet, WeakValueDictionary

import torch
import torch.distributed as dist

from hyperpod_plugins.comm.health import GroupHealth
from hyperpod_plugins.comm.options import GroupKey
from hyperpod_plugins.comm.traffic import Traffic, TrafficCounters
from hyperpod_plugins.errors import DeviceHung

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
    """Collectives that the host has queued on a device, in the order of its waits, and how far the device has come.

    A wait for an nccl collective returns at once, and the host blocks elsewhere: in `loss.item()`, in a copy, in the
    driver. So the host of a rank whose device waits for a peer is not itself waiting in a collective. The queue shows
    what the device waits for: the oldest collective that it has not completed, if it has reached it.

    The step's thread adds collectives; any thread may query.
    """

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


_ABORT_TIMEOUT_S = 30.0


class Discardable(Protocol):
    """The handle of a collective under way."""

    def discard(self) -> None:
        """Release the library's handle."""
        ...


class CurrentWait:
    """The collective in which the step's thread waits now; read by the hang detection."""

    def __init__(self) -> None:
        self.key: GroupKey | None = None
        """Key of the group; None while the thread does not wait."""
        self.since_s = 0.0
        """Monotonic time at which the wait began."""
        self.number = 0
        """Number of the collective in its group and generation; 0 if it is not known."""
        self.total_s = 0.0
        """Seconds of all waits that have ended."""

    def end(self) -> None:
        """The wait has ended."""
        self.key = None
        self.total_s += time.monotonic() - self.since_s


class PinnedGenerations(threading.local):
    """The generations to which the calling thread's use of groups is restricted."""

    def __init__(self) -> None:
        self.generations: dict[dist.ProcessGroup, int] = {}


class CommRuntime:
    """Communication state of a process. Any thread may call the methods."""

    def __init__(self) -> None:
        self.health = GroupHealth()
        self.device_queue = DeviceQueue()
        """Collectives queued on the device; a process uses one."""
        self.traffic = TrafficCounters()
        self.waiting = CurrentWait()
        self.pinned = PinnedGenerations()
        self.groups: WeakValueDictionary[str, dist.ProcessGroup] = WeakValueDictionary()
        """Groups of the backend `hyperpod` by the names of their keys, destroyed ones too; see `live_groups`."""
        self.num_created: Counter[str] = Counter()
        """Number of groups that this process has created for each key."""
        self.pending: WeakSet[Discardable] = WeakSet()
        """Handles of all collectives, until their last user drops them."""
        self.gloo_devices: list[Any] = []
        """The gloo device that groups of one member share; see [Note: devices]."""
        self.aborts: list[threading.Thread] = []
        """Threads that abort what is queued on the device; guarded by `aborts_lock`."""
        self.aborts_lock = threading.Lock()

    def discard_pending(self) -> None:
        """Release the library's handles of all collectives under way."""
        for _ in range(100):
            try:
                works = list(self.pending)
            except RuntimeError:  # another thread has just issued a collective
                continue
            for work in works:
                work.discard()
            return

    def finish_aborts(self) -> None:
        """Wait for all aborts to end. New groups are connected, and another step is voted on, only after that.

        Raises:
            DeviceHung: an abort did not end within 30 s.
        """
        with self.aborts_lock:
            aborts = list(self.aborts)
        deadline_s = time.monotonic() + _ABORT_TIMEOUT_S
        for abort in aborts:
            abort.join(max(0.0, deadline_s - time.monotonic()))
            if abort.is_alive():
                raise DeviceHung(f"a group's abort did not end within {_ABORT_TIMEOUT_S:.0f} s")
        with self.aborts_lock:
            self.aborts[:] = [each for each in self.aborts if each not in aborts]
        self.device_queue.clear()

    def reset(self) -> None:
        """Return to the state of a new process, for tests; no group may be left."""
        self.finish_aborts()
        self.health.reset()
        self.health.allow_collectives()
        self.health.on_set_up = self.health.on_dropped = None
        self.traffic.reset()
        self.waiting.key = None
        self.num_created.clear()


runtime = CommRuntime()
group_health = runtime.health
"""Health of the groups of this process."""
device_queue = runtime.device_queue
"""The queue of this process, which uses one device."""


def traffic() -> dict[str, Traffic]:
    """Return what this process has issued on each mesh axis since the last reset; axes without calls are omitted."""
    return runtime.traffic.snapshot()


def reset_traffic() -> None:
    """Set the counters of all axes to zero."""
    runtime.traffic.reset()
