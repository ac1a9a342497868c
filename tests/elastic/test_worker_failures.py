"""What is told of workers that failed."""

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from hyperpod_plugins.elastic.launcher.local_workers import failure_report, root_failures
from hyperpod_plugins.elastic.membership.restart_policy import GAVE_UP, NOT_NEEDED, ExitAction, WorkerExit
from hyperpod_plugins.elastic.store.records import FailureRecord


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


def failed(code=1, *, is_armed=True, has_begun=True, uses_recovery=True, **rest):
    return WorkerExit(code=code, is_armed=is_armed, has_begun=has_begun, uses_recovery=uses_recovery, **rest)


GIVEN_UP = FailureRecord(kind="process", cause="a test", worker_id=3)


@pytest.mark.parametrize(
    ("loss", "over_budget", "exit_action", "why"),
    [
        (failed(), None, ExitAction.REPLACE, ""),
        (failed(-9), None, ExitAction.REPLACE, ""),
        (failed(NOT_NEEDED, has_begun=False), None, ExitAction.REPLACE, ""),
        (failed(), "it was replaced 3 times", ExitAction.END, "replaced 3 times"),
        (failed(are_others_finished=True), None, ExitAction.END, "all others have finished"),
        (failed(are_others_finished=True), "early", ExitAction.END, "early"),
        (failed(given_up=GIVEN_UP), None, ExitAction.END, "the job has given up: worker 3"),
        (failed(is_armed=False, uses_recovery=False), None, ExitAction.END, "no worker takes part in recovery"),
        # a restart of all workers, before there is state to recover
        (failed(is_armed=False), None, ExitAction.RESTART_ALL, ""),
        (failed(-9, is_armed=False, has_begun=False), None, ExitAction.RESTART_ALL, ""),
        (failed(is_armed=False, given_up=GIVEN_UP), None, ExitAction.END, "given up"),
        (failed(is_armed=False, error="ConfigError: wrong"), None, ExitAction.END, "outside of the program's steps"),
        # a node that joined a running job and cannot run its workers is blamed, not the job
        (failed(is_unproven=True), None, ExitAction.REPLACE, ""),
        (failed(is_unproven=True), "early", ExitAction.EXCLUDE, "early"),
        (failed(is_needed=False), "early", ExitAction.EXCLUDE, "early"),
        (failed(has_begun=False, is_unproven=True), None, ExitAction.REPLACE, ""),
        (failed(has_begun=False, is_unproven=True, error="DataError: x"), None, ExitAction.EXCLUDE, "outside of"),
        (failed(is_unproven=True, has_slots=False), "early", ExitAction.END, "early"),
        (failed(GAVE_UP, is_unproven=True), "gave up", ExitAction.END, "gave up"),
        (failed(is_unproven=True, given_up=GIVEN_UP), "early", ExitAction.END, "given up"),
        (failed(is_unproven=True, is_armed=False), None, ExitAction.RESTART_ALL, ""),
    ],
)
def test_what_follows_from_the_failure_of_a_worker(loss, over_budget, exit_action, why):
    found, reason = loss.decide(over_budget)
    assert found is exit_action
    assert why in reason
    assert bool(reason) == (exit_action in (ExitAction.EXCLUDE, ExitAction.END))
