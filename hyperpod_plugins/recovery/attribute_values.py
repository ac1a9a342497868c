"""Values of attributes: copies that are restored in place, and forms that another process reads without running code.

    in this process        `Contents`: what a container, tensor or array held, given to the same object again
    for another process    `encoded`: plain containers and tensors on the CPU that name the types, so that it gets them

A thread of the program may change a container meanwhile: Python's loops go over a list of its entries, which is made at
once.

A form that stands for an object that is followed by itself (see `held_objects`) is only its name and its class.
"""

# A tensor's version and a module's tables have no public API.
# pyright: reportPrivateUsage=false

import enum
import io
import marshal
import pickle
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from fractions import Fraction
from operator import is_
from pathlib import PurePath
from typing import Any, NoReturn, cast
from uuid import UUID

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hyperpod_plugins.errors import CheckpointMismatch
from hyperpod_plugins.parallel.unit_watch import fsdp_parameters, parameters_by_id
from hyperpod_plugins.recovery.buffer_layout import ModuleTables
from hyperpod_plugins.recovery.optimizer_copy import local_tensor
from hyperpod_plugins.recovery.packing import are_same
from hyperpod_plugins.recovery.program_collectives import DataUnpickler

MAX_ENTRIES = 1024
"""Most numbers, strings, containers and tensors in an attribute whose contents are kept, or that is sent.

Lists and dictionaries of numbers and strings only may have `MAX_NUMBERS` entries: of these, only what was added last is
taken away again, until one is found to be changed in another way. Tensors and arrays may have any size; those of more
than `MAX_ENTRIES` elements are copied once they were found to be written to.
"""
MAX_NUMBERS = 2**20
MAX_DEPTH = 8
"""How deep containers within containers are looked at; a cyclic one has no end."""
ABSENT = object()
DELETED, OWN = ("deleted",), ("own",)
"""Forms of an attribute that is gone, and of one that the set-up of each process makes, such as an open file."""
_MAX_TEXT = 2**16
_TEXTS = frozenset({str, bytes})
SCALARS = frozenset({bool, int, float, str, bytes, type(None)})
_LISTS = frozenset({list, deque})
_DICTS = frozenset({dict, OrderedDict, Counter, defaultdict})
_TENSORS = frozenset({torch.Tensor, nn.Parameter, DTensor})
ARRAYS = frozenset({*_TENSORS, np.ndarray})
_TENSOR_OR_ARRAY = torch.Tensor, np.ndarray
CONTAINERS = frozenset({*_LISTS, *_DICTS, set, tuple})
_MUTABLE = frozenset({*_LISTS, *_DICTS, *ARRAYS, set})
_WRITTEN_QUICKLY = frozenset({list, dict, set})
_KINDS: dict[str, Any] = {
    each.__name__: each for each in (list, tuple, set, deque, dict, OrderedDict, Counter, defaultdict)
}
_DICT_NAMES = frozenset(each.__name__ for each in _DICTS)
_FACTORIES = {each.__name__: each for each in (int, float, str, bool, list, dict, set)}
_DATA = (complex, frozenset, range, slice, enum.Enum, np.generic, PurePath, date, time, timedelta, Decimal, Fraction)
_DATA_OF_TORCH = frozenset({torch.dtype, torch.device, torch.Size, UUID})
_QUICK_LENGTH = 64
_NUM_SAMPLED = 256


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """The contents of a container, tensor or array at one moment."""

    value: Any
    """The object."""
    size: int
    """Its length; of a tensor, its version."""
    entries: Any
    """Of a container, a `Contents` or the value of each entry (of a dictionary, pairs); of others a copy.

    None if they are not kept: they are too large, or cannot be copied.
    """
    text: bytes = b""
    """The contents as `marshal` writes them, which is quickly compared; empty if it does not."""
    ends: tuple[Any, ...] = ()
    """First and last entry of a list that is not kept."""

    @property
    def is_partial(self) -> bool:
        """Whether the contents of the object, or of one inside it, are not kept."""
        if self.entries is None or type(self.value) in ARRAYS:
            return self.entries is None
        entries = (each for _, each in self.entries) if type(self.value) in _DICTS else self.entries
        return any(isinstance(each, Contents) and each.is_partial for each in entries)


@dataclass(frozen=True, slots=True, eq=False)
class LocalShard:
    """This rank's part of a DTensor, which is put into the one that the process has made itself."""

    local: torch.Tensor


def is_data(value: Any) -> bool:
    """Whether a value consists of data and never changes: an enum, a named tuple, a date, a NumPy scalar, ..."""
    kind = type(value)
    is_named = issubclass(kind, tuple) and getattr(kind, "_fields", None) is not None
    return is_named or kind in _DATA_OF_TORCH or issubclass(kind, _DATA)


def num_entries(value: Any, names: Collection[int] = (), depth: int = 0) -> int:
    """Numbers, strings, containers and tensors; more than `MAX_ENTRIES` if there is anything that cannot be sent.

    Args:
        value: of an attribute.
        names: `id`s of the objects that are sent by themselves.
        depth: of the containers around it.
    """
    kind, too_many = type(value), MAX_ENTRIES + 1
    if kind in SCALARS:
        return too_many if kind in _TEXTS and len(value) > _MAX_TEXT else 1
    if id(value) in names:
        return 1
    if kind not in CONTAINERS:
        return 1 if _is_sendable(value) else too_many
    if depth > MAX_DEPTH or (kind is defaultdict and value.default_factory not in (None, *_FACTORIES.values())):
        return too_many
    if len(value) > _QUICK_LENGTH and _holds_scalars(value):
        return min(len(value), MAX_ENTRIES - 1) + 1 if len(value) <= MAX_NUMBERS else too_many
    if kind in _DICTS | {set} and any(isinstance(key, torch.Tensor) and id(key) not in names for key in [*value]):
        return too_many  # another process would get a key by another tensor
    total = 1
    for each in (*value, *value.values()) if kind in _DICTS else (*value,):
        total += num_entries(each, names, depth + 1)
        if total > MAX_ENTRIES:
            break
    return total


def _is_sendable(value: Any) -> bool:
    """Whether a tensor, array or other object of data can be sent."""
    if type(value) in _TENSORS:
        return _has_values(value)
    return _has_plain_type(value) if type(value) is np.ndarray else is_data(value) and _is_readable(value)


def _holds_scalars(value: Any) -> bool:
    """Whether a container holds only numbers and strings."""
    kinds = {*map(type, value)}
    if type(value) in _DICTS:
        kinds |= {*map(type, value.values())}
    return kinds <= SCALARS


def _has_values(value: torch.Tensor) -> bool:
    """Whether a tensor has values that can be copied."""
    local = local_tensor(value)
    return local.layout is torch.strided and not (local.is_quantized or local.is_meta)


def _is_writable(value: torch.Tensor) -> bool:
    """Whether a tensor also has memory that can be written to."""
    local = local_tensor(value)
    return _has_values(value) and local.is_contiguous() and not local.is_inference()


def _has_plain_type(value: np.ndarray[Any, Any]) -> bool:
    return value.dtype.kind in "biuf" and value.dtype.itemsize <= 8 and value.dtype.isnative


def _is_plain_array(value: np.ndarray[Any, Any]) -> bool:
    return _has_plain_type(value) and value.flags.writeable and value.flags.c_contiguous


# In this process: contents are restored in the objects themselves.


class Copying:
    """Which large tensors, arrays and lists are copied."""

    def __init__(self, is_elsewhere: Callable[[object], bool], *, room: int = 0, copies_lists: bool = False) -> None:
        self.is_elsewhere = is_elsewhere
        """Whether a tensor is restored in another way."""
        self._written: set[int] = set()
        self._copies_lists = copies_lists
        self.room = room
        """Number of elements for which those that were not written to are copied as well."""

    def is_list_copied(self, value: Any) -> bool:
        """Whether the contents of a long container are kept."""
        return self._copies_lists or id(value) in self._written

    def is_copied(self, value: Any, size: int) -> bool:
        """Whether the contents of a tensor or array with so many elements are kept."""
        if size <= MAX_ENTRIES or id(value) in self._written:
            return True
        self.room -= size
        return self.room >= 0

    def note(self, contents: Contents) -> None:
        """Note that the objects in `contents` that have changed are copied from now on."""
        if contents.entries is None or type(contents.value) in ARRAYS:
            if not is_same(contents):
                self._written.add(id(contents.value))
        elif type(contents.value) in CONTAINERS:
            pairs: Any = contents.entries
            for each in (value for _, value in pairs) if type(contents.value) in _DICTS else pairs:
                if isinstance(each, Contents):
                    self.note(each)


def contents_of(value: Any, copying: Copying, depth: int = 0) -> Any:
    """The contents of a container, tensor or array; any other value as it is."""
    kind = type(value)
    if copying.is_elsewhere(value):
        return value
    if kind in _TENSORS:
        is_kept = _is_writable(value) and copying.is_copied(value, local_tensor(value).numel())
        return Contents(value, _version_of(value), local_tensor(value).detach().clone() if is_kept else None)
    if kind is np.ndarray:
        is_kept = _is_plain_array(value) and copying.is_copied(value, value.size)
        return Contents(value, value.size, value.copy() if is_kept else None, b"" if is_kept else _sample_of(value))
    if kind not in CONTAINERS:
        return value
    if len(value) > MAX_ENTRIES:
        is_kept = len(value) <= MAX_NUMBERS and copying.is_list_copied(value) and _holds_scalars(value)
        if not is_kept:
            return Contents(value, len(value), None, ends=_ends_of(value))
    if depth > MAX_DEPTH:
        return Contents(value, len(value), None, ends=_ends_of(value))
    if kind in _DICTS:
        entries: Any = [(key, contents_of(each, copying, depth + 1)) for key, each in [*value.items()]]
    else:
        entries = [contents_of(each, copying, depth + 1) for each in [*value]]
    return Contents(value, len(entries), entries, b"" if depth else text_of(value))


def _version_of(value: torch.Tensor) -> int:
    """Counts the writes to a tensor; a DTensor's are counted by itself or by its local part."""
    if isinstance(value, DTensor):
        return value._version + value._local_tensor._version
    return 0 if value.is_inference() else value._version


def _sample_of(value: np.ndarray[Any, Any]) -> bytes:
    """A few elements of a large array: NumPy does not count writes."""
    if not _is_plain_array(value):
        return b""
    return value.reshape(-1)[:: max(1, value.size // _NUM_SAMPLED)].tobytes()


def _ends_of(value: Any) -> tuple[Any, ...]:
    return (value[0], value[-1]) if type(value) in _LISTS and value else ()


def text_of(value: Any) -> bytes:
    """What `marshal` writes for a container of numbers and strings; empty for anything else."""
    try:
        return marshal.dumps(value, 2) if type(value) in _WRITTEN_QUICKLY else b""
    except ValueError:
        return b""


def is_same(contents: Any, value: Any = ABSENT) -> bool:
    """Whether an object still has its contents; `value`: what stands in its place now."""
    if not isinstance(contents, Contents):
        return contents is value or (type(contents) in SCALARS and _is_same_scalar(contents, value))
    owner, entries = contents.value, contents.entries
    if value is not ABSENT and value is not owner:
        return False
    if type(owner) in _TENSORS:
        return _version_of(owner) == contents.size or (entries is not None and are_same(local_tensor(owner), entries))
    if type(owner) is np.ndarray:
        if entries is None:
            return _sample_of(owner) == contents.text
        return owner.shape == entries.shape and owner.tobytes() == entries.tobytes()
    if len(owner) != contents.size or entries is None:
        return len(owner) == contents.size and all(map(_is, _ends_of(owner), contents.ends))
    if contents.text and text_of(owner) == contents.text:
        return True
    if type(owner) in _DICTS:
        present = [*owner.items()]
        pairs = zip(entries, present, strict=False)
        return len(entries) == len(present) and all(
            _is_same_key(before[0], now[0]) and is_same(before[1], now[1]) for before, now in pairs
        )
    return all(map(is_same, entries, [*owner]))


def is_change_seen(contents: Any) -> bool:
    """Whether `is_same` notices each change of what `encoded` reads of an object, so that its form can serve again."""
    kind = type(contents)
    if not isinstance(contents, Contents):
        return kind in SCALARS or not (
            kind in CONTAINERS or isinstance(contents, _TENSOR_OR_ARRAY) or is_data(contents)
        )
    kind, entries = type(contents.value), contents.entries
    if entries is None or kind not in CONTAINERS or kind is defaultdict:  # its factory may be another one
        return False
    if kind in _DICTS:
        return all(type(key) in SCALARS and is_change_seen(each) for key, each in entries)
    return all(map(is_change_seen, entries))


def _is(one: Any, other: Any) -> bool:
    return one is other


def _is_same_scalar(one: Any, other: Any) -> bool:
    is_equal = type(one) is type(other) and one == other
    return is_equal and (bool(one) or type(one) is not float or str(one) == str(other))  # 0.0 equals -0.0


def _is_same_key(one: Any, other: Any) -> bool:
    if one is other or type(one) in SCALARS:
        return one is other or _is_same_scalar(one, other)
    return not isinstance(one, torch.Tensor) and one == other  # tensors compare by element


def can_restore(contents: Any) -> bool:
    """Whether `restore_contents` gives an object, as it is now, its contents again."""
    if not isinstance(contents, Contents):
        return True
    owner, entries = contents.value, contents.entries
    kind = type(owner)
    if entries is None:
        if is_same(contents):
            return True
        return kind in _LISTS and len(owner) > contents.size > 0 and owner[contents.size - 1] is contents.ends[1]
    if kind in ARRAYS:
        return True
    return all(map(can_restore, (each for _, each in entries) if kind in _DICTS else entries))


def restore_contents(contents: Any) -> Any:
    """Give an object its contents again, in place; returns the object."""
    if not isinstance(contents, Contents):
        return contents
    value, entries = contents.value, contents.entries
    kind = type(value)
    if kind in ARRAYS:
        if entries is not None:
            _write(value, entries)
    elif entries is None:
        while len(value) > contents.size and kind in _LISTS | _DICTS:  # what was added last
            value.popitem() if kind in _DICTS else value.pop()
    else:
        restored = (
            [(key, restore_contents(each)) for key, each in entries]
            if kind in _DICTS
            else [*map(restore_contents, entries)]
        )
        if kind is not tuple:
            value.clear()
            (value.extend if kind in _LISTS else value.update)(restored if kind is not Counter else dict(restored))
    return value


def _write(value: Any, contents: Any) -> None:
    """Set the elements of a tensor or array, and its shape."""
    if isinstance(value, torch.Tensor):
        local = local_tensor(value)
        with torch.no_grad():
            if local.shape == contents.shape:
                local.copy_(contents)
            else:
                value.data = contents.clone()
    else:
        value.resize(contents.shape, refcheck=False) if value.shape != contents.shape else None
        value[...] = contents


class ModelParameters:
    """The parameters of a model, sharded and gathered, and the forms that stand for them.

    They are collected only when the model holds others.

    Args:
        model: a sharded or plain model; None for no parameters.
        cls: name of the class of a parameter in these forms.
    """

    def __init__(self, model: nn.Module | None, cls: str) -> None:
        self._model, self._cls = model, cls
        self._parts: list[nn.Module] = []
        self._tables, self._contents = list[dict[str, Any]](), ModuleTables(())
        self._keys: list[list[str]] = []
        self._of_fsdp: list[dict[str, Any]] = []
        """Attributes of FSDP2's records of parameters."""
        self._shown: list[Any] = []
        self._names: dict[int, tuple[nn.Parameter, str]] = {}
        self._forms: dict[Any, tuple[Any, ...]] = {}

    def present(self) -> tuple[dict[int, tuple[nn.Parameter, str]], dict[Any, tuple[Any, ...]]]:
        """Parameters and their names by `id`, and their forms as `parameter_forms` returns them; not to be changed."""
        if self._model is not None and not self._are_same:
            self._parts = [*self._model.modules()]
            self._tables = self._present_tables()
            self._contents, self._keys = ModuleTables(self._tables), [*map(list, self._tables)]
            self._of_fsdp = [vars(each) for each in fsdp_parameters(self._model)]
            self._shown = self._present_tensors()
            self._names = parameters_by_id(self._model)
            self._forms = parameter_forms(self._names, self._cls)
        return self._names, self._forms

    @property
    def _are_same(self) -> bool:
        return (
            bool(self._parts)
            and all(map(is_, self._present_tables(), self._tables))
            and self._contents.are_same
            and [*map(list, self._tables)] == self._keys
            and all(map(is_, self._present_tensors(), self._shown))
        )

    def _present_tables(self) -> list[dict[str, Any]]:
        return [table for part in self._parts for table in (part._modules, part._parameters)]

    def _present_tensors(self) -> list[Any]:
        return [each.get(key) for each in self._of_fsdp for key in ("_unsharded_param", "sharded_param")]


# For another process: types are named, so that it gets the same ones.


def parameter_forms(names: Mapping[int, tuple[nn.Parameter, str]], cls: str) -> dict[Any, tuple[Any, ...]]:
    """The forms that stand for parameters, by `id`, and by the layout of those that are DTensors.

    Args:
        names: parameters and their names, by `id`.
        cls: name of their class in these forms.
    """
    forms: dict[Any, tuple[Any, ...]] = {}
    for key, (parameter, name) in names.items():
        forms[key] = form = ("object", name, cls)
        if isinstance(parameter, DTensor):
            forms.setdefault(_layout_of(parameter), form)
    return forms


def _layout_of(value: DTensor) -> tuple[Any, ...]:
    return value.device_mesh, value.placements, value.shape


def encoded(value: Any, names: Mapping[Any, tuple[Any, ...]]) -> Any:
    """A form of plain containers and tensors on the CPU, which keeps the types.

    Args:
        value: of an attribute.
        names: by `id`, the forms of objects that are sent by themselves; of parameters, as in `parameter_forms`.
    """
    kind = type(value)
    if kind in SCALARS or value is OWN:
        return value
    if value is ABSENT:
        return DELETED
    if (form := names.get(id(value))) is not None:
        return form
    if kind in _TENSORS:
        copied = local_tensor(value).detach().cpu().clone()
        if kind is nn.Parameter:
            return "parameter", copied, value.requires_grad
        if kind is DTensor:
            return "part", copied, names.get(_layout_of(value))
        return ("tensor", copied, True) if value.requires_grad and value.is_leaf else ("tensor", copied)
    if kind is np.ndarray:
        return "array", torch.from_numpy(value.reshape(-1).copy()), value.shape
    if kind not in CONTAINERS:
        return "data", pickle.dumps(value, 4)
    is_quick = len(value) > _QUICK_LENGTH and _holds_scalars(value)
    if kind in _DICTS:
        factory = value.default_factory.__name__ if kind is defaultdict and value.default_factory else ""
        pairs = [*value.items()] if is_quick else [(encoded(k, names), encoded(v, names)) for k, v in [*value.items()]]
        return kind.__name__, pairs, factory
    entries = [*value] if is_quick else [encoded(each, names) for each in [*value]]
    return kind.__name__, entries, value.maxlen if kind is deque else None


def decoded(form: Any, object_of: Callable[[str, str], Any]) -> Any:
    """Inverse of `encoded`; a form that it does not make is left as it is.

    Args:
        form: from this process or another one, not trusted.
        object_of: returns the object with this name, of the class of this full name.
    """
    match form:
        case ("object", str(name), str(cls)):
            return object_of(name, cls)
        case ("tensor", torch.Tensor() as value, *needs_grad):
            return value.requires_grad_(bool(needs_grad) and value.is_floating_point())
        case ("part", torch.Tensor() as value, like):
            return _laid_out_like(decoded(like, object_of), value)
        case ("parameter", torch.Tensor() as value, bool(needs_grad)):
            return nn.Parameter(value, needs_grad and value.is_floating_point())
        case ("array", torch.Tensor() as value, tuple(shape)):
            return value.numpy().copy().reshape(shape)
        case ("data", bytes(data)):
            return _read(data)
        case (str(name), list(entries), more) if name in _KINDS:
            kind = _KINDS[name]
            if name in _DICT_NAMES:
                pairs: dict[Any, Any] = {decoded(key, object_of): decoded(each, object_of) for key, each in entries}
                if name == "defaultdict":
                    factory: Any = _FACTORIES.get(more)
                    return defaultdict(factory, pairs)
                return kind(pairs)
            inner = [decoded(each, object_of) for each in entries]
            return deque(inner, more) if name == "deque" else kind(inner)
        case _:
            return form


def _laid_out_like(parameter: object, local: torch.Tensor) -> DTensor | LocalShard:
    """This rank's part of a DTensor that another process has laid out as it has this parameter."""
    if not isinstance(parameter, DTensor) or parameter.to_local().shape != local.shape:
        return LocalShard(local)
    spec: Any = parameter._spec
    local = local.to(parameter.to_local().device)
    return DTensor.from_local(local, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride)


def is_own(form: Any) -> bool:
    """Whether a form stands for no value: the attribute is gone, or made by each process."""
    return isinstance(form, tuple) and len(cast("tuple[Any, ...]", form)) == 1


def filled(present: Any, value: Any, is_elsewhere: Callable[[object], bool]) -> Any:
    """The present object with the contents of `value`, or `value` itself if they are of different kinds.

    Tensors that are restored in another way are not written to.
    """
    kind = type(present)
    if is_elsewhere(present) or is_elsewhere(value):
        return value
    if kind in ARRAYS or isinstance(value, LocalShard):
        return _filled_array(present, value)
    if kind is not type(value) or kind not in _MUTABLE or (kind is deque and present.maxlen != value.maxlen):
        return value
    if kind in _DICTS:
        value = {key: filled(present.get(key), each, is_elsewhere) for key, each in value.items()}
    elif kind in _LISTS:
        former = [*present, *[None] * len(value)]
        value = [filled(old, new, is_elsewhere) for old, new in zip(former, value, strict=False)]
    present.clear()
    (present.extend if kind in _LISTS else present.update)(value)
    return present


def _filled_array(present: Any, value: Any) -> Any:
    """Like `filled`, for a tensor or array."""
    if isinstance(value, LocalShard):
        if type(present) is DTensor and _have_same_form(present, value.local):
            _write(present, value.local)
            return present
        raise CheckpointMismatch("the state of one rank has a part of a DTensor, which this process has not made")
    if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
        is_alike = type(value) is type(present) and (
            type(present) is nn.Parameter or (present.requires_grad == value.requires_grad and present.is_leaf)
        )
        if is_alike and _is_writable(present) and _have_same_form(present, value):
            _write(present, local_tensor(value))
            return present
        return value.to(local_tensor(present).device) if type(value) is torch.Tensor else value
    if isinstance(present, np.ndarray) and isinstance(value, np.ndarray) and _is_plain_array(present):
        if not _have_same_form(present, value):
            return value
        _write(present, value)
        return present
    return value


def _have_same_form(present: Any, value: Any) -> bool:
    part = local_tensor(present) if isinstance(present, torch.Tensor) else present
    return (part.shape, part.dtype) == (value.shape, value.dtype)


def _is_readable(value: Any) -> bool:
    """Whether another process can read a value without running code."""
    try:
        _read(pickle.dumps(value, 4))
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError):  # no importable name
        return False
    return True


def _read(data: bytes) -> Any:
    """Read what `encoded` has pickled.

    Raises:
        UnpicklingError: it names what may run code.
    """

    def refuse(name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"a value of an attribute names {name}")

    return DataUnpickler(io.BytesIO(data), refuse).load()


def class_called(name: str) -> type | None:
    """The class with this full name, `module:qualified name`, in a module that is imported already."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if isinstance(found, type | type(sys)) else None
    return found if isinstance(found, type) else None
