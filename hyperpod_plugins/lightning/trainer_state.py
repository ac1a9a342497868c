"""What a Trainer knows beside tensors, as a newcomer needs it: loops, schedulers, callbacks, the data position.

A survivor gives its state from inside a step that is to be run again. Lightning restores states that were saved between
steps. `rewind` makes the one out of the other; the rest is Lightning's own checkpoint code.
"""

# Lightning's connectors have no public spelling.
# pyright: reportPrivateUsage=false

import copy
import io
import pickle
from collections.abc import Mapping
from functools import partial
from pathlib import PosixPath, PurePosixPath
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hyperpod_plugins.errors import ConfigError, few
from hyperpod_plugins.lightning.compat import (
    Callback,
    Trainer,
)
from hyperpod_plugins.lightning.module_checks import initial_micro_steps
from hyperpod_plugins.lightning.saving_hooks import SavingHooks
from hyperpod_plugins.lightning.shown_values import tables_of
from hyperpod_plugins.parallel.checkpoint.state import plain
from hyperpod_plugins.recovery.packing import packed, unpacked
from hyperpod_plugins.recovery.rng import EPOCH_BEGIN, EPOCH_END, EVALUATION_BEGIN, FIT_END
from hyperpod_plugins.recovery.state import hyperparameters

_PROGRESS = ("total", "current")
_PART = "hyperpod:part"
_SHOULD_STOP = "hyperpod:should_stop"
_RELOADED_AT = "hyperpod:reloaded_at"
_SAVED_AT = "hyperpod:saved_at"
_MICRO_STEPS = "hyperpod:micro_steps"
GROUPS = "hyperpod:param_groups"
"""Key of the hyperparameters of the optimizers in a described trainer."""
METRICS = "hyperpod:metrics"
"""Key of what `callback_metrics` and its like show; see `ShownValues.described`."""
LOGGED = "hyperpod:logged"
"""Key of what is logged until the end of the epoch, and how."""
ROWS = "hyperpod:rows"
"""Key of the rows that were logged in a part of the fit that is to be run again."""
LOCAL = "hyperpod:local"
"""Key of buffers, metrics and logged means of one rank, in what is described for this rank alone."""
LAYOUT = "hyperpod:layout"
"""Key of the degrees of the job that wrote a checkpoint."""
_OF_DESCRIPTIONS = (_MICRO_STEPS, _SAVED_AT, _SHOULD_STOP, _RELOADED_AT, GROUPS, METRICS, LOGGED, ROWS)
_LAST_SAVED = ("_last_global_step_saved", "_last_checkpoint_saved")
_OF_LIGHTNING = [
    "epoch",
    "global_step",
    "pytorch-lightning_version",
    "state_dict",
    "loops",
    "callbacks",
    "optimizer_states",
    "lr_schedulers",
]


def is_rank_local(state: Any) -> bool:
    """Whether saved state may be of one rank alone: it holds a tensor of more than one element, such as a shard."""
    return any(isinstance(leaf, torch.Tensor) and leaf.numel() > 1 for leaf in tree_leaves(state))


def keep_own(theirs: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The description with which a survivor enters the loops again: that of another rank, without its rank-local state.

    Callbacks keep what they hold. What other hooks have saved is this rank's own.

    Args:
        theirs: of the rank that had come furthest.
        own: of this rank, described when it left the loops.
    """
    callbacks = {key: state for key, state in theirs.get("callbacks", {}).items() if not is_rank_local(state)}
    known = (*_OF_LIGHTNING, *_OF_DESCRIPTIONS, LOCAL)
    saved = {key: value for key, value in own.items() if key not in known and is_rank_local(value)}
    return {**theirs, **saved, "callbacks": callbacks}


def own_part(checkpoint: Mapping[str, Any], trainer: Trainer) -> dict[str, Any]:
    """What of a checkpoint may differ from rank to rank: what hooks and callbacks save, and `LOCAL`."""
    known = (*(name for name in _OF_LIGHTNING if name != "callbacks"), *arguments(trainer), LAYOUT)
    return {key: value for key, value in checkpoint.items() if key not in known}


def sharded_parts(own: Mapping[str, Any]) -> dict[str, Any]:
    """Callbacks and hooks of an `own_part` whose state, if it differs, means nothing to a rank with another shard."""
    callbacks = {f"callbacks[{key!r}]": state for key, state in own.get("callbacks", {}).items()}
    named = {**callbacks, **{key: value for key, value in own.items() if key not in ("callbacks", LOCAL)}}
    return {name: state for name, state in named.items() if is_rank_local(state)}


def is_within_epoch(checkpoint: Mapping[str, Any]) -> bool:
    """Whether what has been counted in the epoch of a state is still counted on."""
    fit_loop: dict[str, Any] = (checkpoint.get("loops") or {}).get("fit_loop", {})
    counts = fit_loop.get("epoch_loop.batch_progress")
    if counts is None or counts["current"]["processed"] == 0:
        return False
    return not counts["is_last_batch"] or fit_loop.get(_PART) in (EVALUATION_BEGIN, EPOCH_END)


def rank_local_of(trainer: Trainer, hooks: SavingHooks) -> bytes:
    """What hooks save that may be of one rank alone, `packed`."""
    saved = hooks.dump(trainer)
    known = (*_OF_LIGHTNING, *arguments(trainer))
    callbacks = {key: state for key, state in saved.get("callbacks", {}).items() if is_rank_local(state)}
    own = {key: value for key, value in saved.items() if key not in known and is_rank_local(value)}
    if not (callbacks or own):
        return b""
    return packed({"callbacks": callbacks, **own})


def take_rank_local(trainer: Trainer, data: bytes, entered_with: bytes) -> list[str]:
    """Let a replacement's hooks read what a replica of its shard has, after what they read when it entered the loops.

    Args:
        trainer: of the replacement.
        data: made by `rank_local_of`.
        entered_with: the description with which the loops were entered.

    Returns:
        Keys of the callbacks' states among it.
    """
    saved = read_trainer(data)
    callbacks: list[Callback] = vars(trainer)["callbacks"]
    states = saved.pop("callbacks")
    for callback in callbacks:
        if callback.state_key in states:
            callback.load_state_dict(states[callback.state_key])
    if saved:
        checkpoint = (read_trainer(entered_with) if entered_with else {}) | saved
        for callback in callbacks:
            callback.on_load_checkpoint(trainer, trainer.lightning_module, checkpoint)
        trainer.lightning_module.on_load_checkpoint(checkpoint)
    return list(states)


def describe_trainer(
    trainer: Trainer,
    *,
    micro_steps_open: int,
    loader_states: list[Any],
    hooks: SavingHooks,
    logged: dict[str, dict[str, Any]] | None = None,
    metrics: dict[str, dict[str, Any]] | None = None,
    as_begun: dict[str, Any] | None = None,
    rows: list[list[Any]] | None = None,
) -> bytes:
    """The state at the beginning of the present accumulation window, `packed`.

    Args:
        trainer: inside a step, or outside.
        micro_steps_open: micro-steps of the window that have begun, the present one included; 0 outside a step, where
            Lightning's own state is the right one.
        loader_states: what the loaders said before the first batch of the window was fetched.
        hooks: of the program.
        logged: see `LoggedMeans.forms`.
        metrics: see `ShownValues.described`; None for what the tables hold.
        as_begun: what `as_part_begins` said; None outside of such parts.
        rows: see `LoggedRows.state`.
    """
    checkpoint = hooks.dump(trainer)
    checkpoint["state_dict"], checkpoint["optimizer_states"] = {}, []
    for name in arguments(trainer):  # every process makes its own; they may be anything
        checkpoint.pop(name, None)
    if as_begun is None:
        fit_loop = checkpoint["loops"]["fit_loop"]
        if micro_steps_open:
            fit_loop = rewind(fit_loop, micro_steps_open)
        elif trainer.validating or is_validation_due(trainer):
            fit_loop = before_validation(fit_loop)
        elif hooks.part == EPOCH_BEGIN:
            fit_loop = before_epoch(fit_loop)
        if loader_states:
            fit_loop["state_dict"]["combined_loader"] = loader_states
        as_begun = _changed_by_loops(trainer, fit_loop, logged or {}, metrics)
    checkpoint |= as_begun
    checkpoint[_SAVED_AT], checkpoint[ROWS] = last_saves(trainer), rows or []
    checkpoint[_SHOULD_STOP] = hooks.should_stop(trainer)
    checkpoint[_MICRO_STEPS] = trainer.accumulate_grad_batches
    evaluation = trainer.fit_loop.epoch_loop.val_loop
    checkpoint[_RELOADED_AT] = [trainer.fit_loop._last_train_dl_reload_epoch, evaluation._last_val_dl_reload_epoch]
    return packed(checkpoint)


def as_part_begins(
    trainer: Trainer,
    part: str,
    logged: dict[str, dict[str, Any]],
    metrics: dict[str, dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """What Lightning changes while a part of a fit is run that lies outside of steps, as the part begins.

    Args:
        trainer: about to call the first hook of the part.
        part: an evaluation, or the end of an epoch or of the fit.
        logged: see `LoggedMeans.forms`.
        metrics: see `ShownValues.described`; None for what the tables hold.
    """
    fit_loop = trainer.fit_loop.state_dict()
    fit_loop = before_validation(fit_loop) if part == EVALUATION_BEGIN else {**fit_loop, _PART: part}
    return copy.deepcopy(_changed_by_loops(trainer, fit_loop, logged, metrics))


def _changed_by_loops(
    trainer: Trainer,
    fit_loop: dict[str, Any],
    logged: dict[str, dict[str, Any]],
    metrics: dict[str, dict[str, Any]] | None,
) -> dict[str, Any]:
    """Of a described trainer: its loops, which are given, its schedulers, and what was logged."""
    return {
        "loops": {"fit_loop": fit_loop},
        "lr_schedulers": plain([each.scheduler.state_dict() for each in trainer.lr_scheduler_configs]),
        GROUPS: [hyperparameters(each) for each in trainer.optimizers],
        METRICS: tables_of(trainer) if metrics is None else metrics,
        LOGGED: logged,
    }


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


def refuse_unreadable(trainer: Trainer, hooks: SavingHooks) -> None:
    """Refuse what a replacement could not read of this trainer, or not be given, before one is needed.

    Raises:
        ConfigError: naming the callback, or whatever else holds it.
    """
    data = describe_trainer(trainer, micro_steps_open=0, loader_states=[], hooks=hooks)
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
    try:
        read_trainer(packed(value))
    except pickle.UnpicklingError:
        return False
    return True


def read_trainer(data: bytes) -> dict[str, Any]:
    """Inverse of `describe_trainer`; only tensors, plain containers, numbers, strings and paths are read."""
    with torch.serialization.safe_globals([PosixPath, PurePosixPath]):
        return unpacked(data, map_location=None)


def as_checkpoint(described: dict[str, Any]) -> dict[str, Any]:
    """What Lightning saves beside tensors, of a described trainer."""
    known = {*_OF_DESCRIPTIONS} - {_SHOULD_STOP}
    return {name: value for name, value in described.items() if name not in known}


def with_local(described: bytes, local: dict[str, Any]) -> bytes:
    """A description for the rank that made it alone: with its buffers, metrics and logged means."""
    return packed({**read_trainer(described), LOCAL: local})


def restore_unsaved(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Tell of what is in no state, and all ranks must agree on: when callbacks saved last, and loaders were made."""
    set_last_saves(trainer, checkpoint.get(_SAVED_AT, []))
    if _RELOADED_AT in checkpoint:
        train, validation = checkpoint[_RELOADED_AT]
        trainer.fit_loop._last_train_dl_reload_epoch = train
        trainer.fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch = validation


def accumulate_as_others(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Take as many micro-steps as the others: `GradientAccumulationScheduler` sets them as an epoch begins."""
    trainer.accumulate_grad_batches = checkpoint.get(_MICRO_STEPS, trainer.accumulate_grad_batches)


def make_loaders_as_others(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Let a replacement make its loaders in the epoch in which the others made theirs, if they make new ones at times.

    Args:
        trainer: about to enter its loops.
        checkpoint: of the others.
    """
    every, made_at = vars(trainer)["reload_dataloaders_every_n_epochs"], checkpoint.get(_RELOADED_AT, [])
    for loop, epoch in zip((trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop), made_at, strict=False):
        if every > 1 and loop._combined_loader is None and epoch >= 0:  # minus infinity before there are any
            vars(loop._data_source)["dataloader"] = partial(_made_in, trainer, loop._data_source, epoch, epoch + every)


def _made_in(trainer: Trainer, source: Any, epoch: int, next_epoch: int) -> Any:
    """Loaders as they are made in an epoch, unless it is time for the next ones."""
    del vars(source)["dataloader"]
    counts: Any = trainer.fit_loop.epoch_progress.current
    present = counts.completed
    if present < next_epoch:
        counts.completed = epoch
    try:
        return source.dataloader()
    finally:
        counts.completed = present


def last_saves(trainer: Trainer) -> list[dict[str, Any]]:
    """At which step each callback that saves checkpoints did so last, and where."""
    every = [vars(callback) for callback in trainer.checkpoint_callbacks]
    return [{name: each[name] for name in _LAST_SAVED if name in each} for each in every]


def set_last_saves(trainer: Trainer, saves: list[dict[str, Any]]) -> None:
    """Inverse of `last_saves`."""
    for callback, values in zip(trainer.checkpoint_callbacks, saves, strict=False):
        present = vars(callback)
        present.update({name: values[name] for name in _LAST_SAVED if name in values and name in present})


def log_last_batch(trainer: Trainer, committed: int) -> None:
    """Log what the present batch is to log, if its step counts and its hooks were interrupted: nobody comes back to it.

    Args:
        trainer: outside of a step, or in one that was committed in the end.
        committed: how many steps its rank has committed; the trainer counts the present one when it returns.
    """
    if is_in_batch_end(trainer) or committed > steps_done(trainer):
        trainer._logger_connector.update_train_step_metrics()


def steps_done(trainer: Trainer) -> int:
    """Steps that the trainer has run, as transactions count them: with manual optimization a batch is one."""
    if trainer.lightning_module.automatic_optimization:
        return trainer.global_step
    counts: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    return counts.processed


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


def part_of(checkpoint: dict[str, Any]) -> str:
    """The part of a fit at whose beginning the state lies; empty where that is a step or an epoch."""
    part = checkpoint["loops"]["fit_loop"].get(_PART)
    return part if part in (EVALUATION_BEGIN, EPOCH_END, FIT_END) else ""


def order_of(checkpoint: dict[str, Any]) -> int:
    """Of two states after the same step, the one in whose part the other one's has ended has the larger number."""
    part, epochs = part_of(checkpoint), checkpoint["loops"]["fit_loop"]["epoch_progress"]["total"]
    has_begun = epochs["started"] > epochs["completed"]  # the present epoch, whose first hooks have been called
    place = {EVALUATION_BEGIN: 1, EPOCH_END: 3, FIT_END: 4}.get(part, 2 if has_begun else 0)
    return 5 * epochs["completed"] + place


def was_asked_to_stop(checkpoint: dict[str, Any]) -> bool:
    """Whether `Trainer.should_stop` was set."""
    return bool(checkpoint.get(_SHOULD_STOP))


def before_validation(fit_loop: dict[str, Any]) -> dict[str, Any]:
    """State of the fit loop as if the validation that is about to begin had been interrupted in its first batch.

    Lightning begins an interrupted validation again, if its counts say that one batch was started and not processed.
    """
    loop = copy.deepcopy(fit_loop)
    for scope in _PROGRESS:  # the batch before it may have been interrupted in its last hooks
        counts = loop["epoch_loop.batch_progress"][scope]
        counts["completed"] = counts["processed"]
    batches = loop["epoch_loop.val_loop.batch_progress"]
    done = batches["total"]["completed"]
    batches["total"] |= {"ready": done + 1, "started": done + 1, "processed": done, "completed": done}
    batches["current"] |= {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    batches["is_last_batch"] = False
    loop[_PART] = EVALUATION_BEGIN
    return loop


def before_epoch(fit_loop: dict[str, Any]) -> dict[str, Any]:
    """State of the fit loop, saved in the first hooks of an epoch, as if these had not begun.

    Lightning begins to count batches anew after those hooks; it would take the epoch before for the present one.
    """
    loop = copy.deepcopy(fit_loop)
    batches, epochs = loop["epoch_loop.batch_progress"], loop["epoch_progress"]
    for scope in _PROGRESS:
        done = epochs[scope]["completed"]
        epochs[scope] |= {"ready": done + 1, "started": done, "processed": done}
        batches[scope] |= dict.fromkeys(batches[scope], 0 if scope == "current" else batches[scope]["processed"])
    batches["is_last_batch"] = False
    return loop


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
        loop.epoch_loop.manual_optimization.optim_step_progress,
        loop.epoch_loop.val_loop.batch_progress,
    ):
        progress.reset()


def tear_down_loops(trainer: Trainer, *, has_evaluated: bool) -> None:
    """Bring the loops to where they can be entered again, after an exception that Lightning has not seen.

    Args:
        trainer: whose loops.
        has_evaluated: whether an evaluation has ended here, so that modules are as its last hooks have left them.
    """
    evaluation = trainer.fit_loop.epoch_loop.val_loop
    if trainer.evaluating or trainer.sanity_checking:
        if not has_evaluated:
            evaluation._module_mode.restore(trainer.lightning_module)
        forget_logged_metrics(evaluation._results)
    trainer.training = True  # a fault in a validation leaves the stage at that
    trainer.accumulate_grad_batches = initial_micro_steps(trainer)
    evaluation._has_run = False
    trainer.fit_loop.teardown()
    trainer._logger_connector.teardown()
    trainer._signal_connector.teardown()


def describe_end(trainer: Trainer) -> dict[str, Any]:
    """What this rank's trainer knows beside tensors, after a fit."""
    checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    left_out = {"state_dict", "optimizer_states", *arguments(trainer)}
    return {name: value for name, value in checkpoint.items() if name not in left_out}


def not_restarting(trainer: Trainer) -> None:
    """Let the next `fit` of a trainer whose loops were restored at their end begin as after a `fit` that was run."""
    fit_loop = trainer.fit_loop
    epoch_loop = fit_loop.epoch_loop
    for loop in (fit_loop, epoch_loop, epoch_loop.val_loop, epoch_loop.automatic_optimization):
        loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    epoch_loop.manual_optimization._restarting = False
    fit_loop._combined_loader_states_to_load = []


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
