"""`HyperPodPlugin`: where it reads from, what it makes, what it refuses."""

import dataclasses
import json
import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy

from hyperpod_plugins.accelerate import HyperPodPlugin, process_state
from hyperpod_plugins.comm import CommOptions
from hyperpod_plugins.errors import ConfigError, DegreeError, MissingExtraError, UnknownKeyError
from hyperpod_plugins.parallel import ParallelConfig
from hyperpod_plugins.precision import TeScaling
from hyperpod_plugins.presets import preset_path

LAUNCHED = {
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "FSDP_VERSION": "2",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_ACTIVATION_CHECKPOINTING": "true",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
}


def setenv(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_it_is_frozen_and_equal_to_what_was_asked_for_in_another_way(tmp_path, monkeypatch):
    plugin = HyperPodPlugin(hybrid_shard_degree=2, tensor_parallel_degree=2, fp8="off")
    (tmp_path / "smp.json").write_text(json.dumps({"hybrid_shard_degree": 2, "tensor_parallel_degree": 2}))
    assert plugin == HyperPodPlugin({"hybrid_shard_degree": 2, "tensor_parallel_degree": 2})
    assert plugin == HyperPodPlugin(tmp_path / "smp.json")
    monkeypatch.setenv("HYPERPOD_CONFIG", str(tmp_path / "smp.json"))
    assert plugin == HyperPodPlugin()
    assert plugin == HyperPodPlugin.from_environ()
    assert HyperPodPlugin.from_environ(hybrid_shard_degree=4).config.hybrid_shard_degree == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        plugin.timeout_s = 1.0  # pyright: ignore


def test_the_environment_of_accelerate_launch(monkeypatch):
    setenv(monkeypatch, LAUNCHED)
    asked = HyperPodPlugin(hybrid_shard_degree=2, precision="bf16-mixed", activation_checkpointing=True)
    assert HyperPodPlugin.from_environ() == asked
    assert HyperPodPlugin() != asked  # only when it is asked to
    without = HyperPodPlugin.from_environ(activation_checkpointing=False, timeout_s=5.0)
    assert (without.config.activation_checkpointing, without.timeout_s) == ("none", 5.0)


def test_a_preset_is_read_by_other_launchers_too(monkeypatch):
    monkeypatch.setenv("HYPERPOD_CONFIG", str(preset_path("hsdp-tp")))
    asked = HyperPodPlugin(hybrid_shard_degree=2, tensor_parallel_degree=2, precision="bf16-mixed")
    assert HyperPodPlugin.from_environ() == HyperPodPlugin(preset_path("hsdp-tp")) == asked


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ({"hybrid_shard_degre": 2}, UnknownKeyError, "hybrid_shard_degree"),
        ({"config": "absent.yaml"}, ConfigError, "absent.yaml"),
        ({"config": "absent.json"}, ConfigError, "absent.json"),
        ({"timeout_s": 0}, ConfigError, "timeout_s"),
        ({"fp8": "te", "mlp_tiles": 2}, ConfigError, "te-fp8"),
        ({"activation_checkpointing": "some"}, ConfigError, "activation_checkpointing must be one of none, selective"),
        ({"fp8": "te", "precision": "bf16-true"}, ConfigError, "bf16-true"),
    ],
)
def test_bad_input_is_refused_early(arguments, error, told):
    with pytest.raises(error, match=told):
        HyperPodPlugin(**arguments)


@pytest.mark.parametrize("text", ["[1, 2]", "fsdp_config: {", ""])
def test_a_file_that_is_none_of_accelerate(tmp_path, text):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        HyperPodPlugin(tmp_path / "bad.yaml")


def test_what_accelerate_is_given(monkeypatch):
    setenv(monkeypatch, {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"})
    plugin = HyperPodPlugin(
        hybrid_shard_degree=2,
        offload_params=True,
        precision="bf16-mixed",
        block_classes=("Block",),
        reshard_after_forward=False,
        timeout_s=60,
    )
    fsdp, sizes, group = plugin.fsdp_plugin, plugin.parallelism_config, plugin.process_group_kwargs
    assert (fsdp.fsdp_version, fsdp.reshard_after_forward, fsdp.cpu_ram_efficient_loading) == (2, False, False)
    assert isinstance(fsdp.cpu_offload, CPUOffloadPolicy)
    assert not fsdp.cpu_offload.pin_memory  # pinning needs a GPU
    assert fsdp.mixed_precision_policy.reduce_dtype is torch.float32
    assert (sizes.dp_replicate_size, sizes.dp_shard_size, sizes.tp_size, sizes.total_size) == (4, 2, 1, 8)
    assert (group.backend, group.timeout.total_seconds()) == ("hyperpod", 60)
    assert plugin.mixed_precision == "bf16"
    assert [type(each).__name__ for each in plugin.kwargs_handlers] == ["InitProcessGroupKwargs"]
    with pytest.raises(DegreeError, match="nearest"):
        _ = HyperPodPlugin(hybrid_shard_degree=3).parallelism_config


@pytest.mark.parametrize("library", ["torchao", "te"])
def test_fp8_without_its_library_says_what_to_install(library, monkeypatch):
    plugin = HyperPodPlugin(fp8=library)
    assert (plugin.config.precision, plugin.mixed_precision) == ("bf16-mixed", "bf16")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="pip install"):
        plugin.accelerator()
    assert not dist.is_initialized()  # refused before anything was joined


def test_fp8_is_done_by_this_package():
    assert HyperPodPlugin(fp8="torchao").config.float8_recipe == "tensorwise"
    assert HyperPodPlugin(fp8="torchao", float8_recipe="rowwise").config.float8_recipe == "rowwise"
    assert HyperPodPlugin(fp8="torchao", float8_all_gather=True).config.float8_all_gather
    of_te = HyperPodPlugin(fp8="te", te_scaling={"margin": 1}).config
    assert (of_te.float8_recipe, of_te.te_scaling.margin) == ("te-fp8", 1)
    with pytest.raises(ConfigError, match="fp8='te' contradicts float8_recipe='rowwise'"):
        HyperPodPlugin(fp8="te", float8_recipe="rowwise")
    with pytest.raises(ConfigError, match="te-fp8' cannot be combined with param_offload"):
        HyperPodPlugin(fp8="te", offload_params=True)


def test_float32_beside_fp8_is_refused_where_the_program_says_it(monkeypatch, tmp_path):
    file = tmp_path / "float32.json"
    file.write_text('{"precision": "32-true"}')
    for given in ({"precision": "32-true"}, {"config": {"precision": "32-true"}}, {"config": file}):
        with pytest.raises(ConfigError, match=r"fp8='torchao' contradicts precision='32-true'"):
            HyperPodPlugin(fp8="torchao", **given)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # the launcher's default
    assert HyperPodPlugin.from_environ(fp8="torchao").config.precision == "bf16-mixed"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(ConfigError, match=r"contradicts precision='32-true'"):
        HyperPodPlugin.from_environ(precision="32-true")
    assert HyperPodPlugin(ParallelConfig(), fp8="torchao").config.precision == "bf16-mixed"  # its default


def test_options_of_torchao_need_fp8():
    assert HyperPodPlugin(fp8="torchao", float8_pad_inner_dim=True).config.float8_pad_inner_dim
    with pytest.raises(ConfigError, match="float8_pad_inner_dim=True needs float8_recipe"):
        HyperPodPlugin(float8_pad_inner_dim=True)


def test_a_recipe_of_ms_amp_is_refused():
    handler = type("MSAMPRecipeKwargs", (), {})()
    with pytest.raises(ConfigError, match="MSAMPRecipeKwargs is not supported"):
        HyperPodPlugin().accelerator(kwargs_handlers=[handler])


def of_recipe(handler, **options):
    """The configuration of an Accelerator with a handler and `mixed_precision="fp8"`."""
    return HyperPodPlugin(**options)._with_precision("fp8")._with_recipe(handler).config


def test_the_handler_of_torchao_is_served_or_refused_by_name():
    pytest.importorskip("torchao")
    from accelerate.utils import AORecipeKwargs
    from torchao.float8 import Float8LinearConfig

    config = of_recipe(AORecipeKwargs())
    assert (config.float8_recipe, config.float8_all_gather, config.float8_pad_inner_dim) == ("tensorwise", True, True)
    config = of_recipe(AORecipeKwargs(config=Float8LinearConfig.from_recipe_name("rowwise")))
    assert (config.float8_recipe, config.float8_all_gather, config.float8_pad_inner_dim) == ("rowwise", False, False)
    with pytest.raises(ConfigError, match="module_filter_func"):
        of_recipe(AORecipeKwargs(module_filter_func=lambda *_: True))
    with pytest.raises(ConfigError, match="neither of torchao's recipes"):
        of_recipe(AORecipeKwargs(config=Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")))
    with pytest.raises(ConfigError, match=r"AORecipeKwargs, but the precision is not fp8. Give mixed_precision='fp8'"):
        HyperPodPlugin().accelerator(kwargs_handlers=[AORecipeKwargs()])
    with pytest.raises(ConfigError, match="asks for float8_recipe='tensorwise', and the plugin for 'rowwise'"):
        of_recipe(AORecipeKwargs(), float8_recipe="rowwise", precision="bf16-mixed")
    with pytest.raises(ConfigError, match="is for torchao, and the plugin has fp8='te'"):
        of_recipe(AORecipeKwargs(), fp8="te")


def test_options_that_the_program_gave_the_plugin_are_not_reset_by_a_handler(monkeypatch):
    pytest.importorskip("torchao")
    from accelerate.utils import AORecipeKwargs, TERecipeKwargs
    from torchao.float8 import Float8LinearConfig

    monkeypatch.setattr("accelerate.utils.dataclasses.is_transformer_engine_available", lambda: True)
    rowwise = Float8LinearConfig.from_recipe_name("rowwise")
    tensorwise = Float8LinearConfig.from_recipe_name("tensorwise")
    for handler, options, told in (
        (
            TERecipeKwargs(),
            {"fp8": "te", "te_scaling": {"margin": 2}},
            r"TERecipeKwargs asks for te_scaling=.*margin=0",
        ),
        (AORecipeKwargs(config=tensorwise), {"fp8": "torchao", "float8_all_gather": True}, "float8_all_gather=False"),
        (
            AORecipeKwargs(),
            {"fp8": "torchao", "float8_all_gather": False},
            "float8_all_gather=True, and the plugin for",
        ),
        (AORecipeKwargs(), {"float8_pad_inner_dim": False}, "float8_pad_inner_dim=True, and the plugin for False"),
        (
            AORecipeKwargs(config=rowwise),
            {"fp8": "torchao", "float8_pad_inner_dim": True},
            "float8_pad_inner_dim=False",
        ),
        (
            AORecipeKwargs(),
            {"fp8": "torchao", "float8_recipe": "rowwise"},
            "float8_recipe='tensorwise', and the plugin",
        ),
        (TERecipeKwargs(), {"fp8": "torchao"}, "TERecipeKwargs asks for fp8='te', and the plugin for 'torchao'"),
        (
            AORecipeKwargs(config=tensorwise),
            {"config": {"float8_recipe": "tensorwise", "float8_all_gather": True, "precision": "bf16-mixed"}},
            "float8_all_gather=False, and the plugin for True",
        ),
    ):
        with pytest.raises(ConfigError, match=told):
            of_recipe(handler, **options)
    same = TeScaling(margin=2, amax_compute_algo="most_recent")
    assert of_recipe(TERecipeKwargs(margin=2), fp8="te", te_scaling=same).te_scaling == same
    assert of_recipe(AORecipeKwargs(), fp8="torchao", float8_all_gather=True).float8_all_gather
    assert not HyperPodPlugin(float8_pad_inner_dim=False)._with_precision("fp8").config.float8_pad_inner_dim
    emulated = dataclasses.replace(tensorwise, emulate=True)
    with pytest.raises(ConfigError, match=r"emulate=True\) is not supported"):
        of_recipe(AORecipeKwargs(config=emulated))


def test_a_handler_overrides_what_the_launcher_says(monkeypatch):
    """As it does in Accelerate."""
    pytest.importorskip("torchao")
    from accelerate.utils import AORecipeKwargs
    from torchao.float8 import Float8LinearConfig

    setenv(monkeypatch, {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "AO"})
    plugin = HyperPodPlugin.from_environ()
    assert plugin.config.float8_all_gather
    rowwise = AORecipeKwargs(config=Float8LinearConfig.from_recipe_name("rowwise"))
    assert plugin._with_recipe(rowwise).config.float8_recipe == "rowwise"
    with pytest.raises(ConfigError, match="float8_all_gather=False, and the plugin for True"):
        HyperPodPlugin.from_environ(float8_all_gather=True)._with_recipe(rowwise)


@pytest.mark.parametrize(("backend", "recipe"), [("TE", "te-nvfp4"), ("AO", "rowwise")])
def test_another_recipe_takes_no_details_of_the_one_that_the_launcher_implies(monkeypatch, tmp_path, backend, recipe):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", backend)
    assert HyperPodPlugin.from_environ(float8_recipe=recipe).config.float8_recipe == recipe
    file = tmp_path / "fp8.yaml"
    file.write_text(f"mixed_precision: fp8\nfp8_config: {{backend: {backend}}}\n")
    config = HyperPodPlugin(str(file), float8_recipe=recipe).config
    assert (config.float8_recipe, config.float8_pad_inner_dim) == (recipe, False)


def test_the_handler_of_transformer_engine_is_served_or_refused_by_name(monkeypatch):
    from accelerate.utils import TERecipeKwargs

    monkeypatch.setattr("accelerate.utils.dataclasses.is_transformer_engine_available", lambda: True)
    config = of_recipe(TERecipeKwargs(margin=2, amax_history_len=16))
    assert config.float8_recipe == "te-fp8"
    assert config.te_scaling == TeScaling(margin=2, amax_history_len=16, amax_compute_algo="most_recent")
    assert of_recipe(TERecipeKwargs(use_mxfp8_block_scaling=True)).float8_recipe == "te-mxfp8"
    for option, told in (
        ({"use_mxfp8_block_scaling": True, "margin": 1}, "margin=1 is not supported with use_mxfp8_block_scaling"),
        ({"use_autocast_during_eval": True}, "evaluations are in bfloat16"),
        ({"interval": 2}, "interval=2"),
        ({"override_linear_precision": (False, True, False)}, "all three products"),
        ({"fp8_format": "E5M2"}, "fp8_format must be one of HYBRID, E4M3"),
    ):
        with pytest.raises(ConfigError, match=told):
            of_recipe(TERecipeKwargs(**option))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"fsdp_plugin": object()}, "fsdp_plugin"),
        ({"dynamo_backend": "inductor"}, "dynamo_backend"),
        ({"mixed_precision": "fp16"}, "fp16"),
    ],
)
def test_arguments_that_contradict_the_plugin(options, told):
    with pytest.raises(ConfigError, match=told):
        HyperPodPlugin().accelerator(**options)
    assert not dist.is_initialized()


def test_a_program_that_asks_for_the_cpu_gets_it_where_there_are_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    assert not process_state.uses_cpu()
    process_state.use_cpu()
    assert process_state.uses_cpu()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    monkeypatch.setattr(process_state, "has_joined", lambda: True)  # as in a Session, for a GPU
    with pytest.raises(ConfigError, match="comes too late"):
        process_state.use_cpu()


def test_precisions_that_contradict_each_other():
    with pytest.raises(ConfigError, match="contradicts"):
        HyperPodPlugin(precision="bf16-mixed").accelerator(mixed_precision="no")


def test_the_launcher_says_the_precision_where_nobody_else_does(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert HyperPodPlugin()._with_precision(None).config.precision == "bf16-mixed"
    assert HyperPodPlugin()._with_precision("no").config.precision == "32-true"
    assert HyperPodPlugin(precision="bf16-true")._with_precision(None).mixed_precision == "no"
    told = HyperPodPlugin(timeout_s=5, offload_params=True)._with_precision("fp8")
    assert (told.mixed_precision, told.config.float8_recipe, told.config.param_offload) == (
        "bf16",
        "tensorwise",
        True,
    )
    assert (told.config.float8_all_gather, told.config.float8_pad_inner_dim) == (True, True)  # Accelerate's defaults
    rowwise = HyperPodPlugin(float8_recipe="rowwise")._with_precision("fp8").config
    assert (rowwise.precision, rowwise.float8_recipe, rowwise.float8_all_gather) == ("bf16-mixed", "rowwise", False)
    assert told.timeout_s == 5


def test_handlers_that_the_plugin_makes():
    from accelerate.utils import InitProcessGroupKwargs

    with pytest.raises(ConfigError, match="timeout_s"):
        HyperPodPlugin().accelerator(kwargs_handlers=[InitProcessGroupKwargs()])


def in_one_process():
    """All that needs a process of its own, for Accelerate's state lives as long as that."""
    import torch
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import AutocastKwargs

    seen = {}

    def refused(name, call):
        try:
            call()
        except ConfigError as error:
            seen[name] = str(error)

    PartialState()  # joins a group of its own, where a launcher says which rank this is
    refused("another backend", HyperPodPlugin().accelerator)
    dist.destroy_process_group()
    AcceleratorState._reset_state(True)
    del os.environ["LOCAL_RANK"]
    PartialState()
    refused("made before", HyperPodPlugin(comm=CommOptions(transport="gloo")).accelerator)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = HyperPodPlugin(comm=CommOptions(transport="gloo")).accelerator(
        cpu=True, mixed_precision="bf16", dynamo_backend="no", kwargs_handlers=[AutocastKwargs(cache_enabled=False)]
    )
    again = HyperPodPlugin().accelerator(cpu=False, mixed_precision="bf16")
    seen["state"] = [accelerator.distributed_type.name, accelerator.mixed_precision, again.is_fsdp2]
    seen["group"] = [dist.get_backend(), dist.get_world_size(), accelerator.num_processes, str(accelerator.device)]
    seen["options"] = dist.group.WORLD.options.transport

    net, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    refused("foreign", lambda: accelerator.prepare(net, torch.optim.SGD(other.parameters(), 0.1)))
    begun = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    net(torch.ones(1, 2)).sum().backward()
    begun.step()
    refused("begun", lambda: accelerator.prepare(net, begun))
    whole = torch.nn.Linear(2, 2)
    refused("closure", lambda: accelerator.prepare(whole, torch.optim.LBFGS(whole.parameters())))
    refused("closure, later", lambda: accelerator.prepare_optimizer(torch.optim.LBFGS(net.parameters())))
    net, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    seen["sharded"] = [type(parameter).__name__ for parameter in net.parameters()]
    refused("reduction", lambda: accelerator.reduce(torch.ones(1), "median"))
    return seen


@pytest.mark.spawns
def test_one_process_is_a_group_too_and_mistakes_are_explained(run_ranks):
    (seen,) = run_ranks(in_one_process, world_size=1)
    assert "before the plugin's" in seen["made before"]
    assert seen["state"] == ["FSDP", "bf16", True]
    assert seen["group"] == ["hyperpod", 1, 1, "cpu"]
    assert seen["options"] == "gloo"
    assert "not in the Linear" in seen["foreign"]
    assert "has state already" in seen["begun"]
    assert "LBFGS" in seen["closure"]
    assert "LBFGS" in seen["closure, later"]
    assert seen["sharded"] == ["DTensor", "DTensor"]
    assert "median" in seen["reduction"]
    assert "cannot lose members" in seen["another backend"]


def half_loaded():
    from torch import nn

    accelerator = HyperPodPlugin().accelerator()
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        net = nn.Linear(4, 4)
    try:
        accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    except ConfigError as error:
        return str(error)
    return "taken"


@pytest.mark.spawns
def test_a_model_that_only_one_rank_has_loaded_is_refused_on_all(run_ranks):
    told = run_ranks(half_loaded, world_size=2, timeout_s=60)
    assert "cpu_ram_efficient_loading" in told[0]
    assert told[0] == told[1]
