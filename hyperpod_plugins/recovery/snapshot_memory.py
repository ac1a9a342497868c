"""Snapshots in shared memory: they outlive the process that took them, and its replacement finds them.

A slot is two files: `NAME.data` holds the bytes of all tensors and is mapped into memory; `NAME.head` describes them
and holds the rest. As a process may end at any moment, the head is deleted before the data changes, and written (to a
temporary name, then renamed) once the data is complete. It holds a checksum of everything, which is verified before
anything is used, and not before it is needed: a replacement mostly gets its state from a replica, which waits for it.

Others use shared memory too, such as the workers of a DataLoader, and a process that writes to it when it is full
gets a SIGBUS. So a good part of it stays free, and a snapshot that does not fit is kept in the memory of its process.
"""

import errno
import json
import logging
import mmap
import os
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from hyperpod_plugins.elastic.store.world import WorldPlan
from hyperpod_plugins.env import JobEnv, snapshot_folder
from hyperpod_plugins.parallel.checkpoint.files import tensor_checksum
from hyperpod_plugins.parallel.topology import Topology

log = logging.getLogger(__name__)
_NUM_SLOTS = 2
_FORMAT = 1
_NUM_DIGITS = 12  # of a number of steps
_CHUNK_BYTES = 64 * 2**20  # processed between two calls of `check`
_MIN_FREE_PART, _MIN_FREE_BYTES = 0.5, 2**30


def _never() -> None:
    """Default `check`: never interrupts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of one rank after `step` committed steps."""

    step: int
    header: bytes
    """See `TrainingState.header`."""
    trainer: bytes
    """See `TrainingLoop.capture_own_state`."""
    data: torch.Tensor
    """Bytes of all tensors, in host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """Shared memory in which a process may keep snapshots that outlive it."""

    folder: Path
    """Folder of this node's agent, accessible to this user only."""
    worker_id: int
    """Worker slot of this process, whatever its rank."""
    identity_of: Callable[[int], str]
    """Identifies the state of a rank: job, world, layout and rank. Snapshots with another identity are not used."""
    is_replacement: bool
    """Whether this process replaces another one whose snapshots are valid."""

    def slots(self, name: str, rank: int) -> "SharedSlots":
        """Two slots for the snapshots of `rank`, in files that `name` tells apart."""
        return SharedSlots(self.folder, f"{self.worker_id}-{name}", self.identity_of(rank))

    def committed_steps(self, rank: int) -> "CommittedSteps":
        """The number of steps that `rank` has committed."""
        return CommittedSteps(self.folder / f"{self.worker_id}.committed", self.identity_of(rank))


def shared_memory(
    job: JobEnv, worker_id: int, world: WorldPlan, topology: Topology, *, num_ended: int, is_joining: bool
) -> SharedMemory | None:
    """Shared memory for the snapshots of a process; None if no agent has created a folder for it.

    Args:
        job: environment of the process.
        worker_id: worker slot of the process, whatever its rank.
        world: the world that it belongs to.
        topology: topology of that world.
        num_ended: number of fits that the program has finished; their snapshots are of no use to the next fit.
        is_joining: whether this process replaces a lost one and has not trained yet (see `Member`).
    """
    folder = snapshot_folder()
    if folder is None or not folder.is_dir():
        return None
    layout = f"{job.run_id} fit={num_ended} world={world.number} places={world.worker_ids} {topology}"
    return SharedMemory(
        folder=folder,
        worker_id=worker_id,
        identity_of=lambda rank: f"{layout} rank={rank}",
        is_replacement=is_joining,
    )


class CommittedSteps:
    """The number of committed steps of one rank in shared memory, so that a return can say how many steps it loses."""

    def __init__(self, path: Path, whose: str) -> None:
        """Use the file `path` for the rank that `whose` identifies."""
        self._path = path
        self._whose = f" {whose}\n".encode()
        self._file: int | None = None
        """Descriptor of the file, which stays open, as each step writes to it."""

    def load(self) -> int | None:
        """The number that the previous process left; None if it left none for the same rank."""
        try:
            with open(os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
                number, whose = file.read(_NUM_DIGITS), file.read()
        except OSError:
            return None
        return int(number) if whose == self._whose and number.isdigit() else None

    def record(self, step: int) -> None:
        """Record that `step` steps are committed. A failure is ignored: the number serves a message only."""
        with suppress(OSError):
            if self._file is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                self._file = os.open(self._path, flags, 0o600)
                weakref.finalize(self, os.close, self._file)
            os.pwrite(self._file, b"%0*d" % (_NUM_DIGITS, step) + self._whose, 0)  # always of the same length

    def clear(self) -> None:
        """Delete what the previous process left, before anything is recorded."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


class SharedSlots:
    """Shared memory for two snapshots of one rank. Not thread-safe."""

    def __init__(self, folder: Path, name: str, whose: str) -> None:
        """Use files in `folder` whose names begin with `name`, for snapshots of the state that `whose` identifies."""
        self._data = [folder / f"{name}-{index}.data" for index in range(_NUM_SLOTS)]
        self._heads = [folder / f"{name}-{index}.head" for index in range(_NUM_SLOTS)]
        self._whose = whose
        self._memory: dict[int, torch.Tensor] = {}
        self._registered: dict[int, torch.Tensor] = {}
        self._unverified: dict[int, int] = {}
        """Checksum in the head of each slot that the previous process left and that has not been verified."""
        # If memory is unmapped while registered with CUDA, the next mapping at its address cannot be registered.
        weakref.finalize(self, _unregister_all, self._registered).atexit = False

    def allocate(
        self, num_bytes: int, in_use: Sequence[torch.Tensor], check: Callable[[], None] = _never
    ) -> torch.Tensor | None:
        """Shared memory for a snapshot, in a slot that no snapshot of `in_use` occupies; None if memory is short.

        Args:
            num_bytes: size of the snapshot.
            in_use: data of the snapshots to keep.
            check: called now and then; if it raises, the new memory is freed and the exception propagates.
        """
        used = {self._slot_of(data) for data in in_use}
        slot = next(index for index in range(_NUM_SLOTS) if index not in used)
        self._memory.pop(slot, None)
        _unregister(self._registered.pop(slot, None))
        self._unverified.pop(slot, None)
        self._remove(slot)  # not overwritten: the previous process may still have it mapped
        if num_bytes == 0:
            return None
        memory = None
        try:
            file = os.open(self._data[slot], os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                _allocate(file, num_bytes, check)  # otherwise a write could kill the process (SIGBUS)
                memory = mmap.mmap(file, num_bytes)
            finally:
                os.close(file)
        except OSError:
            return None
        finally:
            if memory is None:
                self._data[slot].unlink(missing_ok=True)
        self._use(slot, torch.frombuffer(memory, dtype=torch.uint8))
        return self._memory[slot]

    def invalidate(self, data: torch.Tensor) -> None:
        """Invalidate a snapshot: its memory is about to change, or it is no longer needed."""
        slot = self._slot_of(data)
        if slot is not None:
            self._unverified.pop(slot, None)
            self._heads[slot].unlink(missing_ok=True)

    def record(self, snapshot: Snapshot, check: Callable[[], None] = _never) -> bool:
        """Make a complete snapshot outlive this process, if its data is in one of the slots; return whether it does.

        `check` is called now and then; if it raises, the snapshot is not recorded and the exception propagates.
        """
        slot = self._slot_of(snapshot.data)
        if slot is None:
            return False
        sizes = [len(snapshot.header), len(snapshot.trainer), snapshot.data.numel()]
        described = {
            "format": _FORMAT,
            "whose": self._whose,
            "step": snapshot.step,
            "sizes": sizes,
            "checksum": _checksum(snapshot.header, snapshot.trainer, snapshot.data, check),
        }
        partial = self._heads[slot].with_suffix(".partial")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(partial, flags, 0o600), "wb") as file:
                file.write(json.dumps(described).encode() + b"\n" + snapshot.header + snapshot.trainer)
            partial.rename(self._heads[slot])
        except OSError:  # no room left, or the agent is gone: the snapshot lives only as long as this process
            partial.unlink(missing_ok=True)
            return False
        return True

    def load(self) -> list[Snapshot]:
        """The snapshots that the previous process left, if they are complete and of the same state.

        Deletes all others: they would only take memory. Call `is_intact` before you use one.
        """
        found = {slot: self._load(slot) for slot in range(_NUM_SLOTS)}
        for slot, snapshot in found.items():
            if snapshot is None:
                self._remove(slot)
        return [snapshot for snapshot in found.values() if snapshot is not None]

    def is_intact(self, snapshot: Snapshot, check: Callable[[], None] = _never) -> bool:
        """Whether a snapshot of `load` has its checksum; deletes it if not.

        `check` is called now and then; if it raises, the exception propagates.
        """
        slot = self._slot_of(snapshot.data)
        if slot is None or slot not in self._unverified:
            return True
        is_intact = _checksum(snapshot.header, snapshot.trainer, snapshot.data, check) == self._unverified[slot]
        del self._unverified[slot]
        if not is_intact:
            self._remove(slot)
        return is_intact

    def clear(self) -> None:
        """Delete what the previous process left."""
        for slot in range(_NUM_SLOTS):
            self._remove(slot)

    def _remove(self, slot: int) -> None:
        for path in (self._heads[slot], self._data[slot]):
            path.unlink(missing_ok=True)

    def _load(self, slot: int) -> Snapshot | None:
        try:
            with open(os.open(self._heads[slot], os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
                described, texts = json.loads(file.readline()), file.read()
            if (described["format"], described["whose"]) != (_FORMAT, self._whose):
                return None
            step, (of_header, of_trainer, num_bytes) = int(described["step"]), described["sizes"]
            checksum = int(described["checksum"])
            file = os.open(self._data[slot], os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(file).st_size != num_bytes or len(texts) != of_header + of_trainer:
                    return None
                data = torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)
            finally:
                os.close(file)
        except (OSError, ValueError, KeyError, TypeError):  # missing or damaged
            return None
        header, trainer = texts[:of_header], texts[of_header:]
        self._unverified[slot] = checksum
        self._use(slot, data)
        return Snapshot(step=step, header=header, trainer=trainer, data=data)

    def _use(self, slot: int, data: torch.Tensor) -> None:
        self._memory[slot] = data
        if _register(data):
            self._registered[slot] = data

    def _slot_of(self, data: torch.Tensor) -> int | None:
        return next((slot for slot, each in self._memory.items() if each.data_ptr() == data.data_ptr()), None)


def leaves_enough(num_bytes: int, free: int, total: int) -> bool:
    """Whether a file system with `free` of `total` bytes has enough for others after `num_bytes` more are used."""
    return num_bytes <= room_for_snapshots(free, total)


def room_for_snapshots(free: int, total: int) -> int:
    """Bytes that snapshots may take of a file system with `free` of `total` bytes; negative if too few are free."""
    return free - max(int(_MIN_FREE_PART * total), _MIN_FREE_BYTES)


def _allocate(file: int, num_bytes: int, check: Callable[[], None]) -> None:
    """Reserve memory for a file, safely against concurrent allocations of other processes on this machine.

    Raises:
        OSError: too little shared memory is left.
    """
    for begin in range(0, num_bytes, _CHUNK_BYTES):
        check()
        system = os.fstatvfs(file)
        if not leaves_enough(num_bytes - begin, system.f_bavail * system.f_frsize, system.f_blocks * system.f_frsize):
            raise OSError(errno.ENOSPC, "too little shared memory would be left for others")
        os.posix_fallocate(file, begin, min(_CHUNK_BYTES, num_bytes - begin))


def _checksum(header: bytes, trainer: bytes, data: torch.Tensor, check: Callable[[], None] = _never) -> int:
    value = zlib.crc32(trainer, zlib.crc32(header))
    for chunk in data.split(_CHUNK_BYTES):
        check()
        value = tensor_checksum(chunk, value)
    return value


def _register(data: torch.Tensor) -> bool:
    """Pin memory for direct GPU copies. Returns whether that worked: `ulimit -l` may forbid it."""
    runtime = torch.cuda.cudart() if torch.cuda.is_available() else None
    if runtime is None:
        return False
    code = int(runtime.cudaHostRegister(data.data_ptr(), data.numel(), 0))
    if code:
        log.info("snapshot memory is not pinned, so GPU copies are slower: cudaHostRegister returned %d", code)
        _forget_error()
    return code == 0


def _unregister(data: torch.Tensor | None) -> None:
    runtime = torch.cuda.cudart() if data is not None else None
    if runtime is not None and data is not None and int(runtime.cudaHostUnregister(data.data_ptr())):
        _forget_error()


def _unregister_all(registered: dict[int, torch.Tensor]) -> None:
    while registered:
        _unregister(registered.popitem()[1])


def _forget_error() -> None:
    """Clear the CUDA error of a failed call, which the next kernel of the program would raise otherwise."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
