"""From the events of a run to seconds: pure.

A *commit* is an event `committed` with `step`, counted from 0, and `world`, the number of ranks that took part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a fault cost; seconds count from the kill, and None is what never happened."""

    step_s: float | None
    """Median time of a step before the fault."""
    first_s: float | None = None
    """Until a process has committed a step again."""
    full_s: float | None = None
    """Until all ranks have committed one step together again."""
    regain_s: float | None = None
    """Until every rank has committed the step that was interrupted, or holds its outcome and has committed a later one.
    Repeated steps are in this."""
    steps_lost: int = 0
    """Committed steps that had to be computed again."""
    steps_reduced: int = 0
    """Steps that were committed without some of the ranks, and so without their samples."""
    stages: Mapping[str, float] = field(default_factory=dict)
    """Parts of `first_s`, where the program tells them."""
    milestones: Mapping[str, float] = field(default_factory=dict)
    """When the last process first told each event after the fault."""
    fingerprints: tuple[str, ...] = ()
    """Of what was trained, one a process that finished."""
    losses: tuple[float, ...] = ()
    """Of the last step, one a rank."""
    num_done: int = 0
    """Processes that came to the end of the program."""


def outcome_of(events: Sequence[Event], world_size: int) -> Outcome:
    """Read a run.

    Args:
        events: all of them, by time.
        world_size: ranks of the healthy job.
    """
    done = [each for each in events if each["event"] == "done"]
    fault = next((each for each in events if each["event"] == "fault"), None)
    end = {
        "fingerprints": tuple(sorted({each["fingerprint"] for each in done})),
        "losses": tuple(each["loss"] for each in sorted(done, key=lambda each: each["rank"])),
        "num_done": len(done),
    }
    if fault is None:
        return Outcome(step_s=step_time(events), **end)
    kill_s, step = fault["at_s"], fault["step"]
    before = [each for each in events if each["at_s"] <= kill_s]
    after = commits_after(events, fault)
    if not after:
        return Outcome(step_s=step_time(before), **end)
    return Outcome(
        step_s=step_time(before),
        first_s=after[0]["at_s"] - kill_s,
        full_s=since(kill_s, full_at(after, world_size)),
        regain_s=since(kill_s, regained_at(after, step, world_size)),
        steps_lost=max(0, step - min(each["step"] for each in after)),
        steps_reduced=len({each["step"] for each in after if each["world"] < world_size}),
        stages=stages_of(events, kill_s, after[0]["at_s"]),
        milestones=milestones_of(events, kill_s),
        **end,
    )


def commits_after(events: Sequence[Event], fault: Event) -> list[Event]:
    """Commits that belong to the recovery: those after the kill, but not a survivor's end of the step before it."""
    last: dict[int, int] = {}
    found = []
    for each in events:
        if each["event"] != "committed":
            continue
        is_late = each["step"] == fault["step"] - 1 and last.get(each["pid"]) == each["step"] - 1
        last[each["pid"]] = each["step"]
        if each["at_s"] > fault["at_s"] and not is_late:
            found.append(each)
    return found


def full_at(commits: Sequence[Event], world_size: int) -> float | None:
    """Time at which the last rank has committed the first step that all ranks committed together."""
    ranks: dict[int, set[int]] = {}
    for each in commits:
        if each["world"] == world_size:
            ranks.setdefault(each["step"], set()).add(each["rank"])
            if len(ranks[each["step"]]) == world_size:
                return each["at_s"]
    return None


def regained_at(commits: Sequence[Event], step: int, world_size: int) -> float | None:
    """Time at which the last rank has committed `step` or a later one."""
    first: dict[int, float] = {}
    for each in commits:
        if each["step"] >= step:
            first.setdefault(each["rank"], each["at_s"])
    return max(first.values()) if len(first) == world_size else None


def stages_of(events: Sequence[Event], kill_s: float, first_s: float) -> dict[str, float]:
    """How a survivor that repaired itself spent its time, from the event `repaired`."""
    for each in events:
        if each["event"] == "repaired" and not each["is_joining"]:
            stages = {
                "detected": each["incident_s"] - kill_s,
                "aborted": each["noticed_s"],
                "assembled": each["assembled_s"],
                "restored": each["restored_s"],
            }
            return stages | {"first step": first_s - kill_s - sum(stages.values())}
    return {}


def milestones_of(events: Sequence[Event], kill_s: float) -> dict[str, float]:
    """For each event told after the kill: when the last process told it first, in the order in which they came."""
    first: dict[tuple[str, int], float] = {}
    for each in events:
        if each["at_s"] > kill_s and each["event"] != "done":
            first.setdefault((each["event"], each["pid"]), each["at_s"] - kill_s)
    last: dict[str, float] = {}
    for (name, _), seconds in first.items():
        last[name] = max(seconds, last.get(name, 0.0))
    return dict(sorted(last.items(), key=lambda each: each[1]))


def step_time(events: Sequence[Event], settle: int = 3) -> float | None:
    """Median time between two successive commits of a process, after its first few."""
    commits: dict[int, list[Event]] = {}
    for each in events:
        if each["event"] == "committed":
            commits.setdefault(each["pid"], []).append(each)
    gaps = [
        later["at_s"] - earlier["at_s"]
        for own in commits.values()
        for earlier, later in zip(own[settle:], own[settle + 1 :], strict=False)
        if later["step"] == earlier["step"] + 1
    ]
    return median(gaps) if gaps else None


def since(kill_s: float, at_s: float | None) -> float | None:
    """Seconds from the kill, or None."""
    return None if at_s is None else at_s - kill_s


def medians(outcomes: Sequence[Outcome]) -> dict[str, float | None]:
    """Median of each figure over trials; None where a trial has none."""
    names = ("step_s", "first_s", "full_s", "regain_s", "steps_lost", "steps_reduced")
    columns = {name: [getattr(each, name) for each in outcomes] for name in names}
    return {name: None if not values or None in values else median(values) for name, values in columns.items()}


def median_milestones(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Median of each milestone over trials that tell it, and of what ends a recovery."""
    names = list(dict.fromkeys(name for each in outcomes for name in each.milestones))
    found = {name: median(each.milestones[name] for each in outcomes if name in each.milestones) for name in names}
    ends = medians(outcomes)
    return found | {name: ends[name] for name in ("first_s", "regain_s") if ends[name] is not None}


def median_stages(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Median of each stage over trials that tell it."""
    names = list(dict.fromkeys(name for each in outcomes for name in each.stages))
    return {name: median(each.stages[name] for each in outcomes if name in each.stages) for name in names}


def speed_up(regain_s: float | None, ours_s: float | None) -> float | None:
    """How many times longer somebody else's regain is than ours."""
    return None if regain_s is None or not ours_s else regain_s / ours_s
