"""The state of a Trainer besides tensors, as a joiner needs it: loops, schedulers, callbacks, the data position.

A survivor describes its trainer inside a step that is to be run again, but Lightning restores states that were saved
between steps. `rewind` converts the former to the latter; the rest is Lightning's own checkpoint code.
"""

# Lightning's connectors have no public API.
# pyright: reportPrivateUsage=false

import copy
import io
import pickle
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path, PosixPath, PurePosixPath
from types import NoneType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hyperpod_plugins.data.random_numbers import keyed_generators
from hyperpod_plugins.errors import ConfigError, format_list
from hyperpod_plugins.lightning.compat import (
    Callback,
    CombinedLoader,
    Trainer,
    callbacks_of,
    original,
    override,
)
from hyperpod_plugins.lightning.module_checks import initial_micro_steps
from hyperpod_plugins.lightning.saving_hooks import SavingHooks
from hyperpod_plugins.lightning.shown_values import tables_of
from hyperpod_plugins.parallel.checkpoint.state import to_python_scalars
from hyperpod_plugins.recovery.packing import pack, unpack
from hyperpod_plugins.recovery.rng import EPOCH_BEGIN, EPOCH_END, EVALUATION_BEGIN, FIT_END
from hyperpod_plugins.recovery.state_transfer import freeze, frozen_parameters, hyperparameters

_PROGRESS = ("total", "current")
_PART = "hyperpod:part"
_SHOULD_STOP = "hyperpod:should_stop"
_RELOADED_AT = "hyperpod:reloaded_at"
_SAVED_AT = "hyperpod:saved_at"
_MICRO_STEPS = "hyperpod:micro_steps"
_SETTINGS = "hyperpod:settings"
_FROZEN = "hyperpod:frozen"
_LIMITS = "hyperpod:limits"
GROUPS = "hyperpod:param_groups"
"""Key of the optimizers' hyperparameters in the description of a trainer."""
METRICS = "hyperpod:metrics"
"""Key of the values that `callback_metrics` and similar tables show; see `ShownValues.described`."""
LOGGED = "hyperpod:logged"
"""Key of the values reduced at the end of the epoch, with their `log` arguments; see `LoggedMeans.forms`."""
ROWS = "hyperpod:rows"
"""Key of the rows that were logged in a part of the fit that is to be run again."""
LOCAL = "hyperpod:local"
"""Key of one rank's buffers, metrics and logged means, in a description for that rank only."""
READ_BY_HOOKS = "hyperpod:read_by_hooks"
"""Key of the attributes and buffers from before the hooks that precede a step, for a replacement that runs them."""
LAYOUT = "hyperpod:layout"
"""Key of the world size and the shard and tensor degrees of the job that wrote a checkpoint."""
_OF_DESCRIPTIONS = (
    *(_MICRO_STEPS, _SETTINGS, _LIMITS, _FROZEN, _SAVED_AT, _SHOULD_STOP, _RELOADED_AT),
    *(GROUPS, METRICS, LOGGED, ROWS, READ_BY_HOOKS),
)
_MAX_SMALL_ENTRIES, _MAX_SMALL_BYTES = 1024, 2**16
_NOW, _BEGUN = "now", "before the first hook of the part"
_SCORE = "current_score"
_LAST_SAVED = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation", _SCORE)
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
    """Whether saved state may be rank-local: it has a tensor with more than one element, such as a shard."""
    return any(isinstance(leaf, torch.Tensor) and leaf.numel() > 1 for leaf in tree_leaves(state))


def is_small(state: Any) -> bool:
    """Whether a state is plain, and small enough to be sent to another rank in each step."""
    sizes = _sizes(state)
    return sum(sizes) <= _MAX_SMALL_BYTES and len(sizes) <= _MAX_SMALL_ENTRIES


def _sizes(value: Any) -> list[int]:
    """The size of each value in plain containers, in bytes; too large for other types, and cut off at the limit."""
    kind = type(value)
    if kind in (int, float, bool, NoneType):
        return [8]
    if kind in (str, bytes):
        return [len(value)]
    if kind is torch.Tensor:
        return [value.nbytes if value.numel() <= _MAX_SMALL_ENTRIES else _MAX_SMALL_BYTES + 1]
    if kind not in (dict, list, tuple, set) or len(value) > _MAX_SMALL_ENTRIES:
        return [_MAX_SMALL_BYTES + 1]
    found: list[int] = []
    for each in (*value, *value.values()) if kind is dict else value:
        found += _sizes(each)
        if len(found) > _MAX_SMALL_ENTRIES:
            break
    return found


def merge_own(theirs: dict[str, Any], own: Mapping[str, Any], keys: Collection[str] = ()) -> dict[str, Any]:
    """The description with which a survivor re-enters the loops: that of another rank, without its rank-local state.

    Callbacks with large rank-local state keep their present one. Other rank-local state is taken from `own`.

    Args:
        theirs: description of the rank that had come furthest.
        own: description of this rank from when it left the loops.
        keys: `state_key` of the callbacks whose small state is rank-local.
    """
    callbacks = {key: state for key, state in theirs.get("callbacks", {}).items() if not is_rank_local(state)}
    callbacks = _with_small(callbacks, own, keys)
    if keys and _SAVED_AT in own:
        pairs = zip(theirs.get(_SAVED_AT, []), own[_SAVED_AT], strict=False)
        saved_at = [{**one, **{key: value for key, value in other.items() if key == _SCORE}} for one, other in pairs]
        theirs = {**theirs, _SAVED_AT: saved_at}
    known = (*_OF_LIGHTNING, *_OF_DESCRIPTIONS, LOCAL)
    saved = {key: value for key, value in own.items() if key not in known and is_rank_local(value)}
    return {**theirs, **saved, "callbacks": callbacks}


def _with_small(callbacks: dict[str, Any], own: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """The states of callbacks with small ones named in `keys` as they are in `own`, where an empty one is missing."""
    mine = own.get("callbacks", {})
    names = {key for key in keys if is_small(mine.get(key, {})) and is_small(callbacks.get(key, {}))}
    return {key: state for key, state in callbacks.items() if key not in names} | {
        key: mine[key] for key in names & mine.keys()
    }


def with_rank_local(theirs: dict[str, Any], own: Mapping[str, Any], keys: Collection[str] = ()) -> dict[str, Any]:
    """The description of another rank after the same step, with this rank's own state of what is rank-local.

    Args:
        theirs: description with which this rank has entered the loops.
        own: what the hooks of this rank save at that point.
        keys: `state_key` of the callbacks whose small state is rank-local.
    """
    callbacks = {key: state for key, state in own.get("callbacks", {}).items() if is_rank_local(state)}
    known = (*_OF_LIGHTNING, *_OF_DESCRIPTIONS, LOCAL)
    saved = {key: value for key, value in own.items() if key not in known and is_rank_local(value)}
    merged = _with_small(theirs.get("callbacks", {}), own, keys)
    return {**theirs, **saved, "callbacks": {**merged, **callbacks}}


def rank_local_part(checkpoint: Mapping[str, Any], trainer: Trainer) -> dict[str, Any]:
    """The part of a checkpoint that may differ between ranks: what hooks and callbacks save, and `LOCAL`."""
    known = (*(name for name in _OF_LIGHTNING if name != "callbacks"), *arguments(trainer), LAYOUT)
    return {key: value for key, value in checkpoint.items() if key not in known}


def sharded_parts(own: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of a `rank_local_part` that only a rank with the same shard can use if they differ between ranks."""
    callbacks = {f"callbacks[{key!r}]": state for key, state in own.get("callbacks", {}).items()}
    named = {**callbacks, **{key: value for key, value in own.items() if key not in ("callbacks", LOCAL)}}
    return {name: state for name, state in named.items() if is_rank_local(state)}


def is_within_epoch(checkpoint: Mapping[str, Any]) -> bool:
    """Whether the state lies inside an epoch, so that what is counted per epoch continues."""
    fit_loop: dict[str, Any] = (checkpoint.get("loops") or {}).get("fit_loop", {})
    counts = fit_loop.get("epoch_loop.batch_progress")
    if counts is None or counts["current"]["processed"] == 0:
        return False
    epochs = fit_loop["epoch_progress"]["total"]
    if epochs["started"] <= epochs["completed"]:  # a fit may end before the last batch of an epoch
        return False
    return not counts["is_last_batch"] or fit_loop.get(_PART) in (EVALUATION_BEGIN, EPOCH_END)


def rank_local_of(trainer: Trainer, hooks: SavingHooks) -> bytes:
    """What hooks save that may be rank-local, `packed`; empty if there is none."""
    saved = hooks.dump(trainer)
    known = (*_OF_LIGHTNING, *arguments(trainer))
    of_callbacks = saved.get("callbacks", {})
    callbacks = {
        each.state_key: {_NOW: _as_computed_with(each, hooks), _BEGUN: of_callbacks[each.state_key]}
        for each in callbacks_of(trainer)
        if is_rank_local(of_callbacks.get(each.state_key))
    }
    own = {key: value for key, value in saved.items() if key not in known and is_rank_local(value)}
    if not (callbacks or own):
        return b""
    return pack({"callbacks": callbacks, **own})


def take_rank_local(trainer: Trainer, hooks: SavingHooks, data: bytes, entered_with: bytes) -> None:
    """Make a replacement's hooks load the rank-local state of a replica of its shard.

    The hooks have already loaded `entered_with`; they load it once more with that state added.

    Args:
        trainer: of the replacement.
        hooks: of the program.
        data: made by `rank_local_of`.
        entered_with: the description with which the loops were entered.
    """
    saved = read_trainer(data)
    callbacks = callbacks_of(trainer)
    states = saved.pop("callbacks")
    for callback in callbacks:
        if callback.state_key in states:
            callback.load_state_dict(states[callback.state_key][_NOW])
    if saved:
        checkpoint = (read_trainer(entered_with) if entered_with else {}) | saved
        for callback in callbacks:
            callback.on_load_checkpoint(trainer, trainer.lightning_module, checkpoint)
        trainer.lightning_module.on_load_checkpoint(checkpoint)
    hooks.refresh_untouched(states)
    for key, state in states.items():
        if hooks.begun_with(key) is not None:
            hooks.replace_begun(key, state[_BEGUN])


def _as_computed_with(callback: Callback, hooks: SavingHooks) -> dict[str, Any] | None:
    """The state of a callback as the present step began to compute, or now between steps."""
    in_window = hooks.begun_computing(callback.state_key)
    return hooks.state_of(callback) if in_window is None else in_window


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
    paths: Mapping[str, str] | None = None,
    read_by_hooks: dict[str, Any] | None = None,
) -> bytes:
    """Describe the trainer at the beginning of the present accumulation window, `packed`.

    Args:
        trainer: inside or outside a step.
        micro_steps_open: micro-steps of the window that have begun, including the present one; 0 outside a step,
            where Lightning's own state is correct.
        loader_states: states of the loaders before the first batch of the window was fetched.
        hooks: of the program.
        logged: see `LoggedMeans.forms`.
        metrics: see `ShownValues.described`; None for the present contents of the tables.
        as_begun: result of `describe_part_start`; None outside such parts.
        rows: see `LoggedRows.state`.
        paths: see `CheckpointCalls.shared`.
        read_by_hooks: see [Note: what hooks read]; None for a description that is not for replacements.
    """
    checkpoint = hooks.dump(trainer)
    checkpoint["state_dict"], checkpoint["optimizer_states"] = {}, []
    for name in arguments(trainer):  # every process has its own, of any type
        checkpoint.pop(name, None)
    if as_begun is None:
        fit_loop = checkpoint["loops"]["fit_loop"]
        if micro_steps_open:
            fit_loop = rewind(fit_loop, micro_steps_open)
        elif trainer.validating or is_validation_due(trainer):
            fit_loop = before_validation(fit_loop)
        elif hooks.part == EPOCH_BEGIN:
            fit_loop = before_epoch(fit_loop)
        elif is_in_batch_end(trainer) and trainer.fit_loop.epoch_loop.done:
            fit_loop = before_epoch_end(fit_loop)
        if loader_states:
            fit_loop["state_dict"]["combined_loader"] = loader_states
        as_begun = _changed_by_loops(trainer, fit_loop, logged or {}, metrics)
    checkpoint |= untracked(trainer) | as_begun
    _use_shared_paths(trainer, checkpoint, paths or {})
    checkpoint[ROWS] = rows or []
    checkpoint[READ_BY_HOOKS] = read_by_hooks or {}
    checkpoint[_SHOULD_STOP] = hooks.should_stop(trainer)
    checkpoint[_MICRO_STEPS] = trainer.accumulate_grad_batches
    return pack(checkpoint)


def describe_part_start(
    trainer: Trainer,
    part: str,
    logged: dict[str, dict[str, Any]],
    metrics: dict[str, dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """At the beginning of a part of the fit outside steps, copy the state that Lightning changes during the part.

    Args:
        trainer: about to call the first hook of the part.
        part: an evaluation, or the end of an epoch or of the fit.
        logged: see `LoggedMeans.forms`.
        metrics: see `ShownValues.described`; None for the present contents of the tables.
    """
    fit_loop = trainer.fit_loop.state_dict()
    fit_loop = before_validation(fit_loop) if part == EVALUATION_BEGIN else {**fit_loop, _PART: part}
    return copy.deepcopy(_changed_by_loops(trainer, fit_loop, logged, metrics) | {_SAVED_AT: last_saves(trainer)})


def _changed_by_loops(
    trainer: Trainer,
    fit_loop: dict[str, Any],
    logged: dict[str, dict[str, Any]],
    metrics: dict[str, dict[str, Any]] | None,
) -> dict[str, Any]:
    """The entries of a description for loops (given), schedulers, hyperparameters and logged values."""
    return {
        "loops": {"fit_loop": fit_loop},
        "lr_schedulers": to_python_scalars([each.scheduler.state_dict() for each in trainer.lr_scheduler_configs]),
        GROUPS: [hyperparameters(each) for each in trainer.optimizers],
        METRICS: tables_of(trainer) if metrics is None else metrics,
        LOGGED: logged,
        _LIMITS: _limits_of(trainer),
    }


def _limits_of(trainer: Trainer) -> dict[str, int | None]:
    """The loops' limits, which a program may change while it trains."""
    fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
    return {
        "max_epochs": fit.max_epochs,
        "min_epochs": fit.min_epochs,
        "max_steps": epoch.max_steps,
        "min_steps": epoch.min_steps,
    }


def limit_as_others(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Set the loops' limits to those of a state of this fit that all ranks enter the loops with."""
    for name, value in checkpoint.get(_LIMITS, {}).items():
        setattr(trainer.fit_loop if name.endswith("epochs") else trainer.fit_loop.epoch_loop, name, value)


def arguments(trainer: Trainer) -> dict[str, Any]:
    """The hyperparameters of module and data module, as Lightning adds them to a checkpoint."""
    found: dict[str, Any] = {}
    for owner in (trainer.lightning_module, getattr(trainer, "datamodule", None)):
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
    """Raise if a replacement could not get or read the description of this trainer, before one is needed.

    Raises:
        ConfigError: the state holds Python objects, or the program reads back what a hook that communicates saves.
    """
    data = describe_trainer(trainer, micro_steps_open=0, loader_states=[], hooks=hooks)
    try:
        read_trainer(data)
    except pickle.UnpicklingError:
        whole: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=False)  # this process has just written it
        holders = {**whole, **{f"callbacks[{name!r}]": state for name, state in whole.get("callbacks", {}).items()}}
        bad = [name for name, value in holders.items() if name != "callbacks" and not _is_readable(value)]
        raise ConfigError(
            f"the state of {format_list(bad)} holds Python objects that a process which replaces a lost one would "
            "have to unpickle, and that runs code. Let on_save_checkpoint and state_dict return tensors, plain "
            "containers, numbers and strings, or use CheckpointlessRecovery(enabled=False)."
        ) from None


def _is_readable(value: Any) -> bool:
    try:
        read_trainer(pack(value))
    except pickle.UnpicklingError:
        return False
    return True


def read_trainer(data: bytes) -> dict[str, Any]:
    """Inverse of `describe_trainer`; only tensors, plain containers, numbers, strings and paths are read."""
    with torch.serialization.safe_globals([PosixPath, PurePosixPath]):
        return unpack(data, map_location=None)


def named_by_kind(described: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a description by names that begin with a kind: `callback`, `logged`, `hook` or `trainer`."""
    found = {f"callback {name}": state for name, state in described.get("callbacks", {}).items()}
    for name, value in described.items():
        if name == METRICS:
            found |= {f"logged {table.lstrip('_')}": each for table, each in value.items()}
        elif name != "callbacks":
            found[f"{'trainer' if name in (*_OF_LIGHTNING, *_OF_DESCRIPTIONS) else 'hook'} {name}"] = value
    return found


def as_checkpoint(described: dict[str, Any]) -> dict[str, Any]:
    """The entries of a description that belong in a Lightning checkpoint."""
    known = {*_OF_DESCRIPTIONS} - {_SHOULD_STOP, _LIMITS}
    return {name: value for name, value in described.items() if name not in known}


def without_requests(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Checkpoint data without what only a job that goes on elsewhere must know: whether it was asked to stop."""
    return {name: value for name, value in checkpoint.items() if name != _SHOULD_STOP}


def with_local(described: bytes, local: dict[str, Any]) -> bytes:
    """Add a rank's buffers, metrics and logged means to its description, which is then for that rank only."""
    return pack({**read_trainer(described), LOCAL: local})


def untracked(trainer: Trainer) -> dict[str, Any]:
    """What no state_dict has: when callbacks last saved and loaders were created, what is not trained, and settings."""
    algorithm = trainer.gradient_clip_algorithm
    evaluation = trainer.fit_loop.epoch_loop.val_loop
    reloaded = [trainer.fit_loop._last_train_dl_reload_epoch, evaluation._last_val_dl_reload_epoch]
    return {
        _SAVED_AT: last_saves(trainer),
        _RELOADED_AT: reloaded,
        _FROZEN: frozen_parameters(trainer.lightning_module),
        _LIMITS: _limits_of(trainer),
        _SETTINGS: {
            "gradient_clip_val": trainer.gradient_clip_val,
            "gradient_clip_algorithm": None if algorithm is None else str(getattr(algorithm, "value", algorithm)),
            "check_val_every_n_epoch": trainer.check_val_every_n_epoch,
        },
    }


def untracked_in(trainer: Trainer, checkpoint: dict[str, Any], path: str) -> dict[str, Any]:
    """`untracked` as of a checkpoint that is saved: a callback records a save only when it is done.

    Args:
        trainer: about to continue from the checkpoint.
        checkpoint: its contents.
        path: of the checkpoint.
    """
    saves: list[dict[str, Any]] = [dict(each) for each in checkpoint.get(_SAVED_AT, [])]
    for callback, values in zip(trainer.checkpoint_callbacks, saves, strict=False):
        state: dict[str, Any] = checkpoint["callbacks"].get(callback.state_key, {})
        names = (state.get("best_model_path"), state.get("last_model_path"), *state.get("best_k_models", ()))
        if Path(path).absolute() in [Path(name).absolute() for name in names if name]:
            values |= {"_last_global_step_saved": checkpoint["global_step"], "_last_checkpoint_saved": path}
    names = _RELOADED_AT, _FROZEN, _SETTINGS, _LIMITS
    return {name: checkpoint[name] for name in names if name in checkpoint} | {_SAVED_AT: saves}


def freeze_as_saved(trainer: Trainer, found: Mapping[str, Any]) -> None:
    """Train the parameters that were trained when the checkpoint was saved of which `untracked_in` was `found`."""
    if _FROZEN in found:
        freeze(trainer.lightning_module, found[_FROZEN])


def restore_untracked(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Restore when callbacks last saved and loaders were created, and settings, on which all ranks must agree."""
    set_last_saves(trainer, checkpoint.get(_SAVED_AT, []))
    if _RELOADED_AT in checkpoint:
        train, validation = checkpoint[_RELOADED_AT]
        trainer.fit_loop._last_train_dl_reload_epoch = train
        trainer.fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch = validation
    for name, value in checkpoint.get(_SETTINGS, {}).items():
        if getattr(trainer, name) != value:  # the program has changed it since it made the Trainer
            setattr(trainer, name, value)


def begin_epoch_after_last_batch(trainer: Trainer) -> None:
    """Begin an epoch as such after a restart from a checkpoint of the last batch of the one before.

    Lightning completes that epoch, and takes the next one for its continuation (2.6): it neither counts it as started
    nor calls `on_train_epoch_start`. Means of an epoch that seems not to have started are not restored.
    """
    loop = trainer.fit_loop
    epochs: Any = loop.epoch_progress.total
    if loop.restarted_mid_epoch and epochs.processed == epochs.started:
        loop.reset_restart_stage()


def accumulate_as_others(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Use the others' number of micro-steps; `GradientAccumulationScheduler` sets it when an epoch begins."""
    trainer.accumulate_grad_batches = checkpoint.get(_MICRO_STEPS, trainer.accumulate_grad_batches)


def make_loaders_as_others(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Make a replacement create its loaders as in the epoch in which the others did, if they are reloaded regularly.

    Args:
        trainer: about to enter its loops.
        checkpoint: description of the others.
    """
    every, made_at = vars(trainer)["reload_dataloaders_every_n_epochs"], checkpoint.get(_RELOADED_AT, [])
    for loop, epoch in zip((trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop), made_at, strict=False):
        if every > 1 and loop._combined_loader is None and epoch >= 0:  # the epoch is -inf before loaders exist
            source = loop._data_source
            undo: list[Callable[[], None]] = []
            undo.append(
                override(source, "dataloader", partial(_made_in, trainer, source, (epoch, epoch + every), undo))
            )


def _made_in(trainer: Trainer, source: Any, epochs: tuple[int, int], undo: list[Callable[[], None]]) -> Any:
    """Create loaders as in the first of two epochs, unless the second one has been reached, when the next are due."""
    epoch, next_epoch = epochs
    undo.pop()()
    counts: Any = trainer.fit_loop.epoch_progress.current
    present = counts.completed
    if present < next_epoch:
        counts.completed = epoch
    try:
        return source.dataloader()
    finally:
        counts.completed = present


def prepare_loader_hooks(trainer: Trainer, key: tuple[object, ...] | None) -> None:
    """Let the hooks that create loaders be called any number of times in a fit, from now on.

    The loops get copies of each `CombinedLoader` of the program: Lightning replaces the loaders in it by those that it
    has processed for the present world, and would process these when a fit is entered again. Random numbers that
    `train_dataloader` and `val_dataloader` draw (`random_split`) depend on the epoch in which the loaders are due: a
    replacement calls these hooks at another time, and less often.

    Args:
        trainer: about to fit.
        key: of these random numbers, besides hook and epoch; None to leave them as they are.
    """
    for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop):
        override(loop._data_source, "dataloader", partial(_created, trainer, loop._data_source, key))


def _created(trainer: Trainer, source: Any, key: tuple[object, ...] | None) -> Any:
    epoch = trainer.current_epoch if vars(trainer)["reload_dataloaders_every_n_epochs"] else 0
    is_hook = key is not None and source.is_module()
    with keyed_generators("loaders", *(key or ()), source.name, epoch) if is_hook else nullcontext():
        loaders = original(source, "dataloader")()
    return copy.copy(loaders) if isinstance(loaders, CombinedLoader) else loaders


def last_saves(trainer: Trainer) -> list[dict[str, Any]]:
    """Step, path and score of the last save of each checkpoint callback; its `load_state_dict` leaves these out."""
    every = [vars(callback) for callback in trainer.checkpoint_callbacks]
    return [{name: each[name] for name in _LAST_SAVED if name in each} for each in every]


def put_back_last_saves(trainer: Trainer, part: Mapping[str, Any]) -> None:
    """Restore when callbacks last saved to the beginning of a part, as `describe_part_start` found it."""
    set_last_saves(trainer, part[_SAVED_AT])


def _use_shared_paths(trainer: Trainer, checkpoint: dict[str, Any], paths: Mapping[str, str]) -> None:
    """Replace paths in the states of checkpoint callbacks; see [Note: paths that differ]."""
    if not paths:
        return
    checkpoint[_SAVED_AT] = replace_paths(checkpoint[_SAVED_AT], paths)
    callbacks: dict[str, Any] = checkpoint["callbacks"]
    for key in {each.state_key for each in trainer.checkpoint_callbacks} & {*callbacks}:
        callbacks[key] = replace_paths(callbacks[key], paths)


def replace_paths(value: Any, paths: Mapping[str, str]) -> Any:
    """A copy of nested containers in which strings that are keys of `paths` are replaced."""
    if isinstance(value, str):
        return paths.get(value, value)
    if isinstance(value, dict):
        return {replace_paths(key, paths): replace_paths(each, paths) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(replace_paths(each, paths) for each in value)
    return value


def set_last_saves(trainer: Trainer, saves: list[dict[str, Any]]) -> None:
    """Inverse of `last_saves`."""
    for callback, values in zip(trainer.checkpoint_callbacks, saves, strict=False):
        present = vars(callback)
        present.update({name: values[name] for name in _LAST_SAVED if name in values and name in present})


def log_last_batch(trainer: Trainer, committed: int) -> None:
    """Log the metrics of the present batch if its step was committed but its hooks were interrupted.

    The loops are not re-entered there, so they would not be logged otherwise.

    Args:
        trainer: outside a step, or in one that was committed in the end.
        committed: steps that this rank has committed; the trainer counts the present one when its step returns.
    """
    if is_in_batch_end(trainer) or committed > steps_done(trainer):
        trainer._logger_connector.update_train_step_metrics()


def steps_done(trainer: Trainer) -> int:
    """Steps that the trainer has run, as counted by transactions: with manual optimization, each batch is a step."""
    if trainer.lightning_module.automatic_optimization:
        return trainer.global_step
    counts: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    return counts.processed


def steps_in(checkpoint: dict[str, Any], trainer: Trainer) -> int:
    """The same for the trainer that a checkpoint describes."""
    if trainer.lightning_module.automatic_optimization:
        return checkpoint["global_step"]
    return checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["processed"]


def show_epoch(trainer: Trainer) -> None:
    """Make the progress bar show an epoch that is resumed in the middle; Lightning only announces new epochs."""
    bar = trainer.progress_bar_callback
    if bar is not None:
        bar.on_train_epoch_start(trainer, trainer.lightning_module)


def is_in_batch_end(trainer: Trainer) -> bool:
    """Whether a step has been run, but not all hooks at the end of its batch."""
    counts: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return trainer.training and counts.processed == counts.completed + 1


def is_validation_due(trainer: Trainer) -> bool:
    """Whether a validation follows the hooks that the trainer is running."""
    fetcher = trainer.fit_loop._data_fetcher
    return (
        is_in_batch_end(trainer) and fetcher is not None and trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)
    )


def batches_done(checkpoint: dict[str, Any]) -> int:
    """Batches of the epoch before the state's position."""
    return checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["processed"]


def is_epoch_start(checkpoint: dict[str, Any]) -> bool:
    """Whether the state lies before the first step of an epoch."""
    return batches_done(checkpoint) == 0


def part_of(checkpoint: dict[str, Any]) -> str:
    """The evaluation, epoch end or fit end at whose beginning the state lies; empty for a step or an epoch."""
    part = checkpoint["loops"]["fit_loop"].get(_PART)
    return part if part in (EVALUATION_BEGIN, EPOCH_END, FIT_END) else ""


def part_order(checkpoint: dict[str, Any]) -> int:
    """A number that orders states after the same step: larger for a state in a later part of the fit."""
    part, epochs = part_of(checkpoint), checkpoint["loops"]["fit_loop"]["epoch_progress"]["total"]
    has_begun = epochs["started"] > epochs["completed"]  # the present epoch, whose first hooks have been called
    place = {EVALUATION_BEGIN: 1, EPOCH_END: 3, FIT_END: 4}.get(part, 2 if has_begun else 0)
    return 5 * epochs["completed"] + place


def was_asked_to_stop(checkpoint: dict[str, Any]) -> bool:
    """Whether `Trainer.should_stop` was set."""
    return bool(checkpoint.get(_SHOULD_STOP))


def before_validation(fit_loop: dict[str, Any]) -> dict[str, Any]:
    """State of the fit loop as if the validation that is about to begin had been interrupted in its first batch.

    Lightning restarts an interrupted validation if its counts say that one batch was started but not processed.
    """
    loop = copy.deepcopy(fit_loop)
    for scope in _PROGRESS:  # the previous training batch may have been interrupted in its last hooks
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
    """State of the fit loop, saved during the first hooks of an epoch, as if these had not begun.

    Lightning resets the count of batches only after those hooks; otherwise it would resume the previous epoch.
    """
    loop = copy.deepcopy(fit_loop)
    batches, epochs = loop["epoch_loop.batch_progress"], loop["epoch_progress"]
    for scope in _PROGRESS:
        done = epochs[scope]["completed"]
        epochs[scope] |= {"ready": done + 1, "started": done, "processed": done}
        batches[scope] |= dict.fromkeys(batches[scope], 0 if scope == "current" else batches[scope]["processed"])
    batches["is_last_batch"] = False
    return loop


def before_epoch_end(fit_loop: dict[str, Any]) -> dict[str, Any]:
    """State of the fit loop, saved during the hooks at the end of an epoch's last batch, as if these had ended.

    Lightning would resume with the next epoch, and never call the hooks at the end of this one.
    """
    loop = copy.deepcopy(fit_loop)
    for scope in _PROGRESS:
        counts = loop["epoch_loop.batch_progress"][scope]
        counts["completed"] = counts["processed"]
    loop["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
    loop[_PART] = EPOCH_END
    return loop


def forget_logged_metrics(results: dict[str, Any]) -> None:
    """Reset the metrics that an interrupted validation has logged, because it is run again from its beginning.

    Args:
        results: of its loop: sums of tensors and torchmetrics objects, which would both continue.
    """
    for result in results.values():
        result.reset()


def forget_loaders(trainer: Trainer) -> None:
    """Drop the loaders, so that they are created again for another world."""
    forget_training_loader(trainer)
    trainer.fit_loop.epoch_loop.val_loop._combined_loader = None


def forget_training_loader(trainer: Trainer) -> None:
    """Drop the loader for training.

    `Trainer.estimated_stepping_batches` has created it if the program reads that before the loops are entered, for
    example in `configure_optimizers`. It begins with the first batch then, and its random numbers are not keyed.
    """
    trainer.fit_loop._combined_loader = None


def prepare_data_alone(trainer: Trainer) -> None:
    """Make a detached process prepare data without the barrier, which the other ranks have long passed."""

    def prepare_data() -> None:
        for owner in (getattr(trainer, "datamodule", None), trainer.lightning_module):
            if owner is not None and trainer.local_rank == 0 and owner.prepare_data_per_node:
                owner.prepare_data()

    override(trainer._data_connector, "prepare_data", prepare_data)


def begin_afresh(trainer: Trainer) -> None:
    """Reset the loops to the beginning of `fit`."""
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
    """Tear down the loops so that they can be re-entered, after an exception that Lightning has not handled.

    Args:
        trainer: whose loops.
        has_evaluated: whether an evaluation has just ended, so that its last hooks have already set the modules'
            mode.
    """
    evaluation = trainer.fit_loop.epoch_loop.val_loop
    if trainer.evaluating or trainer.sanity_checking:
        if not has_evaluated:
            evaluation._module_mode.restore(trainer.lightning_module)
        forget_logged_metrics(evaluation._results)
    trainer.training = True  # a fault in a validation leaves the trainer in that stage
    trainer.accumulate_grad_batches = initial_micro_steps(trainer)
    evaluation._has_run = False
    trainer.fit_loop.teardown()
    trainer._logger_connector.teardown()
    trainer._signal_connector.teardown()


def describe_end(trainer: Trainer) -> dict[str, Any]:
    """Lightning's checkpoint data of this rank after a fit, without tensors and hyperparameters of the module."""
    checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    left_out = {"state_dict", "optimizer_states", *arguments(trainer)}
    return {name: value for name, value in checkpoint.items() if name not in left_out}


def not_restarting(trainer: Trainer) -> None:
    """Clear the restart flags of loops restored at their end, so that the next `fit` starts normally."""
    fit_loop = trainer.fit_loop
    epoch_loop = fit_loop.epoch_loop
    for loop in (fit_loop, epoch_loop, epoch_loop.val_loop, epoch_loop.automatic_optimization):
        loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    epoch_loop.manual_optimization._restarting = False
    fit_loop._combined_loader_states_to_load = []


def rewind(fit_loop: dict[str, Any], micro_steps_open: int) -> dict[str, Any]:
    """State of the fit loop as if it had been saved at the end of the last batch before the window.

    This is where `ModelCheckpoint` saves within an epoch, and what Lightning can continue from: the last batch has
    been processed, but is not yet counted as completed.
    """
    loop = copy.deepcopy(fit_loop)
    batches = loop["epoch_loop.batch_progress"]
    for scope in _PROGRESS:
        done = batches[scope]["ready"] - micro_steps_open
        batches[scope] |= {"ready": done, "started": done, "processed": done, "completed": max(0, done - 1)}
    batches["is_last_batch"] = False
    for scope in _PROGRESS:  # a validation that was run again leaves counts like an interrupted one
        counts = loop["epoch_loop.val_loop.batch_progress"][scope]
        counts |= dict.fromkeys(("ready", "started", "processed"), counts["completed"])
    optimizer = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    for part in ("step", "zero_grad"):
        for scope in _PROGRESS:
            counts = optimizer[part][scope]
            counts |= dict.fromkeys(counts, counts["completed"])
    if batches["current"]["ready"]:
        loop["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1  # Lightning counts it after those hooks
    else:
        batches["total"]["completed"] = batches["total"]["processed"]
        for scope in _PROGRESS:  # the epoch has not started: its hooks will be called
            loop["epoch_progress"][scope]["started"] -= 1
    return loop
