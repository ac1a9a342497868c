"""Policies for steps whose losses, known to one rank each, or whose gradients are not finite; one process."""

import math

import pytest
import torch
from torch import nn

from hyperpod_plugins.errors import NonFiniteError
from hyperpod_plugins.parallel.finite import FiniteCheck, NonFinite, RankFiniteCheck, gradient_flag

STOPS, SKIPS, GOES_ON = "stops", "skips", "goes on"


def model_with(gradient):
    """A layer with two parameters, one of which has this number in its gradient."""
    model = nn.Linear(2, 1)
    if gradient is not None:
        model.weight.grad = torch.tensor([[1.0, gradient]])
    return model


def outcome(policy, values, norm=None, gradient=None):
    check = FiniteCheck(policy, waits_anyway=True)
    losses = RankFiniteCheck(check)
    for batch, value in enumerate(values, 6):
        losses.record(batch, torch.tensor(math.nan))
        losses.record(batch, torch.tensor(value))  # it is computed again
    losses.reconcile(model_with(gradient))
    may_update = losses.allows_update(None if norm is None else torch.tensor(norm), step=3, epoch=1)
    if check.error is not None:
        assert not may_update
        return STOPS, check.error
    return (GOES_ON if may_update else SKIPS), None


@pytest.mark.parametrize(
    ("values", "norm", "gradient", "is_good"),
    [
        ([1.0, 2.0], 3.0, 1.0, True),
        ([], None, None, True),
        ([1.0, math.nan], 3.0, None, False),
        ([math.inf], None, None, False),
        ([1.0], math.nan, None, False),
        ([1.0], None, 1.0, True),
        ([1.0], None, math.inf, False),
        ([1.0], None, -math.inf, False),
        ([1.0], 3.0, math.nan, False),
        ([], None, math.inf, False),
    ],
)
def test_policies(values, norm, gradient, is_good):
    assert outcome("auto", values, norm, gradient)[0] == (GOES_ON if is_good else STOPS)
    assert outcome("skip", values, norm, gradient)[0] == (GOES_ON if is_good else SKIPS)
    assert outcome("warn", values, norm, gradient)[0] == GOES_ON


def test_the_error_names_step_and_batch():
    text = "step 3 of epoch 1 is not finite: the loss of batch 7 of this rank is nan. Nothing was updated"
    assert text in str(outcome("stop", [1.0, math.nan])[1])
    assert "its gradient norm is inf, and all losses are finite" in str(outcome("stop", [1.0], math.inf)[1])
    text = "a gradient is infinite or NaN, and all losses are finite; the batches of this rank: 6, 7"
    assert text in str(outcome("stop", [1.0, 2.0], gradient=math.inf)[1])


def test_gradients_of_all_kinds_are_looked_at():
    def flag(*gradients):
        parameters = [nn.Parameter(torch.zeros(4, 2, dtype=each.dtype)) for each in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return int(gradient_flag([*parameters, nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(3))]))

    one, infinite = torch.ones(4, 2), torch.full((4, 2), torch.inf)
    assert flag() == 0
    assert flag(one, one.bfloat16(), one.to_sparse()) == 0
    for each in (infinite, infinite.bfloat16(), infinite.to_sparse()):
        assert flag(one, each, one.bfloat16()) == NonFinite.GRADIENT


def test_a_finite_step_forgets_the_error_of_the_one_before():
    check = FiniteCheck("stop", waits_anyway=True)
    losses = RankFiniteCheck(check)
    for batch, value in enumerate((math.nan, 1.0)):
        losses.record(batch, torch.tensor(value))  # the first one after a decision begins another step
        losses.reconcile(nn.Linear(1, 1))
        losses.allows_update(None, step=0, epoch=0)
        if not math.isfinite(value):
            with pytest.raises(NonFiniteError):
                check.raise_if_stopped()
    check.raise_if_stopped()
