"""A job that goes on from a checkpoint of another one, and a loader of unknown length."""

import pytest
import torch
from recovery.faults import PRELOAD, run_job

LIGHTNING = ("--preload", f"{PRELOAD[1]},lightning.pytorch,torchmetrics")
pytestmark = pytest.mark.spawns


def run(folder, *, faults=(), **environ):
    return run_job("program_resumed.py", folder, faults=faults, num_ranks=2, environ=environ, args=LIGHTNING)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    """Two fits, to which nothing happens."""
    job = run(tmp_path_factory.mktemp("wanted"), TWICE="1")
    assert job.code == 0, job.output[-8000:]
    return job


def test_another_program_takes_what_a_checkpoint_of_its_model_has(tmp_path):
    """Each rank its own running statistics; not buffers that are not persistent, nor metrics that are gone."""
    first = run(tmp_path)
    assert first.code == 0, first.output[-8000:]
    saved = first.results(2)
    assert not torch.equal(saved[0]["ends_with"], saved[1]["ends_with"])
    changed = run(tmp_path, CHANGED="1")
    assert changed.code == 0, changed.output[-8000:]
    for before, after in zip(saved, changed.results(2), strict=True):
        assert torch.equal(after["begins_with"], before["ends_with"])
        assert (before["factor"], after["factor"], after["step"]) == (1.0, 2.0, 8)


def test_a_validation_within_a_step_after_an_epoch_of_unknown_length_is_refused(tmp_path):
    job = run(tmp_path, STREAM="1")
    assert job.code == 1
    assert "an epoch of unknown length has ended after a number of batches that is not a multiple of 2" in job.output


@pytest.mark.parametrize(
    "faults",
    [
        [["entry 2", 0, 0, "sleep1"], ["fit 2", 0, 1, "kill"]],  # its buddy has yet to receive its statistics
        [["entry 2", 0, 1, "kill"]],
        [["begin 2", 0, 1, "kill"]],
    ],
)
def test_a_rank_that_is_lost_as_a_second_fit_begins_keeps_its_running_statistics(faults, wanted, tmp_path):
    found = run(tmp_path, faults=faults, TWICE="1")
    assert (found.code, found.num_faults) == (0, len(faults)), found.output[-6000:]
    assert_equal(wanted, found)


@pytest.mark.parametrize(
    "faults",
    [
        [["write 1", 0, 1, "kill"], ["write 2", 0, 0, "kill"]],
        [["written 1", 0, 0, "kill"], ["written 2", 0, 1, "kill"]],
        [["record 1", 0, 1, "kill"], ["record 2", 0, 0, "kill"]],
    ],
)
def test_a_rank_that_is_lost_while_the_state_after_a_fit_is_kept(faults, wanted, tmp_path):
    """No step runs twice, although there is no checkpoint, and values that were logged are shown."""
    found = run(tmp_path, faults=faults, TWICE="1")
    assert (found.code, found.num_faults) == (0, 2), found.output[-6000:]
    assert_equal(wanted, found)
    for steps in found.records("step", num_ranks=2):
        assert [step["index"] for step in steps] == [0, 1, 2] * 2, found.output[-6000:]


def assert_equal(wanted, found):
    for one, other in zip(wanted.results(2), found.results(2), strict=True):
        assert (one["epoch"], one["drawn"], one["shown"]) == (other["epoch"], other["drawn"], other["shown"])
        for name, value in one["state"].items():
            assert torch.equal(value, other["state"][name]), name
