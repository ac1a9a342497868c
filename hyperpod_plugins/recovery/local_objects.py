"""Objects with state that belongs to a rank, as `LocalStates` keeps it: the interfaces, and objects of the program."""

import pickle
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, runtime_checkable

from torch.distributed.checkpoint.stateful import Stateful
from torch.utils._pytree import tree_map

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.recovery.held_objects import forget_step
from hyperpod_plugins.recovery.packing import are_same, copied_leaf, on_devices_of, pack, unpack


class RankLocalState(Protocol):
    """An object with rank-local state."""

    def state_dict(self) -> dict[str, Any]:
        """Copies of tensors, plain containers, numbers and strings; empty for no state. Must not communicate."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], leave: Collection[str] = ()) -> None:
        """Load a `state_dict`; parts whose names are in `leave` stay as they are."""
        ...

    def written(self, before: dict[str, Any], now: dict[str, Any] | None = None) -> set[str]:
        """Names of the parts in which `now`, or the present state, differs from `before`, an earlier `state_dict`.

        Empty if such parts cannot be left out when a state is loaded.
        """
        ...

    def fitting(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The part of a `state_dict` of another job, perhaps of another program, that this object can load."""
        ...


@runtime_checkable
class ReplicatedState(RankLocalState, Protocol):
    """Rank-local state that a joiner first gets from the rank that gives it its parameters.

    It continues with that where its buddy does not have the state of its predecessor.
    """

    def for_joiner(self) -> dict[str, Any]:
        """What `take_from_replica` takes in another process."""
        ...

    def take_from_replica(self, given: dict[str, Any]) -> None:
        """Take over the state of a replica."""
        ...

    def leave_out(self, value: object) -> None:
        """Note that an object's state is kept by another one."""
        ...

    def check(self) -> None:
        """Refuse what the last `state_dict` could not contain, if there is any: raise `ConfigError`."""
        ...


class ProgramState:
    """An object of the program with rank-local state."""

    def __init__(self, name: str, stateful: Stateful) -> None:
        """Wrap an object.

        Raises:
            ConfigError: its state holds Python objects that another process would have to unpickle.
        """
        self.stateful = stateful
        self.begins_empty = is_metric(stateful)
        """Whether a rank without a predecessor begins with an empty state."""
        try:
            unpack(pack(stateful.state_dict()))
        except pickle.UnpicklingError:
            raise ConfigError(
                f"the state of {name!r} ({type(stateful).__name__}) holds Python objects that a replacement process "
                "would have to unpickle, which runs code. Return only tensors, plain containers, numbers and strings "
                "from state_dict."
            ) from None

    def state_dict(self) -> dict[str, Any]:
        """The object's state, with copies of tensors on the CPU."""
        return {"state": tree_map(copied_leaf, self.stateful.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any], leave: Collection[str] = ()) -> None:
        """Load a copy of a `state_dict`, since the object may keep and change what it is given; ignore an empty one.

        Tensors are on the devices of the present ones: some objects (metrics) keep those that they are given.
        """
        if state_dict and "state" not in leave:
            copied = tree_map(copied_leaf, state_dict["state"])
            forget_step(self.stateful)
            self.stateful.load_state_dict(on_devices_of(self.stateful.state_dict(), copied))

    def written(self, before: dict[str, Any], now: dict[str, Any] | None = None) -> set[str]:
        """The state as a whole, if it differs."""
        return set() if are_same(self.state_dict() if now is None else now, before) else {"state"}

    def fitting(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """All of it: the program's own `load_state_dict` decides."""
        return state_dict


def is_metric(value: object) -> bool:
    """Whether an object is a metric of torchmetrics, which need not be installed."""
    return any(kind.__module__.partition(".")[0] == "torchmetrics" for kind in type(value).__mro__)


class AgreedParts:
    """The parts of states that code after a commit was found to write, and that two ranks agreed on at the next vote.

    If such code writes them once more, the two are expected to agree again; of other parts nothing is known.
    """

    _WHOLE_STATE = "the state as a whole"
    """Stands for the parts of a state that is written in one piece."""
    _MAX_NOTED = 16
    """Number of commits after which writes are noted; not more, because each takes a comparison of all parts."""

    def __init__(self) -> None:
        """Know of none."""
        self._written: dict[str, set[str]] = {}
        """Those written since the last commit, by the name of the state."""
        self._agreed: dict[str, set[str]] = {}
        self._num_noted = 0

    def note_written(
        self,
        states: Mapping[str, RankLocalState],
        present: Mapping[str, dict[str, Any]],
        since: Mapping[str, dict[str, Any]],
    ) -> None:
        """Note what code after a commit has written, as the next step begins.

        Args:
            states: those to look at.
            present: what they are.
            since: what they were at the commit.
        """
        if self._num_noted >= self._MAX_NOTED:
            return
        for name, state in states.items():
            now, before = present.get(name, {}), since.get(name, {})
            if not are_same(now, before):
                self._written[name] = state.written(before, now) or {self._WHOLE_STATE}
        self._num_noted += bool(self._written)

    def note_vote(
        self,
        states: Mapping[str, RankLocalState],
        present: Mapping[str, dict[str, Any]],
        read_other: Callable[[], Mapping[str, dict[str, Any]]],
    ) -> None:
        """Note on which of these the two ranks agree at the vote that follows.

        Args:
            states: as in `note_written`, or more.
            present: what they are.
            read_other: returns those of the other rank; empty if they are not known.
        """
        if not self._written:
            return
        others = read_other()
        for name, parts in self._written.items() if others else ():
            own, other = present.get(name, {}), others.get(name, {})
            differing = set[str]() if are_same(own, other) else states[name].written(other, own) or parts
            self._agreed[name] = (self._agreed.get(name, set()) | parts) - differing
        self.forget_written()

    def forget_written(self) -> None:
        """Forget what was written since the last commit."""
        self._written = {}

    def holds(self, name: str, parts: set[str]) -> bool:
        """Whether the ranks have agreed on all these parts of a state."""
        return self._agreed.get(name, set()) >= (parts or {self._WHOLE_STATE})
