"""The way back to Lightning: single files, exported or written by the strategy, are read without this package."""

import os
import shutil
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from device import ACCELERATOR
from harness import run_ranks
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from hyperpod_plugins.errors import CheckpointError
from hyperpod_plugins.lightning import HyperPodStrategy
from hyperpod_plugins.parallel import CheckpointWriter
from hyperpod_plugins.parallel.checkpoint import save_load
from hyperpod_plugins.parallel.checkpoint.export import export_checkpoint
from hyperpod_plugins.parallel.checkpoint.single_file import shards_path, with_shards, write_single_file
from hyperpod_plugins.recovery.protocols import RESHARD

EPOCH = 8


class Module(L.LightningModule):
    def __init__(self, width=8):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(7)
        self.net = nn.Sequential(
            nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
        )

    def training_step(self, rows, _):
        return nn.functional.mse_loss(self.net(rows), rows.flip(-1))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self):
        return DataLoader(torch.rand(32, 4, generator=torch.Generator().manual_seed(2)), batch_size=4)


def fit(folder, num_steps, *, strategy="auto", resume=None, is_averaged=False, callbacks=()):
    """Every rank reads all samples, so that the gradients are those of one process."""
    trainer = L.Trainer(
        accelerator=ACCELERATOR,
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy=strategy,
        max_steps=num_steps,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[*callbacks, *([EMAWeightAveraging(decay=0.9)] if is_averaged else [])],
    )
    module = Module()
    trainer.fit(module, ckpt_path=resume)
    return trainer, module


def save_sharded(folder, num_steps, is_averaged):
    strategy = HyperPodStrategy(hybrid_shard_degree=2, block_classes=("Linear",))
    trainer, _ = fit(folder, num_steps, strategy=strategy, is_averaged=is_averaged)
    trainer.save_checkpoint(folder / "sharded.ckpt")
    again = HyperPodStrategy(hybrid_shard_degree=1)
    resumed, _ = fit(
        folder, num_steps + 1, strategy=again, resume=f"hyperpod://{folder / 'sharded.ckpt'}", is_averaged=is_averaged
    )
    assert resumed.global_step == num_steps + 1


@pytest.mark.spawns
@pytest.mark.parametrize("is_averaged", [False, True])
def test_another_strategy_continues_where_this_one_has_saved(tmp_path, is_averaged):
    run_ranks(save_sharded, tmp_path, EPOCH, is_averaged, world_size=2, timeout_s=120.0)
    export_checkpoint(tmp_path / "sharded.ckpt", tmp_path / "one.ckpt", "lightning")
    url = f"hyperpod://{tmp_path / 'sharded.ckpt'}"
    loaded = Module.load_from_checkpoint(url)
    exported = Module.load_from_checkpoint(tmp_path / "one.ckpt").state_dict()
    assert all(torch.equal(value, exported[name]) for name, value in loaded.state_dict().items())
    whole, known = fit(tmp_path, EPOCH, is_averaged=is_averaged)
    whole.save_checkpoint(tmp_path / "plain.ckpt")
    wanted = Module.load_from_checkpoint(tmp_path / "plain.ckpt")
    assert loaded.hparams == wanted.hparams == known.hparams
    for name, value in wanted.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value, rtol=1e-5, atol=1e-7)
    reference, continued = fit(tmp_path, EPOCH + 3, resume=tmp_path / "plain.ckpt", is_averaged=is_averaged)
    for opened in (tmp_path / "one.ckpt", url):
        trainer, resumed = fit(tmp_path, EPOCH + 3, resume=opened, is_averaged=is_averaged)
        assert trainer.global_step == reference.global_step == EPOCH + 3
        assert trainer.optimizers[0].param_groups[0]["lr"] == reference.optimizers[0].param_groups[0]["lr"]
        for name, value in continued.state_dict().items():
            torch.testing.assert_close(resumed.state_dict()[name], value, rtol=1e-5, atol=1e-7)


class RankCounter(L.Callback):
    """State that differs from rank to rank, which no single file has."""

    state_key = "rank counter"

    def __init__(self):
        self.seen = 0.0

    def on_train_batch_end(self, trainer, *_):
        self.seen += 1 + 100 * trainer.global_rank

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def fit_with_files(folder, num_steps, *, strategy="auto", resume=None):
    kept = ModelCheckpoint(
        folder / "kept", filename="{step}", every_n_train_steps=2, save_top_k=2, monitor="step", mode="max",
        save_last="link",
    )  # fmt: skip
    counter = RankCounter()
    trainer, module = fit(folder, num_steps, strategy=strategy, resume=resume, callbacks=[kept, counter])
    return trainer, module, counter


def whole_state(module):
    return {
        name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in module.state_dict().items()
    }


def train_and_resume(folder, in_background):
    def strategy():
        return HyperPodStrategy(
            hybrid_shard_degree=2,
            block_classes=("Linear",),
            save_distributed_checkpoint=False,
            background_checkpoints=in_background,
        )

    trainer, module, counter = fit_with_files(folder, EPOCH, strategy=strategy())
    rank, best = trainer.global_rank, trainer.checkpoint_callback.best_model_path
    state = whole_state(module)
    if rank == 1:  # it neither wrote the file nor has the others' help in reading it
        loaded = Module.load_from_checkpoint(best).state_dict()
        assert all(torch.equal(value, state[name]) for name, value in loaded.items())
    trainer.strategy.barrier()
    kept = sorted(each.name for each in (folder / "kept").iterdir())
    assert kept == [".step=6.ckpt.shards", ".step=8.ckpt.shards", "last.ckpt", "step=6.ckpt", "step=8.ckpt"]
    assert counter.seen == EPOCH * (1 + 100 * rank)
    resumed, module, counter = fit_with_files(folder, EPOCH, strategy=strategy(), resume=folder / "kept" / "last.ckpt")
    assert resumed.global_step == EPOCH
    assert counter.seen == EPOCH * (1 + 100 * rank)
    assert all(torch.equal(value, state[name]) for name, value in whole_state(module).items())
    trainer.strategy.barrier()
    if rank == 0:
        shutil.rmtree(shards_path(folder / "kept" / "step=8.ckpt"))
    trainer.strategy.barrier()
    alone, module, counter = fit_with_files(folder, EPOCH, strategy=strategy(), resume=folder / "kept" / "last.ckpt")
    assert alone.global_step == EPOCH
    assert counter.seen == EPOCH  # of the first rank, as in every checkpoint of Lightning's own
    assert all(torch.equal(value, state[name]) for name, value in whole_state(module).items())


@pytest.mark.spawns
@pytest.mark.parametrize("in_background", [False, True])
def test_a_trainer_s_checkpoints_are_files(tmp_path, in_background):
    run_ranks(train_and_resume, tmp_path, in_background, world_size=2, timeout_s=180.0)
    reference, known = fit(tmp_path / "plain", EPOCH + 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the folder that exists
        trainer, module, _ = fit_with_files(tmp_path, EPOCH + 3, resume=tmp_path / "kept" / "step=8.ckpt")
    assert trainer.global_step == reference.global_step == EPOCH + 3
    assert trainer.optimizers[0].param_groups[0]["lr"] == reference.optimizers[0].param_groups[0]["lr"]
    for name, value in known.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-5, atol=1e-7)


@contextmanager
def trained_alone(folder):
    """A Trainer of one process that has trained two steps, with its checkpoint as a file."""
    trainer, _, _ = fit_with_files(folder, 2, strategy=HyperPodStrategy(save_distributed_checkpoint=False))
    try:
        yield trainer, folder / "kept" / "step=2.ckpt"
    finally:
        dist.destroy_process_group()


@pytest.fixture
def one_rank(tmp_path):
    with trained_alone(tmp_path) as found:
        yield found


def test_a_file_belongs_to_its_folder_only_with_the_contents_that_were_written_with_it(one_rank):
    trainer, file = one_rank
    folder = shards_path(file)
    assert with_shards(file) == with_shards(file.with_name("last.ckpt")) == folder
    content = file.read_bytes()
    torch.save(torch.load(file, weights_only=True) | {"global_step": 3}, file)
    assert with_shards(file) == file
    file.write_bytes(content)
    assert with_shards(file) == folder
    folder.chmod(0o775)  # others may have put it there
    assert with_shards(file) == file
    folder.chmod(0o755)
    for damaged in (b"not an archive", content[: len(content) // 2], b""):
        file.write_bytes(damaged)
        assert with_shards(file) == file
    trainer.save_checkpoint(file)  # what is damaged is replaced like any other
    assert with_shards(file) == folder
    file.unlink()
    assert with_shards(file) == folder  # the process was lost before it could write the file
    file.with_name(".step=2.ckpt.old").mkdir()  # what an interrupted save of a folder leaves
    assert with_shards(file) == file


def test_a_process_that_is_lost_between_folder_and_file(one_rank, monkeypatch):
    trainer, file = one_rank
    before = file.read_bytes()

    def lost(*args, **kwargs):
        raise SystemExit

    trainer.lightning_module.net[0].weight.data.add_(1.0)
    with monkeypatch.context() as patched:
        patched.setattr("hyperpod_plugins.lightning.checkpoint_io.write_single_file", lost)
        with pytest.raises(SystemExit):
            trainer.save_checkpoint(file)
    assert file.read_bytes() == before
    assert with_shards(file) == shards_path(file)  # the newer one
    other = file.with_name("other.ckpt")
    trainer.save_checkpoint(other)
    assert file.read_bytes() != before  # what was missing is written with the next one
    weights = [torch.load(each, weights_only=True)["state_dict"]["net.0.weight"] for each in (file, other)]
    assert torch.equal(*weights)
    trainer.strategy.remove_checkpoint(file)
    trainer.strategy.remove_checkpoint(other)
    assert {each.name for each in file.parent.iterdir()} == {"last.ckpt"}


def test_checkpoints_for_a_restart_stay_folders_and_later_ones_are_files(one_rank):
    trainer, file = one_rank
    strategy = trainer.strategy
    saved = strategy._save_for_recovery(trainer._checkpoint_connector.dump_checkpoint(), RESHARD, False)
    assert Path(saved).is_dir()
    with strategy._checkpoints.not_of_program():
        trainer.save_checkpoint(file.with_name("internal"))
    assert file.with_name("internal").is_dir()
    trainer.save_checkpoint(file.with_name("later.ckpt"))
    assert file.with_name("later.ckpt").is_file()


def test_a_checkpoint_that_is_being_written_is_complete_before_it_is_read(one_rank, monkeypatch):
    trainer, file = one_rank
    trainer.strategy._checkpoints._in_background = True
    wanted = trainer.lightning_module.net[0].weight.full_tensor().clone() + 1.0

    def slowly(*args, **kwargs):
        time.sleep(1.0)
        write_single_file(*args, **kwargs)

    monkeypatch.setattr("hyperpod_plugins.lightning.checkpoint_io.write_single_file", slowly)
    with torch.no_grad():
        trainer.lightning_module.net[0].weight.add_(1.0)
    trainer.save_checkpoint(file)
    with torch.no_grad():
        trainer.lightning_module.net[0].weight.zero_()
    trainer.strategy.load_checkpoint(file)
    assert torch.equal(trainer.lightning_module.net[0].weight.full_tensor(), wanted)
    trainer.strategy._checkpoints.close()


@pytest.mark.parametrize("mask", [0o002, 0o000])
def test_a_restart_trusts_the_folder_whatever_others_may_write(tmp_path, mask):
    before = os.umask(mask)
    try:
        with trained_alone(tmp_path) as (_, file):
            folder = shards_path(file)
    finally:
        os.umask(before)
    assert not [each.name for each in (folder, *folder.iterdir()) if each.stat().st_mode & 0o022]


def act_slowly_and_wrongly(folder):
    dist.init_process_group("gloo")
    save_load._TELL_S = 0.5  # much less than the timeout, also on a slow machine
    writer = CheckpointWriter(timeout_s=10.0)
    model = torch.nn.Linear(2, 2)
    writer.save(folder / "some", model=model)
    done = folder / "done"
    writer.when_written_by_first("it is not done", lambda: (time.sleep(12.0), done.touch()))  # longer than the timeout
    assert done.exists()
    with pytest.raises(CheckpointError, match="it is not done"):
        writer.when_written_by_first("it is not done", lambda: done.rename(folder / "absent" / "there"))
    writer.save(folder / "more", model=model)
    writer.close()
    dist.destroy_process_group()


@pytest.mark.spawns
def test_other_ranks_wait_for_the_first_one_as_long_as_it_takes(tmp_path):
    run_ranks(act_slowly_and_wrongly, tmp_path, world_size=2, timeout_s=120.0)
