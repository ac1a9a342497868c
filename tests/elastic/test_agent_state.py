"""What an agent does next, as tables of cases."""

from types import SimpleNamespace

import pytest
from torch.distributed import DistNetworkError
from torch.distributed.elastic.agent.server import SimpleElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from hyperpod_plugins.elastic.launcher.agent import HyperPodAgent
from hyperpod_plugins.elastic.launcher.agent_state import (
    AgentAction,
    AgentState,
    AgentView,
    next_agent_action,
)
from hyperpod_plugins.elastic.launcher.local_workers import WorkerStatus

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


def test_a_store_that_is_lost_as_workers_are_about_to_start_is_reported_in_words(monkeypatch):
    def lose(*_):
        raise DistNetworkError("Connection reset by peer")

    monkeypatch.setattr(SimpleElasticAgent, "_invoke_run", lose)
    agent = object.__new__(HyperPodAgent)
    agent.node = SimpleNamespace(
        handler=SimpleNamespace(loss=lambda error: RendezvousConnectionError(f"lost: {error}"))
    )
    with pytest.raises(RendezvousConnectionError, match="lost: Connection reset"):
        agent._invoke_run()
