"""How batch, learning rate and schedule change with the number of replicas: pure arithmetic, the same on all ranks.

By default the global batch stays the same, and with it the learning rate. If the user lets the batch follow the world
instead, the learning rate follows by a named rule, and schedulers advance by samples. Each rank then keeps an
`LRState`, which depends only on the samples trained on; joiners receive it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real
from typing import Literal

from hyperpod_plugins.data import BatchSplit
from hyperpod_plugins.elastic.scaling.adascale import AdaScaleState, GradientNoise
from hyperpod_plugins.elastic.store.records import JsonRecord
from hyperpod_plugins.errors import ConfigError

LrScaling = Literal["none", "linear", "sqrt", "adascale"] | Callable[[float], float]
"""How the learning rate follows the global batch: the name of a rule, or a function of new batch / reference
batch."""

_RULES: dict[str, Callable[[float], float]] = {
    "none": lambda ratio: 1.0,
    "linear": lambda ratio: ratio,
    "sqrt": math.sqrt,
    "adascale": lambda ratio: 1.0,  # its factor is measured from the gradients; see adascale.py
}


def plan_batch(
    global_batch_size: int, data_degree: int, max_micro_batch: int, *, allows_idle_ranks: bool = False
) -> BatchSplit:
    """Split one global batch over the data-parallel ranks, each sample exactly once.

    The shares are equal if the ranks divide the batch. Otherwise they differ by one sample, and gradients must be
    weighted by `data.sample_weight`. A rank accumulates gradients if its share is larger than a micro-batch.

    Args:
        global_batch_size: samples of one optimizer step, over all ranks.
        data_degree: ranks that read different samples: replicas x shards.
        max_micro_batch: largest number of samples per rank in one forward and backward pass.
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
    """Return the factor for a learning rate that was tuned for the reference batch.

    `linear` is for SGD (Goyal et al. 2017, arXiv:1706.02677), `sqrt` for Adam and its variants (Malladi et al. 2022,
    arXiv:2205.10287). `none` and `adascale` give 1; AdaScale's gain is applied on top.

    Raises:
        ConfigError: an unknown rule, a batch that is not positive, or a function whose result is not a positive
            number.
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
    """A factor that moves linearly from one value to another, to warm up a larger learning rate."""

    start: float
    """Value before the change."""
    end: float
    """Value after `num_samples`."""
    num_samples: int = 0
    """Samples from `start` to `end`; 0 for a jump."""

    def at(self, samples_since: int) -> float:
        """The factor `samples_since` samples after the change."""
        if samples_since >= self.num_samples:
            return self.end
        return self.start + (self.end - self.start) * samples_since / self.num_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleClock:
    """Counts steps of the reference batch, so that a schedule made for that batch advances by samples.

    A step of twice the reference batch counts as two steps of the schedule, and two steps of half of it as one.
    """

    reference_batch_size: int
    """Samples per step for which the schedule was made."""
    num_samples: int = 0
    """Samples trained on so far."""

    @property
    def schedule_step(self) -> int:
        """Completed steps of the schedule."""
        return self.num_samples // self.reference_batch_size

    def after(self, step_size: int) -> "SampleClock":
        """Return the clock after one more step of `step_size` samples."""
        return SampleClock(reference_batch_size=self.reference_batch_size, num_samples=self.num_samples + step_size)


_LEVEL = Ramp(start=1.0, end=1.0)


def whole_number(name: str, value: object) -> int:
    """Return an option's value as an integer, also if it is NumPy's, or 4.0.

    Raises:
        ConfigError: it is not a whole number; `name` is for the message.
    """
    if type(value) is int:
        return value
    number = math.nan if type(value) is bool or not isinstance(value, Real) else float(value)
    if not number.is_integer():
        raise ConfigError(f"{name} must be a whole number, but is {value!r}.")
    return int(number)


@dataclass(frozen=True, slots=True, kw_only=True)
class LRScalingRule:
    """How the learning rate follows the batch.

    Raises:
        ConfigError: an unknown rule, negative values, or options that do not go together.
    """

    scaling: LrScaling = "none"
    """The name of a rule, or a function of new batch / reference batch."""
    reference_batch_size: int = 0
    """Batch for which learning rate and schedule were made; 0 for the batch of the initial world."""
    warmup_samples: int = 0
    """Samples over which the factor moves to its new value after a change; 0 for at once."""
    scale_adam: bool = False
    """Whether `sqrt` also changes Adam's betas and eps (Malladi et al. 2022, arXiv:2205.10287)."""

    def __post_init__(self) -> None:
        """Check the values together; whole numbers of other types become integers."""
        lr_factor(self.scaling, 1, 1)
        for name in ("reference_batch_size", "warmup_samples"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        if min(self.reference_batch_size, self.warmup_samples) < 0:
            raise ConfigError(
                f"reference_batch_size and warmup_samples must not be negative, but are {self.reference_batch_size} "
                f"and {self.warmup_samples}."
            )
        if self.is_adascale and self.warmup_samples:
            raise ConfigError(
                "lr_scaling='adascale' measures the factor of each step from its gradients: leave "
                "warmup_samples out. A warm-up for the reference batch belongs into the schedule."
            )
        if self.scaling == "none" and self.warmup_samples:
            raise ConfigError("warmup_samples needs a learning rate that changes: give lr_scaling, or leave it out.")
        if self.scale_adam and self.scaling != "sqrt":
            raise ConfigError("scale_adam goes with lr_scaling='sqrt': its betas and eps belong to that rule.")

    def check_batch(self, *, follows_world: bool) -> None:
        """Check the rule against the choice of the batch.

        Args:
            follows_world: whether the global batch depends on the number of replicas.

        Raises:
            ConfigError: the rule changes a learning rate whose batch stays the same.
        """
        if not follows_world and self != LRScalingRule():
            raise ConfigError(
                "lr_scaling, reference_batch_size, warmup_samples and scale_adam are for a batch that follows the "
                "world: give samples_per_replica. With the same global batch the learning rate stays what it is."
            )

    @property
    def is_adascale(self) -> bool:
        """Whether the factor comes from the gradients of each step: AdaScale."""
        return self.scaling == "adascale"

    def factor(self, batch_size: int, reference_batch_size: int) -> float:
        """Factor of the learning rate once the ramp is over; AdaScale's gain is applied on top."""
        return lr_factor(self.scaling, batch_size, reference_batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class LRState(JsonRecord):
    """Progress of learning rate and schedule in a job whose batch follows the world."""

    reference_batch_size: int
    """Batch for which learning rate and schedule were made."""
    batch_size: int
    """Global batch of the present steps; the reference batch before the first."""
    ramp: Ramp = _LEVEL
    """Ramp to the factor for that batch."""
    ramp_from: int = 0
    """Value of `num_samples` at the start of the ramp."""
    num_samples: int = 0
    """Samples trained on so far."""
    gains: AdaScaleState | None = None
    """State of AdaScale; None if the factor depends on the batch alone."""

    @classmethod
    def initial(cls, reference_batch_size: int, rule: LRScalingRule) -> "LRState":
        """Return the state before the first step."""
        gains = AdaScaleState() if rule.is_adascale else None
        return cls(reference_batch_size=reference_batch_size, batch_size=reference_batch_size, gains=gains)

    @property
    def factor(self) -> float:
        """Factor of the next step's learning rate; with AdaScale, the last step's until the next one is measured."""
        return self.ramp.at(self.num_samples - self.ramp_from) if self.gains is None else self.gains.gain

    @property
    def schedule_step(self) -> int:
        """Completed steps of the schedule: reference steps by samples, or by AdaScale's gains."""
        return self._clock.schedule_step if self.gains is None else int(self.gains.num_steps)

    def with_batch(self, batch_size: int, rule: LRScalingRule) -> "LRState":
        """Return the state for steps of `batch_size` from now on; the ramp starts at the present factor."""
        end = rule.factor(batch_size, self.reference_batch_size)
        if (batch_size, end) == (self.batch_size, self.ramp.end):
            return self
        ramp = Ramp(start=self.factor, end=end, num_samples=rule.warmup_samples)
        return replace(self, batch_size=batch_size, ramp=ramp, ramp_from=self.num_samples)

    def with_gain(self, gradient_noise: GradientNoise | None, num_samples: int) -> "LRState":
        """Return the state with AdaScale's gain for the next step, measured from its gradients.

        Args:
            gradient_noise: gradient norms of that step; None if not measured.
            num_samples: samples of that step: fewer than `batch_size` if it is the last one of an epoch.
        """
        if self.gains is None:
            return self
        noise = None if gradient_noise is None else gradient_noise.estimate(num_samples, self.reference_batch_size)
        return replace(self, gains=self.gains.measured(noise, num_samples / self.reference_batch_size))

    def after(self, num_samples: int) -> "LRState":
        """Return the state after one more step of `num_samples` samples."""
        gains = None if self.gains is None else self.gains.after()
        return replace(self, num_samples=self._clock.after(num_samples).num_samples, gains=gains)

    @property
    def _clock(self) -> SampleClock:
        return SampleClock(reference_batch_size=self.reference_batch_size, num_samples=self.num_samples)


def scaled_adam(betas: tuple[float, float], eps: float, lr_factor: float) -> tuple[tuple[float, float], float]:
    """Return Adam's betas and eps for a scaled learning rate: 1 - beta is scaled by kappa, and eps by 1 /
    sqrt(kappa).

    Args:
        betas: for the reference batch.
        eps: for the reference batch.
        lr_factor: sqrt(kappa), for a batch kappa times the reference.

    Raises:
        ConfigError: a beta would be negative; the message says how large the batch may be.
    """
    kappa = lr_factor**2
    first, second = (1.0 - kappa * (1.0 - beta) for beta in betas)
    if min(first, second) < 0.0:
        largest = 1.0 / (1.0 - min(betas))
        raise ConfigError(
            f"with scale_adam, a batch {kappa:g} times the reference would make a beta of {betas} negative; up to "
            f"{math.floor(largest * 1000) / 1000:g} times is possible. Use a lower max_replicas, or no "
            "scale_adam."
        )
    return (first, second), eps / lr_factor
