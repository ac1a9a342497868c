"""Attributes of datasets that a program changes between epochs, and within one."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset
from typing_extensions import override

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.recovery.data_attributes import DataAttributes, objects_of_loader, watch_reads


class Crop:
    """A transform of the program."""

    size = 4


class Curriculum(Dataset[torch.Tensor]):
    """A dataset whose samples depend on its level, with a transform and a cache."""

    level = 0

    def __init__(self) -> None:
        self.crop, self.cache, self.file = Crop(), dict[int, int](), None

    def __len__(self) -> int:
        return 8

    @override
    def __getitem__(self, index: int) -> torch.Tensor:
        self.cache[index] = index
        self.file = self.file or open  # cannot be sent
        return torch.tensor(float(self.level * index))


def followed(dataset: Any) -> DataAttributes:
    """The attributes of a process that has just made its loader."""
    attributes = DataAttributes()
    attributes.follow("training 0", DataLoader(dataset), model=nn.Module(), left_out=[])
    return attributes


def test_replacement_begins_with_the_attributes_of_its_place() -> None:
    """Whatever the place, also one before the last change, and also where the dataset is within another one."""
    dataset = Curriculum()
    attributes = followed(ConcatDataset([Subset(dataset, [0, 1])]))
    for epoch in range(3):
        attributes.note((epoch, 1, 0))
        dataset.level += 1
        dataset.crop.size = 10 + epoch
        attributes.note((epoch, 2, 0))
    for place, level, size in (((2, 1, 0), 2, 11), ((1, 2, 0), 2, 11), ((0, 2, 0), 1, 10), ((0, 1, 0), 0, 4)):
        replacement, other = DataAttributes(), Curriculum()
        replacement.load_noted(attributes.noted)
        replacement.enter(place)
        replacement.follow(
            "training 0", DataLoader(ConcatDataset([Subset(other, [0, 1])])), model=nn.Module(), left_out=[]
        )
        replacement.begin()
        assert (other.level, other.crop.size) == (level, size)
    attributes.enter((0, 2, 0))
    assert (dataset.level, dataset.crop.size) == (1, 10), "a process that was not lost returns to the same place"


def test_workers_of_a_replacement_copy_what_its_predecessors_workers_did() -> None:
    """A change after they were started is not seen by them, but by the program."""
    dataset, other = Curriculum(), Curriculum()
    attributes = followed(dataset)
    attributes.note((0, 0, 1), for_workers=True)
    dataset.level = 5
    attributes.note((0, 1, 0))
    replacement = DataAttributes()
    replacement.load_noted(attributes.noted)
    replacement.enter((0, 1, 0))
    replacement.follow("training 0", DataLoader(other), model=nn.Module(), left_out=[])
    assert other.level == 0
    replacement.begin()
    assert other.level == 5


def test_what_reading_changes_is_not_refused_but_what_the_program_changes_is() -> None:
    """A cache fills, and a file is opened; a level that changes between two batches is named."""
    dataset = Curriculum()
    attributes = followed(dataset)
    attributes.note((0, 1, 0))
    for index in range(4):
        attributes.fetched(lambda index=index: dataset[index], trains=True)
    attributes.check_unchanged("while an epoch was being read")
    dataset.level = 1
    with pytest.raises(ConfigError, match="level"):
        attributes.fetched(lambda: dataset[4], trains=True)
    with pytest.raises(ConfigError, match="level"):
        attributes.check_unchanged("while an epoch was being read")


@pytest.mark.parametrize("value", [open, torch.ones(2**19)])
def test_what_cannot_be_sent_is_refused(value: Any) -> None:
    """By name, where the training gets to."""
    dataset = Curriculum()
    attributes = followed(dataset)
    vars(dataset)["labels"] = value
    with pytest.raises(ConfigError, match="dataset"):
        attributes.note((0, 2, 0))


@pytest.mark.parametrize("value", [0, torch.zeros(2**11)])
def test_cache_that_grows_between_two_looks_is_not_refused(value: Any) -> None:
    """It has more entries, or bytes, than are sent by the next look; the level is sent all the same."""
    dataset = Curriculum()
    attributes = followed(dataset)
    for index in range(40):
        attributes.fetched(lambda index=index: dataset[index], trains=True)
    dataset.cache.update({index: value for index in range(2000 if isinstance(value, int) else 300)})
    attributes.check_unchanged("while an epoch was being read")
    dataset.level = 2
    attributes.note((0, 2, 0))
    replacement, other = DataAttributes(), Curriculum()
    replacement.load_noted(attributes.noted)
    replacement.enter((0, 2, 0))
    replacement.follow("training 0", DataLoader(other), model=nn.Module(), left_out=[])
    assert other.level == 2


def test_long_lists_are_refused_once_another_one_takes_their_place() -> None:
    """They are not copied, and so not given to a replacement."""
    dataset = Curriculum()
    vars(dataset)["paths"] = [f"{number}" for number in range(2**15)]
    attributes = followed(dataset)
    dataset.level = 1
    attributes.note((0, 2, 0))
    vars(dataset)["paths"] = [f"{number}" for number in range(2**15)]
    with pytest.raises(ConfigError, match="paths"):
        attributes.note((1, 2, 0))


def test_job_that_changes_its_size_refuses_a_change() -> None:
    """A replacement there may have no predecessor."""
    dataset = Curriculum()
    attributes = DataAttributes(is_elastic=True)
    attributes.follow("training 0", DataLoader(dataset), model=nn.Module(), left_out=[])
    attributes.fetched(lambda: vars(dataset).update(last=3), trains=True)
    assert not attributes.note((0, 2, 0))  # each process reads for itself
    dataset.level = 1
    with pytest.raises(ConfigError, match=r"dataset\.level.*changes its size|changes its size.*dataset\.level"):
        attributes.note((0, 2, 0))


def test_torch_datasets_and_samplers_are_not_followed() -> None:
    """A plain loader has nothing to look at."""
    assert not [
        *objects_of_loader(DataLoader(Subset(torch.utils.data.TensorDataset(torch.ones(4)), [0, 1]), shuffle=True))
    ]


def test_reads_of_a_loader_are_watched_once_each_time_it_is_used() -> None:
    """Also if it is watched again, as where a fit is entered again."""
    loader, numbers = DataLoader(Curriculum(), batch_size=4), list[int]()

    def fetch(read: Any) -> Any:
        numbers.append(1)
        return read()

    for _ in range(2):
        watch_reads(loader, list[Any], fetch)
        assert len([*loader]) == 2
    assert len(numbers) == 6, "two batches and the end, twice"
