"""Tensor plans: which module gets which style, what is refused, and that the styles compute what one process does."""

import sys

import pytest
import torch
import torch.distributed as dist
from device import DEVICE
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hyperpod_plugins.errors import DegreeError, NotBuiltYetError, PlanError
from hyperpod_plugins.parallel import ParallelConfig
from hyperpod_plugins.parallel.tensor_parallel import STYLES, plan_for, shard_tensors, tied_parameters
from hyperpod_plugins.parallel.tensor_styles import Block, needed_features, row_routes

SIZES = dict(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=16,
    bos_token_id=0,
    eos_token_id=0,
    use_cache=False,
)


def llama(**changes):
    return LlamaForCausalLM(LlamaConfig(**(SIZES | changes)))


def gpt2(**changes):
    sizes = dict(n_layer=1, n_embd=8, n_head=2, vocab_size=16, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(GPT2Config(**(sizes | changes)))


def two_way(plan="auto", **options):
    return ParallelConfig(tensor_parallel_degree=2, tensor_plan=plan, **options)


@pytest.fixture
def fake_mesh():
    """A mesh of two tensor ranks in one process: nothing can be sent, and making DTensors sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.init_device_mesh(DEVICE, (2,), mesh_dim_names=("tensor",))
    dist.destroy_process_group()


def split(model, plan, mesh, **options):
    config = two_way(plan, **options)
    shard_tensors(model, mesh, plan_for(model, config), config)
    return {name: tuple(map(str, p.placements)) for name, p in model.named_parameters() if hasattr(p, "placements")}


# -- deciding -------------------------------------------------------------------------------------------------------


def test_a_llama_brings_its_own_plan():
    plan = plan_for(llama(), two_way())
    layer = {
        "self_attn.q_proj": "colwise",
        "self_attn.k_proj": "colwise",
        "self_attn.v_proj": "colwise",
        "self_attn.o_proj": "rowwise",
        "mlp.gate_proj": "colwise",
        "mlp.up_proj": "colwise",
        "mlp.down_proj": "rowwise",
    }
    blocks = {f"model.layers.{i}.{name}": style for i in range(2) for name, style in layer.items()}
    # 5.x plans the embedding too, older ones do not; both are right.
    assert {name: style for name, style in plan.items() if name != "model.embed_tokens"} == {
        **blocks,
        "lm_head": "colwise_gather_output",
    }


def test_the_norms_over_heads_of_qwen3_are_planned():
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=4))
    plan = plan_for(model, two_way())
    for layer in range(2):
        for norm in ("q_norm", "k_norm"):
            assert plan[f"model.layers.{layer}.self_attn.{norm}"] == "replicated_with_grad_allreduce"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_hugging_face_model_inside_a_wrapper_keeps_its_plan(depth):
    plain = plan_for(llama(), two_way())
    wrapper, prefix = llama(), ""
    for _ in range(depth):
        outer = nn.Module()
        outer.net = wrapper
        outer.head = nn.Linear(4, 3)  # a module of the wrapper's own stays whole
        wrapper, prefix = outer, f"net.{prefix}"
    assert plan_for(wrapper, two_way()) == {f"{prefix}{name}": style for name, style in plain.items()}


def test_two_hugging_face_models_in_one_module_are_both_planned():
    pair = nn.ModuleDict({"teacher": llama(), "student": llama(num_hidden_layers=1)})
    plan = plan_for(pair, two_way())
    assert plan["teacher.model.layers.1.mlp.up_proj"] == plan["student.model.layers.0.mlp.up_proj"] == "colwise"
    assert plan["teacher.lm_head"] == plan["student.lm_head"] == "colwise_gather_output"


def test_blocks_that_bring_no_plan_are_recognised_by_their_class():
    plan = plan_for(gpt2(), two_way())
    assert {name: style if isinstance(style, str) else type(style).__name__ for name, style in plan.items()} == {
        "transformer.h.0.attn": "DividedHeads",
        "transformer.h.0.attn.c_attn": "PackedColwise",
        "transformer.h.0.attn.c_proj": "rowwise",
        "transformer.h.0.mlp.c_fc": "colwise",
        "transformer.h.0.mlp.c_proj": "rowwise",
        "lm_head": "colwise_gather_output",
        "transformer.wte": "embedding_rowwise",
    }
    odd = plan_for(gpt2(vocab_size=17), two_way())
    assert set(plan) - set(odd) == {"lm_head", "transformer.wte"}


@pytest.mark.parametrize(("rank", "needed"), [(0, [0, 1, 4, 5, 8]), (1, [2, 3, 6, 7, 8])])
def test_a_rank_needs_its_share_of_each_block_and_all_of_a_shared_one(rank, needed):
    blocks = (Block(4), Block(4), Block(1, is_shared=True))
    assert needed_features(blocks, rank, 2) == needed


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_rows_arrive_where_they_are_needed(degree):
    """All routes of a group, followed by hand: each rank has the rows that it needs, in order."""
    blocks = (Block(12), Block(12, is_shared=True), Block(24))
    routes = [row_routes(blocks, rank, degree) for rank in range(degree)]
    for rank in range(degree):
        arrived = []
        for source, route in enumerate(routes):
            assert len(route.sent_rows[rank]) == routes[rank].received[source]
            arrived += [source * route.num_rows + row for row in route.sent_rows[rank]]
        placed = dict(zip(routes[rank].order, arrived, strict=True))
        assert [placed[place] for place in range(len(placed))] == needed_features(blocks, rank, degree)


def test_a_degree_of_one_needs_no_plan():
    assert plan_for(nn.Linear(3, 3), ParallelConfig()) == {}
    assert plan_for(nn.Linear(3, 3), ParallelConfig(tensor_plan={"*.nothing": "colwise"})) == {}


def test_the_first_matching_pattern_decides():
    plan = plan_for(llama(), two_way({"*.0.mlp.up_proj": "replicate", "*.up_proj": "colwise"}))
    assert plan == {"model.layers.0.mlp.up_proj": "replicate", "model.layers.1.mlp.up_proj": "colwise"}


def test_a_style_may_be_an_object():
    style = ColwiseParallel()
    assert plan_for(llama(), two_way({"*.up_proj": style}))["model.layers.0.mlp.up_proj"] is style


# -- refusing -------------------------------------------------------------------------------------------------------


def test_experts_of_a_model_that_was_not_compared_are_not_built_yet():
    model = OlmoeForCausalLM(OlmoeConfig(**SIZES, num_experts=2, num_experts_per_tok=1))
    with pytest.raises(NotBuiltYetError, match=r"moe_tp_experts.*only mixtral.*tensor_parallel_degree=1"):
        plan_for(model, two_way())


def test_plans_that_divided_experts_do_not_go_with():
    model = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2))
    of_attention = {"*.q_proj": "colwise", "*.k_proj": "colwise", "*.v_proj": "colwise", "*.o_proj": "rowwise"}
    assert len(plan_for(model, two_way(of_attention, expert_parallel_degree=2))) == 8
    assert not any("experts" in name for name in plan_for(model, two_way(expert_parallel_degree=2)))
    with pytest.raises(PlanError, match=r"splits model.layers.0.mlp.experts.*expert_parallel_degree=2"):
        plan_for(model, two_way({"*.experts": "rowwise"}, expert_parallel_degree=2))
    with pytest.raises(NotBuiltYetError, match=r"ParallelStyle objects \(model.layers.0.mlp,.*Use styles by name"):
        plan_for(model, two_way({"*.mlp": ColwiseParallel()}, expert_parallel_degree=2))


def test_experts_of_mixtral_are_split_by_their_inner_features(fake_mesh):
    model = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2))
    placements = split(model, "auto", fake_mesh)
    assert placements["model.layers.1.mlp.experts.gate_up_proj"] == ("S(1)",)
    assert placements["model.layers.1.mlp.experts.down_proj"] == ("S(2)",)
    assert "model.layers.1.mlp.gate.weight" not in placements


def test_a_mixture_of_experts_splits_by_a_plan_of_the_user():
    model = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2))
    assert len(plan_for(model, two_way({"*.q_proj": "colwise", "*.o_proj": "rowwise"}))) == 4


def test_a_model_without_a_plan_is_told_patterns_and_module_names():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with pytest.raises(PlanError) as caught:
        plan_for(model, two_way())
    message = str(caught.value)
    for word in ("*.q_proj", "Sequential", "'0', '2'", "tensor_plan=", "tensor_parallel_degree=1", *STYLES):
        assert word in message


def test_opt_has_no_plan_and_is_not_split_by_its_head_alone():
    """Splitting the head and nothing else would look like tensor parallelism and save next to nothing."""
    sizes = dict(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, ffn_dim=8, vocab_size=16)
    with pytest.raises(PlanError) as caught:
        plan_for(OPTForCausalLM(OPTConfig(**sizes, word_embed_proj_dim=8)), two_way())
    message = str(caught.value)
    for word in ("OPTForCausalLM", "model.decoder.embed_tokens", "tensor_plan=", "*.q_proj"):
        assert word in message


def test_attention_whose_output_layer_has_another_name_is_not_llama_like():
    """Split queries before a whole output projection would fail in forward, with a message about shapes."""
    attention = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("q_proj", "k_proj", "v_proj", "out_proj")})
    model = nn.ModuleDict({"embed_tokens": nn.Embedding(8, 4), "attention": attention, "lm_head": nn.Linear(4, 8)})
    with pytest.raises(PlanError, match=r"only some modules .*attention\.q_proj.*attention\.out_proj"):
        plan_for(model, two_way())


@pytest.mark.parametrize("plan", [{"*.query": "colwise"}, {"*.q_proj": "colwise", "*.query": "colwise"}])
def test_a_pattern_of_the_users_that_matches_nothing_is_named(plan):
    with pytest.raises(PlanError, match=r"patterns \['\*\.query'\] match no module of LlamaForCausalLM"):
        plan_for(llama(), two_way(plan))


def test_an_empty_plan_is_refused():
    """Two tensor ranks would compute the same thing twice, silently."""
    with pytest.raises(PlanError, match="tensor_plan"):
        plan_for(llama(), two_way({}))


def test_an_unknown_style_is_told_the_known_ones():
    with pytest.raises(PlanError, match=r"unknown styles \['columnwise'\].*colwise.*rowwise.*ParallelStyle"):
        plan_for(llama(), two_way({"*.q_proj": "columnwise"}))


@pytest.mark.parametrize(
    ("pattern", "style", "words"),
    [
        ("model.embed_tokens", "colwise", r"'colwise' needs an nn\.Linear, but 'model.embed_tokens' is a Embedding"),
        ("*.q_proj", "embedding_rowwise", r"needs an nn\.Embedding, but 'model.layers.0.self_attn.q_proj' is a Linear"),
        ("*.mlp", "rowwise", r"'model.layers.0.mlp' is a LlamaMLP"),
        ("*.input_layernorm", "colwise_gather_output", r"'model.layers.0.input_layernorm' is a LlamaRMSNorm"),
    ],
)
def test_a_style_for_a_module_of_another_type_names_both(pattern, style, words):
    with pytest.raises(PlanError, match=words):
        plan_for(llama(), two_way({pattern: style}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 1}, "num_key_value_heads=1, which tensor_parallel_degree=2 .*one of \\[1\\]"),
        (
            {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 12},
            "num_attention_heads=3, which tensor_parallel_degree=2 .*one of \\[1, 3\\]",
        ),
        ({"intermediate_size": 25}, "mlp.gate_proj' .colwise. has 25 features.*one of \\[1, 5, 25\\]"),
        ({"vocab_size": 33}, "has 33 features.*one of \\[1, 3, 11, 33\\]"),
    ],
)
def test_what_does_not_divide_is_named_with_what_would(changes, words):
    with pytest.raises(DegreeError, match=words):
        plan_for(llama(**changes), two_way())


def test_heads_of_blocks_that_bring_no_plan_are_checked():
    with pytest.raises(DegreeError, match=r"transformer.h.0.attn \(GPT2Attention\) has num_heads=3"):
        plan_for(gpt2(n_head=3, n_embd=12), two_way())


def test_a_replaced_layer_of_a_known_block_is_named():
    model = gpt2()
    model.transformer.h[0].attn.c_attn = nn.Sequential(model.transformer.h[0].attn.c_attn)
    with pytest.raises(PlanError, match=r"splits transformer\.h\.0\.attn\.c_attn, but that is a .*Sequential"):
        plan_for(model, two_way())


def test_a_packed_projection_is_not_split_as_if_it_were_none():
    words = r"transformer\.h\.0\.attn\.c_attn 'colwise', but GPT2Attention computes queries, keys and values"
    with pytest.raises(PlanError, match=words):
        plan_for(gpt2(), two_way({"*.c_attn": "colwise", "*.attn.c_proj": "rowwise"}))
    assert len(plan_for(gpt2(), two_way({"*.c_fc": "colwise", "*.mlp.c_proj": "rowwise"}))) == 2


def test_a_plan_of_the_user_gets_the_heads_that_the_attention_views():
    model = BloomForCausalLM(BloomConfig(n_layer=1, hidden_size=8, n_head=2, vocab_size=16))
    plan = plan_for(model, two_way({"*.query_key_value": "colwise", "*.self_attention.dense": "rowwise"}))
    assert type(plan["transformer.h.0.self_attention"]).__name__ == "DividedHeads"


class Heads(nn.Module):
    """An attention without softmax."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = 2, 4
        self.q, self.k, self.o = (nn.Linear(8, 8) for _ in range(3))

    def split(self, x):
        return x.unflatten(-1, (-1, self.head_dim))

    def forward(self, x):
        q, k = self.split(self.q(x)), self.split(self.k(x))
        return self.o((q * k.sum(1, keepdim=True)).flatten(2))


class FixedHeads(Heads):
    def split(self, x):
        return x.view(*x.shape[:2], self.num_heads, -1)


def test_code_that_uses_the_number_of_all_heads_is_refused_in_a_plan_of_the_user():
    split = {"*q": "colwise", "*k": "colwise", "*o": "rowwise"}
    model = nn.Sequential(Heads())
    assert len(plan_for(model, two_way(split))) == 3
    model = nn.Sequential(FixedHeads())
    with pytest.raises(PlanError, match=r"layers of '0', but the code of FixedHeads uses num_heads"):
        plan_for(model, two_way(split))
    assert plan_for(model, two_way({**split, "0": "replicate"}))["0"] == "replicate"
    model[0].num_heads = 1  # as a program has it that divides the number itself
    assert len(plan_for(model, two_way(split))) == 3
    sizes = {"hidden_size": 8, "ffn_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 16}
    opt = OPTForCausalLM(OPTConfig(**sizes, word_embed_proj_dim=8, max_position_embeddings=8))
    with pytest.raises(PlanError, match=r"self_attn', but the code of OPTAttention uses num_heads"):
        plan_for(opt, two_way({"*.[qkv]_proj": "colwise", "*.out_proj": "rowwise"}))
    assert len(plan_for(opt, two_way({"*.fc1": "colwise", "*.fc2": "rowwise"}))) == 2


def test_a_split_stream_is_refused_where_the_plan_was_not_compared_with_it():
    with pytest.raises(NotBuiltYetError, match=r"sequence_parallel=True .*GPT2LMHeadModel"):
        plan_for(gpt2(), two_way(sequence_parallel=True))


def test_heads_are_checked_inside_a_wrapper():
    with pytest.raises(DegreeError, match="num_key_value_heads=1"):
        plan_for(nn.ModuleDict({"net": llama(num_key_value_heads=1, head_dim=8)}), two_way())


# -- following ------------------------------------------------------------------------------------------------------


def test_parameters_become_dtensors_of_their_style(fake_mesh):
    model = llama(attention_bias=True)
    placements = split(model, "auto", fake_mesh)
    first = "model.layers.0."
    assert placements[f"{first}self_attn.q_proj.weight"] == ("S(0)",)
    assert placements[f"{first}self_attn.q_proj.bias"] == ("S(0)",)
    assert placements[f"{first}self_attn.o_proj.weight"] == ("S(1)",)
    assert placements[f"{first}self_attn.o_proj.bias"] == ("R",)
    assert placements["lm_head.weight"] == ("S(0)",)
    assert f"{first}input_layernorm.weight" not in placements


@pytest.mark.parametrize("is_split", [False, True])
def test_what_is_frozen_stays_frozen(fake_mesh, is_split):
    """Also norms, of heads and of the stream, for which torch's style makes parameters that are trained."""
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=4))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name)
    wanted = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    config = two_way(sequence_parallel=is_split)
    shard_tensors(model, fake_mesh, plan_for(model, config), config)
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == wanted


def test_tied_weights_stay_one_parameter(fake_mesh):
    model = llama(tie_word_embeddings=True)
    split(model, "auto", fake_mesh)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert str(model.lm_head.weight.placements[0]) == "S(0)"
    assert tied_parameters(model) == [["model.embed_tokens.weight", "lm_head.weight"]]


def test_tied_weights_follow_a_users_split_head(fake_mesh):
    model = llama(tie_word_embeddings=True)
    split(model, {"lm_head": "colwise_gather_output"}, fake_mesh)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert str(model.lm_head.weight.placements[0]) == "S(0)"


@pytest.mark.parametrize(
    "plan",
    [
        {"lm_head": "rowwise"},
        {"lm_head": "rowwise", "*.embed_tokens": "embedding_rowwise"},
        {"*.embed_tokens": "embedding_rowwise"},
        {"lm_head": "colwise_gather_output", "*.embed_tokens": "replicate"},
    ],
)
def test_tied_weights_that_are_split_differently_are_named(fake_mesh, plan):
    with pytest.raises(PlanError) as caught:
        split(llama(tie_word_embeddings=True), plan, fake_mesh)
    message = str(caught.value)
    for word in ("model.embed_tokens.weight", "lm_head.weight", "one tied parameter", "embedding_rowwise"):
        assert word in message


def test_a_planned_module_without_parameters_to_split_is_no_reason_to_fail(fake_mesh):
    placements = split(llama(), {"*.act_fn": "replicate", "*.up_proj": "colwise"}, fake_mesh)
    assert set(placements.values()) == {("S(0)",)}


def test_plans_need_no_transformers(monkeypatch):
    """Its models are recognised only where the program has imported it."""
    monkeypatch.delitem(sys.modules, "transformers")
    model = nn.ModuleDict({"q_proj": nn.Linear(4, 4), "o_proj": nn.Linear(4, 4)})
    assert plan_for(model, two_way()) == {"q_proj": "colwise", "o_proj": "rowwise"}


# -- computing --------------------------------------------------------------------------------------------------------

NUM_STEPS, BATCH, SEQUENCE = 3, 4, 10
# float32 sums in another order; AdamW enlarges the rounding of tiny gradients (as in test_equality.py)
LOSS_TOLERANCE = dict(rtol=2e-6, atol=0.0)
STATE_TOLERANCE = dict(rtol=0.0, atol=2e-5)


def make_qwen3():
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=4))
    for name, parameter in model.named_parameters():
        if "norm" in name:  # all ones would hide a norm that is applied to the wrong head
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model, lambda tokens: model(input_ids=tokens, labels=tokens).loss


def make_wrapped_llama():
    torch.manual_seed(0)

    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = llama(attention_bias=True, tie_word_embeddings=True)
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, tokens):
            return self.net(input_ids=tokens, labels=tokens).loss * self.scale.prod()

    model = Wrapper()
    return model, model


def make_called_by_keyword():
    """Every planned layer is called as `layer(input=x)`; DTensor's own hooks look at positional arguments only."""
    torch.manual_seed(0)

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)

        def forward(self, x):
            return self.down_proj(input=torch.tanh(self.gate_proj(input=x)) * self.up_proj(x))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed_tokens = nn.Embedding(SIZES["vocab_size"], 16)
            self.norm, self.mlp = nn.LayerNorm(16), Gated()
            self.lm_head = nn.Linear(16, SIZES["vocab_size"], bias=False)

        def forward(self, tokens):
            x = self.embed_tokens(input=tokens)
            return self.lm_head(input=x + self.mlp(x=self.norm(input=x)))

    model = Model()
    return model, lambda tokens: nn.functional.cross_entropy(model(tokens)[:, :-1].mT, tokens[:, 1:])


MODELS = {"qwen3": make_qwen3, "llama in a wrapper": make_wrapped_llama, "called by keyword": make_called_by_keyword}


def batches():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(SIZES["vocab_size"], (BATCH, SEQUENCE), generator=generator) for _ in range(NUM_STEPS)]


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def train(model, loss):
    """Losses, the gradients of the first step, and the parameters at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, gradients = [], {}
    for batch in batches():
        value = loss(batch)
        value.backward()
        gradients = gradients or {name: whole(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(whole(value))
    return torch.stack(losses), gradients, {name: whole(p) for name, p in model.named_parameters()}


def train_all_split():
    from hyperpod_plugins.parallel import build_mesh, parallelize

    dist.init_process_group("hyperpod")
    results = {}
    for sequence_parallel in (False, True):
        config = ParallelConfig(tensor_parallel_degree=2, sequence_parallel=sequence_parallel)
        mesh = build_mesh(config.topology(2), DEVICE)
        for name, make in MODELS.items():
            model, loss = make()
            parallelize(model, mesh, config)
            results[name, sequence_parallel] = train(model, loss)
    return results


@pytest.mark.spawns
def test_split_models_compute_what_one_process_computes(run_ranks):
    first, second = run_ranks(train_all_split, world_size=2, timeout_s=120)
    alone = {name: train(*make()) for name, make in MODELS.items()}
    for (name, sequence_parallel), (losses, gradients, state) in first.items():
        what = f"{name}, sequence_parallel={sequence_parallel}"
        losses_alone, gradients_alone, state_alone = alone[name]
        torch.testing.assert_close(losses, losses_alone, **LOSS_TOLERANCE, msg=lambda m, w=what: f"{w}: {m}")
        for parameter, value in gradients.items():
            torch.testing.assert_close(
                value, gradients_alone[parameter], rtol=1e-4, atol=1e-6, msg=lambda m, w=(what, parameter): f"{w}: {m}"
            )
        for parameter, value in state.items():
            torch.testing.assert_close(
                value, state_alone[parameter], **STATE_TOLERANCE, msg=lambda m, w=(what, parameter): f"{w}: {m}"
            )
        assert torch.equal(losses, second[name, sequence_parallel][0]), what
        for parameter, value in second[name, sequence_parallel][2].items():
            assert torch.equal(value, state[parameter]), f"{what}: {parameter} differs between the ranks"
