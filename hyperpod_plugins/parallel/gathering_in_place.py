"""Parameters that only one rank has a shard of, which are gathered without a copy.

With one rank a shard, the shard is the whole parameter. FSDP2 (torch 2.13) still copies it into other memory in each
gather, in forward and in backward, which made a step of a small model 2 to 4 % longer (docs/benchmarks.md). Here the
gathered parameter is a view of the shard, as in DDP: nothing is copied, and nothing is allocated. That is not possible
where the gathered parameter has another type or device than the shard, as with mixed precision.

[Note: a version counter of its own] The view does not count the writes to the shard, nor the shard those to the view.
So what the optimizer and a restore write is no write of the program to a gathered parameter; see
`gathered_parameters.py`.
"""

# FSDP2's parameters have no public API.
# pyright: reportPrivateUsage=false

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch


class GatheringInPlace:
    """Gathers one parameter of an FSDP2 group in place, whenever that is possible."""

    __slots__ = ("_free", "_init_outputs", "_of_fsdp", "_view")

    def __init__(self, of_fsdp: Any) -> None:
        """Replace methods of FSDP2's record of a parameter with one rank a shard: what makes and what frees memory."""
        self._of_fsdp = of_fsdp
        self._view: torch.Tensor | None = None
        """The memory of the shard, as the gathered parameter; None if that has memory of its own."""
        self._init_outputs, self._free = of_fsdp.init_all_gather_outputs, of_fsdp.free_unsharded_param
        vars(of_fsdp).update(init_all_gather_outputs=self._choose_memory, free_unsharded_param=self._free_memory)

    @property
    def is_ready(self) -> bool:
        """Whether the gathered parameter exists, as a view of the present shard."""
        of_fsdp = vars(self._of_fsdp)
        return self._view is of_fsdp["_sharded_param_data"] and "_unsharded_param" in of_fsdp

    def _choose_memory(self, numels: Sequence[int], dtypes: Sequence[torch.dtype], *args: Any, **kwargs: Any) -> None:
        """Called in each gather, before the shard is copied to where it is gathered: nowhere, if that is itself."""
        of_fsdp = self._of_fsdp
        shard = of_fsdp._sharded_param_data
        if self._view is not None and self._view is shard:
            return
        self._forget()  # the program has replaced the shard, as `module.to` or `load_state_dict(assign=True)` do
        if not of_fsdp.all_gather_outputs and _is_whole(of_fsdp, shard, numels, dtypes):
            self._view = of_fsdp._sharded_param_data = shard.data  # the same memory; see the note on version counters
            of_fsdp.all_gather_outputs = [self._view]
        self._init_outputs(numels, dtypes, *args, **kwargs)

    def _forget(self) -> None:
        if self._view is not None:
            self._view, self._of_fsdp.all_gather_outputs = None, []
            vars(self._of_fsdp).pop("_unsharded_param", None)

    def _free_memory(self) -> None:
        if self._view is None:
            self._free()


def gather_in_place(group: Any) -> None:
    """Gather the parameters of an FSDP2 parameter group with one rank a shard in place from now on."""
    parameters = [GatheringInPlace(each) for each in group.fsdp_params]
    if group.device.type == "cpu":
        vars(group)["wait_for_unshard"] = partial(_wait_for_unshard, group, parameters, group.wait_for_unshard)


def _wait_for_unshard(group: Any, parameters: Sequence[GatheringInPlace], of_torch: Callable[[], object]) -> None:
    """End a gather. There is nothing to wait for if all parameters are views: only attributes of modules change."""
    needs_torch = group.comm_ctx.all_gather_state is not None or not all(each.is_ready for each in parameters)
    if group._all_gather_result is None or needs_torch:
        of_torch()
        return
    group._to_unsharded()
    group._all_gather_result = None


def _is_whole(of_fsdp: Any, shard: Any, numels: Sequence[int], dtypes: Sequence[torch.dtype]) -> bool:
    """Whether a gather would copy all values of the shard as they are, and the shard has its memory for itself."""
    return (
        type(shard) is torch.Tensor
        and shard.numel() > 0
        and [*numels] == [shard.numel()]
        and [*dtypes] == [shard.dtype]
        and not of_fsdp.offload_to_cpu
        and not shard.is_meta
        and shard.untyped_storage().nbytes() == shard.nbytes
    )
