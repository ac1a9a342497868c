"""How the learning rate, and the schedule, follow the batch.

By default the global batch stays the same, and with it the learning rate. If the user lets the batch follow the world
instead, the learning rate follows by a named rule, and schedulers advance by samples. Each rank then keeps an
`LRState`, which depends only on the samples trained on; joiners receive it. Rule and state are pure arithmetic, the
same on all ranks; `LearningRates` applies them to an optimizer and its schedulers.

[Note: whose learning rate] Schedulers read and write `lr` in the optimizer's groups, and some compute it from its
last value. Therefore the factor is applied to the groups only while the optimizer steps. At all other times the
groups hold the schedulers' value: the rate for the reference batch.
"""

import logging
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from hyperpod_plugins.elastic.scaling.adascale import AdaScaleState, GradientNoise
from hyperpod_plugins.elastic.store.job_store import JobStore
from hyperpod_plugins.elastic.store.records import JsonRecord
from hyperpod_plugins.errors import ConfigError, whole_number
from hyperpod_plugins.events import Event, record

log = logging.getLogger(__name__)

LRScaling = Literal["none", "linear", "sqrt", "adascale"] | Callable[[float], float]
"""How the learning rate follows the global batch: the name of a rule, or a function of new batch / reference
batch."""

_RULES: dict[str, Callable[[float], float]] = {
    "none": lambda ratio: 1.0,
    "linear": lambda ratio: ratio,
    "sqrt": math.sqrt,
    "adascale": lambda ratio: 1.0,  # its factor is measured from the gradients; see adascale.py
}
# Key in the job store: reference batch of a job whose batch follows the world, set by the initial world.
_REFERENCE = "reference_batch"


def lr_factor(scaling: LRScaling, global_batch_size: float, reference_batch_size: float) -> float:
    """Return the factor for a learning rate that was tuned for the reference batch.

    `linear` is for SGD (Goyal et al. 2017, arXiv:1706.02677), `sqrt` for Adam and its variants (Malladi et al. 2022,
    arXiv:2205.10287). `none` and `adascale` give 1; AdaScale's gain is applied on top.

    Raises:
        ConfigError: an unknown rule, a batch that is not positive, or a function whose result is not a positive
            number.
    """
    if min(global_batch_size, reference_batch_size) <= 0:
        raise ConfigError(f"batches must be positive, but are {global_batch_size} and {reference_batch_size}")
    if isinstance(scaling, str):
        if scaling not in _RULES:
            raise ConfigError(f"lr_scaling must be one of {', '.join(_RULES)} or a function, but is {scaling!r}")
        return _RULES[scaling](global_batch_size / reference_batch_size)
    factor = float(scaling(global_batch_size / reference_batch_size))
    if not (math.isfinite(factor) and factor > 0.0):
        raise ConfigError(
            f"lr_scaling returned {factor} for a batch {global_batch_size / reference_batch_size:g} times the "
            "reference; it must return a positive number."
        )
    return factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    """A factor that moves linearly from one value to another, to warm up a larger learning rate."""

    start: float
    """Value before the change."""
    end: float
    """Value after `num_samples`."""
    num_samples: int = 0
    """Samples from `start` to `end`; 0 for a jump."""

    def at(self, samples_since: int) -> float:
        """The factor `samples_since` samples after the change."""
        if samples_since >= self.num_samples:
            return self.end
        return self.start + (self.end - self.start) * samples_since / self.num_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleClock:
    """Counts steps of the reference batch, so that a schedule made for that batch advances by samples.

    A step of twice the reference batch counts as two steps of the schedule, and two steps of half of it as one.
    """

    reference_batch_size: int
    """Samples per step for which the schedule was made."""
    num_samples: int = 0
    """Samples trained on so far."""

    @property
    def schedule_step(self) -> int:
        """Completed steps of the schedule."""
        return self.num_samples // self.reference_batch_size

    def after(self, step_size: int) -> "SampleClock":
        """Return the clock after one more step of `step_size` samples."""
        return SampleClock(reference_batch_size=self.reference_batch_size, num_samples=self.num_samples + step_size)


_LEVEL = Ramp(start=1.0, end=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LRScalingRule:
    """How the learning rate follows the batch.

    Raises:
        ConfigError: an unknown rule, negative values, or options that do not go together.
    """

    scaling: LRScaling = "none"
    """The name of a rule, or a function of new batch / reference batch."""
    reference_batch_size: int = 0
    """Batch for which learning rate and schedule were made; 0 for the batch of the initial world."""
    warmup_samples: int = 0
    """Samples over which the factor moves to its new value after a change; 0 for at once."""
    scale_adam: bool = False
    """Whether `sqrt` also changes Adam's betas and eps (Malladi et al. 2022, arXiv:2205.10287)."""

    def __post_init__(self) -> None:
        """Check the values together; whole numbers of other types become integers."""
        lr_factor(self.scaling, 1, 1)
        for name in ("reference_batch_size", "warmup_samples"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        if min(self.reference_batch_size, self.warmup_samples) < 0:
            raise ConfigError(
                f"reference_batch_size and warmup_samples must not be negative, but are {self.reference_batch_size} "
                f"and {self.warmup_samples}."
            )
        if self.is_adascale and self.warmup_samples:
            raise ConfigError(
                "lr_scaling='adascale' measures the factor of each step from its gradients: leave "
                "warmup_samples out. A warm-up for the reference batch belongs into the schedule."
            )
        if self.scaling == "none" and self.warmup_samples:
            raise ConfigError("warmup_samples needs a learning rate that changes: give lr_scaling, or leave it out.")
        if self.scale_adam and self.scaling != "sqrt":
            raise ConfigError("scale_adam goes with lr_scaling='sqrt': its betas and eps belong to that rule.")

    def check_batch(self, *, follows_world: bool) -> None:
        """Check the rule against the choice of the batch.

        Args:
            follows_world: whether the global batch depends on the number of replicas.

        Raises:
            ConfigError: the rule changes a learning rate whose batch stays the same.
        """
        if not follows_world and self != LRScalingRule():
            raise ConfigError(
                "lr_scaling, reference_batch_size, warmup_samples and scale_adam are for a batch that follows the "
                "world: give samples_per_replica. With the same global batch the learning rate stays what it is."
            )

    @property
    def is_adascale(self) -> bool:
        """Whether the factor comes from the gradients of each step: AdaScale."""
        return self.scaling == "adascale"

    def factor(self, batch_size: int, reference_batch_size: int) -> float:
        """Factor of the learning rate once the ramp is over; AdaScale's gain is applied on top."""
        return lr_factor(self.scaling, batch_size, reference_batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class LRState(JsonRecord):
    """Progress of learning rate and schedule in a job whose batch follows the world."""

    reference_batch_size: int
    """Batch for which learning rate and schedule were made."""
    batch_size: int
    """Global batch of the present steps; the reference batch before the first."""
    ramp: Ramp = _LEVEL
    """Ramp to the factor for that batch."""
    ramp_from: int = 0
    """Value of `num_samples` at the start of the ramp."""
    num_samples: int = 0
    """Samples trained on so far."""
    gains: AdaScaleState | None = None
    """State of AdaScale; None if the factor depends on the batch alone."""

    @classmethod
    def initial(cls, reference_batch_size: int, rule: LRScalingRule) -> "LRState":
        """Return the state before the first step."""
        gains = AdaScaleState() if rule.is_adascale else None
        return cls(reference_batch_size=reference_batch_size, batch_size=reference_batch_size, gains=gains)

    @property
    def factor(self) -> float:
        """Factor of the next step's learning rate; with AdaScale, the last step's until the next one is measured."""
        return self.ramp.at(self.num_samples - self.ramp_from) if self.gains is None else self.gains.gain

    @property
    def schedule_step(self) -> int:
        """Completed steps of the schedule: reference steps by samples, or by AdaScale's gains."""
        return self._clock.schedule_step if self.gains is None else int(self.gains.num_steps)

    def with_batch(self, batch_size: int, rule: LRScalingRule) -> "LRState":
        """Return the state for steps of `batch_size` from now on; the ramp starts at the present factor."""
        end = rule.factor(batch_size, self.reference_batch_size)
        if (batch_size, end) == (self.batch_size, self.ramp.end):
            return self
        ramp = Ramp(start=self.factor, end=end, num_samples=rule.warmup_samples)
        return replace(self, batch_size=batch_size, ramp=ramp, ramp_from=self.num_samples)

    def with_gain(self, gradient_noise: GradientNoise | None, num_samples: int) -> "LRState":
        """Return the state with AdaScale's gain for the next step, measured from its gradients.

        Args:
            gradient_noise: gradient norms of that step; None if not measured.
            num_samples: samples of that step: fewer than `batch_size` if it is the last one of an epoch.
        """
        if self.gains is None:
            return self
        noise = None if gradient_noise is None else gradient_noise.estimate(num_samples, self.reference_batch_size)
        return replace(self, gains=self.gains.measured(noise, num_samples / self.reference_batch_size))

    def after(self, num_samples: int) -> "LRState":
        """Return the state after one more step of `num_samples` samples."""
        gains = None if self.gains is None else self.gains.after()
        return replace(self, num_samples=self._clock.after(num_samples).num_samples, gains=gains)

    @property
    def _clock(self) -> SampleClock:
        return SampleClock(reference_batch_size=self.reference_batch_size, num_samples=self.num_samples)


def scaled_adam(betas: tuple[float, float], eps: float, lr_factor: float) -> tuple[tuple[float, float], float]:
    """Return Adam's betas and eps for a scaled learning rate: 1 - beta is scaled by kappa, and eps by 1 /
    sqrt(kappa).

    Args:
        betas: for the reference batch.
        eps: for the reference batch.
        lr_factor: sqrt(kappa), for a batch kappa times the reference.

    Raises:
        ConfigError: a beta would be negative; the message says how large the batch may be.
    """
    kappa = lr_factor**2
    first, second = (1.0 - kappa * (1.0 - beta) for beta in betas)
    if min(first, second) < 0.0:
        largest = 1.0 / (1.0 - min(betas))
        raise ConfigError(
            f"with scale_adam, a batch {kappa:g} times the reference would make a beta of {betas} negative; up to "
            f"{math.floor(largest * 1000) / 1000:g} times is possible. Use a lower max_replicas, or no "
            "scale_adam."
        )
    return (first, second), eps / lr_factor


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

    @property
    def factor(self) -> float:
        """Factor of the next step's learning rate; with AdaScale, the gain of the last step."""
        return 1.0 if self.lr_state is None else self.lr_state.factor

    @property
    def schedule_step(self) -> int:
        """Completed steps of the schedule."""
        return 0 if self.lr_state is None else self.lr_state.schedule_step

    @contextmanager
    def step(self, *optimizers: Optimizer, batch_size: int, num_samples: int, is_first_rank: bool) -> Generator[None]:
        """Scale the learning rate for this batch while optimizers step inside; then count the step's samples.

        Args:
            optimizers: those that step inside.
            batch_size: global batch size in this world.
            num_samples: samples of this step; fewer than `batch_size` if it is the last one of an epoch.
            is_first_rank: whether to log a change.
        """
        assert self.lr_state is not None
        before, lr_state = self.lr_state, self.lr_state.with_batch(batch_size, self.rule)
        is_change = lr_state is not before
        lr_state, self.noise = lr_state.with_gain(self.noise, num_samples), None
        with ExitStack() as stack:
            for optimizer in optimizers:
                stack.enter_context(scaled(optimizer, lr_state.factor, scale_adam=self.rule.scale_adam))
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
        lr_state, wanted = LRState.from_dict(state["course"]), self.rule.reference_batch_size
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
            optimizers: of the training.
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

    def due_schedule_steps(self, *, waiting_for_metric: bool = False) -> Iterator[int]:
        """Count each schedule step that has become due, and yield its number, from 1.

        Args:
            waiting_for_metric: whether these are steps of schedulers that follow a metric, or of the others.
        """
        assert self.lr_state is not None
        while self.ticks[waiting_for_metric] < self.lr_state.schedule_step:
            self.ticks[waiting_for_metric] += 1
            yield self.ticks[waiting_for_metric]


def find_reference(job_store: JobStore | None, rule: LRScalingRule, batch_size: int) -> int:
    """Return the reference batch size: the rule's, else the one in the job store, else that of the present world.

    Args:
        job_store: of the job; None without an agent.
        rule: of the learning rate.
        batch_size: global batch size of the present world.
    """
    known = None if job_store is None else job_store.try_get(_REFERENCE)
    return rule.reference_batch_size or (batch_size if known is None else int(known))


def publish_reference(job_store: JobStore, reference_batch_size: int) -> None:
    """Publish the reference batch size for processes that join later, unless it is known."""
    job_store.set_if_absent(_REFERENCE, str(reference_batch_size).encode())


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
