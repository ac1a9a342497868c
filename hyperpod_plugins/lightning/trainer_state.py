"""What a Trainer knows beside tensors, as a newcomer needs it: loops, schedulers, callbacks, the data position.

A survivor gives its state from inside a step that is to be run again. Lightning restores states that were saved between
steps. `rewind` makes the one out of the other; the rest is Lightning's own checkpoint code.
"""

# Lightning's connectors have no public spelling.
# pyright: reportPrivateUsage=false

import copy
import io
from pathlib import PosixPath, PurePosixPath
from typing import Any

import torch

from hyperpod_plugins.lightning.flavour import Trainer

_PROGRESS = ("total", "current")
_AT_EPOCH_END = "hyperpod:at_epoch_end"
_SAVED_AT = "hyperpod:saved_at"
_LAST_SAVED = "_last_global_step_saved"


def describe_trainer(trainer: Trainer, *, micro_steps_open: int, loader_states: list[Any]) -> bytes:
    """The state at the beginning of the present accumulation window, as bytes that `weights_only` can read.

    Args:
        trainer: inside a step, or outside.
        micro_steps_open: micro-steps of the window that have begun, the present one included; 0 outside a step, where
            Lightning's own state is the right one.
        loader_states: what the loaders said before the first batch of the window was fetched.
    """
    checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    checkpoint["state_dict"], checkpoint["optimizer_states"] = {}, []
    fit_loop = checkpoint["loops"]["fit_loop"]
    if micro_steps_open:
        fit_loop = rewind(fit_loop, micro_steps_open)
    elif trainer.validating:
        fit_loop = before_validation(fit_loop)
    elif ends_epoch(fit_loop):
        fit_loop = before_epoch_end(fit_loop)
    if loader_states:
        fit_loop["state_dict"]["combined_loader"] = loader_states
    checkpoint["loops"] = {"fit_loop": fit_loop}
    checkpoint[_SAVED_AT] = [vars(callback).get(_LAST_SAVED, 0) for callback in trainer.checkpoint_callbacks]
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    return buffer.getvalue()


def read_trainer(data: bytes) -> dict[str, Any]:
    """Inverse of `describe_trainer`; only tensors, plain containers, numbers, strings and paths are read."""
    with torch.serialization.safe_globals([PosixPath, PurePosixPath]):
        return torch.load(io.BytesIO(data), weights_only=True)


def restore_last_saves(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Tell callbacks that save checkpoints when they did last: it is not in their state, and all ranks must agree."""
    for callback, step in zip(trainer.checkpoint_callbacks, checkpoint.get(_SAVED_AT, []), strict=False):
        if _LAST_SAVED in vars(callback):
            vars(callback)[_LAST_SAVED] = step


def batches_done(checkpoint: dict[str, Any]) -> int:
    """Batches of the epoch that lie before the state's position."""
    return checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["processed"]


def is_epoch_start(checkpoint: dict[str, Any]) -> bool:
    """Whether the state lies before the first step of an epoch."""
    return batches_done(checkpoint) == 0


def before_validation(fit_loop: dict[str, Any]) -> dict[str, Any]:
    """State of the fit loop as if the validation that is going on had been interrupted in its first batch.

    Lightning begins an interrupted validation again, if its counts say that one batch was started and not processed.
    """
    loop = copy.deepcopy(fit_loop)
    batches = loop["epoch_loop.val_loop.batch_progress"]
    done = batches["total"]["completed"] - batches["current"]["completed"]
    batches["total"] |= {"ready": done + 1, "started": done + 1, "processed": done, "completed": done}
    batches["current"] |= {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    batches["is_last_batch"] = False
    return loop


def ends_epoch(fit_loop: dict[str, Any]) -> bool:
    """Whether the state was saved in the hooks at the end of an epoch."""
    epochs = fit_loop["epoch_progress"]["total"]
    return epochs["processed"] == epochs["started"] and epochs["completed"] < epochs["processed"]


def before_epoch_end(fit_loop: dict[str, Any]) -> dict[str, Any]:
    """State of the fit loop as if all batches of the epoch had been run, and its end had not begun.

    From a state within those hooks Lightning would count the epoch twice.
    """
    loop = copy.deepcopy(fit_loop)
    for scope in _PROGRESS:
        loop["epoch_progress"][scope]["processed"] -= 1
    loop["epoch_loop.state_dict"]["_batches_that_stepped"] += 1  # Lightning takes one off while the hooks run
    loop[_AT_EPOCH_END] = True
    return loop


def is_epoch_end(checkpoint: dict[str, Any]) -> bool:
    """Whether the state lies after the last batch of an epoch, and before the hooks at its end."""
    return _AT_EPOCH_END in checkpoint["loops"]["fit_loop"]


def begin_afresh(trainer: Trainer) -> None:
    """Set the loops back to where `fit` begins."""
    loop = trainer.fit_loop
    for progress in (
        loop.epoch_progress,
        loop.epoch_loop.batch_progress,
        loop.epoch_loop.scheduler_progress,
        loop.epoch_loop.automatic_optimization.optim_progress,
        loop.epoch_loop.val_loop.batch_progress,
    ):
        progress.reset()


def rewind(fit_loop: dict[str, Any], micro_steps_open: int) -> dict[str, Any]:
    """State of the fit loop as if it had been saved when the last batch before the window ended.

    That is where `ModelCheckpoint` saves within an epoch, and what Lightning continues from: the last batch has been
    processed, and the end of its hooks is still to be counted.
    """
    loop = copy.deepcopy(fit_loop)
    batches = loop["epoch_loop.batch_progress"]
    for scope in _PROGRESS:
        done = batches[scope]["ready"] - micro_steps_open
        batches[scope] |= {"ready": done, "started": done, "processed": done, "completed": max(0, done - 1)}
    batches["is_last_batch"] = False
    optimizer = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    for part in ("step", "zero_grad"):
        for scope in _PROGRESS:
            counts = optimizer[part][scope]
            counts |= dict.fromkeys(counts, counts["completed"])
    if batches["current"]["ready"]:
        loop["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1  # counted when those hooks have ended
    else:
        batches["total"]["completed"] = batches["total"]["processed"]
        for scope in _PROGRESS:  # the epoch has not started: its hooks are to be called
            loop["epoch_progress"][scope]["started"] -= 1
    return loop
