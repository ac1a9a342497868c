"""The batches of a Trainer, in the order in which it would read them, as one sequence that any world can share.

A sample of the session's loop is one batch of `per_device_train_batch_size` here, a micro-batch: the ranks share the
micro-batches of each step, however many ranks there are. Which samples it has is a function of its number. So a
process that replaces a lost one, or another number of processes, continue anywhere.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from hyperpod_plugins.data.random_numbers import preserve_generators, seed_host_generators
from hyperpod_plugins.errors import ConfigError

_NUM_SLOTS = 2**45
"""Micro-batches of the whole sequence: more than any job reads, as a longer training may continue a shorter one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """How the micro-batches of an epoch are divided into steps."""

    num_batches: int
    """Micro-batches of an epoch, over all ranks: a multiple of `num_ranks`."""
    num_ranks: int
    """Ranks that read different samples where the job began."""
    accumulation: int
    """Micro-batches of each of these ranks in a step, but for the last one of an epoch."""
    batch_size: int
    """Samples of a micro-batch."""

    def to_dict(self) -> dict[str, int]:
        """What `MicroBatches` needs to divide the same data in the same way."""
        return {"num_ranks": self.num_ranks, "accumulation": self.accumulation, "batch_size": self.batch_size}

    @property
    def step_size(self) -> int:
        """Micro-batches of a full step, over all ranks."""
        return self.accumulation * self.num_ranks

    @property
    def num_steps(self) -> int:
        """Steps of an epoch; the last one may have fewer micro-batches."""
        return -(-self.num_batches // self.step_size)

    @property
    def batches_per_rank(self) -> int:
        """Micro-batches of each rank in an epoch."""
        return self.num_batches // self.num_ranks

    def size_of(self, step: int) -> int:
        """Micro-batches of a step, over all ranks."""
        return min(self.step_size, self.num_batches - step % self.num_steps * self.step_size)

    def epoch_at(self, step: int) -> float:
        """Epochs that have been read after `step` more steps than none."""
        epoch, index = divmod(step, self.num_steps)
        return epoch + min(index * self.accumulation, self.batches_per_rank) / self.batches_per_rank


def deal(batches: Sequence[list[int]], num_ranks: int, batch_size: int, *, drop_last: bool) -> list[list[int]]:
    """Make the batches of an epoch a multiple of the number of ranks, as Accelerate does with `even_batches`.

    The last ones are completed with samples from the beginning of the epoch, or left out with `drop_last`. Rank `r` of
    `n` gets the batches `r`, `r + n`, and so on.
    """
    whole = len(batches) // num_ranks * num_ranks
    if drop_last or (whole == len(batches) and (not batches or len(batches[-1]) == batch_size)):
        return list(batches[:whole])
    cut = whole - num_ranks if whole == len(batches) else whole
    first = [each for batch in batches[:num_ranks] for each in batch]
    ids = [each for batch in batches[cut:] for each in batch]
    while len(ids) < num_ranks * batch_size:
        ids += first
    parts = (ids[index * batch_size : (index + 1) * batch_size] for index in range(num_ranks))
    return [*batches[:cut], *parts]


class MicroBatches(Dataset[dict[str, Any]]):
    """The micro-batches of all epochs, each as `{"slot", "counts", "inputs"}`.

    `slot` is its number; `counts` is False for what only fills the last step of an epoch, and must not be trained on.

    Args:
        loader: the loader of the training, not prepared by any library.
        seed: determines the order, together with the epoch.
        num_ranks: ranks that read different samples.
        accumulation: micro-batches of each rank in a step.
        batch_size: that of the loader.

    Raises:
        ConfigError: the loader reads a stream, or its batches have no common size or another one; or an epoch would
            have no batch.
    """

    def __init__(
        self, loader: DataLoader[Any], *, seed: int, num_ranks: int, accumulation: int, batch_size: int
    ) -> None:
        sampler = loader.batch_sampler
        if isinstance(loader.dataset, IterableDataset):
            raise ConfigError(
                f"train_dataset is a stream ({type(loader.dataset).__name__}), which no other process could continue. "
                "Give a dataset with __getitem__ and __len__."
            )
        if not isinstance(sampler, BatchSampler) or loader.batch_size is None:
            raise ConfigError(
                "get_train_dataloader returned a loader with its own batch sampler, whose batches another number of "
                "ranks could not share. Return a DataLoader with batch_size, and with a sampler if there is one."
            )
        self.loader = loader
        self.dataset = loader.dataset
        self._batches, self._collate = sampler, loader.collate_fn
        self._seed, self._drop_last = seed, loader.drop_last
        self._order = _LastOrder()
        found = len(sampler)
        num_batches = found // num_ranks * num_ranks if self._drop_last else -(-found // num_ranks) * num_ranks
        if not num_batches:
            raise ConfigError(
                f"the data has {found} batches of {loader.batch_size} samples, fewer than the {num_ranks} ranks. Use "
                "more data, a smaller per_device_train_batch_size, or dataloader_drop_last=False."
            )
        if loader.batch_size != batch_size:
            raise ConfigError(
                f"the training loader has batch_size={loader.batch_size}, and not per_device_train_batch_size="
                f"{batch_size}, with which its steps are divided. Use the same for both."
            )
        self.plan = EpochPlan(
            num_batches=num_batches, num_ranks=num_ranks, accumulation=accumulation, batch_size=batch_size
        )

    def __len__(self) -> int:
        """Number of micro-batches of the sequence, which no training reads to its end."""
        return _NUM_SLOTS // self.plan.step_size * self.plan.step_size

    def __getitem__(self, slot: int) -> dict[str, Any]:
        """Read a micro-batch."""
        step, place = divmod(slot, self.plan.step_size)
        size, index = self.plan.size_of(step), step % self.plan.num_steps
        number = index * self.plan.step_size + place % size  # what fills a step is read again, and not trained on
        ids = self.batches_of(step // self.plan.num_steps)[number]
        read_all: Any = getattr(self.dataset, "__getitems__", None)
        samples: list[Any] = read_all(ids) if read_all is not None else [self.dataset[each] for each in ids]
        return {"slot": slot, "counts": place < size, "inputs": self._collate(samples)}

    def batches_of(self, epoch: int) -> list[list[int]]:
        """The samples of each micro-batch of an epoch, in the order in which they are dealt to the ranks."""
        if self._order.epoch != epoch:
            sampler = self._batches.sampler
            with preserve_generators():
                seed_host_generators(self._seed + epoch)
                if "generator" in getattr(sampler, "__dict__", {}):
                    vars(sampler)["generator"] = torch.Generator().manual_seed(self._seed + epoch)
                set_epoch = getattr(sampler, "set_epoch", None)
                if callable(set_epoch):
                    set_epoch(epoch)
                found = [list(each) for each in self._batches]
            plan, drop_last = self.plan, self._drop_last
            self._order.batches = deal(found, plan.num_ranks, plan.batch_size, drop_last=drop_last)
            self._order.epoch = epoch
        return self._order.batches

    def as_loader(self) -> DataLoader[Any]:
        """A loader of the micro-batches, with the options of the Trainer's."""
        theirs, options = self.loader, dict[str, Any]()
        if theirs.num_workers:
            options = {
                "prefetch_factor": theirs.prefetch_factor,
                "persistent_workers": theirs.persistent_workers,
                "multiprocessing_context": theirs.multiprocessing_context,
            }
        return DataLoader(
            self,
            batch_size=1,
            collate_fn=only,
            num_workers=theirs.num_workers,
            pin_memory=theirs.pin_memory,
            timeout=theirs.timeout,
            in_order=theirs.in_order,
            **options,
        )


class EpochLength:
    """What a Trainer asks of its loader before the training: length and dataset."""

    def __init__(self, batches: MicroBatches) -> None:
        self.dataset = batches.dataset
        self._length = batches.plan.batches_per_rank

    def __len__(self) -> int:
        """Number of micro-batches of each rank in an epoch."""
        return self._length

    def __iter__(self) -> Iterator[Any]:
        """Refuse: the session reads the batches."""
        raise TypeError("the batches of the training are read by the session")


class _LastOrder:
    """The order of one epoch, kept until another one is asked for."""

    __slots__ = ("batches", "epoch")

    def __init__(self) -> None:
        self.epoch, self.batches = -1, list[list[int]]()


def only(items: Sequence[Any]) -> Any:
    """Return the one item."""
    [item] = items
    return item


def without_labels(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs with labels that no loss counts, for a rank that has no micro-batch in a step."""
    ignored = {name: torch.full_like(inputs[name], -100) for name in ("labels", "shift_labels") if name in inputs}
    return {**inputs, **ignored}
