"""Random numbers that depend on the step, not on the process: a retried step draws what it drew before.

What is drawn while data is read depends on the sample instead; see `data.random_numbers`.
"""

import torch

from hyperpod_plugins.data.random_numbers import keyed_seed, seed_host_generators

COMPUTE = "step"
"""Part of a micro-step in which it is computed."""
BATCH = "batch"
"""From the fetch of its batch on: transfer hooks, and those at the beginning of the batch."""
AFTER = "after"
"""What follows a commit, up to the next batch; the micro-step is 0."""
EVALUATION = "evaluation"
"""A batch of an evaluation, whose number takes the micro-step's place."""
END = "end"
"""What follows a call that trained."""
EPOCH_BEGIN, EPOCH_END = "epoch begin", "epoch end"
"""Hooks at the beginning and the end of an epoch; the micro-step is 0."""
EVALUATION_BEGIN, FIT_END = "evaluation begin", "fit end"
"""Hooks before the first batch of an evaluation, and at the end of all epochs; the micro-step is 0."""


def stream_seed(seed: int, step: int, micro_step: int, data_rank: int, part: str = COMPUTE) -> int:
    """Seed of one part of a micro-step's random stream, in `0 .. 2**63 - 1`.

    A newcomer cannot be given the random state of the process that it replaces. It does not need to: the stream is a
    function of these numbers. Tensor peers, which work on the same samples, share `data_rank` and so the stream.
    """
    return keyed_seed(part, seed, step, micro_step, data_rank)


def seed_micro_step(seed: int, step: int, micro_step: int, data_rank: int, part: str = COMPUTE) -> None:
    """Set torch's (CPU, and the current CUDA device), Python's and NumPy's generators for a part of a micro-step."""
    value = stream_seed(seed, step, micro_step, data_rank, part)
    seed_host_generators(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(value)
