"""Accelerate's optimizer and scheduler, where parameters are shards and not every rank reads its own samples."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from hyperpod_plugins.accelerate.library import AcceleratedOptimizer, AcceleratedScheduler
from hyperpod_plugins.parallel.local_update import step_locally


class HyperPodOptimizer(AcceleratedOptimizer):
    """An optimizer whose arithmetic runs on local shards, past the dispatch of DTensor; `optimizer` is torch's."""

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update parameters where an accumulation window ends; otherwise do nothing."""
        if self.gradient_state.sync_gradients:
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
        end = vars(self.scheduler).get("total_steps")  # of one that refuses to go further (OneCycleLR)
        for _ in range(self._data_group.size()):
            if end is None or self.scheduler._step_count <= end:
                self.scheduler.step(*args, **kwargs)


def _nothing() -> None:
    return None
