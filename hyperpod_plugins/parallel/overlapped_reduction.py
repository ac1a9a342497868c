"""All-reduces of gradients between replicas that run while backward goes on, for tensors in host memory.

On a GPU, FSDP2 queues the all-reduce of a unit on a stream of its own, and backward of the next unit runs meanwhile.
On a CPU it waits for each. Here the wait is put off until backward ends, as in DDP: the collective library's threads
reduce one unit while this thread computes the next.

[Note: when a wait may be put off] Between the all-reduce and the end of backward, FSDP2 only takes views of the result,
unless it casts it to another type, divides it, adds it to a gradient that is there already, copies it to another
device, or calls a hook with it. In these cases the wait stays where it was.

[Note: gradients that are awaited] A program may read or write a gradient within backward: in hooks of modules and
activations, in functions of its own, or with an optimizer that steps there. So until the wait, the local part of the
gradient is an `AwaitedTensor`, with which whatever uses it waits first.

[Note: one buffer] FSDP2 copies a unit's gradients into one piece of memory for the reduce-scatter, and the result of
that into another one. With one rank a shard there is no reduce-scatter, and both are the same memory here.
"""

# FSDP2's parameter groups have no public API.
# pyright: reportPrivateUsage=false

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from hyperpod_plugins.comm import ResilientProcessGroup
from hyperpod_plugins.comm.work import ResilientWork

_DIVIDED_BY_LIBRARY = torch.float32, torch.bfloat16
"""Types in which the collective library computes the mean; FSDP2 itself divides others."""


class OverlappedReduction:
    """The all-reduces of one FSDP2 unit whose waits are put off."""

    def __init__(self, group: Any) -> None:
        """Prepare for a parameter group of FSDP2, in place; does nothing yet."""
        self._group = group
        self._works: list[dist.Work] = []
        self._awaited: list[tuple[torch.Tensor, Any]] = []
        """The shards, and their gradients, DTensors, that `_works` compute."""
        self._lock = threading.RLock()
        """Of `wait`: a thread of the program may read a gradient, too."""
        self._state_context: Any = None
        is_on_host = group.device.type == "cpu"
        self._is_eligible = is_on_host and isinstance(group.mesh_info, DDPMeshInfo)
        if is_on_host and shard_size(group) == 1 and type(group._reduce_scatter_comm) is DefaultReduceScatter:
            group._reduce_scatter_comm = _OneBuffer()

    @contextmanager
    def reduction(self) -> Generator[None]:
        """Context of one reduction, in which its all-reduce is not waited for if that may be put off."""
        self.wait()  # the unit ran more than once, and its gradients are added up
        comm = self._group._reduce_scatter_comm
        if isinstance(comm, _OneBuffer):
            comm.begin()
        replicas = self._replicas() if self._is_eligible else None
        if replicas is None:
            yield
            return
        with replicas.defer_waits(self._works):
            yield
        if self._works:
            self._await_gradients()

    def wait(self) -> None:
        """Wait for the all-reduces.

        Raises:
            PeerLost: a rank is lost, outside a step.
        """
        if not self._works:
            return
        with self._lock:
            while self._works:
                self._works[0].wait()
                del self._works[0]  # not before: whatever reads a gradient after a wait that failed must fail, too
            awaited, self._awaited = self._awaited, []
            for _, gradient in awaited:
                if isinstance(gradient._local_tensor, AwaitedTensor):
                    gradient._local_tensor.wait = _nothing  # the program may keep it
                    gradient._local_tensor = gradient._local_tensor.value

    def forget(self) -> None:
        """Drop the all-reduces of a backward that has not ended, with the gradients that they compute."""
        works, awaited, self._works, self._awaited = self._works, self._awaited, [], []
        for each in works:
            if isinstance(each, ResilientWork):
                each.discard()  # the library may still write to the memory
        for shard, gradient in awaited:
            if shard.grad is gradient:
                shard.grad = None

    def _await_gradients(self) -> None:
        for each in self._group.fsdp_params:
            shard, gradient = each.sharded_param, each.sharded_param.grad
            if gradient is not None:
                gradient._local_tensor = AwaitedTensor(gradient._local_tensor, self.wait)
                self._awaited.append((shard, gradient))

    def _replicas(self) -> ResilientProcessGroup | None:
        """The group of the all-reduce, if its wait may be put off; see [Note: when a wait may be put off]."""
        group, replicas = self._group, self._group._all_reduce_process_group
        is_plain = (
            group.all_reduce_grads
            and group.gradient_divide_factor is None
            and not group.force_sum_reduction_for_comms
            and group._all_reduce_hook is None
            and self._is_last_backward
        )
        if not is_plain or not isinstance(replicas, ResilientProcessGroup):
            return None
        for each in group.fsdp_params:
            shard = each.sharded_param
            in_type = group._reduce_dtype or each.param_dtype or each.orig_dtype
            is_kept = in_type == each.orig_dtype and in_type in _DIVIDED_BY_LIBRARY and not each.offload_to_cpu
            is_reduced = shard.requires_grad or each.unsharded_accumulated_grad is not None
            if shard.grad is not None or (is_reduced and not is_kept) or shard._post_accumulate_grad_hooks:
                return None
        return replicas

    @property
    def _is_last_backward(self) -> bool:
        """Whether FSDP2 will finalize the unit when this backward ends."""
        if self._state_context is None:
            self._state_context = self._group.modules[0]._get_fsdp_state()._state_ctx
        return self._state_context.is_last_backward


class AwaitedTensor(torch.Tensor):
    """A tensor that a collective is writing to. Whatever uses it waits first, and gets the tensor itself.

    Args:
        value: the tensor.
        wait: waits for the collective, if it was not waited for yet.
    """

    value: torch.Tensor
    wait: Callable[[], object]

    @staticmethod
    def __new__(cls: type["AwaitedTensor"], value: torch.Tensor, wait: Callable[[], object]) -> "AwaitedTensor":
        """Wrap the tensor, without an operation."""
        made: AwaitedTensor = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls,
            value.size(),
            strides=value.stride(),
            storage_offset=value.storage_offset(),
            dtype=value.dtype,
            layout=value.layout,
            device=value.device,
            requires_grad=False,
        )
        made.value, made.wait = value, wait
        return made

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Wait before methods and attributes as well: some, such as `numpy` and `data_ptr`, read memory directly."""
        args, kwargs = tree_map_only(AwaitedTensor, _arrived, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    @override
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(AwaitedTensor, _arrived, (args, kwargs or {}))
        return func(*args, **kwargs)


def _arrived(tensor: AwaitedTensor) -> torch.Tensor:
    tensor.wait()
    return tensor.value


def _nothing() -> None:
    """Wait for nothing: the collective has ended."""


class _OneBuffer(DefaultReduceScatter):
    """Allocates one buffer for input and result; see [Note: one buffer]."""

    def __init__(self) -> None:
        super().__init__()
        self._input: torch.Tensor | None = None

    def begin(self) -> None:
        """Forget the input of a reduction that was interrupted."""
        self._input = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return new memory for the input, and the same for the result."""
        given, self._input = self._input, None
        if given is not None and (given.shape, given.dtype, given.device) == (torch.Size(size), dtype, device):
            return given
        self._input = super().allocate(size, dtype=dtype, device=device)
        return self._input


def shard_size(group: Any) -> int:
    """Number of ranks over which the parameters of an FSDP2 parameter group are sharded."""
    return group._all_gather_process_group.size()
