"""The entries of this process (its calls of `fit`, `validate`, `test` and `predict`), and the state after each.

The state after an entry is kept, so that a process that starts later skips the entry instead of running it again.

In a job of `hyperpod rehearse`, `rehearsed_call` keeps evaluations short, faults happen in the hooks of a call, and its
results are recorded.
"""

# Lightning's connectors have no public API.
# pyright: reportPrivateUsage=false

import io
import pickle
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from hyperpod_plugins.elastic.store.entry_records import EndedEntry
from hyperpod_plugins.errors import CheckpointError, CommError, RecoveryError, format_list
from hyperpod_plugins.lightning.compat import Callback, LightningModule, Trainer, TrainerFn, callbacks_of
from hyperpod_plugins.lightning.compat import override as override_method
from hyperpod_plugins.lightning.fault_injection import FaultInjection
from hyperpod_plugins.lightning.local_state import load_attributes, load_local_state
from hyperpod_plugins.lightning.shown_values import put_tables, tables_of
from hyperpod_plugins.lightning.trainer_state import (
    describe_end,
    last_saves,
    not_restarting,
    set_last_saves,
    steps_done,
)
from hyperpod_plugins.recovery import TrainingState
from hyperpod_plugins.recovery.entries import (
    Entries,
    invisible_workers,
    load_entry_values,
    save_entry_values,
    state_folder,
)
from hyperpod_plugins.recovery.rehearsal import Rehearsal
from hyperpod_plugins.recovery.rehearsal_jobs import MAX_EVALUATION_BATCHES, RehearsedCall, ScheduledFaults
from hyperpod_plugins.recovery.state_digests import state_digests, value_digest

ENTRY_KINDS = {"_fit_impl": "fit", "_validate_impl": "validate", "_test_impl": "test", "_predict_impl": "predict"}
"""Kind of entry, by the name of the function that the Trainer launches."""
ENTRY = "hyperpod:entry"
"""Key of the number of the entry that wrote a checkpoint."""
_MAX_PREDICTIONS_BYTES = 64 << 20

entries = Entries()
"""The entries of this process, shared by all its Trainers."""
_LIMITS = ("limit_val_batches", "limit_test_batches", "limit_predict_batches")


def save_entry_end(
    trainer: Trainer,
    kind: str,
    results: Any,
    worker_id: int,
    *,
    local: dict[str, Any] | None = None,
    worker_ids: Sequence[int] = (),
) -> None:
    """Keep the state after the present entry, so that no process has to run it again; all ranks call it together.

    Args:
        trainer: of the entry.
        kind: of the entry.
        results: what its loops have returned.
        worker_id: of this process.
        local: rank-local state after a fit.
        worker_ids: of all ranks; empty if they are those of the job, or of the world in which this process left it.

    Raises:
        PeerLost: a rank was lost meanwhile.
    """
    strategy: Any = trainer.strategy
    try:
        folder = entries.folder(Path(strategy.checkpoint_root))
        if not can_keep(results, kind):
            entries.mark_not_kept(
                "what `predict` returned is large, or holds Python objects that are not read without pickle"
            )
        elif kind == "fit":
            strategy.save_entry_end(_dump_end(trainer), state_folder(folder, entries.number))
        if entries.is_complete:
            save_entry_values(folder, entries.number, worker_id, _values_of(trainer, kind, results, local or {}))
            load_entry_values(folder, entries.number, worker_id)  # fails now if only pickle can read it
    except (CommError, RecoveryError):
        raise
    except Exception as error:  # noqa: BLE001 (of hooks, too: the call has succeeded, and other ranks await the vote)
        entries.mark_not_kept(error)
    is_kept = strategy.reduce_boolean_decision(entries.is_complete)
    if is_kept:
        if strategy.global_rank == 0:
            _check_visible(worker_ids or _worker_ids_left() or range(strategy.world_size))
        is_kept = strategy.reduce_boolean_decision(entries.is_complete)
    if is_kept:
        entries.record(kind, results if kind in ("validate", "test") else None)
    elif entries.is_complete:
        entries.mark_not_kept("another rank could not keep its part; see its log")


def _dump_end(trainer: Trainer) -> dict[str, Any]:
    """Collect the trainer's checkpoint data; if a hook raises on one rank, all ranks raise before they write.

    Raises:
        CheckpointError: a hook failed on some rank.
    """
    strategy: Any = trainer.strategy
    checkpoint: dict[str, Any] = {}
    problem: Exception | None = None
    try:
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(False)
    except (CommError, RecoveryError):
        raise
    except Exception as error:  # noqa: BLE001 (reported to all ranks)
        problem = error
    if not strategy.reduce_boolean_decision(problem is None):
        raise CheckpointError(f"a saving hook failed: {problem or 'on another rank'}") from problem
    return checkpoint


def _worker_ids_left() -> Sequence[int]:
    """Worker ids of the present world of the job, or of that in which this process left it; empty if neither is known.

    Not of a fit that has its own: an earlier one that was only skipped may have left in another world.
    """
    return entries.worker_ids if entries.member is None else entries.member.world.worker_ids


def _check_visible(worker_ids: Sequence[int]) -> None:
    """Check that this rank sees the files of all ranks; without them, the state after the entry is not kept."""
    hidden = invisible_workers(entries.folder(Path()), entries.number, worker_ids)
    if hidden:
        entries.mark_not_kept(
            f"rank 0 does not see the files of workers {format_list(map(str, hidden))}. Use storage that nodes share"
        )


def skip_entry(trainer: Trainer, record: EndedEntry, call: Callable[[str], Any], worker_id: int) -> Any:
    """Skip an entry that has ended: restore the state after it, and return what it returned.

    Args:
        trainer: of the entry.
        record: of the entry.
        call: runs the Trainer's own code except the loops; takes the checkpoint path, empty for none.
        worker_id: of this process.
    """
    folder = entries.folder(Path())
    values, set_random_state = load_entry_values(folder, record.number, worker_id)
    entries.trainer_state = values["trainer"]

    def restore() -> Any:
        put_tables(trainer, values["metrics"])
        if record.kind == "fit":
            trainer.should_stop = values["should_stop"]
            set_last_saves(trainer, values["saved_at"])
            not_restarting(trainer)
            load_local_state(trainer, values["local"])
            load_attributes(trainer, values["local"])
        set_random_state()
        return record.results

    is_fit = record.kind == "fit"
    undo = override_method(trainer, "_run_stage", restore if is_fit else lambda: record.results)
    try:
        returned = call(str(state_folder(folder, record.number)) if is_fit else "")
    finally:
        undo()
    if not is_fit:  # of a fit, this was kept before its last hooks
        restore()
    return values["predictions"] if record.kind == "predict" else returned


def can_keep(results: Any, kind: str) -> bool:
    """Whether the results of an entry can be given to a process that starts later; predictions may be anything."""
    if kind != "predict":
        return True
    buffer = io.BytesIO()
    try:
        torch.save(results, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError):
        return False
    return buffer.tell() <= _MAX_PREDICTIONS_BYTES


def _values_of(trainer: Trainer, kind: str, results: Any, local: dict[str, Any]) -> dict[str, Any]:
    return {
        "metrics": tables_of(trainer),
        "trainer": describe_end(trainer) if kind == "fit" else {},
        "local": local,
        "should_stop": bool(trainer.should_stop),
        "saved_at": last_saves(trainer),
        "predictions": results if kind == "predict" else None,
    }


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
