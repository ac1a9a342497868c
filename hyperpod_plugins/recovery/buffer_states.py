"""The buffers of a model as rank-local state, and tensors written as one piece of bytes.

BatchNorm's running statistics differ from rank to rank; tables of constants do not. Many small tensors are slow to
copy and to pickle one by one, and each step does this: so names, dtypes and shapes are a text that rarely changes, and
the values follow each other. Another text lists all buffers that the rank has, as a program may register, replace and
delete them while it trains.
"""

# Buffer tables and tensor versions have no public API.
# pyright: reportPrivateUsage=false

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, TypeVar, cast

import torch
from torch import nn

from hyperpod_plugins.errors import CheckpointMismatch
from hyperpod_plugins.recovery.buffer_layout import ModuleTables, device_of_module, may_hold, set_table, split_name
from hyperpod_plugins.recovery.packing import are_same, as_integers, is_size

_is_cpu = attrgetter("is_cpu")
_Name = TypeVar("_Name", str, tuple[str, str])
_Row = tuple[str, bool, bool, bool]
"""Name of a buffer; whether it is None, whether it is persistent, and whether it is in host memory."""
_PLAIN_TYPE = re.compile(r"torch\.(bool|u?int(8|16|32|64)|b?float16|float(32|64)|float8_\w+|complex(32|64|128))")
_DTYPES = {
    str(each): each
    for each in vars(torch).values()
    if isinstance(each, torch.dtype) and _PLAIN_TYPE.fullmatch(str(each))  # torch.frombuffer supports no others
}
ALWAYS_KEPT_BYTES = 2**14
"""A buffer of at most this size is always kept, whether it was written to or not."""


class BufferStates:
    """The buffers of a model: all small ones, and large ones that were written to; the others never differ.

    BatchNorm updates its statistics without advancing the tensor's version, so versions are used for large ones only.
    """

    def __init__(self, model: nn.Module) -> None:
        """Assume that the present values of large buffers are the same on all ranks."""
        self._model = model
        self._tables: list[dict[str, torch.Tensor | None]] = []
        self._children = ModuleTables(())
        self._places: list[tuple[str, nn.Module, str]] = []
        self._keys: tuple[list[int], list[str]] = [], []
        self._held: list[_Row] = []
        self._layout = "[]"
        self._collect()
        self._first = {name: (tensor, tensor._version) for name, tensor in self._present().items()}
        self._forms = TensorSpecCache()

    @property
    def is_empty(self) -> bool:
        """Whether the model has no buffers at present."""
        self._collect()
        return not self._places

    def state_dict(self) -> dict[str, Any]:
        """Names, dtypes and shapes, and all bytes in one piece: many small tensors are slow to copy and pickle."""
        own = {name: each for name, each in self._present().items() if self._is_own(name, each)}
        return {**packed_tensors(own, self._forms), "layout": self._present_layout()}

    def _collect(self) -> None:
        """List the buffers again if any has been registered or deleted, or a module exchanged."""
        if not (self._tables and self._children.are_same):
            parts = [*self._model.modules()]
            self._tables = [part._buffers for part in parts]
            self._children = ModuleTables(part._modules for part in parts)
            self._keys = [-1], []
        keys = [*map(len, self._tables)], [*chain.from_iterable(self._tables)]
        if keys != self._keys:
            self._keys = keys
            self._places = [
                (f"{name}.{key}" if name else key, part, key)
                for name, part in self._model.named_modules()
                for key in part._buffers
            ]

    def _present_layout(self) -> str:
        """Which buffers there are, as JSON, with what `_Row` says of each; as last collected."""
        held = [
            (name, tensor is None, key not in part._non_persistent_buffers_set, tensor is None or tensor.is_cpu)
            for name, part, key in self._places
            for tensor in [part._buffers[key]]
        ]
        if held != self._held:
            self._held, self._layout = held, json.dumps(held)
        return self._layout

    def all_small(self, limit_bytes: int = 2**20) -> dict[str, Any]:
        """A `state_dict` of all buffers, but for the largest ones where all together exceed `limit_bytes`."""
        found: dict[str, torch.Tensor] = {}
        for name, tensor in sorted(self._present().items(), key=lambda item: item[1].nbytes):
            limit_bytes -= tensor.nbytes
            if limit_bytes < 0:
                break
            found[name] = tensor
        return {**packed_tensors(found, self._forms), "layout": self._present_layout(), "is_partial": True}

    def load_state_dict(self, state_dict: dict[str, Any], leave: Collection[str] = ()) -> None:
        """Copy the values into the buffers, in place; values not in `state_dict` count as equal on all ranks.

        Registers, replaces and deletes buffers where the rank whose state it is had others.

        Raises:
            CheckpointMismatch: the model cannot have such buffers, or the state lacks the values of one.
        """
        if "layout" in state_dict:
            self._take_layout(state_dict, leave)
        with torch.no_grad():
            for _, tensor, values in self._pairs(state_dict, leave):
                tensor.copy_(values)
        present = self._present()
        for name in present.keys() - _names(state_dict):
            self._first[name] = (present[name], present[name]._version)

    def written(self, before: dict[str, Any], now: dict[str, Any] | None = None) -> set[str]:
        """Names of the buffers that differ from `before`, or that were written to and are not in it."""
        old = dict(_unpacked(before))
        if now is not None:
            new = dict(_unpacked(now))
            return {name for name in old.keys() | new.keys() if not are_same(old.get(name), new.get(name))}
        present = self._present()
        found = {name for name, tensor in present.items() if name not in old and self._is_own(name, tensor)}
        return found | {name for name, values in old.items() if not _is_like(present.get(name), values)}

    def fitting(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Only the persistent buffers: all others are as the program creates them (as in torch)."""
        names = self.saved_names()
        return packed_tensors({name: values for name, values in _unpacked(state_dict) if name in names})

    def extended(self, state_dict: dict[str, Any], copies: Mapping[int, torch.Tensor]) -> dict[str, Any]:
        """An earlier `state_dict` with the large buffers that were written for the first time since.

        Args:
            state_dict: the earlier state.
            copies: values at that time, by `id` of the buffer.
        """
        known, present = _names(state_dict), self._present()
        new = {name: copies.get(id(present[name])) for name in self.own_names() if name not in known}
        found = {name: copy for name, copy in new.items() if copy is not None}
        return {**state_dict, **packed_tensors(dict(_unpacked(state_dict)) | found)} if found else state_dict

    def overwrite(self, state_dict: dict[str, Any]) -> None:
        """Give the buffers in a `state_dict` another value, as a process has them that has not loaded it."""
        with torch.no_grad():
            for _, tensor, _ in self._pairs(state_dict):
                tensor.fill_(1)

    def saved_names(self) -> set[str]:
        """Names of the persistent buffers, which a checkpoint of the model holds."""
        return {
            name
            for name, part, key in self._present_places()
            if key not in part._non_persistent_buffers_set and part._buffers[key] is not None
        }

    def own_names(self) -> list[str]:
        """Names of the buffers that `state_dict` holds."""
        return [name for name, tensor in self._present().items() if self._is_own(name, tensor)]

    def _pairs(
        self, state_dict: dict[str, Any], leave: Collection[str] = ()
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Name, tensor and saved values of each buffer in a `state_dict`, but for those in `leave`.

        Raises:
            CheckpointMismatch: the model has no such buffer.
        """
        present = self._present()
        for name, values in _unpacked(state_dict):
            if isinstance(name, str) and name in leave:
                continue
            tensor = present.get(name) if isinstance(name, str) else None
            if tensor is None or tensor.numel() != values.numel():
                raise CheckpointMismatch(f"the state of one rank has a buffer {name!r} of shape {(*values.shape,)}")
            yield name, tensor, values.view(tensor.shape)

    def _take_layout(self, state_dict: dict[str, Any], leave: Collection[str]) -> None:
        """Have the buffers that a `state_dict` of this job lists, but for those in `leave`."""
        values, present = dict(_unpacked(state_dict)), self._present()
        is_known = state_dict["layout"] == self._present_layout()  # collected by `_present`
        if is_known and all(_has_form(present.get(name), each) for name, each in values.items()):
            return
        parts = dict(self._model.named_modules())
        tables = {name: (dict(part._buffers), {*part._non_persistent_buffers_set}) for name, part in parts.items()}
        rows = {row[0]: row for row in _rows_in(state_dict)}
        for name, _, key in self._places:
            if name not in rows and name not in leave:
                del tables[split_name(name)[0]][0][key]
        replaced: dict[int, torch.Tensor] = {}
        for name, is_none, is_persistent, is_on_host in (row for name, row in rows.items() if name not in leave):
            module, key = split_name(name)
            if module not in parts or not may_hold(parts[module], key):
                raise CheckpointMismatch(f"the state of one rank has a buffer {name!r}, which this model cannot have")
            table, non_persistent = tables[module]
            device = torch.device("cpu") if is_on_host else device_of_module(self._model, parts[module])
            is_missing = is_none or (table.get(key) is None and name not in values and "is_partial" in state_dict)
            table[key] = None if is_missing else _fitted(name, table.get(key), values.get(name), device, replaced)
            (non_persistent.discard if is_persistent else non_persistent.add)(key)
        for name, (table, non_persistent) in tables.items():
            if table or parts[name]._buffers:
                set_table(parts[name], table, non_persistent & table.keys())

    def _is_own(self, name: str, tensor: torch.Tensor) -> bool:
        first, version = self._first.get(name, (None, 0))
        return tensor.nbytes <= ALWAYS_KEPT_BYTES or first is not tensor or version != tensor._version

    def _present_places(self) -> list[tuple[str, nn.Module, str]]:
        self._collect()
        return self._places

    def _present(self) -> dict[str, torch.Tensor]:
        return {
            name: tensor
            for name, part, key in self._present_places()
            if type(tensor := part._buffers.get(key)) is torch.Tensor  # not a sharded one
        }


def packed_tensors(tensors: Mapping[_Name, torch.Tensor], known: "TensorSpecCache | None" = None) -> dict[str, Any]:
    """Names, dtypes and shapes as one JSON text, and values as bytes; an empty dict for no tensors.

    Args:
        tensors: tensors by name.
        known: cache of the JSON text: it is needed in each step and rarely changes.
    """
    forms = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    known = TensorSpecCache() if known is None else known
    return {"forms": known.text_of(forms), "data": bytes_of([*tensors.values()])} if forms else {}


class TensorSpecCache:
    """Caches names, dtypes and shapes of tensors as JSON."""

    def __init__(self) -> None:
        self._forms: list[Any] = []
        self._text = "[]"

    def text_of(self, forms: Sequence[tuple[Any, torch.dtype, torch.Size]]) -> str:
        """A JSON list of name, dtype and shape of each tensor."""
        if forms != self._forms:
            self._forms = list(forms)
            self._text = json.dumps([(name, str(dtype), shape) for name, dtype, shape in forms])
        return self._text


def bytes_of(tensors: Sequence[torch.Tensor]) -> bytes:
    """Bytes of all tensors, concatenated; copied from a device at once."""
    if all(map(_is_cpu, tensors)):
        return b"".join([_host_values(each).numpy().tobytes() for each in tensors])
    flat = [as_integers(each).reshape(-1).view(torch.uint8).to(tensors[0].device) for each in tensors]
    return torch.cat(flat).cpu().numpy().tobytes()


def _host_values(tensor: torch.Tensor) -> torch.Tensor:
    """A view that NumPy accepts: it lacks some dtypes."""
    is_plain = tensor.dtype is torch.float32 and not (tensor.requires_grad or tensor.is_neg())
    return tensor if is_plain else as_integers(tensor)


def unpacked_tensors(packed: Mapping[str, Any]) -> list[tuple[Any, torch.Tensor]]:
    """Inverse of `packed_tensors`; names that are tuples come back as lists.

    Raises:
        CheckpointMismatch: the values do not fit the names, dtypes and shapes.
    """
    if not packed:
        return []
    try:
        forms: list[Any] = json.loads(packed["forms"])
        return [*tensors_in(packed["data"], [(name, kind, shape) for name, kind, shape in forms])]
    except (KeyError, TypeError, ValueError, RuntimeError) as error:  # including deep nesting and excessive sizes
        raise CheckpointMismatch(f"the state of one rank does not say what it holds: {error!r}") from error


def tensors_in(data: object, forms: Iterable[tuple[Any, Any, Any]]) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield name and tensor of each form, reading their values from consecutive bytes.

    Args:
        data: bytes from this process or another one, not trusted.
        forms: name, dtype and shape of each tensor.

    Raises:
        CheckpointMismatch: `data` does not hold such values.
    """
    begin = 0
    for name, kind, shape in forms:
        dtype = _DTYPES.get(kind)
        is_shape = isinstance(shape, list | tuple) and all(map(is_size, cast("Sequence[object]", shape)))
        end = begin + math.prod(shape) * dtype.itemsize if dtype is not None and is_shape else -1
        if dtype is None or not isinstance(data, bytes) or not begin <= end <= len(data):
            raise CheckpointMismatch(f"the state of one rank has no values for {name!r} ({kind}, {shape})")
        part = bytearray(data[begin:end])
        values = torch.frombuffer(part, dtype=dtype) if part else torch.empty(0, dtype=dtype)
        yield name, values.view(shape)
        begin = end


def _unpacked(state_dict: Mapping[str, Any]) -> list[tuple[Any, torch.Tensor]]:
    """Names and values in a `state_dict` of buffers."""
    return unpacked_tensors({key: each for key, each in state_dict.items() if key in ("forms", "data")})


def _names(state_dict: Mapping[str, Any]) -> set[str]:
    return {name for name, _, _ in json.loads(state_dict["forms"])} if "forms" in state_dict else set()


def _rows_in(state_dict: Mapping[str, Any]) -> list[_Row]:
    """The layout in a `state_dict` of buffers, which may come from another process, not trusted."""
    try:
        rows: list[Any] = json.loads(state_dict["layout"])
    except (TypeError, ValueError, RecursionError):
        rows = [None]
    for row in rows:
        match row:
            case [str(), bool(), bool(), bool()]:
                pass
            case _:
                raise CheckpointMismatch("the state of one rank does not say which buffers it has")
    return [(name, is_none, is_persistent, is_on_host) for name, is_none, is_persistent, is_on_host in rows]


def _fitted(
    name: str,
    tensor: torch.Tensor | None,
    values: torch.Tensor | None,
    device: torch.device,
    replaced: dict[int, torch.Tensor],
) -> torch.Tensor:
    """The present tensor of a buffer if its values fit, or are not given; otherwise a new one.

    Args:
        name: of the buffer.
        tensor: present one, if any.
        values: to be copied into it, if known.
        device: of a new tensor.
        replaced: new tensors by the `id` of those whose place they take, which several modules may hold.

    Raises:
        CheckpointMismatch: there is neither.
    """
    if tensor is not None and (values is None or _has_form(tensor, values)):
        return tensor
    if values is None:
        raise CheckpointMismatch(f"the state of one rank lacks the values of its buffer {name!r}")
    new = torch.empty_like(values, device=device)
    if tensor is None:
        return new
    known = replaced.setdefault(id(tensor), new)
    return known if _has_form(known, values) else new


def _has_form(tensor: torch.Tensor | None, values: torch.Tensor) -> bool:
    return tensor is not None and (tensor.shape, tensor.dtype) == (values.shape, values.dtype)


def _is_like(tensor: torch.Tensor | None, values: torch.Tensor) -> bool:
    return tensor is not None and are_same(tensor.cpu(), values)
