"""Rank arithmetic: who is where, who are whose peers, and what an impossible layout is told."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_plugins.errors import DegreeError
from hyperpod_plugins.parallel import Coordinates, Topology
from hyperpod_plugins.parallel.topology import AXES, nearest_degrees


@st.composite
def topologies(draw):
    replicate, shard, tensor = (draw(st.integers(1, 6)) for _ in AXES)
    context, experts = (draw(st.sampled_from([d for d in range(1, shard + 1) if shard % d == 0])) for _ in range(2))
    return Topology(
        world_size=replicate * shard * tensor,
        shard_degree=shard,
        tensor_degree=tensor,
        context_degree=context,
        expert_degree=experts,
    )


@st.composite
def topologies_on_nodes(draw):
    """Several nodes, each a whole number of replicas: the placement the layout is made for."""
    shard, tensor, replicas_on_node, nodes = (draw(st.integers(1, 4)) for _ in range(4))
    per_node = shard * tensor * replicas_on_node
    return Topology(world_size=nodes * per_node, shard_degree=shard, tensor_degree=tensor, ranks_per_node=per_node)


@given(topologies())
def test_ranks_lie_in_row_major_order(topology):
    places = [topology.coordinates(rank) for rank in range(topology.world_size)]
    assert places == sorted(places, key=lambda place: (place.replicate, place.shard, place.tensor))
    assert len(set(places)) == topology.world_size
    for place in places:
        assert 0 <= place.replicate < topology.replicate_degree
        assert 0 <= place.shard < topology.shard_degree
        assert 0 <= place.tensor < topology.tensor_degree


@given(topologies())
def test_peers_partition_the_world(topology):
    for axis, size in zip(AXES, topology.shape, strict=True):
        groups = {topology.peers(rank, axis) for rank in range(topology.world_size)}
        assert sorted(rank for group in groups for rank in group) == list(range(topology.world_size))
        assert {len(group) for group in groups} == {size}


@given(topologies())
def test_peers_differ_in_one_axis_alone_and_come_in_its_order(topology):
    for rank in range(topology.world_size):
        here = topology.coordinates(rank)
        for axis in AXES:
            peers = [topology.coordinates(peer) for peer in topology.peers(rank, axis)]
            assert [getattr(peer, axis) for peer in peers] == list(range(len(peers)))
            for other in AXES:
                assert other == axis or {getattr(peer, other) for peer in peers} == {getattr(here, other)}


@given(topologies())
def test_tensor_is_innermost_and_replicate_outermost(topology):
    shard, tensor = topology.shard_degree, topology.tensor_degree
    assert topology.peers(0, "tensor") == tuple(range(tensor))
    assert topology.peers(0, "shard") == tuple(range(0, shard * tensor, tensor))
    assert topology.peers(0, "replicate") == tuple(range(0, topology.world_size, shard * tensor))


@given(topologies())
def test_data_rank_is_shared_by_tensor_and_context_peers_alone(topology):
    members = {}
    for rank in range(topology.world_size):
        members.setdefault(topology.data_rank(rank), []).append(rank)
    assert sorted(members) == list(range(topology.data_degree))
    for ranks in members.values():
        parts = topology.context_peers(ranks[0])
        assert ranks == sorted(peer for part in parts for peer in topology.peers(part, "tensor"))


@given(topologies())
def test_compute_rank_is_shared_by_tensor_peers_alone(topology):
    members = {}
    for rank in range(topology.world_size):
        members.setdefault(topology.compute_rank(rank), []).append(rank)
    assert all(tuple(ranks) == topology.peers(ranks[0], "tensor") for ranks in members.values())


@given(topologies())
def test_context_peers_are_neighbours_that_divide_the_shard_axis(topology):
    for rank in range(topology.world_size):
        peers = topology.context_peers(rank)
        assert rank in peers
        assert len(peers) == topology.context_degree
        assert all(topology.context_peers(peer) == peers for peer in peers)
        shards = [topology.coordinates(peer).shard for peer in peers]
        assert shards == list(range(shards[0], shards[0] + len(peers)))
        assert set(peers) <= set(topology.peers(rank, "shard"))


@given(topologies())
def test_experts_are_divided_among_neighbours_and_sharded_over_the_rest(topology):
    for rank in range(topology.world_size):
        peers, sharing = topology.expert_peers(rank), topology.expert_shard_peers(rank)
        shards = topology.peers(rank, "shard")
        assert len(peers) == topology.expert_degree
        assert len(peers) * len(sharing) == topology.replica_size
        assert set(peers) & set(sharing) == {rank}
        first = shards.index(peers[0])
        assert peers == shards[first : first + len(peers)]
        replica = sorted(each for shard in shards for each in topology.peers(shard, "tensor"))
        assert sorted(other for peer in sharing for other in topology.expert_peers(peer)) == replica
        assert all(topology.expert_shard_peers(peer) == sharing for peer in sharing)


@given(topologies())
def test_data_peers_are_one_of_each_data_rank(topology):
    for rank in range(topology.world_size):
        peers = topology.data_peers(rank)
        assert rank in peers
        assert [topology.data_rank(peer) for peer in peers] == list(range(topology.data_degree))
        assert all(topology.data_peers(peer) == peers for peer in peers)


@given(topologies())
def test_replicas_hold_the_same_shard_and_exclude_oneself(topology):
    for rank in range(topology.world_size):
        here, replicas = topology.coordinates(rank), topology.replicas_of(rank)
        assert rank not in replicas
        assert len(replicas) == topology.replicate_degree - 1
        for replica in replicas:
            there = topology.coordinates(replica)
            assert (there.shard, there.tensor) == (here.shard, here.tensor)


@given(topologies_on_nodes())
def test_replicas_lie_on_different_nodes_where_a_node_holds_one(topology):
    per_replica = topology.replica_size
    for rank in range(topology.world_size):
        assert {topology.node_of(peer) for peer in topology.peers(rank, "tensor")} == {topology.node_of(rank)}
        assert {topology.node_of(peer) for peer in topology.peers(rank, "shard")} == {topology.node_of(rank)}
        if topology.ranks_per_node == per_replica:
            nodes = [topology.node_of(peer) for peer in topology.peers(rank, "replicate")]
            assert len(set(nodes)) == len(nodes)


@given(topologies())
def test_growing_by_replicas_moves_nobody_inside_a_replica(topology):
    """Only the replicate axis changes its size in a running job: every old rank keeps its coordinates."""
    grown = Topology(
        world_size=topology.world_size + topology.replica_size,
        shard_degree=topology.shard_degree,
        tensor_degree=topology.tensor_degree,
        context_degree=topology.context_degree,
        expert_degree=topology.expert_degree,
    )
    for rank in range(topology.world_size):
        assert grown.coordinates(rank) == topology.coordinates(rank)
        assert grown.peers(rank, "shard") == topology.peers(rank, "shard")
        assert grown.context_peers(rank) == topology.context_peers(rank)
        assert grown.expert_peers(rank) == topology.expert_peers(rank)
        assert grown.expert_shard_peers(rank) == topology.expert_shard_peers(rank)


def test_one_table_by_hand():
    topology = Topology(world_size=8, shard_degree=2, tensor_degree=2)
    assert topology.shape == (2, 2, 2)
    assert topology.data_degree == 4
    assert topology.coordinates(5) == Coordinates(replicate=1, shard=0, tensor=1)
    assert [topology.peers(5, axis) for axis in AXES] == [(1, 5), (5, 7), (4, 5)]
    assert topology.replicas_of(5) == (1,)
    assert [topology.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert str(topology) == "replicate 2 x shard 2 x tensor 2"


def test_one_table_with_contexts_by_hand():
    topology = Topology(world_size=8, shard_degree=4, context_degree=2)
    assert (topology.data_degree, topology.data_ranks_per_replica, topology.shares_samples) == (4, 2, True)
    assert [topology.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [topology.compute_rank(rank) for rank in range(8)] == list(range(8))
    assert [topology.context_peers(rank) for rank in (1, 6)] == [(0, 1), (6, 7)]
    assert topology.data_peers(3) == (1, 3, 5, 7)
    assert str(topology) == "replicate 2 x shard 4 x tensor 1 (context 2)"


def test_a_world_of_one_has_every_axis():
    topology = Topology(world_size=1)
    assert topology.shape == (1, 1, 1)
    assert all(topology.peers(0, axis) == (0,) for axis in AXES)
    assert topology.replicas_of(0) == ()
    assert topology.placement_notes() == ()


@pytest.mark.parametrize(
    ("degrees", "wanted"),
    [
        ({"world_size": 8, "shard_degree": 3}, r"shard_degree can be 1, 2, 4 or 8; the nearest is 2\."),
        ({"world_size": 12, "shard_degree": 5}, r"1, 2, 3, 4, 6 or 12; the nearest is 4\."),
        ({"world_size": 8, "shard_degree": 8, "tensor_degree": 2}, r"With tensor_degree 2, .*1, 2 or 4; .* is 4\."),
        ({"world_size": 8, "tensor_degree": 3}, r"tensor_degree must divide the world: 1, 2, 4 or 8 would\."),
        ({"world_size": 7, "shard_degree": 2, "tensor_degree": 7}, r"shard_degree can be 1; the nearest is 1\."),
        ({"world_size": 4, "shard_degree": 5}, r"shard_degree must lie in 1 \.\. 4 .* but is 5"),
        ({"world_size": 4, "shard_degree": 0}, r"shard_degree must lie in 1 \.\. 4 .* but is 0"),
        (
            {"world_size": 4, "shard_degree": 4, "context_degree": 3},
            r"context_degree must divide shard_degree 4, but is 3",
        ),
        ({"world_size": 4, "context_degree": 2}, r"context_degree must divide shard_degree 1, but is 2"),
        ({"world_size": 4, "expert_degree": 2}, r"expert_degree must divide shard_degree 1, but is 2"),
        ({"world_size": 4, "tensor_degree": -1}, r"tensor_degree must lie in 1 \.\. 4 .* but is -1"),
    ],
)
def test_impossible_degrees_name_the_nearest_that_fit(degrees, wanted):
    with pytest.raises(DegreeError, match=wanted):
        Topology(**degrees)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))
def test_every_degree_named_in_the_message_fits(world, shard, tensor):
    text = nearest_degrees(world, shard, tensor)
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    if world % tensor:
        for degree in numbers:
            Topology(world_size=world, tensor_degree=degree)
        return
    for degree in numbers[1:]:  # the first is the tensor degree itself
        Topology(world_size=world, shard_degree=degree, tensor_degree=tensor)
    nearest, possible = numbers[-1], numbers[1:-1]
    assert all(abs(nearest - shard) <= abs(other - shard) for other in possible)


@pytest.mark.parametrize("rank", [-1, 4])
@pytest.mark.parametrize("ask", ["coordinates", "data_rank", "peers", "replicas_of"])
def test_a_rank_outside_the_world_is_refused(rank, ask):
    topology = Topology(world_size=4, shard_degree=2)
    arguments = (rank, "shard") if ask == "peers" else (rank,)
    with pytest.raises(DegreeError, match=f"rank {rank} does not exist in a world of 4"):
        getattr(topology, ask)(*arguments)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"world_size": 16, "shard_degree": 8, "ranks_per_node": 8}, []),
        ({"world_size": 16, "shard_degree": 16, "ranks_per_node": 8}, ["the shard axis (16) crosses nodes"]),
        ({"world_size": 16, "tensor_degree": 16, "ranks_per_node": 8}, ["the tensor axis (16) crosses nodes"]),
        ({"world_size": 16, "shard_degree": 4, "ranks_per_node": 16}, []),  # one node: nothing to be placed better
        ({"world_size": 16, "shard_degree": 4, "ranks_per_node": 0}, []),
        ({"world_size": 12, "tensor_degree": 4, "ranks_per_node": 6}, ["the tensor axis (4)"]),  # of ranks 4 to 7
        (
            {"world_size": 16, "shard_degree": 4, "tensor_degree": 4, "ranks_per_node": 2},
            ["the tensor axis", "the shard axis"],
        ),
    ],
)
def test_unfortunate_placements_are_noted(layout, words):
    notes = Topology(**layout).placement_notes()
    assert len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes, strict=True))
