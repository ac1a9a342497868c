"""Refuses schedules of the program's own classes that only a variable holds: a replacement would begin them anew.

torch's schedulers leave a mark on their optimizer. An object of another class that steps one (a warm-up that counts by
itself) is found by its reference to the optimizer: it has the optimizer in an attribute, a method `step`, and no
network. Objects that the session restores, since the model holds them or they are registered, are served.
"""

import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.recovery.held_objects import Way, packages_of, way_of


def refuse_own_schedules(
    optimizers: Sequence[Optimizer], model: nn.Module, *, is_restored: Callable[[object], bool]
) -> None:
    """Look once at all objects of the process, which takes some ten milliseconds.

    Args:
        optimizers: those that the steps train with.
        model: of the program; its package counts as the program's.
        is_restored: whether the session restores an object, and sends it to a replacement.

    Raises:
        ConfigError: an object of the program steps an optimizer by hand, and no replacement would get it.
    """
    packages = packages_of(model.modules())
    for owner in _owners_of(optimizers):
        is_own = way_of(owner, packages) is Way.ATTRIBUTES and callable(getattr(type(owner), "step", None))
        if is_own and not any(isinstance(each, nn.Module) for each in vars(owner).values()) and not is_restored(owner):
            raise ConfigError(
                f"a {type(owner).__name__} holds an optimizer of session.train and has a method step, but the session "
                "does not restore it: with recovery, a replacement would begin with a new one. Give it state_dict and "
                'load_state_dict, and call session.register_rank_local("schedule", it) after session.train; or keep it '
                "in an attribute of a module of your own class; or use one of torch's schedulers (LambdaLR), "
                "given to session.train."
            )


def _owners_of(optimizers: Sequence[Optimizer]) -> Iterable[Any]:
    """Objects with an attribute that is one of the optimizers."""
    referrers = gc.get_referrers(*optimizers)
    tables = [each for each in referrers if type(each) is dict]
    known = {id(each) for each in tables}
    holders = [*referrers, *(gc.get_referrers(*tables) if tables else [])]
    for each in holders:
        table = getattr(each, "__dict__", None) if type(each).__dictoffset__ else None
        if isinstance(table, dict) and (
            id(table) in known or any(value is one for value in table.values() for one in optimizers)
        ):
            yield each
