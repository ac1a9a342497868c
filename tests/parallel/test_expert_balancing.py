"""Routers that are balanced: what is chosen, what is added to the loss, and what is refused.

On several ranks: `test_expert_ranks.py`.
"""

import copy
import inspect

import pytest
import torch
from parallel.equal_training import samples
from parallel.expert_models import OwnMixture, make_model

from hyperpod_plugins.errors import ConfigError, NotBuiltYetError
from hyperpod_plugins.memory import chunk_loss
from hyperpod_plugins.memory.recompute import recompute_blocks
from hyperpod_plugins.parallel import balance_experts, router_aux_loss, router_z_loss
from hyperpod_plugins.parallel.expert_balancing import _WEIGHTS, sinkhorn

SERVED = ("mixtral", "qwen3_moe", "gpt_oss")
BATCH = samples(2)


def routers_of(model):
    return {name: part for name, part in model.named_modules() if type(part).__name__.lower().endswith("topkrouter")}


def watch(model):
    """What the routers of a model return from now on."""
    seen = []
    for part in routers_of(model).values():
        part.register_forward_hook(lambda _, args, result: seen.append(result))
    return seen


def loss_of(model):
    return model(input_ids=BATCH, labels=BATCH).loss


def recompute(model, *, use_reentrant):
    # of a newer transformers, which warns of the older name
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})


def gradients(model):
    return {name: each.grad for name, each in model.named_parameters()}


def test_sinkhorn_gives_all_experts_the_same_sum():
    scores = torch.randn(40, 8, generator=torch.Generator().manual_seed(0)) + 4 * torch.arange(8)
    scaled = sinkhorn(scores)
    torch.testing.assert_close(scaled.sum(dim=0), torch.full((8,), 1 / 8, dtype=torch.float64))
    torch.testing.assert_close(scaled.sum(dim=1), torch.full((40,), 1 / 40, dtype=torch.float64), rtol=2e-3, atol=0)
    chosen = torch.bincount(scaled.topk(2, dim=1).indices.reshape(-1), minlength=8)
    preferred = torch.bincount(scores.topk(2, dim=1).indices.reshape(-1), minlength=8)
    assert chosen.max() < preferred.max()
    assert sinkhorn(torch.empty(0, 8)).shape == (0, 8)
    assert torch.isfinite(sinkhorn(torch.tensor([[1e4, 0.0], [9e3, -1e4]]))).all()


@pytest.mark.parametrize("name", SERVED)
def test_weights_are_those_of_the_model_for_the_same_experts(name):
    model = make_model(name)
    seen = watch(model)
    loss_of(model)
    for router, (logits, scores, chosen) in zip(routers_of(model).values(), seen, strict=True):
        assert torch.equal(_WEIGHTS[type(router).__name__](router, logits, chosen), scores)


@pytest.mark.parametrize("name", SERVED)
def test_sinkhorn_spreads_tokens_in_training_alone(name):
    model = make_model(name)
    plain, wanted = copy.deepcopy(model), watch(model)
    loss_of(model)
    balance_experts(plain, method="sinkhorn")
    seen = watch(plain)
    loss_of(plain).backward()
    for (logits, _, chosen), (_, _, preferred) in zip(seen, wanted, strict=True):
        assert torch.equal(chosen, sinkhorn(logits).topk(2, dim=1).indices)
        assert torch.bincount(chosen.reshape(-1)).max() < torch.bincount(preferred.reshape(-1)).max()
    assert torch.equal(loss_of(plain.eval()), loss_of(model.eval()))


@pytest.mark.parametrize("name", [*SERVED, "deepseek_v3"])
def test_losses_are_added_for_each_layer(name):
    model = make_model(name)
    seen, plain = watch(model), loss_of(model)
    layers = [(logits, chosen) for logits, _, chosen in seen]
    has_softmax = name in SERVED
    aux = sum(router_aux_loss(*each) for each in layers) if has_softmax else 0
    squares = sum(router_z_loss(logits) for logits, _ in layers)
    balanced = balance_experts(
        make_model(name), method="aux_loss" if has_softmax else "none", aux_loss_coeff=0.2, z_loss_coeff=0.05
    )
    torch.testing.assert_close(loss_of(balanced), plain + 0.2 * aux + 0.05 * squares)
    torch.testing.assert_close(balanced(input_ids=BATCH, labels=BATCH, return_dict=False)[0], loss_of(balanced))
    with torch.no_grad():
        torch.testing.assert_close(loss_of(balanced), plain)
    torch.testing.assert_close(loss_of(balanced.eval()), loss_of(model.eval()))


def test_losses_of_no_tokens_are_zero():
    nothing = torch.empty(0, 4, requires_grad=True)
    assert router_z_loss(nothing) == router_aux_loss(nothing, torch.empty(0, 2, dtype=torch.int64)) == 0


@pytest.mark.parametrize("prepare", [balance_experts, lambda model: chunk_loss(model, 3) or model])
def test_generation_is_that_of_the_model(prepare):
    """It finds out by the signature of `forward` that padding has to be masked."""
    model, prepared = make_model(), prepare(make_model())
    prompt = BATCH[:, :6].clone()
    prompt[0, :3] = 0
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(prepared.eval().generate(prompt, **options), model.eval().generate(prompt, **options))
    assert inspect.signature(prepared.forward) == inspect.signature(model.forward)


def test_chunks_of_the_loss_are_balanced_alike():
    wanted, model = (balance_experts(make_model(), z_loss_coeff=0.1) for _ in range(2))
    chunk_loss(model, 3)
    torch.testing.assert_close(loss_of(model), loss_of(wanted))


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("method", ["aux_loss", "sinkhorn"])
def test_blocks_that_this_package_recomputes_are_balanced_alike(kind, method):
    wanted, model = (balance_experts(make_model(), method=method, z_loss_coeff=0.1) for _ in range(2))
    recompute_blocks(list(model.model.layers), kind)
    for each in (wanted, model):
        loss_of(each).backward()
    assert all(torch.equal(gradients(model)[name], gradient) for name, gradient in gradients(wanted).items())


def test_the_auxiliary_loss_is_that_of_transformers():
    """Which does not divide by the number of choices, and takes all layers together."""
    model = make_model(num_hidden_layers=1)
    output = model(input_ids=BATCH, labels=BATCH, output_router_logits=True)
    (logits,) = output.router_logits
    torch.testing.assert_close(2 * router_aux_loss(logits, logits.topk(2, dim=1).indices), output.aux_loss)


@pytest.mark.parametrize("method", ["aux_loss", "sinkhorn"])
def test_recomputed_blocks_are_balanced_alike(method):
    wanted = balance_experts(make_model(), method=method, aux_loss_coeff=0.5, z_loss_coeff=0.1)
    loss_of(wanted).backward()
    model = balance_experts(make_model(), method=method, aux_loss_coeff=0.5, z_loss_coeff=0.1)
    recompute(model, use_reentrant=False)
    loss_of(model).backward()
    for name, gradient in gradients(wanted).items():
        torch.testing.assert_close(gradients(model)[name], gradient, msg=name)
    assert not any(key.startswith("_hyperpod_routed") for part in model.modules() for key in vars(part))


def test_a_balanced_model_is_copied_with_its_own_routers():
    model = balance_experts(make_model(), z_loss_coeff=0.1)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for part in routers_of(other).values():
            part.weight.mul_(3)
    assert not torch.equal(loss_of(other), loss_of(model))
    loss_of(other).backward()
    assert all(each is None for each in gradients(model).values())


def test_what_cannot_be_balanced_is_refused():
    for wrong, what in (
        ({"method": "sinkhole"}, "must be one of none, aux_loss, sinkhorn"),
        ({"z_loss_coeff": -1.0}, "z_loss_coeff must be"),
        ({"aux_loss_coeff": float("nan")}, "aux_loss_coeff must be"),
    ):
        with pytest.raises(ConfigError, match=what):
            balance_experts(make_model(), **wrong)
    with pytest.raises(NotBuiltYetError, match=r"DeepseekV3TopkRouter.*serves MixtralTopKRouter"):
        balance_experts(make_model("deepseek_v3"))
    with pytest.raises(ConfigError, match="adds an auxiliary loss itself"):
        balance_experts(make_model(output_router_logits=True))
    balanced = balance_experts(balance_experts(make_model()))
    torch.testing.assert_close(loss_of(balanced), loss_of(balance_experts(make_model())))
    with pytest.raises(ConfigError, match="balanced already"):
        balance_experts(balanced, method="none")
    with pytest.raises(ConfigError, match="contains 0"):
        balance_experts(OwnMixture())
    with pytest.raises(ConfigError, match="Give it labels"):
        balance_experts(make_model())(input_ids=BATCH)
    recomputed = balance_experts(make_model())
    recompute(recomputed, use_reentrant=True)
    recomputed.enable_input_require_grads()
    with pytest.raises(ConfigError, match="use_reentrant"):
        loss_of(recomputed)


def test_what_would_not_be_balanced_is_refused_in_training():
    model = balance_experts(make_model())
    with pytest.raises(ConfigError, match="a part of a balanced model was called in training"):
        model.model(input_ids=BATCH)
    with torch.no_grad():
        model.model(input_ids=BATCH)
    model.eval().model(input_ids=BATCH)
    for part in routers_of(model.train()).values():
        part.eval()
    with pytest.raises(ConfigError, match="no router of a balanced model has run in training mode"):
        loss_of(model)
    with pytest.raises(ConfigError, match="output_router_logits=True in this call"):
        balance_experts(make_model())(input_ids=BATCH, labels=BATCH, output_router_logits=True)
    for part_of in (lambda model: model, lambda model: model.model.layers[1].mlp.gate):
        model = make_model()
        part_of(model).forward = part_of(model).forward
        with pytest.raises(ConfigError, match="has an attribute forward"):
            balance_experts(model)
    balance_experts(make_model(), method="sinkhorn").model(input_ids=BATCH)


def test_frozen_routers_are_balanced_through_what_they_read():
    frozen = balance_experts(make_model(), z_loss_coeff=0.1)
    for part in routers_of(frozen).values():
        part.weight.requires_grad_(requires_grad=False)
    loss_of(frozen).backward()
    assert all(part.weight.grad is None for part in routers_of(frozen).values())
    plain = make_model()
    loss_of(plain).backward()
    assert not torch.equal(
        gradients(frozen)["model.embed_tokens.weight"], gradients(plain)["model.embed_tokens.weight"]
    )
    for each in frozen.parameters():
        each.requires_grad_(requires_grad=False)
    with pytest.raises(ConfigError, match="leave the coefficients at 0"):
        loss_of(frozen)


def test_nothing_is_kept_of_a_forward_that_fails():
    model = balance_experts(make_model())
    model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model)
    assert not any("_hyperpod_routed" in vars(part) for part in model.modules())
