"""Checksums (CRC-32) of tensors, and those in a checkpoint: of each stored part, and of the files that describe it.

    .metadata           holds the location of each part and the checksum of its bytes
    checksums.json      holds the checksums of `.metadata` and of `meta.pt`

CRC-32 detects every flipped bit, and every burst of up to 32 bits. It does not protect against deliberate changes: an
attacker can rewrite the checksums too.
"""

import io
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem

from hyperpod_plugins.errors import CheckpointDamaged

SUMS = "checksums.json"
_BLOCK_BYTES = 2**18  # fits a processor's cache


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
