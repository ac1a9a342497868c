"""AdaScale (Johnson et al. 2020, arXiv:2007.05105): how many reference steps a step of a larger batch is worth.

The gradient of one sample is the true gradient plus noise. The gradient of a batch S times the reference has S times
less variance. If the gradients are all noise, a step of that batch may go S times as far as a step of the reference
batch, and is worth S such steps. Without noise, a larger batch adds nothing, and the step is worth one. In between,
the gain is

    r = (variance + signal) / (variance / S + signal)

where `variance` is that of the gradient of the reference batch, and `signal` the squared norm of the true gradient.
The learning rate of the step is multiplied by r, and the schedule advances by r steps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

_MEMORY = 1000
"""Number of reference batches over which the moving averages reach back, as in the paper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseEstimate:
    """Variance and signal of the gradients, over all parameters together."""

    variance: float
    """Variance of the gradient of one reference batch."""
    signal: float
    """Squared norm of the true gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNoise:
    """Squared norms of the gradients of one step and of its parts, from which `noise` estimates the variance."""

    squared_norms: tuple[float, ...]
    """Squared norm of each part's mean gradient over its samples."""
    shares: tuple[float, ...]
    """Each part's share of the samples of the step; parts without samples do not count."""
    mean_squared_norm: float
    """Squared norm of the gradient of the whole step."""

    @classmethod
    def of_table(cls, table: Sequence[float], num_micro_steps: int, data_ranks_per_replica: int) -> Self:
        """Return the noise of a step, given the norms of its parts' weighted gradients.

        A part's weighted gradient is the gradient of its samples times the ratio of its number of samples to that of
        the mean replica in a full step.

        Args:
            table: squared norm and weight of each part, then the squared norm of the step's mean.
            num_micro_steps: number of parts of each replica.
            data_ranks_per_replica: ranks of a replica that read different samples.
        """
        *parts, of_mean = table
        per_replica = data_ranks_per_replica * num_micro_steps
        shares = [weight / per_replica for weight in parts[1::2]]
        num_replicas = len(shares) // num_micro_steps
        norms = [norm / (share * share) if share else 0.0 for norm, share in zip(parts[::2], shares, strict=True)]
        return cls(
            squared_norms=tuple(norms),
            shares=tuple(share / num_replicas for share in shares),
            mean_squared_norm=of_mean,
        )

    def estimate(self, num_samples: int, reference_batch_size: int) -> NoiseEstimate | None:
        """Estimate variance and signal from one step: unbiased, but clipped at zero.

        These are the paper's estimators if all parts are reference batches. A mean over n samples has 1/n of the
        variance of one sample, so squared distances from the mean are weighted by n.

        Args:
            num_samples: number of samples in the step.
            reference_batch_size: batch size for which the variance is estimated.

        Returns:
            The estimates; None if fewer than two parts had samples, or a gradient was not finite.
        """
        parts = [(norm, share) for norm, share in zip(self.squared_norms, self.shares, strict=True) if share > 0.0]
        if len(parts) < 2:
            return None
        apart = sum(share * norm for norm, share in parts) - self.mean_squared_norm
        of_step = apart / (len(parts) - 1)
        variance, signal = of_step * num_samples / reference_batch_size, self.mean_squared_norm - of_step
        if not (math.isfinite(variance) and math.isfinite(signal)):
            return None
        return NoiseEstimate(variance=max(0.0, variance), signal=max(0.0, signal))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaScaleState:
    """Moving averages of the gradient statistics, and the number of reference steps that the steps were worth."""

    variance: float = 0.0
    """Average of the steps' estimates; see `NoiseEstimate`."""
    signal: float = 0.0
    """Average of the steps' estimates; see `NoiseEstimate`."""
    num_estimates: int = 0
    """Number of steps that gave an estimate."""
    gain: float = 1.0
    """Gain of the last step."""
    num_steps: float = 0.0
    """Sum of all gains: scale-invariant steps, by which the schedule advances."""

    def measured(self, noise: NoiseEstimate | None, scale: float) -> "AdaScaleState":
        """Return the state with the next step's estimates averaged in, and with the gain of that step.

        The averages are the paper's (appendix B.3): plain means at first, then exponential moving averages that
        weight each new estimate with `scale / 1000`, once that exceeds its weight in the mean.

        Args:
            noise: estimates of the step; None if its gradients give none, and the averages stay as they are.
            scale: samples of the step / reference batch.
        """
        found = self
        if noise is not None:
            count = self.num_estimates + 1
            new = max(1.0 / count, min(1.0, scale / _MEMORY))
            found = replace(
                self,
                variance=self.variance + new * (noise.variance - self.variance),
                signal=self.signal + new * (noise.signal - self.signal),
                num_estimates=count,
            )
        return replace(found, gain=found._gain(scale))

    def after(self) -> "AdaScaleState":
        """Return the state after the step."""
        return replace(self, num_steps=self.num_steps + self.gain)

    def _gain(self, scale: float) -> float:
        """The gain, between 1 and `scale`; the smaller of the two without estimates, to be safe."""
        least, most = min(1.0, scale), max(1.0, scale)
        below = self.variance / scale + self.signal
        if not below > 0.0:
            return least
        return min(most, max(least, (self.variance + self.signal) / below))
