"""A checkpoint that is also one file: `last.ckpt`, and beside it the folder `.last.ckpt.shards`.

The file is what `hyperpod export --to lightning` writes, for everybody else. The folder is the checkpoint itself, from
which a job continues, with what differs from rank to rank. A file that is moved or copied without its folder is still
complete for those who read it alone. A file belongs to the folder only if it has the contents that were written with
it: it may be another one by now.
"""

import hashlib
import json
import os
import zipfile
from pathlib import Path

from hyperpod_plugins.errors import CheckpointDamaged
from hyperpod_plugins.parallel.checkpoint.export import export_checkpoint
from hyperpod_plugins.parallel.checkpoint.files import find

_FILE = "file.json"
"""File of the folder that says which contents the single file has: `{"contents": ...}`."""


def shards_path(file: Path) -> Path:
    """The folder of the checkpoint that is also this file."""
    return file.with_name(f".{file.name}.shards")


def write_single_file(folder: Path, file: Path, *, weights_only: bool) -> None:
    """Write the checkpoint in a folder as one file, too, in one process. It must fit into this process's memory.

    Args:
        folder: Of the checkpoint.
        file: To be written or replaced.
        weights_only: Refuse Python objects besides plain containers, numbers, strings and tensors.

    Raises:
        HyperPodError: See `export_checkpoint`.
        OSError: The file cannot be written.
    """
    export_checkpoint(folder, file, "lightning", weights_only=weights_only, overwrite=True)
    part = folder / f"{_FILE}.part"
    part.write_text(json.dumps({"contents": _contents_of(file)}))
    part.replace(folder / _FILE)


def with_shards(path: Path) -> Path:
    """The folder of the checkpoint that a file was written with, or was to be; `path` itself if there is none."""
    try:
        folder = find(shards_path(Path(os.path.realpath(path))))  # "last.ckpt" may be a link to another one
        if not path.exists():
            return folder
        described = json.loads((folder / _FILE).read_text())
        is_same = isinstance(described, dict) and described.get("contents") == _contents_of(path)
    except (CheckpointDamaged, OSError, ValueError, zipfile.BadZipFile):
        return path
    return folder if is_same else path


def _contents_of(file: Path) -> str:
    """A digest of the names, sizes and checksums of what torch has packed into a file; reads its directory only."""
    with zipfile.ZipFile(file) as packed:
        entries = [(each.filename, each.file_size, each.CRC) for each in packed.infolist()]
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()
