"""Plans of recovery: tables of cases, and laws over every state in which survivors can be."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_plugins.errors import StateLost
from hyperpod_plugins.parallel import Topology
from hyperpod_plugins.recovery import NO_STATE, Arrival, RecoveryLevel, RecoveryPlan, plan_recovery
from hyperpod_plugins.recovery.plan import buddies

HSDP = Topology(world_size=4, shard_degree=2)


def arrived(committed, prepared=NO_STATE, incarnation=0):
    return Arrival(incarnation=incarnation, committed=committed, voted_step=prepared)


NEW = arrived(NO_STATE, incarnation=1)
ONLY_FORWARD = arrived(NO_STATE, 6)  # it has voted for a step that it cannot undo


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
        pytest.param([ONLY_FORWARD, arrived(6), NEW, arrived(5, 6)], 6, (0, 3), {2: 0}, id="from one that cannot undo"),
        pytest.param(
            [ONLY_FORWARD, arrived(5, 6), arrived(5, 6), NEW], 5, (), {0: 2, 3: 1}, id="one cannot undo, none knows"
        ),
    ],
)
def test_the_plan(arrivals, step, roll_forward, sources):
    plan = plan_recovery(dict(enumerate(arrivals)), HSDP)
    hooks_first = bool(set(roll_forward) & set(sources.values()))
    assert plan == RecoveryPlan(step=step, roll_forward=roll_forward, senders=sources, hooks_first=hooks_first)


def test_state_comes_from_a_rank_that_has_the_hooks_of_the_step_behind_it():
    replicas = Topology(world_size=3, shard_degree=1)
    plan = plan_recovery(dict(enumerate([arrived(5, 6), NEW, arrived(6)])), replicas)
    assert (plan.senders, plan.hooks_first) == ({1: 2}, False)


def keeping(*local_steps, snapshots=(), needs_local=False, equal_step=NO_STATE, prepared=NO_STATE):
    return Arrival(
        incarnation=0,
        committed=5,
        voted_step=prepared,
        snapshots=snapshots,
        source_snapshots=snapshots,
        rank_local_steps=local_steps,
        equal_local_step=equal_step,
        needs_rank_local_state=needs_local,
    )


def test_rank_local_state_comes_from_a_rank_that_has_run_the_hooks_of_the_step():
    """The lost rank's parameters come from rank 0, which has; its buddy is about to commit the step."""
    buddy = buddies(HSDP)[2]
    late, done = keeping(5, 6, prepared=6), replace(keeping(5, 6), committed=6)
    plan = plan_recovery(dict(enumerate([done, late, NEW, done])), HSDP)
    assert (plan.senders, plan.roll_forward, plan.hooks_first) == ({2: 0}, (buddy,), True)


@pytest.mark.parametrize(
    ("arrivals", "step", "is_return"),
    [
        pytest.param([keeping(4, 5)] * 2 + [NEW, keeping(4, 5)], 5, False, id="its buddy has it"),
        pytest.param([arrived(5), NEW, NEW, arrived(5)], 5, False, id="nobody has anything alone, or the job grows"),
        pytest.param([keeping(4, 5), NEW, NEW, keeping(4, 5)], 5, False, id="its buddy was lost too, and no snapshots"),
        pytest.param(
            [keeping(snapshots=(3,), needs_local=True)] * 2 + [NEW, keeping(snapshots=(3,), needs_local=True)],
            3,
            True,
            id="too much, and a snapshot",
        ),
        pytest.param(
            [keeping(snapshots=(3,))] * 2 + [NEW, keeping(snapshots=(3,))],
            5,
            False,
            id="a snapshot, but a replica's is enough",
        ),
        pytest.param(
            [
                keeping(4, 5, snapshots=(3,), needs_local=True),
                Arrival(incarnation=1, snapshots=(3,), source_snapshots=(3,)),
                NEW,
                keeping(4, 5, snapshots=(3,), needs_local=True),
            ],
            3,
            True,
            id="its buddy was lost too, and its snapshot is in shared memory",
        ),
    ],
)
def test_what_a_rank_had_alone_is_looked_for_down_the_ladder(arrivals, step, is_return):
    plan = plan_recovery(dict(enumerate(arrivals)), HSDP)
    assert (plan.step, plan.is_return) == (step, is_return)


def test_without_what_a_rank_had_alone_the_job_goes_back_to_a_checkpoint_where_it_is_told_to():
    exact = keeping(4, 5, needs_local=True)
    with pytest.raises(StateLost, match=r"ranks \[1, 2\] had alone after step 5"):
        plan_recovery(dict(enumerate([exact, NEW, NEW, exact])), HSDP)


@pytest.mark.parametrize(
    ("equal_steps", "are_equal"), [((5, 5), True), ((5, NO_STATE), False), ((4, 4), False), ((NO_STATE,) * 2, False)]
)
def test_what_was_equal_on_all_ranks_is_not_lost_with_a_rank_and_its_buddy(equal_steps, are_equal):
    first, second = (keeping(4, 5, needs_local=True, equal_step=step) for step in equal_steps)
    arrivals = dict(enumerate([first, NEW, NEW, second]))
    if are_equal:
        assert plan_recovery(arrivals, HSDP).are_local_equal
    else:
        with pytest.raises(StateLost):
            plan_recovery(arrivals, HSDP)
    for lost in ((2,), (0, 1), (2, 3)):  # a whole replica: the buddies give the ranks what these have alone
        one_lost = {rank: NEW if rank in lost else first for rank in range(4)}
        assert not plan_recovery(one_lost, HSDP).are_local_equal


GROWN = Topology(world_size=4, shard_degree=1)
"""Its last two ranks are new; the buddy of each rank is the next one."""


def moved(*kept, needs_local=True, equal_step=NO_STATE):
    """One of two ranks that were in the former world, and have sent no state in this one before a vote."""
    return Arrival(
        incarnation=0,
        committed=5,
        rank_local_steps=kept or None,
        unshared_ranks=(0, 1),
        equal_local_step=equal_step,
        needs_rank_local_state=needs_local,
    )


@pytest.mark.parametrize(
    "arrivals",
    [
        pytest.param([moved(), moved(), NEW, NEW], id="only the new ranks have no state"),
        pytest.param([moved(), NEW, keeping(5), NEW], id="its buddy in this world has it already"),
        pytest.param([moved(5), moved(), NEW, NEW], id="a fault in the first exchange: new ranks have nothing to lose"),
        pytest.param([moved(needs_local=False), NEW, NEW, NEW], id="a replica's is enough"),
    ],
)
def test_a_job_that_changes_its_size_goes_on(arrivals):
    plan = plan_recovery(dict(enumerate(arrivals)), GROWN)
    assert (plan.step, plan.level, plan.are_local_equal) == (5, RecoveryLevel.REPLACE, False)


def test_a_rank_that_is_lost_while_the_job_changes_its_size_takes_its_state_with_it():
    with pytest.raises(StateLost, match=r"ranks \[1\] had alone after step 5"):
        plan_recovery(dict(enumerate([moved(), NEW, NEW, NEW])), GROWN)
    assert plan_recovery(dict(enumerate([moved(equal_step=5), NEW, NEW, NEW])), GROWN).are_local_equal


@pytest.mark.parametrize(
    ("arrivals", "topology"),
    [
        pytest.param([NEW] * 4, HSDP, id="nobody is left"),
        pytest.param([NEW, arrived(5), NEW, arrived(5)], HSDP, id="all copies of a shard"),
        pytest.param([arrived(5), NEW], Topology(world_size=2, shard_degree=2), id="no replicas"),
        pytest.param([NEW, arrived(6), arrived(5), arrived(6)], HSDP, id="the only copy is behind"),
        pytest.param([ONLY_FORWARD, ONLY_FORWARD, NEW, ONLY_FORWARD], HSDP, id="none can undo, and none knows"),
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
            can_undo = not has_voted or draw(st.booleans())
            arrivals[rank] = arrived(step if can_undo else NO_STATE, step + 1 if has_voted else NO_STATE)
    return topology, arrivals


@given(faults())
def test_all_end_at_one_step_and_nobody_goes_back(case):
    topology, arrivals = case
    step = max(each.committed for each in arrivals.values())
    holders = {rank for rank, each in arrivals.items() if each.has_state or each.voted_step == step != NO_STATE}
    covered = {frozenset(topology.peers(rank, "replicate")) for rank in holders}
    is_lost = any(frozenset(topology.peers(rank, "replicate")) not in covered for rank in arrivals)
    if is_lost:
        with pytest.raises(StateLost):
            plan_recovery(arrivals, topology)
        return
    plan = plan_recovery(arrivals, topology)
    assert plan.step == step
    for rank, each in arrivals.items():
        if rank in plan.senders:
            source = plan.senders[rank]
            assert source in topology.replicas_of(rank)
            assert source not in plan.senders
            assert rank not in holders  # a survivor of a commit never throws its state away
        elif rank in plan.roll_forward:
            assert each.voted_step == plan.step
            assert each.committed in (NO_STATE, plan.step - 1)
        else:
            assert each.committed == plan.step
    for peers in covered:
        able = [rank for rank in peers if rank not in plan.senders]
        have_run_hooks = [rank for rank in able if rank not in plan.roll_forward] or able
        load = [list(plan.senders.values()).count(rank) for rank in have_run_hooks]
        assert max(load) - min(load) <= 1


def test_an_arrival_survives_the_job_store():
    for arrival in (NEW, arrived(3, 4), Arrival(incarnation=2, committed=7, in_step=False)):
        assert Arrival.from_dict(arrival.to_dict()) == arrival
