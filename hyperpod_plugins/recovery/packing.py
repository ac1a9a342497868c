"""Serialize small states to bytes, read them without running code, and compare them. Each step does this.

For a small state, writing the archive of `torch.save` takes longer than sending it. So numbers, strings, plain
containers and tensors are pickled directly, and read by an unpickler that allows no classes (see "Restricting
Globals" in the documentation of Python's `pickle`). `torch.save` writes a state that contains anything else.
"""

import copy
import io
import marshal
import math
import pickle
import reprlib
from collections import Counter
from typing import Any

import torch
from torch.serialization import default_restore_location

MUTABLE_LEAVES = set, bytearray, Counter
"""Types that `torch.load` reads without running code, that change in place, and that `tree_map` does not look into."""
_ZIP = b"PK"
"""First bytes of a `torch.save` archive."""
_LONG = 64
"""Lists with more entries are first compared as a whole."""
_INTEGERS = torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DTYPES = {str(dtype): dtype for dtype in (*_INTEGERS, torch.float16, torch.float32, torch.float64, torch.bfloat16)}


class _NotPlainError(Exception):
    """The value must be written by `torch.save`."""


def pack(value: Any) -> bytes:
    """Serialize a value to bytes that `unpack` reads without running code."""
    for pickler in (_PlainPickler, _Pickler):
        buffer = io.BytesIO()
        try:
            pickler(buffer, protocol=4).dump(value)
        except _NotPlainError:
            continue
        return buffer.getvalue()
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(data: bytes, *, map_location: str | None = "cpu") -> Any:
    """Inverse of `packed`. Reads only tensors, plain containers, numbers and strings.

    Args:
        data: bytes from this process or another one, not trusted.
        map_location: device for tensors that were on a device; None for this process's device of the same kind.

    Raises:
        UnpicklingError: `data` holds anything else.
    """
    if data.startswith(_ZIP):
        return torch.load(io.BytesIO(data), weights_only=True, map_location=map_location or on_own_device)
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        EOFError,
        OverflowError,
        MemoryError,
        RuntimeError,
    ) as error:
        raise pickle.UnpicklingError(f"not a packed state: {error}") from error


def on_own_device(storage: Any, location: str) -> Any:
    """The `map_location` for what another rank has saved: the present device of the kind that it was on.

    Without it, tensors of `cuda:3` would be put on `cuda:3` again, which is another rank's device here.
    """
    return default_restore_location(storage, location.partition(":")[0])


class _PlainPickler(pickle.Pickler):
    """Writes only types that pickle handles without naming a class, with no Python call for each object."""

    def reducer_override(self, obj: Any) -> Any:
        raise _NotPlainError


class _Pickler(_PlainPickler):
    """Also writes tensors in host memory.

    Tensors that share memory or are not contiguous are left to `torch.save`, which preserves that.
    """

    def __init__(self, file: io.BytesIO, *, protocol: int) -> None:
        super().__init__(file, protocol=protocol)
        self._memories: set[int] = set()

    def persistent_id(self, obj: Any) -> tuple[str, tuple[int, ...], bytes] | None:
        if not isinstance(obj, torch.Tensor):
            return None
        if not self._is_plain(obj):
            raise _NotPlainError
        values = obj.view(torch.int16) if obj.dtype is torch.bfloat16 else obj  # NumPy has no bfloat16
        return str(obj.dtype), tuple(obj.shape), values.numpy().tobytes()

    def _is_plain(self, tensor: torch.Tensor) -> bool:
        is_known = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
        if not is_known or tensor.requires_grad or tensor.is_neg() or not tensor.is_contiguous():
            return False
        if str(tensor.dtype) not in _DTYPES:
            return False
        memory = tensor.untyped_storage().data_ptr()
        if memory in self._memories:
            return False
        if memory:
            self._memories.add(memory)
        return True


class _Unpickler(pickle.Unpickler):
    """Reads what `_Pickler` writes; rejects anything that would import or call something."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"a packed state names {module_name}.{global_name}")

    def persistent_load(self, pid: Any) -> torch.Tensor:
        match pid:
            case (str(name), tuple(shape), bytes(data)) if name in _DTYPES and all(map(is_size, shape)):
                dtype = _DTYPES[name]
                if math.prod(shape) * dtype.itemsize == len(data):
                    values = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
                    return values.view(shape)
            case _:
                pass
        raise pickle.UnpicklingError(f"a packed state has a malformed tensor: {reprlib.repr(pid)}")


def is_size(value: object) -> bool:
    """Whether an untrusted value is a valid size in a tensor's shape."""
    return type(value) is int and 0 <= value < 2**63


def copied_leaf(leaf: Any) -> Any:
    """A copy of a leaf of a state that an object may change in place; of a tensor, on the CPU."""
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().cpu().clone()
    return copy.copy(leaf) if isinstance(leaf, MUTABLE_LEAVES) else leaf


def on_devices_of(present: Any, value: Any) -> Any:
    """A state with each tensor on the device of the one in its place in `present`; others as they are."""
    if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
        return value.to(present.device)
    if type(present) is dict and type(value) is dict:
        return {key: on_devices_of(present.get(key), each) for key, each in value.items()}
    if type(present) is list and type(value) is list:
        return [on_devices_of(old, new) for old, new in zip([*present, *[None] * len(value)], value, strict=False)]
    return value


def are_same(one: Any, other: Any) -> bool:
    """Whether plain containers and tensors are bitwise equal."""
    if one is other:
        return True
    if type(one) is bytes:
        return type(other) is bytes and one == other
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
            return False
        return torch.equal(as_integers(one), as_integers(other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(are_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) > _LONG and _are_written_alike(one, other):
            return True
        return len(one) == len(other) and all(map(are_same, one, other))
    return type(one) is type(other) and (one == other or (type(one) is float and one != one and other != other))


def _are_written_alike(one: Any, other: Any) -> bool:
    """Whether two long containers of numbers and strings are equal; False also where this is not known."""
    try:
        return marshal.dumps(one, 2) == marshal.dumps(other, 2)
    except ValueError:
        return False


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """View of the same memory as integers of the same size, for bitwise comparison; a copy for a conjugated view."""
    real = tensor.detach()
    if tensor.is_complex() or tensor.is_neg():  # only these may have a conj or neg bit, which changes the values
        real = real.resolve_conj().resolve_neg()
        real = torch.view_as_real(real) if real.is_complex() else real
    return real.view(_INTEGER_OF_SIZE[real.element_size()])
