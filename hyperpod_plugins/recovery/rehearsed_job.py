"""What the processes of a rehearsed job share in its folder: their digests, and the faults that have happened.

    file                      content                                                      written by
    rank-RANK.jsonl           digests of that rank, one line for each point of a call       each process of that rank
    fault-PHASE.json          a fault that has happened, so that it does not happen again   the process that it kills
    begins-ENTRY-STEP         number of steps before a call that trains                     each process that begins it

A call of the program that trains or evaluates is an entry; see `entries.py`. `hyperpod rehearse` starts these jobs, and
compares their digests (`rehearsal_jobs.py`).
"""

import contextlib
import json
import os
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from hyperpod_plugins.env import RehearsalEnv
from hyperpod_plugins.recovery.snapshot import SnapshotPolicy
from hyperpod_plugins.recovery.state_digests import Digests

LATER_STEPS = 3
"""Steps of each call that trains, except of the first one."""
MAX_EVALUATION_BATCHES = 4
"""Batches of an evaluation under Lightning."""
STATE_LOST, STATE_COPY = "state_lost", "state_copy"
"""A rank is killed, and its replacement is killed while it receives its state: two faults that form one phase."""
_SNAPSHOT_STEPS = 2


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
