"""Accelerate's collectives over the ranks that read different samples."""

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hyperpod_plugins.accelerate.compat import recursively_apply
from hyperpod_plugins.comm import group_health
from hyperpod_plugins.errors import ConfigError

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def gathered(data: Any, group: dist.ProcessGroup) -> Any:
    """Concatenate tensors in lists, tuples and dicts with those of the other ranks, each along its first dimension.

    A scalar becomes a vector. Logits that are split over the vocabulary are gathered into full tensors first.
    """

    def gather_one(tensor: Tensor) -> Tensor:
        local = _whole(tensor)
        local = (local[None] if local.dim() == 0 else local).contiguous()
        parts = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(parts, local, group=group)
        return torch.cat(parts)

    return recursively_apply(gather_one, data, error_on_other_type=True)


def are_tensors(data: Any) -> bool:
    """Whether lists, tuples and dicts contain nothing but tensors."""
    if isinstance(data, Mapping):
        return all(map(are_tensors, cast("Mapping[Any, Any]", data).values()))
    if isinstance(data, list | tuple):
        return all(map(are_tensors, cast("list[Any]", data)))
    return isinstance(data, Tensor)


def gathered_objects(data: Any, group: dist.ProcessGroup) -> list[Any]:
    """Concatenate the ranks' lists of picklable objects, in the order of ranks."""
    lists: list[Any] = [None] * group.size()
    with group_health.checks_host_read():
        dist.all_gather_object(lists, data, group=group)
    return [each for one in lists for each in one]


def reduced(data: Any, group: dist.ProcessGroup, reduction: str) -> Any:
    """Return copies of tensors in lists, tuples and dicts, reduced over a group; `none` only copies.

    Raises:
        ConfigError: the reduction is unknown.
    """
    if reduction not in (*_OPERATIONS, "none"):
        raise ConfigError(f"reduction must be one of {', '.join(_OPERATIONS)}, none, but is {reduction!r}")

    def reduce_one(tensor: Tensor) -> Tensor:
        result = _whole(tensor).clone()
        if reduction != "none":
            dist.all_reduce(result, op=_OPERATIONS[reduction], group=group)
        return result / group.size() if reduction == "mean" else result

    return recursively_apply(reduce_one, data, error_on_other_type=True)


def without_padding(data: Any, gradient_state: Any) -> Any:
    """Remove from gathered data the samples that only pad the last batch of a loader."""
    remainder = gradient_state.remainder if gradient_state.end_of_dataloader else 0
    if remainder <= 0:
        return data
    if isinstance(data, list) and not any(isinstance(each, Tensor) for each in cast("list[Any]", data)):
        return data[:remainder]
    return recursively_apply(lambda tensor: tensor[:remainder], data)


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
