"""The entries of a program: its calls that train or evaluate, numbered in program order, and how each has ended.

    value of the job store       content                               written by
    entry/NUMBER              EndedEntry                            each process that leaves it (the first counts)
    entries_before            how many had ended before this round  the agents, before they start their workers
    entries_folder            where the state after each is kept    the first process that keeps one
    checkpoints               [path, step, entry] of each           the first rank

Where all processes start again, the program runs from its first line. Entries that have ended are not run again: they
return what they returned, with the state after them. So the agents hand these values over to the next round.
"""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hyperpod_plugins.elastic.membership.restart_policy import JobRestart
from hyperpod_plugins.elastic.resume import check_checkpoint
from hyperpod_plugins.elastic.store.job_store import JobStore
from hyperpod_plugins.elastic.store.records import FailureRecord, JsonRecord
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.errors import ConfigError

TRAINING = ("fit", "steps")
"""Kinds of entries that train."""
CHECKPOINTS_KEY = "checkpoints"
_BEFORE = "entries_before"
_FOLDER = "entries_folder"
_FOLDER_NAME = re.compile(r"hyperpod-ended-[0-9a-f]{12}")
_WAIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedEntry(JsonRecord):
    """An entry that has come to its end on all ranks, whose state is kept."""

    number: int
    kind: str
    """`fit`, `validate`, `test`, `predict`, or `steps` for the loop of a session."""
    results: Any = None
    """What it returned, where that is small; plain values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryRecords:
    """What one round leaves to the next."""

    ended: tuple[EndedEntry, ...] = ()
    folder: str = ""

    @classmethod
    def of(cls, job_store: JobStore) -> "EntryRecords":
        """Read the records of a round."""
        return cls(ended=ended_entries(job_store), folder=str(_named_folder(job_store) or ""))

    def hand_over(self, job_store: JobStore, num_before: int) -> None:
        """Leave them to the workers of the next round, of which `num_before` entries count as ended before it."""
        if self.folder:
            job_store.set_if_absent(_FOLDER, self.folder.encode())
        for entry in self.ended:
            record_end(job_store, entry)
        job_store.set_if_absent(_BEFORE, str(num_before).encode())

    def num_training(self) -> int:
        """How many of the ended entries have trained."""
        return sum(entry.kind in TRAINING for entry in self.ended)


def record_end(job_store: JobStore, entry: EndedEntry) -> None:
    """Say that an entry has ended and its state is kept, unless somebody has."""
    job_store.set_if_absent(_name(entry.number), entry.to_json().encode())


def ended_entry(job_store: JobStore, number: int) -> EndedEntry | None:
    """The entry of a number, once it has ended; what no process of this package has written counts as none."""
    found = job_store.try_get(_name(number))
    try:
        entry = None if found is None else EndedEntry.from_json(found)
    except ValueError:
        return None
    return entry if entry is not None and entry.number == number else None


def ended_entries(job_store: JobStore) -> tuple[EndedEntry, ...]:
    """All that have ended, in order."""
    entries: list[EndedEntry] = []
    while (entry := ended_entry(job_store, len(entries))) is not None:
        entries.append(entry)
    return tuple(entries)


def num_ended_before(job_store: JobStore, job: JobEnv) -> int:
    """How many entries had ended before this round; waits for the agents to say so.

    Raises:
        DistStoreError: none of them did within a minute.
    """
    if not job.restart_count or job.agent_pid:  # torch's own agents hand nothing over
        return 0
    return int(job_store.wait_get(_BEFORE, _WAIT_S))


def folder_for(job_store: JobStore, proposed: str) -> Path:
    """Folder for the state after entries, the same on all ranks: the first that was proposed in this job.

    The store may say anything, so only a folder with a name that this package gives is used, which only this user may
    read and write; it is made here.

    Raises:
        ConfigError: the store names another one.
        OSError: it cannot be made.
    """
    job_store.set_if_absent(_FOLDER, proposed.encode())
    path = _named_folder(job_store)
    if path is None:
        raise ConfigError(
            "the job's store names a folder for the state after calls of the program that none of its processes has "
            "chosen. Somebody else writes to the store: choose an endpoint that only this job's machines reach."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(0o700)
    except FileExistsError:  # another rank was first, or the round before; `check_checkpoint` does not look at links
        if path.is_symlink():
            raise ConfigError(f"{path} is a link, and not the folder that a process of this job has made.") from None
    check_checkpoint(str(path))
    return path


def kept_folder(job_store: JobStore) -> Path | None:
    """That folder, to be removed with all that is in it; None where there is none, or somebody has named another one.

    The store may say anything, so nothing is removed but a folder whose name is one that this module gives.
    """
    path = _named_folder(job_store)
    return path if path is not None and path.is_dir() and not path.is_symlink() else None


def _named_folder(job_store: JobStore) -> Path | None:
    """What the store names, if that is an absolute path with a name that this package gives."""
    path = Path((job_store.try_get(_FOLDER) or b"").decode(errors="replace"))
    is_ours = path.is_absolute() and ".." not in path.parts and "\0" not in str(path)
    return path if is_ours and _FOLDER_NAME.fullmatch(path.name) is not None else None


def known_checkpoints(job_store: JobStore) -> list[tuple[str, int]]:
    """Path and step of each checkpoint of the entry that trains now, or is to be run next; oldest first."""
    return [(path, step) for path, step, _ in _checkpoints_of(job_store, len(ended_entries(job_store)))]


def all_checkpoints(job_store: JobStore) -> list[tuple[str, int, int]]:
    """Path, step and entry of each checkpoint that this round knows; oldest first."""
    found = job_store.try_get(CHECKPOINTS_KEY)
    try:
        rows: Any = [] if found is None else json.loads(found)
    except (ValueError, RecursionError):
        return []
    return [tuple(row) for row in rows if _is_checkpoint(row)] if isinstance(rows, list) else []


def _is_checkpoint(row: Any) -> bool:
    return isinstance(row, list) and [type(value) for value in row] == [str, int, int]


def newest_checkpoint(known: list[tuple[str, int]]) -> tuple[str, int]:
    """The last one that exists; `("", 0)` where there is none."""
    return next(((path, step) for path, step in reversed(known) if Path(path).exists()), ("", 0))


def restart_from_newest(job_store: JobStore, job: JobEnv, failure: FailureRecord) -> JobRestart:
    """How all processes start again after an failure: past what has ended, from the newest checkpoint of what has not.

    Args:
        job_store: of the round that ends.
        job: of that round.
        failure: why.
    """
    path, step = next_beginning(job_store, job.resume_from)
    return JobRestart(
        failure=failure,
        resume_from=path,
        step=step,
        entry=len(ended_entries(job_store)),
        shard_degree=job.shard_degree,  # what somebody has asked for holds on
        tensor_degree=job.tensor_degree,
    )


def next_beginning(job_store: JobStore, resumed_from: str) -> tuple[str, int]:
    """The checkpoint from which what has not ended goes on if all start again now, and its steps; `("", 0)` for none.

    Args:
        job_store: of the round that ends.
        resumed_from: checkpoint from which that round began; empty where it did not.
    """
    path, step = newest_checkpoint(known_checkpoints(job_store))
    since = ended_entries(job_store)[_number_of(job_store.try_get(_BEFORE)) :]
    if not path and not any(entry.kind in TRAINING for entry in since):
        path = resumed_from  # it still belongs to the entry that trains next
    return path, step


def from_present_entry(job_store: JobStore, restart: JobRestart) -> JobRestart:
    """A restart from a checkpoint of the entry that trains now."""
    return replace(restart, entry=len(ended_entries(job_store)))


def _checkpoints_of(job_store: JobStore, at_least: int) -> list[tuple[str, int, int]]:
    known = [each for each in all_checkpoints(job_store) if each[2] >= at_least]
    first = min((entry for _, _, entry in known), default=0)
    return [each for each in known if each[2] == first]


def _number_of(found: bytes | None) -> int:
    return int(found) if found is not None and found.isdigit() else 0


def _name(number: int) -> str:
    return f"entry/{number}"
