"""What context parallelism refuses by name: models, changes and batches that it would not serve exactly."""

import pytest
import torch
import torch.nn.functional as F
from parallel.context_models import (
    SIZES,
    VOCABULARY,
    Own,
    llama,
    make,
    mixtral,
    packed,
    plain,
    refuse,
    split,
    tokens,
)
from parallel.context_threads import run_threads
from torch import nn

from hyperpod_plugins.errors import ConfigError, NotBuiltYetError
from hyperpod_plugins.parallel import ParallelConfig, SequenceContext, Topology, ring_attention
from hyperpod_plugins.parallel.context_attention import SequenceLayout
from hyperpod_plugins.parallel.parallelize import match_degrees
from hyperpod_plugins.parallel.sequence_context import ContextDegrees

transformers = pytest.importorskip("transformers")


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
    assert degrees.comm_type_for(4, 1) == degrees.comm_type_for(5, 5) == degrees.comm_type_for(6, 6) == "all_gather"
    assert degrees.comm_type_for(8, 4) == "a2a"


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
