"""The optimizer's arithmetic on local shards, past the dispatch of DTensor.

An optimizer such as AdamW works element by element: on shards that lie alike, the result of an operation is what the
same operation gives on each rank's own part. DTensor has to find that out. For each kind of operation and each shape it
asks once how operands may lie, which takes a millisecond a tensor: a first step with `foreach=True` spent 0.6 s on
76 parameters, and a process that replaces a lost one takes such a first step while all others wait for it. Each
operation costs some 20 microseconds more for as long as the job lives.

What is not element by element, or joins tensors that lie differently, goes to DTensor as before.
"""

# DTensor's local tensor and specification, and an operation's schema, have no public spelling that is as cheap.
# pyright: reportPrivateUsage=false

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from enum import Enum, auto
from functools import cache
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from hyperpod_plugins.errors import ConfigError

_ELEMENTWISE = frozenset(
    {
        "abs", "add", "addcdiv", "addcmul", "clamp", "clamp_max", "clamp_min", "copy", "div", "exp", "fill", "lerp",
        "maximum", "minimum", "mul", "neg", "ones_like", "pow", "reciprocal", "rsqrt", "sign", "sqrt", "sub", "zero",
        "zeros_like",
    }
)  # fmt: skip
_layout_of = attrgetter("mesh", "placements", "tensor_meta.shape")
_FUSED = frozenset({"_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"})


class LocalUpdate(TorchDispatchMode):
    """While it is on, operations on DTensors that work element by element run on their local tensors."""

    @override
    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func` on local tensors if that is the same, else as it is."""
        kwargs = kwargs or {}
        how = _how(func) if DTensor in types else None
        if how is None:
            return _completed(func(*args, **kwargs))
        operands = _Operands()
        local_args = [operands.local(each) for each in args]
        local_kwargs = {name: operands.local(each) for name, each in kwargs.items()}
        if not operands.are_alike:
            return func(*args, **kwargs)
        result = func(*local_args, **local_kwargs)
        if how is _How.IN_PLACE:
            return None if result is None else args[0]
        if isinstance(result, Tensor):
            return _distributed(result, operands.first[0])
        return [_distributed(each, like) for each, like in zip(result, operands.first, strict=True)]


def step_locally(optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
    """`optimizer.step(closure)`; whatever follows the closure runs on local shards where that is the same.

    A step that the program has compiled is left alone: dynamo runs nothing compiled inside a dispatch mode.

    Args:
        optimizer: any; what it does with parameters and its state may be on DTensors.
        closure: computes gradients, and is not affected.
        **kwargs: for `optimizer.step`.
    """
    if _is_compiled(vars(optimizer).get("step")):
        return optimizer.step(closure=closure, **kwargs)
    with ExitStack() as after_closure:

        def compute() -> Any:
            after_closure.close()
            result = closure()
            after_closure.enter_context(LocalUpdate())
            return result

        return optimizer.step(closure=compute, **kwargs)


def refuse_closures(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers that compute gradients several times in a step, such as L-BFGS.

    Raises:
        ConfigError: the step of one can not do without a closure.
    """
    for optimizer in optimizers:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ConfigError(
                f"{type(optimizer).__name__} evaluates its closure several times in each step, and compares norms of "
                "whole gradients, of which a rank has a part. Use an optimizer that steps once on given gradients."
            )


def closure_of(optimizer: Optimizer, result: Any) -> Callable[[], Any]:
    """What an optimizer gets as a closure where the gradients have been computed already.

    Args:
        optimizer: that is about to step.
        result: what the closure returns.

    Raises:
        ConfigError: from the closure, where the optimizer wants gradients for other parameters than it was given.
    """
    first = next((each for group in optimizer.param_groups for each in group["params"]), None)
    memory = first._local_tensor if isinstance(first, DTensor) else first
    version, num_calls = 0 if memory is None else memory._version, 0

    def closure() -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 1 or (memory is not None and memory._version != version):
            raise ConfigError(
                f"{type(optimizer).__name__} computes gradients more than once in a step (it called its closure "
                f"{num_calls} times, or after it had changed parameters), which is not possible with recovery in "
                'place or where non_finite is not "off". Use an optimizer that steps once on given gradients, or '
                'switch both off (enabled=False, non_finite="off").'
            )
        return result

    return closure


def _is_compiled(step: Any) -> bool:
    """Whether an optimizer's own `step`, in place of its class's, came from `torch.compile`."""
    return inspect.getattr_static(step, "_torchdynamo_orig_callable", None) is not None


class _How(Enum):
    """What an operation that works element by element does with its result."""

    IN_PLACE = auto()
    RETURNED = auto()


@cache
def _how(func: OpOverload) -> _How | None:
    name = func._schema.name.removeprefix("aten::")
    if "out" in func._overloadname:
        return None
    if name not in _FUSED and name.removeprefix("_foreach_").removesuffix("_") not in _ELEMENTWISE:
        return None
    return _How.IN_PLACE if func._schema.is_mutable else _How.RETURNED


class _Operands:
    """What one operation is given: local tensors in place of DTensors, as long as these lie alike."""

    def __init__(self) -> None:
        self.first: list[DTensor] = []
        """The first list of DTensors; a DTensor that is in no list is a list of one."""
        self.are_alike = True
        self._layout: list[Any] = []

    def local(self, operand: Any) -> Any:
        if isinstance(operand, list | tuple):
            if any(isinstance(each, Tensor) for each in operand[:1]):
                return self._locals(operand)
            return operand
        return self._locals([operand])[0] if isinstance(operand, Tensor) else operand

    def _locals(self, tensors: Sequence[Any]) -> Sequence[Any]:
        try:
            specs = [tensor._spec for tensor in tensors]
        except AttributeError:  # numbers in tensors, such as counts of steps, lie everywhere
            self.are_alike &= all(type(tensor) is not DTensor and tensor.dim() == 0 for tensor in tensors)
            return tensors
        layout = list(map(_layout_of, specs))
        if not self.first:
            self.first, self._layout = list(tensors), layout
            distinct = {placements for _, placements, _ in layout}
            self.are_alike &= not any(each.is_partial() for placements in distinct for each in placements)
        self.are_alike &= layout == self._layout
        return [tensor._local_tensor for tensor in tensors]


def _completed(result: Any) -> Any:
    """A norm that each rank has of its own part, made whole: torch 2.13 cannot square it in place (Adafactor)."""
    if not isinstance(result, DTensor) or all(
        not each.is_partial() or type(each) is Partial for each in result.placements
    ):
        return result
    return result.redistribute(placements=[Replicate() if each.is_partial() else each for each in result.placements])


def _distributed(local: Tensor, like: DTensor) -> DTensor:
    spec = like._spec
    if local.dtype != like.dtype:
        return DTensor.from_local(
            local, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )
    return DTensor(local, spec, requires_grad=False)
