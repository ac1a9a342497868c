"""The report of a run as a picture (PNG), drawn by matplotlib: timelines, where the time went, loss and goodput."""

from pathlib import Path
from typing import Any

from hyperpod_plugins.errors import MissingExtraError
from hyperpod_plugins.ledger import TimeCategory
from hyperpod_plugins.report.run_report import RunReport
from hyperpod_plugins.report.text import duration

COLORS = {
    TimeCategory.STEP: "#2f7f79",
    TimeCategory.STRAGGLER_WAIT: "#8cc5bd",
    TimeCategory.DATA_WAIT: "#7a8fb5",
    TimeCategory.EVALUATION: "#4d6ea8",
    TimeCategory.CHECKPOINT_SAVE: "#9b7fb8",
    TimeCategory.CHECKPOINT_RESTORE: "#6f4f93",
    TimeCategory.SNAPSHOT: "#c9b6dc",
    TimeCategory.DETECT: "#8c1c13",
    TimeCategory.ASSEMBLE: "#d1495b",
    TimeCategory.RESTORE: "#ed8936",
    TimeCategory.REDONE: "#f6c344",
    TimeCategory.RESIZE: "#a8653a",
    TimeCategory.CAPACITY_WAIT: "#5c4033",
    TimeCategory.SETUP: "#b9bfc7",
    TimeCategory.OTHER: "#dfe3e8",
}
"""A colour for each category: what counts is calm, what failures cost is warm."""
_MAX_LANES = 64


def draw_report(report: RunReport, path: Path) -> None:
    """Draw the report and write it as PNG.

    Raises:
        MissingExtraError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", "report", "a report as PNG") from error
    lanes = report.ranks[:_MAX_LANES]
    figure = Figure(figsize=(12, 5.5 + 0.28 * len(lanes)), layout="constrained")
    FigureCanvasAgg(figure)
    heights = [max(1.2, 0.28 * len(lanes)), 0.7, 1.6, 1.2]
    timeline, shares, loss, goodput = figure.subplots(4, 1, height_ratios=heights)
    figure.suptitle(_title(report), fontsize=11, x=0.01, ha="left")
    _draw_timeline(timeline, report, lanes)
    _draw_shares(shares, report)
    _draw_steps(loss, goodput, report)
    figure.savefig(path, dpi=130, format="png")


def _title(report: RunReport) -> str:
    headline = report.headline
    return (
        f"goodput {headline.goodput:.1%}   ETTR {headline.ettr:.1%}   {headline.num_failures} failures that cost "
        f"{duration(headline.failures_cost_s)}   {headline.steps_committed} steps in {duration(headline.wall_s)}"
    )


def _draw_timeline(axes: Any, report: RunReport, lanes: Any) -> None:
    for lane, rank in enumerate(lanes):
        for category in TimeCategory:
            parts = [(at_s - report.began_at_s, long_s) for at_s, long_s, name in rank.spans if name == category]
            if parts:
                axes.broken_barh(parts, (lane - 0.42, 0.84), facecolors=COLORS[category], linewidth=0)
    for incident in report.incidents:
        axes.axvline(incident.at_s - report.began_at_s, color="#30343a", linewidth=0.7, linestyle=(0, (3, 2)))
    axes.set_yticks(range(len(lanes)), [f"rank {each.rank}" for each in lanes], fontsize=8)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(0, max(report.headline.wall_s, 1e-9))
    axes.set_title(
        "where each rank's time went, over seconds since the start; incidents dashed", fontsize=9, loc="left"
    )
    _plain(axes)


def _draw_shares(axes: Any, report: RunReport) -> None:
    left = 0.0
    for each in report.categories:
        if each.share > 0:
            color = COLORS[TimeCategory(each.category)]
            label = f"{each.label} {each.share:.1%}"
            axes.barh(0, each.share, left=left, color=color, label=label, height=0.6)
            left += each.share
    axes.set_xlim(0, 1)
    axes.axis("off")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0.05), ncols=5, fontsize=8, frameon=False)


def _draw_steps(loss: Any, goodput: Any, report: RunReport) -> None:
    steps = report.steps
    times = [each - report.began_at_s for each in steps.at_s]
    known = [(at_s, value) for at_s, value in zip(times, steps.loss, strict=True) if value is not None]
    loss.plot([at_s for at_s, _ in known], [value for _, value in known], color="#1f4e79", linewidth=1.1)
    loss.set_title("loss", fontsize=9, loc="left")
    goodput.plot(times, [100 * each for each in steps.goodput], color=COLORS[TimeCategory.STEP], linewidth=1.1)
    goodput.set_ylim(0, 100)
    goodput.set_title("goodput over the last steps, in percent", fontsize=9, loc="left")
    for axes in (loss, goodput):
        axes.set_xlim(0, max(report.headline.wall_s, 1e-9))
        for incident in report.incidents:
            axes.axvline(incident.at_s - report.began_at_s, color="#d1495b", linewidth=0.7, linestyle=(0, (3, 2)))
        _plain(axes)


def _plain(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=8)
