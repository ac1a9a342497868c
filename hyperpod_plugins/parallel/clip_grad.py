"""Gradient norm and clipping for parameters on different meshes, or on none."""

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, _foreach_norm  # pyright: ignore
from torch.distributed.tensor import DTensor, Replicate

from hyperpod_plugins.parallel.hsdp import compute_device, local_part


@torch.no_grad()
def gradient_norm(parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the norm of all gradients as one vector, the same on every rank.

    `torch.nn.utils.clip_grad_norm_` cannot mix meshes: with hybrid sharding and tensor parallelism some parameters
    lie on `(replicate, shard)` and some on `(replicate, shard, tensor)`. Here each rank takes the norms of its local
    parts, where these lie, and each norm is reduced over exactly the groups its parameter is split over, on the device
    of the mesh. Gradients that are plain tensors are assumed to be replicated.

    Returns:
        A float32 scalar, `()`; zero if no parameter has a gradient.
    """
    is_max = math.isinf(norm_type)
    operation = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    device = torch.device("cpu")
    for gradient in _gradients(parameters):
        by_groups.setdefault(_split_over(gradient), []).append(local_part(gradient))
        device = compute_device(gradient)
    if not by_groups:
        return torch.tensor(0.0)
    totals: list[Tensor] = []
    for groups, gradients in by_groups.items():
        parts = [gradient for gradient in gradients if gradient.numel()]  # an empty tensor has no infinity norm
        zero = torch.zeros((), device=gradients[0].device)
        norms = torch.stack([zero, *(norm.float() for norm in (_foreach_norm(parts, norm_type) if parts else ()))])
        total = (norms.max() if is_max else norms.pow(norm_type).sum()).to(device)  # gradients may be on the host
        for group in groups:
            dist.all_reduce(total, op=operation, group=group)
        totals.append(total)
    return torch.stack(totals).max() if is_max else torch.stack(totals).sum().pow(1 / norm_type)


def _split_over(gradient: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups whose members hold different parts of a gradient, innermost axis first."""
    if not isinstance(gradient, DTensor):
        return ()
    axes = [axis for axis, placement in enumerate(gradient.placements) if not placement.is_replicate()]
    return tuple(gradient.device_mesh.get_group(axis) for axis in reversed(axes))


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients in place so that their total norm is at most `max_norm`; return the norm before scaling.

    Args:
        parameters: parameters on any mix of meshes; those without a gradient are skipped.
        max_norm: maximum norm.
        norm_type: order of the norm; `inf` for the largest absolute value.
    """
    with_gradient = list(parameters)
    norm = gradient_norm(with_gradient, norm_type)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    converted: dict[tuple[torch.device, torch.dtype], Tensor] = {}
    for gradient in _gradients(with_gradient):
        local = local_part(gradient)
        kind = local.device, local.dtype
        if kind not in converted:
            converted[kind] = factor.to(*kind)
        local.mul_(converted[kind])
    return norm


@torch.no_grad()
def clip_grad_value_(parameters: Iterable[Tensor], max_value: float) -> None:
    """Clamp every element of every gradient to `[-max_value, max_value]`, in place."""
    for gradient in _gradients(parameters):
        local_part(gradient).clamp_(-max_value, max_value)


def _gradients(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield each gradient; writing to its local part writes to the gradient.

    A DTensor with a `Partial` placement, whose ranks hold terms of a sum, is reduced first. FSDP2 leaves no such
    gradient, but a DTensor parameter that it does not shard may have one.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and any(each.is_partial() for each in gradient.placements):
            placements = [Replicate() if each.is_partial() else each for each in gradient.placements]
            gradient = parameter.grad = gradient.redistribute(placements=placements)
        if gradient is not None:
            yield gradient
