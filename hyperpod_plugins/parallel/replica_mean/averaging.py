"""Gradient averaging outside FSDP2, micro-step by micro-step: for reproducible steps, and for AdaScale."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hyperpod_plugins.parallel.replica_mean.noise import GradientNormTable, NoiseMeasuringMean
from hyperpod_plugins.parallel.replica_mean.reproducible import FixedOrderMean


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMicroStep:
    """One forward and backward pass of this rank, as a part of an optimizer step."""

    index: int
    """Number within the step, from 0; 0 starts a new step, or the same step again."""
    count: int
    """Number of micro-steps by which losses are divided; a last, smaller step has fewer."""
    is_last: bool
    """Whether the step ends with it."""
    weight: float
    """Factor that the rank's mean loss is multiplied by, so that all samples of the step count equally."""


class FixedOrderAveraging:
    """Averages gradients in a fixed order, so that results do not depend on the number of replicas.

    Each micro-batch of a rank is its part of one logical shard. Losses are not divided, because a quotient would be
    rounded, and the number of micro-steps depends on the number of replicas.
    """

    divides_loss = False
    """Whether losses are divided by the number of micro-steps before backward."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, num_logical_shards: int) -> None:
        """Average gradients of a module for which FSDP2 does not average over replicas.

        Raises:
            ConfigError: FSDP2 averages over replicas.
        """
        self._mean = FixedOrderMean(module, mesh.get_group("replicate"), num_logical_shards)
        self._shards = mesh.get_group("shard")
        self.mean_loss: Tensor | None = None
        """Mean loss of the last step over its whole global batch, shaped as in `add`; None before the first step."""

    def add(self, micro_step: RankMicroStep, loss: Tensor) -> None:
        """Take the gradients of one logical shard after its backward; after the last one, leave the step's mean.

        Args:
            micro_step: whose backward has run.
            loss: this rank's mean loss, not divided, `()`, or also other means over its samples, `(num_values,)`.
        """
        mean = self._mean.add(micro_step.index, loss)
        if mean is not None:
            if self._shards.size() > 1:  # each rank had its part of every logical shard
                dist.all_reduce(mean, group=self._shards)
            self.mean_loss = mean / self._shards.size()


class NoiseMeasuringAveraging:
    """Averages gradients, and measures the norms that AdaScale estimates gradient noise from.

    The comparison of gradients is part of the step, but AdaScale only uses it at the commit: a step that is computed
    again is compared again, and a step that is never committed has no effect.
    """

    divides_loss = True
    """Whether losses are divided by the number of micro-steps before backward."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Average gradients of a module for which FSDP2 does not average over replicas.

        Raises:
            ConfigError: FSDP2 averages over replicas.
        """
        self._mean = NoiseMeasuringMean(module, mesh)
        self.ranks_per_replica = mesh.size(1)
        """Ranks of a replica that read different samples."""
        self.compared: GradientNormTable | None = None
        """Comparison of the last step's gradients; None within a step, and before the first."""

    def add(self, micro_step: RankMicroStep, loss: Tensor) -> None:
        """Take the gradients of a micro-step after its backward; after the last one, leave the step's mean.

        Args:
            micro_step: whose backward has run.
            loss: not needed.
        """
        self.compared = self._mean.add(micro_step.weight, is_first=micro_step.index == 0, is_last=micro_step.is_last)


GradAveraging = FixedOrderAveraging | NoiseMeasuringAveraging
"""Averages gradients over replicas in place of FSDP2. All ranks call `add` after each backward, in the same order."""
