"""Redirect `FullyShardedDataParallel(model, ...)` to `wrap` after `init`, however a script imported the class.

The class itself is changed, not its name in a module, because a script or its imports may already hold the class. If
`__new__` returns an object that is not an instance of the class, Python does not call `__init__`, so the call returns
that object. Nothing is changed before `init`; afterwards each call checks whether the translation is on.
"""

# pyright: reportAttributeAccessIssue=false

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from hyperpod_plugins.parallel import ParallelConfig
from hyperpod_plugins.smp.offload import replace_offload

_wrap: Callable[..., nn.Module] | None = None
_options: Callable[[], ParallelConfig | None] | None = None
_functions: dict[str, Callable[..., Any]] = {}
_is_changed = False
_translates = False


def set_replacements(
    wrap: Callable[..., nn.Module],
    functions: Mapping[str, Callable[..., Any]],
    options: Callable[[], ParallelConfig | None],
) -> None:
    """Set what is called instead of the class, and of its static methods on models that FSDP2 has sharded.

    Args:
        wrap: instead of the class.
        functions: instead of its static methods, by name.
        options: returns the configuration of the job; None before `init`.
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
