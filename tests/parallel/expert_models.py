"""Small mixtures of experts."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from parallel.equal_training import VOCABULARY
from torch import nn

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
KINDS = {
    "mixtral": ("Mixtral", {"num_local_experts": 8}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}),
    "gpt_oss": ("GptOss", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 4, "head_dim": 8}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **LATENT,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 0,
            "head_dim": 8,
        },
    ),
}


def make_model(name="mixtral", **options):
    import transformers

    torch.manual_seed(0)
    kind, sizes = KINDS[name]
    config = getattr(transformers, f"{kind}Config")(**(SIZES | sizes | options))
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():  # routers that prefer some experts
            if "gate.weight" in parameter_name or "router" in parameter_name or "_bias" in parameter_name:
                parameter.normal_(0.0, 0.3)
    return model


def drawn_again(model):
    torch.manual_seed(5)
    return type(model)(model.config)


class OwnExperts(nn.Module):
    """A layer of experts that is not of transformers: with biases, and each expert has another activation."""

    holds_experts = True

    def __init__(self, num_experts=8, width=16):
        super().__init__()
        self.num_experts = num_experts
        self.up, self.bias = (nn.Parameter(torch.randn(num_experts, *size)) for size in ((width, 24), (24,)))
        self.down = nn.Parameter(torch.randn(num_experts, 24, width) / 5)
        self.power = nn.Parameter(torch.rand(num_experts) + 0.5)

    def forward(self, hidden, expert_index, weights):
        result = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, choice = torch.where(expert_index == expert)
            inner = torch.tanh(hidden[token] @ self.up[expert] + self.bias[expert]) * self.power[expert]
            result = result.index_add(0, token, inner @ self.down[expert] * weights[token, choice, None])
        return result


class OwnMixture(nn.Module):
    """A model around it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.router = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 8)
        self.experts, self.head = OwnExperts(), nn.Linear(16, VOCABULARY)

    def forward(self, input_ids, labels):
        hidden = self.embed(input_ids).flatten(0, 1)
        weights, chosen = self.router(hidden).softmax(dim=1).topk(2, dim=1)
        logits = self.head(hidden + self.experts(hidden, chosen, weights))
        return SimpleNamespace(loss=F.cross_entropy(logits[:-1], labels.flatten()[1:]), logits=logits)
