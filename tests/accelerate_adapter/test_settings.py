"""How Accelerate's variables and files are read: pure tables."""

import importlib
import sys

import pytest
import yaml

from hyperpod_plugins.accelerate.launch_config import AccelerateSettings, options_in, variables_in
from hyperpod_plugins.errors import ConfigError, MissingExtraError, NotBuiltYetError
from hyperpod_plugins.presets import FOLDER, preset_names, preset_path, preset_summary, write_preset

FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
MESH = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}

TE = {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "TE"}
TORCHAO = {"precision": "bf16-mixed", "fp8": "torchao", "float8_all_gather": True, "float8_pad_inner_dim": True}


def of_te(**scaling):
    """Options for Transformer Engine, with Accelerate's defaults."""
    defaults = {"margin": 0, "fp8_format": "HYBRID", "amax_history_len": 1024, "amax_compute_algo": "most_recent"}
    options = {"precision": "bf16-mixed", "fp8": "te", "float8_recipe": "te-fp8"}
    return options | {"te_scaling": defaults | scaling}


@pytest.mark.parametrize(
    ("variables", "options"),
    [
        ({}, {}),
        ({"ACCELERATE_MIXED_PRECISION": "no"}, {"precision": "32-true"}),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {"precision": "bf16-mixed"}),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, TORCHAO),
        (
            {
                "ACCELERATE_MIXED_PRECISION": "fp8",
                "ACCELERATE_FP8_BACKEND": "AO",
                "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": "0",
                "ACCELERATE_FP8_PAD_INNER_DIM": "False",
            },
            TORCHAO | {"float8_all_gather": False, "float8_pad_inner_dim": False},
        ),
        ({"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "te"}, of_te()),
        (
            {
                "ACCELERATE_MIXED_PRECISION": "fp8",
                "ACCELERATE_FP8_BACKEND": "TE",
                "ACCELERATE_FP8_MARGIN": "2",
                "ACCELERATE_FP8_FORMAT": "e4m3",
                "ACCELERATE_FP8_AMAX_HISTORY_LEN": "16",
                "ACCELERATE_FP8_AMAX_COMPUTE_ALGO": "max",
                "ACCELERATE_FP8_OVERRIDE_WGRAD": "False",
            },
            of_te(margin=2, fp8_format="E4M3", amax_history_len=16, amax_compute_algo="max"),
        ),
        (
            MESH | {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "4", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "9"},
            {"hybrid_shard_degree": 4, "tensor_parallel_degree": 1, "context_parallel_degree": 1},
        ),
        (  # Accelerate's world is replicate x shard x cp x tp; here a context is a part of the shard axis
            MESH | {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "2", "PARALLELISM_CONFIG_CP_SIZE": "4"},
            {"hybrid_shard_degree": 8, "tensor_parallel_degree": 1, "context_parallel_degree": 4},
        ),
        ({"PARALLELISM_CONFIG_DP_SHARD_SIZE": "4"}, {}),  # not in use
        ({"FSDP_RESHARD_AFTER_FORWARD": "false"}, {}),
        (FSDP2 | {"FSDP_RESHARD_AFTER_FORWARD": "false"}, {"reshard_after_forward": False}),
        (FSDP2 | {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, {"activation_checkpointing": True}),
        (FSDP2 | {"FSDP_OFFLOAD_PARAMS": "True"}, {"param_offload": True}),
        (
            FSDP2 | {"FSDP_TRANSFORMER_CLS_TO_WRAP": "A, B", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"},
            {"block_classes": ("A", "B")},
        ),
        (FSDP2 | {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}, {"state_dict_type": "FULL_STATE_DICT"}),
    ],
)
def test_what_the_launcher_exports_is_read(variables, options):
    assert options_in(variables) == options


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"ACCELERATE_USE_FSDP": "true"}, "fsdp_version is 1"),
        (FSDP2 | {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"}, "SIZE_BASED_WRAP"),
        (FSDP2 | {"FSDP_IGNORED_MODULES": "head"}, "fsdp_ignored_modules"),
        (FSDP2 | {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "INDUCTOR"),
        (FSDP2 | {"FSDP_RESHARD_AFTER_FORWARD": "FULL_SHARD"}, "FULL_SHARD"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "fp16"),
        ({"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "MSAMP"}, "MSAMP"),
        (TE | {"ACCELERATE_FP8_OVERRIDE_DGRAD": "True"}, "override_linear_precision"),
        (TE | {"ACCELERATE_FP8_OVERRIDE_LINEAR_PRECISION": "[False, True, False]"}, "override_linear_precision"),
        (
            TE | {"ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING": "true", "ACCELERATE_FP8_AMAX_HISTORY_LEN": "16"},
            "amax_history_len=16 is not supported with use_mxfp8",
        ),
        (TE | {"ACCELERATE_FP8_MARGIN": "-1"}, "MARGIN must be a whole number, but is '-1'"),
        (MESH | {"PARALLELISM_CONFIG_SP_SIZE": "2"}, "DeepSpeed"),
        (MESH | {"PARALLELISM_CONFIG_TP_SIZE": "two"}, "'two'"),
    ],
)
def test_what_can_not_be_honoured_is_refused(variables, told):
    with pytest.raises(ConfigError, match=told):
        options_in(variables)


@pytest.mark.parametrize(
    "values",
    [
        {"fp8": "msamp"},
        {"state_dict_type": "LOCAL_STATE_DICT"},
    ],
)
def test_settings_that_make_no_sense_are_refused(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        AccelerateSettings(**values)


LAYOUTS = {
    "checkpointless": (2, 1),
    "context": (8, 1),
    "cpu-smoke": (2, 1),
    "elastic": (8, 1),
    "experts": (8, 1),
    "fp8": (4, 1),
    "full-shard": (0, 1),
    "hsdp-1node": (4, 1),
    "hsdp-multinode": (8, 1),
    "hsdp-tp": (2, 2),
    "long-context": (8, 1),
    "offload": (0, 1),
}
RECOMPUTES = ("context", "experts", "full-shard", "long-context", "offload")


def test_all_presets_are_there():
    assert preset_names() == tuple(LAYOUTS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_preset_says_what_it_is_for_and_asks_for_its_layout(name):
    file = yaml.safe_load(preset_path(name).read_text())
    options = options_in(variables_in(file))
    assert (options.get("hybrid_shard_degree", 0), options.get("tensor_parallel_degree", 1)) == LAYOUTS[name]
    assert options["precision"] == ("32-true" if name == "cpu-smoke" else "bf16-mixed")
    assert options.get("fp8", "off") == ("torchao" if name == "fp8" else "off")
    assert options.get("activation_checkpointing", False) == (name in RECOMPUTES)
    assert options.get("sm_activation_offloading", False) == (name in ("long-context", "offload"))
    assert options.get("context_parallel_degree", 1) == {"long-context": 8, "context": 2}.get(name, 1)
    assert preset_summary(name).endswith((".", "?"))
    assert f"hyperpod preset {name}" in preset_path(name).read_text()


def test_a_preset_is_written_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written = write_preset("hsdp-tp")
    assert written == tmp_path / "hsdp-tp.yaml"
    assert written.read_text() == (FOLDER / "hsdp-tp.yaml").read_text()
    with pytest.raises(ConfigError, match="File exists"):
        write_preset("hsdp-tp", tmp_path)
    assert write_preset("hsdp-tp", tmp_path / "other.yaml").exists()
    with pytest.raises(ConfigError, match="No such file"):
        write_preset("hsdp-tp", tmp_path / "absent" / "other.yaml")
    with pytest.raises(ConfigError, match="hsdp-1node"):
        write_preset("hsdp")


@pytest.mark.parametrize("key", ["fsdp_activation_checkpointing", "activation_checkpointing"])
def test_a_file_may_leave_out_the_prefix_of_its_section(key):
    file = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, key: True}}
    assert options_in(variables_in(file)) == {"precision": "32-true", "activation_checkpointing": True}


@pytest.mark.parametrize(
    ("file", "told"),
    [
        (
            {"fsdp_config": {"fsdp_activation_checkpoint": True}},
            "fsdp_config has the key 'fsdp_activation_checkpoint', which is unknown. Did you mean 'fsdp_activation_",
        ),
        ({"fsdp_config": {"limit_all_gathers": True}}, "'limit_all_gathers', which is unknown.*Known keys: fsdp_"),
        ({"fp8_config": {"backend": "TE", "marginn": 2}}, "'marginn', which is unknown. Did you mean 'fp8_margin'"),
        ({"parallelism_config": {"parallelism_config_ep_size": 2}}, "'parallelism_config_ep_size', which is unknown"),
        ({"distributed_type": "DEEPSPEED"}, "asks for DEEPSPEED"),
        ({"distributed_type": "MEGATRON_LM", "megatron_lm_config": {"megatron_lm_tp_degree": 2}}, "MEGATRON_LM"),
        ({"distributed_type": "FSDP", "deepspeed_config": {"zero_stage": 3}}, r"asks for DEEPSPEED.*deepspeed_config"),
    ],
)
def test_what_a_file_asks_for_and_this_plugin_does_not_know_is_refused_by_name(file, told):
    with pytest.raises(ConfigError, match=told):
        options_in(variables_in(file))


def test_keys_of_fsdp1_and_empty_sections_do_no_harm():
    """`accelerate config` writes them."""
    old = {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_use_orig_params": True, "fsdp_backward_prefetch": "NO"}
    others = {"fsdp_sync_module_states": True, "fsdp_cpu_ram_efficient_loading": True, "fsdp_min_num_params": 1}
    file = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2} | old | others, "deepspeed_config": {}}
    assert options_in(variables_in(file)) == {"precision": "32-true"}


def test_the_launcher_of_another_engine_is_refused():
    with pytest.raises(ConfigError, match="asks for DEEPSPEED"):
        options_in({"ACCELERATE_USE_DEEPSPEED": "true"})


@pytest.mark.parametrize("is_file", [True, False])
def test_keys_of_fp8_as_accelerate_config_writes_them(is_file):
    keys = {"backend": "TE", "amax_history_length": 16, "amax_compute_algorithm": "max"}
    variables = variables_in({"mixed_precision": "fp8", "fp8_config": keys})
    if not is_file:  # the launcher exports its own defaults beside them
        variables = {f"ACCELERATE_FP8_{name.upper()}": str(value) for name, value in keys.items()}
        variables |= TE | {"ACCELERATE_FP8_AMAX_HISTORY_LEN": "1024", "ACCELERATE_FP8_AMAX_COMPUTE_ALGO": "most_recent"}
    assert options_in(variables) == of_te(amax_history_len=16, amax_compute_algo="max")


def test_a_file_without_a_version_asks_for_the_first():
    with pytest.raises(ConfigError, match="fsdp_version is 1"):
        options_in(variables_in({"distributed_type": "FSDP"}))


def test_what_is_not_built_says_so():
    with pytest.raises(NotBuiltYetError):
        options_in(FSDP2 | {"FSDP_IGNORED_MODULES": "head"})


def test_without_accelerate_the_error_says_what_to_install(monkeypatch):
    """The presets and everything else work without it."""
    monkeypatch.setitem(sys.modules, "accelerate", None)
    for name in [name for name in sys.modules if name.startswith(("accelerate.", "hyperpod_plugins.accelerate"))]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingExtraError, match=r"extra \[accelerate\]"):
        importlib.import_module("hyperpod_plugins.accelerate")
    monkeypatch.delitem(sys.modules, "hyperpod_plugins.presets")
    assert importlib.import_module("hyperpod_plugins.presets").preset_names() == preset_names()
