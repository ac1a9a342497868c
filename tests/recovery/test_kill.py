"""Lightning jobs that lose ranks at every point of their life, against undisturbed ones: same bits, same logs."""

from collections import Counter

import pytest
import torch
from recovery.faults import run_job

from hyperpod_plugins.parallel.checkpoint_files import read_document

EVERYWHERE = [
    ["sanity", 0, 1, "kill"],
    ["forward", 1, 0, "kill"],
    ["receive", 0, 0, "kill"],  # and again, while it is repaired
    ["backward", 2, 3, "kill"],
    ["clip", 3, 2, "kill"],
    ["validation", 4, 1, "kill"],
    ["clip", 4, 3, "kill"],  # in the step after a validation that was run again
    ["vote", 5, 0, "kill"],
    ["checkpoint", 6, 2, "kill"],
    ["scheduler", 7, 1, "kill"],
    ["epoch end", 8, 3, "kill"],
    ["voted", 9, 1, "kill"],
    ["optimizer", 10, 2, "kill"],
    ["batch end", 11, 1, "kill"],
    ["validation end", 12, 2, "kill"],
    ["dataloader", 13, 3, "kill"],
    ["forward", 14, 0, "kill"],  # a whole replica
    ["forward", 14, 1, "kill"],
    ["batch end", 16, 2, "kill"],  # where a validation and the end of the epoch follow
    ["forward", 17, 0, "kill"],  # one of each shard and each replica
    ["forward", 17, 3, "kill"],
    ["voted", 19, 3, "break"],  # it rolls forward, is outside of a step after that, and gives its state to rank 1
    ["optimizer", 19, 1, "kill"],
    ["train end", 24, 3, "kill"],  # the others have trained to the end, and wait
]
NOBODY_DIES = [
    ["clip", 2, 0, "raise"],
    ["clip", 3, 1, "raise"],
    ["forward", 5, 3, "raise"],
    ["voted", 6, 0, "break"],
    ["backward", 7, 1, "raise"],
    ["clip", 9, 2, "raise"],
    ["voted", 11, 1, "break"],  # the others go on to a validation
    ["forward", 13, 2, "raise"],
    ["voted", 14, 3, "break"],
    ["voted", 19, 0, "break"],
    ["clip", 20, 2, "raise"],
]
SPLIT = [
    ["forward", 3, 1, "kill"],
    ["validation", 8, 2, "kill"],
    ["forward", 11, 0, "kill"],  # the shorter loader is in its second round
    ["epoch end", 16, 3, "kill"],  # two ranks are in the next step by then, one is not
    ["voted", 17, 0, "kill"],
]
SPLIT_OPTIONS = {"LAYOUT": "tensor", "LOADERS": "2", "INTERVAL": "epoch"}
IN_BACKGROUND = [
    ["checkpoint", 6, 2, "kill"],
    ["forward", 12, 1, "kill"],  # while the checkpoint of that step is being written
    ["forward", 15, 0, "term"],
    ["batch end", 18, 3, "kill"],
]

ACCUMULATED = [
    ["forward", 1, 1, "kill"],  # in the first of four micro-steps
    ["forward", 2, 3, "raise"],
    ["validation", 3, 2, "kill"],  # in the middle of a window
    ["backward", 4, 0, "kill"],
    ["validation", 5, 0, "kill"],
]
ACCUMULATED_OPTIONS = {"ACCUMULATE": "4", "VALIDATE_EVERY": "6", "STEPS": "8", "VALIDATE_AFTER": "1"}

pytestmark = pytest.mark.spawns


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    def run(name, faults=(), **environ):
        folder = tmp_path_factory.mktemp(name)
        job = run_job("ranks_lightning.py", folder, faults=faults, environ=environ, timeout_s=150)
        if job.code != 0:
            pytest.fail(f"exit code {job.code}\n{job.output[-8000:]}")
        if job.num_faults != len(faults):
            pytest.fail(f"{job.num_faults} of {len(faults)} faults happened\n{job.output[-8000:]}")
        return job

    return run


@pytest.fixture(scope="module")
def undisturbed(run):
    return run("undisturbed")


@pytest.fixture(scope="module")
def everywhere(run):
    return run("everywhere", EVERYWHERE)


@pytest.fixture(scope="module")
def unharmed(run):
    return run("unharmed", NOBODY_DIES)


def logged(job, rank):
    """(step, name, value) -> how often this rank logged it; means over an epoch are apart."""
    rows = [(line["step"], *row) for line in job.records("metrics")[rank] for row in line["metrics"].items()]
    return Counter(row for row in rows if row[1] not in ("epoch", "loss_epoch", "mean"))


def assert_equal(found_job, wanted_job):
    for rank, (wanted, found) in enumerate(zip(wanted_job.results(), found_job.results(), strict=True)):
        for key in ("lr", "step", "epoch", "early", "validated"):
            assert found[key] == wanted[key], (rank, key)
        assert found["state"].keys() == wanted["state"].keys()
        for name, value in found["state"].items():
            assert torch.equal(value, wanted["state"][name]), (rank, name)


def assert_logged_once(found_job, wanted_job, faults):
    """Every row has the value of the undisturbed job, none comes twice; a rank leaves out at most one row a fault."""
    for rank in range(4):
        wanted, found = logged(wanted_job, rank), logged(found_job, rank)
        assert not found - wanted
        assert (wanted - found).total() <= len(faults) // 2
    kept = sum((logged(found_job, rank) for rank in range(4)), Counter())
    assert {step for step, name, _ in kept if name == "loss_step"} == set(range(24))


def test_ranks_killed_everywhere(undisturbed, everywhere):
    assert_equal(everywhere, undisturbed)
    assert_logged_once(everywhere, undisturbed, EVERYWHERE)


def test_a_checkpoint_that_was_interrupted_is_written_again(everywhere):
    assert (everywhere.folder / "checkpoints" / "step=6.ckpt").exists()


def test_checkpoints_of_other_steps_are_written(everywhere):
    found = {path.name for path in (everywhere.folder / "checkpoints").iterdir() if not path.name.startswith(".")}
    assert {"step=18.ckpt", "step=24.ckpt"} <= found


def test_faults_without_a_loss(undisturbed, unharmed):
    assert_equal(unharmed, undisturbed)
    assert_logged_once(unharmed, undisturbed, NOBODY_DIES)
    # No process was replaced: each has seen every repair. One repair may mend two faults that come close together.
    assert "takes its place" not in unharmed.output
    assert all(result["repairs"] >= len(NOBODY_DIES) - 3 for result in unharmed.results())


def test_repeated_steps_count_once_in_the_means_of_an_epoch(undisturbed, unharmed):
    for wanted, found in zip(undisturbed.records("metrics"), unharmed.records("metrics"), strict=True):
        means = [line for line in wanted if "mean" in line["metrics"]]
        assert means[0] in found


def test_a_fault_without_a_loss_is_repaired_at_once(unharmed):
    lasted_s = [each for result in unharmed.results() for each in result["lasted_s"]]
    assert max(lasted_s) < 5.0


def test_tensor_parallel_ranks_with_two_loaders_of_different_length(run):
    assert_equal(run("split_disturbed", SPLIT, **SPLIT_OPTIONS), run("split", **SPLIT_OPTIONS))


def test_windows_of_micro_steps_and_a_validation_after_the_fit(run):
    assert_equal(
        run("accumulated_disturbed", ACCUMULATED, **ACCUMULATED_OPTIONS), run("accumulated", **ACCUMULATED_OPTIONS)
    )


def test_checkpoints_in_the_background(run, undisturbed):
    job = run("background", IN_BACKGROUND, BACKGROUND="1")
    assert_equal(job, undisturbed)
    for folder in (job.folder / "checkpoints").glob("step=*.ckpt"):  # complete, or not there
        extra = read_document(folder, weights_only=True)["extra"]
        assert extra["global_step"] == int(folder.stem.removeprefix("step="))
    assert (job.folder / "checkpoints" / "step=24.ckpt").exists()


def test_a_loss_after_the_fit_ends_the_job_at_once(tmp_path):
    job = run_job("ranks_lightning.py", tmp_path, faults=[["fit end", 6, 2, "raise"]], environ={"STEPS": "6"})
    assert job.code == 1
    assert "past its fit" in job.output
    assert "Transient: fault at fit end" in job.output
    assert "takes its place" not in job.output


def test_a_mistake_of_the_program_ends_the_job(tmp_path):
    job = run_job("ranks_lightning.py", tmp_path, faults=[["forward", 7, 2, "always"]])
    assert job.code == 1
    assert "Transient: fault at forward of step 7" in job.output
    assert 'faults.at("forward", self.global_step)' in job.output  # the traceback leads into the program
    assert "takes its place" not in job.output
    attempts = [line for line in job.output.splitlines() if "repaired in" in line]
    assert len(attempts) == 2
