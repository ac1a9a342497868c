"""Which persistent checkpoints a job has written: where all processes begin again when nothing else is left."""

import json
import logging

from hyperpod_plugins.elastic import Ledger
from hyperpod_plugins.elastic.entries import CHECKPOINTS_KEY, all_checkpoints, known_checkpoints, newest_checkpoint
from hyperpod_plugins.elastic.resume import refusal
from hyperpod_plugins.errors import StateLost

log = logging.getLogger(__name__)

__all__ = ["SavedCheckpoints", "all_checkpoints", "known_checkpoints", "newest_checkpoint"]


class SavedCheckpoints:
    """The list in the ledger, oldest first. One rank writes it; everybody may read."""

    def __init__(self, ledger: Ledger, entry: int = 0) -> None:
        """Use a connection that nobody else does: a checkpoint may be completed by a thread beside the training.

        Args:
            ledger: of the job.
            entry: number of the entry of the program that saves them; see `elastic/entries.py`.
        """
        self._ledger = ledger
        self._entry = entry
        self._has_warned = False

    def add(self, path: str, step: int) -> None:
        """A checkpoint of `step` optimizer steps, with which training can go on, is complete."""
        why = None if self._has_warned else refusal(path)
        if why is not None:
            self._has_warned = True
            log.warning(
                "all processes could not start again from the checkpoint %s: %s. Keep checkpoints in folders that "
                "only this user may write to (chmod go-w).",
                *(path, why),
            )
        known = [each for each in all_checkpoints(self._ledger) if each[0] != path]
        self._write([*known, (path, step, self._entry)])

    def discard(self, path: str) -> None:
        """A checkpoint is about to be removed."""
        self._write([each for each in all_checkpoints(self._ledger) if each[0] != path])

    def _write(self, known: list[tuple[str, int, int]]) -> None:
        self._ledger.put(CHECKPOINTS_KEY, json.dumps(known).encode())


def refuse_older(step: int, ledger: Ledger) -> None:
    """See whether the snapshots of a step are the newest state there is, where no process has any.

    Raises:
        StateLost: a checkpoint is newer.
    """
    path, saved = newest_checkpoint(known_checkpoints(ledger))
    if saved > step:
        raise StateLost(
            f"all processes were lost, and the checkpoint {path} is newer than the snapshots of step {step}"
        )
