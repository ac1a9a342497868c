"""Batches of a loop, grouped by step, in a world of any size."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hyperpod_plugins.data import StatefulLoader


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatches:
    """This rank's part of one step."""

    batches: tuple[Any, ...]
    """One batch per micro-step."""
    weights: tuple[float, ...]
    """Factor for the mean loss of each batch, so that all samples of the step count equally."""
    num_samples: int
    """Number of samples of the step, over all ranks."""
    epoch: int
    ends_epoch: bool


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
            ends_epoch = sampler.cursor.epoch != epoch
            if ends_epoch or (number + index + 1) % sampler.split.micro_steps == 0:
                yield StepBatches(
                    batches=tuple(batches),
                    weights=tuple(weights),
                    num_samples=sampler.step_size(number + index),
                    epoch=epoch,
                    ends_epoch=ends_epoch,
                )
                batches, weights = [], []
