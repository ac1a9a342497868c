"""Which optimizers step element by element: their steps do not communicate, whatever the parallelism."""

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks  # pyright: ignore

_ELEMENTWISE = frozenset(
    {Adadelta, Adagrad, Adam, AdamW, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop, SGD}
)  # with any parallelism: each element of a parameter depends only on the same element of gradient and state
_PACKAGE = __name__.partition(".")[0]
_TORCHS_WRAPPER = Optimizer.profile_hook_step(lambda self: None).__code__  # pyright: ignore
_hooks_of_all: tuple[dict[int, Any], dict[int, Any]] = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step is known not to communicate: it is that of one of torch's elementwise classes.

    A step hook of the program, or a `step` that the program has set on the instance, may do anything.
    """
    if not any(_plain(type(optimizer).step) is _plain(each.step) for each in _ELEMENTWISE):
        return False
    return _is_of_class(optimizer) and not any(map(_is_foreign, _hooks_of(optimizer)))


def _plain(step: Callable[..., Any]) -> Callable[..., Any]:
    """The `step` of a class without the wrapper that torch puts around it when the first instance is created.

    A subclass gets a wrapper too, if the class that defines the step has had no instance before.
    """
    while inspect.isfunction(step) and step.__code__ is _TORCHS_WRAPPER:
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step


def _is_of_class(optimizer: Optimizer) -> bool:
    """Whether an optimizer runs the `step` of its class, possibly wrapped by a scheduler or compiled."""
    step = vars(optimizer).get("step")
    if step is None:
        return True
    of_class = type(optimizer).step
    if is_compiled(step):
        step = inspect.getattr_static(step, "_torchdynamo_orig_callable")
    if inspect.getattr_static(step, "_wrapped_by_lr_sched", False):
        step = step.__wrapped__
    return step is of_class or (isinstance(step, MethodType) and step.__func__ is of_class)


def _hooks_of(optimizer: Optimizer) -> list[Callable[..., Any]]:
    own = vars(optimizer)
    tables = (own["_optimizer_step_pre_hooks"], own["_optimizer_step_post_hooks"], *_hooks_of_all)
    return [hook for table in tables for hook in table.values()]


def _is_foreign(hook: Callable[..., Any]) -> bool:
    """Whether a hook is neither of this package nor of torch (such as the profiler's)."""
    return (hook.__module__ or "").partition(".")[0] not in (_PACKAGE, "torch")


def is_compiled(step: Any) -> bool:
    """Whether a `step` set on the optimizer instance was compiled with `torch.compile`."""
    return inspect.getattr_static(step, "_torchdynamo_orig_callable", None) is not None
