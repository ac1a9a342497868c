"""Which rank keeps a copy of whose state in its memory, and what the copies that are left are good for; pure."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from itertools import chain, product

from hyperpod_plugins.parallel.topology import Topology


def buddies(topology: Topology, node_of: Callable[[int], int] | None = None) -> tuple[int, ...]:
    """The rank that keeps the snapshots of each rank, by rank.

    Nodes form a ring, and the ranks within a node form one, too: a snapshot moves some nodes on, and some places
    within the node; where nodes differ in size, all ranks form one ring. Of all such moves it is the shortest that
    brings every snapshot to another node and to no replica of its own shard, for what takes all replicas must not take
    the snapshot along. Where none does both, another node comes first; where there is one node, another rank.

    Args:
        topology: who is there, and who holds the same shard.
        node_of: index of the node of a rank; by default as the topology says.

    Returns:
        A permutation of the ranks without fixed points; of a single rank, itself.
    """
    node = node_of or topology.node_of
    order = sorted(range(topology.world_size), key=lambda rank: (node(rank), rank))
    nodes = [node(rank) for rank in order]
    shards = [topology.peers(rank, "replicate")[0] for rank in order]
    if len(set(shards)) == 1:
        shards = order  # everybody is a replica of everybody, and nothing can be left
    sizes = set(Counter(nodes).values())
    places = sizes.pop() if len(sizes) == 1 else 1  # in each node of the ring
    num_nodes = len(order) // places

    def moved(at: int, move: tuple[int, int]) -> int:
        return (at // places + move[0]) % num_nodes * places + (at + move[1]) % places

    def leaves(what: list[int], move: tuple[int, int]) -> bool:
        return all(what[at] != what[moved(at, move)] for at in range(len(order)))

    moves = [move for move in product(range(num_nodes), range(places)) if move != (0, 0)]
    choices = (
        (move for move in moves if leaves(nodes, move) and leaves(shards, move)),
        (move for move in moves if leaves(nodes, move)),
        (move for move in moves if leaves(shards, move)),
        iter(moves),
    )
    best = next(chain.from_iterable(choices), (0, 0))
    buddy_of = {rank: order[moved(at, best)] for at, rank in enumerate(order)}
    return tuple(buddy_of[rank] for rank in range(len(order)))


def wards(buddy_of: tuple[int, ...]) -> tuple[int, ...]:
    """Whose snapshots each rank keeps: the inverse of `buddies`."""
    return tuple(buddy_of.index(rank) for rank in range(len(buddy_of)))


def restorable_steps(
    own: Mapping[int, Collection[int]], kept: Mapping[int, Collection[int]], buddy_of: tuple[int, ...]
) -> set[int]:
    """Steps to which all ranks can return.

    Args:
        own: steps of which each rank has a snapshot of itself.
        kept: steps of which each rank has a snapshot of its ward.
        buddy_of: see `buddies`.
    """
    within_reach = [{*own.get(rank, ()), *kept.get(buddy, ())} for rank, buddy in enumerate(buddy_of)]
    return set[int].intersection(*within_reach) if within_reach else set()
