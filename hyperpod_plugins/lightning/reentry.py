"""Watching the parts of a fit, and re-entering a fit at the beginning of one.

Lightning resumes a fit where a checkpoint was saved, and returns at once if a limit has been reached (`max_steps`,
`should_stop`). It has no way to resume after the last step: at the last validation, or at the hooks at the end of the
epoch or of the fit. `SkipBatches` resumes in the middle of an epoch with loaders that have no state.
"""

# Lightning's loops and connectors have no public API.
# pyright: reportPrivateUsage=false

import dis
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import CodeType, TracebackType
from typing import Any

from torch.utils.data import DataLoader

from hyperpod_plugins.data.loader import refuse_out_of_order
from hyperpod_plugins.errors import PeerLost
from hyperpod_plugins.ledger import TimeCategory, ledger
from hyperpod_plugins.lightning.compat import Checkpoint, Trainer, original, override, restore
from hyperpod_plugins.recovery.program_collectives import is_library
from hyperpod_plugins.recovery.rng import EPOCH_BEGIN, EPOCH_END, EVALUATION_BEGIN, FIT_END


def install_part_hooks(trainer: Trainer, begin: Callable[[str], None], end: Callable[[str], None]) -> None:
    """Report the parts of a fit outside steps, before their first hook and after their last one.

    This also makes schedulers that follow a metric (`ReduceLROnPlateau`) step at the end of a resumed epoch.
    Lightning skips that, but ranks that were not interrupted take that step.

    Args:
        trainer: about to fit.
        begin: called with each part that begins.
        end: called with each evaluation or epoch end that has ended, and after the first hooks of an epoch, whose part
            lasts until the next one begins.
    """

    def begun(part: str, run: Callable[..., Any], *args: Any) -> Any:
        if part == EPOCH_END:
            loop._restarting = False
        begin(part)
        found = run(*args)
        if part != FIT_END:
            end(part)
        return found

    loop, evaluation = trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop
    for name, part in (("on_advance_start", EPOCH_BEGIN), ("on_advance_end", EPOCH_END), ("on_run_end", FIT_END)):
        override(loop, name, partial(begun, part, original(loop, name)))
    override(evaluation, "run", partial(begun, EVALUATION_BEGIN, original(evaluation, "run")))


def take_micro_steps(trainer: Trainer, run: Callable[[Callable[[], Any]], object]) -> None:
    """Have the micro-steps before the last one of a step run by `run`; see `AccumulationWindow.accumulates`.

    Lightning calls the module's `optimizer_step` for them where the strategy accumulates gradients. A program that
    counts its steps there, or averages its weights, expects to be called once a step.
    """
    loop = trainer.fit_loop.epoch_loop.automatic_optimization

    def step(batch_index: int, closure: Callable[[], Any]) -> None:
        if trainer.fit_loop._should_accumulate():
            run(closure)
        else:
            original(loop, "_optimizer_step")(batch_index, closure)

    override(loop, "_optimizer_step", step)


def forget_results(trainer: Trainer, part: str) -> None:
    """Forget what was logged in former epochs or evaluations, all of which has been reset.

    Lightning reduces what was logged in the order of first logging, ever. A replacement knows the present epoch
    only, and would take part in the collectives in another order.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    results: Any = epoch_loop._results if part == EPOCH_BEGIN else epoch_loop.val_loop._results
    if all(result.has_reset or not result._update_count for result in results.values()):
        results.clear()


def book_data_waits(trainer: Trainer) -> None:
    """Have the ledger book the time from the end of a batch until the next one is there."""
    loop = trainer.fit_loop.epoch_loop

    def advance(data_fetcher: Any) -> None:
        ledger.enter(TimeCategory.DATA_WAIT)
        original(loop, "advance")(data_fetcher)

    override(loop, "advance", advance)


def find_batch_despite_skipped_ones(trainer: Trainer) -> None:
    """Have the loop find where in a batch it resumes by the counts of the present epoch.

    If `on_train_batch_start` returns -1, Lightning (2.6) counts a batch as processed that was not started. It compares
    the counts of the whole fit, which differ from then on, and would not count a batch whose last hooks saved.
    """
    loop = trainer.fit_loop.epoch_loop

    def update() -> None:
        batches = loop.batch_progress
        in_fit, batches.total = batches.total, batches.current
        try:
            original(loop, "update_restart_stage")()
        finally:
            batches.total = in_fit

    override(loop, "update_restart_stage", update)


def remove_part_hooks(trainer: Trainer) -> None:
    """Undo the functions above: the fit has ended."""
    loop = trainer.fit_loop
    restore(loop, "on_advance_start", "on_advance_end", "on_run_end")
    restore(loop.epoch_loop, "advance", "update_restart_stage")
    restore(loop.epoch_loop.val_loop, "run", "increment_progress_to_evaluation_end")
    restore(loop.epoch_loop.automatic_optimization, "_optimizer_step")
    restore(trainer, "_run_sanity_check")


_BATCH_END = "on_train_batch_end"
_STEPS_SCHEDULERS = "update_lr_schedulers"
_CALLS_HOOKS = ("_call_callback_hooks", "_call_lightning_module_hook")
_RESULT_IS_UNUSED = ("log", "log_dict", "barrier")
_RETURNS = {"POP_TOP", "LOAD_CONST", "RETURN_VALUE", "RETURN_CONST", "NOP", "CACHE"}


@dataclass(frozen=True, slots=True)
class UnfinishedBatch:
    """What a rank has not run at the end of a batch whose step is committed."""

    checkpoints: Sequence[Checkpoint] = ()
    """Callbacks whose hooks were interrupted, or not called; all ranks call them again."""
    incomplete: str = ""
    """Why this rank's state is incomplete; empty if it is complete."""


def finish_batch_end(trainer: Trainer, error: PeerLost) -> UnfinishedBatch:
    """Run the hooks that a fault has left out at the end of a batch whose step is committed.

    [Note: the hooks of a committed step] The loops are re-entered at the next step, where `on_train_batch_end` is not
    called again, and other ranks may have run it already. A fault in the saving of a checkpoint there is common, and
    hooks that come after it, such as the update of a teacher in the module's own hook, do not depend on it. So they are
    run now, while the groups are broken; only checkpoint callbacks wait until all ranks are back, see [Note:
    interrupted saves]. If one of them communicates, or the hook that was interrupted had more to do than to log or to
    wait, this rank cannot have the result of an undisturbed run.

    Args:
        trainer: whose fit has ended with `error`.
        error: the fault.
    """
    found = _interrupted_hooks(error.__traceback__)
    if found is None and any(
        each.tb_frame.f_code.co_name == _STEPS_SCHEDULERS for each in _frames(error.__traceback__)
    ):
        return UnfinishedBatch(
            trainer.checkpoint_callbacks,
            "a learning rate scheduler was interrupted in a collective after its step was committed; communicate in "
            "training_step instead",
        )
    if found is None:
        return UnfinishedBatch()
    trace, values = found
    module = trainer.lightning_module
    interrupted = values.get("callback", module)
    callbacks: list[Any] = values.get("callbacks", [])
    place = next((index for index, each in enumerate(callbacks) if each is interrupted), len(callbacks))
    checkpoints = [each for each in callbacks[place:] if isinstance(each, Checkpoint)]
    if not _can_leave_out(interrupted, trace):
        return UnfinishedBatch(
            checkpoints,
            f"{type(interrupted).__name__}.{_BATCH_END} was interrupted in a collective. That hook is not called again "
            "after its step is committed; communicate in training_step instead",
        )
    if interrupted is module:
        return UnfinishedBatch()
    later_ones = [each for each in callbacks[place + 1 :] if not isinstance(each, Checkpoint)]
    left_out: list[tuple[Any, tuple[Any, ...]]] = [*((each, (trainer, module)) for each in later_ones), (module, ())]
    former, module._current_fx_name = module._current_fx_name, _BATCH_END
    try:
        for owner, first in left_out:
            try:
                owner.on_train_batch_end(*first, *values["args"])
            except PeerLost as later:
                if later.__traceback__ is None or not _can_leave_out(owner, later.__traceback__):
                    name = f"{type(owner).__name__}.{_BATCH_END}"
                    return UnfinishedBatch(
                        checkpoints, f"{name} communicates, and peers were lost before it was called"
                    )
    finally:
        module._current_fx_name = former
    return UnfinishedBatch(checkpoints)


def _can_leave_out(owner: Any, trace: TracebackType) -> bool:
    """Whether nothing is lost if a hook ends where it was interrupted; `trace` is that of its caller.

    Callbacks of Lightning communicate for what all ranks do later: a checkpoint, a limit of time.
    """
    if is_library(type(owner).__module__):
        return True
    return isinstance(owner, Checkpoint) or _has_only_logged_or_waited(trace.tb_next)


def _interrupted_hooks(trace: TracebackType | None) -> tuple[TracebackType, dict[str, Any]] | None:
    """Where Lightning calls the hooks of a batch's end in a traceback, and the variables there."""
    for each in _frames(trace):
        values = each.tb_frame.f_locals
        if each.tb_frame.f_code.co_name in _CALLS_HOOKS and values.get("hook_name") == _BATCH_END:
            return each, values
    return None


def _has_only_logged_or_waited(trace: TracebackType | None) -> bool:
    """Whether an error came from a barrier or from logging, and the program had nothing left to do in its functions."""
    for each in _frames(trace):
        code = each.tb_frame.f_code
        if is_library(each.tb_frame.f_globals.get("__name__", "")):
            return code.co_name in _RESULT_IS_UNUSED
        if not _returns_next(code, each.tb_lasti):
            return False
    return False


def _returns_next(code: CodeType, offset: int) -> bool:
    """Whether a function only returns after the instruction at `offset`."""
    for each in dis.get_instructions(code):
        if each.offset > offset and each.opname not in _RETURNS:
            return False
        if each.offset > offset and each.opname.startswith("RETURN"):
            return True
    return True


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


class Reentry:
    """Re-entry of a fit at an evaluation, epoch end or fit end; active until that part begins.

    It lifts the trainer's limits only where Lightning checks whether they have been reached.
    """

    def __init__(self) -> None:
        self.part = ""
        """The part at which the fit continues: an evaluation, epoch end or fit end; empty once it has begun."""
        self.description = b""
        """Description of the trainer at that part."""
        self._undo: list[Callable[[], None]] = []
        self._has_started = False

    def open(self, trainer: Trainer, part: str, description: bytes) -> None:
        """Make the trainer enter its loops at `part`.

        Args:
            trainer: about to enter its loops.
            part: see the attribute `part`; empty for a step or the beginning of an epoch, which need no help.
            description: of the trainer.
        """
        if not part:
            return
        self.part, self.description = part, description
        self._trainer, self._fit, self._has_started = trainer, trainer.fit_loop, False
        loop = self._fit.epoch_loop
        self._limits = loop.max_steps, self._fit.max_epochs, trainer.should_stop
        self._sanity_steps, trainer.num_sanity_val_steps = trainer.num_sanity_val_steps, 0  # it would reset counts
        self._replace(self._fit, "setup_data", self._set_up)  # precedes Lightning's first check of the limits
        self._replace(self._fit, "on_run_start", self._start)  # precedes the second check
        self._replace(self._fit, "on_advance_start", self._begin_epoch)  # precedes the third, in the batch loop
        if part == EVALUATION_BEGIN:
            self._replace(loop, "advance", self._evaluate)
        elif part == EPOCH_END:
            self._replace(loop, "run", self._end_epoch)

    def close(self) -> None:
        """Restore the loops' limits and methods, if that has not been done yet."""
        if not self.part:
            return
        self.part, self.description = "", b""
        self._set(*self._limits)
        self._trainer.num_sanity_val_steps = self._sanity_steps
        for undo in self._undo:
            undo()
        self._undo = []

    def _replace(self, owner: Any, name: str, function: Callable[..., None]) -> None:
        self._undo.append(override(owner, name, partial(function, getattr(owner, name))))

    def _lift(self) -> None:
        self._set(-1, -1, should_stop=False)

    def _set(self, max_steps: int, max_epochs: int | None, should_stop: bool) -> None:
        self._fit.epoch_loop.max_steps, self._fit.max_epochs = max_steps, max_epochs
        self._trainer.should_stop = should_stop

    def _set_up(self, run: Callable[[], None]) -> None:
        run()
        if not self._has_started:
            self._lift()

    def _start(self, run: Callable[[], None]) -> None:
        self._set(*self._limits)
        self._has_started = True
        run()
        if self.part == FIT_END:
            self.close()
        else:
            self._lift()

    def _begin_epoch(self, run: Callable[[], None]) -> None:
        self._set(*self._limits)
        run()
        if self.part == EVALUATION_BEGIN:
            self._lift()

    def _evaluate(self, run: Callable[[Any], None], data_fetcher: Any) -> None:
        self.close()
        run(data_fetcher)

    def _end_epoch(self, run: Callable[[Any], None], data_fetcher: Any) -> None:
        """Replace the loop over batches, which has nothing to do and would resume every later epoch as well."""
        self.close()
        loop = self._fit.epoch_loop
        loop.reset()
        loop.on_iteration_done()


def is_stateful(loader: Any) -> bool:
    """Whether Lightning considers a loader stateful: it has `state_dict` and `load_state_dict`."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def rest_of_epoch(loader: Any, num_done: int, trainer: Trainer, category: TimeCategory = TimeCategory.RESTORE) -> Any:
    """A loader for the rest of the epoch, which skips the batches done; the loader itself if there are none.

    Args:
        loader: of the whole epoch.
        num_done: number of batches to skip.
        trainer: whose loop reads them.
        category: of the time that this takes.

    Raises:
        ConfigError: the loader's batches may come in any order.
    """
    if isinstance(loader, DataLoader):
        refuse_out_of_order(loader)
    return SkipBatches(loader, num_done, trainer, category) if num_done else loader


class SkipBatches:
    """A loader that skips its first `count` batches in the present epoch, and yields full epochs after that."""

    def __init__(self, loader: Any, count: int, trainer: Trainer, category: TimeCategory) -> None:
        self._loader = loader
        self._count = count
        self._category = category
        self._trainer = trainer
        self._epoch = self._present_epoch

    @property
    def loader(self) -> Any:
        """The loader of whole epochs."""
        return self._loader

    @property
    def _present_epoch(self) -> int:
        epochs: Any = self._trainer.fit_loop.epoch_progress
        return epochs.current.processed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        # Lazy: Lightning calls `iter` before it sets the sampler's epoch.
        count, self._count = self._count, 0
        is_over = count >= self._trainer.num_training_batches  # nothing left; Lightning keeps this iterator for later
        if is_over or self._present_epoch != self._epoch:  # a shorter loader may have ended the epoch before this one
            count = 0
        combined: Any = self._trainer.fit_loop._combined_loader
        batches = iter(self._loader)
        with ledger.phase(self._category):
            while count and (num_skipped := sum(1 for _ in itertools.islice(batches, count))):
                count -= num_skipped
                if count and combined is not None and combined._mode == "max_size_cycle":
                    batches = iter(self._loader)  # a shorter loader next to a longer one has started over
                    combined._iterator._consumed[combined.flattened.index(self)] = True
        yield from batches
