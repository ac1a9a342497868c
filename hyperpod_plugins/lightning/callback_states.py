"""States of callbacks that decide by values of their own rank, such as the best score of `EarlyStopping`."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map, tree_map_with_path

from hyperpod_plugins.lightning.checkpoint_calls import CheckpointCalls
from hyperpod_plugins.lightning.compat import (
    Callback,
    Checkpoint,
    ModelCheckpoint,
    Timer,
    Trainer,
    WeightAveraging,
    callbacks_of,
    is_overridden,
)
from hyperpod_plugins.lightning.saving_hooks import SavingHooks, load_empty
from hyperpod_plugins.lightning.trainer_state import is_small, replace_paths
from hyperpod_plugins.recovery.local_state import LocalStates
from hyperpod_plugins.recovery.optimizer_copy import local_tensor
from hyperpod_plugins.recovery.packing import are_same, copied_leaf

_BEGUN = " before its batch"
"""Suffix of the name of a state from before the hooks that precede the step."""
_PACKAGE = f"{__name__.partition('.')[0]}."


class CallbackStates:
    """Those states of callbacks that are small; a `RankLocalState`.

    A value that is logged without `sync_dist` differs between ranks, and so does what callbacks keep of it. Larger
    states, and those with tensors in the shapes of this rank's parameters, such as averages of weights, come with the
    parameters from a replica. `Timer` is left out: its times differ in each process, and no rank needs another's.
    """

    def __init__(
        self,
        trainer: Trainer,
        hooks: SavingHooks,
        is_kept: Callable[[Callback], bool],
        *,
        names_parts: bool,
        shapes: Iterable[torch.Size] = (),
    ) -> None:
        """Create the states.

        Args:
            trainer: whose callbacks; it may create new ones at each entry into its fit.
            hooks: with the copies of states at the beginning of each part.
            is_kept: whether the state of a callback is one of these.
            names_parts: whether the parts of a state are its entries, and not the state as a whole.
            shapes: of each of this rank's parameters, or parts of parameters.
        """
        self._trainer = trainer
        self._hooks = hooks
        self._is_kept = is_kept
        self._names_parts = names_parts
        self._shapes = Counter(each for each in shapes if each.numel() > 1)
        self._looked_at: list[Callback] = []
        self._found: dict[str, Callback] = {}
        self.paths: Mapping[str, str] = {}
        """Paths to replace by others in the states; see [Note: paths that differ]."""
        self.describes_step = False
        """Whether the states are those with which the present step begins to compute, and come with those before the
        hooks that precede it."""

    @property
    def callbacks(self) -> dict[str, Callback]:
        """The callbacks that may have such a state, by `state_key`."""
        every = callbacks_of(self._trainer)
        if len(every) != len(self._looked_at) or not all(map(is_, every, self._looked_at)):
            self._looked_at = [*every]
            has_state = [each for each in every if is_overridden("state_dict", each, parent=Callback)]
            self._found = {each.state_key: each for each in has_state if self._is_kept(each)}
        return self._found

    def state_dict(self) -> dict[str, Any]:
        """By `state_key`, the states with copies of tensors on the CPU; empty ones too."""
        found: dict[str, Any] = {}
        for key, callback in self.callbacks.items():
            in_window = self._hooks.begun_computing(key) if self.describes_step else None
            state = self._hooks.read(callback) if in_window is None else in_window
            if not isinstance(state, dict) or not is_small(state) or self._has_shards(state):
                continue
            found[key] = self._copied(state)
            begun = self._begun(key)
            if begun is not None and not are_same(before := self._copied(begun), found[key]):
                found[f"{key}{_BEGUN}"] = before
        return found

    def load_state_dict(self, state_dict: dict[str, Any], leave: Collection[str] = ()) -> None:
        """Let each callback load its state if it differs, with the present values of the entries in `leave`."""
        for key, present in self.state_dict().items():
            if key not in state_dict or key not in self.callbacks:
                continue
            callback, begun = self.callbacks[key], self._begun(key)
            values = self._merged(state_dict[key], present, self._left(key, present | state_dict[key], leave))
            if not are_same(values, present):
                self._load(callback, values)
            if begun is None:
                continue
            name = f"{key}{_BEGUN}"
            given = _entry(state_dict, name) or {}
            left = self._left(name, begun | given, leave)
            if name not in state_dict:  # it is the state after the step before; what was written since stays
                left |= self._left(key, begun | given, leave)
            self._hooks.replace_begun(key, _placed(self._merged(given, begun, left), begun))

    def written(self, before: dict[str, Any], now: dict[str, Any] | None = None) -> set[str]:
        """Parts that differ from `before`, an earlier `state_dict`."""
        found = set[str]()
        for key, new in (self.state_dict() if now is None else now).items():
            old = _entry(before, key) or {}
            for name in new.keys() | old.keys():
                if (name in new) != (name in old) or not are_same(new[name], old[name]):
                    found.add(self._part(key, name))
        return found

    def fitting(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Nothing: Lightning loads the callbacks of a checkpoint of another job."""
        return {}

    def _has_shards(self, state: dict[str, Any]) -> bool:
        """Whether tensors of a state have the shapes of at least half of this rank's parameters, as averages do."""
        found = Counter(leaf.shape for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor))
        return bool(self._shapes) and 2 * (found & self._shapes).total() >= self._shapes.total()

    def _begun(self, key: str) -> dict[str, Any] | None:
        return self._hooks.begun_with(key) if self.describes_step else None

    def _copied(self, state: dict[str, Any]) -> dict[str, Any]:
        copied = tree_map(copied_leaf, state)
        return replace_paths(copied, self.paths) if self.paths else copied

    def _load(self, callback: Callback, values: dict[str, Any]) -> None:
        placed = _placed(values, self._hooks.read(callback))
        if placed:
            callback.load_state_dict(placed)
        else:
            load_empty(callback)
        if isinstance(callback, ModelCheckpoint) and "current_score" in placed:
            callback.current_score = placed["current_score"]  # which it does not load

    def _left(self, key: str, names: Collection[str], leave: Collection[str]) -> set[str]:
        return {name for name in names if self._part(key, name) in leave}

    def _merged(self, given: Mapping[str, Any], present: Mapping[str, Any], left: Collection[str]) -> dict[str, Any]:
        """Copies of given values, but for those that stay."""
        taken = {name: value for name, value in given.items() if name not in left}
        stays = {name: value for name, value in present.items() if name in left}
        return tree_map(copied_leaf, {**taken, **stays})

    def _part(self, key: str, name: Any) -> str:
        return f"{key}.{name}" if self._names_parts else key


def _entry(states: Mapping[str, dict[str, Any]], key: str) -> dict[str, Any] | None:
    """The state with this key; a state before a batch is that after the step before, if no other is known."""
    return states.get(key, states.get(key.removesuffix(_BEGUN)))


def _placed(values: dict[str, Any], present: Any) -> dict[str, Any]:
    """Values with tensors on the device of the present tensor at the same place, if there is one."""
    leaves, _ = tree_flatten_with_path(present)
    devices = {path: leaf.device for path, leaf in leaves if isinstance(leaf, torch.Tensor)}

    def place(path: Any, leaf: Any) -> Any:
        return leaf.to(devices.get(path, leaf.device)) if isinstance(leaf, torch.Tensor) else leaf

    return tree_map_with_path(place, values)


class RankLocalCallbacks:
    """All callbacks of a Trainer whose small states are rank-local.

    Callbacks that write checkpoints are kept apart. If a fault interrupts their calls at the end of a batch, these are
    made again, and after other saves all ranks send their states when the next step begins.
    """

    def __init__(self, states: LocalStates, trainer: Trainer, hooks: SavingHooks, calls: CheckpointCalls) -> None:
        """Register the states; Lightning loads them itself where a fit is entered."""
        self._hooks = hooks
        shapes = [local_tensor(each).shape for each in trainer.lightning_module.parameters()]
        self._others = CallbackStates(trainer, hooks, _is_other, names_parts=True, shapes=shapes)
        self._saving = CallbackStates(trainer, hooks, _is_saving, names_parts=False)
        states.register("callbacks", self._others, is_entered_with=True)
        states.register("checkpoint callbacks", self._saving, is_repeated=True, is_entered_with=True)
        self._saving.paths = calls.shared

    @property
    def keys(self) -> tuple[str, ...]:
        """The `state_key` of each callback that may have such a state."""
        return (*self._others.callbacks, *self._saving.callbacks)

    def as_step_begins(self) -> "_StepBegins":
        """Within the context, the states are those of the step's beginning, with those before its first hooks."""
        return _StepBegins((self._others, self._saving))

    def restored(self) -> None:
        """Update the copies with which steps are undone: the states have just been given to a replacement."""
        self._hooks.refresh_untouched(self.keys)


class _StepBegins:
    """See `RankLocalCallbacks.as_step_begins`; a class because `@contextmanager` costs more, in each step."""

    def __init__(self, states: Sequence[CallbackStates]) -> None:
        self._states = states

    def __enter__(self) -> None:
        for each in self._states:
            each.describes_step = True

    def __exit__(self, *_: object) -> None:
        for each in self._states:
            each.describes_step = False


def _is_other(callback: Callback) -> bool:
    is_of_package = type(callback).__module__.startswith(_PACKAGE)
    return not (isinstance(callback, Checkpoint | Timer | WeightAveraging) or is_of_package)


def _is_saving(callback: Callback) -> bool:
    """Whether the callback decides by what it has saved; one that keeps all checkpoints does not."""
    return isinstance(callback, Checkpoint) and getattr(callback, "save_top_k", 0) != -1
