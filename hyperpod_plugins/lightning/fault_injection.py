"""Fault injection in a Trainer: the `FaultInjection` callback; see `hyperpod_plugins.fault_injection.faults`."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from hyperpod_plugins.fault_injection.faults import Fault, Injector, parse_faults
from hyperpod_plugins.lightning.compat import Callback, LightningModule, Trainer
from hyperpod_plugins.recovery.rehearsal_jobs import ScheduledFaults


class FaultInjection(Callback):
    """Inject faults into training, to test that the job survives them.

    The phases are those of `fault_injection.faults.PHASES`. `dataloader` is just after a batch was fetched. In
    `validation`, `sanity_check`, `checkpoint` and `epoch_end`, the step of a fault is the number of steps committed
    before it.

    Args:
        faults: as text, such as `"kill:rank=3,step=7,phase=backward; hang:rank=0,step=9"`, or as data.

    Raises:
        ConfigError: the text cannot be parsed.
    """

    def __init__(self, faults: str | Sequence[Fault]) -> None:
        self._faults = parse_faults(faults) if isinstance(faults, str) else tuple(faults)
        self._injector: Injector | ScheduledFaults | None = None
        self._forward: RemovableHandle | None = None

    def _at(self, trainer: Trainer, phase: str, step: int) -> None:
        self._injector_of(trainer).reach(phase, step)

    def _injector_of(self, trainer: Trainer) -> Injector | ScheduledFaults:
        if self._injector is None:
            self._injector = Injector(self._faults, rank=trainer.global_rank)
        return self._injector

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Inject faults of the phase `dataloader`, and arm those of the phase `forward`."""
        self._disarm()
        step = trainer.global_step
        self._at(trainer, "dataloader", step)
        if self._injector_of(trainer).is_due("forward", step):
            self._forward = register_module_forward_pre_hook(lambda *_: self._at(trainer, "forward", step))

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Arm faults of the phase `backward`, which happen inside autograd."""
        step = trainer.global_step
        if self._injector_of(trainer).is_due("backward", step):
            loss.register_hook(lambda _: self._at(trainer, "backward", step))

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Inject faults of the phase `optimizer_step`: after backward, before clipping and the commit vote."""
        self._at(trainer, "optimizer_step", trainer.global_step)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Inject faults of the phase `batch_end`: the step has been committed."""
        self._disarm()
        self._at(trainer, "batch_end", trainer.global_step - 1)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Inject faults of the phase `epoch_end`."""
        self._at(trainer, "epoch_end", trainer.global_step)

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Inject faults of the phase `validation`, or `sanity_check` before training."""
        self._at(trainer, "sanity_check" if trainer.sanity_checking else "validation", trainer.global_step)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Inject faults of the phase `checkpoint`, while a checkpoint is being collected (not a description)."""
        if not getattr(trainer.strategy, "saves_for_peers", False):
            self._at(trainer, "checkpoint", trainer.global_step)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove the forward hook."""
        self._disarm()

    def _disarm(self) -> None:
        if self._forward is not None:
            self._forward.remove()
            self._forward = None
