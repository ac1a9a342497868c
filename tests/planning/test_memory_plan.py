"""Plans of memory, against what is tracked in steps that run."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
import transformers
from planning.memory_layouts import IN_SUITE, SHAPE, SHAPES, WAYS, compare, leave_host_out, mixtral, sizes
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from hyperpod_plugins.errors import ConfigError, NotBuiltYetError
from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize
from hyperpod_plugins.planning import (
    GIB,
    TrackedMemory,
    TrainingShape,
    plan_memory,
    smallest_degrees,
)
from hyperpod_plugins.recovery.snapshot import COPIES


@pytest.fixture
def one_rank():
    dist.init_process_group("hyperpod", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def peaks_of(options, config, shape):
    """Bytes of a small Llama on one rank, in forward and backward and in the optimizer's step; and what is planned."""
    tracker, implementation = TrackedMemory(), shape.optimizer_implementation
    chosen = {"fused": True} if implementation == "fused" else {"foreach": implementation == "foreach"}
    with pytest.MonkeyPatch.context() as patch, tracker:
        leave_host_out(tracker, patch.setattr)
        model = transformers.AutoModelForCausalLM.from_config(sizes(**options)).train()
        parallelize(model, build_mesh(config.topology(1), "cpu"), config)
        optimizer = torch.optim.AdamW(model.parameters(), **chosen)
        batch = torch.randint(2048, (shape.micro_batch_size, shape.sequence_length))
        for _ in range(2):
            tracker.peak = tracker.current
            model(input_ids=batch, labels=batch).loss.backward()
            in_backward, tracker.peak = tracker.peak, tracker.current
            optimizer.step()
            in_optimizer_step = tracker.peak
            optimizer.zero_grad(set_to_none=not shape.keeps_gradients)
    plan = plan_memory(sizes(**options), config, shape, world_size=1)
    return (in_backward, in_optimizer_step), plan


@pytest.mark.parametrize(
    ("way", "gradients", "options"),
    [
        *((way, gradients, {}) for way in WAYS for gradients in SHAPES),
        ("whole", "dropped", {"tie_word_embeddings": True}),
        ("chunks and tiles", "dropped", {"tie_word_embeddings": True}),
    ],
)
def test_a_step_needs_what_is_planned(way, gradients, options, one_rank):
    used, plan = peaks_of(options, ParallelConfig.of(WAYS[way]), SHAPES[gradients])
    assert (plan.in_backward, plan.in_optimizer_step) == pytest.approx(used, rel=0.05)
    num_parameters = plan.num_parameters
    assert (plan.parameters, plan.gradients, plan.optimizer) == tuple(each * num_parameters for each in (4, 4, 8))


@pytest.mark.parametrize("implementation", ["for_loop", "foreach", "fused"])
def test_what_an_optimizer_takes_while_it_steps(implementation, one_rank):
    """With short sequences, more than what forward and backward take besides; `foreach` is the default on GPUs."""
    shape = TrainingShape(micro_batch_size=1, sequence_length=16, optimizer_implementation=implementation)
    config = ParallelConfig(activation_checkpointing="full", loss_chunks=4)
    used, plan = peaks_of({}, config, shape)
    assert (plan.in_backward, plan.in_optimizer_step) == pytest.approx(used, rel=0.05)
    if implementation == "foreach":
        assert plan.peak == plan.in_optimizer_step > plan.in_backward
        assert plan == plan_memory(sizes(), config, replace(shape, optimizer_implementation="auto"), world_size=1)
    else:
        assert plan.peak == plan.in_backward > plan.in_optimizer_step


@pytest.mark.parametrize("gradients", SHAPES)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_parameters_are_planned_in_the_type_that_they_have(precision, gradients, one_rank):
    """`from_pretrained` loads a checkpoint of today in bfloat16, and so it stays, gradients and states included."""
    used, plan = peaks_of({"dtype": torch.bfloat16}, ParallelConfig(precision=precision), SHAPES[gradients])
    assert (plan.in_backward, plan.in_optimizer_step) == pytest.approx(used, rel=0.06)
    assert plan.parameters == 2 * plan.num_parameters


def test_an_unknown_implementation_of_the_optimizer_is_refused():
    with pytest.raises(ConfigError, match="optimizer_implementation='forloop' is none of auto, foreach, for_loop, "):
        replace(SHAPE, optimizer_implementation="forloop")


@pytest.mark.spawns
def test_a_rank_needs_what_is_planned():
    comparisons, snapshots, kept = compare(IN_SUITE, timeout_s=360.0)
    assert [each for each in comparisons if not each.fits] == []
    assert kept == [pytest.approx(snapshots, rel=0.01)] * 4  # buffers, and counts of steps, too


def test_a_tensor_around_others_takes_their_memory():
    around = TwoTensor(torch.zeros(8), torch.zeros(8))  # as weights are that are gathered in float8
    with TrackedMemory() as tracker:
        result = around + 1
    assert tracker.current == 2 * 8 * 4  # and nothing for its own storage, which has no memory
    del result
    assert tracker.current == 0


def test_activations_that_host_memory_does_not_hold_stay_on_the_device():
    shape = replace(SHAPE, sequence_length=16 * SHAPE.sequence_length)
    config = ParallelConfig(sm_activation_offloading=True)
    whole = plan_memory(sizes(), config, shape, world_size=4)
    half = whole.host_activations / 2
    config = replace(config, activation_host_memory_gib=half / 2**30)
    limited = plan_memory(sizes(), config, shape, world_size=4)
    assert 0 < limited.host_activations <= half
    assert limited.activations > whole.activations


def test_training_state_in_host_memory_counts_there():
    whole, states, everything = (
        plan_memory(sizes(), ParallelConfig.of(options), SHAPE, world_size=4)
        for options in ({}, {"optimizer_offload": True}, {"param_offload": True})
    )
    assert (whole.host, states.optimizer, everything.optimizer) == (0, 0, 0)
    assert (states.parameters, states.gradients) == (whole.parameters, whole.gradients)
    assert states.host_state == whole.optimizer + whole.parameters + whole.gradients  # and copies for the step
    assert (everything.parameters, everything.gradients) == (0, 0)
    assert everything.host_state == whole.parameters + whole.gradients + whole.optimizer
    largest = 4 * 2048 * 128 / 4  # bytes of a shard of the embedding: on a host, torch loops over parameters
    assert (whole.host_temporary, states.host_temporary, everything.host_temporary) == (0, 2 * largest, 2 * largest)
    vectors, matrices = 3 * 128 + 6 * 128, 4 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 512 * 128) + 2 * 2048 * 128
    assert everything.num_parameters == vectors + matrices  # all of sizes that are powers of two
    assert (whole.host_margin, states.host_margin, everything.host_margin) == (0, 0, 0)
    odd = plan_memory(sizes(vocab_size=1536), ParallelConfig(param_offload=True), SHAPE, world_size=4)
    assert odd.host_margin == 2 * 2 * 512 * 128 * 4 / 4  # embedding and head, and gradients, rounded up to 2048 rows
    assert odd.host == odd.host_state + odd.host_temporary + odd.host_margin
    assert (whole.temporary, states.temporary, everything.temporary) == (whole.parameters, 0, 0)
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
            num_local_experts=4, vocab_size=2048, experts_implementation="batched_mm"),
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


@pytest.mark.slow_single
def test_weights_that_are_gathered_in_float8_take_one_byte_a_value():
    """The peak is in backward of the middle block, with whose parameters those of the first have been gathered."""

    def gathered(in_float8, width=256, tensor_degree=1, keeps=False, num_tokens=16):
        config = ParallelConfig.of(
            precision="bf16-mixed",
            float8_recipe="tensorwise",
            float8_all_gather=in_float8,
            tensor_parallel_degree=tensor_degree,
            reshard_after_forward=not keeps,
        )
        shape = TrainingShape(micro_batch_size=1, sequence_length=num_tokens)
        return plan_memory(sizes(3, width), config, shape, world_size=4).gathered

    linears = 3 * 256 * 256 + 3 * 256 * 1024  # queries and outputs; keys and values of half the heads; MLP
    for num_blocks, options in ((2, {}), (2, {"keeps": True}), (1, {"tensor_degree": 2, "num_tokens": 128})):
        assert gathered(False, **options) - gathered(True, **options) == num_blocks * linears
    assert gathered(False, width=24) == gathered(True, width=24)  # sides that are no multiples of 16


@pytest.mark.slow_single
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
    small = smallest_degrees(sizes(), ParallelConfig(), SHAPE, world_size=6, device_memory_gib=0.05)
    assert small.topology.shape == (2, 3, 1)
    with pytest.raises(ConfigError, match="do not fit 6 devices"):  # 3 and 6 divide no heads, and are passed over
        smallest_degrees(sizes(), ParallelConfig(), SHAPE, world_size=6, device_memory_gib=0.001)
    with pytest.raises(ConfigError, match=r"8,030,261,248 parameters with 8192 tokens do not fit 2 devices of 24 GiB"):
        smallest_degrees(llama, config, shape, world_size=2, ranks_per_node=1, device_memory_gib=24)


def test_the_smallest_degrees_that_fit_the_memory_of_hosts():
    """Replicas need no less host memory; shards do."""
    config, shape = ParallelConfig(param_offload=True), replace(SHAPE, optimizer_implementation="fused")
    find = partial(smallest_degrees, sizes(), config, shape, world_size=8, ranks_per_node=4, device_memory_gib=1)
    assert find().topology.shape == (8, 1, 1)
    node = 4 * find().host / GIB
    assert find(host_memory_gib=node).topology.shape == (8, 1, 1)
    assert find(host_memory_gib=node * 0.99).topology.shape == (4, 2, 1)
    assert find(host_memory_gib=node / 4).topology.shape == (2, 4, 1)
    with pytest.raises(
        ConfigError, match=r"do not fit 8 devices on nodes with 0.005 GiB of host memory, of which 4 ranks need 0.01; "
    ):
        find(host_memory_gib=0.005)
    with pytest.raises(ConfigError, match=r"do not fit 8 devices of 0.001 GiB and on nodes with 0.005 GiB of host mem"):
        find(host_memory_gib=0.005, device_memory_gib=0.001)


def test_offloaded_activations_get_half_of_a_ranks_part_of_a_host():
    shape = replace(SHAPE, sequence_length=16 * SHAPE.sequence_length)
    plan = partial(plan_memory, sizes(), training=shape, world_size=4, ranks_per_node=2)
    config = ParallelConfig(sm_activation_offloading=True)
    part = plan(config=config).host_activations / 2
    limited = plan(config=config, host_memory_gib=4 * part / GIB)
    assert limited == plan(config=replace(config, activation_host_memory_gib=part / GIB))
    assert 0 < limited.host_activations <= part
    own = replace(config, activation_host_memory_gib=2 * part / GIB)
    assert plan(config=own, host_memory_gib=4 * part / GIB) == plan(config=own)
    found = smallest_degrees(sizes(), config, shape, world_size=4, device_memory_gib=9, host_memory_gib=8 * part / GIB)
    assert found.host_activations <= part


@pytest.mark.parametrize(
    ("options", "copies"),
    [
        ({}, 3),  # log-probabilities, their gradient, and that of logits
        ({"precision": "bf16-mixed"}, 3),
        ({"tensor_parallel_degree": 2, "loss_parallel": True}, 1.5),
        ({"context_parallel_degree": 2}, 1.5),
        ({"activation_checkpointing": "full", "loss_chunks": 4, "mlp_tiles": 4}, 0),  # the peak is elsewhere
    ],
)
def test_logits_are_told_apart(options, copies):
    """What a larger vocabulary adds to activations is what it adds to logits."""
    small, large = (
        plan_memory(sizes(vocab_size=size), ParallelConfig.of(options), SHAPE, world_size=2) for size in (2048, 4096)
    )
    assert small.logits == copies * 4 * SHAPE.micro_batch_size * SHAPE.sequence_length * 2048
    assert large.activations - small.activations == large.logits - small.logits == small.logits
    assert f"(logits {large.logits / GIB:.2f})" in str(large)


def test_degrees_inside_the_shard_axis_are_kept():
    config = ParallelConfig(precision="bf16-mixed", expert_parallel_degree=4, context_parallel_degree=2)
    plan = smallest_degrees(mixtral(), config, SHAPE, world_size=8, device_memory_gib=1)
    assert (plan.topology.shape, plan.topology.expert_degree, plan.topology.context_degree) == ((2, 4, 1), 4, 2)
    with pytest.raises(NotBuiltYetError, match="the memory plan of Depends"):
        plan_memory(Depends(), ParallelConfig(context_parallel_degree=2), SHAPE, world_size=2)
    with pytest.raises(ConfigError, match="has no layer of experts"):
        plan_memory(sizes(), ParallelConfig(expert_parallel_degree=2), SHAPE, world_size=2)


@pytest.mark.parametrize(
    "config", [transformers.T5Config(num_layers=1, decoder_start_token_id=0), "meta-llama/Llama-3.1-8B"]
)
def test_what_is_no_causal_language_model_is_refused_or_planned_as_a_module(config):
    with pytest.raises(ConfigError, match=f"a model of {type(config).__name__} cannot .*AutoModelForCausalLM.* step="):
        plan_memory(config, ParallelConfig(), SHAPE, world_size=1)
    if not isinstance(config, str):
        with torch.device("meta"):
            model = transformers.AutoModelForSeq2SeqLM.from_config(config)
        assert plan_memory(model, ParallelConfig(), SHAPE, world_size=1).activations > 0


class Depends(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, input_ids, labels):
        return self.layer(torch.ones(4)) * float(input_ids.sum())


def test_a_step_that_depends_on_values_is_not_planned_wrongly():
    with pytest.raises(ConfigError, match=r"a step of Depends cannot be planned with fake .*\(step=\.\.\.\)"):
        plan_memory(Depends(), ParallelConfig(), SHAPE, world_size=1)
    plan = plan_memory(
        Depends(), ParallelConfig(), SHAPE, world_size=1, step=lambda model, _: model.layer(torch.ones(4)).sum()
    )
    assert plan.num_trained == 20


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"world_size": 0}, "world_size must be a whole number of at least 1, but is 0"),
        ({"world_size": 2.0}, "world_size must be a whole number of at least 1, but is 2.0"),
        ({"ranks_per_node": -1}, "ranks_per_node must be a whole number of at least 0, but is -1"),
        ({"host_memory_gib": 0}, "host_memory_gib must be a number of GiB above 0, or None for no limit, but is 0"),
        ({"device_memory_gib": math.nan}, "device_memory_gib must be a number of GiB above 0, but is nan"),
        ({"device_memory_gib": "80"}, "device_memory_gib must be a number of GiB above 0, but is '80'"),
        ({"config": {"precision": "bf16-mixed"}}, "config must be a ParallelConfig, but is {'precision'"),
        ({"training": None}, "training must be a TrainingShape, but is None"),
        ({"model": "models/llama"}, "'models/llama' is neither a configuration of transformers nor an nn.Module"),
        ({"model": nn.Linear(2, 2)}, r"Linear cannot be planned as a causal language model.*Give step="),
    ],
)
def test_arguments_that_mean_nothing_are_refused_by_name(change, told):
    pytest.importorskip("transformers")
    given = {
        "model": nn.Linear(2, 2), "config": ParallelConfig(), "world_size": 2, "device_memory_gib": 1,
        "training": TrainingShape(micro_batch_size=1, sequence_length=8),
    } | change  # fmt: skip
    with pytest.raises(ConfigError, match=told):
        smallest_degrees(given.pop("model"), given.pop("config"), given.pop("training"), **given)


@pytest.mark.parametrize(
    "wrong",
    [
        {"micro_batch_size": 0}, {"sequence_length": 8.0}, {"sequence_length": True}, {"optimizer_states": -1},
        {"keeps_gradients": None},
    ],
)  # fmt: skip
def test_a_shape_of_other_numbers_is_refused(wrong):
    [(name, value)] = wrong.items()
    with pytest.raises(ConfigError, match=f"{name} must be .* but is {value}"):
        TrainingShape(**({"micro_batch_size": 1, "sequence_length": 8} | wrong))
