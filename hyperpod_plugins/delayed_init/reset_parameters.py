"""Initialise a model built under `torch.device("meta")`, one module at a time, with each module's own initialiser.

Without a tape, the constructor's operations are unknown. This relies on two conventions instead: `reset_parameters`
of torch and `_init_weights` of Hugging Face models. They run on full, real tensors that temporarily replace the
sharded ones of a module. It is an error if they leave a tensor unwritten.

[Note: existing values]
An initialiser also writes tensors that have values already, such as the weight of a layer whose bias alone is missing.
It gets copies of them, or, as values are not gathered, unwritten memory of the full shape if they are sharded. So it
draws the same random numbers with and without sharding. Meanwhile, tensors of submodules, which get values of their
own, are on the meta device: to write them has no effect and draws nothing, and to read them is an error.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hyperpod_plugins.delayed_init.tape import full_name, own_tensors
from hyperpod_plugins.errors import InitializationError, format_list

_UNTOUCHED_BYTE = 0xFF
_USE_DELAYED_INIT = (
    "Build the model inside hyperpod_plugins.delayed_init.delayed_init() instead of torch.device('meta')."
)


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
    """Run one initialiser on full tensors and pass each that needs values to `copy(target, full)`.

    All other tensors of the module and its submodules keep their values; see [Note: existing values].

    Raises:
        InitializationError: the initialiser left a tensor unwritten, or needs values that it cannot read.
    """
    module, missing = initializer.module, initializer.tensor_names
    targets = own_tensors(module)
    full = {key: _scratch(each) if key in missing else _copy_of(each) for key, each in targets.items()}
    try:
        with _replaced(module, full), torch.no_grad(), _RefuseReads():
            initializer.call()
    except RuntimeError as error:
        raise InitializationError(
            f"the initialiser of {initializer.name or 'the root'} ({type(module).__name__}) failed: {error} It cannot "
            f"read tensors of submodules, which get their values later. {_USE_DELAYED_INIT}"
        ) from error
    sharded = [key for key in targets if key not in missing and isinstance(targets[key], DTensor)]
    for key in missing:
        target = f"{full_name(initializer.name, key)} is on the meta device, and the initialiser of its module"
        if _is_untouched(full[key]):
            raise InitializationError(f"{target} ({type(module).__name__}) gives it no values. {_USE_DELAYED_INIT}")
        if sharded and bool(full[key].isnan().any()):
            raise InitializationError(
                f"{target} ({type(module).__name__}) computes it from {format_list(sharded)}, of which each rank has a "
                f"part only. {_USE_DELAYED_INIT}"
            )
        copy(targets[key], full[key])


@contextmanager
def _replaced(module: nn.Module, full: dict[str, torch.Tensor]) -> Generator[None]:
    """Replace the own tensors of a module by `full`, and those of its submodules by some on the meta device."""
    stores: list[dict[str, Any]] = [
        store
        for part in module.modules()
        for store in (part._parameters, part._buffers)  # pyright: ignore[reportPrivateUsage]
    ]
    before = [dict(store) for store in stores]
    try:
        for index, store in enumerate(stores):
            is_own = index < 2  # `modules()` begins with the module itself
            for key, tensor in before[index].items():
                if tensor is not None:
                    store[key] = full[key] if is_own else _without_memory(tensor)
        yield
    finally:
        for store, saved in zip(stores, before, strict=True):
            store.clear()
            store.update(saved)


class _RefuseReads(TorchDispatchMode):
    """Refuses to compute real tensors from tensors on the meta device; some ops would do nothing, without an error."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given, others = (
            {each.is_meta for each in tree_leaves(part) if isinstance(each, torch.Tensor)}
            for part in (args[:1], (args[1:], kwargs))
        )
        if False in given and True in others:
            raise RuntimeError(f"{func} reads a tensor that has no values yet.")
        return func(*args, **(kwargs or {}))


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
    return _like(target, full)


def _copy_of(target: torch.Tensor) -> torch.Tensor:
    """Full CPU tensor with the same values; a sharded tensor would have to be gathered, so its values are missing."""
    return _scratch(target) if isinstance(target, DTensor) else _like(target, target.detach().to("cpu", copy=True))


def _without_memory(target: torch.Tensor) -> torch.Tensor:
    return _like(target, torch.empty(target.shape, dtype=target.dtype, device="meta"))


def _like(target: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    return nn.Parameter(full, requires_grad=False) if isinstance(target, nn.Parameter | DTensor) else full


def _is_untouched(tensor: torch.Tensor) -> bool:
    data = tensor.detach().reshape(-1).view(torch.uint8)
    return data.numel() > 0 and bool((data == _UNTOUCHED_BYTE).all())
