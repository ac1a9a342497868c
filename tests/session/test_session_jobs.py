"""Loops written by hand, with real processes that are killed at every point of a body."""

import json

import pytest
import torch
from recovery.faults import PRELOAD, run_job

SCRIPT = "../session/program_loop.py"
NUM_STEPS = 30
FAULTS = [
    ["forward", 1, 0, "kill"],
    ["backward", 3, 1, "kill"],
    ["validate", 4, 2, "kill"],
    ["committed", 6, 3, "kill"],
    ["validated", 9, 0, "kill"],
    ["forward", 11, 2, "raise"],
    ["forward", 13, 1, "kill"],
    ["forward", 13, 2, "kill"],
    ["validate", 14, 1, "break"],
    ["saved", 19, 3, "kill"],
    ["forward", 22, 2, "pause30"],
    ["validate", 29, 0, "kill"],
    ["validated", 29, 1, "kill"],
]

pytestmark = pytest.mark.spawns


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    job = run_job(SCRIPT, tmp_path_factory.mktemp("calm"), args=PRELOAD, environ={"SAVE": "1"})
    assert job.code == 0, job.output[-8000:]
    return job


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disturbed")
    environ = {"SAVE": "1", "CLOCK_SHIFTS": json.dumps({0: 7200.0, 1: -3600.0, 3: 60.0})}
    job = run_job(SCRIPT, folder, faults=FAULTS, args=PRELOAD, environ=environ, timeout_s=120)
    assert job.code == 0, job.output[-8000:]
    return job


def test_every_fault_happened(disturbed):
    assert disturbed.num_faults == len(FAULTS)


def test_nobody_is_replaced_but_those_that_were_killed_or_stopped(disturbed):
    """Among ranks whose clocks differ by hours, of which one hangs."""
    for rank, processes in enumerate(disturbed.records("process")):
        wanted = sum(fault[2] == rank and (fault[3] == "kill" or fault[3].startswith("pause")) for fault in FAULTS)
        assert len(processes) == 1 + wanted, disturbed.output[-8000:]


def test_all_ranks_end_with_the_same_bits(calm, disturbed):
    for rank, (wanted, found) in enumerate(zip(calm.results(), disturbed.results(), strict=True)):
        assert (found["lr"], found["best"]) == (wanted["lr"], wanted["best"])
        assert found["state"].keys() == wanted["state"].keys()
        for name, value in found["state"].items():
            assert torch.equal(value, wanted["state"][name]), (rank, name)


def test_every_step_is_run_once_and_its_body_to_the_end(calm, disturbed):
    for rank in range(4):
        wanted = {line["step"]: line for line in calm.records("step")[rank]}
        steps, again = disturbed.records("step")[rank], disturbed.records("again")[rank]
        assert len({line["step"] for line in steps}) == len(steps)
        for line in steps:
            own = {"pid": 0, "at_s": 0.0}
            assert line | own == wanted[line["step"]] | own
        for line in again:  # of a process that has not run the step, or has not come to the end of its body
            for name in ("loss", "lr", "ids", "num_samples"):
                assert line[name] == wanted[line["step"]][name], name
        gaps = set(wanted) - {line["step"] for line in (*steps, *again)}
        assert len(gaps) <= 1  # killed when it had committed, while the others were in the next step already


def test_a_shard_that_only_a_snapshot_has(tmp_path):
    """Two shards, no replica: all return to the snapshot of step 12, 16 and 24, and run up to 4 steps again."""
    environ = {"SNAPSHOTS": "4", "SHARDS": "2"}
    calm = run_job(SCRIPT, tmp_path / "calm", num_ranks=2, args=PRELOAD, environ=environ)
    faults = [["forward", 14, 1, "kill"], ["validate", 19, 0, "kill"], ["committed", 25, 1, "kill"]]
    found = run_job(SCRIPT, tmp_path / "found", num_ranks=2, faults=faults, args=PRELOAD, environ=environ)
    assert calm.code == found.code == 0, found.output[-8000:]
    assert found.num_faults == len(faults)
    assert "all ranks return" not in calm.output
    for wanted, result in zip(calm.results(2), found.results(2), strict=True):
        assert (result["lr"], result["best"]) == (wanted["lr"], wanted["best"])
        for name, value in result["state"].items():
            assert torch.equal(value, wanted["state"][name]), name


def test_a_checkpoint_has_what_each_rank_had_alone(tmp_path):
    """Two shards, no replica and no snapshot: all begin again from what was saved after the first and second epoch."""
    environ = {"OWN": "1", "SAVE": "1", "SHARDS": "2"}
    calm = run_job(SCRIPT, tmp_path / "calm", num_ranks=2, args=PRELOAD, environ=environ)
    faults = [["forward", 13, 1, "kill"], ["forward", 24, 0, "kill"]]
    found = run_job(SCRIPT, tmp_path / "found", num_ranks=2, faults=faults, args=PRELOAD, environ=environ)
    assert calm.code == found.code == 0, found.output[-8000:]
    assert found.num_faults == len(faults)
    assert "all processes start again" in found.output
    totals = []
    for wanted, result in zip(calm.results(2), found.results(2), strict=True):
        totals.append(result["total"])
        assert result["total"] == wanted["total"]
        for name, value in result["state"].items():
            assert torch.equal(value, wanted["state"][name]), name
    assert totals[0] != totals[1]
