"""What part of its time a job trains while one of its processes is killed each minute (ETTR).

    python benchmarks/ettr.py --minutes 5

The Trainer of `recovery.py` (two ranks, 5.3 million parameters) runs twice: without a fault, and with SIGKILL for one
rank, drawn at random, every `--every-s` seconds. A step counts as taken when all ranks have committed it.

    lost a kill    time from the last step before a kill to the second one after it, less two median steps
    ETTR           1 - what all kills have cost / the time from the first step to the last
    steps kept     steps a second with kills / without
    bitwise        whether both runs end with the same bits of parameters and optimizer state

Steps a second also have the noise of the machine in them, which ETTR, measured within one run, has not.
"""

import argparse
import contextlib
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness, report
from benchmarks.recovery_jobs.events import Setting, read_events
from benchmarks.recovery_jobs.job import run_job
from benchmarks.recovery_jobs.ways import WAYS, WORLD_SIZE

GOAL = 0.99
COLUMNS = ("run", "kills", "steps", "step ms", "lost a kill s", "longest s", "ETTR", "steps kept", "bitwise")
_STEPS_A_MINUTE = 400
_LAST_S = 10.0
"""No kill comes so shortly before the end is expected: it would fall into the job's own ending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one job has told."""

    at_s: list[float]
    """When each step had been committed by all ranks, in order."""
    kills_s: list[float]
    fingerprints: set[str]

    @property
    def step_s(self) -> float:
        """Median time from one step to the next, in seconds."""
        return statistics.median(after - before for before, after in zip(self.at_s, self.at_s[1:], strict=False))

    @property
    def lasted_s(self) -> float:
        """From the first step to the last."""
        return self.at_s[-1] - self.at_s[0]

    @property
    def lost_s(self) -> list[float]:
        """What each kill has cost; the second step after it counts too, for a new process may be slow in its first."""
        found: list[float] = []
        for killed_s in self.kills_s:
            after = bisect_right(self.at_s, killed_s)
            if 0 < after < len(self.at_s) - 1:
                found.append(self.at_s[after + 1] - self.at_s[after - 1] - 2 * self.step_s)
        return found

    @property
    def ettr(self) -> float:
        """Part of the time in which the job trained."""
        return 1 - sum(self.lost_s) / self.lasted_s


def run(setting: Setting, every_s: float, chooser: random.Random, timeout_s: float) -> Run:
    """Run the job of our own way, and kill a rank every `every_s` seconds; never, if that is 0."""
    folder, kills_s, is_over = Path(setting.folder), list[float](), threading.Event()
    way = next(way for way in WAYS if way.is_ours)

    def kill_on() -> None:
        while not steps_by_all(read_events(folder)) and not is_over.wait(0.2):
            pass
        while not is_over.wait(every_s):
            events = read_events(folder)
            steps = steps_by_all(events)
            pace_s = (steps[-1] - steps[0]) / max(1, len(steps) - 1)
            if (setting.steps - len(steps)) * pace_s < _LAST_S:
                return
            pids = {each["rank"]: each["pid"] for each in events if each["event"] == "process_started"}
            kills_s.append(time.time())
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[chooser.randrange(WORLD_SIZE)], signal.SIGKILL)
            harness.progress(f"kill {len(kills_s)}, step {len(steps)} of {setting.steps}")

    killer = threading.Thread(target=kill_on, daemon=True)
    if every_s:
        killer.start()
    try:
        run_job(way.commands(Path(sys.executable)), setting, timeout_s, expected_done=WORLD_SIZE)
    finally:
        is_over.set()
    harness.progress("")
    events = read_events(folder)
    told = {each["fingerprint"] for each in events if each["event"] == "done"}
    return Run(at_s=steps_by_all(events), kills_s=kills_s, fingerprints=told)


def steps_by_all(events: list[dict[str, Any]]) -> list[float]:
    """When each step had been committed by all ranks; a step that was told again counts from the first time."""
    ranks: dict[int, dict[int, float]] = {}
    for each in events:
        if each["event"] == "committed":
            ranks.setdefault(each["step"], {}).setdefault(each["rank"], each["at_s"])
    # A rank that is killed after a commit leaves no word of it: the next step, which all have taken, says enough.
    return sorted(max(told.values()) for told in ranks.values() if len(told) == WORLD_SIZE)


def line(name: str, done: Run, calm: Run) -> list[str]:
    """One row of the table."""
    lost_s, kept = done.lost_s, (len(done.at_s) / done.lasted_s) / (len(calm.at_s) / calm.lasted_s)
    costs = [f"{statistics.median(lost_s):.2f}", f"{max(lost_s):.2f}"] if lost_s else ["", ""]
    is_same = "yes" if done.fingerprints == calm.fingerprints else "NO"
    ettr = f"{done.ettr:.4f}" if done.kills_s else ""
    counts = [str(len(done.kills_s)), str(len(done.at_s)), f"{1000 * done.step_s:.0f}"]
    return [name, *counts, *costs, ettr, f"{kept:.3f}", is_same]


def main() -> int:
    harness.leave_cleanly_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="see that it works; the figures mean nothing")
    parser.add_argument("--json", type=Path, help="where to write the figures (default: benchmarks/results/ettr.json)")
    parser.add_argument("--minutes", type=float, default=5.0, help="of training, about, in each of the two runs")
    parser.add_argument("--every-s", type=float, default=60.0, help="seconds between two kills")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    minutes, every_s = (0.5, 10.0) if arguments.quick else (arguments.minutes, arguments.every_s)
    steps, timeout_s = int(minutes * _STEPS_A_MINUTE), 240 * minutes + 120
    runs: list[Run] = []
    for pause_s in (0.0, every_s):
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            setting = Setting(folder=folder, steps=steps, fault_step=-1, checkpoint_every=steps)
            runs.append(run(setting, pause_s, random.Random(arguments.seed), timeout_s))
    calm, disturbed = runs
    lines = [line("no fault", calm, calm), line(f"a kill each {every_s:.0f} s", disturbed, calm)]
    report.print_table("Effective training time", COLUMNS, lines)
    is_met = disturbed.ettr >= GOAL and disturbed.fingerprints == calm.fingerprints
    print(f"ETTR of {GOAL} or more, with the same bits: {'met' if is_met else 'MISSED'}")
    findings = {"ettr": disturbed.ettr, "lost_s": disturbed.lost_s, "kills": len(disturbed.kills_s), "steps": steps}
    report.write_results("ettr", [], path=arguments.json, findings=findings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
