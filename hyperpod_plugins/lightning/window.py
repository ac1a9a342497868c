"""One optimizer step as Lightning runs it: the closures of an accumulation window, which can be run again."""

# Lightning's connectors and results have no public spelling.
# pyright: reportPrivateUsage=false

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torchmetrics import Metric

from hyperpod_plugins.lightning.flavour import Trainer
from hyperpod_plugins.lightning.trainer_state import (
    GROUPS,
    arguments,
    as_checkpoint,
    describe_trainer,
    read_trainer,
)
from hyperpod_plugins.parallel.checkpoint_parts import StateParts
from hyperpod_plugins.recovery import SAVING_GROUP, RecoveryPlan, Snapshot, TrainingState
from hyperpod_plugins.recovery.hyperparameters import give_hyperparameters
from hyperpod_plugins.recovery.preview import Preview
from hyperpod_plugins.recovery.undo import CAN_RESET, Buffers, drop_gradients, end_iteration, parts_of


class Window:
    """The `Subject` of a Trainer's transactions."""

    def __init__(
        self,
        trainer: Trainer,
        state: TrainingState,
        save: Callable[[dict[str, Any], str, bool, StateParts | None], str],
    ) -> None:
        self._trainer = trainer
        self._state = state
        self._save = save
        self._closures: list[Callable[[], Any]] = []
        self._num_done = 0
        self._buffers = Buffers()
        self._results: dict[str, dict[str, Any]] = {}
        self._metrics: list[tuple[Metric, dict[str, Any]]] = []
        self._loaders_before: list[Any] = []
        self._loaders_now: list[Any] = []
        self.micro_step = 0
        """Index of the micro-step that is being computed."""
        self.preview: Preview
        """What newcomers are told of the state that they will get."""
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
        self.preview.leave()

    # -- Subject ------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Remember buffers and logged metrics."""
        parts = parts_of(self._state.model)
        self._buffers = Buffers(parts)
        self._results = {key: _attributes(metric) for key, metric in self._logged().items()}
        self._metrics = [(part, _counts(part)) for part in parts if isinstance(part, Metric)]

    def undo(self) -> None:
        """Forget gradients; put buffers and logged metrics back."""
        drop_gradients(self._state.model, self._state.optimizers)
        self._buffers.put_back()
        logged = self._logged()
        for key in list(logged):
            if key in self._results:
                vars(logged[key]).update(self._results[key])
            else:
                del logged[key]
        for metric, counts in self._metrics:
            vars(metric).update({key: _own(value) for key, value in counts.items()})
        self._num_done = 0

    def end_iteration(self) -> None:
        """Put FSDP2's modules back to where an iteration begins."""
        end_iteration(self._state.model)

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
            give_hyperparameters(read_trainer(self.entered_with).get(GROUPS, []), self._state.optimizers)

    can_undo_exceptions = CAN_RESET

    saving_group = SAVING_GROUP

    def save(self, path: str, *, is_alone: bool, snapshots: Sequence[Snapshot] | None = None) -> str:
        """Write the state at the beginning of this step, or of snapshots, as a checkpoint that `fit` can go on from."""
        described, parts = self.describe() if snapshots is None else snapshots[0].trainer, None
        if snapshots is not None:
            parts = self._state.parts_of([(each.header, each.data) for each in snapshots], "a snapshot")
        checkpoint = as_checkpoint(read_trainer(described)) | arguments(self._trainer)
        return self._save(checkpoint, path, is_alone, parts)

    def _logged(self) -> dict[str, Any]:
        return self._trainer.fit_loop.epoch_loop._results


def _attributes(metric: Any) -> dict[str, Any]:
    """What logging changes of a metric; it puts new tensors in the place of old ones, and never writes to them."""
    return dict(vars(metric))


def _counts(metric: Metric) -> dict[str, Any]:
    """What a torchmetrics object has counted; updates may write to its tensors and extend its lists."""
    return {key: _own(vars(metric)[key]) for key in (*metric._defaults, "_computed", "_update_count")}


def _own(value: Any) -> Any:
    """A value that no update of a metric changes."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)
