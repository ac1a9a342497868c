# ruff: noqa: E402 (warnings are off before the imports that would give them)
"""What `test_life.py` runs under `hyperpodrun`: a program that does more than one fit, with faults in all its parts."""

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn

from hyperpod_plugins.elastic import JobStore
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.lightning import CheckpointlessRecovery, HyperPodStrategy
from hyperpod_plugins.recovery import TrainingState

sys.path.append(str(Path(__file__).parents[1]))

from device import ACCELERATOR, devices

torch.set_num_threads(1)
RANK = int(os.environ["RANK"])


class Faults:
    """`kind:rank:place:step`, each of which comes once in a job; `late` is a SIGKILL when node 0 is done."""

    def __init__(self, text, folder):
        self.wanted = [fault.split(":") for fault in text.split()]
        self.folder = Path(folder)

    def at(self, place, step=0):
        with open(self.folder / f"places-{RANK}", "a") as file:
            print(place, step, file=file)
        for kind, rank, where, when in self.wanted:
            if (int(rank), where, int(when)) != (RANK, place, step):
                continue
            mark = self.folder / f"done-{kind}-{rank}-{where}-{when}"
            if mark.exists() and kind != "always":
                continue
            mark.touch()
            if kind == "late":
                job_store = JobStore.connect(JobEnv.from_environ())
                for first in range(int(os.environ["LOCAL_WORLD_SIZE"])):
                    job_store.wait_get(f"agent/finished/{first}", 60.0)
                time.sleep(1.0)  # its agent says so to the others
            if kind in ("kill", "late"):
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            raise RuntimeError(f"fault at {place} {step}")


class Module(pl.LightningModule):
    def __init__(self, faults, name):
        super().__init__()
        self.faults, self.name = faults, name
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 16))

    def at(self, place, step=0):
        self.faults.at(f"{self.name}-{place}", step)

    def loss(self, batch):
        return (self.net(batch) - batch).square().mean()

    def setup(self, stage):
        self.at(f"setup-{stage}")

    def training_step(self, batch, batch_idx):
        self.at("step", self.global_step)
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.at("sanity" if self.trainer.sanity_checking else self.trainer.state.fn.value, batch_idx)
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.at("test", batch_idx)
        self.log("test", self.loss(batch) * torch.rand(()), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        self.at("predict", batch_idx)
        return self.net(batch).sum(1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_end(self):
        self.at("train-end")

    def on_fit_end(self):
        self.at("fit-end")


def loader(seed, size=2):
    data = torch.randn(32, 16, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.DataLoader(data, batch_size=size)


def trainer_for(folder, name, **options):
    return pl.Trainer(
        strategy=HyperPodStrategy(hybrid_shard_degree=2),
        accelerator=ACCELERATOR,
        devices=devices(4),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        num_sanity_val_steps=1,
        use_distributed_sampler=True,
        callbacks=[
            CheckpointlessRecovery(),
            pl.callbacks.ModelCheckpoint(f"{folder}/{name}", filename="{step}", every_n_train_steps=2, monitor="loss"),
            pl.callbacks.EarlyStopping("val", patience=50),
        ],
        **options,
    )


def of(trainer):
    [saving] = trainer.checkpoint_callbacks
    return {
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "metrics": {name: float(value) for name, value in sorted(trainer.callback_metrics.items())},
        "best": saving.best_model_path,
        "score": float(saving.best_model_score),
    }


def main(folder, faults_text):
    faults = Faults(faults_text, folder)
    result = {}
    trainer = trainer_for(folder, "first", max_steps=6, val_check_interval=4)
    faults.at("script")
    torch.manual_seed(1)
    module = Module(faults, "first")
    result["validated"] = trainer.validate(module, loader(3), verbose=False)
    faults.at("before-fit")
    trainer.fit(module, loader(1), loader(3))
    result["first"] = {**of(trainer), "state": TrainingState(module, trainer.optimizers).checksum()}
    faults.at("between")
    result["tested"] = trainer.test(module, loader(4), verbose=False)
    result["after test"] = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
    predictions = trainer.predict(module, loader(5))
    result["predicted"] = torch.cat(predictions).tolist()
    result["drawn"] = float(torch.rand(()))

    # The same trainer and module go on; whoever is lost there is replaced in place.
    trainer.fit_loop.epoch_loop.max_steps = 10
    trainer.fit(module, loader(6), loader(3))
    result["again"] = {**of(trainer), "state": TrainingState(module, trainer.optimizers).checksum()}

    # Whoever is lost after collectives between two calls cannot come in: all start again.
    weights = {name: value.full_tensor() for name, value in module.state_dict().items()}
    faults.at("export")
    dist.barrier()
    result["exported"] = sum(float(value.double().sum()) for value in weights.values())
    second = Module(faults, "second")
    second.net[0].bias.data += float(torch.rand(()))
    trainer = trainer_for(folder, "second", max_steps=6, val_check_interval=4)
    trainer.fit(second, loader(2), loader(3))
    result["second"] = {**of(trainer), "state": TrainingState(second, trainer.optimizers).checksum()}
    result["tested again"] = trainer.test(second, loader(4), verbose=False)
    time.sleep(0.05 * RANK)
    faults.at("end")
    Path(folder, f"rank{RANK}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
