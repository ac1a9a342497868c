"""Models that transformers has sharded while loading them, against the same model loaded whole.

With ranks that are lost, and with a replica that joins: `tests/recovery/test_adopted.py`.
"""

import copy
import functools
from types import MethodType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from device import DEVICE
from parallel.equal_training import state_of, train_alone, train_on_mesh, whole
from parallel.expert_models import SIZES, make_model
from parallel.test_expert_ranks import assert_close
from torch import nn

pytest.importorskip("transformers", minversion="5.23")
CASES = {
    ("llama", "tensor 2, shard 2"): (dict(tp_size=2, fsdp_size=2), dict(tensor_parallel_degree=2)),
    ("llama", "tensor 2, shard 2 become shard 4"): (dict(tp_size=2, fsdp_size=2), {}),  # 62 rows do not divide evenly
    ("qwen3", "tensor 2 of replicas"): (
        dict(tp_size=2, dp_replicate_size=2),
        dict(tensor_parallel_degree=2, hybrid_shard_degree=1),
    ),
    ("mixtral", "tensor 4 becomes 2"): (dict(tp_plan="auto"), dict(tensor_parallel_degree=2)),
    ("qwen3_moe", "tensor 2, experts 4 become 2"): (
        dict(tp_size=2, fsdp_size=2, ep_size=4),
        dict(tensor_parallel_degree=2, expert_parallel_degree=2),
    ),
    ("gpt_oss", "experts 2 of replicas become shards"): (
        dict(fsdp_size=2, dp_replicate_size=2, ep_size=2),
        dict(hybrid_shard_degree=4),
    ),
}
"""Model and layout: what transformers is told, and what we are."""


def make(name):
    import transformers

    sizes = SIZES | {"num_key_value_heads": 4}
    if name not in ("llama", "qwen3"):
        return make_model(name, num_key_value_heads=4)
    torch.manual_seed(0)
    own = {"tie_word_embeddings": True} if name == "llama" else {"head_dim": 8}
    config = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[name](**sizes, **own)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrained")
    for name, _ in CASES:
        make(name).save_pretrained(folder / name)
    return str(folder)


def load(folder, name, degrees=None):
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    options = {"distributed_config": DistributedConfig(**degrees)} if degrees else {}
    return AutoModelForCausalLM.from_pretrained(f"{folder}/{name}", dtype="float32", **options)


def sharded(model, options):
    from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize

    config = ParallelConfig.of(options)
    return parallelize(model, build_mesh(config.topology(dist.get_world_size()), DEVICE), config)


def bits(value):
    if isinstance(value, torch.Tensor | float):
        return torch.as_tensor(value).tolist()
    return {key: bits(each) for key, each in value.items()} if isinstance(value, dict) else [*map(bits, value)]


def marks_of(model):
    """What transformers would still take for a model that it has sharded."""
    own = {name: each for name, each in (vars(model) | vars(vars(model)["config"])).items() if "distributed" in name}
    return own, model.tp_size


def train_adopted(folder):
    from hyperpod_plugins.comm import live_groups

    dist.init_process_group("hyperpod")
    found = {}
    for case, (degrees, options) in CASES.items():
        adopted = load(folder, case[0], degrees)
        found[case] = train_on_mesh(adopted, options)
        plain = train_on_mesh(load(folder, case[0]), options)
        assert bits(found[case]) == bits(plain), case
        assert marks_of(adopted) == ({}, None), case
        assert not [name for name in live_groups() if name.startswith("other")], case
    return found


@pytest.mark.spawns
def test_adopted_models_train_as_those_that_were_loaded_whole(run_ranks, folder):
    found = run_ranks(train_adopted, folder, world_size=4, timeout_s=240)[0]
    for case, results in found.items():
        assert_close(results, train_alone(make(case[0])), (case[0], "tensor"))


# -- parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 8, 13, 62])
@pytest.mark.parametrize("tensors", [1, 2, 3])
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_fsdp_shards_the_part_of_a_tensor_rank(size, tensors, shards):
    """As `torch.chunk` does, after tensor parallelism, although its axis comes first."""
    from hyperpod_plugins.parallel.adopted_parts import Cut, pieces

    def chunk(values, number, index):
        chunks = values.chunk(number)
        return chunks[index] if index < len(chunks) else values[:0]

    cuts = [Cut(axis="tp", dim=0, num_ranks=tensors), Cut(axis="fsdp", dim=0, num_ranks=shards)]
    for tensor in range(tensors):
        for shard in range(shards):
            found = [row for piece in pieces(size, 0, cuts, (tensor, shard)) for row in piece]
            assert found == chunk(chunk(torch.arange(size), tensors, tensor), shards, shard).tolist()
            assert pieces(5, 1, cuts, (tensor, shard)) == [range(5)]


def test_a_packed_parameter_is_divided_group_by_group():
    from hyperpod_plugins.parallel.adopted_parts import Cut, pieces

    packed = Cut(axis="tp", dim=0, num_ranks=2, num_groups=2)
    assert pieces(12, 0, [packed], (1,)) == [range(3, 6), range(9, 12)]
    assert pieces(12, 0, [packed, Cut(axis="fsdp", dim=0, num_ranks=2)], (1, 1)) == [range(9, 12)]
    assert pieces(12, 0, [packed, Cut(axis="fsdp", dim=0, num_ranks=4)], (1, 1)) == [range(5, 6), range(9, 10)]


def parts_of_wrong_size(folder):
    from hyperpod_plugins.errors import NotBuiltYetError

    dist.init_process_group("hyperpod")
    found = []
    for options in ({}, {"tensor_parallel_degree": 2, "hybrid_shard_degree": 1}):
        for kept in (23, 1):  # of 24 rows; a single one would be repeated
            model = load(folder, "qwen3", {"tp_size": 2})
            if dist.get_rank() == 1:
                weight = model.model.layers[0].mlp.up_proj.weight
                weight._local_tensor = weight._local_tensor[:kept]
            try:
                sharded(model, options)
                found.append("accepted")
            except NotBuiltYetError as error:
                found.append(str(error))
    return found


@pytest.mark.spawns
def test_all_ranks_refuse_a_part_of_the_wrong_size(run_ranks, folder):
    found = run_ranks(parts_of_wrong_size, folder, world_size=2, timeout_s=120)
    assert found[0] == found[1]
    for words in found[0]:
        assert words.startswith("model.layers.0.mlp.up_proj.weight of shape (48, 32) was sharded by"), words
        assert "part on rank 1" in words


# -- checkpoints ------------------------------------------------------------------------------------------------------


def save_and_load(folder, saved):
    from hyperpod_plugins.parallel import CheckpointWriter, load_checkpoint
    from hyperpod_plugins.parallel.local_optimizer import step_locally

    def trained(degrees, options, num_steps):
        model = sharded(load(folder, "qwen3_moe", degrees), options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        tokens = torch.arange(24, device=DEVICE).view(2, 12)
        for _ in range(num_steps):
            model(input_ids=tokens, labels=tokens).loss.backward()
            step_locally(optimizer, lambda: None)
            optimizer.zero_grad()
        return model, optimizer

    def everything(model, optimizer):
        states = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
        moments = {f"{name}:{key}": whole(each) for name, held in states.items() for key, each in held.items()}
        return state_of(model) | moments

    dist.init_process_group("hyperpod")
    writer = CheckpointWriter()
    model, optimizer = trained(*CASES["qwen3_moe", "tensor 2, experts 4 become 2"], num_steps=2)
    writer.save(saved, model=model, optimizers=[optimizer])
    writer.close()
    wanted = everything(model, optimizer)
    for degrees, options in (
        ({"tp_size": 4}, {}),
        (None, {"tensor_parallel_degree": 2}),
        ({"fsdp_size": 4}, {"expert_parallel_degree": 4}),
    ):
        model, optimizer = trained(degrees, options, num_steps=0)
        load_checkpoint(saved, model=model, optimizers=[optimizer])
        found = everything(model, optimizer)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(found[name], value), (degrees, name)


@pytest.mark.spawns
def test_checkpoints_of_adopted_models_load_with_any_degrees(run_ranks, folder, tmp_path):
    run_ranks(save_and_load, folder, str(tmp_path), world_size=4, timeout_s=150)


# -- what the program has done before ---------------------------------------------------------------------------------


def adopt_after_the_program(folder):
    from hyperpod_plugins.parallel.former_parameters import replace_stale_parameters

    dist.init_process_group("hyperpod")
    model = load(folder, "llama", {"tp_size": 2, "dp_replicate_size": 2})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.lm_head.weight.note = "kept"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().add_(dist.get_rank())  # as what was initialized by each rank for itself
    sharded(model, {"tensor_parallel_degree": 2, "hybrid_shard_degree": 1})
    replace_stale_parameters([optimizer], model, num_ranks=4)
    held = {id(each) for each in optimizer.param_groups[0]["params"]}
    assert held == {id(each) for each in model.parameters()}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.note == "kept"
    own = {name: each.detach().to_local() for name, each in model.named_parameters()}
    every = [None] * 4
    dist.all_gather_object(every, own)
    for name in own:
        assert torch.equal(every[0][name], every[2][name]), name
        assert torch.equal(every[1][name], every[3][name]), name
        if "norm" in name:
            assert torch.equal(every[0][name], every[1][name]), name


@pytest.mark.spawns
def test_optimizers_attributes_and_ties_follow_and_copies_are_those_of_rank_0(run_ranks, folder):
    run_ranks(adopt_after_the_program, folder, world_size=4, timeout_s=120)


def refusals(folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    from hyperpod_plugins.delayed_init import delayed_init
    from hyperpod_plugins.errors import ConfigError, NotBuiltYetError

    def refused(model):
        try:
            sharded(model, {"tensor_parallel_degree": 2})
        except (ConfigError, NotBuiltYetError) as error:
            return str(error)
        return "accepted"

    dist.init_process_group("hyperpod")
    found = {}
    tokens = torch.arange(8, device=DEVICE).view(1, 8)
    has_run = load(folder, "llama", {"fsdp_size": 2})
    has_run(tokens)
    trained = load(folder, "llama", {"tp_size": 2})
    trained(tokens, labels=tokens).loss.backward()
    wrapped = load(folder, "llama", {"tp_size": 2})
    layer = wrapped.model.layers[0].mlp.up_proj
    layer.forward = lambda hidden, original=layer.forward: 2 * original(hidden)
    wrapped_alike = load(folder, "llama", {"tp_size": 2})
    layer = wrapped_alike.model.layers[0].mlp.up_proj
    layer.forward = functools.wraps(layer.forward)(lambda hidden, original=layer.forward: 2 * original(hidden))
    hooked = load(folder, "llama", {"tp_size": 2})
    hooked.lm_head.weight.register_hook(lambda gradient: 2 * gradient)
    parametrized = load(folder, "qwen3", {"fsdp_size": 2})
    torch.nn.utils.parametrize.register_parametrization(parametrized.lm_head, "weight", nn.Identity())
    foreign = make("llama")
    parallelize_module(foreign.model.layers[0].mlp.up_proj, init_device_mesh(DEVICE, (2,)), ColwiseParallel())
    older = make("llama")
    older._tp_size = 2
    around = nn.ModuleList([nn.Linear(2, 2), load(folder, "llama", {"tp_size": 2})])
    parallelize_module(around[0], init_device_mesh(DEVICE, (2,)), ColwiseParallel())
    with delayed_init():
        beside = nn.ModuleList([nn.Linear(2, 2)])
    beside.append(load(folder, "llama", {"tp_size": 2}))
    with delayed_init():
        within = load(folder, "llama", {"tp_size": 2})
    units = nn.ModuleList([load(folder, "llama", {"fsdp_size": 2}).model])
    models = {"units": units, "tensors": load(folder, "llama", {"tp_size": 2}).model.layers}
    models |= {"has run": has_run, "trained": trained, "wrapped": wrapped, "wrapped alike": wrapped_alike}
    models |= {"hooked": hooked, "foreign": foreign, "parametrized": parametrized}
    models |= {"older": older, "around": around, "beside": beside, "within": within}
    for name, model in models.items():
        found[name] = refused(model)
    return found


def with_style(module, style="replicate"):
    """As transformers leaves a module whose forward it has replaced."""
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    ALL_PARALLEL_STYLES[style].install_forward(module, None)
    return module


def test_part_of_a_model_that_transformers_has_split_is_not_taken_for_the_programs_own():
    from hyperpod_plugins.errors import ConfigError
    from hyperpod_plugins.parallel.adopted_model import is_sharded_by_program

    with pytest.raises(ConfigError, match=r"^1 of Sequential is part of a model .* Give the whole model"):
        is_sharded_by_program(nn.Sequential(nn.ReLU(), with_style(nn.Linear(2, 2))))
    own = nn.Linear(2, 2)
    own._is_hooked = True
    assert not is_sharded_by_program(own)


def as_loaded(*modules):
    """A model of which transformers has split the given modules, without ranks."""
    from transformers.distributed.utils import TransformersDeviceMesh

    class Meshes(TransformersDeviceMesh):
        def get_mesh(self, dims):
            return SimpleNamespace(size=lambda: 1)

    model = nn.Sequential(*modules)
    empty = SimpleNamespace(ndim=0, get_group=None)
    model._mesh_manager = Meshes(empty, empty)
    return model


WRAPPERS = {
    "functools.wraps": lambda forward: functools.wraps(forward)(lambda hidden: 2 * forward(hidden)),
    "no_grad": lambda forward: torch.no_grad()(forward),
    "autocast": lambda forward: torch.autocast("cpu", dtype=torch.bfloat16)(forward),
    "compile": lambda forward: torch.compile(forward, backend="eager"),
    "partial": lambda forward: functools.partial(forward),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("between", [False, True])
def test_a_wrapped_forward_is_refused_before_anything_is_undone(wrapper, between):
    from hyperpod_plugins.errors import ConfigError
    from hyperpod_plugins.parallel.adopted_model import release_shards

    first, last = with_style(nn.Linear(2, 2)), with_style(nn.Linear(2, 2))
    last._is_hooked = True
    last.forward = WRAPPERS[wrapper](last.forward)
    if between:
        with_style(last)
    model, forwards = as_loaded(first, last), (first.forward, last.forward)
    with pytest.raises(ConfigError, match=r"^forward of 1 was replaced"):
        release_shards(model)
    assert (first.forward, last.forward) == forwards


def test_forwards_are_those_of_the_modules_again():
    from hyperpod_plugins.parallel.adopted_model import release_shards

    twice, own = with_style(with_style(nn.Linear(2, 2))), nn.Linear(2, 2)
    own.forward = MethodType(lambda self, hidden: self.weight, own)
    before = own.forward
    model = as_loaded(twice, with_style(own))
    release_shards(model)
    assert "forward" not in vars(twice)
    assert own.forward == before


def test_a_deep_copy_is_refused_as_its_forwards_are_those_of_the_original():
    from hyperpod_plugins.errors import ConfigError
    from hyperpod_plugins.parallel.adopted_model import release_shards

    with pytest.raises(ConfigError, match=r"^forward of 0 was replaced or copied"):
        release_shards(as_loaded(copy.deepcopy(with_style(nn.Linear(2, 2)))))


@pytest.mark.parametrize("value", ["data", 2.5, object(), True])
def test_attributes_of_the_program_that_are_called_as_those_of_transformers_count_for_nothing(value):
    from hyperpod_plugins.parallel.adopted_model import is_sharded_by_program, release_shards, sharded_at_load

    model = nn.Sequential(nn.Linear(2, 2))
    for name in ("_mesh_manager", "_tp_size", "_device_mesh", "tp_layer", "_is_hooked"):
        setattr(model, name, value)
        setattr(model[0], name, value)
    assert sharded_at_load(model) == []
    assert not is_sharded_by_program(model)
    assert release_shards(model) is None


def adapt_embeddings(folder):
    from peft import LoraConfig, get_peft_model

    dist.init_process_group("hyperpod")
    found = []
    for degrees in ({"tp_size": 2}, None):
        torch.manual_seed(0)
        targets = ["embed_tokens", "q_proj", "down_proj"]
        adapter = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
        model = get_peft_model(load(folder, "qwen3", degrees), adapter)
        with torch.no_grad():  # PEFT draws others for a part
            for name, parameter in model.named_parameters():
                if "lora" in name:
                    parameter.fill_(0.02)
        model = sharded(model, {})
        left = [name for module in model.modules() for name in vars(module) if name.startswith("_hf_")]
        tokens = torch.arange(24, device=DEVICE).view(2, 12)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        gradients = {name: whole(each.grad) for name, each in model.named_parameters() if each.grad is not None}
        found.append((left, bits(loss.detach()), bits(gradients)))
    return found


@pytest.mark.spawns
def test_adapters_of_split_embeddings_are_plain_again(run_ranks, folder):
    pytest.importorskip("peft")
    adopted, plain = run_ranks(adapt_embeddings, folder, world_size=2, timeout_s=120)[0]
    assert adopted == plain
    assert any("lora_embedding_A" in name for name in plain[2])
    assert plain[0] == []


WORDS = {
    "has run": "has run already",
    "trained": "has run already",
    "wrapped": "forward of model.layers.0.mlp.up_proj was replaced",
    "wrapped alike": "forward of model.layers.0.mlp.up_proj was replaced",
    "hooked": "gradient hooks of model.embed_tokens.weight",
    "parametrized": "the class of lm_head was changed",
    "foreign": "model.layers.0.mlp.up_proj.weight of LlamaForCausalLM are sharded already",
    "older": "Use transformers 5.23 or later",
    "around": "0 was sharded by the program around or beside LlamaForCausalLM",
    "beside": "0.weight, 0.bias have no values yet",
    "within": "have no values yet",
    "units": "of ModuleList is part of a model that transformers has sharded",
    "tensors": "0.self_attn.q_proj of ModuleList is part of a model that transformers has sharded",
}


@pytest.mark.spawns
def test_models_that_cannot_be_adopted_are_refused_by_name(run_ranks, folder):
    found = run_ranks(refusals, folder, world_size=2, timeout_s=120)[0]
    assert found.keys() == WORDS.keys()
    for name, words in WORDS.items():
        assert words in found[name], (name, found[name])


# -- adapters ---------------------------------------------------------------------------------------------------------

OPTIONS = {"hybrid_shard_degree": 1, "tensor_parallel_degree": 2}
NUM_STEPS = 3


def tokens_of_steps():
    return torch.arange(2 * NUM_STEPS * 8).view(-1, 8) % 62


def train_with_accelerate(folder, degrees):
    from hyperpod_plugins.accelerate import HyperPodPlugin

    accelerator, losses = HyperPodPlugin(**OPTIONS).accelerator(), []
    model = load(folder, "llama", degrees).train()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for tokens in tokens_of_steps().to(accelerator.device).split(2):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def train_with_lightning(folder, degrees):
    import lightning.pytorch as pl
    from device import ACCELERATOR

    from hyperpod_plugins.lightning import HyperPodStrategy

    losses = []

    class Module(pl.LightningModule):
        def configure_model(self):
            self.net = load(folder, "llama", degrees).train()

        def training_step(self, batch, _):
            loss = self.net(input_ids=batch, labels=batch).loss
            losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    strategy = HyperPodStrategy(**OPTIONS)
    trainer = pl.Trainer(accelerator=ACCELERATOR, devices=2, strategy=strategy, max_epochs=1, **quiet)
    trainer.fit(Module(), torch.utils.data.DataLoader(tokens_of_steps(), batch_size=2))
    return losses


@pytest.mark.spawns
@pytest.mark.parametrize("train", [train_with_accelerate, train_with_lightning])
def test_each_adapter_adopts_a_model_that_has_fsdp_units(run_ranks, folder, train):
    plain = run_ranks(train, folder, None, world_size=2, timeout_s=150)
    assert len(plain[0]) == NUM_STEPS
    assert run_ranks(train, folder, {"fsdp_size": 2}, world_size=2, timeout_s=150) == plain
