"""Which buffers a model has. A program may register, replace and delete them while it trains.

A model that another process built, or the same one at another step, may therefore have other buffers than the state
that it is to load. `buffer_rows` lists the buffers of a model in rows of plain data, which are sent with their values.
`plan_buffers` plans how another model gets the buffers that such rows describe.
"""

# Buffer tables have no public API.
# pyright: reportPrivateUsage=false

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_, methodcaller
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hyperpod_plugins.recovery.packing import is_size

_values_of = methodcaller("values")
_OF_MODULE = frozenset(vars(nn.Module()))
"""Attributes of every module, which no buffer replaces."""
Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of this rank's part of a tensor."""


class ModuleTables:
    """Some tables of modules, and the objects that they held when this was created."""

    def __init__(self, tables: Iterable[dict[str, Any]]) -> None:
        self._tables = [*tables]
        self._sizes = [*map(len, self._tables)]
        self._filled = [table for table in self._tables if table]
        self._held = [*chain.from_iterable(map(_values_of, self._filled))]

    @property
    def are_same(self) -> bool:
        """Whether they hold the same objects."""
        present = chain.from_iterable(map(_values_of, self._filled))
        return [*map(len, self._tables)] == self._sizes and all(map(is_, present, self._held))


@dataclass(frozen=True, slots=True)
class BufferRow:
    """An entry in the buffer table of a module, as another process can read it."""

    name: str
    owner: str
    """First name of the same tensor, which may be held under several names; empty for an entry that is None."""
    is_persistent: bool
    is_sharded: bool = False
    is_on_host: bool = True

    def to_plain(self) -> list[str | bool]:
        """As plain data."""
        return [self.name, self.owner, self.is_persistent, self.is_sharded, self.is_on_host]

    @classmethod
    def from_plain(cls, row: object) -> "BufferRow":
        """Inverse of `to_plain`.

        Raises:
            ValueError: it is not such a row.
        """
        match row:
            case [str(name), str(owner), bool(is_persistent), bool(is_sharded), bool(is_on_host)]:
                return cls(name, owner, is_persistent, is_sharded, is_on_host)
            case _:
                raise ValueError(f"not a row of a buffer: {row!r}")


def split_name(name: str) -> tuple[str, str]:
    """Name of the module, and key in its table of buffers."""
    module, _, key = name.rpartition(".")
    return module, key


def may_hold(part: nn.Module, key: str) -> bool:
    """Whether a module can have a buffer of this name: as `register_buffer`, but a plain attribute is replaced."""
    if key in part._buffers:
        return True
    is_other = key in part._parameters or key in part._modules or key in _OF_MODULE or not key.isidentifier()
    return not is_other and not any(key in vars(base) for base in type(part).__mro__)


def set_table(part: nn.Module, table: Mapping[str, torch.Tensor | None], non_persistent: Iterable[str]) -> None:
    """Give a module other buffers. In place: an assignment to a module that torch.compile wrapped would go to that."""
    for key in table.keys() - part._buffers.keys():
        vars(part).pop(key, None)  # it would hide the buffer
    part._buffers.clear()
    part._buffers.update(table)
    part._non_persistent_buffers_set.clear()
    part._non_persistent_buffers_set.update(non_persistent)


def buffer_rows(model: nn.Module) -> list[BufferRow]:
    """The entries in the buffer tables of all modules, in the order of `named_buffers`."""
    first: dict[int, str] = {}
    return [
        BufferRow(
            name=name,
            owner="" if tensor is None else first.setdefault(id(tensor), name),
            is_persistent=key not in part._non_persistent_buffers_set,
            is_sharded=isinstance(tensor, DTensor),
            is_on_host=tensor is None or tensor.device.type == "cpu",
        )
        for prefix, part in model.named_modules()
        for key, tensor in part._buffers.items()
        for name in [f"{prefix}.{key}" if prefix else key]
    ]


@dataclass(frozen=True, slots=True)
class PlannedTable:
    """Buffers that a module is to have."""

    part: nn.Module
    table: dict[str, torch.Tensor | None]
    non_persistent: set[str]

    def apply(self) -> None:
        """Give the module these buffers."""
        set_table(self.part, self.table, self.non_persistent)


def plan_buffers(
    model: nn.Module, rows: Sequence[BufferRow], forms: Mapping[str, Form]
) -> tuple[list[PlannedTable], list[str]]:
    """Plan the buffers that some rows describe; nothing is changed. Present tensors that fit stay.

    Args:
        model: to have the buffers.
        rows: from a process whose model has the same parameters, not trusted.
        forms: shape and dtype of each tensor in the rows, by its owner's name.

    Returns:
        The tables of modules that have, or are to have, buffers, with new tensors allocated; and the names of buffers
        that the model cannot have.
    """
    parts = dict(model.named_modules())
    tables = {name: PlannedTable(part, {}, set()) for name, part in parts.items() if part._buffers}
    tensors: dict[str, torch.Tensor] = {}
    used: set[int] = set()
    wrong: list[str] = []
    for row in rows:
        module, key = split_name(row.name)
        part = parts.get(module)
        if part is None or not may_hold(part, key) or (row.owner not in tensors and row.owner not in ("", row.name)):
            wrong.append(row.name)
            continue
        if row.owner == row.name:
            device = torch.device("cpu") if row.is_on_host else device_of_module(model, part)
            tensor = _tensor_for(row, part._buffers.get(key), forms.get(row.name), used, device)
            if tensor is None:
                wrong.append(row.name)
                continue
            used.add(id(tensor))
            tensors[row.name] = tensor
        planned = tables.setdefault(module, PlannedTable(part, {}, set()))
        planned.table[key] = tensors[row.owner] if row.owner else None
        if not row.is_persistent:
            planned.non_persistent.add(key)
    return [*tables.values()], wrong


def _tensor_for(
    row: BufferRow, present: torch.Tensor | None, form: Form | None, used: set[int], device: torch.device
) -> torch.Tensor | None:
    """The present tensor if it fits, otherwise a new one; None if there can be none."""
    if form is None or not all(map(is_size, cast("Sequence[object]", form[0]))):
        return None
    if present is not None and id(present) not in used:
        local = present.to_local() if isinstance(present, DTensor) else present
        found = (tuple(local.shape), local.dtype), isinstance(present, DTensor), local.device.type == "cpu"
        if found == (form, row.is_sharded, row.is_on_host):
            return present
    if row.is_sharded:
        return None
    shape, dtype = form
    return torch.empty(shape, dtype=dtype, device=device)


def device_of_module(model: nn.Module, part: nn.Module) -> torch.device:
    """The device of a module, or of the model if the module has no tensors on a device."""
    tensors = chain(part.parameters(), part.buffers(), model.parameters(), model.buffers())
    return next((each.device for each in tensors if each.device.type != "cpu"), torch.device("cpu"))
