"""Ours: an ordinary LightningModule under HyperPodStrategy, started by hyperpodrun. Nothing in it is about recovery.

Two replicas of an unsharded model, the counterpart of the peers' DistributedDataParallel.
"""

import os
import warnings
from typing import Any

from benchmarks.recovery_jobs.events import EventLog, Setting

setting = Setting.from_environ()
log = EventLog(setting, int(os.environ["RANK"]))

import lightning.pytorch as pl  # noqa: E402  (after the clock has been read)
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from benchmarks.recovery_jobs import workload  # noqa: E402
from hyperpod_plugins.lightning import CheckpointlessRecovery, HyperPodStrategy  # noqa: E402

log.tell("imported")


class Module(pl.LightningModule):
    """The workload."""

    def __init__(self) -> None:
        super().__init__()
        self.model = workload.make_model()

    def training_step(self, rows: Tensor, batch_idx: int) -> Tensor:
        return workload.loss_of(self.model, rows)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return workload.make_optimizer(self.model)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return workload.make_loader(log.rank, setting.world_size)


class Watch(pl.Callback):
    """Tells the benchmark what happens, and dies where it is to."""

    def __init__(self, recovery: CheckpointlessRecovery) -> None:
        self.recovery = recovery
        self.num_told = 0
        self.loss = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        log.tell("ready")

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        workload.die_if_due(setting, log, trainer.global_step)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        log.tell("committed", step=trainer.global_step - 1, world=setting.world_size)
        self.loss = outputs["loss"].item()
        for repair in self.recovery.repairs[self.num_told :]:
            self.num_told += 1
            log.tell(
                "repaired",
                noticed_s=repair.noticed_s,
                assembled_s=repair.quorum_s,
                restored_s=repair.restored_s,
                incident_s=repair.failure.at_s,
                is_joining=log.rank in repair.receivers,
            )


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    recovery = CheckpointlessRecovery()
    watch, module = Watch(recovery), Module()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=setting.world_size,
        strategy=HyperPodStrategy(hybrid_shard_degree=1),
        max_steps=setting.steps,
        callbacks=[recovery, watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module)
    workload.tell_result(log, module.model, trainer.optimizers[0], watch.loss)


main()
