"""What each rank does to bring the job back to one common step: decided from the arrivals, and from nothing else.

[Note: commit rule] A vote that completes on any rank proves that every rank had valid gradients. So if anybody has
committed step t, every survivor that voted for t holds what it needs to commit it too, and does. Nothing that a
peer may have committed is ever rolled back, and no step is applied twice; only where a part of the state of
step t is gone for good do all ranks return together, to a step of which it is whole.
"""

import enum
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from itertools import chain, product
from typing import Any, Self

from hyperpod_plugins.errors import StateLost
from hyperpod_plugins.parallel.topology import Topology

# Which rank keeps a copy of whose state in its memory, and what the copies that are left are good for; pure.


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


def sources_of(buddy_of: tuple[int, ...]) -> tuple[int, ...]:
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


NO_STATE = -1


class RecoveryLevel(enum.Enum):
    """How far down the ladder of recovery a fault leads; the first that is possible is taken."""

    RETRY = "nobody lost its state: the step is run again"
    REPLACE = "each lost shard lives on another rank, which gives it to the replacement; no committed step is lost"
    SNAPSHOT = "a lost shard lives nowhere: all ranks return to the newest snapshot that is whole"
    CHECKPOINT = "no snapshot is whole: all ranks return to the last persistent checkpoint"
    STOP = "nothing is left to return to: the job ends with an error"

    @property
    def event(self) -> str:
        """Name of the event that tells of it."""
        return f"recovery.{self.name.lower()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What a process brings when it wants to become a member."""

    incarnation: int
    """Which process in this rank's place."""
    committed: int = NO_STATE
    """Steps that it has committed, or `NO_STATE` for a newcomer."""
    voted_step: int = NO_STATE
    """Step that it could commit: it computed the gradients and voted for it."""
    groups: str = ""
    """Fingerprint of the process groups that it holds."""
    in_step: bool = True
    """Whether it waits at a step, so that it can go on there."""
    entered_part: int | None = None
    """Place of the part of the program at which it entered its loops, apart from the others; None in a step."""
    snapshots: tuple[int, ...] = ()
    """Steps of which it has a snapshot of itself."""
    source_snapshots: tuple[int, ...] = ()
    """Steps of which it has a snapshot of the rank whose buddy it is."""
    local_steps: tuple[int, ...] | None = None
    """Steps of which it keeps what its ward has alone; None where nothing is kept, or nothing has been yet."""
    needs_local: bool = False
    """Whether the job goes back to a checkpoint rather than on without what a lost rank had alone."""
    abort_reason: str = ""
    """Why the job must not go on, where this process says so: all save what they have, and end."""
    starts_again: bool = False
    """Whether `ends` is the end of this process only, for all start again in a world of those that are left."""
    pending_checkpoint: str = ""
    """Path of a checkpoint of the committed step that was interrupted."""

    def to_dict(self) -> dict[str, Any]:
        """For the job store."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`."""
        tuples: dict[str, Any] = {name: tuple(each) for name, each in values.items() if isinstance(each, list)}
        return cls(**{**values, **tuples})

    @property
    def has_state(self) -> bool:
        """Whether it holds parameters and optimizer state."""
        return self.committed != NO_STATE


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """How the members get to one common step."""

    step: int
    """Steps that all of them have committed afterwards."""
    roll_forward: tuple[int, ...]
    """Ranks that commit the step that they voted for."""
    sources: Mapping[int, int]
    """Rank that gives the state, or the snapshot, for each rank that needs one."""
    steps_lost: int = 0
    """Committed steps that have to be run again; above 0 on the rung SNAPSHOT only."""
    is_return: bool = False
    """Whether all ranks take their state from snapshots, those with a source after it has sent them theirs."""
    abort_reason: str = ""
    """Why the job ends here instead of going on; empty where it goes on."""
    pending_checkpoint: str = ""
    """Path of a checkpoint that was interrupted, and is to be written again before the job goes on."""
    hooks_first: bool = False
    """Whether a rank that commits the step only now is the only one that could give its state.

    A program may change state in what follows a step (a teacher's average at the end of a batch). So that rank goes on
    to its next step first, and all meet there again; until then nobody gives anything.
    """

    @property
    def level(self) -> RecoveryLevel:
        """Which rung of the ladder this is."""
        if self.abort_reason:
            return RecoveryLevel.STOP
        if self.is_return:
            return RecoveryLevel.SNAPSHOT
        return RecoveryLevel.REPLACE if self.sources else RecoveryLevel.RETRY


def plan_recovery(arrivals: Mapping[int, Arrival], topology: Topology) -> RecoveryPlan:
    """Choose the common step, and a source for every rank without state; sources share the work evenly.

    Raises:
        StateLost: a rank's state lives nowhere, and there is no snapshot to which all can return.
    """
    step, roll_forward, whole = _common_step(arrivals)
    ends = next((each.abort_reason for _, each in sorted(arrivals.items()) if each.abort_reason), "")
    owes = next((each.pending_checkpoint for _, each in sorted(arrivals.items()) if each.pending_checkpoint), "")
    load: Counter[int] = Counter()
    sources: dict[int, int] = {}
    for rank in sorted(set(arrivals) - set(whole)):
        candidates = [other for other in topology.replicas_of(rank) if other in whole]
        if not candidates:
            return _return_to_snapshot(arrivals, topology, step, rank, ends)
        source = min(candidates, key=lambda other: (other in roll_forward, load[other], other))
        load[source] += 1
        sources[rank] = source
    lost = _lost_alone(arrivals, topology, step, sources)
    if lost and newest_snapshot(arrivals, topology) != NO_STATE:
        return _return_to_snapshot(arrivals, topology, step, lost[0], ends)
    if lost and any(each.needs_local for each in arrivals.values()):
        raise StateLost(
            f"no rank has what the ranks {lost} had alone after step {step} (buffers, metrics, means of the epoch): "
            f"their buddies {[buddies(topology)[rank] for rank in lost]} were lost with them or could not keep it, and "
            "there is no snapshot that is whole (they are taken with snapshot_every_steps). With "
            'rank_local_state="replica" the job goes on with what a replica has'
        )
    hooks_first = not ends and not set(roll_forward).isdisjoint(sources.values())
    return RecoveryPlan(
        step=step,
        roll_forward=roll_forward,
        sources=sources,
        abort_reason=ends,
        pending_checkpoint=owes,
        hooks_first=hooks_first,
    )


def _lost_alone(
    arrivals: Mapping[int, Arrival], topology: Topology, step: int, sources: Mapping[int, int]
) -> list[int]:
    """Ranks whose predecessors had something alone that no buddy has as it was after a step.

    Where no rank keeps anything the ranks have nothing alone, or they are new because the job grows.
    """
    if step <= 0 or all(each.local_steps is None for each in arrivals.values()):
        return []
    buddy_of = buddies(topology)
    return [rank for rank in sorted(sources) if step not in (arrivals[buddy_of[rank]].local_steps or ())]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalSavePlan:
    """What those that are left save before the job ends, because nobody came for the others."""

    step: int
    """Steps that the saved state has committed."""
    roll_forward: tuple[int, ...]
    """Ranks that commit the step that they voted for."""
    savers: tuple[int, ...]
    """Ranks that hold the state after that step; none if a shard is held by nobody, so that nothing can be saved."""


def plan_final_save(arrivals: Mapping[int, Arrival], topology: Topology) -> FinalSavePlan:
    """Choose the common step of those that are left, and see whether together they hold every shard."""
    step, roll_forward, whole = _common_step(arrivals)
    is_held = all({rank, *topology.replicas_of(rank)} & set(whole) for rank in range(topology.world_size))
    return FinalSavePlan(step=step, roll_forward=roll_forward, savers=tuple(whole) if is_held else ())


def newest_snapshot(arrivals: Mapping[int, Arrival], topology: Topology) -> int:
    """The newest step to which all ranks could return, or `NO_STATE`."""
    own = {rank: each.snapshots for rank, each in arrivals.items()}
    kept = {rank: each.source_snapshots for rank, each in arrivals.items()}
    if not any(own.values()):
        return NO_STATE
    return max(restorable_steps(own, kept, buddies(topology)), default=NO_STATE)


def _common_step(arrivals: Mapping[int, Arrival]) -> tuple[int, tuple[int, ...], list[int]]:
    """Steps that anybody has committed, who commits the last of them now, and who has that state then."""
    held = {rank: each for rank, each in sorted(arrivals.items()) if each.has_state}
    step = max((each.committed for each in held.values()), default=NO_STATE)
    behind = {rank for rank, each in held.items() if each.committed < step}
    roll_forward = tuple(rank for rank in held if rank in behind and held[rank].voted_step == step)
    return step, roll_forward, [rank for rank in held if rank not in behind or rank in roll_forward]


def _return_to_snapshot(
    arrivals: Mapping[int, Arrival], topology: Topology, step: int, lost: int, ends: str
) -> RecoveryPlan:
    """Everybody goes back to the newest snapshot that is whole, since the state of rank `lost` is gone."""
    newest, buddy_of = newest_snapshot(arrivals, topology), buddies(topology)
    if newest == NO_STATE:
        raise StateLost(_why_lost(arrivals, topology, step, lost, buddy_of))
    return RecoveryPlan(
        step=newest,
        roll_forward=(),
        sources={rank: buddy_of[rank] for rank, each in sorted(arrivals.items()) if newest not in each.snapshots},
        steps_lost=max(0, step - newest),
        is_return=True,
        abort_reason=ends,
    )


def _why_lost(
    arrivals: Mapping[int, Arrival], topology: Topology, step: int, lost: int, buddy_of: tuple[int, ...]
) -> str:
    others = list(topology.replicas_of(lost))
    if step == NO_STATE:
        replaced = "no rank that is left holds the training state"
    else:
        replaced = f"no rank that is left holds the shard of rank {lost} after step {step}, whose other copies were on "
        replaced += f"the ranks {others}" if others else "no rank (replicate degree 1)"
    own = {rank: each.snapshots for rank, each in arrivals.items()}
    kept = {rank: each.source_snapshots for rank, each in arrivals.items()}
    taken = sorted(set(chain(*own.values(), *kept.values())))
    gone = [rank for rank, buddy in enumerate(buddy_of) if not (own.get(rank) or kept.get(buddy))]
    if not taken:
        back = "no rank that is left holds a snapshot (they are taken with snapshot_every_steps)"
    elif gone:
        back = f"of the snapshots of steps {taken} nothing is left of the ranks {gone}, whose buddies are "
        back += str([buddy_of[rank] for rank in gone])
    else:
        back = f"of the snapshots of steps {taken} none is whole, for the ranks hold different ones"
    return f"{replaced}; {back}"


# What those that are left write together of the snapshots in their memory, before all processes start again; pure.


@dataclass(frozen=True, slots=True, kw_only=True)
class SalvagePlan:
    """Who writes what."""

    step: int
    """Of the snapshots."""
    owners: Mapping[int, tuple[int, ...]]
    """For each rank that writes, the ranks whose snapshots it does: itself, its ward, or both."""


def plan_salvage(arrivals: Mapping[int, Arrival], topology: Topology) -> SalvagePlan | None:
    """Choose the newest step of which every shard is held by somebody, and one holder for each, evenly.

    None where there is no such step. Replicas of a shard hold the same, so one of them will do.
    """
    ward_of, size = sources_of(buddies(topology)), topology.shard_degree * topology.tensor_degree
    held: defaultdict[int, defaultdict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for rank, arrival in sorted(arrivals.items()):
        for owner, steps in ((rank, arrival.snapshots), (ward_of[rank], arrival.source_snapshots)):
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
    return SalvagePlan(step=newest, owners={writer: tuple(sorted(those)) for writer, those in sorted(owners.items())})
