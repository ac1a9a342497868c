"""What the strategy refuses, warns of, and does to a user's LightningModule and the loops that call its steps."""

# Lightning keeps the mesh of a module in a private attribute.
# pyright: reportPrivateUsage=false

import re
import warnings
from collections.abc import Mapping
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torchmetrics import Metric

from hyperpod_plugins.errors import ConfigError, few
from hyperpod_plugins.lightning.compat import (
    Callback,
    GradientAccumulationScheduler,
    LightningModule,
    Trainer,
    is_overridden,
)
from hyperpod_plugins.lightning.datamodule import SizesSteps
from hyperpod_plugins.parallel.topology import AXES, Topology

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def refuse_another_layout(module: LightningModule, mesh: DeviceMesh) -> None:
    """Raise where `module` was sharded over a mesh of other degrees: it would train on that one, and read for this."""
    earlier = module._device_mesh
    is_sharded = any(isinstance(part, FSDPModule) for part in module.modules())
    if earlier is not None and is_sharded and earlier.shape[1:] != mesh.shape[1:]:  # replicas come and go
        was, wanted = (" x ".join(map("{} {}".format, AXES, each.shape)) for each in (earlier, mesh))
        raise ConfigError(
            f"this {type(module).__name__} was sharded as {was} by an earlier Trainer, and this one asks for {wanted}. "
            "Use the same degrees, or give this Trainer a new module (ckpt_path loads what the earlier one saved)."
        )


def looks_at_old_gradients(trainer: Trainer, module: LightningModule) -> bool:
    """Whether a hook may want the gradients of the step before when this one's forward has been run.

    Lightning drops them only then. Without such a hook they can go before it, and their memory with them.
    """
    callbacks: list[Callback] = vars(trainer)["callbacks"]
    return (
        not module.automatic_optimization
        or is_overridden("optimizer_zero_grad", module)
        or is_overridden("on_before_zero_grad", module)
        or any(is_overridden("on_before_zero_grad", callback, parent=Callback) for callback in callbacks)
    )


def refuse_other_types(module: LightningModule, precision: str) -> None:
    """Raise where `bf16-true` is asked for and a module that sharded itself has parameters of another floating type.

    A module that is left to the strategy is converted before it is sharded; afterwards it is too late.
    """
    if precision != "bf16-true":
        return
    others = [
        f"{name} ({str(parameter.dtype).removeprefix('torch.')})"
        for name, parameter in module.named_parameters()
        if parameter.is_floating_point() and parameter.dtype != torch.bfloat16
    ]
    if others:
        raise ConfigError(
            f"precision='bf16-true' needs parameters in bfloat16, but this {type(module).__name__} was sharded with "
            f"{few(others)}. Convert it in configure_model before fully_shard (self.bfloat16()), leave the sharding to "
            "the strategy, which converts, or use bf16-mixed, which keeps parameters in float32."
        )


def treat_steps_as_forward(module: LightningModule) -> None:
    """Make FSDP2 gather the root's parameters when Lightning calls a step, which is not `forward`.

    A step that calls `self(...)` enters FSDP2's hooks a second time, inside. FSDP2 warns when that call returns a
    view, for an in-place operation on it would lose a hook; here the hook on the step's own result counts.
    """
    view = f".*{re.escape(type(module).__name__)}.* returned a view tensor"
    warnings.filterwarnings("ignore", message=view, category=UserWarning)
    for step in STEPS:
        if is_overridden(step, module):
            register_fsdp_forward_method(module, step)


@cache
def warn_of_placement(topology: Topology) -> None:
    """Say once what is unfortunate about a layout, if anything is."""
    notes = topology.placement_notes()
    if notes:
        warnings.warn(
            f"the layout {topology} on nodes of {topology.ranks_per_node} ranks can be improved: {'; '.join(notes)}. "
            "Where the model fits, choose hybrid_shard_degree and tensor_parallel_degree so that their product divides "
            f"{topology.ranks_per_node}: then only replicas talk between nodes.",
            stacklevel=2,
        )


def synchronise_metrics_over(module: LightningModule, group: dist.ProcessGroup) -> None:
    """Let torchmetrics objects gather from the ranks that read different samples, so that each sample counts once."""
    for part in module.modules():
        if isinstance(part, Metric):
            vars(part)["process_group"] = group


def forbid_inference_mode(trainer: Trainer) -> None:
    """Evaluate under `no_grad` instead: tensors that FSDP2 makes under inference mode cannot be trained on later.

    Lightning knows this for gloo and its own FSDP strategy, but not for a backend with another name.
    """
    validation = trainer.fit_loop.epoch_loop.val_loop
    for loop in (validation, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False


def refuse_validation_by_clock(trainer: Trainer) -> None:
    """Refuse validation after a time has passed: Lightning lets each rank decide by its own clock.

    Ranks that validate and ranks that train would gather parameters together, each into a different layer.

    Raises:
        ConfigError: naming the argument.
    """
    interval_s = vars(trainer).get("_val_check_time_interval")
    if interval_s is not None:
        raise ConfigError(
            f"Trainer(val_check_interval=...) is a time ({interval_s:g} s): each rank would decide by its own clock "
            "when to validate, and ranks that validate cannot work with ranks that train. Give a number of batches, "
            "or a part of an epoch."
        )


def micro_steps_of(trainer: Trainer) -> set[int]:
    """All numbers of micro-steps that a step of the fit may have."""
    resized = {number for each in vars(trainer)["callbacks"] if isinstance(each, SizesSteps) for number in each.counts}
    return {*_scheduled(trainer), *resized}


def _scheduled(trainer: Trainer) -> set[int]:
    return {
        trainer.accumulate_grad_batches,
        *(number for each in _schedulers_of(trainer) for number in each.scheduling.values()),
    }


def refuse_own_micro_steps(trainer: Trainer) -> None:
    """Refuse a program that decides on the number of micro-steps of a step, in a job whose size does.

    Raises:
        ConfigError: manual optimization has one, whatever the size; or a callback sets it.
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


def initial_micro_steps(trainer: Trainer) -> int:
    """Micro-steps of a step when a fit begins: one where a callback changes the number, which it demands."""
    return 1 if _schedulers_of(trainer) else trainer.accumulate_grad_batches


def _schedulers_of(trainer: Trainer) -> list[GradientAccumulationScheduler]:
    return [each for each in vars(trainer)["callbacks"] if isinstance(each, GradientAccumulationScheduler)]


def refuse_validation_within_windows(trainer: Trainer, worlds: Mapping[int, tuple[int, int]]) -> None:
    """Refuse validation between micro-steps of one optimizer step, where lost processes are to be replaced.

    A replacement begins with the step's first micro-step, and would validate while the others train.

    Args:
        trainer: whose loaders are there.
        worlds: of a job that changes its size, for each number of replicas: micro-steps, and batches of an epoch.

    Raises:
        ConfigError: naming both numbers.
    """
    if trainer.val_check_batch is None or not trainer.enable_validation:
        return
    counts_on = trainer.check_val_every_n_epoch is None
    different = sorted({micro_steps for micro_steps, _ in worlds.values()})
    if counts_on and len(different) > 1:
        raise ConfigError(
            f"val_check_interval={trainer.val_check_interval} with check_val_every_n_epoch=None counts batches over "
            f"all sizes of the job, and ElasticTraining allows sizes at which a step has {few(map(str, different))} of "
            "them: validation would fall between the micro-steps of a step. A process that replaces a lost one there "
            "begins with the first of them, and would validate while the others train. Use check_val_every_n_epoch=1, "
            "or allow sizes with the same number of micro-steps."
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


def _limited(num_batches: int, limit: float) -> int:
    """Batches that are trained on of an epoch: Lightning's `limit_train_batches` is a number, or a part of them."""
    return min(num_batches, limit) if isinstance(limit, int) else int(num_batches * limit)


def refuse_validation_within_window(trainer: Trainer) -> None:
    """The same where a validation is about to begin there, for an epoch was of another length than could be known.

    Lightning validates there also where it is asked to stop: no step follows then.

    Raises:
        ConfigError: naming what to do.
    """
    if trainer.num_training_batches != float("inf") or trainer.should_stop:
        return
    micro_steps = trainer.accumulate_grad_batches
    raise ConfigError(
        f"an epoch of unknown length has ended after a number of batches that is no multiple of {micro_steps} "
        f"(accumulate_grad_batches), so validation every {trainer.val_check_batch} batches falls between the "
        "micro-steps of an optimizer step. A process that replaces a lost one there would validate while the others "
        f"train. Give limit_train_batches a multiple of {micro_steps}, validate at the end of epochs "
        "(check_val_every_n_epoch=1), or use CheckpointlessRecovery(enabled=False)."
    )


def ends_steps(every: float, micro_steps: int, num_batches: float, *, counts_on: bool) -> bool:
    """Whether every so many batches an optimizer step ends, as it does at the end of an epoch.

    Args:
        every: number of batches.
        micro_steps: batches of a step.
        num_batches: of an epoch; infinite where that is not known, and then taken for a multiple of `micro_steps`.
        counts_on: whether batches are counted from epoch to epoch.
    """
    if micro_steps == 1 or every == float("inf"):
        return True
    is_aligned = every % micro_steps == 0
    if num_batches == float("inf"):
        return is_aligned
    return is_aligned and num_batches % micro_steps == 0 if counts_on else is_aligned or every >= num_batches
