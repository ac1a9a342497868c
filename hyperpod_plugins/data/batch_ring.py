"""A ring of checksummed slots in a mapped file: what a killed process finished stays, what it tore is noticed.

    0              header: magic, version, number and size of slots, checksum; then the turn counter
    4096           one 64-byte record for each slot: key, index, size, checksums, state
    page-aligned   the slots

[Note: torn writes] A writer first marks the record as empty, then writes the payload, then the record, and its state
last. A reader copies the payload out before it checks it, so that a writer that comes round in between can only cause a
miss.
"""

import mmap
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hyperpod_plugins.errors import DataError

_MAGIC = b"HYPODRNG"
_VERSION = 1
_PAGE = 4096
_FIELDS = struct.Struct("<8sIIQ")  # magic, version, slots, bytes a slot
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
    """The slots of one mapped file; `write` and `discard` need the caller's lock, `read` needs none.

    Args:
        memory: the mapped file, already checked or freshly formatted.
        num_slots: number of slots.
        slot_bytes: size of each.
    """

    def __init__(self, memory: mmap.mmap, num_slots: int, slot_bytes: int) -> None:
        self._memory = memory
        self._num_slots = num_slots
        self._slot_bytes = slot_bytes
        self._records: npt.NDArray[np.void] = np.ndarray((num_slots,), _RECORD, memory, _PAGE)
        self._turn: npt.NDArray[np.uint64] = np.ndarray((1,), "<u8", memory, _TURN_OFFSET)

    def read(self, key: bytes, index: int) -> tuple[bytearray | None, int | None]:
        """Return a copy of the payload, or None; and the slot that should have held it, if that one is damaged."""
        for slot in self._slots_of(key, index):
            record = self._records[slot].copy()
            if int(record["index"]) != index or record["key"].tobytes() != key:
                return None, None  # a writer has come round since, and this is another batch
            size = int(record["size"])
            if int(record["record_crc"]) == _record_crc(record) and size <= self._slot_bytes:
                start = self._offset(slot)
                payload = bytearray(self._memory[start : start + size])
                if zlib.crc32(payload) == int(record["payload_crc"]):
                    return payload, None
            return None, slot
        return None, None

    def write(self, key: bytes, index: int, payload: bytes) -> None:
        """Put `payload` in the place of the oldest one, unless it is there already."""
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
        """Empty a slot that was found damaged."""
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
    """Map an existing file, or say why it cannot be used.

    Raises:
        FileNotFoundError: there is none.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            return None, "other users may write to it"
        if status.st_size != ring_bytes(num_slots, slot_bytes):
            return None, f"it has {status.st_size} bytes where {ring_bytes(num_slots, slot_bytes)} belong"
        memory = mmap.mmap(descriptor, status.st_size)
    finally:
        os.close(descriptor)
    if memory[: _FIELDS.size + 4] != _header(num_slots, slot_bytes):
        return None, "its header is damaged, or of another kind of file, version or slot size"
    return BatchRing(memory, num_slots, slot_bytes), ""


def create_ring(path: Path, num_slots: int, slot_bytes: int) -> BatchRing:
    """Make an empty file under `path`, complete or not at all; the caller holds the lock.

    Raises:
        DataError: the file system has no room for it.
    """
    path.unlink(missing_ok=True)
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    size = ring_bytes(num_slots, slot_bytes)
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        # Reserve the room now: in a sparse file a full disk would end the process with SIGBUS at some later write.
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
    """Size of the whole file."""
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
