"""The figures of `GoodputMonitor` in TensorBoard, MLflow and W&B; each is skipped where its library is missing."""

import lightning.pytorch as pl
import pytest
import torch
from report import tracked

from hyperpod_plugins.lightning import GoodputMonitor


class Small(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def tensorboard(folder, monkeypatch):
    pytest.importorskip("tensorboard")
    from lightning.pytorch.loggers import TensorBoardLogger

    return TensorBoardLogger(folder), lambda: tracked.of_tensorboard(folder)


def mlflow(folder, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from lightning.pytorch.loggers import MLFlowLogger

    uri = f"file:{folder}/mlruns"
    return MLFlowLogger(tracking_uri=uri), lambda: tracked.of_mlflow(uri)


def wandb(folder, monkeypatch):
    library = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    from lightning.pytorch.loggers import WandbLogger

    logger = WandbLogger(save_dir=folder, offline=True, settings=library.Settings(console="off"))

    def read():
        library.finish()
        return tracked.of_wandb(folder, step_name="trainer/global_step")

    return logger, read


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("tracker", [tensorboard, mlflow, wandb])
def test_the_figures_are_in_the_tracker(tmp_path, monkeypatch, tracker):
    logger, read = tracker(tmp_path, monkeypatch)
    monkeypatch.delenv("HYPERPOD_EVENTS", raising=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=10,
        callbacks=[GoodputMonitor(every_num_steps=4)],
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(Small(), torch.utils.data.DataLoader(torch.ones(24, 4), batch_size=2))
    found = read()
    figures = {name.removeprefix("hyperpod/"): values for name, values in found.items() if name.startswith("hyperpod/")}
    assert set(figures) >= {"goodput", "ettr", "world_size", "generation", "seconds/setup", "seconds/step"}
    assert all(list(values) == [4, 8] for values in figures.values())
    assert all(0 < value < 1 for value in figures["goodput"].values())
    assert set(figures["ettr"].values()) == {1.0}
    assert set(figures["world_size"].values()) == {1.0}
    assert set(figures["generation"].values()) == {0.0}
    assert figures["seconds/step"][8] > figures["seconds/step"][4] > 0
    assert len(found["loss"]) == 10
