"""Context parallelism against one process: losses, gradients, and what a token may see. Ranks are threads here.

`test_context_ranks.py` has the same over real ranks and with FSDP2.
`test_context_refusals.py` has what is refused.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from parallel.context_models import (
    IN_A_RING,
    MODELS,
    TOLERANCE,
    VOCABULARY,
    Own,
    assert_equal,
    loss_of,
    make,
    marked,
    own_with,
    packed,
    padded,
    plain,
    refuse,
    some_labels,
    split,
    tokens,
)
from parallel.context_threads import run_threads
from torch import nn

from hyperpod_plugins.memory import offload
from hyperpod_plugins.memory.chunked_loss import chunk_loss
from hyperpod_plugins.memory.recompute import recompute_blocks
from hyperpod_plugins.memory.tiled_mlp import tile_mlps
from hyperpod_plugins.parallel import ParallelConfig, SequenceContext, ring_attention
from hyperpod_plugins.parallel.context_attention import SequenceLayout
from hyperpod_plugins.parallel.parallelize import save_activation_memory

transformers = pytest.importorskip("transformers")


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
