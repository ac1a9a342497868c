"""The arithmetic of steps: every sample once, every rank in every micro-step, shares that differ by at most one."""

from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hyperpod_plugins.data import BatchSplit, Cursor, ElasticSampler, rank_positions, sample_weight
from hyperpod_plugins.elastic.membership.elastic_spec import ElasticPolicy
from hyperpod_plugins.elastic.scaling.batch import StepBatch
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
    assert split.num_micro_steps == len(expected)


@given(sizes, st.integers(1, 6), st.integers(1, 8))
def test_shares_are_even_never_empty_and_never_too_large(global_batch, micro_batch, world):
    split = split_or_skip(global_batch, micro_batch, world)
    totals = [0] * world
    for micro_step in split.walk(Cursor(), global_batch, drop_last=True):
        shares = [rank_positions(micro_step, rank=rank, world_size=world) for rank in range(world)]
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
    assert split_or_raise(global_batch, micro_batch, world).num_micro_steps >= 1


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


@given(st.data(), st.integers(1, 6), st.integers(1, 4))
def test_weighted_means_of_means_are_the_mean_over_all_samples(data, ranks, micro):
    batch = data.draw(st.integers(ranks, 6 * ranks))
    split = split_or_skip(batch, micro, ranks)
    losses = data.draw(st.lists(st.integers(-50, 50), min_size=batch, max_size=batch))
    sizes, used, total, plain = split.micro_step_sizes(batch), 0, 0.0, 0.0
    for size in sizes:
        for rank in range(ranks):
            count = size // ranks + (rank < size % ranks)
            mean = sum(losses[used : used + count]) / count
            weight = sample_weight(count, step_size=batch, data_degree=ranks, num_micro_steps=len(sizes))
            total += weight * mean / ranks / len(sizes)
            plain += mean / ranks / len(sizes)
            used += count
    assert total == pytest.approx(sum(losses) / batch, abs=1e-9)
    if batch % (ranks * len(sizes)) == 0:
        assert (
            sample_weight(batch // ranks // len(sizes), step_size=batch, data_degree=ranks, num_micro_steps=len(sizes))
            == 1.0
        )
        assert plain == pytest.approx(total, abs=1e-9)


def test_a_plain_mean_of_means_is_biased():
    # One rank has a sample with loss 3, the other two with loss 0: the mean over samples is 1, that of means 1.5.
    weights = [sample_weight(count, step_size=3, data_degree=2, num_micro_steps=1) for count in (1, 2)]
    assert (3 * weights[0] + 0 * weights[1]) / 2 == 1.0


@pytest.mark.parametrize(
    ("global_batch", "micro_batch", "world", "num_samples"),
    [
        *[(8, 2, 2, 16), (10, 2, 4, 20), (7, 4, 2, 14), (5, 2, 2, 12), (20, 2, 4, 50)],
        *[(4, 2, 2, 41), (6, 1, 6, 27), (6, 1, 3, 28), (8, 1, 4, 13), (8, 8, 4, 18)],  # a last step for some ranks only
    ],
)
def test_a_sampler_knows_the_weight_of_each_batch(global_batch, micro_batch, world, num_samples):
    split = BatchSplit(
        global_batch_size=global_batch,
        micro_batch_size=micro_batch,
        data_world_size=world,
        allows_idle_ranks=True,
    )
    samplers = [ElasticSampler(num_samples, split, data_rank=rank, drop_last=False) for rank in range(world)]
    losses = {sample: float((7 * sample) % 11) for sample in range(num_samples)}
    steps = {}  # what the optimizer sees of each step: rank means, weighted, averaged over ranks and micro-steps
    for batches in zip(*samplers, strict=True):
        index = steps.setdefault("next", 0)
        steps["next"] += 1
        for sampler, batch in zip(samplers, batches, strict=True):
            weight = sampler.weight(index)
            mean = sum(losses[sample] for sample in batch) / len(batch)
            entry = steps.setdefault(index // split.num_micro_steps, [0.0, []])
            entry[0] += weight * mean / world / split.num_micro_steps
            entry[1] += [losses[sample] for sample in batch if weight]
    del steps["next"]
    assert len(steps) == -(-num_samples // global_batch)
    for found, expected in steps.values():
        assert found == pytest.approx(sum(expected) / len(expected))
    assert sum(len(expected) for _, expected in steps.values()) == num_samples


def test_a_last_step_that_cannot_be_shared_out_is_refused_where_nobody_weights_losses():
    split = BatchSplit(global_batch_size=4, micro_batch_size=2, data_world_size=2)
    with pytest.raises(ConfigError, match="drop_last=True"):
        ElasticSampler(41, split, drop_last=False)


@given(st.integers(1, 24), st.integers(1, 6), st.integers(1, 4), st.integers(1, 100))
def test_every_size_that_a_job_is_told_it_may_have_can_share_out_the_last_step(batch, micro, shards, num_samples):
    step = StepBatch(global_batch_size=batch, micro_batch_size=micro)
    try:
        sizes = step.feasible_sizes(ElasticPolicy(max_replicas=8), shards)
    except ConfigError:
        assume(False)
        raise
    for size in sizes:
        samplers = [
            ElasticSampler(num_samples, step.split(size, shards), data_rank=rank, drop_last=False)
            for rank in range(size * shards)
        ]
        lists = [list(sampler) for sampler in samplers]
        weighted = [
            sample
            for sampler, own in zip(samplers, lists, strict=True)
            for index, ids in enumerate(own)
            for sample in (ids if sampler.weight(index) else ())
        ]
        assert len({len(own) for own in lists}) == 1  # as many micro-steps on each rank
        assert all(1 <= len(ids) <= micro for own in lists for ids in own)
        assert sorted(weighted) == list(range(num_samples))


def test_equal_shares_weigh_exactly_one():
    split = BatchSplit(global_batch_size=24, micro_batch_size=2, data_world_size=3)
    sampler = ElasticSampler(48, split, data_rank=2)
    assert {sampler.weight(index) for index in range(8)} == {1.0}


@pytest.mark.parametrize("data_ranks_per_replica", [1, 2])
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4, 6])
def test_logical_shards_are_the_same_samples_for_every_number_of_replicas(num_replicas, data_ranks_per_replica):
    micro = 24 // 12 // data_ranks_per_replica
    split = BatchSplit(
        global_batch_size=24,
        micro_batch_size=micro,
        data_world_size=num_replicas * data_ranks_per_replica,
        num_logical_shards=12,
    )
    assert (split.num_replicas, split.data_ranks_per_replica, split.num_micro_steps) == (
        num_replicas,
        data_ranks_per_replica,
        12 // num_replicas,
    )
    walk = list(split.walk(Cursor(), 53, drop_last=True))
    assert len(walk) == 2 * split.num_micro_steps
    for step in range(2):
        steps = walk[step * split.num_micro_steps : (step + 1) * split.num_micro_steps]
        computed = [  # by one replica after the other, each in order
            [
                i
                for place in range(data_ranks_per_replica)
                for i in split.share(each, replica * data_ranks_per_replica + place)
            ]
            for replica in range(num_replicas)
            for each in steps
        ]
        assert computed == [list(range(step * 24 + 2 * n, step * 24 + 2 * n + 2)) for n in range(12)]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((24, 2, 5, 12), "cannot be spread over 5 ranks"),
        ((24, 2, 24, 12), "cannot be spread over 24 ranks"),
        ((24, 5, 2, 4), "cannot be spread over 2 ranks"),
    ],
)
def test_logical_shards_that_replicas_cannot_share(sizes, words):
    names = ("global_batch_size", "micro_batch_size", "data_world_size", "num_logical_shards")
    with pytest.raises(ConfigError, match=words):
        BatchSplit(**dict(zip(names, sizes, strict=True)))


def test_logical_shards_need_whole_steps():
    split = BatchSplit(global_batch_size=24, micro_batch_size=2, data_world_size=2, num_logical_shards=12)
    with pytest.raises(ConfigError, match="drop_last=True"):
        split.micro_step_sizes(5)
