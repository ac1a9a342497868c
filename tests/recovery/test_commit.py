"""Optimizers whose step communicates: a fault inside it is undone, or another replica's step counts; the same bits."""

import pytest
import torch
from recovery.faults import PRELOAD, run_job

SCRIPT = "program_commit.py"
FAULTS = [
    ["collective 1", 2, 1, "kill"],
    ["collective 5", 4, 2, "break"],  # nobody dies
    ["collective 2", 6, 0, "break"],
    ["collective 4", 8, 3, "kill"],
]
BY_HAND = [
    ["optimizer 1", 2, 1, "kill"],  # between the two steps
    ["stepped", 4, 2, "break"],
    ["optimizer 1", 6, 0, "break"],
    ["batch end", 18, 3, "kill"],  # global_step counts both optimizers
]
LIGHTNING = ("--preload", f"{PRELOAD[1]},lightning.pytorch")
ARGS = {"session": PRELOAD, "lightning": LIGHTNING, "gan": LIGHTNING}

pytestmark = pytest.mark.spawns


def compare(calm, found, num_ranks, steps_lost=0):
    for rank, (wanted, result) in enumerate(zip(calm.results(num_ranks), found.results(num_ranks), strict=True)):
        assert result["steps_lost"] <= steps_lost
        assert result["state"].keys() == wanted["state"].keys()
        for name, value in result["state"].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(wanted["state"][name])), (rank, name)


def run_both(folder, faults, num_ranks, steps_lost=0, **environ):
    options = {"args": ARGS[environ["ADAPTER"]], "environ": environ, "num_ranks": num_ranks}
    calm = run_job(SCRIPT, folder / "calm", **options)
    found = run_job(SCRIPT, folder / "found", faults=faults, **options)
    assert calm.code == found.code == 0, (calm.output + found.output)[-8000:]
    assert found.num_faults == len(faults), found.output[-8000:]
    compare(calm, found, num_ranks, steps_lost)
    replaced = [rank for _, _, rank, action in faults if action in ("kill", "raise")]
    assert [len(each) - 1 for each in found.records("process", num_ranks)] == [*map(replaced.count, range(num_ranks))]


@pytest.mark.parametrize(
    ("adapter", "optimizer"),
    [("session", "muon"), ("lightning", "adafactor"), pytest.param("lightning", "lars", marks=pytest.mark.variant)],
)
def test_a_fault_inside_the_optimizers_step(adapter, optimizer, tmp_path):
    run_both(tmp_path, FAULTS, 4, ADAPTER=adapter, OPTIMIZER=optimizer)


def test_without_replicas_a_broken_connection_costs_no_step(tmp_path):
    faults = [["collective 1", 2, 1, "break"], ["collective 4", 4, 0, "break"]]
    run_both(tmp_path, faults, 2, ADAPTER="session", OPTIMIZER="muon")


def test_a_state_that_is_torn_is_no_state(tmp_path):
    """An elementwise optimizer, which steps after the vote, is interrupted between two of its writes."""
    faults = [["second group", 3, rank, "interrupt"] for rank in range(4)]  # all have the same part of the step
    faults += [["second group", 6, 1, "raise"]]
    # The interruptions may be repaired one by one, and a rank may have committed the step by then.
    run_both(tmp_path, faults, 4, steps_lost=4, ADAPTER="session", OPTIMIZER="grouped", SNAPSHOTS="1")


def test_two_optimizers_that_are_stepped_by_hand(tmp_path):
    run_both(tmp_path, BY_HAND, 4, ADAPTER="gan")


def test_two_optimizers_that_are_stepped_by_hand_without_replicas(tmp_path):
    faults = [["optimizer 1", 3, 0, "break"], ["optimizer 1", 5, 1, "kill"]]
    run_both(tmp_path, faults, 2, steps_lost=3, ADAPTER="gan", SNAPSHOTS="2")
