"""Each closed form whose assumptions the simulation can meet lies within an interval of simulated runs.

`test_simulation.py` compares what `forecast` is made of. All seeds are fixed. Intervals of means are widened from 95 %
to 99.9 %, for there are many.
"""

import math
from dataclasses import replace

import numpy as np
import pytest

from hyperpod_plugins.planning import closed_forms as forms
from hyperpod_plugins.planning.estimate import Estimate, poisson_interval
from hyperpod_plugins.planning.failures import NO_LEMONS, TraceFailures
from hyperpod_plugins.planning.scenario import RECOVERY_POLICIES, Scenario, StageTimes
from hyperpod_plugins.planning.simulation import simulate

DAY, HOUR = 86400.0, 3600.0
POLICIES = {policy.name: policy for policy in RECOVERY_POLICIES}
INSTANT = StageTimes(
    step_s=1, detect_s=0, assemble_s=0, restore_s=0, startup_s=0, checkpoint_restore_s=0, checkpoint_save_s=0,
    snapshot_s=0, resize_s=0, repair_s=0, spare_start_s=0,
)  # fmt: skip
RARE = Scenario(
    num_nodes=16, failures_per_node_hour=1 / 160, work_s=40 * DAY, num_replicas=4, num_spares=1,
    node_loss_fraction=0.0, stages=INSTANT,
)  # fmt: skip
"""Processes fail every 10 hours."""
MTBF_S = 10 * HOUR


def run(scenario, policy, **options):
    return simulate(scenario, POLICIES[policy], **{"lemons": NO_LEMONS, "num_runs": 400, "seed": 3} | options)


def assert_within(values, expected, *, at_most=0.05):
    """Within the interval of the mean, which must be narrow enough to say something: so much of what is expected."""
    found = Estimate.of(np.asarray(values, dtype=float))
    half = 3.3 / 1.96 * (found.high - found.mean)
    assert half <= at_most * abs(expected), "the interval says nothing"
    assert abs(found.mean - expected) <= half, (found.mean, expected, half)


def test_time_between_failures():
    runs = run(RARE, "standby")
    assert_within(runs.num_failures, runs.scenario.work_s / MTBF_S, at_most=0.03)
    assert forms.mean_time_between_failures_s(16, 1 / 160) == pytest.approx(MTBF_S)
    rates = [forms.failure_rate_per_hour(each, 16, RARE.work_s) for each in runs.num_failures]
    assert_within(rates, RARE.failures_per_node_hour, at_most=0.03)


def test_time_until_something_has_run_once_without_a_failure():
    """With a single interval, all is lost at each failure; it takes 0.7 times as long as it is between two of these."""
    scenario = replace(RARE, work_s=0.7 * MTBF_S)
    runs = run(scenario, "checkpoint restart", checkpoint_interval_s=scenario.work_s, num_runs=4000)
    assert np.isfinite(runs.wall_s).all()
    assert_within(runs.wall_s, forms.uninterrupted_time_s(MTBF_S, scenario.work_s), at_most=0.08)


DOWN_S = 60.0 + 120.0 + 30.0
DOWN = replace(INSTANT, detect_s=60.0, assemble_s=120.0, restore_s=30.0, step_s=40.0)


def test_the_downtime_of_a_failure_without_checkpoints():
    downtime_s = forms.checkpointless_downtime_s(
        detect_s=60.0, abort_s=0.0, reinit_s=120.0, transfer_s=30.0, first_step_s=0.0, step_s=40.0
    )
    runs = run(replace(RARE, stages=DOWN, work_s=80 * DAY), "standby")
    assert_within((runs.wall_s - runs.scenario.work_s) / (runs.scenario.work_s / MTBF_S), downtime_s, at_most=0.03)


def test_time_ratios_and_ettr_of_a_downtime_agree_where_failures_are_rare():
    runs = run(replace(RARE, stages=replace(DOWN, step_s=1e-3)), "standby")
    lost = runs.wall_s / runs.scenario.work_s - 1
    assert_within(lost, forms.additive_time_ratio(MTBF_S, DOWN_S) - 1)
    assert_within(lost, forms.saturating_time_ratio(MTBF_S, DOWN_S) - 1)
    assert_within(1 - 1 / (1 + lost), 1 - forms.checkpointless_ettr(MTBF_S, DOWN_S))


def test_where_failures_are_frequent_the_simulation_is_none_of_both():
    """Downtimes that begin again at a failure are neither left out nor added up in full: `M (e^(D / M) - 1)` each."""
    scenario = replace(RARE, stages=replace(DOWN, step_s=1e-3, assemble_s=MTBF_S * 0.7))
    found = run(scenario, "standby").time_ratio
    downtime_s = 60.0 + MTBF_S * 0.7 + 30.0
    assert found.low > forms.additive_time_ratio(MTBF_S, downtime_s)
    assert found.high < forms.saturating_time_ratio(MTBF_S, downtime_s)
    assert_within(run(scenario, "standby").wall_s / scenario.work_s, math.exp(downtime_s / MTBF_S))


def test_the_ettr_of_checkpoint_restart_to_first_order():
    stages = replace(INSTANT, detect_s=20.0, startup_s=100.0, checkpoint_restore_s=60.0, checkpoint_save_s=5.0)
    runs = run(replace(RARE, stages=stages), "checkpoint restart", checkpoint_interval_s=600.0)
    expected = forms.kokolis_ettr(MTBF_S, 180.0, 600.0, 5.0)
    assert_within(1 - runs.scenario.work_s / runs.wall_s, 1 - expected)
    with_fallbacks = forms.checkpointless_ettr(
        MTBF_S, 1e-9, fallback_probability=1.0, restart_s=180.0, interval_s=600.0, save_s=5.0
    )
    assert_within(1 - runs.scenario.work_s / runs.wall_s, 1 - with_fallbacks)


@pytest.mark.parametrize(
    "interval_s",
    [
        forms.young_interval_s(60.0, MTBF_S),
        forms.daly_interval_s(60.0, MTBF_S),
        forms.saxena_interval_s(60.0, MTBF_S, 100.0) - 60.0,  # from one to the next, the save included
    ],
    ids=["young", "daly", "saxena"],
)
def test_a_run_with_the_best_interval_is_faster_than_with_a_shorter_or_longer_one(interval_s):
    scenario = replace(RARE, stages=replace(INSTANT, checkpoint_save_s=60.0, startup_s=100.0))
    best, *others = (
        run(scenario, "checkpoint restart", checkpoint_interval_s=factor * interval_s).wall_s
        for factor in (1.0, 0.6, 1.7)
    )
    for wall_s in others:
        assert Estimate.of(wall_s - best).low > 0


def test_the_ettr_of_groups_that_go_on_while_one_recovers():
    """Survivors stall for the detection and both changes of size; their group is missing between these."""
    stages = replace(INSTANT, step_s=1e-3, detect_s=20.0, resize_s=10.0, repair_s=600.0)
    scenario = replace(RARE, num_nodes=8, failures_per_node_hour=1 / 80, num_replicas=8, stages=stages)
    scenario = replace(scenario, node_loss_fraction=1.0)
    runs = run(scenario, "elastic", checkpoint_interval_s=DAY)
    expected = forms.replica_groups_ettr(MTBF_S, 20.0 + 2 * 10.0, 600.0 - 10.0, 8)
    assert_within(1 - scenario.work_s / runs.wall_s, 1 - expected)


LOSS = replace(INSTANT, detect_s=5.0, resize_s=6.0)
ONE_FAILURE = TraceFailures(times_s=(350.0,), nodes=(1,), duration_s=1e6, starts_anywhere=False)


@pytest.mark.parametrize("num_replicas", [2, 3, 8])
@pytest.mark.parametrize("replace_s", [40.0, 500.0])
def test_costs_of_waiting_and_of_shrinking(num_replicas, replace_s):
    """Exactly, for one failure: in replica-seconds, besides the detection and the step that is done again."""
    # While the others change their size, the simulation counts all replicas as paused: the lost one is no extra.
    stages = replace(LOSS, step_s=1e-6, repair_s=replace_s + LOSS.resize_s)
    scenario = replace(RARE, num_nodes=num_replicas, num_replicas=num_replicas, stages=stages, work_s=5000.0)
    scenario = replace(scenario, node_loss_fraction=1.0)
    options = {"failures": ONE_FAILURE, "num_runs": 2, "checkpoint_interval_s": 1e5}
    waits, shrinks = (run(scenario, name, **options) for name in ("checkpointless", "elastic"))
    lost_s = waits.spent_s["waiting"][0] * num_replicas
    assert lost_s == pytest.approx(forms.waiting_cost_s(num_replicas, stages.repair_s))
    lost_s = (shrinks.spent_s["recovery"][0] + shrinks.spent_s["fewer replicas"][0]) * num_replicas
    assert lost_s == pytest.approx(forms.shrinking_cost_s(num_replicas, 1, stages.resize_s, replace_s))
    break_even_s = forms.shrink_break_even_s(num_replicas, 1, stages.resize_s)
    is_cheaper = shrinks.wall_s[0] < waits.wall_s[0]
    assert is_cheaper == (stages.repair_s > break_even_s)


def test_the_part_of_the_capacity_that_an_elastic_job_used():
    stages = replace(LOSS, step_s=1e-6, repair_s=200.0)
    scenario = replace(RARE, num_nodes=2, num_replicas=2, stages=stages, work_s=1000.0, node_loss_fraction=1.0)
    options = {"failures": ONE_FAILURE, "num_runs": 2, "checkpoint_interval_s": 1e5}
    wall_s = run(scenario, "elastic", **options).wall_s[0]
    durations_s = [350.0, 5.0 + 6.0, 194.0, 6.0]
    used = forms.elastic_useful([*durations_s, wall_s - sum(durations_s)], [2, 0, 1, 0, 2], 2)
    assert 1000.0 / wall_s == pytest.approx(used, rel=1e-6)


def losses(num_copies, repair_s):
    """Interval (Garwood's, exact) of the number of losses of all copies, for all runs together; and the closed form."""
    scenario = Scenario(
        num_nodes=4 * num_copies, failures_per_node_hour=0.02, work_s=60 * DAY, num_replicas=num_copies,
        node_loss_fraction=1.0, stages=replace(INSTANT, repair_s=repair_s),
    )  # fmt: skip
    runs = run(scenario, "checkpointless", num_runs=200, checkpoint_interval_s=600.0)
    assert runs.num_fallbacks.sum() > 100
    expected = runs.wall_s.sum() / forms.mean_time_to_loss_s(4, num_copies, 0.02, repair_s)
    return *poisson_interval(int(runs.num_fallbacks.sum())), expected


def test_losses_of_both_copies_of_a_shard():
    low, high, expected = losses(2, 1200.0)
    assert low <= expected <= high


def test_of_three_copies_the_simulation_loses_more_while_a_job_waits():
    """The first copy counts as away until the node of the second one is back as well, as the guide says."""
    low, _, expected = losses(3, 7200.0)
    assert low > 1.5 * expected


def test_as_many_copies_as_needed_keep_the_risk():
    """The risk of a run of 4 shards, by one copy fewer and by as many as are needed."""
    window_s, duration_s, rate = 1200.0, 10 * DAY, 2e-3
    number = forms.copies_needed(4, rate, window_s, duration_s, risk=0.02)
    assert number == 2
    scenario = Scenario(
        num_nodes=8, failures_per_node_hour=rate, work_s=duration_s, num_replicas=2, node_loss_fraction=1.0,
        stages=replace(INSTANT, repair_s=window_s),
    )  # fmt: skip
    runs = run(scenario, "checkpointless", num_runs=10_000, checkpoint_interval_s=DAY)
    part = -math.expm1(-duration_s / forms.mean_time_to_loss_s(4, 2, rate, window_s))
    low, high = (each / 10_000 for each in poisson_interval(int((runs.num_fallbacks > 0).sum())))
    assert low <= part <= high <= 0.02
