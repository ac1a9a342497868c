"""The entries of a program: its calls that train or evaluate, numbered in program order, and how each ended.

    value of the job store    content                               written by
    entry/NUMBER              EndedEntry                            each process that leaves it (the first counts)
    entries_before            how many had ended before this round  agents or their rendezvous, before workers start
    resumed_step              step at which this round resumes      the same
    entries_folder            where the state after each is kept    the first process that keeps one
    checkpoints               [path, step, entry] of each           the first rank

When all workers restart, the program runs from its first line. Entries that have ended are not run again: they return
what they returned before, with the state after them restored. So the agents hand these values over to the next round.

Other users may reach the store, so `check_checkpoint` checks that this job has written the checkpoint that it names.
"""

import contextlib
import grp
import hashlib
import json
import os
import pwd
import re
import stat
import tempfile
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hyperpod_plugins.checkpoint_names import JOB, present_path
from hyperpod_plugins.elastic.membership.restart_policy import JobRestart
from hyperpod_plugins.elastic.store.job_store import RESTART_KEY, JobStore
from hyperpod_plugins.elastic.store.records import FailureRecord, JsonRecord
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.errors import ConfigError

TRAINING = ("fit", "steps")
"""Kinds of entries that train."""
CHECKPOINTS_KEY = "checkpoints"
_BEFORE = "entries_before"
_RESUMED_STEP = "resumed_step"
_FOLDER = "entries_folder"
_FOLDER_NAME = re.compile(r"hyperpod-ended-([0-9a-f]{8})-[0-9a-f]{8}")
_WAIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedEntry(JsonRecord):
    """An entry that has ended on all ranks, with the state after it kept."""

    number: int
    kind: str
    """`fit`, `validate`, `test`, `predict`, or `steps` for the loop of a session."""
    results: Any = None
    """What it returned, if that is small; plain values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryRecords:
    """The ended entries that one round hands over to the next, and the step at which that one resumes."""

    ended: tuple[EndedEntry, ...] = ()
    folder: str = ""
    resumed_step: int = 0
    """Optimizer steps in the checkpoint from which the next round resumes; 0 if there is none."""

    @classmethod
    def read(cls, job_store: JobStore) -> "EntryRecords":
        """Read the records of a round."""
        return cls(
            ended=ended_entries(job_store),
            folder=str(_named_folder(job_store) or ""),
            resumed_step=_step_of_next_round(job_store),
        )

    def hand_over(self, job_store: JobStore, num_before: int) -> None:
        """Write the records for the workers of the next round; `num_before` entries count as ended before it."""
        if self.folder:
            job_store.set_if_absent(_FOLDER, self.folder.encode())
        for entry in self.ended:
            record_end(job_store, entry)
        job_store.set_if_absent(_RESUMED_STEP, str(self.resumed_step).encode())
        job_store.set_if_absent(_BEFORE, str(num_before).encode())


def record_end(job_store: JobStore, entry: EndedEntry) -> None:
    """Record that an entry has ended and its state is kept, unless this is recorded already."""
    job_store.set_if_absent(_name(entry.number), entry.to_json().encode())


def ended_entry(job_store: JobStore, number: int) -> EndedEntry | None:
    """Return the entry of a number; None if it has not ended, or if the record was not written by this package."""
    found = job_store.try_get(_name(number))
    try:
        entry = None if found is None else EndedEntry.from_json(found)
    except ValueError:
        return None
    return entry if entry is not None and entry.number == number else None


def ended_entries(job_store: JobStore) -> tuple[EndedEntry, ...]:
    """All ended entries, in order."""
    entries: list[EndedEntry] = []
    while (entry := ended_entry(job_store, len(entries))) is not None:
        entries.append(entry)
    return tuple(entries)


def num_ended_before(job_store: JobStore, job: JobEnv) -> int:
    """How many entries had ended before this round; waits until an agent publishes it.

    Raises:
        DistStoreError: no agent did within a minute.
    """
    if job.agent_pid:  # of torchrun, where the rendezvous has published it before it started this process
        return _number_of(job_store.try_get(_BEFORE))
    return int(job_store.wait_get(_BEFORE, _WAIT_S)) if job.restart_count else 0


def new_folder_name(run_id: str) -> str:
    """A new name for the folder of `folder_for`, which tells the job."""
    return f"hyperpod-ended-{_digest(run_id)}-{uuid.uuid4().hex[:8]}"


def folder_for(job_store: JobStore, proposed: str, run_id: str) -> Path:
    """Create the folder for the state after entries and return its path: the first that was proposed in this job.

    It is the same on all ranks. The content of the store is untrusted, so the folder must have a name that this
    package gives in this job, and only this user may read and write it.

    Args:
        job_store: of the present round.
        proposed: path of a new folder, which ends in a `new_folder_name`.
        run_id: the job's `--rdzv-id`.

    Raises:
        ConfigError: the store names any other folder.
        OSError: the folder cannot be created.
    """
    job_store.set_if_absent(_FOLDER, proposed.encode())
    path = _named_folder(job_store, _digest(run_id))
    if path is None:
        raise ConfigError(
            "the job's store names a folder for the state after calls of the program that none of its processes has "
            "chosen. Another user writes to the store: choose an endpoint that only this job's machines can reach."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(0o700)
    except FileExistsError:  # another rank or an earlier round was first
        if path.is_symlink():
            raise ConfigError(f"{path} is a link, not the folder that a process of this job has created.") from None
    why = _why_of_others(path, path.stat())
    if why is not None:
        raise ConfigError(
            f"the state after calls of the program cannot be kept in {path}, because {why}. Keep checkpoints in a "
            "folder that only this user may write to."
        )
    return path


def existing_folder(job_store: JobStore, run_id: str) -> Path | None:
    """The folder of `folder_for`, to be deleted with its contents; None if there is none.

    The content of the store is untrusted, so any folder without a name that this package gives in this job counts as
    none.
    """
    path = _named_folder(job_store, _digest(run_id))
    return path if path is not None and path.is_dir() and not path.is_symlink() else None


def _named_folder(job_store: JobStore, digest: str | None = None) -> Path | None:
    """The path in the store, if it is absolute and ends in a name that this package gives, in one job or in any."""
    path = Path((job_store.try_get(_FOLDER) or b"").decode(errors="replace"))
    is_valid = path.is_absolute() and ".." not in path.parts and "\0" not in str(path)
    name = _FOLDER_NAME.fullmatch(path.name) if is_valid else None
    return path if name is not None and digest in (None, name[1]) else None


def _digest(run_id: str) -> str:
    return hashlib.sha256(run_id.encode()).hexdigest()[:8]


def known_checkpoints(job_store: JobStore) -> list[tuple[str, int]]:
    """Path and step of each checkpoint of the entry that trains now, or that is run next; oldest first."""
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
    """The last one that exists, also if saving over it was interrupted; `("", 0)` if there is none."""
    return next(((path, step) for path, step in reversed(known) if present_path(Path(path)).exists()), ("", 0))


def restart_from_newest(job_store: JobStore, job: JobEnv, failure: FailureRecord) -> JobRestart:
    """Plan the restart of all workers after a failure: past ended entries, from the next one's newest checkpoint.

    Args:
        job_store: of the round that ends.
        job: of that round.
        failure: the reason for the restart.
    """
    path, step = resume_point(job_store, job.resume_from)
    return JobRestart(
        failure=failure,
        resume_from=path,
        step=step,
        entry=len(ended_entries(job_store)),
        shard_degree=job.shard_degree,  # requested degrees stay in force
        tensor_degree=job.tensor_degree,
    )


def resume_point(job_store: JobStore, resumed_from: str) -> tuple[str, int]:
    """Path and step of the checkpoint to resume from if all workers restart now; `("", 0)` for none.

    If this round has no checkpoint of its own, it is the one from which this round resumed.

    Args:
        job_store: of the round that ends.
        resumed_from: checkpoint from which that round resumed; empty if none.
    """
    path, step = newest_checkpoint(known_checkpoints(job_store))
    since = ended_entries(job_store)[_number_of(job_store.try_get(_BEFORE)) :]
    if resumed_from and not path and not any(entry.kind in TRAINING for entry in since):
        # It still belongs to the entry that trains next.
        path, step = resumed_from, _number_of(job_store.try_get(_RESUMED_STEP))
    return path, step


def _step_of_next_round(job_store: JobStore) -> int:
    """Optimizer steps in the checkpoint from which the next round resumes: the requested one, or else the newest."""
    requested = job_store.try_get(RESTART_KEY)
    if requested is not None:
        with contextlib.suppress(ValueError, RecursionError):  # not written by this package
            return JobRestart.from_json(requested).step
    return resume_point(job_store, "any path, as only the step is used")[1]


def from_present_entry(job_store: JobStore, restart: JobRestart) -> JobRestart:
    """Return the restart as one from a checkpoint of the entry that trains now."""
    return replace(restart, entry=len(ended_entries(job_store)))


def _checkpoints_of(job_store: JobStore, at_least: int) -> list[tuple[str, int, int]]:
    known = [each for each in all_checkpoints(job_store) if each[2] >= at_least]
    first = min((entry for _, _, entry in known), default=0)
    return [each for each in known if each[2] == first]


def _number_of(found: bytes | None) -> int:
    return int(found) if found is not None and found.isdigit() else 0


def _name(number: int) -> str:
    return f"entry/{number}"


def check_checkpoint(path: str, run_id: str) -> str:
    """Check that this job has written the checkpoint from which all processes resume, and nobody can have changed it.

    Anyone who can reach the job's store can write a path there, but cannot write a folder of this user, and not that
    this job has written another one.

    Args:
        path: the checkpoint.
        run_id: the job's `--rdzv-id`, as this process was started with.

    Returns:
        The checked path with symbolic links resolved, since their targets may change later.

    Raises:
        ConfigError: the checkpoint does not exist, is of another job or user, or others may write to it.
    """
    why, resolved = why_untrusted(path, run_id), path
    if why is None:
        resolved = os.path.realpath(path)
        why = why_untrusted(resolved, run_id)
    if why is not None:
        raise ConfigError(
            f"the job's store says that all processes go on from {path!r:.300}, but {why}. If the job wrote this "
            "itself, keep checkpoints on storage that all nodes share, in folders that only its user may write to. "
            "If you mean a checkpoint of another job, name it in the program (`ckpt_path=`, `session.load`). "
            "Otherwise another user writes to the store: choose an endpoint that only this job's machines can reach."
        )
    return resolved


def why_untrusted(checkpoint: str, run_id: str) -> str | None:
    """Return why a job cannot trust that it has written a checkpoint; None if it can."""
    try:
        path = present_path(Path(checkpoint))
        status = path.stat()
        if not stat.S_ISDIR(status.st_mode):
            return "this is not a folder"
        why = _why_of_others(path, status)
        if why is not None:
            return why
        for file in path.iterdir():
            why = _why_writable(file.stat())
            if why is not None:
                return f"of its file {file.name}: {why}"
        if path != Path(checkpoint) and path.parent.stat().st_mode & stat.S_IWOTH:  # they could take the free name
            return "saving over it was interrupted, and all users of this machine may write to the folder around it"
        return _why_of_another_job(path, run_id)
    except OSError as error:
        return f"it cannot be read here ({error.strerror})"
    except ValueError as error:  # a path with a NUL
        return f"this is not a path ({error})"


def _why_of_another_job(checkpoint: Path, run_id: str) -> str | None:
    try:
        found: Any = json.loads((checkpoint / JOB).read_bytes())
    except FileNotFoundError:
        return f"it does not say which job has written it (it has no {JOB})"
    except (ValueError, RecursionError):
        found = None
    written_by = found.get("run_id") if isinstance(found, dict) else None
    if written_by == run_id:
        return None
    return f"the job {written_by!r:.100} has written it, and this is the job {run_id!r:.100} (--rdzv-id)"


def _why_of_others(folder: Path, status: os.stat_result) -> str | None:
    """Return why others than this user may have written to a folder; None if they cannot.

    Where a file system changes owners (such as NFS, which maps root to nobody), it must have the owner that a new file
    beside it gets.
    """
    why = _why_writable(status)
    if why is None and status.st_uid != os.geteuid() and status.st_uid != _owner_beside(folder):
        why = f"it belongs to another user (uid {status.st_uid})"
    return why


def _why_writable(status: os.stat_result) -> str | None:
    if status.st_mode & stat.S_IWOTH:
        return "all users of this machine may write to it"
    if status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid):
        return f"all members of its group (gid {status.st_gid}) may write to it"
    return None


def _is_private_group(gid: int) -> bool:
    """Whether a group is this user's own: the primary one, with the user's name and without other members."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:  # in a container, ids need not have names
        return False
    return gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _owner_beside(path: Path) -> int:
    """Owner (uid) of a file that this process creates in the same folder; -1 if it may not."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.resolve().parent, prefix=".owner-") as file:
            return os.fstat(file.fileno()).st_uid
    except OSError:
        return -1
