"""Gradient averaging outside FSDP2 in a Trainer, for reproducible steps and for AdaScale."""

# Lightning's loops have no public API.
# pyright: reportPrivateUsage=false

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hyperpod_plugins.elastic.scaling.adascale import GradientNoise
from hyperpod_plugins.lightning.compat import Trainer
from hyperpod_plugins.lightning.datamodule import sample_weight_of
from hyperpod_plugins.lightning.elastic_training import ElasticTraining
from hyperpod_plugins.parallel.replica_mean import (
    FixedOrderAveraging,
    GradAveraging,
    NoiseMeasuringAveraging,
    RankMicroStep,
)


class TrainerAveraging:
    """Passes a Trainer's micro-steps to the averaging that its `ElasticTraining` needs."""

    def __init__(
        self,
        trainer: Trainer,
        options: ElasticTraining,
        averaging: GradAveraging,
    ) -> None:
        self._trainer = trainer
        self._options = options
        self._averaging = averaging
        self._loss = torch.zeros(())

    @classmethod
    def of(
        cls, trainer: Trainer, module: nn.Module, mesh: DeviceMesh, options: ElasticTraining
    ) -> "TrainerAveraging | None":
        """Return the averaging that these options need; None if FSDP2 averages.

        Raises:
            ConfigError: FSDP2 averages over replicas, but the options do not allow it.
        """
        if options.reproducible:
            assert options.split is not None
            return cls(trainer, options, FixedOrderAveraging(module, mesh, options.split.num_logical_shards))
        return cls(trainer, options, NoiseMeasuringAveraging(module, mesh)) if options.rates.rule.is_adascale else None

    def computed(self, output: Any) -> None:
        """Note the loss that `training_step` returned."""
        loss = output["loss"] if isinstance(output, dict) else output
        self._loss = loss.detach().clone() if isinstance(loss, Tensor) else torch.zeros(())

    def add(self, loss: Tensor, backward: Callable[[Tensor], Tensor], batch_index: int) -> Tensor:
        """Run a backward; after the last one of a step, leave the step's mean as the gradients.

        Lightning has divided the loss by the number of micro-steps. Where it must not be, it is multiplied by that
        number again, so that its gradient is exactly 1.

        Args:
            loss: of a micro-batch, as divided by Lightning, weighted.
            backward: computes the gradients of such a loss.
            batch_index: number of the batch in the epoch.
        """
        trainer = self._trainer
        count, loop = trainer.accumulate_grad_batches, trainer.fit_loop.epoch_loop
        result = backward(loss if self._averaging.divides_loss else loss * count)
        micro_step = RankMicroStep(
            index=batch_index % count,
            count=count,
            is_last=batch_index == loop.batch_idx and not loop._should_accumulate(),
            weight=sample_weight_of(trainer, batch_index),
        )
        self._averaging.add(micro_step, self._loss)
        return result

    def committed(self) -> None:
        """Publish `ElasticTraining.step_loss`, or the noise of the step's gradients, when the step is committed."""
        averaging = self._averaging
        if isinstance(averaging, FixedOrderAveraging):
            self._options.step_loss = averaging.mean_loss
        elif averaging.compared is not None:
            self._options.rates.noise = GradientNoise.of_table(
                averaging.compared.table.tolist(), averaging.compared.num_micro_steps, averaging.ranks_per_replica
            )
