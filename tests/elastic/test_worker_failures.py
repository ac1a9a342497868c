"""What is told of workers that failed."""

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from hyperpod_plugins.elastic.launcher.local_workers import failure_report, root_failures


def failure(pid, message):
    """The record of a failure, all of them within one second, as torch counts."""
    record = ProcessFailure(local_rank=0, pid=pid, exitcode=1, error_file="")
    record.timestamp = 1
    record.message = message
    return record


LOST = {"message": "PeerLost: the process groups of this rank are broken", "extraInfo": {"py_callstack": "callstack 0"}}
OWN = {"message": "RuntimeError: fault", "extraInfo": {"py_callstack": "callstack 1"}}


def test_a_worker_that_failed_because_another_ended_is_not_told_of():
    failures = {0: failure(10, LOST), 1: failure(11, OWN)}
    assert [*root_failures(failures)] == [1]
    told = failure_report(ChildFailedError("train.py", failures))
    assert told.startswith("Rank 1 failed first:\n\ncallstack 1\n")
    assert "PeerLost" not in told


def test_where_all_failed_with_a_peer_all_are_told_of():
    failures = {0: failure(10, LOST), 1: failure(11, LOST)}
    assert [*root_failures(failures)] == [0, 1]
    assert failure_report(ChildFailedError("train.py", failures)).startswith("Rank 0 failed first:\n\ncallstack 0\n")


def test_a_message_without_an_exception_is_one_of_its_own():
    failures = {0: failure(10, LOST), 1: failure(11, "Signal 9 (SIGKILL) received by PID 11")}
    assert [*root_failures(failures)] == [1]
