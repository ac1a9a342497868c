"""What a loop trains: the model with its optimizers and schedulers, as a transaction sees them."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hyperpod_plugins.loops.position import Position
from hyperpod_plugins.parallel import CheckpointWriter, load_checkpoint
from hyperpod_plugins.parallel.local_update import step_locally
from hyperpod_plugins.recovery import SAVING_GROUP, RecoveryPlan, Snapshot, TrainingState
from hyperpod_plugins.recovery.hyperparameters import give_hyperparameters, hyperparameters
from hyperpod_plugins.recovery.undo import CAN_RESET, Buffers, drop_gradients, end_iteration, parts_of


class Trained:
    """The `Subject` of a loop's transactions, and what its checkpoints hold."""

    can_undo_exceptions = CAN_RESET

    saving_group = SAVING_GROUP

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[LRScheduler],
        *,
        state: dict[str, Any],
        verify: bool,
        folder: Path,
    ) -> None:
        """Take hold of them.

        Args:
            model: sharded or plain.
            optimizers: over its parameters.
            schedulers: stepped once after each step.
            state: what the program keeps beside them; plain values.
            verify: compare checksums of what a replacement receives.
            folder: where an emergency's checkpoint goes.
        """
        self.model = model
        self.optimizers = list(optimizers)
        self.schedulers = list(schedulers)
        self.tensors = TrainingState(model, optimizers, verify=verify)
        self.saving: dist.ProcessGroup | None = None
        """Group of all ranks for nothing but checkpoints; None to have one made when it is needed."""
        self.where: Callable[[], Position] = Position
        """Says where the loop stands: committed steps, epoch and loader."""
        self.entered_with: Position | None = None
        """With which the loop was entered, until this rank is among the others."""
        self._state = state
        self._folder = folder
        self._buffers = Buffers()
        self._modes: list[tuple[nn.Module, bool]] = []
        self._writer: CheckpointWriter | None = None

    def position(self) -> Position:
        """Where the loop stands, with all that a process needs that comes in there."""
        return replace(
            self.where(),
            schedulers=tuple(scheduler.state_dict() for scheduler in self.schedulers),
            groups=tuple(hyperparameters(optimizer) for optimizer in self.optimizers),
            state=dict(self._state),
        )

    def take(self, position: Position) -> None:
        """Take over what schedulers, optimizers' groups and the program's own state were at a position."""
        for scheduler, state in zip(self.schedulers, position.schedulers, strict=True):
            scheduler.load_state_dict(state)
        give_hyperparameters(position.groups, self.optimizers)
        self._state.clear()
        self._state.update(position.state)

    def update(self) -> None:
        """Let optimizers and schedulers step, once each."""
        for optimizer in self.optimizers:
            step_locally(optimizer, lambda: None)
            optimizer.zero_grad(set_to_none=True)
        for scheduler in self.schedulers:
            scheduler.step()

    def train_again(self) -> None:
        """Let modules train that did in the last step: a validation may have been interrupted."""
        for part, is_training in self._modes:
            part.training = is_training

    # -- Subject ------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Remember buffers, and which modules train."""
        parts = parts_of(self.model)
        self._buffers = Buffers(parts)
        self._modes = [(part, part.training) for part in parts]

    def undo(self) -> None:
        """Forget gradients; put buffers back."""
        drop_gradients(self.model, self.optimizers)
        self._buffers.put_back()

    def end_iteration(self) -> None:
        """Put FSDP2's modules back to where an iteration begins."""
        end_iteration(self.model)

    def describe(self) -> bytes:
        """The position at the beginning of this step, or where the loop was entered."""
        return (self.entered_with or self.position()).to_bytes()

    def restore(self, plan: RecoveryPlan, rank: int) -> None:
        """Copy tensors between ranks."""
        for target, source in sorted(plan.sources.items()):
            if rank == source:
                self.tensors.send(target)
            elif rank == target:
                self.tensors.receive(source)
        if self.entered_with is not None:
            give_hyperparameters(self.entered_with.groups, self.optimizers)

    def save(self, path: str, *, is_alone: bool, snapshots: Sequence[Snapshot] | None = None) -> str:
        """Write a checkpoint; without a path one for an emergency."""
        assert snapshots is None, "a loop has the degrees that it began with, so nobody writes those of others"
        position = self.entered_with or self.position()
        path = path or str(self._folder / f"emergency-step={position.committed}")
        self.write(path, position)
        return path

    # -- checkpoints --------------------------------------------------------------------------------------------

    def write(self, path: str | Path, position: Position) -> None:
        """Write a checkpoint on all ranks together."""
        if self._writer is None:
            self._writer = CheckpointWriter(self.saving)
        self._writer.save(path, model=self.model, optimizers=self.optimizers, extra={"loop": asdict(position)}).wait()

    def read(self, path: str | Path) -> Position:
        """Load a checkpoint of any degrees on all ranks together; where its loop stood."""
        extra = load_checkpoint(path, model=self.model, optimizers=self.optimizers)
        position = Position(**extra["loop"])
        self.take(position)
        return position
