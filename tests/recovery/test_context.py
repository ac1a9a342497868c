"""Ranks that are lost while sequences or experts are split over them: the bits of a job to which nothing happens."""

import pytest
import torch
from recovery.faults import PRELOAD, run_job

SCRIPT = "program_context.py"
NUM_STEPS = 12
FAULTS = [
    ["forward", 1, 0, "kill"],
    ["layer", 3, 1, "kill"],  # its peer waits for its keys and values, or its tokens
    ["backward", 5, 3, "kill"],
    ["layer", 8, 2, "raise"],
    ["layer", 10, 2, "kill"],
    ["backward", 10, 3, "kill"],  # a whole replica
]

pytestmark = pytest.mark.spawns


def run(folder, environ, faults):
    jobs = []
    for name, wanted in (("calm", []), ("disturbed", faults)):
        job = run_job(SCRIPT, folder / name, faults=wanted, args=PRELOAD, environ=environ, timeout_s=120)
        assert job.code == 0, job.output[-8000:]
        jobs.append(job)
    calm, disturbed = jobs
    assert disturbed.num_faults == len(faults)
    for rank, (wanted, found) in enumerate(zip(calm.results(), disturbed.results(), strict=True)):
        assert found["state"].keys() == wanted["state"].keys()
        for name, value in found["state"].items():
            assert torch.equal(value, wanted["state"][name]), (rank, name)
    return calm, disturbed


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param({}, id="heads exchanged"),
        pytest.param({"KEY_HEADS": "1"}, id="keys and values gathered", marks=pytest.mark.variant),
        pytest.param({"HYPERPOD_TEST_TRANSPORT": "nccl-like"}, id="nccl-like"),
        pytest.param({"COMM": "p2p"}, id="keys and values in a ring"),
        pytest.param({"SPLIT": "expert"}, id="experts"),
        pytest.param({"SPLIT": "expert tensor", "ON_HOST": "optimizer_offload"}, id="experts and tensors"),
        pytest.param({"SPLIT": "context tensor"}, id="contexts and tensors", marks=pytest.mark.variant),
        pytest.param({"SPLIT": "context expert"}, id="contexts and experts"),
        pytest.param({"SPLIT": "context expert tensor"}, id="contexts, experts and tensors"),
        pytest.param(
            {"SPLIT": "expert", "ON_HOST": "param_offload"}, id="experts on the host", marks=pytest.mark.variant
        ),
        pytest.param({"ON_HOST": "optimizer_offload"}, id="contexts, host optimizer", marks=pytest.mark.variant),
        pytest.param(
            {"SPLIT": "expert", "HYPERPOD_TEST_TRANSPORT": "nccl-like"},
            id="experts, nccl-like",
            marks=pytest.mark.variant,
        ),
    ],
)
def test_lost_ranks_change_no_bit(tmp_path, environ):
    faults = FAULTS[:4] if "tensor" in environ.get("SPLIT", "") else FAULTS  # there is one replica
    calm, disturbed = run(tmp_path, {"HYPERPOD_TEST_TRANSPORT": "gloo"} | environ, faults)
    losses = {line["step"]: line["loss"] for line in calm.records("step")[0]}
    assert len(losses) == NUM_STEPS
    for lines in disturbed.records("step"):
        assert all(line["loss"] == losses[line["step"]] for line in lines)


def test_lost_ranks_of_a_fit_change_no_bit(tmp_path):
    calm, _ = run(tmp_path, {"FIT": "1"}, [*FAULTS, ["validation", 8, 1, "kill"]])
    for first, second in ((0, 1), (2, 3)):  # the parts of the same samples have the same loss
        losses = [[line["loss"] for line in calm.records("step")[rank]] for rank in (first, second)]
        assert len(losses[0]) == NUM_STEPS
        assert losses[0] == losses[1]
