"""The entries of this process: which have ended, the state they left, and the one that a restart continues with.

An entry is a call of the program that trains or evaluates; see `elastic/store/entry_records.py`. Each process counts
its own entries. Since all processes run the same program, the same number stands for the same call on all of them.
"""

import logging
import uuid
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any

import torch

from hyperpod_plugins.comm import group_health
from hyperpod_plugins.comm.health import Phase
from hyperpod_plugins.elastic import FailureRecord, JobStore
from hyperpod_plugins.elastic.store.entry_records import (
    TRAINING,
    EndedEntry,
    ended_entry,
    folder_for,
    new_folder_name,
    num_ended_before,
    record_end,
    restart_from_newest,
)
from hyperpod_plugins.env import JobEnv, WorkerEnv, run_id
from hyperpod_plugins.errors import CheckpointDamaged, RecoveryError
from hyperpod_plugins.recovery.member import Member
from hyperpod_plugins.recovery.packing import on_own_device
from hyperpod_plugins.recovery.plan import RecoveryLevel
from hyperpod_plugins.recovery.restart_all import request_restart
from hyperpod_plugins.recovery.rng import random_state, set_random_state

log = logging.getLogger(__name__)
_APART = (
    "a replacement process reached a collective between two calls of the program, which the other ranks have already "
    "passed"
)


class Entries:
    """The entries of one process; not thread-safe."""

    def __init__(self) -> None:
        """Start before the first entry."""
        self.number = -1
        """Number of the present entry, or of the last one; -1 before the first."""
        self.training_index = -1
        """Number of the present entry that trains, or of the last one, among those that train; -1 before the first."""
        self.is_inside = False
        """Whether an entry is in progress; calls nested in it are part of it."""
        self.is_skipping = False
        """Whether the present entry ended before a restart, so that only its state is restored."""
        self.is_complete = True
        """Whether the state after every entry so far was kept."""
        self.member: Member | None = None
        """This process as a member of the job, from the first entry that recovers on."""
        self.has_left = False
        """Whether it has left the job, so that later entries are not repaired in place."""
        self.worker_ids: Sequence[int] = ()
        """Worker ids of the world when it left; empty before."""
        self.trainer_state: dict[str, Any] = {}
        """For an entry that is passed: the state of this rank's trainer at its end, other than tensors."""
        self.resumed_from = ""
        """Checkpoint from which the present entry was restarted; empty if it was not."""
        self.begins_anew = False
        """Whether the present entry is a fit without a checkpoint: it begins with what the program's code has made."""
        self._job: JobEnv | None = None
        self._job_store: JobStore | None = None
        self._resumes = False

    @contextmanager
    def enter(self, job: JobEnv, kind: str) -> Generator[EndedEntry | None]:
        """Enter the next entry. Yields its record if it has ended already and is only to be passed, else None.

        Args:
            job: Environment of the job.
            kind: Kind of the entry; see `EndedEntry.kind`.

        Raises:
            RuntimeError: This process makes other calls than the processes before it did.
        """
        if self._job_store is None:
            self._job, self._job_store = job, JobStore.connect(job)
            self._num_before = num_ended_before(self._job_store, job)
            self._resumes = bool(job.resume_from)
        self.number += 1
        self.training_index += kind in TRAINING
        record = ended_entry(self._job_store, self.number) if self.is_complete else None
        if record is not None and record.kind != kind:
            raise RuntimeError(
                f"call {self.number} of the program was `{record.kind}` before, and is `{kind}` now. A program whose "
                "processes are replaced must make the same calls in the same order each time that it runs."
            )
        self.is_inside, self.is_skipping = True, record is not None
        group_health.allow_collectives()
        try:
            yield record
        finally:
            self.is_inside = self.is_skipping = False
            group_health.allow_collectives()
            if group_health.phase is Phase.DETACHED:
                group_health.forbid_collectives(_APART, self._request_restart)

    @property
    def is_joining(self) -> bool:
        """Whether this process has yet to join the others in an entry that trains."""
        return self._job is not None and (self._job.is_joining if self.member is None else self.member.is_joining)

    def _request_restart(self) -> None:
        """Request a restart of all processes: a detached process cannot communicate between two entries."""
        group_health.allow_collectives()
        job, job_store = self._job, self._job_store
        if job is None or job_store is None:
            return
        reporter = f"worker {WorkerEnv.from_environ().global_rank}"
        restart = restart_from_newest(job_store, job, FailureRecord(kind="request", cause=_APART, reporter=reporter))
        request_restart(job_store, restart, RecoveryLevel.CHECKPOINT.event, RecoveryError(_APART))

    def resume_from(self, kind: str) -> str:
        """Checkpoint from which all processes were restarted, if it belongs to the entry that begins; else empty."""
        self.resumed_from = ""
        if not self._resumes or kind not in TRAINING or self.number < self._num_before:
            return ""
        self._resumes = False
        if self._job is not None and not self.is_skipping:
            self.resumed_from = self._job.resume_from
        return self.resumed_from

    def folder(self, parent: Path) -> Path:
        """Folder for the state of all ranks after entries: a new one in `parent`, unless a rank has chosen one."""
        assert self._job_store is not None
        return folder_for(self._job_store, str((parent / new_folder_name(run_id())).absolute()), run_id())

    def record(self, kind: str, results: Any) -> None:
        """Record that the present entry has ended; call this after all ranks have kept their state."""
        assert self._job_store is not None
        record_end(self._job_store, EndedEntry(number=self.number, kind=kind, results=results))

    def mark_not_kept(self, why: object) -> None:
        """Continue without the state after the present entry, which a restart will run again."""
        log.warning("the state after call %d of the program is not kept: %s", self.number, why)
        self.is_complete = False


def save_entry_values(folder: Path, number: int, worker_id: int, values: dict[str, Any]) -> None:
    """Write this rank's values and the state of its random generators after an entry."""
    path = _path_of_rank(folder, number, worker_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{uuid.uuid4().hex[:8]}")
    torch.save({"values": values, "random": random_state()}, draft)
    draft.replace(path)


def invisible_workers(folder: Path, number: int, worker_ids: Iterable[int]) -> list[int]:
    """Worker ids whose values after an entry are not visible on this node, although all ranks have written them."""
    return [worker_id for worker_id in worker_ids if not _path_of_rank(folder, number, worker_id).exists()]


def load_entry_values(folder: Path, number: int, worker_id: int) -> tuple[dict[str, Any], Callable[[], None]]:
    """Read the values that `save_entry_values` wrote; also returns a function that restores the random generators.

    If this worker wrote none, use those of worker 0.

    Raises:
        CheckpointDamaged: This node sees neither.
    """
    own, first = _path_of_rank(folder, number, worker_id), _path_of_rank(folder, number, 0)
    path = own if own.exists() else first
    if not path.exists():
        raise CheckpointDamaged(
            f"{folder} on this node does not hold the state after call {number} of the program: neither {own.name} nor "
            f"{first.name} is there. Other nodes have written them: keep checkpoints on storage that all nodes share."
        )
    with torch.serialization.safe_globals([PosixPath, PurePosixPath]):
        kept = torch.load(path, weights_only=True, map_location=on_own_device)
    return kept["values"], partial(set_random_state, kept["random"])


def state_folder(folder: Path, number: int) -> Path:
    """Path of the checkpoint after an entry that trained."""
    return folder / f"{number}.ckpt"


def _path_of_rank(folder: Path, number: int, worker_id: int) -> Path:
    return folder / f"{number}.rank-{worker_id}.pt"
