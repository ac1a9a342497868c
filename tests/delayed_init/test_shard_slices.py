"""The part of a full tensor at each place of a mesh."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hyperpod_plugins.delayed_init.materialize import slice_at
from hyperpod_plugins.errors import InitializationError


def rows(size, mesh, coordinate, placements):
    return slice_at(torch.arange(size), mesh, coordinate, placements).tolist()


@pytest.mark.parametrize(("coordinate", "expected"), [((0,), [0, 1]), ((1,), [2, 3]), ((2,), [4]), ((3,), [])], ids=str)
def test_five_rows_on_four_ranks(coordinate, expected):
    assert rows(5, (4,), coordinate, [Shard(0)]) == expected


def test_tensor_parallel_splits_before_fsdp():
    placements = [Replicate(), _StridedShard(0, split_factor=2), Shard(0)]
    parts = {(s, t): rows(8, (2, 2, 2), (1, s, t), placements) for s in range(2) for t in range(2)}
    assert parts == {(0, 0): [0, 1], (1, 0): [2, 3], (0, 1): [4, 5], (1, 1): [6, 7]}


def test_two_dimensions():
    full = torch.arange(12).view(3, 4)
    assert slice_at(full, (2, 2), (1, 0), [Shard(0), Shard(1)]).tolist() == [[8, 9]]


@given(size=st.integers(0, 13), shard=st.integers(1, 5), tensor=st.integers(1, 4))
def test_parts_tile_the_tensor(size, shard, tensor):
    placements = [_StridedShard(0, split_factor=tensor), Shard(0)]
    parts = [rows(size, (shard, tensor), (s, t), placements) for t in range(tensor) for s in range(shard)]
    assert list(itertools.chain(*parts)) == list(range(size))


def test_the_part_is_a_view():
    full = torch.zeros(4)
    slice_at(full, (2,), (1,), [Shard(0)]).fill_(1)
    assert full.tolist() == [0, 0, 1, 1]


def test_sums_are_refused():
    with pytest.raises(InitializationError, match="cannot be filled"):
        rows(4, (2,), (0,), [Partial()])
