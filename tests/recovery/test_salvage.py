"""Who writes which snapshots when too few are left for a replica: tables."""

import pytest

from hyperpod_plugins.parallel import Topology
from hyperpod_plugins.recovery import Arrival
from hyperpod_plugins.recovery.plan import buddies, plan_salvage


def arrivals(**snapshots):
    """Of the ranks `r0=((own steps), (steps of its source))`."""
    return {
        int(name[1:]): Arrival(incarnation=0, snapshots=own, source_snapshots=source_rank)
        for name, (own, source_rank) in snapshots.items()
    }


TWO = Topology(world_size=2, shard_degree=2, ranks_per_node=1)
FOUR = Topology(world_size=4, shard_degree=4, ranks_per_node=2)  # rank 0 keeps for 2, and 2 for 0; 1 and 3 as well
HYBRID = Topology(world_size=4, shard_degree=2, ranks_per_node=2)


@pytest.mark.parametrize(
    ("topology", "here", "step", "owners"),
    [
        pytest.param(TWO, {"r0": ((10,), (10,))}, 10, {0: (0, 1)}, id="one has its own and the other's"),
        pytest.param(TWO, {"r1": ((10, 20), (10,))}, 10, {1: (0, 1)}, id="the newer one had not arrived"),
        pytest.param(TWO, {"r0": ((10, 20), (10, 20))}, 20, {0: (0, 1)}, id="the newest"),
        pytest.param(TWO, {"r0": ((10,), ())}, None, None, id="nobody has the other's"),
        pytest.param(TWO, {"r0": ((20,), (10,))}, None, None, id="of different steps"),
        pytest.param(TWO, {"r0": ((0,), (0,))}, None, None, id="before the first step there is nothing to save"),
        pytest.param(TWO, {"r0": ((), ())}, None, None, id="no snapshots"),
        pytest.param(FOUR, {"r0": ((5,), (5,)), "r1": ((5,), (5,))}, 5, {0: (0, 2), 1: (1, 3)}, id="a node is left"),
        pytest.param(FOUR, {"r0": ((5,), (5,)), "r2": ((5,), (5,))}, None, None, id="two shards are gone"),
        pytest.param(
            FOUR,
            {"r0": ((5,), (5,)), "r1": ((5,), (5,)), "r2": ((5,), (5,))},
            5,
            {0: (0,), 1: (1, 3), 2: (2,)},
            id="those write whose they are",
        ),
        pytest.param(HYBRID, {"r0": ((5,), ()), "r1": ((5,), ())}, 5, {0: (0,), 1: (1,)}, id="a replica's are enough"),
    ],
)
def test_what_can_be_saved(topology, here, step, owners):
    salvage = plan_salvage(arrivals(**here), topology)
    if step is None:
        assert salvage is None
        return
    assert (salvage.step, dict(salvage.owners)) == (step, owners)
    size = topology.replica_size
    assert sorted(owner % size for those in salvage.owners.values() for owner in those) == list(range(size))


def test_the_buddies_that_the_tables_count_on():
    assert buddies(FOUR) == (2, 3, 0, 1)
