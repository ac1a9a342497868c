"""`BatchHooks`: watches what the hooks that precede a step read when they change the batch.

[Note: what hooks read] A replacement runs the hooks that precede its first step before it gets the state of its
predecessor. What they do with the batch may depend on that state, so it begins with the attributes and the buffers of
another rank, as they were before these hooks. That is exact only for what is equal on all ranks, and parameters are not
there yet. So these hooks are watched in two first steps:

    of a fit              a hook that changes the batch by a trained parameter is refused
    of a replacement      what such hooks have read is compared with what the replacement then gets: if it differs, the
                          step would train on another batch, and the job restarts from the last checkpoint

A tensor is read where an operation has it or a view of it as an argument, an attribute where it is looked up. Compiled
code shows neither, so it runs eagerly while it is watched. In a replacement that could change bits: there a hook is
called a second time with a copy of the batch, and this call is watched. What it writes, and random numbers, are put
back.
"""

# Metrics have no public list of their states.
# pyright: reportPrivateUsage=false

import contextlib
import copy
import functools
import inspect
import logging
import random
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torchmetrics import Metric
from typing_extensions import override

from hyperpod_plugins.errors import ConfigError, StateLost, format_list
from hyperpod_plugins.lightning.compat import Callback, Trainer, callbacks_of, is_overridden, original
from hyperpod_plugins.lightning.local_state import metrics_of
from hyperpod_plugins.recovery.attributes import PlainAttributes
from hyperpod_plugins.recovery.local_objects import ProgramState
from hyperpod_plugins.recovery.optimizer_copy import local_tensor
from hyperpod_plugins.recovery.packing import are_same
from hyperpod_plugins.recovery.program_collectives import is_of_program

_log = logging.getLogger(__name__)
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_START, _END = "on_train_batch_start", "on_train_batch_end"
_DEPTH = 8
"""How deep a batch is looked at."""


class CanPutBack(Protocol):
    """A copy of some state at one moment."""

    def put_back(self) -> None:
        """Restore it."""
        ...


class BatchHooks:
    """The hooks of a program that run around its steps. Use it in the main thread only."""

    def __init__(self, trainer: Trainer, model: nn.Module, attributes: Sequence[PlainAttributes]) -> None:
        """Find them.

        Args:
            trainer: whose fit it is.
            model: its module, sharded.
            attributes: of the program's objects, which a replacement gets.
        """
        hooks = _hooks_around_steps(trainer)
        self.are_any = bool(hooks)
        """Whether hooks run before or after each micro-step, or before the first one of an epoch."""
        self.are_before = any(name != _END for _, name in hooks)
        """Whether such hooks run before a step."""
        self._changing = [each for each in hooks if each[1] in (*_TRANSFERS, _START)]
        self._model, self._attributes, self._metrics = model, attributes, metrics_of(trainer)
        self.registered: Mapping[str, ProgramState] = {}
        """Objects that the program has registered as rank-local state."""
        self._keep: Callable[[], CanPutBack] | None = None
        self._is_watching = False
        self._undo: Callable[[], None] | None = None
        """Ends the watch; None if nothing is watched."""
        self._by: dict[str, str] = {}
        """What hooks that changed the batch have read, and the name of such a hook."""
        self._noted: dict[str, Any] | None = None
        """The same, with the values that these hooks have left."""

    def watch(self, keep: Callable[[], CanPutBack] | None = None) -> None:
        """Watch the hooks of the next batch; see [Note: what hooks read].

        Args:
            keep: in a replacement, copies what hooks may write; None where hooks that read trained parameters are
                refused.
        """
        self.end()
        self._keep, watched = keep, ExitStack()
        for owner, name in self._changing:
            if isinstance(inspect.getattr_static(owner, name), staticmethod | classmethod):
                continue  # reads no state through its object
            watched.callback(_wrap(type(owner), name, functools.partial(self._watched, owner, name)))
        self._undo = watched.close

    def end(self) -> None:
        """End the watch, and forget what has been read."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()
        self._by, self._noted = {}, None

    def note(self) -> None:
        """Note the values of what has been read, before the state of another process takes their place."""
        if self._by and self._noted is None:  # a restore that is repeated may have replaced some of it already
            present = self._present()
            self._noted = {name: _copied(present[name]) for name in self._by.keys() & present.keys()}

    def check(self) -> None:
        """Compare what has been read with the state that has taken its place since `note`, and end the watch.

        Raises:
            StateLost: it differs.
        """
        if self._undo is None or self._keep is None:
            return
        present = self._present() if self._by else {}
        others = [
            name for name, value in (self._noted or {}).items() if not are_same(value, _copied(present.get(name)))
        ]
        differing, by = self._trained() + sorted(others), self._by
        self.end()
        if differing:
            raise StateLost(
                f"{by[differing[0]]} has changed the first batch of a replacement by {format_list(differing, 3)}, "
                "which it did not have yet as its predecessor did. Change a batch in training_step if that depends on "
                "parameters, or on attributes or buffers that differ between ranks"
            )

    def _trained(self) -> list[str]:
        """Names of the trained parameters that have been read."""
        return sorted(name for name, each in self._model.named_parameters() if each.requires_grad and name in self._by)

    def _watched(
        self, owner: object, name: str, function: Callable[..., Any], this: object, *args: Any, **named: Any
    ) -> Any:
        """Call a hook of `owner`, and add what it reads to `_by` if it changes the batch."""
        if this is not owner or self._is_watching:
            return function(this, *args, **named)
        index = 2 if name == _START and isinstance(owner, Callback) else 0
        batch = args[index] if len(args) > index else named.get("batch")
        if self._keep is not None:
            copied, is_compared = None, False
            with contextlib.suppress(Exception):
                copied = copy.deepcopy(batch)
            result = function(this, *args, **named)
            if copied is not None and len(args) > index:
                again = functools.partial(function, this, *args[:index], copied, *args[index + 1 :], **named)
                kept, state = self._keep(), _state_of(owner)
                with _random_numbers_put_back(), contextlib.suppress(Exception):
                    self._call(name, copied, again)
                    is_compared = True
                kept.put_back()
                if state:
                    original(owner, "load_state_dict")(state)
            if not is_compared:
                _log.warning(
                    "whether %s has changed the first batch of this replacement by state that differs between ranks "
                    "could not be checked: its batch could not be copied, or a second call failed",
                    name,
                )
            return result
        result = self._call(name, batch, functools.partial(function, this, *args, **named))
        found = self._trained()
        if found:
            whose = type(owner).__name__.removeprefix("FSDP")
            raise ConfigError(
                f"{name} of {whose} changes the batch by {format_list(found, 3)}. It runs before the step, and a "
                "process that replaces a lost one has no parameters there yet. Change the batch in training_step."
            )
        return result

    def _call(self, name: str, batch: Any, function: Callable[[], Any]) -> Any:
        """Call a hook, and add what it reads to `_by` if it changes the batch."""
        before, read = _form(batch), set[str]()
        self._is_watching = True
        try:
            with self._reading(read):
                result = function()
        finally:
            self._is_watching = False
        if _form(batch) != before or (name in _TRANSFERS and _form(result) != before):
            self._by = dict.fromkeys(read, name) | self._by
        return result

    @contextmanager
    def _reading(self, read: set[str]) -> Generator[None]:
        """Context that adds the names of the parameters, buffers and attributes that are read to `read`."""
        tensors = {memory: name for name, each in self._tensors() if (memory := _memory_of(each)) is not None}
        found = {} if self._keep is None else self._places()  # only a replacement may have others
        places = {(id(owner), key): place for place, (owner, key) in found.items()}
        objects = {} if self._keep is None else {name: each.stateful for name, each in self.registered.items()}
        registered = {id(each): name for name, each in objects.items()}

        def note(owner: object, key: str) -> None:
            place = places.get((id(owner), key)) or registered.get(id(owner))
            if place is not None:
                read.add(place)

        owners = {*(type(owner) for owner, _ in found.values()), *map(type, objects.values())}
        with ExitStack() as undo:
            for owner in owners:
                undo.callback(_wrap(owner, "__getattribute__", functools.partial(_looked_up, note)))
            with torch.compiler.set_stance("force_eager"), _Operands(tensors, read):
                yield

    def _tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        yield from self._model.named_parameters()
        yield from self._model.named_buffers()

    def _places(self) -> dict[str, tuple[object, str]]:
        """Owner and name of each attribute, and of each state of a metric, by its name for people."""
        found = {place: named for each in self._attributes for place, named in each.places().items()}
        return found | {f"{name}.{key}": (metric, key) for name, metric, key in self._states_of_metrics()}

    def _states_of_metrics(self) -> Iterable[tuple[str, Metric, str]]:
        for name, metric in self._metrics.items():
            for key in (*metric._defaults, "_update_count"):
                yield name, metric, key

    def _present(self) -> dict[str, Any]:
        """By name, all that `_reading` may find but trained parameters; attributes packed."""
        found: dict[str, Any] = {name: local_tensor(each) for name, each in self._tensors() if not each.requires_grad}
        for each in self._attributes:
            found |= each.packed()
        found |= {f"{name}.{key}": vars(metric)[key] for name, metric, key in self._states_of_metrics()}
        return found | {name: each.state_dict() for name, each in self.registered.items()}


class _Operands(TorchDispatchMode):
    """Context that adds the names of known tensors to a set once an operation has one of them as an argument."""

    def __init__(self, names: Mapping[int, str], found: set[str]) -> None:
        super().__init__()
        self._names, self._found = names, found

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = () if _uses_no_values(func) else tree_leaves((args, kwargs))
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and (name := self._names.get(_memory_of(leaf) or 0)) is not None:
                self._found.add(name)
        return func(*args, **(kwargs or {}))


def _hooks_around_steps(trainer: Trainer) -> list[tuple[object, str]]:
    """Owner and name of each hook of the program that runs before or after micro-steps, or as an epoch begins."""
    names = ("on_train_epoch_start", _START, _END)
    module, data = trainer.lightning_module, getattr(trainer, "datamodule", None)
    owners: list[tuple[object, str]] = [(module, name) for name in (*names, *_TRANSFERS)]
    if data is not None:
        owners += [(data, name) for name in _TRANSFERS]
    of_callbacks = [
        (each, name)
        for each in callbacks_of(trainer)
        for name in names
        if is_of_program(type(each)) and is_overridden(name, each, parent=Callback)
    ]
    return [(owner, name) for owner, name in owners if is_overridden(name, owner)] + of_callbacks


def _wrap(cls: Any, name: str, call: Callable[..., Any]) -> Callable[[], None]:
    """Have a class call `call(function, self, ...)` instead of a method, and return what undoes that.

    Not in the object: what a program's objects have as attributes is part of its state.
    """
    former, function = vars(cls).get(name), getattr(cls, name)

    @functools.wraps(function)
    def wrapped(this: object, *args: Any, **kwargs: Any) -> Any:
        return call(function, this, *args, **kwargs)

    def undo() -> None:
        if former is None:
            delattr(cls, name)
        else:
            setattr(cls, name, former)

    setattr(cls, name, wrapped)
    return undo


def _looked_up(note: Callable[[object, str], None], function: Callable[..., Any], this: object, key: str) -> Any:
    note(this, key)
    return function(this, key)


def _state_of(owner: object) -> dict[str, Any]:
    """A copy of the state of a callback that has one, which is not among the attributes that are kept."""
    return copy.deepcopy(original(owner, "state_dict")()) if isinstance(owner, Callback) else {}


def _uses_no_values(func: Any) -> bool:
    """Whether an operation only makes a view of a tensor, or a new tensor of its form."""
    name = str(func).removeprefix("aten.")
    return getattr(func, "is_view", False) or name.startswith(("new_", "detach")) or "_like." in name


def _memory_of(tensor: torch.Tensor) -> int | None:
    """Identifies the memory of a tensor and its views; of a DTensor, that of its local part. None if it has none."""
    if is_lazy(tensor) or tensor.layout is not torch.strided:
        return None
    local = local_tensor(tensor)
    return local.untyped_storage()._cdata if local.numel() else None


@contextmanager
def _random_numbers_put_back() -> Generator[None]:
    """Context after which the random generators of Python, NumPy and torch are as they were."""
    state, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()):
            yield
    finally:
        random.setstate(state)
        np.random.set_state(of_numpy)


def _copied(value: Any) -> Any:
    """A copy in host memory of a tensor, or of a list of them; anything else as it is."""
    return tree_map_only(torch.Tensor, lambda each: each.detach().cpu().clone(), value)


def _form(value: Any, depth: int = 0) -> Any:
    """What tells whether a batch is still the same: its objects, versions of tensors, and what containers hold."""
    if isinstance(value, torch.Tensor):
        return _Same(value), 0 if value.is_inference() else value._version
    if isinstance(value, np.ndarray):
        return _Same(value), value.tobytes()
    if isinstance(value, str | bytes | int | float | bool | None):
        return value
    entries: Any = value if isinstance(value, Mapping) else _attributes_of(value)
    values: Any = entries.values() if entries else value if isinstance(value, list | tuple) else ()
    if depth == _DEPTH:
        return _Same(value)
    return _Same(value), [*entries], [_form(each, depth + 1) for each in values]


def _attributes_of(value: Any) -> dict[str, Any]:
    slots = [name for cls in type(value).__mro__ for name in cls.__dict__.get("__slots__", ())]
    return {**{name: getattr(value, name, None) for name in slots}, **getattr(value, "__dict__", {})}


@dataclass(frozen=True, slots=True, eq=False)
class _Same:
    """Equal to another one of the same object; holds it, so that no later one has its address."""

    value: Any

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    @override
    def __hash__(self) -> int:
        return id(self.value)
