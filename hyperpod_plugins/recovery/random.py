"""Random numbers that depend on the step, not on the process: a retried step draws what it drew before."""

import hashlib
import random

import numpy as np
import torch


def stream_seed(seed: int, step: int, micro_step: int, data_rank: int) -> int:
    """Seed of one micro-step's random stream, in `0 .. 2**63 - 1`.

    A newcomer cannot be given the random state of the process that it replaces. It does not need to: the stream is a
    function of these four numbers. Tensor peers, which work on the same samples, share `data_rank` and so the stream.
    """
    text = f"hyperpod:{seed}:{step}:{micro_step}:{data_rank}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


def seed_micro_step(seed: int, step: int, micro_step: int, data_rank: int) -> None:
    """Set torch's (CPU, and the current CUDA device), Python's and NumPy's generators for one micro-step."""
    value = stream_seed(seed, step, micro_step, data_rank)
    # Not `torch.manual_seed`: where CUDA has not been used it notes each call, with a stack trace, for later.
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(value)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
