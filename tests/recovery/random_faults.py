# ruff: noqa: E402 (the path to what is imported)
"""The programs of the matrix with random faults and delays: each must end with the bits of the run without faults.

A schedule is a function of its number: which program, which ranks are killed or disconnected or raise, in which phases,
and which others are late there. What a fault meets depends on who is late, and delays make rare orders likely.

    python tests/recovery/random_faults.py --cases 100 [--first 0] [--parallel 2]

Prints a line a schedule; exits with 1 if one differs. `tests/session/random_faults.py` does the same for plain loops.
"""

import argparse
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from recovery.faults import run_job
from recovery.matrix import _PRELOAD, PROGRAMS, TIMEOUT_S, compare, logs_of

NUM_RANKS = 4
FIRST_FIT, SECOND_FIT = 20, 4
"""Steps of the two fits of each program."""
PHASES = ("fetch", "forward", "backward", "vote", "voted", "commit", "committed", "hooks", "validation", "save")
_RESTARTED = "all processes start again"
_SHOWN = ("metric.", "step")
"""Logged values and the epoch, which a fit shows only once a step has been taken since it began from a checkpoint."""
RAISING = ("forward", "backward")
EDGES = (
    ("setup", 1),
    ("epoch end", 12),
    ("train end", FIRST_FIT),
    ("validate", 0),
    ("between", 0),
    ("setup", 2),
    ("fit start", 2),
    ("second train end", FIRST_FIT + SECOND_FIT),
    ("test", 0),
)
"""Where loops begin and end, with the steps that their places are given."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Faults of one run."""

    program: str
    faults: tuple[tuple[str, int, int, str], ...]


def schedule(number):
    """The schedule of a number."""
    draw = random.Random(number)
    program = draw.choice(PROGRAMS)
    faults = []
    step = draw.randrange(4)
    while step < FIRST_FIT + SECOND_FIT:
        second = "second " if step >= FIRST_FIT else ""
        phase = draw.choice(PHASES)
        victims = draw.sample(range(NUM_RANKS), 2 if draw.random() < 0.15 else 1)
        for victim in victims:
            kinds = ["kill"] * 5 + ["kill in 0.3", "kill in 0.6"] + ["raise", "break"] * (phase in RAISING)
            faults.append((second + phase, step, victim, draw.choice(kinds)))
        for late in draw.sample([rank for rank in range(NUM_RANKS) if rank not in victims], draw.randrange(3)):
            when = max(0, step + draw.choice((-1, 0, 0, 0, 1)))
            faults.append((second + draw.choice(PHASES), when, late, f"sleep{draw.choice((0.2, 0.5, 1.2))}"))
        step += draw.randrange(2, 9)
    for place, step in EDGES:
        if draw.random() < 0.2:
            kind = draw.choice(["kill"] * 3 + ["break"])
            faults.append((place, step, draw.randrange(NUM_RANKS), kind))
    return Schedule(program=program, faults=tuple(dict.fromkeys(faults)))


def run_program(folder, program, faults=()):
    """Run a program, and return the job."""
    return run_job(
        "program_matrix.py",
        folder,
        faults=list(map(list, faults)),
        environ={"PROGRAM": program, "HANGS": "0"},
        args=("--preload", _PRELOAD, "--log-dir", str(folder / "logs"), "--tee", "3"),
        timeout_s=TIMEOUT_S,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=2)
    options = parser.parse_args()
    bad = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.parallel) as pool:
        numbers = range(options.first, options.first + options.cases)
        programs = sorted({schedule(number).program for number in numbers})
        wanted = dict(
            zip(programs, pool.map(lambda name: run_program(Path(folder) / name, name), programs), strict=True)
        )

        def one(number):
            began_s, chosen = time.monotonic(), schedule(number)
            try:
                job = run_program(Path(folder) / str(number), chosen.program, chosen.faults)
                why, log = (
                    compare(wanted[chosen.program], job, (), ignored=_SHOWN if _RESTARTED in job.output else ()),
                    logs_of(job),
                )
            except AssertionError as error:  # it did not end, or has left processes
                why, log = str(error).splitlines()[0], str(error)
            print(f"{number:5} {why or 'equal':30} {time.monotonic() - began_s:4.0f} s  {chosen}", flush=True)
            if why:
                bad.append(number)
                Path(f"/tmp/random-faults-lightning-{number}.log").write_text(log)

        list(pool.map(one, numbers))
    print(f"{options.cases} schedules, {len(bad)} failed: {sorted(bad)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
