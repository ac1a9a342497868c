"""What an agent does next, as tables of cases."""

import pytest

from hyperpod_plugins.elastic import FailureRecord
from hyperpod_plugins.elastic.launcher.agent_policy import (
    AgentAction,
    AgentState,
    AgentView,
    ExitAction,
    ExitView,
    exit_action,
    next_agent_action,
)
from hyperpod_plugins.elastic.launcher.local_workers import WorkerStatus
from hyperpod_plugins.elastic.membership.restart_policy import GAVE_UP, NOT_NEEDED, WorkerExit

RUNNING, DRAINING, RELEASED = AgentState.RUNNING, AgentState.DRAINING, AgentState.RELEASED
EXCLUDED, RESTARTING, STOPPING = AgentState.EXCLUDED, AgentState.RESTARTING, AgentState.STOPPING
WORK, DONE, LOST = WorkerStatus.RUNNING, WorkerStatus.DONE, WorkerStatus.LOST


def view(state, statuses=(WORK,), **rest):
    return AgentView(state=state, statuses=frozenset(statuses), **rest)


STOP, RESTART = {"is_stop_requested": True}, {"is_restart_requested": True}
OVER = {"ended_without_this_node": True, "is_over": True, "is_success": True}


@pytest.mark.parametrize(
    ("seen", "action"),
    [
        (view(RUNNING), AgentAction.WAIT),
        (view(RUNNING, [WORK, DONE]), AgentAction.WAIT),
        (view(RUNNING, [DONE]), AgentAction.SUCCEED),
        (view(RUNNING, [DONE, LOST]), AgentAction.WAIT),  # its replacement has not been requested yet
        (view(DRAINING, [DONE]), AgentAction.SUCCEED),
        (view(DRAINING, [LOST]), AgentAction.WAIT),  # the job may still need it, until its world changes
        (view(RELEASED, [WORK, LOST]), AgentAction.WAIT),
        (view(RELEASED, [DONE, LOST]), AgentAction.SUCCEED),
        (view(RESTARTING, [DONE]), AgentAction.BEGIN_ROUND),
        (view(STOPPING, [DONE]), AgentAction.FAIL),
        # what other nodes have decided
        (view(RUNNING, **STOP), AgentAction.STOP),
        (view(RUNNING, **RESTART), AgentAction.RESTART),
        (view(RUNNING, [DONE], **RESTART), AgentAction.RESTART),
        (view(DRAINING, **RESTART), AgentAction.RESTART),
        (view(RELEASED, **RESTART), AgentAction.RESTART),
        (view(RUNNING, **STOP, **RESTART), AgentAction.STOP),
        (view(RESTARTING, **STOP), AgentAction.STOP),
        (view(RESTARTING, **RESTART), AgentAction.BEGIN_ROUND),
        (view(EXCLUDED, serves_store=True, **RESTART), AgentAction.WAIT),
        (view(EXCLUDED, serves_store=True, **STOP), AgentAction.STOP),
        (view(STOPPING, **STOP, **RESTART), AgentAction.FAIL),
        # the job succeeds while the workers of this node wait to be taken in
        (view(RUNNING, **OVER), AgentAction.RELEASE),
        (view(DRAINING, **OVER), AgentAction.RELEASE),
        (view(RUNNING, **OVER, **RESTART), AgentAction.RELEASE),
        (view(RELEASED, [LOST], **OVER), AgentAction.SUCCEED),
        (view(STOPPING, **OVER), AgentAction.FAIL),
        # a node without workers
        (view(EXCLUDED, [LOST]), AgentAction.FAIL),
        (view(EXCLUDED, [LOST], is_over=True, is_success=True), AgentAction.FAIL),  # it has left
        (view(EXCLUDED, [LOST], serves_store=True), AgentAction.WAIT),
        (view(EXCLUDED, [LOST], serves_store=True, is_over=True), AgentAction.FAIL),
        (view(EXCLUDED, [LOST], serves_store=True, is_over=True, is_success=True), AgentAction.SUCCEED),
    ],
)
def test_what_an_agent_does_next(seen, action):
    assert next_agent_action(seen) is action


@pytest.mark.parametrize(
    ("state", "counts_exits", "may_restart"),
    [
        (RUNNING, True, True),
        (DRAINING, True, True),
        (RELEASED, False, True),
        (EXCLUDED, False, False),
        (RESTARTING, False, False),
        (STOPPING, True, False),
    ],
)
def test_what_each_state_permits(state, counts_exits, may_restart):
    assert (state.counts_exits, state.may_restart) == (counts_exits, may_restart)


def failed(code=1, *, is_armed=True, has_begun=True, uses_recovery=True, is_needed=True, error="", **rest):
    loss = WorkerExit(
        code=code,
        is_armed=is_armed,
        has_begun=has_begun,
        uses_recovery=uses_recovery,
        is_needed=is_needed,
        error=error,
    )
    return ExitView(exit=loss, **rest)


GIVEN_UP = FailureRecord(kind="process", cause="a test", worker_id=3)


@pytest.mark.parametrize(
    ("seen", "action", "why"),
    [
        (failed(), ExitAction.REPLACE, ""),
        (failed(-9), ExitAction.REPLACE, ""),
        (failed(NOT_NEEDED, has_begun=False), ExitAction.REPLACE, ""),
        (failed(over_budget="it was replaced 3 times"), ExitAction.STOP, "replaced 3 times"),
        (failed(are_others_finished=True), ExitAction.STOP, "all others have finished"),
        (failed(over_budget="early", are_others_finished=True), ExitAction.STOP, "early"),
        (failed(given_up=GIVEN_UP), ExitAction.STOP, "the job has given up: worker 3"),
        (failed(is_armed=False, uses_recovery=False), ExitAction.STOP, "no worker takes part in recovery"),
        # a restart of all workers, before there is state to recover
        (failed(is_armed=False), ExitAction.RESTART, ""),
        (failed(-9, is_armed=False, has_begun=False), ExitAction.RESTART, ""),
        (failed(is_armed=False, given_up=GIVEN_UP), ExitAction.STOP, "given up"),
        (failed(is_armed=False, error="ConfigError: wrong"), ExitAction.STOP, "outside of the program's steps"),
        # a node that joined a running job and cannot run its workers is blamed, not the job
        (failed(is_unproven=True), ExitAction.REPLACE, ""),
        (failed(is_unproven=True, over_budget="early"), ExitAction.EXCLUDE, "early"),
        (failed(is_needed=False, over_budget="early"), ExitAction.EXCLUDE, "early"),
        (failed(has_begun=False, is_unproven=True), ExitAction.REPLACE, ""),
        (failed(has_begun=False, is_unproven=True, error="DataError: x"), ExitAction.EXCLUDE, "outside of the program"),
        (failed(is_unproven=True, over_budget="early", has_slots=False), ExitAction.STOP, "early"),
        (failed(GAVE_UP, is_unproven=True, over_budget="gave up"), ExitAction.STOP, "gave up"),
        (failed(is_unproven=True, over_budget="early", given_up=GIVEN_UP), ExitAction.STOP, "given up"),
        (failed(is_unproven=True, is_armed=False), ExitAction.RESTART, ""),
    ],
)
def test_what_follows_from_the_failure_of_a_worker(seen, action, why):
    found, reason = exit_action(seen)
    assert found is action
    assert why in reason
    assert bool(reason) == (action in (ExitAction.EXCLUDE, ExitAction.STOP))
