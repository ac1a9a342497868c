"""Settings of Accelerate besides parallel degrees, and how its environment variables and files express both.

`accelerate launch` reads a YAML file and passes its contents to the workers as environment variables. If another
launcher starts the job, the same file can be read here: `variables_in` returns the variables that `accelerate launch`
would have exported. Recipes of float8, from handlers or these variables, become options of `HyperPodPlugin`;
what has no counterpart is refused by name. This file is pure, and imports neither Accelerate nor torchao.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from hyperpod_plugins.errors import ConfigError, NotBuiltYetError, nearest_name

Fp8 = Literal["off", "torchao", "te"]
StateDictType = Literal["SHARDED_STATE_DICT", "FULL_STATE_DICT"]
PRECISION_OF = {"no": "32-true", "bf16": "bf16-mixed", "fp8": "bf16-mixed"}
"""Maps Accelerate's name of a precision to ours. With fp8, all else is computed in bfloat16."""
_FP8_OF = {"AO": "torchao", "TE": "te", "NO": "torchao"}  # the launcher exports NO if the file names no backend
_DEGREES = {
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "hybrid_shard_degree",
    "PARALLELISM_CONFIG_TP_SIZE": "tensor_parallel_degree",
    "PARALLELISM_CONFIG_CP_SIZE": "context_parallel_degree",
}
_FLAGS = {
    "FSDP_RESHARD_AFTER_FORWARD": "reshard_after_forward",
    "FSDP_OFFLOAD_PARAMS": "param_offload",
    "FSDP_ACTIVATION_CHECKPOINTING": "activation_checkpointing",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "sm_activation_offloading",
}
_AS_WRITTEN = {
    "FP8_AMAX_HISTORY_LENGTH": "FP8_AMAX_HISTORY_LEN",
    "FP8_AMAX_COMPUTE_ALGORITHM": "FP8_AMAX_COMPUTE_ALGO",
}
"""Names of variables as `accelerate config` writes their keys; Accelerate itself does not read them."""
_OWN_NAMES = {"FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP": "FSDP_TRANSFORMER_CLS_TO_WRAP"} | _AS_WRITTEN
_SECTIONS = {"fsdp_config": "FSDP_", "parallelism_config": "PARALLELISM_CONFIG_", "fp8_config": "FP8_"}
"""Sections of a file that are read, with the prefix of their variables."""
_OF_FSDP1 = ("SHARDING_STRATEGY", "BACKWARD_PREFETCH", "FORWARD_PREFETCH", "USE_ORIG_PARAMS", "SYNC_MODULE_STATES")
"""Options of FSDP1, which mean nothing to FSDP2, in Accelerate either."""
_KEYS: dict[str, frozenset[str]] = {
    "fsdp_config": frozenset(
        [
            *_FLAGS,
            *(f"FSDP_{name}" for name in _OF_FSDP1),
            "FSDP_VERSION",
            "FSDP_AUTO_WRAP_POLICY",
            "FSDP_TRANSFORMER_CLS_TO_WRAP",
            "FSDP_MIN_NUM_PARAMS",  # of the policy SIZE_BASED_WRAP, which is refused
            "FSDP_STATE_DICT_TYPE",
            "FSDP_IGNORED_MODULES",
            "FSDP_CPU_RAM_EFFICIENT_LOADING",  # turned off: every rank starts from rank 0's values
        ]
    ),
    "parallelism_config": frozenset(
        [
            *_DEGREES,
            "PARALLELISM_CONFIG_DP_REPLICATE_SIZE",  # follows from the others and the world
            "PARALLELISM_CONFIG_CP_BACKEND",
            "PARALLELISM_CONFIG_CP_COMM_STRATEGY",
            "PARALLELISM_CONFIG_SP_SIZE",
            "PARALLELISM_CONFIG_SP_BACKEND",
            "PARALLELISM_CONFIG_SP_SEQ_LENGTH",
            "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE",
            "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION",
        ]
    ),
    "fp8_config": frozenset(
        [
            "FP8_BACKEND",
            "FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER",
            "FP8_PAD_INNER_DIM",
            "FP8_MARGIN",
            "FP8_INTERVAL",
            "FP8_FORMAT",
            "FP8_AMAX_HISTORY_LEN",
            "FP8_AMAX_COMPUTE_ALGO",
            "FP8_OVERRIDE_LINEAR_PRECISION",
            "FP8_USE_AUTOCAST_DURING_EVAL",
            "FP8_USE_MXFP8_BLOCK_SCALING",
            "FP8_OPT_LEVEL",  # of MS-AMP, which is refused
            "FP8_OPTIMIZATION_LEVEL",
        ]
    ),
}
"""Variables of the keys that each section may have; what they ask for is mapped or refused by `options_in`."""
_ENGINES = {"DEEPSPEED": "deepspeed_config", "MEGATRON_LM": "megatron_lm_config"}
"""Types of jobs that are refused, with their sections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccelerateSettings:
    """Settings of Accelerate besides parallel degrees.

    Raises:
        ConfigError: a value is unknown.
    """

    fp8: Fp8 = "off"
    """Library for matrix products in fp8, `torchao` or Transformer Engine; see `ParallelConfig.float8_recipe`."""
    state_dict_type: StateDictType = "SHARDED_STATE_DICT"
    """What `save_state` writes: one file per rank with its shards, or everything in one file."""

    def __post_init__(self) -> None:
        """Check the values."""
        for name, allowed in (("fp8", get_args(Fp8)), ("state_dict_type", get_args(StateDictType))):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, but is {getattr(self, name)!r}")


def variables_in(file: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that `accelerate launch` derives from a configuration file, for `options_in`.

    Raises:
        ConfigError: a section has a key that Accelerate does not have.
    """
    variables = {"ACCELERATE_MIXED_PRECISION": str(file.get("mixed_precision") or "no")}
    if file.get("distributed_type") == "FSDP":
        variables["ACCELERATE_USE_FSDP"] = "true"
    for engine, section in _ENGINES.items():
        if file.get("distributed_type") == engine or file.get(section):
            variables[f"ACCELERATE_USE_{engine}"] = "true"
    for section, prefix in _SECTIONS.items():
        for key, value in (file.get(section) or {}).items():
            name = _variable_of(str(key), section, prefix)
            variables[f"ACCELERATE_{name}" if section == "fp8_config" else name] = str(value)
    if file.get("parallelism_config"):
        variables["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    if "FSDP_VERSION" not in variables and "ACCELERATE_USE_FSDP" in variables:
        variables["FSDP_VERSION"] = "1"  # the launcher's default
    backend = (file.get("dynamo_config") or {}).get("dynamo_backend")
    return variables | ({"ACCELERATE_DYNAMO_BACKEND": str(backend)} if backend else {})


def _variable_of(key: str, section: str, prefix: str) -> str:
    """The variable of a key of a section, without `ACCELERATE_`.

    Raises:
        ConfigError: Accelerate does not have the key.
    """
    upper = key.upper()
    name = upper if upper.startswith(prefix) else prefix + upper
    name = _OWN_NAMES.get(name, name)
    if name not in _KEYS[section]:
        near = nearest_name(name, _KEYS[section])
        hint = f" Did you mean {near.lower()!r}?" if near else ""
        known = ", ".join(sorted(each.lower() for each in _KEYS[section]))
        raise ConfigError(f"{section} has the key {key!r}, which is unknown.{hint} Known keys: {known}.")
    return name


def options_in(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the `HyperPodPlugin` arguments that variables of `accelerate launch` ask for; empty without variables.

    The number of replicas is not among them: it follows from the world size, and may change.

    Raises:
        ConfigError: a variable asks for something that is not supported, or has an invalid value.
    """
    _refuse_engines(variables)
    options: dict[str, Any] = {}
    if _is_true(variables, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        if _number(variables, "PARALLELISM_CONFIG_SP_SIZE") > 1:
            raise NotBuiltYetError(
                f"PARALLELISM_CONFIG_SP_SIZE={variables['PARALLELISM_CONFIG_SP_SIZE']} asks for DeepSpeed's sequence "
                "parallelism, which this plugin does not serve. Set parallelism_config_sp_size to 1."
            )
        options |= {option: _number(variables, name) for name, option in _DEGREES.items()}
        options["hybrid_shard_degree"] *= max(1, options["context_parallel_degree"])  # which is part of it here
    if _is_true(variables, "ACCELERATE_USE_FSDP"):
        _refuse(variables)
        options |= {option: _is_true(variables, name) for name, option in _FLAGS.items() if name in variables}
        classes = variables.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "")
        if classes:
            options["block_classes"] = tuple(name.strip() for name in classes.split(","))
        if "FSDP_STATE_DICT_TYPE" in variables:
            options["state_dict_type"] = variables["FSDP_STATE_DICT_TYPE"]
    precision = variables.get("ACCELERATE_MIXED_PRECISION")
    if precision is not None:
        options["precision"] = precision_of(precision)
        if precision == "fp8":
            backend = variables.get("ACCELERATE_FP8_BACKEND", "NO").upper()
            if backend not in _FP8_OF:
                raise ConfigError(f"the fp8 backend must be one of AO, TE, but is {backend}")
            options |= launched_options(_FP8_OF[backend], variables)
    return options


def precision_of(name: str) -> str:
    """Return our name of a precision of Accelerate.

    Raises:
        ConfigError: the precision is not supported.
    """
    if name not in PRECISION_OF:
        raise ConfigError(
            f"mixed_precision must be one of {', '.join(PRECISION_OF)} with this plugin, but is {name!r}. "
            "bf16 needs no loss scaling and trains what fp16 does."
        )
    return PRECISION_OF[name]


def _refuse_engines(variables: Mapping[str, str]) -> None:
    """Raise `ConfigError` if a job is to be run by DeepSpeed or Megatron-LM."""
    for engine, section in _ENGINES.items():
        if _is_true(variables, f"ACCELERATE_USE_{engine}"):
            raise ConfigError(
                f"the configuration asks for {engine} (distributed_type or {section}), and this plugin trains with "
                "FSDP2. Use distributed_type: FSDP with fsdp_version: 2, or a preset: `hyperpod preset list`."
            )


def _refuse(variables: Mapping[str, str]) -> None:
    """Raise `ConfigError` if FSDP's variables ask for something that is not supported."""
    version = variables.get("FSDP_VERSION", "1")
    if version != "2":
        raise ConfigError(
            f"fsdp_version is {version}, and this plugin is of FSDP2. Set fsdp_version: 2 in the configuration file "
            "(Accelerate's default is 1), or use a preset: `hyperpod preset list`."
        )
    policy = variables.get("FSDP_AUTO_WRAP_POLICY", "NO_WRAP").upper()
    if policy not in ("TRANSFORMER_BASED_WRAP", "NO_WRAP"):
        raise ConfigError(
            f"fsdp_auto_wrap_policy is {policy}, which has no counterpart here. Use TRANSFORMER_BASED_WRAP; without "
            "fsdp_transformer_layer_cls_to_wrap the layers a model runs one after the other are sharded one by one."
        )
    if variables.get("FSDP_IGNORED_MODULES", "None") != "None":
        raise NotBuiltYetError("fsdp_ignored_modules is not supported: every parameter is sharded. Leave it out.")
    compiler = variables.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper()
    if compiler != "NO":
        raise NotBuiltYetError(
            f"dynamo_backend is {compiler}, but this plugin compiles nothing. Set it to 'no', and call "
            "`block.compile()` on the blocks of the model after `prepare`."
        )


def _is_true(variables: Mapping[str, str], name: str) -> bool:
    value = variables.get(name, "false").lower()
    if value not in ("true", "false", "1", "0", "yes", "no"):
        raise ConfigError(f"{name} must be true or false, but is {variables[name]!r}")
    return value in ("true", "1", "yes")


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name, "1")
    if not text.isdecimal():
        raise ConfigError(f"{name} must be a whole number, but is {text!r}")
    return int(text)


_PREFIX = "ACCELERATE_FP8_"
_DELAYED = {"margin": 0, "fp8_format": "HYBRID", "amax_history_len": 1024, "amax_compute_algo": "most_recent"}
"""Accelerate's defaults of the options of delayed scaling."""
_TE_OTHERS = {
    "interval": (1, "scales are computed anew in every pass"),
    "use_autocast_during_eval": (False, "evaluations are in bfloat16"),
    "override_linear_precision": ((False, False, False), "all three products of a layer are in float8"),
}
"""Options of Transformer Engine with the one value that is served, and why."""


def torchao_options(config: Any, module_filter: Callable[..., bool] | None, from_name: Callable[[str], Any]) -> Any:
    """Return the options that an `AORecipeKwargs` asks for.

    Args:
        config: its `Float8LinearConfig`.
        module_filter: its `module_filter_func`.
        from_name: torchao's `Float8LinearConfig.from_recipe_name`.

    Raises:
        ConfigError: the configuration is not one of the recipes of torchao that this package serves, or emulates
            float8, or there is a filter.
    """
    if module_filter is not None:
        raise ConfigError(
            "AORecipeKwargs(module_filter_func=...) is not supported: the linear layers of the model's blocks are "
            "converted. Name the classes of the blocks with HyperPodPlugin(block_classes=...)."
        )
    if config.emulate:
        raise ConfigError(
            "AORecipeKwargs: Float8LinearConfig(emulate=True) is not supported: on a CPU float8 is emulated in any "
            "case, and on a GPU it never is. Leave it out."
        )
    without = {"enable_fsdp_float8_all_gather": False, "pad_inner_dim": False}
    plain = replace(config, **without)
    for recipe in ("tensorwise", "rowwise"):
        if plain == replace(from_name(recipe), **without):
            return {
                "fp8": "torchao",
                "float8_recipe": recipe,
                "float8_all_gather": config.enable_fsdp_float8_all_gather,
                "float8_pad_inner_dim": config.pad_inner_dim,
            }
    raise ConfigError(
        "AORecipeKwargs(config=...) is neither of torchao's recipes 'tensorwise' and 'rowwise'. Use "
        "Float8LinearConfig.from_recipe_name(...) with one of them, of which enable_fsdp_float8_all_gather and "
        "pad_inner_dim may differ."
    )


def te_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a `TERecipeKwargs` asks for.

    Args:
        values: its fields.

    Raises:
        ConfigError: a field has a value that is not served.
    """
    if str(values.get("backend") or "TE").upper() != "TE":
        raise ConfigError(
            f"FP8RecipeKwargs(backend={values['backend']!r}) is not supported: use TE, or AORecipeKwargs."
        )
    for name, (served, why) in _TE_OTHERS.items():
        if values.get(name, served) != served:
            raise ConfigError(f"TERecipeKwargs: {name}={values[name]!r} is not supported: {why}. Leave it out.")
    if values.get("use_mxfp8_block_scaling"):
        for name, default in _DELAYED.items():
            if values.get(name, default) not in (default, *(("E4M3",) if name == "fp8_format" else ())):
                raise ConfigError(
                    f"TERecipeKwargs: {name}={values[name]!r} is not supported with use_mxfp8_block_scaling=True: "
                    "scales of blocks do not follow earlier passes. Leave it out."
                )
        return {"fp8": "te", "float8_recipe": "te-mxfp8"}
    scaling = {name: values[name] for name in _DELAYED if name in values}
    return {"fp8": "te", "float8_recipe": "te-fp8", "te_scaling": scaling}


def launched_options(backend: str, variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the options that variables of `accelerate launch` ask for; absent ones count as its defaults.

    Args:
        backend: `torchao` or `te`.
        variables: variables of the process.

    Raises:
        ConfigError: a variable has an invalid value, or one that is not served.
    """
    written = {f"ACCELERATE_{name}": f"ACCELERATE_{other}" for name, other in _AS_WRITTEN.items()}
    variables = dict(variables) | {written[name]: value for name, value in variables.items() if name in written}

    def flag(name: str, default: str) -> bool:
        value = variables.get(_PREFIX + name, default).lower()
        if value not in ("true", "false", "1", "0", "yes", "no"):
            raise ConfigError(f"{_PREFIX}{name} must be true or false, but is {value!r}")
        return value in ("true", "1", "yes")

    def number(name: str, default: str) -> int:
        text = variables.get(_PREFIX + name, default)
        if not text.isdecimal():
            raise ConfigError(f"{_PREFIX}{name} must be a whole number, but is {text!r}")
        return int(text)

    if backend == "torchao":
        return {
            "fp8": "torchao",
            "float8_all_gather": flag("ENABLE_FSDP_FLOAT8_ALL_GATHER", "true"),
            "float8_pad_inner_dim": flag("PAD_INNER_DIM", "true"),
        }
    return te_options(
        {
            "margin": number("MARGIN", "0"),
            "interval": number("INTERVAL", "1"),
            "fp8_format": variables.get(f"{_PREFIX}FORMAT", "HYBRID").upper(),
            "amax_history_len": number("AMAX_HISTORY_LEN", "1024"),
            "amax_compute_algo": variables.get(f"{_PREFIX}AMAX_COMPUTE_ALGO", "most_recent").lower(),
            "override_linear_precision": _overridden(variables)
            or tuple(flag(f"OVERRIDE_{product}", "false") for product in ("FPROP", "DGRAD", "WGRAD")),
            "use_autocast_during_eval": flag("USE_AUTOCAST_DURING_EVAL", "false"),
            "use_mxfp8_block_scaling": flag("USE_MXFP8_BLOCK_SCALING", "false"),
        }
    )


def _overridden(variables: Mapping[str, str]) -> str:
    """`override_linear_precision` as a configuration file has it; empty without."""
    text = variables.get(f"{_PREFIX}OVERRIDE_LINEAR_PRECISION", "")
    return text if "true" in text.lower() else ""
