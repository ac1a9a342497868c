"""Send signals to random workers of a running `hyperpodrun` job on this machine.

Workers are found through /proc: each agent has a fork server as its child, whose children are the workers.
"""

import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.fault_injection.faults import FaultKind, draw_cause

SIGNALS: dict[FaultKind, signal.Signals] = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
"""The fault kinds that can be injected into another process."""
_FORK_SERVER = b"hyperpod_plugins.elastic.launcher.fork_server"
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosPlan:
    """How many faults to inject, how often and of which kinds."""

    every_s: float = 30.0
    """Mean time between faults, which are independent: intervals are drawn from an exponential distribution."""
    count: int = 10
    """Total number of faults."""
    seed: int = 0
    kinds: tuple[FaultKind, ...] = ("kill",)
    resume_s: float = 60.0
    """Time after which a stopped process is resumed."""

    def __post_init__(self) -> None:
        """Check the values."""
        if self.every_s <= 0 or self.count < 1 or self.resume_s <= 0:
            raise ConfigError(
                f"every_s={self.every_s} and resume_s={self.resume_s} must be more than 0 seconds, and "
                f"count={self.count} at least 1 fault."
            )
        if not self.kinds or set(self.kinds) - set(SIGNALS):
            raise ConfigError(
                f"kinds={','.join(self.kinds) or '(none)'}, but only {', '.join(SIGNALS)} can be injected from "
                "outside a process. For other kinds, use an Injector in the program: see fault_injection.faults."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledSignal:
    """One fault of a schedule."""

    wait_s: float
    """Time after the previous fault."""
    kind: FaultKind
    cause: str
    worker_fraction: float
    """Which worker: a fraction of the ordered list of workers, in `0 .. 1`."""


def schedule(plan: ChaosPlan) -> Iterator[ScheduledSignal]:
    """The schedule of a plan; equal plans give equal schedules."""
    draw = random.Random(plan.seed)
    for _ in range(plan.count):
        wait_s = draw.expovariate(1 / plan.every_s)
        cause, kind = draw_cause(draw, plan.kinds)
        yield ScheduledSignal(wait_s=wait_s, kind=kind, cause=cause.name, worker_fraction=draw.random())


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process of this machine, as read from /proc."""

    pid: int
    parent: int
    state: str
    command: tuple[bytes, ...]

    @property
    def is_alive(self) -> bool:
        """Whether the process is neither a zombie nor dead."""
        return self.state not in "ZX"


def processes() -> dict[int, Process]:
    """All processes of this machine by pid."""
    found: dict[int, Process] = {}
    for folder in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            command = tuple((folder / "cmdline").read_bytes().split(b"\0"))
            pid = int(folder.name)
            found[pid] = Process(pid=pid, parent=int(fields[1]), state=fields[0], command=command)
    return found


def agents_in(table: dict[int, Process]) -> list[int]:
    """Pids of all agents: the parents of fork servers that are not fork servers themselves."""
    fork_servers = {each.pid for each in table.values() if _FORK_SERVER in each.command and each.is_alive}
    return sorted({table[pid].parent for pid in fork_servers if table[pid].parent not in fork_servers} & set(table))


def workers_in(table: dict[int, Process], agents: Sequence[int]) -> list[int]:
    """Pids of the agents' workers: the children of their fork servers."""
    fork_servers = {each.pid for each in table.values() if each.parent in agents and _FORK_SERVER in each.command}
    return sorted(each.pid for each in table.values() if each.parent in fork_servers and each.is_alive)


def select_agents(table: dict[int, Process], *, pid: int | None = None, run_id: str | None = None) -> list[int]:
    """Find the agents of a job; without `pid` and `run_id`, the only agent on this machine.

    Args:
        table: all processes by pid.
        pid: pid of one agent.
        run_id: the `--rdzv-id` of the job's agents.

    Raises:
        ConfigError: no agent matches, or the choice is ambiguous.
    """
    agents = agents_in(table)
    listed = ", ".join(map(str, agents)) or "none"
    if pid is not None:
        if pid not in agents:
            raise ConfigError(f"process {pid} is not an agent of hyperpodrun with workers; on this machine: {listed}.")
        return [pid]
    if run_id is not None:
        named = [agent for agent in agents if run_id in _run_ids(table[agent].command)]
        if not named:
            raise ConfigError(
                f"no agent of hyperpodrun on this machine was started with --rdzv-id={run_id}; agents here: {listed}. "
                "Choose a job without that option by --pid."
            )
        return named
    if not agents:
        raise ConfigError("no agent of hyperpodrun with workers runs on this machine. Start a job first.")
    if len(agents) != 1:
        raise ConfigError(f"choose a job with --pid or --run-id; agents of hyperpodrun on this machine: {listed}.")
    return agents


def _run_ids(command: Sequence[bytes]) -> set[str]:
    """Values of `--rdzv-id`, in any of its spellings."""
    names = ("--rdzv-id", "--rdzv_id")
    words = [word.decode(errors="replace") for word in command]
    parted = [word.partition("=") for word in words]
    joined = {value for name, equals, value in parted if name in names and equals}
    return joined | {after for word, after in itertools.pairwise(words) if word in names}


def inject(blow: ScheduledSignal, agents: Sequence[int]) -> int | None:
    """Send the fault's signal to a worker; returns its pid, or None if no worker is left."""
    workers = workers_in(processes(), agents)
    if not workers:
        return None
    pid = workers[min(int(blow.worker_fraction * len(workers)), len(workers) - 1)]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, SIGNALS[blow.kind])
    return pid


def run_chaos(plan: ChaosPlan, agents: Sequence[int], tell: Callable[[str], None]) -> int:
    """Inject faults until the plan is done or the job has ended, then resume all stopped workers.

    Args:
        plan: the faults to inject.
        agents: pids of the agents whose workers are signalled.
        tell: called with one line for each fault.

    Returns:
        The number of faults injected.
    """
    stopped: dict[int, float] = {}
    num_faults = 0
    try:
        for blow in schedule(plan):
            if not _wait(blow.wait_s, agents, stopped):
                break
            pid = inject(blow, agents)
            if pid is None:
                continue
            num_faults += 1
            tell(f"fault {num_faults} of {plan.count}: {blow.cause}: {SIGNALS[blow.kind].name} to worker {pid}")
            if blow.kind == "stop":
                stopped[pid] = time.monotonic() + plan.resume_s
        while stopped and _wait(0.1, agents, stopped):
            pass
    finally:
        _resume(stopped, now_s=float("inf"))
    return num_faults


def _wait(seconds: float, agents: Sequence[int], stopped: dict[int, float]) -> bool:
    """Wait, resuming stopped workers when due; returns False as soon as no agent is left."""
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0:
        time.sleep(min(0.5, left_s))
        _resume(stopped, now_s=time.monotonic())
        if not set(agents_in(processes())) & set(agents):
            return False
    return True


def _resume(stopped: dict[int, float], now_s: float) -> None:
    for pid in [pid for pid, at_s in stopped.items() if at_s <= now_s]:
        del stopped[pid]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
