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
    model = Own()
    model.mlp.forward = model.mlp.forward
    with pytest.raises(ConfigError, match=r"forward of MLPs was replaced in the objects.*mlp"):
        tile_mlps(model, 2)


class Cumulative(nn.Sequential):
    def forward(self, x):
        return super().forward(x).cumsum(-2)


class Functional(nn.Sequential):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.3)


class Sorted(nn.Sequential):
    def forward(self, x):
        return super().forward(x).sort(-2).values


class Summed(nn.Sequential):
    def forward(self, x, scale=1.0):
        return super().forward(x) * scale


@pytest.mark.parametrize("kind", [Cumulative, Functional, Sorted])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_module_whose_tokens_depend_on_each_other_is_refused_before_the_first_step(kind, device):
    """Also before it has values, and where what is loaded is in evaluation."""
    with torch.device(device):
        model = Own()
    model.mlp = kind(*model.mlp)
    model.eval()
    with pytest.raises(ConfigError, match=rf"{kind.__name__} \(mlp\) does not treat each token alone"):
        tile_mlps(model, 2)


class Sometimes(nn.Sequential):
    depends = False

    def forward(self, x):
        return super().forward(x).cumsum(-2) if self.depends else super().forward(x)


def test_each_module_that_may_compute_differently_is_tried():
    model = nn.ModuleList([Own(), Own(), Own()])
    for each in model:
        each.mlp = Sometimes(*each.mlp)
    tile_mlps(copy.deepcopy(model), 2)
    model[1].mlp.depends = True
    with pytest.raises(ConfigError, match=r"Sometimes \(1.mlp\) does not treat"):
        tile_mlps(model, 2)
    model[1].mlp.depends = False
    model[2].mlp[0].register_forward_hook(lambda module, args, output: output.cumsum(-2))
    with pytest.raises(ConfigError, match=r"Sometimes \(2.mlp\) does not treat"):
        tile_mlps(model, 2)


class Named(nn.Module):
    """Its last layer comes first among its modules, and a buffer counts its calls."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(8, 4), nn.Linear(4, 8)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        assert self.training
        self.calls += 1
        return self.down(torch.tanh(self.up(x)))


def test_a_trial_leaves_no_trace():
    torch.manual_seed(3)
    model = nn.ModuleDict({"mlp": Named()}).eval()
    with torch.no_grad():
        model["mlp"].down.weight.zero_()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert tile_mlps(model, 2, ("Named",)) == ["mlp"]
    assert torch.equal(random, torch.get_rng_state())
    assert not model["mlp"].up.training
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    broken = nn.ModuleDict({"mlp": Named()})
    broken["mlp"].up = nn.Linear(4, 9)
    with pytest.raises(ConfigError, match=r"Named \(mlp\) could not be computed .* shapes cannot be multiplied"):
        tile_mlps(broken, 2, ("Named",))


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
