"""State of callbacks as parts of a fit began: what is described meanwhile, and put back where hooks run again."""

from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from device import ACCELERATOR
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, LambdaCallback, ModelCheckpoint
from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging

from hyperpod_plugins.comm import group_health
from hyperpod_plugins.errors import ConfigError, LoopError, PeerLost
from hyperpod_plugins.lightning import ElasticTraining
from hyperpod_plugins.lightning.saving_hooks import SavingHooks, refuse_interleaved_hooks
from hyperpod_plugins.recovery.rng import BATCH, EPOCH_BEGIN, EPOCH_END, EVALUATION_BEGIN, FIT_END


class Count(pl.Callback):
    """Has a state that anybody may change."""

    def __init__(self):
        self.state = {"count": 0, "sum": torch.zeros(())}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state

    def up(self):
        self.state["count"] += 1
        self.state["sum"] += 1


def counting(*hooks):
    """A callback with those hooks and no others."""

    def hook(self, *_):
        self.up()

    return type("Of_" + "_".join(hooks), (Count,), dict.fromkeys(hooks, hook))()


def trainer_with(*callbacks, **arguments):
    trainer = pl.Trainer(
        accelerator=ACCELERATOR,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        **arguments,
    )
    trainer.callbacks = list(callbacks)
    trainer.strategy.connect(pl.LightningModule())
    return trainer


def counts(*callbacks):
    for each in callbacks:
        assert each.state["sum"] == each.state["count"]
    return [each.state["count"] for each in callbacks]


def of(description, *callbacks):
    return [description["callbacks"].get(each.state_key, {}).get("count") for each in callbacks]


HOOKS = {
    EPOCH_BEGIN: ["on_train_epoch_start"],
    BATCH: ["on_train_batch_start", "on_before_zero_grad", "on_after_backward", "on_before_optimizer_step"],
    EVALUATION_BEGIN: ["on_validation_start", "on_validation_batch_end", "on_validation_end"],
    EPOCH_END: ["on_train_epoch_end"],
    FIT_END: ["on_train_end"],
}


@pytest.mark.parametrize("part", HOOKS)
def test_callbacks_with_hooks_of_a_part_are_put_back_to_where_it_began(part):
    ours, others = (
        [counting(hook) for kind in kinds for hook in HOOKS[kind]] for kinds in ([part], HOOKS.keys() - {part})
    )
    trainer, hooks = trainer_with(*ours, *others), SavingHooks()
    for each in (*ours, *others):
        each.up()
    hooks.begin_part(trainer, part)
    assert hooks.part == part
    for _ in range(2):  # the second time from the same state
        for each in (*ours, *others):
            each.up()
        described = hooks.dump(trainer)
        assert of(described, *ours) == [1] * len(ours)
        hooks.put_back(trainer)
        assert counts(*ours) == [1] * len(ours)
    assert counts(*others) == of(described, *others) == [3] * len(others)
    hooks.end_part()
    assert hooks.part == ""
    for each in ours:
        each.up()
    hooks.put_back(trainer)
    assert counts(*ours) == of(hooks.dump(trainer), *ours) == [2] * len(ours)


def test_a_step_puts_back_its_computation_alone_unless_the_loops_are_left():
    both = counting("on_train_epoch_start", "on_before_optimizer_step")
    epoch, batch, step = (
        counting(name) for name in ("on_train_epoch_start", "on_train_batch_start", "on_before_optimizer_step")
    )
    callbacks = both, epoch, batch, step
    trainer, hooks = trainer_with(*callbacks), SavingHooks()
    hooks.begin_part(trainer, EPOCH_BEGIN)
    both.up(), epoch.up()
    hooks.begin_part(trainer, BATCH)
    batch.up()
    hooks.begin_compute(trainer)
    assert hooks.part == EPOCH_BEGIN
    for _ in range(2):
        both.up(), step.up()
        hooks.put_back(trainer, is_inside=True)
        assert counts(*callbacks) == [1, 1, 1, 0]
    both.up(), step.up()
    assert of(hooks.dump(trainer), *callbacks) == [0, 0, 0, 0]  # who enters there calls the hooks of the epoch, too
    hooks.put_back(trainer)
    assert counts(*callbacks) == [0, 0, 0, 0]

    hooks.end_part()
    hooks.begin_part(trainer, BATCH)  # the second step of the epoch
    both.up(), epoch.up(), step.up()
    assert of(hooks.dump(trainer), *callbacks) == [0, 1, 0, 0]


def test_a_step_that_follows_anything_but_an_epochs_beginning_has_its_own_state():
    callback = counting("on_validation_end", "on_before_optimizer_step")
    trainer, hooks = trainer_with(callback), SavingHooks()
    hooks.begin_part(trainer, EVALUATION_BEGIN)
    callback.up()
    trainer.should_stop = True
    hooks.begin_part(trainer, BATCH)
    callback.up()
    hooks.put_back(trainer)
    assert counts(callback) == [1]
    assert trainer.should_stop


@pytest.mark.parametrize(("accumulate", "wanted"), [(1, 1), (2, 0)])
def test_hooks_at_the_end_of_a_batch_belong_to_the_step_where_more_batches_follow(accumulate, wanted):
    callback = counting("on_train_batch_end")
    trainer, hooks = trainer_with(callback, accumulate_grad_batches=accumulate), SavingHooks()
    hooks.begin_part(trainer, BATCH)
    callback.up()
    hooks.put_back(trainer)
    assert counts(callback) == [wanted]


@pytest.mark.parametrize("part", [EVALUATION_BEGIN, EPOCH_BEGIN])
def test_what_a_part_asks_the_trainer_to_do_is_asked_again(part):
    trainer, hooks = trainer_with(), SavingHooks()
    assert not hooks.should_stop(trainer)
    hooks.begin_part(trainer, part)
    trainer.should_stop = True
    assert not hooks.should_stop(trainer)
    hooks.put_back(trainer, is_inside=True)
    assert trainer.should_stop
    hooks.put_back(trainer)
    assert not trainer.should_stop
    trainer.should_stop = True
    hooks.end_part()
    assert hooks.should_stop(trainer)
    hooks.put_back(trainer)
    assert trainer.should_stop


def gather():
    """What a group does with a collective; there is none here."""
    if group_health.refusal_reason:
        raise LoopError(group_health.refusal_reason)


class Gathers(Count):
    num_calls = 0

    def state_dict(self):
        self.num_calls += 1
        gather()
        return self.state

    def on_validation_start(self, *_):
        self.up()


class Loses(Gathers):
    def state_dict(self):
        raise PeerLost("gone")


class Fails(Gathers):
    def state_dict(self):
        raise LoopError("of its own")


def test_callbacks_whose_state_communicates_keep_it():
    gathers, loses, count = Gathers(), Loses(), counting("on_validation_start")
    trainer, hooks = trainer_with(gathers, loses, count), SavingHooks()
    hooks.begin_part(trainer, EVALUATION_BEGIN)
    for each in (gathers, loses, count):
        each.up()
    assert group_health.refusal_reason == ""
    hooks.put_back(trainer)
    assert counts(gathers, loses, count) == [1, 1, 0]
    with pytest.raises(ConfigError, match=r"Gathers\.state_dict communicates"):
        hooks.dump(trainer)
    num_calls = gathers.num_calls
    hooks.begin_part(trainer, EVALUATION_BEGIN)
    assert gathers.num_calls == num_calls  # once is enough to know
    with pytest.raises(LoopError, match="of its own"):
        SavingHooks().begin_part(trainer_with(Fails()), EVALUATION_BEGIN)
    assert group_health.refusal_reason == ""


def test_what_was_saved_and_averages_of_weights_are_never_put_back(tmp_path):
    saving, average, stop = ModelCheckpoint(tmp_path), EMAWeightAveraging(), EarlyStopping("val")
    trainer, hooks = trainer_with(saving, average, stop), SavingHooks()
    average._average_model = SimpleNamespace(n_averaged=torch.zeros(()))
    for part in HOOKS:
        hooks.begin_part(trainer, part)
        saving.best_model_path, average._latest_update_step, stop.wait_count = "best", 7, 5
        hooks.put_back(trainer)
        assert saving.best_model_path == "best"
        assert average._latest_update_step == 7
        assert stop.wait_count == (0 if part in (EVALUATION_BEGIN, EPOCH_END) else 5)
        stop.wait_count = 0


def test_callbacks_without_state_are_never_put_back():
    hooks, calls = SavingHooks(), []
    callback = LambdaCallback(on_validation_start=calls.append)
    callback.load_state_dict = calls.append
    trainer = trainer_with(callback, EmptyState())
    hooks.begin_part(trainer, EVALUATION_BEGIN)
    hooks.put_back(trainer)
    assert calls == []


class EmptyState(Count):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        raise AssertionError("nothing was kept")

    def on_validation_start(self, *_):
        pass


@pytest.mark.parametrize("around", ["on_train_batch_start", "on_train_batch_end"])
@pytest.mark.parametrize("inside", ["on_before_zero_grad", "on_after_backward", "on_before_optimizer_step"])
def test_callbacks_whose_hooks_take_turns_in_a_window_are_refused(around, inside):
    both = counting(around, inside)
    stateless = type("Stateless", (pl.Callback,), dict.fromkeys((around, inside), print))()
    refuse_interleaved_hooks(trainer_with(both))
    elastic = ElasticTraining(global_batch_size=8, micro_batch_size=2)
    refuse_interleaved_hooks(trainer_with(both, elastic))
    elastic.possible_micro_steps = frozenset({1, 4})
    with pytest.raises(ConfigError, match="With 4 micro-steps in a step"):
        refuse_interleaved_hooks(trainer_with(both, elastic))
    refuse_interleaved_hooks(trainer_with(counting(around), counting(inside), stateless, accumulate_grad_batches=2))
    for callbacks, accumulate in (([both], 2), ([both, GradientAccumulationScheduler({0: 1, 3: 4})], 1)):
        with pytest.raises(ConfigError, match=f"{type(both).__name__} has state, and both {inside} and {around}"):
            refuse_interleaved_hooks(trainer_with(*callbacks, accumulate_grad_batches=accumulate))
