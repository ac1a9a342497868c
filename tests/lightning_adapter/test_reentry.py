"""How a fit is entered again after its last step, and what was logged in the epoch before."""

import io
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from device import ACCELERATOR
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torchmetrics import MeanMetric

from hyperpod_plugins.comm import group_health
from hyperpod_plugins.comm.runtime import runtime
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.errors import ConfigError, PeerLost, StateLost
from hyperpod_plugins.lightning import CheckpointlessRecovery, HyperPodStrategy
from hyperpod_plugins.lightning.local_state import LoggedMeans
from hyperpod_plugins.lightning.recovery import TrainerRecovery
from hyperpod_plugins.lightning.reentry import Reentry, install_part_hooks, remove_part_hooks, rest_of_epoch
from hyperpod_plugins.lightning.trainer_entries import entries
from hyperpod_plugins.lightning.trainer_state import prepare_loader_hooks
from hyperpod_plugins.recovery import Member, restart_all
from hyperpod_plugins.recovery.rng import EPOCH_BEGIN, EPOCH_END, EVALUATION_BEGIN, FIT_END


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.parts = nn.ModuleDict({"mean": MeanMetric()})

    def training_step(self, batch, index):
        return self.layer(batch).square().mean()

    def validation_step(self, batch, index):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(4, 4), batch_size=1)

    val_dataloader = train_dataloader


class Calls(pl.Callback):
    """Notes hooks in a list."""

    def __init__(self, calls):
        self.calls = calls

    def on_train_epoch_start(self, *_):
        self.calls.append("epoch start")

    def on_validation_start(self, *_):
        self.calls.append("validation start")

    def on_validation_end(self, *_):
        self.calls.append("validation end")

    def on_train_epoch_end(self, *_):
        self.calls.append("epoch end")

    def on_train_end(self, *_):
        self.calls.append("train end")


def trainer_with(*callbacks, **arguments):
    return pl.Trainer(
        accelerator=ACCELERATOR,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **arguments,
    )


@pytest.fixture
def make_recovery(monkeypatch):
    """Makes a `TrainerRecovery` for another entry into a fit, of a job of one rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = JobEnv(store_host="127.0.0.1", store_port=store.port, run_id="job")
    monkeypatch.setattr(entries, "member", None)
    monkeypatch.setattr(Member, "start", lambda member: None)
    monkeypatch.setattr(restart_all, "_FINAL_SAVE_S", 0.0)
    yield lambda: TrainerRecovery(CheckpointlessRecovery(), None, job, worker_id=0, world_size=1)
    runtime.reset()


def save_config(strategy, value):
    return strategy.broadcast(value)


def resolve_folder(strategy, value):
    return strategy.broadcast(value)


@pytest.mark.slow_single
def test_a_rank_that_enters_a_fit_again_gets_the_value_of_the_same_call(make_recovery):
    """It need not make all of the calls that it made the first time: `SaveConfigCallback` does not."""
    strategy = HyperPodStrategy()
    strategy._recovery = make_recovery()
    save_config(strategy, "config")
    assert [resolve_folder(strategy, value) for value in ("a", Path("b"))] == ["a", Path("b")]
    strategy._recovery = make_recovery()
    group_health.detach()
    assert [resolve_folder(strategy, "its own") for _ in range(2)] == ["a", Path("b")]
    with pytest.raises(StateLost, match=r"call 3 of strategy\.broadcast in .*test_reentry\.resolve_folder came before"):
        resolve_folder(strategy, "its own")


@pytest.mark.slow_single
def test_a_rank_that_has_lost_a_peer_broadcasts_nothing_of_its_own(make_recovery, monkeypatch):
    def broadcast(strategy, value, src):
        raise PeerLost("a test")

    monkeypatch.setattr(ModelParallelStrategy, "broadcast", broadcast)
    strategy = HyperPodStrategy()
    strategy._recovery = make_recovery()
    group_health.mark_broken("a test", lambda: None)
    with pytest.raises(PeerLost):
        strategy.broadcast("its own")
    with group_health.tolerate_breaks():
        assert strategy.broadcast("its own") == "its own"  # in a step that is discarded


@pytest.mark.slow_single
def test_a_loader_without_order_is_refused_for_training():
    trainer = trainer_with()
    loader = torch.utils.data.DataLoader(torch.ones(4, 4), num_workers=1, in_order=False)
    with pytest.raises(ConfigError, match="in_order=False"):
        rest_of_epoch(loader, 0, trainer)


class Stream:
    """A loader that does not know its length."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


def resumed_trainer():
    """In its first epoch, of unknown length."""
    epochs = SimpleNamespace(current=SimpleNamespace(processed=0))
    return SimpleNamespace(num_training_batches=float("inf"), fit_loop=SimpleNamespace(epoch_progress=epochs))


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("mode", ["max_size_cycle", "max_size", "min_size"])
def test_an_epoch_after_one_that_was_resumed_at_its_end_is_whole(mode, order):
    """With "min_size", the longer loader may not be asked for a batch in the epoch that the shorter one has ended."""
    loaders = [Stream("abc"), Stream(range(8))][::order]
    everything = [batch for batch, _, _ in CombinedLoader(loaders, mode)]
    trainer = resumed_trainer()
    combined = CombinedLoader([rest_of_epoch(each, len(everything), trainer) for each in loaders], mode)
    trainer.fit_loop._combined_loader = combined
    next(iter(combined), None)  # Lightning fetches a batch to learn whether there is one
    trainer.fit_loop.epoch_progress.current.processed = 1
    assert [batch for batch, _, _ in combined] == everything


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(("mode", "num_batches"), [("max_size_cycle", 8), ("max_size", 8), ("min_size", 3)])
def test_several_loaders_that_skip_what_is_done_go_on_as_they_would_have(mode, num_batches, order):
    """The shorter one is in its third round at the end, and where no loader has a length, the longer one must not
    begin again."""
    loaders = [Stream("abc"), Stream(range(8))][::order]
    everything = [batch for batch, _, _ in CombinedLoader(loaders, mode)]
    assert len(everything) == num_batches
    for num_done in range(num_batches):
        trainer = resumed_trainer()
        combined = CombinedLoader([rest_of_epoch(each, num_done, trainer) for each in loaders], mode)
        trainer.fit_loop._combined_loader = combined
        assert [batch for batch, _, _ in combined] == everything[num_done:]
        assert [batch for batch, _, _ in combined] == everything


def test_a_loader_with_nothing_to_skip_ends():
    trainer = resumed_trainer()
    trainer.fit_loop._combined_loader = CombinedLoader([rest_of_epoch(Stream(""), 2, trainer)], "max_size_cycle")
    assert list(trainer.fit_loop._combined_loader.flattened[0]) == []


def test_a_collection_of_loaders_stays_as_the_program_has_made_it():
    """Lightning writes the loaders of the present world into it."""
    loaders = torch.utils.data.DataLoader(torch.ones(4, 4)), torch.utils.data.DataLoader(torch.ones(4, 4))
    given, trainer = CombinedLoader({"one": loaders[0], "other": loaders[1]}, "min_size"), trainer_with()
    prepare_loader_hooks(trainer, None)
    for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop):
        loop._data_source.instance = given
        for _ in range(2):
            made = loop._data_source.dataloader()
            assert made.flattened == list(loaders)
            assert made._mode == "min_size"
            made.flattened = ["of this", "world"]
            assert made.iterables == {"one": "of this", "other": "world"}


def test_loader_hooks_draw_numbers_of_the_epoch_in_which_loaders_are_due():
    module, trainer = Module(), trainer_with(reload_dataloaders_every_n_epochs=1)
    module.train_dataloader = lambda: torch.rand(3).tolist()
    trainer.strategy.connect(module)
    module.trainer = trainer

    def drawn(key, epoch):
        torch.manual_seed(epoch)  # what was drawn before does not matter
        before = torch.get_rng_state()
        source = trainer.fit_loop._data_source
        source.instance, source.name = module, "train_dataloader"
        prepare_loader_hooks(trainer, key)
        trainer.fit_loop.epoch_progress.current.completed = epoch
        numbers = source.dataloader()
        assert key is None or torch.equal(torch.get_rng_state(), before)
        return numbers

    first, second = drawn((0, 1), 0), drawn((0, 1), 1)
    assert first == drawn((0, 1), 0) != second == drawn((0, 1), 1)
    assert first != drawn((0, 2), 0)
    assert drawn(None, 0) != first


@pytest.mark.slow_single
def test_parts_are_told_of_before_their_hooks_and_after_them():
    calls = []
    trainer = trainer_with(Calls(calls), max_epochs=2, num_sanity_val_steps=1)
    install_part_hooks(trainer, calls.append, lambda part: calls.append(f"{part} has ended"))
    trainer.fit(Module())
    evaluation = [EVALUATION_BEGIN, "validation start", "validation end", f"{EVALUATION_BEGIN} has ended"]
    first_hooks = [EPOCH_BEGIN, "epoch start", f"{EPOCH_BEGIN} has ended"]
    epoch = [*first_hooks, *evaluation, EPOCH_END, "epoch end", f"{EPOCH_END} has ended"]
    assert calls == [*evaluation, *epoch, *epoch, FIT_END, "train end"]


def limits_of(trainer):
    return trainer.max_steps, trainer.max_epochs, trainer.should_stop


def functions_of(trainer):
    loop = trainer.fit_loop
    return {**vars(loop)}, {**vars(loop.epoch_loop)}


@pytest.mark.parametrize("part", [EVALUATION_BEGIN, EPOCH_END, FIT_END])
@pytest.mark.parametrize("is_watched", [False, True])
def test_a_fit_that_is_left_again_before_the_part_has_its_limits_and_functions(part, is_watched):
    trainer = trainer_with(max_steps=3, max_epochs=2)
    trainer.should_stop = True
    if is_watched:
        install_part_hooks(trainer, print, print)
    before, reentry = functions_of(trainer), Reentry()
    for _ in range(2):
        reentry.open(trainer, part, b"described")
        assert (reentry.part, reentry.description) == (part, b"described")
        assert limits_of(trainer) == (3, 2, True)  # until Lightning looks at them
        assert trainer.num_sanity_val_steps == 0
        assert functions_of(trainer) != before
        for _ in range(2):
            reentry.close()
            assert (reentry.part, reentry.description) == ("", b"")
            assert limits_of(trainer) == (3, 2, True)
            assert trainer.num_sanity_val_steps == 2
            assert functions_of(trainer) == before
    trainer.fit_loop.epoch_loop.max_steps = 7
    reentry.close()  # is over
    assert trainer.max_steps == 7


def test_nothing_is_done_for_a_step_or_an_epoch():
    trainer = trainer_with(max_steps=3)
    before = functions_of(trainer)
    reentry = Reentry()
    reentry.close()  # never opened
    reentry.open(trainer, "", b"described")
    assert reentry.description == b""  # which would be taken for the present one when the loops are left
    assert functions_of(trainer) == before
    reentry.close()
    assert functions_of(trainer) == before


def test_a_fit_that_has_ended_is_not_watched():
    trainer = trainer_with(max_steps=3)
    before, evaluation = functions_of(trainer), {**vars(trainer.fit_loop.epoch_loop.val_loop)}
    install_part_hooks(trainer, print, print)
    assert functions_of(trainer) != before
    remove_part_hooks(trainer)
    assert functions_of(trainer) == before
    assert vars(trainer.fit_loop.epoch_loop.val_loop) == evaluation


class Enters(pl.Callback):
    """Enters a fit that has reached its limits once more."""

    def __init__(self, part, calls):
        self.part, self.calls = part, calls
        self.reentry = Reentry()

    def setup(self, trainer, module, stage):
        trainer.should_stop = True
        self.reentry.open(trainer, self.part, b"")

    def on_train_start(self, trainer, module):
        self.calls.append(limits_of(trainer))

    def on_train_epoch_end(self, trainer, module):
        self.calls.append(limits_of(trainer))

    def on_train_end(self, trainer, module):
        self.calls.append(limits_of(trainer))


@pytest.mark.slow_single
@pytest.mark.parametrize(
    ("part", "wanted"),
    [
        ("", []),
        (EPOCH_END, ["epoch end", "train end"]),
        (FIT_END, ["train end"]),
    ],
)
def test_a_fit_that_has_reached_its_limits_runs_the_rest(part, wanted, tmp_path):
    path = tmp_path / "last.ckpt"

    class Saves(pl.Callback):
        """Saves where only that rest is left."""

        def on_train_epoch_end(self, trainer, module):
            if part == EPOCH_END:
                trainer.fit_loop.epoch_progress.total.processed -= 1
                trainer.fit_loop.epoch_progress.current.processed -= 1
                trainer.save_checkpoint(path)
                trainer.fit_loop.epoch_progress.total.processed += 1
                trainer.fit_loop.epoch_progress.current.processed += 1

        def on_train_end(self, trainer, module):
            if part != EPOCH_END:
                trainer.save_checkpoint(path)

    limits = {"max_steps": 8, "max_epochs": 2, "num_sanity_val_steps": 0}
    trainer_with(Saves(), **limits).fit(Module())
    calls = []
    trainer = trainer_with(Calls(calls), Enters(part, calls), **limits)
    trainer.fit(Module(), ckpt_path=path)
    assert [each for each in calls if isinstance(each, str)] == wanted
    assert limits_of(trainer) == (8, 2, True)
    assert [each for each in calls if isinstance(each, tuple)] == [(8, 2, True)] * (1 + len(wanted)) * bool(wanted)


def logged(module, *, only=(), weight=1.0, trainer=None):
    """A trainer whose training steps log in several ways."""
    trainer = trainer or trainer_with(max_epochs=1)
    results = trainer.fit_loop.epoch_loop._results
    trainer.fit_loop.epoch_progress.current.ready = 1
    epoch = {"on_step": False, "on_epoch": True, "sync_dist_fn": reduced}
    value = torch.tensor(weight)
    ways = {
        "first": {**epoch, "sync_dist": True},
        "most": {**epoch, "reduce_fx": "max", "sync_dist": True},
        "step": {"on_step": True, "on_epoch": False, "sync_dist_fn": reduced},
        "mean": {**epoch, "metric_attribute": "parts.mean"},
        "grouped": {**epoch, "sync_dist": True, "sync_dist_group": "some group"},
        "both": {**epoch, "on_step": True, "prog_bar": True},
        "sum": {**epoch, "reduce_fx": "sum", "rank_zero_only": True},
        "last": epoch,
    }
    for name in only or ways:
        if name == "mean":
            module.parts["mean"].update(value)
        given = module.parts["mean"] if name == "mean" else value * (1 + len(name))
        results.log("training_step", name, given, batch_size=int(2 * weight), **ways[name])
    return trainer


def reduced(value, *_, **__):
    return value


def means_of(trainer):
    """What is reduced at the end of the epoch, in that order."""
    results = {key.removeprefix("training_step."): each for key, each in trainer.fit_loop.epoch_loop._results.items()}
    return {name: each.compute() for name, each in results.items() if name in EPOCH_KEYS and not each.has_reset}


def passed_on(value):
    """As a replacement reads it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def names(forms):
    return [key.removeprefix("training_step.") for key in forms]


EPOCH_KEYS = ["first", "most", "mean", "both", "sum", "last"]


def test_forms_are_those_of_values_that_are_reduced_at_the_end_of_the_present_epoch():
    trainer = logged(Module())
    means = LoggedMeans(trainer)
    assert names(means.forms()) == EPOCH_KEYS
    assert names(passed_on(means.forms())) == EPOCH_KEYS
    trainer.fit_loop.epoch_loop._results["training_step.most"].reset()
    assert names(means.forms()) == ["first", "mean", "both", "sum", "last"]
    trainer.fit_loop.epoch_loop._results.reset()
    assert means.forms() == {}


def test_what_is_expected_is_passed_on_before_it_is_logged_again():
    module = Module()
    forms = LoggedMeans(logged(module)).forms()
    trainer = trainer_with(max_epochs=1)
    means = LoggedMeans(trainer)
    means.expect(passed_on(forms))
    assert means.forms() == forms
    logged(module, only=["last", "most"], trainer=trainer)
    assert names(means.forms()) == EPOCH_KEYS


@pytest.mark.parametrize("is_survivor", [False, True], ids=["replacement", "survivor"])
@pytest.mark.parametrize("again", [[], ["last", "both"], ["mean", "first"]])
def test_an_epoch_ends_with_all_that_was_logged_in_the_same_order(is_survivor, again):
    module = Module()
    trainer = logged(module)
    before = LoggedMeans(trainer)
    forms, state = passed_on(before.forms()), passed_on(before.state_dict())
    metas = {key: result.meta for key, result in trainer.fit_loop.epoch_loop._results.items()}
    if is_survivor:  # Lightning has reset what was logged
        for result in trainer.fit_loop.epoch_loop._results.values():
            if result.is_tensor:
                result.reset()
            result.has_reset = True
    else:
        trainer = trainer_with(max_epochs=1)
    other = Module()
    if again:
        logged(other, only=EPOCH_KEYS, trainer=(wanted := trainer_with(max_epochs=1)))
        logged(other, only=again, weight=2.0, trainer=wanted)
    else:
        wanted = logged(other)
    means = LoggedMeans(trainer)
    means.load_state_dict(state)
    means.expect(forms)
    assert passed_on(means.state_dict()) == state
    if again:
        logged(module, only=again, weight=2.0, trainer=trainer)
    means.restore_missing(module, reduced)
    results = trainer.fit_loop.epoch_loop._results
    assert list(means_of(trainer)) == EPOCH_KEYS
    assert means_of(trainer) == means_of(wanted)
    for name in EPOCH_KEYS:
        result = results[f"training_step.{name}"]
        assert not result.has_reset
        assert result.meta == metas[f"training_step.{name}"]
        assert result.update_called
    assert results["training_step.mean"].value is module.parts["mean"]
    assert means.forms() == forms
    assert "update_metrics" not in vars(results)

    means.restore_missing(module, reduced)  # nothing is expected any more
    results.reset()
    logged(module, only=["first"], trainer=trainer)
    assert means_of(trainer)["first"] == 6  # of the next epoch alone


def test_a_rank_whose_sums_are_lost_takes_part_in_the_reductions_of_the_others():
    module = Module()
    forms = LoggedMeans(logged(module)).forms()
    trainer = trainer_with(max_epochs=1)
    means = LoggedMeans(trainer)
    means.load_state_dict({})
    means.expect(forms)
    logged(module, only=["last"], trainer=trainer)
    means.restore_missing(module, reduced)
    results = trainer.fit_loop.epoch_loop._results
    assert list(means_of(trainer)) == EPOCH_KEYS
    assert [results[f"training_step.{name}"].value for name in ("first", "most", "sum")] == [0, -torch.inf, 0]
    assert results["training_step.first"].cumulated_batch_size == 0


def test_nothing_is_put_in_its_place_where_nothing_is_expected():
    trainer = trainer_with(max_epochs=1)
    LoggedMeans(trainer).restore_missing(Module(), reduced)
    assert means_of(trainer) == {}
