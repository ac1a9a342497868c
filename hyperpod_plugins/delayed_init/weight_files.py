"""Weights that a build reads from safetensors files: they go on the tape, and each rank later copies its own part.

[Note: how weights are found]
Under `delayed_init`, `safetensors.safe_open` returns files whose tensors are delayed, with the reading of the file as
the operation on the tape. What the code that loads a model does with them is recorded like any other operation: a cast,
renamed or tied weights, experts of separate tensors that become one. So `from_pretrained` needs no code of its own
here, and neither does any other loader over safetensors. The replay maps the file into memory and copies from it only
the rank's part; a tensor that the loader has changed (by a cast, for instance) is computed as a whole, one at a time.
Ranks of one node share what they read: the system keeps one copy of a mapped file for all of them.
"""

# There is no public way to leave dispatch modes for a while.
# pyright: reportPrivateUsage=false

import hashlib
import os
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hyperpod_plugins.delayed_init.tape import Tape
from hyperpod_plugins.env import loading_in_this_thread

_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Element types by their name in a file. Tensors of other types are read at once."""
_MAX_HEADER_BYTES = 100_000_000
"""The limit of safetensors itself."""


class _Records(Protocol):
    """What is needed of a `Recorder`."""

    def record_source(self, source: "FileTensor", shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A delayed tensor whose value `source()` returns."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class FileTensor:
    """Reads one tensor of a file, without a copy: its memory is that of the mapped file."""

    name: str
    """Of the tensor in the file."""
    digest: str
    """Digest of the file's header and size; see `_digest`."""
    file: Any = field(repr=False)
    """The open file."""

    def __call__(self) -> torch.Tensor:
        """The tensor, in the memory of the mapped file."""
        return self.file.get_tensor(self.name)


def files_digest(tape: Tape) -> str:
    """Digest of the headers and sizes of the files that a build has read from; empty if there are none."""
    found = sorted({op.func.digest for op in tape.ops if isinstance(op.func, FileTensor)})
    return hashlib.blake2b("".join(found).encode(), digest_size=8).hexdigest() if found else ""


_lock = threading.Lock()
_recorders: dict[int, _Records] = {}
"""The recorder of each thread that is inside `delayed_init`, by the thread's identifier."""
_originals: list[Any] = []
"""`safetensors.safe_open` itself, while it is replaced."""


@contextmanager
def delayed_files(recorder: _Records) -> Generator[None]:
    """Put tensors that this thread reads from safetensors files on the tape of `recorder`, inside the context."""
    import safetensors

    thread = threading.get_ident()
    with _lock:
        if not _recorders:
            _originals[:] = [safetensors.safe_open]
            _replace_everywhere(safetensors.safe_open, _safe_open)
        _recorders[thread] = recorder
    try:
        with loading_in_this_thread():  # what other threads do is not recorded
            yield
    finally:
        with _lock:
            del _recorders[thread]
            if not _recorders:
                _replace_everywhere(_safe_open, _originals[0])


def _safe_open(filename: Any, framework: str = "pt", device: Any = "cpu", **options: Any) -> Any:
    """Stands for `safetensors.safe_open`; in a thread that is not inside `delayed_init` it is the same."""
    file = _originals[0](filename, framework, device, **options)
    is_on_cpu = device is None or torch.device(device).type == "cpu"
    is_delayed = _recorders.get(threading.get_ident()) is not None and is_on_cpu
    return _DelayedFile(file, os.fspath(filename)) if framework in ("pt", "torch", "pytorch") and is_delayed else file


def _replace_everywhere(old: Any, new: Any) -> None:
    """Replace `safe_open` in each module that has imported it by name."""
    for module in list(sys.modules.values()):
        names: dict[str, Any] = getattr(module, "__dict__", {})
        if names.get("safe_open") is old:
            names["safe_open"] = new


class _DelayedFile:
    """An open safetensors file, as `safe_open` returns it, whose tensors are delayed.

    A thread that is not inside `delayed_init`, any longer or at all, reads values.
    """

    def __init__(self, file: Any, path: str) -> None:
        self._file, self._digest = file, _digest(path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "_DelayedFile":
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the file open: the tape reads from it, and closes it by dropping it."""

    def get_slice(self, name: str) -> Any:
        return _DelayedSlice(self, name) if threading.get_ident() in _recorders else self._file.get_slice(name)

    def get_tensor(self, name: str) -> torch.Tensor:
        recorder = _recorders.get(threading.get_ident())
        if recorder is None:
            return self._file.get_tensor(name)
        described = self._file.get_slice(name)
        dtype = _TYPES.get(described.get_dtype())
        if dtype is None:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                return self._file.get_tensor(name)
        source = FileTensor(name, self._digest, self._file)
        return recorder.record_source(source, tuple(described.get_shape()), dtype)

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return {name: self.get_tensor(name) for name in self._file.keys()}  # noqa: SIM118 (it is not a dict)


class _DelayedSlice:
    """A tensor of a file before it is read, as `get_slice` returns it."""

    def __init__(self, file: _DelayedFile, name: str) -> None:
        self._file, self._name = file, name
        self._slice = file._file.get_slice(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slice, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor = self._file.get_tensor(self._name)
        return tensor if index is Ellipsis else tensor[index]


def _digest(path: str) -> str:
    """Digest of a file's header and size, by which ranks see whether they read the same file.

    Values are not compared: that would read the whole file on each rank.
    """
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = file.read(min(size, _MAX_HEADER_BYTES))
        return hashlib.blake2b(header + str(os.fstat(file.fileno()).st_size).encode(), digest_size=8).hexdigest()
