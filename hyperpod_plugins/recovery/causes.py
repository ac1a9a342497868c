"""Why jobs are interrupted: the mix that Llama 3 met in training, and schedules drawn from it; pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.recovery.faults import KINDS, STEP_PHASES, Fault, FaultKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why jobs are interrupted, how often, and what the others see of it."""

    name: str
    count: int
    """Of 419 unexpected interruptions in 54 days of training Llama 3 (arXiv 2407.21783, table 5)."""
    kinds: tuple[FaultKind, ...]
    """What it looks like, the most typical first."""


CAUSES = (
    Cause(name="faulty GPU", count=148, kinds=("kill", "exit")),
    Cause(name="GPU memory (HBM3)", count=72, kinds=("kill", "exit")),
    Cause(name="software bug", count=54, kinds=("exception", "exit", "kill")),
    Cause(name="network switch or cable", count=35, kinds=("hang", "stop", "kill")),
    Cause(name="host maintenance", count=32, kinds=("exit", "kill")),
    Cause(name="something else", count=78, kinds=("stop", "hang", "kill")),
)


def draw_cause(draw: random.Random, kinds: Sequence[FaultKind] = KINDS) -> tuple[Cause, FaultKind]:
    """One cause of the mix and what it looks like, among those that one of `kinds` can stand for.

    Raises:
        ConfigError: a kind that does not exist, or none that could stand for anything.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    possible = [cause for cause in CAUSES if set(cause.kinds) & set(kinds)]
    if unknown or not possible:
        raise ConfigError(f"kinds of faults are {', '.join(KINDS)}, but {', '.join(kinds) or 'none'} were given.")
    cause = draw.choices(possible, [each.count for each in possible])[0]
    return cause, next(kind for kind in cause.kinds if kind in kinds)


def random_faults(
    seed: int,
    *,
    steps: int,
    world_size: int,
    rate: float,
    kinds: Sequence[FaultKind] = KINDS,
    phases: Sequence[str] = STEP_PHASES,
) -> tuple[Fault, ...]:
    """A schedule with the causes' mix: the same for the same arguments, so every rank can draw it for itself.

    Args:
        seed: of the drawing.
        steps: how long the job is.
        world_size: ranks, each as likely as the others.
        rate: faults per step, at most 1; they fall on different steps.
        kinds: what may happen.
        phases: where, each as likely as the others.

    Raises:
        ConfigError: a rate outside of `0 .. 1`, a kind that does not exist, or nothing to choose from.
    """
    if not 0 <= rate <= 1 or world_size < 1 or not phases:
        raise ConfigError(
            f"rate={rate} must lie in 0 .. 1 faults per step, world_size={world_size} must be at least 1, and phases "
            f"({', '.join(phases) or 'none'}) must name some. For one fault in 50 steps on average use rate=0.02."
        )
    draw = random.Random(seed)
    schedule: list[Fault] = []
    for step in range(steps):
        if draw.random() < rate:
            cause, kind = draw_cause(draw, kinds)
            rank, phase = draw.randrange(world_size), draw.choice(phases)
            schedule.append(Fault(kind=kind, rank=rank, step=step, phase=phase, cause=cause.name))
    return tuple(schedule)
