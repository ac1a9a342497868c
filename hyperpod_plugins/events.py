"""Events with their listeners, and a warning when the CUDA caching allocator flushes its cache.

An event says what happened, when, and how long it took. Events are rare: a repair is one, a training step is not.
"""

import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import final

import torch
from torch import nn

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened, recorded once it has ended."""

    name: str
    """Package and kind, such as `recovery.replace`."""
    at_s: float
    """Start, as Unix time in seconds."""
    duration_s: float = 0.0
    details: Mapping[str, str | int | float] = field(default_factory=dict[str, str | int | float])


EventListener = Callable[[Event], None]
_listeners: list[EventListener] = []


def listen(listener: EventListener) -> Callable[[], None]:
    """Call `listener` with each event of this process, in the thread that records the event.

    Returns:
        A function that removes the listener.
    """
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


def record(event: Event) -> None:
    """Pass an event to all listeners; an exception in one is only logged."""
    for listener in list(_listeners):
        try:
            listener(event)
        except Exception:
            log.exception("a listener failed on event %s", event.name)


@final
class AllocatorWatch:
    """Warns when the CUDA allocator freed its cache to retry an allocation, which stalls the device.

    Args:
        device: a CUDA device; for any other device the watch does nothing.
        every_num_steps: how often to read the allocator's statistics, which takes about 0.1 ms.
    """

    def __init__(self, device: torch.device, every_num_steps: int = 50) -> None:
        self._device = device
        self._every_num_steps = every_num_steps
        self._num_steps = 0
        self._num_retries = 0

    def after_step(self) -> None:
        """Count a step; every `every_num_steps` steps, check the allocator and warn."""
        self._num_steps += 1
        if self._device.type == "cuda" and self._num_steps % self._every_num_steps == 0:
            news = self.warning_for(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))
            if news:
                warnings.warn(news, stacklevel=2)

    def attach(self, model: nn.Module) -> None:
        """Count each forward pass of a model with gradients as a step, except within a graph of torch.compile.

        A model that is counted already, or of a device without the watch, is left as it is.
        """
        hooks = model._forward_pre_hooks.values()  # pyright: ignore[reportPrivateUsage]
        is_counted = any(isinstance(getattr(hook, "__self__", None), AllocatorWatch) for hook in hooks)
        if self._device.type == "cuda" and not is_counted:
            model.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, *_: object) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.after_step()

    def warning_for(self, num_retries: int) -> str:
        """Warning for the number of retries since the process started; empty if there are no new ones."""
        new, self._num_retries = num_retries - self._num_retries, num_retries
        if new <= 0:
            return ""
        return (
            f"the CUDA allocator flushed its cache {new} times in the last {self._every_num_steps} steps: device "
            "memory is nearly full, and each flush stalls the device. Raise hybrid_shard_degree, lower the "
            "micro-batch, or turn this warning off with fsdp_cache_flush_warnings=False."
        )
