"""Policies for steps whose losses, known to one rank each, or whose gradient norm are not finite; one process."""

import math

import pytest
import torch
from torch import nn

from hyperpod_plugins.errors import NonFiniteError
from hyperpod_plugins.parallel.finite import FiniteCheck, RankLosses

STOPS, SKIPS, GOES_ON = "stops", "skips", "goes on"


def outcome(policy, values, norm=None):
    check = FiniteCheck(policy, waits_anyway=True)
    losses = RankLosses(check)
    for batch, value in enumerate(values, 6):
        losses.record(batch, torch.tensor(math.nan))
        losses.record(batch, torch.tensor(value))  # it is computed again
    losses.settle(nn.Linear(1, 1))
    may_update = losses.allows_update(None if norm is None else torch.tensor(norm), step=3, epoch=1)
    if check.error is not None:
        assert not may_update
        return STOPS, check.error
    return (GOES_ON if may_update else SKIPS), None


@pytest.mark.parametrize(
    ("values", "norm", "is_good"),
    [
        ([1.0, 2.0], 3.0, True),
        ([], None, True),
        ([1.0, math.nan], 3.0, False),
        ([math.inf], None, False),
        ([1.0], math.nan, False),
    ],
)
def test_policies(values, norm, is_good):
    assert outcome("auto", values, norm)[0] == (GOES_ON if is_good else STOPS)
    assert outcome("skip", values, norm)[0] == (GOES_ON if is_good else SKIPS)
    assert outcome("warn", values, norm)[0] == GOES_ON


def test_the_error_names_step_and_batch():
    text = "step 3 of epoch 1 is not finite: the loss of batch 7 of this rank is nan. Nothing was updated"
    assert text in str(outcome("stop", [1.0, math.nan])[1])
    assert "its gradient norm is inf, and all losses are finite" in str(outcome("stop", [1.0], math.inf)[1])


def test_a_finite_step_forgets_the_error_of_the_one_before():
    check = FiniteCheck("stop", waits_anyway=True)
    losses = RankLosses(check)
    for value in (math.nan, 1.0):
        losses.begin()
        losses.record(0, torch.tensor(value))
        losses.settle(nn.Linear(1, 1))
        losses.allows_update(None, step=0, epoch=0)
        if not math.isfinite(value):
            with pytest.raises(NonFiniteError):
                check.raise_if_stopped()
    check.raise_if_stopped()
