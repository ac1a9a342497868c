"""Learning rate and schedule where the batch follows the world: tables for the rules, and laws of any course."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_plugins.elastic.membership.elastic_spec import ElasticPolicy
from hyperpod_plugins.elastic.scaling.lr_scaling import LRScalingRule, LRState, scaled_adam
from hyperpod_plugins.errors import ConfigError

REFERENCE = 100


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scaling": "square"}, "one of none, linear, sqrt"),
        ({"scaling": "linear", "warmup_samples": -1}, "must not be negative"),
        ({"scaling": "linear", "reference_batch_size": -1}, "must not be negative"),
        ({"warmup_samples": 10}, "warmup_samples needs a learning rate that changes"),
        ({"scaling": "adascale", "warmup_samples": 10}, "leave warmup_samples out"),
        ({"scaling": "adascale", "scale_adam": True}, "goes with lr_scaling='sqrt'"),
        ({"scaling": "linear", "scale_adam": True}, "goes with lr_scaling='sqrt'"),
        ({"scaling": lambda kappa: kappa - 1}, "must return a positive number"),
    ],
)
def test_rules_that_make_no_sense(options, words):
    with pytest.raises(ConfigError, match=words):
        LRScalingRule(**options)


@pytest.mark.parametrize(
    ("scaling", "warmup", "batches", "factors"),
    [
        ("none", 0, [100, 200, 400], [1, 1, 1]),
        ("linear", 0, [100, 200, 400, 100], [1, 2, 4, 1]),
        ("sqrt", 0, [100, 400, 100], [1, 2, 1]),
        ("linear", 400, [100, 200, 200, 200, 200], [1, 1, 1.5, 2, 2]),
        ("linear", 400, [200, 200, 100, 100, 100], [1, 1.5, 2, 1.75, 1.5]),  # down by a ramp too
        ("linear", 400, [200, 200, 400], [1, 1.5, 2]),  # the second change begins where the first has come to
        (lambda kappa: kappa**0.25, 0, [1600], [2]),
    ],
)
def test_factors_of_the_learning_rate(scaling, warmup, batches, factors):
    rule, found = LRScalingRule(scaling=scaling, warmup_samples=warmup), []
    lr_state = LRState.initial(REFERENCE, rule)
    for batch in batches:
        lr_state = lr_state.with_batch(batch, rule)
        found.append(lr_state.factor)
        lr_state = lr_state.after(batch)
    assert found == pytest.approx(factors)


def test_a_reference_other_than_the_first_batch():
    rule = LRScalingRule(scaling="linear", reference_batch_size=50, warmup_samples=200)
    lr_state = LRState.initial(50, rule).with_batch(100, rule)
    assert lr_state.factor == 1.0
    assert lr_state.after(200).factor == 2.0


@given(st.lists(st.tuples(st.integers(1, 900), st.booleans()), max_size=30), st.sampled_from([0, 150, 1000]))
def test_whoever_is_given_the_course_goes_on_as_those_who_gave_it(steps, warmup):
    rule = LRScalingRule(scaling="sqrt", warmup_samples=warmup)
    old = new = LRState.initial(REFERENCE, rule)
    for batch, is_passed_on in steps:
        if is_passed_on:
            new = LRState.from_dict(json.loads(json.dumps(old.to_dict())))
        old, new = old.with_batch(batch, rule), new.with_batch(batch, rule)
        assert old == new
        assert 0.0 < old.factor <= math.sqrt(900 / REFERENCE)
        old, new = old.after(batch), new.after(batch)
    assert old.schedule_step == sum(batch for batch, _ in steps) // REFERENCE


def test_adam_beside_a_learning_rate_by_the_square_root():
    (first, second), eps = scaled_adam((0.9, 0.999), 1e-8, 2.0)
    assert (first, second, eps) == pytest.approx((0.6, 0.996, 0.5e-8))
    assert scaled_adam((0.9, 0.999), 1e-8, 1.0) == (pytest.approx((0.9, 0.999)), 1e-8)
    with pytest.raises(ConfigError, match="up to 10 times is possible"):
        scaled_adam((0.9, 0.999), 1e-8, 4.0)


@pytest.mark.parametrize("number", [1000, 1e3, np.int64(1000), np.float32(1000)])
def test_a_count_of_any_type_of_number_is_an_integer_that_another_process_can_read(number):
    rule = LRScalingRule(scaling="linear", warmup_samples=number)
    state = LRState.initial(8, rule).with_batch(16, rule)
    assert LRState.from_dict(json.loads(json.dumps(state.to_dict()))) == state
    policy = ElasticPolicy(min_replicas=number, max_replicas=number)
    assert (type(rule.warmup_samples), type(policy.max_replicas)) == (int, int)


@pytest.mark.parametrize("number", [True, 1.5, "8", None, float("nan"), float("inf")])
def test_what_is_no_whole_number_is_refused(number):
    with pytest.raises(ConfigError, match="warmup_samples must be a whole number"):
        LRScalingRule(scaling="linear", warmup_samples=number)
    with pytest.raises(ConfigError, match="max_replicas must be a whole number"):
        ElasticPolicy(max_replicas=number)
