"""One optimizer step as Lightning runs it: the closures of an accumulation window, which can be run again."""

# Lightning's connectors and results have no public API.
# pyright: reportPrivateUsage=false

import copy
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from hyperpod_plugins.errors import CheckpointMismatch
from hyperpod_plugins.lightning.batch_hooks import BatchHooks
from hyperpod_plugins.lightning.callback_states import RankLocalCallbacks
from hyperpod_plugins.lightning.checkpoint_calls import CheckpointCalls
from hyperpod_plugins.lightning.compat import (
    Trainer,
    original,
    override,
    restore,
)
from hyperpod_plugins.lightning.held_optimizers import HeldOptimizers
from hyperpod_plugins.lightning.local_state import (
    MEANS_OF_EPOCH,
    METRICS_OF_EPOCH,
    CountedStart,
    LoggedMeans,
    LoggedStart,
    MetricStates,
    attributes_of,
)
from hyperpod_plugins.lightning.loggers import LoggedRows
from hyperpod_plugins.lightning.reentry import is_stateful
from hyperpod_plugins.lightning.saving_hooks import SavingHooks
from hyperpod_plugins.lightning.shown_values import TABLES, ShownValues, Tables, put_tables, tables_of
from hyperpod_plugins.lightning.trainer_state import (
    GROUPS,
    LOCAL,
    LOGGED,
    arguments,
    as_checkpoint,
    describe_part_start,
    describe_trainer,
    is_within_epoch,
    named_by_kind,
    rank_local_of,
    read_trainer,
    steps_done,
    take_rank_local,
    with_local,
    with_rank_local,
    without_requests,
)
from hyperpod_plugins.parallel.checkpoint.state import StateParts
from hyperpod_plugins.parallel.elementwise import is_elementwise
from hyperpod_plugins.recovery import SAVING_GROUP, RecoveryPlan, Snapshot, TrainingState
from hyperpod_plugins.recovery.attributes import PlainAttributes
from hyperpod_plugins.recovery.buffer_states import BufferStates
from hyperpod_plugins.recovery.local_state import LocalStates
from hyperpod_plugins.recovery.optimizer_copy import FreshGradients, HasState, OptimizerCopy, local_tensor
from hyperpod_plugins.recovery.rng import BATCH, EPOCH_BEGIN, EPOCH_END, EVALUATION_BEGIN, FIT_END
from hyperpod_plugins.recovery.state_transfer import hyperparameters, load_hyperparameters, to_python_numbers
from hyperpod_plugins.recovery.undo import (
    CAN_RESET,
    Buffers,
    OutsideWrites,
    StepStart,
    drop_gradients,
    end_iteration,
    forget_iteration,
)

_Log = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""A batch, and arguments of Lightning's `log` in its hooks."""
SaveForRecovery = Callable[[dict[str, Any], str, bool, tuple[StateParts, Mapping[int, dict[str, Any]]] | None], str]
"""See `HyperPodStrategy._save_for_recovery`."""

WITHIN_WINDOW = (
    "a collective was called between the micro-steps of one optimizer step (accumulate_grad_batches), in a hook such "
    "as on_train_batch_end, a callback, a loader or self.log(..., sync_dist=True) there. If a process is lost in the "
    "second or a later micro-step, the other ranks cannot run the step again in place, because they would not call "
    "that collective again when the replacement does: all ranks return to a snapshot, or restart from the last "
    "checkpoint. To avoid this, communicate in training_step, or after the last micro-step of a step. "
    "ModelCheckpoint(train_time_interval=...) communicates after each batch."
)


class ModuleStart:
    """What hooks may write besides the state of callbacks, at one moment: buffers, Python attributes, parameters."""

    def __init__(
        self, buffers: Buffers, attributes: Sequence[PlainAttributes], written: Iterable[torch.Tensor] = ()
    ) -> None:
        """Copy them, but for the buffers, which are copied already.

        Args:
            buffers: those of the module.
            attributes: of the program's objects.
            written: this rank's part of the parameters that the program itself writes.
        """
        self._buffers = buffers
        self._attributes = [(each, each.keep()) for each in attributes]
        self._copies = [(each, each.clone()) for each in written]

    def put_back(self) -> None:
        """Restore them."""
        self._buffers.put_back()
        with torch.no_grad():
            for memory, saved in self._copies:
                memory.copy_(saved)
        for each, kept in self._attributes:
            each.put_back(kept)


@dataclass(frozen=True, slots=True)
class HooksStart:
    """What hooks around a step may write, at one moment."""

    module: ModuleStart
    counted: CountedStart | None = None
    logged: LoggedStart | None = None

    def put_back(self) -> None:
        """Restore it."""
        self.put_back_but_counted()
        if self.counted is not None:
            self.counted.put_back()

    def put_back_but_counted(self) -> None:
        """Restore it, without calling `load_state_dict` of the program's objects."""
        self.module.put_back()
        if self.logged is not None:
            self.logged.put_back()


@dataclass(frozen=True, slots=True)
class PartStart:
    """State of one rank at the beginning of a part of the fit outside steps."""

    trainer: dict[str, Any]
    """See `describe_part_start`."""
    local: dict[str, dict[str, Any]]
    """See `LocalStates.state`."""
    module: ModuleStart
    """Also holds large buffers that were not written to, and attributes that cannot be sent; `local` does not."""


class AccumulationWindow:
    """The `TrainingLoop` of a Trainer's step transactions: runs and undoes the micro-steps of one optimizer step."""

    def __init__(
        self,
        trainer: Trainer,
        state: TrainingState,
        save: SaveForRecovery,
        hooks: SavingHooks,
        calls: CheckpointCalls,
        *,
        others: Sequence[HasState] = (),
        former: "AccumulationWindow | None" = None,
    ) -> None:
        """Create the window of a trainer.

        Args:
            trainer: whose steps these are.
            state: tensors of model and optimizers.
            save: see `HyperPodStrategy._save_for_recovery`.
            hooks: saving hooks of the program.
            calls: checkpoint callbacks of the program.
            others: other objects that an optimizer step changes, besides parameters and optimizer state.
            former: window of the same trainer before it left the loops.

        Raises:
            ConfigError: the optimizers have hyperparameters that cannot be sent to another rank.
        """
        to_python_numbers(state.optimizers)
        self._trainer, self._hooks, self._calls, self._state, self._save = trainer, hooks, calls, state, save
        self._closures, self.communicates_between = list[Callable[[], Any]](), False
        """Whether the program communicates between the micro-steps of a window, which a replacement cannot do alone."""
        self._batches_of: list[Any] = []
        """The batch of each micro-step of the window; Lightning weights logged values by its size."""
        self._logged_after: list[list[_Log]] = []
        """What hooks have logged after each micro-step but the last one."""
        self._num_done, self._num_logged = 0, 0
        """Number of micro-steps that have been run, and of those whose `_logged_after` is already in the results."""
        is_manual = not trainer.lightning_module.automatic_optimization
        if is_manual:  # schedulers step inside the step, too
            schedulers: list[Any] = [each.scheduler for each in trainer.lr_scheduler_configs]
            others = (*others, *schedulers, trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress)
        writes = is_manual or not all(map(is_elementwise, state.optimizers))
        kept = OptimizerCopy(state.optimizers, others) if writes else None
        self.held_optimizers, attributes = HeldOptimizers(trainer), attributes_of(trainer).values()
        self._attributes = [each for each in attributes if not each.is_empty]
        self.batch_hooks, self._is_replay = BatchHooks(trainer, state.model, self._attributes), False
        self._has_started = former is not None and former._has_started
        self._entered: tuple[ModuleStart | None, dict[str, Any]] = None, {}
        self._before_hooks: HooksStart | None = None
        """State before the first hooks of the step, or of the epoch that it begins; None if they write nothing."""
        self._groups = _MicroStepGroups(state.optimizers)
        self._starts: dict[int, HooksStart] = {}
        """State at the beginning of each later micro-step: hooks between them are not called again."""
        self._beginning = StepStart(state.model, state.optimizers, kept, attributes=self._attributes)
        state.watched = [self._beginning]
        if former is not None:
            self._beginning.adopt(former._beginning)
            restore(self._logged(), "log")
            self.communicates_between = former.communicates_between
        self._fresh = FreshGradients(state.optimizers) if is_manual else None
        self._results: dict[str, dict[str, Any]] = {}
        self._tables, self._zero_grads = Tables(), dict[str, Any]()
        self._loaders_before, self._loaders_now = list[Any](), list[Any]()
        self._begins_at: int | None = None
        """Batches of the epoch before this window; None if no window has begun."""
        self.micro_step = 0
        """Index of the micro-step that is being computed."""
        self._local: LocalStates
        self._means: LoggedMeans
        self._values: ShownValues
        self._callbacks: RankLocalCallbacks
        self._rows: LoggedRows
        self.entered_with, self.entered_within_step = b"", False
        """Description with which the loops were entered, until this rank has joined the others; and whether it is one
        of a step's beginning, after its first hooks, which this rank calls once more."""
        self.part: PartStart | None = None
        """Beginning of the evaluation, epoch end or fit end that is under way, unless inside a window."""

    @property
    def is_empty(self) -> bool:
        """Whether no micro-step of the window has begun."""
        return not self._closures

    @property
    def accumulates(self) -> bool:
        """Whether Lightning must pass every batch to the strategy, because windows have several micro-steps.

        False for the last batch of an epoch: Lightning would skip its optimizer step if the strategy accumulated.
        """
        trainer = self._trainer
        return trainer.accumulate_grad_batches != 1 and not trainer.fit_loop.epoch_loop._num_ready_batches_reached()

    @property
    def outside(self) -> OutsideWrites:
        """The parameters at the beginning of `part`."""
        return self._beginning.outside

    @property
    def is_told_to_end(self) -> bool:
        """Whether this process has received SIGTERM."""
        return self._trainer.received_sigterm

    @property
    def num_micro_steps(self) -> int:
        """Micro-steps of the window that have begun."""
        return len(self._closures)

    @property
    def num_micro_steps_after(self) -> int:
        """Micro-steps of the window after the one that is being computed."""
        return max(0, len(self._closures) - 1 - self.micro_step)

    def begin_batch(self) -> None:
        """Note the beginning of a batch, before any hook has seen it."""
        self._values.starts()
        if self.is_empty:
            self._hooks.begin_part(self._trainer, BATCH)
            self._begins_at = self._batches.processed
            if self._may_hooks_write and (self._before_hooks is None or self._hooks.part == BATCH):
                self._begin_hooks()

    def begin_part(self, part: str) -> None:
        """Begin a part of the fit outside steps: keep the state to restore if the part has to be run again."""
        self._hooks.begin_part(self._trainer, part)
        self.part = None
        self._before_hooks = None
        if part == EPOCH_BEGIN and self._may_hooks_write:
            self._begin_hooks()
        if part in (EVALUATION_BEGIN, EPOCH_END, FIT_END) and self.is_empty and not self._trainer.sanity_checking:
            self._local.begin_part(steps_done(self._trainer))
            begun = describe_part_start(self._trainer, part, self._means.forms(), self.shown_values())
            self.part = PartStart(begun, copy.deepcopy(self._local.state()), self._module_start())
            self._beginning.outside.begin()

    @property
    def _may_hooks_write(self) -> bool:
        """Whether hooks of the program run in a window before its last micro-step is computed."""
        return self.batch_hooks.are_before or (self.batch_hooks.are_any and self._trainer.accumulate_grad_batches != 1)

    def _begin_hooks(self) -> None:
        """Note what hooks that precede a step may write: they run again if the loops are entered there."""
        self._before_hooks = self._hooks_start()
        self._groups.note_before_hooks()

    def _hooks_start(self) -> HooksStart:
        if not self.batch_hooks.are_before:
            return HooksStart(self._module_start())
        return HooksStart(self._module_start(), self._counted_start(), LoggedStart(self._means))

    def _counted_start(self) -> CountedStart:
        return CountedStart(self._metrics, self._local.of_program)

    def _module_start(self) -> ModuleStart:
        return ModuleStart(self._beginning.present_buffers(), self._attributes)

    def put_back_first_hooks(self) -> None:
        """Undo what the hooks before a step wrote, once the step is undone: they run again as the loops are entered."""
        before, self._before_hooks = self._before_hooks, None
        if before is not None:
            before.put_back()

    def keep_start(self, read_by_hooks: dict[str, Any]) -> None:
        """Keep the state with which the loops are re-entered: `on_train_start` is called again, and may reset it.

        Args:
            read_by_hooks: what hooks read, of another rank; empty for a rank that has its own, or if the program has no
                such hooks. See `batch_hooks`.
        """
        self._entered = self._module_start() if self._has_started else None, read_by_hooks

    def put_back_start(self) -> None:
        """Undo what `on_train_start` has written in another call, or note what it has written in the first."""
        entered, read_by_hooks = self._entered
        if entered is not None:
            entered.put_back()
        if not self._has_started:
            for each in self._attributes:
                each.mark_own()
        if read_by_hooks:
            self._take_read_by_hooks(read_by_hooks)
            self.batch_hooks.watch(self._hooks_start)
        self._entered, self._has_started = (None, {}), True

    def _take_read_by_hooks(self, given: dict[str, Any]) -> None:
        match given:
            case {"attributes": [*attributes], "buffers": dict(buffers)} if len(attributes) == len(self._attributes):
                for each, values in zip(self._attributes, attributes, strict=True):
                    each.take_from_replica(values)
                BufferStates(self._state.model).load_state_dict(buffers)
            case _:
                raise CheckpointMismatch("what hooks have read on another rank is not what they read here")

    def end_part(self) -> None:
        """End a part that all ranks have run: keep its changes, unless it lies inside a window."""
        if self.is_empty:
            self._hooks.end_part()
            self._beginning.outside.end()
            self.part = None

    def note_fetched(self) -> None:
        """Note the loaders' positions after a batch was fetched, and those before this window."""
        if self.is_empty:  # a step begins with the loader state after the previous batch
            self._loaders_before = self._loaders_now
        self.note_loaders()

    def note_loaders(self) -> None:
        """Note the loaders' positions as they are.

        Call it also when an epoch has begun: the position after the last batch lies inside the former epoch if a limit
        or a shorter loader has ended that.
        """
        loader = self._trainer.fit_loop._combined_loader
        # `_state_dicts` runs `isinstance` with a protocol, which takes 0.05 ms.
        can_say = loader is not None and any(map(is_stateful, loader.flattened))
        self._loaders_now = copy.deepcopy(loader._state_dicts()) if loader is not None and can_say else []

    def add(self, closure: Callable[[], Any]) -> None:
        """Add a micro-step to the window."""
        self.batch_hooks.end()
        restore(self._logged(), "log")
        if self._closures and self.batch_hooks.are_any:
            written = map(local_tensor, self._beginning.written.values())
            module = ModuleStart(self._beginning.present_buffers(), self._attributes, written)
            self._starts[len(self._closures)] = HooksStart(module, self._counted_start())
        self._groups.begin_micro_step(len(self._closures))
        self._closures.append(closure)
        self._batches_of.append(self._logged().batch)

    def note_batch(self, batch: Any) -> None:
        """Note the batch that a micro-step is about to compute on."""
        self._beginning.batches.remember(batch)

    def compute(self) -> Any:
        """Run the micro-steps not run since the window began or was undone; return the result of the last one."""
        result: Any = None
        while self._num_done < len(self._closures):
            self.micro_step = self._num_done
            if self._num_logged < self.micro_step:
                self._log_again()
            if self._is_replay and self.micro_step in self._starts:
                self._starts[self.micro_step].put_back()
            if self._is_replay:
                self._groups.put_back(self.micro_step)
            with _LoggingFor(self._logged(), self._batches_of[self.micro_step]):
                result = self._closures[self._num_done]()
            self._num_done += 1
        self._beginning.end()
        return result

    def ends_micro_step(self) -> None:
        """Record what the following hooks log: they are not called again when the window is run again."""
        self._groups.end_micro_step()
        results, noted = self._logged(), list[_Log]()
        logged = original(results, "log")
        self._logged_after.append(noted)
        self._num_logged = len(self._logged_after)

        def log(*args: Any, **kwargs: Any) -> None:
            noted.append((results.batch, args, kwargs))
            logged(*args, **kwargs)

        override(results, "log", log)

    def _log_again(self) -> None:
        """Repeat what hooks logged between the previous micro-step and this one."""
        results = self._logged()
        for batch, args, kwargs in self._logged_after[self._num_logged]:
            with _LoggingFor(results, batch):
                results.log(*args, **kwargs)
        self._num_logged += 1

    @property
    def steps_before_vote(self) -> bool:
        """Whether optimizers step before the vote, because they may communicate; see `recovery.optimizer_copy`."""
        return self._beginning.kept is not None

    def forget_gradients(self) -> None:
        """Stop watching gradients, since the loops are left: a module whose gradients are watched cannot be moved."""
        if self._fresh is not None:
            self._fresh.close()

    def begin_commit(self) -> None:
        """End the step's undo record: the step is being committed."""
        self._beginning.close()
        self._before_hooks = None

    def close(self) -> None:
        """Empty the window after its step was committed."""
        self._closures, self._num_done, self._begins_at = [], 0, None
        self._before_hooks, self._starts, self._is_replay = None, {}, False
        self._groups.forget()
        self._batches_of, self._logged_after, self._num_logged = [], [], 0
        self._hooks.end_part()
        if self._fresh is not None:  # a forward after the last backward leaves parameters unsharded
            forget_iteration(self._state.model)

    def set_local_state(
        self,
        states: LocalStates,
        means: LoggedMeans,
        values: ShownValues,
        rows: LoggedRows,
        metrics: MetricStates,
        callbacks: RankLocalCallbacks,
    ) -> None:
        """Set the objects that hold rank-local state."""
        self._local, self._means, self._values, self._rows, self._metrics = states, means, values, rows, metrics
        self._callbacks = callbacks
        states.before_hooks, states.has_taken = self._states_before_hooks, self._begin_hooks_of_lost
        self.batch_hooks.registered = states.of_program

    def shown_values(self) -> Tables:
        """Shown values in the form that `ShownValues.load_described` takes; inside a step, those at its beginning."""
        return self._values.described((self._tables, self._results) if self._closures else None)

    # -- TrainingLoop -------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Remember what the step may change, and what has been logged and shown."""
        self._hooks.begin_compute(self._trainer)
        self._groups.forget()
        self._beginning.begin()
        if self._fresh is not None:
            self._fresh.begin()
        self._results = {key: _attributes(metric) for key, metric in self._logged().items()}
        self._tables = tables_of(self._trainer)
        begins_epoch = self._begins_epoch
        if begins_epoch:
            self._means.drop_saved()
            self._values.drop_given()
        self._means.begin()
        counts = self._zero_grad_counts
        self._zero_grads = {"total": dict(vars(counts.total)), "current": dict(vars(counts.current))}
        with self._beginning.just_begun(), self._callbacks.as_step_begins():
            self._local.begin(step, begins_epoch=begins_epoch)

    @property
    def can_undo(self) -> bool:
        """Whether the step has written only to state copied at its beginning, and can run again without its hooks."""
        is_with_peers = self.communicates_between and len(self._closures) > 1
        return self._beginning.is_within_reach and not is_with_peers

    def undo_step(self) -> None:
        """Drop gradients, and restore logged values, shown values and all other state of the step's beginning."""
        drop_gradients(self._state.model, self._state.optimizers)
        self._groups.put_back(0)
        self._beginning.put_back()
        self._local.undo()
        self._means.undo()
        self._hooks.put_back(self._trainer, is_inside=True)
        if self._fresh is not None:
            self._fresh.put_back()
        logged = self._logged()
        for key in list(logged):
            if key in self._results:
                vars(logged[key]).update(self._results[key])
            else:
                del logged[key]
        if self._tables:
            put_tables(self._trainer, self._tables)
        if self._zero_grads:
            self._zero_grad_counts.load_state_dict(self._zero_grads)
        self._num_done = self._num_logged = 0
        self._is_replay = True

    def end_iteration(self) -> None:
        """Reset FSDP2's modules to the state at the beginning of an iteration."""
        end_iteration(self._state.model)

    def share_rank_local_state(self, step: int) -> bool:
        """Send buffers, metrics and logged means to the buddy; return whether the source rank's may differ."""
        differs = self._local.exchange(step)
        self.held_optimizers.check()
        return differs

    def note_equal_local_state(self, step: int, *, is_equal: bool) -> None:
        """Note whether the rank-local states of all ranks are equal after `step` steps."""
        self._local.note_equal(step, is_equal=is_equal)

    @property
    def equal_local_step(self) -> int:
        """Number of steps after which they were, if no code has written to this rank's since; else -1."""
        return self._local.equal_step

    def capture_state(self) -> bytes:
        """Description of the Trainer at the beginning of this step, or where the loops were entered."""
        return self._captured(is_for_joiner=True)

    def _captured(self, *, is_for_joiner: bool = False) -> bytes:
        if self.entered_with:
            return self.entered_with
        num_open = max(1, self._num_open)
        with self._at_step_begin():
            return self._described(num_open, self._loaders_before, is_for_joiner=is_for_joiner)

    def capture_state_outside_step(self, part: PartStart | None) -> bytes:
        """Description of the Trainer between two steps.

        Inside a window it is the one at the window's beginning: gradients accumulated so far are lost.

        Args:
            part: the part that is under way, to describe its beginning; None for the present state.
        """
        num_open = self._num_open
        with self._at_step_begin():
            return self._described(num_open, self._loaders_before if num_open else [], part, is_for_joiner=True)

    @property
    def _num_open(self) -> int:
        """Batches of this window that have begun, including one whose first hooks are running."""
        return 0 if self._begins_at is None else max(0, self._batches.ready - self._begins_at)

    @property
    def _batches(self) -> Any:
        return self._trainer.fit_loop.epoch_loop.batch_progress.current

    @property
    def local_steps(self) -> tuple[int, ...] | None:
        """Steps for which this rank keeps its source rank's rank-local state; None if nothing is kept yet."""
        return self._local.kept_steps

    @property
    def rank_local_states(self) -> LocalStates:
        """Buffers, metrics, attributes, logged values and registered objects."""
        return self._local

    def captured_values(self) -> dict[str, Any]:
        """Loops, schedulers, hyperparameters, callbacks, logged values and what hooks save."""
        return named_by_kind(read_trainer(self._captured()))

    def present_values(self) -> dict[str, Any]:
        """Callbacks, and loops, schedulers, hyperparameters, and what hooks save.

        In a window of micro-steps, hooks between them have changed the latter, and do not run again.
        """
        callbacks = self._hooks.present_states(self._trainer)
        found: dict[str, Any] = {f"callback {name}": state for name, state in callbacks.items()}
        if self._trainer.accumulate_grad_batches == 1:
            described = read_trainer(self._captured())
            found["trainer zero_grad"] = self._zero_grad_counts.state_dict()
            found |= {name: value for name, value in named_by_kind(described).items() if not _is_of_part(name)}
        return found

    def own_objects(self) -> Mapping[str, Stateful]:
        """The program's callbacks that have a `state_dict`."""
        return {f"callback {name}": each for name, each in self._hooks.own_callbacks(self._trainer).items()}

    def capture_own_state(self) -> bytes:
        """`capture_state` plus the rank-local buffers, metrics and logged means; call it between two steps."""
        with self._as_before_hooks(self._before_hooks):  # hyperparameters are loaded after these hooks, see `restore`
            # After a return to it, this is also what a process begins with whose predecessor is lost on the way back.
            return with_local(self._captured(is_for_joiner=True), self._local_as_begun())

    @contextmanager
    def _at_step_begin(self) -> Generator[None]:
        """Inside a step, restore all but tensors to the step's beginning for the block, in order to describe it."""
        counts, present = self._zero_grad_counts, self._zero_grad_counts.state_dict()
        if self._closures and self._zero_grads:
            counts.load_state_dict(self._zero_grads)
        try:
            with self._groups.as_step_began(), self._beginning.at_step_start():
                yield
        finally:
            counts.load_state_dict(present)

    @property
    def _zero_grad_counts(self) -> Any:
        """How often Lightning has zeroed gradients: it does so in each attempt at a step, but it must count once."""
        return self._trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.zero_grad

    def _described(
        self,
        micro_steps_open: int,
        loader_states: list[Any],
        part: PartStart | None = None,
        *,
        is_for_joiner: bool = False,
    ) -> bytes:
        begun = self._before_hooks if part is None else part.module
        return describe_trainer(
            self._trainer,
            micro_steps_open=micro_steps_open,
            loader_states=loader_states,
            hooks=self._hooks,
            logged=self._means.forms(self._results if self._closures else None),
            metrics=self.shown_values(),
            as_begun=None if part is None else part.trainer,
            rows=None if part is None else self._rows.state(),
            paths=self._calls.shared,
            read_by_hooks=self._read_by_hooks(begun) if is_for_joiner and self.batch_hooks.are_any else None,
        )

    @contextmanager
    def _as_before_hooks(self, begun: HooksStart | ModuleStart | None, *, and_groups: bool = False) -> Generator[None]:
        """Context in which attributes, buffers and logged sums are as before the hooks that precede the step.

        These hooks run again. For metrics and registered objects see `_local_as_begun`.

        Args:
            begun: the state from before these hooks; None if they have not begun.
            and_groups: whether hyperparameters are, too.
        """
        if begun is None:
            yield
            return
        if isinstance(begun, ModuleStart):
            begun = HooksStart(begun)
        logged = None if begun.logged is None else LoggedStart(self._means)
        now = HooksStart(self._module_start(), logged=logged)
        begun.put_back_but_counted()
        try:
            with self._groups.as_before_hooks() if and_groups else nullcontext():
                yield
        finally:
            now.put_back_but_counted()

    def _local_as_begun(self) -> dict[str, Any]:
        """Rank-local state from before the hooks that precede the step; call it in the context `_as_before_hooks`."""
        counted = None if self._before_hooks is None else self._before_hooks.counted
        states = {} if counted is None else counted.states
        return {**self._local.state(), **states, LOGGED: self._means.forms()}

    def _read_by_hooks(self, begun: HooksStart | ModuleStart | None) -> dict[str, Any]:
        """Attributes and buffers from before the hooks that precede the step; see [Note: what hooks read]."""
        with self._as_before_hooks(begun):
            attributes = [each.for_joiner() for each in self._attributes]
            return {"attributes": attributes, "buffers": BufferStates(self._state.model).all_small()}

    def restore(self, plan: RecoveryPlan, rank: int) -> None:
        """Send this rank's state to the ranks whose source it is, or receive it, as `plan` says.

        Raises:
            PeerLost: a rank was lost meanwhile.
            StateLost: this rank's first batch depends on state that it has received only now.
        """
        self.batch_hooks.note()
        self._local.keep_first(plan.step, plan.senders)
        self._state.share(plan.senders)
        hooks_state = self._local.send_to_joiners(plan.senders, lambda: rank_local_of(self._trainer, self._hooks))
        if hooks_state:
            take_rank_local(self._trainer, self._hooks, hooks_state, self.entered_with)
        entered = read_trainer(self.entered_with) if self.entered_with else None
        begins_epoch = self._begins_epoch if entered is None else not is_within_epoch(entered)
        with self._callbacks.as_step_begins():
            self._local.restore(plan.step, plan.senders, are_equal=plan.are_local_equal, begins_epoch=begins_epoch)
        if rank in plan.senders:
            self._callbacks.restored()
            self._means.take_awaited()
        self._metrics.forget_computed()
        self._means.forget_computed()
        if entered is not None and self.entered_within_step:
            load_hyperparameters(entered.get(GROUPS, []), self._state.optimizers)
        self.batch_hooks.check()

    def _states_before_hooks(self) -> dict[str, dict[str, Any]]:
        """See `LocalStates.before_hooks`."""
        begun = self._before_hooks
        if begun is None or not self.batch_hooks.are_before:
            return {}
        with self._as_before_hooks(begun):
            return {**self._local.state(), **({} if begun.counted is None else begun.counted.states)}

    def _begin_hooks_of_lost(self, begins_epoch: bool) -> None:
        """Have the state from before the hooks that precede the step be the predecessor's, which this joiner has now.

        Until here it was that of this process, whose hooks have run before it got that state.
        """
        own = self._before_hooks
        if own is not None and self.entered_with:
            self._means.take_awaited()
            self._before_hooks = self._hooks_start_of_lost(own, begins_epoch=begins_epoch)

    def _hooks_start_of_lost(self, own: HooksStart, *, begins_epoch: bool) -> HooksStart:
        given, own_parts = self._local.taken.before, self._local.taken.own_parts
        present, states = self._module_start(), {**self._local.state(), **given}
        own.module.put_back()
        self._local.load_again(states, own_parts)
        module = self._module_start()
        present.put_back()
        if own.counted is None or own.logged is None:
            return HooksStart(module)
        kept = {*own_parts, *({METRICS_OF_EPOCH, MEANS_OF_EPOCH} - given.keys() if begins_epoch else ())}
        of_own = {name: state for name, state in own.counted.states.items() if name in kept}
        counted = CountedStart(self._metrics, self._local.of_program, {**given, **of_own})
        sums = given.get(MEANS_OF_EPOCH)
        return HooksStart(module, counted, own.logged if MEANS_OF_EPOCH in kept else LoggedStart(self._means, sums))

    can_undo_exceptions = CAN_RESET

    saving_group = SAVING_GROUP

    @property
    def pending_saves(self) -> tuple[str, ...]:
        """See `CheckpointCalls.pending`."""
        return self._calls.pending

    def finish_saves(self, pending: tuple[str, ...]) -> None:
        """Call the checkpoint callbacks whose calls at the end of the last batch were interrupted."""
        self._calls.finish(self._trainer, pending, self.shown_values()[TABLES[0]], self._save_committed)

    def _save_committed(self, path: str, weights_only: bool) -> str:
        """Write a checkpoint of the committed step as the program would have, and return its path."""
        with self._as_before_hooks(self._before_hooks, and_groups=True):
            checkpoint = without_requests(self._checkpoint_of_rank()) | {LOCAL: self._local_as_begun()}
            states = {each.state_key: each.state_dict() for each in self._trainer.checkpoint_callbacks}
            checkpoint["callbacks"] = {**checkpoint["callbacks"], **states}
            self._hooks.add_left_out(self._trainer, checkpoint)
            if weights_only:
                checkpoint = {
                    name: each for name, each in checkpoint.items() if name not in ("callbacks", "lr_schedulers")
                }
            return self._save(checkpoint, path, False, None)

    def _checkpoint_of_rank(self) -> dict[str, Any]:
        """Checkpoint data of the step's beginning; its description may be another rank's, but not the local state."""
        described, own = read_trainer(self._captured()), self._hooks.dump(self._trainer)
        return as_checkpoint(with_rank_local(described, own, self._callbacks.keys)) | arguments(self._trainer)

    def save(self, path: str, *, is_alone: bool, snapshots: Mapping[int, Snapshot] | None = None) -> str:
        """Write a checkpoint that `fit` can resume from: the state at the beginning of this step, or `snapshots`.

        See `TrainingLoop.save` for the arguments.
        """
        if snapshots is None:
            with self._as_before_hooks(self._before_hooks, and_groups=True):
                checkpoint = self._checkpoint_of_rank() | {LOCAL: self._local_as_begun()}
                return self._save(checkpoint, path, is_alone, None)
        parts = self._state.checkpoint_parts([(each.header, each.data) for each in snapshots.values()], "a snapshot")
        described = {rank: self._checkpoint(each.trainer) for rank, each in snapshots.items()}
        return self._save(next(iter(described.values())), path, is_alone, (parts, described))

    def _checkpoint(self, described: bytes) -> dict[str, Any]:
        return as_checkpoint(read_trainer(described)) | arguments(self._trainer)

    @property
    def _begins_epoch(self) -> bool:
        """Whether what is counted per epoch starts from zero."""
        return not 0 < self._batches.processed < self._trainer.num_training_batches

    def _logged(self) -> Any:
        return self._trainer.fit_loop.epoch_loop._results


def _is_of_part(name: str) -> bool:
    """Whether a description has these values as they were when the present part began."""
    return name.partition(" ")[0] in ("callback", "logged") or name == f"trainer {LOGGED}"


class _LoggingFor:
    """Context in which Lightning's results are weighted by the size of a given batch instead of the latest one.

    A class, because a generator costs more, and each step enters one such block.
    """

    def __init__(self, results: Any, batch: Any) -> None:
        self._results = results
        self._batch = batch
        self._present = results.batch

    def __enter__(self) -> None:
        self._results.batch, self._results.batch_size = self._batch, None

    def __exit__(self, *_: object) -> None:
        self._results.batch, self._results.batch_size = self._present, None


def _attributes(metric: Any) -> dict[str, Any]:
    """The attributes of a metric that logging changes; it replaces tensors, and never writes to them in place."""
    return dict(vars(metric))


class _MicroStepGroups:
    """Hyperparameters of optimizers as each micro-step began: hooks between them may write a learning rate.

    A step that is run again begins with those of its beginning, and each micro-step with its own, since these hooks are
    not called again.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._at: dict[int, list[list[dict[str, Any]]]] = {}
        self._before_hooks: list[list[dict[str, Any]]] = []

    def forget(self) -> None:
        """Forget them, when a step begins or ends."""
        self._at = {}

    def note_before_hooks(self) -> None:
        """Note those from before the hooks that precede the step."""
        self._before_hooks = self._present()

    def end_micro_step(self) -> None:
        """Note those of the step's beginning when its first micro-step has ended: no hook has been called since."""
        if not self._at:
            self._at[0] = self._present()

    def begin_micro_step(self, number: int) -> None:
        """Note those of a later micro-step."""
        if number:
            self._at[number] = self._present()

    def put_back(self, number: int) -> None:
        """Restore those of a micro-step that is run again; none if there has been no second one."""
        load_hyperparameters(self._at.get(number, []), self._optimizers)

    @contextmanager
    def as_step_began(self) -> Generator[None]:
        """Context in which they are those of the step's beginning."""
        present = self._present() if self._at else []
        self.put_back(0)
        try:
            yield
        finally:
            load_hyperparameters(present, self._optimizers)

    @contextmanager
    def as_before_hooks(self) -> Generator[None]:
        """Context in which they are those from before the hooks that precede the step."""
        present = self._present()
        load_hyperparameters(self._before_hooks, self._optimizers)
        try:
            yield
        finally:
            load_hyperparameters(present, self._optimizers)

    def _present(self) -> list[list[dict[str, Any]]]:
        return [hyperparameters(each) for each in self._optimizers]
