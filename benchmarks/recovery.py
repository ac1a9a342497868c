"""What a SIGKILL in the middle of a step costs: our peers and us, the same model and data, in one invocation.

    python -m benchmarks.recovery_jobs.peers     # once: the peers' packages, in an environment of their own
    python benchmarks/recovery.py --trials 3

Two ranks train a transformer of 5.3 million parameters. Rank 1 is killed at step 125, 25 steps after the last
checkpoint. Trials interleave the contenders. Seconds count from the kill:

    first      until a process has committed a step again
    full       until all ranks have committed one step together again
    regain     until every rank has committed the interrupted step, or holds its outcome; repeated steps are in it
    lost       committed steps that had to be computed again
    reduced    steps that were committed without the lost rank's samples
    bitwise    whether parameters and optimizer state end with the bits of the undisturbed run of the same program

Then the same Trainer runs with recovery on and off, and nothing fails: what the readiness costs.
"""

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import harness, report
from benchmarks.recovery_jobs import overhead, peers
from benchmarks.recovery_jobs.events import Setting, read_events
from benchmarks.recovery_jobs.job import JobFailed, run_job
from benchmarks.recovery_jobs.timeline import Outcome, median_milestones, median_stages, medians, outcome_of, speed_up
from benchmarks.recovery_jobs.ways import WAYS, WORLD_SIZE, Way
from benchmarks.stats import rotated

COLUMNS = ("contender", "step ms", "first s", "full s", "regain s", "against us", "lost", "reduced", "bitwise", "load")
MILESTONES = {
    "process_started": "process",
    "imported": "imports",
    "connected": "connected",
    "restored": "restored",
    "ready": "ready",
    "first_s": "first step",
    "regain_s": "regained",
}
"""What is told of a process that starts after the kill, and the ends of a recovery: name here, column there."""


@dataclass(slots=True, kw_only=True)
class Record:
    """What was seen of one contender."""

    way: Way
    trouble: str = ""
    """Why it has no figures."""
    undisturbed: Outcome | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    """Load average (1 min) when each trial began."""
    events: list[list[dict[str, Any]]] = field(default_factory=list)

    @property
    def is_bitwise(self) -> bool | None:
        """Whether every rank of every trial ended with the bits of the undisturbed run; None if that is not known."""
        if self.undisturbed is None or not self.outcomes:
            return None
        return all(each.fingerprints == self.undisturbed.fingerprints for each in self.outcomes)


def run_once(way: Way, setting: Setting, timeout_s: float) -> list[dict[str, Any]]:
    """One job of a contender; its events."""
    with tempfile.TemporaryDirectory(prefix="recovery-", ignore_cleanup_errors=True) as folder:
        own = Setting(**{**asdict(setting), "folder": folder})
        run_job(way.commands(peers.PYTHON), own, timeout_s, expected_done=WORLD_SIZE)
        return read_events(Path(folder))


def run_all(records: Sequence[Record], setting: Setting, trials: int, timeout_s: float) -> None:
    """The undisturbed run of each program first, then the trials, in turn."""
    calm = Setting(**{**asdict(setting), "fault_step": -1})
    references: dict[str, Outcome | None] = {}
    for record in records:
        program = record.way.program
        if not record.trouble and program not in references:
            harness.progress(f"{record.way.name}: undisturbed")
            try:
                references[program] = outcome_of(run_once(record.way, calm, timeout_s), WORLD_SIZE)
            except JobFailed as error:
                references[program] = None
                record.trouble = str(error)
        record.undisturbed = references.get(program)
        if not record.trouble and record.undisturbed is None:
            record.trouble = "the undisturbed run of the same program failed"
    for trial in range(trials):
        for record in rotated(records, trial) if records else ():
            if record.trouble:
                continue
            harness.progress(f"{record.way.name}: trial {trial + 1} of {trials}")
            record.loads.append(os.getloadavg()[0])
            try:
                record.events.append(run_once(record.way, setting, timeout_s))
            except JobFailed as error:
                record.trouble = str(error)
                continue
            record.outcomes.append(outcome_of(record.events[-1], WORLD_SIZE))
    harness.progress("")


def lines_of(records: Sequence[Record]) -> list[list[str]]:
    """One line a contender."""
    ours = next((medians(r.outcomes)["regain_s"] for r in records if r.way.is_ours and r.outcomes), None)
    lines = []
    for record in records:
        if not record.outcomes:
            lines.append([record.way.name, *["-"] * (len(COLUMNS) - 1)])
            continue
        found = medians(record.outcomes)
        ratio = speed_up(found["regain_s"], ours)
        lines.append(
            [
                record.way.name,
                shown(found["step_s"], 1000, ".0f"),
                *(shown(found[name], 1, ".2f") for name in ("first_s", "full_s", "regain_s")),
                "" if record.way.is_ours or ratio is None else f"{ratio:.1f} x",
                *(shown(found[name], 1, ".0f") for name in ("steps_lost", "steps_reduced")),
                {True: "yes", False: "no", None: "?"}[record.is_bitwise],
                f"{min(record.loads):.1f} .. {max(record.loads):.1f}",
            ]
        )
    return lines


def stage_lines(records: Sequence[Record]) -> list[list[str]]:
    """When each stage of each contender was behind the last process that had to pass it."""
    found = [(record.way.name, median_milestones(record.outcomes)) for record in records if record.outcomes]
    return [[name, *(f"{at[each]:.2f}" if each in at else "-" for each in MILESTONES)] for name, at in found]


def shown(value: float | None, factor: float, how: str) -> str:
    return "never" if value is None else format(value * factor, how)


def write_document(
    records: Sequence[Record], setting: Setting, comparisons: Sequence[harness.Comparison], path: Path
) -> None:
    """Everything that was measured, as the other benchmarks write it."""
    document = {
        "benchmark": "recovery",
        "command": shlex.join(["python", *sys.argv]),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": report.machine_facts(),
        "setting": asdict(setting),
        "contenders": [
            {
                "name": record.way.name,
                "trouble": record.trouble,
                "medians": medians(record.outcomes) if record.outcomes else {},
                "stages": median_stages(record.outcomes),
                "bitwise_equal_to_undisturbed": record.is_bitwise,
                "undisturbed": record.undisturbed and asdict(record.undisturbed),
                "load_averages": record.loads,
                "trials": [asdict(outcome) for outcome in record.outcomes],
                "events_of_median_trial": median_trial(record) if record.outcomes else [],
            }
            for record in records
        ],
        "comparisons": [report.as_document(comparison) for comparison in comparisons],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(document, indent=1, default=str))
    unfinished.replace(path)
    print(f"samples: {path}")


def draw_picture(records: Sequence[Record], path: Path) -> None:
    """The trial of each contender whose regain is the median one, side by side; where matplotlib is installed."""
    try:
        from benchmarks.recovery_jobs.picture import draw
    except ModuleNotFoundError as error:
        print(f"no picture: {error}. Install the group `bench` of pyproject.toml.")
        return
    chosen = {record.way.name: median_trial(record) for record in records if record.outcomes}
    loads = [load for record in records for load in record.loads]
    machine = f"{WORLD_SIZE} gloo ranks on {os.cpu_count()} cores, load average {min(loads):.1f} to {max(loads):.1f}"
    draw(chosen, WORLD_SIZE, path, machine)
    print(f"picture: {path.with_suffix('.png')}, {path.with_suffix('.svg')}")


def median_trial(record: Record) -> list[dict[str, Any]]:
    order = sorted(range(len(record.outcomes)), key=lambda trial: record.outcomes[trial].regain_s or float("inf"))
    return record.events[order[(len(order) - 1) // 2]]


def records_of(only: Sequence[str] | None) -> list[Record]:
    """The contenders, with the reason of each that cannot run."""
    chosen = [way for way in WAYS if not only or any(word in way.name for word in only)]
    reasons = {package: peers.why_not(package) for package in {way.package for way in chosen} - {""}}
    return [
        Record(way=way, trouble=f"cannot run: {reason}" if (reason := reasons.get(way.package)) else "")
        for way in chosen
    ]


def print_notes(records: Sequence[Record]) -> None:
    """Why contenders have no figures, and where our seconds went."""
    for record in records:
        if record.trouble:
            print(f"{record.way.name}: {record.trouble[:2000]}")
        if record.way.is_ours and record.outcomes:
            stages = median_stages(record.outcomes).items()
            print(f"{record.way.name}: " + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in stages))


def overhead_schedule(asked: argparse.Namespace) -> harness.Schedule:
    """Rounds of recovery on and off."""
    if asked.quick:
        return harness.Schedule(rounds=3, steps=2, warmup=2, starts=1)
    return harness.Schedule(rounds=asked.rounds, steps=1, lead_in=0, starts=3, warmup=20)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Recovery from a lost process, beside our peers.")
    parser.add_argument("--trials", type=int, help="runs of each contender with a fault (default: 3)")
    parser.add_argument("--fault-step", type=int, default=125, help="step that is interrupted (default: 125)")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="contenders with one of these words in their name")
    parser.add_argument("--rounds", type=int, default=900, help="of each part where nothing fails (default: 900)")
    parts = range(1, len(overhead.PARTS) + 1)
    parser.add_argument(
        "--parts", type=int, nargs="+", choices=parts, default=[*parts], help="comparisons where nothing fails"
    )
    parser.add_argument("--skip-overhead", action="store_true", help="leave out the part where nothing fails")
    parser.add_argument("--quick", action="store_true", help="see that it works; the figures mean nothing")
    parser.add_argument(
        "--json", type=Path, default=report.RESULTS / "recovery.json", help="where to write the samples"
    )
    return parser.parse_args()


def main() -> int:
    harness.leave_cleanly_on_sigterm()
    asked = arguments()
    if asked.quick:
        setting = Setting(folder="", steps=20, fault_step=14, checkpoint_every=10)
    else:
        fault_step = asked.fault_step
        setting = Setting(folder="", steps=fault_step + 35, fault_step=fault_step, checkpoint_every=50)
    trials = asked.trials or (1 if asked.quick else 3)
    records = records_of(asked.only)
    began_s = time.monotonic()
    try:
        run_all(records, setting, trials, timeout_s=90 if asked.quick else 180)
    except (KeyboardInterrupt, SystemExit):
        print("interrupted: what there is follows")
        asked.skip_overhead = True
    took_s = time.monotonic() - began_s
    title = f"SIGKILL of a rank in step {setting.fault_step} (medians of {trials} trials; {took_s:.0f} s)"
    report.print_table(title, COLUMNS, lines_of(records))
    columns = ("contender", *MILESTONES.values())
    report.print_table("Seconds from the kill to the end of each stage (medians)", columns, stage_lines(records))
    print_notes(records)
    write_document(records, setting, [], asked.json)
    if any(record.outcomes for record in records):
        draw_picture(records, asked.json.with_suffix(""))
    if not asked.skip_overhead:
        comparisons = []
        for part in (overhead.PARTS[number - 1] for number in asked.parts):
            comparison = overhead.compare(overhead_schedule(asked), part)
            report.print_comparison(comparison)
            _, on, control = comparison.runs
            against_both = report.ratio_line(comparison, on, overhead.LIMIT, again=control)
            print(f"{against_both} (against both turns of a round without)")
            print(report.ratio_line(comparison, control))
            comparisons.append(comparison)
            write_document(records, setting, comparisons, asked.json)
    return 1 if any(record.trouble and not record.trouble.startswith("cannot run") for record in records) else 0


if __name__ == "__main__":
    sys.exit(main())
