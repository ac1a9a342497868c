"""What counts is what the trainer was given, however far the workers have read ahead."""

import json
import traceback
from itertools import chain, islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from hyperpod_plugins.data import BatchCache, BatchCacheConfig, BatchSplit, ElasticSampler, StatefulLoader


class Squares(Dataset):
    def __init__(self, num_samples, poisoned=None):
        self.num_samples = num_samples
        self.poisoned = poisoned

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        if index == self.poisoned:
            raise ArithmeticError(f"sample {index} cannot be squared")
        return {"id": torch.tensor(index), "square": torch.tensor(index**2)}


class ListLoader(StatefulLoader):
    """The same, with batches that compare with `==`."""

    def __iter__(self):
        return (batch["id"].tolist() for batch in super().__iter__())


def loader(num_samples=40, world=2, rank=0, poisoned=None, kind=ListLoader, seed=0, **options):
    split = BatchSplit(global_batch_size=8, micro_batch_size=2, data_world_size=world)
    sampler = ElasticSampler(num_samples, split, data_rank=rank, seed=seed)
    return kind(Squares(num_samples, poisoned), sampler, **options)


@settings(max_examples=40, deadline=None)
@given(st.sets(st.integers(0, 40), max_size=4))
def test_the_state_law(resuming_equals_never_stopping, cuts):
    resuming_equals_never_stopping(loader, 40, cuts)


@pytest.mark.spawns
@pytest.mark.parametrize(
    "options", [{"num_workers": 2}, {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True}]
)
def test_the_state_law_with_workers_that_read_ahead(resuming_equals_never_stopping, options):
    resuming_equals_never_stopping(lambda: loader(**options), 25, {1, 4, 10, 13})


@pytest.mark.spawns
def test_prefetched_batches_do_not_count():
    source = loader(num_workers=2, prefetch_factor=4)
    iterator = iter(source)
    for num_given in range(1, 8):
        next(iterator)
        assert source.batch_sampler.micro_steps_left == len(source) - num_given
        assert source.state_dict()["position"] == 4 * num_given


@pytest.mark.spawns
def test_a_state_moves_between_worlds_and_numbers_of_workers():
    ids, state = [], None
    for world, num_workers, num_steps in [(2, 2, 2), (4, 0, 1), (1, 1, 2)]:
        loaders = [loader(world=world, rank=rank, num_workers=num_workers) for rank in range(world)]
        for source in loaders:
            if state is not None:
                source.load_state_dict(json.loads(state))
        for _, lists in zip(
            range(num_steps * loaders[0].batch_sampler.split.num_micro_steps), zip(*loaders, strict=True), strict=False
        ):
            ids += [sample for part in lists for sample in part]
        state = json.dumps(loaders[0].state_dict())
    assert sorted(ids) == list(range(40))


def test_set_epoch_after_iter_still_decides_as_lightning_calls_it():
    source = loader()
    iterator = iter(source)
    source.set_epoch(3)
    reference = loader()
    reference.set_epoch(3)
    assert list(iterator) == list(reference)
    assert source.state_dict()["epoch"] == 4


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.spawns)])
def test_errors_of_the_data_reach_the_trainer_and_the_position_stays(num_workers):
    reference = [batch for batch in loader(world=1)]
    poisoned = reference[5][0]
    source = loader(world=1, poisoned=poisoned, num_workers=num_workers)
    with pytest.raises(ArithmeticError, match=f"sample {poisoned} cannot be squared") as caught:
        list(source)
    # Else the workers die in the garbage collector, where torch waits 5 s for each of them.
    traceback.clear_frames(caught.tb)
    assert source.batch_sampler.micro_steps_left == len(source) - 5
    healthy = loader(world=1)
    healthy.load_state_dict(source.state_dict())
    assert list(healthy) == reference[5:]


class Counting(Squares):
    """Counts reads, which a cache should save."""

    num_reads = 0

    def __getitem__(self, index):
        Counting.num_reads += 1
        return super().__getitem__(index)


def test_with_a_cache_a_restart_reads_nothing_again(tmp_path):
    def restart():
        cache = BatchCache(
            "loader",
            fingerprint="squares",
            config=BatchCacheConfig(size_bytes=1 << 20, max_batch_bytes=1 << 14, folder=tmp_path),
        )
        split = BatchSplit(global_batch_size=8, micro_batch_size=2, data_world_size=2)
        return StatefulLoader(Counting(40), ElasticSampler(40, split, data_rank=1), cache=cache)

    reference = list(loader(rank=1))
    Counting.num_reads = 0
    first = restart()
    given_before = [batch["id"].tolist() for batch in islice(iter(first), 7)]
    assert Counting.num_reads == 14
    second = restart()
    again = [batch["id"].tolist() for batch in islice(iter(second), 7)]
    assert Counting.num_reads == 14
    third = restart()
    third.load_state_dict(first.state_dict())
    rest = [batch["id"].tolist() for batch in third]
    assert given_before == again == reference[:7]
    assert rest == reference[7:]
    assert Counting.num_reads == 20
    second_epoch = [batch["id"].tolist() for batch in third]
    assert second_epoch != reference
    assert set(chain.from_iterable(second_epoch)) != set(chain.from_iterable(reference))


@settings(max_examples=20, deadline=None)
@given(st.sets(st.integers(0, 40), max_size=3), st.sampled_from([0, 3]), st.sampled_from([2, 5, 100]))
def test_the_state_law_through_a_cache_of_any_size(
    resuming_equals_never_stopping, tmp_path_factory, cuts, read_ahead, num_slots
):
    config = BatchCacheConfig(
        size_bytes=num_slots << 12, max_batch_bytes=1 << 12, folder=tmp_path_factory.mktemp("cache")
    )

    def make():
        return loader(cache=BatchCache("law", fingerprint="squares", config=config), read_ahead=read_ahead)

    resuming_equals_never_stopping(make, 40, cuts)
