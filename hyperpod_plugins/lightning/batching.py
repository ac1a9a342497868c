"""How the loaders of a Trainer learn how many samples a step has: from their own options, or from `ElasticTraining`."""

from typing import Any

from hyperpod_plugins.data import BatchSplit
from hyperpod_plugins.elastic.batch import StepBatch
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.lightning.flavour import Callback, ModelParallelStrategy, Trainer


class SizesSteps(Callback):
    """A callback that says how many samples a step has."""

    batch: StepBatch
    """In any world."""
    split: BatchSplit | None = None
    """In the present world; None before there is one, and in a job that does not change its size."""
    counts: frozenset[int] = frozenset()
    """Numbers of micro-steps that a step may have, in all worlds; none before there is one."""


def batch_split(trainer: Trainer, data_world_size: int, *, global_batch_size: int, micro_batch_size: int) -> BatchSplit:
    """How a step is spread in the present world.

    Args:
        trainer: whose loaders are made.
        data_world_size: ranks that read different samples.
        global_batch_size: 0 for what a callback says.
        micro_batch_size: 0 for what a callback says.

    Raises:
        ConfigError: nobody says it, or the batch cannot be spread over the ranks.
    """
    callbacks: list[Any] = vars(trainer)["callbacks"]
    found = next((callback for callback in callbacks if isinstance(callback, SizesSteps)), None)
    if found is None and not (global_batch_size and micro_batch_size):
        raise ConfigError(
            f"global_batch_size={global_batch_size} and micro_batch_size={micro_batch_size} leave the sizes to "
            "ElasticTraining, and this Trainer does not have that callback. Give both sizes."
        )
    split = None if found is None else found.split
    is_cut = split is not None and split.num_logical_shards > 0 and split.global_batch_size == global_batch_size
    if found is None or (global_batch_size and not is_cut):
        micro_batch_size = micro_batch_size or (0 if found is None else found.batch.micro_batch_size)
        return BatchSplit(
            global_batch_size=global_batch_size, micro_batch_size=micro_batch_size, data_world_size=data_world_size
        )
    if found.split is not None:
        return found.split
    strategy = trainer.strategy
    num_replicas = data_world_size
    if isinstance(strategy, ModelParallelStrategy) and strategy.device_mesh.ndim > 1:
        num_replicas = strategy.device_mesh.size(0)
    return found.batch.split(num_replicas, data_world_size // num_replicas)
