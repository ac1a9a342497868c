"""Models that are loaded from safetensors files under `delayed_init` are bitwise those that are loaded at once."""

import copy
import os
import threading
import warnings

import pytest
import safetensors
import torch
from delayed_init.test_delayed_init import build_both
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from hyperpod_plugins.delayed_init import delayed_init, materialize, tapes_of
from hyperpod_plugins.delayed_init.api import delay_transformers
from hyperpod_plugins.delayed_init.weight_files import files_digest
from hyperpod_plugins.errors import InitializationError

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "gpt2": GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=8),  # transposed, fused
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),  # experts that the loader stacks
    "qwen3_moe": Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, head_dim=8),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a small model with random weights, in several files."""

    def save(kind):
        folder = tmp_path_factory.getbasetemp() / f"pretrained_{kind}"
        if not folder.exists():
            torch.manual_seed(7)
            AutoModelForCausalLM.from_config(CONFIGS[kind]).save_pretrained(folder, max_shard_size="5KB")
        return folder

    return save


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_of_transformers_is_bitwise_what_is_loaded_at_once(saved, kind, dtype):
    folder = saved(kind)
    _, model, _ = build_both(lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).train())
    model(torch.arange(4)[None], labels=torch.arange(4)[None]).loss.backward()


def test_weights_that_the_files_lack_are_drawn_as_by_the_loader(saved):
    folder = saved("llama")
    build_both(lambda: AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3))


def test_a_change_inside_is_recorded(saved):
    def build():
        model = AutoModelForCausalLM.from_pretrained(saved("llama"), dtype="bfloat16")
        model.resize_token_embeddings(40)  # new rows are drawn around the mean of the old ones
        return model

    build_both(build)


def test_nothing_is_read_before_the_model_is_materialized(saved):
    folder = saved("llama")
    with delayed_init() as tape:
        model = AutoModelForCausalLM.from_pretrained(folder)
    assert all(each.is_meta for each in model.parameters())
    largest = max(each.numel() * each.element_size() for each in model.parameters())
    assert materialize(model).peak_bytes <= largest + 64  # the rotary frequencies
    assert files_digest(tape)


def test_a_loader_of_the_program_itself(tmp_path):
    values = {"weight": torch.randn(3, 2), "bias": torch.arange(3).half()}
    save_file(values, tmp_path / "weights.safetensors")

    class Loaded(nn.Module):
        def __init__(self):
            super().__init__()
            weights = load_file(tmp_path / "weights.safetensors")
            with safetensors.safe_open(tmp_path / "weights.safetensors", "pt") as file:
                part = file.get_slice("weight")
                assert part.get_shape() == [3, 2]
                self.rows = nn.Parameter(part[1:] * 2)
            self.weight, self.bias = nn.Parameter(weights["weight"]), nn.Parameter(weights["bias"].float())

    build_both(Loaded)


def test_what_is_replaced_comes_back(saved):
    before, variables = safetensors.safe_open, dict(os.environ)
    with pytest.raises(OSError, match="nowhere"), delayed_init():
        AutoModelForCausalLM.from_pretrained("/nowhere/at/all")
    assert safetensors.safe_open is before
    assert dict(os.environ) == variables
    with safetensors.safe_open(next(saved("llama").glob("*.safetensors")), "pt") as file:
        assert not file.get_tensor(file.keys()[0]).is_meta


def test_weights_that_a_later_change_would_lose_are_refused(saved):
    folder = saved("llama")
    with delayed_init():
        model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.embed_tokens = nn.Embedding(40, 16, device="meta")  # as resize_token_embeddings does
    with pytest.raises(
        InitializationError, match=r"embed_tokens.weight have no values, beside weights .* inside delayed_init"
    ):
        materialize(model)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.lm_head.weight.mul_(2),
        lambda model: model.load_state_dict(
            {name: torch.zeros(each.shape) for name, each in model.state_dict().items()}
        ),
        lambda model: model.half().float(),
    ],
)
def test_changes_of_values_that_do_not_exist_yet_are_refused(saved, change):
    with delayed_init():
        model = AutoModelForCausalLM.from_pretrained(saved("llama"))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        change(model)
    with pytest.raises(InitializationError, match=r"changed after delayed_init had ended .*Change it inside"):
        materialize(model)


def test_copies_casts_and_ties_afterwards_keep_the_values(saved):
    eager = AutoModelForCausalLM.from_pretrained(saved("llama"))
    with delayed_init():
        model = AutoModelForCausalLM.from_pretrained(saved("llama"))
    other = copy.deepcopy(model).bfloat16()
    model.lm_head.weight = model.model.embed_tokens.weight
    materialize(model)
    materialize(other)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, eager.model.embed_tokens.weight)
    for one, found in zip(eager.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.bfloat16(), found)


def test_a_file_whose_tensors_are_changed_in_place_is_not(tmp_path):
    save_file({"weight": torch.ones(4)}, tmp_path / "weights.safetensors")

    class Doubled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(load_file(tmp_path / "weights.safetensors")["weight"])
            self.weight.data.mul_(2)

    with delayed_init():
        models = Doubled(), Doubled()
        models = (*models, copy.deepcopy(models[0]))
    for model in models:
        materialize(model)
        assert torch.equal(model.weight, torch.full((4,), 2.0))


def test_other_threads_and_types_are_read_at_once(tmp_path):
    save_file({"weight": torch.ones(4), "count": torch.ones(3).to(torch.uint16)}, tmp_path / "weights.safetensors")
    found = {}
    with delayed_init():
        thread = threading.Thread(target=lambda: found.update(load_file(tmp_path / "weights.safetensors")))
        thread.start()
        thread.join()
        with safetensors.safe_open(tmp_path / "weights.safetensors", "pt") as file:
            count = file.get_tensor("count")
    assert torch.equal(found["weight"], torch.ones(4))
    assert count.tolist() == [1, 1, 1]
    assert torch.equal(file.get_tensor("weight"), torch.ones(4))  # once the context has ended


def test_weights_that_the_program_does_not_need_are_not(saved):
    folder = saved("llama")
    with delayed_init():
        model = AutoModelForCausalLM.from_pretrained(folder).model
    materialize(model)


def test_the_digest_tells_files_apart(saved):
    digests = set()
    for kind in ("llama", "tied", "llama"):
        with delayed_init():
            model = AutoModelForCausalLM.from_pretrained(saved(kind))
        digests |= {files_digest(tape) for tape in tapes_of(model)}
    assert len(digests) == 2


def test_transformers_is_delayed_without_a_change_of_the_program(saved, monkeypatch):
    for name in ("from_pretrained", "_from_config"):
        monkeypatch.setattr(PreTrainedModel, name, vars(PreTrainedModel)[name])  # so that it comes back
    torch.manual_seed(3)
    eager = AutoModelForCausalLM.from_pretrained(saved("llama")), AutoModelForCausalLM.from_config(CONFIGS["llama"])
    delay_transformers()
    delay_transformers()
    torch.manual_seed(3)
    models = AutoModelForCausalLM.from_pretrained(saved("llama")), AutoModelForCausalLM.from_config(CONFIGS["llama"])
    for one, other in zip(eager, models, strict=True):
        assert all(each.is_meta for each in other.parameters())
        materialize(other)
        assert all(map(torch.equal, one.parameters(), other.parameters()))


def test_a_skeleton_on_the_meta_device_stays_one():
    torch.manual_seed(2)
    with delayed_init():
        with torch.device("meta"):
            skeleton = nn.Linear(2, 3)
        layer = nn.Linear(2, 3)
        layer.weight = nn.Parameter(torch.zeros_like(skeleton.weight, device="cpu"))
    assert skeleton.weight.is_meta
    materialize(layer)
    assert not layer.weight.any()
    torch.manual_seed(2)
    assert torch.equal(nn.Linear(2, 3).bias, layer.bias)  # the skeleton has drawn nothing
    with pytest.raises(InitializationError, match=r"built under torch.device\('meta'\) inside delayed_init"):
        materialize(skeleton)
