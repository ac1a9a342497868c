"""Steps as transactions without Lightning: a job that meets fifteen faults, against one that meets none."""

import pytest
import torch
from recovery.faults import PRELOAD, run_job

FAULTS = [
    ["forward", 1, 0, "kill"],
    ["backward", 3, 1, "kill"],
    ["clip", 5, 2, "kill"],
    ["vote", 7, 3, "kill"],
    ["voted", 9, 0, "kill"],
    ["optimizer", 11, 2, "kill"],
    ["committed", 13, 1, "kill"],
    # Two at once, when all have committed step 14: their neighbours too, with whom they have gathered parameters since.
    # Were all killed that know of a commit, the others would rightly do that step again.
    ["backward", 15, 0, "kill"],
    ["backward", 15, 3, "kill"],
    ["setup", 1, 0, "kill"],  # the first replacement of rank 0
    ["voted", 17, 3, "break"],  # it has voted, does not know the result, and gives its state to rank 1
    ["optimizer", 17, 1, "kill"],
    ["forward", 19, 2, "raise"],
    ["receive", 21, 1, "kill"],  # while it is repaired
    ["forward", 21, 1, "kill"],
]

pytestmark = pytest.mark.spawns


@pytest.fixture(scope="module", params=[pytest.param("gloo", marks=pytest.mark.gpu), "nccl-like", "staged"])
def jobs(request, undisturbed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("disturbed")
    environ = {"HYPERPOD_TEST_TRANSPORT": request.param}
    job = run_job("ranks_transaction.py", folder, faults=FAULTS, args=PRELOAD, environ=environ, timeout_s=120)
    assert job.code == 0, job.output[-8000:]
    return undisturbed, job


def test_every_fault_happened(jobs):
    assert jobs[1].num_faults == len(FAULTS)


def test_all_ranks_end_with_the_same_bits(jobs):
    for rank, (wanted, found) in enumerate(zip(jobs[0].results(), jobs[1].results(), strict=True)):
        assert found["lr"] == wanted["lr"]
        assert found["state"].keys() == wanted["state"].keys()
        for name, value in found["state"].items():
            assert torch.equal(value, wanted["state"][name]), (rank, name)


def test_every_step_is_committed_once_with_the_same_loss(jobs):
    lost = {(step, rank) for point, step, rank, _ in FAULTS if point in ("voted", "optimizer", "committed")}
    for rank, (wanted, found) in enumerate(zip(*(job.records("loss") for job in jobs), strict=True)):
        steps = [line["step"] for line in found]
        assert len(set(steps)) == len(steps)
        by_step = {line["step"]: line for line in wanted}
        assert all(line == by_step[line["step"]] for line in found)
        # Only a rank that dies between the vote and its record leaves a gap in it; others have committed that step.
        assert {(step, rank) for step in by_step.keys() - set(steps)} <= lost
