"""A checkpoint that is also one file: `last.ckpt`, and beside it the folder `.last.ckpt.shards`.

The file is what `hyperpod export --to lightning` writes, for everybody else. The folder is the checkpoint itself, from
which a job continues, with what differs from rank to rank. A file that is moved or copied without its folder is still
complete for those who read it alone.

[Note: which of the two] The folder is written first. When its file is complete, `file.json` in the folder says which
contents the file has; a file with other contents is not this checkpoint's, and is read as it is. While a name is saved
again, `.last.ckpt.replaced` says which contents the file has that is about to be replaced. So if the process is lost
between folder and file, the folder counts, and not the older file beside it.
"""

import hashlib
import json
import os
import stat
import zipfile
from pathlib import Path

from hyperpod_plugins.checkpoint_names import present_path
from hyperpod_plugins.errors import CheckpointDamaged
from hyperpod_plugins.parallel.checkpoint.export import export_checkpoint
from hyperpod_plugins.parallel.checkpoint.files import find
from hyperpod_plugins.whole_file import sync_folder, write_whole_file

_FILE = "file.json"
"""File of the folder that says which contents the single file has: `{"contents": ...}`."""
_PREFIX, _SUFFIX = ".", ".shards"
_MOST_LINKS = 40
_OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_UNREADABLE = OSError, ValueError, RecursionError, NotImplementedError, zipfile.BadZipFile
"""What reading a damaged or foreign file may raise."""


def shards_path(file: Path) -> Path:
    """The folder of the checkpoint that is also this file."""
    return file.with_name(f"{_PREFIX}{file.name}{_SUFFIX}")


def _replaced_path(file: Path) -> Path:
    return file.with_name(f".{file.name}.replaced")


def begin_replacing(file: Path) -> None:
    """Note, in one process, which file is about to be replaced, before the folder of the new checkpoint is written."""
    remove_notes(file)
    try:
        contents = _contents_of(file)
    except _UNREADABLE:  # there is no file, or it is not a checkpoint
        return
    _write(_replaced_path(file), contents)


def write_single_file(folder: Path, file: Path, *, is_trusted: bool) -> None:
    """Write the checkpoint in a folder as one file, too, in one process. It must fit into this process's memory.

    Args:
        folder: Of the checkpoint.
        file: To be written or replaced.
        is_trusted: Whether to read Python objects besides plain containers, numbers, strings and tensors, also from
            folders that other users can write to.

    Raises:
        HyperPodError: See `export_checkpoint`.
        OSError: The file cannot be written.
    """
    weights_only = not (is_trusted or _is_of_this_user(folder))  # it comes from this job
    export_checkpoint(folder, file, "lightning", weights_only=weights_only, overwrite=True)
    _write(folder / _FILE, _contents_of(file))
    remove_notes(file)


def write_missing_files(beside: Path, *, is_trusted: bool) -> None:
    """Write the files of other checkpoints in a folder whose process was lost before it could, in one process.

    Args:
        beside: The file of a checkpoint there.
        is_trusted: See `write_single_file`.

    Raises:
        HyperPodError: See `export_checkpoint`.
        OSError: A file cannot be written.
    """
    for folder in sorted(beside.parent.glob(f"{_PREFIX}*{_SUFFIX}")):
        file = folder.with_name(folder.name.removeprefix(_PREFIX).removesuffix(_SUFFIX))
        if file != beside and not (folder / _FILE).exists() and with_shards(file) == folder:
            write_single_file(folder, file, is_trusted=is_trusted)


def remove_notes(file: Path) -> None:
    """Remove the note of `begin_replacing`, if there is one."""
    _replaced_path(file).unlink(missing_ok=True)


def with_shards(path: Path) -> Path:
    """The folder of the checkpoint that is also this file; `path` itself if there is none, or the file is another one.

    A file that does not exist yet has a folder, too. A link is followed to the file that it names.
    """
    file = _without_links(path)
    try:
        folder = find(shards_path(file))
        if not _is_of_same_owner(folder, file):
            return path
        if not file.exists():
            return folder if present_path(file) == file else path  # an older folder may bear the name
        note = folder / _FILE if (folder / _FILE).exists() else _replaced_path(file)
        described = json.loads(note.read_text())
        is_same = isinstance(described, dict) and described.get("contents") == _contents_of(file)
    except (CheckpointDamaged, *_UNREADABLE):
        return path
    return folder if is_same else path


def _without_links(path: Path) -> Path:
    """Follow links of the last part of a path only: `last.ckpt` may be one to another file in its folder."""
    for _ in range(_MOST_LINKS):
        if not path.is_symlink():
            break
        path = path.parent / path.readlink()
    return path


def _is_of_same_owner(folder: Path, file: Path) -> bool:
    """Whether no other user has put the folder beside the file."""
    owner = file.stat().st_uid if file.exists() else file.parent.stat().st_uid
    status = folder.stat()
    return (status.st_uid == owner and not status.st_mode & _OF_OTHERS) or _is_of_this_user(folder)


def _is_of_this_user(folder: Path) -> bool:
    status = folder.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & _OF_OTHERS


def _write(note: Path, contents: str) -> None:
    write_whole_file(note, json.dumps({"contents": contents}))
    note.chmod(note.stat().st_mode & ~_OF_OTHERS)  # a restart of all processes rejects what others may write to
    sync_folder(note.parent)


def _contents_of(file: Path) -> str:
    """A digest of the names, sizes and checksums of what torch has packed into a file; reads its directory only."""
    with zipfile.ZipFile(file) as packed:
        entries = [(each.filename, each.file_size, each.CRC) for each in packed.infolist()]
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()
