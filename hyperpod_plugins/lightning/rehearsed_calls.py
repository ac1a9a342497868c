"""The Trainer's calls in a job of `hyperpod rehearse`: faults in their hooks, short evaluations, and their results."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from typing_extensions import override

from hyperpod_plugins.lightning.compat import Callback, LightningModule, Trainer, TrainerFn, callbacks_of
from hyperpod_plugins.lightning.fault_injection import FaultInjection
from hyperpod_plugins.lightning.trainer_entries import entries
from hyperpod_plugins.lightning.trainer_state import steps_done
from hyperpod_plugins.recovery import TrainingState
from hyperpod_plugins.recovery.rehearsal import Rehearsal
from hyperpod_plugins.recovery.rehearsal_jobs import MAX_EVALUATION_BATCHES, RehearsedCall, ScheduledFaults
from hyperpod_plugins.recovery.state_digests import state_digests, value_digest

_LIMITS = ("limit_val_batches", "limit_test_batches", "limit_predict_batches")


class _FaultsInFit(FaultInjection):
    """Injects the faults of a rehearsed fit in the phases that Lightning has hooks for."""

    def __init__(self, faults: ScheduledFaults) -> None:
        super().__init__(())
        self._injector = faults


class _FaultsInEvaluation(Callback):
    """Injects the faults of a rehearsed `validate`, `test` or `predict` at the end of a batch."""

    def __init__(self, faults: ScheduledFaults) -> None:
        self._faults = faults

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Inject faults of the phase `validate`."""
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._faults.reach("validate", 0)

    @override
    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Inject faults of the phase `test`."""
        self._faults.reach("test", 0)

    @override
    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Inject faults of the phase `predict`."""
        self._faults.reach("predict", 0)


def rehearse_fit(trainer: Trainer, rehearsal: Rehearsal | None) -> None:
    """In a rehearsed job, inject faults in the hooks of a fit, which is entered first or again after a fault."""
    if rehearsal is not None and rehearsal.faults is not None:
        _remove_callbacks(trainer)
        callbacks_of(trainer).append(_FaultsInFit(rehearsal.faults))


@contextmanager
def rehearsed_call(trainer: Trainer, kind: str, worker_id: int) -> Generator[RehearsedCall | None]:
    """Context of a call of the Trainer, in which evaluations of a rehearsed job are short and faults happen in them.

    Args:
        trainer: of the call.
        kind: of the call; see `EndedEntry.kind`.
        worker_id: of this process.
    """
    is_fit = kind == "fit"
    call = RehearsedCall.create(
        worker_id, entries.number, training_index=entries.training_index if is_fit else None, kind=kind
    )
    if call is None:
        yield None
        return
    limits = {name: getattr(trainer, name) for name in _LIMITS}
    max_steps = trainer.fit_loop.epoch_loop.max_steps
    for name, limit in limits.items():
        setattr(trainer, name, _few(limit))
    if not is_fit:
        callbacks_of(trainer).append(_FaultsInEvaluation(call.faults))
    try:
        yield call
    finally:
        _remove_callbacks(trainer)
        for name, limit in limits.items():
            setattr(trainer, name, limit)
        trainer.fit_loop.epoch_loop.max_steps = max_steps


def _few(limit: float) -> float:
    """Of a limit in batches or as a fraction, a few batches; 0 if there are none."""
    is_count = isinstance(limit, int) or not limit
    return min(limit, MAX_EVALUATION_BATCHES) if is_count else MAX_EVALUATION_BATCHES


def _remove_callbacks(trainer: Trainer) -> None:
    callbacks = callbacks_of(trainer)
    callbacks[:] = [each for each in callbacks if not isinstance(each, _FaultsInFit | _FaultsInEvaluation)]


def record_restored(call: RehearsedCall, trainer: Trainer, kind: str, results: Any) -> None:
    """Record what is left of a call that has ended before a restart: tensors after a fit, else its results."""
    if kind != "fit":
        record_results(call, trainer, results)
        return
    state = TrainingState(trainer.lightning_module, trainer.optimizers)
    call.write(steps_done(trainer), "end", state_digests(state))


def record_results(call: RehearsedCall, trainer: Trainer, results: Any) -> None:
    """Record what an evaluation has returned and logged."""
    found = {f"result {name}": value_digest(value) for name, value in trainer.callback_metrics.items()}
    call.write(0, "result", {**found, "result returned": value_digest(results)})
