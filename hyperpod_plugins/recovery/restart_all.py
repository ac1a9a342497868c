"""The last recovery levels: all processes restart from a checkpoint, or the job ends.

`SavedCheckpoints` records the checkpoints from which all processes can restart.
"""

import json
import logging
import time
from dataclasses import replace
from typing import NoReturn

from hyperpod_plugins.elastic import FailureRecord, JobStore
from hyperpod_plugins.elastic.membership.restart_policy import JobRestart
from hyperpod_plugins.elastic.store.entry_records import (
    CHECKPOINTS_KEY,
    all_checkpoints,
    known_checkpoints,
    newest_checkpoint,
    restart_from_newest,
    why_untrusted,
)
from hyperpod_plugins.elastic.store.job_store import GAVE_UP_KEY, RESTART_KEY, poll_until
from hyperpod_plugins.env import JobEnv, run_id
from hyperpod_plugins.errors import ModelsDiffer, RecoveryError, StateLost
from hyperpod_plugins.events import Event, record
from hyperpod_plugins.recovery.plan import RecoveryLevel

log = logging.getLogger(__name__)

__all__ = ["SavedCheckpoints", "all_checkpoints", "known_checkpoints", "newest_checkpoint"]


class SavedCheckpoints:
    """The list of persistent checkpoints in the job store, oldest first. One rank writes it; all may read it."""

    def __init__(self, job_store: JobStore, entry: int = 0) -> None:
        """Record the checkpoints of one entry of the program.

        Args:
            job_store: A connection of its own, because a thread beside training may complete a checkpoint.
            entry: Number of the entry of the program that saves them; see `elastic/store/entry_records.py`.
        """
        self._job_store = job_store
        self._entry = entry
        self._is_checked = False

    def add(self, path: str, step: int) -> None:
        """Record a complete checkpoint after `step` optimizer steps from which training can continue."""
        why = None if self._is_checked else why_untrusted(path, run_id())
        self._is_checked = True
        if why is not None:
            log.warning(
                "the job could not be restarted from the checkpoint %s: %s. Keep checkpoints in folders that only "
                "this user may write to (chmod -R go-w).",
                *(path, why),
            )
        known = [each for each in all_checkpoints(self._job_store) if each[0] != path]
        self._write([*known, (path, step, self._entry)])

    def discard(self, path: str) -> None:
        """Drop a checkpoint from the list; call this before the checkpoint is removed."""
        self._write([each for each in all_checkpoints(self._job_store) if each[0] != path])

    def _write(self, known: list[tuple[str, int, int]]) -> None:
        self._job_store.set(CHECKPOINTS_KEY, json.dumps(known).encode())


def check_no_newer_checkpoint(step: int, job_store: JobStore) -> None:
    """Check that no checkpoint is newer than the snapshots of a step, when no process holds state.

    Raises:
        StateLost: A checkpoint is newer.
    """
    path, saved = newest_checkpoint(known_checkpoints(job_store))
    if saved > step:
        raise StateLost(
            f"all processes were lost, and the checkpoint {path} is newer than the snapshots of step {step}"
        )


_POLL_S = 0.02
_FINAL_SAVE_S = 10.0


def request_restart(job_store: JobStore, restart: JobRestart, event: str, wrong: Exception) -> NoReturn:
    """Ask the agents to restart all processes, and wait to be ended. Only the job's first request counts.

    Args:
        job_store: Connection to the job store.
        restart: Checkpoint and degrees to restart with; the reporter of its failure is this process.
        event: Name of the event to record.
        wrong: Raised if the agents have not ended this process within 10 s.
    """
    job_store.set_if_absent(RESTART_KEY, restart.to_json().encode())
    record(Event(name=event, at_s=time.time(), details={"cause": restart.failure.cause, "step": restart.step}))
    log.warning("%s: %s", restart.failure.reporter, restart)
    time.sleep(_FINAL_SAVE_S)
    raise wrong


def restart_all(job_store: JobStore, job: JobEnv, rank: int, lost: StateLost, *, loses_steps: bool = True) -> NoReturn:
    """Ask the agents to restart all processes from the last checkpoint. Only the job's first request counts.

    Args:
        job_store: Connection to the job store.
        job: Environment of the job.
        rank: Rank of this process.
        lost: Why; raised if nothing else ends this process.
        loses_steps: Whether the present call has trained steps that only a checkpoint of it can preserve.

    Raises:
        StateLost: The agents have not ended this process within 10 s.
    """
    failure = FailureRecord(kind="process", cause=str(lost), reporter=f"rank {rank}")
    restart = restart_from_newest(job_store, job, failure)
    # A program that exchanges its parameters does it again: one restart may step over a fault, more would not.
    restart = replace(restart, is_own_fault=isinstance(lost, ModelsDiffer))
    if loses_steps and not restart.resume_from:
        log.error(
            "rank %d: ALL STEPS SO FAR ARE LOST, for this job has saved no checkpoint. Save one from time to time: "
            "with session.save(...) in a loop of a Session, with a ModelCheckpoint under Lightning",
            rank,
        )
    request_restart(job_store, restart, RecoveryLevel.CHECKPOINT.event, lost)


def follow_final_save(job_store: JobStore, patience_s: float = _FINAL_SAVE_S) -> NoReturn:
    """Wait until the process that gave up has exited, so that the launcher shows its error; then raise.

    Args:
        job_store: Connection to the job store.
        patience_s: Longest wait, in seconds.

    Raises:
        RecoveryError: Always.
    """

    def look() -> FailureRecord | None:
        given_up = job_store.try_get(GAVE_UP_KEY)
        return None if given_up is None else FailureRecord.from_json(given_up)

    def has_exited(giver: FailureRecord | None) -> bool:
        return giver is not None and job_store.exit_of(giver.worker_id, giver.incarnation) is not None

    giver = poll_until(look, has_exited, limit_s=patience_s, every_s=_POLL_S)
    raise RecoveryError(f"the job has given up: {giver or 'the process that gave up has not said why'}")
