"""Prefetching host offload of what recomputation keeps: the inputs of checkpointed blocks.

`ActivationOffload.attach(blocks)` surrounds each block with hooks for saved tensors. Both of torch's checkpoint
functions save the inputs of a block through these hooks, so the inputs are copied to the host when the block begins,
and back when its backward does. Parameters, their views and small tensors stay where they are.

    forward     block i      its input is copied to the host, on a stream of its own, while the block computes;
                block i + h  the compute stream waits for that copy, and the memory on the device is free
    backward    block i      its input is there, copied while block i + h - 1 was computed; those of the h - 1 blocks
                             before it are being copied

So at most `horizon` = h blocks have their inputs on the device at once. The last block keeps its input: it is needed
first. This is the meaning of `activation_loading_horizon` in SMP v2.

[Note: streams] A copy is ordered by events only. The tensor on the device belongs to the compute stream: it is
allocated there, and it is freed there after that stream has waited for the copy, so the allocator may reuse the memory
at once. The compute stream is read before a side stream is entered, never inside.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, Self
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from hyperpod_plugins.memory.host_pool import HostPool

MIN_BYTES = 64 * 1024
"""Smaller tensors stay on the device: a copy costs more than their memory is worth."""


class Copies(Protocol):
    """Copies between a device and the host, beside the computation."""

    def store(self, source: Tensor, target: Tensor) -> object:
        """Begin to copy from the device to the host, after all that is queued; returns a mark of the copy's end."""
        ...

    def load(self, source: Tensor, target: Tensor, stored: object) -> object:
        """Begin to copy back, after all that is queued and after the copy `stored`; returns a mark of its end."""
        ...

    def wait(self, mark: object) -> None:
        """Let all that is queued from now on wait for a copy; the host does not wait."""
        ...

    def finish(self, mark: object) -> None:
        """Let the host wait for a copy."""
        ...


class HostCopies:
    """Copies where the host is the device: done when they begin."""

    def store(self, source: Tensor, target: Tensor) -> None:
        """As in `Copies`."""
        target.copy_(source)

    def load(self, source: Tensor, target: Tensor, stored: object) -> None:
        """As in `Copies`."""
        target.copy_(source)

    def wait(self, mark: object) -> None:
        """Nothing to wait for."""

    def finish(self, mark: object) -> None:
        """Nothing to wait for."""


class StreamCopies:
    """Copies of a CUDA device, on one stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        """Create the streams."""
        self._device = device
        self._to_host = torch.cuda.Stream(device)
        self._from_host = torch.cuda.Stream(device)

    def store(self, source: Tensor, target: Tensor) -> torch.cuda.Event:
        """As in `Copies`."""
        return self._copy(self._to_host, source, target)

    def load(self, source: Tensor, target: Tensor, stored: object) -> torch.cuda.Event:
        """As in `Copies`."""
        assert isinstance(stored, torch.cuda.Event)
        self._from_host.wait_event(stored)
        return self._copy(self._from_host, source, target)

    def wait(self, mark: object) -> None:
        """As in `Copies`."""
        assert isinstance(mark, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(mark)

    def finish(self, mark: object) -> None:
        """As in `Copies`."""
        assert isinstance(mark, torch.cuda.Event)
        mark.synchronize()

    def _copy(self, stream: torch.cuda.Stream, source: Tensor, target: Tensor) -> torch.cuda.Event:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        end = torch.cuda.Event()
        end.record(stream)
        return end


class _Kept:
    """One input of a block, kept on the host until its backward; autograd holds it in place of the tensor."""

    def __init__(self, offload: "ActivationOffload", call: "_Call", saved: Tensor, block: Tensor) -> None:
        local = _local(saved)
        self.call = call
        self._offload = offload
        self._block = block
        self._layout = _Layout.of(saved) if isinstance(saved, DTensor) else None
        self.num_bytes = local.numel() * local.element_size()
        self._on_host = block[: self.num_bytes].view(local.dtype).view(local.shape)
        self.source: Tensor | None = local
        """The tensor on the device, until its memory is freed there."""
        self._loaded: Tensor | None = None
        self._device = local.device
        self._is_taken = False
        self._ends: list[object] = [offload.copies.store(local, self._on_host)]  # marks of copies not waited for

    @property
    def is_on_device(self) -> bool:
        """Whether it takes memory on the device, besides what `take` has returned."""
        return self.source is not None or self._loaded is not None

    def free_source(self) -> None:
        """Free the memory on the device; the computation waits until the copy to the host has ended."""
        if self.source is not None:
            self._offload.copies.wait(self._ends[0])
            self.source = None

    def prefetch(self) -> None:
        """Begin to copy back, unless the tensor is there."""
        if not self.is_on_device:
            self._loaded = torch.empty(self._on_host.shape, dtype=self._on_host.dtype, device=self._device)
            self._ends.append(self._offload.copies.load(self._on_host, self._loaded, self._ends[0]))

    def take(self) -> Tensor:
        """Return the tensor on the device, and keep only its copy on the host, for a second backward."""
        self.prefetch()
        for mark in self._ends:
            self._offload.copies.wait(mark)
        del self._ends[1:]
        local = self.source if self.source is not None else self._loaded
        assert local is not None
        self.source = self._loaded = None
        self._is_taken = True
        return local if self._layout is None else self._layout.around(local)

    def __del__(self) -> None:
        if not self._is_taken:  # the graph was dropped without a backward
            for mark in self._ends:
                self._offload.copies.finish(mark)
        self._offload.pool.release(self._block)


@dataclass(slots=True, eq=False)
class _Resident:
    """An input of the last block, which stays on the device."""

    call: "_Call"
    saved: Tensor


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Call:
    """One call of a block in forward, alive as long as one of its inputs."""

    is_last: bool
    """Whether the block is the model's last one."""
    kept: "list[ref[_Kept]]" = field(default_factory=list)

    def alive(self) -> list[_Kept]:
        """What it has saved, as far as autograd still holds it."""
        return [kept for each in self.kept if (kept := each()) is not None]


class ActivationOffload:
    """Offload of one model's checkpointed blocks; see the module."""

    def __init__(
        self,
        device: torch.device,
        *,
        horizon: int = 2,
        pool: HostPool | None = None,
        copies: Copies | None = None,
        min_bytes: int = 0,
    ) -> None:
        """Offload nothing yet; see `attach`.

        Args:
            device: Device of the model.
            horizon: Maximum number of blocks whose inputs are on the device at once, from 1 on.
            pool: Host memory; by default one of its own.
            copies: How to copy; by default as the device does.
            min_bytes: Size below which tensors stay on the device; 0 for `MIN_BYTES`.
        """
        self.horizon = horizon
        self.pool = pool or HostPool(device)
        self.copies: Copies = copies or (StreamCopies(device) if device.type == "cuda" else HostCopies())
        self._device_type = device.type
        self._min_bytes = min_bytes or MIN_BYTES
        self._lock = threading.RLock()
        self._calls: list[ref[_Call]] = []  # in the order of forward
        self._entered: list[tuple[nn.Module, saved_tensors_hooks]] = []
        self._shared: list[ref[Tensor]] = []  # inputs of several blocks, such as a mask
        self.stored_bytes = 0
        """Bytes copied to the host so far."""

    def attach(self, blocks: Sequence[nn.Module]) -> None:
        """Offload the inputs of blocks. Call it after they are set up for recomputation, before they are sharded.

        Args:
            blocks: In the order in which the model runs them.
        """
        for block in blocks:
            block.register_forward_pre_hook(partial(self._begin, block is blocks[-1]), prepend=True)
            block.register_forward_hook(self._end, always_call=True)

    def _begin(self, is_last: bool, block: nn.Module, _: object) -> None:
        in_backward = torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        if in_backward or not torch.is_grad_enabled():
            return  # a recomputation, or an evaluation
        call = _Call(is_last)
        with self._lock:
            self._calls.append(ref(call))
            for earlier in self._alive_calls()[: -self.horizon]:
                for kept in earlier.alive():
                    kept.free_source()
        hooks = saved_tensors_hooks(partial(self._pack, call), self._unpack)
        hooks.__enter__()
        self._entered.append((block, hooks))

    def _end(self, block: nn.Module, *_: object) -> None:
        if self._entered and self._entered[-1][0] is block:
            self._entered.pop()[1].__exit__(None, None, None)

    def _pack(self, call: _Call, saved: Tensor) -> object:
        if not self._is_worth_it(saved):
            return saved
        if call.is_last:
            return _Resident(call, saved)
        if self._is_shared(_local(saved), call):
            self._shared.append(ref(saved))
            return saved
        block = self.pool.acquire(_size(saved))
        if block is None:
            return saved
        kept = _Kept(self, call, saved, block)
        call.kept.append(ref(kept))
        self.stored_bytes += kept.num_bytes
        return kept

    def _unpack(self, packed: object) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        assert isinstance(packed, _Kept | _Resident)
        tensor = packed.saved if isinstance(packed, _Resident) else packed.take()
        with self._lock:
            calls = self._alive_calls()
            position = calls.index(packed.call)
            for earlier in calls[max(0, position - self.horizon + 1) : position]:
                for kept in earlier.alive():
                    kept.prefetch()
        return tensor

    def _alive_calls(self) -> list[_Call]:
        alive = [call for each in self._calls if (call := each()) is not None]
        self._calls = [ref(call) for call in alive]
        return alive

    def _is_worth_it(self, saved: Tensor) -> bool:
        base = saved._base if saved._is_view() else saved  # pyright: ignore[reportPrivateUsage]
        if isinstance(saved, nn.Parameter) or isinstance(base, nn.Parameter) or not saved.is_floating_point():
            return False
        local = _local(saved)
        return (
            local.device.type == self._device_type
            and local.is_contiguous()
            and local.untyped_storage().nbytes() == _size(local) >= self._min_bytes  # not a part of something else
        )

    def _is_shared(self, local: Tensor, call: _Call) -> bool:
        """Whether other blocks take the same tensor, such as a mask, which would be copied for each of them."""
        self._shared = [each for each in self._shared if each() is not None]
        calls = [each for each in self._alive_calls() if each is not call]
        known = [each for one in calls for kept in one.alive() if (each := kept.source) is not None]
        known += [_local(each) for one in self._shared if (each := one()) is not None]
        return any(each.data_ptr() == local.data_ptr() for each in known)


@dataclass(frozen=True, slots=True)
class _Layout:
    """What makes a DTensor of a local part."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: DTensor) -> Self:
        return cls(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride())

    def around(self, local: Tensor) -> DTensor:
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, outside autograd."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _size(tensor: Tensor) -> int:
    local = _local(tensor)
    return local.numel() * local.element_size()
