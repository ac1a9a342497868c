"""`hyperpod rehearse`: run a program briefly without a fault, and again with a SIGKILL in each phase.

Both jobs run the whole program, but each of its fits and loops ends after a few steps. Each rank records digests of
everything that it holds at each step (see `rehearsal.py`), and of what evaluations return. The last fault before the
first difference between the two jobs is the one from which the program does not recover exactly; phases that come after
it are rehearsed in another job. If there is a difference, another job without a fault shows what differs between any
two runs of the program, such as a time that a callback saves; this is not compared.

The processes of a rehearsed job share a folder: their digests, and the faults that have happened.

    file                      content                                                      written by
    rank-RANK.jsonl           digests of that rank, one line for each point of a call       each process of that rank
    fault-PHASE.json          a fault that has happened, so that it does not happen again   the process that it kills
    begins-ENTRY-STEP         number of steps before a call that trains                     each process that begins it

A call of the program that trains or evaluates is an entry; see `entries.py`.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple, Self

from hyperpod_plugins.env import RehearsalEnv
from hyperpod_plugins.errors import ConfigError, RecoveryError, format_list
from hyperpod_plugins.recovery.snapshot import SnapshotPolicy
from hyperpod_plugins.recovery.state_digests import (
    Difference,
    Digests,
    differing_names,
    first_kind,
    order_of_kind,
)

LATER_STEPS = 3
"""Steps of each call that trains, except of the first one."""
MAX_EVALUATION_BATCHES = 4
"""Batches of an evaluation under Lightning."""
STATE_LOST, STATE_COPY = "state_lost", "state_copy"
"""A rank is killed, and its replacement is killed while it receives its state: two faults that form one phase."""
_SNAPSHOT_STEPS = 2
IN_FIRST_FIT = (
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
    "save_state",  # of an Accelerator
    "snapshot",  # in the middle of its exchange
    STATE_COPY,  # a rank, and its replacement while it receives its state
)
"""Phases of the first fit or loop of a program."""
_IN_EVALUATION = "validate", "test", "predict"  # at the end of a batch
REHEARSED_PHASES = (
    *IN_FIRST_FIT,
    "between_fits",  # in the set-up of the second one
    "second_fit",  # in its forward
    *_IN_EVALUATION,
)
"""Phases in which a rank is killed. Some exist only in Lightning; a phase that is not reached is reported as such."""
_POINTS = "state", "begun", "gradients", "end", "result"  # points at which digests are recorded, in order
_WHERE = {"gradients": "computing it", "end": "after its last step", "result": ""}
_STEP_LATER = {"second_fit": 1}  # the number of steps of that fit before the fault
_FIRST_STEP = 2
_STEPS_APART = 2
"""Steps between two faults: no rank commits the step after a fault before that is repaired, so two never coincide."""
_STEPS_AFTER = 2
_GRACE_S = 20.0
_NO_PROGRESS = "all processes were started again"  # see `elastic.membership.restart_policy.no_progress_message`
_MUST_AGREE = ("batch", "gradient", "unowned", "parameter", "buffer", "optimizer")
"""Kinds that are the same in each run of a deterministic program."""


class DigestLog:
    """Digest log of one rank, to which all processes of its worker slot append.

    Args:
        folder: of the job.
        rank: of this process.
        entry: number of the present call of the program.
        call: name of the call, for messages; empty for the first one that trains.
    """

    def __init__(self, folder: Path, rank: int, *, entry: int = 0, call: str = "") -> None:
        self._folder, self._path = folder, folder / f"rank-{rank}.jsonl"
        self._entry, self._call = entry, call

    def write(self, step: int, point: str, digests: Digests) -> None:
        """Append the digests of this rank at a point of a step, with the faults that have happened by now."""
        faults = [path.stem.removeprefix("fault-") for path in self._folder.glob("fault-*.json")]
        line = {"entry": self._entry, "call": self._call, "step": step, "point": point, "after": faults}
        with self._path.open("a") as file:  # on a line of its own, even if a kill has truncated the one before
            file.write(f"\n{json.dumps(line | {'digests': digests})}\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsedFault:
    """A SIGKILL when a rank first reaches a phase, in a fit or loop after `step` of its steps or later."""

    phase: str
    rank: int
    step: int

    def to_text(self) -> str:
        """Text form, for an environment variable."""
        return f"{self.phase}:{self.rank}:{self.step}"


class ScheduledFaults:
    """The scheduled faults of one rank in a rehearsed job. Each happens once: a marker file tells the replacement.

    Args:
        folder: of the job.
        text: the schedule; see `parse_schedule`.
        rank: of this process.
        begins_at: returns the number of steps before the present fit or loop, which are not counted.
    """

    def __init__(self, folder: Path, text: str, rank: int, begins_at: Callable[[], int] = lambda: 0) -> None:
        self._folder, self._begins_at = folder, begins_at
        self._faults = [fault for fault in parse_schedule(text) if fault.rank == rank]

    def is_due(self, phase: str, step: int) -> bool:
        """Whether a fault would happen here."""
        return self._due(phase, step) is not None

    def reach(self, phase: str, step: int) -> None:
        """Kill this process if a fault is due in this phase of a step."""
        fault = self._due(phase, step)
        if fault is None:
            return
        with contextlib.suppress(FileExistsError):
            with self._marker(phase).open("x") as file:
                file.write(json.dumps(asdict(fault) | {"at_step": step}))
                file.flush()
                os.fsync(file.fileno())
            os.kill(os.getpid(), signal.SIGKILL)

    def _due(self, phase: str, step: int) -> RehearsedFault | None:
        named = [each for each in self._faults if each.phase == phase]
        if not named or self._marker(phase).exists():
            return None
        if phase == STATE_COPY and not self._marker(STATE_LOST).exists():
            return None
        done = step - self._begins_at()
        return next((each for each in named if done >= each.step), None)

    def _marker(self, phase: str) -> Path:
        return self._folder / f"fault-{phase}.json"


def parse_schedule(text: str) -> list[RehearsedFault]:
    """Parse comma-separated faults, each as `RehearsedFault.to_text` returns it."""
    parts = (part.split(":") for part in text.split(",") if part)
    return [RehearsedFault(phase=phase, rank=int(rank), step=int(step)) for phase, rank, step in parts]


class RehearsedCall:
    """The present call of the program in one process of a rehearsed job.

    Args:
        env: what `hyperpod rehearse` tells its workers.
        rank: of this process.
        entry: number of the call.
        training_index: number of the call among those that train; None if it evaluates.
        kind: what an evaluation is, for messages.
    """

    def __init__(self, env: RehearsalEnv, rank: int, entry: int, *, training_index: int | None, kind: str) -> None:
        self._folder, self._entry = Path(env.folder), entry
        self._num_steps = LATER_STEPS if training_index else env.num_steps
        self.is_later_training = bool(training_index)
        """Whether the program has trained before, in another call."""
        self._begins_at: int | None = None
        call = kind if training_index is None else f"training {training_index + 1}" if training_index else ""
        self._log = DigestLog(self._folder, rank, entry=entry, call=call)
        self.faults = ScheduledFaults(self._folder, env.faults, rank, lambda: self.begins_at or 0)
        """Faults of this rank."""

    @classmethod
    def create(cls, rank: int, entry: int, *, training_index: int | None = None, kind: str = "") -> Self | None:
        """The present call; None outside of a rehearsed job."""
        env = RehearsalEnv.from_environ()
        return None if env is None else cls(env, rank, entry, training_index=training_index, kind=kind)

    def write(self, step: int, point: str, digests: Digests) -> None:
        """Record digests of this rank at a point of a step."""
        self._log.write(step, point, digests)

    def begin_at(self, step: int) -> None:
        """Record the number of steps before this call, unless an earlier process has."""
        if self.begins_at is None:
            (self._folder / f"begins-{self._entry}-{step}").touch()

    @property
    def begins_at(self) -> int | None:
        """Number of steps before this call; None if no process has recorded it yet."""
        if self._begins_at is None:
            found = self._folder.glob(f"begins-{self._entry}-*")
            self._begins_at = next((int(path.name.rpartition("-")[2]) for path in found), None)
        return self._begins_at

    def is_last(self, step: int) -> bool:
        """Whether the fit or loop ends after `step` steps, as if it had no more data."""
        return self.begins_at is not None and step >= self.begins_at + self._num_steps

    def snapshots(self, policy: SnapshotPolicy) -> SnapshotPolicy:
        """The policy with an interval of a few steps, so that a rehearsal sees some snapshots, if there are any."""
        return replace(policy, every_steps=min(policy.every_steps, _SNAPSHOT_STEPS), is_measured=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalPlan:
    """What to rehearse, and how."""

    program: tuple[str, ...]
    """Script and its arguments."""
    num_ranks: int = 2
    phases: tuple[str, ...] = REHEARSED_PHASES
    timeout_s: float = 600.0
    """Time limit of one job."""
    launcher: tuple[str, ...] = ()
    """Additional arguments of hyperpodrun."""

    def __post_init__(self) -> None:
        """Validate the values."""
        unknown = [phase for phase in self.phases if phase not in REHEARSED_PHASES]
        if unknown or not self.phases:
            raise ConfigError(
                f"phases {', '.join(unknown) or 'none'} cannot be rehearsed. Choose from {', '.join(REHEARSED_PHASES)}."
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
        """Number of steps after which the first fit or loop ends."""
        num_faults = sum(phase in IN_FIRST_FIT for phase in self.phases)
        return _FIRST_STEP + _STEPS_APART * max(0, num_faults - 1) + 1 + _STEPS_AFTER

    def schedule(self, phases: Sequence[str]) -> tuple[RehearsedFault, ...]:
        """One fault for each phase, each on another rank than the one before, and in the first fit at a later step."""
        # Rank 0 passes the result of the vote on to the others, so the fault in that phase is on rank 0.
        number_on_rank_0 = phases.index("vote_result") if "vote_result" in phases else -1
        faults: list[RehearsedFault] = []
        num_before = 0
        for number, phase in enumerate(phases):
            step = _STEP_LATER.get(phase, 0)
            if phase in IN_FIRST_FIT:
                step = 0 if phase == "setup" else _FIRST_STEP + _STEPS_APART * num_before
                num_before += 1
            faults.append(RehearsedFault(phase=phase, rank=(number - number_on_rank_0) % self.num_ranks, step=step))
        return tuple(faults)


def all_faults(faults: Sequence[RehearsedFault]) -> Iterator[RehearsedFault]:
    """The faults of a schedule as the workers read them: the phase `state_copy` consists of two."""
    for fault in faults:
        if fault.phase == STATE_COPY:
            yield replace(fault, phase=STATE_LOST)
        yield replace(fault, step=0) if fault.phase == STATE_COPY else fault


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
    shown: Difference | None = None
    """Logged values of which a rank shows another rank's, which changes nothing else."""

    @property
    def is_good(self) -> bool:
        """Whether the program recovered exactly, or never reached the phase."""
        return self.difference is None and not self.failure

    def cells(self) -> tuple[str, str, str, str]:
        """Phase, rank, step and outcome, as table cells."""
        if self.step is None and self.is_good:
            return self.phase, "", "", "not reached"
        told = self.failure or "recovered, equal to the last bit"
        step = "" if self.step is None or self.phase in _IN_EVALUATION else str(self.step)
        if self.difference is not None:
            told = str(self.difference)
        elif self.shown is not None and not self.failure:
            told = f"{told}, except for values that are shown: {self.shown}"
        return self.phase, str(self.rank), step, told


class DigestPoint(NamedTuple):
    """A point of a program at which a rank records digests; `order` is its place in time."""

    entry: int
    """Number of the call of the program that trains or evaluates."""
    rank: int
    step: int
    point: str

    @property
    def order(self) -> tuple[int, int, int]:
        """Entry, step and index of the point: smaller for an earlier place."""
        return self.entry, self.step, _POINTS.index(self.point)


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestLine:
    """What one rank held at a point of a step, or what an evaluation returned there."""

    entry: int = 0
    call: str = ""
    """Name of the call of the program, for messages; empty for the first one that trains."""
    rank: int
    step: int
    point: str
    digests: Digests
    after: frozenset[str] = frozenset()
    """Phases in which a rank had been killed before."""

    @property
    def place(self) -> DigestPoint:
        """Where it was recorded."""
        return DigestPoint(self.entry, self.rank, self.step, self.point)


Records = Mapping[DigestPoint, Digests]
"""Digests of a job without a fault, by place."""


def records(lines: Iterable[DigestLine]) -> Records:
    """The digests of a job, by place."""
    return {line.place: line.digests for line in lines}


def read_lines(folder: Path) -> Iterator[DigestLine]:
    """Read the digests that the processes of a job recorded; a line that a kill has truncated is skipped."""
    for path in sorted(folder.glob("rank-*.jsonl")):
        rank = int(path.stem.removeprefix("rank-"))
        for line in path.read_text().splitlines():
            try:
                said = json.loads(line)
            except json.JSONDecodeError:
                continue
            yield DigestLine(
                entry=said["entry"],
                call=said["call"],
                rank=rank,
                step=said["step"],
                point=said["point"],
                digests=said["digests"],
                after=frozenset(map(_phase_of, said["after"])),
            )


def _phase_of(fault: str) -> str:
    """The phase that a fault belongs to."""
    return STATE_COPY if fault == STATE_LOST else fault


def first_difference(
    wanted: Records, found: Iterable[DigestLine], ignored: Collection[str] = (), *, of_shown: bool = False
) -> Difference | None:
    """The earliest difference between two jobs; None if all digests agree.

    After the last step only what both jobs have recorded is compared: a process that starts again records tensors only.
    So are gradients, of which some may be those of an earlier step; see `StepGradients`.

    Args:
        wanted: digests of the job without a fault; points that it does not have are skipped.
        found: digests of the other job.
        ignored: names that are not compared.
        of_shown: whether to compare only the logged values that both jobs show, instead of all else.
    """
    differences: list[tuple[tuple[tuple[int, int, int], int, int], Difference]] = []
    for line in found:
        expected = wanted.get(line.place, line.digests)
        differing = differing_names(expected, line.digests) - {*ignored}
        in_both = expected.keys() & line.digests.keys()
        if line.point == "end":
            differing &= in_both
        differing -= {name for name in differing if name.startswith("gradient ") and name not in in_both}
        shown = {name for name in differing & in_both if name.startswith("logged ")}
        names = first_kind(shown if of_shown else differing - shown)
        if names:
            found_here = Difference(
                call=line.call,
                rank=line.rank,
                step=line.step,
                what=_WHERE.get(line.point, "at its beginning"),
                names=names,
                after=line.after,
            )
            # If the batch of one rank differs, the gradients of all ranks do. A call may run twice.
            order = line.place.order, order_of_kind(found_here.kind), len(line.after)
            differences.append((order, found_here))
    return min(differences, key=lambda each: each[0])[1] if differences else None


def unsteady_names(one: Records, other: Records) -> set[str]:
    """Names that differ between two jobs without a fault.

    Raises:
        RecoveryError: these include gradients or parameters, so the program is not deterministic.
    """
    lines = [DigestLine(**place._asdict(), digests=each) for place, each in other.items()]
    found, names = first_difference(one, lines), set[str]()
    for place in one.keys() & other.keys():
        names |= differing_names(one[place], other[place])
    if found is not None and any(name.partition(" ")[0] in _MUST_AGREE for name in names):
        raise RecoveryError(
            f"two runs without a fault differ: {found} Only a program that computes the same in each run can be "
            "rehearsed: seed all of its random generators (seed_everything), and use deterministic operations."
        )
    return names


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
        say(f"the program on {plan.num_ranks} ranks without a fault; its first fit has at most {plan.num_steps} steps")
        wanted = _run_undisturbed(plan, Path(place, "calm"))
        unsteady: set[str] | None = None
        results: dict[str, PhaseResult] = {}
        left = list(plan.phases)
        while left:
            say(f"again, with a SIGKILL in: {', '.join(left)}")
            folder = Path(place, f"faults-{len(left)}")
            faults = plan.schedule(left)
            failure = _run(plan, folder, faults)
            difference = first_difference(wanted, read_lines(folder), unsteady or ())
            if difference is not None and unsteady is None:
                say("again without a fault, to see what differs anyway")
                unsteady = unsteady_names(wanted, _run_undisturbed(plan, Path(place, "calm-again")))
                if unsteady:
                    say(f"not compared, as two runs without a fault differ: {format_list(sorted(unsteady), 8)}")
                difference = first_difference(wanted, read_lines(folder), unsteady)
            shown = first_difference(wanted, read_lines(folder), unsteady or (), of_shown=True)
            found = judge(faults, read_happened(folder), failure, difference, shown)
            results.update({result.phase: result for result in found})
            judged = [phase for phase in left if phase not in results]
            left = judged if len(judged) < len(left) else []
        return [results[phase] for phase in plan.phases]


def _run_undisturbed(plan: RehearsalPlan, folder: Path) -> Records:
    """Run a job without a fault, and return its digests.

    Raises:
        RecoveryError: it failed, or its program does not support recovery in place.
    """
    failure = _run(plan, folder, ())
    if failure:
        raise RecoveryError(
            f"the program failed without a fault, in a rehearsal where its fits end early (there HYPERPOD_REHEARSAL is "
            f"set in its environment):\n{failure}"
        )
    found = records(read_lines(folder))
    if not found:
        raise RecoveryError(
            "the program ran no step that can be recovered. It needs Trainer(strategy='hyperpod') without "
            "CheckpointlessRecovery(enabled=False), or a Session."
        )
    return found


def judge(
    faults: Sequence[RehearsedFault],
    happened: Mapping[str, int | None],
    failure: str,
    difference: Difference | None,
    shown: Difference | None = None,
) -> list[PhaseResult]:
    """Derive results from a job with faults: for all phases, or for those up to the one that did not recover.

    A job allows few restarts from the same place. If a job has ended for that, the last fault gets no result: another
    job begins with it.

    Args:
        faults: the faults as scheduled.
        happened: for each fault that happened, its phase and step, in the order of occurrence; None for the step of a
            phase of two faults of which only the first one happened.
        failure: last output of the job if it failed, else empty.
        difference: the first difference from the job without a fault.
        shown: the first of the logged values that ranks show.
    """
    order = list(happened)
    noted = [phase for phase in order if shown is not None and phase in shown.after][-1:]
    if difference is None and not failure:
        found = [_result(fault, happened) for fault in faults]
        return [replace(each, shown=shown) if each.phase in noted else each for each in found]
    culprits = [phase for phase in order if difference is None or phase in difference.after]
    if not culprits:  # no fault had happened yet: the program itself is not deterministic
        culprits = order[:1] or [faults[0].phase]
    culprit = culprits[-1]
    if difference is None and _NO_PROGRESS in failure and len(culprits) > 1:
        culprits, culprit = culprits[:-1], ""
    results: list[PhaseResult] = []
    for fault in faults:
        if fault.phase == culprit:
            told = "" if difference is not None else f"the job ended: {_last_error(failure)}"
            step = happened.get(fault.phase)
            results.append(
                PhaseResult(phase=fault.phase, rank=fault.rank, step=step, difference=difference, failure=told)
            )
        elif fault.phase in culprits:
            results.append(_result(fault, happened))
    return results


def _last_error(output: str) -> str:
    """The last line of an output that names an error, or else the last one that says anything."""
    lines = [line.strip() for line in output.splitlines() if any(map(str.isalnum, line))]
    errors = [line for line in lines if re.search(r"\w(Error|Failed|Lost|Exception)\b", line)]
    return (errors or lines or ["without a word"])[-1][:300]


def _result(fault: RehearsedFault, happened: Mapping[str, int | None]) -> PhaseResult:
    step = happened.get(fault.phase)
    return PhaseResult(phase=fault.phase, rank=fault.rank if step is not None else None, step=step)


def read_happened(folder: Path) -> dict[str, int | None]:
    """The faults that have happened in a job, as `judge` takes them."""
    markers = sorted(folder.glob("fault-*.json"), key=lambda path: path.stat().st_mtime_ns)
    texts = [marker.read_text() for marker in markers]
    steps: dict[str, int] = {said["phase"]: said["at_step"] for said in map(json.loads, filter(None, texts))}
    happened: dict[str, int | None] = {}
    for phase, step in steps.items():
        happened.setdefault(_phase_of(phase), step)
    if STATE_LOST in steps and STATE_COPY not in steps:
        happened[STATE_COPY] = None
    return happened


def _run(plan: RehearsalPlan, folder: Path, faults: Sequence[RehearsedFault]) -> str:
    """Run one job. Returns the end of its output if it failed, else an empty string."""
    folder.mkdir()
    environ = RehearsalEnv(
        folder=str(folder), num_steps=plan.num_steps, faults=",".join(fault.to_text() for fault in all_faults(faults))
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
