"""Gradients of a model of which each rank has a whole copy: averaged in buckets while backward goes on, as in DDP.

With one rank a shard there is nothing to gather, so units that are gathered one by one only cost time: each switches
its parameters between shard and whole twice in a step, and reduces gradients of its own. Where `takes_buckets` says
so, the whole model is one FSDP2 unit. It would reduce its gradients when backward ends; here they are copied into
buckets as soon as backward has computed them, and a bucket that is full is averaged while backward goes on.

[Note: what makes the bits] Which gradients share a bucket, and the order of the all-reduces, follow from the order of
the parameters and from which of them are frozen: not from timing, and not from what this rank has used. So ranks may
run different modules; what one has not used is zero. With two replicas the bits are those of reductions unit by unit.

[Note: left to FSDP2] Whatever is still with a gathered parameter when backward ends, FSDP2 reduces as usual: in
micro-steps that are not averaged over replicas, where the program has set a divisor or a hook for FSDP2's
reductions, and gradients that come after their bucket has left, as with reentrant checkpoints.
"""

# FSDP2's parameter groups have no public API.
# pyright: reportPrivateUsage=false

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hyperpod_plugins.comm import ResilientProcessGroup
from hyperpod_plugins.comm.work import ResilientWork
from hyperpod_plugins.parallel.config import ParallelConfig

BUCKET_BYTES = 25 * 2**20
_DIVIDED_BY_LIBRARY = torch.float32, torch.bfloat16
"""Types in which the collective library computes the mean; FSDP2 itself divides others."""


def takes_buckets(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> bool:
    """Whether a model is to be one unit whose gradients are averaged in buckets; the same on all ranks.

    Args:
        model: not sharded yet.
        mesh: as in `shard_hybrid`.
        config: configuration to apply.
    """
    is_plain = (
        config.hybrid_shard_degree == 1
        and config.tensor_parallel_degree == 1
        and not config.block_classes  # the program may rely on them, as in hooks that read reduced gradients
        and config.precision != "bf16-mixed"  # the copies in bfloat16 would all exist at once
        and config.float8_recipe == "none"
        and not (config.param_offload or config.optimizer_offload or config.node_collectives)
    )
    if not is_plain or mesh.ndim != 2 or mesh.size(1) != 1 or mesh.device_type != "cpu":
        return False
    parameters = list(model.parameters())
    types = {each.dtype for each in parameters}
    return (
        isinstance(mesh.get_group(0), ResilientProcessGroup)
        and len(types) == 1
        and types <= {*_DIVIDED_BY_LIBRARY}
        and not any(isinstance(each, DTensor) for each in parameters)
        and not any(isinstance(part, FSDPModule) for part in model.modules())
    )


class _Slot:
    """The place of one parameter's gradient in a bucket."""

    __slots__ = ("bucket", "handle", "node", "of_fsdp", "parameter", "partial", "view", "whole")

    def __init__(self, of_fsdp: Any, parameter: Any) -> None:
        self.of_fsdp, self.parameter = of_fsdp, parameter
        self.whole: Any = None
        """The gathered parameter whose gradients are followed."""
        self.node: Any = None
        """What accumulates its gradients in backward; torch keeps the hook only as long as this."""
        self.handle: Any = None
        self.bucket: _Bucket | None = None
        self.view: Any = None
        """Its part of the bucket, shaped like the parameter."""
        self.partial: Any = None
        """The sum of micro-steps that were not averaged over replicas, to be added."""

    @property
    def is_expected(self) -> bool:
        """Whether a backward may compute its gradient, or has left one there."""
        whole = self.whole
        return whole is not None and (whole.requires_grad or whole.grad is not None)


class _Bucket:
    """Gradients that are averaged in one message."""

    __slots__ = ("flat", "group", "num_missing", "slots", "work")

    def __init__(self, slots: Sequence[_Slot], group: dist.ProcessGroup) -> None:
        self.slots, self.group = slots, group
        self.num_missing = len(slots)
        self.flat: torch.Tensor | None = None
        self.work: Any = None

    def give(self, slot: _Slot) -> None:
        """Move the gradient of a parameter into the bucket, or add one that comes later."""
        if self.flat is None:
            self._allocate()
        gradient = slot.whole.grad
        if slot.parameter.is_given:
            slot.view.add_(gradient)
        else:
            if slot.partial is None:
                slot.view.copy_(gradient)
            else:
                torch.add(gradient, slot.partial, out=slot.view)
            slot.parameter.is_given = True
            self.num_missing -= 1
        slot.whole.grad = None

    def _allocate(self) -> None:
        sizes = [each.whole.numel() for each in self.slots]
        first = self.slots[0].whole
        self.flat = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        for slot, part in zip(self.slots, self.flat.split(sizes), strict=True):
            slot.view = part.view(slot.whole.shape)

    def send(self, operation: Any) -> None:
        """Begin to average it. What no gradient was given for is zero, or the partial sum."""
        if self.flat is None:
            self._allocate()
        for slot in self.slots if self.num_missing else ():
            if not slot.parameter.is_given:
                slot.view.zero_() if slot.partial is None else slot.view.copy_(slot.partial)
        self.work = dist.all_reduce(self.flat, operation, self.group, async_op=True)


class GradientBuckets:
    """Averages the gradients of one FSDP2 parameter group with one rank a shard over its replicas.

    Args:
        group: FSDP2's parameter group, of a model for which `takes_buckets` holds.
        parameters: what `unit_watch` knows of its parameters, in the same order.
    """

    def __init__(self, group: Any, parameters: Sequence[Any]) -> None:
        self._group = group
        self._slots = [_Slot(*each) for each in zip(group.fsdp_params, parameters, strict=True)]
        self._task: int | None = None
        """The backward that is under way; None if no gradient has come yet."""
        self._buckets: list[_Bucket] = []
        self._num_sent = 0
        # There is no end of backward at the inputs: their gradient may come before those of the parameters.
        vars(group)["_register_post_backward_hook"] = lambda args, kwargs: (args, kwargs)

    @property
    def has_any(self) -> bool:
        """Whether any bucket was given a gradient in the backward that is under way."""
        return any(each.flat is not None for each in self._buckets)

    def follow(self) -> None:
        """Follow the gradients of the parameters that are gathered now, before they are computed with."""
        if self._task is not None and torch._C._current_graph_task_id() == -1:
            self.forget()  # an exception has ended a backward
        for index, slot in enumerate(self._slots):
            whole = slot.of_fsdp._unsharded_param
            if slot.whole is not whole or (slot.node is None and whole.requires_grad):
                self._follow(index, slot, whole)

    def _follow(self, index: int, slot: _Slot, whole: torch.Tensor) -> None:
        if slot.handle is not None:
            slot.handle.remove()
        slot.whole, slot.node, slot.handle = whole, None, None
        if whole.requires_grad:
            slot.node = get_gradient_edge(whole).node
            slot.handle = slot.node.register_hook(partial(_take, ref(self), index))

    def begin_backward(self) -> None:
        """Forget a backward that has not ended, if this is another one."""
        if self._task is not None and self._task != torch._C._current_graph_task_id():
            self.forget()

    def _begin(self) -> None:
        """Divide the gradients that this backward may compute into buckets."""
        self._task = torch._C._current_graph_task_id()
        self._buckets, self._num_sent = [], 0
        expected = [each for each in self._slots if each.is_expected] if self._is_plain else []
        types = {each.whole.dtype for each in expected}
        partial_sum: torch.Tensor | None = self._group._partial_reduce_output
        if len(types) != 1 or not types <= {*_DIVIDED_BY_LIBRARY}:
            return
        if partial_sum is not None:
            sizes = [each.whole.numel() for each in expected]
            if sum(sizes) != partial_sum.numel():
                return
            for slot, part in zip(expected, partial_sum.split(sizes), strict=True):
                slot.partial = part.view(slot.whole.shape)
        replicas, held, num_bytes = self._group._all_reduce_process_group, list[_Slot](), 0
        for slot in reversed(expected):  # backward comes to the last ones first
            if held and num_bytes + slot.whole.nbytes > BUCKET_BYTES:
                self._buckets.append(_Bucket(held, replicas))
                held, num_bytes = [], 0
            held.append(slot)
            num_bytes += slot.whole.nbytes
        self._buckets.append(_Bucket(held, replicas))
        for bucket in self._buckets:
            for slot in bucket.slots:
                slot.bucket = bucket

    @property
    def _is_plain(self) -> bool:
        group = self._group
        return (
            group.reduce_grads
            and group.all_reduce_grads
            and group.gradient_divide_factor is None
            and not group.force_sum_reduction_for_comms
            and group._all_reduce_hook is None
        )

    def take(self, index: int) -> None:
        """Take the gradient of a parameter, which backward has computed, if it can be averaged in a bucket."""
        if self._task is None:
            self._begin()
        slot = self._slots[index]
        bucket = slot.bucket
        if bucket is None or bucket.work is not None or self._task != torch._C._current_graph_task_id():
            return  # see [Note: left to FSDP2]
        slot.parameter.note(begins=slot.partial is None)
        bucket.give(slot)
        while self._num_sent < len(self._buckets) and self._buckets[self._num_sent].num_missing == 0:
            self._send_next()

    def _send_next(self) -> None:
        replicas = self._group._all_reduce_process_group
        mean = dist.ReduceOp.AVG if replicas.size() > 1 else dist.ReduceOp.SUM
        self._buckets[self._num_sent].send(mean)
        self._num_sent += 1

    def end_backward(self) -> None:
        """Send all that has not been sent, when the last gradient was computed."""
        if self._task is None:
            self._begin()
        while self._num_sent < len(self._buckets):
            bucket = self._buckets[self._num_sent]
            for slot in bucket.slots:
                if slot.whole.grad is not None:
                    bucket.give(slot)
            self._send_next()
        if self._buckets:
            self._group._partial_reduce_output = None

    def set_gradients(self) -> None:
        """Wait for the means, and set the gradients of the shards to them, or add them.

        Raises:
            PeerLost: a rank is lost, outside a step.
        """
        for bucket in self._buckets:
            bucket.work.wait()
            for slot in bucket.slots:
                if slot.parameter.is_given:
                    _set_gradient(slot.of_fsdp, slot.view)
        given = [each for each in self._slots if each.parameter.is_given]
        self._reset()
        for slot in given:
            shard = slot.of_fsdp.sharded_param
            for hook in (shard._post_accumulate_grad_hooks or {}).values():
                hook(shard)

    def forget(self) -> None:
        """Forget a backward that has not ended."""
        for bucket in self._buckets:
            if isinstance(bucket.work, ResilientWork):
                bucket.work.discard()  # the library may still write to the memory
        self._reset()

    def _reset(self) -> None:
        self._task, self._buckets, self._num_sent = None, [], 0
        for slot in self._slots:
            slot.bucket = slot.view = slot.partial = None
            slot.parameter.is_given = False


def _take(buckets: "ref[GradientBuckets]", index: int, *_: Any) -> None:
    """Hook of what accumulates a gradient, which must not keep alive what keeps it."""
    alive = buckets()
    if alive is not None:
        alive.take(index)


def _set_gradient(of_fsdp: Any, mean: torch.Tensor) -> None:
    shard = of_fsdp.sharded_param
    if shard.grad is None:
        shard.grad = of_fsdp.to_sharded_dtensor(mean)
    else:
        shard.grad._local_tensor += mean
