"""What one rank's part of the training state takes: parameters, gradients, optimizer state, the optimizer's step.

`TrainingShape` is what a plan has to know of a training: what a rank computes at a time, and how its optimizer steps.

FSDP2 keeps all three in the type that a parameter has, split over `shard x tensor` ranks: `bf16-mixed` computes in
bfloat16, but stores what the model has. `bf16-true` converts parameters to bfloat16 first.

[Note: memory of an optimizer's step] Adam divides by a square root that exists beside its states. With `foreach`, which
torch chooses on GPUs, those of all parameters exist at once, as large as the parameters together. The loop over
parameters needs two tensors of the size of one (the root, and the root divided by a number); the fused kernel none. The
other elementwise optimizers of torch need as much or less, with few exceptions: Adadelta, and weight decay that is
added to gradients beside such a root (`RMSprop(weight_decay=...)`), need up to twice that with `foreach`.

[Note: pinned memory] With `param_offload` on GPUs, FSDP2 keeps each shard of a parameter or gradient in pinned memory,
and torch's allocator of pinned memory rounds each up to a power of two (pytorch/pytorch#150517), unless it is told a
limit for that. Pinned memory of this package is whole pages.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn

from hyperpod_plugins.errors import ConfigError, format_list
from hyperpod_plugins.parallel import ParallelConfig, Topology
from hyperpod_plugins.parallel.expert_parallel import layers_of_experts
from hyperpod_plugins.parallel.tensor_parallel import plan_for
from hyperpod_plugins.parallel.tensor_styles import SPLITS_PARAMETERS
from hyperpod_plugins.planning.closed_forms import check_whole

_SPLIT = ("colwise", "rowwise", "embedding_rowwise", "colwise_gather_output")
OptimizerImplementation = Literal["auto", "foreach", "for_loop", "fused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingShape:
    """What one rank computes at a time, and what it keeps for each parameter."""

    micro_batch_size: int
    """Samples of one forward and backward pass of a rank."""
    sequence_length: int
    """Tokens of a sample."""
    optimizer_states: int = 2
    """Tensors of the size of a parameter that the optimizer keeps: 2 for Adam, 1 for SGD with momentum."""
    optimizer_implementation: OptimizerImplementation = "auto"
    """Which of torch's implementations steps: `"foreach"`, `"for_loop"` (`foreach=False`) or `"fused"`. `"auto"` is
    torch's choice: `"foreach"` on GPUs, `"for_loop"` where the optimizer steps in host memory. On a CPU without such
    options it is `"for_loop"`, which a plan for CPUs must name."""
    keeps_gradients: bool = False
    """Whether gradients exist when a backward begins: with accumulation, or `zero_grad(set_to_none=False)`. Otherwise
    they grow in backward, while activations are freed."""
    has_snapshots: bool = False
    """Whether ranks keep buddy snapshots: two of their own state, and two of another rank's."""

    def __post_init__(self) -> None:
        """Check the numbers and the name of the implementation."""
        shape = {"micro_batch_size": self.micro_batch_size, "sequence_length": self.sequence_length}
        check_whole(shape, least=1)
        check_whole({"optimizer_states": self.optimizer_states}, least=0)
        for name, value in (("keeps_gradients", self.keeps_gradients), ("has_snapshots", self.has_snapshots)):
            if type(value) is not bool:
                raise ConfigError(f"{name} must be True or False, but is {value!r}.")
        allowed = get_args(OptimizerImplementation)
        if self.optimizer_implementation not in allowed:
            raise ConfigError(
                f"optimizer_implementation={self.optimizer_implementation!r} is none of {format_list(allowed)}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMemory:
    """Bytes of one rank's part, on the device or the host."""

    parameters: float
    """Shards of the parameters."""
    gradients: float
    """Shards of the gradients."""
    optimizer: float
    """Shards of the optimizer's states."""
    temporary: float
    """Of the optimizer's step, where it computes."""
    rounding: float
    """What pinned memory for shards of parameters and gradients takes besides: see [Note: pinned memory]."""


def plan_state(model: nn.Module, config: ParallelConfig, topology: Topology, training: TrainingShape) -> StateMemory:
    """Return what one rank keeps of a model that is not sharded, and what its optimizer's step needs besides."""
    sizes = list(_shard_sizes(model, config, topology))
    trained = [size for parameter, size in sizes if parameter.requires_grad]
    return StateMemory(
        parameters=sum(size for _, size in sizes),
        gradients=sum(trained),
        optimizer=training.optimizer_states * sum(trained),
        temporary=_temporary(trained, config, training),
        rounding=sum(_power_of_two(size) - size for size in (*(size for _, size in sizes), *trained)),
    )


def stored_dtype(parameter: torch.Tensor, config: ParallelConfig) -> torch.dtype:
    """Return the type in which FSDP2 keeps a parameter, its gradient and the optimizer's states."""
    is_converted = config.precision == "bf16-true" and parameter.is_floating_point()
    return torch.bfloat16 if is_converted else parameter.dtype


def _shard_sizes(model: nn.Module, config: ParallelConfig, topology: Topology) -> Iterator[tuple[nn.Parameter, float]]:
    split = {
        name
        for name, style in plan_for(model, config).items()
        if isinstance(style, SPLITS_PARAMETERS) or style in _SPLIT
    }
    if config.expert_parallel_degree > 1:
        split |= layers_of_experts(model).keys()  # sharded over tensor peers, too
    for name, parameter in model.named_parameters():
        ranks = topology.shard_degree * (topology.tensor_degree if name.rpartition(".")[0] in split else 1)
        yield parameter, parameter.numel() * stored_dtype(parameter, config).itemsize / ranks


def _power_of_two(num_bytes: float) -> int:
    return 1 << max(0, math.ceil(num_bytes) - 1).bit_length()


def _temporary(trained: list[float], config: ParallelConfig, training: TrainingShape) -> float:
    """See [Note: memory of an optimizer's step]."""
    implementation = training.optimizer_implementation
    if implementation == "auto":
        implementation = "for_loop" if config.param_offload or config.optimizer_offload else "foreach"
    if implementation == "foreach":
        return sum(trained)
    return 2 * max(trained, default=0.0) if implementation == "for_loop" else 0.0
