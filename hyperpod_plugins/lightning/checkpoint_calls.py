"""Calls of checkpoint callbacks at the end of a batch, made again if a fault has interrupted or prevented them.

[Note: interrupted saves] `on_train_batch_end` comes after the step's commit, so it is not called again as the loops are
re-entered at the next step. If peers are lost there, checkpoint callbacks that had not ended yet are put back to their
state before the call. Once all ranks are connected again, they take the state of those callbacks that have saved from
the rank that has seen most of them save, and call the hooks as they were at that batch's end: with the values shown
there, and the state after the committed step as the contents of a checkpoint. A callback that has saved this step does
nothing more.

What an interrupted call has written is overwritten, not kept beside a second version of it. This also holds for saves
at the end of an evaluation or an epoch, which are parts that are run again; there the callbacks are put back with the
part.

[Note: paths that differ] The name of a checkpoint may contain a value that differs between ranks. Rank 0's is written,
but each rank's callback remembers its own. So in what is described for other processes, one of which may replace rank
0 and then removes files, a path is replaced by rank 0's.
"""

# Lightning's callbacks and loops have no public API for this.
# pyright: reportPrivateUsage=false

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hyperpod_plugins.lightning.compat import Checkpoint, ModelCheckpoint, Trainer, original, override, restore
from hyperpod_plugins.lightning.trainer_state import last_saves, replace_paths, set_last_saves

Save = Callable[[str, bool], str]
"""Writes a checkpoint of the committed step, given its path and whether it is for weights only; returns rank 0's path.
"""
_PATHS = ("best_model_path", "kth_best_model_path", "last_model_path")
BATCH_END = "on_train_batch_end"
"""Stands in `CheckpointCalls.pending` for calls of this hook that have not ended."""


class CheckpointCalls:
    """The checkpoint callbacks of one trainer; see [Note: interrupted saves]."""

    def __init__(self) -> None:
        self.shared: dict[str, str] = {}
        """This rank's path of each checkpoint to rank 0's, where they differ; see [Note: paths that differ]."""
        self._kept: list[tuple[Checkpoint, dict[str, Any]]] = []
        self._paths: set[str] = set()
        self._unfinished: list[tuple[Checkpoint, dict[str, Any]]] = []

    def keep(self, trainer: Trainer) -> None:
        """Keep the state of the callbacks, before the hooks at the end of the batch of a committed step."""
        self.release(trainer)
        self._kept = [(each, _copied(vars(each))) for each in trainer.checkpoint_callbacks]

    def release(self, trainer: Trainer) -> None:
        """Forget what has been saved since the last commit."""
        if self._paths:
            for callback in trainer.checkpoint_callbacks:
                restore(callback, "file_exists")
        self._paths, self._unfinished, self._kept = set(), [], []

    def note_path(self, own: str, shared: str) -> None:
        """Note that a checkpoint is being written to the path `shared`, which is `own` on this rank."""
        self._paths.add(shared)
        if own != shared:
            self.shared[own] = shared

    def note_written(self) -> None:
        """Note what callbacks have named since the last commit; they are about to be put back."""
        for callback, state in self._kept:
            for path in _paths_in(vars(callback)) - _paths_in(state):
                self._paths.add(self.shared.get(path, path))

    def put_back(self, unfinished: Sequence[Checkpoint]) -> None:
        """Undo the calls that were interrupted, or had not been made, as the loops were left."""
        self.note_written()
        for callback, state in self._kept:
            if any(callback is each for each in unfinished):
                vars(callback).update(_copied(state))
                self._unfinished.append((callback, state))

    @property
    def pending(self) -> tuple[str, ...]:
        """Paths of checkpoints since the last commit, and `BATCH_END` if callbacks are to be called again."""
        return (*sorted(self._paths), *([BATCH_END] if self._unfinished else []))

    def repaired(self) -> None:
        """Forget which calls had not ended: all ranks have made them."""
        self._unfinished = []

    def finish(self, trainer: Trainer, pending: tuple[str, ...], shown: Mapping[str, Any], save: Save) -> None:
        """Make the calls that had not ended. All ranks call this, with the same `pending`.

        Args:
            trainer: about to run the next step, or the next part of its fit.
            pending: of all ranks together.
            shown: `Trainer.callback_metrics` of this rank at the end of the batch.
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
        for callback, state in self._unfinished:  # `on_train_start`, called since then, sets it to the present
            vars(callback).update({name: state[name] for name in ("_last_time_checked",) if name in state})
        with ExitStack() as put_back:
            for callback in trainer.checkpoint_callbacks:
                put_back.callback(vars(callback).update, _copied(vars(callback)))
                if all(callback is not each for each, _ in self._unfinished):
                    self._unfinished.append((callback, _copied(vars(callback))))
            self._agree(trainer)
            self._call_again(trainer, shown, save)
            put_back.pop_all()

    def _exists(self, exists: Callable[..., bool], path: str, trainer: Trainer) -> bool:
        return exists(path, trainer) and path not in self._paths

    def _agree(self, trainer: Trainer) -> None:
        """Give all ranks the state of the callbacks that have saved this step, of the rank that has seen most of them.

        Ranks that were interrupted at different points of a save disagree about it, and so may those that have entered
        the loops with the descriptions of different ranks, if faults follow each other. Of other callbacks each rank
        keeps its own state, since the scores that they know may differ.
        """
        step, callbacks = trainer.global_step, trainer.checkpoint_callbacks
        own = [vars(each).get("_last_global_step_saved") == step for each in callbacks]
        place = sum(own) * trainer.world_size - trainer.global_rank
        agreed = torch.tensor([place, *own], dtype=torch.long, device=trainer.strategy.root_device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        place, *have_saved = agreed.tolist()
        if not any(have_saved):
            return
        states = [each.state_dict() if isinstance(each, ModelCheckpoint) else {} for each in callbacks]
        saves = last_saves(trainer)
        given = replace_paths((states, saves), self.shared)
        states, given_saves = trainer.strategy.broadcast(given, -place % trainer.world_size)
        for index, has_saved in enumerate(have_saved):
            if has_saved:
                saves[index] = given_saves[index]
                if states[index]:
                    callbacks[index].load_state_dict(states[index])
        set_last_saves(trainer, saves)

    def _call_again(self, trainer: Trainer, shown: Mapping[str, Any], save: Save) -> None:
        def write(path: Any, weights_only: bool | None = None, storage_options: Any | None = None) -> None:
            self.note_path(str(path), save(str(path), bool(weights_only)))

        override(trainer, "save_checkpoint", write)
        try:
            for callback in trainer.checkpoint_callbacks:
                if isinstance(callback, ModelCheckpoint):
                    override(callback, "_monitor_candidates", partial(_candidates, shown))
                callback.on_train_batch_end(trainer, trainer.lightning_module, None, None, 0)
        finally:
            restore(trainer, "save_checkpoint")
            for callback in trainer.checkpoint_callbacks:
                restore(callback, "_monitor_candidates")


def _candidates(shown: Mapping[str, Any], trainer: Trainer) -> dict[str, torch.Tensor]:
    """As `ModelCheckpoint._monitor_candidates`, of the values that were shown at the end of the batch."""
    found = {name: torch.as_tensor(value).clone() for name, value in shown.items()}
    for name, present in (("epoch", trainer.current_epoch), ("step", trainer.global_step)):
        found[name] = found[name].int() if name in found else torch.tensor(present)
    return found


def _paths_in(attributes: Mapping[str, Any]) -> set[str]:
    """The paths of checkpoints in the state of a `ModelCheckpoint`."""
    return {path for path in (*map(attributes.get, _PATHS), *attributes.get("best_k_models", ())) if path}


def _copied(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of a callback, with copies of the containers that it changes in place."""
    return {name: copy.copy(each) if isinstance(each, dict | list) else each for name, each in attributes.items()}
