"""How much memory a rank of a recipe needs, in GiB: arithmetic over a model on the meta device.

Training state: ZeRO (Rajbhandari et al. 2019, arXiv:1910.02054), section 3.1: what each parameter costs. FSDP2 keeps
parameters, their gradients and AdamW's two moments in the type of the parameters, split over `shard x tensor` ranks.

Gathered: FSDP2 gathers one unit while it computes another, in the type of computation, and holds one unit's whole
gradients in that type. What belongs to no unit (embeddings, the head) is gathered from the forward pass to the end of
backward, and so are its gradients. Those that are being reduced exist once more, in float32.

Activations: Korthikanti et al. 2022 (arXiv:2205.05198), section 4, their terms taken apart for grouped-query
attention, gated feed-forward layers and experts, in bytes for a token:

    input of a block                      2 h                      all that is kept of a block that is recomputed
    norms (each computes in float32)      2 x (2 h + 4 h)
    queries, keys, values, attention      2 (2 a d + 2 k d) + 2 h
    gate, up, their activations, product  k_experts x 8 f + 2 h    k_experts: of each token; 1 in a dense model
    scores, only of eager attention       5 a s                    bytes for each query
    logits                                12 V                     bfloat16, float32, their gradients

h hidden size, a heads, k heads of keys, d head size, f size of the feed-forward layer, s sequence length, V vocabulary.
Left out: fragmentation, buffers of the collectives, what the libraries need for themselves: 5 to 8 GiB of a large GPU.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from recipe import Recipe
from torch import nn

from hyperpod_plugins.parallel.hsdp import find_blocks
from hyperpod_plugins.parallel.tensor_parallel import plan_for

GIB = 2**30
FLOAT32, BFLOAT16 = 4, 2
_SPLIT = ("colwise", "rowwise", "embedding_rowwise", "colwise_gather_output")


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of one rank."""

    num_parameters: int
    """Of the whole model."""
    num_trained: int
    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.gathered + self.activations

    def __str__(self) -> str:
        parts = ("parameters", "gradients", "optimizer", "gathered", "activations", "total")
        return "  ".join(f"{name} {getattr(self, name) / GIB:6.2f}" for name in parts)


def plan_memory(model: nn.Module, recipe: Recipe) -> MemoryPlan:
    """Plan a recipe for its model, which may be on the meta device."""
    config, topology = recipe.config, recipe.topology
    is_whole = config.precision == "32-true"
    stored = BFLOAT16 if config.precision == "bf16-true" else FLOAT32
    computed = FLOAT32 if is_whole else BFLOAT16
    split = {name for name, style in plan_for(model, config).items() if style in _SPLIT}

    def count(names: Iterable[tuple[str, nn.Parameter]], *, trained_only: bool = False) -> float:
        """Parameters of one rank of a tensor group."""
        return sum(
            parameter.numel() / (topology.tensor_degree if name.rpartition(".")[0] in split else 1)
            for name, parameter in names
            if parameter.requires_grad or not trained_only
        )

    everything = list(model.named_parameters())
    sharded = count(everything) / topology.shard_degree
    trained = count(everything, trained_only=True) / topology.shard_degree
    units = {id(block) for block in find_blocks(model)}
    named = {name: module for name, module in model.named_modules() if id(module) in units}
    sizes = [
        (
            count(inside := [(f"{name}.{key}", value) for key, value in module.named_parameters()]),
            count(inside, trained_only=True),
        )
        for name, module in named.items()
    ]
    block, block_trained = max(sizes)
    root = count(everything) - sum(size for size, _ in sizes)
    root_trained = count(everything, trained_only=True) - sum(size for _, size in sizes)
    gathered = computed * (2 * block + root) + computed * (block_trained + root_trained)
    gathered += FLOAT32 * max(block_trained, root_trained)
    return MemoryPlan(
        num_parameters=sum(parameter.numel() for _, parameter in everything),
        num_trained=sum(parameter.numel() for _, parameter in everything if parameter.requires_grad),
        parameters=stored * sharded,
        gradients=stored * trained,
        optimizer=2 * stored * trained,
        gathered=gathered if topology.shard_degree > 1 else 0.0,
        activations=_activations(model.config, recipe, topology.tensor_degree, computed / BFLOAT16),
    )


def _activations(sizes, recipe: Recipe, tensor_degree: int, of_bfloat16: float) -> float:
    training = recipe.training
    tokens = training.micro_train_batch_size * training.sequence_length
    hidden, heads = sizes.hidden_size, sizes.num_attention_heads
    head_size = recipe.model.get("head_dim", hidden // heads)
    feed_forward = recipe.model.get("moe_intermediate_size", recipe.model["intermediate_size"])
    attention = 2 * head_size * (2 * heads + 2 * sizes.num_key_value_heads)
    scores = 5 * heads * training.sequence_length if sizes._attn_implementation == "eager" else 0
    inside = attention + recipe.model.get("num_experts_per_tok", 1) * 8 * feed_forward + scores
    block = 2 * (2 + 4) * hidden + 2 * 2 * hidden + inside / tensor_degree
    kept = 2 * hidden if training.recompute else block
    blocks = kept * sizes.num_hidden_layers + (block if training.recompute else 0)
    return tokens * (blocks * of_bfloat16 + 12 * sizes.vocab_size)
