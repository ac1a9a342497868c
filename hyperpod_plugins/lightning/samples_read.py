"""How many samples all ranks of a Trainer have read in a step, where that is certain."""

# Lightning's loops have no public API.
# pyright: reportPrivateUsage=false

from typing import Any, cast

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hyperpod_plugins.data import StatefulLoader
from hyperpod_plugins.ledger import ledger
from hyperpod_plugins.lightning.compat import DataLoaderIterDataFetcher, DistributedSamplerWrapper, Trainer
from hyperpod_plugins.lightning.reentry import SkipBatches

_DISTRIBUTED = (DistributedSampler, DistributedSamplerWrapper)
_LOCAL = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers that yield as many indices as their length says, and that do not know of other ranks."""


def note_samples(trainer: Trainer, num_batches: int) -> None:
    """Tell the ledger how many samples a step has read, if that is certain.

    Args:
        trainer: in the last batch of the step.
        num_batches: of the step, on each rank.
    """
    if not ledger.is_active:
        return
    last = trainer.fit_loop.epoch_loop.batch_idx
    sizes = [samples_of_batch(trainer, index) for index in range(last - num_batches + 1, last + 1)]
    known = [each for each in sizes if each is not None]
    if sizes and len(known) == len(sizes):
        ledger.note(samples=sum(known))


def samples_of_batch(trainer: Trainer, batch_index: int, *, begins_at: int = 0) -> int | None:
    """Number of samples that all ranks together read in a batch of the present epoch; None if that is not certain.

    It is certain for a `StatefulLoader`, and for an ordinary `DataLoader` with torch's own `BatchSampler` that reads
    as many samples on each rank: over a `DistributedSampler`, or in a job with one rank. A stream, a batch sampler or
    sampler of the program's own, several loaders and a `training_step` that takes an iterator are not.

    Args:
        trainer: whose loop reads the batch.
        batch_index: index of the batch in the epoch, as the Trainer counts it.
        begins_at: index of the first batch of this process in the epoch. An ordinary loader begins again there, unless
            `CheckpointlessRecovery` skips what was read.
    """
    fit = trainer.fit_loop
    loaders: list[Any] = [] if fit._combined_loader is None else fit._combined_loader.flattened
    if len(loaders) != 1 or isinstance(fit._data_fetcher, DataLoaderIterDataFetcher):
        return None
    loader = loaders[0]
    if isinstance(loader, StatefulLoader):
        return _micro_step_size(loader, batch_index)
    if isinstance(loader, SkipBatches):
        loader, begins_at = loader.loader, 0
    coordinates = trainer.distributed_sampler_kwargs or {"num_replicas": 1}
    size = _batch_size(loader, batch_index - begins_at, coordinates["num_replicas"])
    return None if size is None else size * coordinates["num_replicas"]


def _micro_step_size(loader: StatefulLoader, index: int) -> int | None:
    """Number of samples of the batch over all ranks; None if the Trainer counts other batches than the loader."""
    sampler = loader.batch_sampler
    try:
        return sampler.micro_step_size(index) if sampler.step_size(index) > 0 else None
    except IndexError:
        return None


def _batch_size(loader: Any, index: int, num_data_ranks: int) -> int | None:
    """Number of samples of the loader's batch `index`, on every rank; None if that is not certain."""
    if type(loader) is not DataLoader or type(loader.batch_sampler) is not BatchSampler:
        return None
    batches, sampler = loader.batch_sampler, cast(Any, loader.batch_sampler).sampler
    if type(sampler) in _DISTRIBUTED:
        is_known = sampler.num_replicas == num_data_ranks
    else:
        is_known = type(sampler) in _LOCAL and num_data_ranks == 1
    if not is_known:
        return None
    num_full, rest = divmod(len(sampler), batches.batch_size)
    if 0 <= index < num_full:
        return batches.batch_size
    return rest if index == num_full and rest and not batches.drop_last else None
