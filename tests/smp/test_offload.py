"""What is saved for backward goes to the host and comes back; parameters stay where they are."""

import torch
from torch import nn

from hyperpod_plugins.smp.torch_classes import KeepOnHost, _from_host, _to_host


def test_activations_go_and_parameters_stay():
    weight = nn.Parameter(torch.randn(3, 4))
    assert _to_host(weight) is weight
    view = weight.t()
    assert _to_host(view) is view
    activation = torch.randn(4, 3).t()
    packed = _to_host(activation)
    assert packed[0].data_ptr() != activation.data_ptr()
    assert torch.equal(_from_host(packed), activation)


def test_gradients_are_the_same():
    torch.manual_seed(1)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)), torch.randn(5, 4)
    model(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with KeepOnHost():
        loss = model(x).square().sum()
    loss.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
