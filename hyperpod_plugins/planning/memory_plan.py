"""How much memory a rank needs: `plan_memory`, before anything is allocated, for a model on the meta device.

Training state: ZeRO (Rajbhandari et al. 2019, arXiv:1910.02054), section 3.1: what each parameter costs. FSDP2 keeps
parameters, their gradients and the optimizer's states in the type of the parameters, split over `shard x tensor` ranks.

Activations are counted, not estimated: one training step of the model runs with fake tensors, whose operations compute
shapes only, with the recomputation, chunks and tiles of the configuration; `TrackedMemory` counts what it keeps.

Gathered is what FSDP2 would hold at the peak of that step: parameters in the type of computation, messages, and whole
gradients of a unit until all are there; see `GatheredUnits`. What belongs to no unit (embeddings, the head) is gathered
from the forward pass to the end of backward. With `float8_all_gather` weights of float8 layers are gathered in one byte
a value; their gradients keep the type of computation.

What `param_offload` and `optimizer_offload` keep in host memory counts there, and not on the device. A step on the host
also needs a copy of the shards of parameters and gradients, if these are on the device.

Left out: what the libraries need for themselves, 5 to 8 GiB of a large GPU.
"""

# Configurations of transformers have private fields and no common type.
# pyright: reportPrivateUsage=false

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.memory.tiled_mlp import tile_mlps
from hyperpod_plugins.parallel import ParallelConfig, Topology
from hyperpod_plugins.parallel.expert_parallel import layers_of_experts
from hyperpod_plugins.parallel.parallelize import save_activation_memory
from hyperpod_plugins.parallel.tensor_parallel import plan_for
from hyperpod_plugins.parallel.tensor_styles import SPLITS_PARAMETERS
from hyperpod_plugins.planning.gathered_units import GatheredUnits
from hyperpod_plugins.planning.rank_part import (
    plan_context_part,
    plan_expert_part,
    plan_stream_part,
    plan_tensor_part,
)
from hyperpod_plugins.planning.tracked_memory import TrackedMemory, UncountedPool
from hyperpod_plugins.recovery.snapshot import COPIES

GIB = 2**30
_FLOAT32, _BFLOAT16, _FLOAT8 = 4, 2, 1
_SPLIT = ("colwise", "rowwise", "embedding_rowwise", "colwise_gather_output")
_FUSED = "hyperpod_plan"
_FRAGMENTATION = 0.05
"""Part of the device's memory that an allocator loses between blocks of different sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingShape:
    """What one rank computes at a time, and what it keeps for each parameter."""

    micro_batch_size: int
    """Samples of one forward and backward pass of a rank."""
    sequence_length: int
    """Tokens of a sample."""
    optimizer_states: int = 2
    """Tensors of the size of a parameter that the optimizer keeps: 2 for Adam, 1 for SGD with momentum."""
    keeps_gradients: bool = False
    """Whether gradients exist when a backward begins: with accumulation, or `zero_grad(set_to_none=False)`."""
    has_snapshots: bool = False
    """Whether ranks keep buddy snapshots: two of their own state, and two of another rank's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of one rank."""

    topology: Topology
    """Degrees of the plan."""
    num_parameters: int
    """Of the whole model."""
    num_trained: int
    """Of them, those that are trained."""
    parameters: float
    """Shards of the parameters, on the device."""
    gradients: float
    """Shards of the gradients, on the device."""
    optimizer: float
    """Shards of the optimizer's states, on the device."""
    gathered: float
    """Whole parameters and gradients of the units that are being computed."""
    activations: float
    """Peak of what a step keeps besides, logits included."""
    host_state: float
    """In host memory: parameters, gradients and optimizer states, or copies of them while the optimizer steps."""
    host_activations: float
    """In host memory: offloaded activations."""
    host_snapshots: float
    """In host memory: snapshots of this rank's state, and of another's."""

    @property
    def device(self) -> float:
        """Bytes on the device, with a margin for fragmentation."""
        used = self.parameters + self.gradients + self.optimizer + self.gathered + self.activations
        return used * (1 + _FRAGMENTATION)

    @property
    def host(self) -> float:
        """Bytes in host memory."""
        return self.host_state + self.host_activations + self.host_snapshots

    def __str__(self) -> str:
        """Return the parts in GiB."""
        parts = ("parameters", "gradients", "optimizer", "gathered", "activations", "device", "host")
        snapshots = f" (snapshots {self.host_snapshots / GIB:.2f})" if self.host_snapshots else ""
        return "  ".join(f"{name} {getattr(self, name) / GIB:.2f}" for name in parts) + snapshots


def plan_memory(
    model: Any,
    config: ParallelConfig,
    training: TrainingShape,
    *,
    world_size: int,
    ranks_per_node: int = 0,
    step: Callable[[nn.Module, TrainingShape], Tensor] | None = None,
) -> MemoryPlan:
    """Plan the memory of a rank.

    Args:
        model: A module, best on the meta device, or a configuration of transformers. It is not changed.
        config: Degrees, precision and what is done about activations.
        training: Batch, sequence and optimizer.
        world_size: Number of ranks.
        ranks_per_node: Ranks on a node; 0 for all.
        step: Computes the loss of a micro-batch of fake tensors; by default `model(input_ids=..., labels=...).loss`.
            With context parallelism it is given the length of a rank's part of the sequences.

    Raises:
        ConfigError: The step depends on values or uses an operation that fake tensors do not have, or context or
            expert parallelism does not serve the model.
        DegreeError: The degrees do not fit the world.
        NotBuiltYetError: `context_parallel_degree` is above 1, and the model is not one of transformers.
    """
    module = model if isinstance(model, nn.Module) else _built(model)
    topology = config.topology(world_size, ranks_per_node=ranks_per_node)
    tracked = _track_step(module, config, topology, training, step or _language_model_step)
    return _plan(module, config, topology, training, tracked)


def smallest_degrees(
    model: Any,
    config: ParallelConfig,
    training: TrainingShape,
    *,
    world_size: int,
    device_memory_gib: float,
    ranks_per_node: int = 0,
    step: Callable[[nn.Module, TrainingShape], Tensor] | None = None,
) -> MemoryPlan:
    """The plan with the smallest tensor degree, and with it the smallest shard degree, that fits a device.

    Args:
        model: See `plan_memory`.
        config: Of its degrees, only those of context and expert parallelism count, which are kept.
        training: See `plan_memory`.
        world_size: Number of ranks.
        device_memory_gib: Memory of a device that a plan may take, in GiB.
        ranks_per_node: Tensor parallelism stays on a node; 0 for one node.
        step: See `plan_memory`.

    Raises:
        ConfigError: Nothing fits; the message has the plan with the largest degrees.
        NotBuiltYetError: `context_parallel_degree` is above 1, and the model is not one of transformers.
    """
    module = model if isinstance(model, nn.Module) else _built(model)
    plan = None
    inner = math.lcm(config.context_parallel_degree, config.expert_parallel_degree)  # inside the shard axis
    for tensor_degree in _divisors(ranks_per_node or world_size, world_size):
        split = replace(config, tensor_parallel_degree=tensor_degree, hybrid_shard_degree=0)
        most = world_size // tensor_degree
        for shard_degree in (each for each in _divisors(most, most) if each % inner == 0):
            tried = replace(split, hybrid_shard_degree=shard_degree)
            topology = tried.topology(world_size, ranks_per_node=ranks_per_node)
            try:
                shards = _plan(module, tried, topology, training, _TrackedStep())
                if shards.device > device_memory_gib * GIB and shard_degree < most:
                    continue  # whatever a step needs besides
                tracked = _track_step(module, tried, topology, training, step or _language_model_step)
            except ConfigError:
                if tensor_degree == 1:
                    raise
                break  # the model cannot be split so
            plan = _plan(module, tried, topology, training, tracked)
            if plan.device <= device_memory_gib * GIB:
                return plan
    assert plan is not None
    raise ConfigError(
        f"{plan.num_parameters:,} parameters with {training.sequence_length} tokens do not fit {world_size} devices of "
        f"{device_memory_gib:g} GiB; with {plan.topology} a rank needs, in GiB: {plan}. Use more ranks, or what "
        "docs/guides/memory.md lists against activations."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrackedStep:
    """Bytes of one rank in a step, besides its shards."""

    gathered: float = 0.0
    activations: float = 0.0
    host_activations: float = 0.0


def _plan(
    model: nn.Module, config: ParallelConfig, topology: Topology, training: TrainingShape, tracked: _TrackedStep
) -> MemoryPlan:
    stored = _BFLOAT16 if config.precision == "bf16-true" else _FLOAT32
    split = {
        name
        for name, style in plan_for(model, config).items()
        if isinstance(style, SPLITS_PARAMETERS) or style in _SPLIT
    }
    if config.expert_parallel_degree > 1:
        split |= layers_of_experts(model).keys()  # sharded over tensor peers, too

    def count(names: Iterable[tuple[str, nn.Parameter]], *, trained_only: bool = False) -> float:
        """Parameters of one rank of a tensor group."""
        return sum(
            parameter.numel() / (topology.tensor_degree if name.rpartition(".")[0] in split else 1)
            for name, parameter in names
            if parameter.requires_grad or not trained_only
        )

    everything = list(model.named_parameters())
    sharded = count(everything) / topology.shard_degree
    trained = count(everything, trained_only=True) / topology.shard_degree
    optimizer = training.optimizer_states * stored * trained
    shards = {"parameters": stored * sharded, "gradients": stored * trained, "optimizer": optimizer}
    on_host = tuple(shards) if config.param_offload else ("optimizer",) * config.optimizer_offload
    copies = 2 * stored * trained if config.optimizer_offload and not config.param_offload else 0.0
    return MemoryPlan(
        topology=topology,
        num_parameters=sum(parameter.numel() for _, parameter in everything),
        num_trained=sum(parameter.numel() for _, parameter in everything if parameter.requires_grad),
        **{name: 0.0 if name in on_host else size for name, size in shards.items()},
        gathered=tracked.gathered,
        activations=tracked.activations,
        host_state=sum(shards[name] for name in on_host) + copies,
        host_activations=tracked.host_activations,
        host_snapshots=COPIES * (stored * sharded + optimizer) if training.has_snapshots else 0.0,
    )


def _track_step(
    model: nn.Module,
    config: ParallelConfig,
    topology: Topology,
    training: TrainingShape,
    step: Callable[[nn.Module, TrainingShape], Tensor],
) -> _TrackedStep:
    """Run a step with fake tensors, and count."""
    tracker, cpu = TrackedMemory(), torch.device("cpu")
    of_stream = config.tensor_parallel_degree if config.sequence_parallel else 1  # inputs of blocks are parts of it
    options = replace(config, sequence_parallel=False, loss_parallel=False)
    if options.sm_activation_offloading == "auto":  # as a job on GPUs begins
        options = replace(options, sm_activation_offloading=True)
    with FakeTensorMode():
        twin = _fake_twin(model, None if config.precision == "32-true" else torch.bfloat16)
        split = plan_tensor_part(twin, config)
        if config.tensor_parallel_degree > 1 and config.sequence_parallel:
            plan_stream_part(twin, config, tracker)
        if config.context_parallel_degree > 1:
            length = plan_context_part(twin, config, training.sequence_length)
            training = replace(training, sequence_length=length)
        else:
            _leave_masks_out(twin)
        experts = plan_expert_part(twin, config)
        if options.mlp_tiles > 1:
            tile_mlps(twin, options.mlp_tiles, is_tried=False)
        pool = UncountedPool(cpu, tracker, options.activation_host_bytes * of_stream)
        offload = save_activation_memory(twin, options, cpu, pool)
        for parameter in twin.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        kept = [*twin.parameters(), *twin.buffers()]
        for tensor in (*kept, *(each.grad for each in kept if each.grad is not None)):
            tracker.leave_out(tensor)
        keeps_results = training.keeps_gradients or config.param_offload
        units = GatheredUnits(twin, experts, config, topology, tracker, split, keeps_results=keeps_results)
        if topology.world_size > 1:
            units.watch()
        try:
            with tracker:
                loss = step(twin.train(), training)
                if topology.world_size > 1:
                    units.begin_backward()
                loss.backward()
        except (NotImplementedError, RuntimeError) as error:
            raise ConfigError(
                f"a step of {type(model).__name__} cannot be planned with fake tensors, which have no values and not "
                f"all of torch's operations: {str(error).partition(chr(10))[0]}. Give plan_memory a step without that "
                "(step=...), or another implementation of the layer."
            ) from error
    return _TrackedStep(
        gathered=float(tracker.peak_added),
        activations=float(tracker.peak - tracker.peak_added),
        host_activations=0.0 if offload is None else offload.stored_bytes / of_stream,
    )


def _built(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _fake_twin(model: nn.Module, computed: torch.dtype | None) -> nn.Module:
    """A copy of a model with fake tensors, which have no memory, and parameters as FSDP2 gathers them."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        values = torch.empty(parameter.shape, dtype=computed or parameter.dtype)
        memo[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return copy.deepcopy(model, memo)


def _leave_masks_out(model: nn.Module) -> None:
    """Have models of transformers with fused attention build no masks, as they do where they see that none is needed.

    With fake tensors they cannot see that.
    """
    if not any(type(part).__module__.startswith("transformers.") for part in model.modules()):
        return
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(_FUSED, sdpa_attention_forward)
    AttentionMaskInterface.register(_FUSED, _no_mask)
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and part.config._attn_implementation != "eager":
            part.config._attn_implementation = _FUSED


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def _language_model_step(model: nn.Module, training: TrainingShape) -> Tensor:
    shape = training.micro_batch_size, training.sequence_length
    tokens = torch.empty(shape, dtype=torch.int64)
    return model(input_ids=tokens, labels=tokens).loss


def _divisors(number: int, of: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0 and of % each == 0]
