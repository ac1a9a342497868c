"""A worker process of a rank's loader is killed: the rank is replaced, and the job ends with the same bits."""

from pathlib import Path

import pytest
from recovery.faults import PRELOAD, run_job

from hyperpod_plugins.recovery.packing import are_same
from hyperpod_plugins.session.loop import has_lost_loader_worker

PROGRAM = str(Path(__file__).with_name("program_loader_workers.py"))


def run(folder, dies):
    return run_job(PROGRAM, folder, num_ranks=2, environ={"DIES": dies}, args=PRELOAD)


def num_processes(job):
    """How many processes each rank was."""
    return [len(each) for each in job.records("process", 2)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    job = run(tmp_path_factory.mktemp("undisturbed"), "never")
    assert job.code == 0, job.output[-6000:]
    return job


def test_errors_of_other_kinds_end_the_loop():
    assert has_lost_loader_worker(RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "))
    for error in (None, RuntimeError("CUDA error"), ValueError("DataLoader worker (pid 7)")):
        assert not has_lost_loader_worker(error)


@pytest.mark.spawns
@pytest.mark.parametrize("where", ["fetch", "step", "body"])
def test_a_rank_that_loses_a_worker_of_its_loader_is_replaced(where, undisturbed, tmp_path):
    found = run(tmp_path, where)
    assert (found.code, found.num_faults) == (0, 1), found.output[-6000:]
    assert num_processes(found) == [1, 2]
    assert are_same(undisturbed.results(2), found.results(2))


@pytest.mark.spawns
def test_workers_that_are_lost_each_time_end_the_job(tmp_path):
    found = run(tmp_path, "always")
    assert found.code == 1
    of_others, of_lost = num_processes(found)
    assert of_lost >= 3, found.output[-6000:]
    assert of_others <= 2, found.output[-6000:]  # on a busy machine, all may have been started again once before
    # The other way to end: torch reports the next loss by a signal, while the loop is being left for the one before.
    assert "failed 3 times in a row" in found.output or "in handler" in found.output, found.output[-6000:]
