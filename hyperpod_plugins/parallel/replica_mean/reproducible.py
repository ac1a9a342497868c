"""Sum gradients over the logical shards of a step, bitwise independent of the number of replicas.

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
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyperpod_plugins.parallel.replica_mean.flat import GradientVector

Node = tuple[int, int]
"""Height and index: the sum of the existing leaves `index << height` to `((index + 1) << height) - 1`."""
T = TypeVar("T")


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
    """Averages the gradients of a step over its logical shards, in a fixed order and in place of FSDP2.

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
