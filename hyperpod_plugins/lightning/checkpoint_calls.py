"""Calls of checkpoint callbacks at the end of a batch, made again if a fault has interrupted or prevented them.

[Note: interrupted saves] `on_train_batch_end` comes after the step's commit, so it is not called again as the loops are
re-entered at the next step. If peers are lost there, checkpoint callbacks that had not ended yet are put back to their
state before the call. Once all ranks are connected again, all of them call these hooks, as they were at that batch's
end: with the values shown there, and the trainer's state after the committed step as the contents of a checkpoint. A
callback that a rank has seen end has noted that step as saved, and the description that all ranks have re-entered with
says so; it does nothing more. What an interrupted call has written is overwritten, not kept beside a second version of
it; this also holds for saves at the end of an evaluation or an epoch, which are parts that are run again.
"""

# Lightning's callbacks and loops have no public API for this.
# pyright: reportPrivateUsage=false

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from hyperpod_plugins.lightning.compat import Checkpoint, ModelCheckpoint, Trainer, original, override, restore
from hyperpod_plugins.lightning.shown_values import TABLES
from hyperpod_plugins.lightning.trainer_state import METRICS

Save = Callable[[str, bool], str]
"""Writes a checkpoint of the committed step, given its path and whether it is for weights only; returns rank 0's path.
"""
BATCH_END = "on_train_batch_end"
"""Stands in `CheckpointCalls.pending` for calls of this hook that have not ended."""


class CheckpointCalls:
    """The checkpoint callbacks of one trainer; see [Note: interrupted saves]."""

    def __init__(self) -> None:
        self._kept: list[tuple[Checkpoint, dict[str, Any]]] = []
        self._paths: set[str] = set()
        self._has_unfinished = False

    def keep(self, trainer: Trainer) -> None:
        """Keep the state of the callbacks, before the hooks at the end of the batch of a committed step."""
        if self._paths:
            for callback in trainer.checkpoint_callbacks:
                restore(callback, "file_exists")
        self._paths, self._has_unfinished = set(), False
        self._kept = [(each, _copied(vars(each))) for each in trainer.checkpoint_callbacks]

    def note_path(self, trainer: Trainer, own: str, shared: str) -> None:
        """Note that a checkpoint is being written.

        Args:
            trainer: whose callbacks.
            own: path on this rank, which may name a value that differs between ranks. Callbacks use the shared one from
                now on: a process that replaces rank 0 gets their state, and removes the files.
            shared: path on rank 0, where the checkpoint is written.
        """
        self._paths.add(shared)
        if own != shared:
            for callback in trainer.checkpoint_callbacks:
                _rename(callback, own, shared)

    def put_back(self, unfinished: Sequence[Checkpoint]) -> None:
        """Undo the calls that were interrupted, or had not been made, as the loops were left."""
        for callback, state in self._kept:
            if any(callback is each for each in unfinished):
                vars(callback).update(_copied(state))
                self._has_unfinished = True

    @property
    def pending(self) -> tuple[str, ...]:
        """Paths of checkpoints since the last commit, and `BATCH_END` if callbacks are to be called again."""
        return (*sorted(self._paths), *([BATCH_END] if self._has_unfinished else []))

    def repaired(self) -> None:
        """Forget which calls had not ended: all ranks have made them."""
        self._has_unfinished = False

    def finish(self, trainer: Trainer, pending: tuple[str, ...], described: Mapping[str, Any], save: Save) -> None:
        """Make the calls that had not ended. All ranks call this, with the same `pending`.

        Args:
            trainer: about to run the next step, or the next part of its fit.
            pending: of all ranks together.
            described: `describe_trainer` of the end of the batch, unpacked; empty in a rank that never left it.
            save: see `Save`.

        Raises:
            PeerLost: a rank was lost meanwhile. The callbacks are as before.
        """
        self._paths.update(path for path in pending if path != BATCH_END)
        for callback in trainer.checkpoint_callbacks:
            if self._paths and isinstance(callback, ModelCheckpoint):
                override(callback, "file_exists", partial(self._exists, original(callback, "file_exists")))
        if BATCH_END not in pending:
            return
        self._has_unfinished = True
        with ExitStack() as put_back:
            for callback in trainer.checkpoint_callbacks:
                put_back.callback(vars(callback).update, _copied(vars(callback)))
            self._call_again(trainer, described, save)
            put_back.pop_all()

    def _exists(self, exists: Callable[..., bool], path: str, trainer: Trainer) -> bool:
        return exists(path, trainer) and path not in self._paths

    def _call_again(self, trainer: Trainer, described: Mapping[str, Any], save: Save) -> None:
        def write(path: Any, weights_only: bool | None = None, storage_options: Any | None = None) -> None:
            self.note_path(trainer, str(path), save(str(path), bool(weights_only)))

        batches: Any = trainer.fit_loop.epoch_loop.batch_progress
        present, shown = batches.is_last_batch, described.get(METRICS, {}).get(TABLES[0])
        if described:
            batches.is_last_batch = described["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"]
        override(trainer, "save_checkpoint", write)
        try:
            for callback in trainer.checkpoint_callbacks:
                if shown is not None and isinstance(callback, ModelCheckpoint):
                    override(callback, "_monitor_candidates", partial(_candidates, shown))
                callback.on_train_batch_end(trainer, trainer.lightning_module, None, None, 0)
        finally:
            restore(trainer, "save_checkpoint")
            batches.is_last_batch = present
            for callback in trainer.checkpoint_callbacks:
                restore(callback, "_monitor_candidates")


def _candidates(shown: Mapping[str, Any], trainer: Trainer) -> dict[str, torch.Tensor]:
    """As `ModelCheckpoint._monitor_candidates`, of the values that were shown at the end of the batch."""
    found = {name: torch.as_tensor(value).clone() for name, value in shown.items()}
    for name, present in (("epoch", trainer.current_epoch), ("step", trainer.global_step)):
        found[name] = found[name].int() if name in found else torch.tensor(present)
    return found


def _rename(callback: Checkpoint, own: str, shared: str) -> None:
    """Replace a path in the state of a `ModelCheckpoint`."""
    for name in ("best_model_path", "kth_best_model_path", "last_model_path"):
        if vars(callback).get(name) == own:
            setattr(callback, name, shared)
    models: dict[str, Any] = vars(callback).get("best_k_models", {})
    renamed = {shared if path == own else path: score for path, score in models.items()}
    models.clear()
    models.update(renamed)


def _copied(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of a callback, with copies of the containers that it changes in place."""
    return {name: copy.copy(each) if isinstance(each, dict | list) else each for name, each in attributes.items()}
