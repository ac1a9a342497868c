"""Whether keeping inputs of blocks on the host pays: `activation_offload="auto"`.

A block of width h computes about `24 tokens h^2` operations in forward, and its input has `2 tokens h` bytes in
bfloat16. So the copy to the host hides behind the computation if `h >= F / (12 B)`, for F operations and B bytes a
second, whatever the length; backward has three times the time. What is gained, the inputs of all blocks but those that
are on the device anyway, grows with the length: below a part of the device's memory it is not worth the host memory.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

log = logging.getLogger(__name__)
LEAST_GAIN = 0.05
"""Part of the device's memory that must be gained."""
_MATRIX, _COPY_BYTES, _REPEATS = 4096, 64 << 20, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpeed:
    """What a device computes, and what the link to its host carries."""

    flops: float
    """Operations a second, in matrix products in bfloat16."""
    bytes_per_s: float
    """From the device to pinned host memory."""
    memory_bytes: float
    """Memory of the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadChoice:
    """A decision and its reason."""

    pays: bool
    why: str


def choose_offload(width: int, input_bytes: int, num_blocks: int, horizon: int, speed: DeviceSpeed) -> OffloadChoice:
    """Decide by the model above.

    Args:
        width: Hidden size of the model.
        input_bytes: Size of the input of one block.
        num_blocks: Number of blocks that are recomputed.
        horizon: Number of blocks whose inputs are on the device in any case.
        speed: Of the device.
    """
    least_width = speed.flops / (12 * speed.bytes_per_s)
    gain = max(0, num_blocks - horizon) * input_bytes
    if width < least_width:
        return OffloadChoice(
            pays=False,
            why=f"copies would not hide behind the computation: the width is {width}, and at {speed.flops / 1e12:.0f} "
            f"TFLOP/s and {speed.bytes_per_s / 1e9:.0f} GB/s it must be at least {least_width:.0f}",
        )
    if gain < LEAST_GAIN * speed.memory_bytes:
        return OffloadChoice(
            pays=False,
            why=f"inputs of blocks take {gain / 2**30:.2f} GiB, less than {LEAST_GAIN:.0%} of the device's memory: "
            "longer sequences would gain",
        )
    return OffloadChoice(
        pays=True,
        why=f"inputs of blocks take {gain / 2**30:.2f} GiB, and copies hide behind the computation (width {width}, at "
        f"least {least_width:.0f})",
    )


class AutomaticOffload:
    """Decides for each size of input, once, and logs the reason."""

    def __init__(self, device: torch.device, horizon: int, measure: Callable[[], DeviceSpeed] | None = None) -> None:
        """Measure nothing yet.

        Args:
            device: Device of the model.
            horizon: See `choose_offload`.
            measure: Measures the device at the first decision; by default CUDA's, with a product and a copy, in some
                50 ms. Other devices count as the host.
        """
        self._device, self._horizon = device, horizon
        self._measure = measure or (partial(measured_speed, device) if device.type == "cuda" else None)
        self._speed: DeviceSpeed | None = None
        self._choices: dict[int, bool] = {}

    def __call__(self, local: Tensor, num_blocks: int) -> bool:
        """Whether the input of a block goes to the host; `local` is this rank's part of it."""
        num_bytes = local.numel() * local.element_size()
        if num_bytes not in self._choices:
            choice = self._choose(local, num_bytes, num_blocks)
            self._choices[num_bytes] = choice.pays
            log.info("activation_offload='auto': %s; %s", "on" if choice.pays else "off", choice.why)
        return self._choices[num_bytes]

    def _choose(self, local: Tensor, num_bytes: int, num_blocks: int) -> OffloadChoice:
        if self._measure is None:
            return OffloadChoice(pays=False, why=f"the device ({self._device}) is the host")
        self._speed = self._speed or self._measure()
        return choose_offload(local.shape[-1], num_bytes, num_blocks, self._horizon, self._speed)


def measured_speed(device: torch.device) -> DeviceSpeed:
    """Measure a CUDA device."""
    matrix = torch.ones(_MATRIX, _MATRIX, dtype=torch.bfloat16, device=device)
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    product_s = _timed(lambda: matrix @ matrix, device)
    copy_s = _timed(lambda: target.copy_(source, non_blocking=True), device)
    return DeviceSpeed(
        flops=2 * _MATRIX**3 / product_s,
        bytes_per_s=_COPY_BYTES / copy_s,
        memory_bytes=torch.cuda.get_device_properties(device).total_memory,
    )


def _timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run, the shortest of a few."""
    lasted_s: list[float] = []
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(torch.cuda.current_stream(device))
        work()
        end.record(torch.cuda.current_stream(device))
        end.synchronize()
        lasted_s.append(begin.elapsed_time(end) / 1000)
    return min(lasted_s)
