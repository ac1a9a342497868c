"""Proposed tensor plans: pairs that are exact are found, and pairs that only look like it stay whole."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hyperpod_plugins.errors import PlanError
from hyperpod_plugins.parallel import ParallelConfig, propose_tensor_plan
from hyperpod_plugins.parallel.tensor_parallel import plan_for

WIDTH, HEADS = 16, 4
TOKENS = torch.arange(24).view(2, 12) % 20


class Attention(nn.Module):
    heads_in_view = -1

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.normed = nn.Identity()

    def forward(self, x):
        shape = (*x.shape[:2], self.heads_in_view, WIDTH // HEADS)
        query, key, value = (layer(x).view(shape).transpose(1, 2) for layer in (self.to_q, self.to_k, self.to_v))
        mixed = F.scaled_dot_product_attention(self.normed(query), key, value, is_causal=True)
        return self.to_out(mixed.transpose(1, 2).flatten(2))


class FixedHeads(Attention):
    heads_in_view = HEADS


class CountsHeads(Attention):
    """Its code uses the number of heads, but not to view a share of the features."""

    def __init__(self):
        super().__init__()
        self.num_heads = HEADS

    def forward(self, x):
        return super().forward(x) / self.num_heads


class NormedHeads(Attention):
    """The weight of the norm is used by all heads: a rank has a part of its gradient."""

    def __init__(self):
        super().__init__()
        self.normed = nn.RMSNorm(WIDTH // HEADS)


class Packed(nn.Module):
    """Half of `[query | key | value]` can be cut in three as well, but the parts are others."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        query, key, value = (
            each.unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=2)
        )
        return self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, inner=24, norms=False):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(WIDTH, inner), nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.norm = nn.LayerNorm(inner, elementwise_affine=False) if norms else nn.Identity()

    def forward(self, x):
        product = F.silu(self.gate(x)) * self.up(x)
        return self.down(
            F.layer_norm(product, product.shape[-1:]) if not isinstance(self.norm, nn.Identity) else product
        )


class Model(nn.Module):
    def __init__(self, attention=Attention, feed_forward=FeedForward):
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(nn.ModuleList([attention(), feed_forward()]) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 20)

    def forward(self, tokens):
        x = self.embed(tokens)
        for attention, feed_forward in self.blocks:
            x = x + attention(self.norm(x))
            x = x + feed_forward(self.norm(x))
        return self.head(x)


ATTENTION = {f"blocks.*.*.to_{name}": "colwise" for name in "qkv"} | {"blocks.*.*.to_out": "rowwise"}
FEED_FORWARD = {"blocks.*.*.up": "colwise", "blocks.*.*.gate": "colwise", "blocks.*.*.down": "rowwise"}


def test_attention_and_gated_layers_are_found(caplog):
    model = Model()
    before = copy.deepcopy(model.state_dict())
    proposal = propose_tensor_plan(model, [TOKENS])
    assert proposal.plan == ATTENTION | FEED_FORWARD
    assert set(proposal.left_whole) == {"head"}
    assert proposal.largest_difference < 1e-12
    assert "'blocks.*.*.to_out': 'rowwise'" in caplog.text
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(each.grad is None for each in model.parameters())


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        (FixedHeads, "fails with a part of the features"),
        (NormedHeads, "gradients would differ"),
        (Packed, "gradients would differ"),
    ],
)
def test_attention_that_only_looks_like_it_stays_whole(attention, reason):
    proposal = propose_tensor_plan(Model(attention), {"tokens": TOKENS})
    assert proposal.plan == FEED_FORWARD
    whole = {name: why for name, why in proposal.left_whole.items() if name != "head"}
    assert len(whole) == (2 if attention is Packed else 4)
    assert all(reason in why for why in whole.values())


def test_a_norm_over_all_inner_features_keeps_a_block_whole():
    proposal = propose_tensor_plan(Model(feed_forward=lambda: FeedForward(norms=True)), [TOKENS])
    assert proposal.plan == ATTENTION
    assert "gradients would differ" in proposal.left_whole["blocks.*.*.down"]


def test_features_that_the_degree_does_not_divide_stay_whole():
    proposal = propose_tensor_plan(Model(feed_forward=lambda: FeedForward(inner=22)), [TOKENS], degree=4)
    assert proposal.plan == ATTENTION
    assert "4 does not divide the features" in proposal.left_whole["blocks.*.*.up"]


def test_layers_that_begin_with_zeros_hide_no_fault():
    """The result of such a block is zero however it is split."""
    model = Model(Packed)
    for name, parameter in model.named_parameters():
        if name.endswith("out.weight"):
            nn.init.zeros_(parameter)
    assert propose_tensor_plan(model, [TOKENS]).plan == FEED_FORWARD


def test_a_model_that_cannot_be_split_is_refused_with_the_reasons():
    with pytest.raises(PlanError, match=r"no tensor plan of Packed .* 2 ranks: qkv: results or gradients would differ"):
        propose_tensor_plan(Packed(), [torch.randn(2, 5, WIDTH)])


def test_inputs_that_cannot_be_made_are_asked_for():
    with pytest.raises(PlanError, match=r"cannot make random inputs for Model\. Pass inputs"):
        propose_tensor_plan(Model())


def test_a_model_without_values_is_refused():
    with torch.device("meta"):
        model = Model()
    with pytest.raises(PlanError, match=r"embed\.weight is sharded, quantized or has no value"):
        propose_tensor_plan(model, [TOKENS])


def test_a_wrong_part_would_be_noticed(monkeypatch):
    """The comparison itself: a rank that keeps the first rows on every rank is no exact plan."""
    from hyperpod_plugins.parallel import plan_proposal

    part_of = plan_proposal._part_of
    monkeypatch.setattr(plan_proposal, "_part_of", lambda *args: part_of(*args[:4], 0, args[5]))
    with pytest.raises(PlanError, match="no tensor plan of FeedForward"):
        propose_tensor_plan(FeedForward(), [torch.randn(2, 5, WIDTH)])


def test_a_proposed_plan_names_modules_whose_code_is_right_though_it_uses_the_number_of_heads():
    model = nn.Sequential(CountsHeads(), CountsHeads())
    plan = propose_tensor_plan(model, (torch.rand(2, 6, WIDTH),)).plan
    assert (plan["0"], plan["0.to_out"]) == ("replicate", "rowwise")
    assert len(plan_for(model, ParallelConfig(tensor_parallel_degree=2, tensor_plan=plan))) == 10
    split = {name: style for name, style in plan.items() if style != "replicate"}
    with pytest.raises(PlanError, match="the code of CountsHeads uses num_heads"):
        plan_for(model, ParallelConfig(tensor_parallel_degree=2, tensor_plan=split))
