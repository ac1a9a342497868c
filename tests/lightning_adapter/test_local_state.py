"""What a module and a Trainer have of one rank alone: buffers and metrics, and values that were logged in a step."""

from types import SimpleNamespace

import pytest
import torch
from device import ACCELERATOR
from lightning.pytorch import Trainer
from torch import nn
from torchmetrics import MeanMetric

from hyperpod_plugins.errors import CheckpointMismatch
from hyperpod_plugins.lightning.local_state import (
    CountedStart,
    LoggedMeans,
    LoggedStart,
    MetricStates,
    load_local_state,
)
from hyperpod_plugins.lightning.shown_values import ShownValues, put_tables, tables_of
from hyperpod_plugins.recovery.buffer_states import BufferStates
from hyperpod_plugins.recovery.local_state import BUFFERS
from hyperpod_plugins.recovery.packing import pack, unpack


def test_buffers_and_metrics_are_put_back_where_there_are_any():
    module, other = (nn.ModuleDict({"norm": nn.BatchNorm1d(2), "mean": MeanMetric()}) for _ in range(2))
    module["norm"](torch.randn(3, 2, generator=torch.Generator().manual_seed(0)))
    trainer = SimpleNamespace(lightning_module=other, callbacks=[])
    load_local_state(trainer, {BUFFERS: BufferStates(module).state_dict()})
    assert torch.equal(other["norm"].running_mean, module["norm"].running_mean)
    before = {name: value.clone() for name, value in other.named_buffers()}
    load_local_state(trainer, {})
    assert all(torch.equal(value, before[name]) for name, value in other.named_buffers())


def log(trainer, value, names=("both", "step", "rare")):
    """Log values on one rank in a training step."""
    ways = {
        "both": {"on_epoch": True, "prog_bar": True},
        "step": {"on_epoch": False},
        "rare": {"logger": False},
        "new": {},
    }
    for name in names:
        results = trainer.fit_loop.epoch_loop._results
        results.log("training_step", name, torch.tensor(value), on_step=True, batch_size=2, **ways[name])


def begin_batch(trainer):
    trainer.training = True
    trainer.fit_loop.epoch_loop.batch_progress.current.ready += 1
    trainer._logger_connector.on_batch_start(batch=None)


def end_batch(trainer):
    trainer._logger_connector.on_batch_end()
    trainer.fit_loop.epoch_loop.batch_progress.current.completed += 1


def end_epoch(trainer):
    trainer._logger_connector.epoch_end_reached()
    trainer._logger_connector.reset_results()


def trained(*values):
    """A trainer that has shown a validation and is in its last batch, before the hooks at its end, and its state."""
    trainer = Trainer(accelerator=ACCELERATOR, devices=1, logger=False, enable_checkpointing=False)
    state = ShownValues(trainer)
    trainer._logger_connector._callback_metrics["val"] = torch.tensor(0.25)
    for value in values:
        if trainer.fit_loop.epoch_loop.batch_progress.current.ready:
            end_batch(trainer)
        begin_batch(trainer)
        log(trainer, value)
    return trainer, state


def shown_by(trainer):
    """What users see, as numbers."""
    tables = (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)
    return [{name: float(value) for name, value in table.items()} for table in tables]


def replaced(lost, source):
    """A trainer that has what `source` describes, and then the state of `lost` as `source` has kept it for it."""
    trainer, state = trained()
    state.load_described(unpack(pack(source.described())))
    state.load_state_dict(unpack(pack(lost)))
    return trainer, state


def test_a_replacement_shows_what_its_predecessor_had_logged_until_it_logs_again():
    lost, of_lost = trained(1.0, 2.0)
    source, of_source = trained(10.0, 20.0)
    given = of_lost.state_dict()  # before the batch has ended, and anybody has read
    end_batch(lost)
    end_batch(source)
    trainer, state = replaced(given, of_source)
    assert shown_by(trainer) == shown_by(lost) != shown_by(source)
    assert shown_by(trainer)[0] == {"val": 0.25, "both": 2, "both_step": 2, "step": 2, "rare": 2, "rare_step": 2}
    for each in (lost, trainer):
        begin_batch(each)
        each._logger_connector._callback_metrics["rare"] = torch.tensor(7.0)  # a validation, of the same name
        log(each, 3.0, ["step"])
    assert shown_by(trainer) == shown_by(lost)
    assert shown_by(trainer)[0] == {"val": 0.25, "both": 2, "both_step": 2, "step": 3, "rare": 2, "rare_step": 2}
    assert state.described()["cached"].keys() == of_lost.described()["cached"].keys()
    assert state._unpacked(state.state_dict())[0] == of_lost._unpacked(of_lost.state_dict())[0]


def test_a_replacement_that_has_logged_nothing_shows_what_a_batch_begins_with_after_a_validation():
    lost, of_lost = trained(1.0, 2.0)
    given = of_lost.state_dict()
    end_batch(lost)
    trainer, state = replaced(given, of_lost)
    for each in (lost, trainer):
        each._logger_connector._callback_metrics["both"] = torch.tensor(7.0)  # a validation, of the same name
    begin_batch(lost)
    begin_batch(trainer)
    state.starts()
    assert [list(table.items()) for table in shown_by(trainer)] == [list(table.items()) for table in shown_by(lost)]
    assert shown_by(trainer)[0]["both"] == 2
    assert trainer.fit_loop.epoch_loop._results == {}


def test_names_keep_their_order():
    lost, of_lost = trained(1.0)
    given = of_lost.state_dict()
    end_batch(lost)
    trainer, _ = replaced(given, of_lost)
    assert list(trainer.callback_metrics) == list(lost.callback_metrics)
    assert next(iter(trainer.callback_metrics)) == "val"


def test_a_tensor_that_a_callback_writes_to_in_place_is_given_again():
    trainer, state = trained(1.0)
    kept = trainer._logger_connector._callback_metrics["kept"] = torch.zeros(())
    trainer._logger_connector._callback_metrics[("no", "name")] = torch.zeros(())
    with torch.inference_mode():
        trainer._logger_connector._callback_metrics["of an inference"] = torch.zeros(())
    before = state.state_dict()
    kept.add_(1)
    assert "_callback_metrics kept" in state.written(before)
    assert state.state_dict()["others"] != before["others"]


def test_what_was_cached_is_not_shown_any_more_when_an_epoch_has_ended():
    _, of_lost = trained(1.0)
    trainer, state = replaced(of_lost.state_dict(), trained(10.0)[1])
    results = trainer.fit_loop.epoch_loop._results
    results.reset(metrics=False, fx="training_step")  # by the first value that a process logs in a hook
    begin_batch(trainer)
    assert results.metrics(on_step=True)["callback"]["both"] == 1
    assert "both" not in results.metrics(on_step=False)["callback"]
    end_batch(trainer)
    end_epoch(trainer)
    begin_batch(trainer)
    assert results.metrics(on_step=True)["callback"] == {}
    assert shown_by(trainer)[0]["both"] == 1  # a table keeps a name
    assert state.described()["cached"] == {}
    assert not {"metrics", "reset"} & vars(results).keys()


def test_what_hooks_have_written_since_comes_from_the_source():
    lost, of_lost = trained(1.0)
    source, of_source = trained(float("nan"))
    given, before = of_lost.state_dict(), of_source.state_dict()
    assert of_source.written(before) == set()
    end_batch(source)
    assert of_source.written(unpack(pack(before))) == set()  # that the batch ends is known
    source._logger_connector._callback_metrics["val"] = torch.tensor(0.5)
    leave = of_source.written(before)
    assert leave == {"_callback_metrics val"}
    trainer, state = replaced({}, of_source)
    state.load_state_dict(given, leave)
    assert shown_by(trainer)[0] == {**shown_by(lost)[0], "val": 0.5}
    end_epoch(source)
    assert {"cached training_step.both", "cached training_step.step"} < of_source.written(before)
    trainer, state = replaced({}, of_source)
    state.load_state_dict(given, of_source.written(before))
    assert state.described()["cached"] == {}


def test_names_that_only_another_rank_logs_are_not_shown():
    source, of_source = trained(10.0)
    lost, of_lost = trained()
    trainer, _ = replaced(of_lost.state_dict(), of_source)
    assert shown_by(trainer)[0] == {"val": 0.25}
    trainer, _ = replaced({}, of_source)  # nobody has kept what it had
    assert shown_by(trainer) == shown_by(source) != shown_by(lost)


def test_a_step_that_is_undone_shows_what_was_shown_before():
    trainer, state = trained(1.0)
    end_batch(trainer)
    begin_batch(trainer)
    results = trainer.fit_loop.epoch_loop._results
    tables, attributes = tables_of(trainer), {key: dict(vars(each)) for key, each in results.items()}
    wanted, seen, forms = state.described(), trainer.callback_metrics, LoggedMeans(trainer).forms()
    log(trainer, 5.0, ["new", "both"])
    shown_by(trainer)  # somebody reads within the step
    assert state.described() != wanted
    assert state.described((tables, attributes)) == wanted
    assert LoggedMeans(trainer).forms(attributes) == forms != LoggedMeans(trainer).forms()
    put_tables(trainer, tables)
    del results["training_step.new"]
    for key, each in attributes.items():
        vars(results[key]).update(each)
    assert state.described() == wanted
    assert trainer.callback_metrics is seen
    assert (seen["both"], "new" in seen) == (1, False)


def test_nothing_is_written_again_where_nothing_was_logged():
    trainer, state = trained(1.0, 2.0)
    first, again = state.state_dict(), state.state_dict()
    assert first["cached"]["data"] is again["cached"]["data"]
    assert first["others"] is again["others"]
    end_batch(trainer)
    begin_batch(trainer)
    log(trainer, 3.0)
    assert state.state_dict()["others"] is first["others"]
    assert state.state_dict()["cached"]["forms"] is first["cached"]["forms"]
    assert state.state_dict()["cached"]["data"] != first["cached"]["data"]


@pytest.mark.parametrize(
    "changes",
    [
        {"cached": None},
        {"cached": {"forms": "no json"}},
        {"cached": {"forms": '[["key", "torch.float32", [4], true, "a", "a", true, false]]', "data": b"1234"}},
        {"cached": {"forms": '[["key", "torch.float32", [2], true, "a", "a", true, true]]', "data": b"12341234"}},
        {"cached": {"forms": '[["key", "torch.float32", [], true, "a", 3, true, false]]', "data": b"1234"}},
        {"cached": {"forms": '[["key", "torch.bits8", [], true, "a", "a", true, true]]', "data": b"1"}},
        {"cached": {"forms": f'[["key", "torch.float32", [{2**62}, 4, 0], true, "a", "a", true, true]]', "data": b""}},
        {"cached": {"forms": "[" * 100_000}},
        {"others": {"numbers": '[[5, "name", 1.0]]'}},
        {"others": {"numbers": "[[0, 5, 1.0]]"}},
        {"others": {"numbers": '[[0, "name", {"a": 1.0}]]'}},
        {"others": {"numbers": "3"}},
    ],
)
def test_a_malformed_state_of_a_peer_is_refused(changes):
    _, state = trained(1.0)
    with pytest.raises(CheckpointMismatch):
        state.load_state_dict({**state.state_dict(), **changes})
    described = state.described()
    for key, value in (("cached", {"key": ["no tensor", "a", "a", True, False]}), ("_callback_metrics", [1])):
        with pytest.raises(CheckpointMismatch):
            state.load_described({**described, key: value})
    with pytest.raises(CheckpointMismatch):
        state.load_described([1])


def log_mean(trainer, name, value):
    results = trainer.fit_loop.epoch_loop._results
    results.log("on_train_batch_start", name, torch.tensor(value), on_step=False, on_epoch=True, batch_size=1)


def mean_of(trainer, name):
    return float(trainer.fit_loop.epoch_loop._results[f"on_train_batch_start.{name}"].compute())


def test_what_was_logged_before_the_state_came_is_in_the_sum_once():
    """A replacement logs in a hook before its step; the sum that it gets has what its predecessor logged there."""
    lost, replacement = trained()[0], trained()[0]
    for value in (1.0, 2.0, 6.0):
        log_mean(lost, "x", value)
    log_mean(replacement, "x", 6.0)
    log_mean(replacement, "new", 4.0)
    means = LoggedMeans(replacement)
    means.load_state_dict(unpack(pack(LoggedMeans(lost).state_dict())))
    means.take_awaited()
    assert (mean_of(replacement, "x"), mean_of(replacement, "new")) == (3.0, 4.0)
    log_mean(replacement, "x", 7.0)
    assert mean_of(replacement, "x") == 4.0


def test_what_hooks_have_logged_and_counted_is_undone_more_than_once():
    trainer, _ = trained()
    means, metrics = LoggedMeans(trainer), {"metric": MeanMetric(), "unused": MeanMetric()}
    log_mean(trainer, "x", 1.0)
    metrics["metric"].update(2.0)
    start = LoggedStart(means), CountedStart(MetricStates(metrics), {})
    before = means.state_dict()
    for _ in range(2):
        log_mean(trainer, "x", 3.0)
        log_mean(trainer, "new", 5.0)
        metrics["metric"].update(8.0)
        metrics["unused"].update(1.0)
        for each in start:
            each.put_back()
        assert means.state_dict() == before
        assert [*trainer.fit_loop.epoch_loop._results] == ["on_train_batch_start.x"]
        assert (float(metrics["metric"].compute()), metrics["unused"]._update_count) == (2.0, 0)


def test_results_of_a_former_epoch_do_not_come_back():
    """They would be reduced first, and a replacement does not know them."""
    trainer, _ = trained()
    log_mean(trainer, "old", 1.0)
    trainer.fit_loop.epoch_loop._results.reset()
    start = LoggedStart(LoggedMeans(trainer))
    trainer.fit_loop.epoch_loop._results.clear()  # as an epoch begins
    log_mean(trainer, "new", 5.0)
    start.put_back()
    assert [*trainer.fit_loop.epoch_loop._results] == []


@pytest.mark.parametrize("change", ["in place", "assigned", "another name", "a reset", "uncounted"])
def test_sums_that_change_are_written_again_and_others_are_not(change):
    trainer, _ = trained()
    log_mean(trainer, "loss", 1.0)
    means, result = LoggedMeans(trainer), trainer.fit_loop.epoch_loop._results["on_train_batch_start.loss"]
    if change == "uncounted":
        with torch.inference_mode():
            result.value = result.value + 1
    state = means.state_dict()
    assert (means.state_dict() is state) == (change != "uncounted")
    with torch.inference_mode(change == "uncounted"):
        if change == "another name":
            log_mean(trainer, "other", 1.0)
        elif change == "a reset":
            result.reset()
        elif change == "assigned":
            result.value = result.value + 1
        else:
            result.value += 1
    assert means.state_dict() == LoggedMeans(trainer).state_dict() != state


def test_tables_that_are_emptied_and_filled_again_are_sent_as_they_are():
    trainer, state = trained(1.0, 2.0)
    full, tables = state.state_dict(), tables_of(trainer)
    trainer.fit_loop.epoch_loop._results.clear()
    put_tables(trainer, {name: {} for name in tables})
    assert state.state_dict() == ShownValues(trainer).state_dict() != full
    for number in (3.0, 4.0):
        put_tables(trainer, {**tables, "_callback_metrics": {"x": torch.tensor(number)}})
        assert state.state_dict() == ShownValues(trainer).state_dict()
