"""Calls of blocks that are recomputed: what surrounds them, and which checkpoint they are in.

[Note: whole models that are compiled] torch recomputes a block by calling it in backward, outside of the graph that
`torch.compile` has made of the whole model, so it would find other tensors than the graph has saved. Blocks that are
compiled one by one (`block.compile()`) are called compiled in both. So a graph of the whole model leaves blocks out,
and they run as they are, compiled by themselves or not.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo  # pyright: ignore[reportPrivateUsage]

log = logging.getLogger(__name__)
_IS_PLAIN = "_hyperpod_call_is_plain"
"""In classes that are derived here: whether their `__call__` adds nothing to that of torch's modules."""
_AROUND = "_hyperpod_around_calls"
_told = set[str]()


def derived_class(kind: type, members: dict[str, Any]) -> type:
    """A class of the same name. Python looks `__call__` up in the class, and copies of an object share it.

    Objects of one class should share the derived one, too: `torch.compile` compiles again for each class.
    """
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "__qualname__": kind.__qualname__, **members})


def surround(
    block: nn.Module, begin: Callable[[nn.Module, Any, Any], None], end: Callable[[nn.Module, Any, Any], None]
) -> None:
    """Run functions around each call of a block, around those of earlier calls of this function, too.

    They run in forward, and in recomputations only if these call the block with its hooks.

    Args:
        block: In place. Its class may have a `__call__` that calls torch's checkpoint function, as layers of older
            versions of transformers do: hooks would run within the checkpoint.
        begin: Takes the block, its arguments and its keyword arguments.
        end: Takes the block, its arguments and its result; None after an exception.
    """
    if _AROUND not in vars(block) and not _has_own_call(block):
        block.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
        block.register_forward_hook(end, always_call=True)
        return
    if _AROUND not in vars(block):
        vars(block)[_AROUND] = []
        block.__class__ = _surrounding_class(type(block))
    vars(block)[_AROUND].append((begin, end))


def leave_out_of_graphs(block: nn.Module) -> None:
    """Have a block run by itself where an outer module is compiled; see the note above."""
    if not any(_IS_PLAIN in vars(kind) for kind in type(block).__mro__):
        block.__class__ = _plain_class(type(block))


@cache
def _plain_class(kind: type[nn.Module]) -> type:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and torch.is_grad_enabled():
            return _run_by_itself(kind.__call__, self, args, kwargs)
        return kind.__call__(self, *args, **kwargs)

    return derived_class(kind, {"__call__": call, _IS_PLAIN: True})


@cache
def _surrounding_class(kind: type[nn.Module]) -> type:
    """Its objects have what surrounds their calls in a list, the innermost first."""

    def surrounded(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        around, output = vars(self)[_AROUND], None
        for begin, _ in reversed(around):
            begin(self, args, kwargs)
        try:
            output = kind.__call__(self, *args, **kwargs)
        finally:
            for _, end in around:
                end(self, args, output)
        return output

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and torch.is_grad_enabled():
            return _run_by_itself(surrounded, self, args, kwargs)
        return surrounded(self, *args, **kwargs)

    return derived_class(kind, {"__call__": call, _IS_PLAIN: False})


@_disable_dynamo
def _run_by_itself(run: Callable[..., Any], block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = type(block).__name__
    if name not in _told and block._compiled_call_impl is None:  # pyright: ignore[reportPrivateUsage]
        _told.add(name)
        log.warning(
            "%s is recomputed in backward, so that a graph of the whole model leaves it out: it runs without "
            "torch.compile. Compile each block instead: block.compile().",
            name,
        )
    return run(block, *args, **kwargs)


def is_in_checkpoint() -> bool:
    """Whether the caller runs directly within torch's checkpoint function that is not reentrant."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore
    return hooks is not None and getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook.")


def _has_own_call(block: nn.Module) -> bool:
    """Whether the class of a block has a `__call__` of its own, besides those that are derived here for graphs."""
    kinds = type(block).__mro__[: type(block).__mro__.index(nn.Module)]
    return any("__call__" in vars(kind) and not vars(kind).get(_IS_PLAIN) for kind in kinds)
