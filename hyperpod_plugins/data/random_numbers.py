"""Random numbers of data loading that depend on the sample, not on the process that reads it.

A transform that draws from the global generators of torch, NumPy or Python gets for each sample a stream that is a
function of (seed, epoch, sample index). So a replacement, a resumed run, a retried fetch and a worker process that
reads ahead draw the same, whatever number of workers there is and whatever was drawn before. The stream of `collate_fn`
follows from the first sample of the batch, and so does that of a dataset that reads a batch as a whole
(`__getitems__`). Reading leaves the generators of the process that reads as they were.

A generator that the program has passed to a loader or its sampler is seeded for each epoch from its own seed and that
of the job, so that whoever comes in the middle draws the same.

Items of an `IterableDataset` have no index: their streams are functions of (seed, epoch, data rank, worker, number).

[Note: threads] The generators are the process's, and training draws from them in the main thread. A loader that is read
in another thread of the training process (`read_ahead` of a `StatefulLoader`) without workers of its own must not touch
them: its samples are not keyed.
"""

# The iterators of a DataLoader have no public spelling, and NumPy's stubs know less than NumPy.
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
_spare: list[np.random.MT19937] = []  # to make one takes half a millisecond
_PLAIN_INDICES = (int, str, bytes, np.integer)
_own_seeds: "weakref.WeakKeyDictionary[torch.Generator, tuple[int, int]]" = weakref.WeakKeyDictionary()
"""Of generators that are seeded for each epoch: the program's own seed, and the one that was set last."""


def keyed_seed(kind: str, *key: object) -> int:
    """Seed of the stream with a key, in `0 .. 2**63 - 1`; keys are told apart by their text."""
    text = ":".join(map(str, ("hyperpod", kind, *key))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


def seed_host_generators(value: int) -> None:
    """Set the global generators of torch (CPU), Python and NumPy; outside of the main thread they are left alone."""
    if not _is_main():
        return
    # Not `torch.manual_seed`: where CUDA has not been used it notes each call, with a stack trace, for later.
    torch.default_generator.manual_seed(value)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)


@contextmanager
def own_random_numbers() -> Generator[None]:
    """Let what is drawn inside leave the global generators of torch (CPU), Python and NumPy as they were."""
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


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderKey:
    """What the random numbers of a loader depend on, beside the sample."""

    seed: int
    """Of the job."""
    epoch: Callable[[], int]
    """Says which epoch an iteration is of, when its first batch is asked for."""
    data_rank: int = 0
    """Ranks that read the same samples share it; only streams depend on it."""
    kind: str = "sample"
    """Tells loaders for different purposes apart."""
    number: int = 0
    """Tells loaders for the same purpose apart, whose samples may have the same indices."""
    sets_epoch: bool = False
    """Whether a `DistributedSampler` is told the epoch, too: workers read ahead before the trainer tells it."""

    @property
    def stream(self) -> tuple[int, str, int]:
        """What all streams of the loader have in common."""
        return self.seed, self.kind, self.number


def key_random_numbers(loader: DataLoader[Any], key: LoaderKey) -> None:
    """Let each sample of a loader draw from a stream of its own from now on; to be called before the first iteration.

    The loader keeps its dataset, its samplers and its type. One that makes its own kind of iterator is left as it is.
    """
    makes_own = type(loader)._get_iterator is not DataLoader._get_iterator  # type: ignore[attr-defined]
    if makes_own or "_get_iterator" in vars(loader) or isinstance(loader.dataset, IterDataPipe | MapDataPipe):
        return

    own = weakref.ref(loader)  # workers of a loader in a cycle of references would take seconds to end

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
        with own_random_numbers():
            seed_host_generators(seed)  # of what workers are seeded with
            return _InWorkers(keyed) if loader.num_workers else _InProcess(keyed)

    vars(loader)["_get_iterator"] = iterator


class KeyedItems:
    """The items of an iterable that is no `DataLoader`, each from a stream of its own; one an epoch."""

    def __init__(self, items: Any, key: LoaderKey) -> None:
        self._items = items
        self._key = key

    def __getattr__(self, name: str) -> Any:
        return getattr(self._items, name)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        key = self._key
        return isolated(_keyed_items(lambda: self._items, "items", *key.stream, key.epoch(), key.data_rank))


def isolated(items: Iterator[T]) -> Iterator[T]:
    """The same items, made while the global generators are their own."""
    while True:
        with own_random_numbers():
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


def _keyed_items(items: Callable[[], Any], *key: object) -> Iterator[Any]:
    """Seed before the iteration begins, and before each item."""
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
    """Reads in this process, whose generators stay as they were."""

    @override
    def _next_data(self) -> Any:
        with own_random_numbers():
            return super()._next_data()


class _InWorkers(_MultiProcessingDataLoaderIter):
    """Reads in worker processes; what samplers draw is drawn here."""

    @override
    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        with own_random_numbers():
            super()._reset(loader, first_iter)

    @override
    def _next_data(self) -> Any:
        with own_random_numbers():
            return super()._next_data()


class _KeyedWorkers:
    """Lets a worker's program find the user's dataset, and then its own `worker_init_fn` run."""

    def __init__(self, dataset: Any, init: Callable[[int], None] | None) -> None:
        self._dataset = dataset
        self._init = init

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        object.__setattr__(info, "dataset", self._dataset)  # the very object that the keyed one reads
        if self._init is not None:
            self._init(worker_id)


class _KeyedOrder:
    """What a loader's sampler yields, each index with the seed of its sample."""

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
        """Epoch of the present iteration; workers that outlive one read it."""

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
        """By the index; by the place in this rank's order where an index is none, or may come twice in an epoch."""
        key = self._key
        if isinstance(index, _PLAIN_INDICES) and not self._may_repeat:
            return keyed_seed("sample", *key.stream, epoch, index)
        return keyed_seed("place", *key.stream, epoch, key.data_rank, number, place)


class _KeyedDataset:
    """A map-style dataset that is asked for `(seed, index)`."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._is_fixed = _is_fixed(dataset)
        self._reads_many = _reads_many(dataset)

    def __getitem__(self, item: tuple[int, Any]) -> Any:
        seed, index = item
        seed_host_generators(seed)
        sample = self._dataset[index]
        seed_host_generators(seed ^ 1)  # for what converts it
        return sample

    def __getitems__(self, items: list[tuple[int, Any]]) -> list[Any]:
        """A batch; one that the dataset reads as a whole has one stream."""
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
    """The items of an `IterableDataset`, as a worker reads them."""

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
    """Seed a generator of the program from a key and its own seed: what it had before the first call, or got since."""
    now = generator.initial_seed()
    own, last = _own_seeds.get(generator, (now, now))
    own = own if now == last else now
    seed = keyed_seed(*map(str, key), own)
    generator.manual_seed(seed)
    _own_seeds[generator] = own, seed


def _may_repeat(sampler: Any) -> bool:
    """Whether a sampler of torch, or the one that another shares out among ranks, may give an index twice an epoch."""
    if isinstance(sampler, DistributedSampler):  # Lightning shares out other samplers as if they were datasets
        return _may_repeat(getattr(sampler.dataset, "_sampler", None))
    return isinstance(sampler, WeightedRandomSampler) or (isinstance(sampler, RandomSampler) and sampler.replacement)


def _is_fixed(dataset: Any) -> bool:
    """Whether no sample of a dataset is drawn by chance, so that none needs a stream."""
    return _is_fixed(dataset.dataset) if type(dataset) is Subset else type(dataset) is TensorDataset


def _reads_many(dataset: Any) -> bool:
    """Whether a dataset reads a batch as a whole."""
    if isinstance(dataset, Subset):  # which has the method, and reads samples one by one where the inner one has none
        return _reads_many(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))
