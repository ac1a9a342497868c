"""What one attempt at a step computes: forward and backward of each micro-batch, clipping, and the mean loss."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from hyperpod_plugins.errors import LoopError
from hyperpod_plugins.loops.seat import Seat
from hyperpod_plugins.parallel import ParallelConfig, clip_grad_norm_, loss_parallel_context
from hyperpod_plugins.parallel.shard import without_replica_sync
from hyperpod_plugins.parallel.unit_watch import settle_gradients
from hyperpod_plugins.recovery import seed_micro_step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Computed:
    """What one attempt at a step has computed."""

    result: Any
    """The mean over the global batch of what the program's function returned."""
    norm: Tensor | None
    """Of all gradients before clipping; None where they are not clipped."""
    losses: list[Tensor]
    """Of this rank's micro-steps."""

    @property
    def loss(self) -> Tensor:
        """Mean over the global batch, the same on all ranks."""
        return self.result["loss"] if isinstance(self.result, Mapping) else self.result


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """How a loop's steps are computed."""

    model: nn.Module
    config: ParallelConfig
    backward: Callable[[Tensor], object]
    """Computes gradients of a loss."""
    max_grad_norm: float
    """Largest norm of all gradients as one vector; 0 for no limit."""
    is_step_keyed: bool
    """Whether random numbers are a function of the step."""

    def seed(self, step: int, seat: Seat, part: str) -> None:
        """Begin the stream of what a step's body does before it is computed, or after it was committed."""
        if self.is_step_keyed:
            seed_micro_step(self.config.random_seed, step, 0, seat.topology.data_rank(seat.rank), part)

    def attempt(
        self,
        compute_loss: Callable[[Any], Any],
        batches: tuple[Any, ...],
        weights: tuple[float, ...],
        *,
        step: int,
        seat: Seat,
        num_micro_steps: int,
    ) -> Computed:
        """Compute the gradients of a step; the mean over the global batch of what `compute_loss` returned.

        Args:
            compute_loss: the program's.
            batches: of this rank, one a micro-step.
            weights: of their mean losses.
            step: number of the step.
            seat: of this rank.
            num_micro_steps: by which accumulated losses are divided; a last, smaller step has fewer batches.
        """
        total: Any = None
        losses: list[Tensor] = []
        for index, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
            if self.is_step_keyed:
                seed_micro_step(self.config.random_seed, step, index, seat.topology.data_rank(seat.rank))
            is_last = index == len(batches) - 1
            with nullcontext() if is_last else without_replica_sync(self.model), loss_parallel_context(self.config):
                returned = compute_loss(tree_map(lambda leaf: leaf, batch))  # containers that the function may empty
                loss = _loss_of(returned)
                losses.append(loss.detach())
                if num_micro_steps > 1:
                    loss = loss / num_micro_steps
                self.backward(loss if weight == 1.0 else loss * weight)
            part = tree_map(lambda value, weight=weight: _detached(value) * (weight / num_micro_steps), returned)
            total = part if total is None else tree_map(torch.add, total, part)
        settle_gradients(self.model)
        norm = clip_grad_norm_(self.model.parameters(), self.max_grad_norm) if self.max_grad_norm else None
        return Computed(result=_mean(total, seat.data_group), norm=norm, losses=losses)


def _loss_of(returned: Any) -> Tensor:
    loss = returned.get("loss") if isinstance(returned, Mapping) else returned
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise LoopError(
            "the function given to step.run(...) must return the loss as a tensor of one element whose backward has "
            f"not been run, or a dict with it as 'loss', but returned {type(returned).__name__}. Leave backward to it."
        )
    return loss


def _detached(value: Any) -> Tensor:
    return torch.as_tensor(value).detach().float().reshape(())


def _mean(total: Any, group: dist.ProcessGroup) -> Any:
    """The mean over the ranks of a group, in one message."""
    names = list(total) if isinstance(total, Mapping) else [""]
    values = torch.stack([total[name] for name in names] if isinstance(total, Mapping) else [total])
    dist.all_reduce(values, group=group)
    values /= dist.get_world_size(group)
    return dict(zip(names, values.unbind(), strict=True)) if isinstance(total, Mapping) else values[0]
