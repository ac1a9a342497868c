"""Set-ups that load or share objects collectively, as libraries do: ranks are killed later, the bits are the same."""

import collections
import dataclasses
import datetime
import enum
import functools
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from recovery.faults import PRELOAD, run_job
from torch.distributed import distributed_c10d

from hyperpod_plugins.comm import group_health
from hyperpod_plugins.recovery.packing import are_same
from hyperpod_plugins.recovery.program_collectives import are_same_objects, is_alone, replace_in_torch

PROGRAM = "program_library_collectives.py"
Pair = collections.namedtuple("Pair", "first second")


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Plain:
    values: list


@dataclasses.dataclass
class Active:
    value: int

    def __post_init__(self):
        self.value += 1


class Custom:
    pass


def refuse(name):
    raise PermissionError(name)


def pickled(*objects):
    return torch.frombuffer(bytearray(b"".join(map(pickle.dumps, objects))), dtype=torch.uint8)


def received(value):
    """What torch makes of an object that another rank has sent."""
    data = pickled(value)
    return distributed_c10d._tensor_to_object(data, data.numel(), None)


@pytest.fixture
def alone():
    restore = replace_in_torch(refuse)
    group_health.detach()
    assert is_alone()
    yield
    group_health.reset()
    restore()


DATA = [
    {"a": [1, 2.5, None, True, b"x", "y"], "b": {3}, "c": (frozenset({4}), range(3), 1 + 2j)},
    [torch.Size([2, 3]), torch.float32, torch.device("cpu"), Path("here"), datetime.timedelta(seconds=1)],
    [Color.RED, Pair(1, 2), Plain([1]), collections.OrderedDict(a=1), np.float64(1.5)],
]


@pytest.mark.parametrize("value", DATA)
def test_data_is_read_without_connections(value, alone):
    assert received(value) == value


def test_tensors_and_arrays_are_read_without_connections(alone):
    tensor = torch.arange(6.0).view(2, 3)
    assert torch.equal(received({"t": tensor.t()})["t"], tensor.t())
    assert np.array_equal(received([tensor.numpy()])[0], tensor.numpy())


@pytest.mark.parametrize("value", [Custom(), Active(1), print, functools.partial(print)])
def test_what_could_run_code_is_refused_without_connections(value, alone):
    with pytest.raises(PermissionError):
        received(value)


def test_a_class_can_be_allowed(alone):
    with torch.serialization.safe_globals([Custom]):
        assert type(received(Custom())) is Custom


def test_connected_processes_read_what_torch_reads():
    restore = replace_in_torch(refuse)
    try:
        assert received(Active(1)) == Active(1)
    finally:
        restore()
    assert distributed_c10d._unpickler is pickle.Unpickler


def test_pickles_of_equal_objects_are_the_same():
    """Two pickles of equal tensors differ: each contains an address."""
    one, other = torch.ones(2), torch.ones(2)
    assert not torch.equal(pickled(one), pickled(other))
    assert are_same_objects(pickled(1, one), pickled(1, other), refuse)
    assert not are_same_objects(pickled(1, one), pickled(1, 2 * other), refuse)
    assert not are_same_objects(torch.tensor([3]), torch.tensor([4]), refuse)


def run(folder, kind, saved, faults=()):
    return run_job(
        PROGRAM, folder, faults=faults, num_ranks=2, environ={"KIND": kind, "SAVED": str(saved)}, args=PRELOAD
    )


def assert_equal(wanted, found):
    assert found.code == 0, found.output[-8000:]
    for one, other in zip(wanted.results(2), found.results(2), strict=True):
        assert one["factor"] == other["factor"]
        assert are_same(one["state"], other["state"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A job that has saved a checkpoint; its set-up shares nothing."""
    folder = tmp_path_factory.mktemp("saved")
    job = run(folder, "saves", folder)
    assert job.code == 0, job.output[-8000:]
    return job


@pytest.mark.spawns
def test_a_set_up_that_loads_is_repaired_in_place(saved, tmp_path):
    wanted = run(tmp_path / "wanted", "loads", saved.folder)
    assert wanted.code == 0, wanted.output[-8000:]
    found = run(tmp_path / "found", "loads", saved.folder, [["forward", 2, 0, "kill"], ["forward", 5, 1, "kill"]])
    assert found.num_faults == found.output.count("; repaired in") == 2, found.output[-8000:]
    assert "start again" not in found.output
    assert_equal(wanted, found)


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("differs", "sends another object than its predecessor"),
        ("code", "cannot be read from its record without running builtins.eval"),
        ("writes", "was called before this process had joined the others"),
    ],
)
def test_a_set_up_that_cannot_be_repeated_makes_all_start_again(kind, why, saved, tmp_path):
    found = run(tmp_path, kind, saved.folder, [["forward", 3, 0, "kill"]])
    assert found.num_faults == 1
    assert why in found.output
    assert_equal(saved, found)
