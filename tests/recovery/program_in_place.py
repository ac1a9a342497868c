# ruff: noqa: E402 (warnings are off before the imports that would give them)
"""What `test_in_place.py` runs under `hyperpodrun`: a small network with dropout, validation, checkpoints, clipping."""

import csv
import enum
import json
import os
import sys
import time
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from hyperpod_plugins.fault_injection.faults import Injector
from hyperpod_plugins.lightning import CheckpointlessRecovery, FaultInjection, HyperPodStrategy
from hyperpod_plugins.recovery import TrainingState

torch.set_num_threads(1)
sys.path.append(str(Path(__file__).parents[1]))

from device import ACCELERATOR, devices, install_transport

install_transport()


LOSSES = {}
"""What this process has computed; an attribute of the module would be given to a replacement."""


class Samples(torch.utils.data.Dataset):
    def __init__(self, fetching=lambda: None):
        self.fetching = fetching

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.fetching()
        return torch.randn(16, generator=torch.Generator().manual_seed(index))


class Mixer(nn.Module):
    """Named as Llama's feed-forward part, so that the tensor plan finds it."""

    def __init__(self):
        super().__init__()
        self.up_proj = nn.Linear(16, 32)
        self.down_proj = nn.Linear(32, 16)

    def forward(self, x):
        return self.down_proj(torch.relu(self.up_proj(x)))


class Flavour(enum.Enum):
    """A hyper-parameter that `weights_only` does not read."""

    PLAIN = 1


class Module(pl.LightningModule):
    def __init__(self, flavour=Flavour.PLAIN):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(Mixer(), nn.Dropout(0.2), Mixer(), nn.LayerNorm(16))

    def on_train_batch_start(self, batch, batch_idx):
        for group in self.optimizers().param_groups:
            group["weight_decay"] *= 0.9

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch) - batch).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        LOSSES[self.trainer.global_step, batch_idx] = loss.item()
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", (self.net(batch) - batch).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self):
        return torch.utils.data.DataLoader(Samples(self.fetching), batch_size=2, shuffle=True)

    def fetching(self):
        self.injector.reach("fetching", self.global_step)

    def val_dataloader(self):
        return torch.utils.data.DataLoader(Samples(), batch_size=4)


def main(folder, degrees, micro_steps, faults, resume_from="", replacement_timeout_s="60", snapshots="auto"):
    if float(replacement_timeout_s) < 60 and int(os.environ["HYPERPOD_INCARNATION"]):
        time.sleep(300)  # this joiner does not come in time
    recovery = CheckpointlessRecovery(
        hang_timeout_s=4.0,
        verify=True,
        replacement_timeout_s=float(replacement_timeout_s),
        snapshot_every_steps=snapshots if snapshots == "auto" else int(snapshots),
    )
    trainer = pl.Trainer(
        strategy=HyperPodStrategy(**json.loads(degrees), trust_checkpoints=True),
        accelerator=ACCELERATOR,
        devices=devices(4),
        max_steps=20,
        accumulate_grad_batches=int(micro_steps),
        gradient_clip_val=1.0,
        val_check_interval=4 * int(micro_steps),
        check_val_every_n_epoch=None,
        logger=CSVLogger(folder, name="logs", flush_logs_every_n_steps=1),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            recovery,
            pl.callbacks.ModelCheckpoint(
                f"{folder}/checkpoints", filename="{step}", every_n_train_steps=6, save_top_k=-1
            ),
            *([FaultInjection(faults)] if faults else []),
        ],
    )
    torch.manual_seed(1)
    module = Module()
    module.injector = Injector(faults, rank=int(os.environ["RANK"]))
    Path(folder, f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
    trainer.fit(module, ckpt_path=resume_from or None)
    result = {
        "state": TrainingState(module, trainer.optimizers).checksum(),
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "val": float(trainer.callback_metrics["val"]),
        "losses": [(*key, loss) for key, loss in sorted(LOSSES.items())],
        "repairs": [repair.failure.kind for repair in recovery.repairs],
    }
    if trainer.is_global_zero:
        with open(f"{trainer.logger.log_dir}/metrics.csv", newline="") as file:
            result["rows"] = [(row["step"], row["loss_step"]) for row in csv.DictReader(file) if row["loss_step"]]
        result["runs"] = os.listdir(f"{folder}/logs")
    Path(folder, f"rank{trainer.global_rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
