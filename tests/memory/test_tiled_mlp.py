"""MLPs tile by tile along the sequence, against the whole."""

import copy

import pytest
import torch
from torch import nn

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.memory import recompute_blocks, tile_mlps

transformers = pytest.importorskip("transformers")


def tiny_llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=50,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("num_tiles", [2, 5, 100])
@pytest.mark.parametrize("kind", ["none", "full"])
def test_gradients_are_those_of_the_whole(num_tiles, kind):
    tokens = torch.randint(50, (2, 23), generator=torch.Generator().manual_seed(1))
    plain, model = tiny_llama(), tiny_llama()
    assert tile_mlps(model, num_tiles) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    recompute_blocks(model.model.layers, kind)
    for each in (plain, model):
        each(tokens, labels=tokens).loss.backward()
    for wanted, found in zip(plain.parameters(), model.parameters(), strict=True):
        assert (found.grad - wanted.grad).abs().max() <= 5e-7 * max(wanted.grad.abs().max(), 1e-3)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, plain(tokens).logits)


def test_inner_activations_exist_for_one_tile_at_a_time():
    model, largest = tiny_llama(), [0]
    tile_mlps(model, 4)

    def watch(module, args, output):
        largest[0] = max(largest[0], output.shape[-2])

    for layer in model.model.layers:
        layer.mlp.up_proj.register_forward_hook(watch)
    tokens = torch.randint(50, (1, 64))
    model(tokens, labels=tokens).loss.backward()
    assert largest == [64]  # the first time, the whole is compared with the tiles
    largest[0] = 0
    model(tokens, labels=tokens).loss.backward()
    assert largest == [16]


class Own(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(p), nn.Linear(8, 4))


def test_what_cannot_be_tiled_is_refused():
    assert tile_mlps(Own(), 2) == ["mlp"]
    with pytest.raises(ConfigError, match=r"dropout would draw other random numbers.*mlp"):
        tile_mlps(Own(0.1), 2)
    with pytest.raises(ConfigError, match="Linear has no MLP that could be tiled"):
        tile_mlps(nn.Linear(2, 2), 2)
    with pytest.raises(ConfigError, match="must be at least 2, but is 1"):
        tile_mlps(Own(), 1)


class Cumulative(nn.Sequential):
    def forward(self, x):
        return super().forward(x).cumsum(-2)


class Functional(nn.Sequential):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.3)


class Summed(nn.Sequential):
    def forward(self, x, scale=1.0):
        return super().forward(x) * scale


@pytest.mark.parametrize("kind", [Cumulative, Functional])
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_a_module_whose_tokens_depend_on_each_other_is_refused_before_it_is_tiled(kind, is_recomputed):
    torch.manual_seed(0)
    plain, model = Own(), Own()
    plain.mlp = kind(*plain.mlp)
    model.mlp = kind(*model.mlp)
    model.load_state_dict(plain.state_dict())
    tile_mlps(model, 2)
    if is_recomputed:
        recompute_blocks([model.mlp])
    x, gradients = torch.randn(2, 6, 4), []
    for each in (plain, model):
        torch.manual_seed(1)
        each.mlp(x).square().sum().backward()
        gradients.append([parameter.grad for parameter in each.parameters()])
    for wanted, found in zip(*gradients, strict=True):
        assert torch.equal(wanted, found)  # the first step is computed as a whole
    with pytest.raises(ConfigError, match=f"{kind.__name__} does not treat each token alone"):
        model.mlp(x)


def test_modules_of_several_arguments_and_copies():
    model = Own()
    model.mlp = Summed(*model.mlp)
    tile_mlps(model, 2)
    with pytest.raises(ConfigError, match="Summed takes more than one tensor"):
        model.mlp(torch.randn(2, 6, 4), 2.0)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not other.mlp(torch.randn(2, 6, 4)).any()
    assert model.mlp(torch.randn(2, 6, 4)).any()


def test_attention_is_no_mlp():
    model = nn.ModuleDict({"mlp": nn.MultiheadAttention(4, 2)})
    with pytest.raises(ConfigError, match="has no MLP that could be tiled"):
        tile_mlps(model, 2)
