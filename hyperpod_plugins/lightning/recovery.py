"""Checkpointless recovery for a Trainer: `TrainerRecovery` has a method for each point of a fit the strategy calls.

A fault inside a step is repaired by the step's transaction. After any other fault, `fit` ends with `PeerLost`; then
`leave_loops` describes where this rank was, the launcher calls `fit` again, and `state_of_peers` returns the state
that all ranks re-enter the loops with.
"""

# Lightning's loops and connectors have no public API.
# pyright: reportPrivateUsage=false

import io
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PosixPath, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from hyperpod_plugins.comm import group_health
from hyperpod_plugins.comm.health import Phase
from hyperpod_plugins.data.loader import refuse_out_of_order
from hyperpod_plugins.data.random_numbers import LoaderKey, SeededIterable, key_random_numbers
from hyperpod_plugins.elastic import JobStore
from hyperpod_plugins.elastic.membership.admission import arm
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.errors import PeerLost, StateLost
from hyperpod_plugins.lightning.checkpointless import CheckpointlessRecovery
from hyperpod_plugins.lightning.compat import LightningModule, SIGTERMException, Trainer, TrainerFn, TrainerStatus
from hyperpod_plugins.lightning.elastic_training import ElasticState, ElasticTraining
from hyperpod_plugins.lightning.entries import entries
from hyperpod_plugins.lightning.fault_injection import rehearse_faults
from hyperpod_plugins.lightning.local_state import LoggedMeans, register_all
from hyperpod_plugins.lightning.loggers import LoggedRows, append_to_csv, record_runs, restore_runs
from hyperpod_plugins.lightning.module_checks import (
    check_validation_interval,
    check_validation_now,
    refuse_own_micro_steps,
)
from hyperpod_plugins.lightning.reentry import Reentry, finish_batch_end, install_part_hooks, remove_part_hooks
from hyperpod_plugins.lightning.saving_hooks import SavingHooks, refuse_interleaved_hooks
from hyperpod_plugins.lightning.shown_values import ShownValues
from hyperpod_plugins.lightning.skip_batches import SkipBatches, is_stateful
from hyperpod_plugins.lightning.trainer_state import (
    LOCAL,
    LOGGED,
    METRICS,
    ROWS,
    accumulate_as_others,
    batches_done,
    begin_afresh,
    forget_loaders,
    is_epoch_start,
    is_within_epoch,
    log_last_batch,
    make_loaders_as_others,
    merge_own,
    part_of,
    part_order,
    read_trainer,
    refuse_unreadable,
    restore_untracked,
    show_epoch,
    steps_done,
    tear_down_loops,
    was_asked_to_stop,
)
from hyperpod_plugins.lightning.weight_averaging import CallbackAverage
from hyperpod_plugins.lightning.window import AccumulationWindow, PartStart
from hyperpod_plugins.parallel import Topology
from hyperpod_plugins.parallel.checkpoint.parts import StateParts
from hyperpod_plugins.recovery import (
    NO_STATE,
    Repair,
    Snapshot,
    StepTransaction,
    TrainingState,
    seed_micro_step,
)
from hyperpod_plugins.recovery.engine import RecoveryEngine, join_job
from hyperpod_plugins.recovery.local_state import LocalStates, RankLocalState
from hyperpod_plugins.recovery.rng import (
    AFTER_COMMIT,
    BATCH,
    COMPUTE,
    EPOCH_BEGIN,
    EPOCH_END,
    EVALUATION,
    EVALUATION_BEGIN,
    FIT_END,
    TRAINING_END,
)

log = logging.getLogger(__name__)

WITHIN_WINDOW = (
    "a collective was called between the micro-steps of one optimizer step (accumulate_grad_batches), in a hook such "
    "as on_train_batch_end, a callback, a loader or self.log(..., sync_dist=True) there. If a process is lost in the "
    "second or a later micro-step, the other ranks cannot run the step again in place, because they would not call "
    "that collective again when the replacement does: all ranks return to a snapshot, or restart from the last "
    "checkpoint. To avoid this, communicate in training_step, or after the last micro-step of a step. "
    "ModelCheckpoint(train_time_interval=...) communicates after each batch."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """Rank-local state after a part of the fit, which all ranks run again unless another rank is already past it."""

    part: PartStart
    """State when the part began."""
    own: bytes
    """Description of the trainer."""
    metrics: dict[str, dict[str, Any]]
    local: dict[str, Any]


class TrainerRecovery:
    """Membership, step transaction and trainer state of this process, for one strategy.

    Use it in the main thread only.
    """

    def __init__(
        self,
        callback: CheckpointlessRecovery,
        elastic: ElasticTraining | None,
        job: JobEnv,
        *,
        worker_id: int,
        world_size: int,
    ) -> None:
        self.options = callback.options
        self.elastic = None if elastic is None else ElasticState(elastic, JobStore.connect(job))
        """How the job changes its size; None for one that does not."""
        self.member = entries.member or join_job(
            job, self.options, worker_id=worker_id, world_size=world_size, is_elastic=elastic is not None
        )
        if elastic is None:
            entries.member = self.member
        self.engine = RecoveryEngine(self.member, self.options, callback.repairs, on_repair=self._repaired)
        """What recovery of a Trainer shares with that of a loop written by hand."""
        self.engine.begin_entry(entries.number, is_complete=entries.is_complete)
        self.member.collectives.begin_set_up(entries.number)
        self._begins_at, self._pending_checkpoint = NO_STATE, ""
        self._broadcasts: Counter[str] = Counter()
        self._skip_batches = 0
        self._window: AccumulationWindow | None = None
        self._transaction: StepTransaction | None = None
        self._seed: Callable[[int, int, str], None] | None = None
        self._random_seed = self._data_rank = self._num_evaluated = self._num_loaders = 0
        self._starts_epoch = False
        self._reentry = Reentry()
        self._description = self._own = b""
        self._hooks, self._rows = SavingHooks(), LoggedRows()
        self._average: CallbackAverage | None = None
        self._local: LocalStates | None = None
        self._means: LoggedMeans
        self._values: ShownValues
        self._is_stopped = self._is_checked = False
        self._returned: Snapshot | None = None
        self._entered_with: dict[str, Any] = {}
        self._metrics: dict[str, dict[str, Any]] = {}
        self._restarted_with: dict[str, Any] = {}
        """Rank-local state that has been loaded, until `on_train_start` has been called, which may reset it."""
        self._local_on_leave: dict[str, Any] = {}
        """Rank-local state from when this rank left the loops, until it has rejoined the others."""
        self._finished_part: _Ended | None = None
        self._left_at_part_end = False
        """Whether this rank leaves the loops while it waits for the others at the end of a part."""
        self._is_armed = False

    @property
    def rank_and_world_size(self) -> tuple[int, int]:
        """Rank and world size of this process."""
        return self.member.rank, self.member.world.size

    def may_snapshot(self, topology: Topology) -> bool:
        """Whether snapshots may be taken, in this world or in a later one."""
        return self.elastic is not None or self.options.snapshots(topology).every_steps > 0

    @property
    def is_detached(self) -> bool:
        """Whether the groups of this process are not connected: it is a joiner, or a fault has occurred."""
        return group_health.is_unavailable

    @property
    def is_joining(self) -> bool:
        """Whether this process is a joiner, until the call of the program in which it joins has ended."""
        return self.member.is_joining

    @property
    def is_fitting(self) -> bool:
        """Whether steps run as transactions: `begin_fit` has been called."""
        return self._transaction is not None

    # -- setting up ---------------------------------------------------------------------------------------------

    def begin_fit(
        self,
        trainer: Trainer,
        module: LightningModule,
        topology: Topology,
        *,
        seed: int,
        device: torch.device,
        snapshot_group: dist.ProcessGroup | None,
        average: CallbackAverage | None,
        rank_local: Mapping[str, RankLocalState],
        save: Callable[[dict[str, Any], str, bool, tuple[StateParts, Mapping[int, dict[str, Any]]] | None], str],
    ) -> None:
        """Create the step transaction, once model and optimizers exist.

        Args:
            trainer: whose `fit` starts, or is re-entered after a fault.
            module: sharded.
            topology: of the job.
            seed: of the random streams.
            device: of this rank.
            snapshot_group: group of all ranks, used for snapshots only; None for no snapshots.
            average: of the module's weights, if a callback keeps one.
            rank_local: rank-local states registered by the program.
            save: see `SavingStrategy._save_for_recovery`.

        Raises:
            ConfigError: the job is elastic, and the module uses manual optimization, whose steps always have one
                micro-step, or a callback sets the number of micro-steps.
        """
        if self.elastic is not None:
            refuse_own_micro_steps(trainer)
        self._average = average
        averaged = None if average is None else average.average
        state = TrainingState(module, trainer.optimizers, average=averaged, verify=self.options.verify)
        elastic = None if self.elastic is None else self.elastic.options
        others = [elastic.rates] if elastic is not None and elastic.batch.follows_world else []
        self._window = AccumulationWindow(trainer, state, save, self._hooks, others=others, former=self._window)
        if self._local is None:
            self._local = LocalStates(topology, self.member.rank)
            self._means, self._values = register_all(self._local, module, trainer, average)
        for name, registered in rank_local.items():
            self._local.register(f"registered {name!r}", registered)
        self._window.set_local_state(self._local, self._means, self._values, self._rows)
        self._transaction = self.engine.attach(
            self._window, state, topology, device=device, snapshot_group=snapshot_group
        )
        if self.engine.rehearsal is not None and self.engine.rehearsal.faults is not None:
            rehearse_faults(trainer, self.engine.rehearsal.faults)
        self._transaction.pending_checkpoint = self._pending_checkpoint
        if self.member.rank == 0 and not self.is_joining:
            record_runs(self.member.job_store, entries.number, trainer.loggers)
        if steps_done(trainer) == 0 or self.is_joining:
            self._arm()  # a trainer that has trained before is armed in its first step only
        if self._metrics:
            self._values.load_described(self._metrics)  # the trainer drops them when it starts again
        if self.options.step_keyed_random:
            self._key_random_numbers(seed, topology)
        install_part_hooks(trainer, partial(self._begin_part, trainer), partial(self._end_part, trainer))
        self._rows.watch(trainer)

    def _arm(self) -> None:
        """Have lost processes replaced from now on, unless the state after an earlier entry was not kept.

        Without that state a lost process still restarts all workers.

        Raises:
            SIGTERMException: this process has received SIGTERM, and all workers are about to restart.
        """
        if entries.is_complete and not self._is_armed:
            window = self._window
            if not arm(self.member.job_store, lambda: window is not None and window.is_told_to_end):
                raise SIGTERMException
        self._is_armed = True

    def _begin_part(self, trainer: Trainer, part: str) -> None:
        group_health.allow_collectives()  # a fit that was asked to stop may be inside a window
        if trainer.sanity_checking:
            self.member.collectives.pause(is_paused=True)
        if part == EPOCH_BEGIN and self._reentry.part:
            return  # the fit is re-entered at a later part of that epoch
        if part == EVALUATION_BEGIN:
            self.rejoin(trainer)  # hooks and the creation of loaders may communicate
        assert self._window is not None
        self._window.begin_part(part)
        if self._window.part is not None:
            self._rows.begin()
        if part == EPOCH_END:
            self._means.restore_missing(trainer.lightning_module, trainer.strategy.reduce)
        if self._seed is not None:
            self._seed(trainer.current_epoch if part in (EPOCH_BEGIN, EPOCH_END) else self._next_step, 0, part)

    def _end_part(self, trainer: Trainer, part: str) -> None:
        """Wait until all ranks have ended the part.

        [Note: parts that end together] After a loss all ranks continue from one common position, so a part before it
        that some rank had not finished would never be run there. Therefore no rank continues past a part until all
        ranks have run it: the others are still in it, or have finished it and wait here. If any rank has continued,
        all ranks have run the part.
        """
        if trainer.sanity_checking:
            self.member.collectives.pause(is_paused=False)
        if trainer.sanity_checking or self._transaction is None or self._window is None:
            return
        try:
            self._transaction.barrier()
        except PeerLost:
            if trainer.received_sigterm:  # a re-entered fit would not know it
                raise SIGTERMException from None
            self._left_at_part_end = self._window.part is not None
            raise
        self._window.end_part()
        self._rows.end()

    def _key_random_numbers(self, seed: int, topology: Topology) -> None:
        rank, elastic = self.member.rank, self.elastic
        self._random_seed, self._data_rank = seed, topology.data_rank(rank)

        def begin(step: int, index: int, part: str) -> None:
            is_cut = elastic is not None and part in (BATCH, COMPUTE)
            stream = (
                elastic.random_stream_key(index, rank) if is_cut and elastic is not None else (index, self._data_rank)
            )
            seed_micro_step(seed, step, *stream, part)

        self._seed = begin

    def continue_runs(self, trainer: Trainer) -> None:
        """Let a joiner's loggers continue the run of the lost process."""
        restore_runs(self.member.job_store, entries.number, trainer.loggers)
        if self.member.rank == 0:
            append_to_csv(trainer.loggers)

    def broadcast_or_replay(self, value: Any, broadcast: Callable[[], Any], *, caller: str) -> Any:
        """Share a value between all ranks: broadcast it, or in a detached process read it from the job store.

        Only values shared before the first step are recorded there, such as run ids and log folders. They are counted
        for each caller, because a process that enters a fit again does not make every call that the first one made:
        `SaveConfigCallback` skips its own, and no checkpoint path is shared. If a value was not recorded, all ranks
        restart from the last checkpoint.

        Args:
            value: of this rank; returned inside a step that a fault has already ended.
            broadcast: communicates, and returns the shared value.
            caller: name of the function that shares the value.

        Raises:
            PeerLost: a rank was lost, outside a step.
            StateLost: the agents have not restarted a detached process that got no value.
        """
        is_detached = group_health.phase is Phase.DETACHED
        if not is_detached and group_health.suppresses_collectives:
            return value
        if not is_detached and self.member.committed > max(0, self._begins_at):
            return broadcast()
        name = f"broadcast/{entries.number}/{caller}/{self._broadcasts[caller]}"
        self._broadcasts[caller] += 1
        if is_detached:
            return self._replay(name, caller)
        shared = broadcast()
        if self.member.rank == 0:
            buffer = io.BytesIO()
            torch.save(shared, buffer)
            self.member.job_store.set(name, buffer.getvalue())
        return shared

    def _replay(self, name: str, caller: str) -> Any:
        """Return a value that was shared before the first step; without one, restart all ranks."""
        data = self.member.job_store.try_get(name)
        if data is None:
            self.member.restart_all(
                StateLost(
                    f"call {self._broadcasts[caller]} of strategy.broadcast in {caller} came before this process had "
                    "joined the other ranks, and they have not made that call before their first step. Make it in each "
                    "process in setup or on_train_start, or in training_step, or in a hook of the validation."
                )
            )
        with torch.serialization.safe_globals([PosixPath, PurePosixPath]):
            return torch.load(io.BytesIO(data), weights_only=True)

    def leave_loops(self, trainer: Trainer, error: PeerLost, *, from_checkpoint: bool) -> None:
        """Leave the loops after a fault outside a step, and stay detached until they have been re-entered.

        This rank keeps its tensors, but not its position in the loops. All ranks get a common position, that of the
        trainer that has come furthest.

        Args:
            trainer: whose loops to leave.
            error: the fault, raised in them.
            from_checkpoint: whether the fit was started from a checkpoint.
        """
        assert self._window is not None
        assert self._transaction is not None
        group_health.allow_collectives()
        incomplete = finish_batch_end(trainer, error) if self._window.is_empty else ""
        if incomplete:
            self._transaction.mark_state_lost(incomplete)
        if from_checkpoint and self._begins_at == NO_STATE and not self.is_joining:
            self.member.restart_all(StateLost("a process was lost while the checkpoint was being loaded"))
        self.member.end_generation()
        entered_with = self._reentry.description  # the loops had not yet continued from this position
        self._reentry.close()
        self._rows.restart_part()
        part, metrics = self._window.part, self._window.shown_values()
        self._metrics = metrics if part is None else part.trainer[METRICS]
        log_last_batch(trainer, self.member.committed)
        self._returned = self.engine.take_returned()
        self._is_stopped = True
        if self._average is not None:
            self._average.put_back(trainer.lightning_module)
            if self._returned is None and not self.member.has_torn_state:
                self._average.catch_up(trainer, self.member.committed)
        self._own = b"" if self._returned is not None else self._window.capture_state_outside_step(part)
        has_ended, self._left_at_part_end = self._left_at_part_end and bool(self._own), False
        after = self._window.capture_state_outside_step(None) if has_ended else b""
        if not has_ended:
            self._put_back(trainer, part)
        self._description = self.engine.stop_state(
            self._window,
            self._returned,
            is_within_step=not self._window.is_empty,
            capture=lambda: entered_with or self._own,
        )
        self._window.put_back_first_hooks()
        group_health.detach()
        self._move(trainer)
        self._broadcasts.clear()
        if self.member.committed <= 0:
            begin_afresh(trainer)
        tear_down_loops(trainer, has_evaluated=has_ended)
        if self._returned is None and not self.member.has_torn_state and not self._local_on_leave:
            self._local_on_leave = self.local_state if part is None else part.local  # Lightning resets it
        self._finished_part = None
        if has_ended and part is not None:
            self._finished_part = _Ended(part=part, own=after, metrics=metrics, local=self.local_state)

    def _move(self, trainer: Trainer) -> None:
        was_first = self.engine.saved is not None
        if self.engine.move():
            self._local = None
            forget_loaders(trainer)
            if self.engine.saved is not None and not was_first:
                self.continue_runs(trainer)

    def _stop_outside(self, number: int) -> None:
        part = part_order(read_trainer(self._description)) if self._description else 0
        self.member.publish_stop(number, in_step=False, trainer=self._description, part=part)

    def rejoin(self, trainer: Trainer) -> None:
        """Join the other ranks, for instance before a validation, if this process is not connected to them."""
        if self._transaction is not None:
            self._find_beginning(trainer)
            self._transaction.join()

    def _find_beginning(self, trainer: Trainer) -> None:
        """Set the number of committed steps from the checkpoint that the trainer resumed from, once it is known."""
        if self._begins_at != NO_STATE or self.is_detached or self.member.committed > 0:
            return
        self._begins_at = self.member.committed = steps_done(trainer)
        if self.engine.saved is not None and entries.resumed_from:
            self.engine.saved.add(entries.resumed_from, steps_done(trainer))

    def state_of_peers(self, trainer: Trainer) -> dict[str, Any]:
        """Wait until all ranks have stopped, and return the state to re-enter the loops with: all but the tensors."""
        resume_point = self.engine.wait_for_peers(
            "waiting for the trainer's state", self._stop_outside if self._is_stopped else None
        )
        is_ours = self._returned is not None and resume_point.step == self._returned.step  # partly rank-local
        description = self._returned.trainer if self._returned and is_ours else resume_point.trainer
        checkpoint = read_trainer(description)
        self._keep_or_undo_part(trainer, checkpoint)
        self._values.load_described(self._metrics or checkpoint.pop(METRICS, {}))
        if is_ours:
            self.load_local_state(checkpoint.pop(LOCAL, {}), checkpoint)
        else:
            self.load_local_state(self._local_on_leave, checkpoint)
        self._means.expect(checkpoint.pop(LOGGED, {}))
        rows = checkpoint.pop(ROWS, [])
        if self.member.committed == NO_STATE and not self.member.has_torn_state:
            self._rows.expect(rows)
        if self._own:
            checkpoint = merge_own(checkpoint, read_trainer(self._own))
        assert self._transaction is not None
        assert self._window is not None
        self._window.keep_start()
        self._window.entered_with, self._entered_with = description, checkpoint
        self._transaction.entered_at, self._transaction.entered_part = resume_point.step, part_order(checkpoint)
        if resume_point.step == 0 and not (resume_point.in_step or is_ours):
            # Nothing has been trained yet: start from scratch.
            checkpoint |= {"loops": None, "lr_schedulers": [], "callbacks": {}}
            return checkpoint
        make_loaders_as_others(trainer, checkpoint)
        self._skip_batches = batches_done(checkpoint)
        self._starts_epoch, part = is_epoch_start(checkpoint), part_of(checkpoint)
        trainer.should_stop = was_asked_to_stop(checkpoint)
        self._reentry.open(trainer, part, description)
        return checkpoint

    def _keep_or_undo_part(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        """Keep the changes of a part that this rank has run if another rank is already past it; else undo them."""
        ended, self._finished_part = self._finished_part, None
        if ended is None:
            return
        began = read_trainer(self._own)
        if part_order(checkpoint) > part_order(began):
            self._own, self._metrics, self._local_on_leave = ended.own, ended.metrics, ended.local
            self._hooks.end_part()
            self._rows.end()
        else:
            if part_of(began) == EVALUATION_BEGIN:
                trainer.fit_loop.epoch_loop.val_loop._module_mode.restore(trainer.lightning_module)
            self._put_back(trainer, ended.part)

    def _put_back(self, trainer: Trainer, part: PartStart | None) -> None:
        """Restore callbacks and buffers to the beginning of a part, which is run again."""
        self._hooks.put_back(trainer)
        self._hooks.end_part()
        if part is not None:
            part.module.put_back()

    @property
    def local_state(self) -> dict[str, Any]:
        """Buffers, metrics and logged means of this rank; empty if no fit has started."""
        return {} if self._local is None else self._local.state()

    def load_local_state(
        self, local: dict[str, Any], checkpoint: dict[str, Any], *, is_of_another_job: bool = False
    ) -> None:
        """Load this rank's buffers, metrics and logged means.

        Args:
            local: the rank-local state; empty for none.
            checkpoint: the state of the trainer at the same point.
            is_of_another_job: whether a different program may have written it.
        """
        if self._local is not None and local:
            self._restarted_with = {} if is_of_another_job else local
            begins_epoch = not is_within_epoch(checkpoint)
            self._local.load(local, begins_epoch=begins_epoch, is_of_another_job=is_of_another_job)

    def note_interrupted_save(self, path: str) -> None:
        """Note that saving the checkpoint `path` was interrupted; it is written once all ranks are back."""
        self._pending_checkpoint = path

    def finish(self, trainer: Trainer) -> None:
        """Join the others at the end of a fit, so that a replacement for a rank lost there gets its state."""
        if self._transaction is not None and trainer.state.status != TrainerStatus.INTERRUPTED and self.is_detached:
            self._transaction.join()

    def resume_from(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        """Continue where a persistent checkpoint was written, even if a loader has no state to restore."""
        if "loops" in checkpoint:
            self._skip_batches = batches_done(checkpoint)
            trainer.should_stop = trainer.should_stop or was_asked_to_stop(checkpoint)
            self._reentry.open(trainer, part_of(checkpoint), b"")

    def on_train_start(self, trainer: Trainer) -> None:
        """Check the trainer, and complete the restore: loops have been restored, and no batch has been fetched yet.

        Raises:
            ConfigError: the trainer's state, validation, hooks or loaders do not work with recovery.
        """
        assert self._window is not None
        self.member.collectives.end_set_up()
        self._window.put_back_start()
        if self._local is not None:
            self._local.load_again(self._restarted_with)
        self._restarted_with = {}
        self._find_beginning(trainer)
        if not self._is_checked and not self.is_detached:
            refuse_unreadable(trainer, self._hooks)
            worlds = {} if self.elastic is None else self.elastic.epoch_lengths(trainer)
            check_validation_interval(trainer, worlds)
            refuse_interleaved_hooks(trainer)
            self._is_checked = True
        if self.elastic is not None and not self.is_detached:
            self.elastic.publish_spec(trainer)
        if self._starts_epoch:
            trainer.fit_loop.epoch_loop.restarting = False  # nothing of the epoch has been run, so it is not resumed
            epochs: Any = trainer.fit_loop.epoch_progress
            if epochs.total.ready > epochs.total.started:  # Lightning does not count an epoch that it starts again
                epochs.current.ready = epochs.current.started + 1
        if self._reentry.part in (EPOCH_END, FIT_END):
            self.rejoin(trainer)  # the next hooks may communicate
        elif self._skip_batches:
            show_epoch(trainer)
        restore_untracked(trainer, self._entered_with)
        if self.elastic is None:
            accumulate_as_others(trainer, self._entered_with)
        self._entered_with = {}
        self._skip_batches = 0  # every loader skips its batches by now; one created later starts its epoch
        loader = trainer.fit_loop._combined_loader
        self._window.set_loader_states([] if loader is None else loader._state_dicts())

    def count_loaders(self) -> None:
        """Number loaders from 0 again: the trainer is about to set up its loaders of one kind."""
        self._num_loaders = 0

    def with_keyed_random(self, loader: Any, trainer: Trainer) -> Any:
        """The loader, with random numbers keyed by the sample or by the number of the item.

        Those of an evaluation are the same each time.
        """
        number, self._num_loaders = self._num_loaders, self._num_loaders + 1
        if self._seed is None:
            return loader
        seed, data_rank = self._random_seed, self._data_rank
        if trainer.training:
            progress: Any = trainer.fit_loop.epoch_progress
            key = LoaderKey(seed=seed, epoch=lambda: progress.current.processed, data_rank=data_rank, sets_epoch=True)
        else:
            key = LoaderKey(seed=seed, epoch=lambda: 0, data_rank=data_rank, kind="evaluated sample")
        key = replace(key, loader_index=number)
        if isinstance(loader, DataLoader):
            key_random_numbers(loader, key)
            return loader
        return loader if is_stateful(loader) else SeededIterable(loader, key)  # a stateful one may start at any item

    def note_batch(self, batch: Any) -> None:
        """Note the batch that is about to be trained on."""
        if self._window is not None:
            self._window.note_batch(batch)
            if self.engine.rehearsal is not None:
                self.engine.rehearsal.note_batch(self._window.micro_step, batch)

    def skip_done_batches(self, loader: Any, trainer: Trainer) -> Any:
        """A loader for the rest of the epoch, which skips the batches done; the loader itself if there are none.

        Raises:
            ConfigError: the loader's batches may come in any order.
        """
        if isinstance(loader, DataLoader):
            refuse_out_of_order(loader)
        return SkipBatches(loader, self._skip_batches, trainer) if self._skip_batches else loader

    # -- a step -------------------------------------------------------------------------------------------------

    def on_batch(self) -> None:
        """Note that a batch has been fetched."""
        if self._window is not None:
            self._window.note_fetched()

    @property
    def num_batches_back(self) -> int:
        """Batches of the window after the one being computed; above 0 only while the window is run again."""
        return 0 if self._window is None else self._window.num_micro_steps_after

    def begin_evaluation(self, trainer: Trainer) -> None:
        """Count the batches of an evaluation from 0, so that an evaluation that is run again draws the same numbers.

        Raises:
            ConfigError: an epoch of unknown length has ended between the micro-steps of a step.
        """
        self._num_evaluated = 0
        is_fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if is_fitting and self._window is not None and not self._window.is_empty and self.elastic is None:
            check_validation_now(trainer)

    def seed_batch(self, trainer: Trainer) -> None:
        """Start the random stream of a fetched batch: of what precedes its step, or of its evaluation."""
        if self._window is None:
            return
        if trainer.training:
            self._window.begin_batch()
        if self._seed is None:
            return
        if trainer.training:
            self._seed(self._next_step, self._window.num_micro_steps, BATCH)
            return
        self._seed(self._next_step, self._num_evaluated, EVALUATION)
        self._num_evaluated += 1

    @property
    def _next_step(self) -> int:
        """Number of the next step, valid even before this rank has joined the others."""
        assert self._transaction is not None
        entered_at = self._transaction.entered_at
        return self._transaction.step if entered_at is None else entered_at

    def seed(self) -> None:
        """Start the random stream of this micro-step."""
        if self._seed is not None and self._window is not None and self._transaction is not None:
            self._seed(self._transaction.step, self._window.micro_step, COMPUTE)

    def micro_step(self, closure: Callable[[], Any]) -> None:
        """Run a micro-step that is not the last of its window; detect whether the program communicates after it."""
        assert self._window is not None
        assert self._transaction is not None
        group_health.allow_collectives()
        if self._window.is_empty:
            self._arm()
            self._transaction.begin()
        self._window.add(closure)
        self._transaction.compute_part(self._window.compute)
        self._window.ends_micro_step()
        # Not really forbidden: `_notice_collective` notes the first collective, and allows it.
        group_health.forbid_collectives(WITHIN_WINDOW, self._notice_collective)

    def _notice_collective(self) -> None:
        """Note, and warn once, that the program communicates between micro-steps."""
        group_health.allow_collectives()
        assert self._window is not None
        if not self._window.communicates_between and self.member.rank == 0:
            log.warning("%s", WITHIN_WINDOW)
        self._window.communicates_between = True

    def step(self, closure: Callable[[], Any], commit: Callable[[Any], Any]) -> Any:
        """Run the last micro-step of a window and the optimizer, as a transaction.

        Args:
            closure: computes the micro-step.
            commit: runs the optimizer step, given the result of `closure`.
        """
        assert self._window is not None
        assert self._transaction is not None
        group_health.allow_collectives()
        if self._window.is_empty:
            self._arm()
            self._transaction.begin()
        self._window.add(closure)
        result = self._transaction.run(self._window.compute, partial(self._commit, commit))
        self._window.close()
        self.engine.publish_layout()
        if self._seed is not None:
            self._seed(self._transaction.step, 0, AFTER_COMMIT)
        return result

    def _commit(self, commit: Callable[[Any], Any], result: Any) -> Any:
        assert self._window is not None
        self._window.begin_commit()
        return commit(result)

    @property
    def takes_micro_steps(self) -> bool:
        """Whether the micro-steps before the last one of a window are run by recovery instead of Lightning."""
        return self._window is not None and self._window.accumulates

    @property
    def steps_before_vote(self) -> bool:
        """Whether the optimizer steps before the commit vote, because its step may communicate."""
        return self._window is not None and self._window.steps_before_vote

    def close(self, trainer: Trainer | None) -> None:
        """End recovery for this strategy; once a fit has completed, lost processes are no longer replaced."""
        if self._window is not None:
            self._window.part = None  # release the copies that it holds
        is_interrupted = trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED
        has_fitted = trainer is not None and self.is_fitting and not is_interrupted
        if trainer is not None:
            remove_part_hooks(trainer)
            self._rows.forget(trainer)
        if has_fitted and self._seed is not None and self._transaction is not None:
            self._seed(self._transaction.step, entries.number, TRAINING_END)
        leaves = is_interrupted or self.elastic is not None
        self.engine.end_entry(has_ended=has_fitted, leaves=leaves)
        if leaves:
            entries.has_left = entries.has_left or self.is_fitting
            entries.member, entries.worker_ids = None, self.member.world.worker_ids

    def _repaired(self, repair: Repair) -> None:
        assert self._window is not None
        self._window.entered_with, self._pending_checkpoint = b"", ""
        self._local_on_leave = {}
        if self.elastic is not None and self.engine.has_moved:
            self.elastic.record_resize(self.member.world.cause, repair)
