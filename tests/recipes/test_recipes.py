"""Each recipe is built on the meta device and planned; some are trained for real, small, on four CPU ranks."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import run_ranks
from recipes import plans
from recipes.plans import FOLDER, SIZES, built_on_meta
from safetensors.torch import load_file
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hyperpod_plugins.delayed_init import materialize
from hyperpod_plugins.elastic.scaling.policy_formats import read_policy
from hyperpod_plugins.memory import tile_mlps
from hyperpod_plugins.parallel.hsdp import local_part
from hyperpod_plugins.parallel.parallelize import save_activation_memory

PATHS = sorted(FOLDER.glob("*.yaml"))
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # of peft 0.21


@pytest.fixture(autouse=True)
def as_scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


def test_there_is_one_for_each_model():
    assert [path.stem for path in PATHS] == sorted(SIZES)


@pytest.mark.slow_single
@pytest.mark.parametrize(
    "name", ["llama3_8b", "llama3_8b_lora", "llama3_70b_fp8_offload", "gpt_oss_20b", "qwen3_4b_long_context"]
)
def test_the_plan_of_a_rank_fits_its_device(name):
    plans.check(name)


@pytest.mark.slow_single
def test_the_plan_of_llama_3_8b_by_hand():
    """Against a calculation with the published sizes: layers of 218,112,000 parameters, two matrices of 525,336,576."""
    plan = plans.plan_of("llama3_8b")
    root = 2 * 525_336_576 + 4096  # the logits are the peak: of the blocks, only the last one's message is there
    assert plan.gathered == pytest.approx(2 * (root + 218_112_000), rel=0.01)
    tokens, hidden = 8192, 4096
    inputs, logits = 32 * 2 * hidden, 12 * 128_256  # of each block; in bfloat16, in float32, and their gradients
    assert plan.activations == pytest.approx(tokens * (inputs + logits), rel=0.05)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_elastic_block_is_one_that_is_read(path):
    from recipe import Recipe

    recipe = Recipe.read(path)
    if recipe.config.context_parallel_degree > 1:
        assert not recipe.elastic_policy  # these jobs keep their size, though contexts go with elastic jobs
        return
    topology = recipe.topology
    found = read_policy(recipe.elastic_document)
    per_replica = topology.replica_size
    ranks = {"ranks_per_node": recipe.trainer.devices, "replica_size": per_replica}
    scales = found.scales.feasible_on(**ranks, ranks_per_share=topology.tensor_degree)
    policy = replace(found, scales=scales).in_replicas(**ranks, data_ranks_per_replica=topology.shard_degree)
    sizes = scales.batch(**ranks).feasible_sizes(policy, topology.shard_degree)
    assert set(sizes) <= set(policy.sizes)
    assert len(sizes) > 1
    assert topology.replicate_degree in sizes


def test_a_smoke_run_keeps_the_kind_of_the_model():
    from recipe import Recipe

    model = built_on_meta(Recipe.read(FOLDER / "gpt_oss_120b.yaml").smoke())
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    assert model.config.layer_types == ["sliding_attention", "full_attention"]
    assert model.model.layers[0].mlp.experts.gate_up_proj.shape[0] == 4
    assert model.config.num_attention_heads > model.config.num_key_value_heads
    degrees = Recipe.read(FOLDER / "llama3_70b.yaml").smoke().topology.shape
    assert degrees == (1, 2, 2)
    assert Recipe.read(FOLDER / "qwen3_4b_long_context.yaml").smoke(2).topology.context_degree == 2


@pytest.mark.parametrize("name", ["llama3_8b_long_context", "qwen3_30b_a3b"])
def test_the_loss_is_that_of_next_tokens_and_in_chunks_where_the_plan_says_so(name):
    import train
    from recipe import Recipe

    recipe = Recipe.read(FOLDER / f"{name}.yaml").smoke()
    torch.manual_seed(0)
    module = train.CausalLM(recipe, with_weights=False)
    materialize(module)
    module.log = lambda name, value, **_: logged.append(value)
    tokens = torch.randint(256, (2, 33))
    batch, logged = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}, []
    logits = module.model(input_ids=batch["input_ids"]).logits
    whole = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    if recipe.config.mlp_tiles > 1:
        tile_mlps(module, recipe.config.mlp_tiles)
    save_activation_memory(module, recipe.config, torch.device("cpu"))
    outputs = []
    module.model.register_forward_hook(lambda _, __, output: outputs.append(output))
    loss = module.training_step(batch, 0)
    assert logged[0].item() == pytest.approx(whole.item(), rel=1e-6)
    assert (loss.item() > whole.item() + 1e-4) == recipe.training.balance_experts
    assert (type(outputs[0].logits) is torch.Tensor) == (recipe.config.loss_chunks == 1)


def smoke(folder, name, steps, num_ranks):
    sys.path.insert(0, str(FOLDER))
    import train
    from recipe import Recipe

    train.L.seed_everything(1, verbose=False)
    recipe = Recipe.read(FOLDER / f"{name}.yaml").smoke(num_ranks)
    weights = Path(folder) / "weights"
    if weights.exists():
        recipe = replace(recipe, pretrained=str(weights))
    path = train.counting_tokens(Path(folder) / "tokens", vocab_size=256, sequence_length=32)
    module, losses = train.fit(recipe, path, Path(folder) / "checkpoints", num_steps=steps, is_smoke=True)
    [optimizer] = module.trainer.optimizers
    states = [local_part(state[key]) for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    held = [sum(4 * local_part(part).numel() for part in parts) for parts in (module.parameters(), states)]
    plan = recipe.plan()
    if weights.exists():
        check_frozen(module, load_file(weights / "model.safetensors"))
    return losses, held, (plan.parameters, plan.optimizer)


def check_frozen(module, saved):
    """Each rank has its part of the weights from the file, which adapters leave as they are."""
    frozen = {name: part for name, part in module.model.base_model.model.named_parameters() if not part.requires_grad}
    assert {name.replace(".base_layer", "") for name in frozen} == saved.keys()
    for name, part in frozen.items():
        whole = saved[name.replace(".base_layer", "")]
        shape, offset = compute_local_shape_and_global_offset(part.shape, part.device_mesh, part.placements)
        own = tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))
        assert torch.equal(local_part(part), whole[own])


@pytest.mark.parametrize("name", ["llama3_8b_lora", "llama3_8b_full"])
def test_pretrained_weights_take_no_memory_before_the_model_is_sharded(tmp_path, name):
    import train
    from recipe import Recipe

    recipe = Recipe.read(FOLDER / f"{name}.yaml").smoke()
    torch.manual_seed(1)
    replace(recipe, lora=None).build().save_pretrained(tmp_path)
    recipe = replace(recipe, pretrained=str(tmp_path))
    torch.manual_seed(2)
    eager = recipe.build(with_weights=True)
    torch.manual_seed(2)
    module = train.CausalLM(recipe, with_weights=True)
    assert all(parameter.is_meta for parameter in module.parameters())
    materialize(module)
    values = module.model.state_dict()
    assert values.keys() == eager.state_dict().keys()
    assert all(torch.equal(values[key], value) for key, value in eager.state_dict().items())


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("name", "steps", "share", "num_ranks"),
    [
        pytest.param("llama3_70b", 10, 0.7, 4, marks=pytest.mark.variant),
        ("gpt_oss_20b", 10, 0.7, 4),
        ("llama3_8b_lora", 16, 0.985, 4),
        ("qwen3_4b_long_context", 8, 0.7, 2),
        ("llama3_70b_fp8_offload", 10, 0.7, 4),
    ],
)
def test_a_small_one_learns_and_holds_what_was_planned(tmp_path, name, steps, share, num_ranks):
    """Experts; adapters of weights from files, which learn little; split sequences, offload; float8 with TP."""
    if name == "llama3_8b_lora":
        from recipe import Recipe

        torch.manual_seed(0)
        replace(Recipe.read(FOLDER / f"{name}.yaml").smoke(), lora=None).build().save_pretrained(tmp_path / "weights")
    given = (str(tmp_path), name, steps, num_ranks)
    for losses, held, planned in run_ranks(smoke, *given, world_size=num_ranks, timeout_s=150.0):
        assert len(losses) == steps
        assert sum(losses[-2:]) < share * sum(losses[:2])
        assert held == pytest.approx(planned, rel=0.02)  # shards of sizes that the degree does not divide
