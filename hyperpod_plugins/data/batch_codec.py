"""Batches as bytes without pickle: the structure as JSON, then the raw bytes of every tensor.

What another process left in shared memory is read as data only; nothing in it can run code.
"""

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyperpod_plugins.errors import DataError

_LENGTH_BYTES = 8
_NUMPY_KINDS = "biufc"
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def encode_batch(batch: Any) -> bytes:
    """Turn a batch into bytes: tensors and arrays in dicts, lists and tuples, with numbers, strings, bytes and None.

    Raises:
        DataError: naming the part of the batch that is something else.
    """
    blobs: list[bytes] = []
    structure = json.dumps(_describe(batch, "batch", blobs)).encode()
    return b"".join([len(structure).to_bytes(_LENGTH_BYTES, "little"), structure, *blobs])


def decode_batch(payload: bytearray) -> Any:
    """Rebuild the batch that `encode_batch` turned into `payload`, whose bytes must be sound."""
    end = _LENGTH_BYTES + int.from_bytes(payload[:_LENGTH_BYTES], "little")
    return _Reader(payload, end).build(json.loads(payload[_LENGTH_BYTES:end]))


def _describe(value: Any, where: str, blobs: list[bytes]) -> list[Any]:
    """A list for each part: its kind, then what rebuilds it. Exact types only: nothing comes back as another one."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return ["value", value]
    if kind is bytes:
        blobs.append(value)
        return ["bytes", len(value)]
    if kind in (list, tuple):
        return [kind.__name__, [_describe(item, f"{where}[{index}]", blobs) for index, item in enumerate(value)]]
    if kind is dict and all(type(key) in (str, int) for key in value):
        return ["dict", [[key, _describe(item, f"{where}[{key!r}]", blobs)] for key, item in value.items()]]
    if kind is Tensor and value.layout == torch.strided and value.device.type == "cpu" and not value.is_quantized:
        flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        blobs.append(flat.view(torch.uint8).numpy().tobytes())
        return ["tensor", str(value.dtype), list(value.shape), len(blobs[-1])]
    if kind is np.ndarray and value.dtype.kind in _NUMPY_KINDS:
        blobs.append(value.tobytes())
        return ["array", value.dtype.str, list(value.shape), len(blobs[-1])]
    raise DataError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which the batch cache cannot keep. It keeps plain dicts "
        "(with string or whole-number keys), lists, tuples, dense CPU tensors, numeric arrays, numbers, strings, "
        "bytes and None: let collate_fn return these."
    )


class _Reader:
    """Takes the blobs of a payload one after the other."""

    def __init__(self, payload: bytearray, offset: int) -> None:
        self._payload = payload
        self._offset = offset

    def build(self, node: list[Any]) -> Any:
        """Rebuild the value that `node` describes."""
        match node:
            case ["value", value]:
                return value
            case ["bytes", size]:
                return bytes(self._take(size))
            case ["list", items]:
                return [self.build(item) for item in items]
            case ["tuple", items]:
                return tuple(self.build(item) for item in items)
            case ["dict", items]:
                return {key: self.build(item) for key, item in items}
            case ["tensor", dtype, shape, size]:
                return self._tensor(_DTYPES[dtype], shape, size)
            case ["array", dtype, shape, size]:
                return np.frombuffer(self._take(size), dtype=dtype).reshape(shape).copy()
            case _:
                raise DataError(f"a batch in the cache has an unknown part {node!r}. Remove the cache and start again.")

    def _tensor(self, dtype: torch.dtype, shape: list[int], size: int) -> Tensor:
        if not size:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._take(size), dtype=torch.uint8).view(dtype).reshape(shape)

    def _take(self, size: int) -> bytearray:
        self._offset += size
        return self._payload[self._offset - size : self._offset]
