"""What is saved for backward goes to the host and comes back; parameters stay where they are."""

import warnings
from functools import partial

import pytest
import torch
from harness import run_ranks
from torch import nn

from hyperpod_plugins.smp.torch_classes import KeepOnHost, _from_host, _to_host


def test_activations_go_and_parameters_stay():
    weight = nn.Parameter(torch.randn(3, 4))
    assert _to_host(weight) is weight
    view = weight.t()
    assert _to_host(view) is view
    activation = torch.randn(4, 3).t()
    packed = _to_host(activation)
    assert packed[0].data_ptr() != activation.data_ptr()
    assert torch.equal(_from_host(packed), activation)


def test_gradients_are_the_same():
    torch.manual_seed(1)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)), torch.randn(5, 4)
    model(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with KeepOnHost():
        loss = model(x).square().sum()
    loss.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


def offloads_of(cases):
    """What a step does with each configuration and script: offloads, what is kept whole, gradients, warnings."""
    import torch.sagemaker as tsm
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
        checkpoint_wrapper,
        offload_wrapper,
    )
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    from hyperpod_plugins.memory import offload
    from hyperpod_plugins.smp import job, torch_classes

    warnings.simplefilter("ignore")
    offload.MIN_BYTES, attach, keep = 1, offload.ActivationOffload.attach, torch_classes.KeepOnHost
    attached, kept, found = [], [], {}
    offload.ActivationOffload.attach = lambda self, blocks: (attached.append(self), attach(self, blocks))[1]
    torch_classes.KeepOnHost = lambda: (kept.append(True), keep())[1]
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    tokens = torch.arange(2 * 16).view(2, 16)
    for name, (config, wraps) in cases.items():
        job.reset()
        job.warn_once.cache_clear()
        tsm.init(config)
        torch.manual_seed(1)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, use_cache=False, **sizes)).train()
        if "own checkpointing" in wraps:
            model.gradient_checkpointing_enable()
        model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}))
        if "checkpoint" in wraps:
            is_block = partial(lambda kind, part: isinstance(part, kind), LlamaDecoderLayer)
            apply_activation_checkpointing(model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=is_block)
        outer = offload_wrapper(model) if "offload" in wraps else model
        with torch.no_grad():
            model(input_ids=tokens)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model.zero_grad()
                output = outer(input_ids=tokens, labels=tokens)
                output.loss.backward()
        gradients = [each.grad.full_tensor() for each in model.parameters()]
        stored = [each.stored_bytes // (2 * 2 * 16 * 32 * 4) for each in attached]
        told = [str(each.message) for each in caught if "sm_activation_offloading" in str(each.message)]
        found[name] = stored, len(kept) // 2, type(output.logits).__name__, gradients, told
        attached.clear()
        kept.clear()
    return found


SCRIPT = ("checkpoint", "offload")
OURS = {"activation_checkpointing": "full", "sm_activation_offloading": True}
CASES = {
    "plain": ({}, ()),
    "SMP's default": ({}, SCRIPT),
    "asked for": ({"sm_activation_offloading": True}, SCRIPT),
    "not wrapped": ({"sm_activation_offloading": True}, ("checkpoint",)),
    "as torch does": ({"sm_activation_offloading": False}, SCRIPT),
    "nothing is recomputed": ({}, ("offload",)),
    "recomputed by the model": ({}, ("own checkpointing", "offload")),
    "recomputed by the model, not wrapped": ({"sm_activation_offloading": True}, ("own checkpointing",)),
    "recomputed by this package": (OURS, ()),
    "and wrapped": (OURS, ("offload",)),
    "chunks and tiles": ({"loss_chunks": 2, "mlp_tiles": 2}, ()),
}


NOT_DONE = {
    "not wrapped": "model = offload_wrapper(model)",
    "recomputed by the model, not wrapped": "model = offload_wrapper(model)",
    "nothing is recomputed": "apply_activation_checkpointing(model, ",
    "recomputed by the model": "apply_activation_checkpointing(model, ",
}
"""Cases in which nothing is fetched ahead although the configuration says so, and the line that the warning names."""


@pytest.mark.spawns
def test_what_the_configuration_and_the_script_ask_for_is_done_once():
    """Whole inputs of blocks on the host, all but that of the last one; or all that backward needs; the same bits."""
    pytest.importorskip("transformers")
    [found] = run_ranks(installed, CASES, world_size=1, timeout_s=120)
    done = {name: each[:2] for name, each in found.items()}
    assert done == {
        "plain": ([], 0),
        "SMP's default": ([2], 0),
        "asked for": ([2], 0),
        "not wrapped": ([], 0),
        "as torch does": ([], 1),
        "nothing is recomputed": ([], 1),
        "recomputed by the model": ([], 1),
        "recomputed by the model, not wrapped": ([], 0),
        "recomputed by this package": ([2], 0),
        "and wrapped": ([2], 0),
        "chunks and tiles": ([], 0),
    }
    wanted = found["plain"][3]
    for name, (_, _, logits, gradients, _) in found.items():
        is_rounded = name == "chunks and tiles"
        assert (logits == "LogitsNotComputed") == is_rounded
        for one, other in zip(wanted, gradients, strict=True):
            if is_rounded:
                assert (one - other).abs().max() <= 5e-7 * max(float(one.abs().max()), 1e-3)
            else:
                assert torch.equal(one, other), name

    told = {name: each[4] for name, each in found.items() if each[4]}
    assert {name: len(lines) for name, lines in told.items()} == dict.fromkeys(NOT_DONE, 1)
    for name, line in NOT_DONE.items():
        assert line in told[name][0]
    assert "leave out its own gradient_checkpointing_enable()" in told["recomputed by the model"][0]


def installed(cases):
    import hyperpod_plugins.smp

    hyperpod_plugins.smp.install()
    return offloads_of(cases)
