"""A copy of everything that optimizers write, for optimizers that step before the commit vote.

An optimizer whose step communicates (Muon and Adafactor on shards, LARS) can be interrupted between two parameters.
So its step is part of the computation before the vote, and everything can be restored until the vote completes.

    elementwise optimizers     compute -> vote -> step              nothing is copied; the step cannot be interrupted
    all others                 copy -> compute, step -> vote        after a fault anywhere, the copy is restored

[Note: why the vote comes after the step] A vote that completes on any rank then proves that every rank has completed
its writes. A rank that has voted and does not know the result keeps its writes if another rank has committed the
step, and restores the copy if none has. No rank ever has to repeat part of a collective.

`is_elementwise` tells the two kinds apart, `OptimizerCopy` is the copy, and `FreshGradients` rejects gradients that a
replacement would not have.
"""

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks  # pyright: ignore
from torch.utils._pytree import tree_map_only
from torch.utils.weak import TensorWeakRef

from hyperpod_plugins.errors import ConfigError

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


def _plain(step: "Callable[..., Any]") -> "Callable[..., Any]":
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
    compiled = inspect.getattr_static(step, "_torchdynamo_orig_callable", None)
    if compiled is not None:
        step = compiled
    if inspect.getattr_static(step, "_wrapped_by_lr_sched", False):
        step = step.__wrapped__
    return step is of_class or (isinstance(step, MethodType) and step.__func__ is of_class)


def _hooks_of(optimizer: Optimizer) -> "list[Callable[..., Any]]":
    own = vars(optimizer)
    tables = (own["_optimizer_step_pre_hooks"], own["_optimizer_step_post_hooks"], *_hooks_of_all)
    return [hook for table in tables for hook in table.values()]


def _is_foreign(hook: "Callable[..., Any]") -> bool:
    """Whether a hook is neither of this package nor of torch (such as the profiler's)."""
    return hook.__module__.partition(".")[0] not in (_PACKAGE, "torch")


def parameters_of(optimizers: Iterable[Optimizer]) -> dict[int, Tensor]:
    """The parameters of optimizers by `id`, without duplicates."""
    return {id(each): each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter. For a DTensor always the same object, whose version counts writes."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()  # pyright: ignore[reportPrivateUsage]


class HasState(Protocol):
    """An object that a step changes beside tensors, such as a scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """The state of the object."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Load a `state_dict`."""
        ...


class OptimizerCopy:
    """A copy of optimizers, with their parameters and state, as of the beginning of a step. Its memory is reused.

    Args:
        optimizers: the optimizers to copy.
        others: other objects that a step changes; restored with the rest.
    """

    def __init__(self, optimizers: Sequence[Optimizer], others: Iterable[HasState] = ()) -> None:
        self._optimizers = list(optimizers)
        self._others = list(others)
        self._tensors: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._states: list[dict[Tensor, dict[str, Any]]] = []
        self._flags: list[tuple[Tensor, bool]] = []
        self._beside: tuple[list[_Groups], list[dict[str, Any]]] = ([], [])

    def save(self) -> None:
        """Copy the present state."""
        parameters = list(parameters_of(self._optimizers).values())
        self._flags = [(parameter, parameter.requires_grad) for parameter in parameters]
        self._states = [{p: _own(state) for p, state in each.state.items()} for each in self._optimizers]
        tensors: list[Tensor] = [*parameters]
        for states in self._states:
            tensors += [value for state in states.values() for value in state.values() if isinstance(value, Tensor)]
        local = list(map(local_tensor, tensors))
        if len(tensors) != len(self._tensors) or any(a is not b for a, b in zip(tensors, self._tensors, strict=True)):
            self._tensors, self._copies = tensors, [torch.empty_like(each) for each in local]
        with torch.no_grad():
            _copy(local, self._copies)
        self._beside = self._take_beside()

    def restore(self) -> None:
        """Restore everything as of `save`. Tensors keep their identity."""
        with torch.no_grad():
            _copy(self._copies, list(map(local_tensor, self._tensors)))
        for optimizer, states in zip(self._optimizers, self._states, strict=True):
            optimizer.state.clear()
            optimizer.state.update({parameter: _own(state) for parameter, state in states.items()})
        for parameter, requires_grad in self._flags:
            parameter.requires_grad_(requires_grad)
        self._give_beside(self._beside)

    @contextmanager
    def as_it_began(self) -> Generator[None]:
        """Context in which everything except the tensors of parameters and state is as of `save`."""
        present = self._take_beside()
        self._give_beside(self._beside)
        try:
            yield
        finally:
            self._give_beside(present)

    def _take_beside(self) -> "tuple[list[_Groups], list[dict[str, Any]]]":
        groups = [[_own(group) for group in optimizer.param_groups] for optimizer in self._optimizers]
        for each in groups:
            for group in each:
                group |= {"params": list(group["params"])}
                group |= {key: value.clone() for key, value in group.items() if isinstance(value, Tensor)}
        return groups, [copy.deepcopy(each.state_dict()) for each in self._others]

    def _give_beside(self, taken: "tuple[list[_Groups], list[dict[str, Any]]]") -> None:
        groups, states = taken
        for optimizer, saved in zip(self._optimizers, groups, strict=True):
            del optimizer.param_groups[len(saved) :]
            for group, values in zip(optimizer.param_groups, saved, strict=True):
                for key in group.keys() - values.keys():
                    del group[key]
                for key, value in values.items():
                    present = group.get(key)
                    if isinstance(present, Tensor) and isinstance(value, Tensor):
                        present.copy_(value)  # a compiled step refers to this tensor
                    else:
                        group[key] = list(value) if key == "params" else value
        for each, state in zip(self._others, states, strict=True):
            each.load_state_dict(copy.deepcopy(state))


class FreshGradients:
    """Checks that a step uses no gradients of the step before, which a replacement process does not have.

    Args:
        optimizers: the optimizers that the program steps manually.
        unit: name of one step in the program, for error messages.
        otherwise: an alternative to zeroing gradients in each step, for error messages.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        *,
        unit: str = "training_step",
        otherwise: str = "; or use CheckpointlessRecovery(enabled=False)",
    ) -> None:
        self._optimizers = list(optimizers)
        self._unit, self._otherwise = unit, otherwise
        self._old: dict[Tensor, TensorWeakRef] = {}
        self._hooks = [optimizer.register_step_pre_hook(self._before_step) for optimizer in optimizers]

    def close(self) -> None:
        """Stop checking, and remove the hooks."""
        self._old = {}
        for hook in self._hooks:
            hook.remove()

    def begin(self) -> None:
        """Begin a step, which must not use the present gradients."""
        owned = parameters_of(self._optimizers).values()
        self._old = {each: TensorWeakRef(each.grad) for each in owned if each.grad is not None}

    def put_back(self) -> None:
        """Begin the step again after its gradients were dropped; the gradients of `begin` must still not be used."""
        for parameter in self._old:
            parameter.grad = torch.zeros_like(parameter)
            self._old[parameter] = TensorWeakRef(parameter.grad)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            if any(each.grad is not None and self._is_old(each) for each in group["params"]):
                raise ConfigError(
                    f"{type(optimizer).__name__} would step on gradients of an earlier {self._unit}, which a process "
                    "that replaces a lost one does not have. Call optimizer.zero_grad() before backward in each "
                    f"{self._unit} (with set_to_none=True, its default), and accumulate within one "
                    f"{self._unit}{self._otherwise}."
                )

    def _is_old(self, parameter: Tensor) -> bool:
        old = self._old.get(parameter)
        return old is not None and old() is parameter.grad


_Groups = list[dict[str, Any]]


def _own(values: dict[str, Any]) -> dict[str, Any]:
    """A shallow copy of a dict: its tensors stay the same objects; nested containers and their tensors are copied."""
    return {
        key: value if isinstance(value, Tensor) else tree_map_only(Tensor, lambda each: each.detach().clone(), value)
        for key, value in values.items()
        if key != "params"
    } | ({"params": values["params"]} if "params" in values else {})


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy between tensors of equal shapes; those of one device and dtype in few kernels."""
    alike: defaultdict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]]
    alike = defaultdict(lambda: ([], []))
    for source, target in zip(sources, targets, strict=True):
        into, out_of = alike[source.device, source.dtype]
        into.append(target)
        out_of.append(source)
    for into, out_of in alike.values():
        torch._foreach_copy_(into, out_of)  # pyright: ignore
