"""Initialise a model built under `torch.device("meta")`, one module at a time, with each module's own initialiser.

Without a tape, the constructor's operations are unknown. This relies on two conventions instead: `reset_parameters`
of torch and `_init_weights` of Hugging Face models. They run on full, real tensors that temporarily replace the
sharded ones of a module. It is an error if they leave a tensor unwritten.

[Note: existing values]
An initialiser also writes tensors that have values already, such as the weight of a layer whose bias alone is missing.
It gets copies of them, or, as values are not gathered, unwritten memory of the full shape if they are sharded. So it
draws the same random numbers with and without sharding.

[Note: writes to submodules]
In an eager build, a module initialises its submodules after they have initialised themselves. So initialisers run
children first, and also those of modules that own no tensors. During the first call, all tensors of submodules are on
the meta device: to write them has no effect and draws nothing, and to read them is an error. If the call wrote some
that need values, or asked for their device, it is repeated from the same random state with memory for these only,
copies or unwritten memory as above, and what it wrote is kept.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hyperpod_plugins.delayed_init.tape import full_name, own_tensors
from hyperpod_plugins.errors import InitializationError, format_list

_UNTOUCHED_BYTE = 0xFF
_DEVICE_QUERIES = [getattr(torch.Tensor, name).__get__ for name in ("device", "is_meta", "is_cpu")]
_USE_DELAYED_INIT = (
    "Build the model inside hyperpod_plugins.delayed_init.delayed_init() instead of torch.device('meta')."
)


@runtime_checkable
class _Resettable(Protocol):
    def reset_parameters(self) -> None: ...


@runtime_checkable
class _InitializesWeights(Protocol):
    def _init_weights(self, module: nn.Module) -> None: ...


_Slot: TypeAlias = tuple[nn.Module, str]
"""A module and the name of a parameter or buffer that it owns directly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Initializer:
    """The initialiser of one module's own tensors and possibly of those of its submodules."""

    label: str
    """Name and type of the module, for messages."""
    module: nn.Module
    """The module."""
    missing: dict[_Slot, str]
    """Its own tensors that need values, and their full names."""
    missing_inside: dict[_Slot, str]
    """The same of its submodules, without those tied to its own."""
    call: Callable[[], None]
    """Initialises them in place."""


def find_initializers(model: nn.Module, missing: set[str]) -> list[Initializer]:
    """Find the initialisers of the modules that contain a tensor named in `missing`, children first.

    Raises:
        InitializationError: a module that owns such a tensor has no initialiser.
    """
    missing_of: dict[nn.Module, dict[_Slot, str]] = {}
    for name, module in model.named_modules():
        names = {(module, key): full_name(name, key) for key in own_tensors(module)}
        missing_of[module] = {slot: name for slot, name in names.items() if name in missing}
    found: list[Initializer] = []
    without: list[str] = []
    for name, module in _children_first(model, "", set()):
        own = {id(tensor) for tensor in own_tensors(module).values()}
        inside = {
            slot: name for part in module.modules() if part is not module for slot, name in missing_of[part].items()
        }
        inside = {slot: name for slot, name in inside.items() if id(_tensor_of(slot)) not in own}
        if not missing_of[module] and not inside:
            continue
        label = f"{name or 'the root'} ({type(module).__name__})"
        call = _initializer_of(model, name, module)
        if call is not None:
            found.append(
                Initializer(label=label, module=module, missing=missing_of[module], missing_inside=inside, call=call)
            )
        elif missing_of[module]:
            without.append(label)
    if without:
        raise InitializationError(
            f"these modules are on the meta device and have no initialiser: {format_list(without)}. Build the model "
            "inside hyperpod_plugins.delayed_init.delayed_init() instead of torch.device('meta'), which needs none, or "
            "give each of them a method reset_parameters()."
        )
    return found


def reset_module(initializer: Initializer, copy: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    """Run one initialiser on full tensors and pass each that needs values to `copy(target, full)`.

    All other tensors of the module and its submodules keep their values; see [Note: existing values] and
    [Note: writes to submodules].

    Raises:
        InitializationError: the initialiser left a tensor unwritten, or needs values that it cannot read.
    """
    full, written = _run(initializer)
    own = own_tensors(initializer.module)
    sharded = [
        key for key in own if isinstance(own[key], DTensor) and (initializer.module, key) not in initializer.missing
    ]
    sharded += [initializer.missing_inside[slot] for slot in written if isinstance(_tensor_of(slot), DTensor)]
    for slot, name in [*initializer.missing.items(), *((slot, initializer.missing_inside[slot]) for slot in written)]:
        target = f"{name} is on the meta device, and the initialiser of {initializer.label}"
        if _is_untouched(full[slot]) and slot in initializer.missing:
            raise InitializationError(f"{target} gives it no values. {_USE_DELAYED_INIT}")
        if sharded and bool(full[slot].isnan().any()):
            raise InitializationError(
                f"{target} computes it from {format_list(sharded)}, of which each rank has a part only. "
                f"{_USE_DELAYED_INIT}"
            )
        copy(_tensor_of(slot), full[slot])


def _run(initializer: Initializer) -> tuple[dict[_Slot, torch.Tensor], list[_Slot]]:
    """The tensors that one initialiser was run on, and which of submodules it wrote; see [Note: writes to submodules].

    The initialiser is called again until all tensors of submodules that it wrote had memory.
    """
    with_memory: set[_Slot] = set()
    ever_written: set[_Slot] = set()
    while True:
        full = _stand_ins(initializer, with_memory)
        inside = {slot: full[slot].untyped_storage() for slot in initializer.missing_inside}
        watch, queries = _WatchWrites(), _WatchDeviceQueries()
        try:
            with _replaced(full), torch.no_grad(), watch, queries:
                initializer.call()
                after = {slot: _tensor_of(slot) for slot in inside}
        except (RuntimeError, TypeError) as error:
            raise InitializationError(
                f"the initialiser of {initializer.label} failed: {error} It cannot read tensors of submodules. "
                f"{_USE_DELAYED_INIT}"
            ) from error
        replaced = [
            initializer.missing_inside[slot]
            for slot, storage in inside.items()
            if after[slot] is not full[slot] or _key(after[slot].untyped_storage()) != _key(storage)
        ]
        written = [slot for slot, storage in inside.items() if _key(storage) in watch.written]
        touched = {slot for slot, storage in inside.items() if _key(storage) in watch.written | queries.asked}
        ever_written |= set(written)
        if replaced:
            raise InitializationError(
                f"{format_list(replaced)} is on the meta device, and the initialiser of {initializer.label} assigns "
                f"another tensor instead of writing it in place. {_USE_DELAYED_INIT}"
            )
        if touched <= with_memory:
            break
        with_memory |= touched
        for generator, state in watch.states.items():
            generator.set_state(state)
    skipped = [name for slot, name in initializer.missing_inside.items() if slot in ever_written - set(written)]
    if skipped:
        raise InitializationError(
            f"{format_list(skipped)} is on the meta device, and the initialiser of {initializer.label} writes it when "
            f"called once, but not when called again. {_USE_DELAYED_INIT}"
        )
    return full, written


def _children_first(module: nn.Module, name: str, seen: set[nn.Module]) -> Generator[tuple[str, nn.Module]]:
    """`named_modules()`, but each module after its submodules."""
    seen.add(module)
    for key, child in module.named_children():
        if child not in seen:
            yield from _children_first(child, full_name(name, key), seen)
    yield name, module


def _stand_ins(initializer: Initializer, with_memory: set[_Slot]) -> dict[_Slot, torch.Tensor]:
    """Tensors to run an initialiser on instead of those of a module and its submodules. Ties stay."""
    by_target: dict[int, torch.Tensor] = {}
    full: dict[_Slot, torch.Tensor] = {}
    for part in initializer.module.modules():  # begins with the module itself
        for key, target in own_tensors(part).items():
            slot = (part, key)
            if id(target) not in by_target:
                if slot in initializer.missing:
                    by_target[id(target)] = _scratch(target)
                elif part is initializer.module or slot in with_memory:
                    by_target[id(target)] = _copy_of(target)
                else:
                    by_target[id(target)] = _without_memory(target)
            full[slot] = by_target[id(target)]
    return full


@contextmanager
def _replaced(full: dict[_Slot, torch.Tensor]) -> Generator[None]:
    """Replace parameters and buffers of modules by others."""
    parts = dict.fromkeys(part for part, _ in full)
    stores: list[dict[str, Any]] = [
        store
        for part in parts
        for store in (part._parameters, part._buffers)  # pyright: ignore[reportPrivateUsage]
    ]
    before = [dict(store) for store in stores]
    try:
        for (part, key), tensor in full.items():
            _store_of((part, key))[key] = tensor
        yield
    finally:
        for store, saved in zip(stores, before, strict=True):
            store.clear()
            store.update(saved)


class _WatchDeviceQueries(TorchFunctionMode):
    """Collects the storages of tensors that were asked for their device; `torch.nn.init` then skips meta tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _DEVICE_QUERIES:
            self.asked.add(_key(args[0].untyped_storage()))
        return func(*args, **(kwargs or {}))


class _WatchWrites(TorchDispatchMode):
    """Collects the storages that are written, and the first states of the random generators.

    It refuses to compute real tensors from tensors on the meta device; some ops would do nothing, without an error.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()
        self.states = {torch.default_generator: torch.default_generator.get_state()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]  # its own queries do not count
            given, others = (
                {each.is_meta for each in tree_leaves(part) if isinstance(each, torch.Tensor)}
                for part in (args[:1], (args[1:], kwargs))
            )
            if False in given and True in others:
                raise RuntimeError(f"{func} reads a tensor that has no values yet.")
            generator = kwargs.get("generator")
            if generator is not None and generator not in self.states:
                self.states[generator] = generator.get_state()
            for index, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[index] if index < len(args) else kwargs.get(argument.name)
                    self.written |= {
                        _key(each.untyped_storage()) for each in tree_leaves(value) if isinstance(each, torch.Tensor)
                    }
        return func(*args, **kwargs)


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


def _store_of(slot: _Slot) -> dict[str, Any]:
    part, key = slot
    stores: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)  # pyright: ignore[reportPrivateUsage]
    return next((store for store in stores if key in store), {})


def _tensor_of(slot: _Slot) -> Any:
    return _store_of(slot).get(slot[1])


def _key(storage: torch.UntypedStorage) -> int:
    return storage._cdata  # pyright: ignore[reportPrivateUsage]


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
