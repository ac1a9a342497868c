"""Parallelize a model: apply tensor parallelism, sharding and replication to a plain module."""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel

from hyperpod_plugins.delayed_init import materialize
from hyperpod_plugins.parallel.broadcast import broadcast_from_rank_0
from hyperpod_plugins.parallel.config import ParallelConfig
from hyperpod_plugins.parallel.former_parameters import remember_parameters
from hyperpod_plugins.parallel.hsdp import shard_hybrid
from hyperpod_plugins.parallel.tensor_parallel import plan_for, shard_tensors


def parallelize(
    model: nn.Module, mesh: DeviceMesh, config: ParallelConfig, *, averages_replicas: bool = True
) -> nn.Module:
    """Apply `config` to `model` over `mesh`, in place, innermost technique first. The order is part of the contract.

    Existing values are copied from global rank 0, so that all ranks start from the same model. Values that do not
    exist yet (the model was built under `delayed_init`, or on the meta device) are initialized last, when each rank
    stores only its shard. A model that contains an `FSDPModule` is returned unchanged.

    Args:
        model: a plain module, with real parameters, delayed ones, or both.
        mesh: `("replicate", "shard", "tensor")`, as returned by `build_mesh`.
        config: configuration to apply; its degrees must be those of the mesh.
        averages_replicas: let FSDP2 average gradients over the axis `replicate`; if False, the caller does that.

    Returns:
        The same module; its parameters are DTensors.

    Raises:
        ConfigError: the plan or the degrees do not fit the model, or ranks have built different models. The model
            must not be used afterwards.
        InitializationError: a parameter without a value cannot be initialized.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return model  # already sharded, by the user or by an earlier call
    remember_parameters(model)
    plan = plan_for(model, config)
    if config.precision == "bf16-true":
        _to_bfloat16(model)
    broadcast_from_rank_0(model, torch.device(mesh.device_type))
    shard_tensors(model, mesh["tensor"], plan, config)
    shard_hybrid(model, mesh["replicate", "shard"] if averages_replicas else mesh["shard"], config)
    materialize(model, device=torch.device(mesh.device_type), seed=config.random_seed)
    sync_rng_state(mesh["tensor"])
    return model


def sync_rng_state(tensor_mesh: DeviceMesh) -> None:
    """Broadcast the RNG state of the first tensor-parallel rank to its peers, which work on the same samples.

    Outside tensor-parallel regions all peers compute the same. If dropout drew different numbers, their copies of the
    activations, and then of the parameters, would silently diverge.
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
    """Convert parameters and persistent buffers; non-persistent ones (rotary frequencies) keep their precision."""
    saved = model.state_dict(keep_vars=True).values()
    for tensor in saved:
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.bfloat16)


def loss_parallel_context(config: ParallelConfig) -> AbstractContextManager[None]:
    """Return the context for computing the loss and its backward; required if the logits stay split."""
    return loss_parallel() if config.loss_parallel else nullcontext()
