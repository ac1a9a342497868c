"""Failures, changes of size and restarts of a run, each with its first cause and what it cost."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from hyperpod_plugins.elastic.membership.restart_policy import GAVE_UP, NOT_NEEDED
from hyperpod_plugins.ledger import TimeCategory
from hyperpod_plugins.recovery.protocols import cause_of_return
from hyperpod_plugins.report.run_files import Exit, ProcessRecord, Run, RunEvent
from hyperpod_plugins.report.run_report import Incident, Verdict
from hyperpod_plugins.report.timelines import RanksPresent, Timeline

_REPAIRS = {f"recovery.{level}" for level in ("retry", "replace", "snapshot")}
_RESHARD = "elastic.reshard"
_STOP = "recovery.stop"
_ENDINGS = {"recovery.checkpoint", _RESHARD, _STOP}
_BEFORE_S = 30.0
"""A process may have been lost so long before the others noticed."""
_CLOCK_S = 1e-3
"""Times of two ledgers that differ by less are the same."""
_TOGETHER_S = 1.0
"""Processes are lost together if no more than this lies between."""
_GREATEST = 1e11


@final
class Exits:
    """The exits of processes that failed, each of which belongs to one incident at most."""

    def __init__(self, run: Run) -> None:
        self._process_of = run.processes_of_exits()
        self._left = failed_exits(run)

    @property
    def left(self) -> list[Exit]:
        """Those of no incident so far, in the order of time."""
        return list(self._left)

    def host(self, found: Exit) -> str:
        """Host of its process; empty if that has no ledger."""
        process = self._process_of[found]
        return "" if process is None else process.host

    def take(self, found: Iterable[Exit]) -> list[Exit]:
        """Exits that now belong to an incident."""
        taken = list(found)
        self._left = [each for each in self._left if each not in taken]
        return taken

    def take_of(self, process: tuple[int, int], group: tuple[int, int], from_s: float, until_s: float) -> list[Exit]:
        """The exit of a process (worker and incarnation) of a launch and restart, within some time."""
        ends = [each for each in self._left if (each.worker_id, each.incarnation) == process]
        near = [each for each in ends if from_s <= each.at_s <= until_s]
        processes = [self._process_of[each] for each in near]
        groups = [group if each is None else (each.launch, each.restart) for each in processes]
        return self.take([each for each, own in zip(near, groups, strict=True) if own == group][:1])

    def take_between(self, from_s: float, to_s: float) -> list[Exit]:
        """Those within some time."""
        return self.take(each for each in self._left if from_s <= each.at_s <= to_s)

    def take_last(self, group: Sequence[ProcessRecord], stopped_s: float, until_s: float) -> list[Exit]:
        """Those of the processes with which a group ended: no later process of the same worker has made a step."""
        last: list[ProcessRecord] = []
        done: set[int | None] = set()
        for each in sorted(group, key=lambda each: -each.incarnation):
            if each.worker_id is not None and each.worker_id not in done:
                last.append(each)
            if any(span.step is not None for span in each.spans):
                done.add(each.worker_id)
        near_s = stopped_s - _BEFORE_S, max(stopped_s, until_s)
        own = [(each, self._process_of[each]) for each in self._left]
        return self.take(
            each
            for each, process in own
            if any(process is one for one in last) or (process is None and near_s[0] <= each.at_s <= near_s[1])
        )


def incidents_of(run: Run, timelines: Sequence[Timeline]) -> tuple[list[Incident], int]:
    """All incidents, in the order of time; and how many failures they are, as several ranks may fail together."""
    hosts = {(each.launch, each.restart, each.worker_id, each.incarnation): each.host for each in run.workers}
    ranks = {each.worker_id: each.rank for each in timelines}
    exits = Exits(run)
    num_exits = len(exits.left)
    found = _repairs(run, exits, ranks, hosts)
    found += _restarts(run, exits, ranks)
    found += _others(run, exits, ranks)
    num_without = sum(not ends and each.kind != "resize" for each, ends in found)
    incidents = sorted((each for each, _ in found), key=lambda each: each.at_s)
    return _with_redone(_with_new_nodes(incidents, run, timelines), timelines), num_exits + num_without


def failed_exits(run: Run) -> list[Exit]:
    """Exits of processes that failed; those that their agents ended, that were not needed, or gave up, did not.

    A process gives up because of a failure, which is known from its event.
    """
    return [each for each in run.exits if each.code not in (0, NOT_NEEDED, GAVE_UP) and not each.is_requested]


def _repairs(
    run: Run, exits: Exits, ranks: Mapping[int, int], hosts: Mapping[Any, str]
) -> list[tuple[Incident, list[Exit]]]:
    """Repairs in the processes that lived: each is reported by every rank, and taken from the first one that lived."""
    groups: defaultdict[tuple[int, int, int], list[tuple[bool, int, RunEvent, float]]] = defaultdict(list)
    for process in run.workers:
        for event in process.events:
            generation = _number(event.details, "generation", None)
            if event.name in _REPAIRS and isinstance(generation, int) and not _is_second_half(event):
                is_new = process.began_s > event.at_s  # it replaces the one that was lost
                groups[process.launch, process.restart, generation].append(
                    (is_new, event.worker_id, event, process.began_s)
                )
    reported: list[tuple[RunEvent, float, tuple[int, int], list[Exit]]] = []
    for (launch, restart, _), events in groups.items():
        is_new, _, event, began_s = min(events, key=lambda each: each[:2])
        own: list[Exit] = []
        if event.details.get("kind") != "exception":  # which leaves its process alive
            lost = _number(event.details, "worker_id", -1), _number(event.details, "incarnation", 0)
            from_s, until_s = event.at_s - _BEFORE_S, event.at_s + event.duration_s
            own = exits.take_of(lost, (launch, restart), from_s, until_s)
        reported.append((event, began_s - event.at_s if is_new else math.inf, (launch, restart), own))
    found: list[tuple[Incident, list[Exit]]] = []
    for event, until_new_s, group, own in sorted(reported, key=lambda each: each[0].at_s):  # then what is left
        is_resize = event.details.get("kind") == "resize"
        until_s = event.at_s + event.duration_s
        others = [] if is_resize else exits.take_between(event.at_s - _TOGETHER_S, until_s)
        incident = _repair(event, group, others, ranks, hosts)
        late_s = max(0.0, incident.detect_s - until_new_s)  # noticed before the new process had started
        incident = replace(incident, detect_s=incident.detect_s - late_s, assemble_s=incident.assemble_s + late_s)
        found.append((incident, own + others))
    return found


def _is_second_half(event: RunEvent) -> bool:
    """Whether this is how all ranks re-enter their loops after a return to a snapshot, which was one repair before."""
    step = event.details.get("step")
    return (
        isinstance(step, int)
        and abs(step) < _GREATEST
        and str(event.details.get("cause", "")).endswith(cause_of_return(step))
    )


def _repair(
    event: RunEvent,
    group: tuple[int, int],
    others: Sequence[Exit],
    ranks: Mapping[int, int],
    hosts: Mapping[Any, str],
) -> Incident:
    details = event.details
    worker_id, incarnation = _number(details, "worker_id", -1), _number(details, "incarnation", 0)
    noticed_s, assembled_s, restored_s = (
        max(0.0, float(_number(details, name, 0))) for name in ("noticed_s", "assembled_s", "restored_s")
    )
    cause = _cause(details)
    if worker_id < 0 and others:  # a peer has noticed it first, as a broken connection: what broke is the cause
        first, *others = others
        worker_id, incarnation, cause = first.worker_id, first.incarnation, first.cause
    causes = [cause] + [f"rank {ranks.get(each.worker_id, each.worker_id)}: {each.cause}" for each in others]
    steps_lost = _number(details, "steps_lost", None)
    return Incident(
        at_s=event.at_s,
        kind="resize" if details.get("kind") == "resize" else "failure",
        cause="; ".join(causes),
        rank=ranks.get(worker_id),
        host=hosts.get((*group, worker_id, incarnation), ""),
        step=int(_number(details, "step", 0)),
        steps_lost=None if steps_lost is None else int(steps_lost),
        generation=int(_number(details, "generation", 0)),
        level=event.name.removeprefix("recovery."),
        detect_s=noticed_s,
        assemble_s=assembled_s,
        restore_s=restored_s,
        redone_s=0.0,
        total_s=event.duration_s,
    )


def _restarts(run: Run, exits: Exits, ranks: Mapping[int, int]) -> list[tuple[Incident, list[Exit]]]:
    """Restarts of all processes, and launches of the job after the first."""
    groups: defaultdict[tuple[int, int], list[ProcessRecord]] = defaultdict(list)
    for each in run.workers:
        groups[each.launch, each.restart].append(each)
    found: list[tuple[Incident, list[Exit]]] = []
    for (_, former), (key, processes) in itertools.pairwise(sorted(groups.items())):
        began_s = min(each.began_s for each in processes)
        stopped_s = min(began_s, max(each.ended_s for each in former))
        ends = exits.take_last(former, stopped_s, began_s)
        at_s, cause, worker_id, kind = _first_cause(former, ends, stopped_s)
        if kind == "restart":
            others = [each for each in ends[1:] if worker_id == ends[0].worker_id]
            cause += "".join(f"; rank {ranks.get(each.worker_id, each.worker_id)}: {each.cause}" for each in others)
        begun = [span.begin_s for each in processes for span in each.spans if span.step is not None]
        first = _first_step(processes)
        going_s = min(begun, default=max(each.ended_s for each in processes))
        incident = Incident(
            at_s=at_s,
            kind=kind,
            cause=cause if key[1] > 0 else f"{cause}; the job was launched again",
            rank=None if worker_id is None else ranks.get(worker_id),
            host=exits.host(ends[0]) if ends and worker_id == ends[0].worker_id else "",
            step=_last_step(former) if first is None else first[1] - 1,
            steps_lost=None if first is None else _num_lost(former, first),
            generation=None,
            level="checkpoint",
            detect_s=0.0,
            assemble_s=max(0.0, began_s - at_s),
            restore_s=max(0.0, going_s - began_s),
            redone_s=0.0,
            total_s=max(0.0, going_s - at_s),
        )
        found.append((incident, ends))
    return found


def _first_step(processes: Iterable[ProcessRecord]) -> tuple[int, int] | None:
    """Entry and number of the first step that some processes have committed."""
    firsts = [
        next(((span.step.entry, span.step.number) for span in each.spans if span.step is not None), None)
        for each in processes
    ]
    return min((each for each in firsts if each is not None), default=None)


def _last_step(processes: Iterable[ProcessRecord]) -> int:
    """Number of the last step that some processes have committed; 0 if there is none."""
    steps = [(span.step.entry, span.step.number) for each in processes for span in each.spans if span.step is not None]
    return max(steps, default=(0, 0))[1]


def _num_lost(former: Iterable[ProcessRecord], first: tuple[int, int]) -> int:
    """Number of steps that were there when the processes stopped, and were lost as the next ones began before them."""
    held: dict[int, list[tuple[int, int]]] = {}
    last_s: dict[int, float] = {}
    for each in sorted(former, key=lambda each: each.incarnation):
        worker_id = each.worker_id or 0
        for span in each.spans:
            if span.step is not None:
                key = span.step.entry, span.step.number
                own = held.get(worker_id, [])
                if own and own[-1] >= key:  # it has gone back to a snapshot before
                    own = [one for one in own if one < key]
                held[worker_id] = own
                own.append(key)
                last_s[worker_id] = span.end_s
    if not held:
        return 0
    return sum(each >= first for each in held[max(last_s, key=lambda each: last_s[each])])


def _first_cause(
    former: Sequence[ProcessRecord], ends: Sequence[Exit], stopped_s: float
) -> tuple[float, str, int | None, str]:
    """Why the processes of a group ended before all started again: time, cause, worker, and kind of incident."""
    events = [event for each in former for event in each.events if event.name in _ENDINGS]
    event = min(events, key=lambda each: each.at_s, default=None)
    if event is not None and event.name == _RESHARD:
        return event.at_s, _cause(event.details), None, "resize"
    if ends and (event is None or ends[0].at_s <= event.at_s):
        return ends[0].at_s, ends[0].cause, ends[0].worker_id, "restart"
    if event is not None:
        return event.at_s, _cause(event.details), event.worker_id, "restart"
    return stopped_s, "all processes ended, and no ledger says why", None, "restart"


def _others(run: Run, exits: Exits, ranks: Mapping[int, int]) -> list[tuple[Incident, list[Exit]]]:
    """Failed processes that no repair and no restart tells of, and that with which the run gave up."""
    found: list[tuple[Incident, list[Exit]]] = []
    for each in exits.left:
        found.append((_unrepaired(run, each.at_s, each.cause, ranks.get(each.worker_id), exits.host(each)), [each]))
    newest = max(((each.launch, each.restart) for each in run.workers), default=(0, 0))
    stops = [
        event
        for each in run.workers
        if (each.launch, each.restart) == newest
        for event in each.events
        if event.name == _STOP
    ]
    if stops:
        first = min(stops, key=lambda each: each.at_s)
        gave_up = [ends for each, ends in found if abs(each.at_s - first.at_s) <= _BEFORE_S]
        if not gave_up:
            found.append((_unrepaired(run, first.at_s, _cause(first.details), ranks.get(first.worker_id), ""), []))
    return found


def _unrepaired(run: Run, at_s: float, cause: str, rank: int | None, host: str) -> Incident:
    return Incident(
        at_s=at_s,
        kind="failure",
        cause=cause,
        rank=rank,
        host=host,
        step=_steps_until(run, at_s),
        steps_lost=None,
        generation=None,
        level="none",
        detect_s=0.0,
        assemble_s=0.0,
        restore_s=0.0,
        redone_s=0.0,
        total_s=0.0,
    )


def _steps_until(run: Run, at_s: float) -> int:
    """Number of the step that was the last one to be committed before a time."""
    spans = [span for each in run.workers for span in each.spans if span.step is not None and span.end_s <= at_s]
    last = max(spans, key=lambda each: each.end_s, default=None)
    return 0 if last is None or last.step is None else last.step.number


def _with_redone(incidents: Sequence[Incident], timelines: Sequence[Timeline]) -> list[Incident]:
    """Each incident with the work that was lost by it: that which precedes its end, and follows the one before."""
    redone, present = [0.0] * len(incidents), RanksPresent(timelines)
    ends = [each.at_s + each.total_s for each in incidents]
    for timeline in timelines:
        for span in timeline.spans:
            lost_s = span.seconds.get(TimeCategory.REDONE, 0.0)
            if lost_s <= 0:
                continue
            number = None if span.step is None or span.is_counted else span.step.number
            after = [index for index, end_s in enumerate(ends) if span.end_s <= end_s + _CLOCK_S]
            if number is not None:  # a committed step is lost by the first incident that goes back to before it
                after = [index for index in after if incidents[index].step < number]
            during = [index for index, end_s in enumerate(ends) if span.begin_s < end_s - _CLOCK_S]
            if after or during:
                redone[after[0] if after else during[-1]] += present.mean_of(span, lost_s)
    return [replace(each, redone_s=lost_s) for each, lost_s in zip(incidents, redone, strict=True)]


def _with_new_nodes(incidents: Sequence[Incident], run: Run, timelines: Sequence[Timeline]) -> list[Incident]:
    """Each failure with how long it took until a node was there in place of the one that was lost with it.

    The next process of a rank that was lost runs under an agent that began after the loss. If all agents did, the job
    was launched again instead.
    """
    back_s: defaultdict[int, float] = defaultdict(lambda: -math.inf)
    for timeline in timelines:
        pairs = zip(itertools.pairwise(timeline.processes), timeline.endings, strict=False)
        for (lost, new), ending in pairs:
            is_lost = ending.code != 0 and not ending.is_requested if ending is not None else not lost.has_ended
            agents = [each for each in run.agents if each.host == new.host and each.began_s <= new.began_s]
            began_s = max((each.began_s for each in agents), default=-math.inf)
            if not is_lost or began_s <= lost.ended_s or not _has_lived_on(run.agents, lost.ended_s, began_s):
                continue
            for index, each in enumerate(incidents):
                noticed_s = each.at_s + each.detect_s
                if each.kind != "resize" and noticed_s >= lost.ended_s - _TOGETHER_S and each.at_s <= began_s:
                    back_s[index] = max(back_s[index], began_s - noticed_s)
                    break
    return [
        replace(each, node_back_s=max(0.0, back_s[index])) if index in back_s else each
        for index, each in enumerate(incidents)
    ]


def _has_lived_on(agents: Iterable[ProcessRecord], from_s: float, until_s: float) -> bool:
    """Whether an agent was there all the time."""
    return any(each.began_s <= from_s and _last_sign_s(each) >= until_s for each in agents)


def _last_sign_s(agent: ProcessRecord) -> float:
    return max([agent.ended_s, *(each.at_s for each in agent.exits)])


def verdict_of(incidents: Iterable[Incident], timelines: Iterable[Timeline], *, is_complete: bool) -> Verdict:
    """Whether to start the run again: not if the same failure has happened twice in a row, with no new step between."""
    if is_complete:
        return Verdict(action="continue", why="the program of the run ended normally")
    failures = [each for each in incidents if each.kind != "resize"]
    if len(failures) >= 2:
        before, last = failures[-2:]
        steps = sorted(
            (span.end_s, span.step.entry, span.step.number)
            for each in timelines
            for span in each.spans
            if span.step is not None
        )
        reached = [max((key for end_s, *key in steps if end_s <= each.at_s), default=[0, 0]) for each in (before, last)]
        if _what(before) == _what(last) and reached[0] == reached[1]:
            return Verdict(
                action="stop",
                why=f"the run has failed twice in a row after step {reached[1][1]} with the same cause, and no new "
                f"step was committed in between: {last.cause}",
            )
    why = f"the last failure ({failures[-1].cause}) was not the same as one before" if failures else "it was cut off"
    return Verdict(action="restart", why=why)


def _what(incident: Incident) -> tuple[int | None, str]:
    return incident.rank, incident.cause.removesuffix("; the job was launched again")


def _cause(details: Mapping[str, Any]) -> str:
    cause = str(details.get("cause", "unknown"))
    _, separator, after = cause.partition("): ")  # `FailureRecord` names who reports it first
    return after if separator and details.get("kind") is not None else cause


def _number(details: Mapping[str, Any], name: str, default: Any) -> Any:
    """A number of an event, if it is a possible one."""
    value = details.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) >= _GREATEST:
        return default
    return value
