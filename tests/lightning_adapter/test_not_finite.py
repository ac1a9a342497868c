"""A loss that is not a number on one rank of a Trainer: all ranks stop, with nothing updated, or all skip the step."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from device import ACCELERATOR

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.lightning import HyperPodStrategy


def run(policy, recovers, folder):
    launcher = Path(sys.executable).parent / "hyperpodrun"
    program = Path(__file__).parent / "program_not_finite.py"
    command = [launcher, "--nproc-per-node", "2", program, policy, recovers, folder]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder, env=environ, check=False)


def states(folder, name):
    return [torch.load(folder / f"{name}-rank-{rank}.pt") for rank in (0, 1)]


def are_equal(one, other):
    return all(torch.equal(value, other[name]) for name, value in one.items())


def test_an_unknown_policy_is_refused():
    with pytest.raises(ConfigError, match="non_finite='raise' is not known"):
        HyperPodStrategy(non_finite="raise")


def fit_by_hand(policy):
    """Fit with manual optimization, where losses cannot be looked at before the optimizer steps."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.automatic_optimization = torch.nn.Linear(4, 4), False

        def training_step(self, batch, index):
            self.manual_backward(self.layer(batch).square().mean())
            self.optimizers().step()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = pl.Trainer(strategy=HyperPodStrategy(non_finite=policy), accelerator=ACCELERATOR, max_steps=2, **quiet)
    try:
        trainer.fit(Module(), torch.utils.data.DataLoader(torch.eye(4)))
    except ConfigError as error:
        return str(error)
    return f"made {trainer.global_step} steps"


def fits_by_hand(policies):
    return {policy: fit_by_hand(policy) for policy in policies}


@pytest.mark.spawns
def test_policies_that_look_are_refused_with_manual_optimization(run_ranks):
    [told] = run_ranks(fits_by_hand, ("auto", "off", "stop", "skip", "warn"), world_size=1)
    assert told.pop("auto") == told.pop("off") == "made 2 steps"
    for policy, words in told.items():
        assert f"non_finite='{policy}' is not possible with manual optimization. Leave it out" in words


@pytest.mark.spawns
@pytest.mark.parametrize("recovers", ["yes", "no"])
def test_all_ranks_stop(tmp_path, recovers):
    done = run("auto", recovers, tmp_path)
    told = done.stdout + done.stderr
    assert done.returncode != 0
    assert "step 3 of epoch 0 is not finite: the loss of batch 7 of this rank is nan" in told
    assert "step 3 of epoch 0 is not finite: another rank has such a loss" in told
    assert "repaired" not in told
    before, stopped = states(tmp_path, "step-3"), states(tmp_path, "stopped")
    assert are_equal(before[0], before[1])
    for rank in (0, 1):
        assert are_equal(before[rank], stopped[rank])
        assert all(value.isfinite().all() for value in stopped[rank].values())


@pytest.mark.spawns
@pytest.mark.parametrize("recovers", ["yes", "no"])
def test_all_ranks_skip(tmp_path, recovers):
    done = run("skip", recovers, tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    before, after, end = (states(tmp_path, f"step-{step}") for step in (3, 4, 6))
    for rank in (0, 1):
        assert are_equal(before[rank], after[rank])
        assert not are_equal(after[rank], end[rank])
        assert all(value.isfinite().all() for value in end[rank].values())
    assert are_equal(end[0], end[1])
