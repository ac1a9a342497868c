"""Models of failures: how many there are, on which nodes, and when."""

import numpy as np
import pytest

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.planning.failures import (
    NO_LEMONS,
    ExponentialFailures,
    LemonNodes,
    TraceFailures,
    WeibullFailures,
)

HOUR = 3600.0
MODELS = [ExponentialFailures(), WeibullFailures(shape=0.7), WeibullFailures(shape=1.0), WeibullFailures(shape=2.0)]


def drawn(model, *, num_runs=50, num_nodes=126, rate=0.01, lemons=NO_LEMONS, ends=(100 * HOUR, 250 * HOUR), seed=0):
    """Times and nodes of all failures as one list, run by run, from several windows."""
    stream = model.start(np.random.default_rng(seed), num_runs, num_nodes, rate, lemons)
    times, nodes, begin = [], [], 0.0
    for end in ends:
        window = stream.until(end)
        is_there = np.isfinite(window.times_s)
        assert (window.times_s[:, 1:] >= window.times_s[:, :-1]).all(), "not in the order of time"
        assert ((window.times_s >= begin) & (window.times_s < end))[is_there].all(), "not in the window"
        assert (is_there[:, :-1] >= is_there[:, 1:]).all(), "something after the last one"
        times.append(window.times_s[is_there])
        nodes.append(window.nodes[is_there])
        begin = end
    return np.concatenate(times), np.concatenate(nodes), stream


@pytest.mark.parametrize("model", MODELS, ids=repr)
@pytest.mark.parametrize("lemons", [NO_LEMONS, LemonNodes()], ids=["alike", "lemons"])
def test_the_mean_rate_is_kept(model, lemons):
    times, nodes, _ = drawn(model, lemons=lemons)
    wanted = 50 * 126 * 0.01 * 250
    assert len(times) == pytest.approx(wanted, abs=4 * np.sqrt(wanted) * (1.5 if model != MODELS[0] else 1))
    assert set(nodes) == set(range(126))
    early = (times < 125 * HOUR).mean()
    assert early == pytest.approx(0.5, abs=0.02), "not stationary"


@pytest.mark.parametrize("model", MODELS[:2], ids=repr)
def test_few_nodes_cause_half_of_the_failures(model):
    lemons = LemonNodes(fraction=3 / 63, share=0.5)
    _, nodes, stream = drawn(model, lemons=lemons, num_runs=1, rate=0.1, ends=(2000 * HOUR,))
    assert stream.is_lemon.sum(axis=1).tolist() == [6]
    share = np.bincount(nodes, minlength=126)[stream.is_lemon[0]].sum() / nodes.size
    assert share == pytest.approx(0.5, abs=0.02)


def test_new_nodes_fail_early_if_the_shape_is_below_1():
    times, *_ = drawn(WeibullFailures(shape=0.5, starts_new=True), rate=1e-3)
    assert (times < 100 * HOUR).mean() > 0.55
    times, *_ = drawn(WeibullFailures(shape=2, starts_new=True), rate=1e-3)
    assert (times < 100 * HOUR).mean() < 0.25


def test_a_trace_is_repeated_as_it_was():
    trace = TraceFailures(times_s=(50.0, 10.0, 11.0), nodes=(7, 1, 2), duration_s=100, starts_anywhere=False)
    times, nodes, _ = drawn(trace, num_runs=1, num_nodes=8, ends=(60.0, 230.0))
    assert times.tolist() == [10, 11, 50, 110, 111, 150, 210, 211]
    assert nodes.tolist() == [1, 2, 7, 1, 2, 7, 1, 2]
    assert trace.failures_per_hour == 108


def test_a_trace_starts_elsewhere_in_each_run():
    trace = TraceFailures(times_s=(10.0, 11.0), nodes=(1, 2), duration_s=100)
    stream = trace.start(np.random.default_rng(0), 5, 8, 0.0, NO_LEMONS)
    window = stream.until(1000.0)
    assert window.times_s.shape == (5, 20)
    assert len(set(window.times_s[:, 0])) == 5
    pairs = np.isclose(np.diff(window.times_s, axis=1), 1)
    assert (pairs.sum(axis=1) >= 9).all(), "failures that came together do so again"


def test_equal_seeds_give_equal_failures():
    first, *_ = drawn(WeibullFailures(), seed=3)
    again, *_ = drawn(WeibullFailures(), seed=3)
    other, *_ = drawn(WeibullFailures(), seed=4)
    assert (first == again).all()
    assert first.shape != other.shape or (first != other).any()


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: WeibullFailures(shape=0), "shape=0 of a Weibull"),
        (lambda: LemonNodes(share=1), "share=1 of lemon nodes must be below 1"),
        (lambda: LemonNodes(fraction=0.1, share=0.0), "share=0 of lemon nodes, with fraction=0.1"),
        (lambda: TraceFailures(times_s=(float("nan"),), nodes=(0,), duration_s=1), "must be finite numbers"),
        (lambda: TraceFailures(times_s=(0.5, float("nan")), nodes=(0, 1), duration_s=1), "must be finite numbers"),
        (lambda: LemonNodes(exclude_after=-1), "exclude_after=-1"),
        (lambda: TraceFailures(times_s=(), nodes=(), duration_s=1), "at least one failure"),
        (lambda: TraceFailures(times_s=(1, 2), nodes=(1,), duration_s=9), "2 times and 1 nodes"),
        (lambda: TraceFailures(times_s=(9,), nodes=(1,), duration_s=9), "less than duration_s=9"),
        (lambda: drawn(TraceFailures(times_s=(1,), nodes=(8,), duration_s=9), num_nodes=8), "the cluster has 8 nodes"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, told):
    with pytest.raises(ConfigError, match=told):
        call()
