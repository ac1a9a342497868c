"""Lightning programs of many kinds, as people write them; `gallery.py` rehearses each.

python -m hyperpod_plugins.cli rehearse tests/recovery/program_gallery.py one_cycle FOLDER
"""

import copy
import os
import sys
from collections import Counter
from pathlib import Path

import lightning.pytorch as L
import numpy as np
import torch
from gallery_parts import Augmented, Network, generator
from lightning.pytorch import callbacks as C
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassF1Score

sys.path.append(str(Path(__file__).parents[1]))
from device import ACCELERATOR

from hyperpod_plugins.lightning import CheckpointlessRecovery, HyperPodStrategy
from hyperpod_plugins.recovery.optimizer_copy import local_tensor

torch.set_num_threads(1)
RANK, NUM_RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
BATCH = 4


class Stream(IterableDataset):
    """Each worker of each rank reads a part."""

    def __iter__(self):
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        for index in range(RANK * num_workers + worker, 64, NUM_RANKS * num_workers):
            yield torch.full((8,), float(index)) + torch.randn(8), index % 4


class Plain(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.net = Network()

    def loss(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


class NotSynchronized(Plain):
    """What callbacks decide from differs between ranks."""

    def validation_step(self, batch, index):
        self.log("own_loss", self.loss(batch))
        self.log("val_loss", self.loss(batch), sync_dist=True)


class OfRank(C.Callback):
    """Keeps what it has seen on its rank."""

    def __init__(self):
        self.num_batches, self.gradient, self.validated = 0, 0.0, torch.zeros(4)

    def on_train_batch_start(self, trainer, module, batch, index):
        self.num_batches += 1

    def on_after_backward(self, trainer, module):
        self.gradient += sum(float(each.grad.norm()) for each in module.parameters()) * (1 + trainer.global_rank)

    def on_validation_epoch_end(self, trainer, module):
        if not trainer.sanity_checking:
            self.validated[trainer.current_epoch % 4] += trainer.callback_metrics["own_loss"]

    def state_dict(self):
        return {"num_batches": self.num_batches, "gradient": self.gradient, "validated": self.validated}

    def load_state_dict(self, state):
        self.num_batches, self.gradient, self.validated = state["num_batches"], state["gradient"], state["validated"]


class OneCycle(Plain):
    """Asks for the number of steps, which creates the loaders before the loops are entered."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 1e-2, momentum=0.9)
        num_steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=num_steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Plateau(Plain):
    def configure_optimizers(self):
        groups = [
            {"params": self.net.body.parameters(), "weight_decay": 0.1},
            {"params": self.net.head.parameters(), "lr": 3e-3},
        ]
        optimizer = torch.optim.Adam(groups, 1e-2)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class Metrics(Plain):
    def __init__(self):
        super().__init__()
        self.accuracy, self.other_accuracy = MulticlassAccuracy(4), MulticlassAccuracy(4)
        self.several = MetricCollection({"f1": MulticlassF1Score(4), "confusion": MulticlassConfusionMatrix(4)})

    def training_step(self, batch, index):
        x, y = batch
        out = self.net(x)
        self.accuracy(out, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return nn.functional.cross_entropy(out, y)

    def validation_step(self, batch, index):
        x, y = batch
        out = self.net(x)
        self.other_accuracy.update(out, y)
        self.several.update(out, y)
        self.log("val_loss", nn.functional.cross_entropy(out, y), sync_dist=True)
        self.log("val_accuracy", self.other_accuracy)

    def on_validation_epoch_end(self):
        self.log("f1", self.several.compute()["f1"])
        self.several.reset()


class Teacher(Plain):
    """Self-supervision: a queue in buffers, and a teacher whose parameters follow those of the student."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.net)
        self.teacher.requires_grad_(False)
        self.register_buffer("queue", torch.randn(32, 4, generator=generator(0)))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def training_step(self, batch, index):
        x, _ = batch
        with torch.no_grad():
            keys = self.teacher(x)
        found = self.net(x)
        loss = (found - keys).square().mean() - 0.01 * (found @ self.queue.clone().T).tanh().mean() + self.loss(batch)
        self.queue[(int(self.place) + torch.arange(len(keys))) % len(self.queue)] = keys
        self.place[0] = (int(self.place) + len(keys)) % len(self.queue)
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, *_):
        with torch.no_grad():
            for held, new in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                held.mul_(0.9).add_(new.detach(), alpha=0.1)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), 1e-2)


class Mixup(Plain):
    def on_after_batch_transfer(self, batch, index):
        x, y = batch
        if self.training:
            share = np.random.beta(1, 1)
            x = (share * x + (1 - share) * x[torch.randperm(len(x))]).float()
        return x, y


class Adversarial(Plain):
    """Two optimizers with schedules of their own in one step."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.judge = nn.Linear(4, 1)

    def training_step(self, batch, index):
        maker, judge = self.optimizers()
        x, y = batch
        self.toggle_optimizer(maker)
        out = self.net(x)
        loss = nn.functional.cross_entropy(out, y) - self.judge(out).mean() * 0.1
        maker.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(maker, 1.0, "norm")
        maker.step()
        self.untoggle_optimizer(maker)
        self.toggle_optimizer(judge)
        judged = self.judge(self.net(x).detach()).square().mean()
        judge.zero_grad()
        self.manual_backward(judged)
        judge.step()
        self.untoggle_optimizer(judge)
        for schedule in self.lr_schedulers():
            schedule.step()
        self.log_dict({"loss": loss, "judged": judged})

    def configure_optimizers(self):
        maker, judge = (torch.optim.Adam(each.parameters(), 1e-2) for each in (self.net, self.judge))
        schedules = torch.optim.lr_scheduler.ExponentialLR(maker, 0.9), torch.optim.lr_scheduler.StepLR(judge, 3)
        return [maker, judge], list(schedules)


class Curriculum(Plain):
    """What hooks do with a batch follows attributes and buffers, which steps and other hooks write."""

    def __init__(self):
        super().__init__()
        self.scale, self.num_batches = 1.0, 0
        self.register_buffer("mean", torch.zeros(8))

    def on_train_epoch_start(self):
        self.scale = 1.0 + 0.1 * self.current_epoch

    def on_after_batch_transfer(self, batch, index):
        x, y = batch
        if self.trainer.training:
            self.num_batches += 1
            x = x * self.scale - self.mean + 0.01 * self.num_batches
        return x, y

    def training_step(self, batch, index):
        self.mean.mul_(0.9).add_(0.1)
        return super().training_step(batch, index)


class OwnCurriculum(Plain):
    """Each rank changes its batches by what its own batches were."""

    def __init__(self):
        super().__init__()
        self.last, self.of_epoch = 0.0, []

    def on_after_batch_transfer(self, batch, index):
        x, y = batch
        return x + 0.01 * self.last, y

    def training_step(self, batch, index):
        self.last = float(batch[0].mean())
        self.of_epoch.append(self.last)  # differs between ranks too, and changes no batch
        return super().training_step(batch, index)

    def on_train_epoch_end(self):
        self.of_epoch.clear()


class Guided(Plain):
    """Changes batches by a trained parameter."""

    def on_train_batch_start(self, batch, index):
        with torch.no_grad():
            batch[0].add_(local_tensor(self.net.head.bias).mean())


class MetricCurriculum(Plain):
    """Each rank changes its batches by a metric of what its own batches were."""

    def __init__(self):
        super().__init__()
        self.metric = MeanMetric()

    def on_after_batch_transfer(self, batch, index):
        x, y = batch
        return x + 0.01 * (self.metric.mean_value if self.metric.update_called else 0.0), y

    def training_step(self, batch, index):
        self.metric.update(batch[0].mean())
        return super().training_step(batch, index)


class Temperature:
    """State that neither an attribute nor a buffer holds."""

    def __init__(self):
        self.value = 1.0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class RegisteredCurriculum(Plain):
    """Each rank changes its batches by an object that it has registered."""

    def __init__(self):
        super().__init__()
        self.temperature = Temperature()

    def setup(self, stage):
        self.trainer.strategy.register_rank_local("temperature", self.temperature)

    def on_train_batch_start(self, batch, index):
        batch[0].mul_(self.temperature.value)

    def training_step(self, batch, index):
        self.temperature.value = 0.9 * self.temperature.value + 0.01 * float(batch[0].mean())
        return super().training_step(batch, index)


class Resets(Plain):
    """A metric of the last steps, equal on all ranks, which a hook resets before the step."""

    def __init__(self):
        super().__init__()
        self.recent = MeanMetric()

    def on_train_batch_start(self, batch, index):
        self.log("rate", self.trainer.optimizers[0].param_groups[0]["lr"])
        if index % 2 == 0:
            self.recent.reset()

    def training_step(self, batch, index):
        self.recent.update(float(self.global_step + 1))
        return (1 + 0.1 * self.recent.mean_value / self.recent.weight) * super().training_step(batch, index)


class Projects(Plain):
    """What it draws as training begins is too large to be sent to a replacement."""

    def on_fit_start(self):
        self.shifts = torch.randn(2000)

    def on_train_start(self):
        self.directions = torch.randn(500, 8)

    def training_step(self, batch, index):
        x, y = batch
        row = self.directions[index % len(self.directions)] + self.shifts[index]
        return super().training_step((x + 0.1 * row, y), index)


class LogsBefore(Plain):
    """Logs means and updates a metric before each step."""

    def __init__(self):
        super().__init__()
        self.metric, self.means = MeanMetric(), []

    def on_train_batch_start(self, batch, index):
        mean = batch[0].mean()
        self.log("before", mean, on_step=False, on_epoch=True, sync_dist=True)
        self.metric.update(mean)
        self.log("metric", self.metric, on_step=False, on_epoch=True)

    def on_train_epoch_end(self):
        self.means += [float(self.trainer.callback_metrics.get("before", 0.0)), float(self.metric.compute())]


class LogsEverywhere(LogsBefore):
    """Hooks inside and around each step log, count and update a metric; what they have found changes the loss."""

    def __init__(self):
        super().__init__()
        self.inner, self.counts, self.best, self.scale = MeanMetric(), Counter(), 0.0, 1.0

    def on_train_epoch_start(self):
        self.inner.reset()
        self.counts["epoch"] += 1
        self.log("begun", float(self.counts["start"]), on_epoch=True)

    def on_train_batch_start(self, batch, index):
        super().on_train_batch_start(batch, index)
        self.counts["start"] += 1
        self.inner.update(self.counts["start"])

    def training_step(self, batch, index):
        self.counts["step"] += 1
        shown = float(self.trainer.callback_metrics.get("train_loss", 1.0))
        factor = self.scale + 0.1 * shown + 0.01 * float(self.inner.mean_value / (1 + self.inner.weight))
        return factor * super().training_step(batch, index)

    def on_before_zero_grad(self, optimizer):
        self.counts["zero"] += 1
        self.log("zeroed", float(self.counts["zero"]), on_step=False, on_epoch=True)

    def on_after_backward(self):
        self.counts["backward"] += 1
        self.inner.update(self.counts["backward"] / 2)

    def on_before_optimizer_step(self, optimizer):
        self.counts["optimizer"] += 1
        self.log("stepped", float(self.counts["optimizer"]), on_step=True, on_epoch=True)
        self.inner.update(0.5)

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.best = max(self.best, float(self.trainer.callback_metrics["val_loss"]))
            self.scale *= 0.99
            self.counts["validation"] += 1


class TwoLoaders(Plain):
    def training_step(self, batch, index):
        loss = self.loss(batch["one"]) + 0.5 * self.loss(batch["other"])
        self.log("train_loss", loss)
        return loss


class WarmUp(Plain):
    """Writes hyperparameters before each batch, also between the micro-steps of one step, and after a step."""

    def on_train_batch_start(self, batch, index):
        for group in self.trainer.optimizers[0].param_groups:
            group["weight_decay"] *= 0.97

    def training_step(self, batch, index):
        x, y = batch
        loss = self.loss((x * min(1.0, self.global_step / 10 + 0.1 * self.current_epoch), y))
        self.log("train_loss", loss)
        return loss

    def optimizer_step(self, epoch, index, optimizer, closure):
        optimizer.step(closure=closure)
        for group in optimizer.param_groups:
            group["lr"] *= 0.99

    def configure_optimizers(self):
        optimizer = torch.optim.RMSprop(self.parameters(), 1e-3, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 5))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step", "frequency": 2}}


class Recurrent(Plain):
    """The hidden state goes from batch to batch, and begins anew with each epoch."""

    def __init__(self):
        super().__init__()
        self.cell, self.hidden = nn.GRU(8, 8, batch_first=True), None

    def on_train_epoch_start(self):
        self.hidden = None

    def training_step(self, batch, index):
        x, y = batch
        out, hidden = self.cell(x.unsqueeze(1), self.hidden)
        self.hidden = hidden.detach()
        return self.loss((out.squeeze(1), y))


class LeavesOut(Plain):
    """Ends each epoch early."""

    def on_train_batch_start(self, batch, index):
        return -1 if index == 3 else None


class ByHand(Plain):
    """Writes the learning rate of each step, as many loops do, and has no schedule."""

    def on_train_batch_start(self, batch, index):
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 1e-2 * min(1.0, (self.global_step + 1) / 10)
            group["weight_decay"] *= 0.97


class Critic(Plain):
    """A critic that trains in each step, whose weights are clipped there, and a generator that trains in each third."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(8, 1)
        self.register_buffer("noise", torch.ones(()))

    def training_step(self, batch, index):
        generator, critic = self.optimizers()
        x, _ = batch
        critic_loss = (self.critic(x) - self.critic(x + torch.randn_like(x) * self.noise)).mean()
        critic.zero_grad()
        self.manual_backward(critic_loss)
        critic.step()
        with torch.no_grad():
            for weight in self.critic.parameters():
                weight.clamp_(-0.3, 0.3)
        if (index + 1) % 3 == 0:
            loss = self.loss(batch)
            generator.zero_grad()
            self.manual_backward(loss)
            generator.step()
            self.log("loss", loss)
            self.noise.mul_(0.9)
        self.log("critic_loss", critic_loss)

    def configure_optimizers(self):
        return tuple(torch.optim.RMSprop(each.parameters(), 1e-2) for each in (self.net, self.critic))


class Contrastive(Plain):
    """Its loss is over the samples of all ranks."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(1))

    def training_step(self, batch, index):
        found = nn.functional.normalize(self.net(batch[0]), dim=-1)
        of_all = self.all_gather(found, sync_grads=True).flatten(0, 1)
        wanted = torch.arange(len(found)) + self.global_rank * len(found)
        loss = nn.functional.cross_entropy(found @ of_all.T / self.temperature.clamp(min=0.1), wanted)
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        return loss


class OwnHooks(Plain):
    """Clips, zeroes and schedules in hooks of its own, and logs with many reductions."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=0.5 + 0.1 * self.current_epoch, gradient_clip_algorithm="norm")

    def optimizer_zero_grad(self, epoch, index, optimizer):
        optimizer.zero_grad(set_to_none=False)

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step(self.global_step / 7)

    def on_train_epoch_start(self):
        self.log("epoch_started", float(self.current_epoch))

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.log("largest", loss, on_epoch=True, on_step=False, reduce_fx="max", sync_dist=True)
        self.log("smallest", loss, on_epoch=True, on_step=False, reduce_fx=torch.min)
        self.log_dict({"double": loss * 2, "triple": loss * 3}, on_epoch=True, batch_size=3)
        return loss

    def on_train_epoch_end(self):
        self.log("seen", self.trainer.callback_metrics["largest"] * 2)

    def configure_optimizers(self):
        optimizer = torch.optim.NAdam(self.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class LoggedAfter(Plain):
    """Logs a mean of the epoch after each step."""

    def training_step(self, batch, index):
        loss = self.loss(batch)
        return {"loss": loss, "extra": loss.detach()}

    def on_train_batch_end(self, outputs, batch, index):
        self.log("extra", outputs["extra"], on_epoch=True)


class Reloaded(Plain):
    def train_dataloader(self):
        return DataLoader(Augmented(40 + 8 * self.current_epoch), BATCH, shuffle=True)


class SplitInLoaders(Plain):
    """Divides its samples anew whenever loaders are made."""

    def train_dataloader(self):
        samples, _ = random_split(Augmented(48), [32, 16])
        return DataLoader(samples, BATCH, shuffle=True)

    def val_dataloader(self):
        _, samples = random_split(Augmented(48), [32, 16])
        return DataLoader(samples, BATCH)


class SplitInSetup(L.LightningDataModule):
    """Divides its samples in a hook that is called again if the loops are re-entered, and in its loaders."""

    def setup(self, stage):
        self.train, self.held_out = random_split(Augmented(56), [40, 16])
        self.noise = torch.randn(8)

    def train_dataloader(self):
        samples, _ = random_split(self.train, [32, 8])
        return DataLoader(samples, BATCH, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.held_out, BATCH)

    def on_after_batch_transfer(self, batch, index):
        return batch[0] + self.noise, batch[1]


class Data(L.LightningDataModule):
    """Changes batches by what it has counted."""

    def __init__(self):
        super().__init__()
        self.num_batches = 0

    def setup(self, stage):
        self.train, self.held_out = random_split(Augmented(100), [80, 20])

    def train_dataloader(self):
        return DataLoader(self.train, BATCH, shuffle=True, num_workers=1, persistent_workers=True)

    def val_dataloader(self):
        return DataLoader(self.held_out, BATCH)

    def on_after_batch_transfer(self, batch, index):
        x, y = batch
        if self.trainer.training:
            self.num_batches += 1
            x = x + 0.01 * self.num_batches
        return x, y


class Unfreezing(C.BaseFinetuning):
    def freeze_before_training(self, module):
        self.freeze(module.net.body)

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net.body, optimizer, lr=1e-3)


def log_norm(trainer, module, optimizer):
    norms = [each.grad.to_local().norm() for each in module.parameters() if each.grad is not None]
    module.log("norm", torch.stack(norms).norm())


def shuffled(size=80, **options):
    return DataLoader(Augmented(size), BATCH, shuffle=True, **options)


def drawn(sampler, **options):
    return DataLoader(Augmented(), BATCH, sampler=sampler, **options)


def own_batches():
    sampler = RandomSampler(range(80), generator=generator(RANK))
    return DataLoader(Augmented(), batch_sampler=BatchSampler(sampler, BATCH, drop_last=True))


PROGRAMS = {
    "one_cycle": lambda: (OneCycle(), shuffled(num_workers=2), {}),
    "grown_accumulation": lambda: (
        Plain(),
        shuffled(),
        {"callbacks": [C.GradientAccumulationScheduler({0: 1, 1: 2})]},
    ),
    "plateau": lambda: (
        Plateau(),
        shuffled(),
        {
            "callbacks": [
                C.EarlyStopping("val_loss", patience=20),
                C.ModelCheckpoint(sys.argv[2], filename="best", monitor="val_loss", save_top_k=2, save_last=True),
            ]
        },
    ),
    "metrics": lambda: (Metrics(), shuffled(), {"sync_batchnorm": True}),
    "teacher": lambda: (Teacher(), shuffled(), {}),
    "mixup": lambda: (
        Mixup(),
        shuffled(num_workers=1, persistent_workers=True),
        {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
    ),
    "curriculum": lambda: (Curriculum(), shuffled(), {}),
    "sharded_curriculum": lambda: (
        Curriculum(),
        shuffled(),
        {"hybrid_shard_degree": 2, "callbacks": [CheckpointlessRecovery(snapshot_every_steps=3)]},
    ),
    "own_curriculum": lambda: (OwnCurriculum(), shuffled(), {}),
    "metric_curriculum": lambda: (MetricCurriculum(), shuffled(), {}),
    "registered_curriculum": lambda: (RegisteredCurriculum(), shuffled(), {}),
    "resets": lambda: (Resets(), shuffled(), {}),
    "projects": lambda: (Projects(), shuffled(), {}),
    "logs_before": lambda: (LogsBefore(), shuffled(), {}),
    "sharded_logs_before": lambda: (
        LogsBefore(),
        shuffled(),
        {"hybrid_shard_degree": 2, "callbacks": [CheckpointlessRecovery(snapshot_every_steps=3)]},
    ),
    "logs_everywhere": lambda: (LogsEverywhere(), shuffled(), {"val_check_interval": 4}),
    "logs_between": lambda: (
        LogsEverywhere(),
        shuffled(),
        {"accumulate_grad_batches": 2, "val_check_interval": 4},
    ),
    "sharded_logs_between": lambda: (
        LogsEverywhere(),
        shuffled(),
        {
            "hybrid_shard_degree": 2,
            "accumulate_grad_batches": 2,
            "callbacks": [CheckpointlessRecovery(snapshot_every_steps=2)],
        },
    ),
    "guided": lambda: (Guided(), shuffled(), {}),
    "adversarial": lambda: (Adversarial(), shuffled(), {}),
    "two_loaders": lambda: (
        TwoLoaders(),
        CombinedLoader({"one": shuffled(), "other": shuffled(24)}, "max_size_cycle"),
        {},
    ),
    "warm_up": lambda: (WarmUp(), shuffled(), {"accumulate_grad_batches": 2, "limit_train_batches": 0.7}),
    "recurrent": lambda: (Recurrent(), shuffled(), {}),
    "leaves_out": lambda: (LeavesOut(), shuffled(), {}),
    "by_hand": lambda: (ByHand(), shuffled(), {}),
    "critic": lambda: (Critic(), shuffled(), {}),
    "contrastive": lambda: (Contrastive(), shuffled(), {"accumulate_grad_batches": 2}),
    "own_hooks": lambda: (OwnHooks(), shuffled(), {}),
    "averaged": lambda: (Plain(), shuffled(), {"callbacks": [C.StochasticWeightAveraging(1e-3)]}),
    "pruned": lambda: (Plain(), shuffled(), {"callbacks": [C.ModelPruning("l1_unstructured", amount=0.1)]}),
    "finds_rate": lambda: (Plain(), shuffled(), {"callbacks": [C.LearningRateFinder()]}),
    "logged_after": lambda: (LoggedAfter(), shuffled(), {}),
    "data_module": lambda: (Plain(), Data(), {}),
    "stream": lambda: (Plain(), DataLoader(Stream(), BATCH, num_workers=2), {}),
    "unfreezing": lambda: (Plain(), shuffled(), {"callbacks": [Unfreezing()]}),
    "weighted": lambda: (Plain(), drawn(WeightedRandomSampler(torch.rand(80, generator=generator(3)), 80)), {}),
    "reloaded": lambda: (Reloaded(), None, {"reload_dataloaders_every_n_epochs": 1}),
    "splits": lambda: (SplitInLoaders(), None, {"reload_dataloaders_every_n_epochs": 1}),
    "splits_once": lambda: (SplitInLoaders(), None, {}),
    "split_in_setup": lambda: (Plain(), SplitInSetup(), {"reload_dataloaders_every_n_epochs": 1}),
    "bf16": lambda: (Plain(), shuffled(), {"precision": "bf16-mixed"}),
    "own_batches": lambda: (Plain(), own_batches(), {"use_distributed_sampler": False}),
    "callbacks": lambda: (
        Plain(),
        shuffled(),
        {
            "callbacks": [
                C.LambdaCallback(on_before_optimizer_step=log_norm),
                C.LearningRateMonitor("step"),
                C.Timer("00:01:00:00"),
                C.WeightAveraging(),
            ]
        },
    ),
    "not_synchronized": lambda: (
        NotSynchronized(),
        shuffled(),
        {
            "callbacks": [
                C.EarlyStopping("own_loss", patience=2, strict=False),
                C.EarlyStopping("train_loss_epoch", patience=3),
                C.ModelCheckpoint(sys.argv[2], filename="own", monitor="own_loss", save_top_k=2),
                OfRank(),
            ]
        },
    ),
    "few_batches": lambda: (Plain(), shuffled(), {"overfit_batches": 4}),
}


TOLD = {
    "averaged": "StochasticWeightAveraging copies the module before it is sharded",
    "pruned": "ModelPruning replaces parameters by masked copies",
    "guided": "on_train_batch_start of Guided changes the batch by net.head.bias",
    "finds_rate": "LearningRateFinder trains, and then returns to a checkpoint, before the first step",
}
"""Words with which programs are refused."""


if __name__ == "__main__":
    name, folder = sys.argv[1:]
    if name == "split_in_setup":
        torch.manual_seed(5)  # Lightning repeats only its own, each time that the loops are entered
    else:
        L.seed_everything(5, workers=True)
    module, data, options = PROGRAMS[name]()
    degree = options.pop("hybrid_shard_degree", 1)
    saving = C.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3)
    trainer = L.Trainer(
        accelerator=ACCELERATOR,
        devices=NUM_RANKS,
        strategy=HyperPodStrategy(hybrid_shard_degree=degree),
        max_epochs=6,
        default_root_dir=folder,
        log_every_n_steps=1,
        num_sanity_val_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**options, "callbacks": [saving, *options.get("callbacks", [])]},
    )
    if isinstance(data, L.LightningDataModule):
        trainer.fit(module, datamodule=data)
    elif isinstance(module, SplitInLoaders):
        trainer.fit(module)
    else:
        trainer.fit(module, data, DataLoader(Augmented(16), BATCH))
