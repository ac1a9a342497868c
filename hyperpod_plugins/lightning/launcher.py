"""`RecoveryLauncher`: calls the Trainer's functions in the processes of a job with recovery, and recovers `fit`."""

# A strategy uses private parts of Lightning.
# pyright: reportPrivateUsage=false

import signal
import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from typing_extensions import override

from hyperpod_plugins.env import JobEnv, WorkerEnv
from hyperpod_plugins.errors import PeerLost
from hyperpod_plugins.lightning.compat import (
    Launcher,
    ModelSummary,
    SIGTERMException,
    Trainer,
    callbacks_of,
)
from hyperpod_plugins.lightning.recovery import recovers
from hyperpod_plugins.lightning.trainer_entries import (
    ENTRY_KINDS,
    entries,
    record_restored,
    record_results,
    rehearsed_call,
    save_entry_end,
    skip_entry,
)

STATE_OF_PEERS = "memory of the other ranks"
"""Stands for a checkpoint path in a process that gets its state from the other ranks; Lightning logs it as such."""


class RecoveryLauncher(Launcher):
    """Launcher that calls the Trainer's function in this process, and recovers `fit`.

    In a joiner, and after a fault, `fit` resumes from the state of the other ranks.
    """

    def __init__(self, leave_loops: Callable[[PeerLost, bool], bool]) -> None:
        """Create the launcher.

        Args:
            leave_loops: prepares for another call of `fit` after a fault. Its second argument says whether the last
                call had a checkpoint path; it returns False if `fit` cannot continue.
        """
        self._leave_loops = leave_loops

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        """False: an agent starts the processes, not a notebook."""
        return False

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Call `function`, or only restore the state after it if this entry has already ended.

        A fault outside a step ends `fit` with `PeerLost`. `fit` is then called again, and continues where the trainer
        that had come furthest was. To the user this is a single call of `fit`: `on_exception` and teardown do not run
        in between. The fifth argument of `fit` is the checkpoint path.
        """
        job, kind = JobEnv.from_environ(), ENTRY_KINDS.get(function.__name__, "")
        if job is None or not kind or trainer is None or entries.is_inside:
            return function(*args, **kwargs)
        worker_id = WorkerEnv.from_environ().global_rank
        with entries.enter(job, kind) as record, rehearsed_call(trainer, kind, worker_id) as rehearsed:
            resumes_from = entries.resume_from(kind)
            if record is not None:
                results = skip_entry(
                    trainer, record, lambda path: function(*_replace_ckpt_path(args, path), **kwargs), worker_id
                )
                if rehearsed is not None:
                    record_restored(rehearsed, trainer, kind, results)
                return results
            entries.begins_anew = kind == "fit" and args[4] is None and not resumes_from
            comes_later = kind == "fit" and entries.is_joining  # it resumes from the other ranks
            args = _replace_ckpt_path(args, STATE_OF_PEERS if comes_later else resumes_from)
            # Recovery skips the batches that are done, whatever the loader can do.
            warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")
            results = self._run(function, args, kwargs, trainer, is_fit=kind == "fit")
            if not recovers(trainer):
                entries.is_complete = False
            elif kind != "fit":  # a fit has kept its end itself
                save_entry_end(trainer, kind, results, worker_id)
                if rehearsed is not None:
                    record_results(rehearsed, trainer, results)
            return results

    def _run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        trainer: Trainer,
        *,
        is_fit: bool,
    ) -> Any:
        summary: AbstractContextManager[None] = nullcontext()
        while True:
            try:
                with summary:
                    return function(*args, **kwargs)
            except SIGTERMException:
                if not is_fit:
                    raise
                raise SIGTERMException(128 + signal.SIGTERM) from None  # without an argument the exit code would be 0
            except PeerLost as error:
                if not is_fit or not self._leave_loops(error, args[4] not in (None, STATE_OF_PEERS)):
                    raise
                args, summary = _replace_ckpt_path(args, STATE_OF_PEERS), _no_model_summary(trainer)

    @override
    def kill(self, signum: Any) -> None:
        """Do nothing: the agent manages the processes."""


def _replace_ckpt_path(args: tuple[Any, ...], path: str) -> tuple[Any, ...]:
    """The arguments of a fit with another checkpoint path; unchanged if `path` is empty."""
    return (*args[:4], path, *args[5:]) if path else args


@contextmanager
def _no_model_summary(trainer: Trainer) -> Generator[None]:
    """Context in which a re-entered `fit` does not show the model once more."""
    callbacks = callbacks_of(trainer)
    depths = {each: each._max_depth for each in callbacks if isinstance(each, ModelSummary)}
    for each in depths:
        each._max_depth = 0
    try:
        yield
    finally:
        for each, depth in depths.items():
            each._max_depth = depth
