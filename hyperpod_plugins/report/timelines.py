"""Where the time of each rank went: the spans of its processes, what lies between them, and what was lost later.

The seconds of a rank add up to its wall time: from the start of its first process to the end of its last one. Some of
what a process has booked is known better once all ledgers lie side by side:

* A step that the rank has committed again later was lost: its time is `REDONE`.
* In a step, the rank that waited least was the last one. What others waited longer than it is `STRAGGLER_WAIT`.
* The set-up of a replacement is part of a repair: `ASSEMBLE`, or `RESIZE` if the rank did not exist before. So is a
  checkpoint that it loads before its first step: `RESTORE`, or `RESIZE`.
* What a killed process did after its last line is lost, too. Until its replacement starts, the rank is `ASSEMBLE`, or
  `CAPACITY_WAIT` where its agent waited for nodes.
"""

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from hyperpod_plugins.ledger import TimeCategory
from hyperpod_plugins.report.run_files import Exit, LedgerSpan, ProcessRecord, Run
from hyperpod_plugins.report.run_report import RankProcess, RankTimeline

StepKey = tuple[int, int]
"""Entry of the program, and number of the step in it."""
_JOINING = (TimeCategory.SETUP, TimeCategory.ASSEMBLE, TimeCategory.CHECKPOINT_RESTORE, TimeCategory.RESTORE)
_LOST_WITH_PROCESS = {TimeCategory.STEP, TimeCategory.DATA_WAIT, TimeCategory.SNAPSHOT}


@dataclass(slots=True)
class Timeline:
    """The spans of one rank, without gaps."""

    worker_id: int
    processes: list[ProcessRecord]
    endings: list[Exit | None]
    """How each process has ended, as far as its agent says."""
    spans: list[LedgerSpan] = field(default_factory=list[LedgerSpan])
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    waited_s: float = 0.0
    loads_s: list[float] = field(default_factory=list[float])
    """How long each of its checkpoints took to load, also where that is booked as part of a repair."""

    @property
    def rank(self) -> int:
        """The number of its worker: its rank in the first world. Its rank may change with the size of the job."""
        return self.worker_id

    @property
    def wall_s(self) -> float:
        """From the start of its first process to the end of the last one."""
        return self.spans[-1].end_s - self.spans[0].begin_s if self.spans else 0.0

    def shown(self) -> RankTimeline:
        """In the form of a report."""
        return RankTimeline(
            rank=self.rank,
            wall_s=self.wall_s,
            seconds=dict(sorted(self.seconds.items())),
            processes=[_shown(*each) for each in zip(self.processes, self.endings, strict=True)],
            spans=joined_spans(self.spans),
            waited_s=self.waited_s,
            checkpoint_loads_s=self.loads_s,
        )


@final
class RanksPresent:
    """How many ranks a job had at each time: each from the start of its first process to the end of its last one."""

    def __init__(self, timelines: Iterable[Timeline]) -> None:
        """Count them."""
        changes: defaultdict[float, int] = defaultdict(int)
        for each in timelines:
            if each.spans:
                changes[each.spans[0].begin_s] += 1
                changes[each.spans[-1].end_s] -= 1
        self._times_s = sorted(changes)
        self._shares_s = [0.0]
        """Integral of 1 / number of ranks up to each of these times."""
        number = 0
        for from_s, to_s in itertools.pairwise(self._times_s):
            number += changes[from_s]
            self._shares_s.append(self._shares_s[-1] + (to_s - from_s) / max(1, number))

    def mean_seconds(self, timelines: Iterable[Timeline], categories: Iterable[str]) -> float:
        """Seconds of some categories, averaged over the ranks that were there at the time: seconds of the job."""
        wanted = [str(each) for each in categories]
        return sum(
            self.mean_of(span, sum(span.seconds.get(name, 0.0) for name in wanted))
            for each in timelines
            for span in each.spans
        )

    def mean_of(self, span: LedgerSpan, seconds: float) -> float:
        """Seconds of one rank within a span, divided by the number of ranks that were there meanwhile."""
        if seconds <= 0 or span.duration_s <= 0:
            return 0.0
        return seconds * (self._share_s(span.end_s) - self._share_s(span.begin_s)) / span.duration_s

    def _share_s(self, at_s: float) -> float:
        index = bisect_right(self._times_s, at_s) - 1
        if index + 1 >= len(self._times_s):
            return self._shares_s[-1]
        from_s, to_s = self._times_s[index : index + 2]
        before_s, after_s = self._shares_s[index : index + 2]
        return before_s + (after_s - before_s) * (at_s - from_s) / (to_s - from_s)


def timelines_of(run: Run) -> list[Timeline]:
    """The timeline of each rank, in the order of their workers' numbers."""
    by_worker: defaultdict[int, list[ProcessRecord]] = defaultdict(list)
    for each in run.workers:
        by_worker[each.worker_id or 0].append(each)
    exits = {id(process): each for each, process in run.processes_of_exits().items() if process is not None}
    found: list[Timeline] = []
    for worker_id, processes in sorted(by_worker.items()):
        # Not by their start alone: a replacement may run on a machine whose clock is behind.
        processes.sort(key=lambda each: (each.launch, each.restart, each.incarnation))
        endings = [exits.get(id(each)) for each in processes]
        found.append(Timeline(worker_id, processes, endings, loads_s=_loads_s(processes)))
    mark_lost_steps(found)
    waits = [span for agent in run.agents for span in agent.spans if TimeCategory.CAPACITY_WAIT in span.seconds]
    for each in found:
        _book_replacements(each)
        _fill(each, waits)
    _book_waits(found)
    for each in found:
        for span in each.spans:
            for category, value in span.seconds.items():
                each.seconds[category] = each.seconds.get(category, 0.0) + value
    return found


def mark_lost_steps(timelines: Iterable[Timeline]) -> None:
    """Mark the steps after which a rank went back to them or to a step before: only the last time counts.

    Those that come after the step to which it went back are lost, too, even if the run ended before it was there again.
    """
    for each in timelines:
        first_later: StepKey | None = None
        for process in reversed(each.processes):
            for span in reversed(process.spans):
                if span.step is None:
                    continue
                key = span.step.entry, span.step.number
                span.is_counted = first_later is None or key < first_later
                if span.is_counted:
                    first_later = key
                else:
                    for category in _LOST_WITH_PROCESS:
                        _move(span.seconds, category, TimeCategory.REDONE)


def _loads_s(processes: Iterable[ProcessRecord]) -> list[float]:
    """How long each checkpoint took to load: all before a process's first step is one, later visits are one each."""
    found: list[float] = []
    for each in processes:
        first = list(_before_steps(each))
        found.append(sum(span.seconds.get(TimeCategory.CHECKPOINT_RESTORE, 0.0) for span in first))
        later = joined_spans(each.spans[len(first) :])
        found += [duration_s for _, duration_s, category in later if category == TimeCategory.CHECKPOINT_RESTORE]
    return [each for each in found if each > 0]


def _before_steps(process: ProcessRecord) -> Iterator[LedgerSpan]:
    """The spans before the first step that a process has committed."""
    return itertools.takewhile(lambda each: each.step is None, process.spans)


def _book_replacements(timeline: Timeline) -> None:
    """What a process does before its first step is part of a repair or a growth, if it is for that that it started."""
    for index, process in enumerate(timeline.processes):
        if index == 0 and process.incarnation > 0:  # it joins until its first step
            for span in _before_steps(process):
                for category in _JOINING:
                    _move(span.seconds, category, TimeCategory.RESIZE)
        elif index > 0 or process.restart > 0 or process.launch > 0:
            for span in _before_steps(process):
                _move(span.seconds, TimeCategory.CHECKPOINT_RESTORE, TimeCategory.RESTORE)
            for span in process.spans:
                _move(span.seconds, TimeCategory.SETUP, TimeCategory.ASSEMBLE)


def _fill(timeline: Timeline, capacity_waits: Sequence[LedgerSpan]) -> None:
    """Put the spans of all processes in a row, and fill what lies between."""
    spans = timeline.spans
    for process, ending in zip(timeline.processes, timeline.endings, strict=True):
        if spans:
            _fill_gap(spans, process.began_s, capacity_waits)
        is_killed = not process.has_ended
        for each in _after_last_step(process):  # of a step that has never been committed
            for category in _LOST_WITH_PROCESS if is_killed else (TimeCategory.STEP,):
                _move(each.seconds, category, TimeCategory.REDONE)
        own = [_cut(each, spans[-1].end_s if spans else each.begin_s) for each in process.spans]
        spans += [each for each in own if each.duration_s > 0 or each.step is not None]
        end_s = spans[-1].end_s if spans else process.began_s
        if ending is not None and ending.at_s > end_s:
            # Up to a line's delay of a killed process; else the end of the interpreter.
            rest = TimeCategory.REDONE if is_killed and process.spans else TimeCategory.OTHER
            spans.append(LedgerSpan(end_s, ending.at_s, {rest: ending.at_s - end_s}))


def _after_last_step(process: ProcessRecord) -> list[LedgerSpan]:
    """The spans after the last step that a process has committed."""
    last = max((index for index, each in enumerate(process.spans) if each.step is not None), default=-1)
    return process.spans[last + 1 :]


def _fill_gap(spans: list[LedgerSpan], until_s: float, capacity_waits: Sequence[LedgerSpan]) -> None:
    """Fill the time until the next process: its agent waited for nodes, or started it."""
    begin_s = spans[-1].end_s
    for wait in sorted(capacity_waits, key=lambda each: each.begin_s):
        from_s, to_s = max(wait.begin_s, begin_s), min(wait.end_s, until_s)
        if to_s <= from_s:
            continue
        if from_s > begin_s:
            spans.append(LedgerSpan(begin_s, from_s, {TimeCategory.ASSEMBLE: from_s - begin_s}))
        spans.append(LedgerSpan(from_s, to_s, {TimeCategory.CAPACITY_WAIT: to_s - from_s}))
        begin_s = to_s
    if until_s > begin_s:
        spans.append(LedgerSpan(begin_s, until_s, {TimeCategory.ASSEMBLE: until_s - begin_s}))


def _cut(span: LedgerSpan, begin_s: float) -> LedgerSpan:
    """The span from `begin_s` on: two processes of a rank may overlap, if the first one was slow to end."""
    if span.begin_s >= begin_s:
        return span
    end_s = max(begin_s, span.end_s)
    part = (end_s - begin_s) / span.duration_s if span.duration_s > 0 else 0.0
    seconds = {category: value * part for category, value in span.seconds.items()}
    return LedgerSpan(begin_s, end_s, seconds, span.step, span.is_counted)


def _book_waits(timelines: Sequence[Timeline]) -> None:
    """Move what each rank has waited for slower ones, in the steps that all ranks have reported."""
    for spans in counted_steps(timelines).values():
        least_s = min(span.step.waited_s for _, span in spans if span.step is not None)
        for timeline, span in spans:
            if span.step is not None and len(spans) > 1:
                waited_s = min(span.step.waited_s - least_s, span.seconds.get(TimeCategory.STEP, 0.0))
                timeline.waited_s += waited_s
                if waited_s > 0:
                    span.seconds[TimeCategory.STEP] -= waited_s
                    span.seconds[TimeCategory.STRAGGLER_WAIT] = waited_s


def counted_steps(timelines: Sequence[Timeline]) -> dict[StepKey, list[tuple[Timeline, LedgerSpan]]]:
    """The steps that count, with the spans of the ranks that have reported each; in the order of their numbers."""
    found: defaultdict[StepKey, list[tuple[Timeline, LedgerSpan]]] = defaultdict(list)
    for each in timelines:
        for span in each.spans:
            if span.step is not None and span.is_counted:
                found[span.step.entry, span.step.number].append((each, span))
    return dict(sorted(found.items()))


def joined_spans(spans: Iterable[LedgerSpan]) -> list[tuple[float, float, str]]:
    """Start, duration and category of the parts of spans, neighbours of one category joined."""
    found: list[tuple[float, float, str]] = []
    for span in spans:
        begin_s = span.begin_s
        for category, value in span.seconds.items():
            if value <= 0:
                continue
            if found and found[-1][2] == category:
                before_s, duration_s, _ = found[-1]
                found[-1] = before_s, duration_s + value, category
            else:
                found.append((begin_s, value, str(category)))
            begin_s += value
    return found


def mean_seconds(timelines: Sequence[Timeline], categories: Iterable[str]) -> float:
    """Seconds of some categories, averaged over the ranks."""
    wanted = [str(each) for each in categories]
    return sum(each.seconds.get(name, 0.0) for each in timelines for name in wanted) / max(1, len(timelines))


def _move(seconds: dict[str, float], source: str, target: str) -> None:
    if source in seconds:
        seconds[target] = seconds.get(target, 0.0) + seconds.pop(source)


def _shown(process: ProcessRecord, ending: Exit | None) -> RankProcess:
    unknown = "" if not process.has_ended else "ended by itself"
    return RankProcess(
        pid=process.pid,
        host=process.host,
        incarnation=process.incarnation,
        restart=process.restart,
        began_at_s=process.began_s,
        ended_at_s=process.ended_s if ending is None else ending.at_s,
        ending=unknown if ending is None else ending.cause,
    )


def total_seconds(timelines: Sequence[Timeline]) -> Mapping[str, float]:
    """Seconds by category over all ranks."""
    found: defaultdict[str, float] = defaultdict(float)
    for each in timelines:
        for category, value in each.seconds.items():
            found[category] += value
    return found
