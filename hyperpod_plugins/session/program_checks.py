"""Refuses programs that a `Session` cannot train, or whose objects a replacement would not get.

torch's schedulers leave a mark on their optimizer. An object of another class that steps one (a warm-up that counts by
itself) is found by its reference to the optimizer: it has the optimizer in an attribute, a method `step`, and no
network. Objects that the session restores, since the model holds them or they are registered, are served.
"""

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hyperpod_plugins.errors import ConfigError, format_list
from hyperpod_plugins.parallel import ParallelConfig
from hyperpod_plugins.parallel.hsdp import fsdp_units
from hyperpod_plugins.parallel.parallelize import match_degrees
from hyperpod_plugins.recovery.held_objects import FollowMode, follow_mode_of, packages_of
from hyperpod_plugins.recovery.local_objects import is_metric
from hyperpod_plugins.session.state import SessionState


def check_trained(
    model: nn.Module, optimizers: Sequence[Any], schedulers: Sequence[Any], *, config: ParallelConfig, world_size: int
) -> None:
    """Check what `Session.train` is given.

    Raises:
        ConfigError: the model is not sharded, or divided in another way than the degrees say; a library has wrapped an
            optimizer or a scheduler; a scheduler waits for a metric.
    """
    if world_size > 1 and not any(True for _ in fsdp_units(model)):
        raise ConfigError(
            f"the model {type(model).__name__} is not sharded, so each of the {world_size} ranks would train its own "
            "copy. Call model = session.parallelize(model) first."
        )
    match_degrees(model, config)
    if any(isinstance(each, ReduceLROnPlateau) for each in schedulers):
        raise ConfigError(
            "ReduceLROnPlateau waits for a metric, which session.train does not have. Leave it out of train, call "
            "its step(metric) in the body after step.run, on all ranks with the same metric, and keep its state: "
            'session.register_rank_local("plateau", scheduler).'
        )
    wrapped = [type(each).__name__ for each in optimizers if "state" not in vars(each)]
    if wrapped:
        raise ConfigError(
            f"{format_list(wrapped)} wraps an optimizer, and steps it only when its own library says so. Give the "
            "optimizer inside to session.train: optimizer.optimizer where Accelerate has wrapped it."
        )
    counting = [type(each).__name__ for each in schedulers if _is_wrapped_scheduler(each)]
    if counting:
        raise ConfigError(
            f"{format_list(counting)} wraps a scheduler, and advances it by the number of ranks at each step. Give "
            "the scheduler inside to session.train, which steps it once: scheduler.scheduler where Accelerate has "
            "wrapped it, made for as many steps as there are, not times the number of processes."
        )


def refuse_other_models(trained: nn.Module, sharded: Sequence["weakref.ref[nn.Module]"]) -> None:
    """Refuse what a repair would not reset, and a replacement would not get.

    Raises:
        ConfigError: another sharded model is alive, or the trained one has a metric that does not save its state.
    """
    models = [model for alive in sharded if (model := alive()) is not None]
    inside, within = set(trained.modules()), lambda model: trained in set(model.modules())
    beside = [type(model).__name__ for model in models if model not in inside and not within(model)]
    if beside:
        raise ConfigError(
            f"{format_list(beside)} was sharded by session.parallelize, but is not part of the model given to "
            "session.train. With recovery, only that model is reset after a fault and sent to a replacement. Put both "
            "into one module (nn.ModuleDict) that is sharded and given to train, leave the other one unsharded, or use "
            "RecoveryOptions(enabled=False)."
        )
    metrics = [name for name, module in trained.named_modules() if is_metric(module)]
    if metrics:
        raise ConfigError(
            f"the torchmetrics objects {format_list(metrics)} are modules of the trained model, whose state a "
            "replacement would not get. Keep them outside of it, call their persistent(True), and give them to "
            "session.register_rank_local."
        )


def _is_wrapped_scheduler(value: object) -> bool:
    return not isinstance(value, LRScheduler) and isinstance(getattr(value, "scheduler", None), LRScheduler)


def optimizer_of(scheduler: object) -> Optimizer | None:
    """The optimizer of a scheduler, which Accelerate may have wrapped; None for any other object."""
    return getattr(getattr(scheduler, "scheduler", scheduler), "optimizer", None)


def refuse_unknown_schedulers(trained: SessionState, scheduled: Sequence[Optimizer | None]) -> None:
    """Refuse schedulers that the program steps itself: a replacement would have new ones.

    Args:
        trained: what the steps train.
        scheduled: the optimizers whose schedulers the session was ever given.

    Raises:
        ConfigError: an optimizer has a scheduler, and the session was given none for it.
    """
    known = [*scheduled, *(optimizer_of(each.stateful) for each in trained.rank_local.values())]
    for optimizer in trained.optimizers:
        is_scheduled = getattr(optimizer.step, "_wrapped_by_lr_sched", None) is not None  # by torch's schedulers
        if is_scheduled and not any(each is optimizer for each in known):
            raise ConfigError(
                f"a scheduler was created for {type(optimizer).__name__}, but not given to session.train. With "
                "recovery, a replacement would begin with a new one. Give it to train, which steps it once after each "
                "step (or leaves that to the program, with manual_optimization=True); or, to step it in the body, "
                'session.register_rank_local("schedule", scheduler).'
            )


def refuse_own_schedules(
    optimizers: Sequence[Optimizer], model: nn.Module, *, is_restored: Callable[[object], bool]
) -> None:
    """Refuse schedules of the program's own classes that only a variable holds: a replacement would begin them anew.

    This looks once at all objects of the process, which takes some ten milliseconds.

    Args:
        optimizers: those that the steps train with.
        model: of the program; its package counts as the program's.
        is_restored: whether the session restores an object, and sends it to a replacement.

    Raises:
        ConfigError: an object of the program steps an optimizer by hand, and no replacement would get it.
    """
    packages = packages_of(model.modules())
    for owner in _owners_of(optimizers):
        is_own = follow_mode_of(owner, packages) is FollowMode.ATTRIBUTES and callable(
            getattr(type(owner), "step", None)
        )
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
