"""Settings of Accelerate besides parallel degrees, and how its environment variables and files express both.

`accelerate launch` reads a YAML file and passes its contents to the workers as environment variables. If another
launcher starts the job, the same file can be read here: `variables_in` returns the variables that `accelerate launch`
would have exported. This file is pure and does not import Accelerate.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hyperpod_plugins.accelerate.float8_recipes import launched_options
from hyperpod_plugins.errors import ConfigError, NotBuiltYetError

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
_OWN_NAMES: dict[str, str] = {"FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP": "FSDP_TRANSFORMER_CLS_TO_WRAP"}


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
    """Return the variables that `accelerate launch` derives from a configuration file, for `options_in`."""
    variables = {"ACCELERATE_MIXED_PRECISION": str(file.get("mixed_precision") or "no")}
    if file.get("distributed_type") == "FSDP":
        variables["ACCELERATE_USE_FSDP"] = "true"
    for section, prefix in (("fsdp_config", "FSDP_"), ("parallelism_config", ""), ("fp8_config", "FP8_")):
        for key, value in (file.get(section) or {}).items():
            upper = str(key).upper()
            name = upper if upper.startswith(prefix) else prefix + upper
            name = _OWN_NAMES.get(name, name)
            variables[f"ACCELERATE_{name}" if section == "fp8_config" else name] = str(value)
    if file.get("parallelism_config"):
        variables["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    if "FSDP_VERSION" not in variables and "ACCELERATE_USE_FSDP" in variables:
        variables["FSDP_VERSION"] = "1"  # the launcher's default
    backend = (file.get("dynamo_config") or {}).get("dynamo_backend")
    return variables | ({"ACCELERATE_DYNAMO_BACKEND": str(backend)} if backend else {})


def options_in(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the `HyperPodPlugin` arguments that variables of `accelerate launch` ask for; empty without variables.

    The number of replicas is not among them: it follows from the world size, and may change.

    Raises:
        ConfigError: a variable asks for something that is not supported, or has an invalid value.
    """
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
