"""`Estimate`: the mean of simulated runs and its 95 % interval, also where there are few runs or few failures."""

import math
from dataclasses import dataclass, replace

import numpy as np

from hyperpod_plugins.planning.failures import Floats

STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's quantiles of 97.5 % for 1 to 30 degrees of freedom."""


def student_quantile(degrees: int) -> float:
    """Student's quantile of 97.5 %; above 30 degrees of freedom from the normal one (Cornish-Fisher)."""
    return STUDENT[degrees - 1] if degrees <= len(STUDENT) else 1.96 + 2.37 / degrees + 2.82 / degrees**2


def poisson_interval(count: int) -> tuple[float, float]:
    """Exact 95 % interval of the mean of a Poisson distribution of which `count` was drawn (Garwood 1936)."""
    low = _poisson_mean(count - 1, 0.975) if count else 0.0
    return low, _poisson_mean(count, 0.025)


def _poisson_mean(count: int, probability: float) -> float:
    """The mean with which at most `count` is drawn with this probability."""
    low, high = 0.0, count + 10 + 10 * math.sqrt(count + 1)
    for _ in range(60):
        mean = (low + high) / 2
        logs = (number * math.log(mean) - mean - math.lgamma(number + 1) for number in range(count + 1))
        low, high = (mean, high) if math.fsum(map(math.exp, logs)) > probability else (low, mean)
    return (low + high) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Mean of simulated runs, and how they are spread."""

    mean: float
    low: float
    """Lower end of the 95 % confidence interval of the mean."""
    high: float
    """Its upper end."""
    p05: float
    """5 % of the runs are below."""
    p95: float
    """5 % of the runs are above."""

    @classmethod
    def of(cls, values: Floats) -> "Estimate":
        """Estimate from one value of each run, at least two."""
        if not np.isfinite(values).all():
            return cls(mean=math.inf, low=math.inf, high=math.inf, p05=float(values.min()), p95=math.inf)
        mean = float(values.mean())
        half = student_quantile(values.size - 1) * float(values.std(ddof=1)) / math.sqrt(values.size)
        p05, p95 = (float(each) for each in np.quantile(values, (0.05, 0.95)))
        return cls(mean=mean, low=mean - half, high=mean + half, p05=p05, p95=p95)

    def reaching(self, below: float, above: float) -> "Estimate":
        """The same with an interval that reaches at least so far below and above the mean."""
        return replace(self, low=min(self.low, self.mean - below), high=max(self.high, self.mean + above))

    def blurred(self, below: float, above: float) -> "Estimate":
        """The same with another error, independent of the one that the spread of the runs shows."""
        low = self.mean - math.hypot(self.mean - self.low, below)
        return replace(self, low=low, high=self.mean + math.hypot(self.high - self.mean, above))

    def holds(self, value: float) -> bool:
        """Whether a value is in the confidence interval of the mean."""
        return self.low <= value <= self.high
