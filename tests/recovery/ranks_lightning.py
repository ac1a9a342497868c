# ruff: noqa: E402 (warnings are off before the imports that would give them)
"""A Lightning program that meets faults at every point of its life; run by `hyperpodrun` (see `faults.py`)."""

import itertools
import json
import os
import random
import time
import warnings

warnings.filterwarnings("ignore")

import lightning.pytorch as pl
import numpy as np
import torch
from faults import ACCELERATOR, Faults, devices, noticed
from lightning.pytorch.loggers import Logger
from torch import nn
from torchmetrics import MeanMetric

from hyperpod_plugins.lightning import CheckpointlessRecovery, HyperPodStrategy
from hyperpod_plugins.lightning.accumulation_window import AccumulationWindow
from hyperpod_plugins.memory import offload
from hyperpod_plugins.parallel import replica_buckets
from hyperpod_plugins.parallel.host_optimizer import HostMemory, _options_of
from hyperpod_plugins.precision.float8 import conversions_of
from hyperpod_plugins.recovery import StepTransaction, TrainingState, undo

torch.set_num_threads(1)
LAYOUTS = {
    "hsdp": {"hybrid_shard_degree": 2},
    "nodes": {"hybrid_shard_degree": 4, "node_collectives": True},
    "tensor": {"tensor_parallel_degree": 2, "hybrid_shard_degree": 1},
    "replicas": {"hybrid_shard_degree": 1},
}
MEMORY = {
    "whole": {},
    "recomputed": {"activation_checkpointing": "full"},
    "offloaded": {"activation_offload": True, "activation_loading_horizon": 1},
    "parameters on the host": {"param_offload": True},
    "optimizer on the host": {"optimizer_offload": True},
    "in float8": {"float8_recipe": "tensorwise", "float8_all_gather": True},
}
WIDTH, VOCABULARY, SEQUENCE = 16, 32, 6
faults = Faults()


def option(name, default):
    return type(default)(os.environ.get(name, default))


class Tokens(torch.utils.data.Dataset):
    def __init__(self, length, seed):
        self.length, self.seed, self.module = length, seed, None

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.module is not None:
            faults.at("dataloader", self.module.global_step)
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        tokens = torch.randint(VOCABULARY, (SEQUENCE,), generator=generator)
        tokens[random.randrange(SEQUENCE)] = np.random.randint(VOCABULARY)  # a random transform
        return tokens.roll(int(torch.randint(SEQUENCE, ())))


class BatchNorm(nn.BatchNorm1d):
    """Over (batch, sequence, width); each rank has statistics of its own."""

    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = BatchNorm(WIDTH) if option("NORM", "layer") == "batch" else nn.LayerNorm(WIDTH)
        self.w1 = nn.Linear(WIDTH, 2 * WIDTH)
        self.w2 = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.num_calls.add_(1)
        return x + self.dropout(self.w2(torch.tanh(self.w1(self.norm(x)))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


class Mean(MeanMetric):
    """Computed at the end of an epoch or of an evaluation, where all ranks have just gathered it."""

    def compute(self):
        if not self.trainer.sanity_checking:
            faults.at("evaluated" if self.trainer.evaluating else "gathered", self.trainer.global_step)
        return super().compute()


class Losses:
    """A mean over the samples of one rank, of which nobody else knows."""

    def __init__(self):
        self.mean = 0.0

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = state["mean"]


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.losses = Losses()
        self.net = Net()
        self.mean, self.val_mean = Mean(), Mean()
        self.net.layers[0].register_forward_hook(self.watch_backward)

    def watch_backward(self, layer, inputs, output):
        """What comes after this layer has its gradients when backward comes back to it."""
        if output.requires_grad:
            output.register_hook(lambda _: faults.at("within backward", self.global_step))

    def loss(self, tokens):
        logits = self.net(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))

    def setup(self, stage):
        self.mean.trainer = self.val_mean.trainer = self.trainer
        if option("NORM", "layer") == "batch":
            self.trainer.strategy.register_rank_local("losses", self.losses)

    def on_after_batch_transfer(self, batch, index):
        """In evaluations, too."""
        mixed = lambda tokens: torch.where(torch.rand(tokens.shape, device=tokens.device) < 0.1, tokens.flip(0), tokens)  # noqa: E731
        return {name: mixed(tokens) for name, tokens in batch.items()} if isinstance(batch, dict) else mixed(batch)

    def training_step(self, batch, index):
        faults.at("forward", self.global_step)
        time.sleep(option("STEP_S", 0.0))
        if isinstance(batch, dict):
            batch = torch.cat([batch.pop("a"), batch.pop("b")])
        loss = self.loss(batch)
        self.losses.mean = 0.5 * self.losses.mean + 0.5 * float(loss)
        self.mean(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, index):
        if index == 1:
            faults.at("sanity" if self.trainer.sanity_checking else "validation", self.global_step)
        loss = self.loss(batch)
        self.val_mean(loss)
        self.log("val", loss, sync_dist=True)
        self.log("val_mean", self.val_mean)

    def on_after_backward(self):
        faults.at("backward", self.global_step)

    def on_before_optimizer_step(self, optimizer):
        faults.at("clip", self.global_step)

    def lr_scheduler_step(self, scheduler, metric):
        faults.at("scheduler", self.global_step)
        super().lr_scheduler_step(scheduler, metric)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        at = f"end of batch {batch_idx} of epoch {self.current_epoch}"
        drawn = torch.rand(())
        faults.note(kind="drawn", at=at, value=drawn.item())
        if option("ACCUMULATE", 1) > 1:
            self.log("drawn", drawn, on_step=False, on_epoch=True)
        if (self.global_step, self.global_rank) == (option("FLIP_AT", -1), 1):
            self.net.norm.weight.detach().to_local().view(torch.int32)[0] ^= 1 << 12
        faults.at("batch end", self.global_step)

    def on_train_epoch_start(self):
        faults.note(kind="drawn", at=f"begin of epoch {self.current_epoch}", value=random.random())

    def on_train_epoch_end(self):
        faults.note(kind="drawn", at=f"end of epoch {self.current_epoch}", value=np.random.rand())
        faults.at("epoch end", self.global_step)

    def on_validation_end(self):
        if not self.trainer.sanity_checking:
            faults.at("validation end", self.global_step)

    def on_train_end(self):
        faults.at("train end", self.global_step)

    def on_fit_start(self):
        faults.at("fit start", int(os.environ["HYPERPOD_INCARNATION"]))

    def on_save_checkpoint(self, checkpoint):
        faults.at("checkpoint", self.global_step)
        checkpoint["export"] = self.net.output.weight.detach().full_tensor()  # communicates; nobody reads it back

    def configure_optimizers(self):
        faults.at("setup", 0)
        points = itertools.cycle(("optimizer", "second group"))  # the latter is between two writes
        adamw = noticed(torch.optim.AdamW, lambda: faults.at(next(points), self.global_step))
        first, *others = self.parameters()
        optimizer = adamw([{"params": [first]}, {"params": others}], lr=1e-2)
        if option("INTERVAL", "step") == "epoch":
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        else:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": option("INTERVAL", "step")},
        }

    def train_dataloader(self):
        data = Tokens(64, 1)
        data.module = self
        make = lambda batch_size, data: torch.utils.data.DataLoader(  # noqa: E731
            data, batch_size=batch_size, shuffle=True, num_workers=option("WORKERS", 0)
        )
        if option("LOADERS", 1) == 2:
            return {"a": make(1, Tokens(32, 2)), "b": make(1, Tokens(16, 3))}
        return make(option("BATCH", 2), data)

    def val_dataloader(self):
        return torch.utils.data.DataLoader(Tokens(16, 4), batch_size=1)


class Ema(pl.Callback):
    """Averages this rank's shards after each step."""

    def __init__(self):
        self.shards, self.step = [], 0

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step == self.step:  # within a window of micro-steps
            return
        self.step = trainer.global_step
        with torch.no_grad():
            now = [local(parameter) for parameter in module.parameters()]
            self.shards = [0.9 * old + 0.1 * new for old, new in zip(self.shards or now, now, strict=True)]

    def state_dict(self):
        return {"shards": self.shards, "step": self.step}

    def load_state_dict(self, state):
        self.shards, self.step = state["shards"], state["step"]


class Counting(pl.Callback):
    """Counts how often a hook ran, which counts once for each batch however often a step is run."""

    def __init__(self):
        self.count = 0

    @property
    def state_key(self):
        return type(self).__name__

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]

    def called(self, *_):
        self.count += 1


class CountsBatches(Counting):
    """Writes to the optimizer before each batch, too."""

    def on_train_batch_start(self, trainer, *_):
        self.called()
        for group in trainer.optimizers[0].param_groups:
            group["weight_decay"] *= 0.97


class CountsEnds(Counting):
    on_train_batch_end = Counting.called


class CountsBackwards(Counting):
    on_after_backward = Counting.called


class Record(Logger):
    """Keeps what every rank logs."""

    name, version = "record", 0

    def log_metrics(self, metrics, step=None):
        faults.note(kind="metrics", step=step, metrics={k: float(v).hex() for k, v in metrics.items()})

    def log_hyperparams(self, *args, **kwargs):
        pass


class Bar(pl.callbacks.TQDMProgressBar):
    """Writes down what it shows, where it shows something."""

    def on_train_batch_end(self, trainer, *args):
        super().on_train_batch_end(trainer, *args)
        if self.is_enabled:
            bar = self.train_progress_bar
            faults.note(kind="bar", step=trainer.global_step, shown=bar.n, total=bar.total)


def instrument():
    """Points inside the transaction, which has no hooks."""
    vote, restore, send, receive = (
        StepTransaction._vote,
        AccumulationWindow.restore,
        TrainingState.send,
        TrainingState.receive,
    )
    step = 0

    def voting(self):
        faults.at("vote", self.step)
        went_well = vote(self)
        faults.at("voted", self.step)
        from hyperpod_plugins.comm import group_health

        return went_well and group_health.cause is None

    def restoring(self, plan, rank):
        nonlocal step
        step = plan.step
        restore(self, plan, rank)
        faults.at("restored", step)

    def sending(self, *ranks):
        faults.at("send", step)
        send(self, *ranks)

    def receiving(self, rank):
        faults.at("receive", step)
        receive(self, rank)
        faults.at("received", step)

    StepTransaction._vote, AccumulationWindow.restore = voting, restoring
    TrainingState.send, TrainingState.receive = sending, receiving


class Stops(pl.Callback):
    """Asks to stop in the middle of a step's micro-steps, as a time limit may."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.should_stop |= trainer.fit_loop.epoch_loop.batch_progress.total.ready == option("STOP_AT", 0)


def local(tensor):
    whole = tensor.detach()
    return (whole.to_local() if hasattr(whole, "to_local") else whole).clone().cpu()


def main():
    instrument()
    attach, offload.MIN_BYTES, offloads = offload.ActivationOffload.attach, 1, []
    offload.ActivationOffload.attach = lambda self, blocks: (offloads.append(self), attach(self, blocks))
    pl.seed_everything(1, verbose=False)
    module = Module()
    recovery = CheckpointlessRecovery(
        verify=True,
        replacement_timeout_s=option("REPLACEMENT_S", 60.0),
        hang_timeout_s=option("HANG_S", 30.0),
        compare_replicas_every=option("COMPARE", 0) or "auto",
        rank_local_state=os.environ.get("LOCAL", "exact"),
    )
    accumulate = option("ACCUMULATE", 1)
    replica_buckets.BUCKET_BYTES = option("BUCKET_BYTES", replica_buckets.BUCKET_BYTES)
    saves = {"filename": "{step}", "every_n_train_steps": 6, "save_top_k": -1} | json.loads(option("SAVES", "{}"))
    checkpoints = pl.callbacks.ModelCheckpoint(faults.folder / "checkpoints", **saves)
    early = pl.callbacks.EarlyStopping("val", patience=option("PATIENCE", 100))
    bars, ema = [Bar()] if option("BAR", 0) else [], Ema()
    counting = [CountsBatches(), CountsEnds(), CountsBackwards()]
    averages = [pl.callbacks.EMAWeightAveraging(decay=0.8)] if option("AVERAGE", 0) else []
    trainer = pl.Trainer(
        strategy=HyperPodStrategy(
            **LAYOUTS[option("LAYOUT", "hsdp")],
            **MEMORY[option("MEMORY", "whole")],
            background_checkpoints=option("BACKGROUND", 0) > 0,
            timeout_s=option("TIMEOUT_S", 1800),
        ),
        accelerator=ACCELERATOR,
        devices=devices(int(os.environ["LOCAL_WORLD_SIZE"])),
        precision="bf16-mixed" if option("MEMORY", "whole") == "in float8" else "32-true",
        max_steps=option("STEPS", 24),
        logger=Record(),
        log_every_n_steps=1,
        callbacks=[checkpoints, early, recovery, ema, *averages, *bars, *counting, Stops()],
        val_check_interval=option("VALIDATE_EVERY", 4 * accumulate),
        num_sanity_val_steps=2,
        enable_progress_bar=bool(bars),
        enable_model_summary=False,
        gradient_clip_val=0.5,
        accumulate_grad_batches=accumulate,
    )
    AccumulationWindow.can_undo_exceptions = option("CAN_RESET", 1) == 1  # 0: as with a torch older than 2.13,
    undo.CAN_RESET = option("CAN_RESET", 1) >= 0  # -1: which puts FSDP2's modules back by hand, too
    trainer.fit(module, ckpt_path=os.environ.get("RESUME"))
    assert isinstance(module.net.output.weight, torch.distributed.tensor.DTensor)
    faults.at("fit end", trainer.global_step)
    validated = trainer.validate(module, verbose=False) if option("VALIDATE_AFTER", 0) else []
    (optimizer,) = trainer.optimizers
    state = {name: local(value) for name, value in [*module.named_parameters(), *module.named_buffers()]}
    state |= {f"ema.{number}": shard for number, shard in enumerate(ema.shards)}
    state |= {each.state_key: torch.tensor(each.count) for each in counting}
    if option("NORM", "layer") == "batch":
        state["losses"] = torch.tensor(module.losses.mean)
    for average in averages:
        state |= {f"average.{name}": local(value) for name, value in average._average_model.state_dict().items()}
    for number, values in enumerate(optimizer.state.values()):
        state |= {f"{number}.{key}": local(value) for key, value in values.items()}
    result = {
        "state": state,
        "lr": optimizer.param_groups[0]["lr"],
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "early": (early.wait_count, float(early.best_score)),
        "validated": validated,
        "repairs": len(recovery.repairs),
        "offloaded": sum(each.stored_bytes for each in offloads),
        "in_float8": sorted(conversions_of(module)),
        "on_host": [what.value for what in HostMemory if what in _options_of(optimizer)],
        "causes": [repair.failure.kind for repair in recovery.repairs],
        "lasted_s": [repair.total_s for repair in recovery.repairs],
    }
    torch.save(result, faults.folder / f"result-{faults.rank}.pt")


if __name__ == "__main__":
    main()
