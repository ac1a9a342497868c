"""Names of groups, and the arithmetic of bytes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_plugins.comm import WORLD, GroupKey, reset_traffic, traffic, wire_bytes
from hyperpod_plugins.comm.options import key_of_unnamed_group
from hyperpod_plugins.comm.process_group import num_bytes
from hyperpod_plugins.comm.runtime import runtime


def test_roles_have_readable_names():
    assert WORLD.name == "world"
    assert GroupKey("shard", (("replicate", 1), ("tensor", 0))).name == "shard[replicate=1,tensor=0]"
    assert key_of_unnamed_group("3").name == "other#3"


AXES = st.sampled_from(["replicate", "shard", "tensor", "expert"])
ROLES = st.builds(GroupKey, AXES, st.lists(st.tuples(AXES, st.integers(0, 20)), max_size=3).map(tuple))


@given(ROLES, ROLES, st.integers(0, 30), st.integers(0, 30))
def test_store_prefixes_are_equal_only_for_equal_role_and_generation(a, b, generation, other):
    is_same = (a, generation) == (b, other)
    assert (a.store_prefix(generation) == b.store_prefix(other)) == is_same


def test_num_bytes_sums_nested_lists():
    half, whole = torch.zeros(3, dtype=torch.bfloat16), torch.zeros(2, 2)
    assert num_bytes(whole) == 16
    assert num_bytes([whole]) == 16
    assert num_bytes([[half, half], [whole, half]]) == 34
    assert num_bytes([]) == 0


def test_counters_are_shared_by_axis_and_snapshots_stay():
    reset_traffic()
    runtime.traffic.of_axis("a").add("all_reduce", 10)
    runtime.traffic.of_axis("a").add("all_reduce", 5)
    runtime.traffic.of_axis("a").add("barrier", 0)
    runtime.traffic.of_axis("b")
    before = traffic()
    runtime.traffic.of_axis("a").add("all_reduce", 1)
    assert before["a"].calls == {"all_reduce": 2, "barrier": 1}
    assert (before["a"].num_calls, before["a"].num_bytes) == (3, 15)
    assert set(before) == {"a"}
    reset_traffic()
    assert traffic() == {}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all_reduce", 1200),
        ("all_gather", 600),
        ("reduce_scatter", 600),
        ("all_to_all", 600),
        ("broadcast", 600),
        ("gather", 150),
        ("send", 800),
        ("recv", 0),
        ("barrier", 0),
    ],
)
def test_wire_bytes_of_800_bytes_among_four(kind, expected):
    assert wire_bytes(kind, 800, 4) == expected


@given(st.integers(0, 10**12), st.integers(1, 4096))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(payload, size):
    parts = wire_bytes("reduce_scatter", payload, size) + wire_bytes("all_gather", payload, size)
    assert wire_bytes("all_reduce", payload, size) == pytest.approx(parts)
    assert wire_bytes("all_reduce", payload, 1) == 0


@pytest.mark.parametrize("generation", [0, 7, 99, 9999])
def test_short_names_stay_short_and_tell_roles_apart(generation):
    """Longer ones cost a step 15 % on gloo: see [Note: short names]."""
    keys = [WORLD, key_of_unnamed_group("3"), key_of_unnamed_group("a" * 40)]
    keys += [GroupKey(a, (("replicate", r), ("of_shards", 2))) for a in ("shard", "tensor") for r in range(64)]
    names = {key.short_name(generation) for key in keys}
    assert len(names) == len(keys)
    assert all(len(name) <= 15 for name in names)
