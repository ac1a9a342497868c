# ruff: noqa: E402 (warnings are off before the imports that would give them)
"""What `test_program_collectives.py` runs: a program whose own set-up and hooks communicate, and whose steps use it."""

import json
import os
import signal
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from hyperpod_plugins.lightning import CheckpointlessRecovery, HyperPodStrategy
from hyperpod_plugins.recovery import TrainingState
from hyperpod_plugins.session import Session

sys.path.append(str(Path(__file__).parents[1]))

from device import ACCELERATOR, devices

torch.set_num_threads(1)
RANK = int(os.environ["RANK"])


class Faults:
    """`place` of which rank 1 is killed, once."""

    def __init__(self, folder, places):
        self.folder, self.places = Path(folder), places.split()

    def at(self, place):
        mark = self.folder / f"done-{place}"
        if place in self.places and RANK == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def total(value):
    value = torch.tensor(float(value))
    dist.all_reduce(value)
    return float(value)


def gathered(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, {"value": value})
    return sum(each["value"] for each in found)


class Module(pl.LightningModule):
    def __init__(self, faults, hooks):
        super().__init__()
        self.faults, self.hooks = faults, hooks
        self.net = nn.Linear(4, 4)
        self.factors = {}

    def setup(self, stage):
        if "setup" in self.hooks:
            self.factors["setup"] = total(RANK + 1)

    def on_train_start(self):
        if "start" in self.hooks:
            self.factors["start"] = gathered(RANK + 0.5)
            self.factors["gathered"] = float(self.all_gather(torch.ones(1) * RANK).sum())

    def on_train_epoch_start(self):
        self.faults.at(f"epoch{self.current_epoch}")
        if "epoch" in self.hooks:
            self.factors["epoch"] = total(self.current_epoch + 1)

    def on_train_batch_start(self, batch, index):
        if "batch" in self.hooks:
            self.factors["batch"] = total(index + RANK + 1)

    def training_step(self, batch, index):
        self.faults.at(f"step{self.global_step}")
        return (self.net(batch) * sum(self.factors.values())).square().mean()

    def validation_step(self, batch, index):
        self.faults.at(f"validation{self.current_epoch}")
        self.log("val", self.net(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def fit(folder, faults, hooks):
    trainer = pl.Trainer(
        strategy=HyperPodStrategy(hybrid_shard_degree=1),
        accelerator=ACCELERATOR,
        devices=devices(2),
        max_epochs=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[pl.callbacks.ModelCheckpoint(f"{folder}/checkpoints"), CheckpointlessRecovery()],
    )
    module = Module(faults, hooks)
    trainer.fit(module, DataLoader(torch.randn(16, 4), batch_size=4), DataLoader(torch.randn(8, 4), batch_size=4))
    return module.factors, TrainingState(module, trainer.optimizers).checksum()


def loop(folder, faults, hooks):
    session = Session(hybrid_shard_degree=1, checkpoint_folder=folder)
    factors = {"setup": total(RANK + 1), "start": gathered(RANK + 0.5)}
    model = session.parallelize(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with torch.no_grad():
        model(torch.ones(1, 4))  # leaves parameters gathered
    session.train(model, optimizer)
    for step in session.steps(DataLoader(torch.randn(32, 4), batch_size=4), epochs=2):
        with step:
            faults.at(f"step{step.index}")
            step.run(lambda batch: (model(batch) * sum(factors.values())).square().mean())
    return factors, TrainingState(model, [optimizer]).checksum()


def main(kind, folder, places, hooks):
    torch.manual_seed(1)
    result = {"fit": fit, "loop": loop}[kind](folder, Faults(folder, places), hooks.split(","))
    Path(folder, f"rank{RANK}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
