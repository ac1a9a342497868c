"""The tensor plans of transformers models: each model that is split computes what one process computes."""

import pytest
import torch
import torch.distributed as dist
from device import DEVICE
from torch import nn

from hyperpod_plugins.parallel import ParallelConfig

TOLERANCE = 5e-7
BATCH, SEQUENCE, VOCABULARY = 3, 10, 48
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=16,
    bos_token_id=0,
    eos_token_id=0,
    pad_token_id=1,
)
GROUPED = SIZES | {"num_key_value_heads": 2}
EXPERTS = GROUPED | {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FALCON = {name: size for name, size in SIZES.items() if name != "intermediate_size"} | {"bias": True}
GPT = dict(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=16, bos_token_id=0, eos_token_id=0)
NO_DROPOUT = dict(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
BERT_NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
T5 = dict(
    vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, relative_attention_num_buckets=8
) | {"dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0}
MODELS = {
    "GPT-2": ("GPT2LMHeadModel", GPT | NO_DROPOUT),
    "GPT-2, odd vocabulary, eager": (
        "GPT2LMHeadModel",
        GPT | NO_DROPOUT | {"vocab_size": 49, "attn_implementation": "eager", "reorder_and_upcast_attn": True},
    ),
    "GPT-2 for classes": ("GPT2ForSequenceClassification", GPT | NO_DROPOUT | {"num_labels": 3, "pad_token_id": 1}),
    "GPT-NeoX": ("GPTNeoXForCausalLM", SIZES),
    "GPT-J": ("GPTJForCausalLM", GPT | NO_DROPOUT | {"rotary_dim": 4}),
    "Falcon, one key": ("FalconForCausalLM", FALCON | {"multi_query": True, "parallel_attn": True}),
    "Falcon, groups": (
        "FalconForCausalLM",
        FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 48},
    ),
    "Falcon, alibi": (
        "FalconForCausalLM",
        FALCON | {"multi_query": False, "parallel_attn": False, "alibi": True, "num_kv_heads": 4},
    ),
    "Falcon, one key, alibi, eager": (
        "FalconForCausalLM",
        FALCON | {"multi_query": True, "alibi": True, "attn_implementation": "eager"},
    ),
    "Bloom": (
        "BloomForCausalLM",
        dict(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, hidden_dropout=0.0, attention_dropout=0.0),
    ),
    "RoBERTa": ("RobertaForMaskedLM", SIZES | BERT_NO_DROPOUT),
    "BERT": ("BertForMaskedLM", SIZES | BERT_NO_DROPOUT),
    "BERT for pretraining": ("BertForPreTraining", SIZES | BERT_NO_DROPOUT),
    "T5": ("T5ForConditionalGeneration", T5),
    "T5, gated, untied": (
        "T5ForConditionalGeneration",
        T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "ViT": (
        "ViTForImageClassification",
        SIZES | BERT_NO_DROPOUT | {"image_size": 8, "patch_size": 4, "num_labels": 3},
    ),
    "Mistral": ("MistralForCausalLM", GROUPED | {"sliding_window": 4}),
    "Mixtral": ("MixtralForCausalLM", EXPERTS | {"output_router_logits": True}),
    "Mixtral, eager": ("MixtralForCausalLM", EXPERTS | {"experts_implementation": "eager"}),
    "Llama": ("LlamaForCausalLM", GROUPED | {"attention_bias": True, "mlp_bias": True}),
    "Qwen2": ("Qwen2ForCausalLM", GROUPED),
    "Qwen3": ("Qwen3ForCausalLM", GROUPED | {"head_dim": 8}),
    "Qwen2-MoE": ("Qwen2MoeForCausalLM", EXPERTS | {"shared_expert_intermediate_size": 24}),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", EXPERTS | {"head_dim": 8}),
}


def make(name):
    import transformers

    kind, options = MODELS[name]
    attention, experts = (options.get(f"{what}_implementation") for what in ("attn", "experts"))
    options = {key: value for key, value in options.items() if not key.endswith("_implementation")}
    model_class = getattr(transformers, kind)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**options))
    if attention:
        model.set_attn_implementation(attention)
    if experts:
        model.set_experts_implementation(experts)
    with torch.no_grad():
        for key, parameter in model.named_parameters():  # zeros and ones would hide a bias or a norm that is misplaced
            if parameter.dim() == 1:
                nn.init.uniform_(parameter, 0.5, 1.5) if "norm" in key.lower() else nn.init.uniform_(parameter, -0.5, 0.5)
            else:
                parameter.mul_(4)
    return model


def batch_for(model):
    generator = torch.Generator().manual_seed(3)
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(BATCH, 3, 8, 8, generator=generator), "labels": torch.tensor([0, 2, 1])}
    tokens = torch.randint(2, VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    labels = torch.randint(2, VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, -3:] = 0
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": tokens}
    if model.config.model_type in ("bert", "roberta", "t5"):
        batch["labels"] = labels
    if "SequenceClassification" in type(model).__name__:
        batch["labels"] = torch.tensor([0, 2, 1])
    if "PreTraining" in type(model).__name__:
        batch["next_sentence_label"] = torch.tensor([0, 1, 1])
    return batch


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def step(model):
    """The loss, all gradients, and the loss after a step of gradient descent."""
    batch = batch_for(model)
    loss = model(**batch).loss
    loss.backward()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    torch.optim.SGD(model.parameters(), lr=1e-2).step()
    return [whole(loss), whole(model(**batch).loss)], gradients


def difference(found, wanted):
    """The largest relative difference of losses, and of gradients, with where it is.

    A gradient that is zero but for rounding, as that of a bias of keys, is compared with all of them.
    """
    (losses, gradients), (losses_alone, gradients_alone) = found, wanted
    assert gradients.keys() == gradients_alone.keys()
    of_loss = max(float((a - b).abs() / b.abs()) for a, b in zip(losses, losses_alone, strict=True))
    everything = torch.cat([each.flatten() for each in gradients_alone.values()]).norm()
    of_gradients = {
        name: float((gradients[name] - each).norm() / max(each.norm(), 1e-3 * everything))
        for name, each in gradients_alone.items()
    }
    worst = max(of_gradients, key=of_gradients.__getitem__)
    return of_loss, of_gradients[worst], worst


def step_split(names):
    from hyperpod_plugins.parallel import build_mesh, parallelize

    dist.init_process_group("hyperpod")
    config = ParallelConfig(tensor_parallel_degree=2)
    mesh = build_mesh(config.topology(2), DEVICE)
    results = {}
    for name in names:
        model = make(name)
        try:
            results[name] = step(parallelize(model, mesh, config))
        except Exception as error:  # the same on both ranks: the others are still compared
            results[name] = f"{type(error).__name__}: {error}"
    return results


@pytest.mark.spawns
def test_every_model_of_the_list_equals_one_process(run_ranks):
    results = run_ranks(step_split, list(MODELS), world_size=2, timeout_s=240)
    failed = {}
    for name in MODELS:
        found = [each[name] for each in results]
        if any(isinstance(each, str) for each in found):
            failed[name] = found[0]
            continue
        of_loss, of_gradients, worst = difference(found[0], step(make(name)))
        print(f"{name:32} loss {of_loss:.1e}, gradients {of_gradients:.1e} ({worst})")
        if of_loss > TOLERANCE or of_gradients > TOLERANCE:
            failed[name] = f"losses differ by {of_loss:.1e}, the gradient of {worst} by {of_gradients:.1e}"
        if not all(map(torch.equal, found[0][0], found[1][0])):
            failed[name] = "the ranks have different losses"
    assert not failed, "\n".join(f"{name}: {problem}" for name, problem in failed.items())
