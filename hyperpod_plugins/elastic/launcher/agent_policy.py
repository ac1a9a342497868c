"""What the agent of a node does next: its states, and pure decisions from what it sees, without I/O."""

import enum
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from hyperpod_plugins.elastic.launcher.local_workers import WorkerStatus
from hyperpod_plugins.elastic.membership.restart_policy import GAVE_UP, Remedy, WorkerExit
from hyperpod_plugins.elastic.store.records import FailureRecord


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
    """What an agent does next. The first four change its state; the last three are results for torch's loop."""

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


class ExitAction(enum.Enum):
    """What follows from the failure of a worker."""

    REPLACE = "another process takes its place"
    RESTART = "request a restart of all workers"
    EXCLUDE = "the job continues without the workers of this node"
    STOP = "the job ends"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitView:
    """What an agent sees of a worker that has failed."""

    exit: WorkerExit
    has_slots: bool = True
    """Whether the rendezvous gives each node a slot, which another node can take over."""
    is_unproven: bool = False
    """Whether this node joined a running job, and none of its workers has run past the time for early faults."""
    given_up: FailureRecord | None = None
    """Why the job has given up, if it has."""
    over_budget: str | None = None
    """Why the `RestartBudget` of the worker forbids to replace it, if it does."""
    are_others_finished: bool = False


def exit_action(view: ExitView) -> tuple[ExitAction, str]:
    """Decide what follows, and why the worker is not replaced; the reason is empty for REPLACE and RESTART."""
    loss = view.exit
    is_blamed_on_node = (
        view.given_up is None
        and loss.is_armed
        and view.has_slots
        and (not loss.is_needed or (view.is_unproven and loss.code != GAVE_UP))
    )
    if loss.remedy is Remedy.RESTART_ALL and view.given_up is None and not is_blamed_on_node:
        return ExitAction.RESTART, ""
    refusal = _why_not_replace(view)
    if refusal is None:
        return ExitAction.REPLACE, ""
    return ExitAction.EXCLUDE if is_blamed_on_node else ExitAction.STOP, refusal


def _why_not_replace(view: ExitView) -> str | None:
    loss = view.exit
    if view.given_up is not None:
        return f"the job has given up: {view.given_up}"
    if loss.remedy is Remedy.END and loss.code > 0 and loss.uses_recovery:
        return "it failed on its own outside of the program's steps"
    if not loss.is_armed:
        return (
            "no worker takes part in recovery: the program does not use it, has nothing to recover yet, or is "
            "past its last step"
        )
    if view.over_budget is None and view.are_others_finished:
        return "all others have finished, and a replacement would hang"
    return view.over_budget
