"""Recovery of one entry of a Trainer into its loops: `FitRecovery`, and `NullFitRecovery` where there is none.

A fault inside a step is repaired by the step's transaction. After any other fault, `fit` ends with `PeerLost`; then
`leave_loops` describes where this rank was, the launcher calls `fit` again with another `FitRecovery`, and its
`state_of_peers` returns the state that all ranks re-enter the loops with.
"""

# Lightning's loops and connectors have no public API.
# pyright: reportPrivateUsage=false

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from typing_extensions import override

from hyperpod_plugins.comm import group_health
from hyperpod_plugins.data.random_numbers import LoaderKey, SeededIterable, key_random_numbers
from hyperpod_plugins.elastic.membership.admission import arm
from hyperpod_plugins.errors import PeerLost, StateLost
from hyperpod_plugins.ledger import TimeCategory, ledger
from hyperpod_plugins.lightning.accumulation_window import (
    WITHIN_WINDOW,
    AccumulationWindow,
    PartStart,
    SaveForRecovery,
)
from hyperpod_plugins.lightning.callback_states import RankLocalCallbacks
from hyperpod_plugins.lightning.checkpoint_calls import CheckpointCalls
from hyperpod_plugins.lightning.compat import LightningModule, SIGTERMException, Trainer, TrainerStatus
from hyperpod_plugins.lightning.compat import override as override_method
from hyperpod_plugins.lightning.compat import restore as restore_method
from hyperpod_plugins.lightning.elastic_training import ElasticState
from hyperpod_plugins.lightning.left_loops import EndedPart, LeftLoops
from hyperpod_plugins.lightning.loader_attributes import LoaderAttributes
from hyperpod_plugins.lightning.local_state import LoggedMeans, MetricStates, register_all
from hyperpod_plugins.lightning.loggers import LoggedRows, continue_runs, record_runs
from hyperpod_plugins.lightning.module_checks import (
    check_limit,
    check_validation_interval,
    check_validation_now,
    refuse_frequency_of_schedules,
    refuse_nested_fits,
    refuse_own_micro_steps,
)
from hyperpod_plugins.lightning.reentry import (
    Reentry,
    book_data_waits,
    find_batch_despite_skipped_ones,
    finish_batch_end,
    forget_results,
    install_part_hooks,
    is_stateful,
    remove_part_hooks,
    rest_of_epoch,
    take_micro_steps,
)
from hyperpod_plugins.lightning.samples_read import note_samples
from hyperpod_plugins.lightning.saving_hooks import SavingHooks, refuse_interleaved_hooks
from hyperpod_plugins.lightning.shown_values import ShownValues
from hyperpod_plugins.lightning.trainer_entries import ENTRY, entries, rehearse_fit, save_entry_end
from hyperpod_plugins.lightning.trainer_state import (
    GROUPS,
    LOCAL,
    LOGGED,
    METRICS,
    READ_BY_HOOKS,
    ROWS,
    accumulate_as_others,
    batches_done,
    begin_afresh,
    begin_epoch_after_last_batch,
    forget_loaders,
    forget_training_loader,
    freeze_as_saved,
    is_epoch_start,
    is_within_epoch,
    limit_as_others,
    log_last_batch,
    make_loaders_as_others,
    merge_own,
    not_restarting,
    part_of,
    part_order,
    put_back_last_saves,
    read_trainer,
    refuse_unreadable,
    restore_untracked,
    show_epoch,
    steps_done,
    steps_in,
    tear_down_loops,
    untracked_in,
    was_asked_to_stop,
)
from hyperpod_plugins.lightning.weight_averaging import CallbackAverage
from hyperpod_plugins.parallel import Topology
from hyperpod_plugins.recovery import NO_STATE, TrainingState, seed_micro_step
from hyperpod_plugins.recovery.engine import RecoveryEngine
from hyperpod_plugins.recovery.local_objects import RankLocalState
from hyperpod_plugins.recovery.local_state import LocalStates
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
from hyperpod_plugins.recovery.state_transfer import load_hyperparameters

log = logging.getLogger(__name__)


class NullFitRecovery:
    """What a strategy calls where steps are not transactions: without recovery, outside a fit, before its set-up.

    Nothing is noted, and nothing is repaired.
    """

    is_active = False
    """Whether steps run as transactions."""

    @property
    def accumulates(self) -> bool:
        """Whether the micro-steps before the last one of a window are run by recovery instead of Lightning."""
        return False

    @property
    def num_batches_back(self) -> int:
        """Batches of the window after the one being computed; above 0 only while the window is run again."""
        return 0

    @property
    def local_state(self) -> dict[str, Any]:
        """Buffers, metrics and logged means of this rank; empty without recovery."""
        return {}

    def load_local_state(
        self, local: dict[str, Any], checkpoint: dict[str, Any], *, is_of_another_job: bool = False
    ) -> None:
        """Load this rank's buffers, metrics and logged means.

        Args:
            local: the rank-local state; empty for none.
            checkpoint: the state of the trainer at the same point.
            is_of_another_job: whether a different program may have written it.
        """

    def state_of_peers(self) -> dict[str, Any]:
        """Wait until all ranks have stopped, and return the state to re-enter the loops with: all but the tensors."""
        return {}

    def resume_from(self, checkpoint: dict[str, Any]) -> None:
        """Continue where a persistent checkpoint was written, even if a loader has no state to restore."""

    def on_train_start(self) -> None:
        """Check the trainer, and complete the restore: loops have been restored, and no batch has been fetched yet.

        Raises:
            ConfigError: the trainer's state, validation, hooks or loaders do not work with recovery.
        """

    def count_loaders(self) -> None:
        """Number loaders from 0 again: the trainer is about to set up its loaders of one kind."""

    def process_loader(self, loader: Any) -> Any:
        """The loader with random numbers keyed by the sample or the item; in a resumed epoch, for the rest of it.

        Raises:
            ConfigError: the batches of a loader for training may come in any order.
        """
        return loader

    def follow_loader(self, loader: Any) -> Any:
        """The same loader, which keeps its own position; what it reads with is watched."""
        return loader

    def on_batch(self) -> None:
        """Note that a batch has been fetched."""

    def begin_evaluation(self) -> None:
        """Join the other ranks before an evaluation, and count its batches from 0, so that each run draws the same.

        Raises:
            ConfigError: an epoch of unknown length has ended between the micro-steps of a step.
        """

    def seed_batch(self) -> None:
        """Start the random stream of a fetched batch: of what precedes its step, or of its evaluation."""

    def begin_micro_step(self, batch: Any) -> None:
        """Note the batch that is about to be trained on, and start the random stream of this micro-step."""

    def micro_step(self, closure: Callable[[], Any]) -> None:
        """Run a micro-step that is not the last of its window; detect whether the program communicates after it."""
        closure()

    def step(self, closure: Callable[[], Any], commit: Callable[[Any], Any]) -> Any:
        """Run the last micro-step of a window and the optimizer; with recovery, as a transaction.

        Args:
            closure: computes the micro-step.
            commit: runs the optimizer step, given the result of `closure`.
        """
        return commit(closure())

    def note_save(self, own: str, shared: str) -> None:
        """Note that a checkpoint is being written to the path `shared`, which is `own` on this rank."""

    def leave_loops(self, error: PeerLost, *, from_checkpoint: bool) -> bool:
        """Leave the loops after a fault outside a step, and stay detached until they have been re-entered.

        This rank keeps its tensors, but not its position in the loops. All ranks get a common position, that of the
        trainer that has come furthest.

        Args:
            error: the fault, raised in the loops.
            from_checkpoint: whether the fit was started from a checkpoint.

        Returns:
            Whether the loops can be re-entered.
        """
        return False

    def repaired(self) -> None:
        """Forget where the loops were entered and left: all ranks are connected again."""

    def finish(self) -> None:
        """Join the others at the end of a fit, and keep the state after it, so that no process has to run it again.

        Raises:
            PeerLost: a rank was lost meanwhile; its replacement joins here.
        """

    def close(self, *, has_ended: bool) -> None:
        """Release what this entry has attached to the trainer.

        Args:
            has_ended: whether the fit has come to its end.
        """


class FitRecovery(NullFitRecovery):
    """Step transactions and trainer state of one entry into a fit's loops, first or again after a fault.

    Use it in the main thread only.
    """

    is_active = True

    def __init__(
        self,
        engine: RecoveryEngine,
        elastic: ElasticState | None,
        trainer: Trainer,
        module: LightningModule,
        topology: Topology,
        *,
        seed: int,
        device: torch.device,
        snapshot_group: dist.ProcessGroup | None,
        average: CallbackAverage | None,
        rank_local: Mapping[str, RankLocalState],
        save: SaveForRecovery,
        former: "FitRecovery | None",
    ) -> None:
        """Create the step transaction, once model and optimizers exist; see `begin`.

        Args:
            engine: of this process.
            elastic: how the job changes its size; None for one that does not.
            trainer: whose `fit` starts, or is re-entered after a fault.
            module: sharded.
            topology: of the job.
            seed: of the random streams.
            device: of this rank.
            snapshot_group: group of all ranks, used for snapshots only; None for no snapshots.
            average: of the module's weights, if a callback keeps one.
            rank_local: rank-local states registered by the program.
            save: see `HyperPodStrategy._save_for_recovery`.
            former: the entry that a fault has ended; None for the first one.

        Raises:
            ConfigError: a callback trains inside the fit; or the job is elastic, and the module uses manual
                optimization, whose steps always have one micro-step, or a callback sets the number of micro-steps.
        """
        refuse_nested_fits(trainer)
        if elastic is not None:
            refuse_own_micro_steps(trainer)
        options = engine.options
        self.engine, self.member = engine, engine.member
        self.elastic = elastic
        self.trainer = trainer
        self._average = average
        averaged = None if average is None else average.average
        state = TrainingState(module, trainer.optimizers, average=averaged, verify=options.verify)
        chosen = None if elastic is None else elastic.options
        others = [chosen.rates] if chosen is not None and chosen.batch.follows_world else []
        self._hooks, self._rows = (SavingHooks(), LoggedRows()) if former is None else (former._hooks, former._rows)
        self._calls = CheckpointCalls() if former is None else former._calls
        window, local = (None, None) if former is None else (former.window, former.local)
        self.window = AccumulationWindow(trainer, state, save, self._hooks, self._calls, others=others, former=window)
        if former is None or former._has_moved:
            self.local = LocalStates(topology, self.member.rank, former=local, former_ranks=engine.former_ranks)
            self.means, self.values, self.metrics = register_all(self.local, module, trainer, average)
            self._callbacks = RankLocalCallbacks(self.local, trainer, self._hooks, self._calls)
        else:
            self.local, self.means, self.values, self.metrics, self._callbacks = former.rank_local
        if former is None and self.member.is_joining and entries.begins_anew:
            self.local.begins_at = steps_done(trainer)
        for name, registered in rank_local.items():
            self.local.register(f"registered {name!r}", registered)
        self.window.set_local_state(self.local, self.means, self.values, self._rows, self.metrics, self._callbacks)
        self.transaction = engine.attach(self.window, state, topology, device=device, snapshot_group=snapshot_group)
        self._is_keyed, self._random_seed = options.step_keyed_random, seed
        here = self.member.rank
        self._data_rank, self._compute_rank = topology.data_rank(here), topology.compute_rank(here)
        self._num_evaluated = self._num_loaders = 0
        self._reentry = Reentry()
        self._skip_batches, self._starts_epoch, self._is_first = 0, False, former is None
        self._entered_with: dict[str, Any] = {}
        self.data = LoaderAttributes(trainer, engine.member, elastic is not None) if former is None else former.data
        self._begins = self._is_first and not self.member.is_joining
        """Whether this rank has been there from the beginning of the fit, and no fault has interrupted it yet."""
        self._left = LeftLoops() if former is None else former._left
        """Where the loops were left last."""
        self._restarted_with: dict[str, Any] = {}
        """Rank-local state that has been loaded, until `on_train_start` has been called, which may reset it."""
        self._restarted_at: dict[str, Any] = {}
        """What `untracked_in` has found in a checkpoint of this job, until `on_train_start` has been called."""
        self._has_moved = False
        """Whether this process has moved to another world after it left this entry."""
        self._left_at_part_end = False
        """Whether this rank leaves the loops while it waits for the others at the end of a part."""
        self._is_checked = former is not None and former._is_checked
        self._is_armed = former is not None and former._is_armed

    @property
    def rank_local(self) -> tuple[LocalStates, LoggedMeans, ShownValues, MetricStates, RankLocalCallbacks]:
        """The objects that hold rank-local state, which the next entry takes over."""
        return self.local, self.means, self.values, self.metrics, self._callbacks

    # -- setting up ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Attach this entry to the trainer; in a fit that has not trained yet, have lost processes replaced.

        Raises:
            SIGTERMException: this process has received SIGTERM, and all workers are about to restart.
        """
        trainer = self.trainer
        forget_training_loader(trainer)
        rehearse_fit(trainer, self.engine.rehearsal)
        if self.member.rank == 0 and not self.member.is_joining:
            record_runs(self.member.job_store, entries.number, trainer.loggers)
        if steps_done(trainer) == 0 or self.member.is_joining:
            self._arm()  # a trainer that has trained before is armed in its first step only
        if self._left.metrics:
            self.values.load_described(self._left.metrics)  # the trainer drops them when it starts again
        install_part_hooks(trainer, self._begin_part, self._end_part)
        strategy: Any = trainer.strategy
        take_micro_steps(trainer, strategy.micro_step)
        find_batch_despite_skipped_ones(trainer)
        book_data_waits(trainer)
        self._rows.watch(trainer)

    def _arm(self) -> None:
        """Have lost processes replaced from now on, unless the state after an earlier entry was not kept.

        Without that state a lost process still restarts all workers.
        """
        is_due = entries.is_complete and not self._is_armed
        if is_due and not arm(self.member.job_store, lambda: self.window.is_told_to_end):
            raise SIGTERMException
        self._is_armed = True

    def _begin_part(self, part: str) -> None:
        group_health.allow_collectives()  # a fit that was asked to stop may be inside a window
        if self.trainer.sanity_checking:
            self.member.collectives.pause(is_paused=True)
        self.data.begin_part(part)
        if part == EPOCH_BEGIN and self._reentry.part:
            return  # the fit is re-entered at a later part of that epoch
        if part == EVALUATION_BEGIN:
            self._rejoin()  # hooks and the creation of loaders may communicate
            ledger.enter(TimeCategory.EVALUATION)
        self.window.begin_part(part)
        if part in (EPOCH_BEGIN, EVALUATION_BEGIN):
            forget_results(self.trainer, part)
        if self.window.part is not None:
            self._rows.begin()
        if part == EPOCH_END:
            self.means.restore_missing(self.trainer.lightning_module, self.trainer.strategy.reduce)
        is_of_epoch = part in (EPOCH_BEGIN, EPOCH_END)
        self._start_stream(self.trainer.current_epoch if is_of_epoch else self._next_step, 0, part)

    def _end_part(self, part: str) -> None:
        """Wait until all ranks have ended the part; at the beginning of an epoch, only note where the loaders are.

        [Note: parts that end together] After a loss all ranks continue from one common position, so a part before it
        that some rank had not finished would never be run there. Therefore no rank continues past a part until all
        ranks have run it: the others are still in it, or have finished it and wait here. If any rank has continued,
        all ranks have run the part.
        """
        if self.trainer.sanity_checking:
            self.member.collectives.pause(is_paused=False)
            ledger.enter(TimeCategory.SETUP)
            return
        self.data.end_part(part)
        if part == EPOCH_BEGIN:
            self.window.note_loaders()
            return
        try:
            self.transaction.barrier()
        except PeerLost:
            if self.trainer.received_sigterm:  # a re-entered fit would not know it
                raise SIGTERMException from None
            self._left_at_part_end = self.window.part is not None
            raise
        self.window.end_part()
        self._rows.end()
        ledger.enter(TimeCategory.OTHER)

    @override
    def on_train_start(self) -> None:
        trainer = self.trainer
        restore_method(trainer, "_run_sanity_check")
        self.member.collectives.end_set_up()
        self.window.put_back_start()
        self.data.begin()
        self.local.load_again(self._restarted_with)
        self._restarted_with = {}
        is_detached = group_health.is_unavailable
        if self._begins and not is_detached:  # before the beginning is known: a replacement reads no checkpoint
            self.local.exchange(
                steps_done(trainer), is_beginning=True
            )  # a rank that is lost in the first step has what it begins with
            self.transaction.barrier()
        self._find_beginning()
        if not self._is_checked and not is_detached:
            self._check_program()
        if self.elastic is not None and not is_detached:
            self.elastic.publish_spec(trainer)
        if self._starts_epoch:
            trainer.fit_loop.epoch_loop.restarting = False  # nothing of the epoch has been run, so it is not resumed
            epochs: Any = trainer.fit_loop.epoch_progress
            if epochs.total.ready > epochs.total.started:  # Lightning does not count an epoch that it starts again
                epochs.current.ready = epochs.current.started + 1
        if not self._reentry.part:  # at a part, the epoch of that last batch is continued
            begin_epoch_after_last_batch(trainer)
        restore_untracked(trainer, self._restarted_at | self._entered_with)
        self._restarted_at = {}
        load_hyperparameters(self._entered_with.get(GROUPS, []), trainer.optimizers)  # hooks read the learning rate
        if self._reentry.part in (EPOCH_END, FIT_END):
            self._rejoin()  # the next hooks may communicate
        elif self._skip_batches:
            show_epoch(trainer)
        if self.elastic is None:
            accumulate_as_others(trainer, self._entered_with)
        self._entered_with = {}
        self._skip_batches = 0  # every loader skips its batches by now; one created later starts its epoch
        self.window.note_loaders()

    def _check_program(self) -> None:
        """Refuse a program that could not be recovered exactly, or not at each size that the job may have."""
        trainer = self.trainer
        worlds = {} if self.elastic is None else self.elastic.epoch_lengths(trainer)
        refuse_unreadable(trainer, self._hooks)
        check_validation_interval(trainer, worlds)
        follows_world = self.elastic is not None and self.elastic.options.batch.follows_world
        check_limit(trainer, worlds, follows_world=follows_world)
        refuse_frequency_of_schedules(trainer, worlds)
        refuse_interleaved_hooks(trainer)
        self.window.held_optimizers.check()
        has_peers = self.member.world.size > 1 or self.elastic is not None
        if has_peers and steps_done(trainer) == 0:  # where all runs begin: compiled code that is watched runs eagerly
            self.window.batch_hooks.watch()
        self._is_checked = True

    # -- leaving and re-entering the loops ----------------------------------------------------------------------

    @override
    def note_save(self, own: str, shared: str) -> None:
        self._calls.note_path(own, shared)
        self.local.note_hooks()

    @override
    def leave_loops(self, error: PeerLost, *, from_checkpoint: bool) -> bool:
        trainer, member = self.trainer, self.member
        group_health.allow_collectives()
        if self.window.is_empty and self.window.part is None:
            left_out = finish_batch_end(trainer, error)
            self._calls.put_back(left_out.checkpoints)
            if left_out.incomplete:
                self.transaction.mark_state_lost(left_out.incomplete)
        self._restart_if_not_begun(from_checkpoint=from_checkpoint)
        failure = member.end_generation()
        self.engine.restart_if_left(failure)
        entered_with = self._reentry.description  # the loops had not yet continued from this position
        self._reentry.close()
        self._rows.restart_part()
        part, metrics = self.window.part, self.window.shown_values()
        log_last_batch(trainer, member.committed)
        returned = self.engine.take_returned()
        if self._average is not None:
            self._average.put_back(trainer.lightning_module)
            if returned is None and not member.has_torn_state:
                self._average.catch_up(trainer, member.committed)
        own = b"" if returned is not None else self.window.capture_state_outside_step(part)
        has_ended, self._left_at_part_end = self._left_at_part_end and bool(own), False
        after = self.window.capture_state_outside_step(None) if has_ended else b""
        if not (has_ended or self._put_back(part)):
            self.transaction.mark_state_lost(self.window.outside.WHY_LOST)
        description = self.engine.stop_state(
            self.window,
            returned,
            is_within_step=not self.window.is_empty,
            capture=lambda: entered_with or own,
        )
        self.window.put_back_first_hooks()
        self.window.forget_gradients()
        self.window.batch_hooks.end()
        self._left = LeftLoops(
            returned=returned,
            description=description,
            own=own,
            metrics=metrics if part is None else part.trainer[METRICS],
            local=self._left.local,
        )
        group_health.detach()
        local = self.local.state()  # after a move too: means and metrics of this rank's samples
        self._move()
        if member.committed <= 0:
            begin_afresh(trainer)
        tear_down_loops(trainer, has_evaluated=has_ended)
        if returned is None and not member.has_torn_state and not self._left.local:
            self._left.local = local if part is None else part.local  # Lightning resets it
        if has_ended and part is not None:
            self._left.ended = EndedPart(part=part, own=after, metrics=metrics, local=local)
        return True

    def _restart_if_not_begun(self, *, from_checkpoint: bool) -> None:
        """Restart all processes if the fit begins at a later step than 0, and the ranks have not agreed on it yet."""
        if self.engine.begins_at != NO_STATE or self.member.is_joining:
            return
        if from_checkpoint:
            self.member.restart_all(StateLost("a process was lost while the checkpoint was being loaded"))
        if steps_done(self.trainer) > 0:
            why = "a process was lost before a trainer that has trained began its next fit"
            self.member.restart_all(StateLost(why))

    def _move(self) -> None:
        was_first = self.engine.saved is not None
        if self.engine.move():
            self._has_moved = True
            forget_loaders(self.trainer)
            if self.engine.saved is not None and not was_first:
                continue_runs(self.member, entries.number, self.trainer.loggers)

    def _stop_outside(self, number: int) -> None:
        description = self._left.description
        part = part_order(read_trainer(description)) if description else 0
        self.member.publish_stop(number, in_step=False, trainer=description, part=part)

    def _rejoin(self) -> None:
        """Join the other ranks, for instance before a validation, if this process is not connected to them."""
        self._find_beginning()
        self.transaction.join()

    def _find_beginning(self) -> None:
        """Set the number of committed steps from the checkpoint that the trainer resumed from, once it is known."""
        if self.engine.begins_at != NO_STATE or group_health.is_unavailable or self.member.committed > 0:
            return
        self.engine.begin_at(steps_done(self.trainer), entries.resumed_from)

    @override
    def state_of_peers(self) -> dict[str, Any]:
        trainer, left, returned = self.trainer, self._left, self._left.returned
        restore_method(trainer, "_run_sanity_check")
        resume_point = self.engine.wait_for_peers(
            "waiting for the trainer's state", None if self._is_first else self._stop_outside
        )
        is_ours = returned is not None and resume_point.step == returned.step  # partly rank-local
        description = returned.trainer if returned and is_ours else resume_point.trainer
        checkpoint = read_trainer(description)
        forget_training_loader(trainer)
        self._keep_or_undo_part(checkpoint)
        self.values.load_described(left.metrics or checkpoint.pop(METRICS, {}))
        if is_ours:
            self.load_local_state(checkpoint.pop(LOCAL, {}), checkpoint)
        else:
            self.load_local_state(left.local, checkpoint)
        self.means.expect(checkpoint.pop(LOGGED, {}))
        read_by_hooks = checkpoint.pop(READ_BY_HOOKS, {})
        is_behind = self.member.has_torn_state or self.member.committed == NO_STATE  # its buddy gives it the rest
        rows = checkpoint.pop(ROWS, [])
        if self.member.committed == NO_STATE and not self.member.has_torn_state:
            self._rows.expect(rows)
        if left.own:
            own = read_trainer(left.own)
            has_run_less = part_order(own) < part_order(checkpoint)  # its callbacks lack what the hooks of parts did
            keys = () if is_behind or has_run_less else self._callbacks.keys
            checkpoint = merge_own(checkpoint, own, keys)
        is_replaced = self.member.has_torn_state or (is_behind and self.member.is_joining)
        has_own = not is_replaced or resume_point.step == self.local.begins_at
        self.window.keep_start({} if has_own else read_by_hooks)
        self.window.entered_with, self._entered_with = description, checkpoint
        self.window.entered_within_step = resume_point.in_step or is_ours
        self.transaction.entered_at, self.transaction.entered_part = resume_point.step, part_order(checkpoint)
        if resume_point.step == 0 and not (resume_point.in_step or is_ours):
            # Nothing has been trained yet: start from scratch.
            checkpoint |= {"loops": None, "lr_schedulers": [], "callbacks": {}}
            self.data.enter(checkpoint)
            return checkpoint
        limit_as_others(trainer, checkpoint)
        self._end_if_rehearsed(resume_point.step, checkpoint["global_step"])
        self.data.enter(checkpoint)
        make_loaders_as_others(trainer, checkpoint)
        self._skip_batches = batches_done(checkpoint)
        self._starts_epoch, part = is_epoch_start(checkpoint), part_of(checkpoint)
        trainer.should_stop = was_asked_to_stop(checkpoint)
        self._reentry.open(trainer, part, description)
        # Lightning takes a validation that precedes this position for one that was not counted.
        override_method(trainer.fit_loop.epoch_loop.val_loop, "increment_progress_to_evaluation_end", _nothing)
        # Its own reason to leave the check out is a loop in the middle of an epoch, which it does not always find.
        override_method(trainer, "_run_sanity_check", _nothing)
        return checkpoint

    def _keep_or_undo_part(self, checkpoint: dict[str, Any]) -> None:
        """Keep the changes of a part that this rank has run if another rank is already past it; else undo them."""
        left = self._left
        ended, left.ended = left.ended, None
        if ended is None:
            return
        began = read_trainer(left.own)
        if part_order(checkpoint) > part_order(began):
            left.own, left.metrics, left.local = ended.own, ended.metrics, ended.local
            self._hooks.end_part()
            self._rows.end()
        else:
            if part_of(began) == EVALUATION_BEGIN:
                self.trainer.fit_loop.epoch_loop.val_loop._module_mode.restore(self.trainer.lightning_module)
            if not self._put_back(ended.part):
                self.member.restart_all(StateLost(self.window.outside.WHY_LOST))

    def _put_back(self, part: PartStart | None) -> bool:
        """Restore what hooks of a part may have written, if that is possible; it is run again."""
        self._hooks.put_back(self.trainer)
        self._hooks.end_part()
        if part is not None:
            self._calls.note_written()
            put_back_last_saves(self.trainer, part.trainer)
            part.module.put_back()
        return part is None or self.window.outside.put_back()

    @property
    @override
    def local_state(self) -> dict[str, Any]:
        return {} if self._has_moved else {**self.local.state(), LOGGED: self.means.forms()}

    @override
    def load_local_state(
        self, local: dict[str, Any], checkpoint: dict[str, Any], *, is_of_another_job: bool = False
    ) -> None:
        if local:
            self._restarted_with = {} if is_of_another_job else local
            begins_epoch = not is_within_epoch(checkpoint)
            if not (begins_epoch or is_of_another_job):
                self.means.expect(local.get(LOGGED, {}))
            self.local.load(local, begins_epoch=begins_epoch, is_of_another_job=is_of_another_job)

    @override
    def resume_from(self, checkpoint: dict[str, Any]) -> None:
        forget_training_loader(self.trainer)
        if "loops" in checkpoint:
            self._skip_batches = batches_done(checkpoint)
            self.data.enter(checkpoint)
            if entries.resumed_from:
                self._restarted_at = untracked_in(self.trainer, checkpoint, entries.resumed_from)
                make_loaders_as_others(self.trainer, self._restarted_at)
                freeze_as_saved(self.trainer, self._restarted_at)
                if checkpoint.get(ENTRY) == entries.number:  # an earlier fit may have had other limits
                    limit_as_others(self.trainer, checkpoint)
            self.trainer.should_stop = self.trainer.should_stop or was_asked_to_stop(checkpoint)
            self._end_if_rehearsed(steps_in(checkpoint, self.trainer), checkpoint["global_step"])
            self._reentry.open(self.trainer, part_of(checkpoint), b"")

    @override
    def repaired(self) -> None:
        self.window.entered_with = b""
        self._left.local = {}
        self._calls.repaired()

    # -- loaders and batches ------------------------------------------------------------------------------------

    @override
    def count_loaders(self) -> None:
        self._num_loaders = 0

    @override
    def follow_loader(self, loader: Any) -> Any:
        self.data.follow(loader, self._num_loaders)
        self._num_loaders += 1
        return loader

    @override
    def process_loader(self, loader: Any) -> Any:
        if self._is_keyed:
            loader = self._with_keyed_random(loader, self._num_loaders)
        loader = self.follow_loader(loader)
        if not self.trainer.training:
            return loader
        category = TimeCategory.CHECKPOINT_RESTORE if self._begins else TimeCategory.RESTORE
        return rest_of_epoch(loader, self._skip_batches, self.trainer, category)

    def _with_keyed_random(self, loader: Any, number: int) -> Any:
        """The loader with its random numbers keyed; those of an evaluation are the same each time."""
        seed, data_rank = self._random_seed, self._data_rank
        if self.trainer.training:
            progress: Any = self.trainer.fit_loop.epoch_progress
            key = LoaderKey(seed=seed, epoch=lambda: progress.current.processed, data_rank=data_rank, sets_epoch=True)
        else:
            key = LoaderKey(seed=seed, epoch=lambda: 0, data_rank=data_rank, kind="evaluated sample")
        key = replace(key, loader_index=number)
        if isinstance(loader, DataLoader):
            key_random_numbers(loader, key)
            return loader
        return loader if is_stateful(loader) else SeededIterable(loader, key)  # a stateful one may start at any item

    @override
    def on_batch(self) -> None:
        ledger.enter(TimeCategory.OTHER if self.window.is_empty else TimeCategory.STEP)
        self.data.note_read()
        self.window.note_fetched()

    @override
    def begin_evaluation(self) -> None:
        self._num_evaluated = 0
        if not self.trainer.sanity_checking and not self.window.is_empty and self.elastic is None:
            check_validation_now(self.trainer)
        self._rejoin()

    # -- random streams -----------------------------------------------------------------------------------------

    def _start_stream(self, step: int, index: int, part: str) -> None:
        if not self._is_keyed:
            return
        if self.elastic is not None and part in (BATCH, COMPUTE):
            stream = self.elastic.random_stream_key(index, self.member.rank, is_computing=part == COMPUTE)
        else:
            stream = index, self._compute_rank if part == COMPUTE else self._data_rank
        seed_micro_step(self._random_seed, step, *stream, part)

    @override
    def seed_batch(self) -> None:
        if self.trainer.training:
            self.window.begin_batch()
            self._start_stream(self._next_step, self.window.num_micro_steps, BATCH)
        else:
            self.window.outside.notice()
            if self._is_keyed:
                self._start_stream(self._next_step, self._num_evaluated, EVALUATION)
                self._num_evaluated += 1

    @property
    def _next_step(self) -> int:
        """Number of the next step, valid even before this rank has joined the others."""
        entered_at = self.transaction.entered_at
        return self.transaction.step if entered_at is None else entered_at

    @override
    def begin_micro_step(self, batch: Any) -> None:
        self._start_stream(self.transaction.step, self.window.micro_step, COMPUTE)
        self.window.note_batch(batch)
        if self.engine.rehearsal is not None:
            self.engine.rehearsal.note_batch(self.window.micro_step, batch)

    # -- a step -------------------------------------------------------------------------------------------------

    @property
    @override
    def accumulates(self) -> bool:
        return self.window.accumulates

    @property
    @override
    def num_batches_back(self) -> int:
        return self.window.num_micro_steps_after

    @override
    def micro_step(self, closure: Callable[[], Any]) -> None:
        self._add(closure)
        self.transaction.compute_part(self.window.compute)
        self.window.ends_micro_step()
        # Not really forbidden: `_notice_collective` notes the first collective, and allows it.
        group_health.forbid_collectives(WITHIN_WINDOW, self._notice_collective)

    @override
    def step(self, closure: Callable[[], Any], commit: Callable[[Any], Any]) -> Any:
        if self.window.steps_before_vote:
            closure, commit = partial(_compute_and_commit, closure, commit), _nothing_more
        self._add(closure)
        result = self.transaction.run(self.window.compute, partial(self._commit, commit))
        self.window.close()
        self._calls.keep(self.trainer)
        self.engine.publish_layout()
        if self.engine.rehearsal is not None:
            is_automatic, done = self.trainer.lightning_module.automatic_optimization, self.transaction.step
            self._end_if_rehearsed(done, done if is_automatic else self.trainer.global_step)
        self._start_stream(self.transaction.step, 0, AFTER_COMMIT)
        return result

    def _end_if_rehearsed(self, steps: int, global_step: int) -> None:
        """In a rehearsed job, end the fit after its last step, as if the trainer's `max_steps` had been reached.

        Args:
            steps: number of steps done.
            global_step: the trainer's count of them.
        """
        if self.engine.rehearsal is not None and self.engine.rehearsal.is_last(steps):
            self.trainer.fit_loop.epoch_loop.max_steps = global_step

    def _add(self, closure: Callable[[], Any]) -> None:
        """Add a micro-step to the window; the first one begins the transaction."""
        group_health.allow_collectives()
        if self.window.is_empty:
            self._arm()
            self.transaction.begin()
        self.window.add(closure)

    def _commit(self, commit: Callable[[Any], Any], result: Any) -> Any:
        self.window.begin_commit()
        ledger.note_loss(result)
        note_samples(self.trainer, self.window.num_micro_steps)
        return commit(result)

    def _notice_collective(self) -> None:
        """Note, and warn once, that the program communicates between micro-steps."""
        group_health.allow_collectives()
        if not self.window.communicates_between and self.member.rank == 0:
            log.warning("%s", WITHIN_WINDOW)
        self.window.communicates_between = True

    # -- the end ------------------------------------------------------------------------------------------------

    @override
    def finish(self) -> None:
        if self.trainer.state.status == TrainerStatus.INTERRUPTED:
            return
        if group_health.is_unavailable:
            self.transaction.join()
        self._start_end_stream()
        if self.engine.rehearsal is not None:
            self.engine.rehearsal.end_call(steps_done(self.trainer))
        self.member.activity = "keeping the state after a fit"
        save_entry_end(
            self.trainer,
            "fit",
            None,
            self.member.worker_id,
            local=self.local_state,
            worker_ids=self.member.world.worker_ids,
        )

    @override
    def close(self, *, has_ended: bool) -> None:
        self.window.part = None  # release the copies that it holds
        self.window.batch_hooks.end()
        remove_part_hooks(self.trainer)
        self._rows.unwatch(self.trainer)
        self._calls.release(self.trainer)
        if has_ended:
            not_restarting(self.trainer)  # a fit that was re-entered at its last part has run no loop that clears it
            self._start_end_stream()

    def _start_end_stream(self) -> None:
        self._start_stream(self.transaction.step, entries.number, TRAINING_END)


def _compute_and_commit(closure: Callable[[], Any], commit: Callable[[Any], Any]) -> Any:
    return commit(closure())


def _nothing() -> None:
    return None


def _nothing_more(result: Any) -> Any:
    return result
