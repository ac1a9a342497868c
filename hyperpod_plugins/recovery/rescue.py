"""What those that are left write together of the snapshots in their memory, before all processes start again; pure."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from hyperpod_plugins.parallel.topology import Topology
from hyperpod_plugins.recovery.assign import Arrival
from hyperpod_plugins.recovery.buddies import buddies, wards


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescue:
    """Who writes what."""

    step: int
    """Of the snapshots."""
    owners: Mapping[int, tuple[int, ...]]
    """For each rank that writes, the ranks whose snapshots it does: itself, its ward, or both."""


def plan_rescue(arrivals: Mapping[int, Arrival], topology: Topology) -> Rescue | None:
    """Choose the newest step of which every shard is held by somebody, and one holder for each, evenly.

    None where there is no such step. Replicas of a shard hold the same, so one of them will do.
    """
    ward_of, size = wards(buddies(topology)), topology.shard_degree * topology.tensor_degree
    held: defaultdict[int, defaultdict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for rank, arrival in sorted(arrivals.items()):
        for owner, steps in ((rank, arrival.snapshots), (ward_of[rank], arrival.ward_snapshots)):
            for step in steps:
                held[step][owner % size].append((rank, owner))
    newest = max((step for step, shards in held.items() if step > 0 and len(shards) == size), default=None)
    if newest is None:
        return None
    load: Counter[int] = Counter()
    owners: defaultdict[int, list[int]] = defaultdict(list)
    for _, holders in sorted(held[newest].items(), key=lambda each: (len(each[1]), each[0])):
        writer, owner = min(holders, key=lambda each: (load[each[0]], each[0] != each[1], each[0]))
        load[writer] += 1
        owners[writer].append(owner)
    return Rescue(step=newest, owners={writer: tuple(sorted(those)) for writer, those in sorted(owners.items())})
