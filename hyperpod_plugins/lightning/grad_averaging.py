"""Averaging a Trainer's gradients over replicas outside FSDP2, for reproducible steps and for AdaScale."""

# Lightning's loops have no public API.
# pyright: reportPrivateUsage=false

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from hyperpod_plugins.elastic.scaling.adascale import GradientNoise
from hyperpod_plugins.lightning.compat import Trainer
from hyperpod_plugins.lightning.datamodule import sample_weight_of
from hyperpod_plugins.lightning.elastic_training import ElasticTraining
from hyperpod_plugins.parallel.replica_mean import FixedOrderMean, GradientNormTable, NoiseMeasuringMean


class FixedOrderAveraging:
    """Averages gradients in a fixed order, so that results do not depend on the number of replicas.

    Each micro-batch of a rank is its part of one logical shard.
    """

    def __init__(self, trainer: Trainer, module: nn.Module, mesh: DeviceMesh, options: ElasticTraining) -> None:
        """Average gradients of a module for which FSDP2 does not average over replicas.

        Raises:
            ConfigError: FSDP2 averages over replicas.
        """
        assert options.split is not None
        self._trainer = trainer
        self._options = options
        self._mean = FixedOrderMean(module, mesh.get_group("replicate"), options.split.num_logical_shards)
        self._shards = mesh.get_group("shard")
        self._loss = torch.zeros(())
        self._mean_loss: Tensor | None = None

    def computed(self, output: Any) -> None:
        """Note the loss that a training step returned."""
        loss = output["loss"] if isinstance(output, dict) else output
        self._loss = loss.detach().clone() if isinstance(loss, Tensor) else torch.zeros(())

    def add(self, loss: Tensor, backward: Callable[[Tensor], Tensor], batch_index: int) -> Tensor:
        """Run a backward and take its gradients; after the last one of a step, leave the mean over the global batch.

        Lightning has divided the loss by the number of micro-steps, which depends on the number of replicas. The loss
        is multiplied by that number again, so that its gradient is exactly 1; a quotient would be rounded.

        Args:
            loss: of a micro-batch, as divided by Lightning.
            backward: computes the gradients of such a loss.
            batch_index: number of the batch in the epoch.
        """
        num_micro_steps = self._trainer.accumulate_grad_batches
        result = backward(loss * num_micro_steps)
        mean = self._mean.add(batch_index % num_micro_steps, self._loss)
        if mean is not None:
            if self._shards.size() > 1:  # each rank had its part of every logical shard
                dist.all_reduce(mean, group=self._shards)
            self._mean_loss = mean / self._shards.size()
        return result

    def committed(self) -> None:
        """Publish the loss of the committed step as `ElasticTraining.step_loss`."""
        self._options.step_loss = self._mean_loss


class GradAveraging(Protocol):
    """Averages gradients over replicas in place of FSDP2; the strategy calls it in each step."""

    def computed(self, output: Any) -> None:
        """Take what `training_step` returned."""
        ...

    def add(self, loss: Tensor, backward: Callable[[Tensor], Tensor], batch_index: int) -> Tensor:
        """Run a backward; after the last one of a step, leave the step's mean as the gradients.

        Args:
            loss: of a micro-batch, as divided by Lightning, weighted.
            backward: computes the gradients of such a loss.
            batch_index: number of the batch in the epoch.
        """
        ...

    def committed(self) -> None:
        """Called when the step is committed, just before the optimizer steps."""
        ...


def grad_averaging_for(
    trainer: Trainer, module: nn.Module, mesh: DeviceMesh, options: ElasticTraining
) -> GradAveraging | None:
    """The averaging that these options need; None if FSDP2 averages.

    Raises:
        ConfigError: FSDP2 averages over replicas, but the options do not allow it.
    """
    if options.reproducible:
        return FixedOrderAveraging(trainer, module, mesh, options)
    return AdaScaleAveraging(trainer, module, mesh, options) if options.rates.rule.is_adascale else None


class AdaScaleAveraging(GradAveraging):
    """Averages gradients, and measures the gradient noise for AdaScale.

    The comparison of gradients is part of the step, but AdaScale only uses it at the commit: a step that is computed
    again is compared again, and a step that is never committed has no effect.
    """

    def __init__(self, trainer: Trainer, module: nn.Module, mesh: DeviceMesh, options: ElasticTraining) -> None:
        """Average gradients of a module for which FSDP2 does not average over replicas.

        Raises:
            ConfigError: FSDP2 averages over replicas.
        """
        self._trainer = trainer
        self._rates = options.rates
        self._mean = NoiseMeasuringMean(module, mesh)
        self._ranks_per_replica = mesh.size(1)
        self._compared: GradientNormTable | None = None

    @override
    def computed(self, output: Any) -> None:
        """Do nothing: the loss is not needed."""

    @override
    def add(self, loss: Tensor, backward: Callable[[Tensor], Tensor], batch_index: int) -> Tensor:
        """Run a backward and take its gradients; after the last one of a step, leave the step's mean."""
        result = backward(loss)
        loop = self._trainer.fit_loop
        self._compared = self._mean.add(
            sample_weight_of(self._trainer, batch_index),
            is_first=batch_index % self._trainer.accumulate_grad_batches == 0,
            is_last=batch_index == loop.epoch_loop.batch_idx and not loop._should_accumulate(),
        )
        return result

    @override
    def committed(self) -> None:
        """Pass the noise of the committed step's gradients to the learning rates."""
        if self._compared is not None:
            self._rates.noise = noise_of(self._compared, self._ranks_per_replica)


def noise_of(compared: GradientNormTable, ranks_per_replica: int) -> GradientNoise:
    """The gradient noise of a step, from the norms of its parts' gradients.

    A part's weighted gradient is the gradient of its samples times the ratio of its number of samples to that of the
    mean replica in a full step.

    Args:
        compared: gradients of the step.
        ranks_per_replica: ranks of a replica that read different samples.
    """
    *parts, of_mean = compared.table.tolist()
    per_replica = ranks_per_replica * compared.num_micro_steps
    shares = [weight / per_replica for weight in parts[1::2]]
    num_replicas = len(shares) // compared.num_micro_steps
    norms = [norm / (share * share) if share else 0.0 for norm, share in zip(parts[::2], shares, strict=True)]
    return GradientNoise(
        squared_norms=tuple(norms),
        shares=tuple(share / num_replicas for share in shares),
        mean_squared_norm=of_mean,
    )
