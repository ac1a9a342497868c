"""Sums whose order does not depend on who adds."""

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn

from hyperpod_plugins.parallel.replica_mean import FixedOrderMean, nodes_of, tree_sum


def shared(num_leaves, num_replicas):
    """Nodes that replicas are left with, each as the sum that it is."""
    each = num_leaves // num_replicas
    found = {}
    for rank in range(num_replicas):
        for height, index in nodes_of(range(rank * each, (rank + 1) * each)):
            under = range(index << height, min((index + 1) << height, num_leaves))
            found[height, index] = whole_sum(list(under))
    return found


def whole_sum(leaves):
    """Of a power of two of leaves: pairs first."""
    if len(leaves) == 1:
        return str(leaves[0])
    half = len(leaves) // 2
    return plus(whole_sum(leaves[:half]), whole_sum(leaves[half:]))


def plus(left, right):
    return f"({left}+{right})"


@pytest.mark.parametrize("num_leaves", range(1, 25))
def test_one_order_for_every_number_of_replicas(num_leaves):
    alone = tree_sum({(0, leaf): f"{leaf}" for leaf in range(num_leaves)}, num_leaves, plus)
    for num_replicas in (n for n in range(1, num_leaves + 1) if num_leaves % n == 0):
        assert tree_sum(shared(num_leaves, num_replicas), num_leaves, plus) == alone


@pytest.mark.parametrize(
    ("leaves", "nodes"),
    [
        (range(4), [(2, 0)]),
        (range(2, 4), [(1, 1)]),
        (range(3, 6), [(0, 3), (1, 2)]),
        (range(1, 8), [(0, 1), (1, 1), (2, 1)]),
        (range(5, 6), [(0, 5)]),
    ],
)
def test_nodes_of_a_run(leaves, nodes):
    assert nodes_of(leaves) == nodes


LEAVES = 12


def gradients_of(leaf):
    draw = torch.Generator().manual_seed(leaf)
    return [torch.randn(5, 3, generator=draw), torch.randn(7, generator=draw) * 1e4]


def mean_of_all():
    dist.init_process_group("hyperpod")
    model = nn.Linear(3, 5)
    model.bias = nn.Parameter(torch.zeros(7))
    model.register_parameter("unused", nn.Parameter(torch.zeros(2)))
    mean = FixedOrderMean(model, dist.group.WORLD, LEAVES)
    losses = []
    for index, leaf in enumerate(mean.leaves):
        model.weight.grad, bias = gradients_of(leaf)
        model.bias.grad = bias if leaf % 5 else None  # not every logical shard need reach every parameter
        losses.append(mean.add(index, torch.tensor(0.1 * leaf)))
    assert losses[:-1] == [None] * (len(losses) - 1)
    return model.weight.grad, model.bias.grad, losses[-1], model.unused.grad


@pytest.mark.spawns
def test_the_same_bits_from_one_to_four_replicas():
    (alone,) = run_ranks(mean_of_all, world_size=1)
    expected = torch.stack([gradients_of(leaf)[0] for leaf in range(LEAVES)]).mean(0)
    torch.testing.assert_close(alone[0], expected)
    torch.testing.assert_close(alone[2], torch.tensor(0.55))
    assert alone[3] is None
    for num_replicas in (2, 3, 4):
        for found in run_ranks(mean_of_all, world_size=num_replicas):
            assert all(torch.equal(a, b) for a, b in zip(found[:3], alone[:3], strict=True))
            assert found[3] is None
