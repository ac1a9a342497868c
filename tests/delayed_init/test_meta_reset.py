"""Models built on the plain meta device are initialised by their own initialisers, or refused."""

import pytest
import torch
from torch import nn

from hyperpod_plugins.delayed_init import materialize
from hyperpod_plugins.errors import InitializationError


def on_meta(build):
    with torch.device("meta"):
        return build()


def test_reset_parameters_runs_on_every_module_from_the_seed():
    build = lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Embedding(4, 3))  # noqa: E731
    first, second, other = (on_meta(build) for _ in range(3))
    state = torch.get_rng_state()
    materialize(first, seed=1)
    materialize(second, seed=1)
    materialize(other, seed=2)
    assert torch.equal(torch.get_rng_state(), state)
    for (name, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert not torch.equal(first[0].weight, other[0].weight)
    assert first[1].running_var.tolist() == [1] * 6
    assert first[1].num_batches_tracked.item() == 0
    assert first[0].weight.abs().max() <= 5**-0.5


def test_ties_stay():
    def build():
        model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
        model[1].weight = model[0].weight
        return model

    model = on_meta(build)
    materialize(model)
    assert model[1].weight is model[0].weight


class NoInitialiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class HalfInitialiser(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("steps", torch.zeros(3))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (NoInitialiser, r"the root \(NoInitialiser\).*delayed_init"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.MultiheadAttention(4, 1)), r"1 \(MultiheadAttention\)"),
        (HalfInitialiser, "steps is on the meta device"),
    ],
)
def test_modules_without_a_complete_initialiser_are_named(build, message):
    model = on_meta(build)
    with pytest.raises(InitializationError, match=message):
        materialize(model)


@pytest.mark.slow_single
def test_hugging_face_models_use_their_own_rule():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=512,
        initializer_range=0.5,
        tie_word_embeddings=True,
    )
    model = on_meta(lambda: transformers.LlamaForCausalLM(config))
    materialize(model)
    eager = transformers.LlamaForCausalLM(config)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.std().item() == pytest.approx(0.5, rel=0.05)
    assert torch.equal(model.model.rotary_emb.inv_freq, eager.model.rotary_emb.inv_freq)
    assert torch.equal(model.model.norm.weight, torch.ones(64))
