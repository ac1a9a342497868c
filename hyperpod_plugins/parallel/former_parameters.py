"""The parameters that a model had before it was sharded, and what the program has attached to them.

Sharding replaces a model's parameters, and the names of parameters do not change. What refers to the old ones trains
nothing, without a word:

- An optimizer gets the new parameters from `replace_stale_parameters`.
- Attributes, such as `parameter._no_weight_decay`, are copied to the new parameters.
- References in lists, dictionaries and objects, as for a penalty on some parameters, are set together with the module's
  attribute, to the gathered parameter or to its shard, so that they show what the attribute shows.
- Gradient hooks are refused: FSDP2 hands a gradient to the shard without running them, and a hook of the gathered
  parameter would see the gradient of this rank's samples only.
"""

# FSDP2's parameters have no public API.
# pyright: reportPrivateUsage=false

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from hyperpod_plugins.errors import ConfigError, format_list
from hyperpod_plugins.parallel.gathered_parameters import PRIVATE_ATTRIBUTES, GatheredParameter, followed_parameters
from hyperpod_plugins.parallel.host_optimizer import check_host_optimizers
from hyperpod_plugins.parallel.unit_messages import HOOK_ADVICE
from hyperpod_plugins.parallel.unit_watch import parameter_groups

_Names = dict[int, tuple["ref[torch.Tensor]", str]]
_former: "WeakKeyDictionary[nn.Module, _Names]" = WeakKeyDictionary()
_attributes: "WeakKeyDictionary[nn.Module, list[_Attributes]]" = WeakKeyDictionary()
_ORIGINAL = "_fsdp_orig_uid"
"""Attribute with which FSDP2 numbers the parameters that it replaces, from torch 2.13 on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attributes:
    """The attributes of a parameter before sharding, and where it was."""

    name: str
    """Its name in the model."""
    module: "ref[nn.Module]"
    """The module that had it."""
    key: str
    """Its name in that module."""
    shape: torch.Size
    """Its shape."""
    values: dict[str, Any]
    """Its dictionary. FSDP2 adds its number there when it replaces the parameter, which need not stay in memory."""

    def present(self, of_number: Mapping[int | None, GatheredParameter]) -> torch.Tensor | None:
        """Return the parameter that the program has put in its place, if any, given those that FSDP2 has numbered."""
        number = self.values.get(_ORIGINAL)
        if number is not None:
            return of_number[number].shard if number in of_number else None
        module = self.module()
        parameter = None if module is None else module._parameters.get(self.key)
        return parameter if parameter is not None and parameter.shape == self.shape else None


def remember_parameters(model: nn.Module, before: Mapping[str, torch.Tensor] | None = None) -> None:
    """Record the parameters of a model before it is sharded, by weak references, and their attributes.

    Args:
        model: not sharded yet.
        before: parameters, by name, that were in the place of some of them, and that the program may hold.

    Raises:
        ConfigError: see `remember_attributes`.
    """
    remember_attributes(model)
    named = [*model.named_parameters(), *(before or {}).items()]
    _former[model] = {id(parameter): (ref(parameter), name) for name, parameter in named}


def remember_attributes(model: nn.Module) -> None:
    """Record the attributes of a model's parameters before the model is sharded, by this package or by the program.

    Does nothing if it is sharded.

    Raises:
        ConfigError: a parameter has a gradient hook, or a class of the program, which its shard would not have.
    """
    if any(isinstance(part, FSDPModule) for part in model.modules()):
        return
    named = list(model.named_parameters())
    hooked = [name for name, each in named if each._backward_hooks or each._post_accumulate_grad_hooks]
    if hooked:
        raise ConfigError(
            f"gradient hooks of {format_list(hooked)} were registered before {type(model).__name__} was sharded, which "
            f"replaces parameters. {HOOK_ADVICE}"
        )
    found: dict[int, _Attributes] = {}
    for prefix, part in model.named_modules():
        for key, each in part.named_parameters(prefix=prefix, recurse=False):
            own = key.removeprefix(f"{prefix}.")
            found.setdefault(
                id(each), _Attributes(name=key, module=ref(part), key=own, shape=each.shape, values=vars(each))
            )
    _attributes[model] = list(found.values())


def succeed_parameters(model: nn.Module, holders: Sequence[object] = (), *, is_by_program: bool = False) -> None:
    """Give a model's sharded parameters the attributes of those before, and have references follow them.

    Args:
        model: sharded since `remember_parameters` or `remember_attributes`.
        holders: other objects that may refer to parameters.
        is_by_program: the program has sharded it, and may have replaced modules, too, so that names may mean other
            parameters now.

    Raises:
        ConfigError: attributes belong to no parameter of the sharded model; or see `follow_references`.
    """
    present = dict(model.named_parameters(remove_duplicate=False))
    of_number = {vars(record).get("_orig_param_uid"): each for each, record in _followed(model)}
    lost: list[str] = []
    for each in _attributes.pop(model, ()):
        own = {key: value for key, value in each.values.items() if not key.startswith(PRIVATE_ATTRIBUTES)}
        successor = each.present(of_number) if is_by_program else present.get(each.name)
        if successor is not None:
            for key, value in own.items():
                vars(successor).setdefault(key, value)
        elif own and not is_by_program:
            lost.append(f"{each.name} ({', '.join(own)})")
    if lost:
        raise ConfigError(
            f"attributes of {format_list(lost)} would be lost: the sharded {type(model).__name__} has no such "
            "parameters. Set them after it was sharded: in configure_optimizers, or after parallelize or prepare."
        )
    _follow(model, present, of_number, holders)


def _follow(
    model: nn.Module,
    present: Mapping[str, torch.Tensor],
    of_number: Mapping[int | None, GatheredParameter],
    holders: Sequence[object],
) -> None:
    """Have the references of a model and of `holders` to former parameters follow those in their place."""
    of_shard = {id(each.shard): each for each, _ in _followed(model)}
    names = _names_of_former(model)
    of_former = {
        key: of_shard[id(present[name])]
        for key, (alive, name) in names.items()
        if alive() is not None and name in present and id(present[name]) in of_shard
    }

    def successor(value: torch.Tensor) -> GatheredParameter | None:
        return of_former.get(id(value)) or of_number.get(vars(value).get(_ORIGINAL, -1))

    if of_former or not names:  # otherwise no former parameter is referred to any more
        follow_references(model, holders, successor)


def _followed(model: nn.Module) -> Iterator[tuple[GatheredParameter, Any]]:
    """Yield the parameters of a sharded model whose units are watched, with FSDP2's record of each."""
    for part in model.modules():
        for group in parameter_groups(part):
            yield from zip(followed_parameters(group), group.fsdp_params, strict=False)


def replace_stale_parameters(optimizers: Sequence[Optimizer], model: nn.Module, *, num_ranks: int) -> None:
    """Replace the unsharded parameters that optimizers hold by the sharded parameters of the model.

    Args:
        optimizers: optimizers of `model`.
        model: a sharded model, by `parallelize` or otherwise.
        num_ranks: world size of the job.

    Raises:
        ConfigError: an optimizer already has state for an unsharded parameter; or, with several ranks, it holds
            parameters that are not the model's, which each rank would train independently; or it cannot step in
            host memory, see `check_host_optimizers`.
    """
    present = dict(model.named_parameters(remove_duplicate=False))
    held = {id(parameter) for parameter in present.values()}
    names = {
        key: name for key, (alive, name) in _names_of_former(model).items() if alive() is not None and name in present
    }
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        foreign: list[str] = []
        for group in optimizer.param_groups:
            group["params"] = [*group["params"]]  # the program may keep the list: `follow_references` writes to it
            for index, parameter in enumerate(group["params"]):
                if id(parameter) in held:
                    continue
                name = names.get(id(parameter))
                if name is None:
                    foreign.append(str(tuple(parameter.shape)))
                elif parameter in optimizer.state:
                    raise ConfigError(
                        f"this {kind} has state already, of {name} before it was sharded. Make it from the sharded "
                        "model's parameters (in configure_optimizers, or after session.parallelize), and load saved "
                        "state afterwards."
                    )
                else:
                    group["params"][index] = present[name]
        if foreign and num_ranks > 1:
            raise ConfigError(
                f"this {kind} holds {len(foreign)} parameters that are not in the sharded {type(model).__name__}, of "
                f"shapes {format_list(foreign)}: it would not train the model, or each rank would train its own copy. "
                "Make it from parameters of the sharded model: in configure_optimizers with self.parameters(), or "
                "after session.parallelize(model)."
            )
    check_host_optimizers(optimizers)


def _names_of_former(model: nn.Module) -> _Names:
    """Return the record of the parameters that a model, or parts of it, had before sharding, by their names in it."""
    return {key: each for root, former in _former.items() for key, each in _names_in(model, root, former).items()}


def _names_in(model: nn.Module, root: nn.Module, former: _Names) -> _Names:
    """Return the record of `root` under the names that its parameters have in `model`, around or inside it."""
    if root is model:
        return former
    for prefix, part in model.named_modules():
        if part is root:
            return {key: (alive, f"{prefix}.{name}") for key, (alive, name) in former.items()}
    for prefix, part in root.named_modules():
        if part is model:
            begin = f"{prefix}."
            inside = {key: (alive, name) for key, (alive, name) in former.items() if name.startswith(begin)}
            return {key: (alive, name.removeprefix(begin)) for key, (alive, name) in inside.items()}
    return {}


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
                    followed.refer(KeptReference(holder, key, value))
            elif type(value) not in _PLAIN and id(value) not in self._tree:
                self._pending.append((place, value))


class KeptReference:
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
