"""Which bodies of steps count as computing with parameters before the step."""

import pytest
import torch
from torch import nn

from hyperpod_plugins.errors import LoopError
from hyperpod_plugins.session.parameter_reads import ParameterReads


def a_model():
    model = nn.ModuleDict({"net": nn.Linear(3, 3), "teacher": nn.Linear(3, 3).requires_grad_(False)})
    model.register_buffer("mean", torch.zeros(3))
    return model


WRITES = {
    "in place": lambda net, _: net.weight.mul_(0.9),
    "data": lambda net, _: net.weight.data.clamp_(-1, 1),
    "of all": lambda net, _: torch._foreach_mul_([*net.parameters()], 0.9),
    "initialized": lambda net, _: nn.init.zeros_(net.bias),
    "elements": lambda net, _: net.weight.__setitem__(0, 1.0),
    "out": lambda net, _: torch.add(torch.ones(3), 1.0, out=net.bias),
    "average": lambda net, teacher: teacher.weight.add_(torch.ones(3, 3)),
    "reads the teacher": lambda net, teacher: net.weight.copy_(teacher.weight),
    "computes with the teacher": lambda net, teacher: teacher(torch.ones(3)),
    "shapes": lambda net, _: (net.weight.shape, net.weight.numel(), net.weight.grad, [*net.parameters()]),
    "a view": lambda net, _: net.weight.detach()[0].zero_(),
    "gradients": lambda net, _: net.zero_grad(),
    "another mode": lambda net, _: torch.device("cpu").__enter__(),
}
READS = {
    "forward": lambda net, _: net(torch.ones(3)),
    "copy": lambda net, _: net.weight.clone(),
    "number": lambda net, _: net.bias[0].item(),
    "norm of all": lambda net, _: torch._foreach_norm([*net.parameters()]),
    "into another": lambda net, _: torch.zeros(3).copy_(net.bias),
    "average": lambda net, teacher: teacher.weight.lerp_(net.weight, 0.1),
}
BOTH = {
    "by its norm": lambda net, _: net.weight.div_(net.weight.norm()),
    "forward": lambda net, _: (net.weight.data.mul_(0.9), net(torch.ones(3))),
    "the teacher": lambda net, teacher: (teacher.weight.mul_(0.9), teacher(torch.ones(3))),
}


def watch(body):
    model = a_model()
    reads = ParameterReads(model)
    depth = torch._C._len_torch_function_stack()
    reads.open()
    try:
        with torch.no_grad():
            body(model["net"], model["teacher"])
    finally:
        reads.close()
    while torch._C._len_torch_function_stack() > depth:  # what the body has left
        torch.overrides._pop_mode()
    return reads


@pytest.mark.parametrize("name", WRITES)
def test_a_body_that_only_writes(name):
    reads = watch(WRITES[name])
    assert not reads.of_trained
    reads.check()


@pytest.mark.parametrize("name", READS)
def test_a_body_that_computes_with_trained_parameters(name):
    reads = watch(READS[name])
    assert {*reads.of_trained} & {"net.weight", "net.bias"}
    reads.check()


@pytest.mark.parametrize("name", BOTH)
def test_a_body_that_computes_with_what_it_has_written(name):
    with pytest.raises(LoopError, match=r"writes to (net|teacher).weight and also computes with it"):
        watch(BOTH[name]).check()


def test_a_mode_that_the_program_has_entered_meanwhile_stays():
    reads = ParameterReads(a_model())
    reads.open()
    with torch.device("meta"):
        reads.close()
        assert torch.zeros(1).is_meta
    reads.check()
