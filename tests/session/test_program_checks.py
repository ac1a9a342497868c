"""Schedules of the program's own classes, which a `Session` restores or refuses."""

import pytest
import torch
from torch import nn

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.session.program_checks import refuse_own_schedules


class WarmUp:
    """Counts its steps, and sets the rate."""

    def __init__(self, optimizer):
        self.optimizer, self.n = optimizer, 0

    def step(self):
        self.n += 1


class Loop(WarmUp):
    """A loop of the program with a method `step`, not a schedule."""

    def __init__(self, optimizer, net):
        super().__init__(optimizer)
        self.net = net


class Record:
    def __init__(self, optimizer):
        self.optimizer = optimizer


@pytest.mark.parametrize("reads_attributes", [False, True])
def test_a_schedule_of_ones_own_is_refused_unless_it_is_restored(reads_attributes):
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    others = Loop(optimizer, net), Record(optimizer), [optimizer]
    refuse_own_schedules([optimizer], net, is_restored=lambda value: False)
    schedule = WarmUp(optimizer)
    if reads_attributes:  # the object's attributes are then a dictionary of its own
        assert vars(schedule)["n"] == 0
    with pytest.raises(ConfigError, match="a WarmUp holds an optimizer"):
        refuse_own_schedules([optimizer], net, is_restored=lambda value: False)
    refuse_own_schedules([optimizer], net, is_restored=lambda value: value is schedule)
    assert len(others) == 3
