"""The Trainer reads exactly our order, resumes exactly where it stood, in a job of the same size and of another."""

import contextlib
import json
from collections import Counter
from itertools import chain
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from device import ACCELERATOR
from lightning.pytorch.utilities import CombinedLoader

from hyperpod_plugins.data import BatchSplit, ElasticSampler, StatefulLoader, sample_order, write_tokens
from hyperpod_plugins.errors import ConfigError, DatasetChanged
from hyperpod_plugins.lightning.datamodule import TokenDataConfig, TokenDataModule, refuse_early_ends

SEQUENCE = 4
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval.*"),
    pytest.mark.filterwarnings("ignore:.*The `srun` command is available.*"),
]


class Recorder(pl.LightningModule):
    """Records the sample ids of every batch; token 4 * i is the first of sample i."""

    def __init__(self, stop_after=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.stop_after = stop_after
        self.seen, self.validated, self.epochs, self.num_val_batches = [], [], [], 0

    def training_step(self, batch, batch_idx):
        assert torch.equal(batch["input_ids"][:, 1:], batch["labels"][:, :-1])
        self.seen.append((batch["input_ids"][:, 0] // SEQUENCE).tolist())
        self.epochs.append(self.current_epoch)
        return (self.weight - 1.0) ** 2

    def on_train_batch_end(self, *_):
        if self.stop_after is not None and len(self.seen) >= self.stop_after:
            self.trainer.save_checkpoint(self.trainer.default_root_dir + "/cut.ckpt")
            raise KeyboardInterrupt

    def validation_step(self, batch, batch_idx):
        self.num_val_batches += 1
        self.validated += (batch["input_ids"][:, 0] // SEQUENCE).tolist()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(folder, accumulate=1, **options):
    defaults = {
        "accelerator": ACCELERATOR, "devices": 1, "max_epochs": 3, "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "enable_checkpointing": False, "num_sanity_val_steps": 1,
    }  # fmt: skip
    return pl.Trainer(default_root_dir=str(folder), accumulate_grad_batches=accumulate, **defaults | options)


def module(folder, num_samples=42, num_val=13, global_batch_size=8, micro_batch_size=4, **options):
    for name, count in (("train", num_samples), ("val", num_val)):
        if not (folder / name).exists():
            write_tokens(folder / name, [np.arange(count * SEQUENCE + 1)], vocab_size=1000, progress=False)
    config = TokenDataConfig(
        sequence_length=SEQUENCE, global_batch_size=global_batch_size, micro_batch_size=micro_batch_size, **options
    )
    return TokenDataModule(folder / "train", folder / "val" if num_val else None, config=config)


def steps_of(num_epochs, num_samples=42, global_batch_size=8, seed=0):
    """The global batches of whole epochs, in order of position."""
    for epoch in range(num_epochs):
        order = sample_order(range(num_samples), num_samples=num_samples, seed=seed, epoch=epoch).tolist()
        for start in range(0, num_samples - global_batch_size + 1, global_batch_size):
            yield order[start : start + global_batch_size]


def expected(num_epochs, size=4):
    flat = [sample for step in steps_of(num_epochs) for sample in step]
    return [flat[start : start + size] for start in range(0, len(flat), size)]


@pytest.mark.slow_single
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.spawns)])
def test_three_epochs_are_exactly_ours(tmp_path, num_workers):
    recorder = Recorder()
    trainer(tmp_path, accumulate=2).fit(recorder, datamodule=module(tmp_path, num_workers=num_workers))
    assert recorder.seen == expected(3)
    assert Counter(recorder.validated[4:]) == Counter(list(range(13)) * 3)  # the first four are the sanity check


@pytest.mark.slow_single
@pytest.mark.parametrize(
    ("cut", "num_workers"),
    [(cut, 0) for cut in (1, 4, 7, 9, 10, 11, 13, 20, 29)]
    + [pytest.param(cut, 2, marks=pytest.mark.spawns) for cut in (7, 10, 13)],
)
def test_a_cut_anywhere_repeats_and_loses_nothing(tmp_path, cut, num_workers):
    """Ten batches an epoch; 10 and 20 are saved inside the last batch of an epoch, 7 and others inside a step."""
    first, second = Recorder(stop_after=cut), Recorder()
    with pytest.raises(SystemExit):
        trainer(tmp_path, accumulate=2).fit(first, datamodule=module(tmp_path, num_workers=num_workers))
    resumed = trainer(tmp_path, accumulate=2)
    resumed.fit(second, datamodule=module(tmp_path, num_workers=num_workers), ckpt_path=tmp_path / "cut.ckpt")
    assert first.seen + second.seen == expected(3)
    assert first.epochs + second.epochs == [0] * 10 + [1] * 10 + [2] * 10


class Stepper(Recorder):
    """Records the samples of each optimizer step, and after which of them it validates."""

    def __init__(self, stop_after=None):
        super().__init__(stop_after)
        self.steps, self.validations = [], []

    def on_before_optimizer_step(self, optimizer):
        self.steps.append(self.seen[sum(map(len, self.steps)) :])

    def on_validation_start(self):
        self.validations.append(len(self.steps))


@pytest.mark.slow_single
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [16, 4])
def test_another_global_batch_in_the_middle_of_an_epoch_begins_at_whole_steps(tmp_path, drop_last, size):
    """8 of 42 samples are learnt in steps of 8; the other 34 come in steps of another size, then a whole epoch."""
    first, second = Stepper(stop_after=2), Stepper()
    with pytest.raises(SystemExit):
        trainer(tmp_path, accumulate=2).fit(first, datamodule=module(tmp_path, drop_last=drop_last))
    resumed = trainer(tmp_path, accumulate=size // 4, max_epochs=2, num_sanity_val_steps=0)
    data = module(tmp_path, drop_last=drop_last, global_batch_size=size)
    resumed.fit(second, datamodule=data, ckpt_path=tmp_path / "cut.ckpt")
    rest, whole = ([count % size, 0][drop_last or not count % size] for count in (34, 42))
    sizes = [size] * (34 // size) + [rest] * bool(rest), [size] * (42 // size) + [whole] * bool(whole)
    assert [sum(map(len, step)) for step in second.steps] == sizes[0] + sizes[1]
    orders = [sample_order(range(42), num_samples=42, seed=0, epoch=epoch).tolist() for epoch in (0, 1)]
    learnt = [sample for batch in second.seen for sample in batch]
    assert learnt == orders[0][8 : 8 + sum(sizes[0])] + orders[1][: sum(sizes[1])]
    assert second.validations == [len(sizes[0]), len(sizes[0] + sizes[1])]


@pytest.mark.slow_single
@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({"max_epochs": 2}, {"max_epochs": 4}),
        ({"max_epochs": -1, "max_steps": 10}, {"max_epochs": -1, "max_steps": 20}),
        ({"max_epochs": -1, "max_steps": 13}, {"max_epochs": -1, "max_steps": 20}),
    ],
)
def test_continuing_a_finished_training_goes_on_with_the_next_samples(tmp_path, options, more):
    """13 steps end in the middle of an epoch, which Lightning then counts as finished."""
    first, second = Recorder(), Recorder()
    done = trainer(tmp_path, accumulate=2, **options)
    done.fit(first, datamodule=module(tmp_path))
    done.save_checkpoint(tmp_path / "end.ckpt")
    trainer(tmp_path, accumulate=2, **more).fit(second, datamodule=module(tmp_path), ckpt_path=tmp_path / "end.ckpt")
    assert first.seen + second.seen == expected(4)


@pytest.mark.slow_single
@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided.*")
def test_a_checkpoint_after_validation_goes_on_with_the_next_epoch(tmp_path):
    checkpoint = pl.callbacks.ModelCheckpoint(
        dirpath=tmp_path / "checkpoints", save_top_k=-1, filename="{epoch}", save_on_train_epoch_end=False
    )
    first = Recorder()
    trainer(tmp_path, accumulate=2, max_epochs=2, enable_checkpointing=True, callbacks=[checkpoint]).fit(
        first, datamodule=module(tmp_path)
    )
    second = Recorder()
    trainer(tmp_path, accumulate=2, max_epochs=2).fit(
        second, datamodule=module(tmp_path), ckpt_path=tmp_path / "checkpoints" / "epoch=0.ckpt"
    )
    assert first.seen[:10] + second.seen == expected(2)


@pytest.mark.slow_single
def test_limited_and_overfitted_epochs(tmp_path):
    limited = Recorder()
    trainer(tmp_path, accumulate=2, max_epochs=2, limit_train_batches=4).fit(limited, datamodule=module(tmp_path))
    assert limited.seen == expected(2)[:4] + expected(2)[10:14]


@pytest.mark.slow_single
@pytest.mark.parametrize("cut", [3, 4, 5, 8, 9])
@pytest.mark.parametrize("limit", [4, 0.45])
def test_a_cut_in_epochs_that_a_limit_ends(tmp_path, cut, limit):
    """4 of 10 batches; 4 and 8 are saved inside the last batch of an epoch."""
    first, second = Recorder(stop_after=cut), Recorder()
    with pytest.raises(SystemExit):
        trainer(tmp_path, accumulate=2, limit_train_batches=limit).fit(first, datamodule=module(tmp_path))
    resumed = trainer(tmp_path, accumulate=2, limit_train_batches=limit)
    resumed.fit(second, datamodule=module(tmp_path), ckpt_path=tmp_path / "cut.ckpt")
    assert first.seen + second.seen == [batch for start in (0, 10, 20) for batch in expected(3)[start : start + 4]]
    assert first.epochs + second.epochs == [0] * 4 + [1] * 4 + [2] * 4


@pytest.mark.slow_single
@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided.*")
@pytest.mark.parametrize("on_epoch_end", [False, True])
def test_a_checkpoint_after_an_epoch_that_a_limit_has_ended(tmp_path, on_epoch_end):
    checkpoint = pl.callbacks.ModelCheckpoint(
        dirpath=tmp_path / "checkpoints", save_top_k=-1, filename="{epoch}", save_on_train_epoch_end=on_epoch_end
    )
    options = {"accumulate": 2, "max_epochs": 2, "limit_train_batches": 4}
    first, second = Recorder(), Recorder()
    trainer(tmp_path, **options, enable_checkpointing=True, callbacks=[checkpoint]).fit(
        first, datamodule=module(tmp_path)
    )
    trainer(tmp_path, **options).fit(
        second, datamodule=module(tmp_path), ckpt_path=tmp_path / "checkpoints" / "epoch=0.ckpt"
    )
    assert first.seen[:4] + second.seen == expected(2)[:4] + expected(2)[10:14]


class Pairs(pl.LightningModule):
    """Records the sample ids of two loaders."""

    def __init__(self, stop_after=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen, self.stop_after = [], stop_after

    def training_step(self, batch, index):
        self.seen.append([(each["input_ids"][:, 0] // SEQUENCE).tolist() for each in batch])
        return (self.weight - 1.0) ** 2

    def on_train_batch_end(self, *_):
        if len(self.seen) == self.stop_after:
            self.trainer.save_checkpoint(self.trainer.default_root_dir + "/cut.ckpt")
            raise KeyboardInterrupt

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Several(pl.LightningDataModule):
    """Loaders of several token files."""

    def __init__(self, modules, mode):
        super().__init__()
        self.modules, self.mode = modules, mode

    def train_dataloader(self):
        for each in self.modules:
            each.trainer = self.trainer
        loaders = [each.train_dataloader() for each in self.modules]
        return CombinedLoader(loaders, self.mode) if self.mode else loaders


def several(folder, mode, *numbers_of_samples):
    modules = []
    for number in numbers_of_samples:
        (folder / str(number)).mkdir(exist_ok=True)
        modules.append(module(folder / str(number), num_samples=number, num_val=0))
    return Several(modules, mode)


@pytest.mark.slow_single
@pytest.mark.parametrize(
    ("mode", "numbers", "limit"),
    [
        ("min_size", (42, 26), None),
        ("min_size", (26, 42), None),
        ("", (42, 41), None),  # five steps each
        ("max_size_cycle", (26, 42), 4),  # ended before the shorter one is
    ],
)
def test_several_loaders_are_cut_anywhere(tmp_path, mode, numbers, limit):
    options = {"accumulate": 2, "max_epochs": 2, "limit_train_batches": limit}
    whole = Pairs()
    trainer(tmp_path, **options).fit(whole, datamodule=several(tmp_path, mode, *numbers))
    per_epoch = len(whole.seen) // 2
    for cut in (1, per_epoch - 1, per_epoch, per_epoch + 1):
        first, second = Pairs(stop_after=cut), Pairs()
        with pytest.raises(SystemExit):
            trainer(tmp_path, **options).fit(first, datamodule=several(tmp_path, mode, *numbers))
        trainer(tmp_path, **options).fit(
            second, datamodule=several(tmp_path, mode, *numbers), ckpt_path=tmp_path / "cut.ckpt"
        )
        assert first.seen + second.seen == whole.seen


@pytest.mark.slow_single
@pytest.mark.parametrize("mode", ["", "max_size_cycle", "max_size"])
def test_loaders_that_end_before_an_epoch_does(tmp_path, mode):
    with pytest.raises(ConfigError, match=rf'of 6, 10 batches, in the mode "{mode or "max_size_cycle"}"'):
        trainer(tmp_path, accumulate=2).fit(Pairs(), datamodule=several(tmp_path, mode, 26, 42))


@pytest.mark.parametrize(
    ("mode", "lengths", "limits", "refused"),
    [
        ("min_size", (8, 4), None, "an epoch ends after 4 batches"),
        ("max_size_cycle", (8, 8), None, ""),
        ("max_size_cycle", (8, 8), [2, 2], "an epoch ends after 2 batches .* but a StatefulLoader for training has 8"),
        ("max_size", (8, 4), None, "the one of 4 ends before the epoch of 8"),
        ("max_size_cycle", (8,), [2], "an epoch ends after 2 batches"),
        ("max_size_cycle", (8,), [8], ""),
        ("max_size_cycle", (8,), None, ""),
    ],
)
def test_stateful_loaders_that_do_not_know_the_trainer(mode, lengths, limits, refused):
    split = BatchSplit(global_batch_size=4, micro_batch_size=4, data_world_size=1)
    loaders = [StatefulLoader(range(4 * each), ElasticSampler(4 * each, split)) for each in lengths]
    combined = SimpleNamespace(flattened=loaders, limits=limits, _mode=mode)
    with pytest.raises(ConfigError, match=refused) if refused else contextlib.nullcontext():
        refuse_early_ends(SimpleNamespace(fit_loop=SimpleNamespace(_combined_loader=combined)))


def fit_ranks(folder, accumulate, stop_after=None, ckpt_path=None):
    """On every rank: the batches it was given."""
    import warnings

    warnings.filterwarnings("ignore")
    recorder = Recorder(stop_after)
    job = trainer(folder, accumulate, devices=2, strategy="ddp")
    with contextlib.suppress(SystemExit):
        job.fit(recorder, datamodule=module(folder), ckpt_path=ckpt_path)
    return recorder.seen, recorder.validated, recorder.num_val_batches


def merge(seen_by_rank):
    """One list a micro-step, in order of position."""
    return [list(chain.from_iterable(parts)) for parts in zip(*seen_by_rank, strict=True)]


@pytest.mark.spawns
def test_two_ranks_share_every_global_batch_and_all_validation_samples(run_ranks, tmp_path):
    module(tmp_path)
    results = run_ranks(fit_ranks, tmp_path, 1, world_size=2, timeout_s=90)
    assert merge([seen for seen, _, _ in results]) == expected(3, size=8)
    once = Counter({sample: 3 for sample in range(13)})
    sanity = Counter(range(6))  # the first micro-step of both ranks
    assert Counter(results[0][1] + results[1][1]) == once + sanity
    assert results[0][2] == results[1][2] == 1 + 3 * 2


@pytest.mark.spawns
@pytest.mark.parametrize("cut", [3, 7])
def test_a_checkpoint_of_one_rank_goes_on_with_two(run_ranks, tmp_path, cut):
    """A step that was torn (cut 3 and 7: two micro-batches a step) is run again, whole."""
    first = Recorder(stop_after=cut)
    with pytest.raises(SystemExit):
        trainer(tmp_path, accumulate=2).fit(first, datamodule=module(tmp_path))
    results = run_ranks(fit_ranks, tmp_path, 1, None, tmp_path / "cut.ckpt", world_size=2, timeout_s=90)
    finished = expected(3, size=8)[: cut // 2]
    assert finished + merge([seen for seen, _, _ in results]) == expected(3, size=8)


@pytest.mark.spawns
def test_a_checkpoint_of_two_ranks_goes_on_with_one(run_ranks, tmp_path):
    module(tmp_path)
    results = run_ranks(fit_ranks, tmp_path, 1, 7, world_size=2, timeout_s=90)
    before = merge([seen for seen, _, _ in results])
    after = Recorder()
    trainer(tmp_path, accumulate=2).fit(after, datamodule=module(tmp_path), ckpt_path=tmp_path / "cut.ckpt")
    assert list(chain(*before, *after.seen)) == list(chain(*expected(3)))


@pytest.mark.slow_single
def test_the_wrong_accumulation_is_refused_with_the_right_number(tmp_path):
    with pytest.raises(ConfigError, match=r"accumulate_grad_batches=2\)"):
        trainer(tmp_path, accumulate=1).fit(Recorder(), datamodule=module(tmp_path))


@pytest.mark.slow_single
def test_a_checkpoint_of_other_data_is_refused(tmp_path):
    (tmp_path / "other").mkdir()
    first = Recorder(stop_after=3)
    with pytest.raises(SystemExit):
        trainer(tmp_path, accumulate=2).fit(first, datamodule=module(tmp_path))
    with pytest.raises(DatasetChanged, match="num_samples was 42 and is 40"):
        trainer(tmp_path, accumulate=2).fit(
            Recorder(), datamodule=module(tmp_path / "other", num_samples=40), ckpt_path=tmp_path / "cut.ckpt"
        )


@pytest.mark.slow_single
@pytest.mark.filterwarnings("ignore:.*defined a `validation_step` but have no `val_dataloader`.*")
def test_training_without_validation_file(tmp_path):
    recorder = Recorder()
    trainer(tmp_path, accumulate=2, max_epochs=1).fit(recorder, datamodule=module(tmp_path, num_val=0))
    assert recorder.seen == expected(1)
    assert recorder.validated == []


def test_loaders_need_a_trainer(tmp_path):
    with pytest.raises(ConfigError, match="has no Trainer yet"):
        module(tmp_path).train_dataloader()


@pytest.mark.slow_single
def test_the_saved_state_is_plain_data(tmp_path):
    with pytest.raises(SystemExit):
        trainer(tmp_path, accumulate=2).fit(Recorder(stop_after=4), datamodule=module(tmp_path))
    saved = torch.load(tmp_path / "cut.ckpt", weights_only=True)
    [state] = saved["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    assert json.loads(json.dumps(state))["position"] == 16
