"""What it costs a running job to grow and to shrink: live in memory, beside a restart from a DCP checkpoint.

    python benchmarks/resize.py --trials 3

A job of one node trains; a second node comes, and goes again (SIGTERM to its agent). Both jobs keep their global batch.

    live       hyperpodrun, a Trainer with ElasticTraining: the survivor keeps its process
    restart    torchrun, rendezvous c10d, FSDP2, a DCP checkpoint every 50 steps, which is loaded into the new mesh
    reshard    ours, two nodes: asked for shard degree 2 in place of 1, all save a step and start again from it

`pause` is the longest time between two steps, of those that were not committed before, from the moment that the node
comes or goes until the job makes progress at its new size; a usual step is taken off. Steps that are computed again
are in it. `until` counts from the start, or the end, of that node's agent until the first step at the new size.
"""

import argparse
import contextlib
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import harness, report
from benchmarks.recovery_jobs.events import Setting, read_events
from benchmarks.recovery_jobs.job import ROOT, end_all, free_port
from benchmarks.recovery_jobs.ways import STOCK
from benchmarks.resize_jobs import reshard, workload
from benchmarks.stats import rotated

PROGRAMS = Path(__file__).parent / "resize_jobs"
CHANGES = ("grow", "shrink")
LIMIT_S = 120.0
"""Longest wait for a change of size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One contender."""

    name: str
    argv: Sequence[str]
    """Command of one agent, without its endpoint and program."""
    program: str
    environ: Mapping[str, str]


WAYS = (
    Way(
        name="live",
        argv=(sys.executable, "-m", "hyperpod_plugins.elastic.launcher.main", "--rdzv-conf=last_call_timeout=1"),
        program="program_live.py",
        environ={"PYTHONPATH": str(ROOT)},
    ),
    Way(
        name="restart",
        argv=(
            *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d", "--max-restarts=10"),
            *("--monitor-interval=0.1", "--rdzv-conf=last_call_timeout=1,keep_alive_interval=1"),
        ),
        program="program_restart.py",
        environ={**STOCK, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What one change of size cost; seconds."""

    pause_s: float
    until_s: float
    steps_again: int
    """Committed steps that were computed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One job."""

    changes: Mapping[str, Change]
    step_s: Mapping[str, float]
    """Median step `before`, with two nodes (`between`), and `after`."""
    curve: Sequence[tuple[float, int]]
    """Seconds since the second node came, and the steps that were done by then."""


def progress_of(commits: Sequence[Mapping[str, Any]]) -> list[tuple[float, int, int]]:
    """Time, step and size of each step that the first rank committed for the first time."""
    done, found = -1, []
    for each in commits:
        if each["step"] > done:
            done = each["step"]
            found.append((each["at_s"], done, each["world"]))
    return found


def change_of(commits: Sequence[Mapping[str, Any]], began_s: float, size: int, step_s: float) -> Change:
    """Read one change out of the commits of the first rank.

    Args:
        commits: of the whole job, by time.
        began_s: when the node came or went.
        size: number of ranks afterwards.
        step_s: a usual step.
    """
    progress = progress_of(commits)
    settled_s = next(at_s for at_s, _, world in progress if at_s > began_s and world == size)
    near = [at_s for at_s, _, _ in progress if began_s - 2 * step_s <= at_s <= settled_s + 2 * step_s]
    first_s = next(each["at_s"] for each in commits if each["at_s"] > began_s and each["world"] == size)
    again = sum(began_s < each["at_s"] <= settled_s for each in commits) - sum(began_s < at <= settled_s for at in near)
    pause_s = max(later - earlier for earlier, later in itertools.pairwise(near))
    return Change(pause_s=pause_s - step_s, until_s=first_s - began_s, steps_again=again)


class Job:
    """A job of one contender, and what its processes told so far."""

    def __init__(self, way: Way, setting: Setting) -> None:
        self.way, self.setting, self.processes = way, setting, list[subprocess.Popen[bytes]]()
        self._endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"

    def start_node(self) -> float:
        """Start one more agent; when."""
        argv = [*self.way.argv, "--nnodes=1:2", "--nproc-per-node=1", "--rdzv-id=job", self._endpoint]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}
        environ["XDG_RUNTIME_DIR"] = self.setting.folder  # where the agent leaves the ticket
        log = Path(self.setting.folder, f"output-{len(self.processes)}.log")
        with log.open("wb") as output:
            began_s = time.time()
            process = subprocess.Popen(
                [*argv, str(PROGRAMS / self.way.program)],
                cwd=ROOT,
                env={**environ, **self.way.environ, **self.setting.to_environ()},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)
        return began_s

    def commits(self) -> list[dict[str, Any]]:
        """Of the first rank."""
        events = read_events(Path(self.setting.folder))
        return [each for each in events if each["event"] == "committed" and each["first"]]

    def wait_for(self, is_there: Callable[[list[dict[str, Any]]], bool]) -> None:
        """Wait until the commits satisfy a condition."""
        deadline_s = time.monotonic() + LIMIT_S
        while not is_there(self.commits()):
            if time.monotonic() > deadline_s:
                logs = [log.read_text(errors="replace")[-2000:] for log in Path(self.setting.folder).glob("*.log")]
                raise RuntimeError("\n".join([f"{self.way.name} came no further within {LIMIT_S:.0f} s", *logs]))
            time.sleep(0.2)


def run_trial(way: Way, setting: Setting, num_steps: int) -> Trial:
    """Grow and shrink one job, with `num_steps` steps at each size."""
    job = Job(way, setting)
    try:
        job.start_node()
        job.wait_for(lambda commits: len(commits) >= num_steps)
        came_s = job.start_node()
        job.wait_for(lambda commits: sum(each["world"] == 2 for each in commits) >= num_steps)
        gone_s = time.time()
        job.processes[1].terminate()
        job.wait_for(lambda commits: sum(each["world"] == 1 and each["at_s"] > gone_s for each in commits) >= num_steps)
        commits = job.commits()
    finally:
        end_all(job.processes, Path(setting.folder))
    grown_s = next(each["at_s"] for each in commits if each["world"] == 2)
    left_s = next(each["at_s"] for each in commits if each["at_s"] > gone_s and each["world"] == 1)
    spans = {"before": (0.0, came_s), "between": (grown_s, gone_s), "after": (left_s, time.time())}
    step_s = {name: step_time(commits, *span) for name, span in spans.items()}
    return Trial(
        changes={
            "grow": change_of(commits, came_s, 2, step_s["before"]),
            "shrink": change_of(commits, gone_s, 1, step_s["between"]),
        },
        step_s=step_s,
        curve=[(at_s - came_s, step) for at_s, step, _ in progress_of(commits)],
    )


def run_reshard(setting: Setting, num_steps: int) -> reshard.Reshard:
    """Have one job of two nodes change its shard degree, after `num_steps` steps."""
    job = Job(WAYS[0], setting)
    try:
        for _ in range(2):
            job.start_node()
        job.wait_for(lambda commits: sum(each["world"] == 2 for each in commits) >= num_steps)
        asked_s = time.time()
        reshard.ask(setting.folder)
        job.wait_for(reshard.has_resharded)
        commits = job.commits()
    finally:
        end_all(job.processes, Path(setting.folder))
    begin_s = next(each["at_s"] for each in commits if each["world"] == 2)
    return reshard.reshard_of(commits, asked_s, step_time(commits, begin_s, asked_s))


def step_time(commits: Sequence[Mapping[str, Any]], begin_s: float, end_s: float) -> float:
    """Median time between two commits in a span, after its first few."""
    times = [each["at_s"] for each in commits if begin_s <= each["at_s"] <= end_s][3:]
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(times))


def table_of(trials: Mapping[str, Sequence[Trial]]) -> list[list[str]]:
    """One line a contender and change."""
    lines = []
    for change in CHANGES:
        ours = statistics.median(trial.changes[change].pause_s for trial in trials["live"]) if "live" in trials else 0.0
        for name, seen in trials.items():
            changes = [trial.changes[change] for trial in seen]
            pause_s = statistics.median(each.pause_s for each in changes)
            until_s = statistics.median(each.until_s for each in changes)
            again = statistics.median(each.steps_again for each in changes)
            sizes = ("before", "between") if change == "grow" else ("between", "after")
            rates = [workload.GLOBAL_BATCH / statistics.median(trial.step_s[size] for trial in seen) for size in sizes]
            ratio = f"{pause_s / ours:.1f} x" if name != "live" and ours > 0 else ""
            cells = [f"{pause_s:.2f}", ratio, f"{again:.0f}", f"{until_s:.1f}", *(f"{rate:.0f}" for rate in rates)]
            lines.append([f"{change}, {name}", *cells])
    return lines


def reshard_line(seen: Sequence[reshard.Reshard]) -> list[str]:
    """The line of the reshard."""
    pause_s, until_s = (
        statistics.median(values) for values in zip(*((e.pause_s, e.until_s) for e in seen), strict=True)
    )
    again = statistics.median(each.steps_again for each in seen)
    return ["reshard, all processes start again", f"{pause_s:.2f}", f"{again:.0f}", f"{until_s:.2f}"]


@contextlib.contextmanager
def prepared(is_quick: bool) -> Generator[Setting]:
    """The folder of one job, with its data."""
    with tempfile.TemporaryDirectory(prefix="resize-", ignore_cleanup_errors=True) as folder:
        every = 5 if is_quick else 50
        setting = Setting(folder=folder, steps=100_000, fault_step=-1, checkpoint_every=every)
        workload.write_data(setting)
        yield setting


def draw(trials: Mapping[str, Sequence[Trial]], path: Path) -> None:
    """Steps over time of the first trial of each contender; where matplotlib is installed."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        print(f"no picture: {error}. Install the group `bench` of pyproject.toml.")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    for name, seen in trials.items():
        times, steps = zip(*seen[0].curve, strict=True)
        axes.plot(times, steps, label=name, linewidth=1.5)
    axes.axvline(0, color="#a02020", linewidth=0.8)
    axes.set_xlabel("seconds since a second node came; it left after a while")
    axes.set_ylabel("steps done")
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for ending in ("png", "svg"):
        figure.savefig(path.with_suffix(f".{ending}"), dpi=150)
    pyplot.close(figure)
    print(f"picture: {path.with_suffix('.png')}, {path.with_suffix('.svg')}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Growing and shrinking, beside a restart from a checkpoint.")
    parser.add_argument("--trials", type=int, default=3, help="jobs of each contender (default: 3)")
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", help="contenders with one of these words in their name; also: reshard"
    )
    parser.add_argument("--quick", action="store_true", help="see that it works; the figures mean nothing")
    parser.add_argument("--json", type=Path, default=report.RESULTS / "resize.json", help="where to write the samples")
    return parser.parse_args()


def main() -> int:
    harness.leave_cleanly_on_sigterm()
    asked = arguments()
    ways = [way for way in WAYS if not asked.only or any(word in way.name for word in asked.only)]
    num_steps, trials = (12, 1) if asked.quick else (75, asked.trials)
    found: dict[str, list[Trial]] = {way.name: [] for way in ways}
    resharded: list[reshard.Reshard] = []
    reshards = not asked.only or any(word in "reshard" for word in asked.only)
    for number in range(trials):
        for way in rotated(ways, number) if ways else ():
            harness.progress(f"{way.name}: trial {number + 1} of {trials}")
            with prepared(asked.quick) as setting:
                found[way.name].append(run_trial(way, setting, num_steps))
        if reshards:
            harness.progress(f"reshard: trial {number + 1} of {trials}")
            with prepared(asked.quick) as setting:
                resharded.append(run_reshard(setting, num_steps))
    harness.progress("")
    columns = ("change", "pause s", "against us", "steps again", "until s", "samples/s before", "after")
    if ways:
        report.print_table(f"1 -> 2 -> 1 nodes (medians of {trials} trials)", columns, table_of(found))
    if resharded:
        report.print_table(
            f"shard degree 1 -> 2 on two nodes, on request (medians of {trials} trials)",
            ("change", "pause s", "steps again", "until s"),
            [reshard_line(resharded)],
        )
    document = {
        "benchmark": "resize",
        "command": shlex.join(["python", *sys.argv]),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": report.machine_facts(),
        "trials": {name: [asdict(trial) for trial in seen] for name, seen in found.items()},
        "reshard": [asdict(each) for each in resharded],
    }
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(json.dumps(document, indent=1))
    print(f"samples: {asked.json}")
    if ways:
        draw(found, asked.json.with_suffix(""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
