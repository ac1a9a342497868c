"""Optimizer state in host memory: `optimizer_offload`, and what `param_offload` asks of optimizers.

With `param_offload`, FSDP2 keeps parameters and gradients in host memory, so an optimizer finds everything there and
needs no help. With `optimizer_offload`, parameters and gradients stay on the device and only the state of the optimizer
lies in host memory, which is where a step computes:

    closure        gradients are computed; they and the parameters are copied to the host (pinned, allocated once)
    torch's step   on plain host tensors: the optimizer holds host copies in place of the parameters
    post-hook      the updated parameters are copied back; the optimizer holds the parameters again

Outside a step, an optimizer's `state` has the parameters as keys, as always, and DTensors whose local parts are on the
CPU as values. So recovery, snapshots and checkpoints need to know only where to allocate state that does not exist yet.
Host copies of parameters are filled anew in each step: nothing in them has to be kept, sent or saved.

One pair of hooks on the steps of all optimizers does this for each optimizer that holds such parameters, in every loop.

[Note: steps without communication] Only torch's elementwise optimizers are supported. On a CUDA mesh, a step that
communicates would send host tensors through groups that are made for the device, and one that reads whole gradients
would need those of other ranks. The result of an elementwise step does not depend on where it computes: on a CPU it is
bitwise that of the optimizer without the option.
"""

# FSDP2's parameters have no public API.
# pyright: reportPrivateUsage=false

from collections.abc import Iterable
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.memory.host_pool import allocate_near
from hyperpod_plugins.parallel.elementwise import is_compiled, is_elementwise
from hyperpod_plugins.parallel.hsdp import from_local_like, fsdp_parameters

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
_running: "WeakKeyDictionary[Optimizer, HostStep]" = WeakKeyDictionary()


def keep_on_host(model: nn.Module, what: HostMemory) -> None:
    """Have optimizers of a sharded model's parameters keep their state in host memory.

    Args:
        model: sharded by FSDP2.
        what: `PARAMETER` if FSDP2 keeps the parameters there.
    """
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        _hooks.append(register_optimizer_step_post_hook(_after_step))
    _kept.update(dict.fromkeys(fsdp_parameters(model), what))


def ids_with_host_state() -> set[int]:
    """`id` of each parameter whose optimizer state lies in host memory although the parameter does not."""
    return {id(each.sharded_param) for each, what in _kept.items() if what is HostMemory.STATE}


def steps_on_host(optimizer: Optimizer) -> bool:
    """Whether `optimizer_offload` applies to any parameter of an optimizer."""
    return HostMemory.STATE in _options_of(optimizer)


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
    """Step pre-hook of all optimizers: has the step begin on the host once its closure has computed gradients.

    The closure comes after all other pre-hooks, which thus see the optimizer with its parameters.
    """
    end_host_step(optimizer)  # of a step that an exception has ended
    options = _options_of(optimizer)
    _check(optimizer, options)
    if HostMemory.STATE not in options:
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")

    def computed() -> Any:
        result = None if closure is None else closure()
        step = _running[optimizer] = HostStep(optimizer)
        step.begin()
        return result

    return args[:1], {**kwargs, "closure": computed}


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    end_host_step(optimizer)


def end_host_step(optimizer: Optimizer) -> None:
    """Give an optimizer its parameters back, if it holds host copies of them; also after an exception in its step."""
    step = _running.pop(optimizer, None)
    if step is not None:
        step.end()


class _Staged:
    """Host copies of a parameter's local part and of its gradient, in pinned memory where there is a GPU."""

    def __init__(self, local: Tensor) -> None:
        """Allocate memory for a parameter with this local part."""
        num_bytes = -(-local.nbytes // _ALIGNMENT) * _ALIGNMENT
        block = allocate_near(local.device, 2 * num_bytes) if num_bytes else torch.empty(0, dtype=torch.uint8)
        self.parameter, self.gradient = (
            block[start : start + local.nbytes].view(local.dtype).view(local.shape) for start in (0, num_bytes)
        )

    def fits(self, local: Tensor) -> bool:
        """Whether this is memory for a parameter with this local part."""
        return (self.parameter.shape, self.parameter.dtype) == (local.shape, local.dtype)


class HostStep:
    """One step of an optimizer on host copies of its parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._params: list[list[Tensor]] = []
        """The parameters of each group."""
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}
        """Parameter and host copy, by `id` of the parameter."""
        self._given: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        """State of each of these parameters, and what the optimizer was given in its place, by `id` of the copy."""

    @torch.no_grad()
    def begin(self) -> None:
        """Copy the parameters that have a gradient, and their gradients, and give the optimizer the copies."""
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
        self._params = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [self._twins.get(id(each), (each, each))[1] for each in group["params"]]
        self._exchange_state()

    def _exchange_state(self) -> None:
        """Give the optimizer the state of the copies; its order stays the same on all replicas of a shard."""
        state = self._optimizer.state
        entries = list(state.items())
        state.clear()
        for key, values in entries:
            if id(key) in self._twins:
                twin = self._twins[id(key)][1]
                given = {name: _host_part(value) for name, value in values.items()}
                self._given[id(twin)] = values, given
                key, values = twin, dict(given)
            state[key] = values

    @torch.no_grad()
    def end(self) -> None:
        """Copy the parameters back, and give the optimizer its parameters and their state."""
        for parameter, twin in self._twins.values():
            _local(parameter).copy_(twin, non_blocking=True)
            twin.grad = None
        for group, params in zip(self._optimizer.param_groups, self._params, strict=False):
            group["params"] = params
        owners = {id(twin): parameter for parameter, twin in self._twins.values()}
        state = self._optimizer.state
        entries = list(state.items())
        state.clear()
        for key, values in entries:
            owner = owners.get(id(key))
            state[key if owner is None else owner] = values if owner is None else self._kept_state(owner, key, values)

    def _kept_state(self, parameter: Tensor, twin: Tensor, values: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter after the step; tensors that were there before stay the same objects."""
        before, given = self._given.get(id(twin), ({}, {}))
        after: dict[str, Any] = {}
        for name, value in values.items():
            is_same = name in given and value is given[name] and _is_on_host(before[name])
            after[name] = before[name] if is_same else _as_state(parameter, value)
        before.clear()
        before.update(after)
        return before


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
