"""What torch's own collectives over Python objects do in a process that is not connected to the others.

Two parts of torch are replaced in a process that takes part in recovery. Both behave as torch's own while the process
is connected.

    `torch.distributed.checkpoint.load`     plans the reads of all ranks together. Each rank reads its own part only, so
                                            a process without connections plans alone, and reads the same.
    `all_gather_object` and its like        unpickle what other ranks sent. Without connections, that is a record from
                                            the store, which is not trusted: nothing in it may run code.
"""

# torch has no public way to do either.
# pyright: reportPrivateUsage=false

import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import pathlib
import pickle
import sys
import threading
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import _weights_only_unpickler as weights_only
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.utils import _DistWrapper

from hyperpod_plugins.comm import group_health
from hyperpod_plugins.comm.health import Phase
from hyperpod_plugins.recovery.packing import are_same

_PLAIN_CLASSES = frozenset(
    {
        *(pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, decimal.Decimal, fractions.Fraction),
        *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone, uuid.UUID),
        *(frozenset, range, slice),
    }
)
"""Classes that hold data only, beside those that `torch.load(..., weights_only=True)` reads."""

_NUMPY = (
    np.ndarray,
    np.dtype,
    np.zeros(1).__reduce__()[0],
    np.zeros(1).__reduce_ex__(5)[0],
    np.int8(0).__reduce__()[0],
)
"""What pickles of NumPy's arrays and scalars call."""


def is_alone() -> bool:
    """Whether this is the main thread of a process without connections."""
    return group_health.phase is Phase.DETACHED and threading.current_thread() is threading.main_thread()


def replace_in_torch(refuse: Callable[[str], NoReturn]) -> Callable[[], None]:
    """Replace the parts of torch.

    Args:
        refuse: called with the full name of what a record names but must not.

    Returns:
        Restores torch's own.
    """
    loader, c10d = cast("Any", state_dict_loader), cast("Any", distributed_c10d)
    former = loader._DistWrapper, c10d._unpickler

    def restore() -> None:
        loader._DistWrapper, c10d._unpickler = former

    loader._DistWrapper, c10d._unpickler = _LoadingRanks, partial(_unpickler, refuse)
    return restore


def are_same_objects(one: torch.Tensor, other: torch.Tensor, refuse: Callable[[str], NoReturn]) -> bool:
    """Whether two tensors are equal, or consist of pickles of equal objects (a pickled tensor contains its address)."""
    if torch.equal(one, other):
        return True
    if (one.dtype, one.shape) != (torch.uint8, other.shape):
        return False
    try:
        return are_same(_objects_in(one, refuse), _objects_in(other, refuse))
    except (ValueError, RuntimeError):  # some compare element by element
        return False


def _objects_in(pickles: torch.Tensor, refuse: Callable[[str], NoReturn]) -> list[Any]:
    found: list[Any] = []
    file = io.BytesIO(pickles.cpu().numpy().tobytes())
    while file.tell() < pickles.numel():
        found.append(DataUnpickler(file, refuse).load())
    return found


class _LoadingRanks(_DistWrapper):
    """The ranks that load a checkpoint together; only this one if it is not connected to the others."""

    def __init__(self, group: dist.ProcessGroup | None, use_dist: bool, coordinator_rank: int) -> None:
        is_connected = not is_alone()
        super().__init__(group, use_dist and is_connected, coordinator_rank)
        if use_dist and not is_connected:
            self.rank = dist.get_rank(group)  # names its own file, where each rank has one


def _unpickler(refuse: Callable[[str], NoReturn], file: io.BytesIO) -> pickle.Unpickler:
    return DataUnpickler(file, refuse) if is_alone() else pickle.Unpickler(file)


class DataUnpickler(pickle.Unpickler):
    """Reads objects that consist of data.

    These are what `torch.load(..., weights_only=True)` reads, with what `torch.serialization.add_safe_globals` allows;
    arrays of NumPy, `_PLAIN_CLASSES`, enums, named tuples, and dataclasses without `__post_init__`. No module is
    imported.
    """

    def __init__(self, file: io.BytesIO, refuse: Callable[[str], NoReturn]) -> None:
        """Read from `file`; `refuse` is called with the full name of anything else."""
        super().__init__(file)
        self._refuse = refuse

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Look up what a pickle names."""
        name = f"{module_name}.{global_name}"
        if name == "torch.storage._load_from_bytes":  # of a tensor that `torch.save` has not written
            return _load_storage
        allowed = {**weights_only._get_allowed_globals(), **weights_only._get_user_allowed_globals()}
        if name in allowed:
            return allowed[name]
        found = super().find_class(module_name, global_name) if module_name in sys.modules else None
        return found if _is_data(found) else self._refuse(name)


def _load_storage(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def _is_data(found: object) -> bool:
    if any(found is each for each in _NUMPY):
        return True
    if not isinstance(found, type):
        return False
    if found in _PLAIN_CLASSES or issubclass(found, enum.Enum):
        return True
    if issubclass(found, tuple):
        return getattr(found, "_fields", None) is not None
    return dataclasses.is_dataclass(found) and getattr(found, "__post_init__", None) is None
