"""Ours: a Trainer with `ElasticTraining`. Nobody is restarted, unless the shard degree is to change."""

import os
import warnings
from typing import Any

from benchmarks.recovery_jobs.events import EventLog, Setting

setting = Setting.from_environ()
log = EventLog(setting, int(os.environ["RANK"]))

import lightning.pytorch as pl  # noqa: E402  (after the clock has been read)
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.resize_jobs import workload  # noqa: E402
from hyperpod_plugins.lightning import (  # noqa: E402
    ElasticTraining,
    HyperPodStrategy,
    TokenDataConfig,
    TokenDataModule,
)

log.tell("imported")


class Module(pl.LightningModule):
    """The workload; tells the benchmark of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.model = workload.make_model()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return workload.loss_of(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return workload.make_optimizer(self.model)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        world, shards = self.trainer.world_size, self.trainer.strategy.topology.shard_degree
        is_first = self.trainer.global_rank == 0
        log.tell("committed", step=self.trainer.global_step - 1, world=world, shards=shards, first=is_first)


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    sizes = {"global_batch_size": workload.GLOBAL_BATCH, "micro_batch_size": workload.GLOBAL_BATCH}
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=HyperPodStrategy(hybrid_shard_degree=1),
        max_steps=setting.steps,
        callbacks=[ElasticTraining(**sizes, max_replicas=setting.world_size, shard_degrees=(1, 2))],
        default_root_dir=setting.folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    config = TokenDataConfig(sequence_length=workload.SEQUENCE, **sizes)
    trainer.fit(Module(), datamodule=TokenDataModule(workload.tokens_of(setting), config=config))


main()
