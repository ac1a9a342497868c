"""`HyperPodPlugin`: configuration of a job with Accelerate, from arguments, files or environment variables."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import yaml

from hyperpod_plugins.accelerate.accelerator import HyperPodAccelerator
from hyperpod_plugins.accelerate.launch_config import AccelerateSettings, options_in, variables_in
from hyperpod_plugins.accelerate.process_state import ResizableJob
from hyperpod_plugins.accelerate.spec import AcceleratorSpec
from hyperpod_plugins.comm import CommOptions
from hyperpod_plugins.env import accelerate_variables, config_path
from hyperpod_plugins.errors import ConfigError, NotBuiltYetError
from hyperpod_plugins.parallel import ParallelConfig
from hyperpod_plugins.parallel.config import refuse_contexts
from hyperpod_plugins.parallel.finite import FiniteCheck, NonFinitePolicy

ConfigSource = ParallelConfig | Mapping[str, Any] | str | Path
_SETTINGS = {field.name for field in dataclasses.fields(AccelerateSettings)}


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
        asked |= options
        settings = AccelerateSettings(**{name: asked.pop(name) for name in _SETTINGS & set(asked)})
        parallel = ParallelConfig.of(source, **asked)
        if settings.fp8 != "off" and parallel.precision == "32-true":
            parallel = ParallelConfig.of(parallel, precision="bf16-mixed")
        if settings.fp8 == "torchao" and parallel.float8_recipe == "none":
            parallel = ParallelConfig.of(parallel, float8_recipe="tensorwise")  # as Accelerate does
        values: dict[str, object] = {
            "config": parallel,
            "settings": settings,
            "comm": comm or CommOptions(),
            "timeout_s": timeout_s,
            "non_finite": non_finite,
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
        return cls(**(given | options))

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
        return HyperPodAccelerator(self._with_precision(None if given is None else str(given)), session, **options)

    # -- checks -------------------------------------------------------------------------------------------------

    def _with_precision(self, given: str | None) -> "HyperPodPlugin":
        """Return this plugin, with the precision that the Accelerator is to have.

        Args:
            given: the argument `mixed_precision`; None for the plugin's own precision, or else that of the variable
                that Accelerate itself would read.
        """
        is_said = self.config.precision != "32-true"
        variables = accelerate_variables()
        if given is not None and is_said and given != self.mixed_precision:
            raise ConfigError(
                f"mixed_precision={given!r} contradicts the plugin's precision={self.config.precision!r} (fp8="
                f"{self.settings.fp8!r}): give one of them, or the same in both."
            )
        name = given or variables.get("ACCELERATE_MIXED_PRECISION", "no")
        if is_said or name == "no":
            return self
        backend = variables.get("ACCELERATE_FP8_BACKEND", "NO")
        chosen = options_in({"ACCELERATE_MIXED_PRECISION": name, "ACCELERATE_FP8_BACKEND": backend})
        fields = {field: getattr(self.settings, field) for field in _SETTINGS}
        config = ParallelConfig.of(self.config, precision=chosen.pop("precision"))
        own: dict[str, Any] = {"comm": self.comm, "timeout_s": self.timeout_s, "non_finite": self.non_finite}
        return HyperPodPlugin(config, **(own | fields | chosen))

    def _check(self) -> None:
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s must be positive, but is {self.timeout_s}")
        FiniteCheck(self.non_finite, waits_anyway=True)  # validates the value
        left_to_accelerate = self.settings.needs_accelerate_fsdp2
        if left_to_accelerate and self.config.tensor_parallel_degree > 1:
            raise NotBuiltYetError(
                f"{' and '.join(left_to_accelerate)} with tensor_parallel_degree={self.config.tensor_parallel_degree} "
                "is not supported: Accelerate's own FSDP2 does the former, but cannot do the latter. Drop one of "
                "them."
            )
        if left_to_accelerate:
            refuse_contexts(self.config, f"{' and '.join(left_to_accelerate)} of HyperPodPlugin")
        if self.settings.fp8 != "off" and self.config.precision != "bf16-mixed":
            raise ConfigError(
                f"fp8={self.settings.fp8!r} keeps parameters in float32 and computes the rest in bfloat16, so it "
                f"excludes precision={self.config.precision!r}. Leave precision out."
            )


def _read(source: ConfigSource | None) -> tuple[ParallelConfig | Mapping[str, Any] | str | Path | None, dict[str, Any]]:
    """Return what `ParallelConfig.of` can read, and the options from what it cannot read: an Accelerate file."""
    if not isinstance(source, str | Path) or Path(source).suffix not in (".yaml", ".yml"):
        return source, {}
    try:
        file = yaml.safe_load(Path(source).read_text())
    except OSError as error:
        raise ConfigError(
            f"the configuration file {str(source)!r} cannot be read ({error.strerror}). Give the path of a file, in an "
            "argument or in HYPERPOD_CONFIG; `hyperpod preset list` shows those that come with the package."
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"the configuration file {str(source)!r} is not YAML: {error}") from None
    if not isinstance(file, dict):
        raise ConfigError(f"the configuration file {str(source)!r} must hold keys of Accelerate, such as fsdp_config")
    return {}, options_in(variables_in(cast("dict[str, Any]", file)))
