"""`wrap`: FSDP1's `FullyShardedDataParallel(model, ...)` by `parallelize` on FSDP2; warns of what differs."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from hyperpod_plugins import parallel
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.parallel.hsdp import without_replica_sync
from hyperpod_plugins.parallel.parallelize import match_rank_0
from hyperpod_plugins.smp.delayed_param import ParamInit
from hyperpod_plugins.smp.fsdp_arguments import FsdpArguments, translate
from hyperpod_plugins.smp.job import Job, current_job, set_shard_degree, warn_once
from hyperpod_plugins.smp.transform import take_transformed

_ADVICE = "Build it in the same way on all ranks, or with all values on rank 0 and sync_module_states=True."
_ProcessGroups = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup]


def wrap(
    module: nn.Module,
    process_group: _ProcessGroups | None = None,
    sharding_strategy: Any = None,
    *args: Any,
    device_mesh: DeviceMesh | None = None,
    param_init_fn: Callable[[nn.Module], None] | None = None,
    post_param_init_fn: Callable[..., None] | None = None,
    sync_module_states: bool = False,
    device_id: int | torch.device | None = None,
    **options: Any,
) -> nn.Module:
    """Shard a model as `init` and the arguments of FSDP1 specify. After `init`, FSDP1's constructor calls this.

    Args:
        module: the whole model; with tensor parallelism, after `transform`.
        process_group: must match the job: the shard and the replica group, the group of all ranks, or, with a single
            replica, the shard group.
        sharding_strategy: sets the shard degree if the configuration does not.
        args: further positional arguments of FSDP1, which raise.
        device_mesh: must have the shape of the job's mesh.
        param_init_fn: that of a `DelayedParamIniter`. Others raise if the model is on the meta device, unless
            `sync_module_states` provides the values.
        post_param_init_fn: that of a `DelayedParamIniter`.
        sync_module_states: use rank 0's values; if it has all of them, those of other ranks may be on the meta device.
        device_id: ignored, as the job trains on one type of device.
        **options: see `FsdpArguments`.

    Returns:
        The same module, sharded by FSDP2, with FSDP1's `clip_grad_norm_` and `no_sync`. Its parameters are DTensors.

    Raises:
        ConfigError: an argument is not supported, the model or a part of it is wrapped already, or different tensors
            have values on different ranks.
    """
    job = current_job()
    name = type(module).__name__
    if args:
        raise ConfigError(f"give the arguments of FullyShardedDataParallel({name}, ...) by name.")
    if any(isinstance(part, FSDPModule) for part in module.modules()):
        raise ConfigError(
            f"{name}, or a part of it, is wrapped already. Wrap the whole model once; auto_wrap_policy says its units."
        )
    try:
        arguments = FsdpArguments(sharding_strategy=sharding_strategy, **options)
    except TypeError as error:
        raise ConfigError(f"FullyShardedDataParallel({name}, ...): {error}") from None
    translation = translate(job.config, arguments, module, job.ranks_per_node)
    if job.follows_fsdp:
        job = set_shard_degree(translation.config.hybrid_shard_degree)
    _check_groups(job, process_group, device_mesh)
    is_transformed, from_first_rank = take_transformed(module)
    if job.topology.tensor_degree > 1 and not is_transformed:
        raise ConfigError(
            f"tensor_parallel_degree={job.topology.tensor_degree}, but {name} was not given to transform(). Call "
            "model = torch.sagemaker.transform(model) before it is wrapped."
        )
    match_rank_0(
        module,
        allocates=sync_module_states or from_first_rank,
        compares_types=False,
        is_delayed_alike=translation.config.delayed_values != "rank_0",
        advice=_ADVICE,
    )
    if param_init_fn is not None and not isinstance(param_init_fn, ParamInit):
        _refuse_own_init(module)
    config = replace(
        translation.config,
        hybrid_shard_degree=job.topology.shard_degree,
        sm_activation_offloading=False,  # for the script's own offload_wrapper
    )
    parallel.parallelize(module, job.mesh, config)
    vars(module)["clip_grad_norm_"] = partial(clip_grad_norm_, module)
    vars(module)["no_sync"] = partial(without_replica_sync, module)
    warn_once(
        f"FullyShardedDataParallel({name}) is done by FSDP2: {job.topology}, {config.precision}, units "
        f"{', '.join(config.block_classes) or 'in each chain of layers'}"
        + "".join(f"; {each}" for each in translation.notes)
        + "."
    )
    return module


def clip_grad_norm_(model: nn.Module | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Clip the gradients of a wrapped model by their norm over all ranks; return the norm before clipping."""
    parameters = model.parameters() if isinstance(model, nn.Module) else model
    return parallel.clip_grad_norm_(parameters, max_norm, norm_type)


def _check_groups(job: Job, process_group: _ProcessGroups | None, device_mesh: DeviceMesh | None) -> None:
    rank, topology = dist.get_rank(), job.topology
    shards, replicas = list(topology.peers(rank, "shard")), list(topology.peers(rank, "replicate"))
    if device_mesh is not None:
        shape = tuple(size for size in device_mesh.shape if size > 1)
        if shape != tuple(size for size in topology.shape[:2] if size > 1):
            raise ConfigError(
                f"device_mesh has the shape {tuple(device_mesh.shape)}, but init() has set up {topology}. Leave it out."
            )
    if process_group is None:
        return
    groups = process_group if isinstance(process_group, tuple) else (process_group,)
    given = [sorted(dist.get_process_group_ranks(group)) for group in groups]
    allowed = [[shards, replicas], [sorted(range(topology.world_size))]]
    if topology.replicate_degree == 1:
        allowed.append([shards])
    if given not in allowed:
        raise ConfigError(
            f"process_group holds the ranks {given}, and init() has set up {topology}: this rank shards over {shards} "
            f"and replicates over {replicas}. Leave process_group out, or change hybrid_shard_degree."
        )


def _refuse_own_init(model: nn.Module) -> None:
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigError(
            "param_init_fn would be given modules whose parameters are sharded already. Use that of "
            "DelayedParamIniter(model, init_method_using_config=...), whose function gets each module with whole "
            "tensors, or sync_module_states=True, with the values on rank 0."
        )
