"""Places for nodes: who holds which, and what a node does that wants one; pure.

A job has as many slots as nodes took part when it began, and one more for each node that comes later to a program that
grows. A slot has the same places for workers (see `world.py`) for as long as it lasts. A node holds a slot while its
heart beats. One that has fallen silent is vacant, and whoever leases it next counts the claim.
"""

import enum
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from hyperpod_plugins.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPolicy:
    """How many nodes take part, and how long to wait for them; torch's names for the same are in `--rdzv-conf`."""

    min_nodes: int
    """Fewest nodes to begin with."""
    max_nodes: int
    """Most nodes; with so many a round begins at once."""
    join_timeout_s: float = 600.0
    """Longest wait for enough nodes (`join_timeout`)."""
    last_call_s: float = 30.0
    """Wait for more nodes once there are enough (`last_call_timeout`)."""
    heartbeat_s: float = 1.0
    """Time between two heartbeats (`keep_alive_interval`)."""
    answer_s: float = 60.0
    """Longest silence of the store that a node rides out (`read_timeout`)."""
    max_missed_heartbeats: float = 5
    """Looks, `beat_s` apart, at the same heartbeat that show a loss (`keep_alive_max_attempt`)."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ConfigError(
                f"--nnodes={self.min_nodes}:{self.max_nodes} is not possible. Give MIN:MAX with MIN >= 1."
            )
        positive = self.join_timeout_s, self.heartbeat_s, self.max_missed_heartbeats, self.answer_s
        if not (min(positive) > 0 and self.last_call_s >= 0 and all(map(math.isfinite, positive))):
            raise ConfigError(
                f"join_timeout={self.join_timeout_s}, keep_alive_interval={self.heartbeat_s}, keep_alive_max_attempt="
                f"{self.max_missed_heartbeats} and read_timeout={self.answer_s} of --rdzv-conf must be positive, and "
                f"last_call_timeout={self.last_call_s} not negative."
            )


def policy_from(options: Mapping[str, Any], min_nodes: int, max_nodes: int) -> SlotPolicy:
    """The policy that `--rdzv-conf` and `--nnodes` ask for; what else `options` holds is for others.

    Raises:
        ConfigError: something impossible.
    """
    names = {
        "join_timeout": "join_timeout_s",
        "last_call_timeout": "last_call_s",
        "keep_alive_interval": "beat_s",
        "keep_alive_max_attempt": "max_missed_beats",
        "read_timeout": "answer_s",
    }
    try:
        given = {name: float(options[theirs]) for theirs, name in names.items() if theirs in options}
    except ValueError as error:
        raise ConfigError(f"{', '.join(names)} of --rdzv-conf must be numbers: {error}") from None
    return SlotPolicy(min_nodes=min_nodes, max_nodes=max_nodes, **given)


class LeaseState(enum.Enum):
    """What a slot's last lease permits."""

    HELD = "its node is alive: nobody else may claim the slot"
    VACANT = "its node is gone, or has left: anybody may claim the slot"
    DONE = "its workers have come to a good end: nobody will need the slot"
    STAYS = "so they have, and its agent starts them again where those of all nodes start again"

    @property
    def is_done(self) -> bool:
        """Whether the workers have come to a good end."""
        return self in (LeaseState.DONE, LeaseState.STAYS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLease:
    """The last word on a slot."""

    node: str
    """Name of the node that holds it, or held it last."""
    number: int = 0
    """Leases of this slot before: 0 for the founder's."""
    state: LeaseState = LeaseState.HELD

    def to_json(self) -> str:
        """One line of JSON, the same for equal claims."""
        return json.dumps({**asdict(self), "holding": self.state.name})

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Inverse of `to_json`.

        Raises:
            ValueError: the text is that of no claim.
        """
        match json.loads(text):
            case {"node": str(node), "number": int(number), "holding": str(state)} if state in LeaseState.__members__:
                return cls(node=node, number=number, state=LeaseState[state])
            case values:
                raise ValueError(f"this is no claim of a slot: {values!r:.100}")

    def with_state(self, state: LeaseState) -> Self:
        """The same lease, with another word on it."""
        return replace(self, state=state)

    def next(self, node: str) -> Self:
        """The lease of whoever takes the slot after this one."""
        return replace(self, node=node, number=self.number + 1, state=LeaseState.HELD)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeAssignment:
    """The slot that a node got in a round."""

    number: int
    """Of the round."""
    slot: int
    num_slots: int
    lease: SlotLease
    predecessor: str = ""
    """Who held it before; empty for a founder."""
    is_new: bool = False
    """Whether nobody held it before, and the job was running."""
    ranks: range = range(0)
    """Places of its workers; none before they are about to start."""
    incarnation: int = 0
    """Number of those workers in their places."""

    @property
    def reporter(self) -> str:
        """How its agent signs what it reports."""
        return f"agent of node {self.slot}"


class JoinStep(enum.Enum):
    """What a node does that wants a slot."""

    WAIT = "look again in a moment"
    PROPOSE = "propose to begin with the nodes that are here"
    ENTER = "begin in the slot that one was given"
    CLAIM = "take a slot over while the others go on"
    ADD = "take a slot that there was not yet, while the others go on"
    RENEW = "have all nodes begin again, for the running program cannot take newcomers in"
    REFUSE = "the others are done, and would not hear of a newcomer"


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousView:
    """What a node sees that wants a slot."""

    node: str
    """Its own name."""
    candidates: tuple[str, ...] = ()
    """Nodes that are here, in the order in which they came."""
    called_s: float = 0.0
    """Seconds since this node saw that they are enough."""
    are_all_back: bool = False
    """Whether a member has ended the round before, and all its nodes are here that have not been lost."""
    leases: tuple[SlotLease, ...] | None = None
    """The slots; None before the round has begun."""
    has_entered: bool = False
    """Whether workers of this node have run in this round."""
    can_absorb: bool = False
    """Whether the running program takes newcomers in, for those that are lost."""
    can_grow: bool = False
    """Whether it takes in others, too."""
    has_trained: bool = False
    """Whether it has trained in this round, and what it trained has come to its end."""
    is_ending: bool = False
    """Whether a member wants all nodes to begin again, those whose workers are done too."""

    @property
    def own_slot(self) -> int | None:
        """The slot that this node holds."""
        for slot, lease in enumerate(self.leases or ()):
            if lease.node == self.node and lease.state is LeaseState.HELD:
                return slot
        return None


@dataclass(frozen=True, slots=True)
class Decision:
    """A step, and the slot that it is about."""

    step: JoinStep
    slot: int = -1


def next_step(view: RendezvousView, policy: SlotPolicy) -> Decision:
    """Decide; the table of cases is in `tests/elastic/test_slots.py`."""
    if view.leases is None:
        return Decision(JoinStep.PROPOSE if _is_time(view, policy) else JoinStep.WAIT)
    if view.is_ending:
        return Decision(JoinStep.RENEW)
    slot = view.own_slot
    if slot is not None and not view.has_entered:
        return Decision(JoinStep.ENTER, slot)
    if slot is None:
        vacant = (number for number, lease in enumerate(view.leases) if lease.state is LeaseState.VACANT)
        slot = next(vacant, None)
    if slot is None:
        if len(view.leases) >= policy.max_nodes or _some_are_done(view.leases):
            return Decision(JoinStep.WAIT)
        if not view.can_absorb:  # one more node is no reason to run again what has ended
            return Decision(JoinStep.WAIT if view.has_trained else JoinStep.RENEW)
        return Decision(JoinStep.ADD, len(view.leases)) if view.can_grow else Decision(JoinStep.WAIT)
    if _some_are_done(view.leases):
        return Decision(JoinStep.REFUSE, slot)
    return Decision(JoinStep.CLAIM if view.can_absorb else JoinStep.RENEW, slot)


def initial_nodes(candidates: Sequence[str], policy: SlotPolicy) -> tuple[str, ...]:
    """Who gets which slot when a round begins: those who came first, in the order of their names' first part, the host.

    So the ranks of a host are the same each time, wherever the scheduler starts the same hosts.
    """
    return tuple(sorted(candidates[: policy.max_nodes], key=lambda node: node.partition("/")[0]))


def watched(nodes: Sequence[str], node: str, count: int = 3) -> list[str]:
    """Whose hearts a node listens to: those that come after it, all around.

    So each is heard by several others, however many there are; and where those are lost together with it, by others
    as soon as they are off the list.
    """
    start = nodes.index(node) + 1 if node in nodes else 0
    return [each for each in (*nodes[start:], *nodes[:start]) if each != node][:count]


def _is_time(view: RendezvousView, policy: SlotPolicy) -> bool:
    here = len(view.candidates)
    is_called = view.called_s >= policy.last_call_s or view.are_all_back
    return here >= policy.max_nodes or (here >= policy.min_nodes and is_called)


def _some_are_done(leases: tuple[SlotLease, ...]) -> bool:
    return any(lease.state.is_done for lease in leases)


@dataclass(slots=True)
class LivenessTracker:
    """Who has fallen silent, counted in one's own looks.

    So no clock of another machine is asked, and a pause of the reader itself, who then looks once and not five times,
    takes nobody for dead.
    """

    max_missed: float
    _seen: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    def look(self, heartbeats: Mapping[str, int]) -> None:
        """Take in the heartbeats counted so far, of exactly the nodes that matter now."""
        seen: dict[str, tuple[int, int]] = {}
        for node, count in heartbeats.items():
            last, missed = self._seen.get(node, (-1, 0))
            seen[node] = (count, missed + 1 if count == last else 0)
        self._seen = seen

    def is_lost(self, node: str) -> bool:
        """Whether a node's heart has not beaten for too many looks."""
        return self._seen.get(node, (-1, 0))[1] >= self.max_missed
