"""Token files in a Trainer: `TokenDataModule`, and loaders that know the world and resume inside an epoch."""

# Lightning's loops have no public API.
# pyright: reportPrivateUsage=false

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Unpack

from torch.utils.data import Dataset
from typing_extensions import override

from hyperpod_plugins.data import BatchSplit, ElasticSampler, StatefulLoader, TokenDataset
from hyperpod_plugins.data.loader import LoaderOptions
from hyperpod_plugins.elastic.scaling.batch import StepBatch
from hyperpod_plugins.errors import ConfigError, format_list
from hyperpod_plugins.lightning.compat import (
    Callback,
    LightningDataModule,
    ModelParallelStrategy,
    Trainer,
    callbacks_of,
)

# Batch sizes: loaders take them from their own options, or from a callback such as `ElasticTraining`.


class BatchSizeCallback(Callback):
    """Callback that determines the batch sizes of a step; the base class of `ElasticTraining`."""

    batch: StepBatch
    """Batch sizes, for any world."""
    split: BatchSplit | None = None
    """Split of a step in the present world; None before there is a world, and in a job that is not elastic."""
    possible_micro_steps: frozenset[int] = frozenset()
    """Numbers of micro-steps that a step may have, over all possible worlds; empty before there is a world."""


def batch_split(trainer: Trainer, data_world_size: int, *, global_batch_size: int, micro_batch_size: int) -> BatchSplit:
    """The split of a step over the ranks of the present world.

    Args:
        trainer: whose loaders are created.
        data_world_size: number of ranks that read different samples.
        global_batch_size: 0 to take it from the callback.
        micro_batch_size: 0 to take it from the callback.

    Raises:
        ConfigError: a size is 0 and there is no callback, or the batch cannot be split over the ranks.
    """
    callbacks = callbacks_of(trainer)
    found = next((callback for callback in callbacks if isinstance(callback, BatchSizeCallback)), None)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDataConfig:
    """Sequence length, batch sizes and order of the samples that a `TokenDataModule` reads."""

    sequence_length: int
    """Tokens of one sample."""
    global_batch_size: int = 0
    """Samples of one optimizer step, over all ranks; 0 to take it from `ElasticTraining`."""
    micro_batch_size: int = 0
    """Maximum samples of one rank in one forward and backward pass; 0 to take it from `ElasticTraining`."""
    seed: int = 0
    """Determines, with the epoch, the order of the samples."""
    shuffle: bool = True
    """Whether training reads the samples in random order."""
    drop_last: bool = True
    """Whether to drop the incomplete global batch at the end of an epoch; a batch that follows the world keeps it."""
    num_workers: int = 0
    """Worker processes of each rank's loader; reading a token file is fast enough without any."""


class TokenDataModule(LightningDataModule):
    """Train on one token file and validate on another.

    The global batch does not depend on the number of ranks, so the Trainer must accumulate over
    `global_batch_size / (micro_batch_size * data-parallel ranks)` batches; the error for another number names this
    one.

    Validation reads each sample exactly once, in order. All ranks run the same number of batches, and the sizes of a
    batch differ by at most one sample between ranks.

    Args:
        train_path: a file made by `write_tokens` or `build_tokens`.
        val_path: another one, or None for training without validation.
        config: sequence length, batch sizes and order.
    """

    def __init__(
        self,
        train_path: str | os.PathLike[str],
        val_path: str | os.PathLike[str] | None = None,
        *,
        config: TokenDataConfig,
    ) -> None:
        super().__init__()
        self.config = config
        self._train_path = train_path
        self._val_path = val_path
        if val_path is None:
            self.val_dataloader = super().val_dataloader  # Lightning checks whether the hook is overridden

    @override
    def train_dataloader(self) -> StatefulLoader:
        """This rank's training loader.

        Raises:
            DatasetDamaged: the file cannot be used.
            ConfigError: the batch sizes do not fit the world, or the Trainer accumulates over a different number of
                batches.
        """
        config, trainer = self.config, self._trainer()
        data_rank, data_world_size = _data_coordinates(trainer)
        split = self._split(data_world_size)
        if trainer.accumulate_grad_batches != split.num_micro_steps:
            raise ConfigError(
                f"a global batch of {split.global_batch_size} in micro-batches of {split.micro_batch_size} on "
                f"{data_world_size} data-parallel ranks needs "
                f"Trainer(accumulate_grad_batches={split.num_micro_steps}), but it has "
                f"{trainer.accumulate_grad_batches}. Change that, or the batch sizes."
            )
        dataset = TokenDataset(self._train_path, config.sequence_length)
        sampler = ElasticSampler(
            len(dataset),
            split,
            data_rank=data_rank,
            seed=config.seed,
            shuffle=config.shuffle and not trainer.overfit_batches,  # pyright: ignore[reportAttributeAccessIssue]
            drop_last=config.drop_last and not split.pads_last_step,
            fingerprint=dataset.fingerprint,
        )
        return TrainerLoader(trainer, dataset, sampler, num_workers=config.num_workers)

    @override
    def val_dataloader(self) -> StatefulLoader:
        """This rank's validation loader.

        Raises:
            DatasetDamaged: the file cannot be used.
            ConfigError: the file has fewer samples than there are ranks.
        """
        if self._val_path is None:
            raise ConfigError("this TokenDataModule was made without val_path. Give one to validate.")
        data_rank, data_world_size = _data_coordinates(self._trainer())
        dataset = TokenDataset(self._val_path, self.config.sequence_length)
        # The whole file is one step: split evenly, each sample once, with the same number of batches on every rank.
        split = BatchSplit(
            global_batch_size=len(dataset),
            micro_batch_size=self.config.micro_batch_size or self._split(data_world_size).micro_batch_size,
            data_world_size=data_world_size,
        )
        sampler = ElasticSampler(len(dataset), split, data_rank=data_rank, shuffle=False)
        return StatefulLoader(dataset, sampler, num_workers=self.config.num_workers)

    def _split(self, data_world_size: int) -> BatchSplit:
        sizes = (self.config.global_batch_size, self.config.micro_batch_size)
        return batch_split(self._trainer(), data_world_size, global_batch_size=sizes[0], micro_batch_size=sizes[1])

    def _trainer(self) -> Trainer:
        if self.trainer is None:
            raise ConfigError(
                "the loaders of a TokenDataModule depend on the Trainer's world, but it has no Trainer yet. Pass it "
                "to trainer.fit(datamodule=...), or create the loaders yourself from TokenDataset, ElasticSampler "
                "and StatefulLoader."
            )
        return self.trainer


class TrainerLoader(StatefulLoader):
    """Loader that keeps the Trainer's batch counts in line with a position counted in samples.

    Lightning saves how many batches a rank has run. In a job of another size, the same samples are a different number
    of batches, so the epoch would silently end early or late. If the steps of a resumed epoch do not begin at the
    same samples as those of a full epoch, the epoch is counted with fewer batches, so that each step is a full
    accumulation window. In an elastic job, `train_dataloader` must return such a loader, as `TokenDataModule` does.

    Args:
        trainer: whose loop reads the batches.
        dataset: a map-style dataset.
        sampler: selects the samples that this rank reads, and keeps the position. Its `BatchSplit` is that of the
            Trainer's present `distributed_sampler_kwargs`.
        options: see `StatefulLoader`.
    """

    def __init__(
        self, trainer: Trainer, dataset: Dataset[Any], sampler: ElasticSampler, **options: Unpack[LoaderOptions]
    ) -> None:
        super().__init__(dataset, sampler, **options)
        self._trainer = trainer
        self._shorter: tuple[int, int] | None = None
        """An epoch that continues where a job with another global batch left it, and its number of batches."""

    @override
    def __len__(self) -> int:
        """Number of batches in the present epoch, as the Trainer counts them."""
        if self._shorter is not None and self.batch_sampler.cursor.epoch == self._shorter[0]:
            return self._shorter[1]
        return super().__len__()

    @override
    def __iter__(self) -> Iterator[Any]:
        """The remaining batches of the present epoch.

        Raises:
            ConfigError: see `refuse_shorter_loaders`; with the first batch, as Lightning fails in its own way before.
        """
        if self._shorter is not None and self.batch_sampler.cursor.epoch != self._shorter[0]:
            self._shorter = None
            self._tell_length()
        return self._checked(super().__iter__())

    def _checked(self, batches: Iterator[Any]) -> Iterator[Any]:
        refuse_shorter_loaders(self._trainer)
        yield from batches

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at the saved position, and set the Trainer's batch counts to match it.

        Where a limit or a shorter loader ends epochs, that is the beginning of the next epoch.
        """
        super().load_state_dict(state_dict)
        if not state_dict["position"]:
            return  # the start of an epoch, where Lightning counts from zero anyway
        sampler, combined = self.batch_sampler, self._trainer.fit_loop._combined_loader
        length = len(sampler) if combined is None else int(min(len(sampler), _epoch_length(combined)))
        if sampler.cursor.epoch == state_dict["epoch"] and sampler.micro_steps_done >= length:
            sampler.end_epoch()
        is_epoch_over = sampler.cursor.epoch > state_dict["epoch"]
        current = self._trainer.fit_loop.epoch_loop.batch_progress.current
        num_open = current.ready - current.completed  # a state saved inside a hook has one uncompleted batch
        num_done = length if is_epoch_over else sampler.micro_steps_done
        num_batches = len(sampler) if is_epoch_over else num_done + sampler.micro_steps_left
        self._shorter = (sampler.cursor.epoch, num_batches) if num_batches < len(sampler) else None
        current.load_state_dict(
            {"ready": num_done, "started": num_done, "processed": num_done, "completed": num_done - num_open}
        )

    def _tell_length(self) -> None:
        """Tell the Trainer, which reads the length only once, the length of the full epochs after a shorter one."""
        trainer, loop = self._trainer, self._trainer.fit_loop
        assert loop._combined_loader is not None
        assert loop._data_fetcher is not None
        length = len(loop._combined_loader)
        loop.max_batches = loop._data_fetcher.length = length
        if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch is not None:
            trainer.val_check_batch = max(1, int(length * trainer.val_check_interval))


def refuse_shorter_loaders(trainer: Trainer) -> None:
    """Raise if a `StatefulLoader` for training ends before the epoch does.

    In a `CombinedLoader` of the mode "max_size_cycle" it would begin again, with the samples of the next epoch.

    Raises:
        ConfigError: there are several loaders, and a longer one determines the length of an epoch.
    """
    combined = trainer.fit_loop._combined_loader
    if combined is None or len(combined.flattened) < 2:
        return
    lengths, length = [_length_of(each) for each in combined.flattened], _epoch_length(combined)
    pairs = zip(combined.flattened, lengths, strict=True)
    shorter = [number for each, number in pairs if isinstance(each, StatefulLoader) and number < length]
    if shorter:
        raise ConfigError(
            f"there are {len(lengths)} train loaders, of {format_list(map(str, lengths))} batches, in the mode "
            f'"{combined._mode}" ("max_size_cycle" is what Lightning uses if a program gives several loaders without a '
            f"CombinedLoader), so the one of {shorter[0]} ends before the epoch of {length} does. It counts its "
            "position in samples of its own epochs, which does not say where in an epoch the trainer is: a process "
            "that resumes or replaces a lost one would read other samples. Use "
            'CombinedLoader(loaders, "min_size"), loaders with equally many steps, or, without ElasticTraining, '
            "ordinary DataLoaders."
        )


def refuse_early_ends(trainer: Trainer) -> None:
    """Raise if epochs do not end with the loaders for training, and that could not be resumed exactly.

    Raises:
        ConfigError: see `refuse_shorter_loaders`; or a limit or a shorter loader ends epochs before the loader, which
            does not know the trainer.
    """
    refuse_shorter_loaders(trainer)
    combined = trainer.fit_loop._combined_loader
    for each in [] if combined is None else combined.flattened:
        is_apart = isinstance(each, StatefulLoader) and not isinstance(each, TrainerLoader)
        if is_apart and _length_of(each) > _epoch_length(combined):
            raise ConfigError(
                f"an epoch ends after {_epoch_length(combined)} batches (limit_train_batches, or a shorter loader), "
                f"but a StatefulLoader for training has {_length_of(each)}: a process that resumes, or replaces a lost "
                "one, between two epochs would read the rest of the former one. Use a TrainerLoader, which takes the "
                "trainer as its first argument, or let epochs end with the loader."
            )


def _epoch_length(combined: Any) -> float:
    """Batches of an epoch: of the shortest loader with "min_size", else of the longest one; a limit applies to each."""
    lengths = [_length_of(each) for each in combined.flattened]
    limited = [min(pair) for pair in zip(lengths, combined.limits or lengths, strict=True)]
    return min(limited) if combined._mode == "min_size" else max(limited)


def _length_of(loader: Any) -> float:
    """Batches of a whole epoch of one loader; infinite if it does not say."""
    if isinstance(loader, StatefulLoader):
        return len(loader.batch_sampler)
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return float("inf")


def sample_weight_of(trainer: Trainer, batch_index: int) -> float:
    """Factor for this rank's loss in a batch of the epoch: 1 unless a `StatefulLoader` split the step unevenly."""
    combined = trainer.fit_loop._combined_loader
    loaders = [] if combined is None else combined.flattened
    if len(loaders) != 1 or not isinstance(loaders[0], StatefulLoader):
        return 1.0
    return loaders[0].batch_sampler.weight(batch_index)


def _data_coordinates(trainer: Trainer) -> tuple[int, int]:
    """Data-parallel rank and world size; the tensor-parallel ranks of a replica share a data-parallel rank."""
    coordinates = trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
    return coordinates["rank"], coordinates["num_replicas"]
