"""Steps of a Trainer whose bits do not depend on how many replicas compute them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hyperpod_plugins.lightning.elastic import ElasticTraining
from hyperpod_plugins.lightning.flavour import Trainer
from hyperpod_plugins.parallel.fixed_order import FixedOrderMean


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
