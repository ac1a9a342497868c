"""A script's own `from_pretrained` with `delayed_init=True`: nothing is loaded before `prepare`, then shards are."""

import pytest
import torch
from harness import run_ranks

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}


def train(accelerator, folder):
    """The script."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").train()
    has_values = not any(each.is_meta for each in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    losses, tokens = [], torch.arange(2 * 8).view(2, 8)
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, has_values, model.lm_head.weight is model.model.embed_tokens.weight


def with_plugin(folder):
    from hyperpod_plugins.accelerate import HyperPodPlugin

    return train(HyperPodPlugin(hybrid_shard_degree=2, delayed_init=True).accelerator(), folder)


@pytest.mark.spawns
def test_a_script_that_loads_a_pretrained_model_trains_what_it_would_alone(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).save_pretrained(tmp_path, max_shard_size="5KB")
    alone, has_values, is_tied = train(None, tmp_path)
    assert (has_values, is_tied) == (True, True)
    assert alone[-1] < alone[0]
    for losses, has_values, is_tied in run_ranks(with_plugin, tmp_path, world_size=2, timeout_s=240):
        assert (has_values, is_tied) == (False, True)
        assert losses == pytest.approx(alone, rel=2e-6)
