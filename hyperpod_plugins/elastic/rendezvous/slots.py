"""Slots of nodes: their leases, the step that a node takes to get one, and which nodes count as lost; pure.

A job has one slot for each initial node, and one more for each node that joins an elastic job later. The worker_ids
of a slot (see `store/world.py`) follow from its number and never change. A node holds its slot as long as it sends
heartbeats. The slot of a silent node becomes vacant; the lease of the node that takes it over has the next number.
"""

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from hyperpod_plugins.elastic.store.records import JsonRecord
from hyperpod_plugins.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPolicy:
    """How many nodes take part, and how long to wait for them. Names in parentheses are torch's, in `--rdzv-conf`."""

    min_nodes: int
    """Minimum number of nodes to start a round."""
    max_nodes: int
    """Maximum number of nodes; with this many a round starts at once."""
    join_timeout_s: float = 600.0
    """Longest wait in seconds for `min_nodes` nodes (`join_timeout`)."""
    last_call_s: float = 30.0
    """Seconds to wait for more nodes once there are enough (`last_call_timeout`)."""
    heartbeat_s: float = 1.0
    """Seconds between two heartbeats (`keep_alive_interval`)."""
    answer_s: float = 60.0
    """Longest silence of the store in seconds that a node tolerates (`read_timeout`)."""
    max_missed_heartbeats: float = 5
    """Consecutive looks, `heartbeat_s` apart, without a new heartbeat that show a loss (`keep_alive_max_attempt`)."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ConfigError(
                f"--nnodes={self.min_nodes}:{self.max_nodes} is invalid. Give MIN:MAX with 1 <= MIN <= MAX."
            )
        positive = self.join_timeout_s, self.heartbeat_s, self.max_missed_heartbeats, self.answer_s
        if not (min(positive) > 0 and self.last_call_s >= 0 and all(map(math.isfinite, positive))):
            raise ConfigError(
                f"join_timeout={self.join_timeout_s}, keep_alive_interval={self.heartbeat_s}, keep_alive_max_attempt="
                f"{self.max_missed_heartbeats} and read_timeout={self.answer_s} of --rdzv-conf must be positive, and "
                f"last_call_timeout={self.last_call_s} not negative."
            )


def policy_from(options: Mapping[str, Any], min_nodes: int, max_nodes: int) -> SlotPolicy:
    """Make the policy from `--rdzv-conf` and `--nnodes`; other entries of `options` are ignored.

    Raises:
        ConfigError: a value is invalid.
    """
    names = {
        "join_timeout": "join_timeout_s",
        "last_call_timeout": "last_call_s",
        "keep_alive_interval": "heartbeat_s",
        "keep_alive_max_attempt": "max_missed_heartbeats",
        "read_timeout": "answer_s",
    }
    try:
        given = {name: float(options[theirs]) for theirs, name in names.items() if theirs in options}
    except ValueError as error:
        raise ConfigError(f"{', '.join(names)} of --rdzv-conf must be numbers: {error}") from None
    return SlotPolicy(min_nodes=min_nodes, max_nodes=max_nodes, **given)


class LeaseState(enum.Enum):
    """State of a slot's last lease."""

    HELD = "its node is alive: no other node may take the slot"
    VACANT = "its node is lost or has left: any node may take the slot"
    DONE = "its workers have succeeded: the slot is no longer needed"
    DONE_RESTARTABLE = "its workers have succeeded, and its agent restarts them if all nodes restart"

    @property
    def is_done(self) -> bool:
        """Whether the workers of the slot have succeeded."""
        return self in (LeaseState.DONE, LeaseState.DONE_RESTARTABLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLease(JsonRecord):
    """The last lease of a slot."""

    node: str
    """Name of the node that holds it, or held it last."""
    number: int = 0
    """Number of earlier leases of this slot: 0 for the initial node's."""
    state: LeaseState = LeaseState.HELD

    def with_state(self, state: LeaseState) -> Self:
        """The same lease in another state."""
        return replace(self, state=state)

    def next(self, node: str) -> Self:
        """The lease of the node that takes the slot after this one."""
        return replace(self, node=node, number=self.number + 1, state=LeaseState.HELD)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeAssignment:
    """The slot of a node in a round."""

    round_number: int
    """Number of the round."""
    slot: int
    num_slots: int
    lease: SlotLease
    predecessor: str = ""
    """Node that held the slot before; empty for an initial node and for a new slot."""
    is_new: bool = False
    """Whether the slot was added to the running job."""
    worker_ids: range = range(0)
    """The worker_ids of its workers; empty until they are about to start."""
    incarnation: int = 0
    """Incarnation of these workers."""

    @property
    def reporter(self) -> str:
        """Name of its agent as the reporter of failures."""
        return f"agent of node {self.slot}"


_FORMER_S = 30.0
"""How much longer than the last call a round waits for nodes of the one before it, which still end their workers."""


class JoinStep(enum.Enum):
    """What a node that wants a slot does next."""

    WAIT = "look again in a moment"
    PROPOSE = "propose to start the round with the present nodes"
    ENTER = "start in its assigned slot"
    TAKE_OVER = "take over a vacant slot while the others keep running"
    ADD = "add a slot while the others keep running"
    NEW_ROUND = "request a new round, as the running program cannot take joiners in"
    REFUSE = "give up, as other nodes are done and would not notice a joiner"


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousView:
    """State of a round as seen by a node that wants a slot."""

    node: str
    """Name of this node."""
    candidates: tuple[str, ...] = ()
    """Present nodes, in the order of arrival."""
    called_s: float = 0.0
    """Seconds since this node saw `min_nodes` candidates."""
    are_all_back: bool = False
    """Whether a worker requested the end of the previous round and all its surviving nodes are present."""
    awaits_former: bool = False
    """Whether a node of the previous round is neither present, nor silent, nor has left."""
    leases: tuple[SlotLease, ...] | None = None
    """Leases of the slots, by slot; None before the round has started."""
    has_entered: bool = False
    """Whether workers of this node have run in this round."""
    can_absorb: bool = False
    """Whether the running program can take in replacements of lost workers."""
    can_grow: bool = False
    """Whether it can also take in additional workers."""
    has_trained: bool = False
    """Whether the program trained in this round and that training has ended."""
    restart_requested: bool = False
    """Whether a worker requests a restart of all nodes, including those whose workers are done."""

    @property
    def own_slot(self) -> int | None:
        """The slot that this node holds, or None."""
        for slot, lease in enumerate(self.leases or ()):
            if lease.node == self.node and lease.state is LeaseState.HELD:
                return slot
        return None


@dataclass(frozen=True, slots=True)
class Decision:
    """A step and its slot; -1 if the step has none."""

    step: JoinStep
    slot: int = -1


def next_step(view: RendezvousView, policy: SlotPolicy) -> Decision:
    """Decide the next step of a node that wants a slot; `tests/elastic/test_slots.py` has a table of the cases."""
    if view.leases is None:
        return Decision(JoinStep.PROPOSE if _is_time(view, policy) else JoinStep.WAIT)
    if view.restart_requested:
        return Decision(JoinStep.NEW_ROUND)
    slot = view.own_slot
    if slot is not None and not view.has_entered:
        return Decision(JoinStep.ENTER, slot)
    if slot is None:
        vacant = (number for number, lease in enumerate(view.leases) if lease.state is LeaseState.VACANT)
        slot = next(vacant, None)
    if slot is None:
        if len(view.leases) >= policy.max_nodes or _some_are_done(view.leases):
            return Decision(JoinStep.WAIT)
        if not view.can_absorb:  # one more node is no reason to repeat training that has ended
            return Decision(JoinStep.WAIT if view.has_trained else JoinStep.NEW_ROUND)
        return Decision(JoinStep.ADD, len(view.leases)) if view.can_grow else Decision(JoinStep.WAIT)
    if _some_are_done(view.leases):
        return Decision(JoinStep.REFUSE, slot)
    return Decision(JoinStep.TAKE_OVER if view.can_absorb else JoinStep.NEW_ROUND, slot)


def initial_nodes(candidates: Sequence[str], policy: SlotPolicy) -> tuple[str, ...]:
    """The initial nodes of a round, by slot: the first candidates, sorted by host name.

    Sorting gives a host the same ranks each time the scheduler starts the same hosts.
    """
    return tuple(sorted(candidates[: policy.max_nodes], key=lambda node: node.partition("/")[0]))


def members_of(leases: Sequence[SlotLease] | None) -> list[str]:
    """The nodes that hold slots of a round and restart with it; none before it has started."""
    states = LeaseState.HELD, LeaseState.DONE_RESTARTABLE
    return [lease.node for lease in leases or () if lease.state in states]


def watched_peers(nodes: Sequence[str], node: str, count: int = 3) -> list[str]:
    """The nodes whose heartbeats a node watches: its `count` successors on a ring.

    So several nodes watch each one, whatever the number of nodes. If a node is lost together with all its watchers,
    others take over as soon as the watchers are off the list.
    """
    start = nodes.index(node) + 1 if node in nodes else 0
    return [each for each in (*nodes[start:], *nodes[:start]) if each != node][:count]


def _is_time(view: RendezvousView, policy: SlotPolicy) -> bool:
    here = len(view.candidates)
    # Without the former nodes, a node that restarts them would start alone, and they would do the same to it.
    last_call_s = policy.last_call_s + (_FORMER_S if view.awaits_former else 0.0)
    is_called = view.called_s >= last_call_s or view.are_all_back
    return here >= policy.max_nodes or (here >= policy.min_nodes and is_called)


def _some_are_done(leases: tuple[SlotLease, ...]) -> bool:
    return any(lease.state.is_done for lease in leases)


@dataclass(slots=True)
class LivenessTracker:
    """Finds silent nodes by counting looks without a new heartbeat.

    Counting needs no clock of another machine. After a pause of the reader itself, which then looks once and not five
    times, no node is taken for lost.
    """

    max_missed: float
    """Number of such looks in a row that show a loss."""
    _seen: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    def update(self, heartbeats: Mapping[str, int]) -> None:
        """Record the present heartbeat counts of exactly the nodes that are watched now."""
        seen: dict[str, tuple[int, int]] = {}
        for node, count in heartbeats.items():
            last, missed = self._seen.get(node, (-1, 0))
            seen[node] = (count, missed + 1 if count == last else 0)
        self._seen = seen

    def is_lost(self, node: str) -> bool:
        """Whether a node has missed too many heartbeats."""
        return self._seen.get(node, (-1, 0))[1] >= self.max_missed
