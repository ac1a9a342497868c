"""A data loader that tracks exactly which batches the trainer has consumed, however far its workers prefetch.

`MapStyleData` builds one from an ordinary `DataLoader`, for each world.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypedDict, TypeVar, Unpack

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from hyperpod_plugins.data.batch_cache import BatchCache, cached
from hyperpod_plugins.data.batch_split import BatchSplit, Cursor
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
    def reads_with(self) -> DataLoader[Any] | None:
        """The loader that reads the samples in this thread or in workers; None if another thread does."""
        return None if self._read_ahead else self._loader

    @property
    def dataset(self) -> Dataset[Any]:
        """The map-style dataset."""
        return self._loader.dataset

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


T = TypeVar("T", bound=StatefulLoader)


class MapStyleData:
    """Takes the arguments of a `DataLoader`, and builds a loader from them for each world.

    Each epoch uses every sample once. Its order is a function of the seed and the epoch, not of the world.
    """

    def __init__(self, loader: DataLoader[Any], *, seed: int, taken_by: str) -> None:
        """Read the loader's arguments.

        Args:
            loader: its `batch_size` is the largest number of samples of a rank in one micro-step, and `shuffle` tells
                whether samples are read in random order. A `DistributedSampler` also brings its seed.
            seed: determines the order, if the sampler has no seed.
            taken_by: who takes the loader, for error messages.

        Raises:
            ConfigError: the loader reads a stream, or has a custom sampler or batch sampler, whose order no other
                process could continue; or its sampler does not yield each sample once.
        """
        sampler = loader.sampler
        is_stream = isinstance(loader.dataset, IterableDataset)
        if type(loader) is not DataLoader or is_stream or loader.batch_size is None:
            if is_stream:
                given = f"one over {type(loader.dataset).__name__}"
            elif type(loader) is not DataLoader:
                given = type(loader).__name__
            else:
                given = f"one with {'batch_size=None' if loader.batch_sampler is None else 'a batch_sampler'}"
            raise ConfigError(
                f"{taken_by} takes a torch.utils.data.DataLoader over a map-style dataset with a batch_size, "
                f"but was given {given}. Give it the loader before accelerator.prepare or anybody else "
                "has wrapped it."
            )
        if type(sampler) not in (RandomSampler, SequentialSampler, DistributedSampler):
            raise ConfigError(
                f"the DataLoader has the sampler {type(sampler).__name__}, but only shuffle=True or shuffle=False "
                "can be continued by a job of another size. Leave the sampler out; ranks get their own parts anyway."
            )
        num_samples = len(loader.dataset)  # type: ignore[arg-type]
        replaces = isinstance(sampler, RandomSampler) and sampler.replacement
        source: Any = sampler.dataset if isinstance(sampler, DistributedSampler) else sampler
        if replaces or len(source) != num_samples:
            raise ConfigError(
                f"the DataLoader has a {type(sampler).__name__} that yields {len(source)} of {num_samples} samples"
                f"{' with replacement' if replaces else ''}, but each epoch uses every sample once. Leave the sampler "
                "out and say shuffle=True or shuffle=False; for a part of the samples, give a Subset of the dataset."
            )
        self.micro_batch_size = loader.batch_size
        """Maximum number of samples per rank in one micro-step."""
        self._loader = loader
        self._seed = sampler.seed if isinstance(sampler, DistributedSampler) else seed
        self._shuffles = sampler.shuffle if isinstance(sampler, DistributedSampler) else type(sampler) is RandomSampler

    def __len__(self) -> int:
        """Number of samples per epoch."""
        return len(self._loader.dataset)  # type: ignore[arg-type]

    def build_loader(self, split: BatchSplit, data_rank: int, kind: Callable[..., T]) -> T:
        """Build the loader of one data-parallel rank in a world.

        Args:
            split: how a step is divided among the ranks of that world.
            data_rank: of this rank.
            kind: creates the loader; takes the arguments of `StatefulLoader`.
        """
        theirs = self._loader
        sampler = ElasticSampler(
            len(self),
            split,
            data_rank=data_rank,
            seed=self._seed,
            shuffle=self._shuffles,
            drop_last=theirs.drop_last and not split.pads_last_step,
        )
        options: dict[str, Any] = {
            "num_workers": theirs.num_workers,
            "collate_fn": theirs.collate_fn,
            "pin_memory": theirs.pin_memory,
            "timeout": theirs.timeout,
            "worker_init_fn": theirs.worker_init_fn,
            "generator": theirs.generator,
            "pin_memory_device": theirs.pin_memory_device,
            "in_order": theirs.in_order,
        }
        if theirs.num_workers:
            options |= {"prefetch_factor": theirs.prefetch_factor, "persistent_workers": theirs.persistent_workers}
            options |= {"multiprocessing_context": theirs.multiprocessing_context}
        return kind(theirs.dataset, sampler, **options)
