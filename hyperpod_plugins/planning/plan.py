"""`make_plan`: expected time and price of a job under each policy of recovery, simulated and by closed forms."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from hyperpod_plugins.planning.closed_forms import (
    DAY_S,
    HOUR_S,
    copies_needed,
    daly_interval_s,
    mean_time_to_loss_s,
    shrink_break_even_s,
    spares_needed,
    young_interval_s,
)
from hyperpod_plugins.planning.estimate import Estimate
from hyperpod_plugins.planning.expected_time import Forecast, forecast
from hyperpod_plugins.planning.failures import ExponentialFailures, FailureModel, LemonNodes
from hyperpod_plugins.planning.published_figures import aligned
from hyperpod_plugins.planning.scenario import RECOVERY_POLICIES, RecoveryPolicy, Scenario
from hyperpod_plugins.planning.simulation import GIVE_UP, SimulatedRuns, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPolicy:
    """What a policy would make of the job."""

    policy: RecoveryPolicy
    runs: SimulatedRuns
    forecast: Forecast

    @property
    def agrees(self) -> bool:
        """Whether the closed form lies within the interval of the simulation."""
        return self.runs.time_ratio.holds(self.forecast.time_ratio)

    def note(self) -> str:
        """How the closed form compares, in a sentence, if there is anything to say."""
        name, reasons = self.policy.name, "; ".join(self.forecast.limits)
        if math.isinf(self.runs.time_ratio.mean):
            return f"{name}: some runs take more than {GIVE_UP:g} times their work, and were given up"
        if self.agrees:
            return ""
        change = self.forecast.time_ratio / self.runs.time_ratio.mean - 1
        differs = f"{100 * change:+.2f} %" if math.isfinite(change) else "no progress at all"
        if reasons:
            return f"{name}: the closed form ({differs}) does not hold here: {reasons}"
        return f"{name}: the closed form ({differs}) is outside of the interval, which can happen by chance"

    def note_of_rarity(self) -> str:
        """What was seen so rarely that it makes the interval wide, in a sentence, if there is anything."""
        runs = self.runs
        seen = [f"{runs.num_failures.sum()} failures"] if runs.is_of_few_failures else []
        seen += [f"{runs.num_fallbacks.sum()} returns to a checkpoint"] if runs.is_of_few_fallbacks else []
        if not seen or math.isinf(runs.time_ratio.mean):
            return ""
        return f"{self.policy.name}: the interval allows for only {' and '.join(seen)} in all runs (Poisson)"

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        scenario, runs = self.runs.scenario, self.runs
        spent = {name: float(values.mean()) for name, values in runs.spent_s.items()}
        return {
            "policy": self.policy.name,
            "nodes": scenario.num_nodes + self.policy.num_spares(scenario),
            "time_ratio": _finite(asdict(runs.time_ratio)),
            "price": _finite(asdict(runs.price)),
            "failures": float(runs.num_failures.mean()),
            "returns_to_checkpoints": float(runs.num_fallbacks.mean()),
            "checkpoint_interval_s": runs.checkpoint_interval_s,
            "spent_s": spent,
            "closed_form_time_ratio": _finite({"": self.forecast.time_ratio})[""],
            "closed_form_agrees": self.agrees,
            "closed_form_limits": list(self.forecast.limits),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """What to expect of a job."""

    scenario: Scenario
    num_runs: int
    policies: tuple[PlannedPolicy, ...]
    refused: tuple[tuple[str, str], ...]
    """Policies that do not suit the job, and why."""
    remarks: tuple[str, ...] = ()
    """What was decided before, such as the degrees that fit the memory."""

    def heading(self) -> str:
        """The job in a line."""
        scenario = self.scenario
        size = f"{scenario.num_nodes} nodes x {scenario.accelerators_per_node} accelerators"
        work = f"{scenario.work_s / DAY_S:.4g} days of work, {_duration(scenario.mtbf_s)} between failures"
        replicas = f"{scenario.num_replicas} replica{'s' if scenario.num_replicas > 1 else ''}"
        return f"{size}, {replicas}, {work}"

    def table(self) -> list[tuple[str, ...]]:
        """A header, and a row of cells for each policy."""
        return [self._header(), *(self._cells(each) for each in self.policies)]

    def notes(self) -> list[str]:
        """How to read the table, and what to know of each policy, in sentences."""
        found = [
            f"In parentheses: 95 % interval of the mean of {self.num_runs} simulated runs. 5 - 95 %: of the runs.",
            "Against restart: the one with as many nodes, and with spares or standby nodes where the policy has them.",
        ]
        found += [note for each in self.policies for note in (each.note(), each.note_of_rarity()) if note]
        return found + [f"{name}: {reason}" for name, reason in self.refused]

    def sizes(self) -> list[tuple[str, ...]]:
        """Numbers that closed forms recommend: name, value, and why."""
        return [tuple(each.cells()) for each in _sizes(self.scenario)]

    def lines(self) -> list[str]:
        """The plan as text."""
        table = aligned(self.table(), right=range(1, 9))
        return [self.heading(), *self.remarks, "", *table, "", *self.notes(), "", *aligned(self.sizes())]

    def as_dict(self) -> dict[str, Any]:
        """The plan, for JSON."""
        return {
            "scenario": asdict(self.scenario),
            "mtbf_s": self.scenario.mtbf_s,
            "runs": self.num_runs,
            "policies": [
                each.as_dict() | {"against": each.policy.compared_with, "against_restart": self._against_restart(each)}
                for each in self.policies
            ],
            "refused": dict(self.refused),
            "remarks": list(self.remarks),
            "sizes": {each.name: each.value for each in _sizes(self.scenario)},
        }

    def _against_restart(self, row: PlannedPolicy) -> float | None:
        """Time compared with a restart from a checkpoint with equal capacity; None for that itself, or if it fails."""
        restart = next(each for each in self.policies if each.policy.name == row.policy.compared_with)
        mean = restart.runs.time_ratio.mean
        if restart is row or math.isinf(mean):
            return None
        change = row.runs.time_ratio.mean / mean - 1
        return change if math.isfinite(change) else None

    def _header(self) -> tuple[str, ...]:
        price = ("price",) if self.scenario.price_per_accelerator_hour else ()
        return "policy", "nodes", "days", "5 - 95 %", "useful", "against restart", "closed form", "failures", *price

    def _cells(self, row: PlannedPolicy) -> tuple[str, ...]:
        ratio, days = row.runs.time_ratio, self.scenario.work_s / DAY_S
        change = self._against_restart(row)
        against = "" if change is None else f"{100 * change:+.1f} %"
        spread = f"{_days(ratio.p05 * days, days)} - {_days(ratio.p95 * days, days)}"
        cells = (
            row.policy.name,
            str(self.scenario.num_nodes + row.policy.num_spares(self.scenario)),
            _with_interval(ratio, days),
            spread,
            f"{100 / ratio.mean:.2f} %",
            against,
            _days(row.forecast.time_ratio * days, days),
            f"{row.runs.num_failures.mean():.1f}",
        )
        return (*cells, _money(row.runs.price)) if self.scenario.price_per_accelerator_hour else cells


def make_plan(
    scenario: Scenario,
    *,
    failures: FailureModel | None = None,
    lemons: LemonNodes | None = None,
    num_runs: int = 200,
    seed: int = 0,
    remarks: tuple[str, ...] = (),
) -> JobPlan:
    """Simulate a job under every policy that suits it, and compare with closed forms.

    Args:
        scenario: The job.
        failures: When nodes fail; exponential by default.
        lemons: How failures are spread over nodes.
        num_runs: Simulated runs for each policy; intervals become narrower with their root.
        seed: Of all random numbers. All policies meet the same failures, which narrows the differences between them.
        remarks: Lines for the head of the plan.

    Raises:
        ConfigError: A trace of failures does not suit the cluster, or there are fewer than 2 runs.
    """
    failures, lemons = failures or ExponentialFailures(), lemons or LemonNodes()
    planned: list[PlannedPolicy] = []
    refused: list[tuple[str, str]] = []
    for policy in RECOVERY_POLICIES:
        if reason := policy.why_not(scenario):
            refused.append((policy.name, reason))
            continue
        runs = simulate(scenario, policy, failures=failures, lemons=lemons, num_runs=num_runs, seed=seed)
        expected = forecast(scenario, policy, failures=failures, lemons=lemons)
        planned.append(PlannedPolicy(policy=policy, runs=runs, forecast=expected))
    return JobPlan(
        scenario=scenario, num_runs=num_runs, policies=tuple(planned), refused=tuple(refused), remarks=remarks
    )


def spares_for(scenario: Scenario, shortage: float = 0.01) -> int:
    """Smallest number of spares with which at most this part of the lost nodes finds none."""
    if scenario.node_loss_fraction == 0:
        return 1
    loss_mtbf_s = scenario.mtbf_s / scenario.node_loss_fraction
    return spares_needed(loss_mtbf_s, scenario.stages.detect_s + scenario.stages.repair_s, shortage)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Size:
    """A number that closed forms recommend."""

    name: str
    value: float | None
    """None if no number is large enough."""
    purpose: str
    is_duration: bool = True

    def cells(self) -> tuple[str, str, str]:
        if self.value is None:
            return self.name, "none suffices", self.purpose
        return self.name, _duration(self.value) if self.is_duration else str(int(self.value)), self.purpose


def _sizes(scenario: Scenario) -> Iterator[_Size]:
    stages, mtbf_s, save_s = scenario.stages, scenario.mtbf_s, scenario.stages.checkpoint_save_s
    if save_s:
        purpose = "work between checkpoints, for restarts from them"
        yield _Size(name="best checkpoint interval (Daly)", value=daly_interval_s(save_s, mtbf_s), purpose=purpose)
        purpose = "from one checkpoint to the next, to first order"
        yield _Size(name="the same (Young)", value=young_interval_s(save_s, mtbf_s), purpose=purpose)
    in_memory = next(each for each in RECOVERY_POLICIES if each.regain == "replica")
    if in_memory.why_not(scenario) is None:
        rare_s = in_memory.checkpoint_interval_s(scenario)
        purpose = "for failures that leave no copy; at most a day"
        yield _Size(name="checkpointless: checkpoint interval", value=rare_s, purpose=purpose)
    yield _Size(name="snapshot interval", value=scenario.snapshot_every_s, purpose="work between snapshots in memory")
    purpose = "at most 1 % of the lost nodes find none"
    yield _Size(name="spares", value=spares_for(scenario), purpose=purpose, is_duration=False)
    window_s = stages.detect_s + in_memory.pause_s(stages) + scenario.node_loss_fraction * stages.repair_s
    purpose = "at most 1 % risk that all copies of a shard are lost in the run"
    yield _Size(name="replicas", value=_replicas_for(scenario, window_s), purpose=purpose, is_duration=False)
    if scenario.num_replicas > 1:
        at_least_s = shrink_break_even_s(scenario.num_replicas, 1, stages.resize_s)
        yield _Size(name="shrinking pays from", value=at_least_s, purpose="if a replacement takes longer than that")


def _replicas_for(scenario: Scenario, window_s: float, risk: float = 0.01) -> int | None:
    """Smallest number of copies with at most this risk of a loss; None if a copy on each node is not enough."""
    shards, rate, work_s = scenario.nodes_per_replica, scenario.failures_per_node_hour, scenario.work_s
    if rate * window_s >= HOUR_S:
        return None
    # With more copies the risk first rises, if at all, and then falls: if neither end suffices, nothing between does.
    ends_s = (mean_time_to_loss_s(shards, number, rate, window_s) for number in (1, scenario.num_nodes))
    if all(-math.expm1(-work_s / each) > risk for each in ends_s):
        return None
    return copies_needed(shards, rate, window_s, work_s, risk)


def _duration(seconds: float) -> str:
    for name, unit_s in (("days", DAY_S), ("h", HOUR_S), ("min", 60.0)):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.3g} {name}"
    return f"{seconds:.3g} s"


def _days(value: float, work: float) -> str:
    """Days, to a thousandth of the work."""
    if math.isinf(value):
        return f"> {GIVE_UP * work:.4g}"
    return f"{value:.{_decimals(work / 1000)}f}"


def _decimals(precision: float) -> int:
    return max(0, -math.floor(math.log10(precision)))


def _with_interval(ratio: Estimate, days: float) -> str:
    if math.isinf(ratio.mean):
        return f"> {GIVE_UP * days:.4g}"
    half = max(_reach(ratio) * days, days * 1e-5)
    digits = _decimals(half)
    return f"{ratio.mean * days:.{digits}f} (+- {half:.{digits}f})"


def _reach(estimate: Estimate) -> float:
    """How far the interval reaches from the mean, on the side where it reaches farther."""
    return max(estimate.high - estimate.mean, estimate.mean - estimate.low)


def _money(price: Estimate) -> str:
    if math.isinf(price.mean):
        return "?"
    units = ((" M", 1e6), (" k", 1e3), ("", 1.0))
    name, unit = next((each for each in units if price.mean >= each[1]), units[-1])
    half = max(_reach(price) / unit, price.mean / unit * 1e-5)
    digits = _decimals(half)
    return f"{price.mean / unit:,.{digits}f}{name} (+- {half:.{digits}f})"


def _finite(values: dict[str, float]) -> dict[str, float | None]:
    """The same with None for what is infinite, which JSON does not have."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
