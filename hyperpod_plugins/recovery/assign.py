"""What each rank does to bring the job back to one common step: decided from the arrivals, and from nothing else.

[Note: commit rule] A vote that completes on any rank proves that every rank had valid gradients. So if anybody has
committed step t, every survivor that voted for t holds what it needs to commit it too, and does. Nothing that a
peer may have committed is ever rolled back, and no step is applied twice; only where a part of the state of
step t is gone for good do all ranks return together, to a step of which it is whole.
"""

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, Self

from hyperpod_plugins.errors import StateLost
from hyperpod_plugins.parallel.topology import Topology
from hyperpod_plugins.recovery.buddies import buddies, restorable_steps

NO_STATE = -1


class Rung(enum.Enum):
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
    prepared: int = NO_STATE
    """Step that it could commit: it computed the gradients and voted for it."""
    groups: str = ""
    """Fingerprint of the process groups that it holds."""
    in_step: bool = True
    """Whether it waits at a step, so that it can go on there."""
    entered_part: int | None = None
    """Place of the part of the program at which it entered its loops, apart from the others; None in a step."""
    snapshots: tuple[int, ...] = ()
    """Steps of which it has a snapshot of itself."""
    ward_snapshots: tuple[int, ...] = ()
    """Steps of which it has a snapshot of the rank whose buddy it is."""
    local_steps: tuple[int, ...] | None = None
    """Steps of which it keeps what its ward has alone; None where nothing is kept, or nothing has been yet."""
    needs_local: bool = False
    """Whether the job goes back to a checkpoint rather than on without what a lost rank had alone."""
    ends: str = ""
    """Why the job must not go on, where this process says so: all save what they have, and end."""
    starts_again: bool = False
    """Whether `ends` is the end of this process only, for all start again in a world of those that are left."""
    owes: str = ""
    """Path of a checkpoint of the committed step that was interrupted."""

    def to_dict(self) -> dict[str, Any]:
        """For the ledger."""
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
    ends: str = ""
    """Why the job ends here instead of going on; empty where it goes on."""
    owes: str = ""
    """Path of a checkpoint that was interrupted, and is to be written again before the job goes on."""
    hooks_first: bool = False
    """Whether a rank that commits the step only now is the only one that could give its state.

    A program may change state in what follows a step (a teacher's average at the end of a batch). So that rank goes on
    to its next step first, and all meet there again; until then nobody gives anything.
    """

    @property
    def rung(self) -> Rung:
        """Which rung of the ladder this is."""
        if self.ends:
            return Rung.STOP
        if self.is_return:
            return Rung.SNAPSHOT
        return Rung.REPLACE if self.sources else Rung.RETRY


def plan_recovery(arrivals: Mapping[int, Arrival], topology: Topology) -> RecoveryPlan:
    """Choose the common step, and a source for every rank without state; sources share the work evenly.

    Raises:
        StateLost: a rank's state lives nowhere, and there is no snapshot to which all can return.
    """
    step, roll_forward, whole = _common_step(arrivals)
    ends = next((each.ends for _, each in sorted(arrivals.items()) if each.ends), "")
    owes = next((each.owes for _, each in sorted(arrivals.items()) if each.owes), "")
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
        step=step, roll_forward=roll_forward, sources=sources, ends=ends, owes=owes, hooks_first=hooks_first
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
class Farewell:
    """What those that are left save before the job ends, because nobody came for the others."""

    step: int
    """Steps that the saved state has committed."""
    roll_forward: tuple[int, ...]
    """Ranks that commit the step that they voted for."""
    savers: tuple[int, ...]
    """Ranks that hold the state after that step; none if a shard is held by nobody, so that nothing can be saved."""


def plan_farewell(arrivals: Mapping[int, Arrival], topology: Topology) -> Farewell:
    """Choose the common step of those that are left, and see whether together they hold every shard."""
    step, roll_forward, whole = _common_step(arrivals)
    is_held = all({rank, *topology.replicas_of(rank)} & set(whole) for rank in range(topology.world_size))
    return Farewell(step=step, roll_forward=roll_forward, savers=tuple(whole) if is_held else ())


def newest_snapshot(arrivals: Mapping[int, Arrival], topology: Topology) -> int:
    """The newest step to which all ranks could return, or `NO_STATE`."""
    own = {rank: each.snapshots for rank, each in arrivals.items()}
    kept = {rank: each.ward_snapshots for rank, each in arrivals.items()}
    if not any(own.values()):
        return NO_STATE
    return max(restorable_steps(own, kept, buddies(topology)), default=NO_STATE)


def _common_step(arrivals: Mapping[int, Arrival]) -> tuple[int, tuple[int, ...], list[int]]:
    """Steps that anybody has committed, who commits the last of them now, and who has that state then."""
    held = {rank: each for rank, each in sorted(arrivals.items()) if each.has_state}
    step = max((each.committed for each in held.values()), default=NO_STATE)
    behind = {rank for rank, each in held.items() if each.committed < step}
    roll_forward = tuple(rank for rank in held if rank in behind and held[rank].prepared == step)
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
        ends=ends,
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
    kept = {rank: each.ward_snapshots for rank, each in arrivals.items()}
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
