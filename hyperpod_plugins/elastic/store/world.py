"""Who makes up a job, rank by rank, as it grows and shrinks; pure.

A process has a *place*, a number that its agent gave it, under which the job store knows it for as long as the job
lasts. Its rank is the index of that place in the present world. In the first world the two are the same.
"""

import json
import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

from typing_extensions import override

from hyperpod_plugins.elastic.store.records import JsonRecord
from hyperpod_plugins.errors import ConfigError, StateLost


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldPlan(JsonRecord):
    """The places that take part, in the order of their ranks."""

    worker_ids: tuple[int, ...]
    number: int = 0
    """How many worlds the job has had before."""
    cause: str = ""
    """Why it took the place of the one before."""
    num_lost: int = 0
    """Places of the one before that it had to leave out."""
    lasted_s: float = field(default=math.inf, compare=False)
    """Seconds that the one before had lasted when this was planned, by the clock of one of its members; infinite where
    nobody measured."""

    @classmethod
    def initial(cls, world_size: int) -> Self:
        """The world that a job begins with."""
        return cls(worker_ids=tuple(range(world_size)))

    @property
    def size(self) -> int:
        """The world size."""
        return len(self.worker_ids)

    def rank_of(self, worker_id: int) -> int | None:
        """Rank of a place; None if it takes no part."""
        return self.worker_ids.index(worker_id) if worker_id in self.worker_ids else None

    @classmethod
    @override
    def from_json(cls, text: str | bytes) -> Self:
        """Inverse of `to_json`."""
        values = json.loads(text)
        return cls(**values | {"worker_ids": tuple(values["worker_ids"])})


def replan_world(
    world: WorldPlan,
    *,
    healthy: AbstractSet[int],
    joining: Sequence[int] = (),
    num_replicas: int,
    replica_size: int,
    cause: str = "",
) -> WorldPlan:
    """The next world: whole replicas, put together from what is healthy, so that as few as possible need new state.

    A rank's index within its replica says which part of the state it holds. It keeps that index, and its replica where
    that stays whole; places in broken replicas fill the gaps of others; what joins takes the gaps that are left.
    Replicas keep their order, so the first rank changes only where its process is lost.

    Args:
        world: the present one.
        healthy: places of it that go on.
        joining: places that come in, in the order in which they are to be used.
        num_replicas: replicas of the next world.
        replica_size: ranks of one replica: shard degree x tensor degree.
        cause: for the record.

    Raises:
        ConfigError: too few places.
        StateLost: nobody healthy holds a part of the state.
    """
    held = _places_by_index(world, healthy, replica_size)
    lost = [index for index, worker_ids in held.items() if not worker_ids]
    if lost:
        raise StateLost(
            f"no healthy rank holds the part {lost} of the training state, so a world cannot be put together from "
            f"those that are left ({sorted(healthy)})."
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
    """How often in a row, up to now, the job lost places within `min_stable_s` seconds after it had grown.

    Args:
        history: the worlds that the job has had, in order.
        min_stable_s: seconds.
    """
    found, since_growth_s = 0, math.inf
    for before, world in pairwise(history):
        since_growth_s += world.lasted_s
        if world.size > before.size:
            since_growth_s = 0.0
        elif world.size < before.size and world.num_lost:
            found = found + 1 if since_growth_s <= min_stable_s else 0
    return found


def _places_by_index(world: WorldPlan, healthy: AbstractSet[int], replica_size: int) -> Mapping[int, list[int]]:
    return {
        index: [worker_id for worker_id in world.worker_ids[index::replica_size] if worker_id in healthy]
        for index in range(replica_size)
    }
