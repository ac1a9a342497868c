"""A data loader that tracks exactly which batches the trainer has consumed, however far its workers prefetch."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypedDict, Unpack

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from hyperpod_plugins.data.batch_cache import BatchCache, cached
from hyperpod_plugins.data.batch_split import Cursor
from hyperpod_plugins.data.random_numbers import LoaderKey, key_random_numbers
from hyperpod_plugins.data.sampler import ElasticSampler
from hyperpod_plugins.errors import ConfigError


class LoaderOptions(TypedDict, total=False):
    """Options that are passed on to `torch.utils.data.DataLoader`."""

    num_workers: int
    collate_fn: Callable[[list[Any]], Any]
    pin_memory: bool
    timeout: float
    worker_init_fn: Callable[[int], None]
    multiprocessing_context: str
    generator: torch.Generator
    prefetch_factor: int
    persistent_workers: bool


def refuse_out_of_order(loader: DataLoader[Any]) -> None:
    """Refuse a loader whose batches may come in any order: the position in its data would not say which are done.

    Raises:
        ConfigError: the loader has worker processes and `in_order=False`.
    """
    if loader.num_workers and not loader.in_order:
        raise ConfigError(
            "the DataLoader for training has in_order=False, so the batches of its workers come in any order, and a "
            "process that resumes or replaces a lost one could not tell which batches have been trained on. Leave out "
            "in_order=False."
        )


class StatefulLoader:
    """Loads this rank's batches and can resume at any micro-step; has the interface of Lightning's stateful loaders.

    Each `iter()` runs over the whole current epoch; the first one after `load_state_dict` runs over the rest of it.
    This is deliberately not a `DataLoader`, whose samplers Lightning replaces with its own.

    [Note: what counts as consumed] Workers ask the sampler for ids several batches ahead of training. A batch counts
    as consumed when it is handed to the trainer, so a state never includes batches that were only prefetched.

    [Note: nothing happens before the first batch] Lightning calls `iter()` first, then `set_epoch()`. The iterator
    therefore asks the sampler for its start only when the first batch is requested.

    [Note: random transforms] A sample that draws from the global generators of torch, NumPy or Python gets the same
    numbers in every process: see `random_numbers.py`. With `read_ahead` this requires worker processes.

    Args:
        dataset: a map-style dataset.
        sampler: selects the samples of this rank, and keeps the position.
        cache: where to look up and keep finished batches, if they are expensive to make. Tensor-parallel ranks of one
            node read each other's batches there. See `BatchCache`.
        read_ahead: with a cache, number of finished batches to put there ahead of training, so that they outlive this
            process.
        options: see `LoaderOptions`.

    Raises:
        ConfigError: see `refuse_out_of_order`.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: ElasticSampler,
        *,
        cache: BatchCache | None = None,
        read_ahead: int = 0,
        **options: Unpack[LoaderOptions],
    ) -> None:
        self._sampler = sampler
        self._cache = cache
        self._read_ahead = read_ahead
        self._ahead = _AheadSampler(sampler)
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=self._ahead, **options)
        refuse_out_of_order(self._loader)
        key = LoaderKey(seed=sampler.seed, epoch=lambda: self._ahead.start.epoch, data_rank=sampler.data_rank)
        key_random_numbers(self._loader, key)

    @property
    def batch_sampler(self) -> ElasticSampler:
        """The sampler that keeps the position."""
        return self._sampler

    @property
    def sampler(self) -> ElasticSampler:
        """Same as `batch_sampler`; Lightning calls `set_epoch` on this attribute."""
        return self._sampler

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`, or keep the position if it is inside that epoch."""
        self._sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Position after the last batch handed out: plain values, equal on all ranks."""
        return self._sampler.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Start the next iteration where `state_dict` was saved.

        Raises:
            DatasetChanged: the state belongs to other data, another order or another seed.
        """
        self._sampler.load_state_dict(state_dict)

    def __len__(self) -> int:
        """Number of batches in a whole epoch."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining batches of the current epoch."""
        start = self._sampler.start_iteration()
        for batch, micro_step in zip(self._batches(start), self._sampler.micro_steps_from(start), strict=True):
            self._sampler.advance(micro_step)
            yield batch

    def _batches(self, start: Cursor) -> Iterator[Any]:
        if self._cache is None:
            return self._read(start)
        micro_steps = self._sampler.micro_steps_from(start)
        return cached(
            lambda position: self._read(self._sampler.split.cursor_at(position, start)),
            self._cache,
            key=f"{self._sampler.identity}, epoch {start.epoch}",
            indices=(micro_step.before.position for micro_step in micro_steps),
            read_ahead=self._read_ahead,
        )

    def _read(self, start: Cursor) -> Iterator[Any]:
        self._ahead.start = start
        return iter(self._loader)


class _AheadSampler(Sampler[list[int]]):
    """Yields ids from `start` on without moving the sampler's position, for a loader that prefetches."""

    def __init__(self, sampler: ElasticSampler) -> None:
        self._sampler = sampler
        self.start = Cursor()

    def __iter__(self) -> Iterator[list[int]]:
        return (self._sampler.ids(micro_step) for micro_step in self._sampler.micro_steps_from(self.start))

    def __len__(self) -> int:
        return self._sampler.split.count(self.start, self._sampler.num_samples, drop_last=self._sampler.drop_last)
