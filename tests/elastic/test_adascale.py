"""What a larger batch is worth: the paper's formulas, the limits, the averages, and what it is all for."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_plugins.elastic.scaling.adascale import AdaScaleState, GradientNoise, NoiseEstimate
from hyperpod_plugins.elastic.scaling.lr_scaling import LRScalingRule, LRState

REFERENCE = 8
ADASCALE = LRScalingRule(scaling="adascale")


def spread_of(gradients, sizes):
    """Of the mean gradients of parts, over so many samples each."""
    shares = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
    gradients = gradients.double()
    return GradientNoise(
        squared_norms=tuple(gradients.square().sum(1).tolist()),
        shares=tuple(shares.tolist()),
        mean_squared_norm=float((shares[:, None] * gradients).sum(0).square().sum()),
    )


def gain_of(gradient_noise, scale):
    return AdaScaleState().measured(gradient_noise.estimate(int(scale * REFERENCE), REFERENCE), scale).gain


@pytest.mark.parametrize("scale", [2, 3, 8])
def test_the_paper_s_formula(scale):
    """Section 3 of arXiv:2007.05105, where each part is a reference batch."""
    gradients = torch.randn(scale, 50, generator=torch.Generator().manual_seed(scale), dtype=torch.float64) + 0.3
    mean = gradients.mean(0)
    variance = (gradients - mean).square().sum() / (scale - 1)
    signal = mean.square().sum() - variance / scale
    gradient_noise = spread_of(gradients, [REFERENCE] * scale)
    noise = gradient_noise.estimate(scale * REFERENCE, REFERENCE)
    assert noise.variance == pytest.approx(float(variance))
    assert noise.signal == pytest.approx(float(signal))
    assert gain_of(gradient_noise, scale) == pytest.approx(float((variance + signal) / (variance / scale + signal)))


@pytest.mark.parametrize(
    ("squared_norms", "of_mean", "gain"),
    [
        ([4.0, 4.0], 4.0, 1.0),  # they agree: the second taught nothing
        ([4.0, 4.0], 2.0, 2.0),  # noise: as far apart as independent gradients of mean 0 are
        ([4.0, 4.0], 0.0, 2.0),  # further apart than that
        ([4.0, 4.0, 4.0, 4.0], 1.0, 4.0),
        ([4.0], 4.0, 1.0),
        ([0.0, 0.0], 0.0, 1.0),
        ([5e-324, 0.0], 0.0, 1.0),  # too small for its half
        ([math.inf, 1.0], math.inf, 1.0),
        ([math.nan, 1.0], 1.0, 1.0),
        ([-1.0, -2.0], 4.0, 1.0),
    ],
)
def test_limits(squared_norms, of_mean, gain):
    scale = len(squared_norms)
    gradient_noise = GradientNoise(
        squared_norms=tuple(squared_norms), shares=tuple([1 / scale] * scale), mean_squared_norm=of_mean
    )
    assert gain_of(gradient_noise, scale) == pytest.approx(gain)


numbers = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(st.tuples(numbers, numbers), max_size=5), numbers, st.integers(1, 80))
def test_any_values_give_a_gain_between_the_limits(parts, of_mean, num_samples):
    norms, shares = zip(*parts, strict=True) if parts else ((), ())
    gradient_noise = GradientNoise(squared_norms=norms, shares=shares, mean_squared_norm=of_mean)
    scale = num_samples / REFERENCE
    lr_state = LRState.initial(REFERENCE, ADASCALE).with_gain(gradient_noise, num_samples).after(num_samples)
    assert min(1.0, scale) <= lr_state.factor <= max(1.0, scale)
    assert lr_state.schedule_step == int(lr_state.factor)


@pytest.mark.parametrize("sizes", [[8, 8, 8, 8], [3, 9, 0, 4], [2, 2], [2, 0, 14]])
def test_estimates_are_right_in_the_mean(sizes):
    """Of parts of any sizes: the variance is that of a reference batch."""
    generator = torch.Generator().manual_seed(1)
    num_draws, width, per_sample, true = 3000, 20, 3.0, torch.full((20,), 2.0, dtype=torch.float64)
    deviations = torch.tensor([per_sample / max(1, size) ** 0.5 for size in sizes], dtype=torch.float64)
    found = []
    for _ in range(num_draws):
        draws = torch.randn(len(sizes), width, generator=generator, dtype=torch.float64)
        found.append(spread_of(true + deviations[:, None] * draws, sizes).estimate(sum(sizes), REFERENCE))
    variance = sum(noise.variance for noise in found) / num_draws
    assert variance == pytest.approx(width * per_sample**2 / REFERENCE, rel=0.05)
    assert sum(noise.signal for noise in found) / num_draws == pytest.approx(float(true.square().sum()), rel=0.05)


def test_averages_are_means_first_and_then_forget():
    gains, variances = AdaScaleState(), [float(number % 7) for number in range(1, 400)]
    for count, variance in enumerate(variances, 1):
        before = gains
        gains = gains.measured(NoiseEstimate(variance=variance, signal=1.0), 4.0)
        if count <= 250:  # 1 / (1 - theta), with theta = 1 - 4 / 1000
            assert gains.variance == pytest.approx(sum(variances[:count]) / count)
        else:
            assert gains.variance == pytest.approx(0.996 * before.variance + 0.004 * variance)
        assert gains.gain == pytest.approx((gains.variance + 1) / (gains.variance / 4 + 1))


def test_a_step_that_tells_nothing_goes_by_what_is_known():
    gains = AdaScaleState().measured(NoiseEstimate(variance=9.0, signal=1.0), 2.0)
    alone = gains.measured(None, 3.0)
    assert alone.gain == pytest.approx(10.0 / (9.0 / 3.0 + 1.0))
    assert (alone.variance, alone.signal, alone.num_estimates) == (9.0, 1.0, 1)
    smaller = gains.measured(None, 0.5)
    assert smaller.gain == pytest.approx(10.0 / 19.0)
    assert AdaScaleState().measured(None, 4.0).gain == 1.0
    assert AdaScaleState().measured(None, 0.5).gain == 0.5


def test_the_clock_counts_what_steps_are_worth():
    lr_state, worth = LRState.initial(REFERENCE, ADASCALE), 0.0
    for number in range(50):
        before = lr_state
        gradient_noise = GradientNoise(squared_norms=(3.0 + number, 3.0), shares=(0.5, 0.5), mean_squared_norm=2.0)
        lr_state = lr_state.with_batch(2 * REFERENCE, ADASCALE).with_gain(gradient_noise, 2 * REFERENCE)
        assert lr_state.schedule_step == before.schedule_step  # a step counts when it is committed
        lr_state = lr_state.after(2 * REFERENCE)
        worth += lr_state.factor
        assert lr_state.schedule_step == int(worth)
        assert lr_state == LRState.from_dict(json.loads(json.dumps(lr_state.to_dict())))
    assert 50 < worth < 100
    assert lr_state.num_samples == 100 * REFERENCE


def test_a_course_from_before_there_was_adascale():
    state = LRState.initial(REFERENCE, LRScalingRule()).to_dict()
    del state["gains"]
    assert LRState.from_dict(state) == LRState.initial(REFERENCE, LRScalingRule())


# -- what it is for ---------------------------------------------------------------------------------------------------

NUM_STEPS, WIDTH = 300, 30


def logistic(scale, scaling, seed):
    """SGD with momentum on noisy logistic regression, for as many steps of the schedule; loss, and steps made."""
    generator = torch.Generator().manual_seed(seed)
    true = torch.randn(WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    size, rule = scale * REFERENCE, LRScalingRule(scaling=scaling)
    weights = torch.nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
    optimizer = torch.optim.SGD([weights], lr=0.2, momentum=0.5, foreach=False)
    (group,) = optimizer.param_groups
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
    lr_state, num_steps = LRState.initial(REFERENCE, rule), 0
    while lr_state.schedule_step < NUM_STEPS:
        x = torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)
        y = torch.rand(size, generator=generator, dtype=torch.float64) < torch.sigmoid(x @ true)
        gradients = (torch.sigmoid(x @ weights.detach()) - y.double())[:, None] * x
        gradients = gradients.view(scale, REFERENCE, WIDTH).mean(1)  # of each part
        before, lr_state = lr_state.schedule_step, lr_state.with_batch(size, rule)
        lr_state = lr_state.with_gain(spread_of(gradients, [REFERENCE] * scale), size)
        weights.grad = gradients.mean(0)
        rate, group["lr"] = group["lr"], group["lr"] * lr_state.factor
        optimizer.step()
        group["lr"] = rate
        lr_state, num_steps = lr_state.after(size), num_steps + 1
        for _ in range(lr_state.schedule_step - before):
            schedule.step()
    x = torch.randn(20_000, WIDTH, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    logits = x @ weights.detach()
    losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.sigmoid(x @ true))
    return float(losses), num_steps


def test_four_times_the_batch_comes_as_far_in_as_many_scale_invariant_steps():
    for seed in range(2):
        reference, _ = logistic(1, "none", seed)
        scaled, num_steps = logistic(4, "adascale", 100 + seed)
        assert scaled == pytest.approx(reference, abs=0.01)
        assert NUM_STEPS / 4 < num_steps < NUM_STEPS / 3
        as_it_was, _ = logistic(4, "none", 100 + seed)  # a quarter of the steps, and no larger ones
        assert as_it_was > reference + 0.05
