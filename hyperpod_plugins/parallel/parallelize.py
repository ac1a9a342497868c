"""The story of a model: from a plain module to one that is tensor parallel, sharded and replicated."""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from hyperpod_plugins.delayed_init import materialize, tapes_of
from hyperpod_plugins.parallel.config import ParallelConfig
from hyperpod_plugins.parallel.former_parameters import remember_parameters
from hyperpod_plugins.parallel.hsdp import shard_hybrid
from hyperpod_plugins.parallel.tensor_parallel import plan_for, shard_tensors


def parallelize(
    model: nn.Module, mesh: DeviceMesh, config: ParallelConfig, *, averages_replicas: bool = True
) -> nn.Module:
    """Apply `config` to `model` over `mesh`, in place, innermost technique first. The order is part of the contract.

    Values that exist already are taken from global rank 0, so all ranks start from the same model. Values that do
    not (the model was built under `delayed_init`, or on the meta device) are made last, when each rank stores only
    its shard.

    Args:
        model: a plain module, with real parameters, delayed ones, or both.
        mesh: `("replicate", "shard", "tensor")`, as `build_mesh` returns it.
        config: what to apply; its degrees are those the mesh was built with.
        averages_replicas: let FSDP2 average gradients over the axis `replicate`; otherwise that is left to the caller.

    Returns:
        The same module; its parameters are DTensors.

    Raises:
        ConfigError: the plan or the degrees do not fit the model, which must not be used after that.
        InitializationError: a parameter without a value cannot be given one.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return model  # the user has sharded it, or we have been here before
    remember_parameters(model)
    plan = plan_for(model, config)
    if config.precision == "bf16-true":
        _to_bfloat16(model)
    copy_from_first_rank(model, torch.device(mesh.device_type))
    shard_tensors(model, mesh["tensor"], plan, config)
    shard_hybrid(model, mesh["replicate", "shard"] if averages_replicas else mesh["shard"], config)
    materialize(model, device=torch.device(mesh.device_type), seed=config.random_seed)
    draw_alike(mesh["tensor"])
    return model


def copy_from_first_rank(model: nn.Module, device: torch.device) -> None:
    """Give every rank the values of global rank 0, and the random state from which values still to come will be made.

    Ranks that built their model from different random states would otherwise train shards of different models.

    Args:
        model: a module that is not sharded yet.
        device: where the process group communicates; values elsewhere travel through it.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta and not isinstance(tensor, DTensor):
            there = tensor.detach().to(device).contiguous()
            dist.broadcast(there, src=0)
            if there.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(there)
    for tape in tapes_of(model):
        state = tape.rng_state.to(device)
        dist.broadcast(state, src=0)
        tape.rng_state = state.cpu()


def draw_alike(tensor_mesh: DeviceMesh) -> None:
    """Give ranks that work on the same samples the random state of the first of them.

    Outside tensor-parallel regions each of them computes the same; dropout that drew differently would make their
    copies of the activations, and then of the parameters, drift apart without an error.
    """
    if tensor_mesh.size() == 1:
        return
    group = tensor_mesh.get_group()
    state = torch.get_rng_state()
    dist.broadcast(state, group=group, group_src=0)
    torch.set_rng_state(state)
    if tensor_mesh.device_type == "cuda":
        state = torch.cuda.get_rng_state()
        dist.broadcast(state, group=group, group_src=0)
        torch.cuda.set_rng_state(state)


def _to_bfloat16(model: nn.Module) -> None:
    """Convert parameters and saved buffers; buffers that are not saved (rotary frequencies) keep their precision."""
    saved = model.state_dict(keep_vars=True).values()
    for tensor in saved:
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.bfloat16)


def loss_parallel_context(config: ParallelConfig) -> AbstractContextManager[None]:
    """Context for computing the loss and its backward when the logits stay split over the vocabulary."""
    return loss_parallel() if config.loss_parallel else nullcontext()
