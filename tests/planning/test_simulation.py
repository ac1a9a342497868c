"""The simulation: single failures worked out by hand, and closed forms within its interval where they hold."""

import math
from dataclasses import replace

import numpy as np
import pytest

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.planning.estimate import Estimate
from hyperpod_plugins.planning.expected_time import forecast
from hyperpod_plugins.planning.failures import (
    NO_LEMONS,
    ExponentialFailures,
    LemonNodes,
    TraceFailures,
    WeibullFailures,
)
from hyperpod_plugins.planning.scenario import RECOVERY_POLICIES, RetryChain, Scenario, StageTimes
from hyperpod_plugins.planning.simulation import SPENT, simulate

DAY = 86400.0
POLICIES = {policy.name: policy for policy in RECOVERY_POLICIES}
BY_HAND = Scenario(
    num_nodes=4,
    failures_per_node_hour=1e-3,
    work_s=1000.0,
    num_replicas=2,
    num_spares=1,
    node_loss_fraction=1.0,
    stages=StageTimes(
        step_s=8, detect_s=5, assemble_s=7, restore_s=3, startup_s=50, checkpoint_restore_s=20, checkpoint_save_s=10,
        snapshot_s=0, resize_s=6, repair_s=200, spare_start_s=30,
    ),
)  # fmt: skip


def one_run(policy, *failures, scenario=BY_HAND):
    """Simulate failures at given times, with a checkpoint every 100 s of work."""
    times_s, nodes = zip(*failures, strict=True)
    trace = TraceFailures(times_s=times_s, nodes=nodes, duration_s=1e6, starts_anywhere=False)
    runs = simulate(scenario, POLICIES[policy], failures=trace, num_runs=2, checkpoint_interval_s=100.0)
    assert (runs.wall_s[0], runs.num_failures[0]) == (runs.wall_s[1], runs.num_failures[1])
    spent = {name: runs.spent_s[name][0] for name in SPENT}
    assert sum(spent.values()) == pytest.approx(runs.wall_s[0], rel=1e-12)
    assert spent["work"] == pytest.approx(scenario.work_s)
    return runs.wall_s[0], {name: value for name, value in spent.items() if value and name != "work"}, runs


@pytest.mark.parametrize(
    ("policy", "wall_s", "spent"),
    [
        # At 350 s, three checkpoints are complete (every 110 s) and 20 s of work are not in one.
        ("checkpoint restart", 1385, {"redone": 20, "saves": 90, "detect": 5, "waiting": 200, "recovery": 70}),
        ("restart + spares", 1215, {"redone": 20, "saves": 90, "detect": 5, "waiting": 30, "recovery": 70}),
        ("restart + standby", 1185, {"redone": 20, "saves": 90, "detect": 5, "recovery": 70}),
        ("snapshots", 1309, {"redone": 4, "saves": 90, "detect": 5, "waiting": 200, "recovery": 10}),
        ("checkpointless", 1309, {"redone": 4, "saves": 90, "detect": 5, "waiting": 200, "recovery": 10}),
        ("spares", 1139, {"redone": 4, "saves": 90, "detect": 5, "waiting": 30, "recovery": 10}),
        ("standby", 1109, {"redone": 4, "saves": 90, "detect": 5, "recovery": 10}),
    ],
)
def test_one_failure(policy, wall_s, spent):
    found_s, found, runs = one_run(policy, (350.0, 1))
    assert found == pytest.approx(spent)
    assert found_s == pytest.approx(wall_s)
    assert runs.num_failures[0] == 1
    assert runs.num_fallbacks[0] == ("restart" in policy)


def test_one_failure_of_a_job_that_shrinks():
    """It resumes at 361 with one of two replicas, until the node is back at 555; then it grows, in 6 s."""
    wall_s, spent, _ = one_run("elastic", (350.0, 1))
    # 194 s at half speed: 84 s of work to the checkpoint take 168 s, 10 s the checkpoint, then 16 s give 8 s of work.
    assert spent["fewer replicas"] == pytest.approx((194 - 10) / 2)
    assert spent["recovery"] == pytest.approx(6 + 6)
    assert spent["redone"] == pytest.approx(4)
    assert wall_s == pytest.approx(1000 + 90 + 4 + 5 + 12 + 92)


def test_a_failure_while_a_checkpoint_is_saved_loses_the_checkpoint():
    wall_s, spent, _ = one_run("checkpoint restart", (105.0, 1))
    assert spent["redone"] == pytest.approx(100)
    assert wall_s == pytest.approx(105 + 275 + 1000 + 90)


def test_a_failure_in_a_recovery_starts_it_again():
    wall_s, spent, runs = one_run("checkpointless", (350.0, 1), (360.0, 2))
    assert wall_s == pytest.approx(1309 + 10), "both nodes are awaited"
    assert (runs.num_failures[0], runs.num_fallbacks[0]) == (2, 0)
    assert spent["redone"] == pytest.approx(4)
    wall_s, *_ = one_run("standby", (350.0, 1), (360.0, 2))
    assert wall_s == pytest.approx(1109 + 205 - 5), "the second failure finds no spare, and waits until 555"


def test_a_node_that_is_away_cannot_fail():
    assert one_run("checkpointless", (350.0, 1), (360.0, 1))[0] == pytest.approx(1309)


@pytest.mark.parametrize(
    ("policy", "second", "fallbacks"),
    [
        ("checkpointless", 3, 1),  # holds the same shard as node 1
        ("checkpointless", 0, 0),
        ("checkpointless", 2, 0),
        ("snapshots", 0, 1),  # node 1 holds its snapshot
        ("snapshots", 2, 1),  # holds that of node 1
        ("snapshots", 3, 0),
    ],
)
def test_the_last_copy_of_a_shard(policy, second, fallbacks):
    _, spent, runs = one_run(policy, (350.0, 1), (352.0, second))
    assert runs.num_fallbacks[0] == fallbacks
    assert spent["redone"] == pytest.approx(20 if fallbacks else 4)


def test_copies_are_there_again_after_a_recovery():
    assert one_run("checkpointless", (350.0, 1), (600.0, 3))[2].num_fallbacks[0] == 0


@pytest.mark.parametrize("num_nodes", [2, 3])
def test_the_closed_form_counts_each_pair_of_buddies_once(num_nodes):
    stages = StageTimes(repair_s=600.0)
    scenario = Scenario(
        num_nodes=num_nodes, failures_per_node_hour=0.1, work_s=60 * DAY, num_replicas=1, node_loss_fraction=1.0,
        stages=stages,
    )  # fmt: skip
    policy = POLICIES["snapshots"]
    runs = simulate(scenario, policy, num_runs=100, lemons=NO_LEMONS)
    expected = runs.wall_s.sum() / policy.mean_time_to_fallback_s(scenario)
    assert runs.num_fallbacks.sum() == pytest.approx(expected, rel=0.15)


def test_a_shrunk_job_without_copies_goes_back_to_its_checkpoint():
    runs = simulate(
        replace(BY_HAND, num_nodes=2), POLICIES["elastic"], num_runs=2, checkpoint_interval_s=100.0,
        failures=TraceFailures(times_s=(350.0, 400.0), nodes=(1, 0), duration_s=1e6, starts_anywhere=False),
    )  # fmt: skip
    assert runs.num_fallbacks.tolist() == [1, 1]
    assert runs.spent_s["waiting"] == pytest.approx([150, 150]), "from 405 until the first node is back at 555"


def test_without_failures_only_stalls_are_lost():
    quiet = replace(BY_HAND, failures_per_node_hour=1e-9)
    for policy in RECOVERY_POLICIES:
        runs = simulate(quiet, policy, num_runs=2, checkpoint_interval_s=100.0)
        assert runs.wall_s == pytest.approx([1090, 1090])
    stalled = replace(quiet, stages=replace(quiet.stages, snapshot_s=0.8, step_s=100))
    runs = simulate(stalled, POLICIES["snapshots"], num_runs=2, checkpoint_interval_s=1000.0)
    part = 0.8 / stalled.snapshot_every_s
    assert runs.wall_s == pytest.approx([1000 * (1 + part)] * 2)


# -- against closed forms ---------------------------------------------------------------------------------------------

LLAMA_RATE = 1.61e-4
MIDDLE = Scenario(num_nodes=256, failures_per_node_hour=LLAMA_RATE, work_s=60 * DAY, num_replicas=8, num_spares=6)
SCENARIOS = {
    "middle": MIDDLE,
    "nodes only": replace(MIDDLE, failures_per_node_hour=5e-4, node_loss_fraction=1.0),
    "processes only": replace(MIDDLE, failures_per_node_hour=5e-4, node_loss_fraction=0.0),
    "small": replace(MIDDLE, num_nodes=16, num_replicas=4, failures_per_node_hour=1e-3, num_spares=3),
    "large": replace(MIDDLE, num_nodes=2048, num_replicas=16, work_s=30 * DAY, num_spares=10, node_loss_fraction=1.0),
    "slow checkpoints": replace(MIDDLE, stages=StageTimes(checkpoint_save_s=900.0), node_loss_fraction=1.0),
}


def limits_of(scenario, policy):
    return forecast(scenario, policy, failures=ExponentialFailures(), lemons=NO_LEMONS).limits


COMPARED = {
    f"{name}-{policy.name}": (scenario, policy)
    for name, scenario in SCENARIOS.items()
    for policy in RECOVERY_POLICIES
    if not limits_of(scenario, policy)
}


@pytest.mark.parametrize(("scenario", "policy"), COMPARED.values(), ids=COMPARED)
@pytest.mark.parametrize("failures", [ExponentialFailures(), WeibullFailures(shape=1.0)], ids=["pooled", "by node"])
def test_closed_forms_are_within_the_interval_where_they_hold(scenario, policy, failures):
    """The interval of the mean, widened from 95 % to 99.9 %, for there are many comparisons."""
    expected = forecast(scenario, policy, failures=failures, lemons=NO_LEMONS)
    found = simulate(scenario, policy, failures=failures, lemons=NO_LEMONS, num_runs=300, seed=1).time_ratio
    assert not expected.limits
    assert abs(expected.time_ratio - found.mean) <= 3.3 / 1.96 * (found.high - found.mean)


def test_limits_are_named_only_where_they_must_be():
    assert len(COMPARED) == 41  # as the guide says
    assert {policy.name for _, policy in COMPARED.values()} == set(POLICIES)
    for scenario in SCENARIOS.values():
        for policy in RECOVERY_POLICIES:
            assert all(
                "returns to a checkpoint" in each or "while the job waits" in each
                for each in limits_of(scenario, policy)
            )


CROWDED = replace(MIDDLE, num_nodes=4096, failures_per_node_hour=1e-4, work_s=20 * DAY)


@pytest.mark.parametrize(
    ("scenario", "policy", "options", "told"),
    [
        (
            replace(MIDDLE, failures_per_node_hour=1e-3),
            "checkpoint restart",
            {"failures": WeibullFailures(shape=0.5, starts_new=True)},
            "not exponential",
        ),
        (CROWDED, "checkpointless", {}, "processes fail while the job waits"),
        (replace(CROWDED, num_spares=1), "standby", {}, "find no spare"),
        (replace(MIDDLE, num_replicas=2, failures_per_node_hour=2e-3), "elastic", {}, "2 replicas"),
        (
            replace(MIDDLE, failures_per_node_hour=1e-3),
            "checkpoint restart",
            {"lemons": LemonNodes(exclude_after=1)},
            "lemon nodes are exchanged",
        ),
    ],
    ids=["weibull", "overlapping waits", "no spare", "two replicas", "exchanged lemons"],
)
def test_where_closed_forms_do_not_hold_it_says_so(scenario, policy, options, told):
    models = {"failures": ExponentialFailures(), "lemons": LemonNodes()} | options
    expected = forecast(scenario, POLICIES[policy], **models)
    found = simulate(scenario, POLICIES[policy], **models, num_runs=200)
    assert told in "; ".join(expected.limits)
    assert not found.time_ratio.holds(expected.time_ratio)


def test_lemons_change_nothing_but_who_fails():
    alike, lemons = (
        simulate(SCENARIOS["nodes only"], POLICIES["checkpoint restart"], lemons=each, num_runs=300).time_ratio
        for each in (NO_LEMONS, LemonNodes())
    )
    assert abs(alike.mean - lemons.mean) < 2 * (alike.high - alike.mean)


def test_lemons_that_are_exchanged_fail_no_more():
    kept, exchanged = (
        simulate(
            replace(MIDDLE, failures_per_node_hour=2e-3), POLICIES["standby"], num_runs=50, seed=5,
            lemons=LemonNodes(exclude_after=number),
        ).num_failures.mean()
        for number in (0, 2)
    )  # fmt: skip
    assert exchanged / kept == pytest.approx(0.55, abs=0.06)  # half of them, and two of each lemon


def test_retries_take_the_time_that_their_mean_says():
    retries = RetryChain(first_fails=0.5, retry_succeeds=0.3, max_retries=3, interval_s=100, manual_s=1000)
    scenario = replace(BY_HAND, retries=retries)
    trace = TraceFailures(times_s=(350.0,), nodes=(1,), duration_s=1e6, starts_anywhere=False)
    runs = simulate(scenario, POLICIES["standby"], failures=trace, num_runs=4000, checkpoint_interval_s=100.0)
    assert Estimate.of(runs.wall_s - 1109).holds(retries.mean_s(10))
    assert retries.mean_s(10) == pytest.approx(0.5 * ((1 + 0.7 + 0.49) * 110 + 0.343 * 1010))


def test_measured_times_are_drawn_for_each_failure():
    measured = {"repair_s": (100.0, 300.0), "detect_s": (5.0,), "restore_s": (1.0, 5.0)}
    assert StageTimes.means_of(measured) == StageTimes(repair_s=200, detect_s=5, restore_s=3)
    scenario = replace(BY_HAND, measured=measured)
    trace = TraceFailures(times_s=(350.0,), nodes=(1,), duration_s=1e6, starts_anywhere=False)
    runs = simulate(scenario, POLICIES["checkpointless"], failures=trace, num_runs=400, checkpoint_interval_s=100.0)
    found, counts = np.unique(runs.wall_s.round(6), return_counts=True)
    assert found.tolist() == [1207, 1211, 1407, 1411]
    assert counts.min() > 60


def test_all_policies_meet_the_same_failures():
    only_processes = replace(SCENARIOS["processes only"], num_spares=1)
    numbers = [
        simulate(only_processes, POLICIES[name], num_runs=20).num_failures for name in ("spares", "standby", "elastic")
    ]
    assert (numbers[0] == numbers[1]).all()
    assert (numbers[0] == numbers[2]).all()


def test_equal_seeds_give_equal_runs():
    first, again, other = (simulate(MIDDLE, POLICIES["elastic"], num_runs=5, seed=seed).wall_s for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).all()


def test_a_trace_of_a_run_is_like_the_run():
    """Failures of an exponential run, as a trace, give its time."""
    stream = ExponentialFailures().start(np.random.default_rng(0), 1, 64, 1e-3, NO_LEMONS)
    window = stream.until(100 * DAY)
    trace = TraceFailures(
        times_s=tuple(window.times_s[0]), nodes=tuple(int(each) for each in window.nodes[0]), duration_s=100 * DAY
    )
    scenario = Scenario(
        num_nodes=64, failures_per_node_hour=trace.failures_per_hour / 64, work_s=100 * DAY, node_loss_fraction=0.0
    )
    policy = POLICIES["checkpoint restart"]
    replayed = simulate(scenario, policy, failures=trace, num_runs=100).time_ratio.mean
    assert replayed == pytest.approx(simulate(scenario, policy, num_runs=300).time_ratio.mean, rel=0.003)


def test_a_hopeless_run_is_given_up():
    hopeless = replace(MIDDLE, num_nodes=10_000, failures_per_node_hour=1e-2, work_s=DAY)
    runs = simulate(hopeless, POLICIES["checkpoint restart"], num_runs=5)
    assert runs.time_ratio.mean == math.inf
    assert forecast(
        hopeless, runs.policy, failures=ExponentialFailures(), lemons=NO_LEMONS
    ).time_ratio > 10  # fmt: skip


@pytest.mark.parametrize(("repair_s", "is_given_up"), [(8800.0, False), (8830.0, True)])
def test_a_run_is_given_up_at_10_times_its_work_however_rare_failures_are(repair_s, is_given_up):
    """One failure makes the run take 1,185 s and the repair."""
    scenario = replace(BY_HAND, stages=replace(BY_HAND.stages, repair_s=repair_s))
    trace = TraceFailures(times_s=(350.0,), nodes=(1,), duration_s=1e6, starts_anywhere=False)
    policy = POLICIES["checkpoint restart"]
    runs = simulate(scenario, policy, failures=trace, num_runs=2, checkpoint_interval_s=100.0)
    assert np.isinf(runs.wall_s).tolist() == [is_given_up] * 2
    assert is_given_up or runs.wall_s == pytest.approx([1185 + repair_s] * 2)
    assert math.isinf(runs.time_ratio.mean) == is_given_up


def test_estimates():
    estimate = Estimate.of(np.array([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert estimate.mean == 3
    assert estimate.high - estimate.mean == pytest.approx(2.776 * math.sqrt(2.5 / 5))  # Student, 4 degrees
    assert (estimate.p05, estimate.p95) == (1.2, 4.8)
    assert estimate.holds(2)
    assert not estimate.holds(0.9)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: replace(MIDDLE, num_replicas=7), "num_replicas=7 must divide the number of nodes, 256"),
        (lambda: replace(MIDDLE, num_nodes=0), "num_nodes=0"),
        (lambda: replace(MIDDLE, node_loss_fraction=1.5), "node_loss_fraction=1.5"),
        (lambda: StageTimes(step_s=0), "step_s=0"),
        (lambda: replace(MIDDLE, measured={"repair": (1.0,)}), "measured times of repair; allowed are step_s"),
        (lambda: replace(MIDDLE, measured={"repair_s": ()}), "measured times of repair_s are empty"),
        (lambda: StageTimes(repair_s=-1), "repair_s=-1"),
        (lambda: StageTimes.means_of({"repair_s": []}), "measured times of repair_s are empty"),
        (lambda: StageTimes.means_of({"x": [1]}), "measured times of x; allowed are step_s"),
        (lambda: StageTimes(detect_s=1e300), r"detect_s=1e\+300 must be at most"),
        (lambda: RetryChain(max_retries=1.5), "max_retries=1.5 must be a whole number"),
        (lambda: simulate(MIDDLE, POLICIES["spares"], seed=-1), "seed=-1 must be at least 0"),
        (lambda: RetryChain(first_fails=2), "first_fails=2 must be a probability"),
        (lambda: simulate(replace(MIDDLE, num_spares=0), POLICIES["spares"]), "'spares' needs at least 1 spare"),
        (lambda: simulate(replace(MIDDLE, num_replicas=1), POLICIES["elastic"]), "needs at least 2 replicas"),
        (lambda: simulate(replace(MIDDLE, num_nodes=1, num_replicas=1), POLICIES["snapshots"]), "at least 2 nodes"),
        (lambda: simulate(MIDDLE, POLICIES["spares"], num_runs=1), "num_runs=1"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, told):
    with pytest.raises(ConfigError, match=told):
        call()


@pytest.mark.parametrize("interval_s", [-5.0, math.nan, math.inf])
def test_an_interval_must_be_a_finite_time(interval_s):
    with pytest.raises(ConfigError, match="checkpoint_interval_s="):
        simulate(MIDDLE, POLICIES["standby"], num_runs=2, checkpoint_interval_s=interval_s)
    models = {"failures": ExponentialFailures(), "lemons": NO_LEMONS}
    with pytest.raises(ConfigError, match="checkpoint_interval_s="):
        forecast(MIDDLE, POLICIES["standby"], **models, checkpoint_interval_s=interval_s)
