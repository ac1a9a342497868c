"""The hooks of a program that say what a checkpoint holds, and the state of its callbacks as parts of a fit began.

[Note: parts that are run again] After a fault all ranks enter the loops again where a part of the fit begins: a step,
an epoch, an evaluation, the end of an epoch, or of the fit. Hooks of callbacks that had run since then run again, on
all ranks. So the state of callbacks with such hooks is copied as a part begins; it is what a description holds while
the part is under way, and what is put back when a rank leaves the loops within it.
"""

# Lightning's connectors have no public spelling.
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
    is_overridden,
)
from hyperpod_plugins.lightning.module_checks import micro_steps_of
from hyperpod_plugins.recovery.rng import BATCH, EPOCH_BEGIN, EPOCH_END, EVALUATION_BEGIN, FIT_END

FOR_PEERS = (
    "a collective was called while the state of the trainer is described for a process that replaces a lost one: "
    "others may be gone"
)
"""Why hooks that save must not communicate while they are called for a description."""
_READS = {"state_dict": "load_state_dict", "on_save_checkpoint": "on_load_checkpoint"}
_OF_COMPUTATION = frozenset(
    ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
)
"""Hooks of callbacks that run again where a step is run again by ranks that have not left the loops."""
_BATCH_BEGIN = "on_train_batch_start"
_BATCH_END = "on_train_batch_end"
"""Runs before the step counts for all but the last batch of an accumulation window."""
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
"""Hooks of callbacks that run again where all enter the loops at the beginning of a part."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Kept:
    """State of a callback as a part began."""

    callback: Callback
    state: dict[str, Any]
    hooks: frozenset[str]
    """Its hooks of the part."""


class SavingHooks:
    """The hooks of a program that say what a checkpoint holds, called where no rank may communicate.

    [Note: hooks that communicate] A description is also made when ranks are lost, and then nothing can be gathered. A
    hook that gathers (a full tensor for an export) is not called for descriptions. Where the program would read back
    what the hook saves, a replacement would miss it: that is refused before the first step.
    """

    def __init__(self) -> None:
        self._left_out: list[tuple[Any, str]] = []
        self._kept: dict[str, dict[str, _Kept]] = {}
        """For each part that is under way, by key of the state; the part that began first comes first."""
        self._computing: dict[str, _Kept] = {}
        """As the computation of the step began, by key of the state."""
        self._changing: dict[tuple[str, bool], list[tuple[Callback, frozenset[str]]]] = {}
        self._looked_at: list[Callback] = []
        self._should_stop = False

    def begin(self, trainer: Trainer, part: str) -> None:
        """A part begins, and none of its hooks has been called: copy the state of callbacks that have some.

        The first step of an epoch lies within the epoch's beginning, and an evaluation in the middle of a window of
        micro-steps within the window's: who enters there calls the hooks of both.
        """
        if trainer.sanity_checking:
            return  # nothing has been trained, and callbacks may have no state yet
        is_within = BATCH in self._kept if part == EVALUATION_BEGIN else part == BATCH and self.part == EPOCH_BEGIN
        if not is_within:
            self._kept, self._should_stop = {}, trainer.should_stop
        elif part in self._kept:
            return  # the second evaluation of a window
        self._kept[part] = {}
        for callback, hooks in self._changed_in(part, trainer):
            state = self._state_of(callback)
            if state is not None:
                self._kept[part][callback.state_key] = _Kept(callback, state, hooks)

    def compute(self, trainer: Trainer) -> None:
        """The hooks at the beginning of the step's first batch have been called; what follows may be run again alone.

        Within a window of micro-steps hooks of batches and of the computation take turns: a callback that has both
        cannot be put back for the second alone; see `refuse_interleaved_hooks`.
        """
        self._computing = {}
        for key, kept in self._kept.get(BATCH, {}).items():
            if kept.hooks <= _OF_COMPUTATION:
                self._computing[key] = kept
            elif kept.hooks & _OF_COMPUTATION and trainer.accumulate_grad_batches == 1:
                state = self._state_of(kept.callback)
                if state is not None:
                    self._computing[key] = replace(kept, state=state)

    def end(self) -> None:
        """The part has ended: what its hooks have changed counts."""
        self._kept, self._computing = {}, {}

    def loaded(self, keys: Iterable[str]) -> None:
        """Callbacks have been given state as the present parts began, which holds for the copies, too.

        Args:
            keys: of their states.
        """
        for key in keys:
            for states in (*self._kept.values(), self._computing):
                kept = states.get(key)
                state = None if kept is None else self._state_of(kept.callback)
                if kept is not None and state is not None:
                    states[key] = replace(kept, state=state)

    @property
    def part(self) -> str:
        """The part that all would enter again; empty between parts."""
        return next(iter(self._kept), "")

    def put_back(self, trainer: Trainer, *, is_inside: bool = False) -> None:
        """Let callbacks be as they were when the part began: its hooks run again.

        Args:
            trainer: whose callbacks.
            is_inside: whether only the hooks run again that are a part of the step's computation.
        """
        for kept in (self._computing if is_inside else self._first()).values():
            if kept.state:
                kept.callback.load_state_dict(copy.deepcopy(kept.state))
            elif self._state_of(kept.callback):
                _empty(kept.callback)
        if self._kept and not is_inside:
            trainer.should_stop = self._should_stop

    def should_stop(self, trainer: Trainer) -> bool:
        """Whether the trainer had been asked to stop when the part that is under way began."""
        return bool(self._should_stop if self._kept else trainer.should_stop)

    def dump(self, trainer: Trainer) -> dict[str, Any]:
        """What Lightning collects for a checkpoint, without those hooks that communicate, as the present part began."""
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
            if reads and group_health.is_open:
                _log.warning("%s.%s communicates, so a replacement is not given its state", _name(owner), hook)
            elif reads:
                raise ConfigError(
                    f"{_name(owner)}.{hook} communicates (full_tensor(), a collective), and {_READS[hook]} reads what "
                    "it saves. A process that replaces a lost one is given that state when others are gone, so nothing "
                    "can be gathered. Save local shards there (tensor.to_local()), return early where "
                    "trainer.strategy.saves_for_peers is true, or use CheckpointlessRecovery(enabled=False)."
                )

    def _first(self) -> dict[str, _Kept]:
        """Of each callback the state as the earliest part began that has hooks of it."""
        return {key: kept for part in reversed(self._kept.values()) for key, kept in part.items()}

    def _state_of(self, callback: Callback) -> dict[str, Any] | None:
        """A copy of its state; None where that communicates."""
        if (callback, "state_dict") in self._left_out:
            return None
        refusal, group_health.refusal = group_health.refusal, FOR_PEERS
        try:
            return copy.deepcopy(tree_map_only(torch.Tensor, torch.Tensor.detach, callback.state_dict()))
        except PeerLost:
            return None
        except LoopError as error:
            if str(error) != FOR_PEERS:
                raise
            return None  # which `dump` finds, too, and says
        finally:
            group_health.refusal = refusal

    def _changed_in(self, part: str, trainer: Trainer) -> list[tuple[Callback, frozenset[str]]]:
        """Callbacks with state and hooks of a part, and these hooks."""
        if self._looked_at != vars(trainer)["callbacks"]:  # `configure_callbacks` makes new ones with each entry
            self._looked_at, self._changing = [*vars(trainer)["callbacks"]], {}
        key = (part, trainer.accumulate_grad_batches > 1)
        if key not in self._changing:
            names = (*_OF_PARTS[part], _BATCH_END) if key == (BATCH, True) else _OF_PARTS[part]
            found: list[tuple[Callback, frozenset[str]]] = []
            for callback in vars(trainer)["callbacks"]:
                has = partial(is_overridden, instance=callback, parent=Callback)
                if isinstance(callback, WeightAveraging | Checkpoint) or not has("state_dict"):
                    continue  # these know of which step an average is, or what has been saved
                hooks = frozenset(name for name in names if has(name))
                if hooks:
                    found.append((callback, hooks))
            self._changing[key] = found
        return self._changing[key]

    def _try(self, trainer: Trainer) -> dict[str, Any] | LoopError | PeerLost:
        refusal = group_health.refusal
        with ExitStack() as stack:
            for owner, hook in self._left_out:
                stack.enter_context(_silent(owner, hook))
            group_health.refusal = FOR_PEERS
            try:
                return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
            except PeerLost as error:
                return error  # of groups that are broken
            except LoopError as error:
                if str(error) != FOR_PEERS:
                    raise
                return error
            finally:
                group_health.refusal = refusal


def refuse_interleaved_hooks(trainer: Trainer) -> None:
    """Refuse what can not be put back where a window of micro-steps is run again by ranks that have not left the loops.

    Raises:
        ConfigError: naming a callback with state that has hooks of both kinds, which take turns in a window.
    """
    most = max(micro_steps_of(trainer))
    if most == 1:
        return
    for callback in vars(trainer)["callbacks"]:
        has = partial(is_overridden, instance=callback, parent=Callback)
        if isinstance(callback, WeightAveraging | Checkpoint) or not has("state_dict"):
            continue
        inside = sorted(filter(has, _OF_COMPUTATION))
        around = sorted(filter(has, (_BATCH_BEGIN, _BATCH_END)))
        if inside and around:
            raise ConfigError(
                f"{_name(callback)} has state, and both {inside[0]} and {around[0]}. With {most} micro-steps in a step "
                "(accumulate_grad_batches, or what ElasticTraining makes of the batch in its smallest world) these "
                "take turns, and only the first is called again where ranks that live compute a step once more: what "
                "it changes would count twice. Make two callbacks of it, let it have no state_dict, have one "
                "micro-step in each step, or use CheckpointlessRecovery(enabled=False)."
            )


def _empty(callback: Callback) -> None:
    """Put a state back that was empty, which Lightning never does."""
    try:
        callback.load_state_dict({})
    except (LookupError, AttributeError, TypeError) as error:
        _log.warning(
            "%s.load_state_dict does not take the empty state that its state_dict gave before (%r): what its hooks "
            "have changed since then counts twice, for they run again",
            _name(callback),
            error,
        )


@contextmanager
def _silent(owner: Any, hook: str) -> Generator[None]:
    """Let a hook do nothing inside."""
    present = vars(owner).get(hook)
    vars(owner)[hook] = dict if hook == "state_dict" else _nothing
    try:
        yield
    finally:
        del vars(owner)[hook]
        if present is not None:
            vars(owner)[hook] = present


def _nothing(*_: Any) -> None:
    return None


def _called_hook(error: LoopError | PeerLost) -> tuple[Any, str]:
    """The outermost hook in which an error was raised."""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        name, first = frame.f_code.co_name, frame.f_code.co_varnames[:1]
        owner = frame.f_locals.get(first[0]) if first else None  # however the program calls its `self`
        if name in _READS and isinstance(owner, Callback | LightningModule | LightningDataModule):
            return owner, name
        trace = trace.tb_next
    raise error


def _base_of(owner: Any) -> Any:
    return next(base for base in (Callback, LightningModule, LightningDataModule) if isinstance(owner, base))


def _name(owner: Any) -> str:
    return type(owner).__name__
