"""The folder of a checkpoint: it appears complete or not at all, and is read without running foreign code.

    step_100/
        .metadata           which tensor lies where (torch.distributed.checkpoint)
        __0_0.distcp ...    the parts that each rank wrote
        meta.pt             everything that is no tensor of the model or an optimizer

While it is being written it is called `.step_100.part`. When a checkpoint of that name exists it is first renamed to
`.step_100.old`, so that at each moment one of the two is there; readers and the next writer know that name.
"""

import os
import pickle
import shutil
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from hyperpod_plugins.errors import CheckpointDamaged, CheckpointError

DOCUMENT = "meta.pt"
FORMAT = "hyperpod-checkpoint-1"
_METADATA = ".metadata"
# What a damaged or foreign pickle raises while it is read.
_UNREADABLE = (pickle.UnpicklingError, EOFError, OSError, RuntimeError, ValueError, TypeError, KeyError, IndexError)
_KNOWN_CLASSES = {
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}


def part_of(path: Path) -> Path:
    """Where a checkpoint lies while it is being written."""
    return path.with_name(f".{path.name}.part")


def prepare(path: Path) -> None:
    """Make room for a new checkpoint, and undo what an interrupted save has left.

    Raises:
        CheckpointError: the path is a file.
    """
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"a sharded checkpoint is a folder, but {path} is a file. Choose another path.")
    path.parent.mkdir(parents=True, exist_ok=True)
    if _old_of(path).exists() and not path.exists():
        _old_of(path).rename(path)
    shutil.rmtree(_old_of(path), ignore_errors=True)
    shutil.rmtree(part_of(path), ignore_errors=True)


def publish(path: Path, document: bytes) -> None:
    """Complete the folder and give it its name."""
    part, old = part_of(path), _old_of(path)
    with open(part / DOCUMENT, "wb") as file:
        file.write(document)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(part)
    if path.exists():
        path.rename(old)
    part.rename(path)
    _sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def find(path: Path) -> Path:
    """The folder that holds the checkpoint of this name.

    Raises:
        CheckpointDamaged: there is none, or its writing was interrupted.
    """
    if not path.exists() and _old_of(path).is_dir():
        return _old_of(path)  # a save over it was interrupted between the two renames
    if not path.is_dir():
        hint = " Its writing was interrupted; use an older one." if part_of(path).exists() else ""
        raise CheckpointDamaged(f"there is no sharded checkpoint at {path}, which should be a folder.{hint}")
    missing = [name for name in (_METADATA, DOCUMENT) if not (path / name).is_file()]
    if missing:
        raise CheckpointDamaged(
            f"the folder {path} is not a checkpoint written by hyperpod_plugins, or was cut short: it has no "
            f"{' and no '.join(missing)}. Use an older checkpoint, or the path of the checkpoint itself."
        )
    return path


def read_document(folder: Path, *, weights_only: bool) -> dict[str, Any]:
    """What was saved beside the tensors.

    Raises:
        CheckpointDamaged: the file is damaged or foreign, or holds objects that need `weights_only=False`.
    """
    try:
        document = torch.load(folder / DOCUMENT, map_location="cpu", weights_only=weights_only)
    except _UNREADABLE as error:
        raise CheckpointDamaged(
            f"{folder / DOCUMENT} cannot be read: {_first_line(error)}. If it holds Python objects of yours and you "
            "trust where it comes from, load with weights_only=False; otherwise use an older checkpoint."
        ) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointDamaged(f"{folder / DOCUMENT} was not written by hyperpod_plugins (no format {FORMAT!r}).")
    return document


def tensor_entries(reader: FileSystemReader, folder: Path) -> dict[str, TensorStorageMetadata]:
    """Names, shapes and types of all saved tensors, after a check that their bytes are there.

    Raises:
        CheckpointDamaged: a file is missing or too short, or an entry is no tensor.
    """
    metadata = reader.read_metadata()
    for info in metadata.storage_data.values():
        file = folder / info.relative_path
        if not file.is_file() or file.stat().st_size < info.offset + info.length:
            raise CheckpointDamaged(f"{file} is missing or was cut short. Use an older checkpoint.")
    entries: dict[str, TensorStorageMetadata] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointDamaged(f"{folder} holds {name!r}, which is no tensor: it was not written by this package.")
        entries[name] = entry
    return entries


class SafeReader(FileSystemReader):
    """Reads the metadata with an unpickler that makes nothing but torch's own descriptions of tensors."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Metadata of the checkpoint.

        Raises:
            CheckpointDamaged: the file is damaged, or asks for code.
        """
        file_name = Path(self.path) / _METADATA
        try:
            with open(file_name, "rb") as file:
                metadata = _MetadataUnpickler(file).load()
        except (*_UNREADABLE, AttributeError, ImportError) as error:
            raise CheckpointDamaged(
                f"{file_name} is damaged: {_first_line(error)}. Use an older checkpoint."
            ) from error
        if not isinstance(metadata, Metadata):
            raise CheckpointDamaged(f"{file_name} does not describe a checkpoint.")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        is_dtype = module_name == "torch" and isinstance(vars(torch).get(global_name), torch.dtype)
        is_description = module_name == "torch.distributed.checkpoint.metadata" and "." not in global_name
        if is_dtype or is_description or (module_name, global_name) in _KNOWN_CLASSES:
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}, which no checkpoint needs")


def _old_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
