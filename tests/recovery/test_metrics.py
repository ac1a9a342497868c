"""A rank is lost where the others have computed what is gathered, and it has not: no rank waits for another."""

import pytest
from recovery.faults import run_job

pytestmark = pytest.mark.spawns
FAULTS = [
    ["forward", 2, 1, "kill"],  # it has seen no sanity check
    ["forward", 7, 2, "kill"],  # after a validation in the middle of the epoch
    ["rare", 8, 1, "kill"],
    ["own", 16, 3, "kill"],
]


def rows_of(job):
    """(step, name) -> value of what each rank has logged besides its own losses."""
    return [
        {(row["step"], name): value for row in rows for name, value in row["metrics"].items() if "loss" not in name}
        for rows in job.records("metrics")
    ]


def test_metrics_that_only_the_others_have_computed(tmp_path):
    options = {"VALIDATE_EVERY": "3", "STEPS": "20"}
    jobs = [
        run_job("program_metrics.py", tmp_path / str(len(faults)), faults=faults, environ=options)
        for faults in (FAULTS, [])
    ]
    found, wanted = jobs
    assert found.code == wanted.code == 0, found.output[-8000:]
    assert found.num_faults == len(FAULTS)
    names = {name for _, name in rows_of(wanted)[0]}
    assert names >= {"extra", "val", "val_mean", "best", "best_of_epoch", "mean", "rare", "rarer", "first", "second"}
    for rank, (rows, expected) in enumerate(zip(rows_of(found), rows_of(wanted), strict=True)):
        assert rows.items() <= expected.items(), rank  # a process that is lost may leave a row out
        if rank == 0:
            assert rows == expected
