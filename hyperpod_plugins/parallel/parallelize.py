"""Parallelize a model: apply tensor parallelism, sharding and replication to a plain module.

All ranks start from the values of global rank 0. The broadcasts of a model's tensors are matched only by their order:
if another rank holds values of other tensors, it waits for a broadcast that never comes, or takes the bytes of one
tensor for those of another without an error. So `match_rank_0` first compares the models.
"""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, loss_parallel

from hyperpod_plugins.comm import generation_of, group_health
from hyperpod_plugins.delayed_init import materialize
from hyperpod_plugins.delayed_init.materialize import allocate, materialize_from_source
from hyperpod_plugins.delayed_init.tape import binding_of, full_name, own_tensors, rebind, release_tapes, tapes_of
from hyperpod_plugins.delayed_init.weight_files import files_digest
from hyperpod_plugins.errors import ConfigError, format_list
from hyperpod_plugins.events import AllocatorWatch
from hyperpod_plugins.memory.activation_plan import AutomaticPlan
from hyperpod_plugins.memory.chunked_loss import chunk_loss, is_causal_language_model
from hyperpod_plugins.memory.host_pool import HostPool
from hyperpod_plugins.memory.offload import ActivationOffload
from hyperpod_plugins.memory.recompute import offloads_itself, recompute_blocks, recomputes_itself
from hyperpod_plugins.memory.tiled_mlp import describe_tiles, tile_mlps
from hyperpod_plugins.parallel.adopted_model import is_sharded_by_program, release_shards
from hyperpod_plugins.parallel.checkpoint.safetensors import explain_save_pretrained
from hyperpod_plugins.parallel.config import ParallelConfig
from hyperpod_plugins.parallel.context_parallel import context_degree_of, split_contexts
from hyperpod_plugins.parallel.expert_bias import biases_in_float32
from hyperpod_plugins.parallel.expert_parallel import expert_degree_of, find_experts, shard_experts
from hyperpod_plugins.parallel.former_parameters import remember_parameters, succeed_parameters
from hyperpod_plugins.parallel.host_optimizer import keep_on_host
from hyperpod_plugins.parallel.hsdp import find_blocks, ids_on_host, outermost_blocks, shard_hybrid
from hyperpod_plugins.parallel.sequence_context import DEGREES, ContextDegrees
from hyperpod_plugins.parallel.tensor_parallel import plan_for, shard_tensors
from hyperpod_plugins.parallel.topology import EXPERT
from hyperpod_plugins.parallel.unit_watch import fsdp_parameters, parameter_groups
from hyperpod_plugins.precision import convert_linears
from hyperpod_plugins.precision.float8 import Conversion, conversions_of
from hyperpod_plugins.precision.transformer_engine import (
    TE_RECIPES,
    Float8Recomputation,
    refuse_regions_of_program,
)

log = logging.getLogger(__name__)

_HAS_VALUES = "has values"
_Aspects = tuple[str, ...]


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    config: ParallelConfig,
    *,
    averages_replicas: bool = True,
    watches_allocator: bool = True,
) -> nn.Module:
    """Apply `config` to `model` over `mesh`, in place, innermost technique first. The order is part of the contract.

    Existing values are copied from global rank 0, so that all ranks start from the same model. Values that do not
    exist yet (the model was built under `delayed_init`, or on the meta device) are initialized last, when each rank
    stores only its shard. A model that contains an `FSDPModule` is returned unchanged, except that the weights of its
    float8 layers are gathered as `float8_all_gather` says. One that transformers has sharded while it loaded it is
    sharded anew, as `config` says; see `adopted_model.py`.

    Args:
        model: a plain module, with real parameters, delayed ones, or both; or one that transformers has sharded.
        mesh: `("replicate", "shard", "tensor")`, as returned by `build_mesh`.
        config: configuration to apply; its degrees must be those of the mesh.
        averages_replicas: let FSDP2 average gradients over the axis `replicate`; if False, the caller does that.
        watches_allocator: count the model's forward passes for `fsdp_cache_flush_warnings`; if False, the caller does.

    Returns:
        The same module; its parameters are DTensors.

    Raises:
        ConfigError: the plan or the degrees do not fit the model, or ranks have built different models. The model
            must not be used afterwards. See also `apply_offload`, and `match_degrees` and `match_float8` for a
            model that is sharded already, and `release_shards` for one that transformers has sharded.
        InitializationError: a parameter without a value cannot be initialized.
    """
    is_sharded = is_sharded_by_program(model)
    if is_sharded:
        match_float8(model, config)
        match_degrees(model, config)
    if config.float8_recipe == "te-fp8" and not averages_replicas:
        raise ConfigError(
            "float8_recipe='te-fp8' cannot be combined with reproducible=True or AdaScale: its scales depend on how a "
            "batch is split among ranks. Use float8_recipe='tensorwise'."
        )
    if watches_allocator and config.fsdp_cache_flush_warnings:
        AllocatorWatch(torch.device(mesh.device_type)).attach(model)
    if is_sharded:
        apply_offload(model, config)
        explain_save_pretrained(model)
        refuse_regions_of_program(model, _called_parts(model))
        return model  # already sharded, by the user or by an earlier call
    _tell_of_idle_options(model, config)
    adopted = release_shards(model)
    remember_parameters(model, None if adopted is None else adopted.parameters)
    rebind(model)
    plan = plan_for(model, config)
    experts = find_experts(model, config)
    if config.precision == "bf16-true":
        _to_bfloat16(model)
    broadcast_from_rank_0(model, torch.device(mesh.device_type), is_delayed_alike=config.delayed_values != "rank_0")
    _use_mlp_tiles(model, config, torch.device(mesh.device_type))  # it computes without other ranks
    shard_tensors(model, mesh["tensor"], plan, config)
    split_contexts(model, config, mesh["shard"].size())
    use_float8(model, config, torch.device(mesh.device_type))
    save_activation_memory(model, config, torch.device(mesh.device_type), groups=_groups_in_blocks(model, mesh))
    shard_experts(experts, mesh, config, averages_replicas=averages_replicas)
    shard_hybrid(model, mesh["replicate", "shard"] if averages_replicas else mesh["shard"], config)
    use_float8_gathers(model, config)
    if adopted is None:
        give_values(model, torch.device(mesh.device_type), config)
    else:
        adopted.give_to(model, mesh, torch.device(mesh.device_type), ids_on_host(model))
    succeed_parameters(model)
    sync_rng_state(mesh["tensor"])
    apply_offload(model, config)
    explain_save_pretrained(model)
    refuse_regions_of_program(model, _called_parts(model))
    return model


def _called_parts(model: nn.Module) -> list[nn.Module]:
    """The modules of a sharded model that its program may call itself, as in `training_step`, and its FSDP2 units."""
    called = [model]
    for part in called:
        if part is model or isinstance(part, nn.ModuleList | nn.ModuleDict):  # the latter have no forward
            called += part.children()
    units = (part for part in model.modules() if parameter_groups(part))
    return [*dict.fromkeys([*called, *units])]


def _tell_of_idle_options(model: nn.Module, config: ParallelConfig) -> None:
    """Warn on rank 0 of options that have no effect on a model."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    if config.activation_host_memory_gib and not config.sm_activation_offloading:
        log.warning(
            "activation_host_memory_gib=%g has no effect without activation_offload. Set that, or leave it out.",
            config.activation_host_memory_gib,
        )
    tensors = (*model.parameters(), *model.buffers())
    if config.delayed_values == "rank_0" and not tapes_of(model) and not any(each.is_meta for each in tensors):
        log.warning(
            "delayed_values='rank_0' has no effect on %s, which has all its values already. Build or load it inside "
            "delayed_init (delayed_init=True does this for transformers and Lightning), or leave it out.",
            type(model).__name__,
        )


def apply_offload(model: nn.Module, config: ParallelConfig) -> None:
    """Have optimizers step in host memory, as `param_offload` and `optimizer_offload` say.

    Args:
        model: sharded by `parallelize`, or by the program.
        config: configuration to apply.

    Raises:
        ConfigError: `param_offload` is set, but the program has sharded the model without FSDP2's `CPUOffloadPolicy`.
    """
    records = fsdp_parameters(model)
    elsewhere = sum(not each.offload_to_cpu for each in records)
    if config.param_offload and elsewhere:
        raise ConfigError(
            f"param_offload=True, but {elsewhere} of {len(records)} parameters of {type(model).__name__} were sharded "
            "by the program to stay on the device. Pass offload_policy=CPUOffloadPolicy() to each fully_shard, leave "
            "sharding to this package, or use optimizer_offload=True."
        )
    if elsewhere < len(records) or config.optimizer_offload:
        keep_on_host(model, optimizer_state=config.optimizer_offload)


def _use_mlp_tiles(model: nn.Module, config: ParallelConfig, device: torch.device) -> None:
    """Let a model's MLPs compute in tiles, as `mlp_tiles` says, and log which do.

    Raises:
        ConfigError: see `tile_mlps`.
    """
    if config.mlp_tiles == 1:
        return
    tile_mlps(model, config.mlp_tiles, device=device)
    if not dist.is_initialized() or dist.get_rank() == 0:
        log.warning("mlp_tiles=%d: %s", config.mlp_tiles, describe_tiles(model))


def use_float8(model: nn.Module, config: ParallelConfig, device: torch.device) -> None:
    """Let the linear layers of a model's blocks compute in float8, as `float8_recipe` says, and log what was converted.

    Raises:
        ConfigError: the precision is float32, or the model recomputes activations itself and the recipe is one of
            Transformer Engine; see also `convert_linears`.
        MissingExtraError: the library of the recipe is not installed.
    """
    if config.float8_recipe == "none":
        return
    if config.float8_recipe in TE_RECIPES and recomputes_itself(model):
        raise ConfigError(
            f"float8_recipe={config.float8_recipe!r}, but {type(model).__name__} checkpoints its activations itself "
            "(gradient_checkpointing_enable()), and its layers would not have the scales of their forward again. Leave "
            "that out, and use activation_checkpointing='full', which recomputes the same blocks."
        )
    if config.precision == "32-true":
        raise ConfigError(
            f"float8_recipe={config.float8_recipe!r} with precision='32-true': layers in float8 compute all else in "
            "bfloat16. Use precision='bf16-mixed' (Lightning: Trainer(precision='bf16-mixed'))."
        )
    blocks = outermost_blocks(model, config.block_classes)
    done = convert_linears(
        model,
        config.float8_recipe,
        device,
        blocks=blocks,
        gathers_in_float8=config.float8_all_gather,
        pads_inner_dim=config.float8_pad_inner_dim,
        te_scaling=config.te_scaling,
    )
    if not dist.is_initialized() or dist.get_rank() == 0:
        log.warning("%s", done)


def match_degrees(model: nn.Module, config: ParallelConfig) -> None:
    """Check that a model that is sharded already is divided as the configuration says: sequences, experts, matrices.

    Raises:
        ConfigError: it is not, and cannot be divided any more, or again.
    """
    if (split := tensor_degree_of(model)) not in (1, config.tensor_parallel_degree):
        raise ConfigError(
            f"tensor_parallel_degree={config.tensor_parallel_degree}, but matrices of this {type(model).__name__} are "
            f"split over {split} ranks already, which have to read the same samples. Use tensor_parallel_degree="
            f"{split}, or give a new model."
        )
    for name, found, what in (
        ("context_parallel_degree", context_degree_of(model), "sequences cannot be split"),
        ("expert_parallel_degree", expert_degree_of(model), "experts cannot be divided"),
    ):
        asked = getattr(config, name)
        if found == asked:
            continue
        if found == 1:
            problem = (
                f"was sharded already, by the program or with {name}=1, so its {what} any more. Leave the sharding to "
                "this package, give a new model"
            )
        else:
            problem = f"was sharded with {name}={found}, and its {what} in another way. Give a new model"
        raise ConfigError(f"{name}={asked}, but this {type(model).__name__} {problem}, or use {name}={found}.")


def tensor_degree_of(model: nn.Module) -> int:
    """Return the number of ranks over which parameters of a model are split beside its FSDP2 meshes; 1 for none."""
    degrees = {1}
    for part in model.modules():
        for group in parameter_groups(part):
            over: DeviceMesh = group.mesh_info.mesh
            meshes = {each.sharded_param.device_mesh for each in group.fsdp_params}
            degrees |= {mesh.size() // over.size() for mesh in meshes if EXPERT not in (mesh.mesh_dim_names or ())}
    return max(degrees)


def match_float8(model: nn.Module, config: ParallelConfig) -> None:
    """Check that a model that is sharded already was converted as the configuration says, as its layers cannot be now.

    Only how FSDP2 gathers their weights can still be set, if the model has not run yet: as `float8_all_gather` says.

    Raises:
        ConfigError: the model was not converted, or with another recipe, other padding or other scaling, or its weights
            are gathered in another way.
    """
    kind, made = type(model).__name__, conversions_of(model)
    if config.float8_recipe != "none" and not made:
        raise ConfigError(
            f"float8_recipe={config.float8_recipe!r}, but this {kind} was sharded by the program, so "
            "that its layers cannot be converted any more. Leave the sharding to this package, or float8_recipe out."
        )
    for name, conversion in made.items():
        for option in fields(Conversion):
            asked, found = getattr(config, option.name), getattr(conversion, option.name)
            if asked != found:
                raise ConfigError(
                    f"{option.name}={asked!r}, but {name} of this {kind}, which is sharded already, was converted with "
                    f"{option.name}={found!r}, and cannot be converted again. Use that, or give a new model."
                )
    use_float8_gathers(model, config)
    gathered = config.float8_all_gather
    others = [
        name
        for name, each in made.items()
        if each.float8_recipe == "tensorwise" and model.get_submodule(name).is_gathered_in_float8 != gathered
    ]
    if others:
        raise ConfigError(
            f"float8_all_gather={gathered}, but the weight of {others[0]} of this {kind}, which is sharded already, is "
            f"{'not ' if gathered else ''}gathered in float8. Use float8_all_gather={not gathered}, or a new model."
        )


def use_float8_gathers(model: nn.Module, config: ParallelConfig) -> None:
    """Let FSDP2 gather the weights of a sharded model's float8 layers in float8, as `float8_all_gather` says.

    Raises:
        ConfigError: see `gather_in_float8`.
    """
    if config.float8_all_gather:
        from hyperpod_plugins.precision.float8_linear import gather_in_float8  # needs torchao

        gather_in_float8(group for part in model.modules() for group in parameter_groups(part))


def give_values(model: nn.Module, device: torch.device, config: ParallelConfig) -> None:
    """Allocate a model's meta tensors on `device`, and give them their values, as `config.delayed_values` says.

    Parameters that FSDP2 keeps in host memory are allocated there.

    Raises:
        InitializationError: see `materialize` and `materialize_from_source`.
    """
    on_host = ids_on_host(model)
    is_alone = not dist.is_initialized() or dist.get_world_size() == 1 or group_health.suppresses_collectives
    if config.delayed_values == "rank_0" and group_health.suppresses_collectives and not tapes_of(model):
        allocate(model, device, on_host)  # a replacement, whose values come from another rank
        return
    if config.delayed_values == "every_rank" or is_alone:
        materialize(model, device=device, seed=config.random_seed, on_host=on_host)
        return

    def broadcast(tensor: torch.Tensor) -> None:
        there = tensor.to(device)
        dist.broadcast(there, src=0)
        if not is_source and there.data_ptr() != tensor.data_ptr():
            tensor.copy_(there)

    is_source = dist.get_rank() == 0
    materialize_from_source(model, broadcast, is_source=is_source, device=device, on_host=on_host)


def _groups_in_blocks(model: nn.Module, mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Groups of the ranks that compute parts of the same samples: those of tensor and of context parallelism."""
    groups = [mesh["tensor"].get_group()] if mesh["tensor"].size() > 1 else []
    degrees: ContextDegrees | None = vars(model).get(DEGREES)
    return groups if degrees is None else [*groups, degrees.group]


class _PeersOfGroups:
    """The ranks of a grid, of whose axes this rank's groups are given, as `BlockPeers`."""

    def __init__(self, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        self._groups, self._device = groups, device

    def formed(self) -> tuple[int, ...]:
        return tuple(generation_of(group) for group in self._groups)

    def least(self, number: int) -> int:
        least = torch.tensor(number, device=self._device)
        with group_health.checks_host_read():
            for group in self._groups:
                dist.all_reduce(least, dist.ReduceOp.MIN, group)
            return min(number, max(0, int(least)))  # after a break, anything may have been received


def save_activation_memory(
    model: nn.Module,
    config: ParallelConfig,
    device: torch.device,
    pool: HostPool | None = None,
    *,
    groups: Sequence[dist.ProcessGroup] = (),
) -> ActivationOffload | None:
    """Apply recomputation, offload and chunked loss of `config` to a model that is not sharded yet.

    Args:
        model: in place.
        config: configuration to apply.
        device: device of the model.
        pool: host memory for the offload; by default one of its own.
        groups: of the ranks that compute parts of the same samples, with tensor or context parallelism.

    Returns:
        The offload; None without.

    Raises:
        ConfigError: the model has no blocks, or checkpoints or offloads activations itself; see also `chunk_loss`.
    """
    if config.loss_chunks > 1:
        chunk_loss(_language_model(model), config.loss_chunks)
    is_offloaded, kind = config.sm_activation_offloading, config.activation_checkpointing
    if kind == "none" and not is_offloaded:
        return None
    blocks = outermost_blocks(model, config.block_classes)
    if not blocks:
        raise ConfigError(
            f"{type(model).__name__} has no chain of layers whose activations could be recomputed. Name the classes of "
            "its blocks with block_classes, or leave activation_checkpointing and activation_offload out."
        )
    has_own = recomputes_itself(model)
    if has_own and kind != "none":
        raise ConfigError(
            f"activation_checkpointing={kind!r}, but {type(model).__name__} checkpoints its activations itself "
            "(gradient_checkpointing_enable()). Leave one of them out."
        )
    if is_offloaded and offloads_itself(model):
        raise ConfigError(
            f"activation_offload={is_offloaded}, but {type(model).__name__} keeps the inputs of its blocks on the host "
            "itself, with save_on_cpu (activation_checkpointing_enable(offload=True)), and nothing is left to offload. "
            "Leave offload=True out, during whose copies the computation waits, or leave activation_offload out."
        )
    if not has_own:
        recompute_blocks(blocks, "selective" if kind == "selective" else "full", Float8Recomputation.of(model))
    if not is_offloaded:
        return None
    why = _why_all_are_recomputed(model, config, len(blocks))
    return attach_offload(blocks, config, device, pool, recomputes_all=why, groups=groups)


def _why_all_are_recomputed(model: nn.Module, config: ParallelConfig, num_blocks: int) -> str:
    """Why no block may keep its activations with `activation_offload="auto"`; empty if they may."""
    if recomputes_itself(model):
        return "the model checkpoints its activations itself"
    if any(isinstance(part, nn.SyncBatchNorm) for part in model.modules()):
        return "all ranks would have to decide alike for SyncBatchNorm"
    # Parts that are gathered by themselves would be gathered in another order than on ranks that compute them again.
    if len(list(find_blocks(model, config.block_classes))) != num_blocks:
        return "parts of blocks are sharded by themselves"
    if config.expert_parallel_degree > 1:
        return "the memory of a block depends on the tokens that its experts get in a step (expert_parallel_degree)"
    styles = () if config.tensor_plan == "auto" else config.tensor_plan.values()
    if any(isinstance(style, ParallelStyle) for style in styles):
        return "styles of the program's own in tensor_plan may give ranks inputs of different shapes"
    return ""


def attach_offload(
    blocks: Sequence[nn.Module],
    config: ParallelConfig,
    device: torch.device,
    pool: HostPool | None = None,
    *,
    recomputes_all: str = "the program recomputes its blocks itself",
    groups: Sequence[dist.ProcessGroup] = (),
) -> ActivationOffload:
    """Keep the inputs of recomputed blocks on the host, as `sm_activation_offloading` and its horizon say.

    Args:
        blocks: in the order in which the model runs them.
        config: configuration to apply.
        device: device of the model.
        pool: host memory; by default one of its own, as large as the configuration allows.
        recomputes_all: why `"auto"` may not leave out the recomputation of blocks; empty if it may.
        groups: see `save_activation_memory`.
    """
    pool = pool or HostPool(device, budget_bytes=config.activation_host_bytes)
    plan = None
    if config.sm_activation_offloading == "auto":
        plan = AutomaticPlan(
            device,
            recomputes_all=recomputes_all,
            peers=_PeersOfGroups(groups, device) if groups and not recomputes_all else None,
            tensor_degree=config.tensor_parallel_degree,
        )
    offload = ActivationOffload(
        device,
        horizon=config.activation_loading_horizon,
        pool=pool,
        goes_to_host=None if plan is None else plan.goes_to_host,
    )
    offload.attach(blocks)
    if plan is not None:
        plan.attach(blocks)
    return offload


def _language_model(model: nn.Module) -> nn.Module:
    """The Hugging Face model for causal language modelling in a module, or the module itself."""
    found = [part for part in model.modules() if is_causal_language_model(part)]
    if len(found) > 1:
        raise ConfigError(
            f"{type(model).__name__} contains {len(found)} causal language models, and loss_chunks is for one. Leave "
            "loss_chunks out, and call hyperpod_plugins.memory.chunk_loss on those that are trained."
        )
    return found[0] if found else model


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
    """Convert parameters and persistent buffers.

    Non-persistent ones (rotary frequencies) keep their precision, and so do biases of routers that move.
    """
    saved, kept = model.state_dict(keep_vars=True).values(), biases_in_float32(model)
    for tensor in saved:
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and id(tensor) not in kept:
            tensor.data = tensor.data.to(torch.bfloat16)


def loss_parallel_context(config: ParallelConfig) -> AbstractContextManager[None]:
    """Return the context for computing the loss and its backward; required if the logits stay split."""
    return loss_parallel() if config.loss_parallel else nullcontext()


def broadcast_from_rank_0(model: nn.Module, device: torch.device, *, is_delayed_alike: bool = True) -> None:
    """Broadcast parameters and buffers from global rank 0, and the RNG state that delayed parameters start from.

    Otherwise, ranks that built their model from different RNG states would train shards of different models.

    Args:
        model: a module that is not sharded yet.
        device: device that the process group communicates on; values on other devices are copied through it.
        is_delayed_alike: whether tensors without values have the same origin on all ranks; see `match_rank_0`.

    Raises:
        ConfigError: see `match_rank_0`.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    match_rank_0(model, is_delayed_alike=is_delayed_alike)
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta and not isinstance(tensor, DTensor):
            there = tensor.detach().to(device).contiguous()
            dist.broadcast(there, src=0)
            if there.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(there)
    for tape in tapes_of(model) if is_delayed_alike else ():
        state = tape.rng_state.to(device)
        dist.broadcast(state, src=0)
        tape.rng_state = state.cpu()


def match_rank_0(
    model: nn.Module,
    *,
    allocates: bool = False,
    compares_types: bool = True,
    is_delayed_alike: bool = True,
    advice: str = "Build it in the same way on all ranks.",
) -> None:
    """Check that the same tensors have values on all ranks, as those of rank 0 will be copied to the others.

    It sends the names of all tensors from rank 0 and a line from each rank.

    Args:
        model: the whole model, not sharded yet.
        allocates: if all tensors have values on rank 0, first allocate memory for those on the meta device of others.
        compares_types: also compare the element types; False if they will be converted first.
        is_delayed_alike: also compare where tensors without values get theirs: by `delayed_init` or by an initialiser,
            and from which files. False if all of them come from rank 0.
        advice: last sentence of the message.

    Raises:
        ConfigError: they have not, or tensors differ in shape or type, or in what is tied; all ranks raise.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or group_health.suppresses_collectives:
        return  # suppressed: a replacement sets itself up alone, and gets its values later
    received = [_describe(model, compares_types, is_delayed_alike)]
    dist.broadcast_object_list(received, src=0)
    expected = received[0]
    waiting = [name for name, aspects in expected.items() if _HAS_VALUES not in aspects]
    if allocates and not waiting:
        allocate(model, torch.device("cpu"))
        release_tapes(model)
    differences: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(differences, _difference(expected, _describe(model, compares_types, is_delayed_alike)))
    for rank, difference in enumerate(differences):
        if difference:
            raise ConfigError(
                f"{type(model).__name__} takes the values of rank 0, but is built differently on rank {rank}: "
                f"{difference} on rank {rank}. "
                + (f"Rank 0 has no values for {format_list(waiting)}. " if waiting else "")
                + advice
            )


def _describe(model: nn.Module, with_types: bool, with_origin: bool) -> dict[str, _Aspects]:
    """What must be equal on all ranks: of each tensor, whether it has values, its shape, and what it is tied to."""
    found: dict[str, _Aspects] = {}
    names: dict[int, str] = {}
    for module_name, module in model.named_modules():
        binding = binding_of(module)
        for key, tensor in own_tensors(module).items():
            name = full_name(module_name, key)
            first = names.setdefault(id(tensor), name)
            state = _HAS_VALUES
            if tensor.is_meta and not with_origin:
                state = "has no values yet"
            elif tensor.is_meta:
                is_recorded = binding is not None and key in binding.bound
                state = "was built under delayed_init" if is_recorded else "is on the meta device"
            found[name] = (
                state,
                f"has the shape {tuple(tensor.shape)}",
                "is a tensor of its own" if first == name else f"is {first}",
                *([f"is {tensor.dtype}"] if with_types else []),
            )
    digests = [digest for digest in map(files_digest, tapes_of(model)) if digest]
    if digests and with_origin:
        found["the set of its safetensors files"] = (f"has the digest {' '.join(digests)}",)
    return found


def _difference(expected: dict[str, _Aspects], found: dict[str, _Aspects]) -> str:
    """The first tensor that is not as on rank 0, and how it is on both; empty if there is none."""
    missing = ("does not exist",)
    for name in expected | found:
        for ours, theirs in zip(expected.get(name, missing), found.get(name, missing), strict=False):
            if ours != theirs:
                return f"{name} {ours} on rank 0 and {theirs}"
    return ""
