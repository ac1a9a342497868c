"""`HyperPodPlugin`: configuration of a job with Accelerate, from arguments, files or environment variables."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, cast

import yaml

from hyperpod_plugins.accelerate.accelerator import HyperPodAccelerator
from hyperpod_plugins.accelerate.compat import AORecipeKwargs, TERecipeKwargs
from hyperpod_plugins.accelerate.launch_config import (
    AccelerateSettings,
    options_in,
    te_options,
    torchao_options,
    variables_in,
)
from hyperpod_plugins.accelerate.process_state import ResizableJob
from hyperpod_plugins.accelerate.spec import AcceleratorSpec
from hyperpod_plugins.comm import CommOptions
from hyperpod_plugins.env import accelerate_variables, config_path
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.parallel import ParallelConfig
from hyperpod_plugins.parallel.config import fields_given
from hyperpod_plugins.parallel.finite import FiniteCheck, NonFinitePolicy
from hyperpod_plugins.precision.transformer_engine import DEFAULT_SCALING, TE_RECIPES

ConfigSource = ParallelConfig | Mapping[str, Any] | str | Path
_OF_RECIPES = {"float8_all_gather", "float8_pad_inner_dim", "te_scaling"}
_OF_FLOAT8 = ("float8_recipe", "float8_all_gather", "float8_pad_inner_dim", "te_scaling")
_SETTINGS = {field.name for field in dataclasses.fields(AccelerateSettings)}

_DEFAULTS = ParallelConfig()


@dataclass(frozen=True, init=False)
class HyperPodPlugin(AcceleratorSpec):
    """Hybrid sharding, tensor parallelism and the backend `hyperpod` for a program that uses Accelerate.

    Args:
        config: a `ParallelConfig`, a dict, or the path of an SMP v2 JSON file or of an Accelerate configuration file
            (YAML). Default: the file named by `HYPERPOD_CONFIG`, else hybrid sharding over all ranks.
        comm: collective library to use, and whether a fallback is allowed.
        timeout_s: seconds after which a collective that does not complete fails.
        non_finite: what `optimizer.step()` does if a loss of any rank in `accelerator.backward`, the norm computed by
            `accelerator.clip_grad_norm_`, or a gradient is infinite or NaN. "stop" raises `NonFiniteError` on all
            ranks before anything is updated, "skip" skips the step, "warn" warns and continues, and "off" does not
            check. "auto" is "stop" on CPU, and "off" elsewhere, where the host would have to wait for the device. With
            a `Session`, use the option of `Session.train` instead.
        **options: fields of `ParallelConfig` and of `AccelerateSettings`; they override those of `config`.

    Raises:
        ConfigError: unknown options, invalid values or combinations.
    """

    _told: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    """Options of float8 that the program itself has given, not the launcher or its file."""

    def __init__(
        self,
        config: ConfigSource | None = None,
        *,
        comm: CommOptions | None = None,
        timeout_s: float = 1800.0,
        non_finite: NonFinitePolicy = "auto",
        **options: Any,
    ) -> None:
        source, asked = _read(config_path() if config is None else config)
        told = set(options) | (set(source) if isinstance(source, Mapping) else set())
        if "float8_recipe" in options:
            asked = _without_details(asked)
        others = set(_OF_FLOAT8) - set(asked) - told
        asked |= options
        settings = AccelerateSettings(**{name: asked.pop(name) for name in _SETTINGS & set(asked)})
        later = {name: asked.pop(name) for name in _OF_RECIPES & set(asked)}  # need the recipe that `fp8` may imply
        parallel = ParallelConfig.of(source, **asked)
        told |= {name for name in others if getattr(parallel, name) != getattr(_DEFAULTS, name)}
        if settings.fp8 != "off" and parallel.precision == "32-true":
            _refuse_float32(settings, options, source)
            parallel = ParallelConfig.of(parallel, precision="bf16-mixed")
        if settings.fp8 != "off" and parallel.float8_recipe == "none":
            recipe = "te-fp8" if settings.fp8 == "te" else "tensorwise"  # as Accelerate does
            parallel = ParallelConfig.of(parallel, float8_recipe=recipe)
        if later:
            parallel = ParallelConfig.of(parallel, **later)
        values: dict[str, object] = {
            "config": parallel,
            "settings": settings,
            "comm": comm or CommOptions(),
            "timeout_s": timeout_s,
            "non_finite": non_finite,
            "_told": _names_of_float8(told, settings),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check()

    @classmethod
    def from_environ(cls, **options: Any) -> Self:
        """Create a plugin from the file named by `HYPERPOD_CONFIG`, or else from what `accelerate launch` exports.

        Args:
            **options: arguments of the constructor; they override both.
        """
        given = {} if config_path() else options_in(accelerate_variables())
        if "float8_recipe" in options:
            given = _without_details(given)
        if "fp8" in options and given.get("precision") == "32-true":
            del given["precision"]  # the launcher's default; fp8 of the program has its own
        plugin = cls(**(given | options))
        object.__setattr__(plugin, "_told", plugin._told - (set(given) - set(options)))
        return plugin

    # -- the Accelerator ---------------------------------------------------------------------------------------------

    def accelerator(self, *, session: ResizableJob | None = None, **options: Any) -> HyperPodAccelerator:
        """Join the process group, unless it has been joined already, and create the Accelerator.

        Args:
            session: the `Session` whose loop uses the Accelerator, which then follows changes of the job's size.
            **options: arguments of `accelerate.Accelerator`, except those that this plugin creates itself.

        Raises:
            ConfigError: an argument contradicts the plugin, or another Accelerator was created earlier without it.
        """
        given = options.pop("mixed_precision", None)
        plugin = self._with_precision(None if given is None else str(given))
        handlers: list[Any] = options.get("kwargs_handlers") or []
        if any(type(each).__name__ == "MSAMPRecipeKwargs" for each in handlers):
            raise ConfigError("MSAMPRecipeKwargs is not supported. Use AORecipeKwargs or TERecipeKwargs.")
        recipes = [each for each in handlers if isinstance(each, AORecipeKwargs | TERecipeKwargs)]
        if recipes:
            options["kwargs_handlers"] = [each for each in handlers if not any(each is one for one in recipes)]
            plugin = plugin._with_recipe(*recipes)
        return HyperPodAccelerator(plugin, session, **options)

    # -- checks -------------------------------------------------------------------------------------------------

    def _with_precision(self, given: str | None) -> "HyperPodPlugin":
        """Return this plugin, with the precision that the Accelerator is to have.

        Args:
            given: the argument `mixed_precision`; None for the plugin's own precision, or else that of the variable
                that Accelerate itself would read.
        """
        is_said = self.config.precision != "32-true"
        variables = accelerate_variables()
        own_names = (self.mixed_precision, *(("fp8",) if self.config.float8_recipe != "none" else ()))
        if given is not None and is_said and given not in own_names:
            raise ConfigError(
                f"mixed_precision={given!r} contradicts the plugin's precision={self.config.precision!r} (fp8="
                f"{self.settings.fp8!r}): give one of them, or the same in both."
            )
        name = given or variables.get("ACCELERATE_MIXED_PRECISION", "no")
        if is_said or name == "no":
            return self
        of_fp8 = {key: value for key, value in variables.items() if key.startswith("ACCELERATE_FP8_")}
        chosen = options_in(of_fp8 | {"ACCELERATE_MIXED_PRECISION": name})
        if self.config.float8_recipe != "none":  # the plugin says more than the name of the precision
            chosen = {"precision": chosen["precision"]}
        return self._with({name: value for name, value in chosen.items() if name not in self._told})

    def _with_recipe(self, handler: Any, *others: Any) -> "HyperPodPlugin":
        """Return this plugin with what a recipe of Accelerate asks for.

        Args:
            handler: an `AORecipeKwargs` or `TERecipeKwargs`.
            *others: more of them.

        Raises:
            ConfigError: there are several, or it is not served, or the plugin's precision is another one, or options
                that the program gave the plugin are.
        """
        if others:
            raise ConfigError("kwargs_handlers has several recipes of fp8. Give one of them.")
        if isinstance(handler, TERecipeKwargs):
            asked = te_options(vars(handler))
        else:
            from torchao.float8 import Float8LinearConfig  # which the handler has imported

            asked = torchao_options(handler.config, handler.module_filter_func, Float8LinearConfig.from_recipe_name)
        name, recipe = type(handler).__name__, self.config.float8_recipe
        if recipe == "none":
            raise ConfigError(
                f"kwargs_handlers has {name}, but the precision is not fp8. Give mixed_precision='fp8', too, or leave "
                "it out."
            )
        if self.settings.fp8 == "te" and asked["fp8"] != "te":
            raise ConfigError(f"{name} is for torchao, and the plugin has fp8='te'. Give one of them.")
        config = dataclasses.replace(
            self.config,
            float8_recipe=asked["float8_recipe"],
            float8_all_gather=False,
            float8_pad_inner_dim=False,
            te_scaling=DEFAULT_SCALING,
        )
        plugin = self._with(asked, config)
        for option in ("fp8", *_OF_FLOAT8):
            wanted, own = plugin._option(option), self._option(option)
            if option in self._told and wanted != own:
                raise ConfigError(
                    f"{name} asks for {option}={wanted!r}, and the plugin for {own!r}. Give one of them, or the same "
                    "in both."
                )
        return plugin

    def _option(self, name: str) -> Any:
        return getattr(self.settings if name in _SETTINGS else self.config, name)

    def _with(self, asked: Mapping[str, Any], config: ParallelConfig | None = None) -> "HyperPodPlugin":
        """Return this plugin with other options, and with another configuration under them."""
        fields = {field: getattr(self.settings, field) for field in _SETTINGS}
        own: dict[str, Any] = {"comm": self.comm, "timeout_s": self.timeout_s, "non_finite": self.non_finite}
        plugin = HyperPodPlugin(self.config if config is None else config, **(own | fields | dict(asked)))
        object.__setattr__(plugin, "_told", self._told)
        return plugin

    def _check(self) -> None:
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s must be positive, but is {self.timeout_s}")
        FiniteCheck(self.non_finite, waits_anyway=True)  # validates the value
        of_te = self.config.float8_recipe in TE_RECIPES
        if self.settings.fp8 != "off" and of_te != (self.settings.fp8 == "te"):
            raise ConfigError(
                f"fp8={self.settings.fp8!r} contradicts float8_recipe={self.config.float8_recipe!r}: give one of them."
            )
        if self.settings.fp8 != "off" and self.config.precision != "bf16-mixed":
            raise ConfigError(
                f"fp8={self.settings.fp8!r} keeps parameters in float32 and computes the rest in bfloat16, so it "
                f"excludes precision={self.config.precision!r}. Leave precision out."
            )


def _refuse_float32(settings: AccelerateSettings, options: Mapping[str, Any], source: ConfigSource | None) -> None:
    """Refuse fp8 where the program, or its JSON file, says float32, as layers in fp8 compute all else in bfloat16.

    Raises:
        ConfigError: see above.
    """
    in_source = set[str]() if isinstance(source, ParallelConfig) else fields_given(source)
    if "precision" in options or "precision" in in_source:
        raise ConfigError(
            f"fp8={settings.fp8!r} contradicts precision='32-true': it keeps parameters in float32, and computes the "
            "rest in bfloat16. Use precision='bf16-mixed', or leave precision or fp8 out."
        )


def _without_details(given: dict[str, Any]) -> dict[str, Any]:
    """What a launcher or its file asks for, without the options of the recipe that it implies: there is another one."""
    return {name: value for name, value in given.items() if name == "float8_recipe" or name not in _OF_FLOAT8}


def _names_of_float8(told: set[str], settings: AccelerateSettings) -> frozenset[str]:
    names = told & set(_OF_FLOAT8)
    return frozenset(names | {"fp8"} if "fp8" in told and settings.fp8 != "off" else names)


def _read(source: ConfigSource | None) -> tuple[ParallelConfig | Mapping[str, Any] | str | Path | None, dict[str, Any]]:
    """Return what `ParallelConfig.of` can read, and the options from what it cannot read: an Accelerate file."""
    if isinstance(source, str | Path) and Path(source).suffix in (".yaml", ".yml"):
        return {}, options_in(variables_in(_accelerate_file(source)))
    return source, {}


def _accelerate_file(path: str | Path) -> dict[str, Any]:
    """Read an Accelerate configuration file.

    Raises:
        ConfigError: it cannot be read, or is not a YAML file with keys.
    """
    try:
        content = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(
            f"the configuration file {str(path)!r} cannot be read ({error.strerror}). Give the path of a file, in an "
            "argument or in HYPERPOD_CONFIG; `hyperpod preset list` shows those that come with the package."
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"the configuration file {str(path)!r} is not YAML: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"the configuration file {str(path)!r} must hold keys of Accelerate, such as fsdp_config")
    return cast("dict[str, Any]", content)
