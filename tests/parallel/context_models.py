"""Models and batches whose contexts are split over ranks that are threads, and comparisons with one process."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from parallel.context_threads import run_threads
from torch import nn

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.parallel import ParallelConfig, SequenceContext
from hyperpod_plugins.parallel.context_parallel import split_contexts

transformers = pytest.importorskip("transformers")
VOCABULARY = 61
TOLERANCE = 5e-7
ONE_AT_A_TIME = threading.Lock()
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "use_cache": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def llama(heads=4, **options):
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=heads, **options)
    return transformers.LlamaForCausalLM(config)


def qwen3(**options):
    config = transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16, **options)
    return transformers.Qwen3ForCausalLM(config)


def windowed_qwen3():
    return qwen3(use_sliding_window=True, sliding_window=5, max_window_layers=1)


def qwen2():
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, num_key_value_heads=2))


def qwen3_moe():
    config = transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, num_key_value_heads=2, head_dim=8)
    return transformers.Qwen3MoeForCausalLM(config)


def mixtral():
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def glm4_moe():
    sizes = {"head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = transformers.Glm4MoeConfig(**SIZES, **sizes, num_key_value_heads=2, first_k_dense_replace=1)
    return transformers.Glm4MoeForCausalLM(config)


def mistral(window=6, **options):
    config = transformers.MistralConfig(**SIZES, num_key_value_heads=2, head_dim=8, sliding_window=window, **options)
    return transformers.MistralForCausalLM(config)


def gpt_oss():
    config = transformers.GptOssConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    )
    model = transformers.GptOssForCausalLM(config)
    with torch.no_grad():  # sinks that matter
        for layer in model.model.layers:
            layer.self_attn.sinks.uniform_(-1.0, 2.0)
    return model


MODELS = {
    "llama": llama,
    "llama, one head of keys": lambda: llama(heads=1),
    "llama, eager": lambda: llama(attn_implementation="eager"),
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3, windows": windowed_qwen3,
    "qwen3_moe": qwen3_moe,
    "mistral, windows": mistral,
    "mistral, windows, eager": lambda: mistral(attn_implementation="eager"),
    "mixtral": mixtral,
    "glm4_moe": glm4_moe,
    "gpt_oss, windows and sinks": gpt_oss,
}
IN_A_RING = ["llama", "llama, one head of keys", "mistral, windows", "qwen3, windows"]


def make(name):
    torch.manual_seed(0)
    return MODELS[name]()


def tokens(batch=2, length=22, seed=1):
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def packed(*lengths, batch=2):
    """Samples that consist of documents."""
    ids = tokens(batch, sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(batch, -1)
    return {"input_ids": ids, "labels": ids, "position_ids": positions}


def padded(*, is_left):
    ids = tokens(2, 18)
    mask = torch.ones_like(ids)
    mask[1, slice(0, 7) if is_left else slice(11, None)] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0) if is_left else None
    batch = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}
    return batch if positions is None else {**batch, "position_ids": positions}


def plain(length=22):
    ids = tokens(length=length)
    return {"input_ids": ids, "labels": ids}


def some_labels():
    """All labels lie in the part of one rank."""
    ids = tokens()
    labels = ids.clone()
    labels[:, 4:] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(model):
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.requires_grad}


def alone(model, compute):
    model = copy.deepcopy(model)
    loss = compute(model)
    loss.backward()
    return loss.detach(), gradients(model)


def split(model, degree, comm_type="auto"):
    model = copy.deepcopy(model)
    split_contexts(model, ParallelConfig(context_parallel_degree=degree, context_comm_type=comm_type), degree)
    return model


def on_contexts(monkeypatch, model, degree, compute, prepare=lambda model: None, comm_type="auto"):
    """The loss on each rank, and the mean of the ranks' gradients, as FSDP2 computes it."""

    def run(rank, group):
        own = split(model, degree, comm_type)
        with ONE_AT_A_TIME:  # Python's parser, which looks for the blocks of a model, is not for several threads
            prepare(own)
        loss = compute(own)
        loss.backward()
        return loss.detach(), gradients(own)

    results = run_threads(monkeypatch, degree, run)
    losses = [loss for loss, _ in results]
    means = {name: sum(found[name] for _, found in results) / degree for name in results[0][1]}
    return losses, means


def loss_of(batch):
    return lambda model: model(**batch).loss


def assert_equal(monkeypatch, model, degree, compute, prepare=lambda model: None, comm_type="auto"):
    wanted, wanted_gradients = alone(model, compute)
    losses, found = on_contexts(monkeypatch, model, degree, compute, prepare, comm_type)
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    assert abs(losses[0] - wanted) <= TOLERANCE * abs(wanted)
    assert found.keys() == wanted_gradients.keys()
    for name, gradient in wanted_gradients.items():
        assert (found[name] - gradient).norm() <= TOLERANCE * gradient.norm() + 1e-9, name


class Loss(nn.Module):
    """Within a model that uses a context; it asks for that, too."""

    def __init__(self, heads):
        super().__init__()
        self.heads, self.head = heads, nn.Linear(16, VOCABULARY)

    def forward(self, hidden, targets):
        context = SequenceContext.of(self, length=targets.shape[1], **self.heads)
        losses = F.cross_entropy(self.head(hidden).transpose(1, 2), context.part(targets), reduction="sum")
        return context.mean(losses, targets.numel())


class Own(nn.Module):
    """A model that is not of transformers."""

    uses_sequence_context = True

    def __init__(self, heads, key_heads, window):
        super().__init__()
        self.heads, self.key_heads, self.window = heads, key_heads, window
        self.loss = Loss({"num_heads": heads, "num_key_value_heads": key_heads})
        self.embed, self.position = nn.Embedding(VOCABULARY, 16), nn.Embedding(64, 16)
        self.query, self.keys, self.out = (
            nn.Linear(16, 4 * heads),
            nn.Linear(16, 8 * key_heads),
            nn.Linear(4 * heads, 16),
        )
        self.mix = nn.Identity()

    def forward(self, ids, targets):
        context = SequenceContext.of(
            self, length=ids.shape[1], num_heads=self.heads, num_key_value_heads=self.key_heads
        )
        hidden = self.embed(context.part(ids)) + self.position(context.positions)
        query = self.query(hidden).unflatten(2, (self.heads, 4)).transpose(1, 2)
        key, value = self.keys(hidden).unflatten(2, (2 * self.key_heads, 4)).transpose(1, 2).chunk(2, dim=1)
        attended = context.attention(query, key, value, window=self.window)
        return self.loss(self.mix(hidden + self.out(attended.transpose(1, 2).flatten(2))), targets)


def refuse(monkeypatch, degree, compute, words):
    with pytest.raises(ConfigError, match=words):
        run_threads(monkeypatch, degree, compute)


def own_with(module):
    model = Own(4, 4, 0)
    model.mix = module
    return model


def marked(module):
    module.treats_tokens_alone = True
    return module
