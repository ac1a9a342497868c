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
import random
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Thread
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, Sampler
from typing_extensions import override

from hyperpod_plugins.parallel.former_parameters import slots_of
from hyperpod_plugins.recovery.attribute_values import CONTAINERS, MAX_DEPTH, MAX_ENTRIES, SCALARS, is_data
from hyperpod_plugins.recovery.packing import copied_leaf, on_devices_of
from hyperpod_plugins.recovery.program_collectives import is_library

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
INTERNAL = frozenset({*vars(nn.Module()), "_compiled_call_impl"})
"""Attributes that torch gives to each module."""


class Way(enum.Enum):
    """How an object is followed."""

    ATTRIBUTES = enum.auto()
    MODULE = enum.auto()
    GENERATOR = enum.auto()
    STATE = enum.auto()


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """An object that is followed."""

    name: str
    """The attributes through which it was found first."""
    value: Any
    way: Way
    tables: tuple[MutableMapping[str, Any], ...] = ()
    """Attributes, parameters or buffers by name; empty for a generator and an object with a state."""
    allowed: frozenset[str] | None = None
    """Names of the attributes that belong to it; None for all but `ignored`."""
    ignored: frozenset[str] = field(default_factory=frozenset[str])

    def owns(self, key: str) -> bool:
        """Whether an entry of its first table belongs to it."""
        return key not in self.ignored if self.allowed is None else key in self.allowed


class Slots(MutableMapping[str, Any]):
    """The attributes of an object with `__slots__`."""

    def __init__(self, value: object) -> None:
        """Look at the object's present attributes."""
        self._value = value
        self.names = [name for cls in type(value).__mro__ for name in slots_of(cls)]
        """Names of all slots, those without a value included."""

    @override
    def __getitem__(self, key: str) -> Any:
        if key not in self.names:
            raise KeyError(key)
        try:
            return object.__getattribute__(self._value, key)
        except AttributeError:
            raise KeyError(key) from None

    @override
    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.names:
            raise KeyError(key)
        object.__setattr__(self._value, key, value)

    @override
    def __delitem__(self, key: str) -> None:
        object.__delattr__(self._value, key)

    @override
    def __iter__(self) -> Iterator[str]:
        return (name for name in self.names if self.get(name, _UNSET) is not _UNSET)

    @override
    def __len__(self) -> int:
        return sum(1 for _ in self)


def way_of(value: object, packages: frozenset[str]) -> Way | None:
    """How an object is followed; None if it is not."""
    return None if type(value) in SCALARS or is_data(value) else _way_of(type(value), packages)


@lru_cache(maxsize=4096)
def _way_of(cls: type, packages: frozenset[str]) -> Way | None:
    if issubclass(cls, _GENERATORS):
        return None if issubclass(cls, random.SystemRandom) else Way.GENERATOR  # it has no state
    roots = {base.__module__.partition(".")[0] for base in cls.__mro__}
    if issubclass(cls, _ELSEWHERE) or (roots & _ROOTS_ELSEWHERE and not issubclass(cls, nn.Module)):
        return None
    if issubclass(cls, nn.Module):
        return Way.MODULE
    has_state = all(callable(getattr(cls, name, None)) for name in ("state_dict", "load_state_dict"))
    if has_state and any(_defines_state(base) and not _is_own(base, packages) for base in cls.__mro__):
        return Way.STATE
    if issubclass(cls, _NAMESPACES) or (_is_own(cls, packages) and not issubclass(cls, torch.Tensor | np.ndarray)):
        is_open = cls.__dictoffset__ != 0 or any("__slots__" in vars(base) for base in cls.__mro__[:-1])
        return Way.ATTRIBUTES if is_open else None
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
    return is_plain and _way_of(cls, packages) is Way.ATTRIBUTES and cls.__new__ is object.__new__


def make(name: str, cls: type, packages: frozenset[str]) -> Held | None:
    """Make an object of a class that another process has named; None if that may run code of the program."""
    if cls is torch.Generator:
        return _held(name, torch.Generator(), Way.GENERATOR)
    return _held(name, object.__new__(cls), Way.ATTRIBUTES) if _can_be_made(cls, packages) else None


def _held(name: str, value: Any, way: Way) -> Held:
    match way:
        case Way.ATTRIBUTES:
            slots = Slots(value)
            tables = (
                *([vars(value)] if isinstance(getattr(value, "__dict__", None), dict) else []),
                *([slots] if slots.names else []),
            )
            return Held(name, value, way, tables)
        case Way.MODULE:
            own = vars(value)
            kept = {"training", *own.get("_defaults", ()), *({"_computed", "_update_count"} & own.keys())}
            is_known = is_library(type(value).__module__) or "_update_count" in own
            allowed = frozenset(kept) if is_known else None
            tables = own, value._parameters, value._buffers
            return Held(name, value, way, tables, allowed, frozenset(INTERNAL - {"training"}))
        case _:
            return Held(name, value, way)


def find_held(
    roots: Iterable[Held], *, packages: frozenset[str], is_left_out: Callable[[object], bool]
) -> tuple[dict[str, Held], bool]:
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
        for name, value in _entries_of(owner):
            way = None if id(value) in known or len(found) > MAX_OBJECTS else way_of(value, packages)
            if way is None or is_left_out(value):
                continue
            known.add(id(value))
            found[name] = _held(name, value, way)
            queue.append(found[name])
    return found, len(found) > MAX_OBJECTS


def _entries_of(owner: Held) -> Iterator[tuple[str, Any]]:
    """Path and value of each object in the attributes of another, in an order that is the same in all processes."""
    for index, table in enumerate(owner.tables):
        for key in sorted(key for key in [*table] if index or owner.owns(key)):
            yield from _objects_in(f"{owner.name}.{key}", table.get(key), 0)
    if owner.way is Way.MODULE and isinstance(owner.value, nn.Module):
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


def state_of(held: Held) -> Any:
    """A copy of the state of a generator, or of an object with a `state_dict`, in plain containers."""
    value = held.value
    if held.way is Way.STATE:
        return tree_map(copied_leaf, value.state_dict())
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return _with_usual_integers(cast("Any", value.bit_generator).state)
    if isinstance(value, np.random.RandomState):
        return _with_usual_integers(value.get_state(legacy=False))
    version, numbers, following = value.getstate()
    return version, np.array(numbers, np.int64), following


def _with_usual_integers(state: Any) -> Any:
    """A state of NumPy with copies of arrays, in a type that is packed quickly."""
    if isinstance(state, dict):
        return {key: _with_usual_integers(each) for key, each in cast("dict[Any, Any]", state).items()}
    return state.astype(np.int64) if isinstance(state, np.ndarray) and state.dtype == np.uint32 else copied_leaf(state)


def values_of(held: Held) -> dict[str, Any]:
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


def set_state(held: Held, state: Any) -> None:
    """Load what `state_of` returned, in this process or another one."""
    value = held.value
    if held.way is Way.STATE:
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
