"""Faults on purpose, as data, and the injector that lets them happen; `causes.py` draws them at random.

    injector = Injector("kill:rank=3,step=7,phase=backward; stop:rank=0,step=9", rank=rank)
    for step in ...:
        injector.at("forward", step)
        loss = model(batch)

Each fault happens once in a job, not again in the process that replaces the lost one or when the step is repeated.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Literal, Self, get_args

from hyperpod_plugins.elastic import JobStore
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.errors import ConfigError, HyperPodError

FaultKind = Literal[
    "kill",  # SIGKILL: the process is gone at once
    "exit",  # the process ends with code 3
    "exception",  # the program raises InjectedFault
    "stop",  # SIGSTOP: the process stands still, and its sockets stay open
    "hang",  # the program sleeps where it is
]
KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
PHASES = (
    "dataloader",  # the batch is there, and the step has not begun
    "forward",
    "backward",
    "optimizer_step",  # gradients are there, and nobody has voted
    "batch_end",  # the step is committed
    "epoch_end",
    "sanity_check",
    "validation",
    "checkpoint",
)
"""Where the Lightning callback calls the injector; a loop of your own may use any other word."""
STEP_PHASES = ("forward", "backward", "optimizer_step", "batch_end")
EXIT_CODE = 3
ANY = -1


class InjectedFault(HyperPodError):
    """Raised by a fault of kind `exception`; nothing but a fault injector raises it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong, where and when."""

    kind: FaultKind
    rank: int
    """Global rank that it happens to."""
    step: int
    """Number of the step, from 0; outside of a step, the number of steps committed."""
    phase: str = "forward"
    incarnation: int = ANY
    """Which process in the rank's place: 0 for the founder, 1 for the first that replaces one, -1 for any of them."""
    repeat: bool = False
    """Happen whenever this phase of this step is run, in every process that runs it."""
    seconds: float = 3600.0
    """How long a `hang` lasts."""
    cause: str = ""
    """What it stands for, for people."""

    def __post_init__(self) -> None:
        """Check the values."""
        if self.kind not in KINDS:
            raise ConfigError(f"a fault cannot be of kind {self.kind!r}. Choose one of {', '.join(KINDS)}.")
        if self.rank < 0 or self.step < 0 or self.incarnation < ANY or self.seconds <= 0:
            raise ConfigError(
                f"rank={self.rank} and step={self.step} must be at least 0, incarnation={self.incarnation} at least -1 "
                f"(any), and seconds={self.seconds} more than 0. Ranks are global, and steps count from 0."
            )

    def __str__(self) -> str:
        """The text that `parse` reads; a cause is not in it."""
        default = {each.name: each.default for each in fields(self)}
        values = {name: getattr(self, name) for name in _READERS}
        told = [f"{k}={v}" for k, v in values.items() if k in ("rank", "step", "phase") or v != default[k]]
        return f"{self.kind}:{','.join(told)}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read one fault, such as `kill:rank=3,step=7,phase=backward`.

        Raises:
            ConfigError: what is wrong with the text, and what would be right.
        """
        kind, _, rest = text.strip().partition(":")
        values: dict[str, object] = {}
        for part in filter(None, (part.strip() for part in rest.split(","))):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if name not in _READERS or not equals:
                raise ConfigError(
                    f"the fault {text.strip()!r} has the part {part!r}, but only {', '.join(_READERS)} can be given, "
                    "each as NAME=VALUE. An example: kill:rank=3,step=7,phase=backward"
                )
            try:
                values[name] = _READERS[name](value)
            except ValueError:
                raise ConfigError(
                    f"the fault {text.strip()!r} has {name}={value!r}, which cannot be read. Ranks, steps and "
                    "incarnations are whole numbers, seconds a number, repeat is true or false."
                ) from None
        missing = [name for name in ("rank", "step") if name not in values]
        if missing:
            raise ConfigError(
                f"the fault {text.strip()!r} does not say {' and '.join(missing)}. Write KIND:rank=R,step=S with one "
                f"of {', '.join(KINDS)} as KIND; phase, incarnation, repeat and seconds may follow."
            )
        return cls(kind=kind.strip(), **values)  # pyright: ignore[reportArgumentType]: checked at once


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Read several faults, separated by semicolons or lines.

    Raises:
        ConfigError: one of them cannot be read.
    """
    return tuple(Fault.parse(part) for part in text.replace("\n", ";").split(";") if part.strip())


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


_READERS: dict[str, Callable[[str], object]] = {
    "rank": int,
    "step": int,
    "phase": str,
    "incarnation": int,
    "repeat": _truth,
    "seconds": float,
}


def perform(fault: Fault) -> None:
    """Let a fault happen to this process, here.

    Raises:
        InjectedFault: a fault of kind `exception`.
    """
    match fault.kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(EXIT_CODE)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            time.sleep(fault.seconds)
        case "exception":
            raise InjectedFault(f"{fault} (on purpose)")


class Injector:
    """Lets the faults of one rank happen where the program says that it is.

    What has happened is noted in the job's job store, so that a replacement knows it. Without an agent of ours it is
    remembered in this process alone.
    """

    def __init__(
        self,
        faults: str | Sequence[Fault],
        *,
        rank: int,
        job: JobEnv | None = None,
        act: Callable[[Fault], None] = perform,
    ) -> None:
        """Make an injector.

        Args:
            faults: of all ranks, as data or as text.
            rank: this process's global rank.
            job: how to reach the job store; by default as the environment says.
            act: what to do with a fault that is due.

        Raises:
            ConfigError: the text cannot be read.
        """
        self.faults = parse_faults(faults) if isinstance(faults, str) else tuple(faults)
        self._rank = rank
        self._job = job or JobEnv.from_environ()
        self._act = act
        self._happened: set[int] = set()

    def is_due(self, phase: str, step: int) -> bool:
        """Whether a fault would happen here, as far as this process knows."""
        return bool(self._due(phase, step))

    def at(self, phase: str, step: int) -> None:
        """Say that this process is in a phase of a step; what is due happens.

        Raises:
            InjectedFault: a fault of kind `exception` was due.
        """
        for index in self._due(phase, step):
            fault = self.faults[index]
            if fault.repeat or self._claim(index):
                self._act(fault)

    def _due(self, phase: str, step: int) -> list[int]:
        here = (self._rank, phase, step)
        incarnation = self._job.incarnation if self._job is not None else 0
        return [
            index
            for index, fault in enumerate(self.faults)
            if (fault.rank, fault.phase, fault.step) == here
            and fault.incarnation in (ANY, incarnation)
            and (fault.repeat or index not in self._happened)
        ]

    def _claim(self, index: int) -> bool:
        """Note that a fault happens; False if it has happened in an earlier process of this rank."""
        self._happened.add(index)
        if self._job is None:
            return True
        if self._job.restart_count:  # all processes have begun again: what was to happen has
            return False
        job_store, name = JobStore.connect(self._job), f"fault/{self._rank}/{index}"
        if job_store.try_get(name) is not None:
            return False
        job_store.set(name, b"1")
        return True


# Why jobs are interrupted: the mix that Llama 3 met in training, and schedules drawn from it; pure.


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
