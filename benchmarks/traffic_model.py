"""How many bytes leave a node in one optimizer step, for full and for hybrid sharding. Pure functions.

[Note: counting egress]
What limits a step is what crosses the network, not what the collectives hand over inside a node. A ring over ranks
that lie node by node enters and leaves each node once, whatever the number of ranks in it. Over one link of a ring of
n ranks go, with S bytes in the whole (unsharded) tensor:

    all-gather      (n - 1)/n * S       each rank passes on every part but one
    reduce-scatter  (n - 1)/n * S
    all-reduce      2 (n - 1)/n * S     a reduce-scatter and an all-gather

Full sharding over all n = nodes * ranks ranks, per micro-step: parameters are gathered in the forward pass and again in
the backward pass, gradients are reduce-scattered, all on one ring that crosses every node boundary:

    k * 3 * (n - 1)/n * S

Hybrid sharding with the shards inside the node: gathers and reduce-scatters stay inside. Once a step every rank
all-reduces its shard of S/ranks bytes over a ring that has one rank per node; a node holds `ranks` such rings:

    2 (nodes - 1)/nodes * S

Their ratio is 1.5 * k for many nodes and larger for few: 2.25 * k for two nodes of two ranks. It is not the ratio of
bytes per rank, which grows with the ranks in a node and which no network sees.

Full sharding in two stages (`parallel/node_collectives.py`) gathers across nodes, then within them, and reduces within
nodes, then across them. Only one copy of each part crosses, in messages among the ranks of one index on their nodes:

    k * 3 * (nodes - 1)/nodes * S

Full sharding can also keep whole gradients between micro-steps (`set_requires_gradient_sync(False)`), at the price of
the memory it was chosen to save; then it is (2 k + 1) rings instead of 3 k.

[Note: reduce-scatter in gloo]
torch's gloo backend has no ring reduce-scatter: it all-reduces the whole tensor and keeps one part. There full sharding
costs k * 4 * (n - 1)/n * S. A benchmark on gloo must compare with that, and must not sell the difference as a merit
of hybrid sharding.
"""

from enum import Enum


class Sharding(Enum):
    """Where the shards of one model replica lie."""

    FULL = "full"
    """Over all ranks of all nodes."""
    STAGED = "full, two stages"
    """The same; what crosses nodes and what stays within them are collectives of their own."""
    AUTO = "full, gathers as measured"
    """The same; gathers have two stages if that is faster."""
    HYBRID = "hybrid"
    """Over the ranks of one node; nodes are replicas."""


def node_egress_bytes(
    *,
    sharding: Sharding,
    model_bytes: float,
    nodes: int,
    ranks_per_node: int,
    micro_steps: int = 1,
    reduce_scatter_is_all_reduce: bool = False,
    gathers_are_staged: bool = False,
) -> float:
    """Bytes that leave one node in one step; see the notes of this module for the derivation.

    Args:
        sharding: where the shards lie.
        model_bytes: size of all parameters, unsharded, in the type they are communicated in (gradients alike).
        nodes: number of nodes.
        ranks_per_node: ranks on each of them.
        micro_steps: forward and backward passes per optimizer step (k).
        reduce_scatter_is_all_reduce: what gloo does.
        gathers_are_staged: what was chosen, for `Sharding.AUTO`.
    """
    if min(nodes, ranks_per_node, micro_steps) < 1:
        raise ValueError(
            "the number of nodes, of ranks per node and of micro-steps must be at least 1, "
            f"but got {nodes}, {ranks_per_node} and {micro_steps}"
        )
    if nodes == 1:
        return 0.0
    if sharding is Sharding.HYBRID:
        return 2 * (nodes - 1) / nodes * model_bytes
    if sharding is Sharding.STAGED:
        return micro_steps * 3 * (nodes - 1) / nodes * model_bytes
    num_ranks = nodes * ranks_per_node
    if sharding is Sharding.AUTO and gathers_are_staged:
        rings = 2 if reduce_scatter_is_all_reduce else 1
        return micro_steps * (2 * (nodes - 1) / nodes + rings * (num_ranks - 1) / num_ranks) * model_bytes
    rings = 4 if reduce_scatter_is_all_reduce else 3
    return micro_steps * rings * (num_ranks - 1) / num_ranks * model_bytes


def egress_ratio(
    *, nodes: int, ranks_per_node: int, micro_steps: int = 1, reduce_scatter_is_all_reduce: bool = False
) -> float:
    """How many times more leaves a node with full than with hybrid sharding, for two nodes or more."""
    full, hybrid = (
        node_egress_bytes(
            sharding=sharding,
            model_bytes=1.0,
            nodes=nodes,
            ranks_per_node=ranks_per_node,
            micro_steps=micro_steps,
            reduce_scatter_is_all_reduce=reduce_scatter_is_all_reduce,
        )
        for sharding in (Sharding.FULL, Sharding.HYBRID)
    )
    return full / hybrid


def link_seconds(egress_bytes: float, bits_per_s: float) -> float:
    """Least time a link needs for that, when nothing else is in its way: a lower bound of the step time."""
    return 8 * egress_bytes / bits_per_s
