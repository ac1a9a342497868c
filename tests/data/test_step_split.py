"""The arithmetic of steps: every sample once, every rank in every micro-step, shares that differ by at most one."""

from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hyperpod_plugins.data import BatchSplit, Cursor, share
from hyperpod_plugins.errors import ConfigError

sizes = st.integers(1, 24)


def split_or_skip(global_batch_size, micro_batch_size, data_world_size):
    try:
        return BatchSplit(
            global_batch_size=global_batch_size, micro_batch_size=micro_batch_size, data_world_size=data_world_size
        )
    except ConfigError:
        assume(False)
        raise


@pytest.mark.parametrize(
    ("global_batch", "micro_batch", "world", "expected"),
    [
        (8, 2, 2, [4, 4]),
        (8, 8, 1, [8]),
        (8, 3, 2, [4, 4]),
        (20, 2, 4, [8, 8, 4]),
        (10, 2, 4, [4, 6]),
        (7, 4, 2, [7]),
        (5, 2, 4, [5]),
    ],
)
def test_sizes_of_micro_steps(global_batch, micro_batch, world, expected):
    split = BatchSplit(global_batch_size=global_batch, micro_batch_size=micro_batch, data_world_size=world)
    assert split.micro_step_sizes(global_batch) == expected
    assert split.micro_steps == len(expected)


@given(sizes, st.integers(1, 6), st.integers(1, 8))
def test_shares_are_even_never_empty_and_never_too_large(global_batch, micro_batch, world):
    split = split_or_skip(global_batch, micro_batch, world)
    totals = [0] * world
    for micro_step in split.walk(Cursor(), global_batch, drop_last=True):
        shares = [share(micro_step, rank=rank, world_size=world) for rank in range(world)]
        positions = [position for part in shares for position in part]
        first = micro_step.before.position
        assert positions == list(range(first, first + micro_step.size))
        assert all(1 <= len(part) <= micro_batch for part in shares)
        totals = [total + len(part) for total, part in zip(totals, shares, strict=True)]
    assert sum(totals) == global_batch
    assert totals == sorted(totals, reverse=True)
    assert totals[0] - totals[-1] <= 1


@given(sizes, st.integers(2, 6), st.integers(1, 8))
def test_only_too_small_steps_are_refused_when_a_micro_batch_holds_two(global_batch, micro_batch, world):
    assume(global_batch >= world)
    assert split_or_raise(global_batch, micro_batch, world).micro_steps >= 1


def split_or_raise(global_batch, micro_batch, world):
    return BatchSplit(global_batch_size=global_batch, micro_batch_size=micro_batch, data_world_size=world)


@settings(max_examples=200)
@given(sizes, st.integers(1, 6), st.integers(1, 6), st.integers(0, 80), st.booleans(), st.data())
def test_a_walk_covers_the_epoch_without_gap_from_anywhere(global_batch, micro_batch, world, samples, drop_last, data):
    split = split_or_skip(global_batch, micro_batch, world)
    try:
        walked = list(split.walk(Cursor(epoch=4), samples, drop_last=drop_last))
    except ConfigError:
        assume(False)
    usable = samples - samples % global_batch if drop_last else samples
    assert sum(micro_step.size for micro_step in walked) == usable
    for previous, following in pairwise(walked):
        assert previous.after == following.before
    if walked:
        assert walked[-1].after == Cursor(epoch=5)
    cut = data.draw(st.integers(0, len(walked)))
    if cut < len(walked):
        rest = list(split.walk(walked[cut].before, samples, drop_last=drop_last))
        assert rest == walked[cut:]
        assert split.count(walked[cut].before, samples, drop_last=drop_last) == len(rest)
        assert split.cursor_at(walked[cut].before.position, Cursor(epoch=4)) == walked[cut].before


def test_steps_consume_the_same_positions_in_every_world():
    for world in (1, 2, 3, 4, 6):
        split = BatchSplit(global_batch_size=12, micro_batch_size=2, data_world_size=world)
        starts = {m.before.position for m in split.walk(Cursor(), 60, drop_last=True) if m.before.position % 12 == 0}
        assert starts == {0, 12, 24, 36, 48}


@pytest.mark.parametrize(("global_batch", "micro_batch", "world"), [(3, 4, 4), (10, 1, 4), (0, 1, 1), (4, 0, 1)])
def test_impossible_splits_are_refused(global_batch, micro_batch, world):
    with pytest.raises(ConfigError):
        split_or_raise(global_batch, micro_batch, world)


def test_the_error_names_sizes_that_work():
    with pytest.raises(ConfigError, match="8 or 12"):
        split_or_raise(10, 1, 4)
