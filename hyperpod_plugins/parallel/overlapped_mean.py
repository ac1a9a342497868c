"""The mean of gradients over replicas runs while the backward goes on, on CPUs.

On a GPU, FSDP2 reduces a unit's gradients on a stream of its own. On a CPU it waits for each all-reduce before backward
goes on to the next unit. Here backward goes on at once. A shard gets its gradient at the end of the backward, when the
all-reduce has ended; nothing that runs in between can see or change it.

A unit whose gradients are needed at once is reduced as FSDP2 does it: one that has gradients already (of other losses,
or of a penalty on its shards), that accumulates over micro-steps, whose gradients are converted or divided afterwards,
or that has a hook which runs when a gradient is there.
"""

# FSDP2's parameter groups have no public API.
# pyright: reportPrivateUsage=false

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo
from torch.distributed.tensor import DTensor

from hyperpod_plugins.comm.process_group import ResilientProcessGroup
from hyperpod_plugins.parallel.unit_watch import parameter_groups

_NOT_IN_BACKWARD = -1
_EXACT = (torch.float32, torch.bfloat16)
"""Types of gradients that FSDP2 averages by the all-reduce itself; it divides others afterwards."""


def overlap_means(units: Iterable[nn.Module]) -> None:
    """Let backward go on while gradients of FSDP2 units on CPUs are averaged over replicas.

    Args:
        units: FSDP2 units, sharded over a mesh with replicas or without.
    """
    pending = _PendingMeans()
    for unit in units:
        for group in parameter_groups(unit):
            replicas = group._all_reduce_process_group if isinstance(group.mesh_info, DDPMeshInfo) else None
            if isinstance(replicas, ResilientProcessGroup) and group.device.type == "cpu":
                _OverlappedUnit(group, replicas, pending)


class _PendingMeans:
    """All-reduces of the present backward, with the gradients that they write."""

    def __init__(self) -> None:
        self._backward = _NOT_IN_BACKWARD
        self._means: list[tuple[dist.Work, list[tuple[Any, DTensor]]]] = []

    def add(self, works: list[dist.Work], gradients: list[tuple[Any, DTensor]]) -> None:
        """Set gradients when the works have ended, at the end of the backward that runs now."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:  # what an interrupted one has left is dropped with its graph
            self._backward, self._means = backward, []
            Variable._execution_engine.queue_callback(self._complete)
        *first, last = works
        self._means += [*((work, []) for work in first), (last, gradients)]

    def _complete(self) -> None:
        means, self._means, self._backward = self._means, [], _NOT_IN_BACKWARD
        for work, gradients in means:
            work.wait()
            for of_fsdp, gradient in gradients:
                shard = of_fsdp.sharded_param
                if shard.grad is None:
                    shard.grad = gradient
                else:  # of a penalty on the shards, computed since
                    shard.grad._local_tensor += gradient._local_tensor


class _OverlappedUnit:
    """One FSDP2 parameter group."""

    __slots__ = ("_group", "_pending", "_post_backward", "_replicas")

    def __init__(self, group: Any, replicas: ResilientProcessGroup, pending: _PendingMeans) -> None:
        """Wrap the method that reduces the unit's gradients."""
        self._group, self._replicas, self._pending = group, replicas, pending
        self._post_backward = group.post_backward
        vars(group).update(post_backward=self._reduce)

    def _reduce(self, *args: Any) -> Any:
        if not self._may_wait_later():
            return self._post_backward(*args)
        with self._replicas.deferring_all_reduces() as works:
            result = self._post_backward(*args)
        if works:
            gradients: list[tuple[Any, DTensor]] = []
            for each in self._group.fsdp_params:
                gradient, each.sharded_param.grad = each.sharded_param.grad, None
                if gradient is not None:
                    gradients.append((each, gradient))
            self._pending.add(works, gradients)
        return result

    def _may_wait_later(self) -> bool:
        group = self._group
        if not (group.reduce_grads and group.all_reduce_grads) or group._partial_reduce_output is not None:
            return False
        if group.gradient_divide_factor is not None or group.force_sum_reduction_for_comms:
            return False
        if group._all_reduce_hook is not None or torch._C._current_graph_task_id() == _NOT_IN_BACKWARD:
            return False
        if group._orig_dtype not in _EXACT or (group._reduce_dtype or group._orig_dtype) != group._orig_dtype:
            return False
        return not any(
            each.sharded_param.grad is not None
            or each.offload_to_cpu
            or each.param_dtype not in (None, group._orig_dtype)
            or getattr(each.sharded_param, "_post_accumulate_grad_hooks", None)
            for each in group.fsdp_params
        )
