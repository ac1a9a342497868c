"""The data of a report's page: a `RunReport` made small enough for a file that people send to each other.

Ledgers are written by processes that crash, and anybody may edit them: figures may be NaN, spans may overlap, texts may
be of any length. The result is finite, sorted and bounded.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any, Final, NamedTuple

from hyperpod_plugins.ledger import TimeCategory
from hyperpod_plugins.report.run_report import Incident, RankTimeline, RunReport, StepSeries

NO_PROCESS: Final = ""
"""Category of the time in which a rank had no process."""
RECOVERY: Final = frozenset(
    {TimeCategory.DETECT, TimeCategory.ASSEMBLE, TimeCategory.RESTORE, TimeCategory.REDONE, TimeCategory.RESIZE}
)
"""Categories that a timeline shows however short they are, as long as there are not too many of them."""
MAX_POINTS: Final = 2_000
"""Of a curve."""
MAX_SPANS: Final = 80_000
"""Of the timelines of all ranks together; eight or nine bytes each."""
MAX_INCIDENTS: Final = 1_000
MAX_LINES: Final = 50
"""Of problems, stragglers and failing nodes, each."""
MAX_TEXT: Final = 500
"""Characters of a text from a ledger."""
MAX_LABEL: Final = 40
"""Characters of the name of a category."""
TICKS: Final = 1_000_000
"""A timeline's unit of time is this part of the run."""
_ORDER: Final = (
    TimeCategory.STEP,
    TimeCategory.STRAGGLER_WAIT,
    TimeCategory.DATA_WAIT,
    TimeCategory.EVALUATION,
    TimeCategory.CHECKPOINT_SAVE,
    TimeCategory.CHECKPOINT_RESTORE,
    TimeCategory.SNAPSHOT,
    TimeCategory.SETUP,
    TimeCategory.OTHER,
)
"""Categories that are shown first, productive ones before others; those that failures cause follow."""
_SPANS_PER_RANK: Final = 4_000
_POINTS_PER_GROUP: Final = 5


class PageSpan(NamedTuple):
    """An interval of one category; seconds since the run began."""

    start_s: float
    end_s: float
    category: str


def page_data(report: RunReport) -> dict[str, Any]:
    """Return the data of the page of `report`, which `json.dumps(..., allow_nan=False)` accepts.

    Times named `*_ms` are whole milliseconds since the run began, but `began_at_ms` is a Unix time.
    """
    wall_s = _wall_s(report)
    keys = _category_keys(report)
    labels = {time.category: time.label[:MAX_LABEL] for time in report.categories}
    kept = _costliest(report.incidents)
    data = {
        "run_id": report.run_id,
        "began_at_ms": _milliseconds(report.began_at_s),
        "wall_s": wall_s,
        "is_complete": report.is_complete,
        "num_ranks": report.num_ranks,
        "hosts": len(report.hosts),
        "headline": asdict(report.headline),
        "keys": [
            {"key": key if key in set(TimeCategory) else "other", "label": labels.get(key) or _label_of(key)}
            for key in keys
        ],
        "categories": [
            {"key": keys.index(time.category), "seconds": time.seconds, "share": time.share}
            for time in report.categories
        ],
        "ranks": [_rank(timeline, keys) for timeline in report.ranks],
        "incidents": [_incident(incident, number, report.began_at_s) for number, incident in kept],
        "num_incidents": len(report.incidents),
        "steps": step_columns(report.steps, report.began_at_s),
        "num_steps": len(report.steps.step),
        "stragglers": [asdict(straggler) for straggler in report.stragglers[:MAX_LINES]],
        "failing_nodes": [asdict(node) for node in report.failing_nodes[:MAX_LINES]],
        "are_waits_measured": report.are_waits_measured,
        "verdict": asdict(report.verdict),
        "problems": list(report.problems[:MAX_LINES]),
        "num_problems": len(report.problems),
    }
    return {**_clean(data), "ticks": TICKS, "rows": timeline_rows(report.ranks, keys, report.began_at_s, wall_s)}


def timeline_rows(
    ranks: Sequence[RankTimeline], keys: Sequence[str], began_at_s: float, wall_s: float
) -> list[list[int]]:
    """Return a row `[category, ticks, category, ticks, ...]` for each rank; categories are indices of `keys`.

    The row begins with the run; a tick is `wall_s / TICKS`. Spans narrower than 1/4,000 of the run are joined with
    their neighbours, except those of a recovery. With more than `MAX_SPANS` spans these are joined, too, and then the
    limit of 1/4,000 is doubled as often as needed, up to 1/250.
    """
    all_spans = [list(clipped(timeline.spans, began_at_s, wall_s)) for timeline in ranks]
    number_of = {key: number for number, key in enumerate(keys)}
    spans_per_rank, kept = _SPANS_PER_RANK, RECOVERY
    while True:
        rows = [joined(spans, wall_s / spans_per_rank, kept) for spans in all_spans]
        if sum(len(row) for row in rows) <= MAX_SPANS or spans_per_rank <= 250:
            return [_ticks(row, number_of, wall_s) for row in rows]
        spans_per_rank = spans_per_rank // 2 if not kept else spans_per_rank
        kept = frozenset()


def clipped(spans: Iterable[tuple[float, float, str]], began_at_s: float, wall_s: float) -> Iterator[PageSpan]:
    """Yield `spans` in order, without overlaps and within the run; gaps are spans of `NO_PROCESS`."""
    known = [span for span in spans if math.isfinite(span[0]) and math.isfinite(span[1]) and span[1] > 0]
    done_s, shortest_gap_s = 0.0, wall_s / _SPANS_PER_RANK / 10
    for at_s, duration_s, category in sorted(known):
        start_s, end_s = at_s - began_at_s, min(at_s - began_at_s + duration_s, wall_s)
        if start_s - done_s > shortest_gap_s:
            yield PageSpan(done_s, min(start_s, wall_s), NO_PROCESS)
            done_s = min(start_s, wall_s)
        if end_s > done_s:
            yield PageSpan(done_s, end_s, category)
            done_s = end_s


def joined(
    spans: Iterable[PageSpan], narrow_s: float, kept: frozenset[str] | frozenset[TimeCategory]
) -> list[PageSpan]:
    """Return `spans` with those narrower than `narrow_s` put together.

    Consecutive narrow spans become one of the category that has most of their time, as soon as they are `narrow_s` wide
    together; a remainder belongs to the span before it. Spans of the categories `kept` stay as they are.
    """
    result: list[PageSpan] = []
    group: list[PageSpan] = []
    for span in spans:
        if span.end_s - span.start_s < narrow_s and span.category not in kept:
            group.append(span)
            if span.end_s - group[0].start_s >= narrow_s:
                _append(result, _majority(group))
                group.clear()
            continue
        _append_remainder(result, group, kept)
        group.clear()
        _append(result, span)
    _append_remainder(result, group, kept)
    return result


def step_columns(steps: StepSeries, began_at_s: float) -> dict[str, list[Any]]:
    """Return the columns of `steps`, ordered by time, with at most `MAX_POINTS` entries.

    Of each group of neighbours the first entry is kept and those with the least and the greatest duration and loss:
    no peak is lost, and each entry is one that was measured.
    """
    order = sorted((n for n, at_s in enumerate(steps.at_s) if math.isfinite(at_s)), key=lambda n: steps.at_s[n])
    shown = order
    if len(order) > MAX_POINTS:
        num_groups = MAX_POINTS // _POINTS_PER_GROUP
        edges = [len(order) * group // num_groups for group in range(num_groups + 1)]
        shown = [n for a, b in pairwise(edges) for n in _remarkable(order[a:b], steps)]
    return {
        "at_ms": [_milliseconds(steps.at_s[n] - began_at_s) for n in shown],
        "step": [steps.step[n] for n in shown],
        "duration_s": [_compact(steps.duration_s[n], 4) for n in shown],
        "loss": [_compact(steps.loss[n], 5) for n in shown],
        "world_size": [steps.world_size[n] for n in shown],
        "global_batch": [steps.global_batch[n] for n in shown],
        "samples": [steps.samples[n] for n in shown],
        "goodput": [_compact(steps.goodput[n], 4) for n in shown],
    }


def _remarkable(group: Sequence[int], steps: StepSeries) -> list[int]:
    found = {group[0]}
    for column in (steps.duration_s, steps.loss):
        known = [(value, n) for n in group if (value := column[n]) is not None and math.isfinite(value)]
        if known:
            found |= {min(known)[1], max(known)[1]}
    return sorted(found, key=group.index)


def _append(result: list[PageSpan], span: PageSpan) -> None:
    if result and result[-1].category == span.category:
        result[-1] = result[-1]._replace(end_s=span.end_s)
    else:
        result.append(span)


def _append_remainder(
    result: list[PageSpan], group: Sequence[PageSpan], kept: frozenset[str] | frozenset[TimeCategory]
) -> None:
    if not group:
        return
    if result and result[-1].category != NO_PROCESS and result[-1].category not in kept:
        result[-1] = result[-1]._replace(end_s=group[-1].end_s)
    else:
        _append(result, _majority(group))


def _majority(group: Sequence[PageSpan]) -> PageSpan:
    seconds: dict[str, float] = {}
    for start_s, end_s, category in group:
        seconds[category] = seconds.get(category, 0.0) + end_s - start_s
    return PageSpan(group[0].start_s, group[-1].end_s, max(seconds, key=lambda category: seconds[category]))


def _ticks(row: Sequence[PageSpan], number_of: Mapping[str, int], wall_s: float) -> list[int]:
    ticks: list[int] = []
    done = 0
    for span in row:
        end = round(span.end_s / wall_s * TICKS)
        if end > done:
            ticks += [number_of[span.category], end - done]
            done = end
    return ticks


def _rank(timeline: RankTimeline, keys: Sequence[str]) -> dict[str, Any]:
    processes = timeline.processes[-MAX_LINES:]
    return {
        "rank": timeline.rank,
        "hosts": list(dict.fromkeys(process.host for process in processes)),
        "wall_s": timeline.wall_s,
        "waited_s": timeline.waited_s,
        "seconds": [timeline.seconds.get(key, 0) for key in keys],
        "num_processes": len(timeline.processes),
        "endings": list(dict.fromkeys(process.ending or "unknown" for process in processes)),
    }


def _incident(incident: Incident, number: int, began_at_s: float) -> dict[str, Any]:
    fields = asdict(incident)
    del fields["at_s"]
    return {"number": number, "at_ms": _milliseconds(incident.at_s - began_at_s), **fields}


def _costliest(incidents: Sequence[Incident]) -> list[tuple[int, Incident]]:
    """Return the incidents that the page shows, in order of time, with their numbers from 1."""
    in_time = sorted(incidents, key=lambda incident: incident.at_s if math.isfinite(incident.at_s) else math.inf)
    numbered = list(enumerate(in_time, start=1))
    costliest = sorted(numbered, key=lambda one: -one[1].total_s if math.isfinite(one[1].total_s) else 0.0)
    return sorted(costliest[:MAX_INCIDENTS], key=lambda one: one[0])


def _category_keys(report: RunReport) -> list[str]:
    """Return `NO_PROCESS`, the categories that we know, in the order in which they are shown, and others that occur."""
    found = {time.category for time in report.categories}
    for timeline in report.ranks:
        found.update(timeline.seconds)
        found.update(category for _, _, category in timeline.spans)
    known = [str(category) for category in dict.fromkeys((*_ORDER, *TimeCategory))]
    return [NO_PROCESS, *known, *sorted(found - {NO_PROCESS, *known})]


def _label_of(key: str) -> str:
    return key[:MAX_LABEL].replace("_", " ").capitalize() if key else "No process"


def _wall_s(report: RunReport) -> float:
    for wall_s in (report.ended_at_s - report.began_at_s, report.headline.wall_s):
        if math.isfinite(wall_s) and wall_s > 0:
            return wall_s
    return 1.0


def _milliseconds(seconds: float) -> int | None:
    return round(seconds * 1000) if math.isfinite(seconds) else None


def _compact(value: float | None, digits: int) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _clean(value: Any) -> Any:
    """Return `value` without what JSON does not have (NaN, infinities), with 6 digits and short texts."""
    match value:
        case str():
            return value if len(value) <= MAX_TEXT else value[: MAX_TEXT - 1] + "…"
        case float():
            return _compact(value, 6)
        case Mapping():
            return {key: _clean(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_clean(inner) for inner in value]
        case _:
            return value
