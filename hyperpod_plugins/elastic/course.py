"""Learning rate and schedule of a job whose batch follows the world: pure, so that all ranks come to the same numbers.

Each rank keeps a `Course`. It depends on what was trained on, and on nothing else; whoever comes in is given it.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from hyperpod_plugins.elastic.adascale import Gains, Spread
from hyperpod_plugins.elastic.rescale import LrScaling, Ramp, SampleClock, lr_factor
from hyperpod_plugins.errors import ConfigError

_LEVEL = Ramp(start=1.0, end=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RateRule:
    """How the learning rate follows the batch.

    Raises:
        ConfigError: an unknown rule, or values that do nothing together.
    """

    scaling: LrScaling = "none"
    """By name, or a function of new batch / reference batch."""
    reference_batch_size: int = 0
    """Batch that learning rate and schedule were made for; 0 for the one of the first world."""
    warmup_samples: int = 0
    """Samples over which the factor goes to its new value after a change; 0 for at once."""
    scale_adam: bool = False
    """Whether `sqrt` changes Adam's betas and eps too (Malladi et al. 2022, arXiv:2205.10287)."""

    def __post_init__(self) -> None:
        """Check the values together."""
        lr_factor(self.scaling, 1, 1)
        if min(self.reference_batch_size, self.warmup_samples) < 0:
            raise ConfigError(
                f"reference_batch_size and warmup_samples must not be negative, but are {self.reference_batch_size} "
                f"and {self.warmup_samples}."
            )
        if self.is_measured and self.warmup_samples:
            raise ConfigError(
                "lr_scaling='adascale' finds the factor of each step in its gradients: leave "
                "warmup_samples out. A warm-up that belongs to the reference batch is the schedule's."
            )
        if self.scaling == "none" and self.warmup_samples:
            raise ConfigError("warmup_samples needs a learning rate that changes: give lr_scaling, or leave it out.")
        if self.scale_adam and self.scaling != "sqrt":
            raise ConfigError("scale_adam goes with lr_scaling='sqrt': its betas and eps belong to that rule.")

    @property
    def is_measured(self) -> bool:
        """Whether the factor comes from the gradients of each step: AdaScale."""
        return self.scaling == "adascale"

    def factor(self, batch_size: int, reference_batch_size: int) -> float:
        """What the learning rate is multiplied with, once the ramp is over; AdaScale's gain comes on top."""
        return lr_factor(self.scaling, batch_size, reference_batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Where a job stands."""

    reference_batch_size: int
    """Batch that learning rate and schedule were made for."""
    batch_size: int
    """Of the last step."""
    ramp: Ramp = _LEVEL
    """The way to the factor for that batch."""
    ramp_from: int = 0
    """Samples that had been trained on when that way began."""
    num_samples: int = 0
    """Samples that have been trained on."""
    gains: Gains | None = None
    """AdaScale's; None where the factor follows from the batch alone."""

    @classmethod
    def beginning(cls, reference_batch_size: int, rule: RateRule) -> "Course":
        """Before the first step."""
        gains = Gains() if rule.is_measured else None
        return cls(reference_batch_size=reference_batch_size, batch_size=reference_batch_size, gains=gains)

    @property
    def factor(self) -> float:
        """For the learning rate of the next step, or of the last one until the next one has been measured."""
        return self.ramp.at(self.num_samples - self.ramp_from) if self.gains is None else self.gains.gain

    @property
    def schedule_step(self) -> int:
        """Steps of the schedule that are complete: steps of the reference batch, or what was worth as many."""
        return self._clock.schedule_step if self.gains is None else int(self.gains.num_steps)

    def toward(self, batch_size: int, rule: RateRule) -> "Course":
        """The course with steps of that batch from now on; from the present factor, also within a ramp."""
        end = rule.factor(batch_size, self.reference_batch_size)
        if (batch_size, end) == (self.batch_size, self.ramp.end):
            return self
        ramp = Ramp(start=self.factor, end=end, num_samples=rule.warmup_samples)
        return replace(self, batch_size=batch_size, ramp=ramp, ramp_from=self.num_samples)

    def measured(self, spread: Spread | None, num_samples: int) -> "Course":
        """The course with what the gradients of the next step have told, of so many samples.

        Args:
            spread: of that step; None where nobody has looked.
            num_samples: of that step: fewer than `batch_size`, if it is the last one of an epoch.
        """
        if self.gains is None:
            return self
        noise = None if spread is None else spread.noise(num_samples, self.reference_batch_size)
        return replace(self, gains=self.gains.measured(noise, num_samples / self.reference_batch_size))

    def after(self, num_samples: int) -> "Course":
        """The course after one more step, of so many samples."""
        gains = None if self.gains is None else self.gains.after()
        return replace(self, num_samples=self._clock.after(num_samples).num_samples, gains=gains)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Course":
        """Inverse of `to_dict`."""
        plain: dict[str, Any] = {"gains": None} | {**values}
        gains = plain.pop("gains")
        return cls(ramp=Ramp(**plain.pop("ramp")), gains=None if gains is None else Gains(**gains), **plain)

    @property
    def _clock(self) -> SampleClock:
        return SampleClock(reference_batch_size=self.reference_batch_size, num_samples=self.num_samples)


def scaled_adam(betas: tuple[float, float], eps: float, lr_factor: float) -> tuple[tuple[float, float], float]:
    """Adam's betas and eps beside a learning rate that was multiplied: kappa (1 - beta), and eps / sqrt(kappa).

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
            f"a batch {kappa:g} times the reference would make a beta of {betas} negative by scale_adam; up to "
            f"{math.floor(largest * 1000) / 1000:g} times is possible. Use a lower max_replicas, or no "
            "scale_adam."
        )
    return (first, second), eps / lr_factor
