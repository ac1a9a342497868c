"""The tensor plans of transformers models: each model that is split computes what one process computes."""

import pytest
import torch
import torch.distributed as dist
from device import DEVICE
from torch import nn

from hyperpod_plugins.parallel import ParallelConfig, loss_parallel_context, propose_tensor_plan

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
) | {"dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0, "initializer_factor": 0.2}
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
    "BERT with GPT-2": (
        "EncoderDecoderModel",
        {
            "encoder": SIZES | BERT_NO_DROPOUT | {"model_type": "bert"},
            "decoder": GPT | NO_DROPOUT | {"model_type": "gpt2", "add_cross_attention": True, "is_decoder": True},
            "decoder_start_token_id": 0,
            "pad_token_id": 1,
        },
    ),
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
    "GPT-2, loss parallel": ("GPT2LMHeadModel", GPT | NO_DROPOUT, {"loss_parallel": True}),
    "T5, loss parallel": ("T5ForConditionalGeneration", T5, {"loss_parallel": True}),
    "GPT-NeoX, both parallel": ("GPTNeoXForCausalLM", SIZES, {"loss_parallel": True, "sequence_parallel": True}),
    "Mistral, sequence parallel": ("MistralForCausalLM", GROUPED, {"sequence_parallel": True}),
    "OPT, proposed plan": (
        "OPTForCausalLM",
        SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "attention_dropout": 0.0},
    ),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", EXPERTS | {"head_dim": 8}),
}
ONLY_FLOAT32 = ("GPT-2, odd vocabulary, eager", "Mixtral", "Qwen2-MoE", "Qwen3-MoE")
"""Their attention, or their experts, do not compute in float64."""


def config_of(name):
    _, _, *options = MODELS[name]
    if "proposed" in name:
        options = [{"tensor_plan": propose_tensor_plan(make(name, torch.float32)).plan}]
    return ParallelConfig(tensor_parallel_degree=2, **(options[0] if options else {}))


def make(name, dtype):
    import transformers

    kind, options, *_ = MODELS[name]
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
                nn.init.uniform_(parameter, 0.5, 1.5) if "norm" in key.lower() else nn.init.uniform_(
                    parameter, -0.5, 0.5
                )
            else:
                parameter.mul_(2)
    return model.to(dtype)


def batch_for(model):
    generator = torch.Generator().manual_seed(3)
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(BATCH, 3, 8, 8, generator=generator), "labels": torch.full((BATCH,), 2)}
    tokens = torch.randint(2, VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    labels = torch.randint(2, VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, -3:] = 0
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": tokens}
    if model.config.model_type in ("bert", "roberta", "t5"):
        batch["labels"] = labels
    if "SequenceClassification" in type(model).__name__:
        batch["labels"] = torch.full((BATCH,), 2)  # equal ones, whose gradients add up
    if "PreTraining" in type(model).__name__:
        batch["next_sentence_label"] = torch.tensor([0, 1, 1])
    return batch


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def step(model, config):
    """The loss of a step, and all gradients."""
    batch = batch_for(model)
    batch = {name: each.to(model.dtype) if each.is_floating_point() else each for name, each in batch.items()}
    with loss_parallel_context(config):
        loss = model(**batch).loss
        loss.backward()
    return whole(loss), {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def differences(found, wanted):
    """The relative difference of the loss, that of all gradients together, and the largest of one gradient.

    A gradient that is zero but for rounding, as that of a bias of keys, is compared with all of them.
    """
    (loss, gradients), (loss_alone, gradients_alone) = found, wanted
    for name in gradients.keys() ^ gradients_alone.keys():  # a layer whose result the loss does not depend on
        assert not torch.any((gradients | gradients_alone)[name]), name
    gradients_alone = {name: each for name, each in gradients_alone.items() if name in gradients}
    of_loss = float((loss - loss_alone).abs() / loss_alone.abs())
    everything = torch.cat([each.flatten() for each in gradients_alone.values()]).norm()
    errors = {name: (gradients[name] - each).norm() for name, each in gradients_alone.items()}
    of_each = {
        name: float(errors[name] / max(each.norm(), 1e-6 * everything)) for name, each in gradients_alone.items()
    }
    worst = max(of_each, key=of_each.__getitem__)
    return of_loss, float(torch.stack([*errors.values()]).norm() / everything), of_each[worst], worst


def types_of(name):
    """Sums in another order differ in float32 by up to 4e-6 of one gradient, so each is compared in float64."""
    return (torch.float32,) if name in ONLY_FLOAT32 else (torch.float32, torch.float64)


def step_split(names):
    from hyperpod_plugins.parallel import build_mesh, parallelize

    dist.init_process_group("hyperpod")
    results = {}
    for name in names:
        config = config_of(name)
        mesh = build_mesh(config.topology(dist.get_world_size()), DEVICE)
        for dtype in types_of(name):
            try:
                results[name, dtype] = step(parallelize(make(name, dtype), mesh, config), config)
            except (RuntimeError, ValueError, TypeError, AttributeError) as error:  # the same on all ranks
                results[name, dtype] = f"{type(error).__name__}: {error}"
    return results


def compare(results, names):
    failed = {}
    for name in names:
        for dtype in types_of(name):
            found = [each[name, dtype] for each in results]
            if any(isinstance(each, str) for each in found):
                failed[name] = found[0]
                break
            alone = step(make(name, dtype), ParallelConfig())
            of_loss, of_all, of_one, worst = differences(found[0], alone)
            what = (
                f"{dtype}: losses differ by {of_loss:.1e}, gradients by {of_all:.1e}, that of {worst} by {of_one:.1e}"
            )
            print(f"{name:32} {what}")
            if max(of_loss, of_all, of_one if dtype == torch.float64 else 0.0) > TOLERANCE:
                failed[name] = what
            if any(not torch.equal(found[0][0], each[0]) for each in found):
                failed[name] = "the ranks have different losses"
    return failed


@pytest.mark.spawns
@pytest.mark.filterwarnings("ignore:Version v4.12.0 introduces:FutureWarning")  # of EncoderDecoderModel, to all callers
def test_every_model_of_the_list_equals_one_process(run_ranks):
    results = run_ranks(step_split, list(MODELS), world_size=2, timeout_s=420)
    failed = compare(results, MODELS)
    assert not failed, "\n".join(f"{name}: {problem}" for name, problem in failed.items())
