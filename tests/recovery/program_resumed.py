# ruff: noqa: E402 (warnings are off before the imports that would give them)
"""Trains and saves. With CHANGED it goes on from there, after somebody has changed what no checkpoint of a model has.

With STREAM it reads a loader of unknown length, whose epochs end within a step's micro-steps. With TWICE it trains in
two fits, and ranks may be lost as the second one begins, and as one ends.
"""

import os
import warnings

warnings.filterwarnings("ignore")

import lightning.pytorch as pl
import torch
from faults import ACCELERATOR, Faults, devices
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric

from hyperpod_plugins.lightning import CheckpointlessRecovery, HyperPodStrategy, trainer_entries
from hyperpod_plugins.parallel.checkpoint.dcp_storage import CheckedWriter
from hyperpod_plugins.recovery.entries import Entries
from hyperpod_plugins.recovery.local_state import LocalStates

torch.set_num_threads(1)
faults = Faults()
IS_CHANGED = "CHANGED" in os.environ
STREAM = {"accumulate_grad_batches": 2, "val_check_interval": 4, "check_val_every_n_epoch": None}


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
        self.register_buffer("factor", torch.tensor(2.0 if IS_CHANGED else 1.0), persistent=False)
        self.register_buffer("table", torch.zeros(6 if IS_CHANGED else 4), persistent=False)
        self.mean = None if IS_CHANGED else MeanMetric()
        self.begins_with = None
        self.fits = 0

    def on_train_start(self):
        self.fits += 1
        faults.at(f"begin {self.fits}", 0)

    def on_train_batch_start(self, batch, index):
        if self.begins_with is None:
            self.begins_with = self.net[1].running_mean.clone()

    def training_step(self, batch, index):
        faults.note(kind="step", index=self.global_step)
        faults.at(f"fit {self.fits}", index)
        loss = (self.net(batch) - batch).square().mean() * self.factor
        if self.mean is not None:
            self.mean(loss.detach())
            self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, index):
        pass

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Stream(IterableDataset):
    """Five batches of this rank."""

    def __iter__(self):
        yield from torch.randn(20, 8, generator=torch.Generator().manual_seed(faults.rank))


def main():
    pl.seed_everything(1, verbose=False)
    module, data = Module(), torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    is_stream = "STREAM" in os.environ
    loader = DataLoader(Stream() if is_stream else data, batch_size=4)
    if "TWICE" in os.environ:

        def with_fault(point, call):
            def wrapped(*args, **kwargs):
                faults.at(f"{point} {module.fits}", 0)
                return call(*args, **kwargs)

            return wrapped

        CheckedWriter.write_data = with_fault("write", CheckedWriter.write_data)
        trainer_entries.save_entry_values = with_fault("written", trainer_entries.save_entry_values)
        Entries.record = with_fault("record", Entries.record)
        exchange = LocalStates.exchange

        def exchange_with_fault(self, step, **more):
            if step == 0:
                faults.at(f"entry {module.fits}", 0)
            return exchange(self, step, **more)

        LocalStates.exchange = exchange_with_fault
        for _ in range(2):
            trainer = pl.Trainer(
                strategy=HyperPodStrategy(hybrid_shard_degree=1),
                accelerator=ACCELERATOR,
                devices=devices(2),
                max_steps=3,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                callbacks=[CheckpointlessRecovery()],
            )
            trainer.fit(module, loader)
        torch.save(
            {
                "state": {name: each.detach() for name, each in module.named_buffers()},
                "shown": dict(trainer.callback_metrics),
                "epoch": trainer.current_epoch,
                "drawn": torch.rand(()),
            },
            faults.folder / f"result-{faults.rank}.pt",
        )
        return
    trainer = pl.Trainer(
        strategy=HyperPodStrategy(hybrid_shard_degree=2),
        accelerator=ACCELERATOR,
        devices=devices(2),
        max_steps=8 if IS_CHANGED or is_stream else 5,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            CheckpointlessRecovery(),
            pl.callbacks.ModelCheckpoint(faults.folder, filename="{step}", every_n_train_steps=5),
        ],
        **(STREAM if is_stream else {}),
    )
    path = f"{faults.folder}/step=5.ckpt" if IS_CHANGED else None
    trainer.fit(module, loader, DataLoader(data), ckpt_path=path)
    result = {
        "begins_with": module.begins_with,
        "ends_with": module.net[1].running_mean,
        "factor": float(module.factor),
        "step": trainer.global_step,
    }
    torch.save(result, faults.folder / f"result-{faults.rank}.pt")


if __name__ == "__main__":
    main()
