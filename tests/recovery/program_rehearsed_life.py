"""What `test_rehearsal.py` rehearses under Lightning as a whole: two fits, a validation, a test and predictions.

With `FAULT=global` in the environment, the test depends on a global variable that training changes.
"""

import os

import lightning.pytorch as L
import torch
from faults import ACCELERATOR, devices
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from hyperpod_plugins.lightning import CheckpointlessRecovery, HyperPodStrategy

torch.set_num_threads(1)
FAULT, FOLDER = os.environ.get("FAULT", ""), os.environ["FOLDER"]
TRAINED = []


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 8))

    def loss(self, batch):
        return (self.layers(batch) - batch).square().mean()

    def training_step(self, batch, index):
        TRAINED.append(1)
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val/loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch, index):
        self.log("test/loss", self.loss(batch) * (len(TRAINED) if FAULT == "global" else 1), sync_dist=True)

    def predict_step(self, batch, index):
        return self.layers(batch)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(num_batches):
    return DataLoader(torch.randn(num_batches * 4 * num_ranks, 8), batch_size=4)


L.seed_everything(7)
num_ranks = int(os.environ["WORLD_SIZE"])
trainer = L.Trainer(
    accelerator=ACCELERATOR,
    devices=devices(num_ranks),
    strategy=HyperPodStrategy(hybrid_shard_degree=1),
    max_epochs=20,
    limit_test_batches=1.0,
    log_every_n_steps=1,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[CheckpointlessRecovery(snapshot_every_steps=8), ModelCheckpoint(FOLDER)],
)
train, held_out = loader(10), loader(6)
module = Module()
trainer.fit(module, train, held_out)
is_rehearsed = "HYPERPOD_REHEARSAL" in os.environ
assert (trainer.global_step == 200) != is_rehearsed
assert trainer.max_steps == -1
trainer.validate(module, held_out, verbose=False)
trainer.fit_loop.max_epochs = 22
first = trainer.global_step
trainer.fit(module, train, held_out)
assert trainer.global_step - first == (3 if is_rehearsed else 20)
[tested] = trainer.test(module, held_out, verbose=False)
predictions = trainer.predict(module, held_out)
assert len(predictions) == (4 if is_rehearsed else 6)
print(f"tested {tested['test/loss'].hex()}")
