"""Lightning's precision plugin for parameters that are DTensors on several meshes."""

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.lightning.compat import HalfPrecision, MixedPrecision, Precision, TransformerEnginePrecision
from hyperpod_plugins.parallel import ParallelConfig, clip_grad_norm_, clip_grad_value_
from hyperpod_plugins.parallel.config import PRECISIONS
from hyperpod_plugins.parallel.config import Precision as PrecisionName
from hyperpod_plugins.parallel.local_optimizer import step_locally
from hyperpod_plugins.parallel.unit_watch import reconcile_gradients
from hyperpod_plugins.precision.float8 import Float8Recipe
from hyperpod_plugins.precision.transformer_engine import BLOCK_RECIPES, TeRecipe, TeScaling

_PLAIN = "32-true"
"""Precision of a Trainer that was given none."""


class Float8Precision(Precision):
    """Linear layers in float8, as a precision plugin: `Trainer(strategy="hyperpod", plugins=[Float8Precision()])`.

    It means the strategy's options of the same names, with all else in `precision`. Lightning rejects names of
    precisions that it does not know, so `Trainer(precision="rowwise")` is not possible.

    Args:
        float8_recipe: see `ParallelConfig.float8_recipe`.
        precision: of everything else, `bf16-mixed` or `bf16-true`.
        float8_all_gather: see `ParallelConfig`.
        float8_pad_inner_dim: see `ParallelConfig`.
        te_scaling: see `ParallelConfig`.

    Raises:
        ConfigError: the options are not known, or exclude each other.
    """

    def __init__(
        self,
        float8_recipe: Float8Recipe = "tensorwise",
        *,
        precision: PrecisionName = "bf16-mixed",
        float8_all_gather: bool = False,
        float8_pad_inner_dim: bool = False,
        te_scaling: TeScaling | Mapping[str, Any] | None = None,
    ) -> None:
        self.precision = cast("Any", precision)
        self.options: dict[str, Any] = {
            "precision": precision,
            "float8_recipe": float8_recipe,
            "float8_all_gather": float8_all_gather,
            "float8_pad_inner_dim": float8_pad_inner_dim,
        } | ({} if te_scaling is None else {"te_scaling": te_scaling})
        if float8_recipe == "none":
            raise ConfigError("Float8Precision needs a float8_recipe. For none, write Trainer(precision=...) instead.")
        if precision == _PLAIN:
            raise ConfigError(f"Float8Precision(precision={precision!r}): use 'bf16-mixed' or 'bf16-true'.")
        ParallelConfig.of(self.options)  # validates them

    @override
    def convert_module(self, module: Any) -> Any:
        """Refuse another strategy, which would train without float8."""
        raise ConfigError(
            f"Float8Precision works with strategy='hyperpod' only, and this strategy would train in {self.precision}."
        )


def reconcile_for(model: Any, optimizer: Any) -> None:
    """Call `reconcile_gradients` for an optimizer that is about to step."""
    reconcile_gradients(model, optimizers=[optimizer])


class HyperPodPrecision(Precision):
    """Precision plugin for `32-true`, `bf16-mixed` and `bf16-true`, with gradient clipping for mixed meshes.

    For `bf16-mixed`, FSDP2 gathers parameters in bfloat16 and reduces gradients in float32. Autocast around the step
    keeps operations that need float32 (losses, norms) in float32, as Lightning users expect from this precision.
    """

    def __init__(self, precision: PrecisionName, device_type: str) -> None:
        self.precision = cast("Any", precision)
        self._device_type = device_type
        self.when_fetched: Callable[[], object] = lambda: None
        """Called when a batch has been fetched, before any hook sees it."""
        self.region: Callable[[], AbstractContextManager[None]] = nullcontext
        """Context of a step of the module, in which layers of Transformer Engine compute in float8."""
        self.reconcile: Callable[[Any, Any], object] = reconcile_for
        """Called when a step's gradients have been computed, to ensure that all ranks ran the same FSDP units."""
        self.norm: Tensor | None = None
        """Norm of the step's gradients if they are clipped by norm, else None."""

    @classmethod
    def replacing(
        cls, plugin: Precision, device_type: str, config: ParallelConfig, *, was_chosen: bool
    ) -> tuple["HyperPodPrecision", ParallelConfig]:
        """Create the counterpart of one of Lightning's own plugins, or of a `Float8Precision`.

        Args:
            plugin: created by `Trainer(precision=...)`, whose default is 32-true, or given to the Trainer.
            device_type: device type for autocast.
            config: of the strategy.
            was_chosen: whether the precision of `config` was given to the strategy.

        Returns:
            The counterpart, and the configuration with its precision.

        Raises:
            ConfigError: the precision or kind of plugin has no counterpart, or Trainer and strategy contradict.
        """
        chosen = config.precision if was_chosen else None
        if isinstance(plugin, TransformerEnginePrecision):
            return cls._of_transformer_engine(plugin, device_type, config, chosen)
        if type(plugin) is Float8Precision:
            return cls._of_float8(plugin, device_type, config, chosen)
        if type(plugin) not in (Precision, MixedPrecision, HalfPrecision) or plugin.precision not in PRECISIONS:
            raise ConfigError(
                f"strategy='hyperpod' cannot run with precision {plugin.precision!r} ({type(plugin).__name__}). "
                f"Use Trainer(precision=...) with one of {', '.join(PRECISIONS)}, and no precision plugin but "
                "Float8Precision. For float8, give the strategy a float8_recipe, or use that plugin."
            )
        if chosen is not None and plugin.precision not in (_PLAIN, chosen):
            raise ConfigError(
                f"Trainer(precision={plugin.precision!r}) contradicts the strategy's precision={chosen!r}: "
                "give one of them, or the same in both."
            )
        name = chosen or plugin.precision
        return cls(name, device_type), ParallelConfig.of(config, precision=name)

    @classmethod
    def _of_float8(
        cls, plugin: Float8Precision, device_type: str, config: ParallelConfig, chosen: str | None
    ) -> tuple["HyperPodPrecision", ParallelConfig]:
        """The options of the plugin, which those of the strategy must not contradict."""
        default = ParallelConfig()
        own = {name: value for name in plugin.options if (value := getattr(config, name)) != getattr(default, name)}
        own |= {} if chosen is None else {"precision": chosen}
        meant = ParallelConfig.of(config, **plugin.options)
        for name, value in own.items():
            if value != getattr(meant, name):
                raise ConfigError(
                    f"Float8Precision has {name}={getattr(meant, name)!r}, but the strategy has {value!r}: give one of "
                    "them, or the same in both."
                )
        return cls(meant.precision, device_type), meant

    @classmethod
    def _of_transformer_engine(
        cls, plugin: TransformerEnginePrecision, device_type: str, config: ParallelConfig, chosen: str | None
    ) -> tuple["HyperPodPrecision", ParallelConfig]:
        """`Trainer(precision="transformer-engine")`: weights in bfloat16, linear layers in float8."""
        asked = f"Trainer(precision={plugin.precision!r})"
        instead = "Use the strategy's float8_recipe='te-fp8' with Trainer(precision='bf16-true'), or 'bf16-mixed'"
        if not plugin.weights_dtype == plugin.fallback_compute_dtype == torch.bfloat16:
            raise ConfigError(
                f"strategy='hyperpod' cannot run {asked} with weights in {plugin.weights_dtype} and other layers in "
                f"{plugin.fallback_compute_dtype}: it computes in bfloat16. {instead}."
            )
        names: dict[str, TeRecipe] = {kind: name for name, kind in BLOCK_RECIPES.items()}
        names["DelayedScaling"] = "te-fp8"
        recipe, name = plugin.recipe, names.get(type(plugin.recipe).__name__)
        if name is None or recipe != type(recipe)() or plugin.replace_layers is False:
            raise ConfigError(
                f"strategy='hyperpod' takes no options of {type(plugin).__name__} (replace_layers, or a recipe other "
                f"than {', '.join(names)} with their defaults). {instead}, and its option te_scaling."
            )
        if chosen not in (None, "bf16-true") or config.float8_recipe not in ("none", name):
            raise ConfigError(
                f"{asked} means precision='bf16-true' and float8_recipe={name!r}, but the strategy has "
                f"precision={config.precision!r} and float8_recipe={config.float8_recipe!r}. Leave one of them out."
            )
        config = ParallelConfig.of(config, precision="bf16-true", float8_recipe=name)
        return cls("bf16-true", device_type), config

    @override
    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """Enable autocast for `bf16-mixed`, and the region of float8."""
        is_mixed = self.precision == "bf16-mixed"
        autocast = torch.autocast(self._device_type, dtype=torch.bfloat16, enabled=is_mixed, cache_enabled=False)
        with autocast, self.region():
            yield

    @override
    def convert_input(self, data: Any) -> Any:
        """Convert the floating-point tensors of a batch to bfloat16 for `bf16-true`."""
        self.when_fetched()
        return HalfPrecision("bf16-true").convert_input(data) if self.precision == "bf16-true" else data

    @override
    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Compute gradients, then step the optimizer on local shards."""
        return step_locally(optimizer, partial(self._wrap_closure, model, optimizer, closure), **kwargs)

    @override
    def _wrap_closure(self, model: Any, optimizer: Any, closure: Callable[[], Any]) -> Any:
        """Compute gradients, and ensure that all ranks ran the same units before hooks and clipping see them."""
        result = closure()
        self.norm = None
        self.reconcile(model, optimizer)
        self._after_closure(model, optimizer)
        return result

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Scale gradients so that their norm over all ranks and meshes is at most `clip_val`."""
        self.norm = clip_grad_norm_(self.main_params(optimizer), clip_val)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clamp every element of every gradient."""
        clip_grad_value_(self.main_params(optimizer), clip_val)
