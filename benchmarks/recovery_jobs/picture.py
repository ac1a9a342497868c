"""The timelines side by side: each commit of each rank a tick, in seconds since the kill."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from benchmarks.recovery_jobs.timeline import commits_after, outcome_of

DOWN, REDONE, REDUCED, HEALTHY = "#f2c4c0", "#f7e3b5", "#d9d2ec", "#cfe8d5"
TICK, REPEATED_TICK = "#1f5c3a", "#b3801d"
BEFORE_S, AFTER_S = 0.6, 0.6


def draw(timelines: Mapping[str, Sequence[Mapping[str, Any]]], world_size: int, path: Path, subtitle: str) -> None:
    """Draw one lane a contender, and write PNG and SVG.

    Args:
        timelines: events of one run of each contender, by title.
        world_size: ranks of the healthy job.
        path: without its ending.
        subtitle: a line on the machine and its load.
    """
    outcomes = {name: outcome_of(events, world_size) for name, events in timelines.items()}
    end_s = max((each.regain_s or each.first_s or 0.0) for each in outcomes.values()) + AFTER_S
    figure, axes = pyplot.subplots(figsize=(11, 1.5 + 0.75 * len(timelines)), layout="constrained")
    for lane, (name, events) in enumerate(timelines.items()):
        fault = next(each for each in events if each["event"] == "fault")
        draw_lane(axes, -lane, events, fault, outcomes[name], end_s)
        regain_s = outcomes[name].regain_s
        label = "the whole world never came back" if regain_s is None else f"{regain_s:.2f} s"
        axes.annotate(
            label,
            (regain_s or end_s, -lane + 0.4),
            xytext=(3, 0),
            textcoords="offset points",
            fontsize=9,
            fontweight="bold",
            va="bottom",
            ha="left" if (regain_s or end_s) < end_s - 0.8 else "right",
        )
    axes.axvline(0, color="#a02020", linewidth=1.2)
    axes.set_yticks([-lane for lane in range(len(timelines))], list(timelines))
    axes.set_xlim(-BEFORE_S, end_s)
    axes.set_ylim(-len(timelines) + 0.4, 0.75)
    axes.set_xlabel("seconds since SIGKILL of rank 1, in the middle of a step")
    axes.set_title(f"Until all ranks have committed the interrupted step\n{subtitle}", fontsize=10, loc="left")
    legend = ((HEALTHY, "healthy"), (DOWN, "no step is committed"), (REDONE, "lost steps are computed again"))
    legend += ((REDUCED, "steps without the lost rank"),)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color, _ in legend]
    figure.legend(handles, [text for _, text in legend], loc="outside lower center", fontsize=8, ncols=4, frameon=False)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    for ending in ("png", "svg"):
        figure.savefig(path.with_suffix(f".{ending}"), dpi=150)
    pyplot.close(figure)


def draw_lane(axes: Any, height: float, events: Sequence[Any], fault: Any, outcome: Any, end_s: float) -> None:
    """The phases of one run as bands, and the commits of its ranks as ticks in two rows."""
    first_s = outcome.first_s if outcome.first_s is not None else end_s
    regain_s = outcome.regain_s if outcome.regain_s is not None else end_s
    between = REDONE if outcome.steps_lost else REDUCED if outcome.steps_reduced else HEALTHY
    last_s = max(each["at_s"] for each in events if each["event"] == "committed") - fault["at_s"]
    end_s = max(regain_s, min(end_s, last_s))
    bands = ((-BEFORE_S, 0, HEALTHY), (0, first_s, DOWN), (first_s, regain_s, between), (regain_s, end_s, HEALTHY))
    for begin, end, color in bands:
        axes.barh(height, end - begin, left=begin, height=0.7, color=color, linewidth=0)
    after = {id(each) for each in commits_after(events, fault)}
    for each in events:
        if each["event"] == "committed":
            is_repeated = id(each) in after and each["step"] < fault["step"]
            middle = height + 0.17 - 0.34 * each["rank"]
            seconds = each["at_s"] - fault["at_s"]
            if -BEFORE_S <= seconds <= end_s:
                color = REPEATED_TICK if is_repeated else TICK
                axes.plot([seconds, seconds], [middle - 0.12, middle + 0.12], color=color, linewidth=1.3)
