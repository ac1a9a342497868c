"""Steps of a Trainer that average gradients over replicas themselves, instead of leaving that to FSDP2."""

# Lightning's loops have no public spelling.
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
from hyperpod_plugins.parallel.replica_mean.noise import ComparedMean, Comparison
from hyperpod_plugins.parallel.replica_mean.reproducible import FixedOrderMean

# Steps of a Trainer whose bits do not depend on how many replicas compute them.


class LogicalShards:
    """The gradients of one rank, micro-step by micro-step: each micro-batch is its part of one logical shard."""

    def __init__(self, trainer: Trainer, module: nn.Module, mesh: DeviceMesh, options: ElasticTraining) -> None:
        """Keep replicas in step that FSDP2 does not.

        Raises:
            ConfigError: it does.
        """
        assert options.split is not None
        self._trainer = trainer
        self._options = options
        self._mean = FixedOrderMean(module, mesh.get_group("replicate"), options.split.num_logical_shards)
        self._shards = mesh.get_group("shard")
        self._loss = torch.zeros(())
        self._mean_loss: Tensor | None = None

    def computed(self, output: Any) -> None:
        """Note the loss that a training step has returned."""
        loss = output["loss"] if isinstance(output, dict) else output
        self._loss = loss.detach().clone() if isinstance(loss, Tensor) else torch.zeros(())

    def add(self, loss: Tensor, backward: Callable[[Tensor], Tensor], batch_index: int) -> Tensor:
        """Run a backward and take its gradients; after the last one of a step, leave the mean over its whole batch.

        Lightning has divided the loss by the number of micro-steps, which depends on the number of replicas. Of the
        product with it the gradient is exactly 1; a quotient would be rounded.

        Args:
            loss: of a micro-batch, as Lightning has divided it.
            backward: computes gradients of such a loss.
            batch_index: number of the batch in the epoch.
        """
        num_micro_steps = self._trainer.accumulate_grad_batches
        result = backward(loss * num_micro_steps)
        mean = self._mean.add(batch_index % num_micro_steps, self._loss)
        if mean is not None:
            if self._shards.size() > 1:  # each had its part of every logical shard
                dist.all_reduce(mean, group=self._shards)
            self._mean_loss = mean / self._shards.size()
        return result

    def committed(self) -> None:
        """The step counts, and its loss is what users see."""
        self._options.step_loss = self._mean_loss


class OwnAveraging(Protocol):
    """What the strategy tells of a step whose gradients FSDP2 does not average over replicas."""

    def computed(self, output: Any) -> None:
        """A training step has returned this."""
        ...

    def add(self, loss: Tensor, backward: Callable[[Tensor], Tensor], batch_index: int) -> Tensor:
        """Run a backward; after the last one of a step, leave the mean of the step as the gradients.

        Args:
            loss: of a micro-batch, as Lightning has divided it, weighted.
            backward: computes gradients of such a loss.
            batch_index: number of the batch in the epoch.
        """
        ...

    def committed(self) -> None:
        """The step counts, and the optimizer is about to step."""
        ...


def own_averaging(
    trainer: Trainer, module: nn.Module, mesh: DeviceMesh, options: ElasticTraining
) -> OwnAveraging | None:
    """What these options need; None where FSDP2 averages.

    Raises:
        ConfigError: FSDP2 averages, and must not.
    """
    if options.reproducible:
        return LogicalShards(trainer, module, mesh, options)
    return MeasuredGain(trainer, module, mesh, options) if options.rates.rule.is_measured else None


class MeasuredGain(OwnAveraging):
    """The gradients of one rank, of which AdaScale learns; the comparison is part of the step, its use of the commit.

    A step that is computed again compares anew, and one that is never committed has taught nothing.
    """

    def __init__(self, trainer: Trainer, module: nn.Module, mesh: DeviceMesh, options: ElasticTraining) -> None:
        """Keep replicas in step that FSDP2 does not.

        Raises:
            ConfigError: it does.
        """
        self._trainer = trainer
        self._rates = options.rates
        self._mean = ComparedMean(module, mesh)
        self._ranks_per_replica = mesh.size(1)
        self._compared: Comparison | None = None

    @override
    def computed(self, output: Any) -> None:
        """The loss is not needed."""

    @override
    def add(self, loss: Tensor, backward: Callable[[Tensor], Tensor], batch_index: int) -> Tensor:
        """Run a backward and take its gradients; after the last one of a step, leave the mean of the step."""
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
        """Pass on what the step has told."""
        if self._compared is not None:
            self._rates.noise = noise_of(self._compared, self._ranks_per_replica)


def noise_of(compared: Comparison, ranks_per_replica: int) -> GradientNoise:
    """How far the parts of a step are apart, each by itself.

    A part's weighted gradient is that of its samples, times how many more it had than the mean replica in a whole step.

    Args:
        compared: of the step.
        ranks_per_replica: those that read different samples.
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
