"""What a newcomer is told of a trainer: the states that Lightning itself would have saved, made out of later ones."""

import copy

import lightning.pytorch as pl
import pytest
import torch

from hyperpod_plugins.lightning.trainer_state import (
    GROUPS,
    batches_done,
    before_epoch_end,
    before_validation,
    describe_trainer,
    ends_epoch,
    is_epoch_end,
    is_epoch_start,
    read_trainer,
    rewind,
)
from hyperpod_plugins.recovery.hyperparameters import give_hyperparameters

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
            self.validated.append((before_validation(fit_loop), fit_loop))

    def on_train_epoch_end(self, trainer, module):
        self.finished.append(self.state(trainer))


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
        accelerator="cpu",
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
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_interrupted_end_of_an_epoch_is_not_counted(accumulate):
    _, observer = fit(accumulate)
    assert len(observer.finished) == 3
    for number, interrupted in enumerate(observer.finished):
        assert ends_epoch(interrupted)
        again = before_epoch_end(interrupted)
        assert again["epoch_progress"]["total"]["processed"] == number
        assert again["epoch_progress"]["total"]["completed"] == number
        assert is_epoch_end({"loops": {"fit_loop": again}})
        assert batches_done({"loops": {"fit_loop": again}}) == NUM_BATCHES
        # Whether or not Lightning had taken one off its count of steps, which it does while it logs the epoch.
        steps = "_batches_that_stepped"
        assert again["epoch_loop.state_dict"][steps] == interrupted["epoch_loop.state_dict"][steps]
        interrupted["epoch_loop.state_dict"][steps] -= 1
        assert before_epoch_end(interrupted)["epoch_loop.state_dict"] == again["epoch_loop.state_dict"]


@pytest.mark.slow_single
def test_a_description_carries_the_learning_rate():
    trainer, _ = fit()
    described = read_trainer(describe_trainer(trainer, micro_steps_open=0, loader_states=[]))
    (optimizer,) = trainer.optimizers
    wanted = optimizer.param_groups[0]["lr"]
    assert wanted < 0.1
    optimizer.param_groups[0] |= {"lr": 0.7, "momentum": 0.9}
    give_hyperparameters(described[GROUPS], trainer.optimizers)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (wanted, 0)
