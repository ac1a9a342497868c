"""The way back to Lightning: what `hyperpod export --to lightning` writes is read without this package's strategy."""

import lightning.pytorch as L
import pytest
import torch
from device import ACCELERATOR
from harness import run_ranks
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch.utils.data import DataLoader

from hyperpod_plugins.lightning import HyperPodStrategy
from hyperpod_plugins.parallel.checkpoint.export import export_checkpoint

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


def fit(folder, num_steps, *, strategy="auto", resume=None, is_averaged=False):
    """Every rank reads all samples, so that the gradients are those of one process."""
    trainer = L.Trainer(
        accelerator=ACCELERATOR,
        devices=1 if strategy == "auto" else 2,
        strategy=strategy,
        max_steps=num_steps,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[EMAWeightAveraging(decay=0.9)] if is_averaged else [],
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
