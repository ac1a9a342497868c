"""Modules imported ahead of time that a program does not meet before it imports them itself.

`hyperpod_plugins.lightning` follows the Lightning that the program has imported, of the two that are usually installed
together. The zygote imports one of them before it knows the program, so its children begin without either in
`sys.modules`; importing what is hidden takes no time.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_FLAVOURED = "hyperpod_plugins.lightning"
_LIGHTNING = "lightning"
_RIVAL = "pytorch_lightning"


def hide_lightning() -> None:
    """Hide what has been imported of `lightning` and of our strategy for it."""
    lightning = take_out(_LIGHTNING)
    if lightning:
        sys.meta_path.insert(0, HiddenModules(lightning, take_out(_FLAVOURED)))


def take_out(root: str) -> dict[str, ModuleType]:
    """Remove a package from `sys.modules`, and from the package above it; returns its modules."""
    taken = {name: module for name, module in sys.modules.items() if f"{name}.".startswith(f"{root}.")}
    for name in taken:
        del sys.modules[name]
    above, _, name = root.rpartition(".")
    if taken and above in sys.modules:
        vars(sys.modules[above]).pop(name, None)
    return taken


class HiddenModules(MetaPathFinder):
    """Gives back what was hidden when the program first imports any of it."""

    def __init__(self, lightning: dict[str, ModuleType], flavoured: dict[str, ModuleType]) -> None:
        """Hold both; `flavoured` belongs to `lightning` and is of no use beside its rival."""
        self._lightning = lightning
        self._flavoured = flavoured

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a hidden module; everything else is for other finders."""
        module = self._lightning.get(fullname) or self._flavoured.get(fullname)
        if module is None:
            return None
        if fullname in self._flavoured:
            flavoured, self._flavoured = self._flavoured, {}
            if _RIVAL in sys.modules and self._lightning:
                return None  # the program uses the other one: it imports our strategy afresh
            sys.modules.update(flavoured)
        sys.modules.update(self._lightning)
        self._lightning = {}
        return ModuleSpec(fullname, _Given(module), is_package=True)


class _Given(Loader):
    """Loads a module that has been loaded before."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has put that of this loader there
