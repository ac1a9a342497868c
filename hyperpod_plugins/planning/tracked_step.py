"""One training step of a model with fake tensors, as one rank computes it: what it holds at its peak."""

# Configurations of transformers have private fields and no common type.
# pyright: reportPrivateUsage=false

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.memory.tiled_mlp import tile_mlps
from hyperpod_plugins.parallel import ParallelConfig, Topology
from hyperpod_plugins.parallel.context_parallel import causal_language_models
from hyperpod_plugins.parallel.hsdp import outermost_blocks
from hyperpod_plugins.parallel.parallelize import save_activation_memory
from hyperpod_plugins.planning.gathered_units import GATHERED, GRADIENTS, GatheredUnits
from hyperpod_plugins.planning.rank_part import (
    plan_context_part,
    plan_expert_part,
    plan_stream_part,
    plan_tensor_part,
)
from hyperpod_plugins.planning.state_memory import TrainingShape, stored_dtype
from hyperpod_plugins.planning.tracked_memory import TrackedMemory, UncountedPool

_FUSED = "hyperpod_plan"
_LOGITS = "logits"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedStep:
    """Bytes of one rank at the peak of forward and backward, besides its shards of what exists before."""

    gathered: float = 0.0
    """Whole parameters and gradients, messages, and results of reductions that are not gradients."""
    gradients: float = 0.0
    """Shards of gradients that have arisen in the step."""
    activations: float = 0.0
    """All else."""
    logits: float = 0.0
    """Of the activations, logits of a causal language model and what its loss computes of them."""
    host_activations: float = 0.0
    """Offloaded activations, in host memory."""


def track_step(
    model: nn.Module,
    config: ParallelConfig,
    topology: Topology,
    training: TrainingShape,
    step: Callable[[nn.Module, TrainingShape], Tensor],
) -> TrackedStep:
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
        save_activation_memory(twin, options, cpu, pool)
        for parameter in twin.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        kept = [*twin.parameters(), *twin.buffers()]
        for tensor in (*kept, *(each.grad for each in kept if each.grad is not None)):
            tracker.leave_out(tensor)
        units = GatheredUnits(
            twin,
            experts,
            config,
            topology,
            tracker,
            split,
            {name: stored_dtype(each, config) for name, each in model.named_parameters()},
            makes_gradients=not (training.keeps_gradients or config.param_offload),
        )
        units.watch()
        _watch_logits(twin, config, tracker)
        try:
            with tracker:
                loss = step(twin.train(), training)
                units.begin_backward()
                loss.backward()
        except (NotImplementedError, RuntimeError) as error:
            raise ConfigError(
                f"a step of {type(model).__name__} cannot be planned with fake tensors, which have no values and not "
                f"all of torch's operations: {str(error).partition(chr(10))[0]}. Give plan_memory a step without that "
                "(step=...), or another implementation of the layer."
            ) from error
    kinds = tracker.peak_of_kind
    return TrackedStep(
        gathered=float(kinds[GATHERED]),
        gradients=float(kinds[GRADIENTS]),
        activations=float(tracker.peak - kinds[GATHERED] - kinds[GRADIENTS]),
        logits=float(kinds[_LOGITS]),
        host_activations=pool.allocated_bytes / of_stream,
    )


def _watch_logits(model: nn.Module, config: ParallelConfig, tracker: TrackedMemory) -> None:
    """Have the tracker tell logits apart: the rows of the vocabulary that arise in the head and the loss, and backward.

    That is from where the head of a causal language model of transformers is called to where the last block's backward
    begins. Models of other kinds have none.
    """
    heads = [each.get_output_embeddings() for each in causal_language_models(model)]
    if len(heads) != 1 or heads[0] is None:
        return
    is_loss = False

    def switch(now: bool, *_: Any) -> None:
        nonlocal is_loss
        is_loss = now

    def kind_of(tensor: Tensor) -> str:
        is_row = tensor.dim() > 1 and tensor.shape[-1] == len(heads[0].weight)
        return _LOGITS if is_loss and is_row else ""

    tracker.kind_of = kind_of
    heads[0].register_forward_pre_hook(partial(switch, True))
    for block in outermost_blocks(model, config.block_classes):
        block.register_full_backward_pre_hook(partial(switch, False))


def _fake_twin(model: nn.Module, computed: torch.dtype | None) -> nn.Module:
    """A copy of a model with fake tensors, which have no memory, and parameters as FSDP2 gathers them."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        values = torch.empty(
            parameter.shape, dtype=computed if computed and parameter.is_floating_point() else parameter.dtype
        )
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


def language_model_step(model: nn.Module, training: TrainingShape) -> Tensor:
    """Compute the loss of a causal language model of transformers.

    Raises:
        ConfigError: The model cannot be called as one, or returns no loss.
    """
    shape = training.micro_batch_size, training.sequence_length
    tokens = torch.empty(shape, dtype=torch.int64)
    instead = "Give step=..., a function of the model and the TrainingShape that computes the loss."
    try:
        loss = getattr(model(input_ids=tokens, labels=tokens), "loss", None)
    except TypeError as error:
        raise ConfigError(
            f"{type(model).__name__} cannot be planned as a causal language model, which is called as "
            f"model(input_ids=..., labels=...): {error}. {instead}"
        ) from error
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"{type(model).__name__} returns no loss when it is called as model(input_ids=..., labels=...). {instead}"
        )
    return loss
