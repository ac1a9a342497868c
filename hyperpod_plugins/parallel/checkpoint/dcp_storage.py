"""Writers and readers for `torch.distributed.checkpoint` (DCP) that verify checksums and never run code on load.

DCP pickles the description of a checkpoint, `.metadata`, and each value that is not a tensor; its own reader and
planner unpickle both without restrictions.

DCP plans a save from the tensors that a rank has. `PartsPlanner` makes the plan from parts whose offset in the global
tensor is known, also parts that a rank keeps for another one; the files are the same.
"""

# DCP has no public names for what it writes.
# pyright: reportPrivateUsage=false

import io
import math
import os
import pickle
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import _get_layout

from hyperpod_plugins.errors import CheckpointDamaged, CheckpointError, format_list
from hyperpod_plugins.parallel.checkpoint.files import (
    METADATA,
    SUMS,
    UNREADABLE,
    checksum_of,
    first_line,
    read_checked,
    write_sums,
)
from hyperpod_plugins.parallel.checkpoint.state import TensorPart

FILE_VISIBILITY_TIMEOUT_S = (
    15.0  # maximum time until the first rank sees a file that another node has closed, in seconds
)
_SUM = "crc32"  # attribute that holds the checksum in DCP's record of each part
# Every class that DCP puts into `.metadata`, by its exact name. Other names in its modules are functions and imported
# modules, some of which run code.
_DESCRIPTIONS: dict[tuple[str, str], type] = {
    (kind.__module__, kind.__name__): kind
    for kind in (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
        _StorageInfo,
    )
}
# Other values in `.metadata`, with the function that makes each.
_VALUES: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("torch", "Size"): torch.Size,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _MEM_FORMAT_ENCODING,
    ("torch.serialization", "_get_layout"): _get_layout,
}
T = TypeVar("T")
_PATHS = {("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"), ("pathlib._local", "PosixPath")}


def tensor_entries(reader: FileSystemReader, folder: Path) -> dict[str, TensorStorageMetadata]:
    """Return names, shapes and dtypes of all saved tensors, after checking that the files are long enough for them.

    Raises:
        CheckpointDamaged: a file is missing or too short, or an entry is not a tensor.
    """
    metadata = reader.read_metadata()
    for info in metadata.storage_data.values():
        file = folder / info.relative_path
        if not file.is_file() or file.stat().st_size < info.offset + info.length:
            raise CheckpointDamaged(f"{file} is missing or was cut short. Use an older checkpoint.")
    entries: dict[str, TensorStorageMetadata] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointDamaged(
                f"{folder} holds {name!r}, which is not a tensor: it was not written by this package."
            )
        entries[name] = entry
    return entries


class ChecksumStream(io.IOBase):
    """Writes to another stream and keeps a running checksum."""

    def __init__(self, raw: io.IOBase) -> None:
        self._raw = raw
        self.value = 0
        self.length_bytes = 0

    def write(self, data: Any) -> int:
        """Write bytes."""
        self.value = zlib.crc32(data, self.value)
        self.length_bytes += len(data)
        self._raw.write(data)
        return len(data)

    def tell(self) -> int:
        """Position in the other stream."""
        return self._raw.tell()

    def close(self) -> None:
        """Only flush: further parts follow in the same stream."""
        if not self._raw.closed:
            self._raw.flush()


class ChecksumTransforms:
    """Wraps the transforms of DCP's writer so that the streams below them keep checksums."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.streams: dict[Any, ChecksumStream] = {}
        """Streams by the `MetadataIndex` of what was written."""

    def transform_save_stream(self, write_item: WriteItem, raw_stream: io.IOBase) -> Any:
        """See `torch.distributed.checkpoint.filesystem`."""
        stream = self.streams[write_item.index] = ChecksumStream(raw_stream)
        return self._inner.transform_save_stream(write_item, stream)


class CheckedWriter(FileSystemWriter):
    """Writes a checksum with each part, and completes a checkpoint only if all parts lie in one folder."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """See `StorageWriter`."""
        summing = ChecksumTransforms(self.transforms)
        self.transforms: Any = summing
        written = super().write_data(plan, planner)
        for result in written.value():
            stream = summing.streams[result.index]
            if stream.length_bytes == result.storage_data.length:
                vars(result.storage_data)[_SUM] = stream.value  # torch's own reader ignores it
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """See `StorageWriter`; called on the first rank.

        Raises:
            CheckpointError: this rank does not see the files that other ranks have written.
        """
        folder = Path(self.path)
        _wait_for_parts(folder, results)
        (folder / SUMS).unlink(missing_ok=True)  # checksums of the checkpoint that is being overwritten
        super().finish(metadata, results)
        write_sums(folder, {METADATA: (folder / METADATA).read_bytes()})


def _wait_for_parts(folder: Path, results: list[list[WriteResult]]) -> None:
    """Wait until this rank sees the files of all ranks at their full length.

    A network file system may show what another node has written only seconds later.
    """
    sizes: dict[str, int] = {}
    ranks: dict[str, int] = {}
    for rank, written in enumerate(results):
        for info in (result.storage_data for result in written):
            sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), info.offset + info.length)
            ranks[info.relative_path] = rank
    deadline_s = time.monotonic() + FILE_VISIBILITY_TIMEOUT_S
    while missing := [name for name, size in sizes.items() if _size_of(folder / name) < size]:
        if time.monotonic() > deadline_s:
            raise CheckpointError(
                f"the first rank does not see {format_list(missing)}, which "
                f"{format_list(f'rank {ranks[name]}' for name in missing)} wrote to {folder.absolute()} on its own "
                "node: the folder is not shared. Save to a folder that every node mounts under the same path "
                "(FSx for Lustre, NFS), by its absolute path."
            )
        time.sleep(0.1)
        os.listdir(folder)  # refreshes the file system's cache


def _size_of(file: Path) -> int:
    """Size in bytes of an opened file, which on network file systems is newer than the cached size; -1 if absent."""
    try:
        with open(file, "rb") as opened:
            return os.fstat(opened.fileno()).st_size
    except OSError:
        return -1


class SafeReader(FileSystemReader):
    """Reads the metadata with an unpickler that creates only DCP's own descriptions, and verifies checksums."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._sums: dict[tuple[str, int], tuple[str, int]] = {}
        """Tensor name and checksum of each part, by file name and offset."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata of the checkpoint.

        Raises:
            CheckpointDamaged: the file is damaged, refers to code, or names files outside the folder.
        """
        file_name = Path(self.path) / METADATA
        try:
            found = _MetadataUnpickler(io.BytesIO(read_checked(file_name))).load()
            metadata = _rebuilt(found)
            self._sums = _sums_of(found)
        except (*UNREADABLE, AttributeError, ImportError) as error:
            raise CheckpointDamaged(f"{file_name} is damaged: {first_line(error)}. Use an older checkpoint.") from error
        for info in metadata.storage_data.values():
            if Path(info.relative_path).name != info.relative_path:
                raise CheckpointDamaged(f"{file_name} names {info.relative_path!r}, which is not a file of the folder.")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        """Return the bytes of one part.

        Raises:
            CheckpointDamaged: their checksum differs.
        """
        name, expected = self._sums.get((sinfo.relative_path, sinfo.offset), ("", None))
        if expected is not None and checksum_of(file, sinfo.offset, sinfo.length) != expected:
            raise CheckpointDamaged(
                f"{name} is not what was written: the checksum of {sinfo.length} bytes from byte {sinfo.offset} of "
                f"{Path(self.path) / sinfo.relative_path} differs, so a disk, a copy or a person has changed them. Use "
                "an older checkpoint, or copy this one again. The model may hold a part of this checkpoint now."
            )
        return super()._slice_file(file, sinfo)


class SafePlanner(DefaultLoadPlanner):
    """Loads values that are not tensors with `weights_only=True`: plain containers, numbers, strings and tensors."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """See `DefaultLoadPlanner`.

        Raises:
            CheckpointDamaged: the value holds objects of other classes.
        """
        name = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, map_location="cpu", weights_only=True)
        except UNREADABLE as error:
            raise CheckpointDamaged(
                f"the value of {name!r} in the checkpoint cannot be read: {first_line(error)}. If it is an object of a "
                "class that you trust, allow it with torch.serialization.add_safe_globals; otherwise save plain "
                "containers, numbers, strings and tensors."
            ) from error
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


class PartsPlanner(DefaultSavePlanner):
    """Plans a save of tensor parts; a part that several ranks hold is written once."""

    def __init__(self, parts: Iterable[TensorPart]) -> None:
        """Take the parts of this rank; empty parts of non-empty tensors are left out."""
        super().__init__(flatten_state_dict=False)
        kept = [part for part in parts if part.values.numel() or 0 in part.size]
        self._parts = {(part.name, part.offset): part for part in kept}

    def create_local_plan(self) -> SavePlan:
        """See `SavePlanner`."""
        return SavePlan([_item(part) for part in self._parts.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """See `SavePlanner`. Also checks that no part is missing, which torch omits if a single process saves.

        Raises:
            ValueError: the ranks together do not hold all of a tensor.
        """
        plans, metadata = super().create_global_plan(all_plans)
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
                raise ValueError(f"the ranks together do not hold all of {name}")
        return plans, metadata

    def lookup_object(self, index: MetadataIndex) -> Any:
        """See `DefaultSavePlanner`."""
        assert index.offset is not None
        return self._parts[index.fqn, tuple(index.offset)].values


def _item(part: TensorPart) -> WriteItem:
    offsets, sizes = torch.Size(part.offset), part.values.shape
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
        properties=TensorProperties.create_from_tensor(part.values),
        size=torch.Size(part.size),
    )
    return WriteItem(index=MetadataIndex(part.name, offsets), type=WriteItemType.SHARD, tensor_data=data)


def safe_planner(planner: object) -> Any:
    """Return `planner`, but replace torch's default planner by a `SafePlanner` with the same options."""
    if type(planner) is not DefaultLoadPlanner:
        return planner
    return SafePlanner(planner.flatten_state_dict, planner.flatten_sharded_tensors, planner.allow_partial_load)


def safe_reader(reader: object) -> Any:
    """Return `reader`, but replace torch's file system reader by a `SafeReader` of the same folder."""
    return SafeReader(reader.path) if type(reader) is FileSystemReader else reader


def own_error(error: CheckpointException, failure: str) -> CheckpointError:
    """Return the `CheckpointError` that a rank raised, if any; otherwise one that lists all errors."""
    own = [cause for cause, _ in error.failures.values() if isinstance(cause, CheckpointError)]
    if own:
        return own[0]
    reasons = [f"rank {rank}: {first_line(cause)}" for rank, (cause, _) in sorted(error.failures.items())]
    return CheckpointError(f"{failure}: {format_list(reasons)}")


class _MetadataUnpickler(pickle.Unpickler):
    """Creates stand-ins for classes, new ones for each file: a pickle can change attributes of whatever it names."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self._stand_ins: dict[tuple[str, str], Any] = {}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        name = (module_name, global_name)
        if module_name == "torch" and isinstance(dtype := vars(torch).get(global_name), torch.dtype):
            return dtype
        if name not in self._stand_ins:
            self._stand_ins[name] = _stand_in(name)
        return self._stand_ins[name]


def _stand_in(name: tuple[str, str]) -> Any:
    if name in _DESCRIPTIONS:
        return type(name[1], (_DESCRIPTIONS[name],), {})
    if name in _VALUES:
        make = _VALUES[name]
        return lambda value: make(value)
    if name in _PATHS:
        return lambda *parts: "/".join(map(str, parts))
    raise pickle.UnpicklingError(f"it refers to {'.'.join(name)}, which no checkpoint needs")


def _rebuilt(found: object) -> Metadata:
    """Convert stand-ins to DCP's own classes, keeping only their fields."""
    found = _check(found, Metadata)
    entries = {_check(name, str): _entry(entry) for name, entry in found.state_dict_metadata.items()}
    places = {
        MetadataIndex(_check(index.fqn, str), index.offset, index.index): _StorageInfo(
            _check(info.relative_path, str),
            _check(info.offset, int),
            _check(info.length, int),
            info.transform_descriptors,
        )
        for index, info in found.storage_data.items()
    }
    return Metadata(entries, found.planner_data, places, version=found.version)


def _sums_of(found: Metadata) -> dict[tuple[str, int], tuple[str, int]]:
    return {
        (info.relative_path, info.offset): (index.fqn, _check(vars(info)[_SUM], int))
        for index, info in found.storage_data.items()
        if _SUM in vars(info)
    }


def _entry(found: object) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(found, BytesStorageMetadata):
        return BytesStorageMetadata()
    found = _check(found, TensorStorageMetadata)
    chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in found.chunks]
    properties = TensorProperties(dtype=_check(found.properties.dtype, torch.dtype))
    return TensorStorageMetadata(properties, torch.Size(found.size), chunks)


def _check(value: object, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise pickle.UnpicklingError(f"it holds a {type(value).__name__} instead of a {kind.__name__}")
    return value
