"""Objects that a program's own objects hold, in attributes and in containers there: which are followed, and how.

    objects of the program's classes    their attributes, and what these hold
    modules outside of the model        parameters, buffers, and the attributes of the program's classes
    random generators                   their state
    libraries' objects with a state     `state_dict`, such as that of a `GradScaler`

A class is the program's own if its module is not installed (in `site-packages`), or belongs to a package of one of the
objects where the search begins. Other installed packages keep connections, threads and caches in their objects: only
those with `state_dict` and `load_state_dict` are followed, by these.

[Note: handled elsewhere] Optimizers, schedulers, data sets, loaders and samplers are left out, and so is all that
belongs to Lightning, Accelerate or Transformers: other parts of this package restore them, or refuse them. Threads are
left out, because no process can continue another one's.
"""

# A generator of NumPy and a `GradScaler` have no other way to be reset.
# pyright: reportPrivateUsage=false

import argparse
import enum
import logging
import random
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from threading import Thread
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, Sampler
from typing_extensions import override

from hyperpod_plugins.parallel.former_parameters import slots_of
from hyperpod_plugins.recovery.attribute_values import CONTAINERS, MAX_DEPTH, MAX_ENTRIES, SCALARS, is_data
from hyperpod_plugins.recovery.packing import are_same, as_integers, copied_leaf, on_devices_of
from hyperpod_plugins.recovery.program_collectives import is_library

_log = logging.getLogger(__name__)
MAX_OBJECTS = 4096
"""Most objects that are followed."""
STATE = "state_dict()"
"""Name under which the state of an object is kept, beside the attributes of others."""
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_ELSEWHERE = (Optimizer, LRScheduler, Dataset, DataLoader, Sampler, type, types.ModuleType, enum.Enum, Thread)
_ROOTS_ELSEWHERE = frozenset(
    {
        *("hyperpod_plugins", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities"),
        *("accelerate", "transformers", "peft"),
    }
)
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_UNSET = object()
_NUM_COMPARED, _NUM_SAMPLED = 16, 256
_MANY_BYTES = 2**24
"""Size of a state above which a warning names the object."""
INTERNAL = frozenset({*vars(nn.Module()), "_compiled_call_impl"})
"""Attributes that torch gives to each module."""


class FollowMode(enum.Enum):
    """How an object is followed."""

    ATTRIBUTES = enum.auto()
    MODULE = enum.auto()
    GENERATOR = enum.auto()
    STATE = enum.auto()


@dataclass(frozen=True, slots=True, eq=False)
class FollowedObject:
    """An object that is followed."""

    name: str
    """The attributes through which it was found first."""
    value: Any
    mode: FollowMode
    tables: tuple[MutableMapping[str, Any], ...] = ()
    """Attributes, parameters or buffers by name; empty for a generator and an object with a state."""
    allowed: frozenset[str] | None = None
    """Names of the attributes that belong to it; None for all but `ignored`."""
    ignored: frozenset[str] = field(default_factory=frozenset[str])

    def owns(self, key: str) -> bool:
        """Whether an entry of its first table belongs to it."""
        return key not in self.ignored if self.allowed is None else key in self.allowed


class SlotAttributes(MutableMapping[str, Any]):
    """The attributes of an object with `__slots__`."""

    def __init__(self, value: object) -> None:
        """Look at the object's present attributes."""
        self.owner = value
        """The object."""
        self.names = [name for cls in type(value).__mro__ for name in slots_of(cls)]
        """Names of all slots, those without a value included."""
        self._known = frozenset(self.names)

    @override
    def __getitem__(self, key: str) -> Any:
        if (found := self.get(key, _UNSET)) is _UNSET:
            raise KeyError(key)
        return found

    @override
    def get(self, key: str, default: Any = None) -> Any:
        try:
            return object.__getattribute__(self.owner, key) if key in self._known else default
        except AttributeError:
            return default

    @override
    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self._known:
            raise KeyError(key)
        object.__setattr__(self.owner, key, value)

    @override
    def __delitem__(self, key: str) -> None:
        object.__delattr__(self.owner, key)

    @override
    def __iter__(self) -> Iterator[str]:
        return (name for name in self.names if self.get(name, _UNSET) is not _UNSET)

    @override
    def __len__(self) -> int:
        number = len(self.names)
        for name in self.names:
            try:
                object.__getattribute__(self.owner, name)
            except AttributeError:
                number -= 1
        return number


def is_full(table: MutableMapping[str, Any]) -> bool:
    """Whether each attribute that a table may ever have is there: its length changes only if one is deleted."""
    return isinstance(table, SlotAttributes) and len(table) == len(table.names)


def reader_of(table: MutableMapping[str, Any], key: str, default: object) -> Callable[[], Any]:
    """Returns the value of a key of a table at each call, or `default` if it has none."""
    if isinstance(table, SlotAttributes):
        return partial(_read_slot, table.owner, key, default)
    return partial(table.get, key, default)


def _read_slot(owner: object, key: str, default: object) -> Any:
    try:
        return object.__getattribute__(owner, key)
    except AttributeError:
        return default


def follow_mode_of(value: object, packages: frozenset[str]) -> FollowMode | None:
    """How an object is followed; None if it is not."""
    return None if type(value) in SCALARS or is_data(value) else _follow_mode_of(type(value), packages)


@lru_cache(maxsize=4096)
def _follow_mode_of(cls: type, packages: frozenset[str]) -> FollowMode | None:
    if issubclass(cls, _GENERATORS):
        return None if issubclass(cls, random.SystemRandom) else FollowMode.GENERATOR  # it has no state
    roots = {base.__module__.partition(".")[0] for base in cls.__mro__}
    if issubclass(cls, _ELSEWHERE) or (roots & _ROOTS_ELSEWHERE and not issubclass(cls, nn.Module)):
        return None
    if issubclass(cls, nn.Module):
        return FollowMode.MODULE
    has_state = all(callable(getattr(cls, name, None)) for name in ("state_dict", "load_state_dict"))
    if has_state and any(_defines_state(base) and not _is_own(base, packages) for base in cls.__mro__):
        return FollowMode.STATE
    if issubclass(cls, _NAMESPACES) or (_is_own(cls, packages) and not issubclass(cls, torch.Tensor | np.ndarray)):
        is_open = cls.__dictoffset__ != 0 or any("__slots__" in vars(base) for base in cls.__mro__[:-1])
        return FollowMode.ATTRIBUTES if is_open else None
    return None


def _defines_state(cls: type) -> bool:
    return "state_dict" in vars(cls) and not getattr(cls, "_is_protocol", False)


def packages_of(values: Iterable[object]) -> frozenset[str]:
    """The packages of the program: those of the classes of these objects."""
    roots = {base.__module__.partition(".")[0] for value in values for base in type(value).__mro__}
    return frozenset(root for root in roots if not (is_library(root) or root in sys.stdlib_module_names))


def _is_own(cls: type, packages: frozenset[str]) -> bool:
    """Whether the program defines a class; see the module's docstring."""
    root = cls.__module__.partition(".")[0]
    return root in packages or not (is_library(root) or root in sys.stdlib_module_names or _is_installed(cls, root))


def _is_installed(cls: type, root: str) -> bool:
    if root == "__main__":
        return False
    module = sys.modules.get(cls.__module__) or sys.modules.get(root)
    path = str(getattr(module, "__file__", None) or "")
    return module is not None and (not path or "site-packages" in path or "dist-packages" in path)


def can_be_made(value: object, packages: frozenset[str]) -> bool:
    """Whether another process can make an object of this one's class."""
    if isinstance(value, torch.Generator):
        return type(value) is torch.Generator and value.device.type == "cpu"
    return _can_be_made(type(value), packages)


def _can_be_made(cls: type, packages: frozenset[str]) -> bool:
    """Whether objects of a class can be made without running any of its code."""
    is_plain = "<locals>" not in cls.__qualname__ and getattr(cls, "__del__", None) is None
    return is_plain and _follow_mode_of(cls, packages) is FollowMode.ATTRIBUTES and cls.__new__ is object.__new__


def make(name: str, cls: type, packages: frozenset[str]) -> FollowedObject | None:
    """Make an object of a class that another process has named; None if that may run code of the program."""
    if cls is torch.Generator:
        return _held(name, torch.Generator(), FollowMode.GENERATOR)
    return _held(name, object.__new__(cls), FollowMode.ATTRIBUTES) if _can_be_made(cls, packages) else None


def _held(name: str, value: Any, mode: FollowMode) -> FollowedObject:
    match mode:
        case FollowMode.ATTRIBUTES:
            slots = SlotAttributes(value)
            tables = (
                *([vars(value)] if isinstance(getattr(value, "__dict__", None), dict) else []),
                *([slots] if slots.names else []),
            )
            return FollowedObject(name, value, mode, tables)
        case FollowMode.MODULE:
            own = vars(value)
            kept = {"training", *own.get("_defaults", ()), *({"_computed", "_update_count"} & own.keys())}
            is_known = is_library(type(value).__module__) or "_update_count" in own
            allowed = frozenset(kept) if is_known else None
            tables = own, value._parameters, value._buffers
            return FollowedObject(name, value, mode, tables, allowed, frozenset(INTERNAL - {"training"}))
        case _:
            return FollowedObject(name, value, mode)


def find_held(
    roots: Iterable[FollowedObject], *, packages: frozenset[str], is_left_out: Callable[[object], bool]
) -> tuple[dict[str, FollowedObject], bool]:
    """Follow the attributes of some objects.

    Args:
        roots: where to begin.
        packages: of the program; see `packages_of`.
        is_left_out: whether an object is restored in another way.

    Returns:
        The objects by name, the roots among them, and whether there are too many.
    """
    found = {each.name: each for each in roots}
    queue, known = [*found.values()], {id(each.value) for each in found.values()}
    for owner in queue:
        for name, value in objects_of(owner):
            mode = None if id(value) in known or len(found) > MAX_OBJECTS else follow_mode_of(value, packages)
            if mode is None or is_left_out(value):
                continue
            known.add(id(value))
            found[name] = _held(name, value, mode)
            queue.append(found[name])
    return found, len(found) > MAX_OBJECTS


def objects_of(owner: FollowedObject) -> Iterator[tuple[str, Any]]:
    """Path and value of each object in the attributes of another, in an order that is the same in all processes."""
    for index, table in enumerate(owner.tables):
        for key in sorted(key for key in [*table] if index or owner.owns(key)):
            yield from _objects_in(f"{owner.name}.{key}", table.get(key), 0)
    if owner.mode is FollowMode.MODULE and isinstance(owner.value, nn.Module):
        for key, part in owner.value._modules.items():
            yield f"{owner.name}.{key}", part


def _objects_in(path: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    if kind in SCALARS or isinstance(value, torch.Tensor):
        return
    if kind not in CONTAINERS:
        yield path, value
    elif len(value) <= MAX_ENTRIES and depth <= MAX_DEPTH and kind is not set:
        pairs = [*(cast("dict[Any, Any]", value).items() if isinstance(value, dict) else enumerate(value))]
        for index, (key, each) in enumerate(pairs):
            label = repr(key) if type(key) in SCALARS else f"#{index}"
            yield from _objects_in(f"{path}[{label}]", each, depth + 1)


def may_hold_objects(value: Any, depth: int = 0) -> bool:
    """Whether a value is an object that may be followed, or a container of one."""
    kind = type(value)
    if kind in SCALARS or isinstance(value, torch.Tensor | np.ndarray):
        return False
    if kind not in CONTAINERS:
        return not is_data(value)
    if len(value) > MAX_ENTRIES or depth > MAX_DEPTH:
        return False
    entries: Collection[Any] = cast("dict[Any, Any]", value).values() if isinstance(value, dict) else value
    return any(may_hold_objects(each, depth + 1) for each in [*entries])


def holds_any(value: Any, names: Collection[int], depth: int = 0) -> bool:
    """Whether a value is one of the objects with these `id`s, or a container of one."""
    if id(value) in names:
        return True
    if type(value) not in CONTAINERS or len(value) > MAX_ENTRIES or depth > MAX_DEPTH:
        return False
    entries: Collection[Any] = cast("dict[Any, Any]", value).values() if isinstance(value, dict) else value
    return any(holds_any(each, names, depth + 1) for each in [*entries])


def state_of(held: FollowedObject) -> Any:
    """A copy of the state of a generator, or of an object with a `state_dict`, in plain containers."""
    value = held.value
    if held.mode is FollowMode.STATE:
        return tree_map(copied_leaf, value.state_dict())
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return _with_usual_integers(cast("Any", value.bit_generator).state)
    if isinstance(value, np.random.RandomState):
        return _with_usual_integers(value.get_state(legacy=False))
    version, numbers, following = value.getstate()
    return version, np.array(numbers, np.int64), following


@dataclass(frozen=True, slots=True, eq=False)
class _CopiedTensor:
    """A large tensor of a state, and its copy."""

    source: torch.Tensor
    version: int
    sample: torch.Tensor
    copied: torch.Tensor

    def is_same(self, present: torch.Tensor, *, is_compared: bool) -> bool:
        """Whether the tensor has the values of the copy; compares all of them only if `is_compared`."""
        if present._version != self.version or not torch.equal(_sample_of(present), self.sample):
            return False
        return not is_compared or torch.equal(as_integers(present).cpu(), as_integers(self.copied))


@dataclass(slots=True, eq=False)
class _CopiedState:
    """The last copy of one object's state, and its form for another process."""

    value: Any
    state: Any = None
    tensors: dict[tuple[Any, ...], _CopiedTensor] = field(default_factory=dict[tuple[Any, ...], _CopiedTensor])
    num_copies: int = 0
    is_hidden: bool = False
    """Whether a tensor was written to without a trace: all are copied each time from then on."""
    form: tuple[Any, Any] = _UNSET, None
    """A state, and its form."""


class StateCopies:
    """Copies of the states of libraries' objects, of which a large tensor is copied again only once it was written to.

    A write is seen by the tensor's version, or by a few of its elements. In the first copies of an object, and then
    ever more rarely, all elements are compared; if one was written to without another trace, as through `.data`, all
    are copied each time from then on.
    """

    def __init__(self) -> None:
        """Begin without copies."""
        self._last: dict[str, _CopiedState] = {}

    def state_of(self, held: FollowedObject) -> Any:
        """Like the function of this name; the same object as the last time if nothing has changed."""
        if held.mode is not FollowMode.STATE:
            return state_of(held)
        last = self._copy_of(held)
        given, tensors = held.value.state_dict(), dict[tuple[Any, ...], _CopiedTensor]()
        last.num_copies += 1
        is_compared = last.num_copies <= _NUM_COMPARED or last.num_copies & (last.num_copies - 1) == 0

        def copied(leaf: Any) -> Any:
            if not _is_large(leaf) or last.is_hidden:
                return copied_leaf(leaf)
            key = (leaf.data_ptr(), leaf.shape, leaf.dtype, leaf.device)
            known = last.tensors.get(key)
            if known is None or not known.is_same(leaf, is_compared=is_compared):
                last.is_hidden |= known is not None and known.is_same(leaf, is_compared=False)
                known = _CopiedTensor(leaf.detach(), leaf._version, _sample_of(leaf), copied_leaf(leaf))
            tensors[key] = known
            return known.copied

        state = tree_map(copied, given)
        num_bytes = sum(each.copied.nbytes for each in tensors.values())
        if last.num_copies == 1 and num_bytes > _MANY_BYTES and not (dist.is_initialized() and dist.get_rank()):
            _log.warning(
                "the state_dict() of %s (%s) holds %d MiB, which are copied in each step that follows a write to them. "
                "If that takes long, keep the tensors in frozen parameters of the model",
                held.name,
                type(held.value).__name__,
                num_bytes >> 20,
            )
        if last.num_copies == 1 or not are_same(state, last.state):
            last.state = state
        last.tensors = {} if last.is_hidden else tensors
        return last.state

    def form_of(self, held: FollowedObject, encode: Callable[[Any], Any]) -> Any:
        """What `encode` makes of an object's state; the same object as the last time if the state has not changed."""
        state = self.state_of(held)
        if held.mode is not FollowMode.STATE:
            return encode(state)
        last = self._copy_of(held)
        if last.form[0] is not state:
            last.form = state, encode(state)
        return last.form[1]

    def _copy_of(self, held: FollowedObject) -> _CopiedState:
        found = self._last.get(held.name)
        if found is None or found.value is not held.value:
            found = self._last[held.name] = _CopiedState(held.value)
        return found


def _is_large(leaf: Any) -> bool:
    """Whether a leaf of a state is a large tensor whose writes can be seen."""
    is_plain = type(leaf) in (torch.Tensor, nn.Parameter) and leaf.numel() > MAX_ENTRIES
    return is_plain and leaf.layout is torch.strided and leaf.is_contiguous() and not leaf.is_inference()


def _sample_of(tensor: torch.Tensor) -> torch.Tensor:
    flat = as_integers(tensor).view(-1)
    return flat[:: max(1, len(flat) // _NUM_SAMPLED)].clone()


def _with_usual_integers(state: Any) -> Any:
    """A state of NumPy with copies of arrays, in a type that is packed quickly."""
    if isinstance(state, dict):
        return {key: _with_usual_integers(each) for key, each in cast("dict[Any, Any]", state).items()}
    return state.astype(np.int64) if isinstance(state, np.ndarray) and state.dtype == np.uint32 else copied_leaf(state)


def values_of(held: FollowedObject) -> dict[str, Any]:
    """All that an object holds, by the names of its attributes; the state of a generator or an object with one."""
    if not held.tables:
        return {STATE: state_of(held)}
    return {
        key: each
        for index, table in enumerate(held.tables)
        for key, each in [*table.items()]
        if index or held.owns(key)
    }


def forget_step(value: object) -> None:
    """Have a `GradScaler` forget what an interrupted step has done so far: it would refuse to do it again."""
    if isinstance(value, GradScaler):
        value._per_optimizer_states.clear()


def set_state(held: FollowedObject, state: Any) -> None:
    """Load what `state_of` returned, in this process or another one."""
    value = held.value
    if held.mode is FollowMode.STATE:
        forget_step(value)
        value.load_state_dict(on_devices_of(value.state_dict(), tree_map(copied_leaf, state)))
    elif isinstance(value, torch.Generator):
        value.set_state(state)
    elif isinstance(value, np.random.Generator):
        cast("Any", value.bit_generator).state = state
    elif isinstance(value, np.random.RandomState):
        value.set_state(state)
    else:
        version, numbers, following = state
        value.setstate((version, tuple(map(int, numbers)), following))


def may_hide(cls: type, key: str) -> bool:
    """Whether an attribute may hide one of its class: only a value that the program begins with, such as `n = 0`."""
    if key not in vars(cls):
        return True
    return not is_library(cls.__module__) and not {"__get__", "__set__"} & {*dir(type(vars(cls)[key]))}


def is_made_when_read(cls: type, key: str) -> bool:
    """Whether an attribute is a `cached_property`, which each process computes for itself."""
    return any(isinstance(vars(base).get(key), cached_property) for base in cls.__mro__)


def has_state(value: object) -> bool:
    """Whether an object has `state_dict` and `load_state_dict`."""
    return all(callable(getattr(type(value), name, None)) for name in ("state_dict", "load_state_dict"))
