"""Activation checkpointing by block: what a block computes is dropped, and computed again in its backward.

`full` keeps the inputs of a block only. `selective` also keeps the results of attention and of every second matrix
product, which cost the most to compute again; it drops the rest, which takes most of the memory. This is the policy of
torchtitan's selective checkpointing by operators.

[Note: the same again] A block must compute the same values again. Random numbers are drawn again by torch. Buffers that
a block changes, such as running statistics, have the values for the recomputation that they had in its forward, and get
their present ones back after it: `_Buffers` passes what it keeps through the checkpoint as a keyword argument, which it
takes out again before the block sees it. Caches of keys and values, which Hugging Face models hand to their blocks by
default, are left out: a training step does not use them, and a block would append to them again.

[Note: whole models that are compiled] torch recomputes a block by calling it in backward, outside of the graph that
`torch.compile` has made of the whole model, so it would find other tensors than the graph has saved. Blocks that are
compiled one by one (`block.compile()`) are called compiled in both. So a graph of the whole model leaves blocks out,
and they run as they are, compiled by themselves or not.
"""

import logging
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # pyright: ignore[reportPrivateUsage]
from torch.distributed._composable.contract import _get_registry  # pyright: ignore[reportPrivateUsage]
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]
from torch.utils.checkpoint import (
    _DEFAULT_DETERMINISM_MODE,  # pyright: ignore[reportPrivateUsage]
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    _checkpoint_without_reentrant_generator,  # pyright: ignore
    create_selective_checkpoint_contexts,
)

from hyperpod_plugins.errors import ConfigError

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
_PRODUCTS = ("mm", "addmm", "bmm", "linear", "_scaled_mm")
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math",
)
_MARKS = (
    torch.ops.profiler._record_function_enter_new.default,  # pyright: ignore[reportPrivateUsage]
    torch.ops.profiler._record_function_exit._RecordFunction,  # pyright: ignore[reportPrivateUsage]
)
"""Marks for the profiler, which FSDP2 makes as it casts a block's inputs: outside of the block's forward, but within
its recomputation."""
_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")
_CALL = "_hyperpod_call"
_CHECKPOINT = "_hyperpod_checkpoint"
_BETWEEN = ("torch.autograd", "torch._compile", "torch._dynamo")
_LARGEST_KEPT = 1 << 20  # bytes


class Surroundings(Protocol):
    """What recomputations need besides a block's arguments, random numbers and buffers."""

    @property
    def buffers(self) -> Collection[str]:
        """Last parts of the names of buffers that it takes care of."""
        ...

    def of_call(self, block: nn.Module) -> AbstractContextManager[Any]:
        """Return the context of all recomputations of one call of a block, which begins now."""
        ...


def recompute_blocks(
    blocks: Sequence[nn.Module], kind: Recompute = "full", surroundings: Surroundings | None = None
) -> None:
    """Set blocks up for recomputation, in place. Names of parameters do not change.

    Recomputation draws the same random numbers, so that dropout drops the same elements, and buffers count once.

    Args:
        blocks: Modules that backward computes again one by one, such as the layers of a transformer.
        kind: What is kept; "none" does nothing.
        surroundings: What else recomputations need.

    Raises:
        ConfigError: A block is set up already, here or by torch's composable checkpoint.
    """
    if kind == "none":
        return
    for block in blocks:
        if _CHECKPOINT in vars(block) or "checkpoint" in (_get_registry(block) or ()):
            raise ConfigError(
                f"{type(block).__name__} is set up for recomputation already. Do that once, and leave "
                "activation_checkpointing and activation_offload out if the program does it."
            )
        block.register_forward_pre_hook(_leave_caches_out, with_kwargs=True)
        buffers = _Buffers(() if surroundings is None else surroundings.buffers)
        block.register_forward_pre_hook(buffers.begin, with_kwargs=True)
        around = None if surroundings is None else partial(surroundings.of_call, block)
        own = vars(block)[_CHECKPOINT] = _Checkpoint(is_selective=kind == "selective", around=around)
        block.register_forward_pre_hook(own.begin, with_kwargs=True)
        block.register_forward_hook(own.end, prepend=True, always_call=True)
        block.register_forward_pre_hook(buffers.put, with_kwargs=True)
        block.register_forward_hook(buffers.end, always_call=True)
        leave_out_of_graphs(block)


def set_recomputed(block: nn.Module, is_recomputed: bool) -> None:
    """Say whether the next forward of a block that is set up for recomputation drops what it computes, or keeps it."""
    vars(block)[_CHECKPOINT].is_on = is_recomputed


def recomputes_itself(model: nn.Module) -> bool:
    """Whether a model checkpoints activations by its own means, such as `gradient_checkpointing_enable()`."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def offloads_itself(model: nn.Module) -> bool:
    """Whether what a model's own checkpointing keeps goes to the host by torch's `save_on_cpu` around the checkpoint.

    So do models of transformers after `activation_checkpointing_enable(offload=True)`.
    """
    for module in model.modules():
        function = vars(module).get("_gradient_checkpointing_func")
        while isinstance(function, partial):
            function = function.func
        code = getattr(function, "__code__", None)
        if code is not None and "save_on_cpu" in code.co_names and getattr(module, "gradient_checkpointing", False):
            return True
    return False


def is_in_backward() -> bool:
    """Whether this thread runs a backward, so that a module that is called is being recomputed."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


def _leave_caches_out(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not torch.is_grad_enabled():
        return None
    for name in _CACHES:
        cache = kwargs.get(name)
        if cache is None:
            continue
        length = getattr(cache, "get_seq_length", lambda: 0)()
        if length:
            raise ConfigError(
                f"{type(block).__name__} was given a cache with {length} tokens ({name}) in a training step. A block "
                "that is recomputed cannot use it: leave the cache or activation_checkpointing out."
            )
        kwargs[name] = None
    return args, kwargs


@dataclass(slots=True)
class _Call:
    """One call of a block in forward, and each of its recomputations."""

    before: dict[str, Tensor] = field(default_factory=dict)
    """Values of buffers at its beginning."""
    versions: dict[str, int] = field(default_factory=dict)


class _Buffers:
    """Buffers of one block around its recomputations; see [Note: the same again]."""

    def __init__(self, left: Collection[str] = ()) -> None:
        self._left = left  # last parts of names
        self._changing: dict[bool, set[str]] = {}  # names, in training and in evaluation, as a forward has shown them
        self._present: list[tuple[Tensor, Tensor]] = []
        self._call: _Call | None = None

    def begin(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Attach a `_Call` to the arguments that the checkpoint keeps."""
        names = self._changing.get(block.training)
        if torch.is_grad_enabled() and _CALL not in kwargs and names != set():
            call = _Call()
            for name, buffer in block.named_buffers():
                if (names is None or name in names) and name.rpartition(".")[2] not in self._left:
                    call.versions[name] = buffer._version
                    if buffer.nbytes <= _LARGEST_KEPT:
                        call.before[name] = buffer.detach().clone()
            kwargs[_CALL] = call
        return args, kwargs

    def put(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In a recomputation, give changing buffers the values that they had."""
        call = kwargs.pop(_CALL, None)
        if call is None:
            return args, kwargs
        if is_in_backward():
            buffers = dict(block.named_buffers())
            with torch.no_grad(), _disable_current_modes():  # the checkpoint's own mode counts operations
                for name in self._changing.get(block.training, ()):
                    self._present.append((buffers[name], buffers[name].detach().clone()))
                    buffers[name].copy_(call.before[name])
        else:
            self._call = call
        return args, kwargs

    def end(self, block: nn.Module, *_: Any) -> None:
        """After a recomputation, put the present values back; after the first forward, note which buffers change.

        Raises:
            ConfigError: A large buffer changes.
        """
        with torch.no_grad(), _disable_current_modes():
            while self._present:
                buffer, values = self._present.pop()
                buffer.copy_(values)
        call, self._call = self._call, None
        if call is not None and block.training not in self._changing:
            self._changing[block.training] = self._changed(block, call)

    def _changed(self, block: nn.Module, call: _Call) -> set[str]:
        found = set[str]()
        for name, buffer in block.named_buffers():
            before = call.before.get(name)
            is_same = buffer._version == call.versions.get(name, buffer._version)  # of one that is left, too
            if before is not None:  # BatchNorm updates its statistics without advancing the version
                is_same = torch.equal(buffer, before) or (is_same and not buffer.is_floating_point())
            if is_same:
                continue
            if before is None:
                raise ConfigError(
                    f"the buffer {name} of {type(block).__name__}, {buffer.nbytes} bytes, changes in each forward, and "
                    "would have to be kept for the recomputation. Leave activation_checkpointing out for this model."
                )
            found.add(name)
        return found


class _Checkpoint:
    """Recomputation of one block, by hooks, as by torch's composable checkpoint, which permits one backward only."""

    def __init__(self, *, is_selective: bool, around: Callable[[], AbstractContextManager[Any]] | None = None) -> None:
        self.is_on = True
        """Whether the next forward is recomputed."""
        self._is_selective, self._around = is_selective, around
        self._open: Iterator[None] | None = None

    def begin(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the arguments, and from now on nothing that is saved for backward."""
        if self.is_on:
            self._open = _checkpoint_without_reentrant_generator(
                block, True, self._contexts, _DEFAULT_DETERMINISM_MODE, False, True, *args, **kwargs
            )
            next(self._open)

    def end(self, _: nn.Module, __: tuple[Any, ...], ___: Any) -> None:
        """Save what follows as usual."""
        if self.is_on:
            opened, self._open = self._open, None
            if opened is not None:
                next(opened, None)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        forward, backward = _selective_contexts() if self._is_selective else (nullcontext(), nullcontext())
        return forward, _Recomputation(self, backward, nullcontext() if self._around is None else self._around())


class _Recomputation(AbstractContextManager[None]):
    """Around each recomputation of one call, in which the block runs as it is; a graph may have several backwards."""

    def __init__(
        self, checkpoint: _Checkpoint, inner: AbstractContextManager[Any], around: AbstractContextManager[Any]
    ) -> None:
        self._checkpoint, self._inner, self._around, self._was_on = checkpoint, inner, around, True

    def __enter__(self) -> None:
        self._around.__enter__()  # outside of the inner one, which may be a mode that counts operations
        self._inner.__enter__()
        self._was_on, self._checkpoint.is_on = self._checkpoint.is_on, False

    def __exit__(self, *error: Any) -> None:
        self._checkpoint.is_on = self._was_on
        self._inner.__exit__(*error)
        self._around.__exit__(*error)


def _selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    SAC_IGNORED_OPS.update(_MARKS)
    return create_selective_checkpoint_contexts(_SelectivePolicy())


class _SelectivePolicy:
    """Which results are kept, for one call of a block; forward and recomputation count separately."""

    def __init__(self) -> None:
        self._num_products = {False: 0, True: 0}

    def __call__(self, context: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = getattr(getattr(function, "overloadpacket", None), "__name__", "")
        if name in _ATTENTION and not _draws_random_numbers(function, args, kwargs):
            return CheckpointPolicy.MUST_SAVE
        if name in _PRODUCTS:
            self._num_products[context.is_recompute] += 1
            if self._num_products[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


def _draws_random_numbers(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether attention drops elements: kept, it would draw nothing, and what follows would draw other numbers."""
    for index, argument in enumerate(function._schema.arguments):
        if argument.name == "dropout_p":
            given = args[index] if index < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given)
    return False


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
    """Have a block run by itself in a compiled outer module; see [Note: whole models that are compiled]."""
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


def is_saved_by_checkpoint(block: nn.Module) -> bool:
    """Whether a hook for saved tensors, which is the caller, was called for what a checkpoint function keeps.

    Such a function is the first that has called it, besides those of autograd and those that leave it out of graphs. A
    compiled block that checkpoints itself has the checkpoint in its graph, which saves nothing else.

    Args:
        block: That the tensor is saved in.
    """
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame = frame.f_back
    module = frame.f_globals.get("__name__", "")
    has_in_graph = block.training and bool(getattr(block, "gradient_checkpointing", False))
    return module == "torch.utils.checkpoint" or (has_in_graph and module.startswith("torch._functorch"))


def _has_own_call(block: nn.Module) -> bool:
    """Whether the class of a block has a `__call__` of its own, besides those that are derived here for graphs."""
    kinds = type(block).__mro__[: type(block).__mro__.index(nn.Module)]
    return any("__call__" in vars(kind) and not vars(kind).get(_IS_PLAIN) for kind in kinds)
