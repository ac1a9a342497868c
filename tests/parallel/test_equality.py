"""Training on a mesh equals training in one process: losses and parameters after ten steps, for several layouts.

The tolerance is that of float32 sums taken in another order: 2e-6 relative on losses, 2e-5 absolute on parameters whose
updates are of size 1e-2 (AdamW normalises tiny gradients, which enlarges rounding noise). What saves memory is held to
5e-7 relative on losses and norms.
"""

import pytest
import torch
import torch.distributed as dist
from device import DEVICE
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

NUM_STEPS = 10
GLOBAL_BATCH = 8
SEQUENCE = 12
VOCABULARY = 64
MAX_NORM = 0.5
LAYOUTS = {
    "hsdp 2x2": {"hybrid_shard_degree": 2},
    "full shard 4": {"hybrid_shard_degree": 4},
    "tp 2 x shard 2": {"hybrid_shard_degree": 2, "tensor_parallel_degree": 2},
    "replicate 2 x tp 2": {"hybrid_shard_degree": 1, "tensor_parallel_degree": 2},
    "tp 4": {"tensor_parallel_degree": 4},
    "tp 2 x shard 2, sequence parallel": {"tensor_parallel_degree": 2, "sequence_parallel": True},
    "tp 2 x shard 2, loss parallel": {"tensor_parallel_degree": 2, "loss_parallel": True},
    "tp 2 x shard 2, both": {"tensor_parallel_degree": 2, "sequence_parallel": True, "loss_parallel": True},
}
USER_PLANS = {  # by model, for two tensor ranks; modules that no pattern names stay whole
    "llama": {
        "*.layers.0.mlp.*": "replicate",
        **{f"*.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj")},
        **{f"*.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")},
        "*.o_proj": "rowwise",
        "*.down_proj": RowwiseParallel(),
    },
    "tied llama": {
        **{f"*.{name}": "colwise" for name in ("gate_proj", "up_proj")},
        "*.down_proj": "rowwise",
        "lm_head": "colwise_gather_output",
    },
    "plain": {"*.w1": ColwiseParallel(), "*.w2": "rowwise", "output": "colwise_gather_output"},
}


def make_llama(tied: bool = False):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=SEQUENCE,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)

    def loss(tokens):
        return model(input_ids=tokens, labels=tokens).loss

    return model, loss


def make_tied_llama():
    return make_llama(tied=True)


def make_capped():
    """Gemma 2, with a cap of logits that is far from linear for them."""
    return make_changing("gemma2", final_logit_softcapping=0.5)


def make_scaled():
    return make_changing("cohere", logit_scale=8.0)


def make_changing(name, **options):
    """A model that changes its logits before the loss."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        name,
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
        use_cache=False,
        **options,
    )
    model = AutoModelForCausalLM.from_config(config).train()

    def loss(tokens):
        return model(input_ids=tokens, labels=tokens).loss

    return model, loss


class PlainBlock(nn.Module):
    """A feed-forward block named as in the Llama reference code, with a norm and biases."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.w1 = nn.Linear(width, 2 * width)
        self.w2 = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.w2(torch.tanh(self.w1(self.norm(x))))


class PlainModel(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList([PlainBlock(width) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def make_plain():
    model = PlainModel()

    def loss(tokens):
        logits = model(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))

    return model, loss


MODELS = {"llama": make_llama, "tied llama": make_tied_llama, "plain": make_plain}
CHANGING = {"capped": make_capped, "scaled": make_scaled}


def batches():
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(VOCABULARY, (GLOBAL_BATCH, SEQUENCE), generator=generator) for _ in range(NUM_STEPS)]


def train_alone(make):
    torch.manual_seed(0)
    model, loss = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms = [], []
    for batch in batches():
        value = loss(batch)
        value.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(value.detach()))
    return losses, norms, {name: value.detach().clone() for name, value in model.state_dict().items()}


def train_on_mesh(make, options, precision="32-true"):
    from hyperpod_plugins.parallel import (
        ParallelConfig,
        build_mesh,
        clip_grad_norm_,
        loss_parallel_context,
        parallelize,
    )

    config = ParallelConfig.of(options, precision=precision)
    topology = config.topology(dist.get_world_size())
    mesh = build_mesh(topology, DEVICE)
    torch.manual_seed(dist.get_rank())  # ranks start from different models: rank 0's must win
    if dist.get_rank() == 0:
        torch.manual_seed(0)
    model, loss = make()
    parallelize(model, mesh, config)
    is_split = any("tensor" in parameter.device_mesh.mesh_dim_names for parameter in model.parameters())
    assert is_split == (config.tensor_parallel_degree > 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    share, index = GLOBAL_BATCH // topology.data_degree, topology.data_rank(dist.get_rank())
    losses, norms = [], []
    for batch in batches():
        with loss_parallel_context(config):
            value = loss(batch[index * share : (index + 1) * share])
            value.backward()
        norms.append(float(clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value.detach().clone()
        dist.all_reduce(whole)
        losses.append(float(whole) / dist.get_world_size())
    state = {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in model.state_dict().items()
    }
    return losses, norms, state


def train_all_on_mesh(layouts):
    dist.init_process_group("hyperpod")
    cases = {(model, name): options for model in MODELS for name, options in layouts.items()}
    for model, plan in USER_PLANS.items():
        cases[model, "plan of the user"] = {"tensor_parallel_degree": 2, "tensor_plan": plan}
    results = {case: train_on_mesh(MODELS[case[0]], options) for case, options in cases.items()}
    return results if dist.get_rank() == 0 else None


def assert_equal(on_mesh, alone, what, of_losses=2e-6, of_norms=2e-5):
    (losses, norms, state), (losses_alone, norms_alone, state_alone) = on_mesh, alone
    torch.testing.assert_close(
        torch.tensor(losses), torch.tensor(losses_alone), rtol=of_losses, atol=0, msg=lambda m: f"{what}: losses: {m}"
    )
    torch.testing.assert_close(
        torch.tensor(norms), torch.tensor(norms_alone), rtol=of_norms, atol=0, msg=lambda m: f"{what}: norms: {m}"
    )
    assert state.keys() == state_alone.keys()
    for name, value in state.items():
        torch.testing.assert_close(
            value, state_alone[name], rtol=0, atol=2e-5, msg=lambda m, n=name: f"{what}: {n}: {m}"
        )


@pytest.mark.spawns
def test_ten_steps_on_four_ranks_equal_one_process(run_ranks):
    results = run_ranks(train_all_on_mesh, LAYOUTS, world_size=4, timeout_s=240)[0]
    alone = {model: train_alone(make) for model, make in MODELS.items()}
    for (model, layout), result in results.items():
        assert_equal(result, alone[model], f"{model}, {layout}")


@pytest.mark.spawns
def test_ten_steps_on_two_ranks_equal_one_process(run_ranks):
    layouts = {"tp 2": {"tensor_parallel_degree": 2}, "shard 2": {}, "replicate 2": {"hybrid_shard_degree": 1}}
    results = run_ranks(train_all_on_mesh, layouts, world_size=2, timeout_s=120)[0]
    alone = {model: train_alone(make) for model, make in MODELS.items()}
    for (model, layout), result in results.items():
        assert_equal(result, alone[model], f"{model}, {layout}")


SAVING = {"sm_activation_offloading": True, "loss_chunks": 3, "mlp_tiles": 3}
MEMORY_LAYOUTS = {
    "hsdp 2x2, offload, chunks, tiles": {"hybrid_shard_degree": 2, **SAVING},
    "full shard 4, selective, chunks": {"activation_checkpointing": "selective", "loss_chunks": 20},
    "tp 2 x shard 2, offload, chunks, tiles": {"tensor_parallel_degree": 2, **SAVING},
    "tp 2 x shard 2, offload, chunks, parallel loss": {"tensor_parallel_degree": 2, "loss_parallel": True, **SAVING},
    "tp 2 x shard 2, sequence parallel, offload, chunks": {
        "tensor_parallel_degree": 2,
        "sequence_parallel": True,
        **SAVING,
        "mlp_tiles": 1,
    },
}


OF_CHANGED_LOGITS = {
    "capped": ("hsdp 2x2, offload, chunks, tiles", "tp 2 x shard 2, offload, chunks, parallel loss"),
    "scaled": ("tp 2 x shard 2, offload, chunks, parallel loss",),
}


def train_with_little_memory():
    dist.init_process_group("hyperpod")
    cases = [(model, name) for model in ("llama", "tied llama") for name in MEMORY_LAYOUTS]
    cases += [(model, name) for model in CHANGING for name in OF_CHANGED_LOGITS[model]]
    makes = MODELS | CHANGING
    results = {case: train_on_mesh(makes[case[0]], MEMORY_LAYOUTS[case[1]]) for case in cases}
    return results if dist.get_rank() == 0 else None


@pytest.mark.spawns
def test_recomputed_offloaded_chunked_and_tiled_steps_equal_one_process(run_ranks):
    results = run_ranks(train_with_little_memory, world_size=4, timeout_s=320)[0]
    makes = MODELS | CHANGING
    alone = {model: train_alone(makes[model]) for model in ("llama", "tied llama", *CHANGING)}
    for (model, layout), result in results.items():
        assert_equal(result, alone[model], f"{model}, {layout}", of_losses=5e-7, of_norms=5e-7)
