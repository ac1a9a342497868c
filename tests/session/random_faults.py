# ruff: noqa: E402 (the path to what is imported)
"""Loops of `program_loops.py` with random faults and delays: each must end with the bits of the run without faults.

A schedule is a function of its number: which loop, which ranks are killed, interrupted or disconnected at which points,
and which others are late there. What a fault meets depends on who is late, and delays make rare orders likely.

    python tests/session/random_faults.py --cases 100 [--first 0] [--parallel 2]

Prints a line a schedule; exits with 1 if one differs. `test_random_faults.py` runs a few.
"""

import argparse
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from test_loops_with_faults import assert_equal, run

SNAPSHOTS = {"snapshot_every_steps": 2}
LOOPS = {
    "counts": (20, ("begun", "compute", "committed", "between"), SNAPSHOTS),
    "writes": (20, ("begun", "compute", "between"), SNAPSHOTS),
    "decays": (20, ("begun", "compute", "late"), SNAPSHOTS),
    "decays after": (20, ("begun", "compute", "late"), {"after": True}),  # its program takes snapshots, too
    "one_sided": (6, ("compute", "late"), SNAPSHOTS),
    "gan": (20, ("begun", "judge", "maker", "stepped", "vote", "committed", "between"), SNAPSHOTS),
    "two_loops": (10, ("loop 0", "loop 1", "entry 0", "entry 1"), SNAPSHOTS),
}
"""Number of steps, points and options of each loop."""
NUM_RANKS = 4


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Faults of one run."""

    loop: str
    faults: tuple[tuple[str, int, int, str], ...]


def schedule(number):
    """The schedule of a number."""
    draw = random.Random(number)
    loop = draw.choice(sorted(LOOPS.keys() - {"gan"}))
    if number % 7 == 0:  # not drawn, so that the schedules of the others keep their numbers
        loop = "gan"
    num_steps, points, _ = LOOPS[loop]
    faults = []
    step = draw.randrange(3)
    while step < num_steps:
        point = draw.choice(points)
        at = 0 if point.startswith("entry") else step
        victims = draw.sample(range(NUM_RANKS), 2 if draw.random() < 0.15 else 1)
        for victim in victims:
            is_computing = point in ("compute", "loop 0", "loop 1", "judge", "maker", "stepped")
            kinds = ["kill"] * 5 + ["kill in 0.3", "kill in 0.6", "break"] + ["raise"] * is_computing
            faults.append((point, at, victim, draw.choice(kinds)))
        for late in draw.sample([rank for rank in range(NUM_RANKS) if rank not in victims], draw.randrange(3)):
            nearby = draw.choice(points)
            when = 0 if nearby.startswith("entry") else max(0, step + draw.choice((-1, 0, 0, 0, 1)))
            faults.append((nearby, when, late, f"sleep{draw.choice((0.2, 0.5, 1.2))}"))
        step += draw.randrange(2, 8)
    return Schedule(loop=loop, faults=tuple(dict.fromkeys(faults)))


def run_loop(folder, loop, faults=()):
    """Run a loop, and return the job."""
    return run(folder, loop.split()[0], list(map(list, faults)), options=LOOPS[loop][2])


def check(wanted, folder, number):
    """Run a schedule; return what went wrong, or an empty string, and the job."""
    chosen = schedule(number)
    job = run_loop(folder, chosen.loop, chosen.faults)
    if job.code:
        return f"ended with code {job.code}", job
    try:
        assert_equal(wanted[chosen.loop], job, NUM_RANKS)
    except AssertionError as error:
        return f"differs: {str(error).splitlines()[0]}", job
    return "", job


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=2)
    options = parser.parse_args()
    bad = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.parallel) as pool:
        wanted = {loop: run_loop(Path(folder) / f"wanted {loop}", loop) for loop in LOOPS}

        def one(number):
            began_s = time.monotonic()
            why, job = check(wanted, Path(folder) / str(number), number)
            print(f"{number:5} {why or 'equal':30} {time.monotonic() - began_s:4.0f} s  {schedule(number)}", flush=True)
            if why:
                bad.append(number)
                Path(f"/tmp/random-faults-{number}.log").write_text(job.output)

        list(pool.map(one, range(options.first, options.first + options.cases)))
    print(f"{options.cases} schedules, {len(bad)} failed: {sorted(bad)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
