"""Python attributes that a program changes while it trains, such as a counter in `training_step`.

They are part of what a step computes with, but in no `state_dict`. So a step that is run again must find them as they
were when it began, and a replacement must get those of the process that it replaces. Only objects whose class the
program itself defines are looked at, and the objects that these hold (see `held_objects`): libraries have other ways
to keep their state.

    restored in a process that runs a part again    the same objects, with the contents of containers, tensors, arrays
    sent to the buddy, and given to a replacement   numbers, strings, containers, tensors, arrays, and objects of these

[Note: all or nothing] Attributes of one object belong together: a cached table and its length, for example. If one that
has changed cannot be sent, none of that object's is. A step that has changed such an attribute is refused before it is
committed, by `check`; with `rank_local_state="replica"` a warning says that a replacement has the object as its
constructor made it. An object of the program that has `state_dict` and `load_state_dict` gives these instead.

[Note: names of objects] In another process, an object is the one with the same name: the attributes through which it is
found first. An object that the set-up has made keeps its first values, and only what differs from them is sent. If
another one has taken its place since, all that this one holds is sent, and the other process puts it into its own
object of that name; if it has none, it makes one, without a call of the program's code.
"""

import logging
import pickle
import zlib
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from operator import is_
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from hyperpod_plugins.errors import CheckpointMismatch, ConfigError, StateLost, format_list
from hyperpod_plugins.recovery.attribute_values import (
    ABSENT,
    ARRAYS,
    CONTAINERS,
    DELETED,
    MAX_ENTRIES,
    OWN,
    Contents,
    Copying,
    ModelParameters,
    can_restore,
    class_called,
    contents_of,
    decoded,
    encoded,
    filled,
    is_change_seen,
    is_own,
    is_same,
    num_entries,
    restore_contents,
    text_of,
)
from hyperpod_plugins.recovery.held_objects import (
    INTERNAL,
    MAX_OBJECTS,
    STATE,
    FollowedObject,
    FollowMode,
    SlotAttributes,
    StateCopies,
    can_be_made,
    find_held,
    has_state,
    holds_any,
    is_full,
    is_made_when_read,
    make,
    may_hide,
    may_hold_objects,
    packages_of,
    reader_of,
    set_state,
)
from hyperpod_plugins.recovery.module_settings import KeptModules, ModuleSettings
from hyperpod_plugins.recovery.packing import are_same, pack
from hyperpod_plugins.recovery.program_collectives import is_of_program

_log = logging.getLogger(__name__)
ATTRIBUTES = "attributes"
"""Name under which the attributes of a model's modules are registered."""
_OF_TORCH = "__composable_api_state_key"
"""Prefix of the attributes in which `fully_shard` and its kind keep their own state of a module."""
_TABLES = ("_parameters", "_buffers", "_modules")
_PARAMETER = "parameter"
"""Stands for the class of an object that is a parameter of the model."""
_WHOLE = "__class__"
"""Key beside the attributes of an object all of whose attributes are there; its value is the object's class."""
_UNREADABLE = "unreadable"
_ONLY_WARNED = Dataset, DataLoader, Sampler, Mapping
"""Kinds of objects that may change although they cannot be sent."""
_FIRST_COPIES = 32
_FIRST_ELEMENTS = 2**22
"""In the first copies, so many elements of large tensors are copied that were not written to yet."""
_ELEMENTS = 2**15
"""The same in all later copies."""


def modules_of_program(model: nn.Module) -> list[tuple[str, object]]:
    """Name and object of each module whose class the program defines, except torchmetrics objects."""
    return [
        (f"module {name}".rstrip(), part)
        for name, part in model.named_modules()
        if is_of_program(type(part)) and "_update_count" not in vars(part)
    ]


_Table = MutableMapping[str, Any]
_Place = tuple[str, _Table, str]
"""Name of the owner, one of its tables, and a key in it."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptAttributes:
    """Attributes at one moment; see `PlainAttributes.keep`."""

    held: dict[str, FollowedObject]
    """The objects that were followed."""
    places: list[_Place]
    values: list[Any]
    """The value of each place."""
    contents: dict[int, Contents]
    """Of containers, tensors and arrays, by the index of their place."""
    whole: frozenset[str]
    states: dict[str, Any] = field(default_factory=dict[str, Any])
    """States of generators and of objects with a `state_dict`, by name."""
    modules: KeptModules | None = None
    """The modules that there were."""


class PlainAttributes:
    """The attributes of the program's own objects; a `RankLocalState`. For the main thread only."""

    def __init__(
        self,
        owners: Iterable[tuple[str, object]],
        *,
        ignored: Collection[str] = (),
        model: nn.Module | None = None,
        left_out: Collection[object] = (),
        former: "PlainAttributes | None" = None,
        follows: bool = True,
        settings: ModuleSettings | None = None,
    ) -> None:
        """Start from the present values, which a replacement has too when it gets here.

        Args:
            owners: name and object, the same names on all ranks.
            ignored: names of attributes that a library uses.
            model: whose modules are restored in other ways.
            left_out: other objects that are.
            former: of some of the same objects, whose first values stay.
            follows: whether to follow the objects that they hold.
            settings: of the model's modules.
        """
        self._follows = follows
        self._ignored = INTERNAL | frozenset(ignored)
        self._owners = dict(owners)
        self._roots = [
            FollowedObject(name, each, FollowMode.ATTRIBUTES, (vars(each),), ignored=self._ignored)
            for name, each in self._owners.items()
        ]
        self.settings = settings
        if settings is not None:
            self._roots.append(FollowedObject("setting", settings, FollowMode.ATTRIBUTES, (settings,)))
        self._packages = packages_of(self._owners.values())
        self._model = model
        self._left_out = {id(each): each for each in left_out}
        self._in_model, self._held = dict[int, nn.Module](), dict[str, FollowedObject]()
        self._states: list[FollowedObject] = []
        self._state_copies = StateCopies()
        self._by_state: set[str] = set()
        """Names of the program's objects whose `state_dict` stands for attributes that cannot be sent."""
        self._tables, self._places, self._reads = list[_Table](), list[_Place](), list[Callable[[], Any]]()
        self._num_found = (-1, 0)
        self._first_held, self._first = dict[str, FollowedObject](), dict[tuple[str, str], Any]()
        """The first value of each place, by the names of owner and attribute."""
        self._first_contents: dict[tuple[str, str], Contents] = {}
        self._first_copies: dict[tuple[str, str], Contents] = {}
        """The same of large objects, with copies: they are not compared in each step."""
        self._first_states, self._first_values = dict[str, Any](), list[Any]()
        self._first_of: dict[int, Contents] = {}
        """First values and contents by the index of their place, but for `_whole` objects."""
        self._renamed: set[int] = set()
        """`id`s of the objects that were first found under another name."""
        self._whole: set[str] = set()
        """Names of the objects that have taken the place of others."""
        self._warned, self._unsent = set[str](), list[str]()
        self._seen, self._mutable = list[Any](), list[int]()
        self._copied: dict[int, Contents] = {}
        """The last contents, which serve again while they are the same."""
        self._of_model = ModelParameters(model, _PARAMETER)
        self._parameters: dict[int, tuple[nn.Parameter, str]] = {}
        self._are_parameters_known, self._copying = False, Copying(self._is_parameter)
        self._unchanged_since: KeptAttributes | None = None
        self._num_kept, self._quick_text, self._quick = 0, b"", list[int]()
        self._sent: dict[str, Any] = {}
        self._sent_of: tuple[list[Any], dict[int, Contents]] | None = None
        """What it was made of; None if that does not tell when it changes."""
        self.is_marked = False
        """Whether the end of the set-up has been noted; see `mark_own`."""
        self._marked: dict[str, Any] = {}
        self._at_mark: dict[tuple[str, str], tuple[Any, Contents | None]] = {}
        self._note_first()
        if former is not None:
            self._adopt(former)

    def _note_first(self) -> None:
        """Note the present objects and values as the first ones."""
        self._find()
        values, contents = self._present()
        self._first_held, self._whole = dict(self._held), set()
        keys = [(owner, key) for owner, _, key in self._places]
        self._first = dict(zip(keys, values, strict=True))
        self._first_contents = {keys[index]: each for index, each in contents.items()}
        self._first_states = {each.name: self._state_form(each) for each in self._states}
        self._first_values, self._first_of = values, dict(contents)
        copying = Copying(self._is_parameter, room=_FIRST_ELEMENTS, copies_lists=True)
        self._first_copies = {
            place: contents_of(each.value, copying) for place, each in self._first_contents.items() if each.is_partial
        }

    @property
    def is_empty(self) -> bool:
        """Whether the program defines no such object."""
        return not self._roots

    def is_of(self, owners: Iterable[tuple[str, object]]) -> bool:
        """Whether these are the objects whose attributes are kept."""
        found = dict(owners)
        return found.keys() == self._owners.keys() and all(each is self._owners[name] for name, each in found.items())

    @property
    def held(self) -> dict[str, FollowedObject]:
        """The objects that are restored and sent, by name: another dictionary once others are found."""
        return self._held

    def leave_out(self, value: object) -> None:
        """Note that an object is restored in another way: what it holds is not followed."""
        if id(value) not in self._left_out:
            self._left_out[id(value)] = value
            self._first_held = {name: each for name, each in self._first_held.items() if each.value is not value}
            self._find()

    def keep(self) -> KeptAttributes:
        """The present attributes, to be restored by `put_back`."""
        self._num_kept += 1
        self._copying.room = _FIRST_ELEMENTS if self._num_kept <= _FIRST_COPIES else _ELEMENTS
        if self._num_kept in (1, _FIRST_COPIES + 1):
            large = {index for index, each in self._first_of.items() if each.is_partial}
            # what has not been written to is copied from now on, or no more
            self._copied = {index: each for index, each in self._copied.items() if index not in large}
        values, contents = self._present()
        states = {each.name: self._state_copies.state_of(each) for each in self._states}
        for name in self._by_state & self._held.keys() if self._by_state else ():
            states[name] = self._state_copies.state_of(FollowedObject(name, self._held[name].value, FollowMode.STATE))
        modules = None if self.settings is None else self.settings.kept
        return KeptAttributes(self._held, self._places, values, contents, frozenset(self._whole), states, modules)

    @contextmanager
    def as_kept(self, kept: KeptAttributes) -> Generator[None]:
        """Context in which `state_dict` takes what `keep` has just returned: the program changes nothing meanwhile."""
        self._unchanged_since = kept
        try:
            yield
        finally:
            self._unchanged_since = None

    def put_back(self, kept: KeptAttributes) -> None:
        """Restore all attributes: the same objects, with the contents that were kept."""
        if kept.modules is not None and self.settings is not None:
            self.settings.put_back(kept.modules)
        for name, state in kept.states.items():
            held = kept.held[name]
            set_state(
                held if held.mode is not FollowMode.ATTRIBUTES else FollowedObject(name, held.value, FollowMode.STATE),
                state,
            )
        known = {(id(table), key) for _, table, key in kept.places}
        for _, table, key in [*self._keys_of(kept.held.values())]:
            if (id(table), key) not in known:
                table.pop(key, None)
        for index, (name, table, key) in enumerate(kept.places):
            self._put_back(kept.held[name], table, key, kept.values[index], kept.contents.get(index))
        self._whole = set(kept.whole)
        self._find()

    def can_put_back(self, kept: KeptAttributes) -> bool:
        """Whether `put_back` can restore everything: not the contents of large objects at their first change."""
        return all(map(can_restore, kept.contents.values())) and kept.states.keys() >= self._by_state & kept.held.keys()

    def state_dict(self) -> dict[str, Any]:
        """By owner, the attributes that differ from the first values, encoded; None for one that cannot be sent."""
        values, contents = self._present()
        if self._is_as_sent(values, contents):
            return self._sent
        found: dict[str, dict[str, Any]] = {}
        for index in (changed := self._changed(values, contents)):
            found.setdefault(self._places[index][0], {})[self._places[index][2]] = values[index]
        for name in self._whole:
            found.setdefault(name, {})
        names = self._forms() if found else {}
        found = {owner: self._without_own(owner, each, names) for owner, each in found.items()}
        states = self._states_for(found, names)
        bad = {owner: _unsendable(each, names) for owner, each in found.items()}
        self._warn_of(found, {owner: keys for owner, keys in bad.items() if keys} | self._bad_states(states))
        sent: dict[str, Any] = {
            owner: None if bad[owner] else {key: encoded(value, names) for key, value in each.items()}
            for owner, each in found.items()
        }
        for name in self._whole & found.keys():
            if sent[name] is not None:
                sent[name][_WHOLE] = _name_of(type(self._held[name].value))
        for name, form in states.items():
            sent[name] = None if _is_unreadable(form) else {**(sent.get(name) or {}), STATE: form}
        seen = [contents.get(index, values[index]) for index in changed if values[index] is not ABSENT]
        seen += [each for index, each in contents.items() if each is not self._first_of.get(index)]
        is_seen = not (states or self._states or self._whole) and all(map(is_change_seen, seen))
        self._sent_of, self._sent = (values, contents) if is_seen else None, sent
        return sent

    def _is_as_sent(self, values: list[Any], contents: dict[int, Contents]) -> bool:
        """Whether nothing has changed that the last `state_dict` depends on."""
        before = self._sent_of
        return before is not None and all(map(is_, values, before[0])) and contents == before[1]

    def check(self) -> None:
        """Refuse what the last `state_dict` could not send.

        Raises:
            ConfigError: attributes have changed that cannot be sent.
        """
        if self._unsent:
            raise ConfigError(
                f"{format_list(self._unsent, 8)}: changed while the program trains, and a process that replaces a lost "
                "one would not get it. Only numbers, strings, containers, tensors, arrays, and objects of the program "
                "that consist of these are sent. Keep the value in a buffer (register_buffer) or in an object with "
                "state_dict and load_state_dict; or set it once, before training begins (in __init__, setup or "
                "on_train_start). Modules: create all before training begins, and choose between them in forward. "
                'If no result depends on it, rank_local_state="replica" only warns of it.'
            )

    def load_state_dict(self, state_dict: dict[str, Any], leave: Collection[str] = ()) -> None:
        """Load a `state_dict`; attributes that it does not hold are reset to their first values.

        Attributes in `leave`, and those of owners that could not be sent, stay as they are. Values are written into the
        present objects, so that an object that is reached in two ways is still one object.
        """
        self._present()
        self._note_parameters()
        parameters = {name: each for each, name in self._parameters.values()}
        loading = _Loading(self._held, self._first_held, state_dict, self._packages, parameters)
        given: list[tuple[_Table, str, Any]] = []
        absent: list[tuple[FollowedObject, _Table, str, bool]] = []
        for name, held in loading.owners().items():
            values: dict[str, Any] = state_dict.get(name, {})
            self._note_whole(name, is_whole=_WHOLE in values)
            self._load_state(held, values, leave)
            present = {key: table for _, table, key in self._keys_of([held])}
            first = [] if _WHOLE in values else [key for owner, key in self._first if owner == name]
            absent += [
                (held, present.get(key, held.tables[0]), key, _WHOLE in values)
                for key in {*present, *first}
                if key not in values and _named(name, key) not in leave
            ]
            given += [
                (_table_with(held, key), key, form)
                for key, form in values.items()
                if key not in (_WHOLE, STATE) and _named(name, key) not in leave and self._may_set(held, key)
            ]
        self._held = loading.all()
        for each in absent:
            self._reset(*each)
        for table, key, form in given:
            _load(table, key, form, loading.object_of, self._is_parameter)
        for each in absent:  # objects that are one here, and two in the other process, have been written to twice
            self._reset(*each)
        self._held = loading.all()  # with what was made
        names = self._parameter_forms | {
            id(held.value): ("object", name, _name_of(type(held.value))) for name, held in self._held.items()
        }
        for table, key, form in given:
            if key in table and not is_own(form) and not are_same(encoded(table[key], names), form):
                table[key] = decoded(form, loading.object_of)
        self._find()

    def _note_whole(self, name: str, *, is_whole: bool) -> None:
        """Note whether an object has taken the place of another one in the process whose state is loaded."""
        if is_whole or name not in self._first_held:
            self._whole.add(name)
        else:
            self._whole.discard(name)

    def written(self, before: dict[str, Any], now: dict[str, Any] | None = None) -> set[str]:
        """Attributes, named by owner and name, that differ from `before`, an earlier `state_dict`."""
        present, found = self.state_dict() if now is None else now, set[str]()
        for owner in present.keys() | before.keys():
            new, old = present.get(owner) or {}, before.get(owner) or {}
            for key in new.keys() | old.keys():
                if (key in new) != (key in old) or pack(new[key]) != pack(old[key]):
                    found.add(_named(owner, key))
        return found

    def packed(self) -> dict[str, bytes]:
        """Each attribute that can be sent to another process, packed, by the names of its owner and its own."""
        values, _ = self._present()
        names = self._forms()
        return {
            _named(owner, key): pack(encoded(value, names))
            for (owner, _, key), value in zip(self._places, values, strict=True)
            if value is not ABSENT and num_entries(value, names) <= MAX_ENTRIES
        }

    def places(self) -> dict[str, tuple[object, str]]:
        """Owner and name of each attribute, by the same names as in `packed`."""
        self._present()
        return {
            _named(owner, key): (self._held[owner].value, key)
            for owner, _, key in self._places
            if self._held[owner].mode is FollowMode.ATTRIBUTES
        }

    def fitting(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """All of it; attributes of another job's checkpoint are not loaded at all."""
        return state_dict

    def mark_own(self) -> None:
        """Note what this process's own set-up has written, at its end; see `take_from_replica`."""
        if self.settings is not None:
            self.settings.mark()
        kept, self.is_marked, self._sent_of = self.keep(), True, None
        self._at_mark = {
            (owner, key): (kept.values[index], kept.contents.get(index))
            for index, (owner, _, key) in enumerate(kept.places)
        }
        self._marked = self.state_dict()

    def for_joiner(self) -> dict[str, Any]:
        """What `take_from_replica` takes in another process."""
        return {"present": self.state_dict(), "marked": self._marked}

    def take_from_replica(self, given: dict[str, Any]) -> None:
        """Take over a replica's attributes, except those that this process's set-up has written in another way."""
        theirs = given["marked"]
        leave = {
            _named(owner, key)
            for owner, values in self._marked.items()
            for key, value in (values or {}).items()
            if not are_same(value, (theirs.get(owner) or {}).get(key))
        }
        self.load_state_dict(given["present"], leave)

    # -- objects, places and values -----------------------------------------------------------------------------

    def _is_left_out(self, value: object) -> bool:
        if isinstance(value, nn.Module):
            if id(value) not in self._in_model and self._model is not None:
                self._in_model = {id(each): each for each in self._model.modules()}
            if id(value) in self._in_model:
                return True
        return id(value) in self._left_out

    def _is_parameter(self, value: object) -> bool:
        """Whether a value is a parameter of the model, sharded or gathered: these are restored in other ways."""
        if id(value) not in self._parameters and not self._are_parameters_known and isinstance(value, nn.Parameter):
            self._note_parameters()
        return id(value) in self._parameters

    def _note_parameters(self) -> None:
        self._are_parameters_known = True
        self._parameters, self._parameter_forms = self._of_model.present()

    def _find(self) -> None:
        """Find the objects that are followed, and the places of their attributes."""
        self._unchanged_since = None  # what hooks have written may be undone for a moment
        self._note_parameters()
        is_left_out = self._is_left_out if self._follows else lambda _: True
        held, are_too_many = find_held(self._roots, packages=self._packages, is_left_out=is_left_out)
        if are_too_many and "" not in self._warned:
            self._warned.add("")
            _log.warning("attributes hold more than %d objects of the program; others are not restored", MAX_OBJECTS)
        former = {(owner, id(table), key): index for index, (owner, table, key) in enumerate(self._places)}
        for name, each in held.items():
            present, first = self._held.get(name), self._first_held.get(name)
            if present is not None and present.value is each.value:
                held[name] = present
            elif first is not None and first.value is each.value:
                held[name] = first
                self._whole.discard(name)
            elif self._first_held:
                self._whole.add(name)
        self._whole &= held.keys()
        self._held = held
        first_names = {id(each.value): name for name, each in self._first_held.items()}
        self._renamed = {id(each.value) for name, each in held.items() if first_names.get(id(each.value), name) != name}
        self._states = [each for each in held.values() if each.mode in (FollowMode.GENERATOR, FollowMode.STATE)]
        self._tables = [table for each in held.values() for table in each.tables if not is_full(table)]
        self._places = [(name, table, key) for name, table, key in self._keys_of(held.values())]
        known = {(name, key) for name, _, key in self._places}
        for name, key in self._first:  # attributes that are gone
            if (name, key) not in known and name in held and name not in self._whole:
                self._places.append((name, held[name].tables[0], key))
        self._reads = [reader_of(table, key, ABSENT) for _, table, key in self._places]
        self._first_values = [
            ABSENT if name in self._whole else self._first.get((name, key), ABSENT) for name, _, key in self._places
        ]
        self._first_of = {
            index: contents
            for index, (name, _, key) in enumerate(self._places)
            if name not in self._whole and (contents := self._first_contents.get((name, key))) is not None
        }
        moved = {
            former.get((owner, id(table), key), -1): index for index, (owner, table, key) in enumerate(self._places)
        }
        self._copied = {moved[index]: each for index, each in self._copied.items() if index in moved}
        self._quick, self._sent_of = [], None
        values = [read() for read in self._reads]
        self._num_found = self._num_present(values)
        self._note_mutable(values)

    def _num_present(self, values: list[Any]) -> tuple[int, int]:
        return sum(map(len, self._tables)), sum(map(is_, values, repeat(ABSENT)))

    def _keys_of(self, owners: Iterable[FollowedObject]) -> Iterable[_Place]:
        """The places of all attributes that some objects have now."""
        for each in owners:
            for index, table in enumerate(each.tables):
                for key in [*table]:
                    if (index or each.owns(key)) and not key.startswith(_OF_TORCH):
                        yield each.name, table, key

    def _present(self) -> tuple[list[Any], dict[int, Contents]]:
        """The value of each place, and the contents of containers, tensors and arrays; finds new objects first."""
        if self._unchanged_since is not None:
            return self._unchanged_since.values, self._unchanged_since.contents
        if self.settings is not None and self.settings.follow():
            self._sent_of = None
        self._are_parameters_known = False
        while True:
            values = [read() for read in self._reads]
            is_known = self._num_present(values) == self._num_found
            are_seen = is_known and len(values) == len(self._seen) and all(map(is_, values, self._seen))
            if not is_known or (not are_seen and self._are_other_objects(values)):
                self._find()
                values = [read() for read in self._reads]
            if not are_seen:
                self._note_mutable(values)
            contents, are_others = self._contents_of(values)
            if not are_others:
                return values, contents
            self._find()

    def _are_other_objects(self, values: list[Any]) -> bool:
        """Whether an attribute is another value now, which may be an object, or may have been one."""
        return any(
            may_hold_objects(value) or may_hold_objects(before)
            for value, before in zip(values, self._seen, strict=True)
            if value is not before
        )

    def _note_mutable(self, values: list[Any]) -> None:
        """Note the indices of containers, tensors and arrays."""
        self._seen = values
        kinds = CONTAINERS | ARRAYS
        self._mutable = [
            index for index, value in enumerate(values) if type(value) in kinds and not self._is_parameter(value)
        ]
        self._copied = {index: each for index, each in self._copied.items() if each.value is values[index]}
        if not self._copied.keys() >= set(self._quick):
            self._quick = []

    def _contents_of(self, values: list[Any]) -> tuple[dict[int, Contents], bool]:
        """The contents of containers, tensors and arrays: the last ones where they are the same.

        Those that `marshal` writes are compared in one piece, because each step compares all. Also returns whether a
        container holds other objects than before.
        """
        if not self._mutable:
            return {}, False
        last, are_quick_same, are_others = self._copied, False, False
        if self._quick:
            are_quick_same = text_of([values[index] for index in self._quick]) == self._quick_text
        quick = set(self._quick) if are_quick_same else set[int]()
        copied: dict[int, Contents] = {}
        for index in self._mutable:
            before = last.get(index)
            if before is not None and (index in quick or is_same(before)):
                copied[index] = before
                continue
            if before is not None:
                self._copying.note(before)
            copied[index] = now = contents_of(values[index], self._copying)
            is_plain = before is None or bool(now.text and before.text) or type(before.value) in ARRAYS
            are_others |= not is_plain and _may_have_held(before, values[index])
        self._copied = copied
        if not are_quick_same:
            self._quick = [index for index, each in copied.items() if each.text and type(each.value) in CONTAINERS]
            self._quick_text = text_of([values[index] for index in self._quick])
        return copied, are_others

    def _changed(self, values: list[Any], contents: Mapping[int, Contents]) -> list[int]:
        """Indices of the attributes that differ from the first values."""
        found: list[int] = []
        if not all(map(is_, values, self._first_values)):
            pairs = zip(values, self._first_values, strict=True)
            found = [
                index
                for index, (value, first) in enumerate(pairs)
                if value is not first and not self._stands_for(self._places[index], value, first)
            ]
        for index, each in contents.items():
            first = self._first_of.get(index)
            if each is not first and first is not None and first.value is each.value and not is_same(first):
                found.append(index)
        if self._renamed:
            found += [index for index, value in enumerate(values) if holds_any(value, self._renamed)]
        return sorted({*found})

    def _stands_for(self, place: _Place, value: Any, first: Any) -> bool:
        """Whether an object has taken the place of the first one, and is sent under its name."""
        name = _named(place[0], place[2])
        held, former = self._held.get(name), self._first_held.get(name)
        if held is None or former is None or held.value is not value or former.value is not first:
            return False
        return type(value) is type(first)

    def _forms(self) -> dict[Any, tuple[Any, ...]]:
        """Of each object that another process has, or can make: the form that stands for it, by `id`."""
        roots = {each.name for each in self._roots}
        return self._parameter_forms | {
            id(each.value): ("object", name, _name_of(type(each.value)))
            for name, each in self._held.items()
            if name not in roots
            and (
                (name in self._first_held and type(self._first_held[name].value) is type(each.value))
                or can_be_made(each.value, self._packages)
            )
        }

    def _adopt(self, former: "PlainAttributes") -> None:
        """Take over the first values of the objects that are the same as in another one."""
        same = {
            name
            for name, each in self._first_held.items()
            if name in former._first_held and former._first_held[name].value is each.value
        }
        for name, key in [*self._first]:
            if name in same and (name, key) in former._first:
                self._first[name, key] = former._first[name, key]
                for own, others in (
                    (self._first_contents, former._first_contents),
                    (self._first_copies, former._first_copies),
                ):
                    own.pop((name, key), None)
                    if (name, key) in others:
                        own[name, key] = others[name, key]
        self._first_states |= {name: former._first_states[name] for name in same & former._first_states.keys()}
        self._find()

    # -- values for another process -----------------------------------------------------------------------------

    def _state_form(self, held: FollowedObject) -> Any:
        return self._state_copies.form_of(
            held, lambda state: encoded(state, {}) if num_entries(state) <= MAX_ENTRIES else _unreadable(state)
        )

    def _states_for(self, found: dict[str, dict[str, Any]], names: Collection[int]) -> dict[str, Any]:
        """The states of objects that differ from the first ones; takes attributes for which one stands from `found`."""
        states = {each.name: self._state_form(each) for each in self._states}
        states = {
            name: form
            for name, form in states.items()
            if name in self._whole or not are_same(form, self._first_states.get(name))
        }
        for name, each in found.items():
            held = self._held[name]
            bad = _unsendable(each, names)
            if bad and name not in self._owners and has_state(held.value):
                self._by_state.add(name)
                states[name] = self._state_form(FollowedObject(name, held.value, FollowMode.STATE))
                for key in bad:
                    del each[key]
        return states

    def _bad_states(self, states: dict[str, Any]) -> dict[str, list[str]]:
        return {name: [STATE] for name, form in states.items() if _is_unreadable(form)}

    def _without_own(self, owner: str, values: dict[str, Any], names: Collection[int]) -> dict[str, Any]:
        """The attributes with `OWN` for those that cannot be sent, and are as this process's set-up has left them."""
        for key in _unsendable(values, names):
            value, contents = self._at_mark.get((owner, key), (ABSENT, None))
            is_as_marked = values[key] is value and (contents is None or is_same(contents))
            if is_as_marked or is_made_when_read(type(self._held[owner].value), key):
                values[key] = OWN
        return values

    def _may_set(self, held: FollowedObject, key: Any) -> bool:
        """Whether an attribute may be set: not one of a library, a method or property, or one of a module's tables."""
        if not isinstance(key, str) or key.startswith(_OF_TORCH):
            return False
        if any(key in table for table in held.tables[1:]):
            return True
        if not held.owns(key) or not held.tables:
            return False
        table = held.tables[0]
        if any(isinstance(each, SlotAttributes) and key in each.names for each in held.tables):
            return True
        if any(key in table.get(each, {}) for each in _TABLES if isinstance(held.value, nn.Module)):
            return False
        return key in table or all(may_hide(base, key) for base in type(held.value).__mro__)

    def _put_back(self, held: FollowedObject, table: _Table, key: str, value: Any, contents: Contents | None) -> None:
        if value is ABSENT:
            table.pop(key, None)
        elif self._may_set(held, key):
            table[key] = value
            if contents is not None and not is_same(contents):
                restore_contents(contents)

    def _reset(self, held: FollowedObject, table: _Table, key: str, is_whole: bool) -> None:
        """Give an attribute its first value again; of an object that is given as a whole, remove it."""
        first = ABSENT if is_whole else self._first.get((held.name, key), ABSENT)
        contents = self._first_copies.get((held.name, key), self._first_contents.get((held.name, key)))
        contents = None if is_whole else contents
        known = {id(each.value) for each in (*self._held.values(), *self._first_held.values())} | {*self._parameters}
        if first is ABSENT:
            is_known = is_whole or key not in table or num_entries(table[key], known) <= MAX_ENTRIES
        else:
            is_known = contents is not None or num_entries(first, known) <= MAX_ENTRIES
        if is_known and contents is not None and not can_restore(contents):
            raise StateLost(
                f"{_named(held.name, key)} was changed in place, and there is no copy of its first contents"
            )
        if is_known:
            self._put_back(held, table, key, first, contents)

    def _load_state(self, held: FollowedObject, values: dict[str, Any], leave: Collection[str]) -> None:
        """Load the state of a generator, or of an object with a `state_dict`; the first one if there is none."""
        form = values.get(STATE, self._first_states.get(held.name))
        if form is not None and not _is_unreadable(form) and _named(held.name, STATE) not in leave:
            mode = FollowMode.STATE if held.mode is FollowMode.ATTRIBUTES else held.mode
            set_state(FollowedObject(held.name, held.value, mode), decoded(form, _no_object))

    def _warn_of(self, changed: Mapping[str, dict[str, Any]], bad: Mapping[str, list[str]]) -> None:
        """Note the attributes that another process cannot be given, and name them once."""
        found = {
            f"{key} of {owner} ({type(value).__name__})": value
            for owner, keys in bad.items()
            for key in keys
            for value in (changed.get(owner, {}).get(key, self._held[owner].value),)
        }
        # Data are made again by the program in a replacement; a mapping of its own kind is the output of a model.
        kinds = CONTAINERS | ARRAYS
        self._unsent = [
            text for text, value in found.items() if type(value) in kinds or not isinstance(value, _ONLY_WARNED)
        ]
        exchanged = [] if self.settings is None else self.settings.exchanged
        self._unsent += exchanged
        new = [text for text in (*found, *exchanged) if text not in self._warned]
        self._warned |= {*new}
        if new and not (dist.is_initialized() and dist.get_rank()):
            _log.warning(
                "attributes change while the program trains, and cannot be sent to another process: %s. If a process "
                "is lost, its replacement has the attributes of these objects as they were when training began; after "
                "a return to a snapshot, the others keep later ones. If results depend on them, keep them in buffers, "
                "or register them (register_rank_local)",
                format_list(new, 8),
            )


class _Loading:
    """The objects into which one state is loaded, by name."""

    def __init__(
        self,
        present: Mapping[str, FollowedObject],
        first: Mapping[str, FollowedObject],
        state_dict: Mapping[str, Any],
        packages: frozenset[str],
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        self._present, self._first, self._state_dict, self._packages = present, first, state_dict, packages
        self._parameters = parameters
        self._made: dict[str, FollowedObject] = {}

    def owners(self) -> dict[str, FollowedObject]:
        """Each object whose attributes are loaded or reset; makes those that are missing here."""
        found: dict[str, FollowedObject] = {}
        for name in [*self._first, *(name for name in self._state_dict if name not in self._first)]:
            values = self._state_dict.get(name, {})
            if not isinstance(values, dict):
                continue
            whole = values.get(_WHOLE)
            held = self._first.get(name) if whole is None else self._of_class(name, str(whole))
            if held is not None:
                found[name] = held
        return found

    def all(self) -> dict[str, FollowedObject]:
        """All objects that may stand for a name."""
        return {**self._present, **self._first, **self._made}

    def object_of(self, name: str, cls: str) -> Any:
        """The object with this name, of the class of this full name.

        Raises:
            CheckpointMismatch: there is none, and none can be made.
        """
        if cls == _PARAMETER and name in self._parameters:
            return self._parameters[name]
        values = self._state_dict.get(name)
        is_whole = isinstance(values, dict) and _WHOLE in values
        held = self._of_class(name, cls) if is_whole else self._first.get(name)
        if held is None:
            raise CheckpointMismatch(f"the state of one rank has an object {name!r} of {cls}, which is not here")
        return held.value

    def _of_class(self, name: str, cls: str) -> FollowedObject | None:
        for known in (self._first, self._made, self._present):
            held = known.get(name)
            if held is not None and _name_of(type(held.value)) == cls:
                return held
        kind = class_called(cls)
        made = None if kind is None else make(name, kind, self._packages)
        if made is not None:
            self._made[name] = made
        return made


def _may_have_held(before: Any, value: Any) -> bool:
    """Whether a container holds objects that may be followed, or held them when `before` was kept."""
    return may_hold_objects(value) or any(
        type(each.value) in CONTAINERS and _may_have_held(each, None)
        if isinstance(each, Contents)
        else may_hold_objects(each)
        for each in _entries_of(before)
    )


def _entries_of(contents: Contents) -> list[Any]:
    entries: list[Any] = contents.entries or []
    return [each for _, each in entries] if isinstance(contents.value, dict) else entries


def _table_with(held: FollowedObject, key: str) -> _Table:
    """The table of an object in which an attribute is, or will be."""
    return next((table for table in held.tables[1:] if key in table), held.tables[0])


def _named(owner: str, key: str) -> str:
    return f"{owner}.{key}"


def _name_of(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _unsendable(values: dict[str, Any], names: Collection[int]) -> list[str]:
    """Names of the attributes that cannot be sent."""
    return [key for key, value in values.items() if value is not ABSENT and num_entries(value, names) > MAX_ENTRIES]


def _load(
    table: _Table,
    key: str,
    form: Any,
    object_of: Callable[[str, str], Any],
    is_elsewhere: Callable[[object], bool],
) -> None:
    """Give an attribute a value from another process: into the present object if it is of the same kind."""
    if not is_own(form):
        table[key] = filled(table.get(key), decoded(form, object_of), is_elsewhere)
    elif form == DELETED:
        table.pop(key, None)


def _unreadable(state: Any) -> tuple[str, int]:
    """Stands for a state that another process cannot read; tells whether it has changed, where that can be seen."""
    try:
        return _UNREADABLE, zlib.crc32(pickle.dumps(state))
    except (pickle.PicklingError, AttributeError, TypeError):
        return _UNREADABLE, 0


def _is_unreadable(form: Any) -> bool:
    return isinstance(form, tuple) and form[:1] == (_UNREADABLE,)


def _no_object(name: str, cls: str) -> Any:
    raise CheckpointMismatch(f"the state of one rank has an object {name!r} of {cls} where none can be")
