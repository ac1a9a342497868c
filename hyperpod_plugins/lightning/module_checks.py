"""Checks and adjustments of a user's LightningModule and Trainer: errors, warnings, and small changes to both."""

# Lightning keeps the mesh of a module in a private attribute.
# pyright: reportPrivateUsage=false

import re
import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from hyperpod_plugins.errors import ConfigError, format_list
from hyperpod_plugins.lightning.compat import (
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LightningModule,
    ModelPruning,
    StochasticWeightAveraging,
    Trainer,
    callbacks_of,
    is_overridden,
)
from hyperpod_plugins.lightning.datamodule import BatchSizeCallback
from hyperpod_plugins.parallel.config import ParallelConfig
from hyperpod_plugins.parallel.parallelize import match_degrees, match_float8
from hyperpod_plugins.parallel.topology import AXES, Topology
from hyperpod_plugins.recovery.watchdog import completed_outside_step

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def check_same_layout(module: LightningModule, mesh: DeviceMesh) -> None:
    """Raise if `module` was sharded with other degrees: it would train on that mesh, but read data for this one."""
    earlier = module._device_mesh
    is_sharded = any(isinstance(part, FSDPModule) for part in module.modules())
    if earlier is not None and is_sharded and earlier.shape[1:] != mesh.shape[1:]:  # replicas come and go
        was, wanted = (" x ".join(map("{} {}".format, AXES, each.shape)) for each in (earlier, mesh))
        raise ConfigError(
            f"this {type(module).__name__} was sharded as {was} by an earlier Trainer, and this one asks for {wanted}. "
            "Use the same degrees, or give this Trainer a new module (ckpt_path loads what the earlier one saved)."
        )


def needs_previous_gradients(trainer: Trainer, module: LightningModule) -> bool:
    """Whether a hook may need the previous step's gradients after the forward of the present step.

    Lightning zeroes gradients only after the forward. Without such a hook they can be freed before it, to save
    memory.
    """
    callbacks = callbacks_of(trainer)
    return (
        not module.automatic_optimization
        or is_overridden("optimizer_zero_grad", module)
        or is_overridden("on_before_zero_grad", module)
        or any(is_overridden("on_before_zero_grad", callback, parent=Callback) for callback in callbacks)
    )


def refuse_other_layers(module: LightningModule, config: ParallelConfig) -> None:
    """Raise if a module that is sharded already computes in another way than the configuration says.

    Layers cannot be converted after sharding; the strategy converts modules that it shards itself.

    Raises:
        ConfigError: precision is `bf16-true`, and a parameter has another floating dtype; see also `match_float8`
            and `match_degrees`.
    """
    match_float8(module, config)
    match_degrees(module, config)
    if config.precision != "bf16-true":
        return
    others = [
        f"{name} ({str(parameter.dtype).removeprefix('torch.')})"
        for name, parameter in module.named_parameters()
        if parameter.is_floating_point() and parameter.dtype != torch.bfloat16
    ]
    if others:
        raise ConfigError(
            f"precision='bf16-true' needs parameters in bfloat16, but this {type(module).__name__} was sharded with "
            f"{format_list(others)}. Convert it in configure_model before fully_shard (self.bfloat16()), leave the "
            "sharding to the strategy, which converts, or use bf16-mixed, which keeps parameters in float32."
        )


def treat_steps_as_forward(module: LightningModule) -> None:
    """Make FSDP2 unshard the root's parameters when Lightning calls a step method instead of `forward`.

    A step that calls `self(...)` enters FSDP2's hooks a second time. FSDP2 warns if that inner call returns a view,
    because an in-place operation on it would lose a hook. That is harmless here: the hook on the step's result
    counts.
    """
    view = f".*{re.escape(type(module).__name__)}.* returned a view tensor"
    warnings.filterwarnings("ignore", message=view, category=UserWarning)
    for step in STEPS:
        if is_overridden(step, module):
            register_fsdp_forward_method(module, step)


@cache
def warn_of_placement(topology: Topology) -> None:
    """Warn once about disadvantages of a layout, if it has any."""
    notes = topology.placement_notes()
    if notes:
        warnings.warn(
            f"the layout {topology} on nodes of {topology.ranks_per_node} ranks can be improved: {'; '.join(notes)}. "
            "Where the model fits, choose hybrid_shard_degree and tensor_parallel_degree so that their product divides "
            f"{topology.ranks_per_node}: then only replicas talk between nodes.",
            stacklevel=2,
        )


def synchronise_metrics_over(metrics: Iterable[Metric], group: dist.ProcessGroup) -> None:
    """Make torchmetrics objects gather over `group`, the ranks that read different samples, to count each once.

    A metric never computes with what a lost rank has left in the memory; see `completed_outside_step`.
    """
    for metric in metrics:
        vars(metric)["process_group"] = group
        vars(metric)["dist_sync_fn"] = metric.dist_sync_fn or _gather_for_metric


def _gather_for_metric(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    with completed_outside_step(tensor.device):
        return gather_all_tensors(tensor, group)


def forbid_inference_mode(trainer: Trainer) -> None:
    """Evaluate under `no_grad`: tensors that FSDP2 creates in inference mode cannot be used in training later.

    Lightning does the same for gloo and its own FSDP strategy, but not for a backend with another name.
    """
    validation = trainer.fit_loop.epoch_loop.val_loop
    for loop in (validation, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False


def refuse_copying_callbacks(trainer: Trainer) -> None:
    """Raise if a callback of Lightning holds, or makes, parameters that are not those of the sharded module.

    Raises:
        ConfigError: `StochasticWeightAveraging` or `ModelPruning`.
    """
    for callback in callbacks_of(trainer):
        if isinstance(callback, StochasticWeightAveraging):
            raise ConfigError(
                "StochasticWeightAveraging copies the module before it is sharded, and would fail in the first epoch "
                "that it averages. Use WeightAveraging(avg_fn=...) or EMAWeightAveraging, which average shards, and a "
                "schedule such as torch.optim.swa_utils.SWALR."
            )
        if isinstance(callback, ModelPruning):
            raise ConfigError(
                f"{type(callback).__name__} replaces parameters by masked copies while the module trains. The shards "
                "that recovery restores, and the optimizer steps on, would no longer be those of the module. Prune "
                "before training, or after it."
            )


def refuse_nested_fits(trainer: Trainer) -> None:
    """Raise if a callback trains inside the fit, in a job with recovery: a replacement would do so alone.

    Raises:
        ConfigError: `LearningRateFinder`, which `Tuner.lr_find` adds, too.
    """
    if any(isinstance(each, LearningRateFinder) for each in callbacks_of(trainer)):
        raise ConfigError(
            "LearningRateFinder trains, and then returns to a checkpoint, before the first step. A process that "
            "replaces a lost one would do so alone, and the others would wait. Find the rate in a job of its own, with "
            "CheckpointlessRecovery(enabled=False), and set it here."
        )


def refuse_validation_by_clock(trainer: Trainer) -> None:
    """Raise if validation is scheduled by time: in Lightning each rank would decide by its own clock.

    Ranks that validate and ranks that train would then all-gather the parameters of different layers together.

    Raises:
        ConfigError: `val_check_interval` is a time.
    """
    interval_s = getattr(trainer, "_val_check_time_interval", None)
    if interval_s is not None:
        raise ConfigError(
            f"Trainer(val_check_interval=...) is a time ({interval_s:g} s): each rank would decide by its own clock "
            "when to validate, and ranks that validate cannot work with ranks that train. Give a number of batches, "
            "or a part of an epoch."
        )


def micro_steps_of(trainer: Trainer) -> set[int]:
    """All numbers of micro-steps that a step may have during the fit."""
    resized = {
        number
        for each in callbacks_of(trainer)
        if isinstance(each, BatchSizeCallback)
        for number in each.possible_micro_steps
    }
    return {*_scheduled(trainer), *resized}


def _scheduled(trainer: Trainer) -> set[int]:
    return {
        trainer.accumulate_grad_batches,
        *(number for each in _schedulers_of(trainer) for number in each.scheduling.values()),
    }


def refuse_own_micro_steps(trainer: Trainer) -> None:
    """Raise if the program sets the number of micro-steps of a step, which in an elastic job follows from the size.

    Raises:
        ConfigError: the module uses manual optimization, where it is always one, or a callback sets it.
    """
    if not trainer.lightning_module.automatic_optimization:
        raise ConfigError(
            "ElasticTraining needs automatic optimization: a training_step that steps its optimizers by hand "
            "cannot be divided into more micro-steps when replicas leave. Use automatic optimization, or leave "
            "ElasticTraining out."
        )
    if _schedulers_of(trainer):
        raise ConfigError(
            "GradientAccumulationScheduler sets the number of micro-steps of a step, and with ElasticTraining that "
            "follows from the global batch and the present number of replicas: the steps would have other batches. "
            "Leave one of the two out."
        )


def refuse_frequency_of_schedules(trainer: Trainer, worlds: Mapping[int, tuple[int, int]]) -> None:
    """Raise if a schedule advances every few batches of a rank, and sizes of an elastic job have different numbers.

    Args:
        trainer: whose schedulers exist.
        worlds: for each number of replicas: micro-steps of a step, and batches of an epoch.

    Raises:
        ConfigError: a scheduler with `interval="step"` has a `frequency` above 1, and the micro-steps differ.
    """
    different = sorted({micro_steps for micro_steps, _ in worlds.values()})
    for config in trainer.lr_scheduler_configs if len(different) > 1 else ():
        if config.interval == "step" and config.frequency > 1:
            raise ConfigError(
                f'{type(config.scheduler).__name__} has interval="step" and frequency={config.frequency}, which counts '
                "batches of a rank, and ElasticTraining allows sizes at which a step has "
                f"{format_list(map(str, different))} of them: the schedule would run faster or slower after a resize. "
                "Use frequency=1, and a schedule that is as many times as long."
            )


def initial_micro_steps(trainer: Trainer) -> int:
    """Micro-steps of a step when a fit begins; `GradientAccumulationScheduler` requires 1."""
    return 1 if _schedulers_of(trainer) else trainer.accumulate_grad_batches


def _schedulers_of(trainer: Trainer) -> list[GradientAccumulationScheduler]:
    return [each for each in callbacks_of(trainer) if isinstance(each, GradientAccumulationScheduler)]


def check_validation_interval(trainer: Trainer, worlds: Mapping[int, tuple[int, int]]) -> None:
    """Raise if validation would fall between the micro-steps of an optimizer step, in a job with recovery.

    A replacement starts with the first micro-step of the step, and would validate while the others train.

    Args:
        trainer: whose loaders exist.
        worlds: in an elastic job, for each number of replicas: micro-steps of a step, and batches of an epoch.

    Raises:
        ConfigError: validation would fall between micro-steps.
    """
    if trainer.val_check_batch is None or not trainer.enable_validation:
        return
    counts_on = trainer.check_val_every_n_epoch is None
    different = sorted({micro_steps for micro_steps, _ in worlds.values()})
    if counts_on and len(different) > 1:
        raise ConfigError(
            f"val_check_interval={trainer.val_check_interval} with check_val_every_n_epoch=None counts batches over "
            "all sizes of the job, and ElasticTraining allows sizes at which a step has "
            f"{format_list(map(str, different))} of them: validation would fall between the micro-steps of a step. A "
            "process that replaces a lost one there begins with the first of them, and would validate while the "
            "others train. Use check_val_every_n_epoch=1, or allow sizes with the same number of micro-steps."
        )
    for num_replicas, (micro_steps, length) in worlds.items():
        num_batches = _limited(length, trainer.limit_train_batches)
        every = trainer.val_check_batch
        if isinstance(trainer.val_check_interval, float):
            every = max(1, int(num_batches * trainer.val_check_interval))
        if not ends_steps(every, micro_steps, num_batches, counts_on=counts_on):
            raise ConfigError(
                f"validation every {every} batches falls between the {micro_steps} micro-steps that an optimizer step "
                f"has with {num_replicas} replicas, which ElasticTraining allows ({num_batches} batches an epoch). A "
                "process that replaces a lost one there begins with the first of them, and would validate while the "
                "others train. Validate at the end of epochs (check_val_every_n_epoch=1), give val_check_interval a "
                "multiple of the micro-steps of each number of replicas, or allow fewer such numbers."
            )
    every, num_batches = trainer.val_check_batch, trainer.num_training_batches
    numbers = _scheduled(trainer)
    micro_steps = next((each for each in numbers if not ends_steps(every, each, num_batches, counts_on=counts_on)), 0)
    if not micro_steps:
        return
    raise ConfigError(
        f"validation every {every} batches falls between the {micro_steps} micro-steps of an optimizer step "
        f"(accumulate_grad_batches={micro_steps}, {num_batches} batches an epoch). A process that replaces a lost one "
        "there begins with the first of them, and would validate while the others train. Give val_check_interval a "
        f"multiple of {micro_steps}, or use CheckpointlessRecovery(enabled=False)."
    )


def check_limit(trainer: Trainer, worlds: Mapping[int, tuple[int, int]], *, follows_world: bool) -> None:
    """Raise if `limit_train_batches` would end epochs after different samples at different sizes of an elastic job.

    Args:
        trainer: whose loaders exist.
        worlds: see `check_validation_interval`.
        follows_world: whether the global batch does.

    Raises:
        ConfigError: the limit depends on the size of the job.
    """
    limit = trainer.limit_train_batches
    found = [(micro_steps, length, _limited(length, limit)) for micro_steps, length in worlds.values()]
    if len(found) < 2 or all(limited == length for _, length, limited in found):
        return
    steps = {limited / micro_steps for micro_steps, _, limited in found}
    if len(steps) == 1 and steps.pop().is_integer() and not follows_world:
        return
    each = [f"{limited} of {length} ({size})" for size, (_, length, limited) in zip(worlds, found, strict=True)]
    raise ConfigError(
        f"limit_train_batches={limit} ends an epoch after {format_list(each)} batches, by the number of replicas, and "
        "ElasticTraining allows all of these: where the limit is not the same whole number of steps of a constant "
        "global batch, an epoch in which the job changes its size would repeat or leave out samples. Give a fraction "
        "that is a whole number of steps, such as 0.5 of an even number, train on a Subset of the dataset, or allow "
        "one number of replicas."
    )


def _limited(num_batches: int, limit: float) -> int:
    """Training batches of an epoch, given Lightning's `limit_train_batches`: a number (int) or a fraction (float)."""
    return min(num_batches, limit) if isinstance(limit, int) else int(num_batches * limit)


def check_validation_now(trainer: Trainer) -> None:
    """Raise if a validation is about to begin inside a window, after an epoch whose length was unknown.

    If the trainer was asked to stop, Lightning also validates there, but no step follows, so that is allowed.

    Raises:
        ConfigError: the epoch ended between the micro-steps of a step.
    """
    if trainer.num_training_batches != float("inf") or trainer.should_stop:
        return
    micro_steps = trainer.accumulate_grad_batches
    raise ConfigError(
        f"an epoch of unknown length has ended after a number of batches that is not a multiple of {micro_steps} "
        f"(accumulate_grad_batches), so validation every {trainer.val_check_batch} batches falls between the "
        "micro-steps of an optimizer step. A process that replaces a lost one there would validate while the others "
        f"train. Give limit_train_batches a multiple of {micro_steps}, validate at the end of epochs "
        "(check_val_every_n_epoch=1), or use CheckpointlessRecovery(enabled=False)."
    )


def ends_steps(every: float, micro_steps: int, num_batches: float, *, counts_on: bool) -> bool:
    """Whether each multiple of `every` batches is the end of an optimizer step; the end of an epoch always is one.

    Args:
        every: number of batches.
        micro_steps: batches of a step.
        num_batches: of an epoch; infinite if unknown, and then assumed to be a multiple of `micro_steps`.
        counts_on: whether the count of batches continues across epochs.
    """
    if micro_steps == 1 or every == float("inf"):
        return True
    is_aligned = every % micro_steps == 0
    if num_batches == float("inf"):
        return is_aligned
    return is_aligned and num_batches % micro_steps == 0 if counts_on else is_aligned or every >= num_batches
