"""Samples of fixed length from a token file, read through the page cache, which all processes of a node share."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hyperpod_plugins.data.token_file import DATA_OFFSET, TokenHeader, open_tokens, verify_tokens
from hyperpod_plugins.errors import ConfigError, DatasetChanged, DatasetDamaged


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
        DatasetDamaged: the file was truncated or altered, or is no token file.
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
