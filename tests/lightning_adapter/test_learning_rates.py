"""The factor is in an optimizer's groups while it steps, and nowhere else; schedulers go on by samples."""

from types import SimpleNamespace

import pytest
import torch
from torch.optim import lr_scheduler

from hyperpod_plugins.elastic.scaling.adascale import GradientNoise
from hyperpod_plugins.elastic.scaling.lr_scaling import LearningRates, LRScalingRule, LRState, scaled
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.events import listen
from hyperpod_plugins.lightning.elastic_training import step_schedulers

REFERENCE = 10
SCHEDULERS = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, 0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "multiplicative": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.9),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, 0.1), lr_scheduler.StepLR(optimizer, 3)], [4]
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=2),
}


def adam(lr=0.01):
    return torch.optim.Adam([torch.nn.Parameter(torch.ones(3))], lr=lr)


class Module:
    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step() if metric is None else scheduler.step(metric)


class Progress:
    def __init__(self):
        self.num_steps = 0

    def increment_ready(self):
        pass

    def increment_completed(self):
        self.num_steps += 1


def trainer_with(scheduler, frequency=1, **options):
    is_plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
    defaults = {"interval": "step", "monitor": "loss" if is_plateau else None, "strict": True}
    config = SimpleNamespace(
        scheduler=scheduler, frequency=frequency, reduce_on_plateau=is_plateau, **(defaults | options)
    )
    loop = SimpleNamespace(scheduler_progress=Progress(), _should_accumulate=lambda: False)
    return SimpleNamespace(
        lr_scheduler_configs=[config],
        lightning_module=Module(),
        callback_metrics={"loss": torch.tensor(1.0)},
        fit_loop=SimpleNamespace(epoch_loop=loop),
    )


def rates_of(**options):
    rates = LearningRates(rule=LRScalingRule(**options))
    rates.begin(REFERENCE)
    return rates


def run(rates, optimizer, trainer, sizes):
    """Steps of those batches; the learning rates that the optimizer used, and those that the schedulers left."""
    used, left = [], []
    for size in sizes:
        with rates.step(optimizer, batch_size=size, num_samples=size, is_first_rank=False):
            used.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
        for waiting in (False, True):
            step_schedulers(rates, trainer, waiting_for_metric=waiting)
        left.append(optimizer.param_groups[0]["lr"])
    return used, left


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_see_their_own_values(name):
    plain = adam()
    scheduler, wanted = SCHEDULERS[name](plain), []
    for _ in range(18):
        wanted.append(plain.param_groups[0]["lr"])
        plain.step()
        scheduler.step(1.0) if name == "plateau" else scheduler.step()
    optimizer = adam()
    trainer = trainer_with(SCHEDULERS[name](optimizer))
    sizes = [10, 10, 20, 20, 20, 5, 5, 30]
    used, left = run(rates_of(scaling="linear"), optimizer, trainer, sizes)
    done = [sum(sizes[:count]) // REFERENCE for count in range(len(sizes) + 1)]
    assert used == [wanted[at] * (size / REFERENCE) for at, size in zip(done, sizes, strict=False)]
    assert left == [wanted[at] for at in done[1:]]


def test_a_job_whose_members_are_replaced_goes_on_as_one_whose_are_not():
    sizes = [10, 20, 20, 20, 40, 40, 10, 10]
    optimizer = adam()
    calm = run(
        rates_of(scaling="sqrt", warmup_samples=50), optimizer, trainer_with(SCHEDULERS["step"](optimizer)), sizes
    )
    optimizer = adam()
    scheduler = SCHEDULERS["step"](optimizer)
    rates, used, left = rates_of(scaling="sqrt", warmup_samples=50), [], []
    for size in sizes:
        step = run(rates, optimizer, trainer_with(scheduler), [size])
        used, left = used + step[0], left + step[1]
        state, states = rates.state_dict(), (optimizer.state_dict(), scheduler.state_dict())
        optimizer, rates = adam(), LearningRates(rule=rates.rule)
        scheduler = SCHEDULERS["step"](optimizer)
        optimizer.load_state_dict(states[0])
        scheduler.load_state_dict(states[1])
        rates.load_state_dict(state)
        rates.begin(12345)  # of a world that came later
    assert (used, left) == calm


@pytest.mark.parametrize(
    ("sizes", "frequency", "steps"),
    [([10] * 5, 1, 5), ([20] * 5, 1, 10), ([5] * 5, 1, 2), ([10] * 6, 3, 2), ([20] * 6, 3, 4), ([7, 7, 7], 1, 2)],
)
def test_steps_of_a_scheduler(sizes, frequency, steps):
    optimizer = adam()
    trainer = trainer_with(SCHEDULERS["step"](optimizer), frequency)
    run(rates_of(), optimizer, trainer, sizes)
    assert trainer.fit_loop.epoch_loop.scheduler_progress.num_steps == steps


def test_a_metric_that_nobody_has_logged():
    optimizer = adam()
    trainer = trainer_with(SCHEDULERS["plateau"](optimizer), monitor="accuracy")
    with pytest.raises(ConfigError, match="'accuracy', which was not logged; there are loss"):
        run(rates_of(), optimizer, trainer, [10])
    trainer = trainer_with(SCHEDULERS["plateau"](optimizer), monitor="accuracy", strict=False)
    run(rates_of(), optimizer, trainer, [10])


def test_schedulers_by_epochs_are_left_to_lightning():
    optimizer = adam()
    trainer = trainer_with(SCHEDULERS["step"](optimizer), interval="epoch")
    run(rates_of(), optimizer, trainer, [10] * 5)
    assert trainer.fit_loop.epoch_loop.scheduler_progress.num_steps == 0


def test_adam_is_scaled_only_inside():
    optimizer = adam()
    (group,) = optimizer.param_groups
    before = (group["lr"], group["betas"], group["eps"])
    with scaled(optimizer, 2.0, scale_adam=True):
        assert group["lr"] == 0.02
        assert group["betas"] == pytest.approx((0.6, 0.996))
        assert group["eps"] == pytest.approx(0.5e-8)
    assert (group["lr"], group["betas"], group["eps"]) == before


def test_a_learning_rate_in_a_tensor_stays_that_tensor():
    lr = torch.tensor(0.3)
    optimizer = adam(lr)
    with scaled(optimizer, 3.0, scale_adam=False):
        assert optimizer.param_groups[0]["lr"] is lr
        assert lr == torch.tensor(0.3) * 3.0
    assert lr == torch.tensor(0.3)


def test_optimizers_that_the_rule_is_not_for():
    rates = rates_of(scaling="sqrt", scale_adam=True)
    assert rates.check([adam()], [REFERENCE, 4 * REFERENCE]) == REFERENCE
    with pytest.raises(ConfigError, match="up to 10 times"):
        rates.check([adam()], [16 * REFERENCE])
    with pytest.raises(ConfigError, match="is for Adam and its like"):
        rates.check([torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)], [REFERENCE])


def test_a_checkpoint_with_another_reference():
    state = rates_of().state_dict()
    with pytest.raises(ConfigError, match="reference batch of 10 samples"):
        LearningRates(rule=LRScalingRule(reference_batch_size=20)).load_state_dict(state)
    rates = LearningRates(rule=LRScalingRule(reference_batch_size=10))
    rates.load_state_dict(state)
    assert rates.lr_state == LRState.initial(10, rates.rule)


NOISE = GradientNoise(squared_norms=(4.0, 4.0), shares=(0.5, 0.5), mean_squared_norm=2.0)
AGREEMENT = GradientNoise(squared_norms=(4.0, 4.0), shares=(0.5, 0.5), mean_squared_norm=4.0)


def test_adascale_goes_by_what_each_step_has_told():
    optimizer = adam(0.01)
    scheduler = SCHEDULERS["lambda"](optimizer)
    trainer, rates, used = trainer_with(scheduler), rates_of(scaling="adascale"), []
    # variance 4 and signal 0; then 0 and 4, so 2 and 2 in the mean; then nothing new
    for gradient_noise, size in ((NOISE, 20), (AGREEMENT, 20), (None, 20), (None, 5)):
        rates.noise = gradient_noise
        used += run(rates, optimizer, trainer, [size])[0]
        assert rates.noise is None
    gains, done = [2.0, 4 / 3, 4 / 3, 4 / 6], [0, 2, 3, 4]  # 2, 3.33, 4.67 and 5.33 steps
    assert used == pytest.approx([0.01 * gain / (1 + step) for gain, step in zip(gains, done, strict=True)])
    assert trainer.fit_loop.epoch_loop.scheduler_progress.num_steps == rates.lr_state.schedule_step == 5


def test_a_checkpoint_that_counts_otherwise():
    with_gains, without = rates_of(scaling="adascale").state_dict(), rates_of(scaling="linear").state_dict()
    with pytest.raises(ConfigError, match=r"was made with lr_scaling='adascale', .* it is not asked for now"):
        rates_of(scaling="linear").load_state_dict(with_gains)
    with pytest.raises(ConfigError, match=r"was not made with lr_scaling='adascale', .* it is asked for now"):
        rates_of(scaling="adascale").load_state_dict(without)


def test_every_change_is_an_event(caplog):
    found = []
    end = listen(found.append)
    optimizer, rates = adam(), rates_of(scaling="linear", warmup_samples=100)
    for size in (10, 20, 20, 10):
        with rates.step(optimizer, batch_size=size, num_samples=size, is_first_rank=True):
            optimizer.step()
    end()
    assert [event.details["global_batch_size"] for event in found] == [20, 10]
    assert [event.details["lr_factor"] for event in found] == [2.0, 1.0]
    assert found[1].details["lr_factor_before"] == pytest.approx(1.4)
    assert len(caplog.records) == 2
