"""FSDP1's `FullyShardedDataParallel(model, ...)`, done by `parallelize` on FSDP2; warns of what differs.

`wrap` is called in place of the class, `translate` says what its arguments mean for FSDP2, and `DelayedParamIniter`
initializes a model on the meta device when each rank stores only its shard.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, FSDPModule, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, transformer_auto_wrap_policy

from hyperpod_plugins import parallel
from hyperpod_plugins.delayed_init.tape import own_tensors
from hyperpod_plugins.errors import ConfigError, InitializationError, format_list
from hyperpod_plugins.parallel import ParallelConfig
from hyperpod_plugins.parallel.config import Precision
from hyperpod_plugins.parallel.hsdp import without_replica_sync
from hyperpod_plugins.parallel.parallelize import match_rank_0
from hyperpod_plugins.smp.job import Job, current_job, set_shard_degree, warn_once
from hyperpod_plugins.smp.torch_classes import is_in_offload_wrapper
from hyperpod_plugins.smp.transform import take_transformed

_KEEPS_GATHERED = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)  # pyright: ignore
_WITHIN_NODE = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)  # pyright: ignore
_ADVICE = "Build it in the same way on all ranks, or with all values on rank 0 and sync_module_states=True."
_ProcessGroups = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup]


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpArguments:
    """Arguments of FSDP1 that have a meaning here, with FSDP1's defaults."""

    sharding_strategy: ShardingStrategy | None = None
    cpu_offload: CPUOffload | None = None
    auto_wrap_policy: Callable[..., Any] | ModuleWrapPolicy | CustomPolicy | None = None
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    mixed_precision: MixedPrecision | None = None
    ignored_modules: Iterable[nn.Module] | None = None
    ignored_states: Iterable[Any] | None = None
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    use_orig_params: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """What is done in place of FSDP1."""

    config: ParallelConfig
    notes: tuple[str, ...]
    """Differences from what was asked for, one clause each."""


def translate(asked: ParallelConfig, arguments: FsdpArguments, model: nn.Module, ranks_per_node: int) -> Translation:
    """Merge the arguments into the configuration of `init`, which takes precedence where it does in SMP.

    Raises:
        ConfigError: an argument is not supported.
    """
    for name in ("ignored_modules", "ignored_states"):
        ignored = list(getattr(arguments, name) or ())
        if ignored:
            kinds = format_list(sorted({type(each).__name__ for each in ignored}))
            raise ConfigError(
                f"{name} leaves {kinds} out of sharding, and everything in the model is sharded here. Keep such "
                "modules outside of the model that is wrapped, or leave the argument out."
            )
    notes: list[str] = []
    degree, reshards = _sharding(asked, arguments.sharding_strategy, ranks_per_node, notes)
    precision = _precision(asked, arguments.mixed_precision, notes)
    blocks = _block_classes(arguments.auto_wrap_policy, model, notes) or asked.block_classes
    if arguments.backward_prefetch is not BackwardPrefetch.BACKWARD_PRE:
        notes.append("parameters are prefetched in backward, regardless of backward_prefetch")
    if arguments.forward_prefetch:
        notes.append("parameters are prefetched in forward as FSDP2 does by default, regardless of forward_prefetch")
    if not arguments.use_orig_params:
        notes.append("parameters keep their names and shapes, as with use_orig_params=True")
    offloads = arguments.cpu_offload is not None and arguments.cpu_offload.offload_params
    config = replace(
        asked,
        hybrid_shard_degree=degree,
        reshard_after_forward=reshards,
        precision=precision,
        block_classes=blocks,
        param_offload=asked.param_offload or offloads,
    )
    return Translation(config=config, notes=tuple(notes))


def _sharding(
    asked: ParallelConfig, strategy: ShardingStrategy | None, ranks_per_node: int, notes: list[str]
) -> tuple[int, bool]:
    """Shard degree, and whether parameters are freed between forward and backward."""
    degree = asked.hybrid_shard_degree
    if degree == 0 and asked.tensor_parallel_degree == 1:
        if strategy is ShardingStrategy.NO_SHARD:
            return 1, asked.reshard_after_forward
        return (
            ranks_per_node if strategy in _WITHIN_NODE else 0,
            asked.reshard_after_forward and strategy not in _KEEPS_GATHERED,
        )
    agreeing = (*_WITHIN_NODE, *(() if degree else (ShardingStrategy.FULL_SHARD,)))
    if strategy is not None and strategy not in agreeing:
        notes.append(f"the configuration of init() wins over sharding_strategy={strategy.name}")
    keeps = strategy is ShardingStrategy._HYBRID_SHARD_ZERO2  # pyright: ignore[reportPrivateUsage]
    return degree, asked.reshard_after_forward and not keeps


def _precision(asked: ParallelConfig, policy: MixedPrecision | None, notes: list[str]) -> Precision:
    if policy is None:
        return asked.precision
    if policy.param_dtype not in (None, torch.float32, torch.bfloat16):
        raise ConfigError(
            f"mixed_precision computes in {policy.param_dtype}; allowed are torch.bfloat16 and torch.float32. "
            "bfloat16 needs no scaling of the loss."
        )
    if not policy.cast_forward_inputs and not policy.cast_root_forward_inputs:
        notes.append("inputs of every block are cast to its type")
    if policy.buffer_dtype not in (None, torch.float32):
        notes.append(f"buffers keep their type (buffer_dtype={policy.buffer_dtype})")
    if policy.reduce_dtype not in (None, torch.float32) or (policy.reduce_dtype is None and policy.param_dtype):
        notes.append("gradients are reduced in float32")
    return "bf16-mixed" if policy.param_dtype is torch.bfloat16 else "32-true"


def _block_classes(policy: Any, model: nn.Module, notes: list[str]) -> tuple[str, ...]:
    """Class names of the modules that a wrap policy selects as units.

    Raises:
        ConfigError: it selects none.
    """
    if policy is None:
        notes.append("each layer of a chain in a ModuleList is a unit, as there is no auto_wrap_policy")
        return ()
    wants = _unit_predicate(policy)
    chosen = {id(module) for module in model.modules() if module is not model and wants(module)}
    names = {type(module).__name__ for module in model.modules() if id(module) in chosen}
    if not names:
        classes = format_list(sorted({type(module).__name__ for module in model.modules()}), at_most=12)
        raise ConfigError(
            f"auto_wrap_policy chooses no module of {type(model).__name__}, which contains {classes}. Name one of "
            "them, or leave the policy out."
        )
    others = {type(m).__name__ for m in model.modules() if id(m) not in chosen and m is not model} & names
    if others:
        notes.append(f"all {format_list(sorted(others))} are units, though auto_wrap_policy chooses only some of them")
    return tuple(sorted(names))


def _unit_predicate(policy: Any) -> Callable[[nn.Module], bool]:
    if isinstance(policy, ModuleWrapPolicy):
        classes = tuple(policy._module_classes)  # pyright: ignore[reportPrivateUsage]
        return lambda module: isinstance(module, classes)
    if isinstance(policy, CustomPolicy):
        return lambda module: bool(policy._lambda_fn(module))  # pyright: ignore[reportPrivateUsage]
    if isinstance(policy, partial) and policy.func is transformer_auto_wrap_policy:
        classes = tuple(policy.keywords["transformer_layer_cls"])
        return lambda module: isinstance(module, classes)

    def ask(module: nn.Module) -> bool:
        size = sum(parameter.numel() for parameter in module.parameters())
        return bool(policy(module=module, recurse=False, nonwrapped_numel=size))

    return ask


class ParamInit:
    """FSDP's `param_init_fn` for delayed initialization: marks that `wrap` initializes the parameters itself."""

    def __call__(self, module: nn.Module) -> None:
        """Raise `ConfigError`: only torch's own FSDP calls this, which happens without `torch.sagemaker.init`."""
        raise ConfigError(
            f"the parameters of {type(module).__name__} must be initialized by the translated "
            "FullyShardedDataParallel, but torch's own was called. Call torch.sagemaker.init() first."
        )


class DelayedParamIniter:
    """Initializes a model on the meta device with its own initializers, seeded with `random_seed`.

    Supports `reset_parameters` of torch's modules and `_init_weights` of Hugging Face models.

    Args:
        model: built under `torch.device("meta")`, or under `hyperpod_plugins.delayed_init.delayed_init`.
        init_method_using_config: initializes the tensors of one module, in place; for models that have neither.
        verbose: print the number of parameters.

    Raises:
        ConfigError: no parameter or buffer of the model is on the meta device.
    """

    def __init__(
        self,
        model: nn.Module,
        init_method_using_config: Callable[[nn.Module], None] | None = None,
        verbose: bool = False,
    ) -> None:
        self._model = model
        waiting = _without_values(model)
        if not waiting:
            raise ConfigError(
                f"DelayedParamIniter got a {type(model).__name__} whose parameters all have values. Build it under "
                'torch.device("meta"), or leave DelayedParamIniter out.'
            )
        if init_method_using_config is not None:
            for module in model.modules():
                if own_tensors(module):
                    vars(module)["_init_weights"] = init_method_using_config
        if verbose:
            print(f"{self.count_num_params()} parameters of {type(model).__name__} not initialized yet")  # noqa: T201

    def count_num_params(self) -> int:
        """Number of parameters of the model, over all ranks."""
        return sum(parameter.numel() for parameter in self._model.parameters())

    def get_param_init_fn(self) -> Callable[[nn.Module], None]:
        """Return the value for FSDP's `param_init_fn`."""
        return ParamInit()

    def get_post_param_init_fn(self) -> Callable[[nn.Module, nn.Module], None]:
        """Return the value for `post_param_init_fn`, with which SMP ties parameters again; here they stay tied."""
        return _stay_tied

    @contextmanager
    def validate_params_and_buffers_inited(self) -> Generator[None]:
        """Check at the end of the context that all parameters and buffers have values.

        Raises:
            InitializationError: some have none.
        """
        yield
        waiting = _without_values(self._model)
        if waiting:
            raise InitializationError(
                f"{format_list(waiting)} of {type(self._model).__name__} are still on the meta device. Wrap the model "
                "in FullyShardedDataParallel inside this context."
            )


def _stay_tied(*_: nn.Module) -> None:
    pass


def _without_values(model: nn.Module) -> list[str]:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return [name for name, tensor in tensors if tensor.is_meta]


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
    transformed = take_transformed(module)
    if job.topology.tensor_degree > 1 and not transformed:
        raise ConfigError(
            f"tensor_parallel_degree={job.topology.tensor_degree}, but {name} was not given to transform(). Call "
            "model = torch.sagemaker.transform(model) before it is wrapped."
        )
    match_rank_0(
        module,
        allocates=sync_module_states or any(each.from_first_rank for each in transformed),
        compares_types=False,
        is_delayed_alike=translation.config.delayed_values != "rank_0",
        advice=_ADVICE,
    )
    if param_init_fn is not None and not isinstance(param_init_fn, ParamInit):
        _refuse_own_init(module)
    recomputes = translation.config.activation_checkpointing != "none"  # if not, the script does, and wraps for offload
    wrapper_offloads = not recomputes and bool(job.config_in_wrapper.sm_activation_offloading)
    config = replace(
        translation.config,
        hybrid_shard_degree=job.topology.shard_degree,
        sm_activation_offloading=recomputes and translation.config.sm_activation_offloading,
        activation_host_memory_gib=0.0 if wrapper_offloads else translation.config.activation_host_memory_gib,
    )
    asked = {each.cp_comm_type for each in transformed if each.cp_comm_type is not None}
    if len(asked) > 1:
        raise ConfigError(f"parts of {name} were given to transform() with different cp_comm_type: {sorted(asked)}")
    if asked:
        config = replace(config, context_comm_type=asked.pop())
    parallel.parallelize(module, job.mesh, config)
    if job.says_offload and translation.config.sm_activation_offloading and not recomputes:
        _warn_without_wrapper(module)
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


def _warn_without_wrapper(model: nn.Module) -> None:
    """Warn in the first training forward if it does not run inside `offload_wrapper`, as nothing is offloaded then."""

    def check(*_: Any) -> None:
        if not torch.is_grad_enabled():
            return
        handle.remove()
        if not is_in_offload_wrapper():
            warn_once(
                f"sm_activation_offloading has no effect on {type(model).__name__}: as in SMP, it acts on blocks that "
                "checkpoint_wrapper wraps, in a model inside offload_wrapper. After FullyShardedDataParallel, add "
                "apply_activation_checkpointing(model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=...) and "
                'model = offload_wrapper(model). Or add "activation_checkpointing": "full" to the configuration, which '
                "does both without wrappers."
            )

    handle = model.register_forward_pre_hook(check, prepend=True)


def _refuse_own_init(model: nn.Module) -> None:
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigError(
            "param_init_fn would be given modules whose parameters are sharded already. Use that of "
            "DelayedParamIniter(model, init_method_using_config=...), whose function gets each module with whole "
            "tensors, or sync_module_states=True, with the values on rank 0."
        )
