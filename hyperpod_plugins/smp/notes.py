"""Say once, on the first rank, what is done otherwise than an SMP v2 script may expect."""

import warnings
from functools import cache

import torch.distributed as dist


@cache
def note(text: str) -> None:
    """Warn of it, once in this process and on the first rank only."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        warnings.warn(text, stacklevel=3)
