"""Random numbers that depend on the step, not on the process: a retried step draws the same numbers.

Random numbers for reading data depend on the sample instead; see `data.random_numbers`.
"""

import random
from typing import Any

import numpy as np
import torch

from hyperpod_plugins.data.random_numbers import keyed_seed, seed_host_generators

COMPUTE = "step"
"""Stream for the computation of a micro-step."""
BATCH = "batch"
"""From the fetch of the batch on: the transfer hooks and the hooks at the beginning of the batch."""
AFTER_COMMIT = "after"
"""After a commit, up to the next batch; the micro-step is 0."""
EVALUATION = "evaluation"
"""A batch of an evaluation; the batch number is used as the micro-step."""
TRAINING_END = "end"
"""After a call that trained."""
EPOCH_BEGIN, EPOCH_END = "epoch begin", "epoch end"
"""Hooks at the beginning and the end of an epoch; the micro-step is 0."""
EVALUATION_BEGIN, FIT_END = "evaluation begin", "fit end"
"""Hooks before the first batch of an evaluation, and at the end of all epochs; the micro-step is 0."""


def stream_seed(seed: int, step: int, micro_step: int, rank: int, part: str = COMPUTE) -> int:
    """Seed of one part of a micro-step's random stream, in `0 .. 2**63 - 1`.

    A joiner cannot get the random state of the process that it replaces, and does not need it: the stream is a
    function of these arguments. `rank` is the topology's `compute_rank` where a model computes: tensor-parallel peers
    compute the same tokens, so they share the stream. Elsewhere it is `data_rank`, which context peers share, too.
    """
    return keyed_seed(part, seed, step, micro_step, rank)


def seed_micro_step(seed: int, step: int, micro_step: int, rank: int, part: str = COMPUTE) -> None:
    """Seed the generators of torch (CPU and current CUDA device), Python and NumPy for a part of a micro-step."""
    value = stream_seed(seed, step, micro_step, rank, part)
    seed_host_generators(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(value)


def random_state() -> dict[str, Any]:
    """State of the generators of torch (CPU and current CUDA device), Python and NumPy, as plain data."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, cached = numpy_state
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "python": (version, list(words), gauss),
        "numpy": (name, torch.tensor(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
