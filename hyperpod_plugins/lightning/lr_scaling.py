"""The learning rate and the schedulers of a Trainer whose batch follows the world.

[Note: whose learning rate] Schedulers read and write `lr` in the optimizer's groups, and some compute it from its
last value. Therefore the factor is applied to the groups only while the optimizer steps. At all other times the
groups hold the schedulers' value: the rate for the reference batch.
"""

# Lightning's loops have no public API.
# pyright: reportPrivateUsage=false

import logging
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from hyperpod_plugins.elastic.scaling.adascale import GradientNoise
from hyperpod_plugins.elastic.scaling.lr import LRScalingRule, LRState, scaled_adam
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.events import Event, record
from hyperpod_plugins.lightning.compat import Trainer, original, override

log = logging.getLogger(__name__)


@contextmanager
def scaled(optimizer: Optimizer, factor: float, *, scale_adam: bool) -> Generator[None]:
    """Multiply the learning rate inside the context; afterwards the groups are bitwise the same as before."""
    if factor == 1.0:
        yield
        return
    kept = [
        {key: _kept(group[key]) for key in ("lr", "betas", "eps") if key in group} for group in optimizer.param_groups
    ]
    for group in optimizer.param_groups:
        _put(group, "lr", group["lr"] * factor)
        if scale_adam:
            betas, eps = scaled_adam(_floats(group["betas"]), group["eps"], factor)
            _put(group, "betas", betas)
            _put(group, "eps", eps)
    try:
        yield
    finally:
        for group, values in zip(optimizer.param_groups, kept, strict=True):
            for key, value in values.items():
                _put(group, key, value)


@dataclass(slots=True)
class LearningRates:
    """State of learning rate and schedule; the same on all ranks between two steps."""

    rule: LRScalingRule
    lr_state: LRState | None = None
    """None until the first world has been laid out."""
    ticks: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})
    """Schedule steps that schedulers have taken: plain ones (key False), and those that wait for a metric (True)."""
    noise: GradientNoise | None = None
    """Gradient noise of the step that is being committed, for AdaScale; not part of the state."""

    def begin(self, reference_batch_size: int) -> None:
        """Start at the first sample, unless a state has been loaded."""
        if self.lr_state is None:
            self.lr_state = LRState.initial(reference_batch_size, self.rule)

    @contextmanager
    def step(self, optimizer: Optimizer, *, batch_size: int, num_samples: int, is_first_rank: bool) -> Generator[None]:
        """Scale the learning rate for this batch while the optimizer steps inside; then count the step's samples.

        Args:
            optimizer: of the Trainer.
            batch_size: global batch size in this world.
            num_samples: samples of this step; fewer than `batch_size` if it is the last one of an epoch.
            is_first_rank: whether to log a change.
        """
        assert self.lr_state is not None
        before, lr_state = self.lr_state, self.lr_state.with_batch(batch_size, self.rule)
        is_change = lr_state is not before
        lr_state, self.noise = lr_state.with_gain(self.noise, num_samples), None
        with scaled(optimizer, lr_state.factor, scale_adam=self.rule.scale_adam):
            yield
        self.lr_state = lr_state.after(num_samples)
        if is_change:
            _announce(before, lr_state, is_first_rank)

    def state_dict(self) -> dict[str, Any]:
        """State of plain values; empty before the first world has been laid out."""
        if self.lr_state is None:
            return {}
        return {"course": self.lr_state.to_dict(), "ticks": self.ticks[False], "metric_ticks": self.ticks[True]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state.

        Raises:
            ConfigError: the state has a different reference batch than requested, or counts schedule steps
                differently.
        """
        lr_state, wanted = LRState.of(state["course"]), self.rule.reference_batch_size
        if wanted not in (0, lr_state.reference_batch_size):
            raise ConfigError(
                f"the checkpoint was made with a reference batch of {lr_state.reference_batch_size} samples, and its "
                f"schedule counts such steps; with reference_batch_size={wanted} it would jump. Use "
                f"{lr_state.reference_batch_size}, or leave it out."
            )
        if (lr_state.gains is not None) != self.rule.is_adascale:
            was, is_now = ("", "not ") if lr_state.gains is not None else ("not ", "")
            raise ConfigError(
                f"the checkpoint was {was}made with lr_scaling='adascale', whose schedule counts what steps are worth "
                f"instead of samples, and it is {is_now}asked for now; the schedule would jump. Keep the rule, or load "
                "the weights alone."
            )
        self.lr_state = lr_state
        self.ticks = {False: state["ticks"], True: state["metric_ticks"]}

    def check(self, optimizers: list[Optimizer], batch_sizes: Sequence[int]) -> int:
        """Check, before training starts, that the rule fits the optimizers; return the reference batch size.

        Args:
            optimizers: of the Trainer.
            batch_sizes: global batch sizes in all possible worlds.

        Raises:
            ConfigError: the rule returns no valid factor, an optimizer has no betas and eps to scale, or such a batch
                would make a beta negative.
        """
        assert self.lr_state is not None
        reference = self.lr_state.reference_batch_size
        largest_factor = max(self.rule.factor(size, reference) for size in batch_sizes)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group in groups if self.rule.scale_adam else []:
            if not {"betas", "eps"} <= group.keys():
                raise ConfigError(
                    "scale_adam is for Adam and its like, whose groups have betas and eps; these have "
                    f"{', '.join(sorted(set(group) - {'params'}))}. Leave it out."
                )
            scaled_adam(_floats(group["betas"]), float(group["eps"]), largest_factor)
        return reference

    def take_over_schedulers(self, trainer: Trainer) -> None:
        """Make schedulers with `interval="step"` advance by samples, one step per reference batch, from now on."""
        loop = trainer.fit_loop.epoch_loop
        theirs = original(loop, "update_lr_schedulers")

        def update_lr_schedulers(interval: str, update_plateau_schedulers: bool) -> None:
            if interval != "step":
                theirs(interval, update_plateau_schedulers)
            elif not loop._should_accumulate():
                self.step_schedulers(trainer, waiting_for_metric=update_plateau_schedulers)

        override(loop, "update_lr_schedulers", update_lr_schedulers)

    def step_schedulers(self, trainer: Trainer, *, waiting_for_metric: bool) -> None:
        """Step the schedulers once for each reference batch that has been completed.

        Args:
            trainer: whose schedulers.
            waiting_for_metric: whether to step those that follow a metric, or the others.

        Raises:
            ConfigError: the metric that a scheduler follows was not logged.
        """
        assert self.lr_state is not None
        module, progress = trainer.lightning_module, trainer.fit_loop.epoch_loop.scheduler_progress
        while self.ticks[waiting_for_metric] < self.lr_state.schedule_step:
            self.ticks[waiting_for_metric] += 1
            for config in trainer.lr_scheduler_configs:
                is_other = config.interval != "step" or config.reduce_on_plateau != waiting_for_metric
                if is_other or self.ticks[waiting_for_metric] % config.frequency:
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


def warn_of_adaptive(optimizers: list[Optimizer]) -> None:
    """Warn that AdaScale was not designed for optimizers that normalize by the size of gradients."""
    for optimizer in optimizers:
        if any({"betas", "eps"} & group.keys() for group in optimizer.param_groups):
            log.warning(
                "lr_scaling='adascale' was made for SGD with momentum. %s divides its steps by the size of gradients, "
                "which a larger batch changes too, so the gain means less there; 'sqrt' is a rule for such optimizers",
                type(optimizer).__name__,
            )


def _announce(before: LRState, after: LRState, is_first_rank: bool) -> None:
    start, end = (after.ramp.start, after.ramp.end) if after.gains is None else (before.factor, after.factor)
    if is_first_rank and after.gains is not None:
        log.warning(
            "the global batch is %d samples now, and was %d; AdaScale's gain goes from %.4g to %.4g, and on with the "
            "gradients",
            *(after.batch_size, before.batch_size, start, end),
        )
    elif is_first_rank:
        log.warning(
            "the global batch is %d samples now, and was %d; the learning rate goes from %.4g to %.4g times its "
            "schedule, over %d samples",
            *(after.batch_size, before.batch_size, start, end, after.ramp.num_samples),
        )
    record(
        Event(
            name="elastic.batch",
            at_s=time.time(),
            details={
                "global_batch_size": after.batch_size,
                "global_batch_size_before": before.batch_size,
                "lr_factor": end,
                "lr_factor_before": start,
                "warmup_samples": after.ramp.num_samples,
                "samples": after.num_samples,
            },
        )
    )


def _floats(betas: Any) -> tuple[float, float]:
    first, second = betas
    return float(first), float(second)


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _put(group: dict[str, Any], key: str, value: Any) -> None:
    present = group[key]
    if isinstance(present, torch.Tensor):
        present.copy_(torch.as_tensor(value))  # a compiled step keeps a reference to this tensor
    else:
        group[key] = value
