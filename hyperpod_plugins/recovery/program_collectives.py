"""What collectives give to a process that is not connected to the others: the program's own, and those of libraries.

A joiner sets itself up alone, and so does a rank that enters a fit again: collectives do nothing there. For those of
torch and Lightning this is right, because the state comes from the other ranks later. But a collective in the program's
own code, such as an all-reduce in `setup` or the forward of a sharded model, may have a result that matters. So each
rank records the results of its own ones in its set-up, and a process that makes the same call without connections gets
the recorded result.

All ranks start again from the last checkpoint if such a call has no record: its result was too large or is of another
world, or it comes later (in `on_train_batch_start`), where the result may differ each time. A barrier has no result and
needs no record.

    adapter       the set-up lasts
    Lightning     from the creation of the process group in `fit` until `on_train_start` has been called
    Session       from the creation of the session until its first loop

A library's collectives over Python objects are recorded like the program's own, because what they return is read at
once, and no state that comes later replaces it. `replace_in_torch` replaces two parts of torch in a process that takes
part in recovery. Both behave as torch's own while the process is connected.

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
import hashlib
import io
import logging
import pathlib
import pickle
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import _weights_only_unpickler as weights_only
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.utils import _DistWrapper

from hyperpod_plugins.comm import WORLD, GroupKey, group_health
from hyperpod_plugins.comm.health import Phase
from hyperpod_plugins.elastic import JobStore
from hyperpod_plugins.errors import StateLost
from hyperpod_plugins.recovery.packing import are_same, pack, unpack

log = logging.getLogger(__name__)
MAX_RESULT_BYTES = 2**16
"""Largest result that is recorded."""
MAX_RECORDS = 1000
"""Most results that a process records before the first step of a call of the program."""
_LIBRARIES = frozenset(
    {
        *("hyperpod_plugins", "torch", "lightning", "pytorch_lightning", "lightning_fabric"),
        *("torchmetrics", "accelerate", "transformers", "peft", "transformer_engine"),
        *("builtins", "typing", "abc"),
    }
)
_PLUMBING = (
    "hyperpod_plugins.accelerate.collectives",
    "hyperpod_plugins.comm",
    "torch._ops",
    "torch.autograd",
    "torch.distributed._functional_collectives",
    "torch.distributed.c10d_logger",
    "torch.distributed.distributed_c10d",
    "torch.distributed.nn",
    "torch.utils._contextlib",
    "accelerate.utils.operations",
)
"""Modules through which a call of the program reaches a group."""
_COMPUTATIONS = (
    "torch.distributed._state_dict_utils",
    "torch.distributed.fsdp._fully_shard._fsdp_state",
    "torch.distributed.tensor._dispatch",
    "torch.distributed.tensor._redistribute",
)
"""Modules of torch that communicate while the program computes: the forward of a sharded model, a DTensor's operation,
the values that rank 0 shares.

Its other collectives set up modules and tensors, whose values a joiner gets with its state.
"""
_OF_MODELS = ("torch.", "transformers.", "peft.", "hyperpod_plugins.parallel.unit_watch")
"""Modules through which a call of the program reaches a computation. What ranks compare there (`gather_trace`) has no
result that matters."""
_OF_LOADING = ("accelerate.accelerator", "accelerate.utils.fsdp_utils")
"""Modules through which a call of the program reaches collectives over objects, and values that rank 0 shares."""
_C10D = "torch.distributed.distributed_c10d"
_LOADS = "torch.distributed.checkpoint.state_dict_loader"
"""Communicates nothing in a process without connections."""
_WRITES = "torch.distributed.checkpoint.state_dict_saver"
"""Must not be repeated: a replacement has no state yet that it could write."""
_PASSED_ON = frozenset(
    {
        *("all_gather", "_all_gather_ddp_if_available", "gather", "gather_for_metrics"),
        *("reduce", "reduce_boolean_decision"),
    }
)
"""Functions of Lightning and Accelerate that only pass on a collective of their caller."""
_WITHOUT_RESULT = ("barrier",)
_WITHOUT_RECORD = ("send", "recv", "coalesced")
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


class ProgramCollectives:
    """Records and repeats the results of one process's own collectives; for the main thread."""

    def __init__(
        self,
        job_store: JobStore,
        worker_id: int,
        world_number: Callable[[], int],
        restart_all: Callable[[StateLost], NoReturn],
    ) -> None:
        """Start at the beginning of a set-up.

        Args:
            job_store: of the job.
            worker_id: of this process.
            world_number: returns the number of its present world.
            restart_all: has all processes start again.
        """
        self._job_store = job_store
        self._worker_id = worker_id
        self._world_number = world_number
        self._restart_all = restart_all
        self._entry, self._is_in_set_up = -1, True
        self._counts: Counter[str] = Counter()
        self._num_recorded = 0
        self._warned: set[tuple[str, str]] = set()
        self._restore_torch: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Record from now on, and give out what was recorded while this process is detached."""
        group_health.on_set_up, group_health.on_dropped = self._record, self._repeat
        self._restore_torch = replace_in_torch(self._refuse_code)

    def begin_set_up(self, entry: int) -> None:
        """The set-up of an entry of the program begins."""
        self._entry, self._num_recorded, self._is_in_set_up = entry, 0, True
        self._counts.clear()
        group_health.on_set_up = self._record

    def begin_again(self) -> None:
        """This process enters the present entry again, and repeats its set-up."""
        self._is_in_set_up = True
        self._counts.clear()

    def pause(self, *, is_paused: bool) -> None:
        """Stop recording for a while, such as in a sanity check, whose results a joiner does not need; or go on."""
        if self._is_in_set_up:
            group_health.on_set_up = None if is_paused else self._record

    def end_set_up(self) -> None:
        """The loops begin: nothing is recorded from here on, or given out."""
        self._is_in_set_up = False
        group_health.on_set_up = None

    def leave(self) -> None:
        """This process no longer takes part in recovery."""
        group_health.on_set_up, group_health.on_dropped = None, None
        restore, self._restore_torch = self._restore_torch, lambda: None
        restore()

    def _record(self, kind: str, key: GroupKey, outputs: Any, work: dist.Work) -> None:
        """Record the result of a collective if the program itself has called it."""
        caller = "" if kind in _WITHOUT_RESULT or is_called_by(_LOADS) else program_frames()
        if not caller:
            return
        name = self._next_name(caller, kind, key)
        results = [*_tensors_in(outputs)]
        num_bytes = sum(each.nbytes for each in results)
        self._num_recorded += 1
        is_left_out = kind in _WITHOUT_RECORD or is_called_by(_WRITES)
        if is_left_out or num_bytes > MAX_RESULT_BYTES or self._num_recorded > MAX_RECORDS:
            if (kind, _where(caller)) in self._warned:
                return
            self._warned.add((kind, _where(caller)))
            log.warning(
                "%s at %s belongs to the set-up, and its result (%d bytes) is not recorded: if a process is lost, its "
                "replacement calls it alone, and all processes start again from the last checkpoint. Parameters and "
                "optimizer state need not be shared: a replacement gets them",
                *(kind, _where(caller), num_bytes),
            )
            return
        work.wait()
        self._job_store.set(name, pack([each.detach().cpu().clone() for each in results]))

    def _repeat(self, kind: str, key: GroupKey, outputs: Any, is_source: bool = False) -> None:
        """Give a collective without connections its recorded result if the program itself has called it."""
        caller = "" if kind in _WITHOUT_RESULT else program_frames()
        if not caller:
            return
        data = self._job_store.try_get(self._next_name(caller, kind, key)) if self._is_in_set_up else None
        recorded = None if data is None else _tensors_read(data)
        places = [*_tensors_in(outputs)]
        if recorded is None or [(r.shape, r.dtype) for r in recorded] != [(p.shape, p.dtype) for p in places]:
            self._restart_all(
                StateLost(
                    f"{kind} in {_where(caller)} was called before this process had joined the others, and "
                    f"its result was not recorded. Call it in the set-up, where results of up to {MAX_RESULT_BYTES:,} "
                    "bytes are, or in the computation of a step"
                )
            )
        keeps_its_own = is_source and is_called_by(_C10D, "broadcast_object_list")
        if keeps_its_own and not all(
            are_same_objects(place, value, self._refuse_code) for place, value in zip(places, recorded, strict=True)
        ):
            self._restart_all(
                StateLost(
                    f"{_where(caller)} sends another object than its predecessor, which the other ranks hold. Use "
                    "session.agree, or send what is the same in each process"
                )
            )
        with torch.no_grad():
            for place, value in zip(places, recorded, strict=True):
                place.copy_(value)

    def _refuse_code(self, name: str) -> NoReturn:
        caller = program_frames()
        self._restart_all(
            StateLost(
                f"an object that {_where(caller)} received cannot be read from its record without running {name}. "
                "Share tensors, plain containers, numbers, strings, enums, named tuples and dataclasses without "
                "__post_init__ in the set-up, or allow a class with torch.serialization.add_safe_globals"
            )
        )

    def _next_name(self, caller: str, kind: str, key: GroupKey) -> str:
        """Name of a result: a broadcast to all has the same on all ranks of all worlds, others are of one rank."""
        whose = "all" if kind == "broadcast" and key == WORLD else f"{self._world_number()}/{self._worker_id}"
        number, self._counts[caller] = self._counts[caller], self._counts[caller] + 1
        digest = hashlib.blake2b(caller.encode(), digest_size=8).hexdigest()
        return f"own/{self._entry}/{whose}/{digest}/{number}"


def is_library(module: str) -> bool:
    """Whether a module, by its full name, belongs to a library whose collectives are not the program's own."""
    return module.partition(".")[0] in _LIBRARIES


def is_of_program(cls: type) -> bool:
    """Whether the program defines this class, or one that it derives from."""
    return not all(is_library(base.__module__) for base in cls.__mro__)


def program_frames() -> str:
    """Functions of the program that are being called, innermost first; empty if a library calls the collective."""
    found: list[str] = []
    is_computed, is_within_model = False, False
    frame = sys._getframe(1)
    while (frame := frame.f_back) is not None:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if not is_library(module):
            found.append(f"{function} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})")
        elif found:
            continue
        elif module == _C10D and "object" in function:
            is_within_model = is_computed = True
        elif module.startswith((*_PLUMBING, __name__)) or _passes_on(module, function):
            continue
        elif module.startswith(_OF_MODELS) or (is_computed and module.startswith(_OF_LOADING)):
            is_computed |= module.startswith(_COMPUTATIONS)
            is_within_model = True
        else:
            return ""
    return "" if is_within_model and not is_computed else " < ".join(found)


def is_called_by(module: str, function: str = "") -> bool:
    """Whether a function of a module, or the given one, is being called."""
    frame = sys._getframe(1)
    while (frame := frame.f_back) is not None:
        if frame.f_globals.get("__name__") == module and function in ("", frame.f_code.co_name):
            return True
    return False


def _where(caller: str) -> str:
    return caller.partition(" < ")[0]


def _passes_on(module: str, function: str) -> bool:
    return function in _PASSED_ON and not module.startswith("torch.")


def _tensors_read(data: bytes) -> list[torch.Tensor] | None:
    """The tensors of a record; None if the store, which is not trusted, holds anything else."""
    try:
        found = unpack(data)
    except pickle.UnpicklingError:
        return None
    is_record = isinstance(found, list) and all(isinstance(each, torch.Tensor) for each in found)
    return found if is_record else None


def _tensors_in(outputs: Any) -> Iterator[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, list | tuple):
        for each in outputs:
            yield from _tensors_in(each)


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
