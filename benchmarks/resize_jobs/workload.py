"""What both programs train: the transformer of the recovery benchmark on a file of tokens, 4 samples a step."""

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.recovery_jobs.events import Setting
from benchmarks.recovery_jobs.workload import SEQUENCE, VOCABULARY, make_model, make_optimizer
from hyperpod_plugins.data import write_tokens

GLOBAL_BATCH, SAMPLES = 4, 20_000

__all__ = ["GLOBAL_BATCH", "SAMPLES", "SEQUENCE", "loss_of", "make_model", "make_optimizer", "tokens_of", "write_data"]


def tokens_of(setting: Setting) -> str:
    return f"{setting.folder}/tokens"


def write_data(setting: Setting) -> None:
    """Tokens that follow each other in steps of three to six."""
    steps = np.random.default_rng(0).integers(3, 7, SAMPLES * SEQUENCE + 1)
    write_tokens(tokens_of(setting), [np.cumsum(steps) % VOCABULARY], vocab_size=VOCABULARY, progress=False)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
