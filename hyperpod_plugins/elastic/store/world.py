"""World plans: which workers make up the job, in the order of their ranks, as it grows and shrinks; pure functions.

Each worker slot has a *worker_id*, a number assigned by its agent, under which the job store knows it for as long as
the job lasts. The rank of a worker is the index of its worker_id in the present world. In the initial world the two
are equal.
"""

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

from hyperpod_plugins.elastic.store.records import JsonRecord
from hyperpod_plugins.errors import ConfigError, StateLost


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldPlan(JsonRecord):
    """The workers that take part, in the order of their ranks."""

    worker_ids: tuple[int, ...]
    number: int = 0
    """Number of the world: 0 for the initial one."""
    cause: str = ""
    """Why it replaces the previous world."""
    num_lost: int = 0
    """Number of workers of the previous world that were lost or had to leave."""
    previous_lasted_s: float = field(default=math.inf, compare=False)
    """How long the previous world had lasted when this one was planned, in seconds, by the clock of one of its
    members; infinite if it was not measured."""

    @classmethod
    def initial(cls, world_size: int) -> Self:
        """Return the world that a job begins with."""
        return cls(worker_ids=tuple(range(world_size)))

    @property
    def size(self) -> int:
        """The world size."""
        return len(self.worker_ids)

    def rank_of(self, worker_id: int) -> int | None:
        """Rank of a worker; None if it does not take part."""
        return self.worker_ids.index(worker_id) if worker_id in self.worker_ids else None


def replan_world(
    world: WorldPlan,
    *,
    healthy: AbstractSet[int],
    joining: Sequence[int] = (),
    num_replicas: int,
    replica_size: int,
    cause: str = "",
) -> WorldPlan:
    """Plan the next world: complete replicas of healthy workers and joiners, so that few workers need new state.

    The index of a rank within its replica determines which part of the state it holds. A healthy worker keeps that
    index, and its replica if that stays complete. Workers of broken replicas fill the gaps of others, and joiners
    fill the remaining gaps. Replicas keep their order, so the first rank changes only if its process is lost.

    Args:
        world: the present one.
        healthy: worker_ids of the present world that continue.
        joining: worker_ids of the joiners, in the order in which to use them.
        num_replicas: number of replicas in the next world.
        replica_size: ranks of one replica: shard degree x tensor degree.
        cause: for the record.

    Raises:
        ConfigError: too few workers.
        StateLost: no healthy worker holds a part of the state.
    """
    held = _workers_by_shard_index(world, healthy, replica_size)
    lost = [index for index, worker_ids in held.items() if not worker_ids]
    if lost:
        raise StateLost(
            f"no healthy rank holds the part {lost} of the training state, so the remaining workers "
            f"({sorted(healthy)}) cannot form a world."
        )
    whole = [
        replica
        for replica in range(world.size // replica_size)
        if set(world.worker_ids[replica * replica_size : (replica + 1) * replica_size]) <= healthy
    ]
    kept = whole[:num_replicas]
    rows = [list(world.worker_ids[replica * replica_size : (replica + 1) * replica_size]) for replica in kept]
    used = {worker_id for row in rows for worker_id in row}
    fillers = [worker_id for worker_id in joining if worker_id not in used]
    while len(rows) < num_replicas:
        row: list[int] = []
        for index in range(replica_size):
            spare = next((worker_id for worker_id in held[index] if worker_id not in used), None)
            if spare is None and not fillers:
                raise ConfigError(
                    f"{num_replicas} replicas of {replica_size} ranks need {num_replicas * replica_size} workers, but "
                    f"only {len(healthy)} are healthy and {len(joining)} join."
                )
            row.append(fillers.pop(0) if spare is None else spare)
            used.add(row[-1])
        rows.append(row)
    rows.sort(
        key=lambda row: min(
            world.worker_ids.index(worker_id) if worker_id in healthy else world.size for worker_id in row
        )
    )
    return WorldPlan(
        worker_ids=tuple(worker_id for row in rows for worker_id in row), number=world.number + 1, cause=cause
    )


def num_setbacks(history: Sequence[WorldPlan], min_stable_s: float) -> int:
    """Count the latest consecutive times that the job lost workers within `min_stable_s` seconds after it had grown.

    Args:
        history: the worlds of the job so far, in order.
        min_stable_s: in seconds.
    """
    found, since_growth_s = 0, math.inf
    for before, world in pairwise(history):
        since_growth_s += world.previous_lasted_s
        if world.size > before.size:
            since_growth_s = 0.0
        elif world.size < before.size and world.num_lost:
            found = found + 1 if since_growth_s <= min_stable_s else 0
    return found


def _workers_by_shard_index(world: WorldPlan, healthy: AbstractSet[int], replica_size: int) -> Mapping[int, list[int]]:
    return {
        index: [worker_id for worker_id in world.worker_ids[index::replica_size] if worker_id in healthy]
        for index in range(replica_size)
    }
