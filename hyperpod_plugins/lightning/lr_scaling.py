"""The schedulers of a Trainer whose batch follows the world: they advance by samples."""

# Lightning's loops have no public API.
# pyright: reportPrivateUsage=false

from hyperpod_plugins.elastic.scaling.learning_rates import LearningRates
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.lightning.compat import Trainer, original, override


def take_over_schedulers(rates: LearningRates, trainer: Trainer) -> None:
    """Make schedulers with `interval="step"` advance by samples, one step per reference batch, from now on."""
    loop = trainer.fit_loop.epoch_loop
    theirs = original(loop, "update_lr_schedulers")

    def update_lr_schedulers(interval: str, update_plateau_schedulers: bool) -> None:
        if interval != "step":
            theirs(interval, update_plateau_schedulers)
        elif not loop._should_accumulate():
            step_schedulers(rates, trainer, waiting_for_metric=update_plateau_schedulers)

    override(loop, "update_lr_schedulers", update_lr_schedulers)


def step_schedulers(rates: LearningRates, trainer: Trainer, *, waiting_for_metric: bool) -> None:
    """Step the schedulers once for each reference batch that has been completed.

    Args:
        rates: counts the reference batches.
        trainer: whose schedulers.
        waiting_for_metric: whether to step those that follow a metric, or the others.

    Raises:
        ConfigError: the metric that a scheduler follows was not logged.
    """
    module, progress = trainer.lightning_module, trainer.fit_loop.epoch_loop.scheduler_progress
    for number in rates.due_schedule_steps(waiting_for_metric=waiting_for_metric):
        for config in trainer.lr_scheduler_configs:
            is_other = config.interval != "step" or config.reduce_on_plateau != waiting_for_metric
            if is_other or number % config.frequency:
                continue
            metric = trainer.callback_metrics.get(config.monitor) if config.monitor and waiting_for_metric else None
            if metric is None and waiting_for_metric:
                if config.strict:
                    raise ConfigError(
                        f"a scheduler waits for the metric {config.monitor!r}, which nobody has logged; there are "
                        f"{', '.join(trainer.callback_metrics) or 'none'}."
                    )
                continue
            progress.increment_ready()
            module.lr_scheduler_step(config.scheduler, metric)
            progress.increment_completed()
