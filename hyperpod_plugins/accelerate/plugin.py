"""`HyperPodPlugin`: what a job asks for, in our words, and the objects of Accelerate that say the same."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Self, cast

import torch
import torch.distributed as dist
import yaml
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from hyperpod_plugins.accelerate.accelerator import HyperPodAccelerator
from hyperpod_plugins.accelerate.joining import World
from hyperpod_plugins.accelerate.library import (
    AORecipeKwargs,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    KwargsHandler,
    TERecipeKwargs,
    is_torchao_available,
    is_transformer_engine_available,
)
from hyperpod_plugins.accelerate.parallelism import HyperPodParallelism
from hyperpod_plugins.accelerate.settings import AccelerateSettings, options_in, variables_in
from hyperpod_plugins.comm import CommOptions
from hyperpod_plugins.env import WorkerEnv, accelerate_variables, config_path
from hyperpod_plugins.errors import ConfigError, MissingExtraError, NotBuiltYetError
from hyperpod_plugins.parallel import ParallelConfig, Topology
from hyperpod_plugins.parallel.finite import FiniteCheck, NonFinitePolicy
from hyperpod_plugins.parallel.shard import mixed_precision_policy

Source = ParallelConfig | Mapping[str, Any] | str | Path
_SETTINGS = {field.name for field in dataclasses.fields(AccelerateSettings)}
_PACKAGES = {"torchao": "torchao", "te": "transformer_engine"}


@dataclass(frozen=True, init=False)
class HyperPodPlugin:
    """Hybrid sharding, tensor parallelism and the backend `hyperpod` for a program that uses Accelerate.

    Args:
        config: a `ParallelConfig`, a dict, the path of an SMP v2 JSON file, or of a configuration file of Accelerate
            (YAML). Default: the file named by `HYPERPOD_CONFIG`, else hybrid sharding over all ranks.
        comm: collective library to use, and whether a fallback is allowed.
        timeout_s: seconds after which a collective that does not complete fails.
        non_finite: what `optimizer.step()` does where a loss of any rank that went through `accelerator.backward`, or
            the norm that `accelerator.clip_grad_norm_` has found, is infinite or not a number: "stop" raises
            `NonFiniteError` on all ranks, with nothing updated; "skip" leaves the step out; "warn" goes on; "off" does
            not look. "auto" is "stop" on CPU, and "off" elsewhere, where the host would have to wait for the device.
            A Session has an option of its own.
        **options: fields of `ParallelConfig` and of `AccelerateSettings`; they win over `config`.

    Raises:
        ConfigError: unknown options, impossible values or combinations.
    """

    config: ParallelConfig
    """Degrees and policies."""
    settings: AccelerateSettings
    """What Accelerate's own parts are asked to do."""
    comm: CommOptions
    """Collective library."""
    timeout_s: float
    """Seconds after which a collective that does not complete fails."""
    non_finite: NonFinitePolicy
    """What is done about a step that is not finite."""

    def __init__(
        self,
        config: Source | None = None,
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
        """Read the file of `HYPERPOD_CONFIG`; where there is none, what `accelerate launch` exports, if anything.

        Args:
            **options: arguments of the constructor; they win over both.
        """
        given = {} if config_path() else options_in(accelerate_variables())
        return cls(**(given | options))

    # -- what Accelerate is given -------------------------------------------------------------------------------

    @property
    def topology(self) -> Topology:
        """Degrees and rank arithmetic in the world of the process group, or, before it is joined, of the launcher.

        Raises:
            DegreeError: the degrees do not fit it.
        """
        env = WorkerEnv.from_environ()
        world_size = dist.get_world_size() if dist.is_initialized() else env.world_size
        return self.config.topology(world_size, ranks_per_node=env.local_world_size)

    @property
    def mixed_precision(self) -> str:
        """Accelerate's name of the precision; `bf16-true` is not mixed."""
        return "fp8" if self.settings.fp8 != "off" else "bf16" if self.config.precision == "bf16-mixed" else "no"

    @property
    def parallelism_config(self) -> HyperPodParallelism:
        """Accelerate's sizes of the mesh, and the mesh; its groups can lose members and be built again."""
        return HyperPodParallelism.of(self.topology)

    @property
    def fsdp_plugin(self) -> FullyShardedDataParallelPlugin:
        """FSDP2 as Accelerate configures it; reduces gradients in float32, where Accelerate's default is bfloat16."""
        return FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=self.config.reshard_after_forward,
            mixed_precision_policy=mixed_precision_policy(self.config),
            cpu_offload=self.offload_policy,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=list(self.config.block_classes) or None,
            state_dict_type=self.settings.state_dict_type,
            activation_checkpointing=self.settings.activation_checkpointing,
            activation_checkpointing_offload=self.settings.activation_checkpointing_offload,
            cpu_ram_efficient_loading=False,  # values come from rank 0 anyway, and only it would have any
        )

    @property
    def offload_policy(self) -> OffloadPolicy:
        """Where parameters live between uses; pinned memory only where there is a device that copies from it."""
        if not self.settings.offload_params:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=torch.cuda.is_available())

    @property
    def process_group_kwargs(self) -> InitProcessGroupKwargs:
        """The backend `hyperpod` and its timeout."""
        return InitProcessGroupKwargs(backend="hyperpod", timeout=timedelta(seconds=self.timeout_s))

    @property
    def fp8_handler(self) -> AORecipeKwargs | TERecipeKwargs | None:
        """Accelerate's recipe for fp8, or None.

        Raises:
            MissingExtraError: the library asked for is not installed.
            ConfigError: this machine has no matrix units for fp8.
        """
        if self.settings.fp8 == "off":
            return None
        is_here = is_torchao_available if self.settings.fp8 == "torchao" else is_transformer_engine_available
        if not is_here():
            extra = "fp8" if self.settings.fp8 == "torchao" else "te"
            raise MissingExtraError(_PACKAGES[self.settings.fp8], extra, f"fp8={self.settings.fp8!r}")
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
            what = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
            raise ConfigError(
                f"fp8={self.settings.fp8!r} needs GPUs of compute capability 8.9 or higher, but there is {what} here. "
                "Use mixed_precision='bf16' (preset hsdp-1node)."
            )
        return AORecipeKwargs() if self.settings.fp8 == "torchao" else TERecipeKwargs()

    @property
    def kwargs_handlers(self) -> list[KwargsHandler]:
        """All handlers, for `Accelerator(kwargs_handlers=...)`."""
        fp8 = self.fp8_handler
        return [self.process_group_kwargs, *([] if fp8 is None else [fp8])]

    def accelerator(self, *, session: World | None = None, **options: Any) -> HyperPodAccelerator:
        """Join the process group (one that has been joined already is used) and make the Accelerator.

        Args:
            session: a `Session` whose loop the Accelerator is for; the Accelerator follows it when the job changes its
                size.
            **options: arguments of `accelerate.Accelerator`, but for those that this plugin makes itself.

        Raises:
            ConfigError: an argument contradicts the plugin; another Accelerator was made before without it.
        """
        given = options.pop("mixed_precision", None)
        return HyperPodAccelerator(self._with_precision(None if given is None else str(given)), session, **options)

    # -- checks -------------------------------------------------------------------------------------------------

    def _with_precision(self, given: str | None) -> "HyperPodPlugin":
        """This plugin with the precision that the Accelerator is to have.

        Args:
            given: the argument `mixed_precision`; None: what the plugin says, else the variable that Accelerate
                itself would read.
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
        FiniteCheck(self.non_finite, waits_anyway=True)  # refuses other values
        left_to_accelerate = self.settings.of_accelerate
        if left_to_accelerate and self.config.tensor_parallel_degree > 1:
            raise NotBuiltYetError(
                f"{' and '.join(left_to_accelerate)} with tensor_parallel_degree={self.config.tensor_parallel_degree} "
                "is not served: Accelerate's own FSDP2 does the former, and cannot do the latter. Drop one of them."
            )
        if self.settings.fp8 != "off" and self.config.precision != "bf16-mixed":
            raise ConfigError(
                f"fp8={self.settings.fp8!r} keeps parameters in float32 and computes the rest in bfloat16, so it "
                f"excludes precision={self.config.precision!r}. Leave precision out."
            )


def _read(source: Source | None) -> tuple[ParallelConfig | Mapping[str, Any] | str | Path | None, dict[str, Any]]:
    """What `ParallelConfig.of` can read, and options from what it cannot: a file of Accelerate."""
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
