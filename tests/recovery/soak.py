"""Kill ranks of a job at random from outside, many times, and compare the end with that of an undisturbed job.

    python tests/recovery/soak.py --kills 100 --seed 1 --transport nccl-like

Prints one line a check, and exits with 1 if any failed: the same bits, no step logged with another value, survivors
whose memory, descriptors and threads stay flat, no process left behind, and a ledger that knows of each kill which
process it hit. `test_soak.py` runs it with a few kills and
without rests, in which processes are measured.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from faults import Job, left_processes, run_job, start, warm

from hyperpod_plugins.report.make_report import run_report

CAUSE = "killed by SIGKILL"
SLOW_STEP_S = 0.05
TIMEOUT_S, REST_S, NUM_RESTS, NUM_STEPS = 5, 8.0, 12, 900
"""Timeout of gloo, after which it lets go of what a fault left waiting; a rest without kills is longer than that."""


def workers(mark):
    """Rank -> pid of its present process, from the environments of all processes of the job."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if not entry.name.isdecimal():
                continue
            if not warm.has_mark(entry, mark):
                continue
            status = dict(line.split(":\t", 1) for line in (entry / "status").read_text().splitlines() if ":\t" in line)
            found[int(entry.name)] = int(status["PPid"])
    fork_servers = [pid for pid in found if sum(parent == pid for parent in found.values()) >= 4]
    return [pid for pid, parent in found.items() if parent in fork_servers and pid not in fork_servers]


def measure(pid):
    """(resident MiB, descriptors, threads) of a process."""
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    rss_mib = int(status["VmRSS"].split()[0]) / 1024
    return rss_mib, len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"])


def torment(agent, folder, num_kills, num_rests, pause_s, chooser, deadline_s):
    """Kill one worker at a time, once all have trained since the last kill.

    Returns the pids of the killed, and what was measured of each process.

    One process, drawn in the beginning, is spared: it survives all. From time to time the job rests, and at the end of
    each rest all processes are measured: by then what faults have left waiting in gloo is gone, of which a storm has
    several at a time. There is no rest after the last kill: what connections there are depends on the last repair, and
    would stay the same.
    """
    history, killed, spared = {}, [], 0
    output, log = folder / "output", folder / "record-0.jsonl"
    rests = {round(num_kills * (index + 0.5) / num_rests) for index in range(num_rests)}
    while agent.poll() is None and time.monotonic() < deadline_s and not (log.exists() and log.read_text()):
        time.sleep(0.1)  # before the first step a loss makes all start again
    while agent.poll() is None and time.monotonic() < deadline_s:
        if len(killed) == num_kills or output.read_text().count("repaired in") < len(killed):
            time.sleep(0.1)  # the last one is being repaired, and holds the only copy of nothing
            continue
        rests_now = len(killed) in rests
        time.sleep(REST_S if rests_now else chooser.uniform(*pause_s))
        pids = workers(agent.mark)
        if len(pids) == 4:
            rests.discard(len(killed))
            for pid in pids if rests_now else ():
                with contextlib.suppress(OSError, KeyError):  # it ends just now
                    history.setdefault(pid, []).append(measure(pid))
            if spared not in pids:
                spared = chooser.choice(pids)
            with contextlib.suppress(ProcessLookupError):
                chosen = chooser.choice([pid for pid in pids if pid != spared])
                os.kill(chosen, signal.SIGKILL)
                killed.append(chosen)
                print(f"kill {len(killed)}", flush=True)
    return killed, history


def growth(history, num_rests):
    """How much more a process has late in its life than early, at most: MiB, descriptors, threads.

    The least of its last rests against the most of its first ones, a third of them each: a rank that has just given
    its state away has connections for that, and keeps a channel from its first repair on. Last, how many processes
    lived through at least half of the rests.
    """
    worst, survivors = [0.0, 0.0, 0.0], [rests for rests in history.values() if len(rests) >= num_rests // 2]
    for rests in survivors:
        print("at rest: " + "; ".join(f"{mib:.0f} MiB, {fds} fds, {threads} threads" for mib, fds, threads in rests))
        third = len(rests) // 3
        for index in range(3):
            early, late = (max(each[index] for each in rests[:third]), min(each[index] for each in rests[-third:]))
            worst[index] = max(worst[index], late - early)
    return *worst, len(survivors)


def ledger_faults(events, killed):
    """In what the report of a run differs from what was done to it: lines for a reader."""
    report = run_report(events)
    processes = [(rank.rank, process) for rank in report.ranks for process in rank.processes]
    found = {process.pid for _, process in processes if process.ending == CAUSE}
    of_ranks, told = Counter(rank for rank, process in processes if process.pid in killed), Counter()
    for incident in report.incidents:
        first, *others = incident.cause.split("; ")
        told[incident.rank] += first == CAUSE
        told.update(int(each.removeprefix("rank ").removesuffix(f": {CAUSE}")) for each in others)
    faults = [
        f"rank {rank}: {told[rank]} failures told, {of_ranks[rank]} kills"
        for rank in told | of_ranks
        if told[rank] != of_ranks[rank]
    ]
    faults += [f"process {pid} was killed, or is said to have been, but not both" for pid in found ^ set(killed)]
    if (failures := report.headline.num_failures) != len(killed):
        faults.append(f"{failures} failures told, {len(killed)} kills")
    for rank in report.ranks:
        if abs((total_s := sum(rank.seconds.values())) - rank.wall_s) > 1e-3 * rank.wall_s:
            faults.append(f"rank {rank.rank}: categories add up to {total_s:.2f} s of {rank.wall_s:.2f} s")
    return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=1800.0)
    parser.add_argument(
        "--transport", choices=["gloo", "nccl-like"], default="gloo", help="of the job that is disturbed"
    )
    parser.add_argument("--rests", type=int, default=NUM_RESTS, help="0 measures nothing")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="of the job, and 10 more for each kill")
    args = parser.parse_args()
    environ = {"STEPS": str(args.steps + 10 * args.kills), "STEP_S": str(SLOW_STEP_S), "REPLACEMENT_S": "120"}
    environ["PATIENCE"] = environ["STEPS"]  # early stopping has no part in this
    environ["TIMEOUT_S"] = str(TIMEOUT_S)  # of what gloo leaves asleep, see the note on slices in comm/work.py
    failed = False

    def check(name, is_good, detail=""):
        nonlocal failed
        failed |= not is_good
        print(f"{'ok  ' if is_good else 'FAIL'} {name} {detail}", flush=True)

    place = tempfile.mkdtemp(prefix="soak-")
    with contextlib.ExitStack() as tidy:
        began_s = time.monotonic()
        wanted = run_job("ranks_lightning.py", Path(place, "calm"), environ=environ, timeout_s=args.limit_s)
        calm_s = time.monotonic() - began_s
        folder = Path(place, "storm")
        began_s = time.monotonic()
        events = folder / "events"
        told = {"HYPERPOD_TEST_TRANSPORT": args.transport, "HYPERPOD_EVENTS": str(events)}
        agent = start("ranks_lightning.py", folder, environ=environ | told)
        try:
            killed, history = torment(
                agent,
                folder,
                args.kills,
                args.rests,
                (0.3, 1.5),
                random.Random(args.seed),
                began_s + args.limit_s,
            )
            code = agent.wait(args.limit_s)
        finally:
            agent.kill()
            agent.wait(10)
        storm_s = time.monotonic() - began_s
        left = left_processes(agent.mark, patience_s=10.0)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        found = Job(folder, code, (folder / "output").read_text())
        check("exit codes", wanted.code == code == 0, f"{wanted.code}, {code}")
        check("kills", len(killed) == args.kills, str(len(killed)))
        check("no process left", not left, str(left))
        if code != 0:
            print(found.output[-6000:])
            return 1
        for rank, (one, other) in enumerate(zip(wanted.results(), found.results(), strict=True)):
            different = [name for name, value in one["state"].items() if not torch.equal(value, other["state"][name])]
            check(f"bits of rank {rank}", not different and one["lr"] == other["lr"], str(different[:3]))
        for rank, (one, other) in enumerate(zip(wanted.records("metrics"), found.records("metrics"), strict=True)):
            known = {(line["step"], name): value for line in one for name, value in line["metrics"].items()}
            wrong = [
                (line["step"], name)
                for line in other
                for name, value in line["metrics"].items()
                if name in ("loss_step", "val") and known.get((line["step"], name)) != value
            ]
            check(f"log of rank {rank}", not wrong, str(wrong[:3]))
        faults = ledger_faults(events, killed)
        check("ledger", not faults, "; ".join(faults))
        if args.rests:
            rss_mib, descriptors, threads, num_compared = growth(history, args.rests)
            check("memory flat", rss_mib < 30, f"{rss_mib:.1f} MiB more at most")
            check("processes compared", num_compared >= 1, str(num_compared))
            check("descriptors flat", descriptors <= 4, f"{descriptors:.0f} more at most")
            check("threads flat", threads <= 2, f"{threads:.0f} more at most")
        lasted_s = [each for result in found.results() for each in result["lasted_s"]]
        if lasted_s:  # none in processes that all started again after the last step
            print(f"repairs: median {statistics.median(lasted_s):.2f} s, longest {max(lasted_s):.2f} s")
        print(f"calm {calm_s:.0f} s, with {len(killed)} kills {storm_s:.0f} s")
        if not failed:
            tidy.callback(shutil.rmtree, place)
        else:
            print(f"what the jobs wrote is in {place}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
