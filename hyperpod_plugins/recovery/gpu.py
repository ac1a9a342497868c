"""Waiting for a GPU, which runs behind: what has not arrived there yet cannot be voted for, or written."""

import time

import torch

from hyperpod_plugins.comm import WORLD, breaker, waiting
from hyperpod_plugins.errors import HyperPodError

_REST_S = 30.0
_POLL_S = 0.0001


class GpuHangs(HyperPodError):
    """This process cannot go on; as any that ends by an error, it is replaced."""


def come_to_rest(device: torch.device) -> None:
    """Wait until all that was queued on a device is done; on the CPU it is.

    As long as the groups are whole this takes what it takes: who hangs is for others to find out. Once they are broken
    their collectives have been aborted, and the queue must end.

    Raises:
        GpuHangs: it did not, within 30 s.
    """
    if device.type != "cuda":
        return
    waiting.since_s, waiting.role = time.monotonic(), WORLD  # a peer that hangs shows here, not in a collective
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(device))
    broken_s: float | None = None
    try:
        while not done.query():
            now_s = time.monotonic()
            if breaker.cause is not None:
                broken_s = now_s if broken_s is None else broken_s
                if now_s - broken_s > _REST_S:
                    raise GpuHangs(f"the queue of {device} did not end within {_REST_S:.0f} s after its groups broke")
            time.sleep(_POLL_S)
    finally:
        waiting.role = None
