"""A script for SMP v2 with the one line added trains to the same bits as a plain loop over `parallelize`."""

import gc
import importlib.util
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from device import DEVICE
from harness import run_ranks
from parallel.equal_training import samples
from parallel.expert_models import make_model

from hyperpod_plugins.precision import TeScaling

SCRIPT = Path(__file__).parents[2] / "examples" / "smp" / "announced.py"
STAND_INS = str(Path(__file__).parents[1] / "stand_ins")  # of Transformer Engine
NUM_STEPS = 5
SEED = 2023


def load_script():
    spec = importlib.util.spec_from_file_location("announced", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain_loop(script, model=None, **config):
    """What the script does, by our own names."""
    from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize

    config = ParallelConfig(block_classes=("LlamaDecoderLayer",), **config)
    topology = config.topology(dist.get_world_size())
    if model is None:
        with torch.device("meta"):
            model = script.LlamaForCausalLM(script.model_config())
    parallelize(model, build_mesh(topology, DEVICE), config)
    return loop(script, model, topology.data_rank(dist.get_rank()))


def loop(script, model, data_rank):
    from hyperpod_plugins.parallel import clip_grad_norm_

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(NUM_STEPS):
        tokens = script.samples(step, data_rank)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def both(config, own, **options):
    found_before = "torch.sagemaker" in sys.modules
    script = load_script()
    from hyperpod_plugins.memory import offload
    from hyperpod_plugins.smp import torch_classes

    offload.MIN_BYTES, offloads, attach = 1, [], torch_classes.attach_offload  # the model is tiny

    def attach_and_note(*args):
        offloads.append(attach(*args))
        return offloads[-1]

    torch_classes.attach_offload = attach_and_note
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = script.train(config, num_steps=NUM_STEPS, **options)
    told = [str(each.message) for each in caught if "LlamaForCausalLM) is done by FSDP2:" in str(each.message)]
    state, refused = script.tsm.state, ""
    if state.tp_size > 1:
        with pytest.raises(ValueError, match="not given to transform") as error:
            script.FullyShardedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8)))
        refused = str(error.value)
    facts = {
        "before": found_before,
        "told": told,
        "refused": refused,
        "offloads": [(each.horizon, each.stored_bytes) for each in offloads],
        "degrees": (state.hybrid_shard_degree, state.tensor_parallel_degree, state.tp_size, state.world_size),
        "ranks": (state.rank, state.tp_rank, state.dp_rank, state.ep_rank, state.cp_rank, state.local_rank),
        "replicas": state.ranker.get_rep_groups(),
        "rep": (state.ranker.get_rep_rank(), dist.get_process_group_ranks(state.rep_rank_process_group)),
        "tensor": dist.get_process_group_ranks(state.tp_process_group),
        "world": dist.get_process_group_ranks(state.world_process_group),
    }
    return losses, plain_loop(script, **own), facts


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("config", "nodes", "mixed"),
    [({"hybrid_shard_degree": 2}, 1, False), ({}, 2, True)],
    ids=["the configuration says the degree", "HYBRID_SHARD means within a node"],
)
def test_hybrid_sharding(config, nodes, mixed):
    precision = "bf16-mixed" if mixed else "32-true"
    own = {"hybrid_shard_degree": 2, "precision": precision}
    results = run_ranks(both, config, own, world_size=4, nodes=nodes, mixed=mixed)
    for losses, plain, _ in results:
        assert losses == plain
        assert len(losses) == NUM_STEPS
        assert losses[-1] < losses[0]
    facts = [each[2] for each in results]
    assert not facts[0]["before"]
    assert [len(each["told"]) for each in facts] == [1, 0, 0, 0]
    assert f"replicate 2 x shard 2 x tensor 1, {precision}, units LlamaDecoderLayer" in facts[0]["told"][0]
    assert {each["degrees"] for each in facts} == {(2, 1, 1, 4)}
    assert [each["ranks"] for each in facts] == [(rank, 0, rank, 0, 0, rank % (4 // nodes)) for rank in range(4)]
    assert facts[3]["replicas"] == [[0, 2], [1, 3]]
    assert facts[3]["rep"] == (1, [1, 3])
    assert facts[3]["world"] == [0, 1, 2, 3]


@pytest.mark.spawns
def test_tensor_parallel_with_recomputed_and_offloaded_activations():
    """Recomputing and moving activations changes no bit, and `activation_loading_horizon` counts."""
    config = {
        "tensor_parallel_degree": 2,
        "tensor_parallel_seed": SEED,
        "sm_activation_offloading": True,
        "activation_loading_horizon": 4,
    }
    own = {"tensor_parallel_degree": 2, "random_seed": SEED}
    results = run_ranks(both, config, own, world_size=4, offload=True)
    for losses, plain, _ in results:
        assert losses == plain
    facts = results[3][2]
    input_bytes = 2 * 16 * 32 * 4  # of the first of two layers
    assert facts["offloads"] == [(4, NUM_STEPS * input_bytes)]
    assert "not given to transform()" in facts["refused"]
    assert facts["degrees"] == (2, 2, 2, 4)
    assert facts["ranks"] == (3, 1, 1, 0, 0, 3)
    assert facts["tensor"] == [2, 3]


def in_float8(config, own):
    """Losses of a script with `config`, of a plain loop with `own`, and of one without float8; the script's scales."""
    sys.path.append(STAND_INS)
    script = load_script()
    warnings.simplefilter("ignore")
    script.tsm.init(config)

    def build():
        torch.manual_seed(SEED)
        return script.LlamaForCausalLM(script.model_config())

    wrapped = script.FullyShardedDataParallel(
        build(),
        auto_wrap_policy=partial(script.transformer_auto_wrap_policy, transformer_layer_cls={script.LlamaDecoderLayer}),
        mixed_precision=script.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        sharding_strategy=script.ShardingStrategy.FULL_SHARD,
    )
    losses = loop(script, wrapped, script.tsm.state.dp_rank)
    found = {name: tuple(each.shape) for name, each in wrapped.named_buffers() if "amax_history" in name}
    tokens = script.samples(0, script.tsm.state.dp_rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            script.offload_wrapper(wrapped)(input_ids=tokens, labels=tokens).loss.backward()
    told = [str(each.message) for each in caught if "sm_activation_offloading" in str(each.message)]
    del wrapped  # one model of a process trains with Transformer Engine
    gc.collect()
    plain = plain_loop(script, build(), precision="bf16-mixed", **own)
    gc.collect()
    recomputed = plain_loop(script, build(), precision="bf16-mixed", activation_checkpointing="full", **own)
    assert recomputed == plain
    gc.collect()
    return losses, plain, plain_loop(script, build(), precision="bf16-mixed"), found, told


@pytest.mark.spawns
def test_keys_of_float8_mean_transformer_engine():
    config = {"fp8": True, "fp8_amax_history_len": 3, "fp8_amax_compute_algo": "most_recent"}
    scaling = TeScaling(amax_history_len=3, amax_compute_algo="most_recent")
    own = {"float8_recipe": "te-fp8", "te_scaling": scaling}
    for rank, (losses, plain, without, found, told) in enumerate(run_ranks(in_float8, config, own, world_size=2)):
        assert losses == plain
        assert losses != without
        assert len(found) == 2 * 7 * 2  # layers, products of each, and directions
        assert {shape[0] for shape in found.values()} == {3}
        assert len(told) == (rank == 0)  # SMP's default of sm_activation_offloading is left
        assert "does not go with float8_recipe='te-fp8'" in "".join(told) or rank


def in_a_region(config):
    """What a script with `fp8_autocast` around its forward is told."""
    sys.path.append(STAND_INS)
    script = load_script()
    from transformer_engine.common.recipe import DelayedScaling
    from transformer_engine.pytorch import fp8_autocast

    from hyperpod_plugins.errors import ConfigError

    warnings.simplefilter("ignore")
    script.tsm.init(config)
    torch.manual_seed(SEED)
    wrapped = script.FullyShardedDataParallel(
        script.LlamaForCausalLM(script.model_config()),
        auto_wrap_policy=partial(script.transformer_auto_wrap_policy, transformer_layer_cls={script.LlamaDecoderLayer}),
        mixed_precision=script.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    tokens = script.samples(0, script.tsm.state.dp_rank)
    recipe = DelayedScaling(amax_history_len=32, amax_compute_algo="max")
    try:
        with fp8_autocast(enabled=True, fp8_recipe=recipe, fp8_group=dist.group.WORLD):
            loss = wrapped(input_ids=tokens, labels=tokens).loss
    except ConfigError as error:
        return str(error)
    loss.backward()
    return loss.item()


@pytest.mark.spawns
def test_a_region_of_the_script_needs_the_key_of_float8():
    asked, without = run_ranks(in_a_region, {"fp8": True}, world_size=1), run_ranks(in_a_region, {}, world_size=1)
    assert 1 < asked[0] < 10
    assert "LlamaForCausalLM runs inside of an autocast (fp8_autocast) of Transformer Engine" in without[0]
    assert "in a configuration of SMP fp8: true" in without[0]


def more_of_it(folder):
    """What one pair of ranks can show of the rest; a list of what went wrong."""
    import functools

    import hyperpod_plugins.smp

    hyperpod_plugins.smp.install()
    import torch.sagemaker as tsm
    from torch.distributed.fsdp import FullStateDictConfig, StateDictType
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from torch.sagemaker.checkpoint.state_dict_loader import load
    from torch.sagemaker.checkpoint.state_dict_saver import async_save, maybe_finalize_async_calls
    from torch.sagemaker.delayed_param import DelayedParamIniter
    from torch.sagemaker.distributed.checkpoint.state_dict_utils import SMStateDictType, sm_state_dict_type
    from torch.sagemaker.grad_norm import clip_grad_norm_
    from torch.sagemaker.moe.moe_config import MoEConfig

    from hyperpod_plugins.errors import CheckpointMismatch, ConfigError, DegreeError
    from hyperpod_plugins.parallel import balance_experts

    warnings.simplefilter("ignore")
    rank = dist.get_rank if dist.is_initialized() else None
    assert rank is None
    tsm.init({"tensor_parallel_degree": 1})
    rank = dist.get_rank()

    def build(width=8):
        return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(2)))

    def wrap(model, **options):
        return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}), **options)

    def refused(call, error=ConfigError):
        try:
            call()
        except error as found:
            return str(found)
        raise AssertionError(f"{error} was not raised")

    told = {}
    # values of rank 0 count, and the other rank has none
    torch.manual_seed(7)
    with torch.device("cpu" if rank == 0 else "meta"):
        model = build()
    whole = {name: value.clone() for name, value in model.state_dict().items()} if rank == 0 else None
    model = wrap(model, sync_module_states=True, param_init_fn=lambda module: module.to_empty(device="cpu"))
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True)):
        full = model.state_dict()
    assert all(torch.equal(full[name], whole[name]) for name in whole or ())
    assert type(model.state_dict()["0.weight"]).__name__ == "DTensor"
    # the same, asked for by `transform`, in its second call
    with torch.device("cpu" if rank == 0 else "meta"):
        marked = build()
    whole = {name: value.clone() for name, value in marked.state_dict().items()} if rank == 0 else None
    marked = wrap(tsm.transform(tsm.transform(marked), load_state_dict_from_rank0=True))
    with FSDP.state_dict_type(marked, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True)):
        found = marked.state_dict()
    assert all(torch.equal(found[name], whole[name]) for name in whole or ())
    # a step, a save beside training, and a load into another model and optimizer
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with model.no_sync():
        model(torch.ones(2, 8)).sum().backward()
    model(torch.full((2, 8), float(rank))).sum().backward()
    assert clip_grad_norm_(model, 0.5) > 0.5
    optimizer.step()
    with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
        state = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
    async_save(state, checkpoint_id=f"{folder}/first")
    assert maybe_finalize_async_calls(blocking=True) == [0]
    torch.manual_seed(8)
    other = wrap(build())
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.1)
    other(torch.ones(2, 8)).sum().backward()
    other_optimizer.step()
    state = {"model": other.state_dict(), "optimizer": FSDP.optim_state_dict(other, other_optimizer)}
    load(state, checkpoint_id=f"{folder}/first")
    with FSDP.state_dict_type(other, StateDictType.SHARDED_STATE_DICT):
        other.load_state_dict(state["model"])
    loaded = FSDP.optim_state_dict_to_load(model=other, optim=other_optimizer, optim_state_dict=state["optimizer"])
    other_optimizer.load_state_dict(loaded)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local())
        moments, others = optimizer.state[a]["exp_avg"], other_optimizer.state[b]["exp_avg"]
        assert torch.equal(moments.to_local(), others.to_local())
    with FSDP.state_dict_type(other, StateDictType.FULL_STATE_DICT):
        other.load_state_dict({name: torch.zeros_like(value) for name, value in full.items()})
    assert all(not value.to_local().any() for value in other.state_dict().values())
    lacking = {"model": other.state_dict() | {"more": torch.zeros(1)}}
    told["lacking"] = refused(functools.partial(load, lacking, checkpoint_id=f"{folder}/first"), CheckpointMismatch)
    # what is refused
    with torch.device("meta"):
        waiting = build()
    own_init = lambda module: None  # noqa: E731
    told["own init"] = refused(lambda: wrap(waiting, param_init_fn=own_init))
    told["nothing to send"] = refused(lambda: wrap(waiting, param_init_fn=own_init, sync_module_states=True))
    told["twice"] = refused(lambda: wrap(model))
    told["group"] = refused(lambda: wrap(build(), process_group=dist.new_group([rank], use_local_synchronization=True)))
    told["unknown"] = refused(lambda: wrap(build(), zero_stage=3))
    told["other config"] = refused(lambda: tsm.init({"hybrid_shard_degree": 2}))
    told["values"] = refused(lambda: DelayedParamIniter(build()))
    told["degree"] = refused(lambda: wrap(build(width=1)), DegreeError)
    marked = tsm.transform(build())
    told["unwrapped"] = refused(lambda: marked(torch.ones(2, 8)))
    assert tuple(wrap(marked)(torch.ones(2, 8)).shape) == (2, 8)
    # experts that are balanced as SMP does by default
    batch = samples(2)
    experts = FSDP(tsm.transform(make_model(), config=MoEConfig()))
    wanted = balance_experts(make_model(), method="sinkhorn", z_loss_coeff=1e-3)
    wanted_loss = wanted(input_ids=batch, labels=batch).loss
    torch.testing.assert_close(experts(input_ids=batch, labels=batch).loss, wanted_loss)
    assert abs(wanted_loss - make_model()(input_ids=batch, labels=batch).loss) > 1e-3
    told["no experts"] = refused(lambda: tsm.transform(build(), config=MoEConfig()))
    return told


@pytest.mark.spawns
def test_checkpoints_values_of_rank_0_and_what_is_refused(tmp_path):
    for told in run_ranks(more_of_it, str(tmp_path), world_size=2):
        assert "more" in told["lacking"]
        for what, words in {
            "own init": "DelayedParamIniter",
            "no experts": "one causal language model",
            "nothing to send": "with the values on rank 0",
            "twice": "auto_wrap_policy",
            "group": "shards over [0, 1]",
            "unknown": "zero_stage",
            "other config": "Call it once",
            "values": "meta",
            "degree": "allow_empty_shards",
            "unwrapped": "without FullyShardedDataParallel",
        }.items():
            assert words in told[what], what


class Shift(torch.nn.Module):
    """Adds a buffer that no checkpoint has."""

    def __init__(self):
        super().__init__()
        self.register_buffer("by", torch.empty(8), persistent=False)

    def reset_parameters(self):
        self.by.fill_(3.0)

    def forward(self, x):
        return x + self.by


def built_by_each_rank_in_its_way(cases):
    """For each case, the words in which `wrap` refuses the model, or its first weight and its last tensor."""
    import contextlib

    import hyperpod_plugins.smp as tsm
    from hyperpod_plugins.comm import group_health
    from hyperpod_plugins.delayed_init import delayed_init
    from hyperpod_plugins.errors import ConfigError

    warnings.simplefilter("ignore")
    tsm.init()
    contexts = {"values": contextlib.nullcontext, "meta": lambda: torch.device("meta"), "delayed": delayed_init}

    def build(*layers, with_buffer=False):
        torch.manual_seed(7 + dist.get_rank())
        built = []
        for each in layers:
            with contexts[each]():
                built.append(torch.nn.Linear(8, 8))
        if with_buffer:
            with torch.device("meta"):
                built.append(Shift())
        return torch.nn.Sequential(*built)

    found = {}
    for name, (layers, options, with_buffer) in cases.items():
        model = build(*layers[dist.get_rank()], with_buffer=with_buffer)
        try:
            tsm.wrap(model, **options)
        except ConfigError as refusal:
            found[name] = str(refusal)
        else:
            found[name] = (model[0].weight.full_tensor(), [*model.parameters(), *model.buffers()][-1])
    group_health.detach()  # as in a process that replaces another and sets itself up alone
    tsm.wrap(build("meta", "meta"))
    group_health.reset()
    return found


FROM_RANK_0 = {"sync_module_states": True}
REFUSED = {
    # name: (the layers of rank 0 and of rank 1, options, words of the message)
    "values on rank 0 only": (("values", "values"), ("meta", "meta"), {}, "0.weight has values on rank 0"),
    "no values on rank 0": (("meta", "meta"), ("values", "values"), {}, "0.weight is on the meta device on rank 0"),
    "own function": (("values", "values"), ("meta", "meta"), {"param_init_fn": print}, "sync_module_states=True"),
    "delayed on rank 0 only": (("delayed", "meta"), ("meta", "meta"), {}, "0.weight was built under delayed_init"),
    "partly on meta": (("values", "meta"), ("meta", "meta"), FROM_RANK_0, "Rank 0 has no values for 1.weight, 1.bias"),
    "sent by none": (("meta", "meta"), ("values", "meta"), FROM_RANK_0, "Rank 0 has no values for 0.weight"),
}
SERVED = {
    # name: (the layers of rank 0 and of rank 1, options, whether a buffer is on the meta device)
    "sent to delayed layers": (("values", "values"), ("delayed", "delayed"), FROM_RANK_0, False),
    "sent to one delayed layer": (("values", "values"), ("values", "delayed"), FROM_RANK_0, False),
    "partly on meta alike": (("values", "meta"), ("values", "meta"), FROM_RANK_0, False),
    "buffer without values": (("values",), ("values",), FROM_RANK_0, True),
}


@pytest.mark.spawns
def test_ranks_that_hold_values_of_different_tensors_are_refused_by_name():
    """Each would wait for the other, or take the values of one tensor for those of another."""
    cases = {name: ((first, second), options, False) for name, (first, second, options, _) in REFUSED.items()}
    cases |= {name: ((first, second), options, buffer) for name, (first, second, options, buffer) in SERVED.items()}
    results = run_ranks(built_by_each_rank_in_its_way, cases, world_size=2)
    for name, (*_, words) in REFUSED.items():
        assert words in results[0][name], name
        assert results[0][name] == results[1][name], name
    torch.manual_seed(7)
    weight = torch.nn.Linear(8, 8).weight
    for found in results:
        assert all(torch.equal(found[name][0], weight) for name in SERVED)
        assert found["buffer without values"][1].tolist() == [3.0] * 8


def initialised_by_the_script():
    """A script that makes its own gloo group, and gives values by a function of its own."""
    import hyperpod_plugins.smp as tsm
    from hyperpod_plugins.comm.process_group import ResilientProcessGroup

    class Scale(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.empty(4))

        def forward(self, x):
            return x * self.scale

    dist.init_process_group("gloo")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tsm.init()
    with torch.device("meta"):
        model = torch.nn.Sequential(Scale(), Scale())
    initer = tsm.DelayedParamIniter(model, init_method_using_config=lambda module: module.scale.fill_(3.0))
    with initer.validate_params_and_buffers_inited():
        model = tsm.wrap(model, param_init_fn=initer.get_param_init_fn())
    assert not isinstance(dist.group.WORLD, ResilientProcessGroup)
    return [str(each.message) for each in caught], model(torch.ones(2, 4)).tolist(), initer.count_num_params()


@pytest.mark.spawns
def test_a_group_of_the_scripts_own_serves_and_is_told_of():
    results = run_ranks(initialised_by_the_script, world_size=2)
    assert "nothing repairs it" in results[0][0][0]
    assert results[1][0] == []
    assert {str(each[1:]) for each in results} == {str(([[9.0] * 4] * 2, 8))}


def gpt2_model():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(5)
    sizes = dict(vocab_size=32, n_embd=16, n_layer=2, n_head=4, n_positions=16, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0))


def gpt2_loss(model):
    tokens = torch.randint(32, (2, 12), generator=torch.Generator().manual_seed(6))
    return model(input_ids=tokens, labels=tokens).loss


def split_gpt2():
    import hyperpod_plugins.smp
    from hyperpod_plugins.delayed_init import delayed_init
    from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize

    hyperpod_plugins.smp.install()
    import torch.sagemaker as tsm
    from torch.distributed.fsdp import FullStateDictConfig, StateDictType
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    warnings.simplefilter("ignore")
    tsm.init({"tensor_parallel_degree": 2})
    model = FSDP(tsm.transform(gpt2_model()), auto_wrap_policy=ModuleWrapPolicy({GPT2Block}))
    stored = {tuple(map(str, each.placements)) for name, each in model.named_parameters() if "c_attn.weight" in name}
    gpt2_loss(model).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True)):
        state = model.state_dict()
    config = ParallelConfig(tensor_parallel_degree=2)
    with delayed_init():
        delayed = gpt2_model()
    parallelize(delayed, build_mesh(config.topology(2), DEVICE), config)
    whole = {name: each.full_tensor() for name, each in delayed.state_dict().items()}
    return state, stored, float(gpt2_loss(model).detach()), whole


@pytest.mark.spawns
def test_a_packed_projection_is_split_and_saved_as_the_model_has_it():
    """GPT-2: after a step, the whole state is that of one process; also built without memory, and then split."""
    (state, stored, loss, delayed), (*_, other_loss, _) = run_ranks(split_gpt2, world_size=2)
    assert all("S(1)" in placements for placements in stored)
    alone = gpt2_model()
    assert all(torch.equal(value, delayed[name]) for name, value in alone.state_dict().items())
    gpt2_loss(alone).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    assert state.keys() == alone.state_dict().keys()
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
    wanted = float(gpt2_loss(alone).detach())
    assert abs(loss - wanted) <= 5e-7 * wanted
    assert loss == other_loss
