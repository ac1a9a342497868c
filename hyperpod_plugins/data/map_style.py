"""An ordinary `DataLoader` over a map-style dataset, rebuilt for each world so that its position counts samples."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from hyperpod_plugins.data.batch_split import BatchSplit
from hyperpod_plugins.data.loader import StatefulLoader
from hyperpod_plugins.data.sampler import ElasticSampler
from hyperpod_plugins.errors import ConfigError

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
