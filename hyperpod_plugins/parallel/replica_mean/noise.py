"""Average the gradients of a step over replicas, and collect the norms that AdaScale estimates gradient noise from.

A part is the gradient that one replica computes in one micro-step. Its squared norm is taken over the whole model,
before the part is accumulated. A step of R replicas and M micro-steps thus has R x M parts, and the last micro-step
costs one large all-reduce between replicas, as FSDP2's own would, and a small one of 2 R M + 1 numbers over all
ranks.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, _foreach_norm, nn  # pyright: ignore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hyperpod_plugins.parallel.replica_mean.flat import GradientVector


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNormTable:
    """Squared gradient norms of one step; bitwise equal on all ranks."""

    table: Tensor
    """Squared norm and weight of each part, and then the squared norm of the mean, `(2 * num_parts + 1,)`, float64.

    Parts are weighted gradients: sums over their samples, times the number of replicas, divided by the number of
    samples in the step. Weights are summed over the ranks of a replica that read different samples.
    """
    num_micro_steps: int
    """Number of parts of each replica."""


class NoiseMeasuringMean:
    """Averages gradients over replicas once per step, in place of FSDP2, and compares the parts of the step.

    Costs a float32 copy of the local gradients, and a second one if micro-steps are accumulated. Unlike FSDP2's, the
    large all-reduce does not overlap with backward.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Average over `replicate`, whose size may change between steps.

        Args:
            model: sharded within each replica.
            mesh: `("replicate", "shard", "tensor")`.

        Raises:
            ConfigError: FSDP2 averages gradients over the replicas itself.
        """
        self._vector = GradientVector(model, "lr_scaling='adascale'")
        self._replicas = mesh.get_group("replicate")
        self._tensor_degree = mesh.size(2)
        replica_size = mesh.size(1) * self._tensor_degree
        self._copies = [replica_size / _num_shards(parameter) for parameter in self._vector.parameters]
        self._sum: Tensor | None = None
        self._norms: list[Tensor] = []
        self._weights: list[float] = []

    def add(self, weight: float, *, is_first: bool, is_last: bool) -> GradientNormTable | None:
        """Take the gradients of one micro-step; after the last one, set the gradients to the mean of the step.

        Never raises because of values: after a fault they are garbage.

        Args:
            weight: factor that this rank's loss was multiplied by.
            is_first: whether this is the first micro-step of a step; resets the state, as a step may be run again.
            is_last: whether this is the last micro-step of a step.

        Returns:
            The comparison after the last micro-step; None before.
        """
        if is_first:
            self._sum, self._norms, self._weights = None, [], []
        part = self._vector.flatten()
        self._norms.append(self._squared_norm(part))
        self._weights.append(weight / self._tensor_degree)
        self._sum = part if self._sum is None else self._sum.add_(part)
        if not is_last:
            return None
        mean, self._sum = self._sum, None
        num_replicas, num_micro_steps = self._replicas.size(), len(self._norms)
        if num_replicas > 1:
            dist.all_reduce(mean, group=self._replicas)
            mean.div_(num_replicas)
        parts = mean.new_zeros(num_replicas, num_micro_steps, 2, dtype=torch.float64)
        parts[self._replicas.rank(), :, 0] = torch.stack(self._norms)
        parts[self._replicas.rank(), :, 1] = parts.new_tensor(self._weights)
        table = torch.cat([parts.view(-1), self._squared_norm(mean).view(1) / num_replicas])
        dist.all_reduce(table)
        self._vector.unflatten(mean)
        return GradientNormTable(table=table, num_micro_steps=num_micro_steps)

    def _squared_norm(self, vector: Tensor) -> Tensor:
        """Squared norm of the local gradients, `()`; summed over a replica's ranks it is that of the whole model."""
        parts = self._vector.parts(vector)
        norms = torch.stack([norm.double() for norm in _foreach_norm(parts)])
        return (norms.square() / norms.new_tensor(self._copies)).sum()


def _num_shards(parameter: Tensor) -> int:
    """Number of ranks of a replica that hold different parts of a parameter; the other ranks hold copies."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh, found = parameter.device_mesh, 1
    for axis, placement in enumerate(parameter.placements):
        found *= 1 if placement.is_replicate() else mesh.size(axis)
    return found
