"""What a replacement would read of a rank's state besides its tensors, read in this process instead.

Each object is set back to what it was when training began, loads what a replacement would be sent, and must hold the
same bits again:

    rank-local state             buffers, metrics, attributes and logged values, as the buddy keeps them
    objects with a `state_dict`  the program's own callbacks, and objects that it has registered
    other values of the loop     only written and read: a replacement loads them as it enters the loop

[Note: what is set back] Of an object with a `state_dict`, these are its Python attributes that are numbers, strings,
containers or small tensors: `load_state_dict` must restore those that the state is made of. Another object that it has
made for itself stays, with all that it holds. An attribute that is not part of the state may be of no importance, such
as the time of the last step, so it is only warned of.
"""

import logging
import pickle
from collections.abc import Callable, Mapping
from pathlib import PosixPath, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful

from hyperpod_plugins.errors import format_list
from hyperpod_plugins.recovery.attributes import PlainAttributes, is_of_program
from hyperpod_plugins.recovery.buffer_states import BufferStates
from hyperpod_plugins.recovery.local_state import ProgramState, RankLocalState
from hyperpod_plugins.recovery.packing import pack, unpack
from hyperpod_plugins.recovery.protocols import TrainingLoop
from hyperpod_plugins.recovery.state_digests import differing_names, entry_digests, local_digests, steady_digests

_log = logging.getLogger(__name__)
_OF_LIGHTNING = ("log", "log_dict")
"""Attributes that Lightning gives to callbacks."""


def _with_paths(data: bytes) -> Any:
    with torch.serialization.safe_globals([PosixPath, PurePosixPath]):
        return unpack(data, map_location=None)


class StateReadBack:
    """Reads back the state of one rank besides its tensors."""

    def __init__(self, loop: TrainingLoop) -> None:
        """Note what the program's objects hold now: it is what they are set back to."""
        self._loop = loop
        registered = {name: each.stateful for name, each in self._local.items() if isinstance(each, ProgramState)}
        self._objects = {**loop.own_objects(), **registered}
        self._attributes = {
            name: PlainAttributes([(name, each)], ignored=_OF_LIGHTNING)
            for name, each in self._objects.items()
            if is_of_program(type(each)) and isinstance(getattr(each, "__dict__", None), dict)
        }
        self._first = {name: each.keep() for name, each in self._attributes.items()}
        self._warned: set[str] = set()

    def differing(self) -> set[str]:
        """Names of what a replacement would not hold with the same bits, each beginning with its kind."""
        found: set[str] = set()
        for name, value in self._loop.present_values().items():
            data = _written(value, _with_paths)
            again = {"": ""} if data is None else _with_paths(data)
            found |= differing_names(entry_digests(name, value), entry_digests(name, again))
        states = {name: each for name, each in self._local.items() if name not in self._objects}
        present = {name: each.state_dict() for name, each in states.items()}
        again = {name: _reloaded(each, present[name]) for name, each in states.items()}
        found |= differing_names(local_digests(present), local_digests(again))
        not_restored: list[str] = []
        for name, each in self._objects.items():
            names, attributes = self._reload(name, each)
            found |= names
            not_restored += attributes
        self._warn_of(not_restored)
        return found

    @property
    def _local(self) -> Mapping[str, RankLocalState]:
        states = self._loop.rank_local_states
        return {} if states is None else states.objects

    def _reload(self, name: str, each: Stateful) -> tuple[set[str], list[str]]:
        """Let an object load its own state. Names of what differs, and of attributes that it has not restored."""
        values = each.state_dict()
        copy = _StateCopy(values, unpack if name in self._local else _with_paths)
        if copy.unreadable or not values:  # `load_state_dict` need not accept what is left
            return {each for key in copy.unreadable for each in entry_digests(f"{name}.{key}", values[key])}, []
        before = steady_digests(lambda: entry_digests(name, each.state_dict()))
        attributes = self._attributes.get(name, PlainAttributes(()))
        kept, held = attributes.keep(), attributes.packed()
        attributes.put_back(self._first.get(name, kept))
        try:
            copy.load_into(each)
            after = steady_digests(lambda: entry_digests(name, each.state_dict()))
            restored = attributes.packed()
        finally:
            attributes.put_back(kept)
        return differing_names(before, after), [key for key in held if restored.get(key) != held[key]]

    def _warn_of(self, names: list[str]) -> None:
        new = [name for name in names if name not in self._warned]
        self._warned |= {*new}
        if new and not (dist.is_initialized() and dist.get_rank()):
            _log.warning(
                "rehearsal: %s changed since training began, and load_state_dict() does not restore it. A replacement "
                "has it as its constructor makes it. If results depend on it, add it to state_dict()",
                format_list(new, 8),
            )


class _StateCopy:
    """The entries of a state that another process can read, as it would read them."""

    def __init__(self, values: dict[str, Any], read: Callable[[bytes], Any]) -> None:
        self._read = read
        written = {key: _written(value, read) for key, value in values.items()}
        self._data = {key: data for key, data in written.items() if data is not None}
        self.unreadable = values.keys() - self._data.keys()
        """Names of the other entries."""

    def load_into(self, state: RankLocalState | Stateful) -> None:
        """Let an object load them."""
        state.load_state_dict({key: self._read(data) for key, data in self._data.items()})


def _written(value: Any, read: Callable[[bytes], Any]) -> bytes | None:
    """The bytes of a value; None if it cannot be written, or not be read."""
    try:
        data = pack(value)
        read(data)
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError):  # no importable name
        return None
    return data


def _reloaded(state: RankLocalState, values: dict[str, Any]) -> dict[str, Any]:
    """The state of an object that was set back, and has loaded `values` as another process would read them."""
    kept, copy = state.keep() if isinstance(state, PlainAttributes) else None, _StateCopy(values, unpack)
    if isinstance(state, BufferStates):
        state.overwrite(values)
    state.load_state_dict({})
    copy.load_into(state)
    found = {key: value for key, value in state.state_dict().items() if key not in copy.unreadable}
    if isinstance(state, PlainAttributes) and kept is not None:
        state.put_back(kept)  # the same objects as before, to which others may refer
    return found
