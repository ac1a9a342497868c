"""Random numbers for data loading that depend on the sample, not on the process that reads it.

A transform that draws from the global generators of torch, NumPy or Python gets a random stream for each sample, a
function of (seed, epoch, sample index). A replacement, a resumed run, a repeated fetch and a worker that prefetches
therefore draw the same numbers, for any number of workers and whatever was drawn before. The stream of `collate_fn`
follows from the first sample of the batch, as does that of a dataset that reads whole batches (`__getitems__`).
Reading leaves the generators of the reading process unchanged.

A generator that the program passed to a loader or its sampler is seeded for each epoch from its own seed and that of
the job, so that a process that joins in mid-job draws the same numbers.

Items of an `IterableDataset` have no index: their streams are functions of (seed, epoch, data rank, worker, item
number).

[Note: threads] The global generators belong to the process, and training draws from them in the main thread. A loader
without worker processes that is read in another thread (`read_ahead` of a `StatefulLoader`) must not touch them, so
its samples are not keyed.
"""

# The iterators of a DataLoader have no public names, and NumPy's stubs are incomplete.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

import copy
import hashlib
import random
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter
from typing_extensions import override

T = TypeVar("T")
_spare: list[np.random.MT19937] = []  # reused, because creating one takes half a millisecond
_PLAIN_INDICES = (int, str, bytes, np.integer)
_own_seeds: "weakref.WeakKeyDictionary[torch.Generator, tuple[int, int]]" = weakref.WeakKeyDictionary()
"""For each generator that is seeded per epoch: the program's own seed, and the seed set last."""


def keyed_seed(kind: str, *key: object) -> int:
    """Derive the seed of a stream, in `0 .. 2**63 - 1`, from the text of its key."""
    text = ":".join(map(str, ("hyperpod", kind, *key))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


def seed_host_generators(value: int) -> None:
    """Seed the global generators of torch (CPU), Python and NumPy; does nothing outside the main thread."""
    if not _is_main():
        return
    # Not `torch.manual_seed`: before CUDA is initialised it queues every call, with a stack trace.
    torch.default_generator.manual_seed(value)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)


@contextmanager
def preserve_generators() -> Generator[None]:
    """Restore the global generators of torch (CPU), Python and NumPy on exit; only in the main thread."""
    if not _is_main():
        yield
        return
    before = torch.default_generator.get_state(), random.getstate(), np.random.get_bit_generator()
    inside = _spare.pop() if _spare else np.random.MT19937(0)
    np.random.set_bit_generator(inside)
    try:
        yield
    finally:
        torch.default_generator.set_state(before[0])
        random.setstate(before[1])
        np.random.set_bit_generator(before[2])
        _spare.append(inside)


@contextmanager
def keyed_generators(kind: str, *key: object) -> Generator[None]:
    """Context in which the global generators draw the stream of a key; restores them on exit. See `keyed_seed`."""
    with preserve_generators():
        seed_host_generators(keyed_seed(kind, *key))
        yield


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderKey:
    """What the random numbers of a loader depend on, besides the sample."""

    seed: int
    """Seed of the job."""
    epoch: Callable[[], int]
    """Returns the epoch of an iteration; called when its first batch is requested."""
    data_rank: int = 0
    """Data-parallel rank, shared by ranks that read the same samples; unused for samples with a unique index."""
    kind: str = "sample"
    """Distinguishes loaders for different purposes."""
    loader_index: int = 0
    """Distinguishes loaders for the same purpose, whose samples may have the same indices."""
    sets_epoch: bool = False
    """Whether to call `set_epoch` of a `DistributedSampler`, as workers may prefetch before the trainer calls it."""

    @property
    def stream(self) -> tuple[int, str, int]:
        """The part of the key that all streams of the loader share."""
        return self.seed, self.kind, self.loader_index


def key_random_numbers(loader: DataLoader[Any], key: LoaderKey) -> None:
    """Give each sample of a loader its own random stream; call this before the first iteration.

    The loader keeps its dataset, its samplers and its type. A loader with its own kind of iterator is left unchanged.
    """
    makes_own = type(loader)._get_iterator is not DataLoader._get_iterator  # type: ignore[attr-defined]
    if makes_own or "_get_iterator" in vars(loader) or isinstance(loader.dataset, IterDataPipe | MapDataPipe):
        return

    own = weakref.ref(loader)  # in a reference cycle, the loader's workers would take seconds to exit

    def iterator() -> Any:
        loader = own()
        assert loader is not None
        keyed = copy.copy(loader)
        vars(keyed).pop("_get_iterator")
        order = _KeyedOrder(loader, key)
        is_stream = isinstance(loader.dataset, IterableDataset)
        vars(keyed)["dataset"] = (
            _KeyedStream(loader.dataset, key, order) if is_stream else _KeyedDataset(loader.dataset)
        )
        vars(keyed)["batch_sampler" if loader.batch_sampler is not None else "sampler"] = order
        keyed.worker_init_fn = _KeyedWorkers(loader.dataset, loader.worker_init_fn)
        seed = keyed_seed("loader", *key.stream, key.data_rank)
        with preserve_generators():
            seed_host_generators(seed)  # determines the seeds of workers
            return _InWorkers(keyed) if loader.num_workers else _InProcess(keyed)

    vars(loader)["_get_iterator"] = iterator


class SeededIterable:
    """An iterable other than a `DataLoader`, each of whose items draws from its own stream in each epoch."""

    def __init__(self, items: Any, key: LoaderKey) -> None:
        self._items = items
        self._key = key

    def __getattr__(self, name: str) -> Any:
        return getattr(self._items, name)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        key = self._key
        return with_restored_generators(
            _keyed_items(lambda: self._items, "items", *key.stream, key.epoch(), key.data_rank)
        )


def with_restored_generators(items: Iterator[T]) -> Iterator[T]:
    """Yield `items`, restoring the global generators after making each."""
    while True:
        with preserve_generators():
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


def _keyed_items(items: Callable[[], Any], *key: object) -> Iterator[Any]:
    """Yield items, seeding the generators before the iteration and before each item."""
    seed_host_generators(keyed_seed(*map(str, key), "begin"))
    source = iter(items())
    for number in count():
        seed_host_generators(keyed_seed(*map(str, key), number))
        try:
            item = next(source)
        except StopIteration:
            return
        yield item


class _InProcess(_SingleProcessDataLoaderIter):
    """Reads in this process, leaving its generators unchanged."""

    @override
    def _next_data(self) -> Any:
        with preserve_generators():
            return super()._next_data()


class _InWorkers(_MultiProcessingDataLoaderIter):
    """Reads in worker processes; samplers still draw in this process, whose generators stay unchanged."""

    @override
    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        with preserve_generators():
            super()._reset(loader, first_iter)

    @override
    def _next_data(self) -> Any:
        with preserve_generators():
            return super()._next_data()


class _KeyedWorkers:
    """`worker_init_fn` that puts the user's dataset into the worker info, then calls the user's `worker_init_fn`."""

    def __init__(self, dataset: Any, init: Callable[[int], None] | None) -> None:
        self._dataset = dataset
        self._init = init

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        object.__setattr__(info, "dataset", self._dataset)  # the object that the keyed dataset reads
        if self._init is not None:
            self._init(worker_id)


class _KeyedOrder:
    """Sampler that yields each index of a loader's sampler with the seed of its sample."""

    def __init__(self, loader: DataLoader[Any], key: LoaderKey) -> None:
        batches: Any = loader.batch_sampler
        self._is_batched = batches is not None
        self._source: Any = batches if self._is_batched else loader.sampler
        self._sampler: Any = getattr(self._source, "sampler", None) if self._is_batched else self._source
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        self._may_repeat = _may_repeat(self._sampler)
        self._generators = [loader.generator, getattr(self._sampler, "generator", None)]
        self._key = key
        self.epoch = torch.zeros(1, dtype=torch.int64).share_memory_()
        """Epoch of the current iteration, read by persistent workers."""

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        key, epoch = self._key, self._key.epoch()
        self.epoch.fill_(epoch)
        if self._is_stream:
            return iter(self._source)
        if key.sets_epoch and isinstance(self._sampler, DistributedSampler):
            self._sampler.set_epoch(epoch)
        order = "order", *key.stream, epoch
        for generator in self._generators:
            if isinstance(generator, torch.Generator):
                _seed_own(generator, *order)
        return self._with_seeds(epoch, _keyed_items(lambda: self._source, *order))

    def _with_seeds(self, epoch: int, source: Iterator[Any]) -> Iterator[Any]:
        for number, given in enumerate(source):
            if not self._is_batched:
                yield self._seed(epoch, given, number, 0), given
                continue
            yield [(self._seed(epoch, index, number, place), index) for place, index in enumerate(given)]

    def _seed(self, epoch: int, index: Any, number: int, place: int) -> int:
        """Seed of a sample, from its index, or from its place in this rank's order if the index is not unique."""
        key = self._key
        if isinstance(index, _PLAIN_INDICES) and not self._may_repeat:
            return keyed_seed("sample", *key.stream, epoch, index)
        return keyed_seed("place", *key.stream, epoch, key.data_rank, number, place)


class _KeyedDataset:
    """Wraps a map-style dataset; indexed by `(seed, index)`."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._is_fixed = _is_deterministic(dataset)
        self._reads_many = _has_getitems(dataset)

    def __getitem__(self, item: tuple[int, Any]) -> Any:
        seed, index = item
        seed_host_generators(seed)
        sample = self._dataset[index]
        seed_host_generators(seed ^ 1)  # for collate_fn, which converts it
        return sample

    def __getitems__(self, items: list[tuple[int, Any]]) -> list[Any]:
        """Read a batch; a dataset that reads batches as a whole uses one stream for each."""
        first = items[0][0] if items else 0
        if self._reads_many:
            seed_host_generators(first)
            samples = self._dataset.__getitems__([index for _, index in items])
        elif self._is_fixed:
            samples = [self._dataset[index] for _, index in items]
        else:
            samples: list[Any] = []
            for seed, index in items:
                seed_host_generators(seed)
                samples.append(self._dataset[index])
        seed_host_generators(first ^ 1)  # for collate_fn
        return samples


class _KeyedStream(IterableDataset[Any]):
    """Wraps an `IterableDataset`, giving each item of a worker its own stream."""

    def __init__(self, dataset: Any, key: LoaderKey, order: _KeyedOrder) -> None:
        self._dataset = dataset
        self._key = "stream", *key.stream, key.data_rank
        self._epoch = order.epoch

    @override
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        return _keyed_items(lambda: self._dataset, *self._key, int(self._epoch), worker)


def _seed_own(generator: torch.Generator, *key: object) -> None:
    """Seed one of the program's generators from a key and its own seed, the one that the program set last."""
    now = generator.initial_seed()
    own, last = _own_seeds.get(generator, (now, now))
    own = own if now == last else now
    seed = keyed_seed(*map(str, key), own)
    generator.manual_seed(seed)
    _own_seeds[generator] = own, seed


def _may_repeat(sampler: Any) -> bool:
    """Whether a sampler of torch, also inside a `DistributedSampler`, may yield an index twice per epoch."""
    if isinstance(sampler, DistributedSampler):  # Lightning wraps other samplers in it as if they were datasets
        return _may_repeat(getattr(sampler.dataset, "_sampler", None))
    return isinstance(sampler, WeightedRandomSampler) or (isinstance(sampler, RandomSampler) and sampler.replacement)


def _is_deterministic(dataset: Any) -> bool:
    """Whether reading a dataset never draws random numbers, so that no seeding is needed."""
    return _is_deterministic(dataset.dataset) if type(dataset) is Subset else type(dataset) is TensorDataset


def _has_getitems(dataset: Any) -> bool:
    """Whether a dataset reads batches as a whole."""
    if isinstance(dataset, Subset):  # always has `__getitems__`, but reads samples singly if its dataset has none
        return _has_getitems(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))
