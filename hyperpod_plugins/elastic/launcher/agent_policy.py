"""What the agent of a node does next: its states, and pure decisions from what it sees, without I/O."""

import enum
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from hyperpod_plugins.elastic.launcher.local_workers import WorkerStatus


class AgentState(enum.Enum):
    """State of an agent, which determines what may happen to its workers."""

    RUNNING = "lost workers are replaced"
    DRAINING = "the node leaves: exits are recorded, lost workers are not replaced, the job continues without them"
    RELEASED = "the job needs no worker of this node: they are ended, and their exits do not count"
    EXCLUDED = "the workers of this node fail at startup and are not replaced, but it may still serve the store"
    RESTARTING = "all workers of the job restart: those of this node are killed, and their exits do not count"
    STOPPING = "the whole job ends: exits are reported to the user only"

    @property
    def counts_exits(self) -> bool:
        """Whether the failure of a worker matters to the job or to the user."""
        return self in (AgentState.RUNNING, AgentState.DRAINING, AgentState.STOPPING)

    @property
    def may_restart(self) -> bool:
        """Whether the agent follows another node's request to restart all workers."""
        return self in (AgentState.RUNNING, AgentState.DRAINING, AgentState.RELEASED)


class AgentAction(enum.Enum):
    """What an agent does next: it waits, changes its state, or gives torch's loop a result (the last three)."""

    WAIT = "workers run, or this node serves the store of a running job"
    RELEASE = "the job has succeeded while the workers of this node waited to be taken in: kill them"
    STOP = "another node has ended the job: end it here too"
    RESTART = "another node has requested a restart of all workers: take part"
    FAIL = "this node has failed"
    SUCCEED = "the workers of this node are done, or no longer needed"
    BEGIN_ROUND = "all workers are to be started again"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentView:
    """What an agent sees."""

    state: AgentState
    statuses: AbstractSet[WorkerStatus] = frozenset({WorkerStatus.RUNNING})
    """The statuses that occur among the workers of this node."""
    is_stop_requested: bool = False
    is_restart_requested: bool = False
    ended_without_this_node: bool = False
    """Whether the job has succeeded while the workers of this node waited to be taken in."""
    serves_store: bool = False
    is_over: bool = False
    """Whether the job has ended or its store is lost."""
    is_success: bool = False
    """Whether the job has ended with success."""


_RELEASED = (AgentState.RELEASED, AgentState.EXCLUDED, AgentState.RESTARTING)
"""States in which the workers of this node are ended already, or are about to be."""


def next_agent_action(view: AgentView) -> AgentAction:
    """Decide what to do next."""
    state = view.state
    if state is AgentState.STOPPING:
        return AgentAction.FAIL
    if view.ended_without_this_node and state not in _RELEASED:
        return AgentAction.RELEASE
    if view.is_stop_requested:
        return AgentAction.STOP
    if view.is_restart_requested and state.may_restart:
        return AgentAction.RESTART
    if state is AgentState.RESTARTING:
        return AgentAction.BEGIN_ROUND
    if state is AgentState.EXCLUDED:
        if view.serves_store and not view.is_over:
            return AgentAction.WAIT
        return AgentAction.SUCCEED if view.serves_store and view.is_success else AgentAction.FAIL
    final = {WorkerStatus.DONE, WorkerStatus.LOST} if state is AgentState.RELEASED else {WorkerStatus.DONE}
    return AgentAction.SUCCEED if view.statuses <= final else AgentAction.WAIT
