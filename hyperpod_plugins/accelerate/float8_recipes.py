"""Accelerate's recipes of float8, from its handlers or its launcher's variables, as options of `HyperPodPlugin`.

What has no counterpart is refused by name. This file imports neither Accelerate nor torchao.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hyperpod_plugins.errors import ConfigError

_PREFIX = "ACCELERATE_FP8_"
_TE_FIELDS = ("margin", "fp8_format", "amax_history_len", "amax_compute_algo")
_TE_OTHERS = {
    "interval": (1, "scales are computed anew in every pass"),
    "use_autocast_during_eval": (False, "evaluations are in bfloat16"),
    "override_linear_precision": ((False, False, False), "all three products of a layer are in float8"),
    "use_mxfp8_block_scaling": (False, "scales of blocks are not served yet"),
}
"""Options of Transformer Engine with the one value that is served, and why."""


def torchao_options(config: Any, module_filter: Callable[..., bool] | None, from_name: Callable[[str], Any]) -> Any:
    """Return the options that an `AORecipeKwargs` asks for.

    Args:
        config: its `Float8LinearConfig`.
        module_filter: its `module_filter_func`.
        from_name: torchao's `Float8LinearConfig.from_recipe_name`.

    Raises:
        ConfigError: the configuration is none of torchao's recipes that this package serves, or emulates float8, or
            there is a filter.
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
    scaling = {name: values[name] for name in _TE_FIELDS if name in values}
    return {"fp8": "te", "float8_recipe": "te-fp8", "te_scaling": scaling}


def launched_options(backend: str, variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the options that variables of `accelerate launch` ask for; absent ones count as its defaults.

    Args:
        backend: `torchao` or `te`.
        variables: variables of the process.

    Raises:
        ConfigError: a variable has an invalid value, or one that is not served.
    """

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
