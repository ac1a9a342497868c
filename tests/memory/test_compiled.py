"""Compiled blocks and models that are recomputed, offloaded and tiled, against eager ones."""

import gc

import pytest
import torch
import torch._dynamo.testing
from torch import nn

from hyperpod_plugins.memory import ActivationOffload, recompute_blocks, tile_mlps

pytestmark = [pytest.mark.slow_single, pytest.mark.filterwarnings("ignore")]  # of dynamo, many


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))

    def forward(self, x):
        return x + self.mlp(x)


NUM_BLOCKS = 10  # more than torch compiles one function for, if it has to do so for each block


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize(
    ("recompute", "is_offloaded", "num_tiles"),
    [
        ("full", False, 1),
        ("full", True, 1),
        ("selective", False, 1),
        ("selective", True, 1),
        ("none", False, 2),
        ("full", True, 2),
    ],
)
def test_compiled_blocks_have_the_same_gradients(recompute, is_offloaded, num_tiles, is_whole):
    """Each block is compiled, or the whole model, whose graph leaves out blocks that are recomputed."""
    gradients = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
        if num_tiles > 1:
            tile_mlps(model, num_tiles)
        recompute_blocks(list(model), recompute)
        if is_offloaded:
            offload = ActivationOffload(torch.device("cpu"), min_bytes=1)
            offload.attach(list(model))
        if is_compiled:
            for each in [model] if is_whole else model:
                each.compile(backend="aot_eager")
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            for _ in range(3):
                model.zero_grad()
                model(torch.ones(4, 16)).square().sum().backward()
        gc.collect()
        gradients.append([parameter.grad for parameter in model.parameters()])
        if is_offloaded:
            assert offload.stored_bytes == 3 * (NUM_BLOCKS - 1) * 4 * 16 * 4
            assert offload.pool.used_bytes == 0
    for wanted, found in zip(*gradients, strict=True):
        assert torch.allclose(wanted, found, rtol=1e-6, atol=1e-7)


def test_blocks_that_are_compiled_run_compiled_where_the_whole_model_is_too(caplog):
    """The graph of the model leaves them out, and each has its own; otherwise a line says that they have none."""
    torch._dynamo.reset()
    for compiles_blocks in (False, True):
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        kind = type("Own", (Block,), {})
        model = nn.Sequential(*(kind() for _ in range(3)))
        recompute_blocks(list(model))
        if compiles_blocks:
            for block in model:
                block.compile(backend=counter)
        model.compile(backend="aot_eager")
        caplog.clear()
        model(torch.ones(4, 16)).square().sum().backward()
        assert bool(counter.op_count) == compiles_blocks
        assert ("Own is recomputed in backward" in caplog.text) != compiles_blocks
