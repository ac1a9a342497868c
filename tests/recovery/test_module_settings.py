"""Modes and numbers of a model's modules, which a program changes while it trains."""

import math

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from hyperpod_plugins.errors import CheckpointMismatch, ConfigError
from hyperpod_plugins.recovery.attributes import PlainAttributes, modules_of_program
from hyperpod_plugins.recovery.module_settings import ModuleSettings
from hyperpod_plugins.recovery.packing import pack, unpack


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1))
        self.rate = 0.5


def attributes_of(model, **options):
    return PlainAttributes(modules_of_program(model), model=model, settings=ModuleSettings(model, **options))


CHANGES = {
    "a number": (lambda it: vars(it.net[2]).update(p=0.3), lambda it: it.net[2].p),
    "none instead of a number": (lambda it: vars(it.net[1]).update(momentum=None), lambda it: it.net[1].momentum),
    "a mode": (lambda it: it.net[1].eval(), lambda it: it.net[1].training),
    "the mode of a module of the program": (lambda it: it.eval(), lambda it: [each.training for each in it.modules()]),
    "a tensor instead of a number": (
        lambda it: vars(it.net[1]).update(momentum=torch.tensor([0.5, 0.25])),
        lambda it: torch.as_tensor(it.net[1].momentum).tolist(),
    ),
    "an attribute of the program's module": (lambda it: vars(it).update(rate=2.0), lambda it: it.rate),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_undone_and_reaches_another_process(name):
    change, read = CHANGES[name]
    (here, there) = (attributes_of(own := Own()), attributes_of(other := Own()))
    first, kept, empty = read(own), here.keep(), here.state_dict()
    assert empty == {}
    change(own)
    changed, sent, after = read(own), unpack(pack(here.state_dict())), here.keep()
    assert changed != first
    there.load_state_dict(sent)
    assert read(other) == changed
    here.put_back(kept)
    assert read(own) == first
    assert here.state_dict() == {}
    here.put_back(after)
    assert read(own) == changed
    there.load_state_dict(empty)
    assert read(other) == first


def test_modes_that_an_evaluation_will_restore_stand_for_the_present_ones():
    model, captured = Own(), {}
    attributes = attributes_of(model, modes_to_restore=lambda: captured or None)
    model.net[1].eval()
    before = attributes.state_dict()
    kept = attributes.keep()
    captured.update({name: each.training for name, each in model.named_modules()})
    model.eval()
    assert attributes.state_dict() == before
    attributes.load_state_dict({})
    assert not any(each.training for each in model.modules())
    assert captured["net.1"]
    attributes.put_back(kept)
    assert [name for name, mode in captured.items() if not mode] == ["net.1"]


def test_modes_are_left_to_a_loop_that_restores_them():
    attributes = attributes_of(model := Own(), has_modes=False)
    model.eval()
    assert attributes.state_dict() == {}


def test_a_number_that_is_none_and_settings_that_are_deleted_are_changes():
    settings = ModuleSettings(model := Own())
    model.net[2].p = math.nan
    assert [*settings] == ["net.2.p"]
    del settings["net.2.p"]
    assert model.net[2].p == 0.1
    with pytest.raises(KeyError):
        del settings["net.2.p"]


def test_settings_of_modules_that_are_not_here_are_refused():
    attributes = attributes_of(Own())
    with pytest.raises(CheckpointMismatch, match=r"net\.9\.p"):
        attributes.load_state_dict({"setting": {"net.9.p": 0.5}})


def test_an_attribute_that_the_program_deletes_is_named():
    attributes = attributes_of(own := Own())
    del own.net[1].momentum, own.net[2].p
    with pytest.raises(ConfigError, match=r"deleted net\.1\.momentum, net\.2\.p"):
        attributes.state_dict()


def test_a_module_that_differs_in_settings_is_followed_and_another_one_is_refused():
    (here, there) = (attributes_of(own := Own()), attributes_of(other := Own()))
    kept = here.keep()
    own.net[2] = nn.Dropout(0.25)
    there.load_state_dict(unpack(pack(here.state_dict())))
    here.check()
    assert other.net[2].p == 0.25
    here.put_back(kept)
    assert own.net[2].p == 0.1
    assert here.state_dict() == {}


def test_a_module_with_hooks_is_another_one():
    own = Own()
    own.net[2].register_forward_hook(lambda *_: None)
    attributes = attributes_of(own)
    own.net[2] = nn.Dropout(0.25)
    attributes.state_dict()
    with pytest.raises(ConfigError, match=r"module net\.2 \(Dropout, another one\)"):
        attributes.check()


class Half(nn.Module):
    """Of the program."""

    def forward(self, x):
        return x / 2


EXCHANGES = {
    r"module net\.2 \(Tanh, another one\)": lambda it: it.net.__setitem__(2, nn.Tanh()),
    r"module net\.0 \(Linear, another one\)": lambda it: it.net.__setitem__(0, nn.Linear(4, 4)),
    r"module net\.2 \(Dropout, removed\)": lambda it: it.net.pop(2),
    r"module net\.3 \(ReLU, added\)": lambda it: it.net.append(nn.ReLU()),
    r"module half \(Half, another one\)": lambda it: setattr(it, "half", Half()),
}


@pytest.mark.parametrize("message", EXCHANGES)
def test_a_module_that_no_other_process_would_have_is_refused(message):
    own = Own()
    own.half = Half()
    attributes = attributes_of(own)
    kept = attributes.keep()
    attributes.state_dict()
    attributes.check()
    EXCHANGES[message](own)
    attributes.state_dict()
    with pytest.raises(ConfigError, match=message):
        attributes.check()
    attributes.put_back(kept)
    attributes.state_dict()
    attributes.check()


def test_modules_that_the_set_up_exchanges_or_a_forward_creates_and_metrics_are_not_refused():
    own = Own()
    own.mean = MeanMetric()
    attributes = attributes_of(own)
    own.net[2] = nn.Tanh()
    attributes.mark_own()
    own.lazy, own.mean = nn.ReLU(), MeanMetric()
    attributes.state_dict()
    attributes.check()
