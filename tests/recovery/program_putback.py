"""What `putback.py` rehearses: programs that have what once did not recover, with the old fault put back or without.

`PUT_BACK` names the fault in the environment; empty for the package as it is. `ADAPTER` is `session` or `lightning`.
With `SYNC` all ranks log the same loss, otherwise each its own. With `READS` a step computes with what others logged.
"""

import os

import torch
import torch.distributed as dist
from faults import ACCELERATOR, devices
from torch import nn
from torch.optim import LBFGS, AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

import hyperpod_plugins.session.state as trained
from hyperpod_plugins.recovery import local_state, undo
from hyperpod_plugins.recovery import plan as assign
from hyperpod_plugins.recovery.step import StepTransaction

torch.set_num_threads(1)
PUT_BACK, ADAPTER = os.environ.get("PUT_BACK", ""), os.environ.get("ADAPTER", "session")
NUM_RANKS = int(os.environ["WORLD_SIZE"])
REHEARSE = tuple(map(int, filter(None, os.environ.get("REHEARSE", "").split(","))))
WIDTH = 8


# -- the faults -------------------------------------------------------------------------------------------------------


def optimizers_step_after_the_vote():
    """All optimizers step in the commit, and what a fault leaves there counts as whole."""
    trained.is_elementwise = lambda optimizer: True
    StepTransaction._discard_state = lambda self: None


def assigned_buffers_stay():
    """Undoing a step writes to the tensors that were the buffers when it began, whatever is registered now."""

    def put_back(self):
        with torch.no_grad():
            for buffer, saved in self._saved:
                buffer.copy_(saved)

    undo.Buffers.put_back = put_back


def callbacks_are_overwritten():
    """After a fault outside of a step, all survivors load the callback state of one rank."""
    from hyperpod_plugins.lightning import callback_states, fit_recovery

    callback_states._is_other = lambda callback: False  # nor does a callback have state of one rank alone
    fit_recovery.merge_own = lambda theirs, own, keys: theirs


def batch_hooks_draw_anything():
    """Random numbers of what is done with a batch before the step are not a function of the step."""
    from hyperpod_plugins.lightning.fit_recovery import FitRecovery

    FitRecovery.seed_batch = lambda self: None


def hooks_come_later():
    """A rank that commits a step only now gives its state before the hooks that follow the step."""
    plan = assign.RecoveryPlan
    assign.RecoveryPlan = lambda **values: plan(**{**values, "hooks_first": False})


def closures_return_what_was_computed():
    """Optimizers that compute gradients several times in a step get the same ones each time."""
    import hyperpod_plugins.lightning.strategy as strategy

    strategy.single_use_closure = lambda optimizer, result: lambda: result
    strategy.check_no_required_closure = lambda optimizers: None


def rank_local_state_is_lost():
    """What is of one rank alone, such as running statistics, is not given to the buddy."""
    local_state.LocalStates.register = lambda self, name, state, **options: None


def gradients_without_optimizer_stay():
    """The gradients of parameters that no optimizer has add up over steps and attempts."""
    undo.StepStart._drop_unowned = lambda self: None


FAULTS = {
    "A1": optimizers_step_after_the_vote,
    "A2": assigned_buffers_stay,
    "A3": callbacks_are_overwritten,
    "A4": batch_hooks_draw_anything,
    "A5": hooks_come_later,
    "A6": closures_return_what_was_computed,
    "A7": rank_local_state_is_lost,
    "I3": gradients_without_optimizer_stay,
}


# -- the programs -----------------------------------------------------------------------------------------------------


class Lars(Optimizer):
    """Scales each parameter's step by a norm over all ranks, so its step communicates."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"]
                momentum.mul_(0.9).add_(parameter.grad)
                norm = momentum.to_local().square().sum()
                dist.all_reduce(norm)
                parameter.add_(momentum, alpha=-group["lr"] / (1 + float(norm)))
        return loss


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.unowned = nn.Linear(WIDTH, WIDTH)
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        y = self.last(torch.relu(self.norm(self.first(x)))) + self.unowned(x)
        if self.training:
            self.scale = self.scale + 0.1  # assigned, not written to
        return y * self.scale.detach() + 0.1 * self.teacher(x)

    def follow(self):
        """The teacher follows the student, outside of the step."""
        with torch.no_grad():
            self.teacher.weight.lerp_(self.last.weight, 0.5)


def owned(net):
    return [*net.first.parameters(), *net.norm.parameters(), *net.last.parameters()]


def train_with_session():
    from hyperpod_plugins.recovery import RecoveryOptions
    from hyperpod_plugins.session import Session

    shard_degree = 2 if NUM_RANKS > 2 else 1
    options = RecoveryOptions(rehearse=REHEARSE)
    session = Session(hybrid_shard_degree=shard_degree, global_batch_size=4 * NUM_RANKS, recovery=options)
    torch.manual_seed(0)
    net = session.parallelize(Net())
    session.train(net, Lars(owned(net), lr=1e-2), max_grad_norm=0.5)
    data = TensorDataset(torch.randn(50 * 4 * NUM_RANKS, WIDTH))
    for step in session.steps(DataLoader(data, batch_size=4, shuffle=True), epochs=1, max_steps=40):
        with step:
            loss = step.run(lambda batch: (net(batch[0]) - batch[0]).square().mean())
            net.follow()
    print(f"trained to {float(loss).hex()}")


def train_with_lightning():
    import lightning.pytorch as L

    from hyperpod_plugins.lightning import CheckpointlessRecovery, HyperPodStrategy

    class Average(L.Callback):
        """An average of what this rank holds of each parameter."""

        def __init__(self):
            self.values = []

        def on_train_batch_end(self, trainer, module, *_):
            now = [each.detach().to_local().clone() for each in module.net.last.parameters()]
            self.values = [0.9 * a + 0.1 * b for a, b in zip(self.values or now, now, strict=True)]

        def state_dict(self):
            return {"values": self.values}

        def load_state_dict(self, state_dict):
            self.values = state_dict["values"]

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = Net()

        def on_after_batch_transfer(self, batch, index):
            share = torch.rand(())
            return [share * batch[0] + (1 - share) * batch[0].flip(0)]

        def training_step(self, batch, index):
            loss = (self.net(batch[0]) - batch[0]).square().mean()
            if "READS" in os.environ:
                shown = self.trainer.callback_metrics
                loss = loss * (1 + 0.1 * shown.get("loss", 0) + 0.1 * shown.get("rare", 0))
                if index % 6 == 0:
                    self.log("rare", loss, prog_bar=True)
            self.log("loss", loss, on_step=True, on_epoch=True, sync_dist="SYNC" in os.environ)
            return loss

        def on_train_batch_end(self, outputs, batch, index):
            if index % 2:
                self.trainer.strategy.barrier()  # so that a rank that is lost in a callback is lost outside of the step

        def configure_optimizers(self):
            is_lbfgs = PUT_BACK == "A6"
            return LBFGS(owned(self.net), max_iter=3) if is_lbfgs else AdamW(owned(self.net), lr=1e-2)

    L.seed_everything(7)
    trainer = L.Trainer(
        accelerator=ACCELERATOR,
        devices=devices(NUM_RANKS),
        strategy=HyperPodStrategy(hybrid_shard_degree=2 if NUM_RANKS > 2 else 1),
        max_steps=40,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Average(), CheckpointlessRecovery(rehearse=REHEARSE)],
    )
    data = TensorDataset(torch.randn(2 * 50 * 4 * NUM_RANKS, WIDTH))
    trainer.fit(Module(), DataLoader(data, batch_size=4))
    print(f"trained {trainer.global_step} steps")


if PUT_BACK:
    FAULTS[PUT_BACK]()
train_with_lightning() if ADAPTER == "lightning" else train_with_session()
