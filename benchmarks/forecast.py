"""Does the planner forecast a real run? A job loses ranks at random steps; its measured times go into the closed form.

    python benchmarks/forecast.py
    python benchmarks/forecast.py --ledger FOLDER      # of a run that has ended, such as that of `make demo`

The job is `examples/train_lm.py` under `hyperpodrun`, two replicas of one rank each. Twenty times, at random times, a
random rank gets SIGKILL, once the loss before is repaired: a job of two ranks that loses both at once returns to a
snapshot, and one such event outweighs all others. From its ledgers come the mean times of a step and of the stages of
its repairs, and the rate of failures; `planning.forecast` makes of them the time from the first step to the last. Goal:
within 10 % of the ledger.
"""

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from benchmarks import report as figures
from hyperpod_plugins.ledger import TimeCategory
from hyperpod_plugins.planning.expected_time import forecast
from hyperpod_plugins.planning.failures import NO_LEMONS, ExponentialFailures
from hyperpod_plugins.planning.scenario import RECOVERY_POLICIES, Scenario, StageTimes
from hyperpod_plugins.report import RunReport, run_report
from hyperpod_plugins.report.measured_times import stage_times

TRAIN = Path(__file__).parent.parent / "examples" / "train_lm.py"
NUM_RANKS, GOAL, LIMIT_S = 2, 0.10, 1200.0
LEFT_OUT = (
    TimeCategory.SETUP,
    TimeCategory.EVALUATION,
    TimeCategory.CHECKPOINT_SAVE,
    TimeCategory.SNAPSHOT,
    TimeCategory.RESIZE,
)
"""Of the time up to the last step: what the planner is not asked about."""
COLUMNS = ("kills", "steps", "a step", "a repair", "forecast", "ledger", "forecast / ledger")


def run_job(folder: Path, steps: int, kills: int, every_s: float, seed: int) -> RunReport:
    """Train while ranks are killed, and return the report of the run."""
    launcher = [sys.executable, "-m", "hyperpod_plugins.elastic.launcher.main", "--nproc-per-node", str(NUM_RANKS)]
    preload = ["--preload", "default,transformers.models.llama.modeling_llama"]
    layout = ["--hybrid-shard-degree", "1", "--tensor-parallel-degree", "1", "--sequence-length", "64"]
    job = [str(TRAIN), *layout, "--steps", str(steps), "--folder", str(folder)]
    environ = os.environ | {"HYPERPOD_EVENTS": str(folder / "events"), "OMP_NUM_THREADS": "1"}
    deadline_s = time.monotonic() + LIMIT_S
    with (folder / "output.log").open("wb") as log, ExitStack() as stack:
        agent = subprocess.Popen([*launcher, *preload, *job], env=environ, stdout=log, stderr=log)
        stack.callback(end, agent)
        kill_ranks(folder / "events", agent, kills, every_s, random.Random(seed), deadline_s)
        code = agent.wait(max(1.0, deadline_s - time.monotonic()))
    if code:
        raise SystemExit(f"the job failed: {(folder / 'output.log').read_text()[-2000:]}")
    return run_report(folder / "events")


def kill_ranks(
    events: Path, agent: subprocess.Popen[bytes], kills: int, every_s: float, draw: random.Random, deadline_s: float
) -> None:
    """Kill a random rank at random times, each time when all ranks have committed a step since the last time."""
    due_s = time.monotonic() + draw.expovariate(1 / every_s)
    while kills and agent.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.05)
        present = processes_that_train(events)
        if time.monotonic() < due_s or len(present) < NUM_RANKS:
            continue
        with suppress(ProcessLookupError):
            os.kill(draw.choice(present), signal.SIGKILL)
            kills -= 1
        due_s = time.monotonic() + draw.expovariate(1 / every_s)


def processes_that_train(events: Path) -> list[int]:
    """The pids of the ranks' present processes that have committed a step, by rank."""
    newest = [
        max(events.glob(f"worker-{rank}-*.jsonl"), key=lambda path: path.stat().st_mtime_ns, default=None)
        for rank in range(NUM_RANKS)
    ]
    ledgers = [path for path in newest if path is not None and '"kind":"step"' in path.read_text()]
    pids = [int(path.stem.rpartition("-")[2]) for path in ledgers]
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()


def trained_s(found: RunReport) -> float:
    """Wall time of a rank from its first step to its last one, without what the planner is not asked about.

    Mean over the ranks that were there all the time.
    """
    last_s, left_out = max(found.steps.at_s), {str(each) for each in LEFT_OUT}
    of_ranks = [rank.spans for rank in found.ranks if rank.spans and rank.spans[0][0] < min(found.steps.at_s)]
    inside = [
        min(duration_s, last_s - begin_s)
        for spans in of_ranks
        for begin_s, duration_s, category in spans
        if begin_s < last_s and category not in left_out
    ]
    return sum(inside) / len(of_ranks)


def failures_while_trained(found: RunReport) -> int:
    """Number of failures before the last step."""
    return sum(each.kind == "failure" and each.at_s < max(found.steps.at_s) for each in found.incidents)


def forecast_s(found: RunReport) -> float:
    """The same by the closed form, from the run's own times and rate of failures.

    Ranks are killed one at a time, so the sum of all that returns to a checkpoint costs is nothing here.
    """
    stages = StageTimes.means_of(stage_times(found))
    work_s = len(found.steps.step) * stages.step_s
    num_failures = failures_while_trained(found)
    if not num_failures:
        return work_s
    per_hour = num_failures / trained_s(found) / NUM_RANKS * 3600
    scenario = Scenario(
        num_nodes=NUM_RANKS,
        failures_per_node_hour=per_hour,
        work_s=work_s,
        num_replicas=NUM_RANKS,
        node_loss_fraction=0.0,
        stages=replace(
            stages, snapshot_s=0.0, checkpoint_save_s=0.0, repair_s=0.0, startup_s=0.0, checkpoint_restore_s=0.0
        ),
    )
    policy = next(each for each in RECOVERY_POLICIES if each.name == "checkpointless")
    expected = forecast(
        scenario, policy, failures=ExponentialFailures(), lemons=NO_LEMONS, checkpoint_interval_s=stages.step_s
    )
    return work_s * expected.time_ratio


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ledger", type=Path, help="of a run that has ended, instead of a new one")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--every", type=float, default=4.0, help="mean seconds between kills")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="20 steps and 2 kills; the figures mean nothing")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args(arguments)
    steps, kills = (20, 2) if args.quick else (args.steps, args.kills)
    if args.ledger:
        found = run_report(args.ledger)
    else:
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            found = run_job(Path(folder), steps, kills, args.every, args.seed)
    expected_s, measured_s = forecast_s(found), trained_s(found)
    times = stage_times(found)
    repaired_s = [each.total_s for each in found.incidents if each.kind == "failure" and each.level != "none"]
    repair_s, num_failures = statistics.fmean(repaired_s or [0.0]), failures_while_trained(found)
    ratio, step_s = expected_s / measured_s, times["step_s"][0]
    shown = [f"{step_s:.3f} s", f"{repair_s:.2f} s", f"{expected_s:.1f} s", f"{measured_s:.1f} s", f"{ratio:.3f}"]
    row = [str(num_failures), str(len(found.steps.step)), *shown]
    figures.print_table("Forecast of a run from its own ledger", COLUMNS, [row])
    is_met = abs(ratio - 1) <= GOAL
    print(f"goal: within {GOAL:.0%}: {'met' if is_met else 'missed'}")
    findings = {"ratio": ratio, "forecast_s": expected_s, "ledger_s": measured_s, "failures": num_failures}
    figures.write_results("forecast", [], args.json, findings)
    return 0 if is_met or args.quick else 1


if __name__ == "__main__":
    sys.exit(main())
