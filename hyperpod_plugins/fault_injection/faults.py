"""Faults to inject, as data; the injector that performs them; and random schedules with realistic causes.

    injector = Injector("kill:rank=3,step=7,phase=backward; stop:rank=0,step=9", rank=rank)
    for step in ...:
        injector.reach("forward", step)
        loss = model(batch)

By default each fault happens once in a job: it recurs neither in a replacement nor when the step is run again.
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
    "stop",  # SIGSTOP: the process is suspended, and its sockets stay open
    "hang",  # the program sleeps at this point
]
KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
PHASES = (
    "dataloader",  # the batch is loaded, and the step has not begun
    "forward",
    "backward",
    "optimizer_step",  # gradients are computed, before the commit vote
    "batch_end",  # the step is committed
    "epoch_end",
    "sanity_check",
    "validation",
    "checkpoint",
)
"""Phases in which the Lightning callback calls the injector; your own loop may use any other names."""
STEP_PHASES = ("forward", "backward", "optimizer_step", "batch_end")
EXIT_CODE = 3
ANY_INCARNATION = -1


class InjectedFault(HyperPodError):
    """Raised by a fault of kind `exception`, and by nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault to inject: its kind, and the rank, step and phase in which it happens."""

    kind: FaultKind
    rank: int
    """Global rank to inject the fault into."""
    step: int
    """Number of the step, from 0; outside a step, the number of committed steps."""
    phase: str = "forward"
    incarnation: int = ANY_INCARNATION
    """Number of the process in its worker slot: 0 for the first process, 1 for its first replacement, -1 for any."""
    repeat: bool = False
    """Whether the fault happens whenever a process runs this phase of this step, instead of once in the job."""
    seconds: float = 3600.0
    """Duration of a `hang`."""
    cause: str = ""
    """Real-world cause that the fault represents, for display only."""

    def __post_init__(self) -> None:
        """Check the values."""
        if self.kind not in KINDS:
            raise ConfigError(f"a fault cannot be of kind {self.kind!r}. Choose one of {', '.join(KINDS)}.")
        if self.rank < 0 or self.step < 0 or self.incarnation < ANY_INCARNATION or self.seconds <= 0:
            raise ConfigError(
                f"rank={self.rank} and step={self.step} must be at least 0, incarnation={self.incarnation} at least -1 "
                f"(any), and seconds={self.seconds} more than 0. Ranks are global, and steps count from 0."
            )

    def __str__(self) -> str:
        """Text that `parse` reads back, except for the cause."""
        default = {each.name: each.default for each in fields(self)}
        values = {name: getattr(self, name) for name in _READERS}
        told = [f"{k}={v}" for k, v in values.items() if k in ("rank", "step", "phase") or v != default[k]]
        return f"{self.kind}:{','.join(told)}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse one fault, such as `kill:rank=3,step=7,phase=backward`.

        Raises:
            ConfigError: the text is malformed.
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
    """Parse faults separated by semicolons or newlines.

    Raises:
        ConfigError: one of them is malformed.
    """
    return tuple(Fault.parse(part) for part in text.replace("\n", ";").split(";") if part.strip())


def _parse_bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


_READERS: dict[str, Callable[[str], object]] = {
    "rank": int,
    "step": int,
    "phase": str,
    "incarnation": int,
    "repeat": _parse_bool,
    "seconds": float,
}


def perform(fault: Fault) -> None:
    """Perform a fault in this process, now.

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
    """Performs the faults of one rank when the program reports that it reached their step and phase.

    Faults that have happened are recorded in the job store, so that a replacement does not repeat them. Without an
    agent of ours they are only remembered in this process.
    """

    def __init__(
        self,
        faults: str | Sequence[Fault],
        *,
        rank: int,
        job: JobEnv | None = None,
        act: Callable[[Fault], None] = perform,
    ) -> None:
        """Create an injector.

        Args:
            faults: faults of all ranks, as data or as text.
            rank: global rank of this process.
            job: how to reach the job store; by default from the environment.
            act: performs a fault that is due.

        Raises:
            ConfigError: the text is malformed.
        """
        self.faults = parse_faults(faults) if isinstance(faults, str) else tuple(faults)
        self._rank = rank
        self._job = job or JobEnv.from_environ()
        self._act = act
        self._happened: set[int] = set()

    def is_due(self, phase: str, step: int) -> bool:
        """Whether a fault is due here, as far as this process knows."""
        return bool(self._due(phase, step))

    def reach(self, phase: str, step: int) -> None:
        """Report that this process is in a phase of a step, and perform the faults that are due.

        Raises:
            InjectedFault: a fault of kind `exception` was due.
        """
        for index in self._due(phase, step):
            fault = self.faults[index]
            if fault.repeat or self._record_once(index):
                self._act(fault)

    def _due(self, phase: str, step: int) -> list[int]:
        here = (self._rank, phase, step)
        incarnation = self._job.incarnation if self._job is not None else 0
        return [
            index
            for index, fault in enumerate(self.faults)
            if (fault.rank, fault.phase, fault.step) == here
            and fault.incarnation in (ANY_INCARNATION, incarnation)
            and (fault.repeat or index not in self._happened)
        ]

    def _record_once(self, index: int) -> bool:
        """Record that a fault happens; False if it already happened in an earlier process of this rank."""
        self._happened.add(index)
        if self._job is None:
            return True
        if self._job.restart_count:  # after a restart of all workers, faults do not happen again
            return False
        job_store, name = JobStore.connect(self._job), f"fault/{self._rank}/{index}"
        if job_store.try_get(name) is not None:
            return False
        job_store.set(name, b"1")
        return True


# Random schedules, drawn from the mix of causes that interrupted the training of Llama 3.


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A cause of interruptions: how frequent it is, and how it shows."""

    name: str
    count: int
    """Occurrences among 419 unexpected interruptions in 54 days of training Llama 3 (arXiv 2407.21783, table 5)."""
    kinds: tuple[FaultKind, ...]
    """Fault kinds as which it shows, the most typical first."""


CAUSES = (
    Cause(name="faulty GPU", count=148, kinds=("kill", "exit")),
    Cause(name="GPU memory (HBM3)", count=72, kinds=("kill", "exit")),
    Cause(name="software bug", count=54, kinds=("exception", "exit", "kill")),
    Cause(name="network switch or cable", count=35, kinds=("hang", "stop", "kill")),
    Cause(name="host maintenance", count=32, kinds=("exit", "kill")),
    Cause(name="something else", count=78, kinds=("stop", "hang", "kill")),
)


def draw_cause(draw: random.Random, kinds: Sequence[FaultKind] = KINDS) -> tuple[Cause, FaultKind]:
    """Draw a cause by frequency, among those that can show as one of `kinds`, and its most typical such kind.

    Raises:
        ConfigError: a kind is unknown, or no cause shows as any of `kinds`.
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
    """Draw a random schedule from `CAUSES`; equal arguments give equal schedules, so each rank can draw its own.

    Args:
        seed: seed of the schedule.
        steps: number of steps of the job.
        world_size: number of ranks, which are equally likely.
        rate: probability of a fault in each step, in `0 .. 1`; a step has at most one.
        kinds: allowed fault kinds.
        phases: allowed phases, which are equally likely.

    Raises:
        ConfigError: `rate` lies outside `0 .. 1`, a kind is unknown, or there is nothing to choose from.
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
