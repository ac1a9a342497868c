"""What a replacement would read of a rank's state besides tensors, read back by the objects that hold it."""

import itertools
import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric, Metric

from hyperpod_plugins.lightning.local_state import MetricStates
from hyperpod_plugins.recovery.attributes import ATTRIBUTES, PlainAttributes, modules_of_program
from hyperpod_plugins.recovery.buffer_states import BufferStates
from hyperpod_plugins.recovery.local_objects import ProgramState
from hyperpod_plugins.recovery.local_state import BUFFERS
from hyperpod_plugins.recovery.rehearsal import StateReadBack
from hyperpod_plugins.recovery.state_digests import first_kind, local_digests, steady_digests, value_digest


class Net(nn.Module):
    num_seen = 0

    def __init__(self):
        super().__init__()
        self.norm, self.table = nn.BatchNorm1d(3), {"rows": [1]}
        self.rows, self.unsendable = self.table["rows"], object()

    def forward(self, x):
        self.num_seen += 1
        self.rows.append(self.num_seen)
        self.unsendable = object()
        return self.norm(x)


class Counter:
    """Counts, and remembers when; keeps an average as a tensor, and something that it does not save."""

    def __init__(self):
        self.count, self.average, self.seen, self.tool = 0, torch.zeros(2), [], object()

    def step(self):
        self.count, self.average = self.count + 1, self.average + 0.1
        self.seen.append(self.count)

    def state_dict(self):
        return {"count": self.count, "average": self.average}

    def load_state_dict(self, state_dict):
        self.count, self.average = state_dict["count"], state_dict["average"]


class Forgetful(Counter):
    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]


class Wrong(Counter):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.average = self.average.half().float()


class Unreadable(Counter):
    def state_dict(self):
        return {**super().state_dict(), "tool": self.tool if self.count else None}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.tool = state_dict["tool"]


class Empty(Counter):
    def state_dict(self):
        return {}


class Clock(Counter):
    times = itertools.count()

    def state_dict(self):
        return {"count": self.count, "now": next(self.times)}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]


class Loaded(Counter):
    """Without Python attributes that can be set back."""

    __slots__ = ()

    def load_state_dict(self, state_dict):
        pass


class Objects(Metric):
    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("shown", default=[], dist_reduce_fx=None)

    def update(self, value):
        self.shown.append(value)

    def compute(self):
        return torch.tensor(0.0)


def loop(*, objects=None, values=None, **local):
    return SimpleNamespace(
        own_objects=lambda: objects or {},
        present_values=lambda: values or {},
        rank_local_states=SimpleNamespace(objects=local),
    )


def digests(given):
    return local_digests({name: each.state_dict() for name, each in given.rank_local_states.objects.items()})


@pytest.mark.parametrize(
    ("made", "found"),
    [
        (Counter, ()),
        (Clock, ()),
        (Forgetful, ("average",)),
        (Wrong, ("average",)),
        (Unreadable, ("tool",)),
        (Empty, ()),
        (Loaded, ("average", "count")),
    ],
    ids=lambda each: getattr(each, "__name__", " "),
)
def test_a_state_that_an_object_does_not_load_whole_is_named(made, found):
    callback, registered = made(), made()
    given = loop(objects={"callback It": callback}, **{"registered 'it'": ProgramState("it", registered)})
    back = StateReadBack(given)
    assert not back.differing()  # nothing has changed yet, so that nothing can be missed
    for each in (callback, registered):
        each.step()
    values, average = callback.seen, callback.average
    names = {f"{prefix}.{name}" for prefix in ("callback It", "registered 'it'") for name in found}
    assert back.differing() == names
    assert (callback.count, callback.seen, callback.average) == (1, values, average)
    assert callback.seen is values
    assert callback.average is average


def test_attributes_beside_the_state_are_told_once(caplog):
    counter = Counter()
    back = StateReadBack(loop(objects={"callback It": counter}))
    counter.step()
    with caplog.at_level(logging.WARNING):
        assert not back.differing()
        assert not back.differing()
    assert [record.getMessage() for record in caplog.records if "callback It.seen" in record.getMessage()] != []
    assert len(caplog.records) == 1
    assert "callback It.count" not in caplog.text
    assert counter.seen == [1]


def test_rank_local_state_is_read_back_and_left_as_it_was():
    net, mean, own = Net(), MeanMetric(), Objects()
    attributes, metrics = PlainAttributes(modules_of_program(net)), MetricStates({"mean": mean, "own": own})
    given = loop(**{BUFFERS: BufferStates(net), ATTRIBUTES: attributes, "metrics of the epoch": metrics})
    back = StateReadBack(given)
    for _ in range(3):
        net(torch.randn(4, 3))
        mean.update(torch.rand(()))
        own.update(torch.ones(2))
        before, kept = digests(given), net.unsendable
        assert not back.differing()
        assert digests(given) == before
        assert net.rows is net.table["rows"]
        assert net.unsendable is kept
    assert {"buffer norm.running_mean", "metric mean.values.mean_value", "metric own.count"} <= before.keys()
    own.update(lambda: 1)
    assert back.differing() == {"metric own.count", "metric own.values.shown"}


def test_a_buffer_that_is_not_written_back_is_named(monkeypatch):
    net = Net()
    given = loop(**{BUFFERS: BufferStates(net)})
    monkeypatch.setattr(BufferStates, "load_state_dict", lambda self, state_dict, leave=(): None)
    names = StateReadBack(given).differing()
    assert first_kind(names) == ("buffer norm.num_batches_tracked", "buffer norm.running_mean")


def test_values_of_the_loop_that_cannot_be_read_are_named():
    values = {"trainer state": {"n": 3, "x": torch.ones(2)}, "hook mine": 1}
    assert not StateReadBack(loop(values=values)).differing()
    values["trainer state"]["made"] = object()
    assert "trainer state.made" in StateReadBack(loop(values=values)).differing()


def test_what_differs_between_two_reads_is_not_compared():
    numbers = itertools.count()
    one, other = (steady_digests(lambda: {"a": 1, "b": next(numbers)}) for _ in range(2))
    assert one == other == {"a": 1, "b": 0}


def test_sets_and_deques_are_told_apart():
    assert value_digest({1, 2}) != value_digest({1, 3})
    assert value_digest({"b", "a"}) == value_digest({"a", "b"})
