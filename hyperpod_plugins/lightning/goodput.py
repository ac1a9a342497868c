"""`GoodputMonitor`: where the time of a fit goes, in the progress bar and in the trainer's loggers."""

# The strategy alone knows whether recovery books the time.
# pyright: reportPrivateUsage=false

from functools import partial
from typing import Any

from typing_extensions import override

from hyperpod_plugins.ledger import TimeCategory, goodput_metrics, ledger
from hyperpod_plugins.lightning.compat import Callback, LightningModule, Trainer, original
from hyperpod_plugins.lightning.compat import override as override_method
from hyperpod_plugins.lightning.samples_read import samples_of_batch
from hyperpod_plugins.lightning.strategy import HyperPodStrategy


class GoodputMonitor(Callback):
    """Show goodput, world size and generation in the progress bar, and log them with all categories of time.

    It works with every strategy. With `CheckpointlessRecovery` in a job of `hyperpodrun`, recovery books the time;
    otherwise this callback does, and writes a ledger for `hyperpod report` if HYPERPOD_EVENTS is set.

    Args:
        every_num_steps: how often rank 0 logs, in optimizer steps.
        prefix: of the names of logged metrics.
    """

    def __init__(self, every_num_steps: int = 50, prefix: str = "hyperpod/") -> None:
        self._every_num_steps, self._prefix = every_num_steps, prefix
        self._has_opened = self._books = False
        """Whether this callback has opened the ledger, and whether it books the time: no recovery does."""
        self._num_steps = 0
        """Optimizer steps that have been seen."""
        self._num_samples: int | None = 0
        """Samples that all ranks have read since the last of them; None if that is not certain."""
        self._epoch_begins_at: int | None = None
        """Index of the first batch of this process in the present epoch; None before that."""
        self._end_saves = self._end_shown = _nothing

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Open a ledger if there is none, and add to the progress bar."""
        if stage != "fit":
            return
        if ledger.open_without_recovery(trainer.global_rank):
            self._has_opened = True
            self._books = not (isinstance(trainer.strategy, HyperPodStrategy) and trainer.strategy._recovery.is_active)
        if self._books:
            save = ledger.phase(TimeCategory.CHECKPOINT_SAVE)(trainer.save_checkpoint)
            self._end_saves = override_method(trainer, "save_checkpoint", save)
        bar: Any = trainer.progress_bar_callback
        if bar is not None:
            self._end_shown = override_method(bar, "get_metrics", partial(_with_goodput, original(bar, "get_metrics")))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The set-up is over."""
        self._num_steps, self._num_samples, self._epoch_begins_at = trainer.global_step, 0, None
        if self._books:
            ledger.note_world(rank=trainer.global_rank, world_size=trainer.world_size, replicas=1, generation=0)
            ledger.enter(TimeCategory.DATA_WAIT)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Batches are counted from the beginning."""
        self._epoch_begins_at = None

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """A batch is there, and a step or a part of one begins."""
        if self._epoch_begins_at is None:
            self._epoch_begins_at = batch_idx
        if self._books:
            ledger.enter(TimeCategory.STEP)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Book a step that has been taken, and log."""
        is_step, self._num_steps = trainer.global_step > self._num_steps, trainer.global_step
        if self._books:
            self._count_samples(trainer, batch_idx)
            if is_step:
                ledger.note_loss(outputs)
                if self._num_samples is not None:
                    ledger.note(samples=self._num_samples)
                ledger.commit(trainer.global_step)
                self._num_samples = 0
            ledger.enter(TimeCategory.DATA_WAIT)
        if is_step and trainer.is_global_zero and trainer.global_step % self._every_num_steps == 0:
            metrics = {f"{self._prefix}{name}": value for name, value in goodput_metrics().items()}
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.global_step)

    def _count_samples(self, trainer: Trainer, batch_idx: int) -> None:
        """Count those of a batch, of which a step may have several."""
        found = samples_of_batch(trainer, batch_idx, begins_at=self._epoch_begins_at or 0)
        self._num_samples = None if self._num_samples is None or found is None else self._num_samples + found

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """An evaluation begins."""
        if self._books and not trainer.sanity_checking:
            ledger.enter(TimeCategory.EVALUATION)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """It has ended."""
        if self._books and not trainer.sanity_checking:
            ledger.enter(TimeCategory.DATA_WAIT)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close a ledger that this callback has opened."""
        if stage == "fit":
            self._close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The same, as `teardown` is not called then."""
        self._close()

    def _close(self) -> None:
        self._end_shown()
        self._end_shown = _nothing
        self._end_saves()
        self._end_saves = _nothing
        if self._has_opened:
            self._has_opened = self._books = False
            ledger.close()


def _nothing() -> None:
    return None


def _with_goodput(get_metrics: Any, trainer: Trainer, model: LightningModule) -> dict[str, Any]:
    """What a progress bar shows, and goodput, world size and generation."""
    shown: dict[str, Any] = get_metrics(trainer, model)
    found = goodput_metrics()
    names = {"world_size": "world", "generation": "gen"}
    columns = {names[name]: f"{value:.0f}" for name, value in found.items() if name in names}
    return {**shown, **columns, "goodput": f"{found.get('goodput', 0.0):.1%}"}
