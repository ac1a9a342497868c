"""Redirect torch's `FullyShardedDataParallel` and `OffloadWrapper` after `init`, however a script imported them.

The classes themselves are changed, not their names in a module, because a script or its imports may already hold them.
Nothing is changed before `init`.

`FullyShardedDataParallel(model, ...)` returns what `wrap` does. If `__new__` returns an object that is not an instance
of the class, Python does not call `__init__`, so the call returns that object. Each call checks whether the translation
is on.

`OffloadWrapper`, which `offload_wrapper` returns, also takes models sharded by FSDP2 and tensor parallelism. With
`sm_activation_offloading`, the inputs of the blocks that the script has wrapped for checkpointing are kept on the host
and prefetched, with the horizon of the configuration (`memory/offload.py`). If the configuration has the blocks
recomputed, that is done where the model is sharded, and the wrapper adds nothing. Otherwise all tensors saved for
backward are copied to the host, and back when backward needs them, as in torch. Parameters stay on the device: FSDP2
frees and gathers them itself. torch's own wrapper cannot save a DTensor.
"""

# pyright: reportAttributeAccessIssue=false

import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, OffloadWrapper
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from hyperpod_plugins.memory.recompute import recomputes_itself
from hyperpod_plugins.parallel import ParallelConfig
from hyperpod_plugins.parallel.hsdp import compute_device, from_local_like, local_part, outermost
from hyperpod_plugins.parallel.parallelize import attach_offload

_wrap: Callable[..., nn.Module] | None = None
_options: Callable[[], ParallelConfig | None] | None = None
_functions: dict[str, Callable[..., Any]] = {}
_is_changed = False
_translates = False
_num_entered = 0
"""Forwards of `OffloadWrapper` that this process is in."""
_Packed = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def set_replacements(
    wrap: Callable[..., nn.Module],
    functions: Mapping[str, Callable[..., Any]],
    options: Callable[[], ParallelConfig | None],
) -> None:
    """Set what is called instead of the class, and of its static methods on models that FSDP2 has sharded.

    Args:
        wrap: instead of the class.
        functions: instead of its static methods, by name.
        options: returns the configuration that counts inside `OffloadWrapper`; None before `init`.
    """
    global _wrap, _options
    _wrap, _options = wrap, options
    _functions.update(functions)


def set_translation(is_on: bool) -> None:
    """Turn the translation on or off. Subclasses of `FullyShardedDataParallel` are not affected."""
    global _translates, _is_changed
    _translates = is_on
    if is_on and not _is_changed:
        _is_changed = True
        FullyShardedDataParallel.__new__ = staticmethod(_make)
        assert _options is not None
        replace_offload(_options)
        for name, function in _functions.items():
            setattr(FullyShardedDataParallel, name, staticmethod(_dispatch(function, name)))


def _make(cls: type, *args: Any, **kwargs: Any) -> Any:
    if _translates and cls is FullyShardedDataParallel:
        assert _wrap is not None
        return _wrap(*args, **kwargs)
    return object.__new__(cls)


def _dispatch(ours: Callable[..., Any], name: str) -> Callable[..., Any]:
    torchs: Callable[..., Any] = getattr(FullyShardedDataParallel, name)

    def choose(*args: Any, **kwargs: Any) -> Any:
        model = args[0] if args else kwargs.get("module", kwargs.get("model"))
        is_ours = isinstance(model, nn.Module) and any(isinstance(part, FSDPModule) for part in model.modules())
        return (ours if _translates and is_ours else torchs)(*args, **kwargs)

    return choose


class KeepOnHost(saved_tensors_hooks):
    """Context that keeps tensors saved for backward on the host."""

    def __init__(self) -> None:
        super().__init__(_to_host, _from_host)


def replace_offload(options: Callable[[], ParallelConfig | None]) -> None:
    """Make `OffloadWrapper` keep activations of a model that FSDP2 has sharded as the module says.

    Args:
        options: returns the configuration that counts inside it; None before `init`.
    """
    torchs = OffloadWrapper.forward

    def forward(self: OffloadWrapper, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(part, FSDPModule) for part in self.modules()):
            return torchs(self, *args, **kwargs)
        model = self._checkpoint_wrapped_module  # pyright: ignore[reportPrivateUsage]
        if "_hyperpod_prefetches" not in vars(self):
            vars(self)["_hyperpod_prefetches"] = _prefetches(model, options())
        with _entered(), nullcontext() if vars(self)["_hyperpod_prefetches"] else KeepOnHost():
            return model(*args, **kwargs)

    OffloadWrapper.forward = forward


@contextmanager
def _entered() -> Generator[None]:
    global _num_entered
    _num_entered += 1
    try:
        yield
    finally:
        _num_entered -= 1


def is_in_offload_wrapper() -> bool:
    """Whether the caller runs in the forward of an `OffloadWrapper` around a model that FSDP2 has sharded."""
    return _num_entered > 0


def _prefetches(model: nn.Module, config: ParallelConfig | None) -> bool:
    """Attach the prefetching offload to the checkpointed blocks of a model, if it is asked for; whether it has one."""
    if config is None or not config.sm_activation_offloading:
        return False
    if config.activation_checkpointing != "none":
        return True  # attached when the model was sharded
    blocks = outermost([part for part in model.modules() if isinstance(part, CheckpointWrapper)])
    if blocks:
        attach_offload(blocks, config, compute_device(next(model.parameters())))
    elif not dist.is_initialized() or dist.get_rank() == 0:
        own = " (leave out its own gradient_checkpointing_enable())" if recomputes_itself(model) else ""
        warnings.warn(
            f"sm_activation_offloading has no effect in offload_wrapper({type(model).__name__}), of which "
            f"checkpoint_wrapper wraps no block{own}. All that backward needs is copied to the host, and back when it "
            "is needed, as torch does. To keep the inputs of blocks alone there, and to fetch them ahead, call "
            "apply_activation_checkpointing(model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=...) first.",
            stacklevel=3,
        )
    return bool(blocks)


def _to_host(tensor: torch.Tensor) -> _Packed:
    """Return a parameter, or a view of one, itself; else its host copy, and a tensor of its device without memory."""
    base = tensor._base if tensor._is_view() else tensor  # pyright: ignore[reportPrivateUsage]
    if isinstance(base, nn.Parameter):
        return tensor
    with torch.no_grad():
        local = local_part(tensor.detach())
        host = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
        host.copy_(local, non_blocking=local.is_cuda)
    return host, torch.empty_like(tensor.detach(), device="meta") if isinstance(tensor, DTensor) else local.new_empty(0)


def _from_host(packed: _Packed) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    host, twin = packed
    if isinstance(twin, DTensor):
        return from_local_like(twin, host.to(twin.device_mesh.device_type, non_blocking=True))
    return host.to(twin.device, non_blocking=True)
