"""What `test_rehearsal.py` rehearses under Lightning: a fit with validations, checkpoints, metrics and callbacks.

`FAULT` names in the environment what a rehearsal is to find: state that is not restored, or not read back.
"""

import os
import time
from pathlib import Path

import lightning.pytorch as L
import torch
from faults import ACCELERATOR, devices
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, LearningRateMonitor, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, Metric, MetricCollection

from hyperpod_plugins.lightning import CheckpointlessRecovery, HyperPodStrategy

torch.set_num_threads(1)
FAULT, FOLDER = os.environ.get("FAULT", ""), os.environ["FOLDER"]
REHEARSE = tuple(map(int, filter(None, os.environ.get("REHEARSE", "").split(","))))
CALLS = []


class Average(L.Callback):
    """Keeps an average of this rank's part of a weight, how many batches it has seen, and when the last one ended."""

    def __init__(self):
        self.values, self.num_batches, self.last_s = [], 0, 0.0

    def on_train_batch_end(self, trainer, module, *_):
        now = module.last.weight.detach().to_local().clone()
        self.values = [0.9 * self.values[0] + 0.1 * now] if self.values else [now]
        self.num_batches += 1
        self.last_s = time.monotonic()

    def state_dict(self):
        return {"values": self.values, "num_batches": self.num_batches}

    def load_state_dict(self, state_dict):
        self.num_batches = state_dict["num_batches"]
        if FAULT != "callback":
            self.values = state_dict["values"]


class Backwards(L.Callback):
    """Counts what is computed, and is put back where that is computed again."""

    def __init__(self):
        self.count = 0

    def on_before_backward(self, *_):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]


class Seen(L.Callback):
    """Counts batches in an attribute, and sees the learning rate of each step, also in a replacement."""

    num_batches = 0

    def on_train_batch_start(self, trainer, *_):
        self.num_batches += 1
        rates = [each["lr"] for each in trainer.optimizers[0].param_groups]
        assert rates == trainer.lr_scheduler_configs[0].scheduler.get_last_lr()


class Unreadable(Metric):
    """Has a state that another process would have to unpickle."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("shown", default=[], dist_reduce_fx=None)

    def update(self, value):
        self.shown.append(Path("a") if FAULT == "metric" else value.detach())

    def compute(self):
        return torch.tensor(float(len(self.shown)))


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1)
        self.last = nn.Linear(8, 8)
        self.metrics = MetricCollection({"mean": MeanMetric(), "other": MeanMetric()})
        self.own = Unreadable()
        self.num_steps, self.history = 0, {"losses": []}
        self.last_losses = self.history["losses"]  # the same list

    def forward(self, x):
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))

    def training_step(self, batch, index):
        loss = (self(batch) - batch).square().mean()
        self.metrics.update(loss.detach())
        self.own.update(loss)
        self.num_steps += 1
        CALLS.append(1)
        self.last_losses.append(self.num_steps)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        if FAULT == "another's":
            self.trainer.callbacks[0].num_batches += 10
        return loss

    def on_train_epoch_end(self):
        self.log("other", self.metrics["other"].compute())
        self.metrics.reset()

    def validation_step(self, batch, index):
        self.log("val_loss", (self(batch) - batch).square().mean(), sync_dist=True)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["calls"] = len(CALLS) if FAULT == "hook" else self.num_steps

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        num_steps = self.trainer.estimated_stepping_batches  # creates the loader
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


callbacks = [
    Average(),
    Backwards(),
    Seen(),
    Timer(duration={"days": 1}),
    EarlyStopping("val_loss", patience=50),
    EMAWeightAveraging(decay=0.9, update_every_n_steps=1),
    LearningRateMonitor(),
    ModelCheckpoint(FOLDER, every_n_train_steps=3),
    CheckpointlessRecovery(rehearse=REHEARSE),
]
L.seed_everything(7)
num_ranks = int(os.environ["WORLD_SIZE"])
trainer = L.Trainer(
    accelerator=ACCELERATOR,
    devices=devices(num_ranks),
    strategy=HyperPodStrategy(hybrid_shard_degree=1),
    max_steps=int(os.environ.get("MAX_STEPS", "9")),
    max_epochs=50,
    accumulate_grad_batches=int(os.environ.get("ACCUMULATE", "1")),
    val_check_interval=3,
    check_val_every_n_epoch=None,
    log_every_n_steps=1,
    logger=CSVLogger(FOLDER),
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=callbacks,
)
train, held_out = torch.randn(5 * 4 * num_ranks, 8), torch.randn(2 * 4 * num_ranks, 8)
module = Module()
trainer.fit(module, DataLoader(train, batch_size=4, shuffle=True), DataLoader(held_out, batch_size=4))
shown = {name: float(value).hex() for name, value in sorted(trainer.callback_metrics.items())}
weights = float(module.last.weight.detach().to_local().double().sum()).hex()
counts = callbacks[0].num_batches, callbacks[1].count, callbacks[2].num_batches
print(f"trained to {weights} {counts} {module.last_losses} {shown}")
