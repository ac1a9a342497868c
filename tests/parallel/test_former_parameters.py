"""Optimizers that hold parameters from before sharding are given those in their place, or refused."""

import gc

import pytest
import torch
from torch import nn

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.parallel.former_parameters import remember_parameters, replace_stale_parameters


def replaced(model):
    """The model with other parameters under the same names, as sharding leaves it."""
    remember_parameters(model)
    for part in model.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(parameter.detach().clone()))
    return model


def held_by(optimizer):
    return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]


def ids(parameters):
    return [id(parameter) for parameter in parameters]


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_names_lead_to_the_parameters_in_place_of_the_old_ones(num_ranks):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD([{"params": model[1].parameters()}, {"params": [model[0].bias], "lr": 0.5}], lr=0.1)
    replaced(model)
    replace_stale_parameters([optimizer], model, num_ranks=num_ranks)
    assert held_by(optimizer) == ids([*model[1].parameters(), model[0].bias])
    replace_stale_parameters([optimizer], model, num_ranks=num_ranks)
    assert held_by(optimizer) == ids([*model[1].parameters(), model[0].bias])


@pytest.mark.parametrize("is_outside", [True, False])
def test_a_part_that_was_sharded_alone_is_found(is_outside):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    replaced(model[1] if is_outside else model)
    replace_stale_parameters([optimizer], model if is_outside else model[1], num_ranks=2)
    assert held_by(optimizer) == ids(model[1].parameters())


def test_what_is_not_of_the_model_is_refused_where_ranks_would_train_it_apart():
    model, other = replaced(nn.Linear(2, 2)), nn.Linear(3, 5)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    replace_stale_parameters([optimizer], model, num_ranks=1)
    with pytest.raises(
        ConfigError, match=r"SGD holds 2 parameters that are not in the sharded Linear.*\(5, 3\), \(5,\)"
    ):
        replace_stale_parameters([optimizer], model, num_ranks=2)


def test_an_optimizer_that_has_stepped_is_refused():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(ConfigError, match=r"has state already, of weight before it was sharded"):
        replace_stale_parameters([optimizer], replaced(model), num_ranks=1)


def test_old_parameters_that_nobody_holds_are_gone():
    model = nn.Linear(2, 2)
    replaced(model)
    gc.collect()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replace_stale_parameters([optimizer], model, num_ranks=2)
    assert held_by(optimizer) == ids(model.parameters())
