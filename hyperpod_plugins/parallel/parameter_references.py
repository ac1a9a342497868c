"""References of a program to parameters, which sharding has replaced: they follow the parameters of the modules.

A program may keep parameters in a list, a dictionary or an object of its own, as for a penalty on some of them. After
sharding, these would be the parameters from before, which nothing trains. FSDP2 sets a module's attribute to the
gathered parameter or to its shard. The references that are found here are set together with it, so that they show what
the attribute shows.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hyperpod_plugins.errors import ConfigError, format_list
from hyperpod_plugins.parallel.gathered_parameters import GatheredParameter

_PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None), type, torch.dtype, torch.device, torch.Size})
_INSTALLED = {"hyperpod_plugins", "torch", "lightning", "pytorch_lightning", "lightning_fabric", "numpy"}
_LIBRARIES = frozenset(_INSTALLED | sys.stdlib_module_names) - {"types"}
"""Libraries whose objects are not searched. Classes that a program makes at run time are those of `types`."""
_OF_TREE = ("_parameters", "_modules", "_buffers")
"""What torch holds of a module in a model; FSDP2 sets the parameters there."""

_Entry = tuple[Any, Any, Any, str]
"""Where a value is kept (None: it cannot be set there), under which key, the value, and that place in words."""


def follow_references(
    model: nn.Module,
    holders: Sequence[object],
    successor: Callable[[torch.Tensor], GatheredParameter | None],
) -> None:
    """Find references to former parameters, and have each follow the parameter in its place.

    They are looked for in the attributes of the modules, of other modules and of objects of classes that are not of
    torch, Lightning or the standard library; and, in all of those, in containers and in variables that functions have
    captured. An optimizer gets the shards.

    Args:
        model: a sharded model.
        holders: other objects to look in.
        successor: returns the parameter in the place of a former one; None for other tensors.

    Raises:
        ConfigError: a former parameter is kept where it cannot be replaced, such as in a tuple, or an optimizer has
            state of it.
    """
    search = _Search({id(part) for part in model.modules()}, successor)
    for name, parameter in model.named_parameters():
        search.look_at((None, None, value, f"{name}.{key}") for key, value in vars(parameter).items())
    kind = type(model).__name__.removeprefix("FSDP")  # FSDP2 puts that before the name of the class
    named = [(name or kind, part) for name, part in model.named_modules()]
    search.run([*named, *((type(each).__name__, each) for each in holders)])
    if search.fixed:
        raise ConfigError(
            f"{format_list(search.fixed)} of {kind} would keep a parameter from before it was sharded, "
            "which is not trained, and cannot be replaced there. Keep parameters in a list, a dictionary or an "
            "attribute of an object, which follow them, or take them from their modules where they are used."
        )


class _Search:
    """Searches objects that the program can reach for former parameters."""

    def __init__(self, tree: set[int], successor: Callable[[torch.Tensor], GatheredParameter | None]) -> None:
        """Begin; `tree`: the `id` of each module of the model."""
        self._tree, self._successor = tree, successor
        self._pending: list[tuple[str, object]] = []
        self._seen: set[int] = set()
        self.fixed: list[str] = []
        """Places of former parameters that cannot be replaced."""

    def run(self, start: Sequence[tuple[str, object]]) -> None:
        """Search what can be reached from some named objects."""
        self._pending += reversed(start)
        while self._pending:
            place, owner = self._pending.pop()
            if id(owner) not in self._seen:
                self._seen.add(id(owner))
                if isinstance(owner, Optimizer):
                    _replace_in_optimizer(owner, place, self._successor)
                    self._seen |= {id(group["params"]) for group in owner.param_groups}
                self.look_at(_entries(owner, place, is_in_model=id(owner) in self._tree))

    def look_at(self, entries: Iterable[_Entry]) -> None:
        """Have references among some entries follow their parameters, and note what else is to be searched."""
        for holder, key, value, place in entries:
            if isinstance(value, torch.Tensor):
                followed = self._successor(value)
                if followed is not None and holder is None:
                    self.fixed.append(place)
                elif followed is not None:
                    followed.refer(Reference(holder, key, value))
            elif type(value) not in _PLAIN and id(value) not in self._tree:
                self._pending.append((place, value))


class Reference:
    """One place in which a program keeps a parameter."""

    __slots__ = ("_holder", "_key", "_last")

    def __init__(self, holder: Any, key: Any, last: torch.Tensor) -> None:
        """Refer to `holder[key]`, or to the contents of a cell, where `last` is kept now."""
        self._holder, self._key, self._last = holder, key, last

    def set(self, parameter: torch.Tensor) -> None:
        """Replace the parameter if the program still keeps it in the same container."""
        holder, last = self._holder, self._last
        self._last = parameter
        if isinstance(holder, CellType):
            if holder.cell_contents is last:
                holder.cell_contents = parameter
            return
        if not self._is_at(self._key, last):
            keys = holder if isinstance(holder, dict) else range(len(holder))
            self._key = next((key for key in keys if holder[key] is last), self._key)
        if self._is_at(self._key, last):
            holder[self._key] = parameter

    def _is_at(self, key: Any, value: object) -> bool:
        holder = self._holder
        if isinstance(holder, dict):
            return holder.get(key) is value
        return key < len(holder) and holder[key] is value


def _entries(owner: Any, place: str, *, is_in_model: bool) -> Iterator[_Entry]:
    """Yield what a container, function or object keeps."""
    if isinstance(owner, dict | list | deque | tuple | set | frozenset):
        yield from _entries_of_container(owner, place)
    elif isinstance(owner, FunctionType | MethodType | partial):
        yield from _entries_of_function(owner, place)
    elif isinstance(owner, nn.Module) or _is_of_program(owner):
        own: dict[str, Any] = getattr(owner, "__dict__", {})
        for key, value in list(own.items()):
            if not (is_in_model and key in _OF_TREE):
                yield own, key, value, f"{place}.{key}"
        for key in (key for base in type(owner).__mro__ for key in slots_of(base)):
            yield None, None, getattr(owner, key, None), f"{place}.{key} (a slot)"


def _entries_of_container(owner: Any, place: str) -> Iterator[_Entry]:
    if isinstance(owner, dict):
        for key, value in list(owner.items()):
            yield None, None, key, f"a key of {place}"
            yield owner, key, value, f"{place}[{key!r}]" if isinstance(key, str | int) else f"{place}[...]"
    elif isinstance(owner, list | deque):
        for index, value in enumerate(list(owner)):
            yield owner, index, value, f"{place}[{index}]"
    else:
        yield from ((None, None, value, f"{place} (a {type(owner).__name__})") for value in owner)


def _entries_of_function(owner: Any, place: str) -> Iterator[_Entry]:
    if isinstance(owner, FunctionType):
        for name, cell in zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=False):
            with suppress(ValueError):  # a cell that is not set yet
                yield cell, None, cell.cell_contents, f"{place}: {name}"
        parts = {"defaults": owner.__defaults__, "defaults of keywords": owner.__kwdefaults__}
    elif isinstance(owner, MethodType):
        parts = {"__self__": owner.__self__, "__func__": owner.__func__}
    else:
        parts = {"func": owner.func, "args": owner.args, "keywords": owner.keywords}
    yield from ((None, None, value, f"{place}: {name}") for name, value in parts.items())


def slots_of(cls: type) -> list[str]:
    """Names of the attributes for which a class has slots; Python puts that of the class before private ones."""
    slots: Any = vars(cls).get("__slots__", ())
    each: list[str] = [slots] if isinstance(slots, str) else [*slots]
    private, owner = (
        {name for name in each if name.startswith("__") and not name.endswith("__")},
        cls.__name__.lstrip("_"),
    )
    names = [f"_{owner}{name}" if owner and name in private else name for name in each]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _is_of_program(owner: object) -> bool:
    return type(owner).__module__.partition(".")[0] not in _LIBRARIES


def _replace_in_optimizer(
    optimizer: Optimizer, place: str, successor: Callable[[torch.Tensor], GatheredParameter | None]
) -> None:
    for group in optimizer.param_groups:
        group["params"] = [*group["params"]]  # the program's own list shows gathered parameters, too
        for index, parameter in enumerate(group["params"]):
            followed = successor(parameter)
            if followed is not None and parameter in optimizer.state:
                raise ConfigError(
                    f"{place}, a {type(optimizer).__name__}, has state already, of parameters before they were "
                    "sharded. Make it from the sharded model's parameters, and load saved state afterwards."
                )
            if followed is not None:
                group["params"][index] = followed.shard
