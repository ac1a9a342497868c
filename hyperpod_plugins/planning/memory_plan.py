"""How much memory a rank needs: `plan_memory`, before anything is allocated, for a model on the meta device.

Training state: ZeRO (Rajbhandari et al. 2019, arXiv:1910.02054), section 3.1: what each parameter costs. FSDP2 keeps
parameters, their gradients and the optimizer's states in the type of the parameters, split over `shard x tensor` ranks.
While the optimizer steps, it needs memory of its own; see `state_memory.py`.

Activations are counted, not estimated: one training step of the model runs with fake tensors, whose operations compute
shapes only, with the recomputation, chunks and tiles of the configuration; `TrackedMemory` counts what it keeps.

Gathered is what FSDP2 would hold at the peak of that step: parameters in the type of computation, messages, and whole
gradients of a unit until all are there; see `GatheredUnits`. What belongs to no unit (embeddings, the head) is gathered
from the forward pass to the end of backward. Results of reductions stay: they are the gradients, or, where gradients
exist before, are held beside them until backward has ended. With `float8_all_gather` weights of float8 layers are
gathered in one byte a value; their gradients keep the type of computation.

What `param_offload` and `optimizer_offload` keep in host memory counts there, and not on the device. A step on the host
also needs a copy of the shards of parameters and gradients, if these are on the device.

Left out: what the libraries need for themselves, 5 to 8 GiB of a large GPU.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.parallel import ParallelConfig, Topology
from hyperpod_plugins.planning.closed_forms import check_whole
from hyperpod_plugins.planning.state_memory import TrainingShape, plan_state
from hyperpod_plugins.planning.tracked_step import TrackedStep, language_model_step, track_step
from hyperpod_plugins.recovery.snapshot import COPIES

GIB = 2**30
_FRAGMENTATION = 0.05
"""Part of the device's memory that an allocator loses between blocks of different sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of one rank.

    A step has two peaks: one in forward and backward, with activations and what FSDP2 gathers, and one while the
    optimizer steps, with all gradients and what the step needs besides.
    """

    topology: Topology
    """Degrees of the plan."""
    num_parameters: int
    """Of the whole model."""
    num_trained: int
    """Of them, those that are trained."""
    parameters: float
    """Shards of the parameters, on the device."""
    gradients: float
    """Shards of the gradients, on the device; all of them exist while the optimizer steps."""
    optimizer: float
    """Shards of the optimizer's states, on the device."""
    gradients_in_backward: float
    """Of the gradients, those that exist at the peak of forward and backward: all if they are kept between steps."""
    gathered: float
    """Whole parameters and gradients of the units that are being computed, at the peak of forward and backward."""
    activations: float
    """What forward and backward hold besides, logits included, at their peak."""
    logits: float
    """Of the activations at that peak, logits of a causal language model of transformers, and what its loss computes of
    them; 0 if the peak is elsewhere, such as in the backward of a block when the loss is computed in chunks."""
    temporary: float
    """What the optimizer's step needs besides, on the device."""
    host_state: float
    """In host memory: parameters, gradients and optimizer states, or copies of them while the optimizer steps."""
    host_temporary: float
    """In host memory: what the optimizer's step needs besides, if it computes there."""
    host_margin: float
    """In host memory: what torch's allocator of pinned memory adds to `param_offload` on GPUs, by rounding sizes up."""
    host_activations: float
    """In host memory: offloaded activations."""
    host_snapshots: float
    """In host memory: snapshots of this rank's state, and of another's."""

    @property
    def in_backward(self) -> float:
        """Bytes on the device at the peak of forward and backward."""
        kept = self.parameters + self.gradients_in_backward + self.optimizer
        return kept + self.gathered + self.activations

    @property
    def in_optimizer_step(self) -> float:
        """Bytes on the device at the peak of the optimizer's step."""
        return self.parameters + self.gradients + self.optimizer + self.temporary

    @property
    def peak(self) -> float:
        """Bytes on the device at the peak of a step, without a margin: what its allocator should have handed out."""
        return max(self.in_backward, self.in_optimizer_step)

    @property
    def device(self) -> float:
        """Bytes on the device, with a margin for fragmentation."""
        return self.peak * (1 + _FRAGMENTATION)

    @property
    def host(self) -> float:
        """Bytes in host memory, with what pinned memory takes besides."""
        state = self.host_state + self.host_temporary + self.host_margin
        return state + self.host_activations + self.host_snapshots

    def __str__(self) -> str:
        """Return the parts in GiB."""
        names = ("parameters", "gradients", "optimizer", "gathered", "activations", "temporary")
        totals = ("in_backward", "in_optimizer_step", "device", "host")
        sizes = {name: f"{name} {getattr(self, name) / GIB:.2f}" for name in names}
        sizes["activations"] += f" (logits {self.logits / GIB:.2f})"
        peaks = "  ".join(f"{name.replace('_', ' ')} {getattr(self, name) / GIB:.2f}" for name in totals)
        snapshots = f" (snapshots {self.host_snapshots / GIB:.2f})" if self.host_snapshots else ""
        return f"{'  '.join(sizes.values())}  |  {peaks}{snapshots}"


def plan_memory(
    model: Any,
    config: ParallelConfig,
    training: TrainingShape,
    *,
    world_size: int,
    ranks_per_node: int = 0,
    host_memory_gib: float | None = None,
    step: Callable[[nn.Module, TrainingShape], Tensor] | None = None,
) -> MemoryPlan:
    """Plan the memory of a rank.

    Args:
        model: A module, best on the meta device, or a configuration of transformers of which `AutoModelForCausalLM`
            builds a model. It is not changed.
        config: Degrees, precision and what is done about activations.
        training: Batch, sequence and optimizer.
        world_size: Number of ranks.
        ranks_per_node: Ranks on a node; 0 for all.
        host_memory_gib: Memory of a node, in GiB. Offloaded activations then get what they get in a job: unless
            `activation_host_memory_gib` says more, half of a rank's part of it. The rest stays on the device. None for
            no limit. Whether the plan fits is not checked.
        step: Computes the loss of a micro-batch of fake tensors; by default `model(input_ids=..., labels=...).loss`.
            With context parallelism it is given the length of a rank's part of the sequences.

    Raises:
        ConfigError: An argument is of another type or out of range. The model is a configuration of which no causal
            language model can be built. The step depends on values or uses an operation
            that fake tensors do not have, or context or expert parallelism does not serve the model.
        DegreeError: The degrees do not fit the world.
        NotBuiltYetError: `context_parallel_degree` is above 1, and the model is not one of transformers.
    """
    _check_arguments(config, training, world_size, ranks_per_node, host_memory_gib)
    module = model if isinstance(model, nn.Module) else built_model(model)
    topology = config.topology(world_size, ranks_per_node=ranks_per_node)
    limits = _Limits(host_memory_gib=host_memory_gib, ranks_per_node=ranks_per_node or world_size)
    tracked = track_step(module, limits.config(config), topology, training, step or language_model_step)
    return _plan(module, config, topology, training, tracked)


def smallest_degrees(
    model: Any,
    config: ParallelConfig,
    training: TrainingShape,
    *,
    world_size: int,
    device_memory_gib: float,
    ranks_per_node: int = 0,
    host_memory_gib: float | None = None,
    step: Callable[[nn.Module, TrainingShape], Tensor] | None = None,
) -> MemoryPlan:
    """The plan with the smallest tensor degree, and with it the smallest shard degree, that fits devices and hosts.

    Args:
        model: See `plan_memory`.
        config: Of its degrees, only those of context and expert parallelism count, which are kept.
        training: See `plan_memory`.
        world_size: Number of ranks.
        device_memory_gib: Memory of a device that a plan may take, in GiB.
        ranks_per_node: Tensor parallelism stays on a node, whose ranks share its memory; 0 for one node.
        host_memory_gib: Memory of a node that the plans of its ranks may take together, in GiB; None for no limit. See
            also `plan_memory`.
        step: See `plan_memory`.

    Raises:
        ConfigError: Nothing fits; the message has the plan with the largest degrees. See also `plan_memory`.
        NotBuiltYetError: `context_parallel_degree` is above 1, and the model is not one of transformers.
    """
    _check_arguments(config, training, world_size, ranks_per_node, host_memory_gib, device_memory_gib)
    module = model if isinstance(model, nn.Module) else built_model(model)
    limits = _Limits(
        device_memory_gib=device_memory_gib,
        host_memory_gib=host_memory_gib,
        ranks_per_node=ranks_per_node or world_size,
    )
    plan = None
    inner = math.lcm(config.context_parallel_degree, config.expert_parallel_degree)  # inside the shard axis
    for tensor_degree in _divisors(ranks_per_node or world_size, world_size):
        split = replace(config, tensor_parallel_degree=tensor_degree, hybrid_shard_degree=0)
        most = world_size // tensor_degree
        for shard_degree in (each for each in _divisors(most, most) if each % inner == 0):
            tried = replace(split, hybrid_shard_degree=shard_degree)
            topology = tried.topology(world_size, ranks_per_node=ranks_per_node)
            try:
                shards = _plan(module, tried, topology, training, TrackedStep())
                if limits.exceeded(shards) and shard_degree < most:
                    continue  # whatever a step needs besides
                tracked = track_step(module, limits.config(tried), topology, training, step or language_model_step)
            except ConfigError:
                if tensor_degree == 1:
                    raise
                break  # the model cannot be split so
            plan = _plan(module, tried, topology, training, tracked)
            if not limits.exceeded(plan):
                return plan
    assert plan is not None
    raise ConfigError(
        f"{plan.num_parameters:,} parameters with {training.sequence_length} tokens do not fit {world_size} "
        f"{' and '.join(limits.exceeded(plan))}; with {plan.topology} a rank needs, in GiB: {plan}. Use more ranks, or "
        "what docs/guides/memory.md lists against activations."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """Memory that plans may take."""

    device_memory_gib: float = math.inf
    host_memory_gib: float | None
    """Of a node."""
    ranks_per_node: int

    def exceeded(self, plan: MemoryPlan) -> list[str]:
        """Names the limits that a plan does not keep."""
        limits: list[str] = []
        if plan.device > self.device_memory_gib * GIB:
            limits.append(f"devices of {self.device_memory_gib:g} GiB")
        of_node = plan.host * self.ranks_per_node
        if self.host_memory_gib is not None and of_node > self.host_memory_gib * GIB:
            limits.append(
                f"{'' if limits else 'devices '}on nodes with {self.host_memory_gib:g} GiB of host memory, of which "
                f"{self.ranks_per_node} ranks need {of_node / GIB:.2f}"
            )
        return limits

    def config(self, config: ParallelConfig) -> ParallelConfig:
        """Limit offloaded activations as a job does; see `HostPool`."""
        if self.host_memory_gib is None or config.activation_host_memory_gib:
            return config
        return replace(config, activation_host_memory_gib=self.host_memory_gib / self.ranks_per_node / 2)


def exceeded_limits(
    plan: MemoryPlan, *, device_memory_gib: float, host_memory_gib: float | None, ranks_per_node: int
) -> list[str]:
    """Names the limits that a plan does not keep; see `smallest_degrees`."""
    limits = _Limits(
        device_memory_gib=device_memory_gib, host_memory_gib=host_memory_gib, ranks_per_node=ranks_per_node
    )
    return limits.exceeded(plan)


def _plan(
    model: nn.Module, config: ParallelConfig, topology: Topology, training: TrainingShape, tracked: TrackedStep
) -> MemoryPlan:
    state = plan_state(model, config, topology, training)
    shards = {"parameters": state.parameters, "gradients": state.gradients, "optimizer": state.optimizer}
    on_host = tuple(shards) if config.param_offload else ("optimizer",) * config.optimizer_offload
    copies = 2 * state.gradients if config.optimizer_offload and not config.param_offload else 0.0
    parameters = list(model.parameters())
    on_device = {name: 0.0 if name in on_host else size for name, size in shards.items()}
    return MemoryPlan(
        topology=topology,
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_trained=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        **on_device,
        gradients_in_backward=on_device["gradients"] if training.keeps_gradients else tracked.gradients,
        gathered=tracked.gathered,
        activations=tracked.activations,
        logits=tracked.logits,
        temporary=0.0 if on_host else state.temporary,
        host_state=sum(shards[name] for name in on_host) + copies,
        host_temporary=state.temporary if on_host else 0.0,
        host_margin=state.rounding if config.param_offload else 0.0,
        host_activations=tracked.host_activations,
        host_snapshots=COPIES * (state.parameters + state.optimizer) if training.has_snapshots else 0.0,
    )


_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Sizes of a configuration of transformers that are whole numbers from 1 on, where a model has them."""
_NEEDED = ("hidden_size", "num_hidden_layers")
_ERRORS_OF_MODELS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError, AssertionError)
"""What the code of a model raises that was given sizes with which it cannot be built."""


def built_model(config: Any) -> nn.Module:
    """Build the model of a configuration of transformers on the meta device.

    Raises:
        ConfigError: It is not such a configuration, or no causal language model can be built of it.
    """
    from transformers import AutoModelForCausalLM, PretrainedConfig

    instead = (
        "Give a configuration of which transformers' AutoModelForCausalLM builds a model, or any nn.Module; step=... "
        "computes its loss, if that is not model(input_ids=..., labels=...).loss."
    )
    if not isinstance(config, PretrainedConfig):
        what = f"the class {config.__name__}" if isinstance(config, type) else f"{config!r:.80}"
        raise ConfigError(
            f"a model of {type(config).__name__} cannot be planned: {what} is neither a configuration of "
            f"transformers nor an nn.Module. {instead}"
        )
    name, text = type(config).__name__, config.get_text_config()
    for size in _SIZES:
        value = getattr(text, size, None)
        is_absent = value is None and size not in _NEEDED
        if not (is_absent or isinstance(value, list | tuple) or (type(value) is int and value > 0)):
            raise ConfigError(
                f"a model of {name} cannot be planned: its {size} must be a whole number of at least 1, but is "
                f"{value!r}. Correct the configuration."
            )
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except _ERRORS_OF_MODELS as error:
        told = str(error).partition(chr(10))[0].rstrip(".")
        raise ConfigError(f"a model of {name} cannot be planned: {type(error).__name__}: {told}. {instead}") from error


def _check_arguments(
    config: object,
    training: object,
    world_size: int,
    ranks_per_node: int,
    host_memory_gib: float | None,
    device_memory_gib: float = math.inf,
) -> None:
    """Check what `plan_memory` and `smallest_degrees` are given.

    Raises:
        ConfigError: See there.
    """
    for name, value, kind in (("config", config, ParallelConfig), ("training", training, TrainingShape)):
        if not isinstance(value, kind):
            raise ConfigError(f"{name} must be a {kind.__name__}, but is {value!r:.80}.")
    check_whole({"world_size": world_size}, least=1)
    check_whole({"ranks_per_node": ranks_per_node}, least=0)
    for name, size in (("host_memory_gib", host_memory_gib), ("device_memory_gib", device_memory_gib)):
        is_unlimited = size is None and name == "host_memory_gib"
        if not (is_unlimited or (isinstance(size, int | float) and size > 0)):
            limit = ", or None for no limit" if name == "host_memory_gib" else ""
            raise ConfigError(f"{name} must be a number of GiB above 0{limit}, but is {size!r}.")


def _divisors(number: int, of: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0 and of % each == 0]
