"""What every program of the benchmark trains: a small causal transformer on a made-up language, with AdamW.

Samples are functions of their index, and the order is a function of a seed, so the undisturbed run is an exact
reference. There is no dropout: the peers do not restore the state of the random generators.
"""

import hashlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from benchmarks.recovery_jobs.events import EventLog, Setting

VOCABULARY, SEQUENCE, WIDTH, HEADS, LAYERS, BATCH = 1024, 64, 256, 4, 6, 2
SAMPLES = 8192


class Block(nn.Module):
    """Attention and a feed-forward layer, normalised before each; `(batch, sequence, width)` in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.query_key_value(self.norm_1(hidden)).unflatten(-1, (3, HEADS, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.output(mixed.transpose(1, 2).flatten(2))
        return hidden + self.feed_forward(self.norm_2(hidden))


class Transformer(nn.Module):
    """5.3 million parameters; tokens `(batch, sequence)` to logits `(batch, sequence, vocabulary)`."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Sentences(Dataset[Tensor]):
    """Rows of `SEQUENCE + 1` tokens, each three to six further than the one before it."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> Tensor:
        draw = torch.Generator().manual_seed(1_000_003 * (index + 1))
        return torch.randint(3, 7, (SEQUENCE + 1,), generator=draw).cumsum(0).add(index).remainder(VOCABULARY)


def make_model() -> Transformer:
    """The same on every rank."""
    torch.manual_seed(0)
    return Transformer()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01, fused=True)


def make_loader(rank: int, world_size: int, batch: int = BATCH) -> DataLoader[Tensor]:
    sentences = Sentences(SAMPLES * batch // BATCH)
    sampler = DistributedSampler(sentences, num_replicas=world_size, rank=rank, shuffle=True, seed=7)
    return DataLoader(sentences, batch_size=batch, sampler=sampler)


def batches_from(step: int, rank: int, world_size: int) -> Iterator[Tensor]:
    """The loader's batches from a step on; a plain loader cannot be told where to begin, so it is run up to there."""
    batches = iter(make_loader(rank, world_size))
    for _ in range(step):
        next(batches)
    return batches


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def die_if_due(setting: Setting, log: EventLog, step: int) -> None:
    """Kill this process, once in a job, where the setting says; called after forward, before backward."""
    if step != setting.fault_step or log.rank != setting.fault_rank:
        return
    try:
        os.close(os.open(Path(setting.folder) / "killed", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    log.tell("fault", step=step)
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def tell_result(log: EventLog, model: nn.Module, optimizer: torch.optim.Optimizer, loss: float) -> None:
    """Tell a fingerprint of everything that was trained: parameters and optimizer state, to the last bit."""
    fingerprint = hashlib.sha256()
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        for tensor in (parameter, *(state[name] for name in sorted(state))):
            whole = tensor.detach()
            fingerprint.update(whole.to_local().numpy().tobytes() if is_sharded(whole) else whole.numpy().tobytes())
    log.tell("done", fingerprint=fingerprint.hexdigest()[:16], loss=loss)


def is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, torch.distributed.tensor.DTensor)
