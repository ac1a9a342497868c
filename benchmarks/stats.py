"""What the samples say: medians, quartiles and paired ratios. Pure functions, no clock, no process."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from statistics import median
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median and quartiles of one list of samples, in the unit of the samples."""

    median: float
    low: float
    """First quartile."""
    high: float
    """Third quartile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Median of paired ratios, with the interval that holds the true median with the given confidence."""

    median: float
    low: float
    high: float
    confidence: float


def spread(samples: Sequence[float]) -> Spread:
    """Median and quartiles of at least one sample."""
    ordered = sorted(samples)
    return Spread(median=median(ordered), low=quantile(ordered, 0.25), high=quantile(ordered, 0.75))


def quantile(ordered: Sequence[float], fraction: float) -> float:
    """Quantile of an ordered, non-empty list; between two samples, a straight line."""
    place = fraction * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def paired_ratio(
    samples: Sequence[float],
    reference: Sequence[float],
    rounds_per_start: Sequence[int],
    *,
    again: Sequence[float] | None = None,
    confidence: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 0,
) -> Ratio:
    """Ratio of samples to the reference's samples of the *same round*, whose common noise cancels.

    The interval is a percentile bootstrap of the median (B. Efron, 1979) in two levels: starts are drawn again with
    replacement, and within each its rounds. Processes differ from start to start (which cores and pages they got), and
    rounds of one start share that, so drawing rounds alone would promise more than the samples hold.

    Args:
        samples: one a round, of the contender.
        reference: one a round, of the reference.
        rounds_per_start: how many rounds, in this order, belong to each fresh set of processes.
        again: one a round, of the reference once more: each round then has two ratios, which are drawn together. (One
            ratio to the mean of both has a median below 1 where nothing differs, for step times are skewed.)
        confidence: share of the interval.
        num_resamples: how often everything is drawn again.
        seed: of the drawing.

    Raises:
        ValueError: the lists do not have one sample for each of the same rounds.
    """
    references = [reference] if again is None else [reference, again]
    ratios = [
        tuple(mine / each for each in theirs)
        for mine, theirs in zip(samples, zip(*references, strict=True), strict=True)
    ]
    if sum(rounds_per_start) != len(ratios):
        raise ValueError(f"{len(ratios)} rounds cannot be spread over starts as {list(rounds_per_start)}")
    ends = list(accumulate(rounds_per_start))
    starts = [ratios[end - count : end] for end, count in zip(ends, rounds_per_start, strict=True)]
    draw = random.Random(seed)

    def median_drawn_again() -> float:
        rounds = chain.from_iterable(draw.choices(s, k=len(s)) for s in draw.choices(starts, k=len(starts)))
        return median(chain.from_iterable(rounds))

    medians = sorted(median_drawn_again() for _ in range(num_resamples))
    tail = (1 - confidence) / 2
    return Ratio(
        median=median(chain.from_iterable(ratios)),
        low=quantile(medians, tail),
        high=quantile(medians, 1 - tail),
        confidence=confidence,
    )


def verdict(ratio: Ratio, limit: float) -> str:
    """Whether a ratio keeps below a limit, as far as its interval can tell."""
    if ratio.high <= limit:
        return "met"
    if ratio.low > limit:
        return "missed"
    return "not decided by these rounds"


def rotated(items: Sequence[Item], round_index: int) -> list[Item]:
    """Order of one round: everybody moves up one place a round, so that no place in the order belongs to anybody."""
    first = round_index % len(items)
    return [*items[first:], *items[:first]]
