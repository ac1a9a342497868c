"""What a joiner is told of a trainer: the states that Lightning itself would have saved, made out of later ones."""

import copy

import lightning.pytorch as pl
import pytest
import torch
from device import ACCELERATOR

from hyperpod_plugins.comm import group_health
from hyperpod_plugins.errors import ConfigError, LoopError
from hyperpod_plugins.lightning.reentry import find_batch_despite_skipped_ones, install_part_hooks
from hyperpod_plugins.lightning.saving_hooks import SavingHooks
from hyperpod_plugins.lightning.trainer_state import (
    GROUPS,
    batches_done,
    describe_part_start,
    describe_trainer,
    freeze_as_saved,
    is_epoch_start,
    make_loaders_as_others,
    merge_own,
    part_of,
    part_order,
    read_trainer,
    rewind,
    set_last_saves,
    untracked,
    untracked_in,
)
from hyperpod_plugins.recovery.rng import EPOCH_END, EVALUATION_BEGIN, FIT_END
from hyperpod_plugins.recovery.state_transfer import load_hyperparameters

NUM_BATCHES = 7
POSITION = ("epoch_progress", "epoch_loop.batch_progress", "epoch_loop.scheduler_progress", "epoch_loop.state_dict")
OPTIMIZER = "epoch_loop.automatic_optimization.optim_progress"


def position(fit_loop):
    found = {key: copy.deepcopy(fit_loop[key]) for key in POSITION}
    found["epoch_loop.batch_progress"].pop("is_last_batch")
    return found | {"steps": fit_loop[OPTIMIZER]["optimizer"]["step"]["total"]["completed"]}


class Observer(pl.Callback):
    """Compares, in every micro-step, the rewound state with the one at the last batch's end before the window."""

    def __init__(self):
        self.saved, self.validated, self.finished = None, [], []
        self.num_compared = self.num_starts = 0

    def state(self, trainer):
        return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)["loops"]["fit_loop"]

    def on_train_epoch_start(self, trainer, module):
        self.saved = None

    def on_before_zero_grad(self, trainer, module, optimizer):
        self.compare(trainer)

    def compare(self, trainer):
        ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        num_open = (ready - 1) % trainer.accumulate_grad_batches + 1
        rewound = rewind(self.state(trainer), num_open)
        if ready == num_open:
            assert is_epoch_start({"loops": {"fit_loop": rewound}})
            assert rewound["epoch_progress"]["current"]["started"] == rewound["epoch_progress"]["current"]["ready"] - 1
            self.num_starts += 1
        else:
            assert position(rewound) == self.saved
            self.num_compared += 1

    def on_train_batch_end(self, trainer, *_):
        if not trainer.fit_loop._should_accumulate():
            self.saved = position(self.state(trainer))

    def on_validation_batch_start(self, trainer, module, batch, index, loader=0):
        if not trainer.sanity_checking:
            fit_loop = self.state(trainer)
            self.validated.append((self.begun["loops"]["fit_loop"], fit_loop))

    def on_train_epoch_end(self, trainer, module):
        self.finished.append(self.begun)


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        self.trainer.callbacks[0].compare(self.trainer)
        return self.layer(batch).square().mean()

    def validation_step(self, batch, index):
        self.log("val", self.layer(batch).mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(NUM_BATCHES, 4), batch_size=1)

    def val_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(3, 4), batch_size=1)


def fit(accumulate=1, validate_every=3, callbacks=(), **arguments):
    observer = Observer()
    trainer = pl.Trainer(
        accelerator=ACCELERATOR,
        devices=1,
        max_epochs=3,
        accumulate_grad_batches=accumulate,
        val_check_interval=validate_every,
        callbacks=[observer, *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )

    def begin(part):
        observer.begun = describe_part_start(trainer, part, {})

    install_part_hooks(trainer, begin, lambda part: None)
    trainer.fit(Module())
    return trainer, observer


@pytest.mark.slow_single
@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_a_rewound_state_is_the_one_at_the_end_of_the_batch_before(accumulate):
    _, observer = fit(accumulate)
    assert observer.num_compared > 3 * (NUM_BATCHES - accumulate)
    assert observer.num_starts >= 3 * accumulate


@pytest.mark.slow_single
def test_a_validation_begins_again_from_its_first_batch():
    _, observer = fit()
    assert observer.validated
    for again, interrupted in observer.validated:
        counts = again["epoch_loop.val_loop.batch_progress"]
        assert counts["current"] == {"ready": 1, "started": 1, "processed": 0, "completed": 0}
        assert counts["total"]["started"] == counts["total"]["processed"] + 1
        batches = again["epoch_loop.batch_progress"]["current"]
        ready = interrupted["epoch_loop.batch_progress"]["current"]["ready"]
        assert batches["completed"] == batches["processed"] == ready


@pytest.mark.slow_single
def test_a_validation_that_was_run_again_counts_as_done_in_the_step_after_it():
    _, observer = fit()
    again, _ = observer.validated[0]
    counts = again["epoch_loop.val_loop.batch_progress"]
    for name in counts[
        "total"
    ]:  # Lightning runs its three batches, and leaves the one that was interrupted in the total
        counts["total"][name] += 3
    assert counts["total"]["started"] == counts["total"]["processed"] + 1
    for name in ("ready", "started"):  # the next batch has begun
        for scope in ("total", "current"):
            again["epoch_loop.batch_progress"][scope][name] += 1
    rewound = rewind(again, 1)["epoch_loop.val_loop.batch_progress"]
    assert len(set(rewound["total"].values())) == 1


@pytest.mark.slow_single
def test_the_end_of_an_epoch_is_described_as_it_begins():
    _, observer = fit()
    assert len(observer.finished) == 3
    for number, begun in enumerate(observer.finished):
        again = begun["loops"]["fit_loop"]
        assert again["epoch_progress"]["total"]["processed"] == again["epoch_progress"]["total"]["completed"] == number
        assert part_of(begun) == EPOCH_END
        assert batches_done(begun) == NUM_BATCHES


def described(part="", started=1, completed=0):
    epochs = {"total": {"started": started, "completed": completed}}
    return {"loops": {"fit_loop": {"epoch_progress": epochs, "hyperpod:part": part}}}


def test_the_order_of_parts_is_that_in_which_they_follow_a_step():
    first = [described(started=0), described(EVALUATION_BEGIN), described(), described(EPOCH_END)]
    second = [described(completed=1), described(started=2, completed=1), described(EPOCH_END, 2, 1)]
    orders = [part_order(each) for each in (*first, *second, described(FIT_END, 2, 2))]
    assert orders == sorted(set(orders))


@pytest.mark.slow_single
def test_a_description_carries_the_learning_rate():
    trainer, _ = fit()
    described = read_trainer(describe_trainer(trainer, micro_steps_open=0, loader_states=[], hooks=SavingHooks()))
    (optimizer,) = trainer.optimizers
    wanted = optimizer.param_groups[0]["lr"]
    assert wanted < 0.1
    optimizer.param_groups[0] |= {"lr": 0.7, "momentum": 0.9}
    load_hyperparameters(described[GROUPS], trainer.optimizers)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (wanted, 0)


def gather():
    """What a group does with a collective; there is none here."""
    if group_health.refusal_reason:
        raise LoopError(group_health.refusal_reason)


class Exports(pl.Callback):
    def on_save_checkpoint(this, trainer, module, checkpoint):
        gather()
        checkpoint["export"] = 1


class Reads(Exports):
    def on_load_checkpoint(self, trainer, module, checkpoint):
        pass


class Gathers(pl.Callback):
    def state_dict(self):
        gather()
        return {"whole": 1}

    def load_state_dict(self, state):
        pass


@pytest.mark.slow_single
def test_hooks_that_communicate_are_left_out_of_descriptions_or_refused():
    trainer, _ = fit()
    exports, hooks = Exports(), SavingHooks()
    trainer.callbacks.append(exports)
    for _ in range(2):
        assert "export" not in hooks.dump(trainer)
    assert trainer._checkpoint_connector.dump_checkpoint()["export"] == 1  # in files it is as ever
    for callback, hook in ((Reads(), "Reads.on_save_checkpoint"), (Gathers(), "Gathers.state_dict")):
        trainer.callbacks[-1] = callback
        with pytest.raises(ConfigError, match=f"{hook} communicates"):
            SavingHooks().dump(trainer)
    assert group_health.refusal_reason == ""


def test_survivors_keep_what_is_of_one_rank_alone():
    one, other = torch.zeros(3), torch.ones(3)
    theirs = {"loops": 1, "callbacks": {"Ema": {"shards": [one]}, "Stopper": {"best": torch.ones(())}}, "ema": one}
    own = {"loops": 0, "callbacks": {"Ema": {"shards": [other]}, "Stopper": {"best": torch.zeros(())}}, "ema": other}
    kept = merge_own(theirs, own)
    assert kept == {"loops": 1, "callbacks": {"Stopper": {"best": torch.ones(())}}, "ema": other}


def test_parts_and_notes_that_no_rank_writes_are_not_taken():
    assert part_of({"loops": {"fit_loop": {"hyperpod:part": "elsewhere"}}}) == ""
    assert part_of({"loops": {"fit_loop": {"hyperpod:part": [EPOCH_END]}}}) == ""
    callback = pl.callbacks.ModelCheckpoint()
    trainer = pl.Trainer(logger=False, callbacks=[callback], accelerator=ACCELERATOR, devices=1)
    set_last_saves(trainer, [{"_last_global_step_saved": 3, "current_score": 2, "save_top_k": 9, "state_dict": None}])
    assert (callback._last_global_step_saved, callback._last_checkpoint_saved, callback.save_top_k) == (3, "", 1)
    assert callback.current_score == 2
    assert "state_dict" not in vars(callback)


@pytest.mark.parametrize(("present", "made_at", "wanted"), [(3, 2, 2), (4, 2, 4), (3, float("-inf"), 3)])
def test_a_replacement_makes_its_loaders_in_the_epoch_of_the_others(present, made_at, wanted):
    epochs = []

    class Reloads(Module):
        def train_dataloader(self):
            epochs.append(self.current_epoch)
            return super().train_dataloader()

    trainer = pl.Trainer(reload_dataloaders_every_n_epochs=2, accelerator=ACCELERATOR, logger=False, barebones=False)
    module = Reloads()
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module)
    trainer.fit_loop.epoch_progress.current.completed = present
    make_loaders_as_others(trainer, {"hyperpod:reloaded_at": [made_at, made_at]})
    source = trainer.fit_loop._data_source
    source.dataloader(), source.dataloader()  # the second time as Lightning does
    assert epochs == [wanted, present]
    assert trainer.current_epoch == present


class Plain(Module):
    def training_step(self, batch, index):
        return self.layer(batch).square().mean()


def test_a_restart_finds_when_callbacks_had_saved_also_the_one_that_saved_its_checkpoint(tmp_path):
    """Lightning saves a callback's state before the callback records the save, and never loads that record."""
    saved, path = {}, str(tmp_path / "step=3.ckpt")

    class Saves(pl.callbacks.ModelCheckpoint):
        def _save_checkpoint(self, trainer, filepath):
            saved[filepath] = trainer._checkpoint_connector.dump_checkpoint() | untracked(trainer)
            super()._save_checkpoint(trainer, filepath)

    callbacks = [Saves(tmp_path, filename="{step}", every_n_train_steps=number) for number in (2, 3)]
    trainer = pl.Trainer(
        max_steps=3, accelerator=ACCELERATOR, logger=False, callbacks=callbacks, enable_progress_bar=False
    )
    module = Plain()
    module.layer.bias.requires_grad_(False)
    trainer.fit(module)
    wanted = untracked(trainer)
    again = pl.Trainer(accelerator=ACCELERATOR, logger=False, callbacks=callbacks, enable_progress_bar=False)
    assert untracked_in(again, saved[path], path) == wanted
    assert untracked_in(again, saved[path], "elsewhere.ckpt") != wanted
    again.strategy.connect(Plain())
    freeze_as_saved(again, wanted)
    assert [each.requires_grad for each in again.lightning_module.parameters()] == [True, False]


@pytest.mark.parametrize("left_out", [0, 1])
def test_the_batch_in_which_a_checkpoint_was_saved_counts_after_an_epoch_that_a_hook_has_ended(left_out):
    """`on_train_batch_start` has returned -1 in an earlier epoch: a batch was processed that was not started."""
    trainer = pl.Trainer(accelerator=ACCELERATOR, logger=False, barebones=True)
    loop = trainer.fit_loop.epoch_loop
    batches = loop.batch_progress
    batches.current.ready = batches.current.started = batches.current.processed = 2
    batches.current.completed = 1  # in the last hooks of the second batch
    batches.total.ready = batches.total.processed = 5 + left_out
    batches.total.started, batches.total.completed = 5, 4
    loop.restarting = True
    find_batch_despite_skipped_ones(trainer)
    loop.update_restart_stage()
    assert loop.restarted_on_train_batch_end
    assert batches.total.ready == 5 + left_out
