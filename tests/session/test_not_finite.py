"""A loss that is not a number on one rank: all ranks stop, with nothing updated and nobody replaced, or all skip it."""

from pathlib import Path

import pytest
import torch
import warm

pytestmark = pytest.mark.spawns


def run(policy, folder):
    program = Path(__file__).parent / "program_not_finite.py"
    return warm.run(["--nproc-per-node", "2", program, policy, folder], timeout_s=120, cwd=folder)


def test_all_ranks_stop(tmp_path):
    code, told = run("auto", tmp_path)
    assert code == 1, told[-4000:]
    assert "step 2 of epoch 0 is not finite" in told
    assert "batch 0 of 1 of this rank has such a loss" in told
    assert "no batch of this rank has such a loss" in told
    assert "repaired" not in told
    assert "start again" not in told
    assert list(tmp_path.glob("*.pt")) == []


def test_an_exception_that_each_process_raises_at_one_place_of_the_body_ends_the_job(tmp_path):
    code, told = run("raise", tmp_path)
    assert code == 1, told[-4000:]
    assert told.count("another process takes its place") == 2
    assert "its loop has failed in 3 attempts at the same place, the last time with KeyError: 'a mistake in" in told
    assert "KeyError: 'a mistake in the body'" in told[told.index("Rank 1 failed first") :]
    assert "start again" not in told


def test_all_ranks_skip(tmp_path):
    code, told = run("skip", tmp_path)
    assert code == 0, told[-4000:]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for name, value in first.items():
        assert value.isfinite().all()
        assert torch.equal(value, second[name])
