"""The configuration: SMP v2 JSON unchanged, every range, every exclusion, and messages that help."""

import dataclasses
import json

import pytest

from hyperpod_plugins.errors import ConfigError, DegreeError, NotBuiltYetError, UnknownKeyError
from hyperpod_plugins.parallel import ParallelConfig

SMP_FILE = {
    "hybrid_shard_degree": 8,
    "tensor_parallel_degree": 2,
    "expert_parallel_degree": 1,
    "context_parallel_degree": 1,
    "tensor_parallel_seed": 7,
    "sm_activation_offloading": False,
    "activation_loading_horizon": 4,
    "fsdp_cache_flush_warnings": False,
    "allow_empty_shards": True,
}
SMP_VALUES = dict(
    hybrid_shard_degree=8,
    tensor_parallel_degree=2,
    random_seed=7,
    activation_loading_horizon=4,
    fsdp_cache_flush_warnings=False,
    allow_empty_shards=True,
)


def raised(error, make, *words):
    """The error must be exactly of this class, one paragraph, and hold every word."""
    with pytest.raises(ConfigError) as caught:
        make()
    assert type(caught.value) is error, repr(caught.value)
    message = str(caught.value)
    assert "\n\n" not in message
    for word in words:
        assert word in message
    return message


# -- ways to give it ------------------------------------------------------------------------------------------------


def test_the_same_object_from_a_file_a_dict_and_arguments(tmp_path):
    path = tmp_path / "smp.json"
    path.write_text(json.dumps(SMP_FILE))
    wanted = ParallelConfig(**SMP_VALUES)
    for source in (path, str(path), SMP_FILE, wanted):
        assert ParallelConfig.of(source) == wanted
    assert ParallelConfig.of(**SMP_FILE) == wanted
    assert ParallelConfig.of({}, **SMP_FILE) == wanted


def test_defaults_are_those_of_smp_except_for_offloading():
    config = ParallelConfig.of()
    assert config == ParallelConfig() == ParallelConfig.of({})
    assert (config.hybrid_shard_degree, config.tensor_parallel_degree) == (0, 1)
    assert (config.expert_parallel_degree, config.context_parallel_degree) == (1, 1)
    assert (config.random_seed, config.activation_loading_horizon) == (12345, 2)
    assert config.fsdp_cache_flush_warnings
    assert not config.allow_empty_shards
    assert not config.sm_activation_offloading


def test_explicit_arguments_win_over_every_source(tmp_path):
    path = tmp_path / "smp.json"
    path.write_text(json.dumps(SMP_FILE))
    for source in (path, SMP_FILE, ParallelConfig.of(SMP_FILE)):
        config = ParallelConfig.of(source, hybrid_shard_degree=4, random_seed=1)
        assert config == dataclasses.replace(ParallelConfig(**SMP_VALUES), hybrid_shard_degree=4, random_seed=1)


def test_aliases_mean_what_they_stand_for():
    assert ParallelConfig.of({"tensor_parallel_seed": 3}) == ParallelConfig(random_seed=3)
    assert ParallelConfig.of({"random_seed": 1}, tensor_parallel_seed=3).random_seed == 3
    assert ParallelConfig.of({"tensor_parallel_seed": 3, "random_seed": 3}).random_seed == 3
    assert not ParallelConfig.of(activation_offload=False).sm_activation_offloading
    assert ParallelConfig.of(activation_offload=True).sm_activation_offloading
    launched = ParallelConfig.of(activation_checkpointing=True, activation_checkpointing_offload=True)  # of Accelerate
    assert (launched.activation_checkpointing, launched.sm_activation_offloading) == ("full", True)
    assert ParallelConfig.of(activation_checkpointing=False).activation_checkpointing == "none"


@pytest.mark.parametrize(
    "values", [{"tensor_parallel_seed": 3, "random_seed": 4}, {"random_seed": 4, "tensor_parallel_seed": 3}]
)
def test_an_alias_that_contradicts_its_key_is_refused(values):
    raised(ConfigError, lambda: ParallelConfig.of(values), "random_seed", "tensor_parallel_seed", "keep one")


def test_the_config_cannot_be_changed_after_checking():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ParallelConfig().hybrid_shard_degree = 3


# -- keys ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("hybrid_shard_degre", "'hybrid_shard_degree'"),
        ("tensor_parallel_degrees", "'tensor_parallel_degree'"),
        ("sm_activation_offload", "'sm_activation_offloading'"),
        ("Random_Seed", "'random_seed'"),
        ("offload_activations", "'activation_offload'"),  # and not offload_params, which is another thing
    ],
)
def test_an_unknown_key_is_told_its_nearest(key, suggestion):
    raised(UnknownKeyError, lambda: ParallelConfig.of({key: 1}), repr(key), f"Did you mean {suggestion}?")
    raised(UnknownKeyError, lambda: ParallelConfig.of(None, **{key: 1}), repr(key), f"Did you mean {suggestion}?")


def test_a_key_like_no_other_is_told_all_known_ones():
    message = raised(UnknownKeyError, lambda: ParallelConfig.of({"zzzz": 1}), "'zzzz'")
    assert "Did you mean" not in message
    assert all(field.name in message for field in dataclasses.fields(ParallelConfig))


def test_a_key_that_is_no_string_is_an_unknown_key():
    raised(UnknownKeyError, lambda: ParallelConfig.of({2: 1}), "2", "Known keys")


# -- files --------------------------------------------------------------------------------------------------------


def test_a_missing_file_names_the_path_and_both_ways_to_give_one(tmp_path):
    path = tmp_path / "absent.json"
    raised(ConfigError, lambda: ParallelConfig.of(path), str(path), "No such file", "HYPERPOD_CONFIG")


def test_a_folder_is_no_configuration_file(tmp_path):
    raised(ConfigError, lambda: ParallelConfig.of(tmp_path), str(tmp_path), "directory")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"hybrid_shard_degree: 2", ["is not JSON", "line 1"]),
        (b"", ["is not JSON"]),
        (b'{"hybrid_shard_degree": 2,}', ["is not JSON"]),
        (b"[]", ["one JSON object", "list"]),
        (b'[{"hybrid_shard_degree": 2}]', ["one JSON object", "list"]),
        (b"8", ["one JSON object", "int"]),
        (b"null", ["one JSON object"]),
        (b"\x80\x04\x95\xff\xfe", ["is not JSON"]),
    ],
)
def test_a_file_that_holds_no_json_object_is_named(tmp_path, content, words):
    path = tmp_path / "smp.json"
    path.write_bytes(content)
    raised(ConfigError, lambda: ParallelConfig.of(path), str(path), *words)


@pytest.mark.parametrize("source", [42, ["hybrid_shard_degree", 2], ("a", 1), True, 0])
def test_a_source_of_another_kind_is_refused(source):
    raised(ConfigError, lambda: ParallelConfig.of(source), type(source).__name__, "dict", "path")


# -- values -------------------------------------------------------------------------------------------------------

INTEGERS = (
    "hybrid_shard_degree",
    "tensor_parallel_degree",
    "expert_parallel_degree",
    "context_parallel_degree",
    "random_seed",
    "activation_loading_horizon",
)
BOOLEANS = (
    "sm_activation_offloading",
    "fsdp_cache_flush_warnings",
    "allow_empty_shards",
    "sequence_parallel",
    "loss_parallel",
    "reshard_after_forward",
)


@pytest.mark.parametrize("value", [True, False, "2", 2.0, None, [2], {}])
@pytest.mark.parametrize("key", INTEGERS)
def test_what_is_not_a_whole_number_is_refused(key, value):
    raised(ConfigError, lambda: ParallelConfig.of({key: value}), f"{key} must be a whole number", repr(value))


@pytest.mark.parametrize("value", [0, 1, "true", "false", None, []])
@pytest.mark.parametrize("key", BOOLEANS)
def test_what_is_not_a_boolean_is_refused(key, value):
    raised(ConfigError, lambda: ParallelConfig.of({key: value}), f"{key} must be true or false", repr(value))


@pytest.mark.parametrize(
    ("key", "least"),
    [
        ("hybrid_shard_degree", 0),
        ("tensor_parallel_degree", 1),
        ("expert_parallel_degree", 1),
        ("context_parallel_degree", 1),
        ("activation_loading_horizon", 1),
    ],
)
def test_every_number_has_a_least_value(key, least):
    assert getattr(ParallelConfig(**{key: least}), key) == least
    for value in (least - 1, -7):
        raised(
            DegreeError, lambda v=value: ParallelConfig(**{key: v}), f"{key} must be at least {least}", f"is {value}"
        )


@pytest.mark.parametrize("value", ["2", True, None, [2], -1, -0.5, float("nan"), float("inf")])
def test_what_is_no_amount_of_memory_is_refused(value):
    source = {"activation_host_memory_gib": value}
    raised(ConfigError, lambda: ParallelConfig.of(source), "activation_host_memory_gib must be", repr(value))


@pytest.mark.parametrize(("gib", "num_bytes"), [(0, 0), (2, 2**31), (0.5, 2**29), (1e-12, 1)])
def test_amounts_of_memory_are_given_in_gib(gib, num_bytes):
    assert ParallelConfig(activation_host_memory_gib=gib).activation_host_bytes == num_bytes


def test_any_seed_is_allowed():
    assert ParallelConfig(random_seed=-3).random_seed == -3
    assert ParallelConfig(random_seed=0).random_seed == 0


@pytest.mark.parametrize("precision", ["16-mixed", "bf16", "fp8", "", 32, None, ["bf16-true"]])
def test_an_unknown_precision_is_told_the_known_ones(precision):
    raised(ConfigError, lambda: ParallelConfig(precision=precision), "32-true, bf16-mixed, bf16-true", repr(precision))


def test_block_classes_come_as_a_list_from_json_and_as_nothing_else(tmp_path):
    path = tmp_path / "smp.json"
    path.write_text('{"block_classes": ["LlamaDecoderLayer"]}')
    assert ParallelConfig.of(path) == ParallelConfig(block_classes=("LlamaDecoderLayer",))
    for value in ("LlamaDecoderLayer", [1], 3, None):
        raised(ConfigError, lambda v=value: ParallelConfig.of(block_classes=v), "block_classes", "class names")


@pytest.mark.parametrize("plan", ["llama", ["*.q_proj"], None, 3, {"*.q_proj": None}, {"*.q_proj": 3}, {3: "colwise"}])
def test_a_tensor_plan_of_another_shape_is_refused(plan):
    raised(
        ConfigError,
        lambda: ParallelConfig(tensor_parallel_degree=2, tensor_plan=plan),
        "tensor_plan",
        "auto",
        "pattern",
    )


# -- combinations ---------------------------------------------------------------------------------------------------


def test_experts_are_sharded_over_tensor_peers_too():
    topology = ParallelConfig(tensor_parallel_degree=2, expert_parallel_degree=2, hybrid_shard_degree=4).topology(16)
    assert (topology.shape, topology.data_degree) == ((2, 4, 2), 8)
    assert topology.expert_peers(9) == (9, 11)
    assert topology.expert_shard_peers(9) == (8, 9, 12, 13)
    raised(
        NotBuiltYetError,
        lambda: ParallelConfig(tensor_parallel_degree=2, expert_parallel_degree=2, sequence_parallel=True),
        "expert_parallel_degree=2",
        "Set sequence_parallel=False",
    )


@pytest.mark.parametrize(
    ("key", "degree", "shard_degree", "advice"),
    [
        ("context_parallel_degree", 4, 2, "Use 2"),
        ("context_parallel_degree", 3, 4, "Use 2"),
        ("context_parallel_degree", 2, 1, "Use 1"),
        ("expert_parallel_degree", 8, 4, "Use 4"),
        ("expert_parallel_degree", 4, 6, "Use 3"),
    ],
)
def test_context_and_experts_must_fit_in_the_shard_axis(key, degree, shard_degree, advice):
    message = raised(
        DegreeError,
        lambda: ParallelConfig(**{key: degree, "hybrid_shard_degree": shard_degree}),
        f"must divide hybrid_shard_degree={shard_degree}",
        f"is {degree}",
        advice,
    )
    assert message.startswith(key)


@pytest.mark.parametrize("key", ["sequence_parallel", "loss_parallel"])
def test_what_splits_along_the_tensor_axis_needs_one(key):
    raised(ConfigError, lambda: ParallelConfig(**{key: True}), f"{key}=True needs tensor_parallel_degree > 1")
    assert getattr(ParallelConfig(**{key: True}, tensor_parallel_degree=2), key)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"float8_all_gather": True}, "needs float8_recipe='tensorwise', but it is 'none'"),
        ({"float8_pad_inner_dim": True}, "needs float8_recipe='tensorwise' or 'rowwise', but it is 'none'"),
        ({"te_scaling": {"margin": 1}}, "is for float8_recipe='te-fp8', but it is 'none'"),
    ],
)
def test_options_of_a_recipe_need_it(values, words):
    raised(ConfigError, lambda: ParallelConfig.of(values), next(iter(values)), words)


# -- what is not built ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "beside"),
    [
        ("context_parallel_degree", {"float8_recipe": "te-fp8"}),
        ("expert_parallel_degree", {"float8_recipe": "te-fp8"}),
        ("expert_parallel_degree", {"mlp_tiles": 2}),
    ],
)
def test_parts_of_the_shard_axis_name_what_they_do_not_go_with_yet(key, beside):
    name, value = next(iter(beside.items()))
    make = lambda: ParallelConfig(**{key: 2}, **beside)  # noqa: E731
    message = raised(NotBuiltYetError, make, f"{key}=2", f"{name}={value!r}")
    default = next(field.default for field in dataclasses.fields(ParallelConfig) if field.name == name)
    assert message.endswith(f"Set {name}={default!r}, or {key}=1.")


def test_a_context_lies_in_the_shard_axis():
    topology = ParallelConfig(context_parallel_degree=2, hybrid_shard_degree=4).topology(8)
    assert (topology.shard_degree, topology.context_degree, topology.data_degree) == (4, 2, 4)
    assert ParallelConfig(context_parallel_degree=2).topology(4).data_degree == 2
    raised(DegreeError, lambda: ParallelConfig(context_parallel_degree=4).topology(6), "must divide the world size 6")


def test_experts_lie_in_the_shard_axis_and_share_no_samples():
    topology = ParallelConfig(expert_parallel_degree=2, hybrid_shard_degree=4).topology(8)
    assert (topology.shard_degree, topology.expert_degree, topology.data_degree) == (4, 2, 8)
    raised(DegreeError, lambda: ParallelConfig(expert_parallel_degree=4).topology(6), "must divide the world size 6")


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"expert_parallel_degree": 2, "no_such_key": 1}, UnknownKeyError),
        ({"expert_parallel_degree": True}, ConfigError),
        ({"expert_parallel_degree": 2, "allow_empty_shards": "no"}, ConfigError),
        ({"sm_activation_offloading": True, "activation_loading_horizon": 0}, DegreeError),
        ({"context_parallel_degree": 4, "hybrid_shard_degree": 2}, DegreeError),
        ({"expert_parallel_degree": 2, "sequence_parallel": True}, ConfigError),
    ],
)
def test_a_wrong_request_is_called_wrong_before_it_is_called_not_built(values, error):
    """Otherwise somebody would wait for a release that still refuses."""
    raised(error, lambda: ParallelConfig.of(values))


# -- fitting a world ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "world", "shape"),
    [
        ({}, 8, (1, 8, 1)),
        ({"hybrid_shard_degree": 1}, 8, (8, 1, 1)),
        ({"hybrid_shard_degree": 4}, 8, (2, 4, 1)),
        ({"tensor_parallel_degree": 2}, 8, (1, 4, 2)),
        ({"tensor_parallel_degree": 8}, 8, (1, 1, 8)),
        ({"tensor_parallel_degree": 2, "hybrid_shard_degree": 2}, 8, (2, 2, 2)),
        ({"tensor_parallel_degree": 3}, 6, (1, 2, 3)),
        ({}, 1, (1, 1, 1)),
    ],
)
def test_degrees_become_a_topology(values, world, shape):
    assert ParallelConfig(**values).topology(world).shape == shape


@pytest.mark.parametrize(
    ("values", "world", "words"),
    [
        ({"tensor_parallel_degree": 3}, 8, ["tensor_parallel_degree", "[1, 2, 4, 8]", "the nearest is 2"]),
        ({"tensor_parallel_degree": 16}, 8, ["tensor_parallel_degree", "the nearest is 8"]),
        ({"hybrid_shard_degree": 16}, 8, ["hybrid_shard_degree", "0 .. 8", "is 16", "Start more processes"]),
        ({"hybrid_shard_degree": 3}, 8, ["hybrid_shard_degree=3", "the nearest is 2"]),
        (
            {"hybrid_shard_degree": 8, "tensor_parallel_degree": 2},
            8,
            ["hybrid_shard_degree=8", "tensor_parallel_degree=2", "the nearest is 4"],
        ),
    ],
)
def test_degrees_that_do_not_fit_name_the_keys_the_user_wrote(values, world, words):
    raised(DegreeError, lambda: ParallelConfig(**values).topology(world), *words)
