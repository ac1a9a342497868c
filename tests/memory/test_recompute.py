"""Blocks that are computed again, against blocks that keep everything: the same bits."""

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.memory import ActivationOffload, recompute_blocks
from hyperpod_plugins.memory.recompute import _draws_random_numbers

transformers = pytest.importorskip("transformers")


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        if kind == "spectral norm":
            self.linear = nn.utils.parametrizations.spectral_norm(self.linear)
        self.norm = nn.BatchNorm1d(8) if kind == "batch norm" else nn.LayerNorm(8)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("scale", torch.ones(()))
        self.moves = kind == "buffer"

    def forward(self, x):
        if self.moves:
            self.scale.mul_(1.5)
        return x + self.drop(torch.tanh(self.linear(self.norm(x)))) * self.scale


def train(kind, recompute, num_micro_batches=1):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(kind) for _ in range(3)))
    recompute_blocks(list(model), recompute)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(1)
    for _ in range(3):
        losses = [model(torch.randn(16, 8)).square().mean() for _ in range(num_micro_batches)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("kind", ["plain", "batch norm", "spectral norm", "buffer"])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_state_of_blocks_counts_once(kind, recompute):
    wanted, found = train(kind, "none"), train(kind, recompute)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("kind", ["plain", "batch norm", "buffer"])
@pytest.mark.parametrize("is_offloaded", [False, True])
def test_a_graph_may_have_several_backwards(kind, is_offloaded):
    gradients = []
    for recompute in ("none", "full"):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(kind) for _ in range(3)))
        recompute_blocks(list(model), recompute)
        if is_offloaded and recompute == "full":
            ActivationOffload(torch.device("cpu"), min_bytes=1).attach(list(model))
        torch.manual_seed(1)
        loss = model(torch.randn(16, 8)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        torch.autograd.grad(loss, list(model.parameters()))
        model(torch.randn(16, 8)).square().mean().backward()  # a new graph, after that
        gradients.append([each.grad for each in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_blocks_are_set_up_once():
    first, second = Block("plain"), Block("plain")
    recompute_blocks([first])
    checkpoint(second)
    for block in (first, second):
        with pytest.raises(ConfigError, match="Block is set up for recomputation already"):
            recompute_blocks([block])


def test_each_call_is_computed_again_with_its_own_buffers():
    wanted, found = train("batch norm", "none", 2), train("batch norm", "full", 2)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def test_a_forward_in_evaluation_says_nothing_about_training():
    states = []
    for recompute in ("none", "full"):
        torch.manual_seed(0)
        block = Block("batch norm")
        recompute_blocks([block], recompute)
        for is_training in (False, True, True):
            block.train(is_training)(torch.ones(4, 8)).square().sum().backward()
        states.append(block.state_dict())
    for name, value in states[0].items():
        assert torch.equal(states[1][name], value), name


def test_a_large_buffer_that_changes_is_refused():
    class Large(Block):
        def __init__(self):
            super().__init__("plain")
            self.register_buffer("history", torch.zeros(1 << 19))

        def forward(self, x):
            self.history.add_(1.0)
            return super().forward(x)

    block = Large()
    recompute_blocks([block])
    with pytest.raises(ConfigError, match="the buffer history of Large, 2097152 bytes, changes in each forward"):
        block(torch.randn(4, 8))


@pytest.mark.filterwarnings("ignore:module forward hook with")  # of torch's checkpoint, where a hook before it raises
@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_models_that_hand_caches_to_their_blocks(recompute, attention):
    tokens = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    gradients = []
    for kind in ("none", recompute):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, attn_implementation=attention,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).train()  # use_cache is the default
        recompute_blocks(model.model.layers, kind)
        model(input_ids=tokens, attention_mask=mask, labels=tokens).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for wanted, found in zip(*gradients, strict=True):
        assert torch.equal(wanted, found)
    past = transformers.DynamicCache()
    with torch.no_grad():
        model(input_ids=tokens[:, :3], past_key_values=past)
    with pytest.raises(ConfigError, match="was given a cache with 3 tokens"):
        model(input_ids=tokens[:, 3:], past_key_values=past, labels=tokens[:, 3:])


def test_attention_that_drops_elements_is_not_kept():
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    query = torch.zeros(1, 1, 1, 1)
    assert not _draws_random_numbers(flash, (query, query, query), {})
    assert _draws_random_numbers(flash, (query, query, query, 0.1), {})
    assert _draws_random_numbers(flash, (query, query, query), {"dropout_p": 0.1})
    assert not _draws_random_numbers(torch.ops.aten.mm.default, (query, query), {})
