"""Makes `Trainer(strategy="hyperpod")` and `init_process_group("hyperpod")` work with no import.

torch calls `autoload` (entry-point group `torch.backends`) at the end of `import torch`. Neither torch nor
Lightning is slowed down: the c10d backend is announced by a creator that imports ours when it is first used, and the
strategy by a hook that waits for Lightning's registry to be imported.

Only the standard library is imported here, and nothing may be raised: an error would break `import torch` for every
program of the environment. `TORCH_DEVICE_BACKEND_AUTOLOAD=0` turns the entry point off; then
`import hyperpod_plugins` does the same.
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
    """Announce the backends and the strategy, now or when what they belong to is imported; safe to call again."""
    for name in AFTER_IMPORT:
        if name in sys.modules:
            run_quietly(name)
    if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def run_quietly(name: str) -> None:
    """Do what is to be done after the import of a module; where that fails, warn and go on."""
    try:
        AFTER_IMPORT[name](sys.modules[name])
    except Exception as error:
        with contextlib.suppress(Warning):  # a program may have turned warnings into errors
            warnings.warn(f"hyperpod_plugins could not register itself in {name}: {error!r}", stacklevel=2)


def announce_backends(c10d: ModuleType) -> None:
    """Register the names of our c10d backends; the real modules are imported when a group is made.

    `smddp` is ours until the vendor's library is imported, which then takes the name over.
    """

    def create_hyperpod(options: Any, backend_options: Any) -> Any:
        from hyperpod_plugins.comm import create_group

        return create_group(options, backend_options)

    def create_smddp(options: Any, backend_options: Any) -> Any:
        from hyperpod_plugins.comm import create_smddp_group

        return create_smddp_group(options, backend_options)

    _registration.register_backends(c10d, {"hyperpod": create_hyperpod, "smddp": create_smddp})


def register_strategy(strategies: ModuleType) -> None:
    """Put a factory into a Lightning's strategy registry; the strategy's module is imported when it is asked for."""

    def make(**options: Any) -> object:
        from hyperpod_plugins.lightning import HyperPodStrategy

        return HyperPodStrategy(**options)

    _registration.register_strategy(strategies, make)


def rendezvous_creator() -> Callable[[Any], Any]:
    """For torchrun: what makes the rendezvous `hyperpod` (entry-point group `torchrun.handlers`).

    torch asks for it whenever its rendezvous package is imported; ours is imported when it is used.
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
    """Finds the modules of `AFTER_IMPORT` as usual, and sees to them once they have been executed."""

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
    """The module's own loader, followed by what is to be done after the import."""

    def __init__(self, inner: importlib.abc.Loader) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        run_quietly(module.__name__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
