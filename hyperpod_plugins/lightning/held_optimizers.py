"""Refuses optimizers and schedulers that a program holds in attributes and that the Trainer does not have.

The Trainer's optimizers and schedulers are restored and sent with the state of a fit. If only an
attribute holds one, a replacement would have a new one, and a survivor that runs a step again would step it twice. An
optimizer that shares the state of one of the Trainer's (Lightning's own wrapper, or what a Lookahead wraps) is allowed.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.lightning.compat import Trainer, callbacks_of
from hyperpod_plugins.lightning.local_state import attributes_of, optimizers_followed
from hyperpod_plugins.recovery.attributes import PlainAttributes, modules_of_program
from hyperpod_plugins.recovery.held_objects import (
    INTERNAL,
    FollowedObject,
    FollowMode,
    find_held,
    objects_of,
    packages_of,
)

_HELD = "Return it from configure_optimizers, and use it through self.optimizers() with manual optimization."
_WRAPPED = (
    "An optimizer that wraps another one must share its state (sharpness-aware minimisation, SAM, as it is usually "
    "copied, does not). Return the one inside from configure_optimizers, and write what the other adds in "
    "training_step, with manual optimization."
)


class HeldOptimizers:
    """The check of one fit, for the main thread."""

    def __init__(self, trainer: Trainer) -> None:
        """Nothing is checked yet."""
        self._trainer = trainer
        self._attributes: list[PlainAttributes] = [*attributes_of(trainer).values()]
        self._seen: list[dict[str, FollowedObject]] = []

    def check(self) -> None:
        """Look at all attributes, if other objects are held there than at the last call.

        Raises:
            ConfigError: an optimizer or a scheduler is held that the Trainer does not have.
        """
        held = [each.held for each in self._attributes]
        if len(held) == len(self._seen) and all(one is other for one, other in zip(held, self._seen, strict=True)):
            return
        self._seen = held
        optimizers = [*self._trainer.optimizers]
        schedulers = {id(each) for each in _nested([each.scheduler for each in self._trainer.lr_scheduler_configs])}
        for path, value in self._objects():
            if isinstance(value, Optimizer) and not _is_one_of(value, optimizers):
                raise ConfigError(
                    f"{path} is an optimizer ({type(value).__name__}) that the Trainer does not have: a process that "
                    "replaces a lost one would begin it anew, and a step that is run again would step it twice. "
                    + (_WRAPPED if path.startswith("optimizer ") else _HELD)
                )
            if isinstance(value, LRScheduler) and id(value) not in schedulers:
                raise ConfigError(
                    f"{path} is a learning rate scheduler ({type(value).__name__}) that the Trainer does "
                    "not have: a process that replaces a lost one would begin it anew. Return it from "
                    "configure_optimizers, and let Lightning step it, or step it through self.lr_schedulers() with "
                    "manual optimization."
                )

    def _objects(self) -> Iterator[tuple[str, object]]:
        """Path and value of each object in attributes of modules, callbacks, the data module and the optimizers."""
        trainer = self._trainer
        callbacks = callbacks_of(trainer)
        roots = [
            *modules_of_program(trainer.lightning_module),
            *((f"callback {index} ({type(each).__name__})", each) for index, each in enumerate(callbacks)),
            *optimizers_followed(trainer),
        ]
        if (data := getattr(trainer, "datamodule", None)) is not None:
            roots.append(("the data module", data))
        left_out = {id(each) for each in (*trainer.lightning_module.modules(), *callbacks, trainer)}
        found, _ = find_held(
            [
                FollowedObject(name, each, FollowMode.ATTRIBUTES, (vars(each),), ignored=INTERNAL | {"_trainer"})
                for name, each in roots
            ],
            packages=packages_of(each for _, each in roots),
            is_left_out=lambda value: id(value) in left_out,
        )
        for held in found.values():
            yield from objects_of(held)
            if held.mode is FollowMode.STATE and not isinstance(held.value, nn.Module):
                attributes: dict[str, Any] = getattr(held.value, "__dict__", {})
                yield from ((f"{held.name}.{key}", each) for key, each in attributes.items())


def _is_one_of(value: Optimizer, optimizers: Iterable[Optimizer]) -> bool:
    """Whether an optimizer is one of these, or shares the state of one."""
    inner = vars(value).get("_optimizer", value)  # of Lightning's wrapper
    return any(each is inner or each.state is value.state for each in optimizers)


def _nested(schedulers: Iterable[Any]) -> list[Any]:
    """Schedulers, and those that they hold."""
    found = [*schedulers]
    for each in found:
        for value in vars(each).values():
            inner: Iterable[Any] = value if isinstance(value, list | tuple) else (value,)
            found += [one for one in inner if isinstance(one, LRScheduler) and all(one is not known for known in found)]
    return found
