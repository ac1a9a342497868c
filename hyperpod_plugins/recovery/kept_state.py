"""A copy of all that optimizers write, for steps that write before their vote.

An optimizer whose step communicates (Muon and Adafactor on shards, LARS) can be interrupted between two parameters. So
its step belongs to what is computed, before the vote: until the vote completes, everything can be put back.

    elementwise optimizers     compute -> vote -> step              nothing is copied; the step can not be interrupted
    all others                 copy -> compute, step -> vote        a fault anywhere puts the copy back

[Note: why the vote comes after the step] A vote that completes on any rank then proves that every rank has written all
that the step writes. A rank that has voted and does not know the result keeps what it has written if another rank
counts the step, and takes the copy back if none does; nobody ever has to repeat a half of a collective.
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
)  # whatever parallelism: each element of a parameter depends on that element of gradient and state alone


_PACKAGE = __name__.partition(".")[0]
_TORCHS_WRAPPER = Optimizer.profile_hook_step(lambda self: None).__code__  # pyright: ignore
_hooks_of_all: tuple[dict[int, Any], dict[int, Any]] = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether a step of an optimizer is known not to communicate: it runs the step of one of torch's own classes.

    A hook of the program around the step, and a `step` that the program has put into the optimizer, may do anything.
    """
    if not any(_plain(type(optimizer).step) is _plain(each.step) for each in _ELEMENTWISE):
        return False
    return _is_of_class(optimizer) and not any(map(_is_foreign, _hooks_of(optimizer)))


def _plain(step: "Callable[..., Any]") -> "Callable[..., Any]":
    """The step of a class without the wrapper that torch puts around it where the first of its instances is made.

    It puts one into a subclass, too, if no instance of the class with the step has been made before.
    """
    while inspect.isfunction(step) and step.__code__ is _TORCHS_WRAPPER:
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step


def _is_of_class(optimizer: Optimizer) -> bool:
    """Whether a step is the class's, perhaps within the wrapper of a scheduler, or compiled."""
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
    """Whether a hook is neither this package's nor torch's own, such as the profiler's."""
    return hook.__module__.partition(".")[0] not in (_PACKAGE, "torch")


def owned_by(optimizers: Iterable[Optimizer]) -> dict[int, Tensor]:
    """The parameters of optimizers by their identities, each once."""
    return {id(each): each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}


def memory_of(tensor: Tensor) -> Tensor:
    """The tensor that has what this rank holds of a parameter, the same object each time: its version counts writes."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()  # pyright: ignore[reportPrivateUsage]


class Stateful(Protocol):
    """What keeps something of a step beside tensors, such as a scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """What it keeps."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Inverse of `state_dict`."""
        ...


class KeptState:
    """The parameters of optimizers, and all that these hold, as they were when a step began; its memory is used again.

    Args:
        optimizers: whose.
        others: what else a step changes; put back with the rest.
    """

    def __init__(self, optimizers: Sequence[Optimizer], others: Iterable[Stateful] = ()) -> None:
        self._optimizers = list(optimizers)
        self._others = list(others)
        self._tensors: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._states: list[dict[Tensor, dict[str, Any]]] = []
        self._flags: list[tuple[Tensor, bool]] = []
        self._beside: tuple[list[_Groups], list[dict[str, Any]]] = ([], [])

    def keep(self) -> None:
        """Copy everything now."""
        parameters = list(owned_by(self._optimizers).values())
        self._flags = [(parameter, parameter.requires_grad) for parameter in parameters]
        self._states = [{p: _own(state) for p, state in each.state.items()} for each in self._optimizers]
        tensors: list[Tensor] = [*parameters]
        for states in self._states:
            tensors += [value for state in states.values() for value in state.values() if isinstance(value, Tensor)]
        local = list(map(memory_of, tensors))
        if len(tensors) != len(self._tensors) or any(a is not b for a, b in zip(tensors, self._tensors, strict=True)):
            self._tensors, self._copies = tensors, [torch.empty_like(each) for each in local]
        with torch.no_grad():
            _copy(local, self._copies)
        self._beside = self._take_beside()

    def put_back(self) -> None:
        """Let everything be as `keep` has found it. Tensors keep their identity."""
        with torch.no_grad():
            _copy(self._copies, list(map(memory_of, self._tensors)))
        for optimizer, states in zip(self._optimizers, self._states, strict=True):
            optimizer.state.clear()
            optimizer.state.update({parameter: _own(state) for parameter, state in states.items()})
        for parameter, requires_grad in self._flags:
            parameter.requires_grad_(requires_grad)
        self._give_beside(self._beside)

    @contextmanager
    def as_it_began(self) -> Generator[None]:
        """Let all but tensors of parameters and state be as `keep` has found it, inside."""
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
                        present.copy_(value)  # a compiled step holds on to this tensor
                    else:
                        group[key] = list(value) if key == "params" else value
        for each, state in zip(self._others, states, strict=True):
            each.load_state_dict(copy.deepcopy(state))


class FreshGradients:
    """Sees to it that a step uses no gradients of the step before, which a process that replaces another has not.

    Args:
        optimizers: that the program steps by hand.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._old: dict[Tensor, TensorWeakRef] = {}
        self._hooks = [optimizer.register_step_pre_hook(self._before_step) for optimizer in optimizers]

    def close(self) -> None:
        """Look no more."""
        self._old = {}
        for hook in self._hooks:
            hook.remove()

    def begin(self) -> None:
        """A step begins: what gradients there are must not be used."""
        owned = owned_by(self._optimizers).values()
        self._old = {each: TensorWeakRef(each.grad) for each in owned if each.grad is not None}

    def put_back(self) -> None:
        """The step begins again, and gradients have been dropped: those that were there must still not be used."""
        for parameter in self._old:
            parameter.grad = torch.zeros_like(parameter)
            self._old[parameter] = TensorWeakRef(parameter.grad)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            if any(each.grad is not None and self._is_old(each) for each in group["params"]):
                raise ConfigError(
                    f"{type(optimizer).__name__} was to step on gradients that a training_step before this one had "
                    "left; a process that replaces a lost one has not got them. Call optimizer.zero_grad() before "
                    "backward in each training_step (with set_to_none=True, its default), and accumulate within one "
                    "training_step; or use CheckpointlessRecovery(enabled=False)."
                )

    def _is_old(self, parameter: Tensor) -> bool:
        old = self._old.get(parameter)
        return old is not None and old() is parameter.grad


_Groups = list[dict[str, Any]]


def _own(values: dict[str, Any]) -> dict[str, Any]:
    """A dict whose tensors are the same objects, and whose containers are copies with copies of their tensors."""
    return {
        key: value if isinstance(value, Tensor) else tree_map_only(Tensor, lambda each: each.detach().clone(), value)
        for key, value in values.items()
        if key != "params"
    } | ({"params": values["params"]} if "params" in values else {})


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy tensors of equal shapes; those of one device and type in few kernels."""
    alike: defaultdict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]]
    alike = defaultdict(lambda: ([], []))
    for source, target in zip(sources, targets, strict=True):
        into, out_of = alike[source.device, source.dtype]
        into.append(target)
        out_of.append(source)
    for into, out_of in alike.values():
        torch._foreach_copy_(into, out_of)  # pyright: ignore
