"""Imports from Lightning under either of its names, and `override`, which replaces methods of its objects.

The names are `lightning.pytorch` and `pytorch_lightning`. The two packages have separate copies of every class, and a
Trainer of one rejects a strategy of the other. This module uses `pytorch_lightning` if the program has imported only
that one, otherwise `lightning`.
"""

# Lightning has no public API for creating its process group and for moving optimizers.
# pyright: reportPrivateUsage=false

import importlib
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from hyperpod_plugins.errors import MissingExtraError, OutdatedExtraError

OVERRIDDEN = frozenset(
    {
        *("on_advance_start", "on_advance_end", "on_run_start", "on_run_end", "setup_data"),  # of the fit loop
        *("advance", "run", "update_lr_schedulers", "_broadcast_sigterm_tensor"),  # of the loop over batches
        "increment_progress_to_evaluation_end",  # of the loop of a validation
        "_optimizer_step",  # of automatic optimization
        "update_restart_stage",  # of the loop over batches
        "_run_sanity_check",  # of a trainer
        *("log", "metrics", "reset", "update_metrics"),  # of logged results
        *(
            "log_metrics",
            "_sigterm_notifier_fn",
            "prepare_data",
            "dataloader",
            "_run_stage",
            "save_checkpoint",
        ),  # of a trainer's parts
        *("setup", "on_save_checkpoint", "on_load_checkpoint", "state_dict", "load_state_dict"),  # of callbacks
        *("file_exists", "_monitor_candidates"),  # of ModelCheckpoint
        *("_swap_models", "_copy_average_to_current"),  # of WeightAveraging
        "get_metrics",  # of progress bars
    }
)
"""The methods that `override` replaces; tests/lightning_adapter/test_compat.py compares their parameters."""
_OLDEST = (2, 6)
_PURPOSE = "hyperpod_plugins.lightning"


def is_too_old(version: str) -> bool:
    """Whether a version is older than the oldest supported one; one that cannot be parsed counts as supported."""
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    return len(numbers) == 2 and numbers < _OLDEST


def version_of(package: str) -> str:
    """The `__version__` of a package, or "unknown".

    Raises:
        MissingExtraError: the package, or one that it needs, is not installed.
    """
    try:
        return str(vars(importlib.import_module(package)).get("__version__", "unknown"))
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or package, "lightning", _PURPOSE) from None


def outdated(package: str, lacking: str = "") -> OutdatedExtraError:
    """The error for an installed Lightning that is too old, or lacks a module or name."""
    return OutdatedExtraError(package, version_of(package), ">=" + ".".join(map(str, _OLDEST)), _PURPOSE, lacking)


def override(owner: object, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Replace a method of one of Lightning's objects, in that object only; its class stays as it is.

    Args:
        owner: a trainer, loop, connector, callback, module or collection of results.
        name: of the method, one of `OVERRIDDEN`.
        function: takes the method's arguments, without `self`.

    Returns:
        Restores what the object itself had under that name, if anything.
    """
    if name not in OVERRIDDEN:
        raise KeyError(name)
    former = vars(owner).get(name)
    vars(owner)[name] = function
    return partial(_put_back, owner, name, former)


def restore(owner: object, *names: str) -> None:
    """Give methods of an object back to its class, whichever of them `override` has replaced."""
    for name in names:
        vars(owner).pop(name, None)


def original(owner: object, name: str) -> Callable[..., Any]:
    """A method as the object's class has it, whether or not `override` has replaced it."""
    return partial(getattr(type(owner), name), owner)


def callbacks_of(trainer: "Trainer") -> list[Any]:
    """The trainer's callbacks; Lightning declares them nowhere."""
    return cast("Any", trainer).callbacks


def _put_back(owner: object, name: str, former: Callable[..., Any] | None) -> None:
    restore(owner, name)
    if former is not None:
        vars(owner)[name] = former


if TYPE_CHECKING:
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
    from lightning.fabric.utilities.distributed import _init_dist_connection as init_dist_connection
    from lightning.fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
    from lightning.fabric.utilities.seed import reset_seed
    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
    from lightning.pytorch.callbacks import (
        Checkpoint,
        GradientAccumulationScheduler,
        LearningRateFinder,
        ModelCheckpoint,
        ModelPruning,
        ModelSummary,
        StochasticWeightAveraging,
        Timer,
    )
    from lightning.pytorch.callbacks.weight_averaging import WeightAveraging
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher as DataLoaderIterDataFetcher
    from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision, TransformerEnginePrecision
    from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
    from lightning.pytorch.strategies.launchers.launcher import _Launcher as Launcher
    from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
    from lightning.pytorch.utilities.combined_loader import CombinedLoader
    from lightning.pytorch.utilities.exceptions import SIGTERMException
    from lightning.pytorch.utilities.model_helpers import is_overridden
else:
    _uses_old_name = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    _pl = "pytorch_lightning" if _uses_old_name else "lightning.pytorch"
    _fabric = "lightning_fabric" if _uses_old_name else "lightning.fabric"

    for _package in (_pl.partition(".")[0], _fabric.partition(".")[0]):
        if is_too_old(version_of(_package)):
            raise outdated(_package)

    def _get(module: str, name: str) -> object:
        package = module.partition(".")[0]
        try:
            return vars(importlib.import_module(module))[name]
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith(f"{package}."):
                raise MissingExtraError(error.name or module, "lightning", _PURPOSE) from None
            raise outdated(package, error.name) from None
        except KeyError:
            raise outdated(package, f"{module}.{name}") from None

    SLURMEnvironment = _get(f"{_fabric}.plugins.environments", "SLURMEnvironment")
    TorchElasticEnvironment = _get(f"{_fabric}.plugins.environments", "TorchElasticEnvironment")
    DistributedSamplerWrapper = _get(f"{_fabric}.utilities.distributed", "DistributedSamplerWrapper")
    init_dist_connection = _get(f"{_fabric}.utilities.distributed", "_init_dist_connection")
    optimizers_to_device = _get(f"{_fabric}.utilities.optimizer", "_optimizers_to_device")
    reset_seed = _get(f"{_fabric}.utilities.seed", "reset_seed")
    Callback = _get(_pl, "Callback")
    Checkpoint = _get(f"{_pl}.callbacks", "Checkpoint")
    GradientAccumulationScheduler = _get(f"{_pl}.callbacks", "GradientAccumulationScheduler")
    LearningRateFinder = _get(f"{_pl}.callbacks", "LearningRateFinder")
    LightningDataModule = _get(_pl, "LightningDataModule")
    LightningModule = _get(_pl, "LightningModule")
    Trainer = _get(_pl, "Trainer")
    WeightAveraging = _get(f"{_pl}.callbacks.weight_averaging", "WeightAveraging")
    CSVLogger = _get(f"{_pl}.loggers", "CSVLogger")
    DataLoaderIterDataFetcher = _get(f"{_pl}.loops.fetchers", "_DataLoaderIterDataFetcher")
    LightningOptimizer = _get(f"{_pl}.core.optimizer", "LightningOptimizer")
    HalfPrecision = _get(f"{_pl}.plugins.precision", "HalfPrecision")
    MixedPrecision = _get(f"{_pl}.plugins.precision", "MixedPrecision")
    Precision = _get(f"{_pl}.plugins.precision", "Precision")
    TransformerEnginePrecision = _get(f"{_pl}.plugins.precision", "TransformerEnginePrecision")
    Launcher = _get(f"{_pl}.strategies.launchers.launcher", "_Launcher")
    ModelCheckpoint = _get(f"{_pl}.callbacks", "ModelCheckpoint")
    ModelPruning = _get(f"{_pl}.callbacks", "ModelPruning")
    ModelSummary = _get(f"{_pl}.callbacks", "ModelSummary")
    StochasticWeightAveraging = _get(f"{_pl}.callbacks", "StochasticWeightAveraging")
    Timer = _get(f"{_pl}.callbacks", "Timer")
    ModelParallelStrategy = _get(f"{_pl}.strategies", "ModelParallelStrategy")
    ParallelStrategy = _get(f"{_pl}.strategies", "ParallelStrategy")
    TrainerFn = _get(f"{_pl}.trainer.states", "TrainerFn")
    TrainerStatus = _get(f"{_pl}.trainer.states", "TrainerStatus")
    CombinedLoader = _get(f"{_pl}.utilities.combined_loader", "CombinedLoader")
    SIGTERMException = _get(f"{_pl}.utilities.exceptions", "SIGTERMException")
    is_overridden = _get(f"{_pl}.utilities.model_helpers", "is_overridden")

__all__ = [
    "CSVLogger",
    "Callback",
    "Checkpoint",
    "CombinedLoader",
    "DataLoaderIterDataFetcher",
    "DistributedSamplerWrapper",
    "GradientAccumulationScheduler",
    "HalfPrecision",
    "Launcher",
    "LearningRateFinder",
    "LightningDataModule",
    "LightningModule",
    "LightningOptimizer",
    "MixedPrecision",
    "ModelCheckpoint",
    "ModelParallelStrategy",
    "ModelPruning",
    "ModelSummary",
    "ParallelStrategy",
    "Precision",
    "SIGTERMException",
    "SLURMEnvironment",
    "StochasticWeightAveraging",
    "Timer",
    "TorchElasticEnvironment",
    "Trainer",
    "TrainerFn",
    "TrainerStatus",
    "TransformerEnginePrecision",
    "WeightAveraging",
    "callbacks_of",
    "init_dist_connection",
    "is_overridden",
    "optimizers_to_device",
    "original",
    "override",
    "reset_seed",
    "restore",
]
