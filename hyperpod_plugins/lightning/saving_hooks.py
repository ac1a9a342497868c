"""The saving hooks of a program, and the states of its callbacks at the beginning of each part of a fit.

[Note: parts that are run again] After a fault, all ranks re-enter the loops at the beginning of a part of the fit: a
step, an epoch, an evaluation, the end of an epoch, or the end of the fit. Callback hooks that had run since then run
again on all ranks. Therefore the state of callbacks with such hooks is copied when a part begins. While the part is
under way, descriptions of the trainer contain this copy, and it is restored when a rank leaves the loops.
"""

# Lightning's connectors have no public API.
# pyright: reportPrivateUsage=false

import copy
import logging
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from hyperpod_plugins.comm import group_health
from hyperpod_plugins.errors import ConfigError, LoopError, PeerLost
from hyperpod_plugins.lightning.compat import (
    Callback,
    Checkpoint,
    LightningDataModule,
    LightningModule,
    Trainer,
    WeightAveraging,
    callbacks_of,
    is_overridden,
    override,
)
from hyperpod_plugins.lightning.local_state import is_of_lightning
from hyperpod_plugins.lightning.module_checks import micro_steps_of
from hyperpod_plugins.recovery.rng import BATCH, EPOCH_BEGIN, EPOCH_END, EVALUATION_BEGIN, FIT_END

FOR_PEERS = (
    "a collective was called while the state of the trainer is described for a process that replaces a lost one: "
    "others may be gone"
)
"""Why saving hooks must not communicate while they are called for a description."""
_READS = {"state_dict": "load_state_dict", "on_save_checkpoint": "on_load_checkpoint"}
_OF_COMPUTATION = frozenset(
    ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
)
"""Hooks of callbacks that run again when a step is run again without leaving the loops."""
_LOADING = "on_load_checkpoint", "on_fit_start", "on_train_start"
"""Hooks of callbacks that may complete what `load_state_dict` has begun, when a fit continues."""
_BATCH_BEGIN = "on_train_batch_start"
_BATCH_END = "on_train_batch_end"
"""For all but the last batch of an accumulation window, this hook runs before the step is committed."""
_OF_PARTS = {
    EPOCH_BEGIN: ("on_train_epoch_start",),
    BATCH: (_BATCH_BEGIN, *_OF_COMPUTATION),
    EVALUATION_BEGIN: (
        "on_validation_start",
        "on_validation_epoch_start",
        "on_validation_batch_start",
        "on_validation_batch_end",
        "on_validation_epoch_end",
        "on_validation_end",
    ),
    EPOCH_END: ("on_train_epoch_end",),
    FIT_END: ("on_train_end",),
}
"""Hooks of callbacks that run again when all ranks re-enter the loops at the beginning of a part."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Kept:
    """State of a callback at the beginning of a part."""

    callback: Callback
    state: dict[str, Any]
    hooks: frozenset[str]
    """The callback's hooks in the part."""


class SavingHooks:
    """Calls the saving hooks of a program at points where no rank may communicate.

    It also keeps and restores the states of callbacks at the beginning of each part.

    [Note: hooks that communicate] A description is also made when ranks are lost, and then nothing can be gathered.
    So a hook that gathers (such as a full tensor for an export) is not called for descriptions. If the program also
    reads back what that hook saves, a replacement would lack it, so this raises an error before the first step.
    """

    def __init__(self) -> None:
        self._left_out: list[tuple[Any, str]] = []
        self._kept: dict[str, dict[str, _Kept]] = {}
        """Kept states of each part under way, by `state_key`; the part that began first comes first."""
        self._computing: dict[str, _Kept] = {}
        """States at the beginning of the step's computation, by `state_key`."""
        self._in_window: dict[str, dict[str, Any]] = {}
        """In a window of micro-steps, the states of callbacks that change between them, as its computation began."""
        self._changing: dict[tuple[str, bool], list[tuple[Callback, frozenset[str]]]] = {}
        self._looked_at: list[Callback] = []
        self._should_stop = False

    def begin_part(self, trainer: Trainer, part: str) -> None:
        """Begin a part, before its first hook: copy the states of callbacks with hooks in it.

        The first step of an epoch lies inside the part `EPOCH_BEGIN`, and an evaluation in the middle of a window of
        micro-steps lies inside the window's: a rank that re-enters there calls the hooks of both.
        """
        if trainer.sanity_checking:
            return  # nothing has been trained yet, and callbacks may have no state
        is_within = BATCH in self._kept if part == EVALUATION_BEGIN else part == BATCH and self.part == EPOCH_BEGIN
        if not is_within:
            self._kept, self._should_stop = {}, trainer.should_stop
        elif part in self._kept:
            return  # the second evaluation of a window
        self._kept[part] = {}
        for callback, hooks in self._changed_in(part, trainer):
            state = self.state_of(callback)
            if state is not None:
                self._kept[part][callback.state_key] = _Kept(callback, state, hooks)

    def begin_compute(self, trainer: Trainer) -> None:
        """Begin the computation of a step, after the first hooks of its first batch; it may be run again by itself.

        In a window of micro-steps, hooks of batches and of the computation alternate, so a callback that has both
        cannot be restored for the latter alone; see `refuse_interleaved_hooks`.
        """
        self._computing, self._in_window = {}, {}
        for key, kept in self._kept.get(BATCH, {}).items():
            if kept.hooks <= _OF_COMPUTATION:
                self._computing[key] = kept
            elif kept.hooks & _OF_COMPUTATION and trainer.accumulate_grad_batches == 1:
                state = self.state_of(kept.callback)
                if state is not None:
                    self._computing[key] = replace(kept, state=state)
            elif trainer.accumulate_grad_batches > 1:
                state = self.state_of(kept.callback)
                if state is not None:
                    self._in_window[key] = state

    def end_part(self) -> None:
        """End the part: the changes made by its hooks are final."""
        self._kept, self._computing, self._in_window = {}, {}, {}

    def present_states(self, trainer: Trainer) -> dict[str, dict[str, Any]]:
        """The state of each callback as it is now, by `state_key`; only of those that `put_back` restores in a step.

        In a window of micro-steps, the hooks of batches have changed the others, and are not called again.
        """
        is_window = trainer.accumulate_grad_batches > 1
        every = [each for each in callbacks_of(trainer) if not is_window or each.state_key in self._computing]
        states = {each.state_key: self.state_of(each) for each in every}
        return {key: state for key, state in states.items() if state}

    def own_callbacks(self, trainer: Trainer) -> dict[str, Callback]:
        """Callbacks of the program that `load_state_dict` alone makes as they were, by `state_key`."""
        found: dict[str, Callback] = {}
        for each in callbacks_of(trainer):
            has = partial(is_overridden, instance=each, parent=Callback)
            is_own = has("state_dict") and not is_of_lightning(type(each))
            if is_own and not any(map(has, _LOADING)) and self.state_of(each) is not None:
                found[each.state_key] = each
        return found

    def refresh_untouched(self, keys: Iterable[str]) -> None:
        """Update the copies of callbacks that have been given a state inside a step, before it computes.

        Copies from before hooks that have run since stay as they are; see `replace_begun`.

        Args:
            keys: `state_key` of these callbacks.
        """
        for key in keys:
            for states in (*self._kept.values(), self._computing):
                kept = states.get(key)
                if kept is None or not (states is self._computing or kept.hooks <= _OF_COMPUTATION):
                    continue
                state = self.state_of(kept.callback)
                if state is not None:
                    states[key] = replace(kept, state=state)

    def read(self, callback: Callback) -> dict[str, Any] | None:
        """The callback's state, not copied; None if its `state_dict` communicates."""
        if (callback, "state_dict") in self._left_out:
            return None
        try:
            with group_health.forbid(FOR_PEERS):
                return callback.state_dict()
        except PeerLost:
            return None
        except LoopError as error:
            if str(error) != FOR_PEERS:
                raise
            return None  # `dump` also finds and reports this

    def state_of(self, callback: Callback) -> dict[str, Any] | None:
        """A copy of the callback's state; None if its `state_dict` communicates."""
        state = self.read(callback)
        return None if state is None else copy.deepcopy(tree_map_only(torch.Tensor, torch.Tensor.detach, state))

    def begun_computing(self, key: str) -> dict[str, Any] | None:
        """The state of a callback as the computation of the present window began, if micro-steps have changed it since.

        None for all other callbacks.
        """
        return self._in_window.get(key)

    def begun_with(self, key: str) -> dict[str, Any] | None:
        """The state of a callback before the first hook of the part, if it has hooks there that precede the step."""
        kept = self._first().get(key)
        return None if kept is None or kept.hooks <= _OF_COMPUTATION else kept.state

    def replace_begun(self, key: str, state: dict[str, Any]) -> None:
        """Replace what `begun_with` returns by the state of another process at that point."""
        for states in self._kept.values():
            if key in states:
                states[key] = replace(states[key], state=state)
                return

    def add_left_out(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        """Add what the hooks save that communicate. All ranks call this together, connected."""
        for owner, hook in self._left_out:
            if hook == "on_save_checkpoint" and isinstance(owner, Callback):
                owner.on_save_checkpoint(trainer, trainer.lightning_module, checkpoint)
            elif hook == "on_save_checkpoint":
                owner.on_save_checkpoint(checkpoint)
            elif isinstance(owner, Callback):
                checkpoint["callbacks"][owner.state_key] = owner.state_dict()
            else:
                checkpoint[type(owner).__qualname__] = owner.state_dict()  # a data module

    @property
    def part(self) -> str:
        """The part at which all ranks would re-enter the loops; empty between parts."""
        return next(iter(self._kept), "")

    def put_back(self, trainer: Trainer, *, is_inside: bool = False) -> None:
        """Restore callbacks to the beginning of the part, whose hooks run again.

        Args:
            trainer: whose callbacks.
            is_inside: whether only the hooks of the step's computation run again.
        """
        for kept in (self._computing if is_inside else self._first()).values():
            if kept.state:
                kept.callback.load_state_dict(copy.deepcopy(kept.state))
            elif self.state_of(kept.callback):
                load_empty(kept.callback)
        if self._kept and not is_inside:
            trainer.should_stop = self._should_stop

    def should_stop(self, trainer: Trainer) -> bool:
        """Whether the trainer was asked to stop when the present part began, or by now between parts."""
        return bool(self._should_stop if self._kept else trainer.should_stop)

    def dump(self, trainer: Trainer) -> dict[str, Any]:
        """Lightning's checkpoint data without the hooks that communicate, with callback states as the part began.

        Raises:
            ConfigError: a hook communicates, and the program reads back what it saves.
        """
        while True:
            error = self._try(trainer)
            if isinstance(error, dict):
                states = error.get("callbacks", {})
                states.update({key: kept.state for key, kept in self._first().items()})
                error["callbacks"] = {key: state for key, state in states.items() if state}
                return error
            owner, hook = _called_hook(error)
            self._left_out.append((owner, hook))
            reads = is_overridden(_READS[hook], owner, parent=_base_of(owner))
            if reads and group_health.is_unavailable:
                _log.warning("%s.%s communicates, so a replacement is not given its state", _name(owner), hook)
            elif reads:
                raise ConfigError(
                    f"{_name(owner)}.{hook} communicates (full_tensor(), a collective), and {_READS[hook]} reads what "
                    "it saves. A process that replaces a lost one is given that state when others are gone, so nothing "
                    "can be gathered. Save local shards there (tensor.to_local()), return early where "
                    "trainer.strategy.saves_for_peers is true, or use CheckpointlessRecovery(enabled=False)."
                )

    def _first(self) -> dict[str, _Kept]:
        """For each callback, its state at the beginning of the earliest part under way in which it has hooks."""
        return {key: kept for part in reversed(self._kept.values()) for key, kept in part.items()}

    def _changed_in(self, part: str, trainer: Trainer) -> list[tuple[Callback, frozenset[str]]]:
        """Callbacks that have state and hooks in a part, with these hooks."""
        if self._looked_at != callbacks_of(trainer):  # `configure_callbacks` creates new ones in each entry
            self._looked_at, self._changing = [*callbacks_of(trainer)], {}
        key = (part, trainer.accumulate_grad_batches > 1)
        if key not in self._changing:
            names = (*_OF_PARTS[part], _BATCH_END) if key == (BATCH, True) else _OF_PARTS[part]
            found: list[tuple[Callback, frozenset[str]]] = []
            for callback in callbacks_of(trainer):
                has = partial(is_overridden, instance=callback, parent=Callback)
                if isinstance(callback, WeightAveraging) or not has("state_dict"):
                    continue  # it keeps track of the step of the average
                if isinstance(callback, Checkpoint) and part in (BATCH, EPOCH_BEGIN):
                    continue  # see [Note: interrupted saves]
                hooks = frozenset(name for name in names if has(name))
                if hooks:
                    found.append((callback, hooks))
            self._changing[key] = found
        return self._changing[key]

    def _try(self, trainer: Trainer) -> dict[str, Any] | LoopError | PeerLost:
        with ExitStack() as stack:
            for owner, hook in self._left_out:
                stack.enter_context(_disabled(owner, hook))
            stack.enter_context(group_health.forbid(FOR_PEERS))
            try:
                return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
            except PeerLost as error:
                return error  # the groups are broken
            except LoopError as error:
                if str(error) != FOR_PEERS:
                    raise
                return error


def refuse_interleaved_hooks(trainer: Trainer) -> None:
    """Raise for callbacks that cannot be restored when a window of micro-steps is run again inside the loops.

    Raises:
        ConfigError: a callback with state has hooks of both batches and the computation, which alternate in a window.
    """
    most = max(micro_steps_of(trainer))
    if most == 1:
        return
    for callback in callbacks_of(trainer):
        has = partial(is_overridden, instance=callback, parent=Callback)
        if isinstance(callback, WeightAveraging | Checkpoint) or not has("state_dict"):
            continue
        inside = sorted(filter(has, _OF_COMPUTATION))
        around = sorted(filter(has, (_BATCH_BEGIN, _BATCH_END)))
        if inside and around:
            raise ConfigError(
                f"{_name(callback)} has state, and both {inside[0]} and {around[0]}. With {most} micro-steps in a step "
                "(accumulate_grad_batches, or what ElasticTraining needs for the batch in its smallest world) these "
                "alternate, and only the first is called again when surviving ranks compute a step again: its "
                "changes would count twice. Split it into two callbacks, remove its state_dict, use one micro-step "
                "in each step, or use CheckpointlessRecovery(enabled=False)."
            )


def load_empty(callback: Callback) -> None:
    """Restore a state that was empty, which Lightning never does."""
    try:
        callback.load_state_dict({})
    except (LookupError, AttributeError, TypeError) as error:
        _log.warning(
            "%s.load_state_dict does not accept the empty state that its state_dict returned before (%r): changes "
            "made by its hooks since then count twice, because they run again",
            _name(callback),
            error,
        )


@contextmanager
def _disabled(owner: Any, hook: str) -> Generator[None]:
    """Make a hook do nothing inside the context."""
    undo = override(owner, hook, dict if hook == "state_dict" else _nothing)
    try:
        yield
    finally:
        undo()


def _nothing(*_: Any) -> None:
    return None


def _called_hook(error: LoopError | PeerLost) -> tuple[Any, str]:
    """The outermost hook in which an error was raised."""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        name, first = frame.f_code.co_name, frame.f_code.co_varnames[:1]
        owner = frame.f_locals.get(first[0]) if first else None  # `self`, whatever the program names it
        if name in _READS and isinstance(owner, Callback | LightningModule | LightningDataModule):
            return owner, name
        trace = trace.tb_next
    raise error


def _base_of(owner: Any) -> Any:
    return next(base for base in (Callback, LightningModule, LightningDataModule) if isinstance(owner, base))


def _name(owner: Any) -> str:
    return type(owner).__name__
