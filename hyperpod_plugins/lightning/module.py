"""What the strategy refuses, warns of, and does to a user's LightningModule and the loops that call its steps."""

# Lightning keeps the mesh of a module in a private attribute.
# pyright: reportPrivateUsage=false

import re
import warnings
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torchmetrics import Metric

from hyperpod_plugins.errors import ConfigError, few
from hyperpod_plugins.lightning.flavour import Callback, LightningModule, Trainer, WeightAveraging, is_overridden
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


def refuse_weight_averaging(trainer: Trainer) -> None:
    """Raise for Lightning's own weight averaging, which copies the module before it is sharded."""
    callbacks: list[Any] = vars(trainer)["callbacks"]
    for callback in callbacks:
        if isinstance(callback, WeightAveraging):
            raise ConfigError(
                f"{type(callback).__name__} keeps a copy of the module that is made before it is sharded, so it cannot "
                "average sharded parameters. Use a callback of your own that averages `module.parameters()` in "
                "on_train_batch_end: shards can be averaged one by one."
            )


def forbid_inference_mode(trainer: Trainer) -> None:
    """Evaluate under `no_grad` instead: tensors that FSDP2 makes under inference mode cannot be trained on later.

    Lightning knows this for gloo and its own FSDP strategy, but not for a backend with another name.
    """
    validation = trainer.fit_loop.epoch_loop.val_loop
    for loop in (validation, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False
