"""What recovery costs while nothing fails: the same Trainer with recovery on and off, in paired rounds."""

import os
import warnings
from collections.abc import Iterator

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks import harness, ranks
from benchmarks.recovery_jobs import workload
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.lightning import CheckpointlessRecovery, HyperPodStrategy

WORLD_SIZE = 2
LIMIT = 1.01
"""Goal: less than 1 % of a step of 100 ms."""


class Module(pl.LightningModule):
    """The workload; each batch begins when its turn does."""

    def __init__(self, turns: Iterator[int]) -> None:
        super().__init__()
        self.turns = turns
        self.model = workload.make_model()

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
        return -1 if next(self.turns, None) is None else None  # -1 ends the epoch

    def training_step(self, rows: Tensor, batch_idx: int) -> Tensor:
        return workload.loss_of(self.model, rows)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return workload.make_optimizer(self.model)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return workload.make_loader(self.global_rank, WORLD_SIZE)


def train(turns: Iterator[int], is_on: bool) -> None:
    """A Trainer; with recovery it is told of an agent's store, which here the benchmark serves."""
    warnings.filterwarnings("ignore")
    if is_on:
        job = JobEnv(store_host="127.0.0.1", store_port=int(os.environ["MASTER_PORT"]), run_id="overhead")
        os.environ.update(job.to_environ())
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=WORLD_SIZE,
        strategy=HyperPodStrategy(hybrid_shard_degree=1),
        callbacks=[CheckpointlessRecovery(enabled=is_on)],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Module(turns))


def compare(schedule: harness.Schedule) -> harness.Comparison:
    """Recovery off, on, and off again, which shows the error of this machine."""
    ranks.preload(["lightning.pytorch", "hyperpod_plugins.lightning"])
    ways = {"recovery off": False, "recovery on": True, "recovery off again (control)": False}
    contenders = [
        ranks.Contender(name=name, train=train, world_size=WORLD_SIZE, kwargs={"is_on": is_on})
        for name, is_on in ways.items()
    ]
    return harness.compare("Nothing fails", contenders, schedule)
