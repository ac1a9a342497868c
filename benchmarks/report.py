"""What people and programs read: a table on the screen, every sample in a JSON file."""

import importlib.util
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Comparison, Run
from benchmarks.stats import Ratio, paired_ratio, spread, verdict

RESULTS = Path(__file__).parent / "results"
COLUMNS = ("contender", "step ms", "quartiles", "time ratio", "95 % interval", "cpu ratio", "95 % interval")


def ratio_to_reference(comparison: Comparison, run: Run, measure: str = "step_s", *, again: Run | None = None) -> Ratio:
    """Paired ratio of a run's step times, or of one of its counters, to the first run's, and to those of `again`."""

    def of(run: Run) -> list[float]:
        return run.step_s if measure == "step_s" else run.measures[measure]

    more = None if again is None else of(again)
    return paired_ratio(of(run), of(comparison.runs[0]), comparison.schedule.rounds_per_start, again=more)


def ratio_line(comparison: Comparison, run: Run, limit: float | None = None, *, again: Run | None = None) -> str:
    """What a run takes more than the reference, in percent, by the clock and by processor time; and the verdict.

    Also in milliseconds of a step: the percentage of the reference's median.
    """
    parts = []
    for measure, label in (("step_s", "step time"), ("cpu_s", "processor time")):
        ratio = ratio_to_reference(comparison, run, measure, again=again)
        change, low, high = (100 * (value - 1) for value in (ratio.median, ratio.low, ratio.high))
        judged = "" if limit is None else f", limit {100 * (limit - 1):+.0f} %: {verdict(ratio, limit)}"
        own = comparison.runs[0].step_s if measure == "step_s" else comparison.runs[0].measures[measure]
        ms = spread(own).median * change * 10
        parts.append(f"{label} {change:+.2f} % ({low:+.2f} .. {high:+.2f}), {ms:+.2f} ms{judged}")
    return f"{run.name}: {'; '.join(parts)}"


def rows(comparison: Comparison) -> list[list[str]]:
    """One row a contender; the reference has no ratio but 1."""
    table = []
    for run in comparison.runs:
        time_ms = spread([1000 * seconds for seconds in run.step_s])
        line = [run.name, f"{time_ms.median:.1f}", f"{time_ms.low:.1f} .. {time_ms.high:.1f}"]
        if run is comparison.runs[0]:
            line += ["reference", "", "reference", ""]
        else:
            for measure in ("step_s", "cpu_s"):
                ratio = ratio_to_reference(comparison, run, measure)
                line += [f"{ratio.median:.3f}", f"{ratio.low:.3f} .. {ratio.high:.3f}"]
        table.append(line)
    return table


def print_comparison(comparison: Comparison) -> None:
    """Print step times and paired ratios of all contenders."""
    count = comparison.schedule
    title = f"{comparison.title} ({count.rounds} rounds of {count.steps} steps, {len(count.rounds_per_start)} starts)"
    print_table(title, COLUMNS, rows(comparison))


def print_table(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print a table, with rich where it is installed."""
    if importlib.util.find_spec("rich") is None:
        print(f"\n{plain_table(title, columns, lines)}")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for line in lines:
        table.add_row(*line)
    # Off a terminal rich assumes 80 columns and cuts cells; a file has all the room it needs.
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print()
    console.print(table)


def plain_table(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table of aligned text, first column left, others right."""
    widths = [max(len(line[index]) for line in [columns, *lines]) for index in range(len(columns))]

    def aligned(line: Sequence[str]) -> str:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        return "  ".join([line[0].ljust(widths[0]), *cells[1:]]).rstrip()

    return "\n".join([title, aligned(columns), "  ".join("-" * width for width in widths), *map(aligned, lines)])


def write_results(
    name: str, comparisons: Sequence[Comparison], path: Path | None = None, findings: dict[str, Any] | None = None
) -> Path:
    """Write every sample with the facts of the machine and the command that made them; the path."""
    path = path or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "benchmark": name,
        "command": shlex.join(["python", *sys.argv]),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(),
        "findings": findings or {},
        "comparisons": [as_document(comparison) for comparison in comparisons],
    }
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(document, indent=1, default=str))
    unfinished.replace(path)
    print(f"samples: {path}")
    return path


def as_document(comparison: Comparison) -> dict[str, Any]:
    """A comparison with its summary, in JSON's types."""

    def summary(run: Run) -> dict[str, Any]:
        return {
            "step_s": asdict(spread(run.step_s)),
            "step_s_ratio": asdict(ratio_to_reference(comparison, run)),
            **{name: asdict(spread(samples)) for name, samples in run.measures.items()},
        }

    return {
        "title": comparison.title,
        "schedule": asdict(comparison.schedule),
        "reference": comparison.runs[0].name,
        "runs": [{**asdict(run), "summary": summary(run)} for run in comparison.runs],
    }


def machine_facts() -> dict[str, Any]:
    """What somebody needs to know before comparing figures with another machine's."""
    return {
        "platform": platform.platform(),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "accelerators": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def processor_name() -> str:
    """The kernel's name for the first core, or the architecture's."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
