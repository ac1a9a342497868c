# ruff: noqa: E402 (warnings are off before the imports that would give them)
"""Programs whose optimizers write before the vote: those that communicate, and a GAN that steps two by hand.

Run by `hyperpodrun` (see `faults.py`): ADAPTER is `session`, `lightning` or `gan`, OPTIMIZER `muon`, `adafactor`,
`lars`, or `grouped`: an elementwise one, which writes after the vote, to one group of parameters after the other.
"""

import os
import warnings
from types import FunctionType

warnings.filterwarnings("ignore")

import numpy as np
import torch
from faults import ACCELERATOR, Faults, devices, noticed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hyperpod_plugins.comm import ResilientProcessGroup
from hyperpod_plugins.recovery import RecoveryOptions
from hyperpod_plugins.recovery.optimizer_copy import is_elementwise

WIDTH, NUM_LAYERS, NUM_STEPS = 8, 3, int(os.environ.get("STEPS", "12"))
SNAPSHOTS = int(os.environ.get("SNAPSHOTS", "0"))
torch.set_num_threads(1)
faults = Faults()
DEGREES = {"hybrid_shard_degree": 2, "random_seed": 5}
RECOVERY = {"replacement_timeout_s": 30.0, "hang_timeout_s": 3.0, "verify": True}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)])
        self.dropout = nn.Dropout(0.25)
        self.unowned = nn.Linear(WIDTH, WIDTH, bias=False)  # trainable, and in no optimizer
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        for layer in self.layers:
            x = self.dropout(torch.tanh(layer(x)))
        if self.training:
            self.scale = self.scale + x.detach().abs().mean() * 0 + 0.125  # a buffer that is assigned
        return (x + self.unowned(x)) * self.scale

    def owned(self):
        return self.layers.parameters()


class Lars(torch.optim.Optimizer):
    """Each parameter's rate is that of its norm to its gradient's; two collectives a parameter, one after the other."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr, "num_steps": 0})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else closure()
        for group in self.param_groups:
            group["num_steps"] += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state["velocity"] = 0.9 * state.get("velocity", 0.0) + parameter.grad
                trust = float(whole(parameter.norm())) / (float(whole(state["velocity"].norm())) + group["num_steps"])
                parameter.sub_(state["velocity"], alpha=group["lr"] * trust)
        return loss


class Commits:
    """Counts the collectives of an optimizer's step, and lets faults come before some of them."""

    def __init__(self):
        self.step, self.place = 0, -1
        self.now, self.num_groups = lambda: 0, 0
        issue = ResilientProcessGroup._issue

        def counting(group, *args, **kwargs):
            if self.place >= 0:
                faults.at(f"collective {self.place}", self.step)
                self.place += 1
            return issue(group, *args, **kwargs)

        # What the program itself communicates has to be repeated by a replacement; this is to count as the library's.
        names = {**globals(), "__name__": ResilientProcessGroup.__module__}
        ResilientProcessGroup._issue = FunctionType(
            counting.__code__, names, argdefs=counting.__defaults__, closure=counting.__closure__
        )

    def begin_group(self):
        """Called before an optimizer that steps after the vote writes to a group of its parameters."""
        self.num_groups += 1
        if self.num_groups % NUM_LAYERS == NUM_LAYERS - 1:
            faults.at("second group", self.now())

    def watch(self, optimizer, step):
        self.now = step
        if is_elementwise(optimizer):  # with a hook it would step before the vote
            return optimizer

        def before(*_):
            self.step, self.place = self.now(), 0

        def after(*_):
            faults.note(kind="collectives", count=self.place)
            self.place = -1

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        return optimizer


def make_optimizer(parameters, commits):
    kinds = {"muon": torch.optim.Muon, "adafactor": torch.optim.Adafactor, "lars": Lars}
    kind, lr = os.environ["OPTIMIZER"], np.float64(1e-2)
    if kind != "grouped":
        return kinds[kind](parameters, lr=lr)
    return noticed(torch.optim.AdamW, commits.begin_group)([{"params": [each]} for each in parameters], lr=lr)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor):
    whole = tensor.detach()
    return (whole.to_local() if hasattr(whole, "to_local") else whole).clone()


def save_result(model, optimizers, rank, repairs):
    state = {name: local(value) for name, value in [*model.named_parameters(), *model.named_buffers()]}
    for number, values in enumerate(values for optimizer in optimizers for values in optimizer.state.values()):
        state |= {f"{number}.{key}": local(value) for key, value in values.items() if torch.is_tensor(value)}
    state |= {
        f"{i}.{key}": optimizer.param_groups[0].get(key, 0)
        for i, optimizer in enumerate(optimizers)
        for key in ("num_steps", "lr")
    }
    result = {"state": state, "steps_lost": sum(repair.steps_lost for repair in repairs)}
    torch.save(result, faults.folder / f"result-{rank}.pt")


def session_main():
    from hyperpod_plugins.session import Session

    commits, data = Commits(), torch.randn(96, WIDTH, generator=torch.Generator().manual_seed(1))
    session = Session(**DEGREES, recovery=RecoveryOptions(**RECOVERY, snapshot_every_steps=SNAPSHOTS))
    model = session.parallelize(Net())
    now = 0
    optimizer = commits.watch(make_optimizer(model.owned(), commits), lambda: now)
    session.train(model, optimizer, max_grad_norm=0.5)
    for step in session.steps(DataLoader(TensorDataset(data), batch_size=2), epochs=9, max_steps=NUM_STEPS):
        with step:
            now = step.index
            step.run(lambda batch: (model(batch[0]) - batch[0]).square().mean())
    save_result(model, [optimizer], session.rank, session.repairs)


def lightning_main():
    import lightning.pytorch as pl

    commits, data = Commits(), torch.randn(96, WIDTH, generator=torch.Generator().manual_seed(1))

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, index):
            return (self.net(batch[0]) - batch[0]).square().mean()

        def configure_optimizers(self):
            return commits.watch(make_optimizer(self.net.owned(), commits), lambda: self.global_step)

    fit(Module(), data, accumulate_grad_batches=2, gradient_clip_val=0.5)


def gan_main():
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        automatic_optimization = False

        def __init__(self):
            super().__init__()
            self.maker, self.judge = (nn.ModuleList([Net()]) for _ in range(2))

        def training_step(self, batch, index):
            optimizers, real = self.optimizers(), batch[0]
            made = self.maker[0](torch.randn_like(real))
            losses = (
                lambda: self.judge[0](made.detach()).square().mean() + (self.judge[0](real) - 1).square().mean(),
                lambda: (self.judge[0](made) - 1).square().mean(),
            )
            for number, (optimizer, loss) in enumerate(zip(optimizers, losses, strict=True)):
                faults.at(f"optimizer {number}", index)
                optimizer.zero_grad()
                self.manual_backward(loss())
                optimizer.step()
            self.lr_schedulers().step()
            faults.at("stepped", index)
            with torch.no_grad():  # a weight that is clipped
                for parameter in self.maker[0].unowned.parameters():
                    parameter.clamp_(-0.3, 0.3).mul_(0.99)

        def on_train_batch_end(self, *_):
            faults.at("batch end", self.global_step)

        def configure_optimizers(self):
            judge = torch.optim.AdamW(self.judge[0].owned(), lr=1e-2)
            maker = torch.optim.SGD(self.maker[0].owned(), lr=1e-2, momentum=0.9)
            return [judge, maker], [torch.optim.lr_scheduler.StepLR(maker, 2, 0.9)]

    fit(Module(), torch.randn(96, WIDTH, generator=torch.Generator().manual_seed(1)))


def fit(module, data, **options):
    import lightning.pytorch as pl

    from hyperpod_plugins.lightning import CheckpointlessRecovery, HyperPodStrategy

    recovery = CheckpointlessRecovery(**RECOVERY, snapshot_every_steps=SNAPSHOTS)
    trainer = pl.Trainer(
        accelerator=ACCELERATOR,
        devices=devices(int(os.environ["WORLD_SIZE"])),
        strategy=HyperPodStrategy(**DEGREES, block_classes=["Net"]),
        max_steps=NUM_STEPS if module.automatic_optimization else 2 * NUM_STEPS,
        callbacks=[recovery],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, DataLoader(TensorDataset(data), batch_size=1))
    save_result(module, trainer.optimizers, trainer.global_rank, recovery.repairs)


if __name__ == "__main__":
    faults.note(kind="process")
    {"session": session_main, "lightning": lightning_main, "gan": gan_main}[os.environ["ADAPTER"]]()
