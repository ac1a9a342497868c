"""Plans of recovery: tables of cases, and laws over every state in which survivors can be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_plugins.errors import StateLost
from hyperpod_plugins.parallel import Topology
from hyperpod_plugins.recovery import NO_STATE, Arrival, RecoveryPlan, plan_recovery

HSDP = Topology(world_size=4, shard_degree=2)


def arrived(committed, prepared=NO_STATE, incarnation=0):
    return Arrival(incarnation=incarnation, committed=committed, prepared=prepared)


NEW = arrived(NO_STATE, incarnation=1)


@pytest.mark.parametrize(
    ("arrivals", "step", "roll_forward", "sources"),
    [
        pytest.param([arrived(5)] * 4, 5, (), {}, id="a transient fault"),
        pytest.param([arrived(5), NEW, arrived(5), arrived(5)], 5, (), {1: 3}, id="one rank lost"),
        pytest.param([NEW, NEW, arrived(5), arrived(5)], 5, (), {0: 2, 1: 3}, id="a replica lost"),
        pytest.param([NEW, arrived(5), arrived(5), NEW], 5, (), {0: 2, 3: 1}, id="one of each shard"),
        pytest.param([arrived(6), arrived(5, 6), NEW, arrived(5, 6)], 6, (1, 3), {2: 0}, id="one has committed"),
        pytest.param([arrived(5, 6), arrived(5, 6), NEW, arrived(5, 6)], 5, (), {2: 0}, id="all voted, none knows"),
        pytest.param([NEW, arrived(6), arrived(5, 6), arrived(5, 6)], 6, (2, 3), {0: 2}, id="from one rolled forward"),
        pytest.param([arrived(0), NEW, arrived(0), arrived(0)], 0, (), {1: 3}, id="before the first step"),
        pytest.param([arrived(6), arrived(6), arrived(4), arrived(6)], 6, (), {2: 0}, id="one left behind"),
        pytest.param([arrived(6), arrived(6), arrived(5, 5), arrived(6)], 6, (), {2: 0}, id="an old vote"),
    ],
)
def test_the_plan(arrivals, step, roll_forward, sources):
    plan = plan_recovery(dict(enumerate(arrivals)), HSDP)
    assert plan == RecoveryPlan(step=step, roll_forward=roll_forward, sources=sources)


@pytest.mark.parametrize(
    ("arrivals", "topology"),
    [
        pytest.param([NEW] * 4, HSDP, id="nobody is left"),
        pytest.param([NEW, arrived(5), NEW, arrived(5)], HSDP, id="all copies of a shard"),
        pytest.param([arrived(5), NEW], Topology(world_size=2, shard_degree=2), id="no replicas"),
        pytest.param([NEW, arrived(6), arrived(5), arrived(6)], HSDP, id="the only copy is behind"),
    ],
)
def test_lost_state_is_an_error(arrivals, topology):
    with pytest.raises(StateLost):
        plan_recovery(dict(enumerate(arrivals)), topology)


@st.composite
def faults(draw):
    """Any topology, and what a commit leaves of any step: some have committed, all others have voted or nobody has."""
    shard, tensor, replicate = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(2, 4))
    topology = Topology(world_size=shard * tensor * replicate, shard_degree=shard, tensor_degree=tensor)
    step = draw(st.integers(0, 50))
    is_vote_complete = draw(st.booleans())
    arrivals = {}
    for rank in range(topology.world_size):
        if draw(st.booleans()):
            arrivals[rank] = NEW
        elif is_vote_complete and draw(st.booleans()):
            arrivals[rank] = arrived(step + 1)
        else:
            has_voted = is_vote_complete or draw(st.booleans())
            arrivals[rank] = arrived(step, step + 1 if has_voted else NO_STATE)
    return topology, arrivals


@given(faults())
def test_all_end_at_one_step_and_nobody_goes_back(case):
    topology, arrivals = case
    holders = {rank for rank, each in arrivals.items() if each.has_state}
    covered = {frozenset(topology.peers(rank, "replicate")) for rank in holders}
    is_lost = any(frozenset(topology.peers(rank, "replicate")) not in covered for rank in arrivals)
    if is_lost:
        with pytest.raises(StateLost):
            plan_recovery(arrivals, topology)
        return
    plan = plan_recovery(arrivals, topology)
    assert plan.step == max(each.committed for each in arrivals.values())
    for rank, each in arrivals.items():
        if rank in plan.sources:
            source = plan.sources[rank]
            assert source in topology.replicas_of(rank)
            assert source not in plan.sources
            assert not each.has_state  # a survivor of a commit never throws its state away
        elif rank in plan.roll_forward:
            assert each.prepared == plan.step == each.committed + 1
        else:
            assert each.committed == plan.step
    for peers in covered:
        load = [list(plan.sources.values()).count(rank) for rank in peers if rank not in plan.sources]
        assert max(load) - min(load) <= 1


def test_an_arrival_survives_the_ledger():
    for arrival in (NEW, arrived(3, 4), Arrival(incarnation=2, committed=7, in_step=False)):
        assert Arrival.from_dict(arrival.to_dict()) == arrival
