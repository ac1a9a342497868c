"""State of communication that lives as long as the process: `runtime`, the only `CommRuntime`.

c10d's default group is one per process too. What belongs to one generation of a group ends with its `InnerGroup`.
"""

import threading
import time
from collections import Counter
from typing import Any, Protocol
from weakref import WeakSet, WeakValueDictionary

import torch.distributed as dist

from hyperpod_plugins.comm.device_queue import DeviceQueue
from hyperpod_plugins.comm.health import GroupHealth
from hyperpod_plugins.comm.options import GroupKey
from hyperpod_plugins.comm.traffic import Traffic, TrafficCounters
from hyperpod_plugins.errors import DeviceHung

_ABORT_TIMEOUT_S = 30.0


class Discardable(Protocol):
    """The handle of a collective under way."""

    def discard(self) -> None:
        """Release the library's handle."""
        ...


class Waiting:
    """The collective in which the step's thread waits now; read by the hang detection."""

    def __init__(self) -> None:
        self.key: GroupKey | None = None
        """Key of the group; None while the thread does not wait."""
        self.since_s = 0.0
        """Monotonic time at which the wait began."""
        self.number = 0
        """Number of the collective in its group and generation; 0 if it is not known."""


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
        self.waiting = Waiting()
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
