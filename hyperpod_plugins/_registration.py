"""Registering our names with torch and Lightning: the standard library only, and nothing of this package.

The caller passes the functions behind the names: `comm` its own, `_autoload` functions that import ours when they are
first called.
"""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

STRATEGY_NAME = "hyperpod"


def register_backends(c10d: ModuleType, creators: Mapping[str, Callable[[Any, Any], Any]]) -> None:
    """Register c10d backends by their names, but for those that exist.

    Args:
        c10d: `torch.distributed.distributed_c10d`.
        creators: makes a group from c10d's options and ours, by the name of its backend.
    """
    for name, create in creators.items():
        if name.upper() not in c10d.Backend._plugins:
            c10d.Backend.register_backend(name, create, extended_api=True, devices=["cpu", "cuda"])


def register_strategy(strategies: ModuleType, make: Callable[..., object]) -> None:
    """Put a factory into a Lightning's strategy registry, unless it is there."""
    registry = strategies.StrategyRegistry
    if STRATEGY_NAME not in registry:
        registry.register(STRATEGY_NAME, make, description="Hybrid sharding and tensor parallelism that recover")
