"""A fixed part of the matrix of faults: `matrix.py` runs all of it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from recovery import matrix
from recovery.faults import run_job
from recovery.matrix import KINDS, PHASES, PROGRAMS, Cells, Outcome, jobs_of, table

PART = [
    Cells(
        program="convolution", kind="kill", phases=("snapshot", "give", "save", "fit end", "fit start", "second fit")
    ),
    Cells(program="counting", kind="kill", phases=("fetch", "forward", "snapshot", "give", "take")),
    Cells(
        program="full", kind="stop", phases=("take",)
    ),  # small snapshots, which are sent without waiting for the receiver
]


@pytest.mark.spawns
def test_a_part_of_the_matrix(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        outcomes = matrix.Matrix(tmp_path, pool, timeout_s=120.0).run(PART)
    assert [outcome for outcome in outcomes if outcome.outcome != "ok"] == []
    assert len(outcomes) == sum(len(cells.phases) for cells in PART)


@pytest.mark.spawns
def test_means_of_an_epoch_are_restored_after_a_restart_from_the_last_batch_of_the_one_before(tmp_path):
    """All start again from the checkpoint of step 12, at which an epoch ends, and return to a snapshot of the next."""
    faults = ["forward", 15, 2, "kill"], ["give", 15, -1, "kill"], ["forward", 18, 1, "kill"]
    environ = {"PROGRAM": "full", "HANGS": "0", "MATRIX": "means"}
    calm, disturbed = (
        run_job("program_matrix.py", tmp_path / name, faults=given, environ=environ).results()
        for name, given in (("calm", ()), ("disturbed", faults))
    )
    for one, other in zip(calm, disturbed, strict=True):
        wanted, found = ({k: v for k, v in each["first"].items() if k.startswith("metric.")} for each in (one, other))
        assert len(wanted) >= 4
        assert wanted == found


def test_every_phase_of_every_program_is_in_some_job():
    for kind in KINDS:
        for program in PROGRAMS:
            jobs = jobs_of(program, kind, list(PHASES))
            assert sorted(phase for job in jobs for phase in job.phases) == sorted(PHASES)
    halves = jobs_of("full", "raise", list(PHASES))[0].split()
    assert halves[0].phases + halves[1].phases == jobs_of("full", "raise", list(PHASES))[0].phases


def test_faults_are_at_places_of_their_own():
    faults = Cells(program="hsdp", kind="stop", phases=("give", "second fit")).faults
    assert faults == [["forward", 15, 2, "kill"], ["give", 15, -1, "stop"], ["second forward", 21, 0, "stop"]]
    places = [
        (place, step)
        for phase in PHASES
        for place, step, *_ in Cells(program="hsdp", kind="kill", phases=(phase,)).faults
    ]
    assert len(set(places)) == len(places)


def test_a_table_has_a_row_a_phase_and_a_column_a_program():
    found = [
        Outcome(program="full", kind="kill", phase="vote", outcome="ok"),
        Outcome(program="hsdp", kind="kill", phase="vote", outcome="FAILED", why="x"),
        Outcome(program="hsdp", kind="kill", phase="fetch", outcome="refused"),
    ]
    assert [line.split() for line in table(found)] == [
        [],
        ["SIGKILL", "hsdp", "full"],
        ["fetch", "refused"],
        ["vote", "FAILED", "ok"],
    ]
