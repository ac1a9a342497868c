"""Worlds that follow each other: whole replicas from what is left, with as little new state as possible."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_plugins.elastic.store.world import WorldPlan, num_setbacks, replan_world
from hyperpod_plugins.errors import ConfigError, StateLost

FOUR = WorldPlan.initial(4)


@pytest.mark.parametrize(
    ("world", "healthy", "joining", "num_replicas", "replica_size", "worker_ids"),
    [
        pytest.param(FOUR, {0, 1, 2, 3}, [4, 5], 3, 2, (0, 1, 2, 3, 4, 5), id="growth"),
        pytest.param(WorldPlan.initial(1), {0}, [3, 7], 3, 1, (0, 3, 7), id="growth of single ranks"),
        pytest.param(FOUR, {0, 1}, [], 1, 2, (0, 1), id="a replica is lost"),
        pytest.param(FOUR, {2, 3}, [], 1, 2, (2, 3), id="the first replica is lost"),
        pytest.param(FOUR, {0, 3}, [], 1, 2, (0, 3), id="one of each replica is lost: the rest make one"),
        pytest.param(FOUR, {1, 2}, [], 1, 2, (2, 1), id="the same, crosswise: shards keep their index"),
        pytest.param(FOUR, {0, 1, 3}, [9], 2, 2, (0, 1, 9, 3), id="a spare for a lost one, in its place"),
        pytest.param(FOUR, {0, 1, 2, 3}, [], 1, 2, (0, 1), id="somebody asked for fewer"),
        pytest.param(
            WorldPlan(worker_ids=(5, 1, 2, 7, 0, 3), number=4),
            {5, 1, 7, 0, 3},
            [],
            2,
            2,
            (5, 1, 0, 3),
            id="a later world",
        ),
        pytest.param(
            WorldPlan(worker_ids=(5, 1, 2, 7, 0, 3), number=4),
            {5, 1, 7, 0},
            [],
            2,
            2,
            (5, 1, 0, 7),
            id="two half replicas",
        ),
    ],
)
def test_regroup(world, healthy, joining, num_replicas, replica_size, worker_ids):
    found = replan_world(
        world, healthy=healthy, joining=joining, num_replicas=num_replicas, replica_size=replica_size, cause="a test"
    )
    assert found == WorldPlan(worker_ids=worker_ids, number=world.number + 1, cause="a test")
    assert WorldPlan.from_json(found.to_json()) == found


def world_of(size, lasted_s=math.inf, num_lost=0):
    """A world, and how long the one before it had lasted."""
    return WorldPlan(worker_ids=tuple(range(size)), num_lost=num_lost, previous_lasted_s=lasted_s)


@pytest.mark.parametrize(
    ("worlds", "setbacks"),
    [
        ([world_of(2)], 0),
        ([world_of(2), world_of(4, 100.0), world_of(2, 5.0, num_lost=2)], 1),
        ([world_of(2), world_of(4, 100.0), world_of(2, 11.0, num_lost=2)], 0),  # it was stable
        ([world_of(2), world_of(4, 100.0), world_of(2, 5.0)], 0),  # somebody asked for it
        ([world_of(4), world_of(2, 5.0, num_lost=2)], 0),  # it had not grown
        ([world_of(2), world_of(4, 9.0), world_of(4, 4.0, num_lost=1), world_of(2, 4.0, num_lost=1)], 1),
        ([world_of(2), world_of(4, 9.0), world_of(4, 6.0, num_lost=1), world_of(2, 6.0, num_lost=1)], 0),
        ([world_of(2), *[world_of(4, 0.0), world_of(2, 1.0, num_lost=1)] * 3], 3),
        (
            [
                *[world_of(2), world_of(4, 1.0), world_of(2, 1.0, num_lost=1)],
                *[world_of(4, 1.0), world_of(2, 27.0, num_lost=1), world_of(4, 1.0)],
            ],
            0,
        ),
    ],
)
def test_setbacks(worlds, setbacks):
    assert num_setbacks(worlds, min_stable_s=10.0) == setbacks


def test_a_part_that_nobody_holds_is_named():
    with pytest.raises(StateLost, match=r"no healthy rank holds the part \[1\]"):
        replan_world(FOUR, healthy={0, 2}, joining=[8, 9], num_replicas=1, replica_size=2)


def test_too_few_places_are_refused():
    with pytest.raises(ConfigError, match="3 replicas of 2 ranks need 6 workers, but only 4 are healthy and 1 join"):
        replan_world(FOUR, healthy={0, 1, 2, 3}, joining=[8], num_replicas=3, replica_size=2)


@given(
    replica_size=st.integers(1, 3),
    lost=st.sets(st.integers(0, 11)),
    num_joining=st.integers(0, 6),
    num_replicas=st.integers(1, 5),
)
def test_survivors_keep_their_index(replica_size, lost, num_joining, num_replicas):
    world = WorldPlan.initial(4 * replica_size)
    healthy = set(world.worker_ids) - lost
    joining = list(range(100, 100 + num_joining))
    try:
        after = replan_world(
            world, healthy=healthy, joining=joining, num_replicas=num_replicas, replica_size=replica_size
        ).worker_ids
    except (StateLost, ConfigError):
        return
    assert len(after) == len(set(after)) == num_replicas * replica_size
    assert set(after) <= healthy | set(joining)
    for rank, worker_id in enumerate(after):
        if worker_id in healthy:
            assert world.worker_ids.index(worker_id) % replica_size == rank % replica_size
    needed = num_replicas * replica_size
    assert sum(worker_id in joining for worker_id in after) >= needed - len(healthy)
    for index in range(replica_size):  # nobody receives a part while somebody who holds it is left over
        holders = {worker_id for worker_id in world.worker_ids[index::replica_size] if worker_id in healthy}
        joiners = [worker_id for worker_id in after[index::replica_size] if worker_id in joining]
        assert not joiners or holders <= set(after)
