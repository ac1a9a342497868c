"""Optimizers and schedulers in attributes, what optimizers keep in attributes of their own, and changed settings."""

from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LinearLR, ReduceLROnPlateau, SequentialLR, StepLR

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.lightning.held_optimizers import HeldOptimizers
from hyperpod_plugins.lightning.local_state import attributes_of
from hyperpod_plugins.lightning.trainer_state import restore_untracked, untracked
from hyperpod_plugins.recovery.packing import pack, unpack


class Sam(Optimizer):
    """Wraps an optimizer that has a state of its own."""

    def __init__(self, params):
        super().__init__(params, {"rho": 0.05})
        self.base_optimizer = SGD(self.param_groups, 0.1, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups


class Lookahead(Optimizer):
    """Wraps an optimizer whose state it shows as its own."""

    def __init__(self, inside):
        self.inside, self.n = inside, 0
        self.param_groups, self.defaults, self.state = inside.param_groups, inside.defaults, inside.state
        self.slow = [[each.detach().clone() for each in group["params"]] for group in self.param_groups]


class Counting(SGD):
    """Keeps a counter in an attribute."""

    def __init__(self, params):
        super().__init__(params, 0.1)
        self.count = 0


class Stepper:
    def __init__(self, scheduler):
        self.scheduler = scheduler


class Stopping(EarlyStopping):
    """A callback whose attributes Lightning keeps."""

    def __init__(self, scheduler):
        super().__init__("loss")
        self.scheduler = scheduler


def trainer_of(make=lambda params: Adam(params), schedule=lambda optimizer: StepLR(optimizer, 1)):
    torch.manual_seed(0)
    module = Module()
    optimizer = make(module.parameters())
    return SimpleNamespace(
        training=True,
        lightning_module=module,
        optimizers=[optimizer],
        lr_scheduler_configs=[SimpleNamespace(scheduler=schedule(optimizer))],
        callbacks=[],
    )


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)


def hold(trainer, value):
    trainer.lightning_module.held = value


def hold_in_list(trainer, value):
    trainer.lightning_module.held = {"all": [value]}


def hold_in_object(trainer, value):
    trainer.lightning_module.held = Stepper(value)


def hold_in_callback(trainer, value):
    trainer.callbacks.append(Stopping(value))


@pytest.mark.parametrize("keep", [hold, hold_in_list, hold_in_object, hold_in_callback])
@pytest.mark.parametrize("kind", [Adam, LinearLR, ReduceLROnPlateau])
def test_one_that_the_trainer_does_not_have_is_refused_by_name(keep, kind):
    trainer = trainer_of()
    keep(trainer, kind([nn.Parameter(torch.ones(1))]) if kind is Adam else kind(trainer.optimizers[0]))
    with pytest.raises(ConfigError, match=rf"(held|scheduler)\S* is an? .*\({kind.__name__}\).*configure_optimizers"):
        HeldOptimizers(trainer).check()


def test_one_that_is_held_later_is_refused_in_the_step_that_shows_it():
    trainer = trainer_of()
    held = HeldOptimizers(trainer)
    held.check()
    trainer.lightning_module.late = LinearLR(trainer.optimizers[0])
    for each in attributes_of(trainer).values():  # as before each vote
        each.state_dict()
    with pytest.raises(ConfigError, match=r"module.late .*LinearLR"):
        held.check()


def test_those_of_the_trainer_may_be_held():
    def schedule(optimizer):
        return SequentialLR(optimizer, [LinearLR(optimizer), StepLR(optimizer, 1)], [2])

    trainer = trainer_of(schedule=schedule)
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    trainer.lightning_module.held = [*trainer.optimizers, LightningOptimizer(trainer.optimizers[0]), scheduler]
    trainer.lightning_module.warm_up = scheduler._schedulers[0]
    trainer.callbacks.append(Stopping(scheduler))
    HeldOptimizers(trainer).check()


def test_an_optimizer_that_wraps_one_with_its_own_state_is_refused():
    with pytest.raises(ConfigError, match=r"optimizer 0 \(Sam\).base_optimizer .*sharpness-aware"):
        HeldOptimizers(trainer_of(Sam)).check()
    HeldOptimizers(trainer_of(lambda params: Lookahead(Adam(params)), ReduceLROnPlateau)).check()


@pytest.mark.parametrize("make", [Counting, lambda params: Lookahead(Counting(params))])
def test_what_an_optimizer_keeps_in_attributes_is_undone_and_sent(make):
    one, other = trainer_of(make, ReduceLROnPlateau), trainer_of(make, ReduceLROnPlateau)
    owners = [each.optimizers[0] for each in (one, other)]
    states = [attributes_of(each)["attributes of optimizers"] for each in (one, other)]
    kept = states[0].keep()
    step(owners[0])
    changed = values(owners[0])
    assert changed != values(owners[1])
    states[0].put_back(kept)
    assert values(owners[0]) == values(owners[1])
    step(owners[0])
    states[1].load_state_dict(unpack(pack(states[0].state_dict())))
    assert values(owners[1]) == changed


def step(optimizer):
    for each in (optimizer, vars(optimizer).get("inside")):
        if each is not None:
            vars(each).update({key: vars(each)[key] + 3 for key in ("n", "count") if key in vars(each)})
            for slow in vars(each).get("slow", ()):
                slow[0].mul_(0.5)


def values(optimizer):
    own = vars(optimizer)
    slow = [[each.tolist() for each in group] for group in own.get("slow", ())]
    return own.get("n"), own.get("count"), slow, values(own["inside"]) if "inside" in own else None


def test_torchs_own_optimizers_cost_nothing():
    assert attributes_of(trainer_of(Adam))["attributes of optimizers"].is_empty


def test_settings_that_a_program_changes_reach_a_replacement_and_return_with_a_snapshot():
    trainers = [
        pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
        for _ in range(2)
    ]
    for each in trainers:
        each.strategy._lightning_module = Module()
    before = unpack(pack(untracked(trainers[0])))
    trainers[0].gradient_clip_val, trainers[0].gradient_clip_algorithm = 0.25, "value"
    trainers[0].check_val_every_n_epoch = 3
    restore_untracked(trainers[1], unpack(pack(untracked(trainers[0]))))
    changed = (0.25, "value", 3)
    assert [settings(each) for each in trainers] == [changed, changed]
    restore_untracked(trainers[0], before)
    assert settings(trainers[0]) == (None, None, 1)


def settings(trainer):
    return trainer.gradient_clip_val, trainer.gradient_clip_algorithm, trainer.check_val_every_n_epoch
