"""The model of what leaves a node, against a ring simulated hop by hop."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.traffic_model import Sharding, egress_ratio, link_seconds, node_egress_bytes

small = st.integers(1, 5)


def ring_egress(members, node_of, tensor_bytes, passes):
    """Bytes that leave node 0 when every member hands (n - 1) of n parts to its neighbour, `passes` times."""
    crossing = 0.0
    for member, neighbour in zip(members, [*members[1:], members[0]], strict=True):
        if node_of(member) == 0 and node_of(neighbour) != 0:
            crossing += passes * (len(members) - 1) / len(members) * tensor_bytes
    return crossing


@given(nodes=small, ranks_per_node=small, micro_steps=small)
def test_full_sharding_is_three_rings_over_all_ranks_a_micro_step(nodes, ranks_per_node, micro_steps):
    simulated = micro_steps * ring_egress(list(range(nodes * ranks_per_node)), lambda r: r // ranks_per_node, 8.0, 3)
    assert node_egress_bytes(
        sharding=Sharding.FULL, model_bytes=8.0, nodes=nodes, ranks_per_node=ranks_per_node, micro_steps=micro_steps
    ) == pytest.approx(simulated)


@given(nodes=small, ranks_per_node=small, micro_steps=small)
def test_hybrid_sharding_is_one_all_reduce_ring_for_each_shard_a_step(nodes, ranks_per_node, micro_steps):
    simulated = sum(
        ring_egress(
            [node * ranks_per_node + shard for node in range(nodes)],
            lambda r: r // ranks_per_node,
            8.0 / ranks_per_node,
            2,
        )
        for shard in range(ranks_per_node)
    )
    assert node_egress_bytes(
        sharding=Sharding.HYBRID, model_bytes=8.0, nodes=nodes, ranks_per_node=ranks_per_node, micro_steps=micro_steps
    ) == pytest.approx(simulated)


@given(nodes=small, ranks_per_node=small, micro_steps=small)
def test_two_stages_send_each_part_to_each_other_node_once(nodes, ranks_per_node, micro_steps):
    part = 8.0 / (nodes * ranks_per_node)
    simulated = micro_steps * 3 * ranks_per_node * (nodes - 1) * part
    found = {
        sharding: node_egress_bytes(
            sharding=sharding, model_bytes=8.0, nodes=nodes, ranks_per_node=ranks_per_node, micro_steps=micro_steps
        )
        for sharding in (Sharding.STAGED, Sharding.FULL)
    }
    assert found[Sharding.STAGED] == pytest.approx(simulated)
    assert found[Sharding.STAGED] <= found[Sharding.FULL] + 1e-9


def test_only_gathers_may_have_two_stages():
    sizes = {"model_bytes": 8.0, "nodes": 2, "ranks_per_node": 2}
    one, two = (node_egress_bytes(sharding=Sharding.AUTO, gathers_are_staged=each, **sizes) for each in (False, True))
    assert one == node_egress_bytes(sharding=Sharding.FULL, **sizes) == 18.0
    assert two == 2 * 4.0 + 6.0


@pytest.mark.parametrize(("sharding", "gigabytes"), [(Sharding.FULL, 42), (Sharding.HYBRID, 28)])
def test_a_7b_model_in_bfloat16_on_many_nodes(sharding, gigabytes):
    egress = node_egress_bytes(sharding=sharding, model_bytes=7e9 * 2, nodes=1000, ranks_per_node=8)
    assert egress == pytest.approx(gigabytes * 1e9, rel=0.002)


@pytest.mark.parametrize("micro_steps", [1, 2, 4])
def test_hybrid_saves_one_and_a_half_times_k_on_many_nodes_and_not_more(micro_steps):
    ratio = egress_ratio(nodes=1000, ranks_per_node=8, micro_steps=micro_steps)
    assert ratio == pytest.approx(1.5 * micro_steps, rel=0.002)


@pytest.mark.parametrize(("on_gloo", "expected"), [(False, 2.25), (True, 3.0)])
def test_two_nodes_of_two_ranks(on_gloo, expected):
    assert egress_ratio(nodes=2, ranks_per_node=2, reduce_scatter_is_all_reduce=on_gloo) == pytest.approx(expected)


@pytest.mark.parametrize("sharding", list(Sharding))
def test_nothing_leaves_a_single_node(sharding):
    assert node_egress_bytes(sharding=sharding, model_bytes=1e9, nodes=1, ranks_per_node=8) == 0


@pytest.mark.parametrize("wrong", [{"nodes": 0}, {"ranks_per_node": 0}, {"micro_steps": 0}])
def test_impossible_counts_are_refused(wrong):
    with pytest.raises(ValueError, match="must be at least 1"):
        node_egress_bytes(**{"sharding": Sharding.FULL, "model_bytes": 1.0, "nodes": 2, "ranks_per_node": 2, **wrong})


def test_a_link_carries_its_bits():
    assert link_seconds(37.5e6, 300e6) == pytest.approx(1.0)
