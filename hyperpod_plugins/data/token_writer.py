"""Write token files atomically.

`build_tokens` writes a file only if it is missing or damaged: one process writes it while the others wait.
"""

import importlib
import importlib.util
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self

import numpy as np
import numpy.typing as npt

from hyperpod_plugins.data.locks import file_lock
from hyperpod_plugins.data.token_file import (
    BLOCK_BYTES,
    DATA_OFFSET,
    TokenHeader,
    is_token_file,
    read_header,
    table_digest,
)
from hyperpod_plugins.errors import ConfigError, DataError, DatasetChanged, DatasetDamaged

_LINE_EVERY_S = 10.0
_log = logging.getLogger(__name__)


class ProgressBar:
    """Progress bar without a total, used as a context: tqdm if it is installed, else a log line every 10 seconds.

    Args:
        title: name of the task.
        unit: name of the counted unit.
        is_shown: False disables the output.
    """

    def __init__(self, title: str, unit: str, *, is_shown: bool) -> None:
        self._title = title
        self._unit = unit
        self._is_shown = is_shown
        self._count = 0
        self._next_line_s = time.monotonic() + _LINE_EVERY_S
        self._tqdm: Any = None
        if is_shown and importlib.util.find_spec("tqdm") is not None:
            self._tqdm = importlib.import_module("tqdm").tqdm(desc=title, unit=f" {unit}", unit_scale=True)

    def advance(self, count: int) -> None:
        """Count `count` more."""
        self._count += count
        if self._tqdm is not None:
            self._tqdm.update(count)
        elif self._is_shown and time.monotonic() >= self._next_line_s:
            _log.info("%s: %d %s so far", self._title, self._count, self._unit)
            self._next_line_s = time.monotonic() + _LINE_EVERY_S

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the bar, leaving it as it is."""
        if self._tqdm is not None:
            self._tqdm.close()


TokenType = Literal["auto", "uint16", "uint32"]
TokenChunks = Iterable[npt.ArrayLike]


def build_tokens(
    path: str | os.PathLike[str],
    source: Callable[[], TokenChunks],
    *,
    vocab_size: int,
    dtype: TokenType = "auto",
    progress: bool = True,
    timeout_s: float = 3600.0,
) -> TokenHeader:
    """Return the header of the token file at `path`, first writing it from `source()` if it is missing or damaged.

    All ranks may call this: one builds the file while the others wait. A file of another format is not overwritten.

    Args:
        path: path of the file.
        source: returns the chunks of the token stream; called only if the file must be written.
        vocab_size: vocabulary size; every token must be smaller.
        dtype: see `write_tokens`.
        progress: see `write_tokens`.
        timeout_s: seconds to wait for another process that builds the file.

    Raises:
        ConfigError: `dtype` cannot hold the vocabulary.
        DatasetChanged: the existing file was built for another vocabulary size.
        DatasetDamaged: the existing file is not a token file.
        DataError: see `write_tokens`.
    """
    target = Path(path)
    token_bytes = _token_bytes(dtype, vocab_size)
    if (header := _valid_header(target, vocab_size)) is not None:
        return header
    with file_lock(_lock_path(target), timeout_s=timeout_s, purpose=f"building {target.name}"):
        if (header := _valid_header(target, vocab_size)) is not None:
            return header
        return _write_and_rename(target, source(), token_bytes, vocab_size, progress=progress)


def write_tokens(
    path: str | os.PathLike[str],
    chunks: TokenChunks,
    *,
    vocab_size: int,
    dtype: TokenType = "auto",
    progress: bool = True,
    timeout_s: float = 3600.0,
) -> TokenHeader:
    """Write a token file, atomically replacing an older one.

    Args:
        path: path of the file; its folder must exist and gets a hidden lock file.
        chunks: chunks of the token stream, each a list or array of integers, shape (tokens,).
        vocab_size: vocabulary size; every token must be smaller.
        dtype: "auto" stores two bytes per token if the vocabulary allows, else four.
        progress: whether to show the number of tokens written.
        timeout_s: seconds to wait for another process that writes the same file.

    Raises:
        ConfigError: `dtype` cannot hold the vocabulary.
        DataError: a token lies outside the vocabulary, a chunk is malformed, there are no tokens, the folder does not
            exist, or the other writer did not finish in time.
    """
    target = Path(path)
    token_bytes = _token_bytes(dtype, vocab_size)
    with file_lock(_lock_path(target), timeout_s=timeout_s, purpose=f"writing {target.name}"):
        return _write_and_rename(target, chunks, token_bytes, vocab_size, progress=progress)


def _lock_path(target: Path) -> Path:
    if not target.parent.is_dir():
        raise DataError(
            f"the folder {str(target.parent)!r} for the token file {target.name!r} does not exist. Create it first."
        )
    return target.with_name(f".{target.name}.lock")


def _valid_header(target: Path, vocab_size: int) -> TokenHeader | None:
    if not target.exists():
        return None
    try:
        header = read_header(target)
    except DatasetDamaged as damage:
        if not is_token_file(target):
            raise
        _log.warning("Rebuilding %s: %s", target, damage)
        return None
    if header.vocab_size != vocab_size:
        raise DatasetChanged(
            f"the token file {str(target)!r} was built for a vocabulary of {header.vocab_size}, but {vocab_size} was "
            "asked for. Give another path, or delete the file to rebuild it."
        )
    return header


def _token_bytes(dtype: TokenType, vocab_size: int) -> int:
    needed = 2 if vocab_size <= 1 << 16 else 4
    token_bytes = {"auto": needed, "uint16": 2, "uint32": 4}.get(dtype)
    if token_bytes is None or token_bytes < needed or not 1 <= vocab_size <= 1 << 32:
        raise ConfigError(
            f"tokens of a vocabulary of {vocab_size} cannot be stored as {dtype!r}: uint16 holds vocabularies up to "
            f"{1 << 16}, uint32 "
            f'up to {1 << 32}. Use dtype="auto" and the size of the tokenizer\'s vocabulary.'
        )
    return token_bytes


def _write_and_rename(
    target: Path, chunks: TokenChunks, token_bytes: int, vocab_size: int, *, progress: bool
) -> TokenHeader:
    """Write a temporary file, sync it to disk and rename it; the caller's lock also protects the temporary name."""
    partial = target.with_name(f".{target.name}.partial")
    try:
        with partial.open("wb") as file, ProgressBar(f"writing {target.name}", "tokens", is_shown=progress) as bar:
            header = _write_all(file, _validated_chunks(chunks, token_bytes, vocab_size, bar), token_bytes, vocab_size)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # make the rename durable
    finally:
        os.close(folder)
    return header


def _write_all(file: BinaryIO, pieces: Iterator[bytes], token_bytes: int, vocab_size: int) -> TokenHeader:
    file.write(bytes(DATA_OFFSET))
    table, block = bytearray(), bytearray()
    num_bytes = 0
    for piece in pieces:
        file.write(piece)
        num_bytes += len(piece)
        block += piece
        while len(block) >= BLOCK_BYTES:
            table += zlib.crc32(block[:BLOCK_BYTES]).to_bytes(4, "little")
            del block[:BLOCK_BYTES]
    if block:
        table += zlib.crc32(block).to_bytes(4, "little")
    if not num_bytes:
        raise DataError(
            "the source gave no tokens at all, so there is nothing to write. Check the paths and filters of the source."
        )
    file.write(table)
    header = TokenHeader(
        token_bytes=token_bytes,
        num_tokens=num_bytes // token_bytes,
        vocab_size=vocab_size,
        table_digest=table_digest(bytes(table)),
    )
    file.seek(0)
    file.write(header.pack())
    return header


def _validated_chunks(chunks: TokenChunks, token_bytes: int, vocab_size: int, bar: ProgressBar) -> Iterator[bytes]:
    num_tokens = 0
    for chunk in chunks:
        tokens = np.asarray(chunk)
        if not tokens.size:
            continue
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise DataError(
                f"a chunk of tokens has shape {tokens.shape} and type {tokens.dtype}, but must be one row of whole "
                "numbers. Let the source give lists or one-dimensional integer arrays of token ids."
            )
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= vocab_size:
            raise DataError(
                f"the tokens from number {num_tokens} on hold ids from {low} to {high}, but vocab_size={vocab_size} "
                f"allows 0 to {vocab_size - 1}. Give the size of the tokenizer's whole vocabulary, added tokens "
                "included."
            )
        num_tokens += tokens.size
        bar.advance(tokens.size)
        for start in range(0, tokens.size, BLOCK_BYTES):  # convert in blocks, to avoid a full copy of a huge chunk
            yield tokens[start : start + BLOCK_BYTES].astype(f"<u{token_bytes}").tobytes()
