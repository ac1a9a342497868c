"""`hyperpod plan --model`: its options, which are those of the strategy, and the memory plan that they give."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyperpod_plugins.errors import ConfigError, MissingExtraError, format_list
from hyperpod_plugins.memory.recompute import RECOMPUTE
from hyperpod_plugins.parallel import ParallelConfig
from hyperpod_plugins.parallel.config import PRECISIONS
from hyperpod_plugins.planning.closed_forms import check_numbers
from hyperpod_plugins.planning.memory_plan import GIB, MemoryPlan, exceeded_limits, plan_memory, smallest_degrees
from hyperpod_plugins.planning.state_memory import TrainingShape
from hyperpod_plugins.precision.float8 import FLOAT8_RECIPES

_SHAPE: dict[str, tuple[type, float, str]] = {
    "device_memory_gib": (float, 72.0, "memory of a device that a plan may take"),
    "sequence_length": (int, 4096, "tokens of a sample"),
    "micro_batch_size": (int, 1, "samples that a rank computes at a time"),
}
_NUMBERS = {
    "loss_chunks": "chunks in which the loss is computed; 1: the whole",
    "mlp_tiles": "tiles in which MLPs are computed; 1: the whole sequence",
    "context_parallel_degree": "ranks that a sequence is split over",
    "expert_parallel_degree": "ranks that experts are divided among",
}
_FIXED = {
    "hybrid_shard_degree": "ranks that share a copy of the state; 0: all (default: the smallest degree that fits)",
    "tensor_parallel_degree": "ranks that matrices are split over (default: the smallest degree that fits)",
}
_SWITCHES = {
    "float8_all_gather": "gather weights in float8",
    "param_offload": "parameters, gradients and optimizer state in host memory",
    "optimizer_offload": "optimizer state in host memory",
    "sequence_parallel": "split the residual stream over the tensor degree",
    "loss_parallel": "keep logits split over the tensor degree",
}
_CHOICES: dict[str, tuple[tuple[str, ...], str, str]] = {
    "precision": (PRECISIONS, "bf16-mixed", "precision of the training"),
    "float8_recipe": (FLOAT8_RECIPES, "none", "recipe of linear layers in float8"),
    "activation_checkpointing": (RECOMPUTE, "none", "what backward computes again"),
}
_OF_OFFLOAD = "keep inputs of recomputed blocks in host memory; auto: only where that saves time"
_SIZES = ("hidden_size", "num_hidden_layers")


def add_model_arguments(group: Any) -> None:
    """Add the options of a memory plan; those of the strategy have the names of its options."""
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS}
    group.add_argument(
        "--model", help="folder or config.json of a transformers model, whose degrees give --replicas", **hidden
    )
    for name, (kind, default, text) in _SHAPE.items():
        group.add_argument(_option(name), type=kind, default=default, help=text)
    of_host = "memory of a node that the plans of its ranks may take together (default: no limit)"
    group.add_argument("--host-memory-gib", type=float, help=of_host, **hidden)
    for name, (choices, default, text) in _CHOICES.items():
        group.add_argument(_option(name), choices=choices, default=default, help=text)
    group.add_argument("--activation-offload", nargs="?", const=True, choices=["auto"], help=_OF_OFFLOAD, **hidden)
    for name, text in _NUMBERS.items():
        group.add_argument(_option(name), type=int, default=1, help=text)
    for name, text in _FIXED.items():
        group.add_argument(_option(name), type=int, help=text, **hidden)
    for name, text in _SWITCHES.items():
        group.add_argument(_option(name), action="store_true", help=text)


def refuse_without_model(arguments: argparse.Namespace) -> None:
    """Refuse options of a memory plan where there is no model to plan.

    Raises:
        ConfigError: See above.
    """
    parser = argparse.ArgumentParser()
    add_model_arguments(parser)
    defaults, given = vars(parser.parse_args([])), vars(arguments)
    names = (*_SHAPE, *_CHOICES, *_NUMBERS, *_SWITCHES, *_FIXED, "host_memory_gib", "activation_offload")
    if asked := [_option(name) for name in names if given.get(name) != defaults.get(name)]:
        raise ConfigError(f"{format_list(asked)} without --model has no effect: give --model, or leave it out.")


def plan_of_model(arguments: argparse.Namespace, num_ranks: int) -> tuple[MemoryPlan, str]:
    """The memory plan of `--model`, with the degrees that are given or the smallest that fit, and a line about it.

    Raises:
        ConfigError: The model cannot be planned, an option is out of range, or the plan does not fit.
    """
    given = vars(arguments)
    check_numbers(positive={_option(name): given[name] for name in _SHAPE})
    limit = arguments.device_memory_gib
    chosen = {name: given[name] for name in (*_CHOICES, *_NUMBERS, *_SWITCHES)}
    degrees = {name: given[name] for name in _FIXED if given.get(name) is not None}
    config = ParallelConfig.of(chosen | degrees, activation_offload=given.get("activation_offload") or False)
    if config.precision == "32-true" and config.float8_recipe != "none":
        raise ConfigError(
            f"--float8-recipe {config.float8_recipe} with --precision 32-true: layers in float8 compute all else in "
            "bfloat16. Use --precision bf16-mixed or bf16-true."
        )
    model = model_config(arguments.model)
    training = TrainingShape(micro_batch_size=arguments.micro_batch_size, sequence_length=arguments.sequence_length)
    of_world: dict[str, Any] = {
        "world_size": num_ranks,
        "ranks_per_node": arguments.accelerators_per_node,
        "host_memory_gib": given.get("host_memory_gib"),
    }
    if degrees:
        plan = plan_memory(model, config, training, **of_world)
    else:
        plan = smallest_degrees(model, config, training, device_memory_gib=limit, **of_world)
    found = f"shard {plan.topology.shard_degree}, tensor {plan.topology.tensor_degree}"
    needed = f"({plan.num_parameters:,} parameters, {plan.device / GIB:.1f} GiB a rank, {_named(config)})"
    if not degrees:
        return plan, f"smallest degrees that fit {limit:g} GiB: {found} {needed}"
    missed = exceeded_limits(
        plan,
        device_memory_gib=limit,
        host_memory_gib=of_world["host_memory_gib"],
        ranks_per_node=arguments.accelerators_per_node,
    )
    if missed:
        raise ConfigError(
            f"{found} {needed} do not fit {' and '.join(missed)}; a rank needs, in GiB: {plan}. Give larger degrees, "
            "or none, for the smallest that fit."
        )
    return plan, f"degrees as given, which fit {limit:g} GiB: {found} {needed}"


def _named(config: ParallelConfig) -> str:
    return config.precision if config.float8_recipe == "none" else f"{config.precision}, {config.float8_recipe}"


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def model_config(path: str) -> Any:
    """Read the configuration of a model of transformers, and run none of its code.

    Raises:
        ConfigError: There is none, its sizes are missing or wrong, or transformers does not know its type.
        MissingExtraError: transformers is not installed.
    """
    try:
        from huggingface_hub import errors
        from transformers import AutoConfig
    except ImportError:
        raise MissingExtraError("transformers", "demo", "`hyperpod plan --model`") from None
    of_fields: Any = getattr(errors, "StrictDataclassError", ValueError)  # of newer versions
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, of_fields) as error:
        told = "it does not exist" if not Path(path).exists() else " ".join(str(error).split())
        raise ConfigError(
            f"--model {path} is neither a folder nor a config.json of a transformers model: {told.rstrip('.')}. "
            "Give a folder with a config.json that names a model_type of transformers and its sizes, or such a file."
        ) from None
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if file.is_file() and (missing := _missing(json.loads(file.read_text()), config)):
        raise ConfigError(
            f"--model {path}: {file.name} has no {format_list(missing)}, so the plan would be that of "
            f"{type(config).__name__}'s defaults. Add what is missing."
        )
    return config


def _missing(content: Mapping[str, Any], config: Any) -> list[str]:
    """Sizes that a file does not have, by the names of its type of model, itself or in a part."""
    parts = [content, *(each for each in content.values() if isinstance(each, Mapping))]
    aliases = [type(config).attribute_map, type(config.get_text_config()).attribute_map]
    names = {size: {size, *(each.get(size, size) for each in aliases)} for size in _SIZES}
    return [size for size, known in names.items() if not any(known & part.keys() for part in parts)]
