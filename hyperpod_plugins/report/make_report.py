"""Makes the report of a run from its ledgers: `run_report(folder)`."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median

from hyperpod_plugins.elastic.membership.restart_policy import NOT_NEEDED
from hyperpod_plugins.ledger import TimeCategory
from hyperpod_plugins.planning.estimate import poisson_interval, student_quantile
from hyperpod_plugins.report.incidents import incidents_of, verdict_of
from hyperpod_plugins.report.run_files import LedgerSpan, Run, read_run
from hyperpod_plugins.report.run_report import (
    CategoryTime,
    ConfidenceInterval,
    Headline,
    Incident,
    RunReport,
    StepSeries,
)
from hyperpod_plugins.report.stragglers import failing_nodes_of, stragglers_of
from hyperpod_plugins.report.timelines import (
    RanksPresent,
    Timeline,
    counted_steps,
    mean_seconds,
    timelines_of,
    total_seconds,
)

FAILURE_CATEGORIES = (TimeCategory.DETECT, TimeCategory.ASSEMBLE, TimeCategory.RESTORE, TimeCategory.REDONE)
"""What failures cost."""
ELASTIC_CATEGORIES = (TimeCategory.RESIZE, TimeCategory.CAPACITY_WAIT)
"""What changes of size cost."""
LABELS: Mapping[str, str] = {
    TimeCategory.STEP: "steps that count",
    TimeCategory.STRAGGLER_WAIT: "waiting for slower ranks",
    TimeCategory.DATA_WAIT: "waiting for data",
    TimeCategory.EVALUATION: "evaluation",
    TimeCategory.CHECKPOINT_SAVE: "saving checkpoints",
    TimeCategory.CHECKPOINT_RESTORE: "loading checkpoints",
    TimeCategory.SNAPSHOT: "snapshots",
    TimeCategory.DETECT: "noticing failures",
    TimeCategory.ASSEMBLE: "assembling ranks",
    TimeCategory.RESTORE: "restoring state",
    TimeCategory.REDONE: "work that was lost",
    TimeCategory.RESIZE: "changing the size",
    TimeCategory.CAPACITY_WAIT: "waiting for nodes",
    TimeCategory.SETUP: "set-up",
    TimeCategory.OTHER: "everything else",
}
"""A label for each category, in the order in which they are shown."""
_OUTLIERS = 3
_WINDOW_SHARE, _WINDOW_S = 0.05, 30.0
"""Window of the goodput over time: a part of the run, and at least so long."""


def run_report(folder: Path) -> RunReport:
    """Read the ledgers in `folder` and say what happened in the run; see `RunReport`.

    Raises:
        ConfigError: there are none.
    """
    return report_of(read_run(folder))


def report_of(run: Run) -> RunReport:
    """The report of a run that has been read; the spans of `run` are changed."""
    timelines = timelines_of(run)
    incidents, num_failures = incidents_of(run, timelines)
    began_s = min(each.began_s for each in run.workers)
    ended_s = max((each.spans[-1].end_s for each in timelines if each.spans), default=began_s)
    is_complete = all(map(_has_left_in_order, timelines)) and any(map(_has_finished, timelines))
    totals = total_seconds(timelines)
    wall_of_all_s = sum(totals.values())
    return RunReport(
        run_id=run.workers[0].run_id,
        began_at_s=began_s,
        ended_at_s=ended_s,
        is_complete=is_complete,
        num_ranks=len(timelines),
        hosts=sorted({each.host for each in run.workers}),
        headline=_headline(timelines, incidents, num_failures, ended_s - began_s),
        categories=[
            CategoryTime(
                category=str(name),
                label=label,
                seconds=totals.get(name, 0.0),
                share=totals.get(name, 0.0) / wall_of_all_s if wall_of_all_s else 0.0,
            )
            for name, label in LABELS.items()
        ],
        ranks=[each.shown() for each in sorted(timelines, key=lambda each: each.rank)],
        incidents=incidents,
        steps=_series(timelines),
        stragglers=stragglers_of(timelines, ended_s - began_s),
        failing_nodes=failing_nodes_of(incidents, timelines),
        verdict=verdict_of(incidents, timelines, is_complete=is_complete),
        are_waits_measured=len(timelines) < 2 or any(map(_has_waited, timelines)),
        problems=run.problems,
    )


def _has_waited(timeline: Timeline) -> bool:
    """Whether the rank has measured a wait for its peers in any step."""
    return any(span.step is not None and span.step.waited_s > 0 for span in timeline.spans)


def _has_finished(timeline: Timeline) -> bool:
    ending = timeline.endings[-1]
    return timeline.processes[-1].has_ended if ending is None else ending.code == 0


def _has_left_in_order(timeline: Timeline) -> bool:
    """Whether the rank has finished, or the job went on without it: it was not needed, or its node has left."""
    ending = timeline.endings[-1]
    is_left_out = ending is not None and (ending.code == NOT_NEEDED or ending.is_requested)
    return is_left_out or _has_finished(timeline)


def _headline(
    timelines: Sequence[Timeline], incidents: Sequence[Incident], num_failures: int, wall_s: float
) -> Headline:
    rank_s = mean([each.wall_s for each in timelines])
    failures = [each for each in incidents if each.kind == "failure"]
    repairs = [each for each in failures if each.level != "none"]
    restarts = [each for each in incidents if each.kind == "restart"]
    lost_s = mean_seconds(timelines, [*FAILURE_CATEGORIES, *ELASTIC_CATEGORIES])
    after_setup_s = rank_s - mean_seconds(timelines, [TimeCategory.SETUP])
    restart_s, assumes = _cost_of_restarts(timelines, [*failures, *restarts])
    steps = counted_steps(timelines)
    return Headline(
        wall_s=wall_s,
        goodput=mean_seconds(timelines, [TimeCategory.STEP]) / rank_s if rank_s else 0.0,
        ettr=1 - lost_s / after_setup_s if after_setup_s > 0 else 0.0,
        num_failures=num_failures,
        num_repairs=len(repairs),
        num_restarts=len(restarts),
        num_resizes=sum(each.kind == "resize" for each in incidents),
        steps_committed=len(steps),
        steps_lost=_num_lost(timelines),
        failures_cost_s=RanksPresent(timelines).mean_seconds(timelines, FAILURE_CATEGORIES),
        ideal_step_s=_ideal_step_s([span.duration_s for spans in steps.values() for _, span in spans]),
        mtbf_s=_mtbf(num_failures, wall_s),
        mttr_s=_mttr([each.total_s for each in [*repairs, *restarts]]),
        checkpoint_restart_cost_s=restart_s,
        checkpoint_restart_assumes=assumes,
    )


def _num_lost(timelines: Sequence[Timeline]) -> int:
    """Number of times that a committed step was lost, on the rank that lost most."""
    return max(
        (sum(span.step is not None and not span.is_counted for span in each.spans) for each in timelines), default=0
    )


def _ideal_step_s(durations_s: Sequence[float]) -> float | None:
    """Mean duration without outliers: those above the median by three median absolute deviations."""
    if not durations_s:
        return None
    middle_s = median(durations_s)
    limit_s = middle_s + _OUTLIERS * median(abs(each - middle_s) for each in durations_s)
    return mean(each for each in durations_s if each <= limit_s)


def _mtbf(num_failures: int, wall_s: float) -> ConfidenceInterval | None:
    """Time between failures, with the exact interval of a Poisson process (Garwood)."""
    if wall_s <= 0:
        return None
    low, high = poisson_interval(num_failures)
    value = wall_s / num_failures if num_failures else wall_s
    return ConfidenceInterval(value=value, low=wall_s / high, high=wall_s / low if low > 0 else None)


def _mttr(totals_s: Sequence[float]) -> ConfidenceInterval | None:
    if not totals_s:
        return None
    value = mean(totals_s)
    if len(totals_s) == 1:  # as if repairs were exponential: one says little
        return ConfidenceInterval(value=value, low=value / -math.log(0.025), high=value / -math.log(0.975))
    deviation = math.sqrt(sum((each - value) ** 2 for each in totals_s) / (len(totals_s) - 1))
    half = student_quantile(len(totals_s) - 1) * deviation / math.sqrt(len(totals_s))
    return ConfidenceInterval(value=value, low=max(0.0, value - half), high=value + half)


def _cost_of_restarts(timelines: Sequence[Timeline], failures: Sequence[Incident]) -> tuple[float | None, str]:
    """What the failures would have cost had each of them restarted all processes from the last checkpoint."""
    first = min(timelines, key=lambda each: each.worker_id)
    setup_s = max((each.spans[0].seconds.get(TimeCategory.SETUP, 0.0) for each in timelines if each.spans), default=0)
    if not failures or setup_s <= 0:
        return None, ""
    saves = [span.end_s for span in first.spans if TimeCategory.CHECKPOINT_SAVE in span.seconds]
    loads_s = [load_s for each in timelines for load_s in each.loads_s]
    load_s = mean(loads_s) if loads_s else 0.0
    begins = first.spans[0].begin_s + setup_s
    total_s = 0.0
    for each in failures:
        since_s = max((saved for saved in saves if saved <= each.at_s), default=begins)
        total_s += setup_s + load_s + _productive_s(first.spans, since_s, each.at_s)
    return total_s, (
        f"each failure restarts all processes, which takes {setup_s:.1f} s as it did when this run began, and repeats "
        f"the steps since the last checkpoint, of which this run saved {len(saves) or 'none'}"
    )


def _productive_s(spans: Sequence[LedgerSpan], from_s: float, to_s: float) -> float:
    inside = [each for each in spans if from_s <= each.begin_s and each.end_s <= to_s and each.step is not None]
    return sum(each.duration_s for each in inside)


def _series(timelines: Sequence[Timeline]) -> StepSeries:
    rows = list(counted_steps(timelines).items())
    if not rows:
        return StepSeries()
    ends = [max(span.end_s for _, span in spans) for _, spans in rows]
    order = sorted(range(len(rows)), key=lambda index: ends[index])
    rows, ends = [rows[index] for index in order], [ends[index] for index in order]
    productive = [_step_s(spans) for _, spans in rows]
    lines = [[span.step for _, span in spans if span.step is not None] for _, spans in rows]
    batches = [next((each.samples for each in steps if each.samples is not None), None) for steps in lines]
    return StepSeries(
        step=[number for (_, number), _ in rows],
        at_s=ends,
        duration_s=productive,
        loss=[_mean_or_none([each.loss for each in steps]) for steps in lines],
        world_size=[max(each.world_size for each in steps) for steps in lines],
        global_batch=batches,
        samples=_positions(batches),
        goodput=_rolling_goodput(ends, [_counted_s(spans) for _, spans in rows], ends[0] - productive[0]),
    )


def _step_s(spans: Sequence[tuple[Timeline, LedgerSpan]]) -> float:
    """Duration of a step: its computation, and what its ranks waited for each other in it."""
    both = (TimeCategory.STEP, TimeCategory.STRAGGLER_WAIT)
    return mean([sum(span.seconds.get(each, 0.0) for each in both) for _, span in spans])


def _counted_s(spans: Sequence[tuple[Timeline, LedgerSpan]]) -> float:
    return mean([span.seconds.get(TimeCategory.STEP, 0.0) for _, span in spans])


def _mean_or_none(values: Sequence[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return mean(known) if known else None


def _positions(batches: Sequence[int | None]) -> list[int | None]:
    """Samples of the whole job after each step, as long as each step says how many it had."""
    found: list[int | None] = []
    total: int | None = 0
    for each in batches:
        total = None if total is None or each is None else total + each
        found.append(total)
    return found


def _rolling_goodput(ends_s: Sequence[float], counted_s: Sequence[float], began_s: float) -> list[float]:
    window_s = max(_WINDOW_S, _WINDOW_SHARE * (ends_s[-1] - began_s))
    sums, total = [0.0], 0.0
    for each in counted_s:
        total += each
        sums.append(total)
    found: list[float] = []
    for index, end_s in enumerate(ends_s):
        first = bisect_left(ends_s, end_s - window_s, 0, index)
        from_s = began_s if first == 0 else ends_s[first - 1]
        length_s = end_s - from_s
        found.append(min(1.0, (sums[index + 1] - sums[first]) / length_s) if length_s > 0 else 1.0)
    return found


def labelled(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    """Categories by their labels, in the order in which they are shown; without those of no time."""
    return [(label, seconds[name]) for name, label in LABELS.items() if seconds.get(name, 0.0) > 0]
