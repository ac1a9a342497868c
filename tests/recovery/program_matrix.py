# ruff: noqa: E402 (warnings are off before the imports that would give them)
"""The program of each column of the matrix, with a place for a fault in each phase of its life; see `matrix.py`.

PROGRAM says which, and HANGS=1 makes the limits of hang detection so small that a stopped process is replaced soon.
"""

import json
import os
import warnings

warnings.filterwarnings("ignore")

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from faults import ACCELERATOR, Faults, devices, noticed
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torchmetrics import MeanMetric

from hyperpod_plugins.comm.channel import Channel
from hyperpod_plugins.lightning import CheckpointlessRecovery, HyperPodStrategy
from hyperpod_plugins.recovery import RecoveryOptions, StepTransaction
from hyperpod_plugins.recovery.watchdog import HangPolicy

torch.set_num_threads(1)
PROGRAM = os.environ["PROGRAM"]
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEGREES = {
    "tensor": {"tensor_parallel_degree": 2, "hybrid_shard_degree": 1},
    "full": {"hybrid_shard_degree": 4},
}.get(PROGRAM, {"hybrid_shard_degree": 2})
FIRST_FIT, SECOND_FIT, WIDTH = 20, 4, 8
faults = Faults()


class Now:
    """The step that comes next, and whether this is the second fit."""

    transaction, fits = None, 0

    def step(self):
        """Of a joiner: where it entered the loops, before it has the others' state."""
        if self.transaction is None:
            return -1
        entered_at = self.transaction.entered_at
        return self.transaction.step if entered_at is None else entered_at

    def at(self, phase):
        faults.at(phase if self.fits < 2 else f"second {phase}", self.step())


now = Now()


def instrument():
    """Places that have no hook, most of them within this package."""
    init, vote, run = StepTransaction.__init__, StepTransaction._vote, StepTransaction.run
    exchange, fetch = Channel.exchange, _BaseDataLoaderIter.__next__

    def initializing(self, *args, **kwargs):
        init(self, *args, **kwargs)
        now.transaction = self

    def voting(self):
        now.at("vote")
        went_well = vote(self)
        now.at("voted")
        return went_well

    def running(self, compute, commit):
        result = run(self, compute, commit)
        now.at("committed")
        return result

    def exchanging(self, label, *, sends, receives):
        """In the middle of each transfer of a state: what says how long it is has been sent."""
        if (self._name, label) == ("snapshots", "snapshot"):
            now.at("snapshot")
        elif label in ("tensors", "snapshot"):
            if sends:
                now.at("give")
            if receives and (faults.folder / "fault-forward-16-1-kill").exists():  # of whom this phase is about
                faults.at("take", 0)
        return exchange(self, label, sends=sends, receives=receives)

    def fetching(self):
        now.at("fetch")
        return fetch(self)

    StepTransaction.__init__, StepTransaction._vote, StepTransaction.run = initializing, voting, running
    Channel.exchange, _BaseDataLoaderIter.__next__ = exchanging, fetching


class Mixer(nn.Module):
    """Named as Llama's feed-forward part, so that the tensor plan finds it."""

    def __init__(self):
        super().__init__()
        self.up_proj = nn.Linear(WIDTH, 2 * WIDTH)
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down_proj(torch.relu(self.up_proj(x)))


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.back = nn.Conv1d(4, 2, 3, padding=1)

    def forward(self, x):
        pixels = x.unflatten(1, (2, WIDTH // 2))
        return self.back(torch.relu(self.norm(self.convolution(pixels)))).flatten(1)


class Linear(nn.Module):
    """Matrices alone, which is what Muon takes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        kind = {"convolution": Convolution, "counting": Convolution, "muon": Linear}.get(PROGRAM, Mixer)
        self.layers = nn.ModuleList([kind() for _ in range(2)])
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.num_calls.add_(1)
        for layer in self.layers:
            x = x + self.dropout(layer(x))
            if self.training:
                now.at("forward")
        return x


class Samples(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index)) + 0.1 * torch.rand(WIDTH)


class Stream(IterableDataset):
    """The samples of this rank; it can not be told where to begin."""

    def __iter__(self):
        for index in range(dist.get_rank() if dist.is_initialized() else RANK, 96, WORLD_SIZE):
            yield torch.randn(WIDTH, generator=torch.Generator().manual_seed(index)) + 0.1 * torch.rand(WIDTH)


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = PROGRAM != "manual"
        self.net = Net()
        self.judge = Net() if PROGRAM == "manual" else None
        self.mean, self.before, self.num_batches, self.last, self.index = MeanMetric(), MeanMetric(), 0, 0.0, -1

    def loss(self, batch):
        return (self.net(batch) - batch).square().mean()

    def training_step(self, batch, index):
        self.index = index
        if PROGRAM == "manual":
            return self.by_hand(batch)
        loss = self.loss(batch)
        loss.register_hook(lambda _: now.at("backward"))
        self.mean(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def by_hand(self, batch):
        made = self.net(torch.randn_like(batch))
        losses = (
            lambda: self.judge(made.detach()).square().mean() + (self.judge(batch) - 1).square().mean(),
            lambda: (self.judge(made) - 1).square().mean(),
        )
        for optimizer, compute in zip(self.optimizers(), losses, strict=True):
            optimizer.zero_grad()
            loss = compute()
            loss.register_hook(lambda _: now.at("backward"))
            self.manual_backward(loss)
            optimizer.step()
        self.lr_schedulers().step()
        self.log("loss", loss.detach(), on_step=True, on_epoch=True)

    def validation_step(self, batch, index):
        if index == 1:
            if self.trainer.state.fn == "fit":
                now.at("validation")
            else:
                faults.at("validate", 0)
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch, index):
        if index == 1:
            faults.at("test", 0)
        self.log("test", self.loss(batch) * torch.rand(()), sync_dist=True)

    def on_fit_start(self):
        faults.at("fit start", now.fits)

    def on_train_batch_end(self, *_):
        now.at("hooks")

    def on_train_epoch_end(self):
        now.at("epoch end")

    def on_train_end(self):
        now.at("train end")

    def on_save_checkpoint(self, checkpoint):
        now.at("save")

    def configure_optimizers(self):
        faults.at("setup", now.fits)

        def made(kind, module, **options):
            """Of two groups: a fault comes between the first one's writes and the second one's."""
            groups = [{"params": list(layer.parameters())} for layer in module.layers]
            calls = iter(range(10**9))
            return noticed(kind, lambda: now.at("commit") if next(calls) % 2 else None)(groups, **options)

        if PROGRAM == "muon":
            optimizers = [made(torch.optim.Muon, self.net, lr=1e-2)]
        elif PROGRAM == "manual":
            judge = made(torch.optim.AdamW, self.judge, lr=1e-2)
            optimizers = [judge, made(torch.optim.SGD, self.net, lr=1e-2, momentum=0.9)]
        else:
            optimizers = [made(torch.optim.AdamW, self.net, lr=1e-2)]
        schedule = torch.optim.lr_scheduler.StepLR(optimizers[-1], 3, 0.9)
        return optimizers, [{"scheduler": schedule, "interval": "step"}]


class Ema(pl.Callback):
    """Averages this rank's shards after each step."""

    def __init__(self):
        self.shards = []

    def on_train_batch_end(self, trainer, module, *_):
        with torch.no_grad():
            now = [local(parameter) for parameter in module.parameters()]
            self.shards = [0.9 * old + 0.1 * new for old, new in zip(self.shards or now, now, strict=True)]

    def state_dict(self):
        return {"shards": self.shards}

    def load_state_dict(self, state):
        self.shards = state["shards"]


class Counting(Module):
    """Nothing that a hook before the step writes or logs may be lost, or count twice; the others have no such hook."""

    def on_train_batch_start(self, batch, index):
        self.net.seen.add_(batch.mean())
        self.num_batches, self.last = self.num_batches + 1, float(batch.mean())
        self.before(batch.mean())
        self.log("before", self.before, on_step=False, on_epoch=True)
        self.log("seen", self.net.seen.clone() + self.num_batches, on_step=False, on_epoch=True)


def local(tensor):
    whole = tensor.detach()
    return (whole.to_local() if hasattr(whole, "to_local") else whole).clone()


def state_of(trainer, module, ema):
    """All that this rank holds."""
    state = {name: local(value) for name, value in [*module.named_parameters(), *module.named_buffers()]}
    names = {parameter: name for name, parameter in module.named_parameters()}
    for index, optimizer in enumerate(trainer.optimizers):
        for parameter, values in optimizer.state.items():
            state |= {f"{index}.{names[parameter]}.{key}": local(value) for key, value in values.items()}
        state[f"{index}.lr"] = torch.tensor(optimizer.param_groups[0]["lr"])
    state |= {f"ema.{number}": shard for number, shard in enumerate(ema.shards)}
    state |= {f"metric.{name}": value for name, value in trainer.callback_metrics.items()}
    state["own"] = torch.tensor([module.num_batches, module.last, module.index])
    state["step"] = torch.tensor([trainer.global_step, trainer.current_epoch])
    return {name: value.clone() for name, value in state.items()}


def train_loader():
    if PROGRAM == "accumulation":
        return DataLoader(Stream(), batch_size=1, num_workers=1)
    return DataLoader(Samples(), batch_size=2 if PROGRAM == "tensor" else 1, shuffle=True)


def fit(trainer, module, steps):
    now.fits += 1
    per_step = 2 if PROGRAM == "manual" else 1  # the trainer counts both optimizers
    trainer.fit_loop.epoch_loop.max_steps = per_step * steps
    trainer.fit(module, train_loader(), evaluation_loader())


def evaluation_loader():
    return DataLoader(Samples(), batch_size=4)


def main():
    instrument()
    if PROGRAM == "full" and any(fault[0] in ("give", "take") for fault in json.loads(os.environ["FAULTS"])):
        os.environ.pop("HYPERPOD_SNAPSHOTS", None)  # in the memory of processes, which is copied for a new one
    limits = {"hang_timeout_s": 30.0}
    if os.environ.get("HANGS") == "1":
        limits = {"hang_timeout_s": 4.0}
        policy = HangPolicy(floor_s=4.0, factor=10.0, early_s=5.0, outside_s=6.0)
        RecoveryOptions.hangs = property(lambda _: policy)
    pl.seed_everything(1, verbose=False)
    module, ema = Counting() if PROGRAM == "counting" else Module(), Ema()
    recovery = CheckpointlessRecovery(verify=True, replacement_timeout_s=60.0, snapshot_every_steps=2, **limits)
    per_step = 2 if PROGRAM == "manual" else 1
    trainer = pl.Trainer(
        strategy=HyperPodStrategy(**DEGREES, block_classes=[type(module.net.layers[0]).__name__]),
        accelerator=ACCELERATOR,
        devices=devices(WORLD_SIZE),
        max_steps=FIRST_FIT,
        callbacks=[
            recovery,
            pl.callbacks.ModelCheckpoint(
                faults.folder / "checkpoints", filename="{step}", every_n_train_steps=6 * per_step, save_top_k=-1
            ),
            *([ema] if PROGRAM == "ema" else []),
        ],
        val_check_interval=4 * (2 if PROGRAM == "accumulation" else 1),
        check_val_every_n_epoch=None,
        num_sanity_val_steps=1,
        limit_val_batches=2,
        limit_test_batches=2,
        logger=False,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({} if PROGRAM == "manual" else {"gradient_clip_val": 0.5}),
        accumulate_grad_batches=2 if PROGRAM == "accumulation" else 1,
    )
    fit(trainer, module, FIRST_FIT)
    result = {"first": state_of(trainer, module, ema)}
    result["validated"] = trainer.validate(module, evaluation_loader(), verbose=False)
    faults.at("between", 0)
    fit(trainer, module, FIRST_FIT + SECOND_FIT)
    result["second"] = state_of(trainer, module, ema)
    result["tested"] = trainer.test(module, evaluation_loader(), verbose=False)
    torch.save(result, faults.folder / f"result-{RANK}.pt")


if __name__ == "__main__":
    main()
