"""Compiled blocks that are recomputed and offloaded, against eager ones."""

import gc

import pytest
import torch
from torch import nn

from hyperpod_plugins.memory import ActivationOffload, recompute_blocks

pytestmark = [pytest.mark.slow_single, pytest.mark.filterwarnings("ignore")]  # of dynamo, many


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("is_offloaded", [False, True])
def test_compiled_blocks_have_the_same_gradients(recompute, is_offloaded):
    gradients = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = nn.Sequential(*(Block() for _ in range(3)))
        recompute_blocks(list(model), recompute)
        if is_offloaded:
            offload = ActivationOffload(torch.device("cpu"), min_bytes=1)
            offload.attach(list(model))
        if is_compiled:
            for block in model:
                block.compile(backend="aot_eager")
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(4, 16)).square().sum().backward()
        gc.collect()
        gradients.append([parameter.grad for parameter in model.parameters()])
        if is_offloaded:
            assert offload.stored_bytes == 3 * 2 * 4 * 16 * 4
            assert offload.pool.used_bytes == 0
    for wanted, found in zip(*gradients, strict=True):
        assert torch.allclose(wanted, found, rtol=1e-6, atol=1e-7)
