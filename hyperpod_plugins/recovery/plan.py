"""What each rank does to bring the job back to one common step. Pure functions of the arrivals alone.

`plan_recovery` plans the recovery of a complete world; `plan_final_save` and `plan_salvage` plan what the survivors
save if lost ranks are not replaced. `buddies` assigns to each rank the rank that keeps its snapshots.

[Note: commit rule] A vote that completes on any rank proves that every rank had valid gradients. So if any rank has
committed step t, every survivor that voted for t holds what it needs to commit it too, and does. Nothing that a
peer may have committed is ever rolled back, and no step is applied twice. Only if part of the state after step t is
gone for good do all ranks return together to an earlier step whose state is complete.
"""

import enum
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, product
from typing import Any, Self

from hyperpod_plugins.errors import StateLost
from hyperpod_plugins.parallel.topology import Topology

# Buddy placement: which rank keeps the snapshots of which, and to which steps the remaining snapshots allow a return.


def _replica_of(topology: Topology, rank: int) -> int:
    """Index of the replica of the model that a rank is a part of."""
    return topology.peers(rank, "replicate").index(rank)


def buddies(topology: Topology, node_of: Callable[[int], int] | None = None) -> tuple[int, ...]:
    """Assign to each rank its buddy, the rank that keeps its snapshots.

    The nodes form a ring, and so do the ranks within each node: the buddy lies a fixed number of nodes and of ranks
    within the node further on. If nodes differ in size, all ranks form one ring. Of all such shifts, the shortest is
    taken that places every snapshot on another node and never on a replica of its own shard, so that a fault that
    takes all replicas of a shard does not take the snapshot too. If no shift does both, another node has priority.
    With a single node, the ranks of each replica of the model take the place of a node's.

    Args:
        topology: The ranks and the shards that they hold.
        node_of: Index of the node of a rank; by default that of the topology.

    Returns:
        The buddy of each rank, by rank: a permutation without fixed points (a single rank is its own buddy).
    """
    node = node_of or topology.node_of
    if len({node(rank) for rank in range(topology.world_size)}) == 1:
        node = partial(_replica_of, topology)
    order = sorted(range(topology.world_size), key=lambda rank: (node(rank), rank))
    nodes = [node(rank) for rank in order]
    shards = [topology.peers(rank, "replicate")[0] for rank in order]
    if len(set(shards)) == 1:
        shards = order  # every rank is a replica of every other: ignore the shards
    sizes = set(Counter(nodes).values())
    places = sizes.pop() if len(sizes) == 1 else 1  # ranks in each node of the ring
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
    """The source rank of each rank, whose snapshots it keeps: the inverse of `buddies`."""
    return tuple(buddy_of.index(rank) for rank in range(len(buddy_of)))


def restorable_steps(
    own: Mapping[int, Collection[int]], kept: Mapping[int, Collection[int]], buddy_of: tuple[int, ...]
) -> set[int]:
    """Steps to which all ranks can return.

    Args:
        own: For each rank, the steps of which it has a snapshot of itself.
        kept: For each rank, the steps of which it has a snapshot of its source rank.
        buddy_of: See `buddies`.
    """
    within_reach = [{*own.get(rank, ()), *kept.get(buddy, ())} for rank, buddy in enumerate(buddy_of)]
    return set[int].intersection(*within_reach) if within_reach else set()


NO_STATE = -1


class RecoveryLevel(enum.Enum):
    """How a fault is recovered from, from cheapest to most expensive; the first level that is possible is used."""

    RETRY = "no rank lost its state: the step is run again"
    REPLACE = "another rank holds each lost shard and sends it to the replacement; no committed step is lost"
    SNAPSHOT = "no rank holds a lost shard: all ranks return to the newest complete snapshot"
    CHECKPOINT = "no snapshot is complete: all ranks return to the last persistent checkpoint"
    STOP = "there is no state to return to: the job ends with an error"

    @property
    def event(self) -> str:
        """Name of the event that reports a recovery at this level."""
        return f"recovery.{self.name.lower()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What a process publishes when it arrives to become a member of a generation."""

    incarnation: int
    """Number of the process in its worker slot."""
    committed: int = NO_STATE
    """Steps that it has committed, or `NO_STATE` if it holds no training state, such as a joiner. `NO_STATE` with a
    `voted_step`: its step cannot be undone, so it has state only if another rank has committed that step."""
    voted_step: int = NO_STATE
    """Step that it can commit, because it computed the gradients and voted; `NO_STATE` for none."""
    groups: str = ""
    """Fingerprint of its process groups."""
    in_step: bool = True
    """Whether it waits inside a step and can resume there."""
    entered_part: int | None = None
    """Part of the program at which it entered its loops, until it joined the other ranks; None inside a step."""
    snapshots: tuple[int, ...] = ()
    """Steps of which it has a snapshot of itself."""
    source_snapshots: tuple[int, ...] = ()
    """Steps of which it has a snapshot of its source rank."""
    last_committed: int = NO_STATE
    """Steps that it, or else the process that it replaces, has committed; `NO_STATE` if it does not know."""
    rank_local_steps: tuple[int, ...] | None = None
    """Steps of which it keeps its source rank's rank-local state; None if it keeps none, or none so far."""
    unshared_ranks: tuple[int, ...] = ()
    """Ranks with rank-local state from a former world, while none may have been sent in this one; see
    `LocalStates.unshared_ranks`."""
    equal_local_step: int = NO_STATE
    """Number of committed steps after which all ranks had equal rank-local states, if no code of this rank has written
    to its own since; else `NO_STATE`."""
    needs_rank_local_state: bool = False
    """Whether the job returns to a checkpoint rather than continue without a lost rank's rank-local state."""
    abort_reason: str = ""
    """Why the job must end, if this process says so; all ranks then save what they hold. Empty otherwise."""
    restarts_all: bool = False
    """Whether `abort_reason` ends only this process, because all processes restart in a world of the survivors."""
    pending_saves: tuple[str, ...] = ()
    """What is left of the saving after the committed step; see `TrainingLoop.pending_saves`."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values for the job store."""
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

    @property
    def may_have_state(self) -> bool:
        """Whether it holds state, or will if another rank has committed the step that it voted for."""
        return self.has_state or self.voted_step != NO_STATE


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """How the members reach one common step."""

    step: int
    """Number of steps that all members have committed afterwards."""
    roll_forward: tuple[int, ...]
    """Ranks that commit the step they voted for."""
    senders: Mapping[int, int]
    """For each rank that needs state or a snapshot, the rank that sends it."""
    steps_lost: int | None = 0
    """Committed steps that must be run again; above 0 only at the level SNAPSHOT. None if no rank knows."""
    is_return: bool = False
    """Whether all ranks load their state from snapshots; ranks in `senders` first receive theirs."""
    abort_reason: str = ""
    """Why the job ends after this recovery; empty if it continues."""
    pending_saves: tuple[str, ...] = ()
    """What is left of the saving after that step, of all members together, to be done before the job continues."""
    are_local_equal: bool = False
    """Whether all ranks had equal rank-local states, so that each joiner's source gives it that, too: its buddy can
    not."""
    hooks_first: bool = False
    """Whether a rank that gives state, or rank-local state, commits the step only now.

    The program may change state in what follows a step (a teacher's average in a hook at the end of a batch). So this
    rank first runs on to its next step, where all ranks form another generation; until then no state is sent.
    """

    @property
    def level(self) -> RecoveryLevel:
        """The recovery level of this plan."""
        if self.abort_reason:
            return RecoveryLevel.STOP
        if self.is_return:
            return RecoveryLevel.SNAPSHOT
        return RecoveryLevel.REPLACE if self.senders else RecoveryLevel.RETRY


def plan_recovery(arrivals: Mapping[int, Arrival], topology: Topology) -> RecoveryPlan:
    """Choose the common step, and a source for every rank without state; the load on the sources is balanced.

    Args:
        arrivals: Arrivals of all ranks, by rank.
        topology: The ranks and the shards that they hold.

    Raises:
        StateLost: No rank holds the state of a lost rank, and there is no snapshot to which all ranks can return.
    """
    step, roll_forward, whole = _common_step(arrivals)
    ends = next((each.abort_reason for _, each in sorted(arrivals.items()) if each.abort_reason), "")
    pending = {save for each in arrivals.values() for save in each.pending_saves}
    load: Counter[int] = Counter()
    sources: dict[int, int] = {}
    for rank in sorted(set(arrivals) - set(whole)):
        candidates = [other for other in topology.replicas_of(rank) if other in whole]
        if not candidates:
            return _return_to_snapshot(arrivals, topology, step, rank, ends)
        source = min(candidates, key=lambda other: (other in roll_forward, load[other], other))
        load[source] += 1
        sources[rank] = source
    lost = _lost_rank_local(arrivals, topology, step, sources)
    are_equal = bool(lost) and _are_local_equal(arrivals, step)
    if are_equal:
        lost = []
    needs_local = any(each.needs_rank_local_state for each in arrivals.values())
    if lost and needs_local and newest_restorable_step(arrivals, topology) != NO_STATE:
        return _return_to_snapshot(arrivals, topology, step, lost[0], ends)
    if lost and needs_local:
        raise StateLost(
            f"no rank has what the ranks {lost} had alone after step {step} (buffers, metrics, means of the epoch): "
            f"their buddies {[buddies(topology)[rank] for rank in lost]} were lost with them, could not keep it, or "
            "had not got it since the job changed its size, and there is no snapshot that is whole (they are taken "
            'with snapshot_every_steps). With rank_local_state="replica" the job continues with that of a replica'
        )
    givers = {*sources.values(), *_givers_of_rank_local(arrivals, topology, sources)}
    return RecoveryPlan(
        step=step,
        roll_forward=roll_forward,
        senders=sources,
        abort_reason=ends,
        pending_saves=tuple(sorted(pending)),
        are_local_equal=are_equal,
        hooks_first=not ends and not givers.isdisjoint(roll_forward),
    )


def _givers_of_rank_local(
    arrivals: Mapping[int, Arrival], topology: Topology, lost: Collection[int]
) -> Collection[int]:
    """Ranks that give lost ranks their rank-local state: their buddies; none if no rank keeps any."""
    if all(each.rank_local_steps is None for each in arrivals.values()):
        return ()
    buddy_of = buddies(topology)
    return [buddy_of[rank] for rank in lost]


def _are_local_equal(arrivals: Mapping[int, Arrival], step: int) -> bool:
    """Whether all ranks had equal rank-local states after `step` steps.

    The ranks that have committed that step know what the vote said; the others have run no code since.
    """
    return all(each.equal_local_step == step for each in arrivals.values() if each.committed == step)


def _lost_rank_local(
    arrivals: Mapping[int, Arrival], topology: Topology, step: int, sources: Mapping[int, int]
) -> list[int]:
    """Ranks whose predecessors had rank-local state that their buddies do not keep as of `step`.

    If no rank keeps any, the ranks have no rank-local state, or none has brought any from a former world.
    """
    unshared = {rank for each in arrivals.values() for rank in each.unshared_ranks}
    if step <= 0 or not (unshared or any(each.rank_local_steps is not None for each in arrivals.values())):
        return []
    buddy_of = buddies(topology)
    lost = [rank for rank in sorted(sources) if step not in (arrivals[buddy_of[rank]].rank_local_steps or ())]
    return [rank for rank in lost if rank in unshared] if unshared else lost


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalSavePlan:
    """What the survivors save before the job ends because lost ranks were not replaced."""

    step: int
    """Number of steps committed in the saved state."""
    roll_forward: tuple[int, ...]
    """Ranks that commit the step they voted for."""
    savers: tuple[int, ...]
    """Ranks that hold the state after that step; empty if a shard is missing, so that nothing can be saved."""


def plan_final_save(arrivals: Mapping[int, Arrival], topology: Topology) -> FinalSavePlan:
    """Choose the common step of the survivors, and check whether together they hold every shard."""
    step, roll_forward, whole = _common_step(arrivals)
    is_held = all({rank, *topology.replicas_of(rank)} & set(whole) for rank in range(topology.world_size))
    return FinalSavePlan(step=step, roll_forward=roll_forward, savers=tuple(whole) if is_held else ())


def newest_restorable_step(arrivals: Mapping[int, Arrival], topology: Topology) -> int:
    """The newest step to which all ranks can return with snapshots, or `NO_STATE`."""
    own = {rank: each.snapshots for rank, each in arrivals.items()}
    kept = {rank: each.source_snapshots for rank, each in arrivals.items()}
    if not any(own.values()):
        return NO_STATE
    return max(restorable_steps(own, kept, buddies(topology)), default=NO_STATE)


def _common_step(arrivals: Mapping[int, Arrival]) -> tuple[int, tuple[int, ...], list[int]]:
    """The number of steps to reach, the ranks that commit the last one now, and all ranks that then hold it."""
    step = max((each.committed for each in arrivals.values()), default=NO_STATE)
    held = {
        rank: each for rank, each in sorted(arrivals.items()) if each.has_state or NO_STATE != each.voted_step == step
    }
    behind = {rank for rank, each in held.items() if each.committed < step}
    roll_forward = tuple(rank for rank in held if rank in behind and held[rank].voted_step == step)
    return step, roll_forward, [rank for rank in held if rank not in behind or rank in roll_forward]


def _return_to_snapshot(
    arrivals: Mapping[int, Arrival], topology: Topology, step: int, lost: int, ends: str
) -> RecoveryPlan:
    """Plan the return of all ranks to the newest complete snapshot, since the state of rank `lost` is gone."""
    newest, buddy_of = newest_restorable_step(arrivals, topology), buddies(topology)
    if newest == NO_STATE:
        raise StateLost(_why_lost(arrivals, topology, step, lost, buddy_of))
    if step == NO_STATE:  # all processes are new, or their commits were interrupted
        step = max(each.last_committed for each in arrivals.values())
    return RecoveryPlan(
        step=newest,
        roll_forward=(),
        senders={rank: buddy_of[rank] for rank, each in sorted(arrivals.items()) if newest not in each.snapshots},
        steps_lost=None if step == NO_STATE else max(0, step - newest),
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
        back = f"no snapshot of the steps {taken} is complete, because the ranks hold different ones"
    return f"{replaced}; {back}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SalvagePlan:
    """Which snapshots in their memory the survivors write as a checkpoint, before all processes restart."""

    step: int
    """Step of the snapshots."""
    owners: Mapping[int, tuple[int, ...]]
    """For each rank that writes, the owners of the snapshots it writes: itself, its source rank, or both."""


def plan_salvage(arrivals: Mapping[int, Arrival], topology: Topology) -> SalvagePlan | None:
    """Choose the newest step with a snapshot of every shard, and one writer for each shard, evenly.

    Returns:
        The plan, or None if there is no such step. Replicas of a shard are identical, so one of them suffices.
    """
    source_of, size = sources_of(buddies(topology)), topology.replica_size
    held: defaultdict[int, defaultdict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for rank, arrival in sorted(arrivals.items()):
        for owner, steps in ((rank, arrival.snapshots), (source_of[rank], arrival.source_snapshots)):
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
