"""What a sample draws depends on the sample, whoever reads it; reading leaves the reader's own random numbers alone."""

import random
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, WeightedRandomSampler, get_worker_info

from hyperpod_plugins.data import BatchSplit, ElasticSampler, StatefulLoader
from hyperpod_plugins.data.random_numbers import LoaderKey, SeededIterable, key_random_numbers


def draw():
    return torch.rand(()).item() + random.random() + np.random.rand()


class Noisy(Dataset):
    shift = 0

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return index + self.shift, draw()


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        for index in range(0 if info is None else info.id, 12, 1 if info is None else info.num_workers):
            yield index, draw()


def collate(samples):
    return [tuple(sample) for sample in samples], draw()


def shift(worker_id):
    get_worker_info().dataset.shift = 100


def keyed(dataset, epoch=lambda: 0, seed=3, number=0, **options):
    loader = DataLoader(dataset, collate_fn=collate, **({"batch_size": 2} | options))
    key_random_numbers(loader, LoaderKey(seed=seed, epoch=epoch, data_rank=1, loader_index=number))
    return loader


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"num_workers": 0}, id="in-process"),
        pytest.param({"num_workers": 2}, id="workers"),
        pytest.param({"num_workers": 1, "persistent_workers": True}, id="a-worker-that-stays"),
    ],
)
@pytest.mark.parametrize("kind", [Noisy, Stream])
def test_samples_and_batches_draw_the_same_numbers_in_each_process_and_others_in_each_epoch(kind, options):
    epoch = 0
    loader = keyed(kind(), epoch=lambda: epoch, **options)
    first, before = list(loader), draw()
    epoch = 1
    second = list(loader)
    draw()  # another process has drawn otherwise
    again = keyed(kind(), epoch=lambda: 1, **options)
    assert list(again) == second != first
    if kind is Noisy:  # workers are not seen
        assert second == list(keyed(kind(), epoch=lambda: 1))
    seen = [number for batch, of_batch in first + second for number in (*(drawn for _, drawn in batch), of_batch)]
    assert len(set(seen)) == len(seen) == 36
    assert before not in seen


def test_a_sample_draws_the_same_in_any_batch_order_and_part():
    plain = {index: drawn for batch, _ in keyed(Noisy()) for index, drawn in batch}
    for loader in (keyed(Noisy(), batch_size=5), keyed(Noisy(), shuffle=True), keyed(Subset(Noisy(), range(12)))):
        assert {index: drawn for batch, _ in loader for index, drawn in batch} == plain
    assert {index: drawn for batch, _ in keyed(Noisy(), seed=4) for index, drawn in batch} != plain


def test_order_and_repetitions_come_again():
    sampler = WeightedRandomSampler([1.0] * 11 + [30.0], 24)
    first = list(keyed(Noisy(), sampler=sampler))
    draw()
    assert list(keyed(Noisy(), sampler=sampler)) == first
    drawn = [number for batch, _ in first for index, number in batch if index == 11]
    assert len(set(drawn)) == len(drawn) > 5
    generator = torch.Generator().manual_seed(1)
    loader = keyed(Noisy(), shuffle=True, generator=generator)
    first = list(loader)
    assert list(loader) == first  # the same epoch, whatever the generator has been used for
    assert list(keyed(Noisy(), shuffle=True, generator=generator)) == first  # set up again
    assert (
        list(keyed(Noisy(), shuffle=True, generator=torch.Generator().manual_seed(2))) != first
    )  # its own seed counts
    generator.manual_seed(2)
    assert list(loader) != first


@pytest.mark.parametrize("kind", [Noisy, Stream])
def test_loaders_of_one_trainer_draw_different_numbers_for_the_same_samples(kind):
    first, second = ({index: drawn for batch, _ in keyed(kind(), number=n) for index, drawn in batch} for n in range(2))
    assert not set(first.values()) & set(second.values())
    orders = [
        [index for batch, _ in keyed(Noisy(), number=number, shuffle=True) for index, _ in batch] for number in range(2)
    ]
    assert orders[0] != orders[1]


def test_items_of_two_iterables_of_one_trainer_differ():
    items = [
        list(islice(SeededIterable(iter(draw, None), LoaderKey(seed=1, epoch=lambda: 0, loader_index=n)), 4))
        for n in (0, 1)
    ]
    assert not set(items[0]) & set(items[1])


def test_reading_leaves_the_readers_numbers_alone():
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    undisturbed = [draw() for _ in range(3)]
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    disturbed = [draw()]
    list(keyed(Noisy(), shuffle=True))
    disturbed.append(draw())
    list(keyed(Noisy(), num_workers=1))
    list(islice(SeededIterable([draw, draw], LoaderKey(seed=1, epoch=lambda: 0)), 1))
    disturbed.append(draw())
    assert disturbed == undisturbed


def test_a_workers_program_finds_the_users_dataset():
    batches = list(keyed(Noisy(), num_workers=1, worker_init_fn=shift))
    assert [index for batch, _ in batches for index, _ in batch] == list(range(100, 112))


def test_items_of_any_iterable_are_keyed_by_their_number():
    class Items:
        def __iter__(self):
            return iter(draw, None)

    take = lambda epoch: list(islice(SeededIterable(Items(), LoaderKey(seed=1, epoch=lambda: epoch)), 4))  # noqa: E731
    assert take(0) == take(0) != take(1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_loader_of_another_world_draws_the_same(num_workers):
    def make(world, rank):
        split = BatchSplit(global_batch_size=4, micro_batch_size=4 // world, data_world_size=world)
        sampler = ElasticSampler(12, split, data_rank=rank, seed=9)
        return StatefulLoader(Noisy(), sampler, collate_fn=collate, num_workers=num_workers)

    alone = make(1, 0)
    expected = {index: drawn for batch, _ in alone for index, drawn in batch}
    assert len(expected) == 12
    begun = make(1, 0)
    first = next(iter(begun))[0]
    found = dict(first)
    for rank in range(2):
        loader = make(2, rank)
        loader.load_state_dict(begun.state_dict())
        found |= {index: drawn for batch, _ in loader for index, drawn in batch}
    assert found == expected
