"""The folder of a checkpoint: it appears complete or not at all, and is read without running foreign code.

    step_100/
        .metadata           location and checksum of each part (torch.distributed.checkpoint)
        __0_0.distcp ...    the parts that each rank wrote
        meta.pt             everything that is not a tensor of the model or an optimizer
        job.json            the job that wrote it, if a launcher started the job
        checksums.json      checksums of .metadata and of meta.pt

While it is being written, the folder is named `.step_100.part`. An existing checkpoint of the same name is first
renamed to `.step_100.old`, so that one of the two exists at any moment; readers and the next writer know that name.
If one rank fails, all raise (`raise_on_all_ranks`), so that none waits in the next collective for the one that failed.

CRC-32 detects every flipped bit, and every burst of up to 32 bits. It does not protect against deliberate changes: an
attacker can rewrite the checksums too.
"""

import contextlib
import io
import json
import os
import pickle
import shutil
import warnings
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hyperpod_plugins.checkpoint_names import JOB, present_path, previous_path
from hyperpod_plugins.comm import group_health
from hyperpod_plugins.env import run_id
from hyperpod_plugins.errors import CheckpointDamaged, CheckpointError, CommError
from hyperpod_plugins.whole_file import sync_folder

DOCUMENT = "meta.pt"
FORMAT = "hyperpod-checkpoint-1"
METADATA = ".metadata"
SUMS = "checksums.json"
_BLOCK_BYTES = 2**18  # fits a processor's cache
# Errors that reading a damaged or foreign pickle can raise.
UNREADABLE = (pickle.UnpicklingError, EOFError, OSError, RuntimeError, ValueError, TypeError, KeyError, IndexError)


def incomplete_path(path: Path) -> Path:
    """Return the folder that a checkpoint has while it is being written."""
    return path.with_name(f".{path.name}.part")


def prepare(path: Path) -> None:
    """Make room for a new checkpoint, and clean up after an interrupted save.

    Raises:
        CheckpointError: the path is a file.
    """
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"a sharded checkpoint is a folder, but {path} is a file. Choose another path.")
    path.parent.mkdir(parents=True, exist_ok=True)
    if present_path(path) != path:
        previous_path(path).rename(path)
    shutil.rmtree(previous_path(path), ignore_errors=True)
    shutil.rmtree(incomplete_path(path), ignore_errors=True)


def publish(path: Path, document: bytes) -> None:
    """Complete the folder and rename it to its final name."""
    part, old = incomplete_path(path), previous_path(path)
    _write(part / DOCUMENT, document)
    if run_id():
        _write(part / JOB, json.dumps({"run_id": run_id()}).encode())
    write_sums(part, {METADATA: (part / METADATA).read_bytes(), DOCUMENT: document})
    _forbid_others_to_write(part)
    sync_folder(part)
    if path.exists():
        path.rename(old)
    part.rename(path)
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _write(file: Path, content: bytes) -> None:
    with open(file, "wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())


def _forbid_others_to_write(folder: Path) -> None:
    """Take write permission for group and others from a folder and its files: a restart of all workers rejects it."""
    with contextlib.suppress(OSError):  # some file systems have no file modes
        mode = folder.stat().st_mode
        if mode & 0o022:  # otherwise the umask forbids it for the files, too
            for each in (*folder.iterdir(), folder):
                each.chmod(each.stat().st_mode & ~0o022)


def discard(path: Path) -> None:
    """Remove what a failed save has left on this rank's disk; called once it has failed on all ranks."""
    shutil.rmtree(incomplete_path(path), ignore_errors=True)


def find(path: Path) -> Path:
    """Return the folder that holds the checkpoint of this name.

    Raises:
        CheckpointDamaged: there is none, or writing it was interrupted.
    """
    path = present_path(path)
    if not path.is_dir():
        hint = " Its writing was interrupted; use an older one." if incomplete_path(path).exists() else ""
        raise CheckpointDamaged(f"there is no sharded checkpoint at {path}, which should be a folder.{hint}")
    missing = [name for name in (METADATA, DOCUMENT) if not (path / name).is_file()]
    if missing:
        raise CheckpointDamaged(
            f"the folder {path} is not a checkpoint written by hyperpod_plugins, or was cut short: it has no "
            f"{' and no '.join(missing)}. Use an older checkpoint, or the path of the checkpoint itself."
        )
    return path


def read_document(folder: Path, *, weights_only: bool) -> dict[str, Any]:
    """Read what was saved besides the tensors (`meta.pt`).

    Raises:
        CheckpointDamaged: the file is damaged or foreign, or holds objects that need `weights_only=False`.
    """
    document = load_pickled(read_checked(folder / DOCUMENT), str(folder / DOCUMENT), weights_only=weights_only)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointDamaged(f"{folder / DOCUMENT} was not written by hyperpod_plugins (no format {FORMAT!r}).")
    if read_sums(folder) is None:
        if document.get("has_checksums"):
            raise CheckpointDamaged(f"{folder / SUMS} is missing, which was written. Use an older checkpoint.")
        warnings.warn(
            f"the checkpoint {folder} has no checksums, because an older version wrote it: damage to its tensors would "
            "not be noticed. Save it again to add them.",
            stacklevel=2,
        )
    return document


def load_pickled(content: bytes, where: str, *, weights_only: bool) -> Any:
    """Load what `torch.save` has written, to the CPU.

    Args:
        content: bytes of a file, or of a part of one.
        where: their location, for error messages.
        weights_only: reject Python objects other than plain containers, numbers, strings and tensors.

    Raises:
        CheckpointDamaged: the content cannot be read, or holds objects that need `weights_only=False`.
    """
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=weights_only)
    except UNREADABLE as error:
        raise CheckpointDamaged(
            f"{where} cannot be read: {first_line(error)}. If it holds Python objects of yours and you "
            "trust where it comes from, load with weights_only=False (HyperPodStrategy(trust_checkpoints=True), "
            "`hyperpod export --trust`); otherwise use an older checkpoint."
        ) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class name if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def tensor_checksum(tensor: torch.Tensor, value: int = 0) -> int:
    """Return the checksum of a tensor's bytes, on any device; `value` is the checksum of what comes before them."""
    host = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return zlib.crc32(host.numpy().data, value)


def write_sums(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write the checksums of files, given their contents by name, and sync them to disk."""
    with open(folder / SUMS, "w") as file:
        json.dump({name: zlib.crc32(content) for name, content in contents.items()}, file)
        file.flush()
        os.fsync(file.fileno())


def read_sums(folder: Path) -> dict[str, int] | None:
    """Read the checksums of files, by file name; None if the checkpoint was written by a version without checksums.

    Raises:
        CheckpointDamaged: the file is damaged.
    """
    try:
        found: Any = json.loads((folder / SUMS).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointDamaged(f"{folder / SUMS} cannot be read ({error}). Use an older checkpoint.") from error
    if not isinstance(found, dict) or not all(isinstance(value, int) for value in found.values()):
        raise CheckpointDamaged(f"{folder / SUMS} does not hold checksums. Use an older checkpoint.")
    return found


def read_checked(file: Path) -> bytes:
    """Read a file of a checkpoint and compare it with its checksum, if the checkpoint has checksums.

    Raises:
        CheckpointDamaged: they differ.
        OSError: the file cannot be read.
    """
    content, sums = file.read_bytes(), read_sums(file.parent)
    if sums is not None and sums.get(file.name) != zlib.crc32(content):
        raise CheckpointDamaged(
            f"{file} is not what was written: its checksum differs, so a disk, a copy or a person has changed it. Use "
            "an older checkpoint, or copy this one again."
        )
    return content


def checksum_of(file: io.BufferedIOBase, offset: int, length: int) -> int:
    """Return the checksum of `length` bytes of a file; of fewer if the file ends earlier."""
    file.seek(offset)
    block, value = memoryview(bytearray(_BLOCK_BYTES)), 0
    while length > 0 and (num_read := file.readinto(block[:length])):
        value = zlib.crc32(block[:num_read], value)
        length -= num_read
    return value


@contextmanager
def raise_on_all_ranks(
    failure: str, group: dist.ProcessGroup | None, *, expected: tuple[type[BaseException], ...] = ()
) -> Generator[None]:
    """Raise on all ranks of the group if the body fails on any of them. All of them must enter this context.

    Args:
        failure: what failed and what that means; the reason is appended to it.
        group: ranks that must agree, or None for this process alone.
        expected: errors to report to the other ranks, besides `CheckpointError` and `OSError`. Anything else is a
            bug, which all ranks hit alike, or a lost peer, which the caller's recovery handles.

    Raises:
        CheckpointError: a rank failed or was lost.
    """
    problem: BaseException | None = None
    try:
        yield
    except CommError:
        raise
    except (CheckpointError, OSError, *expected) as error:
        problem = error
    try:
        is_failed = any_rank(problem is not None, group)
    except CommError:
        raise
    except RuntimeError as error:
        raise CheckpointError(f"{failure}: a rank was lost ({problem or error})") from (problem or error)
    if is_failed:
        if isinstance(problem, CheckpointError):
            raise problem
        raise CheckpointError(f"{failure}: {problem or 'another rank failed (see its log)'}") from problem


def any_rank(is_so: bool, group: dist.ProcessGroup | None) -> bool:
    """Whether `is_so` is True on any rank of the group. A collective: no rank returns before all have called it."""
    if group is None:
        return is_so
    flag = torch.tensor(int(is_so), device=device_of(group))
    with group_health.checks_host_read():
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        return bool(flag)


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return a device that the group can communicate from: the CPU if one of its backends supports it."""
    devices = group._device_types  # pyright: ignore[reportPrivateUsage]
    return devices[0] if torch.device("cpu") not in devices else torch.device("cpu")
