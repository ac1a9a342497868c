"""Plans of memory, against what is tracked in steps that run."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.parallel import ParallelConfig
from hyperpod_plugins.parallel.parallelize import save_activation_memory
from hyperpod_plugins.planning import (
    GIB,
    TrackedMemory,
    TrainingShape,
    UncountedPool,
    plan_memory,
    smallest_degrees,
)
from hyperpod_plugins.recovery.snapshot import COPIES

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")
SHAPE = TrainingShape(micro_batch_size=2, sequence_length=256)
WAYS = {
    "whole": {},
    "recomputed": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "offloaded": {"activation_offload": True},
    "chunks and tiles": {"activation_offload": True, "loss_chunks": 4, "mlp_tiles": 4},
}
LAYOUTS = {
    "hsdp 2x2": {"hybrid_shard_degree": 2},
    "full shard 4, recomputed": {"activation_checkpointing": "full"},
    "full shard 4, offloaded, chunks, tiles": WAYS["chunks and tiles"],
    "full shard 4, parameters on the host": {"param_offload": True},
    "full shard 4, optimizer on the host": {"optimizer_offload": True},
    "tp 2 x shard 2": {"tensor_parallel_degree": 2},
    "tp 2 x shard 2, recomputed, loss parallel": {
        "tensor_parallel_degree": 2,
        "activation_checkpointing": "full",
        "loss_parallel": True,
    },
}


def sizes(layers=4, width=128, **options):
    return transformers.LlamaConfig(
        vocab_size=2048,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        **options,
    )


def tokens():
    return torch.randint(2048, (SHAPE.micro_batch_size, SHAPE.sequence_length))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": True}])
def test_activations_are_those_of_a_step(way, options):
    config = ParallelConfig.of(WAYS[way])
    plan = plan_memory(sizes(**options), config, SHAPE, world_size=1)
    model, tracker = transformers.LlamaForCausalLM(sizes(**options)).train(), TrackedMemory()
    save_activation_memory(model, config, CPU, UncountedPool(CPU, tracker))
    model(input_ids=(batch := tokens()), labels=batch).loss.backward()
    for tensor in (*model.parameters(), *(each.grad for each in model.parameters()), *model.buffers()):
        tracker.leave_out(tensor)
    with tracker:
        model(input_ids=batch, labels=batch).loss.backward()
    assert plan.activations == pytest.approx(tracker.peak, rel=0.02)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert (plan.num_parameters, plan.parameters, plan.optimizer) == (
        num_parameters,
        4 * num_parameters,
        8 * num_parameters,
    )


def measured(layouts):
    from hyperpod_plugins.memory import offload
    from hyperpod_plugins.parallel import build_mesh, loss_parallel_context, parallelize

    dist.init_process_group("hyperpod")
    found = {}
    for name, options in layouts.items():
        config, tracker = ParallelConfig.of(options), TrackedMemory()
        offload.HostPool = lambda device, tracker=tracker: UncountedPool(device, tracker)
        mesh = build_mesh(config.topology(dist.get_world_size()), "cpu")
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(sizes())
        with tracker:
            parallelize(model, mesh, config)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
            for _ in range(3):
                tracker.peak = tracker.current
                with loss_parallel_context(config):
                    model(input_ids=(batch := tokens()), labels=batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
        found[name] = tracker.peak
    return found


@pytest.mark.spawns
def test_a_rank_needs_what_is_planned(run_ranks):
    for found in run_ranks(measured, LAYOUTS, world_size=4, timeout_s=120):
        for name, peak in found.items():
            plan = plan_memory(sizes(), ParallelConfig.of(LAYOUTS[name]), SHAPE, world_size=4)
            used = plan.parameters + plan.gradients + plan.optimizer + plan.gathered + plan.activations
            used += plan.host_state  # here, the host is the device
            assert used == pytest.approx(peak, rel=0.1), name


def test_training_state_in_host_memory_counts_there():
    whole, states, everything = (
        plan_memory(sizes(), ParallelConfig.of(options), SHAPE, world_size=4)
        for options in ({}, {"optimizer_offload": True}, {"param_offload": True})
    )
    assert (whole.host, states.optimizer, everything.optimizer) == (0, 0, 0)
    assert (states.parameters, states.gradients) == (whole.parameters, whole.gradients)
    assert states.host == whole.optimizer + whole.parameters + whole.gradients  # its states, and copies for the step
    assert (everything.parameters, everything.gradients) == (0, 0)
    assert everything.host == whole.parameters + whole.gradients + whole.optimizer
    assert (states.gathered, states.activations) == (whole.gathered, whole.activations)
    both = plan_memory(sizes(), ParallelConfig(param_offload=True, optimizer_offload=True), SHAPE, world_size=4)
    assert both == everything
    assert everything.device < states.device < whole.device


@pytest.mark.parametrize(
    "config",
    [
        transformers.GPT2Config(n_layer=2, n_embd=128, n_head=4, vocab_size=2048),
        transformers.BloomConfig(n_layer=2, hidden_size=128, n_head=4, vocab_size=2048),
        transformers.MixtralConfig(
            num_hidden_layers=2, hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2,
            num_local_experts=4, vocab_size=2048, experts_implementation="eager"),
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_models_that_are_split_by_the_classes_of_their_blocks_are_planned(config):
    whole, split = (
        plan_memory(config, ParallelConfig(hybrid_shard_degree=1, tensor_parallel_degree=degree), SHAPE, world_size=2)
        for degree in (1, 2)
    )
    assert 0.5 <= split.parameters / whole.parameters < 0.7
    assert split.activations < 0.9 * whole.activations


def test_weights_that_are_gathered_in_float8_take_one_byte_a_value():
    """The peak is the reduction of the last block's gradients; the others, or one of them, are gathered then."""

    def gathered(in_float8, width=256, tensor_degree=1, keeps=False):
        config = ParallelConfig.of(
            precision="bf16-mixed",
            float8_recipe="tensorwise",
            float8_all_gather=in_float8,
            tensor_parallel_degree=tensor_degree,
            reshard_after_forward=not keeps,
        )
        shape = TrainingShape(micro_batch_size=1, sequence_length=16)
        return plan_memory(sizes(3, width), config, shape, world_size=4).gathered

    linears = 3 * 256 * 256 + 3 * 256 * 1024  # queries and outputs; keys and values of half the heads; MLP
    for num_blocks, options in ((1, {}), (2, {"keeps": True}), (0.5, {"tensor_degree": 2})):
        assert gathered(False, **options) - gathered(True, **options) == num_blocks * linears
    assert gathered(False, width=24) == gathered(True, width=24)  # sides that are no multiples of 16


def test_the_smallest_degrees_that_fit():
    llama = transformers.LlamaConfig(  # of 8 billion parameters
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, use_cache=False,
    )  # fmt: skip
    config = ParallelConfig(precision="bf16-mixed", activation_checkpointing="full", loss_chunks=8)
    shape = TrainingShape(micro_batch_size=1, sequence_length=8192, has_snapshots=True)
    plan = smallest_degrees(llama, config, shape, world_size=16, ranks_per_node=8, device_memory_gib=72)
    assert (plan.topology.tensor_degree, plan.num_parameters) == (1, 8_030_261_248)
    assert plan.device <= 72 * GIB
    smaller = ParallelConfig.of(config, hybrid_shard_degree=plan.topology.shard_degree // 2)
    assert plan_memory(llama, smaller, shape, world_size=16).device > 72 * GIB
    assert plan.host_snapshots == COPIES * (plan.parameters + plan.optimizer)
    with pytest.raises(ConfigError, match=r"8,030,261,248 parameters with 8192 tokens do not fit 2 devices of 24 GiB"):
        smallest_degrees(llama, config, shape, world_size=2, ranks_per_node=1, device_memory_gib=24)


class Depends(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, input_ids, labels):
        return self.layer(torch.ones(4)) * float(input_ids.sum())


def test_a_step_that_depends_on_values_is_not_planned_wrongly():
    with pytest.raises(ConfigError, match="a step of Depends depends on values"):
        plan_memory(Depends(), ParallelConfig(), SHAPE, world_size=1)
    plan = plan_memory(
        Depends(), ParallelConfig(), SHAPE, world_size=1, step=lambda model, _: model.layer(torch.ones(4)).sum()
    )
    assert plan.num_trained == 20
