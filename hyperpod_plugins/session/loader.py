"""Batches of a loop, grouped by step, in a world of any size."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from hyperpod_plugins.data import BatchSplit, ElasticSampler, StatefulLoader
from hyperpod_plugins.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatches:
    """This rank's part of one step."""

    batches: tuple[Any, ...]
    """One batch per micro-step."""
    weights: tuple[float, ...]
    """Factor for the mean loss of each batch, so that all samples of the step count equally."""
    epoch: int
    ends_epoch: bool


class LoopData:
    """Takes the arguments of a `DataLoader`, and builds a loader from them for each world."""

    def __init__(self, loader: DataLoader[Any], *, seed: int) -> None:
        """Read the loader's arguments.

        Raises:
            ConfigError: the loader reads a stream or has a custom sampler, whose order no other process could
                continue.
        """
        sampler = loader.sampler
        is_stream = isinstance(loader.dataset, IterableDataset)
        if type(loader) is not DataLoader or is_stream or not isinstance(loader.batch_sampler, BatchSampler):
            given = f"one over {type(loader.dataset).__name__}" if is_stream else type(loader).__name__
            raise ConfigError(
                "session.steps(...) takes a torch.utils.data.DataLoader over a map-style dataset with a batch_size, "
                f"but was given {given}. Give it the loader before accelerator.prepare or anybody else "
                "has wrapped it."
            )
        if type(sampler) not in (RandomSampler, SequentialSampler):
            raise ConfigError(
                f"the DataLoader has the sampler {type(sampler).__name__}, but only shuffle=True or shuffle=False "
                "can be continued by a job of another size. Leave the sampler out; ranks get their own parts anyway."
            )
        assert loader.batch_size is not None
        self.micro_batch_size = loader.batch_size
        """Maximum number of samples per rank in one micro-step."""
        self._loader = loader
        self._seed = seed
        self._shuffles = type(sampler) is RandomSampler

    def __len__(self) -> int:
        """Number of samples per epoch."""
        return len(self._loader.dataset)  # type: ignore[arg-type]

    def build_loader(self, split: BatchSplit, data_rank: int) -> StatefulLoader:
        """Build the loader of one data-parallel rank in a world."""
        theirs = self._loader
        sampler = ElasticSampler(
            len(self),
            split,
            data_rank=data_rank,
            seed=self._seed,
            shuffle=self._shuffles,
            drop_last=theirs.drop_last,
        )
        options: dict[str, Any] = {
            "num_workers": theirs.num_workers,
            "collate_fn": theirs.collate_fn,
            "pin_memory": theirs.pin_memory,
            "timeout": theirs.timeout,
            "worker_init_fn": theirs.worker_init_fn,
        }
        if theirs.num_workers:
            options |= {"prefetch_factor": theirs.prefetch_factor, "persistent_workers": theirs.persistent_workers}
            options |= {"multiprocessing_context": theirs.multiprocessing_context}
        return StatefulLoader(theirs.dataset, sampler, **options)


def iterate_steps(loader: StatefulLoader, num_epochs: int) -> Iterator[StepBatches]:
    """Yield the steps from the loader's position to the end of the last epoch."""
    sampler = loader.batch_sampler
    while sampler.cursor.epoch < num_epochs:
        epoch = sampler.cursor.epoch
        batches: list[Any] = []
        weights: list[float] = []
        number = sampler.micro_steps_done
        for index, batch in enumerate(loader):
            batches.append(batch)
            weights.append(sampler.weight(number + index))
            cursor = sampler.cursor
            if cursor.position == cursor.step_start:
                yield StepBatches(
                    batches=tuple(batches), weights=tuple(weights), epoch=epoch, ends_epoch=cursor.epoch != epoch
                )
                batches, weights = [], []
