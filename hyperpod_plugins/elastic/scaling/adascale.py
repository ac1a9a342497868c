"""AdaScale (Johnson et al. 2020, arXiv:2007.05105): what a step of a larger batch is worth, as the gradients tell.

The gradient of one sample is the true gradient plus noise. A batch S times the reference has S times less variance.
Where noise is all there is, a step of it may go S times as far as one of the reference batch, and is worth S of them;
where there is none, a larger batch teaches nothing more, and the step is worth one. Between them lies the gain

    r = (variance + signal) / (variance / S + signal)

with the variance of a gradient of the reference batch, and the squared norm of the true gradient, as `signal`. The
learning rate of the step is multiplied by r, and the schedule goes on by r steps.
"""

import math
from dataclasses import dataclass, replace

_MEMORY = 1000
"""Batches of the reference size that the averages reach back over; the paper's number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """What gradients are made of, over all parameters together."""

    variance: float
    """Of the gradient of one reference batch."""
    signal: float
    """Squared norm of the true gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNoise:
    """How far the gradients of the parts of one step are apart."""

    squared_norms: tuple[float, ...]
    """Of the mean gradient over the samples of each part."""
    shares: tuple[float, ...]
    """Of the samples of the step, that each part had; those without any do not count."""
    mean_squared_norm: float
    """Of the gradient of the step."""

    def noise(self, num_samples: int, reference_batch_size: int) -> Noise | None:
        """The unbiased estimates of one step, no less than zero; the paper's, where all parts are reference batches.

        A mean over n samples has 1/n of the variance of one, so squared distances from the mean are weighted by n.

        Args:
            num_samples: of the step.
            reference_batch_size: whose variance is asked for.

        Returns:
            None where fewer than two parts had samples, or a gradient was not finite.
        """
        parts = [(norm, share) for norm, share in zip(self.squared_norms, self.shares, strict=True) if share > 0.0]
        if len(parts) < 2:
            return None
        apart = sum(share * norm for norm, share in parts) - self.mean_squared_norm
        of_step = apart / (len(parts) - 1)
        variance, signal = of_step * num_samples / reference_batch_size, self.mean_squared_norm - of_step
        if not (math.isfinite(variance) and math.isfinite(signal)):
            return None
        return Noise(variance=max(0.0, variance), signal=max(0.0, signal))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaScaleState:
    """What was learnt of the gradients so far, and how many steps of the reference batch the steps were worth."""

    variance: float = 0.0
    """Average of what steps have told; see `Noise`."""
    signal: float = 0.0
    """Average of what steps have told; see `Noise`."""
    num_estimates: int = 0
    """Steps that have told something."""
    gain: float = 1.0
    """Of the last step."""
    num_steps: float = 0.0
    """Sum of all gains: scale-invariant steps, by which the schedule goes on."""

    def measured(self, noise: Noise | None, scale: float) -> "AdaScaleState":
        """With the gain of the next step, and what that step has told.

        The averages are the paper's (appendix B.3): means, until there are as many estimates as the running average
        remembers, which forgets `scale / 1000` of itself with each.

        Args:
            noise: of the step; None where its gradients tell nothing, and the averages stay as they are.
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
        """The step was made."""
        return replace(self, num_steps=self.num_steps + self.gain)

    def _gain(self, scale: float) -> float:
        """Between 1 and `scale`; the smaller one where nothing is known, so that nobody goes too far."""
        least, most = min(1.0, scale), max(1.0, scale)
        below = self.variance / scale + self.signal
        if not below > 0.0:
            return least
        return min(most, max(least, (self.variance + self.signal) / below))
