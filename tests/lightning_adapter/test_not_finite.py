"""A loss or gradient of one rank of a Trainer is not finite: all ranks stop, with nothing updated, or skip the step."""

from pathlib import Path

import pytest
import torch
import warm

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.lightning import HyperPodStrategy


def run(policy, recovers, kind, folder):
    program = Path(__file__).parent / "program_not_finite.py"
    return warm.run(["--nproc-per-node", "2", program, policy, recovers, kind, folder], timeout_s=120, cwd=folder)


def states(folder, name):
    return [torch.load(folder / f"{name}-rank-{rank}.pt") for rank in (0, 1)]


def are_equal(one, other):
    return all(torch.equal(value, other[name]) for name, value in one.items())


def test_an_unknown_policy_is_refused():
    with pytest.raises(ConfigError, match="non_finite='raise' is not known"):
        HyperPodStrategy(non_finite="raise")


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("kind", "recovers"),
    [("loss", "yes"), ("loss", "no"), ("gradient", "no"), ("manual", "yes"), ("averaged", "yes")],
)
def test_all_ranks_stop(tmp_path, kind, recovers):
    code, told = run("auto", recovers, kind, tmp_path)
    assert code == 1, told[-4000:]
    if kind == "loss":
        assert "step 3 of epoch 0 is not finite: the loss of batch 7 of this rank is nan" in told
        assert "step 3 of epoch 0 is not finite: another rank has such a loss" in told
    else:
        batches, step = ("3", 6) if kind == "manual" else ("6, 7", 3)  # `global_step` counts the steps of optimizers
        assert f"step {step} of epoch 0 is not finite: a gradient is infinite or NaN, and all losses are finite" in told
        assert f"the batches of this rank: {batches}." in told
    assert "repaired" not in told
    before, stopped = states(tmp_path, "step-3"), states(tmp_path, "stopped")
    assert are_equal(before[0], before[1])
    for rank in (0, 1):
        assert are_equal(before[rank], stopped[rank])
        assert all(value.isfinite().all() for value in stopped[rank].values())


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("kind", "recovers"),
    [("loss", "yes"), ("loss", "no"), ("gradient", "yes"), ("manual", "no"), ("averaged", "yes")],
)
def test_all_ranks_skip(tmp_path, kind, recovers):
    code, told = run("skip", recovers, kind, tmp_path)
    assert code == 0, told[-4000:]
    before, after, end = (states(tmp_path, f"step-{step}") for step in (3, 4, 6))
    for rank in (0, 1):
        assert are_equal(before[rank], after[rank])
        assert not are_equal(after[rank], end[rank])
        assert all(value.isfinite().all() for value in end[rank].values())
    assert are_equal(end[0], end[1])


@pytest.mark.spawns
def test_a_warning_is_all(tmp_path):
    code, told = run("warn", "no", "manual", tmp_path)
    assert code == 0, told[-4000:]
    assert "The optimizers step anyway." in told
    assert not any(value.isfinite().all() for value in states(tmp_path, "step-4")[0].values())
