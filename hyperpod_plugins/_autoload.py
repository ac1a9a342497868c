"""Makes `Trainer(strategy="hyperpod")` and `init_process_group("hyperpod")` work with no import.

torch calls `autoload` (entry-point group `torch.backends`) at the end of `import torch`. Neither torch nor
Lightning is slowed down: the c10d backend is announced by a creator that imports ours when it is first used, and the
strategy by a hook that waits for Lightning's registry to be imported.

Only the standard library is imported here, and nothing may be raised: an error would break `import torch` for every
program of the environment. `TORCH_DEVICE_BACKEND_AUTOLOAD=0` turns the entry point off; then
`import hyperpod_plugins` does the same.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

STRATEGY_NAME = "hyperpod"
REGISTRIES = ("lightning.pytorch.strategies", "pytorch_lightning.strategies")


def autoload() -> None:
    """Announce the backend and the strategy; safe to call again."""
    try:
        if "torch" in sys.modules:
            announce_backend()
        for name in REGISTRIES:
            if name in sys.modules:
                register_strategy(sys.modules[name])
        if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
            sys.meta_path.insert(0, _AfterImport())
    except Exception as error:
        warnings.warn(f"hyperpod_plugins could not register itself: {error!r}", stacklevel=2)


def announce_backend() -> None:
    """Register the names of our c10d backends; the real modules are imported when a group is made.

    `smddp` is ours until the vendor's library is imported, which then takes the name over.
    """
    import torch.distributed as dist

    def create_hyperpod(options: Any, backend_options: Any) -> Any:
        from hyperpod_plugins.comm import create_group

        return create_group(options, backend_options)

    def create_smddp(options: Any, backend_options: Any) -> Any:
        from hyperpod_plugins.comm import create_smddp_group

        return create_smddp_group(options, backend_options)

    if dist.is_available():
        for name, create in (("hyperpod", create_hyperpod), ("smddp", create_smddp)):
            if name.upper() not in dist.Backend._plugins:  # pyright: ignore[reportPrivateUsage]
                dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu", "cuda"])


def register_strategy(strategies: ModuleType) -> None:
    """Put a factory into a Lightning's strategy registry; the strategy's module is imported when it is asked for."""

    def make(**options: Any) -> object:
        from hyperpod_plugins.lightning import HyperPodStrategy

        return HyperPodStrategy(**options)

    registry = strategies.StrategyRegistry
    if STRATEGY_NAME not in registry:
        registry.register(STRATEGY_NAME, make, description="Hybrid sharding and tensor parallelism that recover")


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds a registry's module as usual, and registers the strategy once it has been executed."""

    def __init__(self) -> None:
        self._searching: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in REGISTRIES or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """The module's own loader, followed by the registration."""

    def __init__(self, inner: importlib.abc.Loader) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        try:
            register_strategy(module)
        except Exception as error:
            warnings.warn(f"hyperpod_plugins could not register its strategy: {error!r}", stacklevel=2)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
