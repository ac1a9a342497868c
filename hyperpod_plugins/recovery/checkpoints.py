"""Which persistent checkpoints a job has written: where all processes begin again when nothing else is left."""

import json
from pathlib import Path

from hyperpod_plugins.elastic import Ledger

_KEY = "checkpoints"


class SavedCheckpoints:
    """The list in the ledger, oldest first. One rank writes it; everybody may read."""

    def __init__(self, ledger: Ledger) -> None:
        """Use a connection that nobody else does: a checkpoint may be completed by a thread beside the training."""
        self._ledger = ledger

    def add(self, path: str, step: int) -> None:
        """A checkpoint of `step` optimizer steps, with which training can go on, is complete."""
        known = [each for each in known_checkpoints(self._ledger) if each[0] != path]
        self._write([*known, (path, step)])

    def discard(self, path: str) -> None:
        """A checkpoint is about to be removed."""
        self._write([each for each in known_checkpoints(self._ledger) if each[0] != path])

    def _write(self, known: list[tuple[str, int]]) -> None:
        self._ledger.put(_KEY, json.dumps(known).encode())


def known_checkpoints(ledger: Ledger) -> list[tuple[str, int]]:
    """Path and step of each checkpoint, oldest first."""
    found = ledger.find(_KEY)
    return [] if found is None else [(path, step) for path, step in json.loads(found)]


def newest_checkpoint(known: list[tuple[str, int]]) -> tuple[str, int]:
    """The last one that exists; `("", 0)` where there is none."""
    return next(((path, step) for path, step in reversed(known) if Path(path).exists()), ("", 0))
