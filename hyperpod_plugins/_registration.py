"""Register our names with torch and Lightning. Imports only the standard library, and nothing from this package.

The caller passes the functions to register: `comm` its own, `_autoload` ones that import ours on first call.
"""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

STRATEGY_NAME = "hyperpod"


def register_backends(c10d: ModuleType, creators: Mapping[str, Callable[[Any, Any], Any]]) -> None:
    """Register c10d backends, skipping names that are already registered.

    Args:
        c10d: `torch.distributed.distributed_c10d`.
        creators: backend name to the function that creates a group from c10d's options and the backend's.
    """
    for name, create in creators.items():
        if name.upper() not in c10d.Backend._plugins:
            c10d.Backend.register_backend(name, create, extended_api=True, devices=["cpu", "cuda"])


def register_strategy(strategies: ModuleType, make: Callable[..., object]) -> None:
    """Add a factory to Lightning's strategy registry, unless one is registered already."""
    registry = strategies.StrategyRegistry
    if STRATEGY_NAME not in registry:
        registry.register(STRATEGY_NAME, make, description="Hybrid sharding and tensor parallelism that recover")
