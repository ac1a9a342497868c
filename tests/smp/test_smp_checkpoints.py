"""Checkpoints of SMP's scripts: nothing of them is executed, by whatever reader and planner they are read."""

import os
import pickle

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader

from hyperpod_plugins.errors import CheckpointDamaged
from hyperpod_plugins.smp.checkpoint import load, save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Evil:
    def __reduce__(self):
        return (os.mkdir, ("evil-was-here",))


def state(value=None):
    return {"model": {"weight": torch.arange(4.0)}, "value": value, "rate": 0.5, "seen": {"steps": [1, (2,)]}}


def empty():
    return {"model": {"weight": torch.zeros(4)}, "value": None, "rate": 0.0, "seen": {"steps": []}}


def options(folder, are_given):
    return {"storage_reader": FileSystemReader(folder), "planner": DefaultLoadPlanner()} if are_given else {}


@pytest.mark.parametrize("are_given", [False, True])
def test_there_and_back(tmp_path, are_given):
    save(state("a text"), checkpoint_id=tmp_path)
    read = empty()
    load(read, checkpoint_id=tmp_path, **options(tmp_path, are_given))
    assert torch.equal(read["model"].pop("weight"), torch.arange(4.0))
    assert read == state("a text") | {"model": {}}


@pytest.mark.parametrize("are_given", [False, True])
@pytest.mark.parametrize("place", ["value", "metadata"])
def test_nothing_is_executed(tmp_path, monkeypatch, place, are_given):
    monkeypatch.chdir(tmp_path)
    save(state(Evil() if place == "value" else None), checkpoint_id=tmp_path / "c")
    if place == "metadata":
        (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(Evil()))
        (tmp_path / "c" / "checksums.json").unlink()
    with pytest.raises(CheckpointDamaged, match=r"'value'.*add_safe_globals|which no checkpoint needs"):
        load(empty(), checkpoint_id=tmp_path / "c", **options(tmp_path / "c", are_given))
    assert not (tmp_path / "evil-was-here").exists()


def test_a_flipped_bit_is_found(tmp_path):
    save(state(), checkpoint_id=tmp_path)
    with pytest.warns(UserWarning, match="existing checkpoint"):
        save(state(), checkpoint_id=tmp_path)
    content = bytearray((tmp_path / "__0_0.distcp").read_bytes())
    content[content.index(torch.arange(4.0).numpy().tobytes())] ^= 1
    (tmp_path / "__0_0.distcp").write_bytes(content)
    with pytest.raises(CheckpointDamaged, match=r"model\.weight is not what was written"):
        load(empty(), checkpoint_id=tmp_path)
