"""Delayed initialisation is bitwise what building eagerly gives, in one process."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from hyperpod_plugins.delayed_init import delayed_init, materialize, tapes_of
from hyperpod_plugins.errors import InitializationError


def named_tensors(model):
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def build_both(build):
    """(eager model, delayed model, report), after checks that hold for every model."""
    torch.manual_seed(0)
    eager = build()
    state_after_eager = torch.get_rng_state()
    torch.manual_seed(0)
    state_before = torch.get_rng_state()
    with delayed_init():
        delayed = build()
    assert torch.equal(torch.get_rng_state(), state_before)
    assert len(tapes_of(delayed)) == 1
    report = materialize(delayed)

    assert tapes_of(delayed) == []
    expected, got = named_tensors(eager), dict(named_tensors(delayed))
    assert [name for name, _ in expected] == list(got)
    for name, value in expected:
        assert torch.equal(got[name], value), name
        assert got[name].dtype == value.dtype, name
        assert got[name].stride() == value.stride(), name
        assert type(got[name]) is type(value), name
        assert got[name].requires_grad == value.requires_grad, name
        assert ties(eager, value) == ties(delayed, got[name]), name
    assert eager.state_dict().keys() == delayed.state_dict().keys()
    assert torch.equal(torch.get_rng_state(), state_after_eager)
    return eager, delayed, report


def ties(model, tensor):
    return [name for name, other in named_tensors(model) if other is tensor]


def size_bytes(tensor):
    return tensor.numel() * tensor.element_size()


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, 8, 2) / 8)), persistent=False)
        self.register_buffer("cis", torch.polar(torch.ones(4), torch.arange(4.0)).conj(), persistent=False)
        self.register_buffer("mask", torch.triu(torch.full((4, 4), float("-inf")), 1))
        self.register_buffer("table", torch.tensor([1.0, 2.0]))
        self.register_buffer("again", self.inv_freq)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=0)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.head.weight.tag = "tied"
        self.frozen = nn.Linear(8, 8).requires_grad_(False)


def every_initialiser():
    names = "abcdefghijkl"
    weights = nn.ParameterDict({name: nn.Parameter(torch.Tensor(8, 6)) for name in names})
    nn.init.orthogonal_(weights["a"])
    nn.init.trunc_normal_(weights["b"], std=0.5)
    nn.init.trunc_normal_(weights["c"], a=1, b=2)
    nn.init.sparse_(weights["d"], 0.3)
    nn.init.eye_(weights["e"])
    nn.init.xavier_normal_(weights["f"])
    nn.init.kaiming_uniform_(weights["g"])
    nn.init.constant_(weights["h"], 3.0)
    weights["i"].data.bernoulli_(0.3)
    weights["j"].data = torch.randint(0, 9, (8, 6)).float()
    with torch.no_grad():
        weights["k"].copy_(torch.from_numpy(np.arange(48.0).reshape(8, 6)))
        weights["k"][0] = weights["a"][1]
        weights["k"][weights["k"] > 40] = 3.0
        weights["l"].copy_(weights["a"] @ weights["b"].T[:, :6] + torch.tensor(1.0))
    weights["m"] = nn.Parameter(weights["a"].new_tensor([1, 2]))
    weights["n"] = nn.Parameter(weights["a"].detach().clone()[:, torch.randperm(6)])
    return weights


def mixed_layers():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LSTM(4, 5, 2), nn.GRUCell(3, 4), nn.Bilinear(2, 3, 4), nn.PReLU()
    )


def seeded_inside():
    layers = [nn.Linear(4, 4)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        layers.append(nn.Linear(4, 4))
    layers.append(nn.Linear(4, 4))
    own = torch.Generator().manual_seed(3)
    with torch.no_grad():
        layers[0].weight.normal_(generator=own)
        layers[2].bias.normal_(generator=own)
    state = torch.get_rng_state()
    layers.append(nn.Linear(4, 4))
    torch.set_rng_state(state)  # the same numbers once more
    layers.append(nn.Linear(4, 4))
    torch.manual_seed(7)
    return nn.Sequential(*layers)


def double_by_default():
    torch.set_default_dtype(torch.float64)
    try:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), Rotary())
    finally:
        torch.set_default_dtype(torch.float32)


BUILDS = {
    "transformer": lambda: nn.Transformer(16, 2, 1, 2, 32, batch_first=True),
    "mixed_layers": mixed_layers,
    "rotary": Rotary,
    "tied": Tied,
    "every_initialiser": every_initialiser,
    "seeded_inside": seeded_inside,
    "double_by_default": double_by_default,
    "cast": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), Tied()).to(torch.bfloat16).to("cpu"),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)),
}


@pytest.mark.parametrize("name", BUILDS)
def test_bitwise_equal_to_eager(name):
    build_both(BUILDS[name])


def test_nothing_is_allocated_while_building():
    with delayed_init():
        layer = nn.Linear(10**6, 10**6)  # 4 TB
        assert layer.weight.device.type == "cpu"  # as it tells code that asks
        assert not layer.weight.is_meta
    assert layer.weight.is_meta
    assert isinstance(layer.weight, nn.Parameter)


def test_attributes_of_parameters_stay():
    _, delayed, _ = build_both(Tied)
    assert delayed.head.weight.tag == "tied"


@pytest.mark.parametrize("cast", [False, True])
def test_one_full_parameter_alive_at_a_time(cast):
    def build():
        layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
        for layer in layers:  # as models do that fill again what the constructor has filled
            nn.init.normal_(layer.weight)
        return layers.bfloat16() if cast else layers

    _, _, report = build_both(build)
    largest_float32 = 64 * 64 * 4
    assert report.peak_bytes <= largest_float32 * (1.5 if cast else 1) + 64 * 4


def test_values_that_do_not_depend_on_random_numbers_can_be_read():
    with delayed_init():
        assert [rate.item() for rate in torch.linspace(0, 1, 3)] == [0.0, 0.5, 1.0]
        assert torch.arange(3).tolist() == [0, 1, 2]
        assert (torch.ones(2).numpy() + np.asarray(torch.ones(2))).tolist() == [2, 2]
        assert torch.nonzero(torch.arange(4) > 1).tolist() == [[2], [3]]
        assert torch.equal(torch.zeros(2), torch.zeros(2))
        assert bool(torch.zeros(2).sum() == 0)


def read_item():
    return torch.rand(2)[0].item()


def branch():
    return 1 if torch.randn(3).sum() > 0 else 2


def to_numpy():
    return nn.Linear(2, 2).weight.detach().numpy()


REAL = nn.Linear(2, 2)


def refill_real():
    nn.init.normal_(REAL.weight)


def copy_into_real():
    REAL.weight.data.copy_(torch.ones(2, 2))


def on_cuda():
    return torch.empty(3, device="cuda")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (read_item, "looks at a random value"),
        (branch, "looks at a random value"),
        (to_numpy, "looks at a random value"),
        (refill_real, "already has memory"),
        (copy_into_real, "already has memory"),
        (on_cuda, "Build the model on the CPU"),
    ],
)
def test_what_cannot_be_delayed_says_so(build, message):
    before = torch.get_rng_state()
    with delayed_init():
        nn.Linear(2, 2)
        with pytest.raises(InitializationError, match=message):
            build()
    assert torch.equal(torch.get_rng_state(), before)


def test_memory_without_values_is_an_error():
    class Forgetful(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.empty(3))
            self.register_buffer("cache", torch.empty(3))

    with delayed_init():
        model = Forgetful()
    with pytest.raises(InitializationError, match="no code gave values to scale:"):
        materialize(model)


def test_real_parts_are_left_alone():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.made_before = nn.Linear(3, 3)

    model = Half()
    pointer = model.made_before.weight.data_ptr()
    before = model.made_before.weight.detach().clone()
    with delayed_init():
        model.made_inside = nn.Linear(3, 3)
    materialize(model)
    assert model.made_before.weight.data_ptr() == pointer
    assert torch.equal(model.made_before.weight, before)
    assert not model.made_inside.weight.is_meta


def test_another_start_state_gives_that_model():
    torch.manual_seed(1)
    expected = nn.Linear(3, 3)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    with delayed_init() as tape:
        model = nn.Linear(3, 3)
    tape.rng_state = state
    materialize(model)
    assert torch.equal(model.weight, expected.weight)


@pytest.mark.parametrize("seed", range(5))
def test_random_programs_of_in_place_ops(seed):
    """Fuzzing: writes to overlapping views, copies, casts and ties in random order come out bitwise equal."""

    def build():
        dice = random.Random(seed)
        module = nn.Module()
        pool = [torch.empty(6, 6).normal_() for _ in range(3)]
        for _ in range(40):
            a, b = dice.choice(pool), dice.choice(pool)
            action = dice.randrange(9)
            if action == 0:
                a.uniform_(-1, 1)
            elif action == 1:
                a[dice.randrange(6)].normal_()
            elif action == 2:
                a.copy_(b.t().clone())
            elif action == 3:
                a[1:3].add_(b[2:4].clone())
            elif action == 4:
                pool.append(a + b)
            elif action == 5:
                pool.append(a.t())
            elif action == 6:
                a.data = b.clone()
            elif action == 7:
                a.t().fill_(dice.random())
            else:
                pool.append(a.bfloat16().float())
        for index, tensor in enumerate(pool):
            module.register_buffer(f"b{index}", tensor)
        return module

    build_both(build)


HUGGING_FACE = {
    "llama_tied": ("LlamaForCausalLM", "LlamaConfig", {"tie_word_embeddings": True}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {"tie_word_embeddings": False}),
    "llama_bfloat16": ("AutoModelForCausalLM.from_config", "LlamaConfig", {"dtype": "bfloat16"}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 2}),
    "moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {"num_experts": 4, "moe_intermediate_size": 16}),
    "vit": ("ViTModel", "ViTConfig", {"image_size": 32}),  # fills by trunc_normal_
}


@pytest.mark.slow_single
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_models(name):
    transformers = pytest.importorskip("transformers")
    maker, config_class, options = HUGGING_FACE[name]
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = getattr(transformers, config_class)(**sizes, **options)
    make = transformers
    for part in maker.split("."):
        make = getattr(make, part)
    eager, _, report = build_both(lambda: make(config))
    largest = max(size_bytes(tensor) for _, tensor in named_tensors(eager))
    assert report.peak_bytes <= 1.1 * largest


def test_a_shape_changed_afterwards_is_an_error():
    with delayed_init():
        model = nn.Linear(3, 3)
    model.weight = nn.Parameter(torch.empty(2, 3, device="meta"))
    with pytest.raises(InitializationError, match=r"weight was built with the shape \(3, 3\)"):
        materialize(model)


def test_two_delayed_parts_in_one_model():
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    torch.manual_seed(0)
    with delayed_init():
        first = nn.Linear(3, 3)
    with delayed_init() as second_tape:
        second = nn.Linear(3, 3)
    model = nn.Sequential(first, second)
    assert len(tapes_of(model)) == 2
    materialize(first)
    second_tape.rng_state = torch.get_rng_state()
    materialize(model)
    assert all(map(torch.equal, model.parameters(), eager.parameters()))


def test_cast_after_the_build():
    torch.manual_seed(0)
    eager = nn.Linear(3, 3).bfloat16()
    torch.manual_seed(0)
    with delayed_init():
        model = nn.Linear(3, 3)
    model.bfloat16()
    materialize(model)
    assert model.weight.dtype == torch.bfloat16
    assert torch.equal(model.weight, eager.weight)


class Inner(nn.Module):
    """Delays its own initialisation, wherever it is built."""

    def __init__(self):
        super().__init__()
        with delayed_init():
            self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4)


class Outer(nn.Module):
    def __init__(self, make_inner=Inner):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.inner = make_inner()
        self.d, self.e = nn.Linear(4, 4), nn.Linear(4, 4)


class Flat(nn.Module):
    """The same without delay."""

    def __init__(self):
        super().__init__()
        self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4)


def test_delayed_init_inside_delayed_init_goes_on_with_the_same_random_numbers():
    torch.manual_seed(0)
    eager = Outer(Flat)
    torch.manual_seed(0)
    with delayed_init():
        delayed = Outer(Inner)
    assert len(tapes_of(delayed)) == 1
    materialize(delayed)
    for name, value in eager.named_parameters():
        assert torch.equal(dict(delayed.named_parameters())[name], value), name


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        nn.init.normal_(self.layer.weight, std=0.001)
        self.scale = nn.Parameter(torch.randn(3))


def test_a_model_that_is_a_deep_copy_gets_the_values_of_the_original():
    build_both(lambda: copy.deepcopy(Small()))
    build_both(lambda: nn.Sequential(copy.deepcopy(Small()), copy.deepcopy(nn.Linear(3, 3))))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: torch.add(x, 1, out=x),
        lambda x: torch.mul(x, x, out=x),
        lambda x: torch.clamp(x, 0.2, 0.5, out=x),
        lambda x: x.copy_(x),
    ],
)
def test_an_operation_that_writes_what_it_reads(change):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            x = torch.rand(8)
            change(x)
            self.x = nn.Parameter(x)

    build_both(Model)
