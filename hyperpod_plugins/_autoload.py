"""Entry points of torch: make Lightning's strategy, the c10d backends and torchrun's rendezvous `hyperpod` known.

`Trainer(strategy="hyperpod")`, `init_process_group("hyperpod")` and `torchrun --rdzv-backend=hyperpod` then work in
programs that do not import this package. torch calls `autoload` (entry-point group `torch.backends`) at the end of
`import torch`, and `rendezvous_creator` (group `torchrun.handlers`) when its rendezvous package is imported. This slows
down neither torch nor Lightning: the c10d backends are registered with functions that import ours on first use, and the
strategy by an import hook that waits for Lightning's strategy registry.

This module imports only the standard library and must not raise: an error would break `import torch` for every
program in the environment. With `TORCH_DEVICE_BACKEND_AUTOLOAD=0`, torch does not call the entry point;
`import hyperpod_plugins` then does the same.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from hyperpod_plugins import _registration


def autoload() -> None:
    """Register the backends and the strategy, now or when c10d or Lightning is imported. Idempotent."""
    for name in AFTER_IMPORT:
        if name in sys.modules:
            run_quietly(name)
    if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def run_quietly(name: str) -> None:
    """Run the hook of `AFTER_IMPORT` for an imported module; if it fails, only warn."""
    try:
        AFTER_IMPORT[name](sys.modules[name])
    except Exception as error:
        with contextlib.suppress(Warning):  # a program may have turned warnings into errors
            warnings.warn(f"hyperpod_plugins could not register itself in {name}: {error!r}", stacklevel=2)


def announce_backends(c10d: ModuleType) -> None:
    """Register our c10d backends by name; their modules are imported when a group is created.

    `smddp` is ours until the vendor's library is imported and registers its own.
    """

    def create_hyperpod(options: Any, backend_options: Any) -> Any:
        from hyperpod_plugins.comm import create_group

        return create_group(options, backend_options)

    def create_smddp(options: Any, backend_options: Any) -> Any:
        from hyperpod_plugins.comm import create_smddp_group

        return create_smddp_group(options, backend_options)

    _registration.register_backends(c10d, {"hyperpod": create_hyperpod, "smddp": create_smddp})


def register_strategy(strategies: ModuleType) -> None:
    """Add a factory to Lightning's strategy registry; the strategy's module is imported on first use.

    Args:
        strategies: `lightning.pytorch.strategies` or `pytorch_lightning.strategies`.
    """

    def make(**options: Any) -> object:
        from hyperpod_plugins.lightning import HyperPodStrategy

        return HyperPodStrategy(**options)

    _registration.register_strategy(strategies, make)


def rendezvous_creator() -> Callable[[Any], Any]:
    """Return the function that creates torchrun's rendezvous `hyperpod` (entry-point group `torchrun.handlers`).

    torch calls this whenever its rendezvous package is imported; ours is imported on first use.
    """
    return _create_rendezvous


def _create_rendezvous(parameters: Any) -> Any:
    from hyperpod_plugins.elastic.rendezvous.handler import create_rendezvous

    return create_rendezvous(parameters)


AFTER_IMPORT: dict[str, Callable[[ModuleType], None]] = {
    "torch.distributed.distributed_c10d": announce_backends,
    "lightning.pytorch.strategies": register_strategy,
    "pytorch_lightning.strategies": register_strategy,
}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Import hook: finds the modules in `AFTER_IMPORT` as usual, and runs their hooks once they are imported."""

    def __init__(self) -> None:
        self._searching: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in AFTER_IMPORT or fullname in self._searching:
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
    """The module's own loader, followed by its hook."""

    def __init__(self, inner: importlib.abc.Loader) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        run_quietly(module.__name__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
