"""Python attributes that a program changes while it trains, such as a counter in `training_step`.

They are part of what a step computes with, but in no `state_dict`. So a step that is run again must find them as they
were when it began, and a replacement must get those of the process that it replaces. Only objects whose class the
program itself defines are looked at; libraries have other ways to keep their state.

    restored in a process that runs a part again    the same objects, with the contents of containers, tensors, arrays
    sent to the buddy, and given to a replacement   numbers, strings, and containers, tensors, arrays of up to 1,024

[Note: all or nothing] Attributes of one object belong together: a cached table and its length, for example. If one that
has changed cannot be sent, none of that object's is: a replacement then has the object as its constructor made it, and
a warning says so.
"""

import logging
import marshal
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import repeat
from operator import is_
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from hyperpod_plugins.errors import format_list
from hyperpod_plugins.recovery.packing import are_same, pack
from hyperpod_plugins.recovery.program_collectives import is_library

_log = logging.getLogger(__name__)
ATTRIBUTES = "attributes"
"""Name under which the attributes of a model's modules are registered."""
MAX_ENTRIES = 1024
"""Most numbers, strings, containers and elements of tensors in an attribute whose contents are kept, or that is sent.

Of a larger list or dictionary, only what was added is taken away again.
"""
_MAX_TEXT = 2**12
_TEXTS = frozenset({str, bytes})
_SCALARS = frozenset({bool, int, float, str, bytes, type(None)})
_LISTS = frozenset({list, deque})
_DICTS = frozenset({dict, OrderedDict, Counter, defaultdict})
_ARRAYS = frozenset({torch.Tensor, np.ndarray})
_CONTAINERS = frozenset({*_LISTS, *_DICTS, set, tuple})
_MUTABLE = frozenset({*_LISTS, *_DICTS, *_ARRAYS, set})
_WRITTEN_QUICKLY = frozenset({list, dict, set})
_KINDS: dict[str, Any] = {
    each.__name__: each for each in (list, tuple, set, deque, dict, OrderedDict, Counter, defaultdict)
}
_DICT_NAMES = frozenset(each.__name__ for each in _DICTS)
_FACTORIES = {each.__name__: each for each in (int, float, str, bool, list, dict, set)}
_INTERNAL = frozenset(vars(nn.Module()))
_OF_TORCH = "__composable_api_state_key"
"""Prefix of the attributes in which `fully_shard` and its kind keep their own state of a module."""
_TABLES = ("_parameters", "_buffers", "_modules")
_ABSENT = object()
_DELETED, _OWN = ("deleted",), ("own",)
"""Forms of an attribute that is gone, and of one that the set-up of each process makes, such as an open file."""


def is_of_program(cls: type) -> bool:
    """Whether the program defines this class, or one that it derives from."""
    return not all(is_library(base.__module__) for base in cls.__mro__)


def modules_of_program(model: nn.Module) -> list[tuple[str, object]]:
    """Name and object of each module whose class the program defines, except torchmetrics objects."""
    return [
        (f"module {name}".rstrip(), part)
        for name, part in model.named_modules()
        if is_of_program(type(part)) and "_update_count" not in vars(part)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class _Contents:
    """The contents of a container, tensor or array at one moment."""

    value: Any
    """The object."""
    size: int
    """Its length; of a tensor, its version."""
    entries: Any
    """Of a container, a `_Contents` or the value of each entry (of a dictionary, pairs); of others a copy.

    None if they are not kept: they are too large, or cannot be copied.
    """
    text: bytes = b""
    """The contents as `marshal` writes them, which is quickly compared; empty if it does not."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptAttributes:
    """Attributes at one moment; see `PlainAttributes.keep`."""

    values: list[Any]
    contents: dict[int, _Contents]
    """Of containers, tensors and arrays, by the index of their place."""


class PlainAttributes:
    """The attributes of the program's own objects; a `RankLocalState`. For the main thread only."""

    def __init__(
        self,
        owners: Iterable[tuple[str, object]],
        *,
        ignored: Collection[str] = (),
        former: "PlainAttributes | None" = None,
    ) -> None:
        """Start from the present values, which a replacement has too when it gets here.

        Args:
            owners: name and object, the same names on all ranks.
            ignored: names of attributes that a library uses.
            former: of some of the same objects, whose first values stay.
        """
        self._ignored = _INTERNAL | frozenset(ignored)
        self._owners = dict(owners)
        self._tables = [vars(each) for each in self._owners.values()]
        self._places: list[tuple[str, dict[str, Any], str]] = []
        self._num_found = (-1, 0)
        self._first: list[Any] = []
        """The first value of each place."""
        self._warned: set[str] = set()
        self._seen: list[Any] = []
        self._mutable: list[int] = []
        self._copied: dict[int, _Contents] = {}
        """The last contents, which serve again while they are the same."""
        self._quick: list[int] = []
        self._quick_text = b""
        self._marked: dict[str, Any] = {}
        self._at_mark: dict[tuple[str, str], tuple[Any, _Contents | None]] = {}
        self._first = self._values()
        self._first_contents = self._contents_of(self._first)
        if former is not None:
            self._adopt(former)

    @property
    def is_empty(self) -> bool:
        """Whether the program defines no such object."""
        return not self._owners

    def is_of(self, owners: Iterable[tuple[str, object]]) -> bool:
        """Whether these are the objects whose attributes are kept."""
        found = dict(owners)
        return found.keys() == self._owners.keys() and all(each is self._owners[name] for name, each in found.items())

    def keep(self) -> KeptAttributes:
        """The present attributes, to be restored by `put_back`."""
        values = self._values()
        return KeptAttributes(values, self._contents_of(values))

    def put_back(self, kept: KeptAttributes) -> None:
        """Restore all attributes: the same objects, with the contents that were kept."""
        self._values()  # finds attributes that are new
        for index in range(len(self._places)):
            value = kept.values[index] if index < len(kept.values) else _ABSENT
            self._put_back(index, value, kept.contents.get(index))

    def state_dict(self) -> dict[str, Any]:
        """By owner, the attributes that differ from the first values, encoded; None for one that cannot be sent."""
        values = self._values()
        found: dict[str, dict[str, Any]] = {}
        for index in self._changed(values):
            owner, _, key = self._places[index]
            found.setdefault(owner, {})[key] = values[index]
        found = {owner: self._without_own(owner, each) for owner, each in found.items()}
        self._warn_of(found)
        return {
            owner: None if _unsendable(each) else {key: _encoded(value) for key, value in each.items()}
            for owner, each in found.items()
        }

    def load_state_dict(self, state_dict: dict[str, Any], leave: Collection[str] = ()) -> None:
        """Load a `state_dict`; attributes that it does not hold are reset to their first values.

        Attributes in `leave`, and those of owners that could not be sent, stay as they are. Values are written into the
        present objects, so that an object that is reached in two ways is still one object.
        """
        self._values()
        absent = [
            index
            for index, (owner, _, key) in enumerate(self._places)
            if isinstance(values := state_dict.get(owner, {}), dict)
            and key not in values
            and _named(owner, key) not in leave
        ]
        given = [
            (vars(owner), key, form)
            for name, values in state_dict.items()
            if (owner := self._owners.get(name)) is not None and isinstance(values, dict)
            for key, form in values.items()
            if _named(name, key) not in leave and self._may_set(owner, key)
        ]
        for index in absent:
            self._reset(index)
        for table, key, form in given:
            _load(table, key, form)
        for index in absent:  # objects that are one here, and two in the other process, have been written to twice
            self._reset(index)
        for table, key, form in given:
            if key in table and not _is_own(form) and not are_same(_encoded(table[key]), form):
                table[key] = _decoded(form)

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
        values = self._values()  # finds new places
        return {
            _named(owner, key): pack(_encoded(value))
            for (owner, _, key), value in zip(self._places, values, strict=True)
            if value is not _ABSENT and _num_entries(value) <= MAX_ENTRIES
        }

    def places(self) -> dict[str, tuple[object, str]]:
        """Owner and name of each attribute, by the same names as in `packed`."""
        self._values()  # finds new places
        return {_named(owner, key): (self._owners[owner], key) for owner, _, key in self._places}

    def fitting(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """All of it; attributes of another job's checkpoint are not loaded at all."""
        return state_dict

    def mark_own(self) -> None:
        """Note what this process's own set-up has written, at its end; see `take_from_replica`."""
        kept = self.keep()
        places = zip(self._places, kept.values, strict=True)
        self._at_mark = {
            (owner, key): (value, kept.contents.get(index)) for index, ((owner, _, key), value) in enumerate(places)
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

    def _without_own(self, owner: str, values: dict[str, Any]) -> dict[str, Any]:
        """The attributes with `_OWN` for those that cannot be sent, and are as this process's set-up has left them."""
        for key in _unsendable(values):
            value, contents = self._at_mark.get((owner, key), (_ABSENT, None))
            if values[key] is value and (contents is None or _is_same(contents)):
                values[key] = _OWN
        return values

    def _adopt(self, former: "PlainAttributes") -> None:
        places = {(name, key): index for index, (name, _, key) in enumerate(former._places)}
        for index, (name, table, key) in enumerate(self._places):
            before = places.get((name, key))
            if before is not None and former._places[before][1] is table:
                self._first[index] = former._first[before]
                self._first_contents.pop(index, None)
                if before in former._first_contents:
                    self._first_contents[index] = former._first_contents[before]

    def _values(self) -> list[Any]:
        """The value of each place; finds new places first."""
        values = [table.get(key, _ABSENT) for _, table, key in self._places]
        num_found = sum(map(len, self._tables)), sum(map(is_, values, repeat(_ABSENT)))
        if num_found == self._num_found:
            return values
        self._num_found = num_found
        known = {(owner, key) for owner, _, key in self._places}
        new = [
            (name, vars(owner), key)
            for name, owner in self._owners.items()
            for key in vars(owner)
            if key not in self._ignored and (name, key) not in known and not key.startswith(_OF_TORCH)
        ]
        self._places += new
        self._first += [_ABSENT] * len(new)
        return values + [table[key] for _, table, key in new]

    def _mutable_in(self, values: list[Any]) -> list[int]:
        """Indices of containers, tensors and arrays."""
        if len(values) != len(self._seen) or not all(map(is_, values, self._seen)):
            self._seen = values
            kinds = _CONTAINERS | _ARRAYS
            self._mutable = [index for index, value in enumerate(values) if type(value) in kinds]
            self._copied = {index: each for index, each in self._copied.items() if each.value is values[index]}
            if not self._copied.keys() >= set(self._quick):
                self._quick = []
        return self._mutable

    def _contents_of(self, values: list[Any]) -> dict[int, _Contents]:
        """The contents of containers, tensors and arrays: the last ones where they are the same.

        Those that `marshal` writes are compared in one piece, because each step compares all.
        """
        mutable = self._mutable_in(values)
        if not mutable:
            return {}
        last, are_quick_same = self._copied, False
        if self._quick:
            are_quick_same = _text_of([values[index] for index in self._quick]) == self._quick_text
        quick = set(self._quick) if are_quick_same else set[int]()
        self._copied = {
            index: last[index]
            if index in quick or (index in last and _is_same(last[index]))
            else _contents(values[index])
            for index in mutable
        }
        if not are_quick_same:
            self._quick = [index for index, each in self._copied.items() if each.text]
            self._quick_text = _text_of([values[index] for index in self._quick])
        return self._copied

    def _changed(self, values: list[Any]) -> list[int]:
        """Indices of the attributes that differ from the first values."""
        found: list[int] = []
        if not all(map(is_, values, self._first)):
            pairs = zip(values, self._first, strict=True)
            found = [index for index, (value, first) in enumerate(pairs) if value is not first]
        for index, contents in self._contents_of(values).items():
            first = self._first_contents.get(index)
            if contents is not first and first is not None and first.value is contents.value and not _is_same(first):
                found.append(index)
        return sorted(found)

    def _may_set(self, owner: Any, key: Any) -> bool:
        """Whether an attribute may be set: not one of a library, a method or property, or one of a module's tables."""
        table = vars(owner)
        if not isinstance(key, str) or key in self._ignored or any(key in table.get(each, {}) for each in _TABLES):
            return False
        if key.startswith(_OF_TORCH):
            return False
        return key in table or all(_may_hide(base, key) for base in type(owner).__mro__)

    def _put_back(self, index: int, value: Any, contents: _Contents | None) -> None:
        name, table, key = self._places[index]
        if value is _ABSENT:
            table.pop(key, None)
        elif self._may_set(self._owners[name], key):
            table[key] = value
            if contents is not None and not _is_same(contents):
                _restore(contents)

    def _reset(self, index: int) -> None:
        first, contents = self._first[index], self._first_contents.get(index)
        _, table, key = self._places[index]
        if first is _ABSENT:
            is_known = key not in table or _num_entries(table[key]) <= MAX_ENTRIES
        else:
            is_known = type(first) in _SCALARS or (contents is not None and _num_entries(first) <= MAX_ENTRIES)
        if is_known:
            self._put_back(index, first, contents)

    def _warn_of(self, changed: dict[str, dict[str, Any]]) -> None:
        """Name, once, the attributes that another process cannot be given."""
        bad = {owner: _unsendable(each) for owner, each in changed.items() if owner not in self._warned}
        bad = {owner: names for owner, names in bad.items() if names}
        self._warned |= bad.keys()
        if bad and not (dist.is_initialized() and dist.get_rank()):
            _log.warning(
                "attributes change while the program trains, and cannot be sent to another process: %s. Only numbers, "
                "strings, and containers, tensors and arrays of at most %d of them are. If a process is lost, its "
                "replacement has the attributes of these objects as they were when training began; after a return to a "
                "snapshot, the others keep later ones. If results depend on them, keep them in buffers, or register "
                "them (register_rank_local)",
                format_list(
                    (
                        f"{each} of {owner} ({type(changed[owner][each]).__name__})"
                        for owner in bad
                        for each in bad[owner]
                    ),
                    8,
                ),
                MAX_ENTRIES,
            )


def _may_hide(cls: type, key: str) -> bool:
    """Whether an attribute may hide one of its class: only a value that the program begins with, such as `n = 0`."""
    if key not in vars(cls):
        return True
    return not is_library(cls.__module__) and not {"__get__", "__set__"} & {*dir(type(vars(cls)[key]))}


def _named(owner: str, key: str) -> str:
    return f"{owner}.{key}"


def _unsendable(values: dict[str, Any]) -> list[str]:
    """Names of the attributes that cannot be sent."""
    return [key for key, value in values.items() if value is not _ABSENT and _num_entries(value) > MAX_ENTRIES]


def _num_entries(value: Any, depth: int = 0) -> int:
    """Numbers, strings, containers and elements of tensors; more than `MAX_ENTRIES` if there is anything else."""
    kind, too_many = type(value), MAX_ENTRIES + 1
    if kind in _SCALARS:
        return too_many if kind in _TEXTS and len(value) > _MAX_TEXT else 1
    if kind is torch.Tensor:
        return max(1, value.numel()) if _is_plain_tensor(value.detach()) else too_many
    if kind is np.ndarray:
        return max(1, value.size) if _is_plain_array(value) else too_many
    if kind is defaultdict and value.default_factory not in (None, *_FACTORIES.values()):
        return too_many
    if kind not in _CONTAINERS or len(value) > MAX_ENTRIES or depth > 8:  # a cyclic one has no end
        return too_many
    total = 1
    for each in (*value, *value.values()) if kind in _DICTS else value:
        total += _num_entries(each, depth + 1)
        if total > MAX_ENTRIES:
            break
    return total


def _is_plain_tensor(value: torch.Tensor) -> bool:
    """Whether a tensor has values that can be copied, and memory that can be written to."""
    is_usual = value.layout is torch.strided and not (value.is_quantized or value.is_meta or value.is_inference())
    return is_usual and value.is_contiguous()


def _is_plain_array(value: np.ndarray[Any, Any]) -> bool:
    is_usual = value.dtype.kind in "biuf" and value.dtype.itemsize <= 8 and value.dtype.isnative
    return is_usual and value.flags.writeable and value.flags.c_contiguous


# In this process: contents are restored in the objects themselves.


def _contents(value: Any, depth: int = 0) -> Any:
    """The contents of a container, tensor or array; any other value as it is."""
    kind = type(value)
    if kind is torch.Tensor:
        is_kept = not value.requires_grad and _is_plain_tensor(value) and value.numel() <= MAX_ENTRIES
        version = 0 if value.is_inference() else value._version  # pyright: ignore[reportPrivateUsage]
        return _Contents(value, version, value.clone() if is_kept else None)
    if kind is np.ndarray:
        is_kept = _is_plain_array(value) and value.size <= MAX_ENTRIES
        return _Contents(value, value.size, value.copy() if is_kept else None)
    if kind not in _CONTAINERS:
        return value
    if len(value) > MAX_ENTRIES or depth > 8:
        return _Contents(value, len(value), None)
    if kind in _DICTS:
        entries: Any = [(key, _contents(each, depth + 1)) for key, each in value.items()]
    else:
        entries = [_contents(each, depth + 1) for each in value]
    return _Contents(value, len(value), entries, b"" if depth else _text_of(value))


def _text_of(value: Any) -> bytes:
    """What `marshal` writes for a container of numbers and strings; empty for anything else."""
    try:
        return marshal.dumps(value, 2) if type(value) in _WRITTEN_QUICKLY else b""
    except ValueError:
        return b""


def _is_same(contents: Any, value: Any = _ABSENT) -> bool:
    """Whether an object still has its contents; `value`: what stands in its place now."""
    if not isinstance(contents, _Contents):
        return contents is value or (type(contents) in _SCALARS and type(value) is type(contents) and contents == value)
    owner, entries = contents.value, contents.entries
    if value is not _ABSENT and value is not owner:
        return False
    if type(owner) is torch.Tensor:
        is_same = owner.is_inference() or owner._version == contents.size  # pyright: ignore[reportPrivateUsage]
        return is_same or (entries is not None and are_same(owner, entries))
    if type(owner) is np.ndarray:
        return entries is None or (owner.shape == entries.shape and owner.tobytes() == entries.tobytes())
    if len(owner) != contents.size or entries is None:
        return len(owner) == contents.size
    if contents.text and _text_of(owner) == contents.text:
        return True
    if type(owner) in _DICTS:
        pairs = zip(entries, owner.items(), strict=True)
        return all(before[0] == now[0] and _is_same(before[1], now[1]) for before, now in pairs)
    return all(map(_is_same, entries, owner))


def _restore(contents: Any) -> Any:
    """Give an object its contents again, in place; returns the object."""
    if not isinstance(contents, _Contents):
        return contents
    value, entries = contents.value, contents.entries
    kind = type(value)
    if kind in _ARRAYS:
        if entries is not None:
            _write(value, entries)
    elif entries is None:
        while len(value) > contents.size and kind in _LISTS | _DICTS:  # what was added last
            value.popitem() if kind in _DICTS else value.pop()
    else:
        restored = [(key, _restore(each)) for key, each in entries] if kind in _DICTS else [*map(_restore, entries)]
        if kind is not tuple:
            value.clear()
            (value.extend if kind in _LISTS else value.update)(restored if kind is not Counter else dict(restored))
    return value


def _write(value: Any, contents: Any) -> None:
    """Set the elements of a tensor or array, and its shape."""
    if type(value) is torch.Tensor:
        with torch.no_grad():
            if value.shape == contents.shape:
                value.copy_(contents)
            else:
                value.data = contents.clone()
    else:
        value.resize(contents.shape, refcheck=False) if value.shape != contents.shape else None
        value[...] = contents


# For another process: types are named, so that it gets the same ones.


def _encoded(value: Any) -> Any:
    """A form of plain containers and tensors on the CPU, which keeps the types."""
    kind = type(value)
    if kind in _SCALARS or value is _OWN:
        return value
    if value is _ABSENT:
        return _DELETED
    if kind is torch.Tensor:
        return "tensor", value.detach().cpu().clone()
    if kind is np.ndarray:
        return "array", torch.from_numpy(value.reshape(-1).copy()), value.shape
    if kind in _DICTS:
        factory = value.default_factory.__name__ if kind is defaultdict and value.default_factory else ""
        return kind.__name__, [(_encoded(key), _encoded(each)) for key, each in value.items()], factory
    return kind.__name__, [*map(_encoded, value)], value.maxlen if kind is deque else None


def _decoded(form: Any) -> Any:
    """Inverse of `_encoded`; a form that it does not make is left as it is."""
    match form:
        case ("tensor", torch.Tensor() as value):
            return value
        case ("array", torch.Tensor() as value, tuple(shape)):
            return value.numpy().copy().reshape(shape)
        case (str(name), list(entries), more) if name in _KINDS:
            kind = _KINDS[name]
            if name in _DICT_NAMES:
                pairs: dict[Any, Any] = {_decoded(key): _decoded(each) for key, each in entries}
                if name == "defaultdict":
                    factory: Any = _FACTORIES.get(more)
                    return defaultdict(factory, pairs)
                return kind(pairs)
            inner = map(_decoded, entries)
            return deque(inner, more) if name == "deque" else kind(inner)
        case _:
            return form


def _load(table: dict[str, Any], key: str, form: Any) -> None:
    """Give an attribute a value from another process: into the present object if it is of the same kind."""
    if not _is_own(form):
        table[key] = _filled(table.get(key), _decoded(form))
    elif form == _DELETED:
        table.pop(key, None)


def _is_own(form: Any) -> bool:
    """Whether a form stands for no value: the attribute is gone, or made by each process."""
    return isinstance(form, tuple) and len(form) == 1


def _filled(present: Any, value: Any) -> Any:
    """The present object with the contents of `value`, or `value` itself if they are of different kinds."""
    kind = type(value)
    if kind is not type(present) or kind not in _MUTABLE:
        return value
    if kind in _ARRAYS:
        is_plain = _is_plain_tensor(present) if kind is torch.Tensor else _is_plain_array(present)
        if is_plain and (present.shape, present.dtype) == (value.shape, value.dtype) and not _needs_grad(present):
            _write(present, value)
            return present
        return value.to(present.device) if kind is torch.Tensor else value
    if kind is deque and present.maxlen != value.maxlen:
        return value
    if kind in _DICTS:
        value = {key: _filled(present.get(key), each) for key, each in value.items()}
    elif kind in _LISTS:
        former = [*present, *[None] * len(value)]
        value = [_filled(old, new) for old, new in zip(former, value, strict=False)]
    present.clear()
    (present.extend if kind in _LISTS else present.update)(value)
    return present


def _needs_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
