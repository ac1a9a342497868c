"""Translate the arguments of `FullyShardedDataParallel` (FSDP1) to FSDP2. Pure, except that it inspects the model."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, transformer_auto_wrap_policy

from hyperpod_plugins.errors import ConfigError, format_list
from hyperpod_plugins.parallel import ParallelConfig
from hyperpod_plugins.parallel.config import Precision

_KEEPS_GATHERED = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)  # pyright: ignore
_WITHIN_NODE = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)  # pyright: ignore


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpArguments:
    """Arguments of FSDP1 that have a meaning here, with FSDP1's defaults."""

    sharding_strategy: ShardingStrategy | None = None
    cpu_offload: CPUOffload | None = None
    auto_wrap_policy: Callable[..., Any] | ModuleWrapPolicy | CustomPolicy | None = None
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    mixed_precision: MixedPrecision | None = None
    ignored_modules: Iterable[nn.Module] | None = None
    ignored_states: Iterable[Any] | None = None
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    use_orig_params: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """What is done in place of FSDP1."""

    config: ParallelConfig
    notes: tuple[str, ...]
    """Differences from what was asked for, one clause each."""


def translate(asked: ParallelConfig, arguments: FsdpArguments, model: nn.Module, ranks_per_node: int) -> Translation:
    """Merge the arguments into the configuration of `init`, which takes precedence where it does in SMP.

    Raises:
        ConfigError: an argument is not supported.
    """
    for name in ("ignored_modules", "ignored_states"):
        ignored = list(getattr(arguments, name) or ())
        if ignored:
            kinds = format_list(sorted({type(each).__name__ for each in ignored}))
            raise ConfigError(
                f"{name} leaves {kinds} out of sharding, and everything in the model is sharded here. Keep such "
                "modules outside of the model that is wrapped, or leave the argument out."
            )
    notes: list[str] = []
    degree, reshards = _sharding(asked, arguments.sharding_strategy, ranks_per_node, notes)
    precision = _precision(asked, arguments.mixed_precision, notes)
    blocks = _block_classes(arguments.auto_wrap_policy, model, notes) or asked.block_classes
    if arguments.backward_prefetch is not BackwardPrefetch.BACKWARD_PRE:
        notes.append("parameters are prefetched in backward, regardless of backward_prefetch")
    if arguments.forward_prefetch:
        notes.append("parameters are prefetched in forward as FSDP2 does by default, regardless of forward_prefetch")
    if not arguments.use_orig_params:
        notes.append("parameters keep their names and shapes, as with use_orig_params=True")
    offloads = arguments.cpu_offload is not None and arguments.cpu_offload.offload_params
    config = replace(
        asked,
        hybrid_shard_degree=degree,
        reshard_after_forward=reshards,
        precision=precision,
        block_classes=blocks,
        param_offload=asked.param_offload or offloads,
    )
    return Translation(config=config, notes=tuple(notes))


def _sharding(
    asked: ParallelConfig, strategy: ShardingStrategy | None, ranks_per_node: int, notes: list[str]
) -> tuple[int, bool]:
    """Shard degree, and whether parameters are freed between forward and backward."""
    degree = asked.hybrid_shard_degree
    if degree == 0 and asked.tensor_parallel_degree == 1:
        if strategy is ShardingStrategy.NO_SHARD:
            return 1, asked.reshard_after_forward
        return (
            ranks_per_node if strategy in _WITHIN_NODE else 0,
            asked.reshard_after_forward and strategy not in _KEEPS_GATHERED,
        )
    agreeing = (*_WITHIN_NODE, *(() if degree else (ShardingStrategy.FULL_SHARD,)))
    if strategy is not None and strategy not in agreeing:
        notes.append(f"the configuration of init() wins over sharding_strategy={strategy.name}")
    keeps = strategy is ShardingStrategy._HYBRID_SHARD_ZERO2  # pyright: ignore[reportPrivateUsage]
    return degree, asked.reshard_after_forward and not keeps


def _precision(asked: ParallelConfig, policy: MixedPrecision | None, notes: list[str]) -> Precision:
    if policy is None:
        return asked.precision
    if policy.param_dtype not in (None, torch.float32, torch.bfloat16):
        raise ConfigError(
            f"mixed_precision computes in {policy.param_dtype}; allowed are torch.bfloat16 and torch.float32. "
            "bfloat16 needs no scaling of the loss."
        )
    if not policy.cast_forward_inputs and not policy.cast_root_forward_inputs:
        notes.append("inputs of every block are cast to its type")
    if policy.buffer_dtype not in (None, torch.float32):
        notes.append(f"buffers keep their type (buffer_dtype={policy.buffer_dtype})")
    if policy.reduce_dtype not in (None, torch.float32) or (policy.reduce_dtype is None and policy.param_dtype):
        notes.append("gradients are reduced in float32")
    return "bf16-mixed" if policy.param_dtype is torch.bfloat16 else "32-true"


def _block_classes(policy: Any, model: nn.Module, notes: list[str]) -> tuple[str, ...]:
    """Class names of the modules that a wrap policy selects as units.

    Raises:
        ConfigError: it selects none.
    """
    if policy is None:
        notes.append("each layer of a chain in a ModuleList is a unit, as there is no auto_wrap_policy")
        return ()
    wants = _unit_predicate(policy)
    chosen = {id(module) for module in model.modules() if module is not model and wants(module)}
    names = {type(module).__name__ for module in model.modules() if id(module) in chosen}
    if not names:
        classes = format_list(sorted({type(module).__name__ for module in model.modules()}), at_most=12)
        raise ConfigError(
            f"auto_wrap_policy chooses no module of {type(model).__name__}, which contains {classes}. Name one of "
            "them, or leave the policy out."
        )
    others = {type(m).__name__ for m in model.modules() if id(m) not in chosen and m is not model} & names
    if others:
        notes.append(f"all {format_list(sorted(others))} are units, though auto_wrap_policy chooses only some of them")
    return tuple(sorted(names))


def _unit_predicate(policy: Any) -> Callable[[nn.Module], bool]:
    if isinstance(policy, ModuleWrapPolicy):
        classes = tuple(policy._module_classes)  # pyright: ignore[reportPrivateUsage]
        return lambda module: isinstance(module, classes)
    if isinstance(policy, CustomPolicy):
        return lambda module: bool(policy._lambda_fn(module))  # pyright: ignore[reportPrivateUsage]
    if isinstance(policy, partial) and policy.func is transformer_auto_wrap_policy:
        classes = tuple(policy.keywords["transformer_layer_cls"])
        return lambda module: isinstance(module, classes)

    def ask(module: nn.Module) -> bool:
        size = sum(parameter.numel() for parameter in module.parameters())
        return bool(policy(module=module, recurse=False, nonwrapped_numel=size))

    return ask
