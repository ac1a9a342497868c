"""Parameters whose shards are whole, because the shard degree is 1: a unit computes with the memory of its shards.

FSDP2 gathers such a shard by a copy into memory that it allocates for each gather, and copies the gradients of a unit
twice before they are averaged over the replicas. `DistributedDataParallel` copies no parameter, and gradients once.
Here a gathered parameter is another tensor in the memory of its shard, and the second copy of gradients is left out.

[Note: what differs for a program] A write to a gathered parameter would reach the shard. It is detected and refused as
with any other shard degree (`gathered_parameters.py`). A write to a shard while it is gathered, such as that of an
optimizer within a forward, is seen by the modules at once, as in one process.
"""

# FSDP2's parameters have no public API.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportDeprecated=false

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hyperpod_plugins.parallel.unit_watch import parameter_groups

_NEEDED = ("free_unsharded_param", "init_all_gather_outputs", "_sharded_param_data", "offload_to_cpu")
"""Attributes of FSDP2's parameters that are overridden or read."""


def compute_with_shards(units: Iterable[nn.Module]) -> None:
    """Have units whose shard degree is 1 compute with the memory of their shards.

    Parameters that FSDP2 converts on the way, to another dtype or device or by methods of their own, are copied.
    """
    for unit in units:
        assert isinstance(unit, FSDPModule)
        unit.set_custom_reduce_scatter(cast(Any, _OneBuffer()))  # its type has no public name
        for group in parameter_groups(unit):
            for each in group.fsdp_params:
                if {*_NEEDED} <= {*dir(each)}:
                    _WholeShard(each)


class _WholeShard:
    """One parameter of FSDP2, gathered in place."""

    __slots__ = ("_free", "_init", "_is_in_place", "_of_fsdp")

    def __init__(self, of_fsdp: Any) -> None:
        """Wrap the methods of FSDP2's record of the parameter that allocate and free the gathered memory."""
        self._of_fsdp, self._is_in_place = of_fsdp, False
        self._init, self._free = of_fsdp.init_all_gather_outputs, of_fsdp.free_unsharded_param
        vars(of_fsdp).update(init_all_gather_outputs=self._take_memory, free_unsharded_param=self._release)

    def _take_memory(self, numels: Sequence[int], dtypes: Sequence[torch.dtype], *others: Any) -> None:
        """Called before FSDP2 copies the shard, which does nothing if it is the same memory."""
        of_fsdp = self._of_fsdp
        shard: torch.Tensor = of_fsdp._sharded_param_data
        is_converted = of_fsdp.offload_to_cpu or of_fsdp.param_dtype is not None or shard.dtype != of_fsdp.orig_dtype
        if is_converted or not _is_alone(shard) or _converts_itself(of_fsdp._sharded_local_tensor):
            if self._is_in_place:
                self._is_in_place = False
                of_fsdp.all_gather_outputs = []
                vars(of_fsdp).pop("_unsharded_param", None)
            self._init(numels, dtypes, *others)
            return
        outputs: list[torch.Tensor] = of_fsdp.all_gather_outputs
        if not self._is_in_place or outputs[0].data_ptr() != shard.data_ptr():
            self._move(shard)

    def _move(self, shard: torch.Tensor) -> None:
        """Have the gathered parameter lie in the memory of a shard.

        It is a tensor with a version counter of its own: that of the shard counts the writes of the optimizer.
        """
        of_fsdp, self._is_in_place = self._of_fsdp, True
        gathered = torch.empty(0, dtype=shard.dtype, device=shard.device)
        _put(gathered, shard, shard.size(), shard.stride())
        of_fsdp.all_gather_outputs = [gathered]
        whole: torch.Tensor | None = vars(of_fsdp).get("_unsharded_param")
        if whole is not None:  # FSDP2 keeps the one that it has made first
            local = whole._local_tensor if isinstance(whole, DTensor) else whole
            _put(local, shard, local.size(), local.stride())

    def _release(self) -> None:
        if not self._is_in_place:
            self._free()


def _is_alone(shard: torch.Tensor) -> bool:
    """Whether no other tensor lies in the same storage: FSDP2 gives a storage the size of the gathered parameter."""
    return type(shard) is torch.Tensor and shard.untyped_storage().size() == shard.numel() * shard.element_size() > 0


def _converts_itself(local: torch.Tensor) -> bool:
    """Whether a tensor has methods that FSDP2 calls before and after it gathers."""
    return getattr(local, "fsdp_pre_all_gather", None) is not None


def _put(tensor: torch.Tensor, shard: torch.Tensor, size: Sequence[int], stride: Sequence[int]) -> None:
    """Have a tensor lie in the memory of a shard. That is no write, so its version stays."""
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tensor):
        tensor.set_(shard.untyped_storage(), 0, size, stride)


class _OneBuffer:
    """FSDP2's reduce-scatter among one rank: the result lies where the input is, and is not copied.

    FSDP2 asks for two tensors of one size and copies the first to the second.
    """

    def __init__(self) -> None:
        self._input: weakref.ref[torch.Tensor] | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a new tensor, and the same one when asked again."""
        known, self._input = None if self._input is None else self._input(), None
        if known is not None and known.size() == torch.Size(size) and known.dtype == dtype and known.device == device:
            return known
        made = torch.empty(*size, dtype=dtype, device=device)
        self._input = weakref.ref(made)
        return made

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        """Communicate; FSDP2 of torch 2.13 does not call this for one rank."""
        if output_tensor is input_tensor:
            return None
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
