"""Which rank keeps a copy of whose state in its memory, and what the copies that are left are good for; pure."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from itertools import chain

from hyperpod_plugins.parallel.topology import Topology


def buddies(topology: Topology, node_of: Callable[[int], int] | None = None) -> tuple[int, ...]:
    """The rank that keeps the snapshots of each rank, by rank: a rotation of the ranks, ordered by node.

    Of all rotations it is the shortest that brings every snapshot to another node and to no replica of the same
    shard, for what takes all replicas must not take the snapshot along. Where no rotation does both, another node
    comes first; where no node can be left, another rank has to do.

    Args:
        topology: who is there, and who holds the same shard.
        node_of: index of the node of a rank; by default as the topology says.

    Returns:
        A permutation of the ranks without fixed points; of a single rank, itself.
    """
    node = node_of or topology.node_of
    order = sorted(range(topology.world_size), key=lambda rank: (node(rank), rank))
    nodes = [node(rank) for rank in order]
    replica_id = {rank: topology.peers(rank, "replicate")[0] for rank in order}
    size, largest = len(order), max(Counter(nodes).values())

    def leaves_node(shift: int) -> bool:
        return all(nodes[at] != nodes[(at + shift) % size] for at in range(size))

    def leaves_shard(shift: int) -> bool:
        return all(replica_id[order[at]] != replica_id[order[(at + shift) % size]] for at in range(size))

    between_nodes, any_shift = range(largest, size - largest + 1), range(1, size)  # no shorter one empties a node
    choices = (
        (shift for shift in between_nodes if leaves_node(shift) and leaves_shard(shift)),
        (shift for shift in between_nodes if leaves_node(shift)),
        (shift for shift in any_shift if leaves_shard(shift)),
        iter(any_shift),
    )
    best = next(chain.from_iterable(choices), 0)
    place = {rank: order[(at + best) % size] for at, rank in enumerate(order)}
    return tuple(place[rank] for rank in range(size))


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
