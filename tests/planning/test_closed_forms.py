"""Closed forms: values worked out by hand, limits in which they meet each other, and input that is refused."""

import math

import pytest

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.planning import closed_forms as forms

HOUR, DAY = 3600.0, 86400.0


@pytest.mark.parametrize(
    ("computed", "wanted"),
    [
        (forms.mean_time_between_failures_s(512, 4e-4) / HOUR, 4.8828125),
        (100 * forms.failure_rate_per_hour(105, 124, 60 * DAY), 0.0588037634),
        (100 * forms.failure_rate_per_hour(417, 2000, 54 * DAY), 0.01608796296),
        (forms.wall_time_s(6.5e6, 2048) / DAY, 132.24283854),
        (forms.additive_time_ratio(HOUR / 0.128, 280 * 60), 1.5973333333),
        (forms.reduction(292, 47), -0.8390410959),
        (forms.transfer_s(12e9, 3e9), 4.0),
        (forms.saturating_time_ratio(100, 50), 2.0),
        (forms.young_interval_s(60, 2954), math.sqrt(120 * 2954)),
        (forms.daly_interval_s(200, 100), 100.0),
        (forms.saxena_interval_s(2, 10, 1), 2 + math.sqrt(48)),
        (forms.kokolis_ettr(1000, 100, 200, 50), 0.8 / 1.25),
        (forms.uninterrupted_time_s(100, 100), 100 * (math.e - 1)),
        (forms.replica_groups_ettr(1000, 10, 400, 8, 0.01), 0.93),
        (forms.waiting_cost_s(8, 600), 4800.0),
        (forms.shrinking_cost_s(8, 1, 10, 600), 760.0),
        (forms.shrink_break_even_s(8, 1, 7), 16.0),
        (forms.elastic_useful([50, 2, 48], [8, 0, 7], 8), (400 + 336) / 800),
        (forms.spares_shortage(0, 100, 50), 1.0),
        (forms.spares_shortage(1, 100, 50), 1 - math.exp(-0.5)),
        (forms.spares_shortage(2, 100, 50), 1 - 1.5 * math.exp(-0.5)),
        (forms.simultaneous_loss_probability(1, 1, 1, HOUR), 1 - 1 / math.e),
        (forms.mean_time_to_loss_s(1, 2, 1e-3, HOUR), HOUR / (2 * 1e-3 * 1e-3)),
        (forms.goodput(0.9, 0.95, 0.4), 0.342),
    ],
)  # fmt: skip
def test_values_worked_out_by_hand(computed, wanted):
    assert computed == pytest.approx(wanted, rel=1e-9)


def test_checkpointless_downtime_is_its_stages_and_half_a_step():
    stages = {"detect_s": 5, "abort_s": 1, "reinit_s": 20, "transfer_s": 4, "first_step_s": 6, "step_s": 10}
    assert forms.checkpointless_downtime_s(**stages) == 41


def test_dalys_interval_is_the_best_of_his_complete_formula():
    for save_s, mtbf_s in ((10, 3600), (60, 3600), (300, 3600), (1200, 3600)):
        interval_s = forms.daly_interval_s(save_s, mtbf_s)
        at_best = forms.daly_time_ratio(mtbf_s, interval_s, save_s, 100)
        for other_s in (0.8 * interval_s, 1.25 * interval_s):
            assert forms.daly_time_ratio(mtbf_s, other_s, save_s, 100) > at_best
        young_s = forms.young_interval_s(
            save_s, mtbf_s
        )  # of the whole period, which Daly's formula leaves a save out of
        assert at_best <= forms.daly_time_ratio(mtbf_s, young_s, save_s, 100)


def test_intervals_meet_where_checkpoints_are_quick():
    young_s = forms.young_interval_s(1, 1e6)
    assert forms.daly_interval_s(1, 1e6) == pytest.approx(young_s, rel=1e-3)
    assert forms.saxena_interval_s(1, 1e6, 0) == pytest.approx(young_s, rel=1e-3)


def test_ratios_meet_where_failures_are_rare():
    mtbf_s, interval_s, save_s, restart_s = 1e6, 600, 10, 300
    exact = forms.daly_time_ratio(mtbf_s, interval_s, save_s, restart_s)
    assert 1 / forms.kokolis_ettr(mtbf_s, restart_s, interval_s, save_s) == pytest.approx(exact, rel=1e-4)
    lost_s = restart_s + interval_s / 2
    assert forms.additive_time_ratio(mtbf_s, lost_s) == pytest.approx(
        forms.saturating_time_ratio(mtbf_s, lost_s), rel=1e-5
    )


def test_checkpointless_with_certain_fallback_is_checkpoint_restart():
    given = {"restart_s": 300.0, "interval_s": 600.0, "save_s": 10.0}
    fallen_back = forms.checkpointless_ettr(1e5, 40, fallback_probability=1, **given)
    assert fallen_back == pytest.approx(forms.kokolis_ettr(1e5, **given))
    assert forms.checkpointless_ettr(1e5, 40) == pytest.approx(1 - 40 / 1e5)


def test_copies_in_memory_cost_what_checkpointless_says_where_failures_are_rare():
    ratio = forms.regained_time_ratio(1e6, 40, regain_every_s=10)
    assert 1 / ratio == pytest.approx(forms.checkpointless_ettr(1e6, 45), rel=1e-6)
    slower = forms.regained_time_ratio(1e6, 40, regain_every_s=10, stall_s=0.1, interval_s=1000, save_s=20)
    assert slower == pytest.approx(ratio * 1.01 + 0.02, rel=1e-5)


def test_break_even_is_where_both_cost_the_same():
    for num_lost in (1, 3):
        replace_s = forms.shrink_break_even_s(8, num_lost, 7)
        assert forms.waiting_cost_s(8, replace_s) == pytest.approx(forms.shrinking_cost_s(8, num_lost, 7, replace_s))
    assert forms.shrink_break_even_s(8, 8, 7) == math.inf


def test_the_number_of_spares_is_the_smallest():
    for repair_s in (1, 50, 1000, 100_000):
        number = forms.spares_needed(100, repair_s, 0.01)
        assert forms.spares_shortage(number, 100, repair_s) <= 0.01 + 1e-9
        assert number == 1 or forms.spares_shortage(number - 1, 100, repair_s) > 0.01
    assert forms.spares_needed(100, 0) == 1


def test_loss_of_all_copies():
    exact = forms.simultaneous_loss_probability(1000, 2, 1e-4, 60)
    assert exact == pytest.approx(1000 * (1e-4 / 60) ** 2, rel=1e-4)
    copies = forms.copies_needed(1000, 1e-3, 600, 90 * DAY, 0.01)
    risks = [
        1 - math.exp(-90 * DAY / forms.mean_time_to_loss_s(1000, each, 1e-3, 600)) for each in (copies, copies - 1)
    ]
    assert risks[0] <= 0.01 < risks[1]
    assert forms.mean_time_to_loss_s(10, 2, 1e-3, 0) == math.inf


def test_hopeless_jobs_take_for_ever():
    assert forms.saturating_time_ratio(100, 100) == math.inf
    assert forms.daly_time_ratio(1, 1000, 10, 10) == math.inf
    assert forms.uninterrupted_time_s(1, 1000) == math.inf
    assert forms.regained_time_ratio(10, 1, regain_every_s=20) == math.inf
    assert forms.kokolis_ettr(10, 100, 10) == 0


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: forms.mean_time_between_failures_s(0, 1e-4), "num_instances=0 must be"),
        (lambda: forms.failure_rate_per_hour(-1, 1, 1), "num_failures=-1 must be"),
        (lambda: forms.young_interval_s(math.nan, 1), "save_s=nan must be"),
        (lambda: forms.checkpointless_ettr(1, 1, fallback_probability=2), "fallback_probability=2 must be between"),
        (lambda: forms.shrink_break_even_s(2, 3, 1), "num_lost=3 must be between 1 and the number of replicas, 2"),
        (lambda: forms.elastic_useful([1], [1, 2], 2), "1 durations and 2"),
        (lambda: forms.spares_needed(1, 1, 0), "shortage=0 must be"),
        (lambda: forms.copies_needed(1, 1, 3600, 1), "Give a shorter window"),
        (lambda: forms.copies_needed(1, 1, 1, 1, 2), "risk=2 must be"),
        (lambda: forms.simultaneous_loss_probability(0, 1, 1, 1), "num_shards=0"),
        (lambda: forms.goodput(1, 1, 1.5), "program=1.5 must be between 0 and 1"),
    ],
)
def test_bad_input_is_named(call, told):
    with pytest.raises(ConfigError, match=told):
        call()
