"""What a change of the number of replicas does to batch, learning rate and schedule: pure arithmetic.

The global batch is kept, sample for sample, and with it the learning rate: the usual case, and the default. Where the
user lets the batch follow the world instead, the learning rate follows by a rule that has a name, and schedulers go on
by samples.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hyperpod_plugins.data import BatchSplit
from hyperpod_plugins.errors import ConfigError

LrScaling = Literal["none", "linear", "sqrt", "adascale"] | Callable[[float], float]
"""How the learning rate follows the global batch: by name, or a function of new batch / reference batch."""

_RULES: dict[str, Callable[[float], float]] = {
    "none": lambda ratio: 1.0,
    "linear": lambda ratio: ratio,
    "sqrt": math.sqrt,
    "adascale": lambda ratio: 1.0,  # the gradients say more; see adascale.py
}


def plan_batch(
    global_batch_size: int, data_degree: int, max_micro_batch: int, *, allows_idle_ranks: bool = False
) -> BatchSplit:
    """Spread one global batch over the data-parallel ranks, every sample once.

    Equal shares if they divide, else shares that differ by one sample, which need gradients weighted by
    `data.sample_weight`. Accumulates where a share is larger than a micro-batch.

    Args:
        global_batch_size: samples of one optimizer step, over all ranks.
        data_degree: ranks that read different samples: replicas x shards.
        max_micro_batch: most samples of one rank in one forward and backward pass.
        allows_idle_ranks: whether a rank may have no sample in the last micro-step of a step.

    Raises:
        ConfigError: some rank would have no sample in some micro-step; the message names what would fit.
    """
    if data_degree > global_batch_size > 0:
        raise ConfigError(
            f"a global batch of {global_batch_size} samples cannot feed {data_degree} data-parallel ranks: each needs "
            f"one sample a step. Use at least {data_degree} samples, or fewer replicas."
        )
    return BatchSplit(
        global_batch_size=global_batch_size,
        micro_batch_size=max_micro_batch,
        data_world_size=data_degree,
        allows_idle_ranks=allows_idle_ranks,
    )


def fits(global_batch_size: int, data_degree: int, max_micro_batch: int, *, allows_idle_ranks: bool = False) -> bool:
    """Whether `plan_batch` would succeed."""
    try:
        plan_batch(global_batch_size, data_degree, max_micro_batch, allows_idle_ranks=allows_idle_ranks)
    except ConfigError:
        return False
    return True


def lr_factor(scaling: LrScaling, global_batch_size: float, reference_batch_size: float) -> float:
    """What to multiply the learning rate with, that was tuned for the reference batch.

    `linear` is for SGD (Goyal et al. 2017, arXiv:1706.02677), `sqrt` for Adam and its like (Malladi et al. 2022,
    arXiv:2205.10287); `none` leaves it alone, and so does `adascale`, whose gain comes on top.

    Raises:
        ConfigError: an unknown rule, a batch that is not positive, or a function whose result is not a positive number.
    """
    if min(global_batch_size, reference_batch_size) <= 0:
        raise ConfigError(f"batches must be positive, but are {global_batch_size} and {reference_batch_size}")
    if isinstance(scaling, str):
        if scaling not in _RULES:
            raise ConfigError(f"lr_scaling must be one of {', '.join(_RULES)} or a function, but is {scaling!r}")
        return _RULES[scaling](global_batch_size / reference_batch_size)
    factor = float(scaling(global_batch_size / reference_batch_size))
    if not (math.isfinite(factor) and factor > 0.0):
        raise ConfigError(
            f"lr_scaling returned {factor} for a batch {global_batch_size / reference_batch_size:g} times the "
            "reference; it must return a positive number."
        )
    return factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    """A factor that goes from one value to another, so that a larger learning rate does not come as a shock."""

    start: float
    """Value before the change."""
    end: float
    """Value after `num_samples`."""
    num_samples: int = 0
    """Samples that the way from `start` to `end` takes; 0 for a jump."""

    def at(self, samples_since: int) -> float:
        """The factor, so many samples after the change; linear between."""
        if samples_since >= self.num_samples:
            return self.end
        return self.start + (self.end - self.start) * samples_since / self.num_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleClock:
    """Counts steps of the reference batch, so that a schedule made for them goes on by samples.

    A step of twice the reference batch is two steps of the schedule; two steps of half of it are one.
    """

    reference_batch_size: int
    """Samples of the step that the schedule was made for."""
    num_samples: int = 0
    """Samples that were trained on so far."""

    @property
    def schedule_step(self) -> int:
        """Steps of the schedule that are complete."""
        return self.num_samples // self.reference_batch_size

    def after(self, step_size: int) -> "SampleClock":
        """The clock after one more step of so many samples."""
        return SampleClock(reference_batch_size=self.reference_batch_size, num_samples=self.num_samples + step_size)

    def ticks(self, step_size: int) -> int:
        """How often the scheduler steps after a step of so many samples."""
        return self.after(step_size).schedule_step - self.schedule_step
