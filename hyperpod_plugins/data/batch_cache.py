"""A cache of finished batches in shared memory, which outlive the process that made them and serve the whole node.

For pipelines that cost more than copying their result: decoding, augmentation, tokenising on the fly. A replacement
starts with the batches that were made ahead, while its own pipeline warms up.

From the bottom up: a codec of batches, `BatchRing` (slots in a mapped file), `prefetched`, `BatchCache` and `cached`.
"""

import hashlib
import json
import logging
import mmap
import os
import struct
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hyperpod_plugins.data.locks import file_lock
from hyperpod_plugins.errors import ConfigError, DataError

# The codec of batches: the structure as JSON, then the raw bytes of every tensor. It does not use pickle, so that
# decoding what another process left in shared memory cannot run code.

_LENGTH_BYTES = 8
_NUMPY_KINDS = "biufc"
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def encode_batch(batch: Any) -> bytes:
    """Encode a batch: tensors and arrays in dicts, lists and tuples, with numbers, strings, bytes and None.

    Raises:
        DataError: the batch contains something else; the message names that part.
    """
    blobs: list[bytes] = []
    structure = json.dumps(_describe(batch, "batch", blobs)).encode()
    return b"".join([len(structure).to_bytes(_LENGTH_BYTES, "little"), structure, *blobs])


def decode_batch(payload: bytearray) -> Any:
    """Decode a batch from the output of `encode_batch`, which must be undamaged."""
    end = _LENGTH_BYTES + int.from_bytes(payload[:_LENGTH_BYTES], "little")
    return _Reader(payload, end).build(json.loads(payload[_LENGTH_BYTES:end]))


def _describe(value: Any, where: str, blobs: list[bytes]) -> list[Any]:
    """Describe a value as `[kind, ...]` and append its bytes to `blobs`.

    Only exact types are accepted, so that no value is decoded as another type.
    """
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
    """Rebuilds values, taking the blobs of a payload in order."""

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


# A ring of checksummed slots in a mapped file. Entries that a killed process completed stay; torn ones are detected.
#
#     0              header: magic, version, number and size of slots, checksum; then the turn counter
#     4096           one 64-byte record for each slot: key, index, size, checksums, state
#     page-aligned   the slots
#
# [Note: torn writes] A writer first marks the record as empty, then writes the payload, then the record, and its
# state last. A reader copies the payload before checking it, so that a writer that reuses the slot meanwhile can only
# cause a miss.

_MAGIC = b"HYPODRNG"
_VERSION = 1
_PAGE = 4096
_FIELDS = struct.Struct("<8sIIQ")  # magic, version, slots, bytes per slot
_TURN_OFFSET = 64
_EMPTY, _COMMITTED = 0, 0x1EAF
_RECORD = np.dtype(
    [
        ("key", "<u8", (2,)),
        ("index", "<u8"),
        ("size", "<u8"),
        ("payload_crc", "<u4"),
        ("record_crc", "<u4"),
        ("padding", "<u8", (2,)),
        ("state", "<u8"),
    ]
)
KEY_BYTES = 16


class BatchRing:
    """The slots of a mapped file. Callers of `write` and `discard` must hold the lock; `read` needs none.

    Args:
        memory: the mapped file, already checked or newly created.
        num_slots: number of slots.
        slot_bytes: size of each slot.
    """

    def __init__(self, memory: mmap.mmap, num_slots: int, slot_bytes: int) -> None:
        self._memory = memory
        self._num_slots = num_slots
        self._slot_bytes = slot_bytes
        self._records: npt.NDArray[np.void] = np.ndarray((num_slots,), _RECORD, memory, _PAGE)
        self._turn: npt.NDArray[np.uint64] = np.ndarray((1,), "<u8", memory, _TURN_OFFSET)

    def read(self, key: bytes, index: int) -> tuple[bytearray | None, int | None]:
        """Return a copy of the payload or None, and the slot that should hold it if that is damaged, else None."""
        for slot in self._slots_of(key, index):
            record = self._records[slot].copy()
            if int(record["index"]) != index or record["key"].tobytes() != key:
                return None, None  # a writer has since reused the slot for another batch
            size = int(record["size"])
            if int(record["record_crc"]) == _record_crc(record) and size <= self._slot_bytes:
                start = self._offset(slot)
                payload = bytearray(self._memory[start : start + size])
                if zlib.crc32(payload) == int(record["payload_crc"]):
                    return payload, None
            return None, slot
        return None, None

    def write(self, key: bytes, index: int, payload: bytes) -> None:
        """Write `payload` over the oldest one, unless it is present already."""
        if self._slots_of(key, index):
            return
        slot = int(self._turn[0]) % self._num_slots
        self._turn[0] = slot + 1
        self._records["state"][slot] = _EMPTY
        start = self._offset(slot)
        self._memory[start : start + len(payload)] = payload
        record = np.zeros((), _RECORD)
        record["key"] = np.frombuffer(key, "<u8")
        record["index"] = index
        record["size"] = len(payload)
        record["payload_crc"] = zlib.crc32(payload)
        record["record_crc"] = _record_crc(record)
        self._records[slot] = record
        self._records["state"][slot] = _COMMITTED

    def discard(self, slot: int) -> None:
        """Mark a damaged slot as empty."""
        self._records["state"][slot] = _EMPTY

    def _slots_of(self, key: bytes, index: int) -> list[int]:
        first, second = np.frombuffer(key, "<u8")
        records = self._records
        found = (records["state"] == _COMMITTED) & (records["index"] == index)
        found &= (records["key"][:, 0] == first) & (records["key"][:, 1] == second)
        return np.flatnonzero(found).tolist()

    def _offset(self, slot: int) -> int:
        return _data_offset(self._num_slots) + slot * self._slot_bytes


def open_ring(path: Path, num_slots: int, slot_bytes: int) -> tuple[BatchRing | None, str]:
    """Map an existing file; returns the ring, or None and the reason why the file cannot be used.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if path.is_symlink():
        return None, "it is a symbolic link"
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            return None, "other users may write to it"
        if status.st_size != ring_bytes(num_slots, slot_bytes):
            return None, f"it has {status.st_size} bytes instead of {ring_bytes(num_slots, slot_bytes)}"
        memory = mmap.mmap(descriptor, status.st_size)
    finally:
        os.close(descriptor)
    if memory[: _FIELDS.size + 4] != _header(num_slots, slot_bytes):
        return None, "its header is damaged, or for another kind of file, version or slot size"
    return BatchRing(memory, num_slots, slot_bytes), ""


def create_ring(path: Path, num_slots: int, slot_bytes: int) -> BatchRing:
    """Create an empty ring at `path` atomically; the caller must hold the lock.

    Raises:
        DataError: the file system has too little space.
    """
    path.unlink(missing_ok=True)
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    size = ring_bytes(num_slots, slot_bytes)
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        # Reserve the space now: with a sparse file, a full disk would kill the process with SIGBUS at a later write.
        os.posix_fallocate(descriptor, 0, size)
        memory = mmap.mmap(descriptor, size)
    except OSError as error:
        partial.unlink()
        free = os.statvfs(path.parent)
        raise DataError(
            f"the batch cache needs {size} bytes in {str(path.parent)!r}, which has {free.f_bavail * free.f_frsize} "
            f"left ({error}). Use a smaller size_bytes, a larger /dev/shm (docker: --shm-size), or another folder."
        ) from None
    finally:
        os.close(descriptor)
    memory[: _FIELDS.size + 4] = _header(num_slots, slot_bytes)
    partial.replace(path)
    return BatchRing(memory, num_slots, slot_bytes)


def ring_bytes(num_slots: int, slot_bytes: int) -> int:
    """Size of the whole file in bytes."""
    return _data_offset(num_slots) + num_slots * slot_bytes


def _header(num_slots: int, slot_bytes: int) -> bytes:
    fields = _FIELDS.pack(_MAGIC, _VERSION, num_slots, slot_bytes)
    return fields + zlib.crc32(fields).to_bytes(4, "little")


def _data_offset(num_slots: int) -> int:
    table_bytes = num_slots * _RECORD.itemsize
    return _PAGE + -(-table_bytes // _PAGE) * _PAGE


def _record_crc(record: npt.NDArray[np.void] | np.void) -> int:
    covered = [record[name].tobytes() for name in ("key", "index", "size", "payload_crc")]
    return zlib.crc32(b"".join(covered))


# Prefetching in a thread.

_END: Final = object()


def prefetched(source: Iterator[Any], depth: int) -> Generator[Any, None, None]:
    """Yield the items of `source`, which one thread reads up to `depth` items ahead.

    An exception of the source is raised here, after the items before it and with its own traceback.
    """
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hyperpod-prefetch")
    try:
        wanted = deque(pool.submit(next, source, _END) for _ in range(depth))
        while (item := wanted.popleft().result()) is not _END:
            wanted.append(pool.submit(next, source, _END))
            yield item
    finally:
        pool.shutdown(cancel_futures=True)


# The cache.

_log = logging.getLogger(__name__)
_LOCK_TIMEOUT_S = 60.0
_MOST_SKIPPED = 8
"""Maximum number of batches to read and drop so that a pipeline catches up with the cache; beyond, it is reopened."""


class Missing:
    """The type of `MISSING`."""


MISSING: Final = Missing()
"""Returned by `BatchCache.get` for a missing batch; None is a valid batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCacheConfig:
    """Size and location of a batch cache."""

    size_bytes: int = 1 << 30
    """Space for all batches together, reserved at once."""
    max_batch_bytes: int = 16 << 20
    """Size of one slot; larger batches are passed on without being cached."""
    folder: Path = Path("/dev/shm")
    """Folder on an in-memory file system; the cache creates a subfolder that only its user can access."""

    def __post_init__(self) -> None:
        """Check that at least one batch fits."""
        if not 0 < self.max_batch_bytes <= self.size_bytes:
            raise ConfigError(
                f"max_batch_bytes={self.max_batch_bytes} must be positive and not larger than "
                f"size_bytes={self.size_bytes}: the cache holds size_bytes // max_batch_bytes batches."
            )

    @property
    def num_slots(self) -> int:
        """Maximum number of cached batches; a further one replaces the oldest."""
        return self.size_bytes // self.max_batch_bytes


class BatchCache:
    """A ring of batches in a file that all processes of a node map; a new batch replaces the oldest.

    A torn, damaged or foreign entry is treated as missing and never returned. A file that is damaged or has another
    size is replaced. Use `fingerprint` to distinguish the data and the code that make the batches: entries with
    another fingerprint are not visible.

    Args:
        name: name of the file; processes that use the same name share it.
        fingerprint: identifier of the data and of the pipeline's configuration.
        config: size and location.

    Raises:
        ConfigError: the name is not a plain file name.
        DataError: there is too little space; the folder is missing, not writable, or accessible to other users; or
            another process held the lock for a minute.
    """

    def __init__(self, name: str, *, fingerprint: str, config: BatchCacheConfig | None = None) -> None:
        if not name or "/" in name or name.startswith("."):
            raise ConfigError(
                f"a batch cache was given the name {name!r}. Use a plain file name without '/' or a leading dot."
            )
        self.config = config or BatchCacheConfig()
        folder = _private_folder(self.config.folder)
        self.path = folder / f"{name}.batches"
        self.num_damaged = 0
        self._lock = folder / f"{name}.lock"
        self._fingerprint = fingerprint
        self._has_warned = False
        self._ring = self._open()

    def get(self, key: str, index: int) -> Any:
        """Return a copy of batch `index` of `key`, or `MISSING`."""
        payload, damaged_slot = self._ring.read(self._digest(key), index)
        if payload is not None:
            return decode_batch(payload)
        if damaged_slot is not None:
            self._discard(key, index)
        return MISSING

    def put(self, key: str, index: int, batch: Any) -> bool:
        """Store batch `index` of `key`; returns False if it is too large.

        Raises:
            DataError: the batch contains something that cannot be encoded.
        """
        payload = encode_batch(batch)
        if len(payload) > self.config.max_batch_bytes:
            if not self._has_warned:
                _log.warning(
                    "A batch of %d bytes does not fit the batch cache %s, whose slots have %d bytes: such batches are "
                    "not cached, so they are made again after each restart. Raise max_batch_bytes.",
                    len(payload),
                    self.path.name,
                    self.config.max_batch_bytes,
                )
            self._has_warned = True
            return False
        with self._locked():
            self._ring.write(self._digest(key), index, payload)
        return True

    def remove(self) -> None:
        """Delete the file; processes that have it mapped can still read it.

        The empty lock file stays, because all processes must lock the same file.
        """
        with self._locked():
            self.path.unlink(missing_ok=True)

    def _open(self) -> BatchRing:
        num_slots, slot_bytes = self.config.num_slots, self.config.max_batch_bytes
        with self._locked():
            if self.path.exists():
                ring, why_not = open_ring(self.path, num_slots, slot_bytes)
                if ring is not None:
                    return ring
                _log.warning("Starting with an empty batch cache: %s cannot be used, %s.", self.path, why_not)
            return create_ring(self.path, num_slots, slot_bytes)

    def _discard(self, key: str, index: int) -> None:
        with self._locked():
            payload, slot = self._ring.read(self._digest(key), index)
            if payload is None and slot is not None:  # still damaged, now that no writer is active
                self.num_damaged += 1
                _log.warning("Batch %d in %s is damaged and will be made again.", index, self.path)
                self._ring.discard(slot)

    def _locked(self) -> Any:
        return file_lock(self._lock, timeout_s=_LOCK_TIMEOUT_S, purpose=f"the batch cache {self.path.stem}")

    def _digest(self, key: str) -> bytes:
        return hashlib.blake2b(f"{self._fingerprint}\0{key}".encode(), digest_size=KEY_BYTES).digest()


def cached(
    read_from: Callable[[int], Iterator[Any]],
    cache: BatchCache,
    *,
    key: str,
    indices: Iterable[int],
    read_ahead: int = 0,
) -> Iterator[Any]:
    """Yield the batches with the given indices, from the cache if present, else from the pipeline.

    The pipeline is opened at the first missing batch. Its exceptions reach the caller unchanged.

    Args:
        read_from: opens the pipeline at a batch index and yields the batches from there on.
        cache: where batches are looked up and stored.
        key: distinguishes this sequence of batches from others in the same cache.
        indices: indices of the batches, in the order of the pipeline, which may end earlier.
        read_ahead: number of batches that a thread makes ahead of the caller, so that they outlive this process; 0 to
            make them in the caller's thread.
    """
    batches = _through_cache(read_from, cache, key, indices)
    return prefetched(batches, read_ahead) if read_ahead else batches


def _through_cache(
    read_from: Callable[[int], Iterator[Any]], cache: BatchCache, key: str, indices: Iterable[int]
) -> Iterator[Any]:
    pipeline: Iterator[Any] | None = None
    num_behind = 0  # batches taken from the cache since the pipeline was last read
    for index in indices:
        batch = cache.get(key, index)
        if batch is not MISSING:
            num_behind += 1
            yield batch
            continue
        if pipeline is None or num_behind > _MOST_SKIPPED:
            pipeline, num_behind = read_from(index), 0
        try:
            for _ in range(num_behind):
                next(pipeline)
            batch = next(pipeline)
        except StopIteration:
            return
        num_behind = 0
        cache.put(key, index, batch)
        yield batch


def _private_folder(parent: Path) -> Path:
    folder = parent / f"hyperpod-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"cannot create a folder for batch caches in {str(parent)!r} ({error.strerror}). Create it, or set "
            "BatchCacheConfig(folder=...) to an existing, writable folder on an in-memory file system."
        ) from None
    status = folder.lstat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077 or folder.is_symlink():
        raise DataError(
            f"the folder {str(folder)!r} for batch caches belongs to another user or is open to others, so its "
            "content cannot be trusted. Remove it, or give another folder."
        )
    return folder
