"""`GoodputMonitor` with a plain Trainer: it books the time itself, shows it and logs it."""

import csv
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger

from hyperpod_plugins.ledger import COPIERS, TimeCategory, goodput_metrics, ledger
from hyperpod_plugins.lightning import GoodputMonitor
from hyperpod_plugins.lightning.reentry import rest_of_epoch
from hyperpod_plugins.report import run_report


class Small(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.shown = []

    def training_step(self, batch, batch_idx):
        bar = self.trainer.progress_bar_callback
        if bar is not None:
            self.shown.append(bar.get_metrics(self.trainer, self))
        return self.layer(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader():
    return torch.utils.data.DataLoader(torch.ones(24, 4), batch_size=2)


def monitored(**options):
    """A quiet Trainer with the callback."""
    return pl.Trainer(
        accelerator="cpu",
        callbacks=[GoodputMonitor()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        **options,
    )


@pytest.mark.parametrize("accumulated", [1, 3])
def test_goodput_is_logged_and_shown_and_written(tmp_path, monkeypatch, accumulated):
    monkeypatch.setenv("HYPERPOD_EVENTS", str(tmp_path / "run"))
    module = Small()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=accumulated,
        callbacks=[GoodputMonitor(every_num_steps=2), TQDMProgressBar(refresh_rate=1000)],
        logger=CSVLogger(tmp_path),
        enable_checkpointing=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    trainer.fit(module, loader(), loader())
    assert not ledger.is_active
    assert "get_metrics" not in vars(trainer.progress_bar_callback)
    assert {"world", "gen", "goodput"} <= module.shown[-1].keys()
    assert (module.shown[-1]["world"], module.shown[-1]["gen"]) == ("1", "0")  # rich would show 1.000
    rows = list(csv.DictReader(Path(trainer.logger.log_dir, "metrics.csv").read_text().splitlines()))
    logged = [row for row in rows if row.get("hyperpod/goodput")]
    num_steps = 12 // accumulated
    assert [int(row["step"]) for row in logged] == [*range(2, num_steps + 1, 2)]
    assert all(0 < float(row["hyperpod/goodput"]) < 1 for row in logged)
    report = run_report(tmp_path / "run")
    assert [*report.steps.step] == [*range(1, num_steps + 1)]
    assert None not in report.steps.loss
    assert report.ranks[0].seconds["evaluation"] > 0
    assert report.is_complete
    assert sum(report.ranks[0].seconds.values()) == pytest.approx(report.ranks[0].wall_s, rel=1e-3)


def test_losses_that_arrive_late_from_a_device_are_in_the_report(tmp_path, monkeypatch):
    """Each is there after the host has looked for it three times, so some after the last step."""

    def copy(value):
        looks = iter([False, False, False])
        return value.clone(), lambda: next(looks, True)

    monkeypatch.setenv("HYPERPOD_EVENTS", str(tmp_path / "run"))
    monkeypatch.setitem(COPIERS, "cpu", copy)
    losses = []

    class Losses(Small):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            losses.append(loss.item())
            return loss

    monitored(max_epochs=1).fit(Losses(), loader(), loader())
    assert '"kind":"loss"' in next((tmp_path / "run").glob("worker-0-*")).read_text()
    assert len(losses) == 12
    assert [*run_report(tmp_path / "run").steps.loss] == losses


def test_without_a_folder_nothing_is_written_and_figures_are_there_all_the_same(tmp_path, monkeypatch):
    monkeypatch.delenv("HYPERPOD_EVENTS", raising=False)
    found = []

    class Ask(pl.Callback):
        def on_train_end(self, trainer, pl_module):
            found.append(goodput_metrics())

    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=3,
        callbacks=[GoodputMonitor(), Ask()],
        enable_progress_bar=False,
        default_root_dir=tmp_path,
        **quiet,
    )
    trainer.fit(Small(), loader(), loader())
    assert found[0]["goodput"] > 0
    assert found[0]["seconds/setup"] > 0
    assert found[0]["world_size"] == 1
    assert goodput_metrics() == {}
    assert not list(tmp_path.rglob("*.jsonl"))


def test_batches_that_are_skipped_after_a_fault_are_restored_and_not_waited_for():
    ledger.open(None, {})
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    categories = []

    class Items:
        def __iter__(self):
            for index in range(4):
                categories.append(ledger.category)
                yield index

    try:
        assert list(ledger.waits_for_data(rest_of_epoch(Items(), 2, trainer, TimeCategory.CHECKPOINT_RESTORE))) == [
            2,
            3,
        ]
        assert list(ledger.waits_for_data(rest_of_epoch(Items(), 3, trainer))) == [3]
    finally:
        ledger.close()
    skipped = [TimeCategory.CHECKPOINT_RESTORE] * 2 + [TimeCategory.DATA_WAIT] * 2
    assert categories == skipped + [TimeCategory.RESTORE] * 3 + [TimeCategory.DATA_WAIT]


class Manual(Small):
    """Steps after each third batch."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        if batch_idx % 3 == 2:
            self.optimizers().step()
            self.optimizers().zero_grad()
        return loss


def test_a_batch_without_a_step_of_a_manual_optimizer_is_no_step_that_was_lost(tmp_path, monkeypatch):
    monkeypatch.setenv("HYPERPOD_EVENTS", str(tmp_path))
    monitored(max_epochs=1).fit(Manual(), loader(), loader())
    report = run_report(tmp_path)
    assert [*report.steps.step] == [1, 2, 3, 4]
    assert report.headline.steps_lost == 0
    assert "redone" not in report.ranks[0].seconds


def test_a_program_of_two_fits_is_one_process_that_has_lost_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("HYPERPOD_EVENTS", str(tmp_path / "run"))
    for _ in range(2):
        monitored(max_steps=3).fit(Small(), loader(), loader())
    report = run_report(tmp_path / "run")
    assert report.is_complete
    assert not report.incidents
    assert [*report.steps.step] == [1, 2, 3, 1, 2, 3]
    (rank,) = report.ranks
    assert len(rank.processes) == 1
    assert "redone" not in rank.seconds
    assert sum(rank.seconds.values()) == pytest.approx(rank.wall_s, rel=1e-3)
    assert rank.wall_s == pytest.approx(report.ended_at_s - report.began_at_s, rel=1e-3)


def test_a_checkpoint_of_any_strategy_is_booked_as_one(tmp_path, monkeypatch):
    monkeypatch.setenv("HYPERPOD_EVENTS", str(tmp_path / "run"))
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=4,
        callbacks=[GoodputMonitor(), pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)],
        logger=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(Small(), loader(), loader())
    assert "save_checkpoint" not in vars(trainer)
    seconds = run_report(tmp_path / "run").ranks[0].seconds
    assert seconds["checkpoint_save"] > 0
    assert set(seconds) == {"setup", "data_wait", "step", "checkpoint_save", "other"}
