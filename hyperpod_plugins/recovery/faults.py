"""Faults on purpose, as data, and the injector that lets them happen; `causes.py` draws them at random.

    injector = Injector("kill:rank=3,step=7,phase=backward; stop:rank=0,step=9", rank=rank)
    for step in ...:
        injector.at("forward", step)
        loss = model(batch)

Each fault happens once in a job, not again in the process that replaces the lost one or when the step is repeated.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Literal, Self, get_args

from hyperpod_plugins.elastic import Ledger
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

    What has happened is noted in the job's ledger, so that a replacement knows it. Without an agent of ours it is
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
            job: how to reach the ledger; by default as the environment says.
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
        ledger, name = Ledger.connect(self._job), f"fault/{self._rank}/{index}"
        if ledger.find(name) is not None:
            return False
        ledger.put(name, b"1")
        return True
