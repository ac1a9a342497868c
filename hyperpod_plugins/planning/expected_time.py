"""`forecast`: the expected time of a job under a policy of recovery, by closed forms, and where they do not hold.

[Note: two kinds of failures]
After some failures a node has to be replaced and after others a process, so pauses have two lengths. A pause that
starts again whenever a failure happens in it takes `M (1 / q - 1)` on average, where `q` is the probability that a
pause ends without a failure: the mean of `e^(-R / M)` over both lengths. With one length that is Daly's
`M (e^(R / M) - 1)`. It leaves out that after the loss of a process a job may still have to wait for a node lost before.
"""

import math
from dataclasses import dataclass

import numpy as np

from hyperpod_plugins.planning.closed_forms import (
    HOUR_S,
    check_numbers,
    daly_time_ratio,
    regained_time_ratio,
    spares_shortage,
    uninterrupted_time_s,
)
from hyperpod_plugins.planning.failures import FailureModel, LemonNodes
from hyperpod_plugins.planning.scenario import RecoveryPolicy, Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Expected time by closed forms."""

    time_ratio: float
    """Wall time divided by the time of the work alone; infinite if the job makes no progress."""
    limits: tuple[str, ...]
    """Assumptions that this job does not meet; where there are any, trust the simulation."""


def forecast(
    scenario: Scenario,
    policy: RecoveryPolicy,
    *,
    failures: FailureModel,
    lemons: LemonNodes,
    checkpoint_interval_s: float = 0.0,
) -> Forecast:
    """Forecast the time of a job.

    Assumes exponential failures of independent nodes; that spares are there when they are needed; that few failures
    happen while others are repaired; and work of many checkpoint intervals.

    Args:
        scenario: The job.
        policy: How it recovers.
        failures: The model of failures, which decides whether the formulas hold.
        lemons: The same. Lemon nodes change nothing in the sum of the rates as long as they are kept.
        checkpoint_interval_s: Work between two checkpoints; 0 for the best one.

    Raises:
        ConfigError: The interval is negative or not finite.
    """
    check_numbers(at_least_zero={"checkpoint_interval_s": checkpoint_interval_s})
    interval_s = checkpoint_interval_s or policy.checkpoint_interval_s(scenario)
    limits = tuple(_limits(scenario, policy, failures, lemons, interval_s))
    num_intervals = scenario.work_s / interval_s
    saves = max(0, math.ceil(num_intervals) - 1) / num_intervals  # there is none at the end
    ratio = _elastic_ratio if policy.capacity == "shrink" else _ratio
    time_ratio = ratio(scenario, policy, interval_s, saves * scenario.stages.checkpoint_save_s)
    return Forecast(time_ratio=time_ratio * _fallbacks_ratio(scenario, policy, interval_s), limits=limits)


def _fallbacks_ratio(scenario: Scenario, policy: RecoveryPolicy, interval_s: float) -> float:
    """How much longer a job takes because it returns to checkpoints if no copy in memory is left."""
    if policy.regain == "checkpoint":
        return 1.0
    part = fallback_cost_s(scenario, policy, interval_s) / policy.mean_time_to_fallback_s(scenario)
    return math.inf if part >= 1 else 1 / (1 - part)


def fallback_cost_s(scenario: Scenario, policy: RecoveryPolicy, interval_s: float) -> float:
    """How much more time a return to a checkpoint takes than a recovery from memory, on average."""
    stages = scenario.stages
    return interval_s / 2 + stages.startup_s + stages.checkpoint_restore_s - policy.pause_s(stages)


def failure_cost_s(scenario: Scenario, policy: RecoveryPolicy, interval_s: float) -> float:
    """Mean time that a failure costs, of the costlier kind: if there are any, one that takes a node away."""
    stages, lost = scenario.stages, scenario.node_loss_fraction
    redone_s = min(interval_s, policy.regain_every_s(scenario), scenario.work_s) / 2
    cost_s = redone_s + _pauses_s(scenario, policy)[0 if lost else 1]
    if policy.capacity == "shrink" and lost:
        cost_s += 2 * stages.resize_s + stages.repair_s / scenario.num_replicas
    return cost_s


def _pauses_s(scenario: Scenario, policy: RecoveryPolicy) -> tuple[float, float]:
    """Time from a failure until training goes on: with a node to replace, and with a process."""
    stages, pause_s = scenario.stages, policy.pause_s(scenario.stages)
    with_process_s = stages.detect_s + pause_s
    retries_s = scenario.retries.mean_s(pause_s)
    return with_process_s + _wait_s(scenario, policy) + retries_s, with_process_s + retries_s


def _wait_s(scenario: Scenario, policy: RecoveryPolicy) -> float:
    """How long the job waits for a node in place of a lost one."""
    stages = scenario.stages
    return {"wait": stages.repair_s, "spare": stages.spare_start_s, "standby": 0.0, "shrink": 0.0}[policy.capacity]


def _ratio(scenario: Scenario, policy: RecoveryPolicy, interval_s: float, save_s: float) -> float:
    mtbf_s, lost = scenario.mtbf_s, scenario.node_loss_fraction
    with_node_s, with_process_s = _pauses_s(scenario, policy)
    ends = lost * math.exp(-with_node_s / mtbf_s) + (1 - lost) * math.exp(-with_process_s / mtbf_s)
    if ends == 0:
        return math.inf
    pause_s = -mtbf_s * math.log(ends)  # the single length with the same effect; see [Note: two kinds of failures]
    if policy.regain == "checkpoint":
        return daly_time_ratio(mtbf_s, interval_s, save_s, pause_s)
    return regained_time_ratio(
        mtbf_s,
        pause_s,
        regain_every_s=policy.regain_every_s(scenario),
        stall_s=policy.stall(scenario) * policy.regain_every_s(scenario),
        interval_s=interval_s,
        save_s=save_s,
    )


def _elastic_ratio(scenario: Scenario, policy: RecoveryPolicy, interval_s: float, save_s: float) -> float:
    """Time ratio of a job that shrinks by whole replicas and grows again.

    Each node alternates between work and repair on its own, so the number of nodes that are away has a binomial
    distribution. Assumes that pauses are short compared with the time between failures, and that a replica is left.
    """
    stages, lost, num_nodes = scenario.stages, scenario.node_loss_fraction, scenario.num_nodes
    rate_s = scenario.failures_per_node_hour / HOUR_S
    is_away = rate_s * lost * max(0.0, stages.repair_s - stages.resize_s)  # while the others train
    num_away = np.arange(num_nodes + 1)
    log_choices = np.array([math.lgamma(each + 1) for each in range(num_nodes + 1)])
    logs = log_choices[-1] - log_choices - log_choices[::-1] + num_away * math.log(max(is_away, 1e-300))
    weights = np.exp(logs - num_nodes * math.log1p(is_away))
    num_there = num_nodes - num_away
    num_busy = num_there // scenario.nodes_per_replica * scenario.nodes_per_replica
    capacity = float(weights @ num_busy) / num_nodes
    shrink_rate_s = float(weights @ np.where(num_there == num_busy, num_busy, 0)) * rate_s * lost
    rate_of_all_s = float(weights @ num_busy) * rate_s
    if capacity == 0:
        return math.inf
    in_place_s, retries_s = policy.pause_s(stages), scenario.retries.mean_s(policy.pause_s(stages))
    pauses_s = stages.detect_s + stages.resize_s + retries_s, stages.detect_s + in_place_s + retries_s
    shrinks = shrink_rate_s / rate_of_all_s
    ends = shrinks * math.exp(-rate_of_all_s * pauses_s[0]) + (1 - shrinks) * math.exp(-rate_of_all_s * pauses_s[1])
    useful = ends - shrink_rate_s * stages.resize_s  # the job grows as often as it shrinks
    useful -= rate_of_all_s * ends * stages.step_s / 2
    stalls = 1 + capacity * uninterrupted_time_s(1 / rate_of_all_s, save_s) / interval_s
    return stalls / (useful * capacity) if useful > 0 else math.inf


def _limits(
    scenario: Scenario, policy: RecoveryPolicy, failures: FailureModel, lemons: LemonNodes, interval_s: float
) -> list[str]:
    """Assumptions that the job does not meet."""
    limits: list[str] = []
    if not failures.is_exponential:
        limits.append("failures are not exponential")
    if lemons.exclude_after and lemons.number(scenario.num_nodes):
        limits.append("lemon nodes are exchanged, so that failures become rarer")
    if scenario.measured:
        limits.append("times of stages vary, and are counted by their means")
    if scenario.retries.first_fails:
        limits.append("retries are counted by their mean")
    if policy.regain == "checkpoint" and scenario.work_s < 20 * interval_s:
        limits.append("the work has fewer than 20 checkpoint intervals")
    return limits + _limits_of_pauses(scenario, policy)


def _limits_of_pauses(scenario: Scenario, policy: RecoveryPolicy) -> list[str]:
    limits: list[str] = []
    lost = scenario.node_loss_fraction
    if lost < 1 and lost * _wait_s(scenario, policy) > 0.01 * scenario.mtbf_s:
        limits.append("processes fail while the job waits for nodes")
    if policy.regain != "checkpoint" and (num := scenario.work_s / policy.mean_time_to_fallback_s(scenario)) > 0.01:
        limits.append(f"about {num:.2g} returns to a checkpoint are counted by their mean")
    shortage = _shortage(scenario, policy)
    if shortage > 0.001:
        limits.append(f"{100 * shortage:.1f} % of the lost nodes find no spare and wait for one")
    if policy.capacity == "shrink":
        if max(_pauses_s(scenario, policy)) > 0.005 * scenario.mtbf_s:
            limits.append("pauses are not short compared with the time between failures")
        if scenario.num_replicas == 2:
            limits.append("with 2 replicas, the job shrinks to one, which has no copy")
    return limits


def _shortage(scenario: Scenario, policy: RecoveryPolicy) -> float:
    if policy.num_spares(scenario) == 0:
        return 0.0
    stages = scenario.stages
    loss_mtbf_s = scenario.mtbf_s / max(scenario.node_loss_fraction, 1e-12)
    return spares_shortage(scenario.num_spares, loss_mtbf_s, stages.detect_s + stages.repair_s)
