"""`requires_grad` of parameters that FSDP2 has gathered: what a program sets while it computes is not forgotten.

A gathered parameter is another tensor than the shard that the optimizer holds, and FSDP2 copies the flag from the shard
when it gathers. A program that freezes a layer within a forward, such as Lightning's `training_step`, sets the flag of
whichever it can see: of gathered parameters by `module.requires_grad_`, of shards by `toggle_optimizer`. Here the one
that has been changed since they were equal determines the other.
"""

# FSDP2's parameters have no public API.
# pyright: reportPrivateUsage=false

from collections.abc import Iterable
from typing import Any

from torch import nn


def follow_requires_grad(groups: Iterable[Any]) -> None:
    """Keep the flags of shards and of gathered parameters equal, in FSDP2 parameter groups that are not watched yet."""
    for group in groups:
        flags: dict[nn.Module, list[_Flag]] = {}
        for each in group.fsdp_params:
            flag, info = _Flag(each), each._module_info
            for owner in (info.module, *info.shared_modules):
                flags.setdefault(owner, []).append(flag)
        vars(group)["_hyperpod_flags"] = flags


def flags_of(groups: Iterable[Any]) -> dict[nn.Module, list["_Flag"]]:
    """Return the flags of the parameters of groups, by the module that has the parameter."""
    return {part: flags for group in groups for part, flags in vars(group).get("_hyperpod_flags", {}).items()}


def make_equal(flags: Iterable["_Flag"]) -> None:
    """Have shards and gathered parameters agree again, before a module computes with the latter."""
    for each in flags:
        each.make_equal()


class _Flag:
    """`requires_grad` of one parameter: of its shard, and of the gathered parameter."""

    __slots__ = ("_last", "_of_fsdp", "_to_sharded", "_to_unsharded")

    def __init__(self, of_fsdp: Any) -> None:
        """Wrap two methods of FSDP2's record of the parameter, which switch between the shard and the whole."""
        self._of_fsdp, self._last = of_fsdp, of_fsdp.sharded_param.requires_grad
        self._to_sharded, self._to_unsharded = of_fsdp.to_sharded, of_fsdp.to_unsharded
        vars(of_fsdp).update(to_sharded=self._shard, to_unsharded=self._gather)

    def make_equal(self) -> None:
        """Have the one that was changed since they were equal determine the other."""
        shard, whole = self._of_fsdp.sharded_param, vars(self._of_fsdp).get("_unsharded_param")
        if whole is not None and whole.requires_grad != shard.requires_grad:
            changed, other = (whole, shard) if shard.requires_grad == self._last else (shard, whole)
            other.requires_grad_(changed.requires_grad)
        self._last = shard.requires_grad

    def _gather(self) -> None:
        self._to_unsharded()  # copies the flag
        self._last = self._of_fsdp.sharded_param.requires_grad

    def _shard(self) -> None:
        if self._of_fsdp.sharded_state.name == "UNSHARDED":
            self.make_equal()
        self._to_sharded()
