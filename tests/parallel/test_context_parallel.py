"""Context parallelism against one process: losses, gradients, and what a token may see. Ranks are threads here.

`test_context_ranks.py` has the same over real ranks and with FSDP2.
"""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from parallel.context_threads import run_threads
from torch import nn

from hyperpod_plugins.errors import ConfigError, NotBuiltYetError
from hyperpod_plugins.memory import offload
from hyperpod_plugins.memory.chunked_loss import chunk_loss
from hyperpod_plugins.memory.recompute import recompute_blocks
from hyperpod_plugins.memory.tiled_mlp import tile_mlps
from hyperpod_plugins.parallel import ParallelConfig, SequenceContext, Topology, ring_attention
from hyperpod_plugins.parallel.context_attention import SequenceLayout
from hyperpod_plugins.parallel.context_parallel import split_contexts
from hyperpod_plugins.parallel.parallelize import match_degrees, save_activation_memory
from hyperpod_plugins.parallel.sequence_context import ContextDegrees

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


# -- the parts ------------------------------------------------------------------------------------------------------


@given(st.integers(1, 70), st.integers(1, 8), st.booleans())
def test_parts_make_up_the_whole(length, degree, exchanges_heads):
    layout = SequenceLayout.of(length, degree, exchanges_heads=exchanges_heads)
    assert length <= layout.length < length + 2 * degree
    positions = [layout.positions(rank) for rank in range(degree)]
    assert {len(each) for each in positions} == {layout.local_length}
    assert torch.equal(torch.cat(positions).sort().values, torch.arange(layout.length))
    whole = torch.arange(3 * layout.length).view(3, layout.length)
    parts = [layout.part(whole, rank) for rank in range(degree)]
    assert torch.equal(layout.whole(torch.stack(parts), dim=1), whole)


@given(st.integers(1, 8))
def test_gathered_parts_cost_the_same(degree):
    """A query attends to the keys before it; each rank has as many such pairs, but for those within a chunk."""
    layout = SequenceLayout.of(16 * degree, degree, exchanges_heads=False)
    assert len({int(layout.positions(rank).sum()) for rank in range(degree)}) == 1


# -- equality -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_one_process(monkeypatch, name, degree):
    batch = plain()
    assert_equal(monkeypatch, make(name), degree, loss_of(batch))


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("name", IN_A_RING)
def test_keys_that_go_round_a_ring(monkeypatch, name, degree):
    monkeypatch.setattr(ring_attention, "_TILE", 3)
    assert_equal(monkeypatch, make(name), degree, loss_of(plain(length=29)), comm_type="p2p")


@pytest.mark.parametrize("name", ["llama", "mistral, windows"])
def test_heads_that_are_not_exchanged_and_keys_that_are_gathered(monkeypatch, name):
    assert_equal(monkeypatch, make(name), 2, loss_of(plain()), comm_type="all_gather")


BATCHES = {
    "documents": packed(7, 9, 8),
    "documents that begin within a part": packed(1, 2, 13, 5),
    "padding on the left": padded(is_left=True),
    "padding on the right": padded(is_left=False),
    "padding with labels": {**padded(is_left=True), "labels": tokens(2, 18)},
    "a length that no part divides": plain(length=21),
    "fewer tokens than parts": plain(length=3),
    "labels of one rank": some_labels(),
    "a sum over items of a larger batch": {**plain(), "num_items_in_batch": torch.tensor(99)},
    "shifted labels": {**plain(), "shift_labels": tokens(seed=5)},
}


ALL_BATCHES = ["llama", "llama, one head of keys", "mistral, windows", "gpt_oss, windows and sinks"]
EAGER = ["llama, eager", "mistral, windows, eager"]  # of which a token of the padding attends to all others equally


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        *((name, batch) for name in ALL_BATCHES for batch in BATCHES if not ("gpt_oss" in name and "docu" in batch)),
        *((name, batch) for name in EAGER for batch in BATCHES if "padding" in batch or "docu" in batch),
    ],
)
def test_batches_of_all_kinds(monkeypatch, name, batch):
    assert_equal(monkeypatch, make(name), 2, loss_of(BATCHES[batch]))


@pytest.mark.parametrize("name", ["llama, one head of keys", "mistral, windows"])
@pytest.mark.parametrize("batch", BATCHES)
def test_batches_of_all_kinds_in_a_ring(monkeypatch, name, batch):
    monkeypatch.setattr(ring_attention, "_TILE", 4)
    assert_equal(monkeypatch, make(name), 2, loss_of(BATCHES[batch]), comm_type="p2p")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"mlp_tiles": 3}, id="tiles"),
        pytest.param({"activation_checkpointing": "selective"}, id="selective"),
        pytest.param({"sm_activation_offloading": True, "loss_chunks": 3, "mlp_tiles": 3}, id="offload, chunks, tiles"),
    ],
)
@pytest.mark.parametrize("name", ["llama", "llama, one head of keys", "qwen3, windows"])
def test_with_the_least_memory(monkeypatch, name, options):
    config, offloads = ParallelConfig(**options), []

    def prepare(model):
        if config.mlp_tiles > 1:
            tile_mlps(model, config.mlp_tiles)
        offloads.append(save_activation_memory(model, config, torch.device("cpu")))

    monkeypatch.setattr(offload, "MIN_BYTES", 1)  # the models are tiny
    assert_equal(monkeypatch, make(name).train(), 2, loss_of(packed(7, 9, 8)), prepare)
    assert len(offloads) == 2  # ranks
    assert all((each is not None and each.stored_bytes > 0) == config.sm_activation_offloading for each in offloads)


@pytest.mark.parametrize("name", ["llama", "llama, one head of keys", "gpt_oss, windows and sinks"])
@pytest.mark.parametrize(
    "prepare",
    [
        pytest.param(lambda model: chunk_loss(model, 3), id="loss in chunks"),
        pytest.param(lambda model: recompute_blocks(model.model.layers), id="recomputed blocks"),
        pytest.param(lambda model: model.activation_checkpointing_enable(), id="recomputed by transformers"),
    ],
)
def test_with_less_memory(monkeypatch, name, prepare):
    batch = plain(24) if "gpt_oss" in name else packed(7, 9, 8)
    assert_equal(monkeypatch, make(name).train(), 2, loss_of(batch), prepare)


def test_what_a_program_makes_of_the_loss_has_the_right_gradient(monkeypatch):
    """Each rank has the loss of whole sequences, not its share, so that any function of it is that of one process."""
    first, second = plain(), {"input_ids": tokens(seed=8), "labels": tokens(seed=8)}

    def compute(model):
        weights = sum(parameter.square().sum() for parameter in model.parameters())
        return model(**first).loss ** 2 / model(**second).loss + 1e-3 * weights

    assert_equal(monkeypatch, make("llama"), 2, compute)


def test_arguments_by_position_and_results_as_tuples(monkeypatch):
    batch = plain()
    assert_equal(
        monkeypatch,
        make("llama"),
        2,
        lambda model: model(batch["input_ids"], None, labels=batch["labels"], return_dict=False)[0],
    )


ADAPTED = ["q_proj", "v_proj", "o_proj"]
ADAPTERS = {
    "LoRA": ("llama", "LoraConfig", {"r": 4, "target_modules": ADAPTED}),
    "LoRA and sinks": ("gpt_oss, windows and sinks", "LoraConfig", {"r": 4, "target_modules": ADAPTED}),
    "LoRA of experts": ("mixtral", "LoraConfig", {"r": 4, "target_parameters": ["experts.down_proj"]}),
    "DoRA": ("llama", "LoraConfig", {"r": 4, "target_modules": [*ADAPTED, "embed_tokens"], "use_dora": True}),
    "AdaLoRA": ("llama", "AdaLoraConfig", {"target_modules": ADAPTED, "total_step": 10}),
    "IA3": ("llama", "IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "trained tokens": ("llama", "TrainableTokensConfig", {"token_indices": [1, 2, 3]}),
    "activated LoRA": ("llama", "LoraConfig", {"target_modules": ADAPTED, "alora_invocation_tokens": [3, 4]}),
    "prompt tuning": ("llama", "PromptTuningConfig", {"num_virtual_tokens": 3}),
    "MiSS": ("llama", "MissConfig", {"r": 4, "target_modules": ADAPTED}),
}
REFUSED_ADAPTERS = {"activated LoRA": "Linear/ALoraLinearVariant", "prompt tuning": "PromptEmbedding", "MiSS": "Miss"}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_of_peft(monkeypatch, kind):
    """They call `model.forward(...)`, which hooks of the model would not see."""
    peft = pytest.importorskip("peft")
    name, options, settings = ADAPTERS[kind]
    model = peft.get_peft_model(make(name), getattr(peft, options)(task_type="CAUSAL_LM", **settings))
    if kind in REFUSED_ADAPTERS:
        refuse(monkeypatch, 2, lambda rank, group: split(model, 2), f"contains {REFUSED_ADAPTERS[kind]}")
        return
    torch.manual_seed(3)
    with torch.no_grad():  # adapters that change something
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02 * torch.randn_like(parameter))
    assert_equal(monkeypatch, model, 2, loss_of(plain()))


def test_a_copy_computes_with_its_own_weights(monkeypatch):
    model, batch = make("llama"), plain()

    def compute(model):
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.lm_head.weight.mul_(2.0)
        return other(**batch).loss.detach() + model(**batch).loss

    assert_equal(monkeypatch, model, 2, compute)


def test_evaluation(monkeypatch):
    model, batch = make("qwen3").eval(), plain()

    def run(rank, group):
        with torch.no_grad():
            return split(model, 2)(**batch).loss

    with torch.no_grad():
        wanted = model(**batch).loss
    for found in run_threads(monkeypatch, 2, run):
        assert abs(found - wanted) <= TOLERANCE * wanted


# -- what a token may see -------------------------------------------------------------------------------------------


def logits_of(monkeypatch, model, degree, batch):
    """Logits of whole sequences, from those of the ranks."""

    def run(rank, group):
        own = split(model, degree)
        with torch.no_grad():
            logits = own(**batch).logits
            return logits.part, logits.positions

    parts, positions = zip(*run_threads(monkeypatch, degree, run), strict=True)
    return torch.cat(parts, dim=1)[:, torch.cat(positions).argsort()][:, : batch["input_ids"].shape[1]]


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize(
    ("name", "reach"),
    [("llama", 100), ("llama, one head of keys", 100), ("mistral, windows", 11), ("gpt_oss, windows and sinks", 100)],
)
@pytest.mark.parametrize("place", [0, 3, 9, 12])
def test_one_token_changes_what_it_may_and_nothing_else(monkeypatch, name, reach, place, degree):
    """The logits of later tokens of its document, within what two layers of windows reach: all change, no other does.

    The probe of TRL #6843, where with context parallelism 100 % of the positions changed instead of 50 %.
    """
    end = 10 if place < 10 and "gpt_oss" not in name else 24
    model, batch = make(name).eval(), packed(24, batch=1) if "gpt_oss" in name else packed(10, 14, batch=1)
    other = {**batch, "input_ids": batch["input_ids"].clone()}
    other["input_ids"][0, place] = (other["input_ids"][0, place] + 1) % VOCABULARY
    before, after = (logits_of(monkeypatch, model, degree, each) for each in (batch, other))
    # Experts compute the tokens of all documents in one product, whose rounding depends on how many there are.
    changed = ((before - after).abs() > 1e-6).any(dim=2)[0].nonzero().flatten().tolist()
    assert changed == list(range(place, min(end, place + reach)))


# -- models of your own ---------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 1), (3, 3)])
def test_a_model_of_ones_own(monkeypatch, heads, key_heads, window, degree):
    torch.manual_seed(0)
    ids, targets = tokens(length=24), tokens(length=24, seed=3)
    model = Own(heads, key_heads, window)
    for comm_type in ("auto", "p2p"):
        assert_equal(monkeypatch, model, degree, lambda model: model(ids, targets), comm_type=comm_type)


def test_a_model_of_ones_own_that_is_alone_is_the_reference():
    """Against torch's attention without any of our code."""
    torch.manual_seed(0)
    model, ids = Own(2, 2, 0), tokens(length=8)
    context = SequenceContext.of(model, length=8, num_heads=2)
    query, key, value = torch.randn(3, 2, 2, 8, 4)
    wanted = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert torch.equal(context.attention(query, key, value), wanted)
    assert torch.equal(context.part(ids), ids)


def own_with(module):
    model = Own(4, 4, 0)
    model.mix = module
    return model


def marked(module):
    module.treats_tokens_alone = True
    return module


@pytest.mark.parametrize(
    "module",
    [nn.BatchNorm1d(16), nn.Conv1d(24, 24, 3, padding=1), nn.GroupNorm(1, 12), nn.Softmax(dim=1), nn.GRU(16, 16)],
    ids=lambda module: type(module).__name__,
)
def test_modules_that_mix_tokens_in_a_model_of_ones_own(monkeypatch, module):
    name = f"contains {type(module).__name__}, which would mix the tokens"
    refuse(monkeypatch, 2, lambda rank, group: split(own_with(module), 2), name)


@pytest.mark.parametrize("module", [nn.Conv1d(24, 24, 1), nn.Softmax(dim=-1), marked(nn.BatchNorm1d(16))])
def test_modules_that_do_not_mix_tokens_in_a_model_of_ones_own(monkeypatch, module):
    assert run_threads(monkeypatch, 2, lambda rank, group: type(split(own_with(module), 2)) is Own) == [True, True]


def test_numbers_that_differ_between_the_ranks_of_a_context(monkeypatch):
    """Also features that are no integers; a batch without samples is no error."""
    torch.manual_seed(0)
    model, features = own_with(nn.Identity()), torch.randn(2, 16, 4)

    def run(rank, group):
        context = SequenceContext.of(split(model, 2), length=16, num_heads=4)
        context.part(features[:0])
        assert context.part(features).shape == (2, 8, 4)
        assert context.part(features.bfloat16() * (1 + rank * torch.ones((), requires_grad=True))).shape == (2, 8, 4)
        other = features.clone()
        other[1, 3, 2] += 1e-6 * rank
        context.part(other)

    refuse(monkeypatch, 2, run, "the same samples, but sequences differ")


# -- what is refused ------------------------------------------------------------------------------------------------


def refuse(monkeypatch, degree, compute, words):
    with pytest.raises(ConfigError, match=words):
        run_threads(monkeypatch, degree, compute)


def gpt_neox():
    sizes = {**SIZES, "hidden_size": 32}
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes))


def with_router_loss():
    model = mixtral()
    model.config.output_router_logits = True
    return model


def with_own_loss():
    model = llama()
    model.loss_function = lambda **_: None
    return model


def with_module(module):
    module.uses_sequence_context = False
    model = llama()
    model.model.layers[0].mix = module
    return model


MIXING = [
    *(
        nn.RNN(32, 32),
        nn.Conv1d(32, 32, 3),
        nn.ConvTranspose1d(32, 32, 3),
        nn.SyncBatchNorm(32),
        nn.LayerNorm((22, 32)),
    ),
    *(nn.LocalResponseNorm(3), nn.Softmax(dim=1), nn.GroupNorm(2, 32), nn.AdaptiveAvgPool1d(2), nn.Dropout1d()),
]


def with_hook():
    def negate(module, inputs, output):
        return -output

    model = llama()
    model.model.layers[0].mlp.up_proj.register_forward_hook(negate)
    return model


def with_own_forward():
    model = llama()
    model.model.layers[0].mlp.forward = lambda hidden: hidden
    return model


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (gpt_neox, "model_type='gpt_neox' is not among those"),
        (lambda: llama(attn_implementation="flex_attention"), "'sdpa' and 'eager' are served"),
        (
            lambda: llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "depend on the longest position",
        ),
        (lambda: nn.Linear(2, 2), "needs one causal language model"),
        (lambda: nn.ModuleList([llama(), llama()]), "contains 2"),
        (lambda: llama().model, "contains 0"),
        (with_router_loss, "auxiliary loss of routers"),
        (with_own_loss, "a loss function of its own"),
        (lambda: nn.ModuleList([llama(), Own(1, 1, 0)]), "contains 1 and modules that use a SequenceContext"),
        *((lambda module=module: with_module(module), f"contains {type(module).__name__}, which") for module in MIXING),
        (with_hook, r"forward hooks within it \(negate of Linear\)"),
        (lambda: with_module(Own(1, 1, 0)), "contains Loss, Own, which may mix tokens"),
        (with_own_forward, f"contains LlamaMLP with a forward of {__name__}"),
    ],
)
def test_models_that_are_not_known_to_be_exact(monkeypatch, build, words):
    refuse(monkeypatch, 2, lambda rank, group: split(build(), 2), words)


def set_attention(model):
    model.set_attn_implementation("sdpa")


def set_attention_of_configuration(model):
    model.config._attn_implementation = "eager"


def ask_for_router_loss(model):
    model.config.output_router_logits = True


def set_loss_function(model):
    model.loss_function = lambda **_: None


def add_noise(model):
    from transformers.integrations.neftune import neftune_post_forward_hook

    model.model.embed_tokens.register_forward_hook(neftune_post_forward_hook)


def replace_attention(model):
    first, second = model.model.layers
    first.self_attn = type(second.self_attn)(model.config, 0)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("llama", set_attention, "attention was changed to 'sdpa' after parallelize"),
        ("mixtral", set_attention_of_configuration, "attention was changed to 'eager' after parallelize"),
        ("mixtral", ask_for_router_loss, "asks for output_router_logits"),
        ("llama", set_loss_function, "a loss function of its own"),
        ("llama", add_noise, "NEFTune"),
        ("llama", replace_attention, "a LlamaAttention that was not in the model when it was parallelized"),
    ],
)
def test_a_model_that_is_changed_after_it_was_split(monkeypatch, name, change, words):
    model = make(name)

    def run(rank, group):
        own = split(model, 2)
        change(own)
        own(**plain(length=16))

    refuse(monkeypatch, 2, run, words)


def test_ways_to_communicate_that_a_model_does_not_have(monkeypatch):
    for name, comm_type, words in (
        ("gpt_oss, windows and sinks", "p2p", "is for attn_implementation='sdpa'"),
        ("llama, one head of keys", "a2a", "2 ranks of a context group cannot share 4 heads and 1 heads of keys"),
        ("llama", "ring", "must be one of auto, a2a, all_gather, p2p, but is 'ring'"),
    ):
        with pytest.raises(ConfigError, match=words):
            run_threads(monkeypatch, 2, lambda *_, name=name, comm_type=comm_type: split(make(name), 2, comm_type))
    words = r"attention has dropout \(0.1\), which context_comm_type='p2p'"
    with pytest.raises(ConfigError, match=words):
        run_threads(monkeypatch, 2, lambda *_: split(llama(attention_dropout=0.1), 2, "p2p"))

    def change(*_):
        own = split(make("llama"), 2, "p2p").train()
        own.model.layers[0].self_attn.attention_dropout = 0.1
        own(**plain())

    with pytest.raises(ConfigError, match=words):
        run_threads(monkeypatch, 2, change)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_ring_computes_in_float32_under_autocast_as_well(monkeypatch, dtype):
    torch.manual_seed(0)
    inputs = [4 * torch.randn(1, 2, 16, 8).to(dtype) for _ in range(3)]
    layout = SequenceLayout.of(16, 2, exchanges_heads=False)

    def run(rank, group, is_autocast):
        own = [layout.part(each, rank, dim=2).requires_grad_() for each in inputs]
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            found = ring_attention.attend_in_ring(*own, None, layout, group)
        found.float().square().sum().backward()
        return [found.detach(), *(each.grad for each in own)]

    plain, cast = (run_threads(monkeypatch, 2, lambda rank, group, on=on: run(rank, group, on)) for on in (False, True))
    for one, other in zip(plain, cast, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_queries_that_are_split_without_their_keys_are_refused(monkeypatch):
    """As by a tensor plan that names only the layer of the queries: each rank would have a part of their gradient."""

    def run(rank, group):
        own = split(Own(4, 1, 0), 2)
        context = SequenceContext.of(own, length=8, num_heads=4, num_key_value_heads=1)
        context.attention(torch.ones(1, 2, 4, 4), torch.ones(1, 1, 4, 4), torch.ones(1, 1, 4, 4))

    refuse(monkeypatch, 2, run, r"attention of 4 heads and 1 heads of keys and values has 2 and 1 of them")


def test_heads_that_tensor_peers_each_have_as_a_whole_are_not_exchanged():
    degrees = ContextDegrees(shard_degree=2, tensor_degree=2, context_degree=2)
    assert degrees.way_of(4, 1) == degrees.way_of(5, 5) == degrees.way_of(6, 6) == "all_gather"
    assert degrees.way_of(8, 4) == "a2a"


def test_a_forward_that_makes_no_mask(monkeypatch):
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **_: None)
    model = make("llama")
    refuse(monkeypatch, 2, lambda rank, group: split(model, 2)(**plain(length=16)), "did not ask for a mask")


@pytest.mark.parametrize(
    ("was", "asked", "words"),
    [
        (2, 1, "was sharded with context_parallel_degree=2, and its sequences cannot be split in another way"),
        (2, 4, "or use context_parallel_degree=2"),
        (1, 2, "was sharded already, by the program or with context_parallel_degree=1"),
    ],
)
def test_another_degree_than_that_of_a_model_that_is_sharded(monkeypatch, was, asked, words):
    def run(rank, group):
        own = nn.Sequential(split(Own(4, 4, 0), was))
        match_degrees(own, ParallelConfig(context_parallel_degree=was))
        match_degrees(own, ParallelConfig(context_parallel_degree=asked))

    refuse(monkeypatch, 2, run, words)


IDS = tokens(length=16)
CALLS = [
    ({"input_ids": IDS}, "needs labels"),
    ({"labels": IDS}, "takes input_ids, but was given labels"),
    ({"inputs_embeds": torch.zeros(2, 16, 32), "labels": IDS}, r"a model cannot be given inputs_embeds\. Change"),
    ({"input_ids": IDS, "labels": IDS, "past_key_values": object()}, r"a model cannot be given past_key_values\."),
    ({"input_ids": IDS, "labels": IDS, "use_cache": True}, "use_cache"),
    ({"input_ids": IDS, "labels": IDS, "logits_to_keep": 1}, "logits_to_keep"),
    ({"input_ids": IDS, "labels": IDS, "output_attentions": True}, "output_attentions"),
    ({"input_ids": IDS, "labels": IDS, "output_hidden_states": True}, "output_hidden_states"),
    ({"input_ids": IDS, "labels": IDS, "is_causal": False}, "is_causal"),
    ({"input_ids": IDS, "labels": IDS, "attention_mask": torch.ones(2, 1, 16, 16)}, r"attention_mask of the shape"),
    ({"input_ids": IDS, "labels": IDS[:, 1:]}, r"labels of the shape \(batch, 16\), but was given \[2, 15\]"),
    ({"input_ids": IDS, "labels": IDS, "position_ids": torch.arange(16)}, "position_ids of the shape"),
]


@pytest.mark.parametrize(("call", "words"), CALLS)
def test_arguments_that_can_not_be_split(monkeypatch, call, words):
    model = make("llama")
    refuse(monkeypatch, 2, lambda rank, group: split(model, 2)(**call), words)


def test_documents_with_a_cache(monkeypatch):
    """transformers lets tokens attend across documents then, and in GPT-OSS always."""
    model = llama()
    model.config.use_cache = True
    refuse(monkeypatch, 2, lambda rank, group: split(model, 2)(**packed(6, 10)), "use_cache is true")
    model = make("gpt_oss, windows and sinks")
    refuse(
        monkeypatch, 2, lambda rank, group: split(model, 2)(**packed(6, 10)), "GptOssForCausalLM of transformers lets"
    )


@pytest.mark.parametrize("name", ["input_ids", "labels", "position_ids", "num_items_in_batch"])
def test_samples_that_differ_between_the_ranks_of_a_context(monkeypatch, name):
    model, seen = make("llama"), []

    def run(rank, group):
        batch = {**packed(6, 10), "num_items_in_batch": 30}
        batch[name] = 30 + rank if name == "num_items_in_batch" else batch[name].clone()
        if name != "num_items_in_batch":
            batch[name][1, 13] += rank
        try:
            split(model, 2)(**batch)
        except ConfigError as error:
            seen.append(rank)
            raise error

    refuse(monkeypatch, 2, run, f"the same samples, but {name} differ between them")
    assert sorted(seen) == [0, 1]  # none waits for the other


def test_samples_of_another_shape_on_another_rank(monkeypatch):
    model = make("llama")
    refuse(monkeypatch, 2, lambda rank, group: split(model, 2)(**plain(length=12 + 2 * rank)), "same samples")


def test_a_part_of_the_model_alone(monkeypatch):
    model = make("llama")
    refuse(
        monkeypatch, 2, lambda rank, group: split(model, 2).model(input_ids=IDS), "Call the whole causal language model"
    )
    refuse(
        monkeypatch, 2, lambda rank, group: type(model)(split(model, 2).config)(IDS), "shares its configuration object"
    )


@pytest.mark.parametrize("name", ["llama", "llama, one head of keys"])
def test_a_mask_of_another_kind(monkeypatch, name):
    """As of a model that attends to later tokens of an image."""
    from transformers.models.llama import modeling_llama

    def create(**arguments):
        arguments["block_sequence_ids"] = torch.zeros(2, 8, dtype=torch.long)
        return original(**arguments)

    original = modeling_llama.create_causal_mask
    monkeypatch.setattr(modeling_llama, "create_causal_mask", create)
    model = make(name)
    refuse(monkeypatch, 2, lambda rank, group: split(model, 2)(**plain(length=16)), "asks for another mask")


def test_a_mask_that_a_model_makes_itself(monkeypatch):
    from transformers.models.llama import modeling_llama

    mask = torch.ones(2, 1, 8, 8, dtype=torch.bool).tril()
    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **_: mask)
    model = make("llama")
    refuse(monkeypatch, 2, lambda rank, group: split(model, 2)(**plain(length=16)), "a mask of its own")


def test_heads_that_layers_change(monkeypatch):
    model = make("llama")

    def run(rank, group):
        own = split(model, 4)
        own.model.layers[0].self_attn.k_proj = nn.Linear(32, 8, bias=False)
        own.model.layers[0].self_attn.v_proj = nn.Linear(32, 8, bias=False)
        own(**plain(length=16))

    refuse(monkeypatch, 4, run, "cannot share equally")


def test_a_length_that_a_model_of_ones_own_has_not_padded(monkeypatch):
    refuse(monkeypatch, 2, lambda rank, group: split(Own(4, 1, 0), 2)(tokens(), tokens()), "Pad them to 24")


def test_logits_of_a_part_are_not_taken_for_those_of_the_whole(monkeypatch):
    model, batch = make("llama"), plain(length=16)

    def run(rank, group):
        logits = split(model, 2)(**batch).logits
        assert logits.part.shape == (2, 8, VOCABULARY)
        assert logits.positions.tolist() == list(range(8 * rank, 8 * rank + 8))
        for use in (
            lambda: logits * 2,
            lambda: F.softmax(logits, dim=-1),
            lambda: logits[:, -1],
            lambda: len(logits),
            lambda: logits == 1,
        ):
            with pytest.raises(ConfigError, match="the logits of its part of the sequences only"):
                use()
        with pytest.raises(AttributeError, match=r"logits\.argmax: with context_parallel_degree"):
            logits.argmax(-1)
        assert not hasattr(logits, "float")
        return True

    assert run_threads(monkeypatch, 2, run) == [True, True]


# -- what is not served together with it ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["context_parallel_degree", "expert_parallel_degree"])
def test_what_is_not_built_together_says_so(name):
    from hyperpod_plugins.accelerate import HyperPodPlugin
    from hyperpod_plugins.session import Session

    degree = {name: 2}
    of_sequences = (
        lambda: Session(**degree, elastic=True, global_batch_size=8, reproducible=True),
        lambda: Session(**degree, samples_per_replica=8, lr_scaling="adascale"),
    )
    for build in (
        *(of_sequences if name == "context_parallel_degree" else ()),
        lambda: Session(**degree, elastic=True, global_batch_size=8, shard_degrees=(4,)),
    ):
        with pytest.raises(NotBuiltYetError, match=f"{name}=2 is not served yet by"):
            build()
    with pytest.raises(NotBuiltYetError, match=f"{name}=2 with float8_recipe='te-fp8'"):
        HyperPodPlugin(**degree, float8_recipe="te-fp8")
    assert HyperPodPlugin(**degree, optimizer_offload=True).config.optimizer_offload


def test_accelerate_divides_samples_over_one_rank_of_each_context():
    from hyperpod_plugins.accelerate.spec import LoaderMesh

    mesh = LoaderMesh.of(Topology(world_size=16, shard_degree=8, context_degree=4))
    sizes = {name: mesh[name].size() for name in mesh.mesh_dim_names}
    assert sizes == {"dp_replicate": 2, "dp_shard": 2, "cp": 4, "tp": 1}
