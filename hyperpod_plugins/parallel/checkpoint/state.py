"""State of a model and its optimizers in a checkpoint, under names that do not depend on the parallelism.

    model.<parameter or persistent buffer>          tied ones once, under their first name
    optim.<index>.<parameter>.<key>                 tensors of optimizer state, such as exp_avg

[Note: optimizers that have not stepped]
Optimizers create their state tensors in the first step. torch's own checkpoint code creates them by stepping with
zero gradients, which counts a step. Here an optimizer without state is saved without state, and on load its state is
created from the description in the checkpoint. Both leave step counts and weights exactly as they were.
"""

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from hyperpod_plugins.errors import CheckpointError, CheckpointMismatch, format_list
from hyperpod_plugins.parallel.host_optimizer import ids_with_host_state
from hyperpod_plugins.parallel.hsdp import compute_device, from_local_like, layout_of, local_part, zeros_on_mesh_of

_EXTRA_STATE = "_extra_state"
AVERAGED = "average:"
"""Prefix of the names of averaged weights where they are stored together with the model's own."""
CURRENT = "current."
"""Prefix of the names of the model's own weights in a checkpoint whose `model.` entries are the average."""
NUM_AVERAGED = "num_averaged"
"""Name of a checkpoint's entry for the number of updates of the average."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorPart:
    """A part of a global tensor."""

    name: str
    size: tuple[int, ...]
    """Global shape."""
    offset: tuple[int, ...]
    """Where the part begins in the global tensor."""
    values: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateParts:
    """Parts of the tensors of a model and its optimizers."""

    model: list[TensorPart] = field(default_factory=list[TensorPart])
    optimizers: list[list[TensorPart]] = field(default_factory=list[list[TensorPart]])
    """Parts of each optimizer's state, named `<parameter>.<key>`."""
    extra_parts: list[TensorPart] = field(default_factory=list[TensorPart])
    """Parts of other tensors, named as in the checkpoint."""
    descriptions: list[Any] = field(default_factory=list[Any])
    """Description of each optimizer; see `describe_optimizer`."""


def shape_and_offset_of(tensor: torch.Tensor) -> tuple[list[int], list[int]]:
    """Return the global shape of a tensor, and the offset of this rank's part in it."""
    if not isinstance(tensor, DTensor):
        return list(tensor.shape), [0] * tensor.dim()
    (chunk,) = tensor.__create_chunk_list__()  # pyright: ignore[reportUnknownMemberType]
    return list(tensor.shape), list(chunk.offsets)


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers, sharing memory with the model; tied ones under their first name."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and id(value) not in seen and not _is_extra_state(name):
            seen.add(id(value))
            tensors[canonical_name(name)] = value.detach()
    return tensors


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the names that `model_tensors` leaves out, and for each the first name of the same tensor."""
    first, tied = dict[int, str](), dict[str, str]()
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and not _is_extra_state(name):
            known = first.setdefault(id(value), canonical_name(name))
            if known != canonical_name(name):
                tied[canonical_name(name)] = known
    return tied


def extra_states(model: nn.Module) -> dict[str, Any]:
    """Return the results of the modules' `get_extra_state`, by name."""
    return {name: value for name, value in model.state_dict(keep_vars=True).items() if _is_extra_state(name)}


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Return an optimizer's state tensors by `<parameter>.<key>`; empty before its first step."""
    names = _parameter_names(model)
    return {
        f"{_name_of(parameter, names)}.{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def _of_own_layout(names: Mapping[int, str], optimizer: Optimizer) -> list[tuple[str, DTensor]]:
    """Return the optimizer state tensors whose layout differs from the parameter's, such as Adafactor's row sums."""
    return [
        (f"{_name_of(parameter, names)}.{key}", value)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, DTensor)
        and not (
            isinstance(parameter, DTensor)
            and value.placements == parameter.placements
            and value.shape == parameter.shape
        )
    ]


def describe_optimizer(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's class, hyperparameters, non-tensor state, and layouts unlike those of its parameters."""
    names = _parameter_names(model)
    groups = [
        {
            **to_python_scalars({key: value for key, value in group.items() if key != "params"}),
            "params": [_name_of(parameter, names) for parameter in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    others = {
        _name_of(parameter, names): {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
        for parameter, state in optimizer.state.items()
    }
    values = {name: to_python_scalars(state) if state else {} for name, state in others.items()}
    kind = {"class": type(optimizer).__name__, "hyperparameters": sorted(optimizer.defaults)}
    own = {name: layout_of(name, tensor) for name, tensor in _of_own_layout(names, optimizer)}
    return {**kind, "param_groups": groups, "values": values, "layouts": own}


def check_model(
    tensors: Mapping[str, torch.Tensor], saved: Mapping[str, TensorStorageMetadata], *, is_training: bool
) -> None:
    """Compare names, global shapes and dtypes of a model with those in a checkpoint.

    If the model is not to be trained, dtypes may differ: values are converted, with a warning.

    Raises:
        CheckpointMismatch: they differ.
    """
    converted = [
        f"{name} (checkpoint {saved[name].properties.dtype}, model {tensor.dtype})"
        for name, tensor in sorted(tensors.items())
        if name in saved and saved[name].properties.dtype != tensor.dtype
    ]
    findings = {
        "missing in the checkpoint": sorted(tensors.keys() - saved.keys()),
        "unknown to the model": sorted(saved.keys() - tensors.keys()),
        "of another shape": [
            f"{name} (checkpoint {tuple(saved[name].size)}, model {tuple(tensor.shape)})"
            for name, tensor in sorted(tensors.items())
            if name in saved and saved[name].size != tensor.shape
        ],
        "of another type": converted if is_training else [],
    }
    if any(findings.values()):
        listed = "; ".join(f"{format_list(names)} {what}" for what, names in findings.items() if names)
        raise CheckpointMismatch(
            f"the checkpoint belongs to another model: {listed}. Build the model with the configuration that it was "
            "saved with, or choose another checkpoint. Parallel degrees and world size may differ; types may, too, "
            "where no optimizer is loaded."
        )
    if converted:
        warnings.warn(
            f"values of the checkpoint are converted to the types of the model: {format_list(converted)}. Large "
            "values may become infinite in float16, and all lose digits in a shorter type.",
            stacklevel=2,
        )


def check_optimizer(model: nn.Module, optimizer: Optimizer, index: int, described: Mapping[str, Any]) -> None:
    """Compare class, hyperparameters and parameter groups of an optimizer with those in a checkpoint.

    Hyperparameters that only the optimizer has keep their values: newer versions of an optimizer may add some.

    Raises:
        CheckpointMismatch: class, hyperparameters, groups or their parameters differ.
    """
    if "class" in described:
        kind, names_here = type(optimizer).__name__, set(optimizer.defaults)
        names_there = set(described["hyperparameters"])
        if kind != described["class"] or names_there - names_here:
            raise CheckpointMismatch(
                f"optimizer {index} is {kind} (hyperparameters {', '.join(sorted(names_here))}), but the checkpoint "
                f"was saved with {described['class']} ({', '.join(sorted(names_there))}), whose state it "
                "cannot continue. "
                "Use the optimizer of the checkpoint, or load the model only, with optimizers=()."
            )
    names = _parameter_names(model)
    here = [{_name_of(parameter, names) for parameter in group["params"]} for group in optimizer.param_groups]
    there = [set(group["params"]) for group in described["param_groups"]]
    if here != there:
        different = sorted(set[str]().union(*here) ^ set[str]().union(*there))
        detail = f"; {format_list(different)} in only one of them" if different else ""
        raise CheckpointMismatch(
            f"optimizer {index} has groups of {[len(group) for group in here]} parameters, but the checkpoint "
            f"has groups of {[len(group) for group in there]}{detail}. Configure the optimizer as when it was saved "
            "(frozen parameters included), or load the model only, with optimizers=()."
        )


def allocate_optimizer_state(
    model: nn.Module,
    optimizer: Optimizer,
    saved: Mapping[str, TensorStorageMetadata],
    described: Mapping[str, Any],
) -> dict[str, torch.Tensor]:
    """Return tensors to load an optimizer's saved state into; see [Note: optimizers that have not stepped].

    Tensors with their parameter's shape have its sharding. Others, except scalars and one-element vectors, have the
    layout given in the description; without one, they are replicated.
    """
    names = _parameter_names(model)
    parameters = {_name_of(p, names): (p, group) for group in optimizer.param_groups for p in group["params"]}
    layouts, on_host = described.get("layouts", {}), ids_with_host_state()
    tensors: dict[str, torch.Tensor] = {}
    for entry, description in saved.items():
        name, _, key = entry.rpartition(".")
        parameter, group = parameters[name]
        present = optimizer.state[parameter].get(key) if parameter in optimizer.state else None
        size, dtype = description.size, description.properties.dtype
        is_laid_out = size == parameter.shape
        is_step_count = not is_laid_out and size.numel() == 1 and len(size) < 2 and entry not in layouts
        if is_step_count:
            device = step_count_device(parameter, group, on_host)
        else:
            device = state_device(parameter, on_host) if is_laid_out else compute_device(parameter)
        if (
            isinstance(present, torch.Tensor)
            and (present.shape, present.dtype) == (size, dtype)
            and device.type == present.device.type
        ):
            tensors[entry] = present
        elif is_laid_out:
            local = torch.zeros_like(local_part(parameter.detach()), dtype=dtype, device=device)
            tensors[entry] = from_local_like(parameter, local)
        elif is_step_count:
            tensors[entry] = torch.zeros(size, dtype=dtype, device=device)
        else:
            tensors[entry] = zeros_on_mesh_of(parameter, size, dtype, layouts.get(entry))
    return tensors


def check_layouts(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Reject optimizer state that may differ between ranks without being a DTensor.

    Raises:
        CheckpointError: a parameter is split over ranks, but a state tensor of it with several elements is not a
            DTensor.
    """
    names = _parameter_names(model)
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if not isinstance(parameter, DTensor) or not _is_split(parameter):
                continue
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.numel() > 1:
                    raise CheckpointError(
                        f"{type(optimizer).__name__} keeps {key!r} of {_name_of(parameter, names)}, which is split "
                        f"over ranks, as a plain tensor of shape {tuple(value.shape)}, which a checkpoint stores once "
                        "for all ranks. Make the optimizer keep it as a DTensor, split like the parameter "
                        "(torch.zeros_like) or replicated on its mesh (torch.distributed.tensor.zeros)."
                    )


def _is_split(tensor: DTensor) -> bool:
    """Whether a rank holds less than the whole tensor."""
    sizes = tensor.device_mesh.shape
    return any(size > 1 and not each.is_replicate() for size, each in zip(sizes, tensor.placements, strict=True))


def state_device(parameter: torch.Tensor, on_host: Collection[int]) -> torch.device:
    """Return where an optimizer keeps the state of a parameter; `on_host` is `ids_with_host_state()`."""
    return torch.device("cpu") if id(parameter) in on_host else parameter.device


def step_count_device(parameter: torch.Tensor, group: Mapping[str, Any], on_host: Collection[int]) -> torch.device:
    """Return where an optimizer keeps its step count: beside the state only if its kernels read it there."""
    is_read_there = bool(group.get("fused") or group.get("capturable"))
    return state_device(parameter, on_host) if is_read_there else torch.device("cpu")


def set_optimizer(
    model: nn.Module, optimizer: Optimizer, tensors: Mapping[str, torch.Tensor], described: Mapping[str, Any]
) -> None:
    """Replace an optimizer's state and hyperparameters by the loaded ones."""
    parameters = parameters_by_saved_name(model)
    optimizer.state.clear()
    for entry, tensor in tensors.items():
        name, _, key = entry.rpartition(".")
        optimizer.state[parameters[name]][key] = tensor
    for name, values in described["values"].items():
        optimizer.state[parameters[name]].update(values)
    for group, saved in zip(optimizer.param_groups, described["param_groups"], strict=True):
        for key, value in saved.items():
            if key in ("params", "param_names"):
                continue
            present = group.get(key)
            if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor | float | int):
                present.copy_(torch.as_tensor(value))  # a compiled step holds on to this tensor
            else:
                group[key] = value


def to_python_scalars(values: Any) -> Any:
    """Convert NumPy scalars in containers to equal Python numbers, which load with `weights_only=True`."""
    return tree_map_only(np.generic, lambda each: each.item(), values)


def _parameter_names(model: nn.Module) -> dict[int, str]:
    """Names of the parameters, by their `id`: a tensor is slow to look up."""
    return {id(parameter): canonical_name(name) for name, parameter in model.named_parameters()}


def _name_of(parameter: torch.Tensor, names: Mapping[int, str]) -> str:
    name = names.get(id(parameter))
    if name is None:
        raise CheckpointError(
            f"an optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the model, so it has no "
            "name to be saved under. Make the optimizer after the model has been sharded, from its own parameters."
        )
    return name


def parameters_by_saved_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return parameters by the names under which they are saved."""
    return {canonical_name(name): parameter for name, parameter in model.named_parameters()}


def canonical_name(name: str) -> str:
    """Remove what activation checkpointing and `torch.compile` add to parameter names."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def _is_extra_state(name: str) -> bool:
    return name.rpartition(".")[2] == _EXTRA_STATE
