"""The reductions of Lightning's strategy interface."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def reduced(tensor: Tensor, group: dist.ProcessGroup | None, reduce_op: Any) -> Tensor:
    """Reduce a copy of a tensor over a group.

    A mean is computed as a sum and a division, because not every collective library can average.

    Args:
        tensor: the same shape on all ranks; a DTensor (such as a loss from split logits) is gathered first.
        group: to reduce over; None for the default group.
        reduce_op: a `ReduceOp`, or the name of one; `mean`, `avg` or None for the mean, which is floating point.
    """
    is_mean = reduce_op in (None, "mean", "avg") or reduce_op == dist.ReduceOp.AVG
    operation: Any = "sum" if is_mean else reduce_op
    if isinstance(operation, str):
        operation = getattr(dist.ReduceOp, operation.upper())
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    result = whole.detach().clone()
    if is_mean and not result.is_floating_point():
        result = result.float()
    dist.all_reduce(result, op=operation, group=group)
    return result / dist.get_world_size(group) if is_mean else result


def decided(decision: bool, device: torch.device, *, by_all: bool) -> bool:
    """Whether `decision` is true on all ranks, or on any rank if not `by_all`."""
    votes = torch.tensor(int(decision), device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN if by_all else dist.ReduceOp.MAX)
    return bool(votes)
