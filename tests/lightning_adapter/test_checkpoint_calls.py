"""Checkpoint callbacks that a fault has interrupted at the end of a batch."""

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from device import ACCELERATOR

from hyperpod_plugins.errors import PeerLost
from hyperpod_plugins.lightning.checkpoint_calls import BATCH_END, CheckpointCalls
from hyperpod_plugins.lightning.reentry import finish_batch_end
from hyperpod_plugins.lightning.saving_hooks import SavingHooks
from hyperpod_plugins.lightning.trainer_state import describe_trainer, read_trainer


class Module(pl.LightningModule):
    def __init__(self, loss=0.0):
        super().__init__()
        self.layer, self.loss = torch.nn.Linear(2, 1), loss

    def training_step(self, batch, index):
        self.log("loss", self.loss + index)
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Calls(pl.Callback):
    """Keeps the states before each batch's last hooks, and loses the peers in the save after one step."""

    def __init__(self, calls, lost_at):
        self.calls, self.lost_at = calls, lost_at

    def setup(self, trainer, module, stage):
        save = trainer.save_checkpoint

        def lose(path, *args):
            if trainer.global_step == self.lost_at:
                self.calls.note_path(str(path), str(path))
                self.before = dict(vars(trainer.checkpoint_callback))
                raise PeerLost("a test has lost them")
            return save(path, *args)

        trainer.save_checkpoint = lose

    def on_before_zero_grad(self, trainer, *_):
        self.calls.keep(trainer)


@pytest.fixture
def alone(tmp_path):
    """The process group that callbacks agree in, of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/../store-{tmp_path.name}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def interrupted(tmp_path, alone):
    """A fit that ended in the save after two steps, and what its `CheckpointCalls` are told."""

    def run(**saves):
        calls = CheckpointCalls()
        saving = pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}-{loss}", every_n_train_steps=1, **saves)
        watch = Calls(calls, lost_at=2)
        trainer = pl.Trainer(
            accelerator=ACCELERATOR,
            max_steps=4,
            callbacks=[watch, saving],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        with pytest.raises(PeerLost) as caught:
            trainer.fit(Module(), torch.utils.data.DataLoader(torch.zeros(4, 2)))
        left_out = finish_batch_end(trainer, caught.value)
        assert list(left_out.checkpoints) == [saving]
        assert not left_out.incomplete
        del trainer.save_checkpoint
        calls.put_back(left_out.checkpoints)
        return calls, trainer, saving

    return run


def test_the_callback_is_as_before_its_call_and_what_it_had_begun_is_pending(interrupted, tmp_path):
    calls, _, saving = interrupted()
    assert saving.best_model_path == str(tmp_path / "step=1-loss=0.0.ckpt")
    assert calls.pending == (str(tmp_path / "step=2-loss=1.0.ckpt"), BATCH_END)


def test_the_call_is_made_with_what_was_shown_then(interrupted, tmp_path):
    calls, trainer, saving = interrupted(save_top_k=1)
    saved = []

    def save(path, weights_only):
        saved.append((path, weights_only))
        Path(path).touch()
        return path

    calls.finish(trainer, calls.pending, {"loss": 7.5}, save)
    assert saved == [(str(tmp_path / "step=2-loss=7.5.ckpt"), False)]
    assert [path.name for path in tmp_path.iterdir()] == ["step=2-loss=7.5.ckpt"]
    assert saving._last_global_step_saved == 2
    calls.repaired()
    assert BATCH_END not in calls.pending


def test_a_file_that_was_begun_is_overwritten(interrupted, tmp_path):
    calls, trainer, _ = interrupted(save_top_k=-1)
    (tmp_path / "step=2-loss=1.0.ckpt").touch()
    saved = []
    calls.finish(trainer, calls.pending, {"loss": 1.0}, lambda path, _: saved.append(path) or path)
    assert saved == [str(tmp_path / "step=2-loss=1.0.ckpt")]


def test_another_file_of_that_name_is_not(interrupted, tmp_path):
    calls, trainer, _ = interrupted(save_top_k=-1)
    (tmp_path / "step=2-loss=3.0.ckpt").touch()
    saved = []
    calls.finish(trainer, calls.pending, {"loss": 3.0}, lambda path, _: saved.append(path) or path)
    assert saved == [str(tmp_path / "step=2-loss=3.0-v1.ckpt")]


def test_a_callback_that_others_have_seen_end_does_nothing_more(interrupted):
    calls, trainer, saving = interrupted()
    saving._last_global_step_saved = 2  # of the description that all ranks have entered with
    calls.finish(trainer, calls.pending, {"loss": 1.0}, lambda *_: pytest.fail("it saves"))


def test_a_second_fault_leaves_the_callback_as_before(interrupted):
    calls, trainer, saving = interrupted()
    before = saving.state_dict()

    def lose(path, weights_only):
        raise PeerLost("again")

    with pytest.raises(PeerLost):
        calls.finish(trainer, calls.pending, {"loss": 1.0}, lose)
    assert saving.state_dict() == before
    assert BATCH_END in calls.pending
    assert "save_checkpoint" not in vars(trainer)


def test_the_next_commit_forgets_all(interrupted):
    calls, trainer, saving = interrupted()
    calls.finish(trainer, calls.pending, {"loss": 1.0}, lambda path, _: path)
    calls.keep(trainer)
    assert calls.pending == ()
    assert "file_exists" not in vars(saving)


def test_what_is_described_has_the_paths_of_rank_0(tmp_path):
    saving = pl.callbacks.ModelCheckpoint(tmp_path, save_top_k=2, monitor="loss")
    trainer = pl.Trainer(
        accelerator=ACCELERATOR,
        max_steps=1,
        callbacks=[saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.zeros(1, 2)))
    own = saving.best_model_path
    calls = CheckpointCalls()
    calls.note_path(own, "shared")
    data = describe_trainer(trainer, micro_steps_open=0, loader_states=[], hooks=SavingHooks(), paths=calls.shared)
    described = read_trainer(data)
    state = described["callbacks"][saving.state_key]
    assert state["best_model_path"] == "shared"
    assert list(state["best_k_models"]) == ["shared"]
    assert described["hyperpod:saved_at"][0]["_last_checkpoint_saved"] == "shared"
    assert saving.best_model_path == own  # a callback compares its own names


def test_a_link_that_was_made_is_written_again(tmp_path):
    saving = pl.callbacks.ModelCheckpoint(tmp_path, save_last="link")
    trainer = pl.Trainer(accelerator=ACCELERATOR, callbacks=[saving], logger=False)
    calls = CheckpointCalls()
    calls.keep(trainer)
    saving.last_model_path = "last.ckpt"
    calls.put_back([saving])
    assert saving.last_model_path == ""
    assert calls.pending == ("last.ckpt", BATCH_END)


def test_a_scheduler_that_a_fault_interrupts_costs_this_rank_its_state():
    class Sums(Module):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step"}]

        def lr_scheduler_step(self, scheduler, metric):
            raise PeerLost("in a collective")

    trainer = pl.Trainer(
        accelerator=ACCELERATOR,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(PeerLost) as caught:
        trainer.fit(Sums(), torch.utils.data.DataLoader(torch.zeros(4, 2)))
    assert "scheduler was interrupted" in finish_batch_end(trainer, caught.value).incomplete
