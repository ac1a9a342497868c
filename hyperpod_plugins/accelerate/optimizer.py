"""Accelerate's optimizer and scheduler, where parameters are shards and not every rank reads its own samples."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from hyperpod_plugins.accelerate.compat import AcceleratedOptimizer, AcceleratedScheduler
from hyperpod_plugins.parallel.finite import FiniteCheck, RankLosses
from hyperpod_plugins.parallel.local_optimizer import step_locally


class StepCheck:
    """Looks at what went through `accelerator.backward` and `clip_grad_norm_` since optimizers stepped last."""

    def __init__(self, finite: FiniteCheck) -> None:
        """Look at nothing yet; `finite` says what to do about a step that is not finite."""
        self._finite = finite
        self._losses = RankLosses(finite)
        self._norm: Tensor | None = None
        self._num_batches = self._num_steps = 0
        self._is_new, self._may_update = False, True

    def note_loss(self, loss: Tensor) -> None:
        """Note the loss of this rank's next batch, with one element."""
        if self._finite.looks:
            self._begin()
            self._losses.note(self._num_batches, loss)
        self._num_batches += 1

    def note_norm(self, norm: Tensor) -> None:
        """Note the norm of all gradients, `()`, the same on all ranks."""
        if self._finite.looks:
            self._begin()
            self._norm = norm

    def _begin(self) -> None:
        if not self._is_new:
            self._losses.begin()
            self._norm, self._is_new = None, True

    def allows_update(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer may step; of several that step on the same losses, all do or none.

        Raises:
            NonFiniteError: a loss of any rank, or the norm, is not finite, and the policy is to stop.
        """
        if self._is_new:
            self._losses.settle_before(optimizer)
            self._may_update = self._losses.allows_update(self._norm, step=self._num_steps)
            self._is_new = False
            self._num_steps += 1
        self._finite.raise_if_stopped()
        return self._may_update


class HyperPodOptimizer(AcceleratedOptimizer):
    """An optimizer whose arithmetic runs on local shards, past the dispatch of DTensor; `optimizer` is torch's.

    Args:
        optimizer: torch's.
        check: looks at each step before it is made.
        **options: of Accelerate's own class.
    """

    def __init__(self, optimizer: Optimizer, *, check: StepCheck, **options: Any) -> None:
        super().__init__(optimizer, **options)
        self._check = check

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update parameters where an accumulation window ends; otherwise do nothing.

        A step that is left out, for it is not finite, is skipped in Accelerate's sense: schedulers do not advance.

        Raises:
            NonFiniteError: see `HyperPodPlugin`; nothing was updated.
        """
        if not self.gradient_state.sync_gradients:
            return
        self._is_overflow = closure is None and not self._check.allows_update(self.optimizer)
        if not self._is_overflow:
            step_locally(self.optimizer, closure or _nothing)


class HyperPodScheduler(AcceleratedScheduler):
    """A scheduler that advances by one for each rank that reads its own samples.

    Accelerate's advances by the number of processes, which under tensor parallelism is a multiple of that.
    """

    def __init__(self, *args: Any, data_group: dist.ProcessGroup, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._data_group = data_group  # asked for its size at each step: replicas come and go

    @override
    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance where the optimizer has made a step."""
        is_shared_out = self.step_with_optimizer and not self.split_batches and self.gradient_state.sync_gradients
        if not is_shared_out:
            super().step(*args, **kwargs)
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        end = vars(self.scheduler).get("total_steps")  # of one that refuses to go further (OneCycleLR)
        for _ in range(self._data_group.size()):
            if end is None or self.scheduler._step_count <= end:
                self.scheduler.step(*args, **kwargs)


def _nothing() -> None:
    return None
