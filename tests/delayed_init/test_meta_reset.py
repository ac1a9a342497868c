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


class Outer(nn.Linear):
    """Initialises its submodule too, as graph convolutions do."""

    def __init__(self):
        super().__init__(3, 4)
        self.inner = nn.Linear(4, 2)
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))

    def reset_parameters(self):
        super().reset_parameters()
        if "inner" in self._modules:  # nn.Linear's constructor calls this too
            self.inner.reset_parameters()
            self.counts.zero_()


@pytest.mark.parametrize("missing", ["bias", "weight", "counts"])
def test_values_that_exist_stay(missing):
    model = Outer()
    model.counts += 5
    model.inner.weight.data[0, 0] = float("nan")
    model.inner.bias.note = "kept"  # an attribute of the program
    before = dict([*model.named_parameters(), *model.named_buffers()])
    values = {name: tensor.detach().clone() for name, tensor in before.items()}
    alone = on_meta(Outer)
    alone.inner = nn.Linear(4, 2)  # has values as in `model`: submodules would draw first
    state = torch.get_rng_state()
    materialize(alone, seed=3)
    whole = getattr(model, missing)
    empty = whole.detach().to("meta")
    setattr(model, missing, nn.Parameter(empty) if isinstance(whole, nn.Parameter) else empty)
    materialize(model, seed=3)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name == missing:
            assert torch.equal(tensor, getattr(alone, name)), "drawn as if the others were drawn too"
        else:
            assert tensor is before[name]
            assert tensor.detach().numpy().tobytes() == values[name].numpy().tobytes(), name
    assert torch.equal(torch.get_rng_state(), state)


READS = {
    "fills": lambda module: module.scale.fill_(module.inner.weight.abs().mean()),
    "copies": lambda module: module.scale.copy_(module.inner.weight.mean()),
    "multiplies": lambda module: nn.init.ones_(module.scale).mul_(module.inner.weight.mean()),
    "asks": lambda module: module.scale.fill_(module.inner.weight.mean().item()),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_an_initialiser_that_reads_a_submodule_is_refused(read):
    """It would read memory without values: submodules are initialised later."""

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.scale = nn.Parameter(torch.ones(1))

        def reset_parameters(self):
            with torch.no_grad():
                read(self)

    with pytest.raises(InitializationError, match=r"the root \(Reads\).*delayed_init"):
        materialize(on_meta(Reads))


class Attention(nn.MultiheadAttention):
    def reset_parameters(self):
        self._reset_parameters()


def test_attention_sets_the_bias_of_its_projection_to_zero():
    attention = on_meta(lambda: Attention(8, 2))
    materialize(attention, seed=3)
    assert attention.out_proj.bias.tolist() == [0] * 8
    assert 0 < attention.out_proj.weight.std() < 1
    assert 0 < attention.in_proj_weight.std() < 1


class Parent(nn.Module):
    """Owns no parameters; its initialiser writes those of its submodule."""

    def __init__(self, write):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.other = nn.Linear(6, 6)
        self.write = write

    def reset_parameters(self):
        with torch.no_grad():
            self.write(self.inner)


WRITES = {
    "draws": lambda inner: inner.weight.normal_(),
    "writes data": lambda inner: inner.weight.data.uniform_(),
    "writes a view": lambda inner: nn.init.ones_(inner.weight[2]),
    "scales": lambda inner: inner.weight.mul_(0.5),
    "copies": lambda inner: inner.weight.copy_(torch.rand(6, 6, device=inner.bias.device)),
    "resets": lambda inner: inner.reset_parameters(),
    # `nn.init` skips tensors on the meta device
    "truncates": lambda inner: nn.init.trunc_normal_(inner.weight),
    "truncates both": lambda inner: (nn.init.trunc_normal_(inner.weight), nn.init.trunc_normal_(inner.bias)),
    "orthogonal": lambda inner: nn.init.orthogonal_(inner.weight),
    "identity": lambda inner: nn.init.eye_(inner.weight),
    "may stop": lambda inner: None if inner.bias.is_meta else nn.init.ones_(inner.weight),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_to_submodules_come_last_as_in_an_eager_build(write):
    model = on_meta(lambda: Parent(write))
    materialize(model, seed=5)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(5)
        expected = Parent(write)
        expected.reset_parameters()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected.state_dict()[name]), name
    assert not torch.equal(model.inner.weight, model.other.weight)


def test_writes_to_values_of_submodules_that_exist_are_ignored():
    model = Parent(lambda inner: (inner.weight.fill_(3), inner.bias.fill_(3)))
    weight, other = model.inner.weight.detach().clone(), model.other.weight.detach().clone()
    model.inner.bias = nn.Parameter(model.inner.bias.to("meta"))
    materialize(model)
    assert torch.equal(model.inner.weight, weight)
    assert torch.equal(model.other.weight, other)
    assert model.inner.bias.tolist() == [3] * 6


def test_ties_between_submodules_stay_when_their_parent_writes_one():
    def build():
        model = Parent(lambda inner: inner.weight.fill_(3))
        model.other.weight = model.inner.weight
        return model

    model = on_meta(build)
    materialize(model)
    assert model.other.weight is model.inner.weight
    assert model.other.weight.unique().tolist() == [3]


def replaces(inner):
    inner.weight = nn.Parameter(torch.ones(6, 6))


def replaces_data(inner):
    inner.weight.data = inner.weight.data * 2


def writes_once(inner):
    if not hasattr(inner, "was_reset"):
        nn.init.ones_(inner.weight)
    inner.was_reset = True


@pytest.mark.parametrize("write", [replaces, replaces_data, writes_once])
def test_an_initialiser_whose_writes_to_submodules_cannot_be_repeated_is_refused(write):
    with pytest.raises(InitializationError, match=r"inner\.weight.*the root \(Parent\).*delayed_init"):
        materialize(on_meta(lambda: Parent(write)))


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


@pytest.mark.slow_single
def test_hugging_face_modules_write_their_submodules():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=64, n_layer=8, n_head=2, vocab_size=64, n_positions=8)
    model = on_meta(lambda: transformers.GPT2LMHeadModel(config))
    materialize(model)
    assert model.transformer.h[0].mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.transformer.h[0].mlp.c_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
