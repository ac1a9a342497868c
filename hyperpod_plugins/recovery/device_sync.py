"""Waiting for a device that runs behind: what has not arrived there yet cannot be voted for, or written."""

import time

import torch

from hyperpod_plugins.comm import group_health, record_queue
from hyperpod_plugins.errors import DeviceHung

_LIMIT_S = 30.0
_POLL_S = 0.0001


def synchronize_or_raise(device: torch.device) -> None:
    """Wait until all that was queued on a device is done; on the CPU it is.

    As long as the groups are healthy this takes what it takes: which rank hangs is for the others to find out. Once
    they are broken their collectives are aborted, and the queue must end.

    Raises:
        DeviceHung: it did not, within 30 s after the groups broke.
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
