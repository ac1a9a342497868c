"""Waiting for an asynchronous device: its pending work cannot be voted for, written or shown yet."""

import time
from collections.abc import Generator
from contextlib import contextmanager

import torch

from hyperpod_plugins.comm import Phase, group_health, record_queue
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


@contextmanager
def completed_outside_step(device: torch.device) -> Generator[None]:
    """Context for a collective outside a step whose result is used: at its end, the result is there, or an exception.

    The result of a collective that was aborted is what was in the memory before (see the note in `comm/health.py`); a
    metric or a logged mean would show it. Inside a step the vote finds out, and nothing is waited for.

    Raises:
        PeerLost: a rank was lost; raised at the end of the context, outside a step only.
        DeviceHung: see `synchronize_or_raise`.
    """
    with group_health.checks_host_read():
        yield
    if group_health.phase is Phase.STRICT:
        synchronize_or_raise(device)
        with group_health.checks_host_read():
            pass
