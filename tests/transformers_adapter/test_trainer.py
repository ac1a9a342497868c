"""`HyperPodTrainer` against transformers' own Trainer, and against itself where ranks are killed."""

import json
import math

import pytest
import torch
from recovery.faults import HYPERPODRUN, PRELOAD, TORCHRUN, run_job

SCRIPT = "../transformers_adapter/program_trainer.py"
OPTIONS = {
    "max_steps": -1,
    "num_train_epochs": 3,
    "gradient_accumulation_steps": 4,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "save_strategy": "steps",
    "save_steps": 3,
    "save_total_limit": 2,
    "include_num_input_tokens_seen": "non_padding",
    "warmup_steps": 2,
    "lr_scheduler_type": "cosine",
    "logging_steps": 2,
}
"""Three steps an epoch of 37 samples: the last one has 2 of 4 micro-batches, and samples from the epoch's beginning."""


def run(folder, faults=(), *, launcher=HYPERPODRUN, environ=None, num_ranks=2, **options):
    environ = {"OPTIONS": json.dumps(OPTIONS | options), "SAMPLES": "37", **(environ or {})}
    args = PRELOAD if launcher == HYPERPODRUN else ()
    job = run_job(
        SCRIPT, folder, faults=faults, num_ranks=num_ranks, environ=environ, launcher=launcher, args=args, timeout_s=250
    )
    assert job.code == 0, job.output[-8000:]
    assert job.num_faults == len(faults)
    return job


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """A job without faults that uses most of what a Trainer does."""
    return run(tmp_path_factory.mktemp("calm"))


def assert_same(wanted, found, num_ranks=2):
    """All ranks of two jobs have the same bits, and the same logs."""
    for before, after in zip(wanted.results(num_ranks), found.results(num_ranks), strict=True):
        assert after["history"] == before["history"]
        assert (after["step"], after["loss"]) == (before["step"], before["loss"])
        for name, value in before["state"].items():
            assert torch.equal(after["state"][name], value), name


@pytest.mark.spawns
def test_the_losses_are_those_of_the_trainer_under_ddp(calm, tmp_path):
    """Order of the samples, weights of the last step of an epoch, norms, rates, evaluations and counts, too."""
    plain = run(tmp_path, launcher=TORCHRUN, environ={"PLAIN": "1"}).results(2)
    ours = calm.results(2)
    assert len(ours[0]["history"]) == len(plain[0]["history"]) == 8
    for wanted, found in zip(plain[0]["history"], ours[0]["history"], strict=True):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            if name != "train_loss":  # of rank 0 alone, in a part
                assert math.isclose(found[name], value, rel_tol=2e-6), (name, wanted, found)
    mean = sum(each["loss"] for each in plain) / 2
    assert all(math.isclose(each["loss"], mean, rel_tol=2e-6) for each in ours)
    for name, value in plain[0]["state"].items():
        torch.testing.assert_close(ours[1]["state"][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.spawns
def test_killed_ranks_are_replaced_and_nothing_shows_it(calm, tmp_path):
    """In a forward pass, and in all that follows a step: an evaluation, a checkpoint, the end of an epoch."""
    faults = [
        ["forward", 1, 1, "kill"],
        ["evaluated", 3, 0, "kill"],
        ["saved", 6, 1, "kill"],
        ["evaluation", 6, 0, "kill"],
        ["after forward", 7, 0, "raise"],
        ["step_end", 9, 0, "kill"],
    ]
    assert_same(calm, run(tmp_path, faults))


@pytest.mark.spawns
def test_random_numbers_of_a_step_are_drawn_again(tmp_path):
    environ = {"DROPOUT": "0.3"}
    wanted = run(tmp_path / "calm", environ=environ)
    assert_same(wanted, run(tmp_path / "kill", [["after forward", 4, 1, "kill"]], environ=environ))
