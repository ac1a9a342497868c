# ruff: noqa: E402 (warnings are off before the imports that would give them)
"""What `test_attributes.py` runs: programs whose steps and hooks change Python attributes, and compute with them."""

import copy
import sys
import warnings
from collections import Counter, deque
from pathlib import Path

warnings.filterwarnings("ignore")

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from meters import Meter
from program_parts import RANK, Faults, Place, checksum, run_kind
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hyperpod_plugins.lightning import CheckpointlessRecovery, HyperPodStrategy
from hyperpod_plugins.recovery import TrainingState
from hyperpod_plugins.session import Session

sys.path.append(str(Path(__file__).parents[1]))

from device import ACCELERATOR, devices

torch.set_num_threads(1)
ENTRIES = []
"""One entry for each time that this process has entered the loops."""


class Average:
    """Averages of a linear layer's outputs, of more elements than are copied in each step."""

    def __init__(self, layer):
        self.parts, self.copy = {"outputs": torch.zeros(64, 32)}, copy.deepcopy(layer)

    def update(self, outputs):
        self.parts["outputs"] = self.parts["outputs"] * 0.9 + outputs.detach().mean()
        with torch.no_grad():
            self.copy.bias.lerp_(outputs.mean(0), 0.1)


class Held:
    """Objects of the program and of libraries, one of which is made anew now and then."""

    def __init__(self, layer):
        self.meters, self.average = {"all": Meter(), "recent": Meter()}, Average(layer)
        self.generator = torch.Generator().manual_seed(5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.queue = torch.zeros(64, 32)

    def update(self, outputs):
        if self.meters["recent"].n == 3:
            self.meters["recent"] = Meter()
        for each in self.meters.values():
            each.update(float(outputs.detach().mean()))
        self.average.update(outputs)
        self.queue[0].add_(outputs.detach().mean())
        scale = float(self.scaler.scale(torch.ones(())))
        self.scaler.update(scale * 1.1)
        drawn = torch.rand((), generator=self.generator)
        return drawn + scale / 99 + self.queue.mean() + sum(self.values()) / 9

    def values(self):
        means = [self.average.parts["outputs"].mean(), self.average.copy.bias.mean()]
        return [each.n + each.mean for each in self.meters.values()] + [float(each.detach()) for each in means]


class Scaled(nn.Module):
    """Counts its calls; its result depends on them, and on what it was given before."""

    def __init__(self):
        super().__init__()
        self.layer, self.num_calls = nn.Linear(8, 8), 0
        self.held = Held(self.layer)
        self.weights = [*self.layer.parameters()]
        self.last, self.recent, self.largest = 0.0, deque(maxlen=3), torch.zeros(())
        self.dropout, self.norm = nn.Dropout(0.0), nn.BatchNorm1d(8)

    def forward(self, x):
        x = self.norm(self.dropout(x))
        if self.training:
            self.num_calls += 1
            self.dropout.p += 0.01
            self.recent.append(float(x.mean()))
            self.largest = torch.maximum(self.largest, x.detach().abs().max())
            x = x + self.held.update(x) / 99
            self.weights.reverse()
        return self.layer(x) * (1 + 0.1 * (self.num_calls % 7)) + sum(self.recent) + self.largest

    def values(self):
        return [
            self.num_calls,
            self.weights[0].ndim,
            *self.recent,
            float(self.largest),
            *self.held.values(),
            float(self.held.queue.sum()),
        ]


class Module(pl.LightningModule):
    def __init__(self, faults, *, follows_own=False):
        super().__init__()
        self.faults, self.calls = faults, Counter()
        self.follows_own, self.last = follows_own, 0.0
        self.net, self.teacher = Scaled(), nn.Linear(8, 8)
        self.teacher.requires_grad_(False)
        self.outputs, self.means = [], []
        self.register_buffer("ends", torch.zeros(()))

    def training_step(self, batch, index):
        self.calls["step"] += 1
        self.seen += 1
        self.last = float(batch.mean())
        self.faults.at(f"step{index}", self.trainer)
        loss = (self.net(batch) - self.teacher(batch)).square().mean() * (1 + self.calls["end"] / 100 + self.ends / 9)
        self.faults.at(f"after{index}", self.trainer)
        return loss

    def on_train_start(self):
        ENTRIES.append(self.trainer)
        self.faults.at(f"entry{len(ENTRIES)}", self.trainer)
        self.seen, self.my_rank = 0, RANK

    def on_train_epoch_start(self):
        self.calls["epoch"] += 1
        self.net.norm.momentum *= 0.5
        self.net.norm.train(self.current_epoch != 1)
        self.trainer.train_dataloader.dataset.difficulty["epoch"] = self.current_epoch

    def on_train_epoch_end(self):
        self.trainer.train_dataloader.dataset.level += 1
        self.trainer.fit_loop.max_epochs += self.current_epoch == 0

    def on_before_batch_transfer(self, batch, index):
        own = self.last if self.follows_own else 0.0
        return batch * (1 + self.calls["end"] / 100 + self.ends.item() / 99 + own / 9)

    def on_train_batch_start(self, batch, index):
        self.calls["start"] += 1

    def on_train_batch_end(self, outputs, batch, index):
        self.calls["end"] += 1
        self.ends += 1
        with torch.no_grad():  # a hook after that of ModelCheckpoint, in whose save a rank may be lost
            for own, other in zip(self.teacher.parameters(), self.net.layer.parameters(), strict=True):
                own.lerp_(other, 0.1)

    def on_save_checkpoint(self, checkpoint):
        if not self.trainer.strategy.saves_for_peers:
            self.faults.at(f"save{self.global_step}", self.trainer)

    def validation_step(self, batch, index):
        self.outputs.append((self.net(batch) - batch).square().mean())

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            mean = torch.stack(self.outputs).mean()
            self.means.append(float(self.all_gather(mean).mean()))  # of all ranks: another's is the same
        self.outputs.clear()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)


class Curriculum(Dataset):
    """Samples that become harder from epoch to epoch."""

    def __init__(self, samples):
        self.samples, self.level, self.difficulty = samples, 0, {}

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index] * (1 + self.level / 9 + self.difficulty.get("epoch", 0) / 7)


class Data(pl.LightningDataModule):
    """Changes batches by how many it has seen."""

    def __init__(self):
        super().__init__()
        self.num_batches, self.samples, self.held_out = 0, torch.randn(96, 8), torch.randn(32, 8)
        self.curriculum = Curriculum(self.samples)

    def train_dataloader(self):
        return DataLoader(self.curriculum, batch_size=4)

    def val_dataloader(self):
        return DataLoader(self.held_out, batch_size=4)

    def on_after_batch_transfer(self, batch, index):
        self.num_batches += self.trainer.training
        return batch + self.num_batches / 100


class Plain(pl.Callback):
    """Has no `state_dict`."""

    def __init__(self, communicates):
        self.calls, self.total, self.communicates = Counter(), torch.zeros(()), communicates

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if self.communicates and index == 3:
            module.faults.at("hook3", trainer)
            value = torch.ones((), device=trainer.strategy.root_device) * trainer.global_step
            dist.all_reduce(value)
            self.total += value.cpu()
        self.calls["end"] += 1

    def on_validation_end(self, trainer, module):
        self.calls["val"] += not trainer.sanity_checking

    def on_train_epoch_end(self, trainer, module):
        self.calls["epoch"] += 1


def fit(folder, faults):
    faults = faults.split()
    scripted = Faults([fault for fault in faults if ":" in fault], folder)
    plain, follows_own = Plain("communicates" in faults), "own" in faults
    # In these cases all return to a checkpoint, and one that is saved within a batch's hooks lacks later ones.
    saves = {"save_on_train_epoch_end": True} if plain.communicates or follows_own else {"every_n_train_steps": 2}
    trainer = pl.Trainer(
        strategy=HyperPodStrategy(hybrid_shard_degree=2),
        accelerator=ACCELERATOR,
        devices=devices(4),
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=2 if "accumulates" in faults else 1,
        callbacks=[
            plain,
            scripted,
            pl.callbacks.ModelCheckpoint(f"{folder}/checkpoints", save_top_k=-1, **saves),
            CheckpointlessRecovery(),
        ],
    )
    module, data = Module(scripted, follows_own=follows_own), Data()
    trainer.fit(module, datamodule=data)
    return {
        "calls": module.calls,
        "seen": [module.seen, module.my_rank, float(module.ends)],
        "net": module.net.values(),
        "means": module.means,
        "batches": data.num_batches,
        "callback": [plain.calls, float(plain.total)],
        "step": trainer.global_step,
        "parameters": checksum(module),
    }


def loop(folder, faults):
    scripted = Faults(faults.split(), folder)
    session = Session(hybrid_shard_degree=2, checkpoint_folder=folder)
    model = session.parallelize(Scaled())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session.train(model, optimizer)
    for step in session.steps(DataLoader(torch.randn(96, 8), batch_size=4), epochs=2):
        with step:

            def loss_of(batch, index=step.index):
                loss = model(batch).square().mean()
                scripted.at(f"step{index}", Place)
                return loss

            step.run(loss_of)
    return {"net": model.values(), "state": TrainingState(model, [optimizer]).checksum()}


if __name__ == "__main__":
    run_kind({"fit": fit, "loop": loop}, *sys.argv[1:])
