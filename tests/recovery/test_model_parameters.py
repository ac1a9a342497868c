"""The parameters of a model are collected only when it holds others, and are those of now."""

from collections import OrderedDict

import torch
import torch.distributed as dist
from device import DEVICE
from torch import nn

from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize
from hyperpod_plugins.parallel.hsdp import reshard
from hyperpod_plugins.parallel.unit_watch import parameters_by_id
from hyperpod_plugins.recovery.attribute_values import ModelParameters, parameter_forms


def test_the_known_parameters_of_a_model_are_those_of_now():
    def is_up_to_date():
        names, forms = known.present()
        return names == parameters_by_id(model) and forms == parameter_forms(names, "a parameter")

    dist.init_process_group("hyperpod", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        known = ModelParameters(model, "a parameter")
        assert is_up_to_date()
        assert known.present()[0] is known.present()[0]  # not collected again
        model[0].weight = nn.Parameter(torch.ones(2, 2))
        assert is_up_to_date()
        model.append(nn.Linear(2, 3))
        assert is_up_to_date()
        parallelize(model, build_mesh(ParallelConfig().topology(1), DEVICE), ParallelConfig())
        assert is_up_to_date()
        shards = list(model.parameters())
        output = model(torch.ones(1, 2, device=DEVICE))
        assert is_up_to_date()
        output.sum().backward()
        assert is_up_to_date()
        names, _ = known.present()
        assert {id(each) for each in shards} < names.keys()  # and the gathered ones
        model, config = nn.Sequential(nn.Sequential(nn.Linear(2, 2))), ParallelConfig(block_classes=("Sequential",))
        parallelize(model, build_mesh(config.topology(1), DEVICE), config)
        known = ModelParameters(model, "a parameter")
        assert is_up_to_date()
        with torch.no_grad():
            model(torch.ones(1, 2, device=DEVICE))
        reshard(model)  # modules hold the same tensors as before, and FSDP2 has made others
        assert is_up_to_date()
    finally:
        dist.destroy_process_group()


def test_the_known_parameters_of_a_model_have_the_names_of_now():
    model = nn.Sequential(OrderedDict(old=nn.Linear(2, 2)))
    known = ModelParameters(model, "a parameter")

    def names():
        return [name for _, name in known.present()[0].values()]

    assert names() == ["old.weight", "old.bias"]
    model.add_module("new", model._modules.pop("old"))
    assert names() == ["new.weight", "new.bias"]
    model.new._parameters = {key: nn.Parameter(torch.zeros(2)) for key in ("weight", "bias")}
    assert {*known.present()[0]} == {id(each) for each in model.parameters()}
