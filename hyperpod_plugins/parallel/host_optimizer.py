"""Optimizer state in host memory: `optimizer_offload`, and what `param_offload` asks of optimizers.

With `param_offload`, FSDP2 keeps parameters and gradients in host memory, so an optimizer finds everything there and
needs no help. With `optimizer_offload`, parameters and gradients stay on the device and only the state of the optimizer
lies in host memory, which is where a step computes:

    pre-hook       torch's step is given another optimizer object of the same class as its `self`
    closure        gradients are computed; they and the parameters are copied to the host (pinned, allocated once)
    torch's step   on plain host tensors, which that object holds in place of the parameters
    post-hook      the updated parameters are copied back, and the optimizer gets the state of the other object

An optimizer itself always holds its parameters: its `state` has them as keys, as always, and DTensors whose local parts
are on the CPU as values. So recovery, snapshots and checkpoints need to know only where to allocate state that does not
exist yet. Host copies of parameters are filled anew in each step: nothing in them has to be kept, sent or saved. After
an exception in a step nothing is copied back. As in any interrupted step, moments may have been updated.

One pair of hooks on the steps of all optimizers does this for each optimizer that holds such parameters, in every loop.

[Note: steps without communication] Only torch's elementwise optimizers are supported. On a CUDA mesh, a step that
communicates would send host tensors through groups that are made for the device, and one that reads whole gradients
would need those of other ranks. The result of an elementwise step does not depend on where it computes: on a CPU it is
bitwise that of the optimizer without the option.
"""

# FSDP2's parameters have no public API.
# pyright: reportPrivateUsage=false

from collections import defaultdict
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.memory.host_pool import allocate_near
from hyperpod_plugins.parallel.elementwise import is_compiled, is_elementwise
from hyperpod_plugins.parallel.hsdp import from_local_like
from hyperpod_plugins.parallel.unit_watch import fsdp_parameters

CPU = torch.device("cpu")
_ALIGNMENT = 64


class HostMemory(Enum):
    """What of a parameter lies in host memory; the values are the names of the options."""

    PARAMETER = "param_offload"
    """The parameter, its gradient and its optimizer state."""
    STATE = "optimizer_offload"
    """Its optimizer state."""


_kept: "WeakKeyDictionary[Any, HostMemory]" = WeakKeyDictionary()  # by FSDP2's record of each parameter: a parameter
# itself must have no weak references, nor keeps its attributes, when a module moves it (`torch.utils.swap_tensors`)
_staged: "WeakKeyDictionary[Any, _Staged]" = WeakKeyDictionary()
_hooks: list[RemovableHandle] = []


def keep_on_host(model: nn.Module, *, optimizer_state: bool = False) -> None:
    """Have optimizers of a sharded model's parameters keep their state in host memory.

    This concerns all parameters that FSDP2 keeps there, also where the program has sharded only a part of them so.

    Args:
        model: sharded by FSDP2.
        optimizer_state: whether this also concerns parameters on the device.
    """
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        _hooks.append(register_optimizer_step_post_hook(_after_step))
    for each in fsdp_parameters(model):
        if each.offload_to_cpu:
            _kept[each] = HostMemory.PARAMETER
        elif optimizer_state:
            _kept[each] = HostMemory.STATE


def ids_with_host_state() -> set[int]:
    """`id` of each parameter whose optimizer state lies in host memory although the parameter does not."""
    return {id(each.sharded_param) for each, what in _kept.items() if what is HostMemory.STATE}


def steps_on_host(optimizer: Optimizer) -> bool:
    """Whether `optimizer_offload` applies to any parameter of an optimizer."""
    return HostMemory.STATE in _options_of(optimizer)


def uses_host_memory(optimizer: Optimizer) -> bool:
    """Whether any parameter of an optimizer, or its state, lies in host memory by one of the options."""
    return bool(_options_of(optimizer))


def check_host_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Reject optimizers that cannot step in host memory; see [Note: steps without communication].

    Raises:
        ConfigError: an optimizer holds parameters in host memory, or state there, and is not one of torch's
            elementwise optimizers, has hooks of the program, is compiled, or is `capturable` or `differentiable`.
    """
    for optimizer in optimizers:
        _check(optimizer, _options_of(optimizer))


def _check(optimizer: Optimizer, options: Iterable[HostMemory]) -> None:
    for what in options:
        reason = _why_not(optimizer)
        if reason:
            raise ConfigError(
                f"{what.value}=True has {type(optimizer).__name__} step in host memory, but {reason}. Use AdamW, Adam, "
                "SGD, Adagrad, RMSprop or another elementwise optimizer of torch, or leave the option out and raise "
                "hybrid_shard_degree, which splits the optimizer's state over more ranks."
            )


def _why_not(optimizer: Optimizer) -> str:
    """Why an optimizer cannot step in host memory; empty if it can."""
    if not is_elementwise(optimizer):
        return "its step, or a hook or wrapper of it, may communicate or read whole gradients"
    if is_compiled(vars(optimizer).get("step")):
        return "its step is compiled for the tensors that it was first run with"
    for option in ("capturable", "differentiable"):
        if any(group.get(option) for group in optimizer.param_groups):
            return f"{option}=True is for steps on the device"
    return ""


def _options_of(optimizer: Optimizer) -> set[HostMemory]:
    if not _kept:
        return set()
    kept = {id(each.sharded_param): what for each, what in _kept.items()}
    found = {kept.get(id(parameter)) for group in optimizer.param_groups for parameter in group["params"]}
    return {what for what in HostMemory if what in found}


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Step pre-hook of all optimizers: has torch's step run on the host once its closure has computed gradients."""
    return _host_step_for(optimizer, args, kwargs, torch.compiler.is_compiling()) if _kept else None


@_disable_dynamo  # if a compiled function calls the step, dynamo compiles the hook, too, and must not compile this
def _host_step_for(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], is_compiling: bool
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    options = _options_of(optimizer)
    _check(optimizer, options)
    if HostMemory.STATE not in options:
        return None
    if is_compiling:
        raise ConfigError(
            f"optimizer_offload=True has {type(optimizer).__name__} step in host memory, but a compiled function calls "
            "its step. Call it outside of what torch.compile compiles, or leave the option out."
        )
    step = HostStep(optimizer, args[1] if len(args) > 1 else kwargs.get("closure"))
    return (step.on_host,), {**kwargs, "closure": step}


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Step post-hook of all optimizers, with the arguments that `_before_step` has returned."""
    step = kwargs.get("closure")
    if isinstance(step, HostStep):
        step.end()


class _Staged:
    """Host copies of a parameter's local part and of its gradient, in pinned memory where there is a GPU."""

    def __init__(self, local: Tensor) -> None:
        """Allocate memory for a parameter with this local part."""
        num_bytes = -(-local.nbytes // _ALIGNMENT) * _ALIGNMENT
        block = allocate_near(local.device, 2 * num_bytes) if num_bytes else torch.empty(0, dtype=torch.uint8)
        self._block = block  # pinned until this object is freed; views do not keep it
        self.parameter, self.gradient = (
            block[start : start + local.nbytes].view(local.dtype).view(local.shape) for start in (0, num_bytes)
        )

    def fits(self, local: Tensor) -> bool:
        """Whether this is memory for a parameter with this local part."""
        return (self.parameter.shape, self.parameter.dtype) == (local.shape, local.dtype)


class HostStep:
    """One step of an optimizer on host copies of its parameters; it is the closure of torch's step."""

    def __init__(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> None:
        """Copy nothing yet.

        Args:
            optimizer: optimizer that is about to step.
            closure: computes gradients; None if they have been computed.
        """
        self._optimizer = optimizer
        self._closure = closure
        self.on_host: Optimizer = object.__new__(type(optimizer))
        """Steps in place of the optimizer: has its attributes, and from `begin` on host copies of its parameters."""
        vars(self.on_host).update(vars(optimizer))
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}
        """Parameter and host copy, by `id` of the parameter."""
        self._given: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        """State of each of these parameters, and its parts in host memory, by `id` of the copy."""

    def __call__(self) -> Any:
        """Compute gradients, then copy them and the parameters to the host."""
        result = None if self._closure is None else self._closure()
        self.begin()
        return result

    @torch.no_grad()
    def begin(self) -> None:
        """Give `on_host` copies of the parameters that have a gradient, and their state; nothing else is changed."""
        owned = {id(each.sharded_param): each for each, what in _kept.items() if what is HostMemory.STATE}
        groups, devices = self._optimizer.param_groups, set[torch.device]()
        for group in groups:
            for parameter in group["params"]:
                if id(parameter) in owned and parameter.grad is not None:
                    self._twins[id(parameter)] = parameter, _stage(owned[id(parameter)], parameter)
                    devices.add(_local(parameter).device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        own = vars(self.on_host)
        own.update(vars(self._optimizer))  # the closure may have changed attributes
        own["param_groups"] = [
            {**group, "params": [self._twins.get(id(each), (each, each))[1] for each in group["params"]]}
            for group in groups
        ]
        own["state"] = self._host_state()

    def _host_state(self) -> defaultdict[Tensor, dict[str, Any]]:
        """The state with the copies as keys; its order stays the same on all replicas of a shard."""
        found: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        for key, values in self._optimizer.state.items():
            if id(key) in self._twins:
                twin = self._twins[id(key)][1]
                given = {name: _host_part(value) for name, value in values.items()}
                self._given[id(twin)] = values, given
                found[twin] = dict(given)
            else:
                found[key] = values
        return found

    @torch.no_grad()
    def end(self) -> None:
        """Copy the parameters back, and give the optimizer what the step has changed in `on_host`."""
        owners = {id(twin): parameter for parameter, twin in self._twins.values()}
        after = [
            (owners[id(key)], self._state_after(owners[id(key)], key, values)) if id(key) in owners else (key, values)
            for key, values in self.on_host.state.items()
        ]
        for parameter, twin in self._twins.values():
            _local(parameter).copy_(twin, non_blocking=True)
            twin.grad = None
        state = self._optimizer.state
        for key, values in after:
            before = state.setdefault(key, values)
            if before is not values:  # stays the same object
                before.clear()
                before.update(values)
        for group, stepped in zip(self._optimizer.param_groups, self.on_host.param_groups, strict=True):
            group.update({name: value for name, value in stepped.items() if name != "params"})
        own = vars(self.on_host).items()
        vars(self._optimizer).update({name: value for name, value in own if name not in ("param_groups", "state")})

    def _state_after(self, parameter: Tensor, twin: Tensor, values: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter after the step; tensors that were there before stay the same objects."""
        before, given = self._given.get(id(twin), ({}, {}))
        after: dict[str, Any] = {}
        for name, value in values.items():
            is_same = name in given and value is given[name] and _is_on_host(before[name])
            after[name] = before[name] if is_same else _as_state(parameter, value)
        return after


def _stage(record: Any, parameter: Tensor) -> Tensor:
    """Begin to copy a parameter and its gradient to the host; returns the copy, a leaf with a `grad`."""
    local, gradient = _local(parameter), parameter.grad
    assert gradient is not None
    staged = _staged.get(record)
    if staged is None or not staged.fits(local):
        staged = _staged[record] = _Staged(local)
    staged.parameter.copy_(local, non_blocking=True)
    part = _local(gradient)
    if part.layout is torch.strided and part.dtype == local.dtype:
        staged.gradient.copy_(part, non_blocking=True)
        staged.parameter.grad = staged.gradient
    else:
        staged.parameter.grad = part.to(CPU, copy=True)
    return staged.parameter


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def _is_on_host(value: Any) -> bool:
    return not isinstance(value, Tensor) or _local(value).device.type == "cpu"


def _host_part(value: Any) -> Any:
    """The local part of a state tensor in host memory; loading a checkpoint may have put it on the device."""
    return _local(value).to(CPU) if isinstance(value, Tensor) else value


def _as_state(parameter: Tensor, value: Any) -> Any:
    """A state value under its parameter: laid out like it if it has its shape, else plain (a step count)."""
    if not isinstance(value, Tensor) or value.dim() == 0 or value.shape != _local(parameter).shape:
        return value
    return from_local_like(parameter, value)
