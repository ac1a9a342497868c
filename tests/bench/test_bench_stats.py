"""Statistics, the table and the schedule of the benchmarks: pure."""

import argparse
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness import Comparison, Run, Schedule
from benchmarks.report import as_document, plain_table, rows
from benchmarks.run_all import summary_lines
from benchmarks.stats import Ratio, paired_ratio, quantile, rotated, spread, verdict

times = st.lists(st.floats(0.01, 100), min_size=1, max_size=30)


def comparison_of(**step_s):
    runs = [
        Run(name=name, step_s=list(samples), measures={"cpu_s": [1.0] * len(samples)})
        for name, samples in step_s.items()
    ]
    return Comparison(title="t", schedule=Schedule(rounds=3, starts=1), runs=runs)


def test_spread_of_known_samples():
    found = spread([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (found.median, found.low, found.high) == (3.0, 2.0, 4.0)


@pytest.mark.parametrize(("fraction", "expected"), [(0.0, 1.0), (0.5, 1.5), (1.0, 2.0), (0.25, 1.25)])
def test_quantile_interpolates(fraction, expected):
    assert quantile([1.0, 2.0], fraction) == expected


def test_noise_that_hits_both_in_a_round_cancels():
    """Rounds ten times slower than others: unpaired medians would say nothing, the paired ratio is exact."""
    reference = [1.0, 10.0, 2.0, 7.0, 0.5]
    found = paired_ratio([1.02 * seconds for seconds in reference], reference, [2, 3])
    assert found.median == pytest.approx(1.02)
    assert found.low == pytest.approx(1.02)
    assert found.high == pytest.approx(1.02)


@given(times)
def test_a_contender_against_itself_is_one(samples):
    found = paired_ratio(samples, samples, [len(samples)], num_resamples=50)
    assert (found.low, found.median, found.high) == (1.0, 1.0, 1.0)


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=2, max_size=20))
def test_interval_and_median_lie_inside_the_samples(pairs):
    found = paired_ratio([a for a, _ in pairs], [b for _, b in pairs], [1, len(pairs) - 1], num_resamples=400)
    ratios = [a / b for a, b in pairs]
    assert min(ratios) <= found.low <= found.high <= max(ratios)
    assert min(ratios) <= found.median <= max(ratios)


def test_interval_covers_the_truth_about_as_often_as_it_says():
    """95 % intervals of 40 noisy rounds whose true median ratio is 1.1, drawn 200 times."""
    import random

    draw = random.Random(3)
    hits = 0
    for trial in range(200):
        ratios = [1.1 * draw.lognormvariate(0, 0.2) for _ in range(40)]
        found = paired_ratio(ratios, [1.0] * 40, [40], num_resamples=300, seed=trial)
        hits += found.low <= 1.1 <= found.high
    assert 0.88 <= hits / 200 <= 0.995


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.99, 1.02, "met"), (1.021, 1.05, "missed"), (0.99, 1.03, "not decided by these rounds")],
)
def test_a_verdict_is_the_intervals_not_the_medians(low, high, expected):
    assert verdict(Ratio(median=1.01, low=low, high=high, confidence=0.95), limit=1.02) == expected


def test_starts_that_differ_widen_the_interval():
    """Four starts without any noise inside: 40 rounds are then no better than four."""
    ratios = [level for level in (0.96, 1.0, 1.02, 1.06) for _ in range(10)]
    by_start = paired_ratio(ratios, [1.0] * 40, [10, 10, 10, 10])
    as_if_one = paired_ratio(ratios, [1.0] * 40, [40])
    assert by_start.median == as_if_one.median
    assert by_start.low < as_if_one.low
    assert by_start.high > as_if_one.high


def test_starts_must_account_for_every_round():
    with pytest.raises(ValueError, match="3 rounds cannot be spread"):
        paired_ratio([1.0] * 3, [1.0] * 3, [2, 2])


@given(st.integers(1, 50), st.integers(1, 10))
def test_rounds_are_spread_evenly_over_starts(rounds, starts):
    counts = Schedule(rounds=rounds, starts=starts).rounds_per_start
    assert sum(counts) == rounds
    assert min(counts) >= 1
    assert max(counts) - min(counts) <= 1
    assert len(counts) == min(starts, rounds)


def test_unequal_numbers_of_rounds_are_refused():
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        paired_ratio([1.0, 2.0], [1.0], [2])


@given(st.integers(1, 6), st.integers(0, 5))
def test_in_as_many_rounds_as_contenders_everyone_has_every_place(num_contenders, offset):
    items = list(range(num_contenders))
    orders = [rotated(items, offset + index) for index in range(num_contenders)]
    assert all(sorted(order) == items for order in orders)
    assert all(sorted(places) == items for places in zip(*orders, strict=True))


def test_two_contenders_alternate():
    assert [rotated("AB", index) for index in range(3)] == [["A", "B"], ["B", "A"], ["A", "B"]]


def test_rows_name_the_reference_and_show_ratios():
    reference, other = rows(comparison_of(gloo=[0.1, 0.2, 0.3], ours=[0.2, 0.4, 0.6]))
    assert reference[0] == "gloo"
    assert reference[3] == "reference"
    assert other[:5] == ["ours", "400.0", "300.0 .. 500.0", "2.000", "2.000 .. 2.000"]


def test_plain_table_is_aligned():
    text = plain_table("title", ("name", "ms"), [["a", "1.0"], ["longer", "100.0"]])
    assert text.splitlines() == ["title", "name       ms", "------  -----", "a         1.0", "longer  100.0"]


def test_summary_over_all_benchmarks_leaves_references_out():
    document = {"benchmark": "b", "comparisons": [as_document(comparison_of(x=[1.0, 2.0, 4.0], y=[2.0, 4.0, 8.0]))]}
    assert summary_lines(document) == [["b", "t", "y", "x", "2.000", "2.000 .. 2.000"]]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, (50, 4)),
        ({"quick": True}, (3, 2)),
        ({"quick": True, "rounds": 7}, (7, 2)),
        ({"steps": 1}, (50, 1)),
    ],
)
def test_arguments_overrule_quick_overrules_defaults(asked, expected):
    arguments = argparse.Namespace(**{"quick": False, "rounds": None, "starts": None, "steps": None, **asked})
    schedule = Schedule.from_arguments(arguments, rounds=50, steps=4)
    assert (schedule.rounds, schedule.steps) == expected


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"steps": 0}, {"starts": 0}, {"lead_in": -1}, {"warmup": -1}])
def test_impossible_schedules_are_refused(wrong):
    with pytest.raises(ValueError, match="at least one round, start and step"):
        Schedule(**wrong)


def test_a_second_reference_of_skewed_samples_makes_no_difference():
    draw = random.Random(1)
    samples, one, other = ([1 + draw.expovariate(10) for _ in range(3000)] for _ in range(3))
    found = paired_ratio(samples, one, [3000], again=other, num_resamples=200)
    assert found.low < 1 < found.high
    assert found.high < 1.01
    to_mean = paired_ratio(samples, [(a + b) / 2 for a, b in zip(one, other, strict=True)], [3000], num_resamples=200)
    assert to_mean.high < 1  # why it is not done so
