"""Parallelism configuration: one frozen object, built from keyword arguments, a dict, or an SMP v2 JSON file.

Keys and their meaning follow the SageMaker model parallelism library (SMP) v2, whose JSON files are accepted
unchanged. Not every combination is supported yet: others raise `NotBuiltYetError`. The keys after
`allow_empty_shards` are specific to this package.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, cast, get_args

from torch.distributed.tensor.parallel import ParallelStyle

from hyperpod_plugins.errors import ConfigError, DegreeError, NotBuiltYetError, UnknownKeyError, nearest_name
from hyperpod_plugins.memory.recompute import RECOMPUTE, Recompute
from hyperpod_plugins.parallel.topology import Topology, nearest_degrees
from hyperpod_plugins.precision.float8 import Float8Recipe, check_float8
from hyperpod_plugins.precision.transformer_engine import DEFAULT_SCALING, TE_RECIPES, TeScaling

Precision = Literal["32-true", "bf16-mixed", "bf16-true"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
DelayedValues = Literal["every_rank", "rank_0"]
DELAYED_VALUES: tuple[DelayedValues, ...] = get_args(DelayedValues)
TensorPlan = Mapping[str, "str | ParallelStyle"]
ContextCommType = Literal["auto", "a2a", "all_gather", "p2p"]
CONTEXT_COMM_TYPES: tuple[ContextCommType, ...] = get_args(ContextCommType)
ALIASES = {
    "cp_comm_type": "context_comm_type",  # of SMP and of Transformer Engine
    "tensor_parallel_seed": "random_seed",
    "activation_offload": "sm_activation_offloading",
    "activation_checkpointing_offload": "sm_activation_offloading",  # of Accelerate
    "offload_params": "param_offload",  # of Accelerate and of FSDP1's `CPUOffload`
    "fsdp_offload_params": "param_offload",
    "cpu_offload": "param_offload",  # of Lightning
    "optimizer_cpu_offload": "optimizer_offload",  # of Megatron
    "offload_optimizer": "optimizer_offload",
}
_RECIPE_KEYS = {
    "fp8": "",
    "fp8_amax_history_len": "amax_history_len",
    "fp8_amax_compute_algo": "amax_compute_algo",
}
"""Keys of HyperPod's recipes, with the field of `TeScaling` that two of them set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Parallel degrees and policies of a training job; `topology(world_size)` applies them to a world.

    Raises:
        ConfigError: a value has the wrong type or is out of range, or two values exclude each other.
        NotBuiltYetError: a value is valid, but this release does not support it.
    """

    hybrid_shard_degree: int = 0
    """Number of ranks that share one copy of the model state; copies are replicated. 0: all data-parallel ranks.
    1: no sharding.
    """
    tensor_parallel_degree: int = 1
    """Number of ranks that each layer's matrices are split over."""
    expert_parallel_degree: int = 1
    """Number of ranks that the experts of a layer are divided among. Part of the shard axis."""
    context_parallel_degree: int = 1
    """Number of ranks that a sequence is split over. Part of the shard axis."""
    context_comm_type: ContextCommType = "auto"
    """How attention of split sequences communicates: heads are exchanged (`a2a`), keys and values are gathered
    (`all_gather`), or go round a ring (`p2p`). `auto`: `a2a` where the degree divides the heads, else `all_gather`.
    """
    random_seed: int = 12345
    """Seed for initializing a model that was built without allocating memory and without a recorded RNG state."""
    sm_activation_offloading: bool | Literal["auto"] = False
    """Keep the inputs of checkpointed blocks on the host, and prefetch them for backward. `auto` decides block by block
    what keeps its activations, is computed again, or waits on the host. Without checkpointing of the model's own, this
    implies `activation_checkpointing="full"`.
    """
    activation_loading_horizon: int = 2
    """Maximum number of blocks whose offloaded inputs are on the device at once."""
    activation_host_memory_gib: float = 0.0
    """Host memory of a rank, in GiB, that may hold offloaded inputs; what does not fit stays on the device. 0: half of
    the rank's share of its host's memory.
    """
    fsdp_cache_flush_warnings: bool = True
    """Warn when the CUDA allocator had to flush its cache: raise the shard degree or lower the batch size."""
    allow_empty_shards: bool = False
    """Allow ranks whose shard of a tensor is empty."""
    precision: Precision = "32-true"
    """`bf16-mixed`: float32 parameters and optimizer state, bfloat16 compute, float32 gradient reduction."""
    float8_recipe: Float8Recipe = "none"
    """Compute the linear layers of the model's blocks in float8: by torchao with one scale for each row (`rowwise`) or
    tensor (`tensorwise`), or by Transformer Engine with delayed scaling (`te-fp8`) or, in MXFP8 or NVFP4, with a scale
    for each block of values (`te-mxfp8`, `te-nvfp4`). Needs a precision of bfloat16 and the extra `fp8` or `te`.
    """
    float8_all_gather: bool = False
    """Gather the weights of these layers in float8, half of the bytes, with the same bits. Needs
    `float8_recipe="tensorwise"`.
    """
    float8_pad_inner_dim: bool = False
    """Pad the inner sides of torchao's products to multiples of 16, as for other numbers of tokens."""
    te_scaling: TeScaling = DEFAULT_SCALING
    """Delayed scaling of `te-fp8`; also a mapping of its fields."""
    tensor_plan: TensorPlan | Literal["auto"] = "auto"
    """Mapping of module-name pattern to style. `auto`: the model's own plan, or else `LLAMA_LIKE_PLAN`."""
    sequence_parallel: bool = False
    """Split the residual stream along the sequence dimension between tensor-parallel regions."""
    loss_parallel: bool = False
    """Keep the logits split over the vocabulary. The loss must then be computed under `loss_parallel_context`."""
    block_classes: tuple[str, ...] = ()
    """Class names of the modules to shard one by one. Empty: the layers that the model runs as a chain."""
    node_collectives: bool | Literal["auto"] = False
    """Gather and reduce in two stages over a shard axis that takes several whole nodes: within nodes, and across them.
    All nodes must have the same number of ranks. `auto`: gather so if that is faster, as measured at the start.
    """
    reshard_after_forward: bool = True
    """Free gathered parameters after forward and gather them again for backward."""
    activation_checkpointing: Recompute | bool = "none"
    """What backward computes again, block by block: nothing, all (`full`, or True), or what is cheap (`selective`)."""
    param_offload: bool = False
    """Keep sharded parameters, their gradients and the optimizer's state in host memory. FSDP2 copies parameters to the
    device unit by unit before it gathers them, and the optimizer steps on the host.
    """
    optimizer_offload: bool = False
    """Keep the optimizer's state in host memory, where the optimizer steps; parameters and gradients stay on the
    device. `param_offload` includes it.
    """
    loss_chunks: int = 1
    """Number of chunks in which a Hugging Face causal language model computes its loss, so that its logits never exist
    as a whole. 1: the whole.
    """
    mlp_tiles: int = 1
    """Number of tiles of the sequence in which MLPs are computed one after the other. 1: the whole sequence."""
    delayed_init: bool = False
    """Build models inside `hyperpod_plugins.delayed_init.delayed_init` without a change of the program: what
    `configure_model` builds (Lightning), and what transformers loads once the Accelerator or the `Session` exists, or
    after `torch.sagemaker.init`.
    """
    delayed_values: DelayedValues = "every_rank"
    """Which ranks compute the values of a model that was built, or loaded, inside `delayed_init`: each its own part, or
    rank 0, which sends the others theirs and alone needs the files of a pretrained model.
    """

    def __post_init__(self) -> None:
        """Check each value, then combinations, then unsupported values."""
        if isinstance(self.activation_checkpointing, bool):
            object.__setattr__(self, "activation_checkpointing", "full" if self.activation_checkpointing else "none")
        for field in dataclasses.fields(self):
            _check_type(field.name, getattr(self, field.name), field.default)
        _check_block_classes(self.block_classes)
        _check_tensor_plan(self.tensor_plan)
        if self.precision not in PRECISIONS:
            raise ConfigError(f"precision must be one of {', '.join(PRECISIONS)}, but is {self.precision!r}")
        if self.activation_checkpointing not in RECOMPUTE:
            raise ConfigError(
                f"activation_checkpointing must be one of {', '.join(RECOMPUTE)}, but is "
                f"{self.activation_checkpointing!r}"
            )
        if self.context_comm_type not in CONTEXT_COMM_TYPES:
            raise ConfigError(
                f"context_comm_type must be one of {', '.join(CONTEXT_COMM_TYPES)}, but is {self.context_comm_type!r}"
            )
        if self.delayed_values not in DELAYED_VALUES:
            raise ConfigError(
                f"delayed_values must be one of {', '.join(DELAYED_VALUES)}, but is {self.delayed_values!r}"
            )
        check_float8(self.float8_recipe)
        minimum = {"hybrid_shard_degree": 0, "random_seed": None}
        for field in dataclasses.fields(self):
            value, low = getattr(self, field.name), minimum.get(field.name, 1)
            if type(field.default) is int and low is not None and value < low:
                raise DegreeError(f"{field.name} must be at least {low}, but is {value}")
            if type(field.default) is float and not 0.0 <= value < math.inf:
                raise ConfigError(f"{field.name} must be 0 or more, but is {value}")
        self._check_combinations()
        self._refuse_what_is_not_built()

    @property
    def activation_host_bytes(self) -> int:
        """`activation_host_memory_gib` in bytes; 0 for the default limit."""
        return math.ceil(self.activation_host_memory_gib * 2**30)

    def topology(self, world_size: int, ranks_per_node: int = 0) -> Topology:
        """Return the topology of a world of `world_size` ranks.

        Raises:
            DegreeError: the degrees do not fit the world; the message names the nearest that do.
        """
        for name in ("tensor_parallel_degree", "expert_parallel_degree", "context_parallel_degree"):
            degree = getattr(self, name)
            if world_size % degree:
                fits = [d for d in range(1, world_size + 1) if world_size % d == 0]
                nearest = min(fits, key=lambda fit, asked=degree: (abs(fit - asked), fit))
                raise DegreeError(
                    f"{name} must divide the world size {world_size}, but is {degree}. "
                    f"It can be one of {fits}; the nearest is {nearest}."
                )
        if self.hybrid_shard_degree > world_size:
            raise DegreeError(
                f"hybrid_shard_degree must lie in 0 .. {world_size} (the world size), but is "
                f"{self.hybrid_shard_degree}. Start more processes, or use 0 for all data-parallel ranks."
            )
        if self.hybrid_shard_degree and world_size % (self.hybrid_shard_degree * self.tensor_parallel_degree):
            raise DegreeError(
                f"hybrid_shard_degree={self.hybrid_shard_degree} x tensor_parallel_degree="
                f"{self.tensor_parallel_degree} must divide the world size {world_size}. "
                f"{nearest_degrees(world_size, self.hybrid_shard_degree, self.tensor_parallel_degree)}"
            )
        return Topology(
            world_size=world_size,
            shard_degree=self.hybrid_shard_degree or world_size // self.tensor_parallel_degree,
            tensor_degree=self.tensor_parallel_degree,
            context_degree=self.context_parallel_degree,
            expert_degree=self.expert_parallel_degree,
            ranks_per_node=ranks_per_node,
            node_collectives=bool(self.node_collectives),
        )

    def _check_combinations(self) -> None:
        for name in ("context_parallel_degree", "expert_parallel_degree"):
            degree = getattr(self, name)
            if self.hybrid_shard_degree and self.hybrid_shard_degree % degree:
                raise DegreeError(
                    f"{name} lies inside the shard axis, so it must divide hybrid_shard_degree="
                    f"{self.hybrid_shard_degree}, but is {degree}. "
                    f"Use {_divisors_up_to(self.hybrid_shard_degree, degree)[-1]}, or raise hybrid_shard_degree."
                )
        if self.tensor_parallel_degree == 1:
            for name in ("sequence_parallel", "loss_parallel"):
                if getattr(self, name):
                    raise ConfigError(
                        f"{name}=True needs tensor_parallel_degree > 1: it splits along the tensor axis. "
                        f"Raise tensor_parallel_degree or drop {name}."
                    )

        self._check_float8_options()
        self._check_te()
        if self.mlp_tiles > 1 and self.activation_checkpointing == "selective":
            raise ConfigError(
                f"mlp_tiles={self.mlp_tiles} cannot be combined with activation_checkpointing='selective': torch does "
                "not recompute tiles within a block of which it keeps results. Use activation_checkpointing='full'."
            )
        if self.mlp_tiles > 1 and self.sequence_parallel:
            raise ConfigError(
                f"mlp_tiles={self.mlp_tiles} cannot be combined with sequence_parallel=True, which splits the sequence "
                "over ranks already. Drop one of them."
            )

    def _check_float8_options(self) -> None:
        if self.float8_all_gather and self.float8_recipe != "tensorwise":
            raise ConfigError(
                f"float8_all_gather=True needs float8_recipe='tensorwise', but it is {self.float8_recipe!r}: only the "
                "scale of a whole tensor can be applied to its shards before they are gathered. Use 'tensorwise', or "
                "leave float8_all_gather out."
            )
        if self.float8_pad_inner_dim and self.float8_recipe == "none":
            raise ConfigError(
                "float8_pad_inner_dim=True needs float8_recipe='tensorwise' or 'rowwise', but it is 'none', so that no "
                "layer computes in float8. Use one of them, or leave float8_pad_inner_dim out."
            )

    def _check_te(self) -> None:
        is_delayed = self.float8_recipe == "te-fp8"
        if self.te_scaling != DEFAULT_SCALING and not is_delayed:
            raise ConfigError(
                f"te_scaling is for float8_recipe='te-fp8', but it is {self.float8_recipe!r}. Use 'te-fp8', or "
                "leave te_scaling out."
            )
        if self.float8_recipe not in TE_RECIPES:
            return
        twice = (
            "its layers would run twice in a step, and lose what they had noted for their next scales"
            if is_delayed
            else "tiles would be computed again in bfloat16, as backward is outside of Transformer Engine's region"
        )
        of_parts = "the second scale of NVFP4 is that of a whole tensor, and ranks would take those of their parts"
        on_host = "no optimizer step on the host has been tried with Transformer Engine's layers"
        others = {
            "tensor_parallel_degree": (self.tensor_parallel_degree > 1 and self.float8_recipe == "te-nvfp4", of_parts),
            "mlp_tiles": (self.mlp_tiles > 1, twice),
            "delayed_init": (self.delayed_init, "its layers are made from the values of those that they replace"),
            "param_offload": (self.param_offload, on_host),
            "optimizer_offload": (self.optimizer_offload, on_host),
            "float8_pad_inner_dim": (self.float8_pad_inner_dim, "padding is that of torchao"),
        }
        asked = [f"{name} ({why})" for name, (is_asked, why) in others.items() if is_asked]
        if asked:
            raise ConfigError(
                f"float8_recipe={self.float8_recipe!r} cannot be combined with {' and '.join(asked)}. Leave "
                f"{asked[0].partition(' ')[0]} out, or use float8_recipe="
                f"{'te-mxfp8' if asked[0].startswith('tensor_parallel_degree') else 'tensorwise'!r}."
            )

    def _refuse_what_is_not_built(self) -> None:
        with_experts = {
            "mlp_tiles": "each tile would exchange tokens with other ranks, and again in backward",
            "sequence_parallel": "the results have not been compared with those of one process",
        }
        is_te = self.float8_recipe in TE_RECIPES
        beside = (
            {"float8_recipe": "no layers of Transformer Engine have been tried with its groups of ranks"}
            if is_te
            else {}
        )
        for name, others in (("expert_parallel_degree", with_experts | beside), ("context_parallel_degree", beside)):
            defaults = {field.name: field.default for field in dataclasses.fields(self)}
            asked = [other for other in others if getattr(self, other) != defaults[other]]
            if getattr(self, name) > 1 and asked:
                together = " and ".join(f"{other}={getattr(self, other)!r}" for other in asked)
                instead = " and ".join(f"{other}={defaults[other]!r}" for other in asked)
                raise NotBuiltYetError(
                    f"{name}={getattr(self, name)} with {together} is valid, but this release does not serve it yet: "
                    f"{'; '.join(dict.fromkeys(others[other] for other in asked))}. Set {instead}, or {name}=1."
                )

    @classmethod
    def of(cls, source: "ParallelConfig | Mapping[str, Any] | str | Path | None" = None, **overrides: Any) -> Self:
        """Build a configuration from another one, a dict, a JSON file or the defaults; keyword arguments override it.

        Raises:
            UnknownKeyError: a key is unknown; the message suggests the nearest known one.
            ConfigError: the file is missing or is not a JSON object, or `source` has an unsupported type.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        if isinstance(source, ParallelConfig):
            values: dict[str, Any] = {name: getattr(source, name) for name in known}
        else:
            values = _canonical(source if isinstance(source, Mapping) else _read(source), known)
        return cls(**(values | _canonical(overrides, known)))


def fields_given(source: "ParallelConfig | Mapping[str, Any] | str | Path | None") -> set[str]:
    """Fields that a source for `ParallelConfig.of` sets, also to their defaults: all those of a `ParallelConfig`."""
    known = {field.name for field in dataclasses.fields(ParallelConfig)}
    if isinstance(source, ParallelConfig):
        return known
    return set(_canonical(source if isinstance(source, Mapping) else _read(source), known))


INSIDE_SHARD_AXIS = ("context_parallel_degree", "expert_parallel_degree")
"""Degrees of parts of the shard axis."""


def refuse_degrees(config: ParallelConfig, names: Sequence[str], what: str) -> None:
    """Raise `NotBuiltYetError` if one of the degrees `names` is above 1, which `what` does not serve yet."""
    for name in names:
        if getattr(config, name) > 1:
            raise NotBuiltYetError(
                f"{name}={getattr(config, name)} is not served yet by {what}. Use {name}=1, or leave the other out."
            )


def _canonical(values: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    """Resolve aliases and reject unknown keys."""
    result: dict[str, Any] = {}
    for key, value in _without_recipe_keys(values).items():
        name = ALIASES.get(key, key)
        if name not in known:
            near = nearest_name(str(key), known | set(ALIASES))
            hint = f" Did you mean {near!r}?" if near else ""
            raise UnknownKeyError(f"unknown configuration key {key!r}.{hint} Known keys: {', '.join(sorted(known))}.")
        if name in result and result[name] != value:
            alias = next(alias for alias, meant in ALIASES.items() if meant == name)
            raise ConfigError(f"{name!r} is given twice, also as the alias {alias!r}, with different values: keep one.")
        match name, value:
            case "block_classes", list():
                result[name] = tuple(cast("list[Any]", value))
            case "te_scaling", Mapping():
                result[name] = TeScaling.of(cast("Mapping[str, Any]", value))
            case _:
                result[name] = value
    return result


def _without_recipe_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the keys `fp8...` of HyperPod's recipes for SMP, which mean Transformer Engine."""
    others = {key: value for key, value in values.items() if key not in _RECIPE_KEYS}
    if len(others) == len(values) or values.get("fp8") is False:
        return others
    if values.get("fp8") is not True:
        raise ConfigError(
            f"fp8 must be true or false (next to {', '.join(_RECIPE_KEYS)}), but is {values.get('fp8')!r}"
        )
    meant: dict[str, Any] = {
        "float8_recipe": "te-fp8",
        "te_scaling": {field: values[key] for key, field in _RECIPE_KEYS.items() if field and key in values},
    }
    twice = [key for key in meant if key in others]
    if twice:
        raise ConfigError(f"fp8 means float8_recipe='te-fp8', and {twice[0]!r} is given, too: keep one.")
    return others | meant


def _read(path: object) -> Mapping[str, Any]:
    if path is None:
        return {}
    if not isinstance(path, str | Path):
        raise ConfigError(
            f"a configuration must be a ParallelConfig, a dict or the path of a JSON file, but is a "
            f"{type(path).__name__}"
        )
    try:
        values = json.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(
            f"the configuration file {str(path)!r} cannot be read ({error.strerror}). "
            "Give the path of a JSON file, in an argument or in HYPERPOD_CONFIG."
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {str(path)!r} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"the configuration file {str(path)!r} must hold one JSON object, not a {type(values).__name__}"
        )
    return values


def _check_type(name: str, value: object, default: object) -> None:
    """Check that integers are whole numbers and booleans are booleans; JSON makes both easy to get wrong."""
    if isinstance(default, bool):
        or_auto = name in ("sm_activation_offloading", "node_collectives")
        if not isinstance(value, bool) and not (or_auto and value == "auto"):
            raise ConfigError(f"{name} must be true or false{' or auto' * or_auto}, but is {value!r}")
    elif isinstance(default, int) and (isinstance(value, bool) or not isinstance(value, int)):
        raise ConfigError(f"{name} must be a whole number, but is {value!r}")
    elif isinstance(default, float) and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ConfigError(f"{name} must be a number, but is {value!r}")


def _check_block_classes(value: object) -> None:
    """Reject a single string: it would be read as one class name per letter."""
    if not isinstance(value, tuple) or not all(isinstance(name, str) for name in cast("tuple[object, ...]", value)):
        raise ConfigError(f"block_classes must be a tuple (JSON: a list) of class names, but is {value!r}")


def _check_tensor_plan(value: object) -> None:
    pairs = cast("Mapping[object, object]", value).items() if isinstance(value, Mapping) else ()
    is_plan = isinstance(value, Mapping) and all(
        isinstance(pattern, str) and isinstance(style, str | ParallelStyle) for pattern, style in pairs
    )
    if value != "auto" and not is_plan:
        raise ConfigError(
            f"tensor_plan must be 'auto' or a mapping of module-name pattern to style (a name or a ParallelStyle "
            f"object), but is {value!r}"
        )


def _divisors_up_to(number: int, limit: int) -> list[int]:
    return [d for d in range(1, min(number, limit) + 1) if number % d == 0]
