"""A write test of the folder for checkpoints, and what kind of file system it is on."""

import errno
import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hyperpod_plugins.doctor.finding import GIB_BYTES, MIB_BYTES, Finding, JobSize, file_text, gib, within
from hyperpod_plugins.whole_file import sync_folder

_TEST_BYTES = 32 * MIB_BYTES
_CHUNK_BYTES = MIB_BYTES
_WRITE_S = 5.0
_DEADLINE_S = 20.0
_MIN_FREE_BYTES, _MIN_FREE_FILES = 10 * GIB_BYTES, 1000
_SLOW_RATE = 50e6  # bytes a second
PREFIX = ".hyperpod-doctor-"
VOLATILE = frozenset({"tmpfs", "ramfs", "overlay", "aufs"})
"""File systems that end with the machine or its container."""
OF_ONE_NODE = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "reiserfs"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFacts:
    """The folder, and how the test went."""

    path: str
    failed_step: str = ""
    """What could not be done, such as `write`; empty if all steps succeeded."""
    error: str = ""
    error_number: int = 0
    num_bytes: int = 0
    """Bytes that were written and synced."""
    duration_s: float = 0.0
    """Of writing and syncing."""
    free: int | None = None
    total: int = 0
    free_files: int | None = None
    """Files that can still be created; None if the file system has no such limit."""
    file_system: str = ""
    """Its type, such as `nfs4`."""


class _StepError(Exception):
    def __init__(self, step: str, error: OSError | None = None, why: str = "") -> None:
        super().__init__(step)
        self.step, self.number = step, 0 if error is None else error.errno or 0
        self.why = why or (str(error.strerror or error) if error else "")


def gather_folder(path: Path, num_bytes: int = _TEST_BYTES) -> FolderFacts:
    """Test a folder; nothing is left there, also after a failure. Ends after a deadline, even if the folder hangs."""
    leftover: list[Path] = []
    found = within(_DEADLINE_S, lambda: _test(path, num_bytes, leftover))
    if found is None:
        what = f"no answer within {_DEADLINE_S:g} s" + (
            f"; the test file {leftover[-1]} may be left there" if leftover else ""
        )
        return FolderFacts(path=str(path), failed_step="answer", error=what, error_number=errno.ETIMEDOUT)
    return found


def _test(path: Path, num_bytes: int, leftover: list[Path]) -> FolderFacts:
    file_system = file_system_type(file_text("/proc/self/mountinfo"), Path(os.path.realpath(path)))
    try:
        written, duration_s = _write_and_read(path, num_bytes, leftover)
        failed = _StepError("")
    except _StepError as error:
        written, duration_s, failed = 0, 0.0, error
    free, total, free_files = None, 0, None
    with suppress(OSError):
        system = os.statvfs(path)
        free, total = system.f_bavail * system.f_frsize, system.f_blocks * system.f_frsize
        free_files = system.f_favail if system.f_files else None
    return FolderFacts(
        path=str(path),
        failed_step=failed.step,
        error=failed.why,
        error_number=failed.number,
        num_bytes=written,
        duration_s=duration_s,
        free=free,
        total=total,
        free_files=free_files,
        file_system=file_system,
    )


def _write_and_read(path: Path, num_bytes: int, leftover: list[Path]) -> tuple[int, float]:
    """Create, write, sync, rename, read and delete a file; returns bytes and seconds of the first three."""
    name = path / f"{PREFIX}{secrets.token_hex(8)}"
    renamed = name.with_suffix(".renamed")
    step, chunk = "create a file", os.urandom(_CHUNK_BYTES)
    try:
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        leftover.append(name)
        try:
            step, began_s, written = "write", time.monotonic(), 0
            while written < num_bytes and time.monotonic() < began_s + _WRITE_S:
                written += os.write(file, chunk[: num_bytes - written])
            step = "sync (fsync)"
            os.fsync(file)
            duration_s = max(time.monotonic() - began_s, 1e-9)
            step = "rename"
            name.rename(renamed)
            leftover.append(renamed)
            step = "sync the folder (fsync)"
            sync_folder(path)
            step = "read back"
            _compare(file, chunk, written)
        finally:
            os.close(file)
        step = "delete"
        renamed.unlink()
    except OSError as error:
        raise _StepError(step, error) from error
    finally:
        for each in (name, renamed):
            with suppress(OSError):
                each.unlink(missing_ok=True)
    return written, duration_s


def _compare(file: int, chunk: bytes, num_bytes: int) -> None:
    """Check that the file holds the bytes that were written: `chunk`, from its beginning after each whole one."""
    position = 0
    while position < num_bytes:
        begin = position % len(chunk)
        found = os.pread(file, min(len(chunk) - begin, num_bytes - position), position)
        if not found or found != chunk[begin : begin + len(found)]:
            raise _StepError("read back", why="the bytes read differ from those written")
        position += len(found)


def file_system_type(mounts: str, path: Path) -> str:
    """Type of the file system of an absolute path, from /proc/self/mountinfo; empty if it is not there."""
    best, found = -1, ""
    for line in mounts.splitlines():
        left, separator, right = line.partition(" - ")
        words, types = left.split(), right.split()
        if not separator or len(words) < 5 or not types:
            continue
        point = Path(words[4].replace("\\040", " "))
        if (path == point or point in path.parents) and len(point.parts) >= best:  # a later mount hides an earlier one
            best, found = len(point.parts), types[0]
    return found


def check_folder(facts: FolderFacts, job: JobSize) -> list[Finding]:
    """All findings of this module."""
    written = check_write(facts)
    return [written, check_space(facts), check_file_system(facts, job)] if written.status != "error" else [written]


def check_write(facts: FolderFacts) -> Finding:
    """Whether checkpoints can be written."""
    name = "checkpoint-folder"
    if facts.failed_step:
        why = f"cannot {facts.failed_step} in {facts.path} ({facts.error})"
        return Finding(name=name, status="error", found=why, advice=_advice(facts))
    rate = facts.num_bytes / max(facts.duration_s, 1e-9)
    found = f"{facts.path}: {rate / 1e6:,.0f} MB/s, written and synced by one process"
    if rate < _SLOW_RATE:
        advice = "use a faster file system, or save less often and let peers hold copies of the state."
        return Finding(name=name, status="warning", found=f"{found}: slow", advice=advice)
    return Finding(name=name, status="ok", found=found)


def _advice(facts: FolderFacts) -> str:
    match facts.error_number:
        case errno.ENOENT:
            return f"create the folder: mkdir -p {facts.path}."
        case errno.ENOTDIR:
            return "name a folder: a part of this path is a file."
        case errno.EACCES | errno.EPERM:
            return f"let this user (uid {os.getuid()}) write there, or choose another folder."
        case errno.EROFS:
            return "mount the file system for writing, or choose another folder."
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return "delete files there, or have the quota raised (`quota`, `lfs quota`, `ulimit -f`)."
        case errno.ETIMEDOUT:
            return "check that the server of that file system answers; then delete the test file, if it is still there."
        case _:
            return "choose another folder, or ask the administrator of that file system."


def check_space(facts: FolderFacts) -> Finding:
    """Whether there is room for checkpoints."""
    name = "checkpoint-space"
    if facts.free is None:
        return Finding(name=name, status="skipped", found="the file system does not report it", advice="see `df`.")
    found = f"{gib(facts.free)} free of {gib(facts.total)}"
    if facts.free < _MIN_FREE_BYTES:
        advice = (
            "delete old checkpoints, or choose a larger file system: one checkpoint holds weights and optimizer state."
        )
        return Finding(name=name, status="warning", found=found, advice=advice)
    if facts.free_files is not None and facts.free_files < _MIN_FREE_FILES:
        found = f"{found}, but only {facts.free_files} more files can be created"
        return Finding(name=name, status="warning", found=found, advice="delete files: see `df -i`.")
    return Finding(name=name, status="ok", found=found)


def check_file_system(facts: FolderFacts, job: JobSize) -> Finding:
    """Whether all nodes see the folder, and it outlives them."""
    name, found = "checkpoint-file-system", facts.file_system or "unknown"
    if facts.file_system in VOLATILE:
        return Finding(
            name=name,
            status="warning",
            found=f"{found}: lost when this machine or its container ends",
            advice="choose a folder on a persistent volume.",
        )
    if facts.file_system in OF_ONE_NODE and job.has_other_nodes:
        return Finding(
            name=name,
            status="warning",
            found=f"{found}: usually a disk of this node only",
            advice="choose a folder that all nodes share (NFS, Lustre): each rank writes a part of a checkpoint.",
        )
    return Finding(name=name, status="ok", found=found)
