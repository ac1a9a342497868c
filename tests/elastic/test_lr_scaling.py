"""What a change of size does to batch, gradient and schedule."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_plugins.data.batch_split import fits, plan_batch
from hyperpod_plugins.elastic.scaling.lr_scaling import Ramp, SampleClock, lr_factor
from hyperpod_plugins.errors import ConfigError


@pytest.mark.parametrize(
    ("batch", "ranks", "micro", "shares"),
    [
        (128, 24, 8, [6] * 8 + [5] * 16),  # as in the public recipes
        (128, 48, 8, [3] * 32 + [2] * 16),
        (128, 16, 8, [8] * 16),
        (12, 3, 2, [4] * 3),
    ],
)
def test_shares_of_one_batch(batch, ranks, micro, shares):
    split = plan_batch(batch, ranks, micro)
    sizes = split.micro_step_sizes(batch)
    found = [sum(size // ranks + (rank < size % ranks) for size in sizes) for rank in range(ranks)]
    assert found == shares


def test_a_batch_smaller_than_the_world_is_refused():
    with pytest.raises(ConfigError, match="at least 8 samples"):
        plan_batch(6, 8, 4)
    assert not fits(6, 8, 4)
    assert fits(8, 8, 4)


@pytest.mark.parametrize(
    ("scaling", "ratio", "factor"),
    [
        ("none", 4, 1.0),
        ("linear", 4, 4.0),
        ("sqrt", 4, 2.0),
        (lambda ratio: ratio**0.25, 16, 2.0),
        ("linear", 0.5, 0.5),
        ("adascale", 4, 1.0),  # the gradients say more
    ],
)
def test_rules_of_the_learning_rate(scaling, ratio, factor):
    assert lr_factor(scaling, 32 * ratio, 32) == pytest.approx(factor)


@pytest.mark.parametrize(
    ("scaling", "batch", "words"),
    [
        ("quadratic", 8, "one of none, linear, sqrt"),
        (lambda _: math.nan, 8, "positive number"),
        ("linear", 0, "positive"),
    ],
)
def test_impossible_rules(scaling, batch, words):
    with pytest.raises(ConfigError, match=words):
        lr_factor(scaling, batch, 32)


def test_a_ramp():
    ramp = Ramp(start=1.0, end=3.0, num_samples=100)
    assert [ramp.at(samples) for samples in (0, 50, 100, 1000)] == [1.0, 2.0, 3.0, 3.0]
    assert Ramp(start=1.0, end=3.0).at(0) == 3.0


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 20))
def test_a_schedule_goes_on_by_samples(steps, reference):
    clock = SampleClock(reference_batch_size=reference)
    for size in steps:
        clock = clock.after(size)
    assert clock.schedule_step == sum(steps) // reference
