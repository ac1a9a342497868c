"""Each kind of fault in each phase of each program: it ends with the same bits, or is refused before the first step.

    python tests/recovery/matrix.py --kinds kill,stop --programs hsdp,muon --phases commit,voted --parallel 2
    python tests/recovery/matrix.py --kinds segfault --programs hsdp --repeat 100 --keep /tmp/matrix

Prints a line a job while it runs, and a table at the end; exits with 1 if a cell failed. `test_matrix.py` runs a part.
The second call looks for what fails rarely: it runs each job a hundred times, and keeps what the ranks of those that
fail have printed, and their results, beside those of the undisturbed job.

Faults of several phases come one after the other in one job, at steps of their own. Where that job fails it is run
again with one half of the phases each, down to the one that fails by itself; if none does, and all fail together a
second time, all have failed.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

try:
    from faults import Job, left_processes, run_job
except ImportError:  # collected by pytest
    from recovery.faults import Job, left_processes, run_job

KINDS = {"kill": "SIGKILL", "stop": "SIGSTOP", "raise": "exception", "segfault": "SIGSEGV"}
PROGRAMS = ("hsdp", "tensor", "full", "convolution", "ema", "muon", "accumulation", "manual", "counting")
PHASES = {
    "setup": ("setup 1 3",),  # before the first step
    "fetch": ("fetch 1 1",),
    "forward": ("forward 2 2",),
    "backward": ("backward 3 3",),
    "vote": ("vote 4 0",),
    "voted": ("voted 5 1",),  # the vote is complete, and nothing is committed
    "commit": ("commit 7 0",),  # between two writes of the optimizer
    "committed": ("committed 9 1",),
    "hooks": ("hooks 11 0",),
    "epoch end": ("epoch end 12 2",),
    "validation": ("validation 12 3",),
    "snapshot": ("snapshot 14 3",),  # in the middle of the exchange
    "give": ("forward 15 2 kill", "give 15 -1"),  # in the middle of the copy for another one that was lost
    "take": ("forward 16 1 kill", "take 0 -1"),
    "save": ("save 18 2",),
    "fit end": ("train end 20 2",),  # the loops have ended, and are entered again
    "validate": ("validate 0 1",),
    "between": ("between 0 3",),  # two fits
    "fit start": ("fit start 2 1 break",),  # before it is known where the second fit begins
    "second fit": ("second forward 21 0",),
    "test": ("test 0 2",),
}
"""Faults of each phase: place, step, rank, and what happens there if it is always the same.

Where the others may commit the step and go on before they notice, the next fault comes two steps later: it is another
question what is left when a rank and its buddy are lost together.
"""
_COPIES = ("give", "take")
_MAX_OWN_FAULTS = 2
"""Of one rank in one job: the third one in a row of a young process ends it."""
_OWN_FAULTS = ("raise", "segfault")
_NUM_RANKS = 4
_CALM_FAILED = "the undisturbed job failed"
TIMEOUT_S = 240.0
_PRELOAD = "torch,torch.distributed.fsdp,lightning.pytorch,torchmetrics"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Phases that are run in one job."""

    program: str
    kind: str
    phases: tuple[str, ...]

    def __str__(self) -> str:
        """For people."""
        return f"{self.program}, {KINDS[self.kind]} in {', '.join(self.phases)}"

    @property
    def faults(self) -> list[list[str | int]]:
        """As `faults.py` reads them."""
        return [fault_of(text, self.kind) for phase in self.phases for text in PHASES[phase]]

    def split(self) -> "tuple[Cells, Cells]":
        """Two halves."""
        half = len(self.phases) // 2
        return replace(self, phases=self.phases[:half]), replace(self, phases=self.phases[half:])


def fault_of(text: str, kind: str) -> list[str | int]:
    """Place, step, rank and action of one fault."""
    words = text.split()
    action = kind if words[-1].lstrip("-").isdecimal() else words.pop()
    *place, step, rank = words
    return [" ".join(place), int(step), int(rank), action]


def jobs_of(program: str, kind: str, phases: Sequence[str]) -> list[Cells]:
    """All phases in one job, or in several where more faults than a job may have are the program's own."""
    together = [phase for phase in phases if not (program == "full" and phase in _COPIES)]
    alone = [phase for phase in phases if phase not in together]  # there snapshots are not in shared memory
    parts = [part for group in (together, alone) for part in _parts_of(group, kind)]
    return [Cells(program=program, kind=kind, phases=tuple(part)) for part in parts]


def _parts_of(phases: Sequence[str], kind: str) -> list[list[str]]:
    """Each phase in the first job that it still fits in."""
    parts: list[list[str]] = []
    for phase in phases:
        for part in parts:
            ranks = Counter(rank for each in (*part, phase) for rank in _own_faults(each, kind))
            if max(ranks.values(), default=0) <= _MAX_OWN_FAULTS:
                part.append(phase)
                break
        else:
            parts.append([phase])
    return parts


def _own_faults(phase: str, kind: str) -> list[int]:
    """Ranks that fail by themselves in a phase; all, where it may be any."""
    ranks = [rank for _, _, rank, action in (fault_of(text, kind) for text in PHASES[phase]) if action in _OWN_FAULTS]
    return [each for rank in ranks for each in (range(_NUM_RANKS) if rank == -1 else (int(rank),))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one fault."""

    program: str
    kind: str
    phase: str
    outcome: str
    """`ok`, `refused` or `FAILED`."""
    why: str = ""


class Matrix:
    """Runs jobs, and compares each with an undisturbed one of the same program."""

    def __init__(
        self, folder: Path, pool: ThreadPoolExecutor, timeout_s: float = TIMEOUT_S, *, keeps_failed: bool = False
    ) -> None:
        self._folder, self._keeps_failed = folder, keeps_failed
        self._pool = pool
        self._timeout_s = timeout_s
        self._calm: dict[str, Future[Job]] = {}
        self._num_jobs = 0
        self._mark = f"matrix-{uuid.uuid4().hex}"
        self._is_ended = False

    def end(self) -> None:
        """Run no more jobs, and leave no process of those that run."""
        self._is_ended = True
        for pid in left_processes(self._mark, patience_s=0.0):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def run(self, jobs: Sequence[Cells]) -> list[Outcome]:
        """Run all jobs, the undisturbed ones first; one outcome a phase."""
        for program in dict.fromkeys(job.program for job in jobs):
            self._calm[program] = self._pool.submit(self._job, program, "", ())
        futures = [self._pool.submit(self._outcomes, job) for job in jobs]
        return [outcome for future in futures for outcome in future.result()]

    def _job(self, program: str, kind: str, faults: Sequence[Sequence[str | int]]) -> Job:
        if self._is_ended:
            raise AssertionError("the matrix was ended")
        self._num_jobs += 1
        folder = self._folder / f"{self._num_jobs:03}-{program}-{kind or 'calm'}"
        logs = ("--log-dir", str(folder / "logs"), "--tee", "3")
        return run_job(
            "program_matrix.py",
            folder,
            faults=faults,
            environ={"PROGRAM": program, "HANGS": str(int(kind == "stop")), "MATRIX": self._mark},
            args=("--preload", _PRELOAD, *logs),
            timeout_s=self._timeout_s,
        )

    def _outcomes(self, cells: Cells) -> list[Outcome]:
        began_s = time.monotonic()
        why, log = self._judge(cells)
        say(f"{'FAILED' if why else 'ok':8} {time.monotonic() - began_s:5.0f} s  {cells}  {why}")
        if why.startswith("refused"):
            return [self._outcome(cells, phase, "refused", why) for phase in cells.phases]
        if why and len(cells.phases) > 1 and why != _CALM_FAILED:
            found = [outcome for half in cells.split() for outcome in self._outcomes(half)]
            if any(each.outcome != "ok" for each in found) or not (why := self._judge(cells)[0]):
                return found
            return [replace(each, outcome="FAILED", why=f"only together, twice: {why}") for each in found]
        if why:
            say(log)
        return [self._outcome(cells, phase, "FAILED" if why else "ok", why) for phase in cells.phases]

    def _outcome(self, cells: Cells, phase: str, outcome: str, why: str) -> Outcome:
        return Outcome(program=cells.program, kind=cells.kind, phase=phase, outcome=outcome, why=why)

    def _judge(self, cells: Cells) -> tuple[str, str]:
        """Why a job failed, empty if it did not, and what its ranks said."""
        calm = self._calm[cells.program].result()
        if calm.code != 0:
            refused = [line.strip() for line in calm.output.splitlines() if "ConfigError: " in line]
            return f"refused: {refused[-1]}" if refused else _CALM_FAILED, logs_of(calm)
        try:
            job = self._job(cells.program, cells.kind, cells.faults)
        except AssertionError as error:  # it did not end, or has left processes
            return str(error).splitlines()[0], str(error)
        why = compare(calm, job, cells.faults)
        if why and self._keeps_failed:
            say(f"kept in {job.folder}; the undisturbed one in {calm.folder}")
        elif self._keeps_failed:
            shutil.rmtree(job.folder)
        return why, logs_of(job) if why else ""


def compare(calm: Job, job: Job, faults: Sequence[Sequence[str | int]], *, ignored: tuple[str, ...] = ()) -> str:
    """What is wrong with a job; empty if nothing is. Names that begin with one of `ignored` are not compared."""
    happened = {path.name for path in job.folder.glob("fault-*")}
    missing = [fault for fault in faults if "fault-" + "-".join(map(str, fault)) not in happened]
    if job.code != 0:
        last = [line for line in job.output.splitlines() if "Error: " in line or "the job ends" in line]
        return f"exit code {job.code}: {last[-1].strip()[:300] if last else '?'}"
    if missing:
        return f"did not happen: {missing}"
    for rank, (wanted, found) in enumerate(zip(calm.results(), job.results(), strict=True)):
        for part in ("first", "second"):
            wanted_part, found_part = (
                {name: value for name, value in each[part].items() if not name.startswith(ignored)}
                for each in (wanted, found)
            )
            names = [name for name, value in wanted_part.items() if not is_same(value, found_part.get(name))]
            if names or wanted_part.keys() != found_part.keys():
                return f"rank {rank}, after the {part} fit, other bits: {', '.join(names)[:300]}"
        for part in ("validated", "tested"):
            if wanted[part] != found[part]:
                return f"rank {rank}, {part}: {found[part]} instead of {wanted[part]}"
    return ""


def is_same(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Whether both have the same bits."""
    return other is not None and one.dtype == other.dtype and torch.equal(one, other)


def logs_of(job: Job) -> str:
    """The end of what each process and the agent printed."""
    paths = sorted(path for path in (job.folder / "logs").rglob("*.log") if path.stat().st_size)
    parts = [f"--- {path.relative_to(job.folder)}\n{path.read_text()[-3000:]}" for path in paths]
    return "\n".join([*parts, f"--- agent and all ranks\n{job.output[-6000:]}"])


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Lines for people: one table a kind, one row a phase, one column a program."""
    found = {(each.kind, each.phase, each.program): each.outcome for each in outcomes}
    programs = [name for name in PROGRAMS if any(each.program == name for each in outcomes)]
    lines: list[str] = []
    for kind in dict.fromkeys(each.kind for each in outcomes):
        rows = [[KINDS[kind], *programs]]
        rows += [
            [phase, *(found.get((kind, phase, program), "") for program in programs)]
            for phase in PHASES
            if any((kind, phase, program) in found for program in programs)
        ]
        lines += ["", *("  ".join(cell.ljust(12) for cell in row).rstrip() for row in rows)]
    return lines


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)


def main() -> int:
    """Run what was asked for; 1 if a cell failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, values in (("kinds", KINDS), ("phases", PHASES), ("programs", PROGRAMS)):
        parser.add_argument(f"--{name}", default=",".join(values), help="separated by commas")
    parser.add_argument("--parallel", type=int, default=2, help="jobs at a time, of four ranks each")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds for one job")
    parser.add_argument("--json", type=Path, help="write the cells to this file")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="run each job N times")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the folders of jobs that fail, in this one")
    args = parser.parse_args()
    if args.repeat < 1:
        parser.error(f"--repeat is {args.repeat}, and must be 1 or more.")
    chosen = {name: getattr(args, name).split(",") for name in ("kinds", "phases", "programs")}
    for name, values in (("kinds", KINDS), ("phases", PHASES), ("programs", PROGRAMS)):
        unknown = [each for each in chosen[name] if each not in values]
        if unknown:
            parser.error(f"--{name} has {', '.join(unknown)}. Choose of {', '.join(values)}.")
    phases = [phase for phase in PHASES if phase in chosen["phases"]]
    jobs = [job for program in chosen["programs"] for kind in chosen["kinds"] for job in jobs_of(program, kind, phases)]
    jobs *= args.repeat
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="matrix-") as temporary, ThreadPoolExecutor(args.parallel) as pool:
        if args.keep is not None:
            args.keep.mkdir(parents=True, exist_ok=True)
        folder = temporary if args.keep is None else tempfile.mkdtemp(dir=args.keep)
        matrix = Matrix(Path(folder), pool, args.timeout, keeps_failed=args.keep is not None)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        try:
            outcomes = matrix.run(jobs)
        finally:
            matrix.end()
    num_failed = sum(outcome.outcome == "FAILED" for outcome in outcomes)
    for line in table(outcomes):
        say(line)
    say(f"\n{len(outcomes)} cells, {num_failed} failed, in {(time.monotonic() - began_s) / 60:.0f} min")
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
