"""Settings of a model's modules that a program changes while it trains: modes, and numbers such as `Dropout.p`.

A module's mode (`training`) decides what it computes, and so do the plain attributes of libraries' modules, such as
the momentum of a BatchNorm. No `state_dict` has them. Other attributes, of modules of the program's own classes, are
found by `PlainAttributes`, which sends these as well: to it, they are an object whose attributes are the settings that
differ from those of the set-up, so that nothing is looked at twice where none does.

[Note: exchanged modules] A program may also put another module into the place of one. Another process does not have it.
So long as the two differ in settings only (a `Dropout(0.5)` for a `Dropout(0.1)`), the settings are all that has to be
sent. Any other exchange is found by `follow`, as are modules that are removed, and those that are added to a list or a
sequence of a library's class. What is added to a module of the program's own class may be something that its `forward`
creates when it runs for the first time, in each process.
"""

# Module tables have no public API.
# pyright: reportPrivateUsage=false

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from operator import itemgetter
from typing import Any, cast

from torch import nn
from typing_extensions import override

from hyperpod_plugins.errors import CheckpointMismatch, ConfigError
from hyperpod_plugins.recovery.attribute_values import SCALARS
from hyperpod_plugins.recovery.buffer_layout import ModuleTables
from hyperpod_plugins.recovery.held_objects import INTERNAL
from hyperpod_plugins.recovery.local_objects import is_metric
from hyperpod_plugins.recovery.program_collectives import is_of_program

_MODE = "training"
_OF_FSDP = "_fsdp", "_is_fsdp"
"""Prefixes of the attributes in which FSDP notes that a module is one of its own."""
Modes = MutableMapping[str, bool]
"""Whether each module is in training mode, by its name."""


class KeptModules:
    """The modules that a model had when this was created."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        """Keep which modules each of these holds; `parts` are all modules of the model."""
        self._children = [(part, dict(part._modules)) for part in parts]
        self._tables = ModuleTables(part._modules for part, _ in self._children)

    @property
    def are_present(self) -> bool:
        """Whether they still are those of the model."""
        return self._tables.are_same

    def put_back(self) -> None:
        """Have the model hold these modules again."""
        for part, children in self._children if not self.are_present else ():
            part._modules.clear()  # not the table of that time: `del` of an entry of a list makes another one
            part._modules.update(children)


def no_modes() -> None:
    """Modes of a loop that sets none for an evaluation."""


class ModuleSettings(MutableMapping[str, Any]):
    """The settings that differ from the first ones, by the names of the module and of the attribute.

    To delete one is to set it to its first value. For the main thread only.
    """

    def __init__(
        self, model: nn.Module, modes_to_restore: Callable[[], Modes | None] = no_modes, *, has_modes: bool = True
    ) -> None:
        """Start from the present settings.

        Args:
            model: whose modules.
            has_modes: whether the modes are among the settings: a loop may restore them in another way.
            modes_to_restore: returns, while an evaluation has changed the modes, those that will be restored when it
                ends, which stand for the present ones; None at other times.
        """
        self.model = model
        self._modes_to_restore = modes_to_restore
        self._parts = dict(model.named_modules())
        found = {name: _settings_of(part, has_mode=has_modes) for name, part in self._parts.items()}
        self._keys = [(name, keys) for name, keys in found.items() if keys]
        self._reads = self._readers()
        self._first = self._seen = self._present()
        self._first_of = self._by_name(self._first)
        self._found: dict[str, Any] = {}
        self.exchanged: list[str] = []
        """Modules, with what has become of them, that another process could not be given."""
        self._kept, self._of_set_up = KeptModules(()), self._parts
        self.mark()

    def mark(self) -> None:
        """Note the present modules as those of the set-up, which another process has too when its own ends."""
        self._of_set_up, self.exchanged = self._collect(), []

    def follow(self) -> bool:
        """Read the settings of the present modules, and find those that were exchanged; whether any other was found."""
        if self._kept.are_present:
            return False
        before, self.exchanged = self.exchanged, _exchanged(self._of_set_up, self._collect())
        return self.exchanged != before

    @property
    def kept(self) -> KeptModules:
        """The modules that `follow` has seen last, to be put back."""
        return self._kept

    def put_back(self, kept: KeptModules) -> None:
        """Have the model hold these modules again."""
        kept.put_back()
        self.follow()

    def _collect(self) -> dict[str, nn.Module]:
        """Read the settings of the present modules from now on; returns these modules by name."""
        present = dict(self.model.named_modules())
        self._kept = KeptModules(present.values())
        for name, keys in self._keys:
            part = present.get(name)
            if part is not None and all(key in vars(part) for key in keys):
                self._parts[name] = part
        self._reads = self._readers()
        return present

    def _readers(self) -> list[tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]]:
        return [(itemgetter(*keys), vars(self._parts[name])) for name, keys in self._keys]

    def _present(self) -> list[Any]:
        """One setting, or a tuple of all, for each module."""
        try:
            return [read(table) for read, table in self._reads]
        except KeyError:
            gone = [f"{name}.{key}" for name, keys in self._keys for key in keys if key not in vars(self._parts[name])]
            raise ConfigError(
                f"the program has deleted {', '.join(gone)}, an attribute of a library's module, which replacements "
                "of lost ranks could not be told. Set it to None instead, or delete it before the fit."
            ) from None

    def _by_name(self, settings: list[Any]) -> dict[str, Any]:
        return {
            f"{name}.{key}": value
            for (name, keys), values in zip(self._keys, settings, strict=True)
            for key, value in zip(keys, values if len(keys) > 1 else (values,), strict=True)
        }

    def _different(self) -> dict[str, Any]:
        modes = self._modes_to_restore()
        present = self._present()
        if not _are_equal(present, self._seen):
            self._seen = present
            self._found = self._without_first(self._by_name(present))
        if modes is None:
            return self._found
        return self._without_first(
            self._by_name(present) | {f"{name}.{_MODE}": mode for name, mode in modes.items() if name in self._parts}
        )

    def _without_first(self, settings: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in settings.items() if _differs(value, self._first_of[name])}

    def _setting(self, key: str) -> Any:
        name, _, attribute = key.rpartition(".")
        modes = self._modes_to_restore() if attribute == _MODE else None
        return modes[name] if modes is not None and name in modes else vars(self._parts[name])[attribute]

    @override
    def __getitem__(self, key: str) -> Any:
        if not _differs(value := self._setting(key), self._first_of[key]):
            raise KeyError(key)
        return value

    @override
    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self._first_of:
            raise CheckpointMismatch(f"the state of one rank has the setting {key} of a module, which is not here")
        name, _, attribute = key.rpartition(".")
        modes = self._modes_to_restore() if attribute == _MODE else None
        if modes is not None and name in modes:
            modes[name] = bool(value)
        else:
            setattr(self._parts[name], attribute, value)

    @override
    def __delitem__(self, key: str) -> None:
        _ = self[key]  # raises if it does not differ
        self[key] = self._first_of[key]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter([*self._different()])

    @override
    def __len__(self) -> int:
        return len(self._different())


def _are_equal(present: list[Any], seen: list[Any]) -> bool:
    try:
        return present == seen
    except RuntimeError:  # tensors of several elements have taken the place of numbers
        return False


def _differs(value: Any, first: Any) -> bool:
    return type(value) is not type(first) or value != first


def _exchanged(first: Mapping[str, nn.Module], present: Mapping[str, nn.Module]) -> list[str]:
    """The modules of the set-up that are others or gone, and those that were added to a library's module, described."""
    found: list[str] = []
    metrics = [name for parts in (first, present) for name, part in parts.items() if is_metric(part)]
    for name in {**first, **present}:
        if any(name == each or name.startswith(f"{each}.") for each in metrics):
            continue  # of torchmetrics: their state is kept in another way
        before, now = first.get(name), present.get(name)
        parent = first.get(name.rpartition(".")[0])
        if before is None and now is not None and parent is not None and not is_of_program(type(parent)):
            found.append(f"module {name} ({type(now).__name__}, added)")
        elif before is not None and now is None:
            found.append(f"module {name} ({type(before).__name__}, removed)")
        elif before is not None and now is not None and now is not before and not _differ_in_settings(before, now):
            found.append(f"module {name} ({type(now).__name__}, another one)")
    return found


def _differ_in_settings(part: nn.Module, other: nn.Module) -> bool:
    """Whether two modules of one library's class differ in nothing but settings, and in what is kept of both."""
    if type(part) is not type(other) or is_of_program(type(part)):
        return False
    if any(each is not None for each in (*part._parameters.values(), *other._parameters.values())):
        return False
    if any(value for each in (part, other) for key, value in vars(each).items() if key.endswith("_hooks")):
        return False  # the other process would have the hooks of its own module
    own, others = (
        {key: value for key, value in vars(each).items() if key not in INTERNAL and not key.startswith(_OF_FSDP)}
        for each in (part, other)
    )
    return own.keys() == others.keys() and all(
        _is_plain(value) and _is_plain(others[key]) and (key[:1] != "_" or value == others[key])
        for key, value in own.items()
    )


def _settings_of(part: nn.Module, *, has_mode: bool) -> tuple[str, ...]:
    """Names of the settings of a module: its mode, and the plain attributes of a library's module."""
    own, mode = vars(part), (_MODE,) if has_mode else ()
    if "_update_count" in own or is_of_program(type(part)):
        return mode  # a metric of torchmetrics, or a module of the program
    plain = (key for key, value in own.items() if key not in INTERNAL and key[:1] != "_" and _is_plain(value))
    return *mode, *plain


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, cast("tuple[object, ...]", value)))
    return type(value) in SCALARS
