"""Prefetching host offload of what recomputation keeps: the inputs of checkpointed blocks.

`ActivationOffload.attach(blocks)` surrounds each block with hooks for saved tensors. Both of torch's checkpoint
functions save the inputs of a block through these hooks, so the inputs are copied to the host when the block begins,
and back when its backward does. Parameters, their views and small tensors stay where they are.

    forward     block i      its input is copied to the host, on a stream of its own, while the block computes;
                block i + h  the compute stream waits for that copy, and the memory on the device is free
    backward    block i      its input is there, copied while block i + h - 1 was computed; those of the h - 1 blocks
                             before it are being copied

So at most `horizon` = h blocks have their inputs on the device at once. The last block keeps its input: it is needed
first. This is the meaning of `activation_loading_horizon` in SMP v2. If another block begins after it, it was not the
last one, such as a block that runs several times in a forward, and its input is copied then.

What a block saves outside of a checkpoint function stays on the device, too: a block that is not recomputed needs all
of it in its backward, and to copy it takes longer than the block.

[Note: streams] A copy is ordered by events only. The tensor on the device belongs to the compute stream: it is
allocated there, and it is freed there after that stream has waited for the copy, so the allocator may reuse the memory
at once. The compute stream is read before a side stream is entered, never inside.
"""

# Storages have no public identity.
# pyright: reportPrivateUsage=false

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, Self
from weakref import ref

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.multiprocessing.reductions import StorageWeakRef

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.memory.host_pool import HostBlock, HostPool
from hyperpod_plugins.memory.recompute import (
    is_in_backward,
    is_in_checkpoint,
    is_saved_by_checkpoint,
    leave_out_of_graphs,
    surround,
)

log = logging.getLogger(__name__)
MIN_BYTES = 64 * 1024
"""Smaller tensors stay on the device: a copy costs more than their memory is worth."""


class Copies(Protocol):
    """Copies between a device and the host, beside the computation."""

    def store(self, source: Tensor, target: Tensor, after: object) -> object:
        """Begin to copy from the device to the host, after all that is queued and after the copy `after`.

        Args:
            source: On the device.
            target: On the host.
            after: Mark of the last copy that reads `target`; None for none.

        Returns:
            A mark of the copy's end.
        """
        ...

    def load(self, source: Tensor, target: Tensor, after: object) -> object:
        """Begin to copy back, after all that is queued and after the copy `after`; returns a mark of the copy's end."""
        ...

    def wait(self, mark: object) -> None:
        """Let all that is queued from now on wait for a copy; the host does not wait."""
        ...

    def finish(self, mark: object) -> None:
        """Let the host wait for a copy."""
        ...


class HostCopies:
    """Copies where the host is the device: done when they begin."""

    def store(self, source: Tensor, target: Tensor, after: object) -> None:
        """As in `Copies`."""
        target.copy_(source)

    def load(self, source: Tensor, target: Tensor, after: object) -> None:
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

    def store(self, source: Tensor, target: Tensor, after: object) -> torch.cuda.Event:
        """As in `Copies`."""
        return self._copy(self._to_host, source, target, after)

    def load(self, source: Tensor, target: Tensor, after: object) -> torch.cuda.Event:
        """As in `Copies`."""
        return self._copy(self._from_host, source, target, after)

    def wait(self, mark: object) -> None:
        """As in `Copies`."""
        assert isinstance(mark, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(mark)

    def finish(self, mark: object) -> None:
        """As in `Copies`."""
        assert isinstance(mark, torch.cuda.Event)
        mark.synchronize()

    def _copy(self, stream: torch.cuda.Stream, source: Tensor, target: Tensor, after: object) -> torch.cuda.Event:
        if isinstance(after, torch.cuda.Event):
            stream.wait_event(after)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        end = torch.cuda.Event()
        end.record(stream)
        return end


class _Kept:
    """One input of a block, kept on the host until its backward."""

    def __init__(self, offload: "ActivationOffload", saved: Tensor, block: HostBlock) -> None:
        local = _local(saved)
        self._offload = offload
        self._block = block
        self._layout = _Layout.of(saved) if isinstance(saved, DTensor) else None
        self.num_bytes = local.numel() * local.element_size()
        self._on_host = block.memory[: self.num_bytes].view(local.dtype).view(local.shape)
        self.source: Tensor | None = local
        """The tensor on the device, until its memory is freed there."""
        self._storage = StorageWeakRef(local.untyped_storage())
        self._version = local._version
        self._device = local.device
        self._loaded: Tensor | None = None
        self._stored = offload.copies.store(local, self._on_host, block.last_copy)
        self._loading: object = None  # mark of a copy that no stream waits for yet
        self._waits_for_store = True

    @property
    def is_on_device(self) -> bool:
        """Whether it takes memory on the device, besides what `take` has returned."""
        return self.source is not None or self._loaded is not None

    def is_copy_of(self, saved: Tensor) -> bool:
        """Whether it is what it would be if a tensor was stored now."""
        local = _local(saved)
        return (
            self._storage == StorageWeakRef(local.untyped_storage())
            and (self._version, self._on_host.shape) == (local._version, local.shape)
            and self._on_host.dtype == local.dtype
            and self._layout == (_Layout.of(saved) if isinstance(saved, DTensor) else None)
        )

    def free_source(self) -> None:
        """Free the memory on the device; the computation waits until the copy to the host has ended.

        Raises:
            ConfigError: The tensor was changed in place meanwhile.
        """
        if self.source is not None:
            _check_version(self.source, self._version)
            self._wait_for_store()
            self.source = None

    def prefetch(self) -> None:
        """Begin to copy back, unless the tensor is there."""
        if not self.is_on_device:
            self._loaded = torch.empty(self._on_host.shape, dtype=self._on_host.dtype, device=self._device)
            self._loading = self._offload.copies.load(self._on_host, self._loaded, self._stored)
            self._block.last_copy = self._loading

    def take(self) -> Tensor:
        """Return the tensor on the device, and keep only its copy on the host, for a second backward.

        Raises:
            ConfigError: The tensor was changed in place meanwhile.
        """
        if self.source is not None:
            _check_version(self.source, self._version)
            self._wait_for_store()
            local = self.source
        else:
            self.prefetch()
            self._offload.copies.wait(self._loading)
            local = self._loaded
        assert local is not None
        self.source = self._loaded = self._loading = None
        return local if self._layout is None else self._layout.around(local)

    def _wait_for_store(self) -> None:
        self._offload.copies.wait(self._stored)
        self._waits_for_store = False

    def __del__(self) -> None:
        if self._waits_for_store:  # the graph was dropped without a backward
            self._offload.copies.finish(self._stored)
        if self._loaded is not None:
            self._offload.copies.finish(self._loading)
        self._offload.pool.release(self._block)


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Packed:
    """What autograd holds in place of a tensor that a block has saved."""

    call: "_Call"
    saved: Tensor | None
    """The tensor, as long as it stays on the device; torch does not notice if it is changed in place, so this does."""
    version: int
    kept: _Kept | None = None
    """Instead of the tensor, from when it is copied to the host."""

    def tensor_on_device(self) -> Tensor:
        """The tensor, for a backward.

        Raises:
            ConfigError: It was changed in place.
        """
        if self.kept is not None:
            return self.kept.take()
        assert self.saved is not None
        _check_version(_local(self.saved), self.version)
        return self.saved


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Call:
    """One call of a block in forward, alive as long as something that it has saved."""

    block: nn.Module
    is_last: bool
    """Whether the block is the model's last one."""
    kept: "list[ref[_Kept]]" = field(default_factory=list)
    waiting: "list[ref[_Packed]]" = field(default_factory=list)
    """What it has saved for the host, to be copied if another call follows, as it is the last one so far."""
    is_recomputed: bool = False
    """Whether a checkpoint function has saved something in it."""
    has_saved: bool = False

    def alive(self) -> list[_Kept]:
        """What it keeps on the host, as far as autograd still holds it."""
        return [kept for each in self.kept if (kept := each()) is not None]

    def take_waiting(self) -> list[_Packed]:
        """What autograd still holds of what waits, which waits no longer."""
        waiting, self.waiting = self.waiting, []
        return [packed for each in waiting if (packed := each()) is not None]


@dataclass(slots=True, eq=False)
class _Input:
    """A tensor that a call of a block has saved for the host, and that may be the input of others, such as a mask."""

    storage: StorageWeakRef
    version: int
    call: "ref[_Call]"
    """The first one."""
    is_shared: bool = False

    @property
    def is_known(self) -> bool:
        """Whether the tensor exists, and either the call or others that share it."""
        return not self.storage.expired() and (self.is_shared or self.call() is not None)


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
        goes_to_host: Callable[[int], bool] | None = None,
    ) -> None:
        """Offload nothing yet; see `attach`.

        Args:
            device: Device of the model.
            horizon: Maximum number of blocks whose inputs are on the device at once, from 1 on.
            pool: Host memory; by default one of its own.
            copies: How to copy; by default as the device does.
            min_bytes: Size below which tensors stay on the device; 0 for `MIN_BYTES`.
            goes_to_host: Whether the inputs of a block, given its index, go to the host; asked as it begins. By default
                those of each block do, but for the last one.
        """
        self.horizon = horizon
        self.pool = pool or HostPool(device)
        self.copies: Copies = copies or (StreamCopies(device) if device.type == "cuda" else HostCopies())
        self._device_type = device.type
        self._min_bytes = min_bytes or MIN_BYTES
        self._goes_to_host = goes_to_host
        self._seen = set[int]()  # indices of blocks that have begun with gradients
        self._num_begun = 0  # blocks since the last one that offloads
        self._lock = threading.RLock()
        self._calls: list[ref[_Call]] = []  # in the order of forward
        self._entered: list[tuple[_Call, saved_tensors_hooks]] = []
        self._inputs: list[_Input] = []
        self._has_told = False
        self.stored_bytes = 0
        """Bytes copied to the host so far."""

    def attach(self, blocks: Sequence[nn.Module]) -> None:
        """Offload the inputs of blocks. Call it after they are set up for recomputation, before they are sharded.

        The first forward or backward raises `ConfigError` for a block that the model calls within a checkpoint of its
        own, which the offload cannot surround.

        Args:
            blocks: In the order in which the model runs them.
        """
        for index, block in enumerate(blocks):
            surround(block, partial(self._begin, index, block is blocks[-1]), self._end)
            leave_out_of_graphs(block)

    @_disable_dynamo
    def _begin(self, index: int, is_last: bool, block: nn.Module, _: object, __: object) -> None:
        if not torch.is_grad_enabled():
            return  # an evaluation
        if is_in_backward():
            if index not in self._seen:
                raise _within_checkpoint(block)  # a reentrant one, whose forward has no gradients
            return  # a recomputation
        if is_in_checkpoint():
            raise _within_checkpoint(block)
        self._seen.add(index)
        call = _Call(block, is_last) if self._goes_to_host is None or self._goes_to_host(index) else None
        with self._lock:
            self._num_begun = self._num_begun + 1 if call is None else 0
            if call is not None:
                self._calls.append(ref(call))
            alive = self._alive_calls()
            for packed in [each for earlier in alive if earlier is not call for each in earlier.take_waiting()]:
                self._store(packed)
            for earlier in alive[: max(0, len(alive) - max(0, self.horizon - self._num_begun))]:
                for kept in earlier.alive():
                    kept.free_source()
        if call is None:
            return
        hooks = saved_tensors_hooks(partial(self._pack, call), self._unpack)
        hooks.__enter__()
        self._entered.append((call, hooks))

    def _end(self, block: nn.Module, _: object, output: object) -> None:
        if not self._entered or self._entered[-1][0].block is not block:
            return
        call, hooks = self._entered.pop()
        hooks.__exit__(None, None, None)
        if output is None or call.is_recomputed or not call.has_saved or self._has_told:
            return
        self._has_told = True
        log.warning(
            "activation_offload: %s recomputes nothing in this forward by torch's checkpoint function, so what it "
            "keeps stays on the device. Layers of transformers recompute in training mode only (model.train()), and "
            "one in n of them with every_n_layers=n. Without the model's own checkpointing, activation_offload "
            "recomputes all blocks itself, in evaluation mode, too",
            type(block).__name__,
        )

    @_disable_dynamo
    def _pack(self, call: _Call, saved: Tensor) -> object:
        is_input = is_saved_by_checkpoint(call.block)
        call.has_saved, call.is_recomputed = True, call.is_recomputed or is_input
        packed = _Packed(call, saved, _local(saved)._version)
        with self._lock:
            if is_input and self._is_worth_it(saved) and not self._is_shared(saved, call):
                if call.is_last:
                    call.waiting.append(ref(packed))
                else:
                    self._store(packed)
        return packed

    def _store(self, packed: _Packed) -> None:
        """Begin to copy a tensor to the host, if there is room, and let go of it."""
        saved, call = packed.saved, packed.call
        assert saved is not None
        _check_version(_local(saved), packed.version)
        packed.kept = next((each for each in call.alive() if each.is_copy_of(saved)), None)
        if packed.kept is None:
            block = self.pool.acquire(_size(saved))
            if block is None:
                if self.pool.num_refused == 1:
                    log.warning(
                        "host memory for activations is limited to %.1f GiB, and is full: what does not fit stays on "
                        "the device. activation_host_memory_gib sets the limit, which is half of this rank's share by "
                        "default",
                        self.pool.budget_bytes / 2**30,
                    )
                return
            packed.kept = _Kept(self, saved, block)
            call.kept.append(ref(packed.kept))
            self.stored_bytes += packed.kept.num_bytes
        packed.saved = None

    @_disable_dynamo
    def _unpack(self, packed: object) -> Tensor:
        assert isinstance(packed, _Packed)
        with self._lock:
            tensor = packed.tensor_on_device()
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
        base = saved._base if saved._is_view() else saved
        if isinstance(saved, nn.Parameter) or isinstance(base, nn.Parameter) or not saved.is_floating_point():
            return False
        local = _local(saved)
        return (
            local.device.type == self._device_type
            and local.is_contiguous()
            and local.untyped_storage().nbytes() == _size(local) >= self._min_bytes  # not a part of something else
        )

    def _is_shared(self, saved: Tensor, call: _Call) -> bool:
        """Whether other blocks take the same tensor, such as a mask, which would be copied for each of them."""
        local = _local(saved)
        storage = StorageWeakRef(local.untyped_storage())
        self._inputs = [each for each in self._inputs if each.is_known]
        for each in self._inputs:
            if each.storage == storage and each.version == local._version:
                each.is_shared = each.is_shared or each.call() is not call
                return each.is_shared
        self._inputs.append(_Input(storage, local._version, ref(call)))
        return False


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


def _within_checkpoint(block: nn.Module) -> ConfigError:
    return ConfigError(
        f"{type(block).__name__} is called within a checkpoint function of its model, and what that keeps cannot be "
        "offloaded. Switch the model's own checkpointing off, and leave recomputation to activation_offload; "
        "or let the block call the checkpoint function in its forward."
    )


def _check_version(tensor: Tensor, version: int) -> None:
    """Refuse a backward that computes with other values than the forward has.

    Raises:
        ConfigError: The tensor was changed in place.
    """
    if tensor._version != version:
        raise ConfigError(
            f"a tensor of shape {(*tensor.shape,)} that a block keeps for its backward, such as its input for the "
            "recomputation, was changed in place, so that the backward would compute with other values. Change the "
            "operation in the block, or of its result, to one that is not in place (x = x * 2 for x *= 2), or do "
            "without activation_checkpointing and activation_offload."
        )


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, outside autograd."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def _size(tensor: Tensor) -> int:
    local = _local(tensor)
    return local.numel() * local.element_size()
