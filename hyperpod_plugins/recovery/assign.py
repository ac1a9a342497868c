"""What each rank does to bring the job back to one common step: decided from the arrivals, and from nothing else.

[Note: commit rule] A vote that completes on any rank proves that every rank had valid gradients. So if anybody has
committed step t, every survivor that voted for t holds what it needs to commit it too, and does. Nothing that a
peer may have committed is ever rolled back, and no step is applied twice.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from hyperpod_plugins.errors import StateLost
from hyperpod_plugins.parallel.topology import Topology

NO_STATE = -1


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

    def to_dict(self) -> dict[str, Any]:
        """For the ledger."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`."""
        return cls(**values)

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
    """Rank that gives its state, for each rank that needs one."""


def plan_recovery(arrivals: Mapping[int, Arrival], topology: Topology) -> RecoveryPlan:
    """Choose the common step, and a source for every rank without state; sources share the work evenly.

    Raises:
        StateLost: no rank holds the state that a newcomer needs.
    """
    held = {rank: each for rank, each in arrivals.items() if each.has_state}
    if not held:
        raise StateLost("no rank that is left holds the training state")
    step = max(each.committed for each in held.values())
    behind = {rank for rank, each in held.items() if each.committed < step}
    roll_forward = {rank for rank in behind if held[rank].prepared == step}
    whole = [rank for rank in held if rank not in behind or rank in roll_forward]
    load: Counter[int] = Counter()
    sources: dict[int, int] = {}
    for rank in sorted(set(arrivals) - set(whole)):
        candidates = [other for other in topology.replicas_of(rank) if other in whole]
        if not candidates:
            raise StateLost(
                f"no rank that is left holds the shard of rank {rank}, whose other copies were on the ranks "
                f"{list(topology.replicas_of(rank)) or '(none: replicate degree 1)'}"
            )
        source = min(candidates, key=lambda other: (load[other], other))
        load[source] += 1
        sources[rank] = source
    return RecoveryPlan(step=step, roll_forward=tuple(sorted(roll_forward)), sources=sources)
