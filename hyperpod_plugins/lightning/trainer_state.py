"""What a Trainer knows beside tensors, as a newcomer needs it: loops, schedulers, callbacks, the data position.

A survivor gives its state from inside a step that is to be run again. Lightning restores states that were saved between
steps. `rewind` makes the one out of the other; the rest is Lightning's own checkpoint code.
"""

# Lightning's connectors have no public spelling.
# pyright: reportPrivateUsage=false

import copy
import io
import pickle
from pathlib import PosixPath, PurePosixPath
from typing import Any

import torch

from hyperpod_plugins.errors import ConfigError, few
from hyperpod_plugins.lightning.flavour import Trainer
from hyperpod_plugins.recovery.hyperparameters import hyperparameters

_PROGRESS = ("total", "current")
_AT_EPOCH_END = "hyperpod:at_epoch_end"
_SAVED_AT = "hyperpod:saved_at"
GROUPS = "hyperpod:param_groups"
"""Key of the hyperparameters of the optimizers in a described trainer."""
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
    for name in arguments(trainer):  # every process makes its own; they may be anything
        checkpoint.pop(name, None)
    fit_loop = checkpoint["loops"]["fit_loop"]
    if micro_steps_open:
        fit_loop = rewind(fit_loop, micro_steps_open)
    elif trainer.validating or is_validation_due(trainer):
        fit_loop = before_validation(fit_loop)
    elif ends_epoch(fit_loop):
        fit_loop = before_epoch_end(fit_loop)
    if loader_states:
        fit_loop["state_dict"]["combined_loader"] = loader_states
    checkpoint["loops"] = {"fit_loop": fit_loop}
    checkpoint[GROUPS] = [hyperparameters(each) for each in trainer.optimizers]
    checkpoint[_SAVED_AT] = [vars(callback).get(_LAST_SAVED, 0) for callback in trainer.checkpoint_callbacks]
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    return buffer.getvalue()


def arguments(trainer: Trainer) -> dict[str, Any]:
    """What Lightning puts into a checkpoint of the arguments that module and data module were made with."""
    found: dict[str, Any] = {}
    for owner in (trainer.lightning_module, vars(trainer).get("datamodule")):
        if owner is None or not owner.hparams:
            continue
        if "_hparams_name" in vars(owner):
            found[owner.CHECKPOINT_HYPER_PARAMS_NAME] = vars(owner)["_hparams_name"]
        is_plain = type(owner.hparams).__module__.partition(".")[0] != "omegaconf"
        found[owner.CHECKPOINT_HYPER_PARAMS_KEY] = dict(owner.hparams) if is_plain else owner.hparams
        if not is_plain:
            found[owner.CHECKPOINT_HYPER_PARAMS_TYPE] = type(owner.hparams)
    return found


def refuse_unreadable(trainer: Trainer) -> None:
    """Refuse what a replacement could not read of this trainer, before one is needed.

    Raises:
        ConfigError: naming the callback, or whatever else holds it.
    """
    data = describe_trainer(trainer, micro_steps_open=0, loader_states=[])
    try:
        read_trainer(data)
    except pickle.UnpicklingError:
        whole: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=False)  # written by this process just now
        holders = {**whole, **{f"callbacks[{name!r}]": state for name, state in whole.get("callbacks", {}).items()}}
        bad = [name for name, value in holders.items() if name != "callbacks" and not _is_readable(value)]
        raise ConfigError(
            f"the state of {few(bad)} holds Python objects that a process which replaces a lost one would have to "
            "unpickle, and that runs code. Let on_save_checkpoint and state_dict return tensors, plain containers, "
            "numbers and strings, or use CheckpointlessRecovery(enabled=False)."
        ) from None


def _is_readable(value: Any) -> bool:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    try:
        read_trainer(buffer.getvalue())
    except pickle.UnpicklingError:
        return False
    return True


def read_trainer(data: bytes) -> dict[str, Any]:
    """Inverse of `describe_trainer`; only tensors, plain containers, numbers, strings and paths are read."""
    with torch.serialization.safe_globals([PosixPath, PurePosixPath]):
        return torch.load(io.BytesIO(data), weights_only=True)


def as_checkpoint(described: dict[str, Any]) -> dict[str, Any]:
    """What Lightning saves beside tensors, of a described trainer."""
    return {name: value for name, value in described.items() if name not in (_SAVED_AT, GROUPS)}


def restore_last_saves(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Tell callbacks that save checkpoints when they did last: it is not in their state, and all ranks must agree."""
    for callback, step in zip(trainer.checkpoint_callbacks, checkpoint.get(_SAVED_AT, []), strict=False):
        if _LAST_SAVED in vars(callback):
            vars(callback)[_LAST_SAVED] = step


def log_last_batch(trainer: Trainer, committed: int) -> None:
    """Log what the present batch is to log, if its step counts and its hooks were interrupted: nobody comes back to it.

    Args:
        trainer: outside of a step, or in one that was committed in the end.
        committed: how many steps its rank has committed; the trainer counts the present one when it returns.
    """
    if is_in_batch_end(trainer) or committed > trainer.global_step:
        trainer._logger_connector.update_train_step_metrics()


def show_epoch(trainer: Trainer) -> None:
    """Let the progress bar show an epoch that is resumed in its middle; Lightning tells it of those that begin."""
    bar = trainer.progress_bar_callback
    if bar is not None:
        bar.on_train_epoch_start(trainer, trainer.lightning_module)


def is_in_batch_end(trainer: Trainer) -> bool:
    """Whether a step has been run, and the hooks at the end of its batch have not."""
    counts: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return trainer.training and counts.processed == counts.completed + 1


def is_validation_due(trainer: Trainer) -> bool:
    """Whether a validation follows the hooks in which the trainer is."""
    fetcher = trainer.fit_loop._data_fetcher
    return (
        is_in_batch_end(trainer) and fetcher is not None and trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)
    )


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
    for scope in _PROGRESS:  # the batch before it may have been interrupted in its last hooks
        counts = loop["epoch_loop.batch_progress"][scope]
        counts["completed"] = counts["processed"]
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
    steps = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]["completed"]
    state = loop["epoch_loop.state_dict"]
    if state["_batches_that_stepped"] == steps - 1:  # Lightning takes one off while it logs the epoch
        state["_batches_that_stepped"] += 1
    loop[_AT_EPOCH_END] = True
    return loop


def is_epoch_end(checkpoint: dict[str, Any]) -> bool:
    """Whether the state lies after the last batch of an epoch, and before the hooks at its end."""
    return _AT_EPOCH_END in checkpoint["loops"]["fit_loop"]


def finish_epoch(trainer: Trainer) -> None:
    """Let a trainer that resumes after an epoch's last batch go on with the hooks at the epoch's end.

    Lightning's loop over the batches has nothing to do then, and would take every later epoch for a resumed one.
    """
    loop = trainer.fit_loop.epoch_loop

    def run(data_fetcher: Any) -> None:
        del vars(loop)["run"]
        loop.reset()
        loop.on_iteration_done()

    vars(loop)["run"] = run


def forget_logged_metrics(results: dict[str, Any]) -> None:
    """Let the metrics that an interrupted validation has logged count from zero: it is run again, from its beginning.

    Args:
        results: of its loop, sums of tensors and objects of `torchmetrics`; both would go on.
    """
    for result in results.values():
        result.reset()


def forget_loaders(trainer: Trainer) -> None:
    """Have the loaders made again, for another world."""
    for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop):
        loop._combined_loader = None


def prepare_data_alone(trainer: Trainer) -> None:
    """Let a newcomer prepare data without the others, which have long passed the barrier around it."""

    def prepare_data() -> None:
        for owner in (vars(trainer).get("datamodule"), trainer.lightning_module):
            if owner is not None and trainer.local_rank == 0 and owner.prepare_data_per_node:
                owner.prepare_data()

    vars(trainer._data_connector)["prepare_data"] = prepare_data


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
    for scope in _PROGRESS:  # a validation that was run again leaves counts like those of one that was interrupted
        counts = loop["epoch_loop.val_loop.batch_progress"][scope]
        counts |= dict.fromkeys(("ready", "started", "processed"), counts["completed"])
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
