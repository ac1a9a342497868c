"""One optimizer step as Lightning runs it: the closures of an accumulation window, which can be run again."""

# Lightning's connectors and results have no public spelling.
# pyright: reportPrivateUsage=false

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchmetrics import Metric

from hyperpod_plugins.lightning.flavour import Trainer
from hyperpod_plugins.lightning.trainer_state import (
    as_checkpoint,
    describe_trainer,
    give_hyperparameters,
    hyperparameters,
    read_trainer,
)
from hyperpod_plugins.recovery import RecoveryPlan, TrainingState

SAVING_GROUP = "checkpoint"
"""Name of the role of the group that checkpoints are written over."""


CAN_RESET = "reset_iter_state" in vars(FSDPModule)
"""Whether this torch (2.13 does) can put FSDP2's modules back after an exception."""


class Window:
    """The `Subject` of a Trainer's transactions."""

    def __init__(
        self, trainer: Trainer, state: TrainingState, save: Callable[[dict[str, Any], str, bool], str]
    ) -> None:
        self._trainer = trainer
        self._state = state
        self._save = save
        self._closures: list[Callable[[], Any]] = []
        self._num_done = 0
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._results: dict[str, dict[str, Any]] = {}
        self._metrics: list[tuple[Metric, dict[str, Any]]] = []
        self._loaders_before: list[Any] = []
        self._loaders_now: list[Any] = []
        self.micro_step = 0
        """Index of the micro-step that is being computed."""
        self.entered_with = b""
        """Description with which the loops were entered, until this rank is among the others."""

    @property
    def is_empty(self) -> bool:
        """Whether a new step begins."""
        return not self._closures

    @property
    def num_after(self) -> int:
        """Micro-steps that follow the one that is being computed."""
        return max(0, len(self._closures) - 1 - self.micro_step)

    def fetched(self) -> None:
        """A batch has been fetched: note where the loaders stand, and where they stood before this window."""
        loader = self._trainer.fit_loop._combined_loader
        if self.is_empty:  # the state that a step begins with is the one after the batch before
            self._loaders_before = self._loaders_now
        self._loaders_now = [] if loader is None else copy.deepcopy(loader._state_dicts())

    def starts_at(self, loader_states: list[Any]) -> None:
        """Say where the loaders stand before the first batch of all."""
        self._loaders_now = loader_states

    def add(self, closure: Callable[[], Any]) -> None:
        """One more micro-step."""
        self._closures.append(closure)

    def compute(self) -> Any:
        """Run the micro-steps that have not been run since the window began, or began again; the last one's result."""
        result: Any = None
        while self._num_done < len(self._closures):
            self.micro_step = self._num_done
            result = self._closures[self._num_done]()
            self._num_done += 1
        return result

    def close(self) -> None:
        """The step is committed."""
        self._closures, self._num_done = [], 0

    # -- Subject ------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Remember buffers and logged metrics."""
        parts = _parts(self._state.model)
        buffers = [buffer for part in parts for buffer in part._buffers.values() if buffer is not None]
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in buffers]
        self._results = {key: _attributes(metric) for key, metric in self._logged().items()}
        self._metrics = [(part, _counts(part)) for part in parts if isinstance(part, Metric)]

    def undo(self) -> None:
        """Forget gradients; put buffers and logged metrics back."""
        for optimizer in self._state.optimizers:
            optimizer.zero_grad(set_to_none=True)
        reset_sharding(self._state.model)
        with torch.no_grad():
            for buffer, saved in self._buffers:
                buffer.copy_(saved)
        logged = self._logged()
        for key in list(logged):
            if key in self._results:
                vars(logged[key]).update(self._results[key])
            else:
                del logged[key]
        for metric, counts in self._metrics:
            vars(metric).update({key: _own(value) for key, value in counts.items()})
        self._num_done = 0

    def describe(self) -> bytes:
        """The Trainer's state at the beginning of this step, or where the loops were entered."""
        if self.entered_with:
            return self.entered_with
        num_open = max(1, len(self._closures))
        return describe_trainer(self._trainer, micro_steps_open=num_open, loader_states=self._loaders_before)

    def describe_outside(self) -> bytes:
        """The Trainer's state between two steps, in a validation, or at the end of an epoch.

        Within a window it is the one at the window's beginning: gradients that were accumulated so far are lost.
        """
        loader_states = self._loaders_before if self._closures else []
        return describe_trainer(self._trainer, micro_steps_open=len(self._closures), loader_states=loader_states)

    def restore(self, plan: RecoveryPlan, rank: int) -> None:
        """Copy tensors between ranks."""
        for target, source in sorted(plan.sources.items()):
            if rank == source:
                self._state.send(target)
            elif rank == target:
                self._state.receive(source)
        if self.entered_with:
            give_hyperparameters(read_trainer(self.entered_with), self._state.optimizers)

    can_undo_exceptions = CAN_RESET

    saving_group = SAVING_GROUP

    def save(self, path: str, *, is_alone: bool) -> str:
        """Write the state at the beginning of this step as a checkpoint that `fit` can go on from."""
        checkpoint = as_checkpoint(read_trainer(self.describe())) | hyperparameters(self._trainer)
        return self._save(checkpoint, path, is_alone)

    def _logged(self) -> dict[str, Any]:
        return self._trainer.fit_loop.epoch_loop._results


def reset_sharding(model: nn.Module) -> None:
    """Put FSDP2's modules back to where an iteration begins, after an exception may have left one in the middle."""
    if not CAN_RESET:
        return
    roots: list[str] = []
    for name, part in model.named_modules():
        if isinstance(part, FSDPModule) and not any(name.startswith(f"{root}." if root else "") for root in roots):
            roots.append(name)
            part.reset_iter_state()


def _parts(model: nn.Module) -> list[nn.Module]:
    """`model.modules()`, in a tenth of the time and in another order; each step asks for them."""
    parts, known = [model], {model}
    for part in parts:
        for child in part._modules.values():
            if child is not None and child not in known:
                known.add(child)
                parts.append(child)
    return parts


def _attributes(metric: Any) -> dict[str, Any]:
    """What logging changes of a metric; it puts new tensors in the place of old ones, and never writes to them."""
    return dict(vars(metric))


def _counts(metric: Metric) -> dict[str, Any]:
    """What a torchmetrics object has counted; updates may write to its tensors and extend its lists."""
    return {key: _own(vars(metric)[key]) for key in (*metric._defaults, "_computed", "_update_count")}


def _own(value: Any) -> Any:
    """A value that no update of a metric changes."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)
