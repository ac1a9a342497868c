"""Outputs of FSDP2 units in objects that torch does not look into.

FSDP2 begins the backward of a unit when a gradient reaches one of its output tensors, which it looks for in lists,
dictionaries and the like. If a forward returns an object of another class, it finds none: the gradients of a unit whose
parameters stay gathered are then never reduced, without an error. So `follow_outputs` looks into such objects, too.
"""

# FSDP2's states have no public API.
# pyright: reportPrivateUsage=false

from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from types import FunctionType, ModuleType
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

_MOST_VALUES = 2**12
"""Values that are looked at in one output: it may hold on to anything."""
_CONTAINERS = (Mapping, list, tuple, set, frozenset)
_NO_OUTPUTS = (nn.Module, Optimizer, type, FunctionType, ModuleType)


def follow_outputs(model: nn.Module) -> None:
    """Have backward begin at all outputs of the FSDP2 units of a model. Call it once."""
    states: dict[int, Any] = {
        id(state): state
        for part in model.modules()
        if isinstance(part, FSDPModule)
        for state in (part._get_fsdp_state(),)
    }
    for state in states.values():
        vars(state)["_register_pre_backward_hook"] = _registering(state, state._register_pre_backward_hook)


def _registering(state: Any, register: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def register_all(output: Any) -> Any:
        registered = register(output)
        if not isinstance(output, Tensor):
            for each in hidden_tensors(registered):
                each.register_hook(state._pre_backward)
        return registered

    return register_all


def hidden_tensors(output: Any) -> list[Tensor]:
    """Return the tensors that need a gradient in objects of an output: neither containers nor in containers alone."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    waiting: list[tuple[Any, bool]] = [(output, False)]
    while waiting and len(seen) < _MOST_VALUES:
        value, is_hidden = waiting.pop()
        if isinstance(value, Tensor):
            if is_hidden and value.requires_grad:
                found[id(value)] = value
            continue
        if id(value) in seen or isinstance(value, _NO_OUTPUTS):
            continue
        seen.add(id(value))
        is_object = not isinstance(value, _CONTAINERS)
        waiting += [(each, is_hidden or is_object or is_dataclass(value)) for each in _parts_of(value)]
    return list(found.values())


def _parts_of(value: Any) -> Iterable[Any]:
    """What a container holds, or the values of an object's attributes."""
    if isinstance(value, Mapping):
        return list(cast("Mapping[Any, Any]", value).values())
    if isinstance(value, _CONTAINERS):
        return list(cast("Iterable[Any]", value))
    slots = (name for kind in type(value).__mro__ for name in _names(vars(kind).get("__slots__", ())))
    of_slots = [getattr(value, name, None) for name in slots]
    return [*of_slots, *vars(value).values()] if "__dict__" in dir(value) else of_slots


def _names(slots: str | Iterable[str]) -> Iterable[str]:
    return [slots] if isinstance(slots, str) else slots
