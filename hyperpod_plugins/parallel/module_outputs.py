"""Outputs of FSDP2 units in objects that torch does not look into.

FSDP2 begins the backward of a unit when a gradient reaches one of its output tensors, which it looks for in lists,
dictionaries and the like. If a forward returns an object of another class, it finds none: the gradients of a unit whose
parameters stay gathered are then never reduced, without an error. So `follow_outputs` looks into such objects, too.
"""

# FSDP2's states have no public API.
# pyright: reportPrivateUsage=false

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType, MemberDescriptorType, ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

_MOST_VALUES = 2**12
"""Objects and containers that are looked into in one output: it may hold on to anything."""
_HOLD_NO_OUTPUTS = (
    *(nn.Module, Optimizer, type, FunctionType, ModuleType),
    *(str, bytes, bool, int, float, complex, type(None)),
)
_SEEN_BY_TORCH = (dict, list, tuple)


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
        if torch.is_grad_enabled() and not isinstance(output, Tensor):
            for each in hidden_tensors(registered):
                each.register_hook(state._pre_backward)
        return registered

    return register_all


def hidden_tensors(output: Any) -> list[Tensor]:
    """Return the computed tensors that need a gradient and lie in objects of an output, or in containers unlike lists.

    Leaves, such as a parameter that an object holds on to, are not outputs.
    """
    hidden, plain, seen = dict[int, Tensor](), set[int](), set[int]()
    waiting: deque[tuple[Any, bool]] = deque([(output, False)])
    while waiting and len(seen) < _MOST_VALUES:
        value, is_hidden = waiting.popleft()
        if isinstance(value, Tensor):
            if not is_hidden:
                plain.add(id(value))
            elif value.grad_fn is not None:
                hidden[id(value)] = value
        elif not isinstance(value, _HOLD_NO_OUTPUTS) and id(value) not in seen:
            seen.add(id(value))
            held = _items_of(value)
            are_seen = isinstance(value, _SEEN_BY_TORCH)
            waiting.extend((each, is_hidden or not are_seen) for each in held)
            waiting.extend((each, True) for each in _attributes_of(value))
    return [each for key, each in hidden.items() if key not in plain]  # outputs of transformers are both


def _items_of(value: Any) -> Iterable[Any]:
    """What a container holds."""
    if isinstance(value, Mapping):
        return list(cast("Mapping[Any, Any]", value).values())
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return list(cast("Iterable[Any]", value))
    return ()


def _attributes_of(value: Any) -> Iterable[Any]:
    """The values of an object's attributes, read without code of its class."""
    kind: type[Any] = type(value)
    slots = [each for base in kind.__mro__ for each in vars(base).values() if isinstance(each, MemberDescriptorType)]
    found: list[Any] = []
    for slot in slots:
        try:
            found.append(slot.__get__(value, kind))
        except AttributeError:
            continue  # not set
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return found
    return [*found, *own.values()]
