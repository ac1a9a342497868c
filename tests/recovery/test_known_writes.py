"""What a replacement gets to know of the writes of its program, in real jobs."""

import pytest
import torch
from recovery.faults import PRELOAD, run_job

pytestmark = pytest.mark.spawns
SCRIPT = "program_known_writes.py"


def test_a_step_is_undone_in_a_replacement_whose_first_step_writes_where_no_counter_tells(tmp_path):
    options = {"SHARDS": "1", "KIND": "loop"}
    faults = [["forward", 10, 1, "kill"], ["forward", 10, 1, "raise"]]
    found, calm = (
        run_job(SCRIPT, tmp_path / str(len(each)), num_ranks=2, args=PRELOAD, faults=each, environ=options)
        for each in (faults, [])
    )
    assert found.code == calm.code == 0, found.output[-8000:]
    assert found.num_faults == 2
    for result, wanted in zip(found.results(2), calm.results(2), strict=True):
        assert len(result["repairs"]) == 2
        for name, value in wanted["state"].items():
            assert torch.equal(result["state"][name], value), name
    own, taken = found.records("known", num_ranks=2)
    assert not own
    assert taken[0] == {"kind": "known", "steps": 10, "written": ["1.weight"]}


def test_replacements_of_a_trainer_know_what_their_replicas_know(tmp_path):
    job = run_job(
        SCRIPT, tmp_path, args=PRELOAD, faults=[["forward", 9, 1, "kill"]], environ={"KIND": "trainer", "STEPS": "12"}
    )
    assert job.code == 0, job.output[-8000:]
    assert job.num_faults == 1
    assert [[row["steps"] for row in rows] for rows in job.records("known")] == [[], [9], [], []]
