# ruff: noqa: E402 (warnings are off before the imports that would give them)
"""What `test_shapes.py` runs: programs that register, resize and delete buffers, or exchange modules, as they train.

Hooks that precede steps and epochs write to the parameters, and to the optimizer's state. What follows a step of the
loop writes, once, what the ranks agreed on before.
"""

import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

import lightning.pytorch as pl
import torch
from program_parts import Faults, Place, checksum, run_kind
from torch import nn
from torch.utils.data import DataLoader

from hyperpod_plugins.lightning import CheckpointlessRecovery, HyperPodStrategy
from hyperpod_plugins.recovery import TrainingState
from hyperpod_plugins.session import Session

sys.path.append(str(Path(__file__).parents[1]))

from device import ACCELERATOR, devices

torch.set_num_threads(1)


class Cached(nn.Module):
    """Has a buffer that its first step registers, one that is longer from epoch to epoch, and one that is deleted."""

    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(8, 8), nn.Dropout(0.1)
        self.register_buffer("warm_up", torch.full((3,), 0.5))
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.register_buffer("unset", None)
        self.register_buffer("rare", torch.zeros(2))

    def begin_epoch(self, epoch):
        self.register_buffer("table", torch.arange(2.0 + 3 * epoch), persistent=False)
        self.drop = nn.Dropout(0.1 + epoch / 5)
        if epoch == 1:
            del self.warm_up

    def forward(self, x):
        if self.training and "means" not in self._buffers:
            self.register_buffer("means", torch.zeros(0))
        if self.training:
            self.means = torch.cat([self.means, x.detach().mean()[None]])  # of this rank alone
            self.unset = self.means.mean()
        factor = 1 + self.table.sum() / 100 + self.rare.sum()
        if "warm_up" in self._buffers:
            self.warm_up.mul_(0.9)
            factor = factor + self.warm_up.sum()
        return self.layer(self.drop(x)) * factor + self.means.sum() / 10 + self.unset

    def values(self):
        return {name: buffer.tolist() for name, buffer in self.named_buffers()}


class Module(pl.LightningModule):
    def __init__(self, faults, *, exchanges):
        super().__init__()
        self.net, self.faults, self.exchanges = Cached(), faults, exchanges

    @torch.no_grad()
    def on_train_epoch_start(self):
        self.net.begin_epoch(self.current_epoch)
        self.net.layer.weight.mul_(1.05)

    @torch.no_grad()
    def on_train_batch_start(self, batch, index):
        for parameter in self.net.parameters():
            parameter.mul_(0.99)
        for state in self.optimizers().optimizer.state.values():
            state["exp_avg"].mul_(0.9)

    def training_step(self, batch, index):
        self.faults.at(f"step{index}", self.trainer)
        loss = (self.net(batch) - batch).square().mean()
        self.faults.at(f"after{index}", self.trainer)
        if self.exchanges and index == 2 and self.current_epoch == 0:
            self.criterion = nn.Linear(8, 1)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)


def fit(folder, faults):
    faults = faults.split()
    scripted = Faults([fault for fault in faults if ":" in fault], folder)
    snapshots = {"snapshot_every_steps": 2} if "snapshots" in faults else {}
    trainer = pl.Trainer(
        strategy=HyperPodStrategy(hybrid_shard_degree=2),
        accelerator=ACCELERATOR,
        devices=devices(4),
        max_epochs=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[scripted, CheckpointlessRecovery(**snapshots)],
    )
    module = Module(scripted, exchanges="exchanges" in faults)
    trainer.fit(module, DataLoader(torch.randn(96, 8), batch_size=4))
    persistent = sorted(key for key in module.state_dict() if "layer" not in key)
    return {"buffers": module.net.values(), "persistent": persistent, "parameters": checksum(module)}


def loop(folder, faults):
    scripted = Faults(faults.split(), folder)
    session = Session(hybrid_shard_degree=2)
    model = session.parallelize(Cached())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session.train(model, optimizer)
    for step in session.steps(DataLoader(torch.randn(96, 8), batch_size=4), epochs=2):
        with step:

            def loss_of(batch, index=step.index):
                if index % 3 == 0:
                    model.register_buffer("table", torch.arange(2.0 + index), persistent=False)
                if index == 4:
                    del model.warm_up
                loss = model(batch).square().mean()
                scripted.at(f"step{index}", Place)
                return loss

            step.run(loss_of)
        if step.index == 6:
            model.rare.fill_(model.means.mean())  # of this rank alone, and for the first time
    return {"buffers": model.values(), "state": TrainingState(model, [optimizer]).checksum()}


if __name__ == "__main__":
    run_kind({"fit": fit, "loop": loop}, *sys.argv[1:])
