"""Average gradients over replicas in place of FSDP2: in a fixed order, or while measuring gradient noise.

[Note: fixed order]
Floating-point addition is not associative: a different number of replicas adds the same gradients in a different
order, and the last bits differ. Here the order is fixed. The gradients of the L logical shards of a step are the
leaves of one binary tree, and every inner node is the sum of its two children, regardless of which rank adds them.

    height 2              (2, 0)
    height 1      (1, 0)          (1, 1)
    leaves     (0, 0) (0, 1)   (0, 2) (0, 3)

A rank adds the nodes of its own run of leaves as it computes them, so it holds at most two nodes per height. Replicas
exchange the remaining nodes: each receives a slice of all nodes, adds them in the order of the tree, and sends its
slice of the sum to all others. If runs begin at multiples of powers of two, a rank has one node left, and as many
bytes are sent as in an all-reduce.

[Note: gradient noise]
A part is the gradient that one replica computes in one micro-step. Its squared norm is taken over the whole model,
before the part is accumulated. A step of R replicas and M micro-steps thus has R x M parts, and the last micro-step
costs one large all-reduce between replicas, as FSDP2's own would, and a small one of 2 R M + 1 numbers over all
ranks.
"""

# Torch has no public way to see hooks.
# pyright: reportPrivateUsage=false

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, _foreach_norm, nn  # pyright: ignore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hyperpod_plugins.errors import ConfigError, format_list
from hyperpod_plugins.parallel.hsdp import compute_device, from_local_like, local_part
from hyperpod_plugins.parallel.unit_watch import reconcile_gradients

Node = tuple[int, int]
"""Height and index: the sum of the existing leaves `index << height` to `((index + 1) << height) - 1`."""
T = TypeVar("T")


class GradientVector:
    """Moves the gradients of a model's parameters into one vector, and back.

    The vector is float32, on the device that computes, also if gradients lie in host memory. It holds the local part of
    each gradient, then for each parameter 1 or 0 for whether it has a gradient, then values added by the caller, then
    padding. A sum of such vectors holds the sum of the gradients, and shows which parameters have a gradient anywhere.
    """

    def __init__(self, model: nn.Module, option: str) -> None:
        """Record the trainable parameters of `model`.

        Args:
            model: model that is sharded only within each replica.
            option: option that the user has set, for the error message.

        Raises:
            ConfigError: the model is sharded such that FSDP2 averages gradients over replicas itself.
        """
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor) and "replicate" in (parameter.device_mesh.mesh_dim_names or ()):
                raise ConfigError(
                    f"{name} is sharded over a mesh with an axis for replicas, so FSDP2 adds up their gradients, and "
                    f"those of a single replica are never seen. For {option} shard over the axis 'shard' alone, or "
                    "leave sharding to the strategy or the session."
                )
        self._model, self._option = model, option
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        """Trainable parameters, in the order of their gradients in the vector."""
        self._sizes = [local_part(parameter).numel() for parameter in self.parameters]

    def flatten(self, *more: Tensor, multiple_of: int = 1) -> Tensor:
        """Return the vector and clear the gradients. All ranks call this together.

        Args:
            more: values to append, each `()`.
            multiple_of: the length is padded with zeros to a multiple of this.

        Raises:
            ConfigError: a parameter has a hook, which has run on the gradient of a single replica.
        """
        reconcile_gradients(self._model, ends_step=False)
        if any(parameter._post_accumulate_grad_hooks for parameter in self.parameters):
            raise ConfigError(self._hook_message())
        parts: list[Tensor] = []
        has_one: list[float] = []
        device = compute_device(self.parameters[0])
        for parameter in self.parameters:
            gradient, parameter.grad = parameter.grad, None
            has_one.append(float(gradient is not None))
            local = local_part(parameter if gradient is None else gradient).detach()
            parts.append(local.to(device).reshape(-1).float())
            if gradient is None:
                parts[-1] = torch.zeros_like(parts[-1])
        parts += [torch.tensor(has_one, device=device), *(each.detach().to(device).float().reshape(1) for each in more)]
        parts.append(torch.zeros(-sum(part.numel() for part in parts) % multiple_of, device=device))
        return torch.cat(parts)

    def _hook_message(self) -> str:
        hooked = [name for name, each in self._model.named_parameters() if each._post_accumulate_grad_hooks]
        return (
            f"register_post_accumulate_grad_hook on {format_list(hooked)} is not possible with {self._option}: "
            "gradients are averaged over replicas after backward, so the hook has seen those of one replica. Nothing "
            "has been updated. Change parameter.grad when the optimizer steps: optimizer.register_step_pre_hook."
        )

    def unflatten(self, vector: Tensor) -> Tensor:
        """Set the gradients from a vector; return the appended values and the padding."""
        counts = vector[sum(self._sizes) :][: len(self._sizes)]
        for parameter, part, has_one in zip(self.parameters, self.parts(vector), counts.tolist(), strict=True):
            if has_one:
                here = local_part(parameter)
                parameter.grad = from_local_like(parameter, part.view(here.shape).to(here.device, here.dtype))
        return vector[sum(self._sizes) + len(self._sizes) :]

    def parts(self, vector: Tensor) -> list[Tensor]:
        """Return views of the local part of each gradient, flat."""
        return list(vector[: sum(self._sizes)].split(self._sizes))


def nodes_of(leaves: range) -> list[Node]:
    """Return the smallest set of complete nodes that covers a run of leaves, from left to right."""
    nodes: list[Node] = []
    for leaf in leaves:
        nodes.append((0, leaf))
        while len(nodes) > 1 and _are_siblings(*nodes[-2:]):
            height, index = nodes.pop(-2)
            nodes[-1] = (height + 1, index // 2)
    return nodes


def tree_sum(found: Mapping[Node, T], num_leaves: int, add: Callable[[T, T], T]) -> T:
    """Return the value of the root, given the values of nodes that cover all leaves."""

    def value(height: int, index: int) -> T:
        if (height, index) in found:
            return found[height, index]
        left = value(height - 1, 2 * index)
        if (2 * index + 1) << (height - 1) >= num_leaves:
            return left
        return add(left, value(height - 1, 2 * index + 1))

    return value((num_leaves - 1).bit_length(), 0)


def _are_siblings(left: Node, right: Node) -> bool:
    return left[0] == right[0] and left[1] % 2 == 0 and right[1] == left[1] + 1


class FixedOrderMean:
    """Averages the gradients of a step over its logical shards, in a fixed order: see [Note: fixed order].

    Costs a float32 copy of the local gradients for each node held, about `log2(L / R) + 1` for L logical shards over
    R replicas, and two more for the exchange.
    """

    def __init__(self, model: nn.Module, replicas: dist.ProcessGroup, num_leaves: int) -> None:
        """Sum over `replicas`, whose size may change between steps.

        Args:
            model: sharded within each replica.
            replicas: ranks that hold the same shards.
            num_leaves: number of logical shards in a step, a multiple of every possible number of replicas.

        Raises:
            ConfigError: FSDP2 averages gradients over the replicas itself, in an order of its own.
        """
        self._vector = GradientVector(model, "reproducible=True")
        self._replicas = replicas
        self._num_leaves = num_leaves
        self._held: list[tuple[Node, Tensor]] = []

    @property
    def leaves(self) -> range:
        """Leaves that this rank computes."""
        each = self._num_leaves // self._replicas.size()
        return range(self._replicas.rank() * each, (self._replicas.rank() + 1) * each)

    def add(self, index: int, loss: Tensor) -> Tensor | None:
        """Take the gradients of one logical shard; after the last one, set the gradients to the mean.

        Args:
            index: index among this rank's logical shards, from 0; 0 starts a new step.
            loss: loss of the logical shard, `()`, or also other means over its samples, `(num_values,)`.

        Returns:
            The mean over all logical shards of `loss` after the last one; None before.
        """
        if index == 0:
            self._held = []
        leaves = self.leaves
        self._held.append(
            ((0, leaves[index]), self._vector.flatten(*loss.reshape(-1).unbind(), multiple_of=self._replicas.size()))
        )
        while len(self._held) > 1 and _are_siblings(self._held[-2][0], self._held[-1][0]):
            _, right = self._held.pop()
            (height, place), left = self._held.pop()
            self._held.append(((height + 1, place // 2), left.add_(right)))
        if index + 1 < len(leaves):
            return None
        held, self._held = dict(self._held), []
        whole = self._exchange(held) if self._replicas.size() > 1 else tree_sum(held, self._num_leaves, torch.add)
        return self._vector.unflatten(whole.div_(self._num_leaves))[: loss.numel()].view(loss.shape)

    def _exchange(self, held: Mapping[Node, Tensor]) -> Tensor:
        """Sum the nodes of all replicas; each replica adds up one slice."""
        size, each = self._replicas.size(), len(self.leaves)
        theirs = [nodes_of(range(rank * each, (rank + 1) * each)) for rank in range(size)]
        mine = list(held.values())
        sent = mine[0].view(size, -1)
        if len(mine) > 1:
            sent = torch.stack([part.view(size, -1) for part in mine], dim=1)
        width = mine[0].numel() // size
        nodes = [node for rank in theirs for node in rank]
        received = sent.new_zeros(len(nodes), width)
        dist.all_to_all_single(
            received.view(-1),
            sent.view(-1),
            [len(rank) * width for rank in theirs],
            [len(mine) * width] * size,
            group=self._replicas,
        )
        found = dict(zip(nodes, received.unbind(), strict=True))
        whole = sent.new_zeros(size, width)
        dist.all_gather(list(whole.unbind()), tree_sum(found, self._num_leaves, torch.add).contiguous(), self._replicas)
        return whole.view(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNormTable:
    """Squared gradient norms of one step; bitwise equal on all ranks."""

    table: Tensor
    """Squared norm and weight of each part, and then the squared norm of the mean, `(2 * num_parts + 1,)`, float64.

    Parts are weighted gradients: sums over their samples, times the number of replicas, divided by the number of
    samples in the step. Weights are summed over the ranks of a replica that read different samples.
    """
    num_micro_steps: int
    """Number of parts of each replica."""


class NoiseMeasuringMean:
    """Averages gradients over replicas once per step, and compares the parts of the step: see [Note: gradient noise].

    Costs a float32 copy of the local gradients, and a second one if micro-steps are accumulated. Unlike FSDP2's, the
    large all-reduce does not overlap with backward.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Average over `replicate`, whose size may change between steps.

        Args:
            model: sharded within each replica.
            mesh: `("replicate", "shard", "tensor")`.

        Raises:
            ConfigError: FSDP2 averages gradients over the replicas itself.
        """
        self._vector = GradientVector(model, "lr_scaling='adascale'")
        self._replicas = mesh.get_group("replicate")
        self._tensor_degree = mesh.size(2)
        replica_size = mesh.size(1) * self._tensor_degree
        self._copies = [replica_size / _num_shards(parameter) for parameter in self._vector.parameters]
        self._sum: Tensor | None = None
        self._norms: list[Tensor] = []
        self._weights: list[float] = []

    def add(self, weight: float, *, is_first: bool, is_last: bool) -> GradientNormTable | None:
        """Take the gradients of one micro-step; after the last one, set the gradients to the mean of the step.

        Never raises because of values: after a fault they are garbage.

        Args:
            weight: factor that this rank's loss was multiplied by.
            is_first: whether this is the first micro-step of a step; resets the state, as a step may be run again.
            is_last: whether this is the last micro-step of a step.

        Returns:
            The comparison after the last micro-step; None before.
        """
        if is_first:
            self._sum, self._norms, self._weights = None, [], []
        part = self._vector.flatten()
        self._norms.append(self._squared_norm(part))
        self._weights.append(weight / self._tensor_degree)
        self._sum = part if self._sum is None else self._sum.add_(part)
        if not is_last:
            return None
        mean, self._sum = self._sum, None
        num_replicas, num_micro_steps = self._replicas.size(), len(self._norms)
        if num_replicas > 1:
            dist.all_reduce(mean, group=self._replicas)
            mean.div_(num_replicas)
        parts = mean.new_zeros(num_replicas, num_micro_steps, 2, dtype=torch.float64)
        parts[self._replicas.rank(), :, 0] = torch.stack(self._norms)
        parts[self._replicas.rank(), :, 1] = parts.new_tensor(self._weights)
        table = torch.cat([parts.view(-1), self._squared_norm(mean).view(1) / num_replicas])
        dist.all_reduce(table)
        self._vector.unflatten(mean)
        return GradientNormTable(table=table, num_micro_steps=num_micro_steps)

    def _squared_norm(self, vector: Tensor) -> Tensor:
        """Squared norm of the local gradients, `()`; summed over a replica's ranks it is that of the whole model."""
        parts = self._vector.parts(vector)
        norms = torch.stack([norm.double() for norm in _foreach_norm(parts)])
        return (norms.square() / norms.new_tensor(self._copies)).sum()


def _num_shards(parameter: Tensor) -> int:
    """Number of ranks of a replica that hold different parts of a parameter; the other ranks hold copies."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh, found = parameter.device_mesh, 1
    for axis, placement in enumerate(parameter.placements):
        found *= 1 if placement.is_replicate() else mesh.size(axis)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMicroStep:
    """One forward and backward pass of this rank, as a part of an optimizer step."""

    index: int
    """Number within the step, from 0; 0 starts a new step, or the same step again."""
    count: int
    """Number of micro-steps by which losses are divided; a last, smaller step has fewer."""
    is_last: bool
    """Whether the step ends with it."""
    weight: float
    """Factor that the rank's mean loss is multiplied by, so that all samples of the step count equally."""


class FixedOrderAveraging:
    """Passes the micro-steps of a rank to a `FixedOrderMean`, so that results do not depend on the number of replicas.

    Each micro-batch of a rank is its part of one logical shard. Losses are not divided, because a quotient would be
    rounded, and the number of micro-steps depends on the number of replicas.
    """

    divides_loss = False
    """Whether losses are divided by the number of micro-steps before backward."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, num_logical_shards: int) -> None:
        """Average gradients of a module for which FSDP2 does not average over replicas.

        Raises:
            ConfigError: FSDP2 averages over replicas.
        """
        self._mean = FixedOrderMean(module, mesh.get_group("replicate"), num_logical_shards)
        self._shards = mesh.get_group("shard")
        self.mean_loss: Tensor | None = None
        """Mean loss of the last step over its whole global batch, shaped as in `add`; None before the first step."""

    def add(self, micro_step: RankMicroStep, loss: Tensor) -> None:
        """Take the gradients of one logical shard after its backward; after the last one, leave the step's mean.

        Args:
            micro_step: whose backward has run.
            loss: this rank's mean loss, not divided, `()`, or also other means over its samples, `(num_values,)`.
        """
        mean = self._mean.add(micro_step.index, loss)
        if mean is not None:
            if self._shards.size() > 1:  # each rank had its part of every logical shard
                dist.all_reduce(mean, group=self._shards)
            self.mean_loss = mean / self._shards.size()


class NoiseMeasuringAveraging:
    """Passes the micro-steps of a rank to a `NoiseMeasuringMean`, and keeps the norms that AdaScale reads.

    The comparison of gradients is part of the step, but AdaScale only uses it at the commit: a step that is computed
    again is compared again, and a step that is never committed has no effect.
    """

    divides_loss = True
    """Whether losses are divided by the number of micro-steps before backward."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Average gradients of a module for which FSDP2 does not average over replicas.

        Raises:
            ConfigError: FSDP2 averages over replicas.
        """
        self._mean = NoiseMeasuringMean(module, mesh)
        self.data_ranks_per_replica = mesh.size(1)
        """Ranks of a replica that read different samples."""
        self.compared: GradientNormTable | None = None
        """Comparison of the last step's gradients; None within a step, and before the first."""

    def add(self, micro_step: RankMicroStep, loss: Tensor) -> None:
        """Take the gradients of a micro-step after its backward; after the last one, leave the step's mean.

        Args:
            micro_step: whose backward has run.
            loss: not needed.
        """
        self.compared = self._mean.add(micro_step.weight, is_first=micro_step.index == 0, is_last=micro_step.is_last)


GradAveraging = FixedOrderAveraging | NoiseMeasuringAveraging
"""Averages gradients over replicas in place of FSDP2. All ranks call `add` after each backward, in the same order."""
