"""Tensor parallelism: plans are data, module-name pattern -> style, and this file gives them to DTensor.

    plan = plan_for(model, config)            # decide, in tensor_plan.py
    shard_tensors(model, mesh["tensor"], plan, config)

[Note: shared input] Several column-parallel layers read the same tensor: query, key and value; gate and up. Each of
them alone would sum that tensor's gradient over the tensor axis in its backward. Here the tensor becomes a replicated
DTensor once; the layers' gradients meet as partial sums, and cross the network once.

[Note: sequence parallel] Between tensor-parallel regions the residual stream is a DTensor split over the sequence
(dimension 1). It stays a DTensor, not a local tensor, so that models which read `hidden.shape[1]` (for positions
and masks) see the whole sequence. The shared input above then gathers it, and scatters its gradient. Source of the
scheme: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from hyperpod_plugins.errors import PlanError
from hyperpod_plugins.parallel.config import ParallelConfig
from hyperpod_plugins.parallel.tensor_plan import Plan, tied_parameters

_SEQUENCE_DIM = 1


def shard_tensors(model: nn.Module, mesh: DeviceMesh, plan: Plan, config: ParallelConfig) -> None:
    """Turn the planned modules' parameters into DTensors over the 1-axis `mesh`, in place and without communication.

    Tied parameters stay tied.

    Raises:
        PlanError: the plan splits two tied parameters differently.
    """
    if not plan:
        return
    ties = tied_parameters(model)
    styles = {name: _style(style, config) for name, style in plan.items() if style != "replicate"}
    if config.sequence_parallel:
        styles |= {name: SequenceParallel(use_local_output=False) for name in _norms_on_stream(model, plan)}
    for name in styles:  # before the hooks that read the input, for hooks run in the order of their registration
        if not isinstance(plan.get(name), ParallelStyle):  # a style of the user's may read keywords itself
            model.get_submodule(name).register_forward_pre_hook(_give_by_position, with_kwargs=True)
    for owner, names in _readers_of_one_tensor(plan).items():
        _SharedInput(model.get_submodule(owner), map(model.get_submodule, names), mesh)
    parallelize_module(model, mesh, styles, src_data_rank=None)
    _retie(model, ties)


class _SharedInput:
    """Makes the tensor that the column-parallel layers of one module read a replicated DTensor, once a forward."""

    def __init__(self, owner: nn.Module, layers: Iterable[nn.Module], mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._read: torch.Tensor | None = None
        self._replicated: torch.Tensor | None = None
        for layer in layers:
            layer.register_forward_pre_hook(self._replicate)
        owner.register_forward_hook(self._forget, always_call=True)

    def _replicate(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        tensor, *rest = args
        if tensor is not self._read:
            whole = [Replicate()]
            self._read = tensor
            self._replicated = (
                tensor.redistribute(placements=whole)
                if isinstance(tensor, DTensor)
                else DTensor.from_local(tensor, self._mesh, whole, run_check=False)
            )
        return (self._replicated, *rest)

    def _forget(self, *_: object) -> None:
        self._read = self._replicated = None


def _give_by_position(
    _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Make `q_proj(input=x)` the call `q_proj(x)`: the hooks of DTensor's styles, and ours, look at position 0 only."""
    if args or not kwargs:
        return None
    first, *others = kwargs
    return (kwargs[first],), {name: kwargs[name] for name in others}


def _style(style: "str | ParallelStyle", config: ParallelConfig) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    split = config.sequence_parallel
    stream = Shard(_SEQUENCE_DIM) if split else Replicate()
    match style:
        case "colwise":  # its input is replicated already: see [Note: shared input]
            return ColwiseParallel()
        case "rowwise":
            return RowwiseParallel(output_layouts=stream, use_local_output=not split)
        case "embedding_rowwise":
            return RowwiseParallel(input_layouts=Replicate(), output_layouts=stream, use_local_output=not split)
        case "colwise_gather_output" if config.loss_parallel:
            return ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False)
        case "colwise_gather_output":
            return ColwiseParallel(input_layouts=stream, output_layouts=Replicate())
        case _:  # replicated_with_grad_allreduce: (batch, sequence, heads, head size), heads split
            return SequenceParallel(sequence_dim=2, use_local_output=True)


def _readers_of_one_tensor(plan: Plan) -> dict[str, list[str]]:
    """Column-parallel layers by the module that owns them and hands them its input."""
    readers: dict[str, list[str]] = {}
    for name, style in plan.items():
        if style == "colwise":
            readers.setdefault(name.rpartition(".")[0], []).append(name)
    return readers


def _norms_on_stream(model: nn.Module, plan: Plan) -> list[str]:
    """Normalisation layers on the residual stream: those that the plan does not speak of."""
    return [
        name for name, module in model.named_modules() if "norm" in type(module).__name__.lower() and name not in plan
    ]


def _retie(model: nn.Module, ties: list[list[str]]) -> None:
    for first, *others in ties:
        kept = model.get_parameter(first)
        for other in others:
            owner, _, attribute = other.rpartition(".")
            if _placements(model.get_parameter(other)) != _placements(kept):
                raise PlanError(
                    f"{first!r} and {other!r} are one tied parameter, but the tensor plan splits them differently "
                    f"({_placements(kept)} and {_placements(model.get_parameter(other))}). "
                    "Give both modules styles that split the same dimension, such as embedding_rowwise with colwise."
                )
            model.get_submodule(owner).register_parameter(attribute, kept)


def _placements(tensor: torch.Tensor) -> object:
    return tensor.placements if isinstance(tensor, DTensor) else "whole"
