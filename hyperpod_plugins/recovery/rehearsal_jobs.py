"""`hyperpod rehearse`: run a program briefly without a fault, and again with a SIGKILL in each phase.

Each rank of both jobs records digests of everything that it holds at each step (see `rehearsal.py`). The last fault
before the first difference between the two jobs is the one from which the program does not recover exactly; phases
that come after it are rehearsed in another job.
"""

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hyperpod_plugins.env import RehearsalEnv
from hyperpod_plugins.errors import ConfigError, RecoveryError
from hyperpod_plugins.recovery.rehearsal import RehearsedFault
from hyperpod_plugins.recovery.state_digests import Difference, Digests, differing, order_of_kind

PHASES = (
    "setup",  # before the first step
    "dataloader",
    "forward",
    "backward",
    "vote",
    "vote_result",  # one rank knows the result and others do not
    "commit",
    "optimizer",  # as an optimizer begins its step
    "between",
    "batch_end",
    "validation",
    "checkpoint",
)
"""Phases in which a rank is killed. Some exist only in Lightning; a phase that is not reached is reported as such."""
_POINTS = "state", "begun", "gradients"  # points of a step at which digests are recorded, in order
_FIRST_STEP = 2
_STEPS_AFTER = 2
_GRACE_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalPlan:
    """What to rehearse, and how."""

    program: tuple[str, ...]
    """Script and its arguments."""
    num_ranks: int = 2
    phases: tuple[str, ...] = PHASES
    timeout_s: float = 600.0
    """Time limit of one job."""
    launcher: tuple[str, ...] = ()
    """Additional arguments of hyperpodrun."""

    def __post_init__(self) -> None:
        """Validate the values."""
        unknown = [phase for phase in self.phases if phase not in PHASES]
        if unknown or not self.phases:
            raise ConfigError(
                f"phases {', '.join(unknown) or 'none'} cannot be rehearsed. Choose from {', '.join(PHASES)}."
            )
        repeated = [phase for phase in dict.fromkeys(self.phases) if self.phases.count(phase) > 1]
        if repeated:
            raise ConfigError(
                f"--phases names {', '.join(repeated)} more than once. Name each once: a job kills one rank in a phase."
            )
        if self.num_ranks < 2:
            raise ConfigError(
                f"--nproc-per-node must be at least 2, but is {self.num_ranks}: one rank is killed, the others recover."
            )
        if not self.program or not Path(self.program[0]).is_file():
            raise ConfigError(f"there is no program {self.program[0] if self.program else ''!r}. Name a Python file.")
        if self.timeout_s <= 0:
            raise ConfigError(f"--timeout must be positive, but is {self.timeout_s}")

    @property
    def num_steps(self) -> int:
        """Number of steps after which the jobs end."""
        return _FIRST_STEP + len(self.phases) + _STEPS_AFTER

    def schedule(self, phases: Sequence[str]) -> tuple[RehearsedFault, ...]:
        """One fault for each phase, each at a later step and on another rank than the one before."""
        # Rank 0 passes the result of the vote on to the others, so the fault in that phase is on rank 0.
        number_on_rank_0 = phases.index("vote_result") if "vote_result" in phases else -1
        return tuple(
            RehearsedFault(phase=phase, rank=(number - number_on_rank_0) % self.num_ranks, step=_step_of(phase, number))
            for number, phase in enumerate(phases)
        )


def _step_of(phase: str, number: int) -> int:
    return 0 if phase == "setup" else _FIRST_STEP + number


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseResult:
    """The outcome of the fault in one phase."""

    phase: str
    rank: int | None = None
    step: int | None = None
    """Step at which the fault happened; None if the program did not reach the phase."""
    difference: Difference | None = None
    failure: str = ""
    """Last output of the job if it failed, else empty."""

    @property
    def is_good(self) -> bool:
        """Whether the program recovered exactly, or never reached the phase."""
        return self.difference is None and not self.failure

    def cells(self) -> tuple[str, str, str, str]:
        """Phase, rank, step and outcome, as table cells."""
        if self.step is None and self.is_good:
            return self.phase, "", "", "not reached"
        told = (
            str(self.difference) if self.difference is not None else self.failure or "recovered, equal to the last bit"
        )
        return self.phase, str(self.rank), str(self.step), told


Records = Mapping[tuple[int, int, str], Digests]
"""Digests by rank, step and point of the step."""


def read_lines(folder: Path) -> Iterator[tuple[tuple[int, int, str], Digests]]:
    """Read the digests that the processes of a job recorded; a line that a kill has truncated is skipped."""
    for path in sorted(folder.glob("rank-*.jsonl")):
        rank = int(path.stem.removeprefix("rank-"))
        for line in path.read_text().splitlines():
            try:
                said = json.loads(line)
            except json.JSONDecodeError:
                continue
            yield (rank, said["step"], said["point"]), said["digests"]


def first_difference(wanted: Records, found: Iterator[tuple[tuple[int, int, str], Digests]]) -> Difference | None:
    """The earliest difference between two jobs; None if all digests agree.

    Points that `wanted` does not have are skipped.
    """
    differences: list[tuple[tuple[int, int, int], Difference]] = []
    for (rank, step, point), digests in found:
        expected = wanted.get((rank, step, point))
        names = () if expected is None else differing(expected, digests)
        if names:
            what = "computing it" if point == "gradients" else "at its beginning"
            found_here = Difference(rank=rank, step=step, what=what, names=names)
            # If the batch of one rank differs, the gradients of all ranks do.
            differences.append(((step, _POINTS.index(point), order_of_kind(found_here.kind)), found_here))
    return min(differences, key=lambda each: each[0])[1] if differences else None


def rehearse(plan: RehearsalPlan, say: Callable[[str], None]) -> list[PhaseResult]:
    """Run the jobs of a plan.

    Args:
        plan: what to rehearse.
        say: called with a line of text before each job.

    Returns:
        One result per phase, in the order of the plan.

    Raises:
        RecoveryError: the job without a fault failed, or its program does not support recovery in place.
    """
    with tempfile.TemporaryDirectory(prefix="hyperpod-rehearsal-") as place:
        calm = Path(place, "calm")
        say(f"{plan.num_steps} steps on {plan.num_ranks} ranks without a fault")
        failure = _run(plan, calm, ())
        if failure:
            raise RecoveryError(f"the program failed without a fault:\n{failure}")
        wanted = dict(read_lines(calm))
        if not wanted:
            raise RecoveryError(
                "the program ran no step that can be recovered. It needs Trainer(strategy='hyperpod') without "
                "CheckpointlessRecovery(enabled=False), or a Session."
            )
        results: dict[str, PhaseResult] = {}
        left = list(plan.phases)
        while left:
            say(f"again, with a SIGKILL in: {', '.join(left)}")
            folder = Path(place, f"faults-{len(left)}")
            faults = plan.schedule(left)
            failure = _run(plan, folder, faults)
            found = judge(faults, _happened(folder), failure, first_difference(wanted, read_lines(folder)))
            results.update({result.phase: result for result in found})
            judged = [phase for phase in left if phase not in results]
            left = judged if len(judged) < len(left) else []
        return [results[phase] for phase in plan.phases]


def judge(
    faults: Sequence[RehearsedFault], happened: Mapping[str, int], failure: str, difference: Difference | None
) -> list[PhaseResult]:
    """Derive results from a job with faults: for all phases, or for those up to the one that did not recover.

    Args:
        faults: the faults as scheduled.
        happened: for each fault that happened, its phase and step, in the order of occurrence.
        failure: last output of the job if it failed, else empty.
        difference: the first difference from the job without a fault.
    """
    order = list(happened)
    if difference is None and not failure:
        return [_result(fault, happened) for fault in faults]
    culprits = [phase for phase in order if difference is None or happened[phase] <= difference.step]
    if not culprits:  # no fault had happened yet: the program itself is not deterministic
        culprits = order[:1] or [faults[0].phase]
    culprit = culprits[-1]
    results: list[PhaseResult] = []
    for fault in faults:
        if fault.phase == culprit:
            told = "" if difference is not None else f"the job ended: {failure.strip().splitlines()[-1][:300]}"
            place = {"rank": fault.rank, "step": happened.get(fault.phase)}
            results.append(PhaseResult(phase=fault.phase, difference=difference, failure=told, **place))
        elif fault.phase in culprits:
            results.append(_result(fault, happened))
    return results


def _result(fault: RehearsedFault, happened: Mapping[str, int]) -> PhaseResult:
    step = happened.get(fault.phase)
    return PhaseResult(phase=fault.phase, rank=fault.rank if step is not None else None, step=step)


def _happened(folder: Path) -> dict[str, int]:
    markers = sorted(folder.glob("fault-*.json"), key=lambda path: path.stat().st_mtime_ns)
    texts = [marker.read_text() for marker in markers]
    return {said["phase"]: said["at_step"] for said in map(json.loads, filter(None, texts))}


def _run(plan: RehearsalPlan, folder: Path, faults: Sequence[RehearsedFault]) -> str:
    """Run one job. Returns the end of its output if it failed, else an empty string."""
    folder.mkdir()
    environ = RehearsalEnv(
        folder=str(folder), last_step=plan.num_steps, faults=",".join(fault.to_text() for fault in faults)
    )
    command = [sys.executable, "-m", "hyperpod_plugins.elastic.launcher.main", "--nproc-per-node", str(plan.num_ranks)]
    with (folder / "output").open("w+") as output:
        job = subprocess.Popen(
            [*command, *plan.launcher, *plan.program],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ.merged_environ(),
            start_new_session=True,
        )
        try:
            code: int | None = job.wait(plan.timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if job.poll() is None:
                job.send_signal(signal.SIGTERM)
                try:
                    job.wait(_GRACE_S)
                except subprocess.TimeoutExpired:
                    job.kill()
                    job.wait()
        output.seek(0)
        text = output.read()
    if code is None:
        return f"{text[-6000:]}\nit did not end within {plan.timeout_s:.0f} s"
    return "" if code == 0 else text[-6000:] or f"exit code {code}"


def format_table(results: Sequence[PhaseResult]) -> list[str]:
    """Lines of a table of results."""
    rows = [("phase", "rank", "step", "after a SIGKILL there"), *(result.cells() for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows]
