"""What a checkpoint holds of a model and its optimizers, under names that do not depend on the parallelism.

    model.<parameter or persistent buffer>          tied ones once, under their first name
    optim.<index>.<parameter>.<key>                 tensors of optimizer state, such as exp_avg

[Note: optimizers that have not stepped]
State tensors are made in the first step. torch's own checkpoint code makes them by stepping with zero gradients, which
counts a step. Here an optimizer without state is saved without state, and when state is to be loaded it is made from
the description in the checkpoint. Both leave step counts and weights exactly as they were.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from hyperpod_plugins.errors import CheckpointError, CheckpointMismatch, few

_EXTRA_STATE = "_extra_state"


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers that share memory with the model, tied ones under their first name only."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and id(value) not in seen and not _is_extra_state(name):
            seen.add(id(value))
            tensors[plain_name(name)] = value.detach()
    return tensors


def extra_states(model: nn.Module) -> dict[str, Any]:
    """What modules return from `get_extra_state`."""
    return {name: value for name, value in model.state_dict(keep_vars=True).items() if _is_extra_state(name)}


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """State tensors of one optimizer by `<parameter>.<key>`; none before its first step."""
    names = _parameter_names(model)
    return {
        f"{_name_of(parameter, names)}.{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def describe_optimizer(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Hyperparameters of one optimizer, and its state that is no tensor."""
    names = _parameter_names(model)
    groups = [
        {**group, "params": [_name_of(parameter, names) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    values = {
        _name_of(parameter, names): {k: v for k, v in state.items() if not isinstance(v, torch.Tensor)}
        for parameter, state in optimizer.state.items()
    }
    return {"param_groups": groups, "values": values}


def check_model(tensors: Mapping[str, torch.Tensor], saved: Mapping[str, TensorStorageMetadata]) -> None:
    """Compare names and global shapes of a model with those in a checkpoint.

    Raises:
        CheckpointMismatch: they differ.
    """
    findings = {
        "missing in the checkpoint": sorted(tensors.keys() - saved.keys()),
        "unknown to the model": sorted(saved.keys() - tensors.keys()),
        "of another shape": [
            f"{name} (checkpoint {tuple(saved[name].size)}, model {tuple(tensor.shape)})"
            for name, tensor in sorted(tensors.items())
            if name in saved and saved[name].size != tensor.shape
        ],
    }
    if any(findings.values()):
        listed = "; ".join(f"{few(names)} {what}" for what, names in findings.items() if names)
        raise CheckpointMismatch(
            f"the checkpoint belongs to another model: {listed}. Build the model with the configuration that it was "
            "saved with, or choose another checkpoint. Parallel degrees and world size may differ."
        )


def check_optimizer(model: nn.Module, optimizer: Optimizer, index: int, described: Mapping[str, Any]) -> None:
    """Compare the parameter groups of an optimizer with those in a checkpoint.

    Raises:
        CheckpointMismatch: other groups, or other parameters in them.
    """
    names = _parameter_names(model)
    here = [{_name_of(parameter, names) for parameter in group["params"]} for group in optimizer.param_groups]
    there = [set(group["params"]) for group in described["param_groups"]]
    if here != there:
        different = sorted(set[str]().union(*here) ^ set[str]().union(*there))
        detail = f"; {few(different)} in only one of them" if different else ""
        raise CheckpointMismatch(
            f"optimizer {index} has groups of {[len(group) for group in here]} parameters, but the checkpoint "
            f"has groups of {[len(group) for group in there]}{detail}. Configure the optimizer as when it was saved "
            "(frozen parameters included), or load the model only, with optimizers=()."
        )


def state_to_fill(
    model: nn.Module, optimizer: Optimizer, saved: Mapping[str, TensorStorageMetadata]
) -> dict[str, torch.Tensor]:
    """Tensors for all saved state of one optimizer, with the sharding of its parameters; see the note above."""
    names = _parameter_names(model)
    parameters = {_name_of(p, names): (p, group) for group in optimizer.param_groups for p in group["params"]}
    tensors: dict[str, torch.Tensor] = {}
    for entry, description in saved.items():
        name, _, key = entry.rpartition(".")
        parameter, group = parameters[name]
        present = optimizer.state[parameter].get(key) if parameter in optimizer.state else None
        if isinstance(present, torch.Tensor) and present.shape == description.size:
            tensors[entry] = present
        elif description.size == parameter.shape:
            tensors[entry] = torch.zeros_like(parameter, dtype=description.properties.dtype, requires_grad=False)
        else:
            device = count_device(parameter, group)
            tensors[entry] = torch.zeros(description.size, dtype=description.properties.dtype, device=device)
    return tensors


def count_device(parameter: torch.Tensor, group: Mapping[str, Any]) -> torch.device:
    """Where an optimizer keeps a step count: beside the parameter only for kernels that read it there."""
    is_read_there = bool(group.get("fused") or group.get("capturable"))
    return parameter.device if is_read_there else torch.device("cpu")


def set_optimizer(
    model: nn.Module, optimizer: Optimizer, tensors: Mapping[str, torch.Tensor], described: Mapping[str, Any]
) -> None:
    """Give an optimizer the loaded state and hyperparameters in place of its own."""
    parameters = {name: parameter for parameter, name in _parameter_names(model).items()}
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


def _parameter_names(model: nn.Module) -> dict[torch.Tensor, str]:
    return {parameter: plain_name(name) for name, parameter in model.named_parameters()}


def _name_of(parameter: torch.Tensor, names: Mapping[torch.Tensor, str]) -> str:
    name = names.get(parameter)
    if name is None:
        raise CheckpointError(
            f"an optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the model, so it has no "
            "name to be saved under. Make the optimizer after the model has been sharded, from its own parameters."
        )
    return name


def plain_name(name: str) -> str:
    """Take out what activation checkpointing and `torch.compile` put into names."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def _is_extra_state(name: str) -> bool:
    return name.rpartition(".")[2] == _EXTRA_STATE
