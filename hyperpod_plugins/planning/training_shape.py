"""What a rank computes at a time, and what its optimizer keeps and takes: what a plan has to know of a training."""

from dataclasses import dataclass
from typing import Literal, get_args

from hyperpod_plugins.errors import ConfigError, format_list

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
        """Check the name of the implementation."""
        allowed = get_args(OptimizerImplementation)
        if self.optimizer_implementation not in allowed:
            raise ConfigError(
                f"optimizer_implementation={self.optimizer_implementation!r} is none of {format_list(allowed)}."
            )
