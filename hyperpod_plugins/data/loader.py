"""A data loader that knows exactly what the trainer has seen, however far its workers have read ahead."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypedDict, Unpack

from torch.utils.data import DataLoader, Dataset, Sampler

from hyperpod_plugins.data.batch_cache import BatchCache, cached
from hyperpod_plugins.data.batch_split import Cursor
from hyperpod_plugins.data.random_numbers import LoaderKey, key_random_numbers
from hyperpod_plugins.data.sampler import ElasticSampler


class LoaderOptions(TypedDict, total=False):
    """The options of `torch.utils.data.DataLoader` that make sense here, under their names there."""

    num_workers: int
    collate_fn: Callable[[list[Any]], Any]
    pin_memory: bool
    timeout: float
    worker_init_fn: Callable[[int], None]
    multiprocessing_context: str
    prefetch_factor: int
    persistent_workers: bool


class StatefulLoader:
    """Batches of this rank, resumable at any micro-step; has what Lightning asks of a stateful loader.

    Each `iter()` gives the whole epoch at which the job stands; after `load_state_dict` the next one gives what is left
    of it. Not a `DataLoader` on purpose: Lightning takes the samplers of those apart to put in its own.

    [Note: what counts as consumed] Workers ask the sampler for ids several batches ahead of training. A batch counts
    when it is handed to the trainer, so a state never includes batches that were only prefetched.

    [Note: nothing happens before the first batch] Lightning calls `iter()` first, then `set_epoch()`. The iterator
    therefore asks the sampler where to begin when its first batch is wanted.

    [Note: random transforms] A sample that draws from the global generators of torch, NumPy or Python gets the same
    numbers whoever reads it: see `random_numbers.py`. With `read_ahead` that needs workers.

    Args:
        dataset: a map-style dataset.
        sampler: says which samples this rank reads, and keeps the position.
        cache: where to find and keep the finished batches, if they are expensive. Tensor-parallel ranks of one node
            read each other's batches there. See `BatchCache`.
        read_ahead: with a cache, finished batches that are put there ahead of training, so that they outlive this
            process.
        options: see `LoaderOptions`.
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
        key = LoaderKey(seed=sampler.seed, epoch=lambda: self._ahead.start.epoch, data_rank=sampler.data_rank)
        key_random_numbers(self._loader, key)

    @property
    def batch_sampler(self) -> ElasticSampler:
        """The sampler that keeps the position."""
        return self._sampler

    @property
    def sampler(self) -> ElasticSampler:
        """The same; Lightning calls `set_epoch` on what it finds under this name."""
        return self._sampler

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`, or stay if the job stands inside it."""
        self._sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was handed out: plain values, equal on all ranks."""
        return self._sampler.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next iteration start where `state_dict` was saved.

        Raises:
            DatasetChanged: the state belongs to other data, another order or another seed.
        """
        self._sampler.load_state_dict(state_dict)

    def __len__(self) -> int:
        """Number of batches in a whole epoch."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        """The batches that are left of the epoch at which the job stands."""
        start = self._sampler.begin()
        for batch, micro_step in zip(self._batches(start), self._sampler.walk(start), strict=True):
            self._sampler.advance(micro_step)
            yield batch

    def _batches(self, start: Cursor) -> Iterator[Any]:
        if self._cache is None:
            return self._read(start)
        micro_steps = self._sampler.walk(start)
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
    """Gives ids from a set place without moving the position, for a loader that reads ahead."""

    def __init__(self, sampler: ElasticSampler) -> None:
        self._sampler = sampler
        self.start = Cursor()

    def __iter__(self) -> Iterator[list[int]]:
        return (self._sampler.ids(micro_step) for micro_step in self._sampler.walk(self.start))

    def __len__(self) -> int:
        return self._sampler.split.count(self.start, self._sampler.num_samples, drop_last=self._sampler.drop_last)
