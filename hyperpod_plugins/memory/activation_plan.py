"""Which blocks keep their activations, are computed again, or wait on the host: `activation_offload="auto"`.

A block of width h computes about `24 tokens h^2` operations in forward, and its input has `2 tokens h` bytes in
bfloat16. So the copy of an input to the host hides behind the computation if `h >= F / (12 B)`, for F operations and B
bytes a second, whatever the length; backward has three times the time. Where t tensor ranks compute a block together,
each has a part of the operations, and unless the sequence is split, the whole input: then it is t times the width. To
compute a block again costs a third of its time, and to keep what it has computed costs memory, some 17 times its input.

So with room for everything nothing is done; with less, the last blocks keep their activations, which backward needs
first, and the others are computed again. The inputs of these go to the host where that hides and lets more blocks keep
their activations, or where nothing else fits.

How much room there is, is measured: in the first steps with a size of input, all blocks are computed again, and their
inputs offloaded if that hides. After two steps of the optimizer, when all of its state exists, what the device has had
free at the peak is shared out. So a rank's part of a block is what counts, whatever its degrees.

[Note: ranks that decide alike] Ranks that communicate within blocks (tensor and context parallelism) must compute the
same blocks again, or their collectives do not match. They have the same sizes of input in the same forwards, so they
decide in the same forward, and keep as many blocks as the one with the least room. Nothing else that they decide may
depend on one rank alone, such as on when the garbage collector frees a graph. The replacement of a lost rank knows
nothing yet, so after a repair all measure again. The others do not forget how much room they had: a plan has used it.

[Note: what a plan relies on] That each block of a forward has an input of the same shape, and that a backward follows
each forward. Of a model that breaks either (towers for images and text, two forwards before a backward), all blocks are
computed again from then on.
"""

import logging
import math
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from hyperpod_plugins.memory.recompute import is_in_backward, set_recomputed, surround

log = logging.getLogger(__name__)
BlockWay = Literal["offload", "recompute", "keep"]
MARGIN = 0.1
"""Part of the device's memory that stays free: an allocator loses some between blocks of different sizes, and later
steps may need more than the first ones."""
_NUM_STEPS = 2
_MOST_TOLD = 8
"""Sizes up to which each plan is logged; a program with sequences of all lengths has many."""
_MATRIX, _COPY_BYTES, _REPEATS = 4096, 64 << 20, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpeed:
    """What a device computes, and what the link to its host carries."""

    flops: float
    """Operations a second, in matrix products in bfloat16."""
    bytes_per_s: float
    """From the device to pinned host memory."""

    @property
    def least_width(self) -> float:
        """Smallest hidden size with which copies of inputs hide behind the computation of blocks."""
        return self.flops / (12 * self.bytes_per_s)


class DeviceMemory(Protocol):
    """Memory of the device of this process, in bytes."""

    def total(self) -> int:
        """All that this process may allocate."""
        ...

    def allocated(self) -> int:
        """What its tensors take now."""
        ...

    def peak(self) -> int:
        """The most that its tensors have taken since the process began."""
        ...


class CudaMemory:
    """Memory of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        """Measure `device`."""
        self._device = device

    def total(self) -> int:
        """What is free, and what this process's allocator holds."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device)

    def allocated(self) -> int:
        """As in `DeviceMemory`."""
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        """As in `DeviceMemory`."""
        return torch.cuda.max_memory_allocated(self._device)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationPlan:
    """What is done about the activations of a model's blocks; in their order, those that are offloaded come first."""

    num_offloaded: int
    """Blocks that are computed again from an input that waits on the host."""
    num_recomputed: int
    """Blocks that are computed again from an input that stays on the device."""
    num_kept: int
    """Blocks whose activations stay on the device."""
    why: str

    def way(self, index: int) -> BlockWay:
        """What is done about the block with this index."""
        if index < self.num_offloaded:
            return "offload"
        return "recompute" if index < self.num_offloaded + self.num_recomputed else "keep"

    def __str__(self) -> str:
        """One line for the log."""
        parts = {"kept": self.num_kept, "computed again": self.num_recomputed}
        parts["computed again from inputs on the host"] = self.num_offloaded
        return f"blocks {', '.join(f'{what}: {number}' for what, number in parts.items() if number)}; {self.why}"


def plan_activations(
    num_blocks: int, input_bytes: int, kept_bytes: int, room_bytes: float, *, hides: bool, most_kept: int
) -> ActivationPlan:
    """Share out the memory that is free while all blocks are computed again, from inputs on the host if that hides.

    Args:
        num_blocks: Number of blocks.
        input_bytes: Size of the input of one block.
        kept_bytes: Size of what a block keeps if it is not computed again.
        room_bytes: What the device has free then, at the peak of a step; negative if too much is taken.
        hides: Whether copies of inputs to the host hide behind the computation.
        most_kept: Most blocks that may keep their activations.
    """
    gib = f"{max(0.0, room_bytes) / 2**30:.2f} GiB are free at the peak, a block keeps {kept_bytes / 2**30:.2f} GiB"
    more_bytes = max(1, kept_bytes + input_bytes * hides)  # a block that is kept has its input on the device, too
    reach = min(num_blocks, most_kept, max(0, int(room_bytes // more_bytes)))
    if not hides:
        missing = max(0, -room_bytes)
        num_offloaded = min(num_blocks, -int(-missing // max(1, input_bytes)))
        if num_offloaded:
            gib = f"{missing / 2**30:.2f} GiB are missing, and copies that do not hide are slower than none"
        kept = 0 if num_offloaded else reach
        return ActivationPlan(
            num_offloaded=num_offloaded, num_recomputed=num_blocks - num_offloaded - kept, num_kept=kept, why=gib
        )
    left = max(0.0, room_bytes - reach * more_bytes)
    resident = min(num_blocks - reach, int(left // max(1, input_bytes)))
    return ActivationPlan(num_offloaded=num_blocks - reach - resident, num_recomputed=resident, num_kept=reach, why=gib)


class BlockPeers(Protocol):
    """The ranks that communicate within blocks; see [Note: ranks that decide alike]."""

    def formed(self) -> Hashable:
        """Return what changes when one of them may have been replaced."""
        ...

    def least(self, number: int) -> int:
        """Return the least of their numbers; all of them call it together."""
        ...


class NoPeers:
    """Of a rank whose blocks do not communicate."""

    def formed(self) -> Hashable:
        """As in `BlockPeers`."""
        return 0

    def least(self, number: int) -> int:
        """As in `BlockPeers`."""
        return number


_Size = tuple[int, ...]
"""Shape of an input, of which tensor ranks may have a part each, and the bytes of an element."""


@dataclass(slots=True)
class _Measured:
    """What is known of one size of input."""

    began_after: int
    """Steps of the optimizer before its first forward."""
    input_bytes: int
    """Size of this rank's part of an input."""
    is_measured: bool = False
    """Whether a block was computed again."""
    kept_bytes: int = 0
    """Most memory that the activations of a block have taken while it was computed again."""
    room_bytes: float | None = None
    """What the device has free while all blocks are computed again; None before that is known."""
    plan: ActivationPlan | None = None


class _Pass:
    """A forward, alive as long as its graph."""


class AutomaticPlan:
    """Decides what each block of a model does in a forward, for each size of input; see the module."""

    def __init__(
        self,
        device: torch.device,
        *,
        recomputes_all: str = "",
        peers: BlockPeers | None = None,
        tensor_degree: int = 1,
        measure: Callable[[], DeviceSpeed] | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        """Measure nothing yet.

        Args:
            device: Device of the model.
            recomputes_all: Why no block may keep its activations; empty if they may.
            peers: The ranks that communicate within blocks; by default, none.
            tensor_degree: Number of ranks that compute a block together.
            measure: Measures the device when training begins; by default CUDA's, with a product and a copy, in some
                50 ms.
            memory: Memory of the device; by default CUDA's. Without it, as on a CPU, whose device is the host, all
                blocks are computed again.
        """
        is_cuda = device.type == "cuda"
        self._device, self._recomputes_all, self._tensor_degree = device, recomputes_all, tensor_degree
        self._peers, self._decides_alone = peers or NoPeers(), peers is None
        self._formed = self._peers.formed()
        self._measure = measure or (partial(measured_speed, device) if is_cuda else None)
        self._memory = memory or (CudaMemory(device) if is_cuda else None)
        self._speed: DeviceSpeed | None = None
        self._num_blocks = self._num_steps = self._peak = 0
        self._blocks: list[weakref.ref[nn.Module]] = []
        self._sizes: dict[_Size, _Measured] = {}
        self._former: dict[_Size, _Measured] = {}
        """What was known before the last repair."""
        self._size: _Size = (0, 0)
        """Of the input of the present forward's blocks."""
        self._input_bytes = 0
        """Of this rank's part of it."""
        self._plan: ActivationPlan | None = None
        """Of the present forward; None if its size is being measured, or plans do not hold."""
        self._before: dict[int, int] = {}
        self._passes: list[weakref.ref[_Pass]] = []
        """Forwards whose backward has not come yet."""
        self._is_regular = True
        """Whether plans hold; see [Note: what a plan relies on]."""

    def attach(self, blocks: Sequence[nn.Module]) -> None:
        """Decide about blocks. Call it when they are set up for recomputation and offload.

        Args:
            blocks: In the order in which the model runs them.
        """
        self._num_blocks = len(blocks)
        for index, block in enumerate(blocks):
            surround(block, partial(self._begin, index), partial(self._end, index))
        if self._memory is None:
            _tell(f"activation_offload='auto': blocks are computed again; the device ({self._device}) is the host")
        else:
            self._blocks = [weakref.ref(block) for block in blocks]
            count = weakref.WeakMethod(self._count_step)
            handle = register_optimizer_step_post_hook(
                lambda optimizer, *_: None if (found := count()) is None else found(optimizer)
            )
            weakref.finalize(self, handle.remove)

    def goes_to_host(self, index: int) -> bool:
        """Whether the block with this index, which has just begun, offloads its input."""
        return self._memory is not None and self._way(index) == "offload"

    def _count_step(self, optimizer: Optimizer) -> None:
        """Count a step on a parameter of the blocks, or any if none is trained, as long as a plan waits for it."""
        if all(each.plan is not None for each in self._sizes.values()):
            return
        blocks = (block for each in self._blocks if (block := each()) is not None)
        first = next((each for block in blocks for each in block.parameters() if each.requires_grad), None)
        if first is None or any(each is first for group in optimizer.param_groups for each in group["params"]):
            self._num_steps += 1

    def _begin(self, index: int, block: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if self._memory is None:
            return
        self._note_peak()
        if is_in_backward():
            if self._is_measuring:
                self._before[index] = self._memory.allocated()
            return
        if torch.is_grad_enabled():
            block_input = _input_of(args, kwargs)
            if index == 0 and block_input is not None:
                self._begin_forward(_size_of(block_input), _local_bytes(block_input))
            elif block_input is not None and _size_of(block_input) != self._size:
                self._note_irregular("its blocks have inputs of different shapes")
            if not self._recomputes_all:
                set_recomputed(block, self._way(index) != "keep")

    def _end(self, index: int, _: nn.Module, __: object, output: object) -> None:
        if self._memory is None:
            return
        self._note_peak()
        before = self._before.pop(index, None)
        if before is not None and self._is_measuring:
            found = self._sizes[self._size]
            found.kept_bytes = max(found.kept_bytes, self._memory.allocated() - before)
            found.is_measured = True
        first = output[0] if isinstance(output, tuple) and output else output
        if index == 0 and not is_in_backward() and isinstance(first, Tensor) and first.requires_grad:
            this_pass = _Pass()
            self._passes.append(weakref.ref(this_pass))
            first.register_hook(partial(self._end_pass, this_pass))  # as long as the graph, which may be dropped

    def _end_pass(self, _: "_Pass", __: Tensor) -> None:
        self._passes.clear()

    @property
    def _is_measuring(self) -> bool:
        """Whether the present size still needs a plan; to ask the device for its memory takes time in each block."""
        return self._is_regular and self._plan is None and self._size in self._sizes

    def _note_peak(self) -> None:
        """Keep the peak also if the program resets the counter of the device."""
        assert self._memory is not None
        if self._is_measuring:
            self._peak = max(self._peak, self._memory.peak())

    def _note_irregular(self, why: str) -> None:
        if self._is_regular:
            self._is_regular, self._plan = False, None
            _tell(f"activation_offload='auto': all blocks are computed again, since {why}")

    def _begin_forward(self, size: "_Size", input_bytes: int) -> None:
        """Note the size of the input, and decide if all is known that is needed for that."""
        assert self._measure is not None
        if (formed := self._peers.formed()) != self._formed:
            self._formed = formed
            self._begin_again()
        if any(each() is not None for each in self._passes) if self._decides_alone else self._passes:
            self._note_irregular("another forward follows before the backward of one")
        self._passes.clear()
        self._size, self._input_bytes = size, input_bytes
        self._speed = self._speed or self._measure()
        self._plan = self._plan_for(size) if self._is_regular else None
        if self._plan is not None or not self._is_regular:
            return
        if size not in self._sizes:
            former = self._former.get(size, _Measured(self._num_steps, input_bytes))
            self._sizes[size] = replace(former, began_after=self._num_steps, is_measured=False, plan=None)
        found = self._sizes[size]
        is_measured = found.is_measured or bool(self._recomputes_all)
        if is_measured and self._num_steps - found.began_after >= _NUM_STEPS:
            self._decide(found)

    def _begin_again(self) -> None:
        """Measure again, since a peer may have been replaced; see [Note: ranks that decide alike]."""
        self._former |= {size: found for size, found in self._sizes.items() if found.room_bytes is not None}
        self._sizes.clear()
        self._passes.clear()
        self._is_regular, self._plan = True, None

    def _decide(self, found: _Measured) -> None:
        """Make the plan for the present size, with the peers."""
        assert self._memory is not None
        if found.room_bytes is None:
            self._peak = max(self._peak, self._memory.peak())
            found.room_bytes = (1 - MARGIN) * self._memory.total() - self._peak
        hides, least_width = self._hides, self._least_width
        plan_of = partial(
            plan_activations, self._num_blocks, found.input_bytes, found.kept_bytes, found.room_bytes, hides=hides
        )
        own = plan_of(most_kept=0 if self._recomputes_all else self._num_blocks)
        num_kept = self._peers.least(own.num_kept)
        plan = own if num_kept == own.num_kept else plan_of(most_kept=num_kept)
        if plan.num_kept < own.num_kept:
            plan = replace(plan, why=f"{plan.why}; of the ranks that compute a block together, one has room for fewer")
        if self._recomputes_all:
            plan = replace(plan, why=f"{plan.why}; none is kept, since {self._recomputes_all}")
        self._plan = found.plan = plan
        if len(self._sizes) <= _MOST_TOLD:
            _tell(
                f"activation_offload='auto': {plan}; {'copies hide' if hides else 'copies would not hide'} behind the "
                f"computation (width {self._size[-2]}, and from {least_width:.0f} on they do)"
            )

    def _plan_for(self, size: "_Size") -> ActivationPlan | None:
        """The plan for a size, or for the smallest that is at least as large, which needs more."""
        plans = {other: each.plan for other, each in self._sizes.items() if each.plan and _is_larger(other, size)}
        return plans[min(plans, key=math.prod)] if plans else None

    @property
    def _least_width(self) -> float:
        """Smallest hidden size with which copies of the present inputs hide behind the computation of blocks."""
        if self._speed is None:
            return math.inf
        part = self._input_bytes / max(1, math.prod(self._size))  # tensor ranks may divide an input
        return self._speed.least_width * self._tensor_degree * part

    @property
    def _hides(self) -> bool:
        return self._size[-2] >= self._least_width

    def _way(self, index: int) -> BlockWay:
        if self._plan is None:
            return "offload" if self._hides else "recompute"
        return self._plan.way(index)


def _input_of(args: tuple[object, ...], kwargs: dict[str, object]) -> Tensor | None:
    """The first floating-point tensor that a block is given; None if there is none."""
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    return next((each for each in tensors if each.is_floating_point() and each.dim()), None)


def _size_of(block_input: Tensor) -> "_Size":
    return (*block_input.shape, block_input.element_size())


def _local_bytes(block_input: Tensor) -> int:
    """Size of this rank's part of an input."""
    local = block_input._local_tensor if isinstance(block_input, DTensor) else block_input  # pyright: ignore[reportPrivateUsage]
    return local.numel() * local.element_size()


def _is_larger(size: "_Size", other: "_Size") -> bool:
    """Whether a size is at least as large as another in each dimension."""
    return len(size) == len(other) and all(own >= its for own, its in zip(size, other, strict=True))


def _tell(line: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        log.warning("%s", line)


def measured_speed(device: torch.device) -> DeviceSpeed:
    """Measure a CUDA device."""
    matrix = torch.ones(_MATRIX, _MATRIX, dtype=torch.bfloat16, device=device)
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    product_s = _timed(lambda: matrix @ matrix, device)
    copy_s = _timed(lambda: target.copy_(source, non_blocking=True), device)
    return DeviceSpeed(flops=2 * _MATRIX**3 / product_s, bytes_per_s=_COPY_BYTES / copy_s)


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
