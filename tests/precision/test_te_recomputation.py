"""Blocks with layers of Transformer Engine that backward computes again: the same bits as blocks that keep everything.

Scales move on as a forward ends, so that a recomputation without those of its own forward would have other values.
"""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.memory import ActivationOffload, recompute_blocks
from hyperpod_plugins.memory.recompute import set_recomputed
from hyperpod_plugins.precision import TeScaling, convert_linears
from hyperpod_plugins.precision.transformer_engine import Float8Recomputation

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(32, 64), nn.Dropout(0.2), nn.Linear(64, 32, bias=False)
        self.seen = []

    def forward(self, x):
        self.seen.append(x)
        return x + self.down(self.drop(torch.relu(self.up(x))))


def made(library, kind, recipe="te-fp8", algorithm="max"):
    import hyperpod_plugins.precision.transformer_engine as ours

    library.FP8GlobalStateManager.reset()
    ours._trained.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), *(Block() for _ in range(3)), nn.Linear(32, 16))
    blocks = [*model[1:4]]
    scaling = TeScaling(amax_history_len=3, amax_compute_algo=algorithm) if recipe == "te-fp8" else TeScaling()
    convert_linears(model, recipe, CPU, blocks=blocks, te_scaling=scaling)
    recompute_blocks(blocks, kind, Float8Recomputation.of(model))
    return model


def batch(seed):
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(seed)) * (1 + seed)


def state_of(model):
    return [each.clone() for each in (*(each.grad for each in model.parameters()), *model.buffers())]


def trained(model, *, num_micro_steps=2):
    """Losses, gradients and scales of some steps."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=1e-2), []
    torch.manual_seed(1)
    for step in range(4):
        for micro_step in range(num_micro_steps):
            loss = model(batch(2 * step + micro_step)).square().mean()
            loss.backward()
            found.append(loss.detach())
        found += state_of(model)
        optimizer.step()
        optimizer.zero_grad()
    return found


def is_same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_recomputation_has_the_scales_of_its_forward(library, kind, algorithm):
    wanted = trained(made(library, "none", algorithm=algorithm))
    model = made(library, kind, algorithm=algorithm)
    assert is_same(trained(model), wanted)
    assert len(model[1].seen) == 2 * 4 * 2  # each of eight forwards, again
    assert not torch.equal(model[1].up.fp8_scale_fwd, torch.ones(3))


@pytest.mark.parametrize("recipe", ["te-mxfp8", "te-nvfp4"])
def test_recomputation_with_scales_of_blocks(library, recipe):
    wanted = trained(made(library, "none", recipe))
    model = made(library, "full", recipe)
    assert is_same(trained(model), wanted)
    assert len(model[1].seen) == 2 * 4 * 2


def drop_graphs(model):
    """A forward whose graph is dropped, as that of a step that is undone, in each step."""
    found = []
    for step in range(3):
        model(batch(7 + step)).sum()
        model(batch(step)).square().mean().backward()
        found += state_of(model)
    return found


def run_backward_twice(model):
    found = []
    for step in range(3):
        loss = model(batch(step)).square().mean()
        loss.backward(retain_graph=True)
        found += state_of(model)
        loss.backward()
        found += state_of(model)
    return found


def run_forwards_first(model):
    """Two forwards, and one backward of both, which computes the second one's blocks again first."""
    found = []
    for step in range(3):
        (model(batch(step)).square().mean() + model(batch(5 - step)).square().mean()).backward()
        found += state_of(model)
    return found


def evaluate_between(model):
    found = []
    for step in range(3):
        loss = model(batch(step)).square().mean()
        with torch.no_grad():
            model(batch(9))
        model.eval()(batch(8))
        model.train()
        loss.backward()
        found += state_of(model)
    return found


@pytest.mark.parametrize("run", [drop_graphs, run_backward_twice, run_forwards_first, evaluate_between])
def test_each_forward_has_scales_of_its_own(library, run):
    torch.manual_seed(1)
    wanted = run(made(library, "none"))
    torch.manual_seed(1)
    assert is_same(run(made(library, "full")), wanted)


def test_a_model_can_be_copied(library):
    model = made(library, "full")
    copied = deepcopy(model)
    model(batch(0)).square().mean().backward()
    assert all(each.grad is None for each in copied.parameters())
    assert torch.equal(copied[1].up.weight, model[1].up.weight)


def test_a_backward_within_a_step_is_the_same(library):
    """As by `manual_backward` in a `training_step`, which is one region."""
    from hyperpod_plugins.precision.transformer_engine import float8_region

    found = []
    for kind in ("none", "full"):
        model = made(library, kind)
        torch.manual_seed(1)
        for step in range(3):
            with float8_region(model):
                model(batch(step)).square().mean().backward()
        found.append(state_of(model))
    assert is_same(*found)


def test_an_interrupted_recomputation_leaves_the_present_scales(library):
    model, manager = made(library, "full"), library.FP8GlobalStateManager
    for step in range(3):
        model(batch(step)).square().mean().backward()
    loss = model(batch(3)).square().mean()
    before = [each.clone() for each in model.buffers()]

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model[3].down.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    handle.remove()
    assert is_same([*model.buffers()], before)
    assert (manager.enabled, manager.depth) == (False, 0)
    model(batch(4)).square().mean().backward()


def test_gradients_of_inputs_in_an_evaluation_are_recomputed_in_bfloat16(library):
    found = []
    for kind in ("none", "full"):
        model = made(library, kind).requires_grad_(False).eval()
        x = batch(0).requires_grad_()
        model(x).square().mean().backward()
        found.append([x.grad, *model.buffers()])
    assert is_same(*found)


def test_offload_moves_the_inputs_of_blocks_and_no_tensor_in_float8(library):
    model = made(library, "full")
    wanted, plain = trained(model), model
    model = made(library, "full")
    offload = ActivationOffload(CPU, min_bytes=1)
    offload.attach([*model[1:4]])
    assert is_same(trained(model), wanted)
    assert offload.stored_bytes == 8 * 2 * 32 * 32 * 4  # of each block but the last, in each of eight forwards
    assert len(plain[1].seen) == len(model[1].seen)


def test_blocks_that_keep_their_activations_keep_tensors_in_float8_on_the_device(library):
    """As `activation_offload='auto'` may have it."""
    wanted = trained(made(library, "none"))
    model, blocks = made(library, "full"), []
    offload = ActivationOffload(CPU, min_bytes=1)
    blocks = [*model[1:4]]
    offload.attach(blocks)
    set_recomputed(blocks[0], False)
    saved = []
    kept = partial(torch.autograd.graph.saved_tensors_hooks, lambda each: saved.append(each) or each, lambda each: each)
    with kept():
        assert is_same(trained(model), wanted)
    assert offload.stored_bytes == 8 * 32 * 32 * 4  # of the middle one
    assert len(model[1].seen) == 8
    assert not any(each.dtype == torch.float8_e4m3fn for each in saved)  # those of blocks are held by the offload


def test_a_checkpoint_function_of_the_program_is_refused(library):
    """It cannot know the scales that its block had."""
    model = made(library, "none")
    model[1].forward = partial(checkpoint, model[1].forward, use_reentrant=False)
    loss = model(batch(0)).square().mean()
    with pytest.raises(
        ConfigError, match=r"again in backward by a checkpoint function .*activation_checkpointing='full'"
    ):
        loss.backward()
