"""The file format of a token dataset, the detection of damaged files, and the samples that are read from a file.

    0             header: magic, version, type, counts, digest of the checksum table, checksum of the header itself
    4096          the tokens, little-endian
    4096 + data   one CRC-32 for each MiB of tokens

Opening a file reads the header, the checksum table and the file's size. This detects files that are truncated, of
another format, or mixed from two files. Altered tokens are found by `verify_tokens`, which reads the whole file.
"""

import contextlib
import hashlib
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hyperpod_plugins.errors import ConfigError, DatasetChanged, DatasetDamaged

DATA_OFFSET = 4096
BLOCK_BYTES = 1 << 20
_MAGIC = b"HYPODTOK"
_VERSION = 1
_FIELDS = struct.Struct("<8sIIQQ32s")  # magic, version, bytes per token, tokens, vocabulary, digest of the table
_CHECKSUM = struct.Struct("<I")
_REBUILD = "If that is not possible, delete the file and build it again with write_tokens."


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHeader:
    """Header of a token file."""

    token_bytes: int
    """Bytes of one token: 2 or 4."""
    num_tokens: int
    """Number of tokens."""
    vocab_size: int
    """Every token is smaller than this."""
    table_digest: bytes
    """BLAKE2b-256 of the block checksums; identifies the content."""

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """Data type of the stored tokens."""
        return np.dtype(f"<u{self.token_bytes}")

    @property
    def data_bytes(self) -> int:
        """Size of the tokens in bytes."""
        return self.num_tokens * self.token_bytes

    @property
    def num_blocks(self) -> int:
        """Number of block checksums."""
        return -(-self.data_bytes // BLOCK_BYTES)

    @property
    def file_bytes(self) -> int:
        """Size of the whole file in bytes."""
        return DATA_OFFSET + self.data_bytes + self.num_blocks * _CHECKSUM.size

    @property
    def fingerprint(self) -> str:
        """Identifier of the content: equal for equal tokens of equal type and vocabulary size."""
        return hashlib.blake2b(self.pack(), digest_size=16).hexdigest()

    def pack(self) -> bytes:
        """The header as stored in the file, without padding."""
        fields = _FIELDS.pack(_MAGIC, _VERSION, self.token_bytes, self.num_tokens, self.vocab_size, self.table_digest)
        return fields + _CHECKSUM.pack(zlib.crc32(fields))


def read_header(path: Path) -> TokenHeader:
    """Read and check the header, the file's size and the checksum table.

    Raises:
        DatasetDamaged: the file is not a token file, has another version, was truncated, or its header or table was
            altered.
    """
    file, header = open_tokens(path)
    file.close()
    return header


def open_tokens(path: Path) -> tuple[BinaryIO, TokenHeader]:
    """Open a token file, and read its header from the open file, since `path` may be replaced meanwhile.

    Raises:
        DatasetDamaged: as `read_header`.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(path.open("rb"))
        header = _parse_header(file.read(_FIELDS.size + _CHECKSUM.size), path)
        actual = os.fstat(file.fileno()).st_size
        if actual != header.file_bytes:
            raise DatasetDamaged(
                f"the token file {str(path)!r} should be {header.file_bytes} bytes long ({header.num_tokens} tokens), "
                f"but is {actual}: it was cut short or added to, most likely by an interrupted copy. Copy it again. "
                + _REBUILD
            )
        _read_table(file, header, path)
        stack.pop_all()  # keep the file open
        return file, header


def verify_tokens(path: Path) -> None:
    """Read all tokens and compare them with the checksums.

    Raises:
        DatasetDamaged: the tokens were altered; the message names the first such block.
    """
    file, header = open_tokens(path)
    with file:
        checksums = np.frombuffer(_read_table(file, header, path), dtype="<u4")
        file.seek(DATA_OFFSET)
        left = header.data_bytes
        for index, expected in enumerate(checksums.tolist()):
            block = file.read(min(BLOCK_BYTES, left))
            left -= len(block)
            if zlib.crc32(block) != expected:
                first = index * BLOCK_BYTES // header.token_bytes
                raise DatasetDamaged(
                    f"the token file {str(path)!r} was altered after it was written: its tokens from number {first} "
                    "on (block "
                    f"{index} of {header.num_blocks}) do not match their checksum. Copy it again. " + _REBUILD
                )


def is_token_file(path: Path) -> bool:
    """Whether the file begins like a token file, damaged or not."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def table_digest(table: bytes) -> bytes:
    """BLAKE2b-256 of the checksum table."""
    return hashlib.blake2b(table, digest_size=32).digest()


def _parse_header(raw: bytes, path: Path) -> TokenHeader:
    if not raw.startswith(_MAGIC[: max(1, len(raw))]):
        raise DatasetDamaged(
            f"{str(path)!r} is not a token file of hyperpod_plugins: it does not begin with the magic bytes. Give the"
            " path of a file that write_tokens made."
        )
    if len(raw) != _FIELDS.size + _CHECKSUM.size:
        raise DatasetDamaged(
            f"the token file {str(path)!r} was cut short: it ends after {len(raw)} bytes, within its header. Copy it "
            f"again. {_REBUILD}"
        )
    fields, checksum = raw[: _FIELDS.size], raw[_FIELDS.size :]
    _, version, token_bytes, num_tokens, vocab_size, digest = _FIELDS.unpack(fields)
    if _CHECKSUM.unpack(checksum)[0] != zlib.crc32(fields):
        raise DatasetDamaged(f"the header of the token file {str(path)!r} was altered. Copy the file again. {_REBUILD}")
    if version != _VERSION or token_bytes not in (2, 4):
        raise DatasetDamaged(
            f"the token file {str(path)!r} has format version {version} with {token_bytes} bytes per token; this "
            f"release reads version {_VERSION} with 2 or 4. Use the release that wrote it. {_REBUILD}"
        )
    return TokenHeader(token_bytes=token_bytes, num_tokens=num_tokens, vocab_size=vocab_size, table_digest=digest)


def _read_table(file: BinaryIO, header: TokenHeader, path: Path) -> bytes:
    file.seek(DATA_OFFSET + header.data_bytes)
    table = file.read()
    if table_digest(table) != header.table_digest:
        raise DatasetDamaged(
            f"the checksum table of the token file {str(path)!r} was altered, or header and content come from two "
            f"different files. Copy the file again. {_REBUILD}"
        )
    return table


class TokenDataset(Dataset[dict[str, Tensor]]):
    """Dataset of samples `input_ids` and `labels`, shape (sequence,); `labels[t]` is the token after `input_ids[t]`.

    Samples are consecutive and overlap by one token, the last label of one sample and the first input of the next.
    The labels are shifted already: compare them directly with the logits (`cross_entropy(logits, labels)`). Hugging
    Face models shift `labels` themselves, so pass them `shift_labels=batch["labels"]` instead.

    Opening reads a header and a small table, whatever the size of the file. A pickled dataset holds the path but not
    the open file; a worker process opens the file on its first read. The file is read, not memory-mapped: if it is
    truncated during training, reading raises an error that names it, where a mapped file would kill the process with
    SIGBUS.

    Args:
        path: a file made by `write_tokens` or `build_tokens`.
        sequence_length: number of tokens per sample.

    Raises:
        FileNotFoundError: there is no such file.
        DatasetDamaged: the file was truncated or altered, or is not a token file.
        ConfigError: the file is shorter than one sample.
    """

    def __init__(self, path: str | os.PathLike[str], sequence_length: int) -> None:
        self.path = Path(path)
        self.sequence_length = sequence_length
        self._file: _Descriptor | None
        self._file, self.header = _open(self.path)
        if sequence_length < 1 or len(self) < 1:
            longest = self.header.num_tokens - 1
            advice = f"Use a length from 1 to {longest}." if longest > 0 else "Write a file with more tokens."
            raise ConfigError(
                f"sequence_length={sequence_length} does not fit the token file {str(self.path)!r}, which holds "
                f"{self.header.num_tokens} tokens. {advice}"
            )

    @property
    def fingerprint(self) -> str:
        """Identifier of the tokens and the sample length, which a sampler's state is bound to."""
        return f"{self.header.fingerprint}/{self.sequence_length}"

    def verify(self) -> None:
        """Compare all tokens with the checksums; reads the whole file.

        Raises:
            DatasetDamaged: the tokens were altered; the message names the first such block.
        """
        verify_tokens(self.path)

    def __len__(self) -> int:
        """Number of samples; trailing tokens that do not fill one are dropped."""
        return (self.header.num_tokens - 1) // self.sequence_length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Sample number `index`: two tensors of type int64, shape (sequence,).

        Raises:
            IndexError: there is no such sample.
            DatasetDamaged: the file was truncated after it was opened.
        """
        stored = np.empty(self.sequence_length + 1, self.header.dtype)
        if _read(self._opened().number, stored.data.cast("B"), self._offset(index)) < stored.nbytes:
            raise DatasetDamaged(
                f"the token file {str(self.path)!r} ends in sample {index}, though it was longer when it was opened: "
                "it was cut short or overwritten in place. Copy it again, and replace files by renaming new ones."
            )
        tokens = torch.from_numpy(stored.astype(np.int64))
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}

    def __getitems__(self, indices: list[int]) -> list[dict[str, Tensor]]:
        """The samples of one batch; `DataLoader` calls this.

        Announces all reads to the kernel first, so that the disk can serve them together rather than one by one.
        """
        descriptor = self._opened().number
        length = (self.sequence_length + 1) * self.header.token_bytes
        for index in indices:
            os.posix_fadvise(descriptor, self._offset(index), length, os.POSIX_FADV_WILLNEED)
        return [self[index] for index in indices]

    def _offset(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} was asked for, but the data has samples 0 to {len(self) - 1}")
        return DATA_OFFSET + index * self.sequence_length * self.header.token_bytes

    def _opened(self) -> "_Descriptor":
        if self._file is None:
            file, header = _open(self.path)
            if header != self.header:
                raise DatasetChanged(
                    f"the token file {str(self.path)!r} was replaced by another after this dataset was opened. "
                    "Create the dataset again."
                )
            self._file = file
        return self._file

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}


def _read(descriptor: int, into: memoryview, offset: int) -> int:
    """Fill a buffer from a file, in several reads if needed; returns the number of bytes read before the end."""
    num_read = 0
    while num_read < len(into) and (more := os.preadv(descriptor, [into[num_read:]], offset + num_read)):
        num_read += more
    return num_read


class _Descriptor:
    """An open file descriptor, closed when this object is garbage-collected."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


def _open(path: Path) -> tuple[_Descriptor, TokenHeader]:
    file, header = open_tokens(path)
    with file:
        return _Descriptor(os.dup(file.fileno())), header
