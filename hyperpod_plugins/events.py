"""Watching the CUDA caching allocator: a flush of its cache means that the job is at the limit of device memory."""

import json
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import final

import torch

# Events: what happened, when, and how long it took. They are few: a step is none, a repair is one.

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that began, and has ended."""

    name: str
    """Package and kind, such as `recovery.replace`."""
    at_s: float
    """Unix time of its beginning, in seconds."""
    duration_s: float = 0.0
    details: Mapping[str, str | int | float] = field(default_factory=dict[str, str | int | float])


Listener = Callable[[Event], None]
_listeners: list[Listener] = []


def listen(listener: Listener) -> Callable[[], None]:
    """Have `listener` called with each event of this process, in the thread that records it; returns what ends that."""
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


def record(event: Event) -> None:
    """Tell all listeners; an error of one is only logged."""
    for listener in list(_listeners):
        try:
            listener(event)
        except Exception:
            log.exception("a listener failed at the event %s", event.name)


class EventFile:
    """A listener that appends each event to a file, as a line of JSON."""

    def __init__(self, path: Path) -> None:
        """The file and its folders are made with the first event."""
        self.path = path

    def __call__(self, event: Event) -> None:
        """Append one line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(event)) + "\n")


@final
class AllocatorWatch:
    """Warns when the allocator had to free its cache and try again, which stalls the device.

    Args:
        device: a CUDA device; on any other the watch does nothing.
        every_num_steps: how often to look. Reading the allocator's statistics takes some 0.1 ms.
    """

    def __init__(self, device: torch.device, every_num_steps: int = 50) -> None:
        self._device = device
        self._every_num_steps = every_num_steps
        self._num_steps = 0
        self._num_retries = 0

    def after_step(self) -> None:
        """Count a step, and look at the allocator where it is time to."""
        self._num_steps += 1
        if self._device.type == "cuda" and self._num_steps % self._every_num_steps == 0:
            news = self.news(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))
            if news:
                warnings.warn(news, stacklevel=2)

    def news(self, num_retries: int) -> str:
        """What to say about the number of retries since the process began; empty where there were no new ones."""
        new, self._num_retries = num_retries - self._num_retries, num_retries
        if new <= 0:
            return ""
        return (
            f"the CUDA allocator flushed its cache {new} times in the last {self._every_num_steps} steps: device "
            "memory is nearly full, and each flush stalls the device. Raise hybrid_shard_degree, lower the "
            "micro-batch, or turn this warning off with fsdp_cache_flush_warnings=False."
        )
