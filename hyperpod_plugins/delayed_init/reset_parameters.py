"""Initialise a model built under `torch.device("meta")`, one module at a time, with each module's own initialiser.

Without a tape, the constructor's operations are unknown. This relies on two conventions instead: `reset_parameters`
of torch and `_init_weights` of Hugging Face models. They run on full, real tensors that temporarily replace the
sharded ones of a module. It is an error if they leave a tensor unwritten.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hyperpod_plugins.delayed_init.tape import full_name, own_tensors
from hyperpod_plugins.errors import InitializationError, format_list

_UNTOUCHED_BYTE = 0xFF


@runtime_checkable
class _Resettable(Protocol):
    def reset_parameters(self) -> None: ...


@runtime_checkable
class _InitializesWeights(Protocol):
    def _init_weights(self, module: nn.Module) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Initializer:
    """The initialiser of one module's own tensors."""

    name: str
    """Name of the module."""
    module: nn.Module
    """The module."""
    tensor_names: tuple[str, ...]
    """Its own parameters and buffers that need values."""
    call: Callable[[], None]
    """Initialises them in place."""


def find_initializers(model: nn.Module, missing: set[str]) -> list[Initializer]:
    """Find the initialiser of each module that owns a tensor named in `missing`.

    Raises:
        InitializationError: a module has no initialiser.
    """
    found: list[Initializer] = []
    without: list[str] = []
    for name, module in model.named_modules():
        names = tuple(key for key in own_tensors(module) if full_name(name, key) in missing)
        if not names:
            continue
        call = _initializer_of(model, name, module)
        if call is None:
            without.append(f"{name or 'the root'} ({type(module).__name__})")
        else:
            found.append(Initializer(name=name, module=module, tensor_names=names, call=call))
    if without:
        raise InitializationError(
            f"these modules are on the meta device and have no initialiser: {format_list(without)}. Build the model "
            "inside hyperpod_plugins.delayed_init.delayed_init() instead of torch.device('meta'), which needs none, or "
            "give each of them a method reset_parameters()."
        )
    return found


def reset_module(initializer: Initializer, copy: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    """Run one initialiser on full tensors and pass each to `copy(target, full)`.

    Raises:
        InitializationError: the initialiser left a tensor unwritten.
    """
    module = initializer.module
    stores: list[dict[str, Any]] = [module._parameters, module._buffers]  # pyright: ignore[reportPrivateUsage]
    before = [dict(store) for store in stores]
    targets = {key: tensor for store in before for key, tensor in store.items() if key in initializer.tensor_names}
    for store in stores:
        store |= {key: _scratch(targets[key]) for key in store.keys() & targets.keys()}
    full = {key: store[key] for store in stores for key in store.keys() & targets.keys()}
    try:
        with torch.no_grad():
            initializer.call()
    finally:
        for store, saved in zip(stores, before, strict=True):
            store.clear()
            store.update(saved)
    for key in initializer.tensor_names:
        value, target = full[key], targets[key]
        if _is_untouched(value):
            raise InitializationError(
                f"{full_name(initializer.name, key)} is on the meta device, and the initialiser of its module "
                f"({type(module).__name__}) gives it no values. Build the model inside "
                "hyperpod_plugins.delayed_init.delayed_init() instead of torch.device('meta')."
            )
        copy(target, value)


def _initializer_of(model: nn.Module, name: str, module: nn.Module) -> Callable[[], None] | None:
    """The `_init_weights` of the innermost Hugging Face model that contains a module, else its `reset_parameters`."""
    parts = name.split(".") if name else []
    for depth in range(len(parts), -1, -1):
        ancestor = model.get_submodule(".".join(parts[:depth]))
        if isinstance(ancestor, _InitializesWeights):
            return _Bound(ancestor, module)
    return module.reset_parameters if isinstance(module, _Resettable) else None


class _Bound:
    def __init__(self, ancestor: _InitializesWeights, module: nn.Module) -> None:
        self._ancestor = ancestor
        self._module = module

    def __call__(self) -> None:
        self._ancestor._init_weights(self._module)  # pyright: ignore[reportPrivateUsage]


def _scratch(target: torch.Tensor) -> torch.Tensor:
    """Full CPU tensor that stands in for a possibly sharded one, filled with bytes that mark it as unwritten."""
    full = torch.empty(target.shape, dtype=target.dtype, device="cpu")
    full.view(-1).view(torch.uint8).fill_(_UNTOUCHED_BYTE)
    return nn.Parameter(full, requires_grad=False) if isinstance(target, nn.Parameter | DTensor) else full


def _is_untouched(tensor: torch.Tensor) -> bool:
    data = tensor.detach().reshape(-1).view(torch.uint8)
    return data.numel() > 0 and bool((data == _UNTOUCHED_BYTE).all())
