"""The samples that a step has read are in the ledger where they are certain, and nothing is where they are not."""

import os
import subprocess
import sys

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from hyperpod_plugins.data import write_tokens
from hyperpod_plugins.lightning import GoodputMonitor
from hyperpod_plugins.lightning.datamodule import TokenDataConfig, TokenDataModule
from hyperpod_plugins.report import run_report
from hyperpod_plugins.report.run_files import read_run

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*is not resumable.*"),
    pytest.mark.filterwarnings("ignore:.*dataloader_iter.*"),
    pytest.mark.filterwarnings("ignore:.*The `srun` command is available.*"),
]


class Counts(pl.LightningModule):
    """Counts the samples that it is given in each step."""

    def __init__(self, save_after=0):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.save_after, self.given = save_after, []

    def training_step(self, batch, batch_idx):
        if isinstance(batch, dict):
            batch = torch.ones(len(batch["input_ids"]), 4)
        self.given.append(len(batch))
        return self.layer(batch).square().mean()

    def on_train_batch_end(self, *_):
        if len(self.given) == self.save_after:
            self.trainer.save_checkpoint(self.trainer.default_root_dir + "/cut.ckpt")
            self.trainer.should_stop = True

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(folder, module, *, ckpt_path=None, accumulated=1, epochs=2, train=None, datamodule=None, events="run"):
    """Fit, and return what the ledger says of the samples of each step."""
    os.environ["HYPERPOD_EVENTS"] = str(folder / events)  # of the fixture's copy
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        accumulate_grad_batches=accumulated,
        callbacks=[GoodputMonitor()],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, train, datamodule=datamodule, ckpt_path=ckpt_path)
    return samples(folder / events)


def samples(folder, worker=0):
    [process] = [each for each in read_run(folder).workers if each.worker_id == worker]
    return [span.step.samples for span in process.spans if span.step is not None]


@pytest.fixture(autouse=True)
def environ(monkeypatch):
    monkeypatch.setenv("HYPERPOD_EVENTS", "")


def summed(given, num_batches, accumulated):
    """Sums over the steps of epochs of `num_batches`."""
    found = []
    for begin in range(0, len(given), num_batches):
        epoch = given[begin : begin + num_batches]
        found += [sum(epoch[index : index + accumulated]) for index in range(0, len(epoch), accumulated)]
    return found


@pytest.mark.parametrize("accumulated", [1, 5])
@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"drop_last": True}, {"num_workers": 1}])
def test_samples_of_an_ordinary_loader(tmp_path, options, accumulated):
    module = Counts()
    train = DataLoader(torch.ones(23, 4), batch_size=2, **options)
    found = fit(tmp_path, module, train=train, accumulated=accumulated)
    assert found == summed(module.given, len(train), accumulated)
    assert sum(found) == (44 if options.get("drop_last") else 46)
    assert run_report(tmp_path / "run").steps.samples[-1] == sum(found)


def test_an_ordinary_loader_begins_again_in_a_resumed_epoch(tmp_path):
    train = DataLoader(torch.ones(7, 4), batch_size=2)
    fit(tmp_path, Counts(save_after=2), train=train, events="first")
    module = Counts()
    found = fit(tmp_path, module, train=train, ckpt_path=tmp_path / "cut.ckpt")
    assert module.given == [2, 2, 2, 2, 2, 1]
    assert found == module.given


@pytest.mark.parametrize("cut", [0, 3])
def test_samples_of_a_token_file(tmp_path, cut):
    """15 samples in global batches of 6; the last step of an epoch has 3. It may be resumed within a step."""
    write_tokens(tmp_path / "train.tokens", [np.arange(4 * 15 + 1, dtype=np.uint16)], vocab_size=64)
    config = TokenDataConfig(sequence_length=4, global_batch_size=6, micro_batch_size=3, drop_last=False)
    data = lambda: TokenDataModule(tmp_path / "train.tokens", config=config)  # noqa: E731
    options = {"accumulated": 2, "epochs": 2}
    resumed = None
    if cut:
        fit(tmp_path, Counts(save_after=cut), datamodule=data(), events="first", **options)
        resumed = tmp_path / "cut.ckpt"
    module = Counts()
    found = fit(tmp_path, module, datamodule=data(), ckpt_path=resumed, **options)
    assert sum(found) == sum(module.given)
    assert found[-3:] == [6, 6, 3]
    assert len(found) == (6 if not cut else 5)


class OwnSampler(SequentialSampler):
    pass


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(6, 4))


class Items:
    def __iter__(self):
        return iter([ONES, ONES])

    def __len__(self):
        return 2


class OwnLoader(DataLoader):
    pass


class TakesIterator(Counts):
    def training_step(self, dataloader_iter):
        return super().training_step(next(dataloader_iter)[0], 0)


class TakesBoth(Counts):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch["a"], batch_idx)


class OwnBatches(BatchSampler):
    pass


ONES = torch.ones(6, 4)
UNCERTAIN = {
    "own sampler": lambda: DataLoader(ONES, batch_size=2, sampler=OwnSampler(ONES)),
    "own batch sampler": lambda: DataLoader(ONES, batch_sampler=OwnBatches(RandomSampler(ONES), 2, False)),
    "own loader": lambda: OwnLoader(ONES, batch_size=2),
    "stream": lambda: DataLoader(Stream(), batch_size=2),
    "not batched": lambda: DataLoader(ONES, batch_size=None),
    "no loader": lambda: Items(),
    "several": lambda: CombinedLoader({"a": DataLoader(ONES), "b": DataLoader(ONES)}, "min_size"),
    "iterator": lambda: DataLoader(ONES, batch_size=2),
}
MODULES = {"iterator": TakesIterator, "several": TakesBoth}


@pytest.mark.parametrize("kind", UNCERTAIN)
def test_what_is_not_certain_is_not_written(tmp_path, kind):
    found = fit(tmp_path, MODULES.get(kind, Counts)(), train=UNCERTAIN[kind]())
    assert found
    assert set(found) == {None}
    steps = run_report(tmp_path / "run").steps
    assert set(steps.samples) == {None}
    assert set(steps.global_batch) == {None}


PROGRAM = """
import warnings
warnings.filterwarnings("ignore")
import lightning.pytorch as pl, torch
from torch.utils.data import DataLoader
from hyperpod_plugins.lightning import GoodputMonitor

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

for is_distributed in (True, False):
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, callbacks=[GoodputMonitor()],
        use_distributed_sampler=is_distributed, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False)
    trainer.fit(Module(), DataLoader(torch.ones(25, 4), batch_size=2, shuffle=True))
"""


@pytest.mark.spawns
def test_ranks_read_different_samples_only_with_a_distributed_sampler(tmp_path):
    """Each of two ranks has 13 of 26 samples, of which one is read twice; then each reads all 25 in its own order."""
    (tmp_path / "program.py").write_text(PROGRAM)
    environ = {**os.environ, "HYPERPOD_EVENTS": str(tmp_path / "run"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        env=environ, timeout=300, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert [samples(tmp_path / "run", worker) for worker in range(2)] == [[4, 4, 4, 4, 4, 4, 2] + [None] * 13] * 2
