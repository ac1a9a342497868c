"""Data for the examples with Accelerate: the standard library's source as blocks of bytes, by `datasets`."""

import sysconfig
from pathlib import Path

from datasets import Dataset

NUM_FILES = 12


def build_datasets(block_size: int) -> tuple[Dataset, Dataset]:
    """Blocks for training and for evaluation; the same on every process."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(root.glob("*.py"))[: NUM_FILES + 1]
    *training, last = [_blocks(path.read_bytes(), block_size) for path in files]
    return Dataset.from_list([block for blocks in training for block in blocks]), Dataset.from_list(last)


def _blocks(text: bytes, block_size: int) -> list[dict[str, list[int]]]:
    whole = range(0, len(text) - block_size + 1, block_size)
    blocks = [list(text[begin : begin + block_size]) for begin in whole]
    return [{"input_ids": block, "labels": block} for block in blocks]
