"""Waiting for an asynchronous device: its pending work cannot be voted for or written yet."""

import time

import torch

from hyperpod_plugins.comm import group_health, record_queue
from hyperpod_plugins.errors import DeviceHung

_LIMIT_S = 30.0
_POLL_S = 0.0001


def synchronize_or_raise(device: torch.device) -> None:
    """Wait until all work queued on a device is done; returns at once on the CPU.

    While the groups are healthy there is no time limit: the other ranks find out which rank hangs. Once the groups
    are broken, their collectives are aborted, and the queue must drain.

    Raises:
        DeviceHung: The queue has not drained within 30 s after the groups broke.
    """
    is_done = record_queue(device)
    broken_s: float | None = None
    while is_done is not None and not is_done():
        now_s = time.monotonic()
        if group_health.cause is not None:
            broken_s = now_s if broken_s is None else broken_s
            if now_s - broken_s > _LIMIT_S:
                raise DeviceHung(f"the queue of {device} did not end within {_LIMIT_S:.0f} s after its groups broke")
        time.sleep(_POLL_S)
