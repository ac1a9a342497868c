"""What a program does to parameters while FSDP2 has gathered them: it freezes them, or writes to them.

A gathered parameter is another tensor than the shard that the optimizer holds. FSDP2 copies `requires_grad` and the
values from the shard when it gathers, and nothing back.

- A program that freezes a layer within a forward, such as Lightning's `training_step`, sets the flag of whichever it
  can see: of gathered parameters by `module.requires_grad_`, of shards by `toggle_optimizer`. Here the one that has
  been changed since they were equal determines the other.
- A write, such as that of `nn.Embedding(max_norm=...)` or of a momentum encoder in `training_step`, would be lost, or
  with `parameter.data = ...` even detach the parameter from its shards. It is detected, so that the step is refused.
- Attributes that it sets on one of the two, such as `parameter._no_weight_decay`, are copied to the other, and
  references of the program show the one that the module's attribute shows; see `follow_references`.

[Note: how writes to gathered parameters are found] FSDP2 preserves the version counter of a gathered parameter, so
only the program advances it. A write through `.data` does not advance it; the bit sums that are compared in the first
gathers show it. An assignment of `.data` changes the memory.
"""

# FSDP2's parameters have no public API.
# pyright: reportPrivateUsage=false

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.tensor import DTensor

NUM_COMPARED = 8
"""First gathers of a parameter at whose end its bits are compared; those of a replica that a replacement follows count,
but for those of a step that is undone."""
_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
PRIVATE_ATTRIBUTES = ("_is_param", "_fsdp", "_dynamo")
"""Beginnings of the names of torch's own attributes of parameters, which describe one tensor."""


def follow_parameters(groups: Iterable[Any]) -> None:
    """Start following the parameters of FSDP2 parameter groups that are not followed yet."""
    for group in groups:
        of_module: dict[nn.Module, list[GatheredParameter]] = {}
        followed = [GatheredParameter(each) for each in group.fsdp_params]
        for each, parameter in zip(group.fsdp_params, followed, strict=True):
            info = each._module_info
            for owner in (info.module, *info.shared_modules):
                of_module.setdefault(owner, []).append(parameter)
        vars(group).update(_hyperpod_parameters=followed, _hyperpod_parameters_of=of_module)


def followed_parameters(group: Any) -> Sequence["GatheredParameter"]:
    """Return the parameters of a group, in FSDP2's order; none if they are not followed."""
    return vars(group).get("_hyperpod_parameters", ())


def parameters_by_module(groups: Iterable[Any]) -> dict[nn.Module, list["GatheredParameter"]]:
    """Return the followed parameters of groups, by the module that has the parameter."""
    of_groups = [vars(group).get("_hyperpod_parameters_of", {}) for group in groups]
    return {part: followed for each in of_groups for part, followed in each.items()}


class ParameterReference(Protocol):
    """A place outside of modules in which the program keeps a parameter."""

    def set(self, parameter: torch.Tensor) -> None:
        """Replace the parameter there."""
        ...


class GatheredParameter:
    """One parameter of an FSDP2 group while it is gathered, compared with its shard."""

    __slots__ = (
        "_attributes",
        "_before",
        "_is_converted",
        "_is_noted",
        "_is_split",
        "_last_flag",
        "_of_fsdp",
        "_references",
        "_reset",
        "_to_sharded",
        "_to_unsharded",
        "_version",
        "is_written",
        "num_compared",
    )

    def __init__(self, of_fsdp: Any) -> None:
        """Wrap methods of FSDP2's record of the parameter: two switch between shard and whole, one notes new shards."""
        self.is_written = False
        """Whether the program has written to it while it was gathered; up to date once `note_writes` was called."""
        self._of_fsdp, self._last_flag = of_fsdp, of_fsdp.sharded_param.requires_grad
        self._version = 0
        self.num_compared = 0
        """Gathers of it in which its bits have been compared."""
        self._is_split = self._is_converted = self._is_noted = False
        """Of the gathered parameter: whether it is a DTensor, and whether its values are not in the gathered memory."""
        self._before: torch.Tensor | None = None
        self._references: list[ParameterReference] = []
        self._attributes = vars(of_fsdp.sharded_param)
        self._to_sharded, self._to_unsharded = of_fsdp.to_sharded, of_fsdp.to_unsharded
        self._reset = of_fsdp.reset_sharded_param
        vars(of_fsdp).update(to_sharded=self._shard, to_unsharded=self._gather, reset_sharded_param=self._take_shard)

    @property
    def is_compared(self) -> bool:
        """Whether its bits are compared in its next gather."""
        return self.num_compared < NUM_COMPARED

    @property
    def shard(self) -> torch.Tensor:
        """The sharded parameter, which the optimizer holds."""
        return self._of_fsdp.sharded_param

    def refer(self, reference: ParameterReference) -> None:
        """From now on, have a reference show what the module's attribute shows."""
        self._references.append(reference)
        is_gathered = self._of_fsdp.sharded_state is ShardedState.UNSHARDED
        reference.set(self._of_fsdp._unsharded_param if is_gathered else self.shard)

    def make_flags_equal(self) -> None:
        """Have the flag that was changed since they were equal determine the other, before a module computes."""
        shard, whole = self._of_fsdp.sharded_param, vars(self._of_fsdp).get("_unsharded_param")
        if whole is not None and whole.requires_grad != shard.requires_grad:
            changed, other = (whole, shard) if shard.requires_grad == self._last_flag else (shard, whole)
            other.requires_grad_(changed.requires_grad)
        self._last_flag = shard.requires_grad

    def note_writes(self) -> None:
        """Detect writes to the parameter since it was gathered; does nothing if it is not gathered."""
        of_fsdp = self._of_fsdp
        if of_fsdp.sharded_state is not ShardedState.UNSHARDED:
            return
        whole, info = of_fsdp._unsharded_param, of_fsdp._module_info
        local = whole._local_tensor if self._is_split else whole
        version = whole._version + local._version if self._is_split else whole._version
        if version != self._version or info.module._parameters.get(info.param_name) is not whole:
            self._version, self.is_written = version, True
        elif not self._is_converted:
            if local.data_ptr() != of_fsdp.all_gather_outputs[0].data_ptr():
                self.is_written = True
            if self._before is not None:
                self.is_written |= bool(self._before != _sum_of_bits(local))
                self._before = None

    def _take_shard(self) -> None:
        """Follow the module's parameter, which `module.to` or `load_state_dict` may have replaced."""
        self._reset()
        self._keep_attributes()

    def _keep_attributes(self) -> None:
        """Keep the attributes of a shard that torch has replaced, or has given the attributes of another tensor."""
        present = vars(self.shard)
        if present is not self._attributes:
            _copy_attributes(self._attributes, present)
            self._attributes = present

    def _gather(self) -> None:
        self._to_unsharded()  # copies the flag
        shard, whole = self._of_fsdp.sharded_param, self._of_fsdp._unsharded_param
        self._last_flag = shard.requires_grad
        self._keep_attributes()
        _copy_attributes(self._attributes, vars(whole))
        for reference in self._references:
            reference.set(whole)
        is_compared = self.is_compared
        if is_compared or not self._is_noted:
            local = self._note(whole)
            self.num_compared += is_compared
            if is_compared and not self._is_converted:
                self._before = _sum_of_bits(local)

    def _note(self, whole: torch.Tensor) -> torch.Tensor:
        """Note in which tensor the values are; returns it."""
        self._is_split, self._is_noted = isinstance(whole, DTensor), True
        local = whole._local_tensor if isinstance(whole, DTensor) else whole
        of_torch = type(local) in (torch.Tensor, nn.Parameter)
        self._is_converted = not of_torch or bool(self._of_fsdp._unsharded_inner_tensors)
        return local

    def _shard(self) -> None:
        of_fsdp = self._of_fsdp
        if of_fsdp.sharded_state is ShardedState.UNSHARDED:
            self.make_flags_equal()
            self.note_writes()
            _copy_attributes(vars(of_fsdp._unsharded_param), self._attributes)
        self._to_sharded()
        for reference in self._references:
            reference.set(self.shard)


def _copy_attributes(source: dict[str, Any], target: dict[str, Any]) -> None:
    """Copy what the program has set on a parameter to the attributes of the tensor in its place."""
    if len(source) > ("_is_param" in source):
        target.update({key: value for key, value in source.items() if not key.startswith(PRIVATE_ATTRIBUTES)})


def _sum_of_bits(memory: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(memory.detach()) if memory.is_complex() else memory.detach()
    return real.view(_INTEGER_OF_SIZE[real.element_size()]).sum(dtype=torch.int64)
