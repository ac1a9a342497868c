"""A worker process of a rank's loader is killed: the rank is replaced, and the job ends with the same bits."""

from pathlib import Path

import pytest
from recovery.faults import PRELOAD, run_job
from torch.utils.data import DataLoader

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
    assert has_lost_loader_worker(EOFError("Caught EOFError in pin memory thread for device 0.\nOriginal Traceback"))
    others = OSError("no space"), ValueError("Caught ValueError in pin memory thread for device 0.")
    for error in (None, RuntimeError("CUDA error"), ValueError("DataLoader worker (pid 7)"), *others):
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
    assert num_processes(found) == [1, 3], found.output[-6000:]
    assert "failed 3 times in a row" in found.output


@pytest.mark.spawns
def test_a_connection_to_a_worker_that_breaks_first(monkeypatch):
    """The worker's end is noted a moment later."""

    def get(*_, **__):
        raise ConnectionResetError(104, "Connection reset by peer")

    batches = iter(DataLoader(range(4), num_workers=1))
    monkeypatch.setattr(batches._data_queue, "get", get)
    with pytest.raises(ConnectionResetError) as raised:
        next(batches)
    monkeypatch.undo()
    assert has_lost_loader_worker(raised.value)
    with pytest.raises(ConnectionResetError) as of_dataset:
        get()
    assert not has_lost_loader_worker(of_dataset.value)
