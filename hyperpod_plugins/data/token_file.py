"""The file format of a token dataset, and the detection of damaged files.

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
from typing import BinaryIO

import numpy as np

from hyperpod_plugins.errors import DatasetDamaged

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
        DatasetDamaged: the file is no token file, has another version, was truncated, or its header or table was
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
