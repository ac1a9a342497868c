"""The worker processes of one node: starting, replacing, signalling and outliving them; no policy, no job store."""

import contextlib
import enum
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from hyperpod_plugins.elastic.launcher.fork_client import (
    ForkServerOptions,
    ForkServerProcess,
    ProgramKind,
    SpawnRequest,
    Started,
    wait_readable,
)
from hyperpod_plugins.elastic.launcher.logs import ProcessLogs, Sink, Tee
from hyperpod_plugins.elastic.launcher.signal_queue import SignalInbox
from hyperpod_plugins.elastic.membership.restart_policy import is_of_peer
from hyperpod_plugins.elastic.process import signal_name
from hyperpod_plugins.errors import ConfigError

_START_TIMEOUT_S = 600.0
"""How long imports from a slow network file system may take before the first worker is forked."""
KILLED_S = 5.0
"""How long a killed process may take to go; one that is stuck in a driver never does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What every worker runs."""

    kind: ProgramKind
    target: str
    args: tuple[str, ...] = ()


class WorkerStatus(enum.Enum):
    """What a place in the crew permits."""

    RUNNING = "its process can be signalled, and its end will be reported"
    DONE = "its program came to a good end; nothing more happens here"
    LOST = "its process ended otherwise, and none has been put in its place"


@dataclass(slots=True, kw_only=True)
class WorkerSlot:
    """One rank of this node, and the process that fills it."""

    local_rank: int
    global_rank: int
    environ: dict[str, str]
    logs: ProcessLogs
    first_logs: ProcessLogs
    prefix: str
    """Put before each line that is copied to the console."""
    args: tuple[str, ...] = ()
    replacement_environ: Mapping[str, str] = field(default_factory=dict[str, str])
    """What is different for processes that take the place of a lost one."""
    incarnation: int = 0
    ticket: int = -1
    pid: int = -1
    started_s: float = 0.0
    status: WorkerStatus = WorkerStatus.LOST

    @property
    def uptime_s(self) -> float:
        """Seconds since its process was forked."""
        return time.monotonic() - self.started_s


class LocalWorkers:
    """All slots of this node."""

    def __init__(self, program: Program, options: ForkServerOptions, environ: dict[str, str]) -> None:
        """Start the zygote; its imports run while the nodes find each other."""
        self._program = program
        self._options = options
        self._environ = environ
        self._fork_server = ForkServerProcess(options, environ)
        self._tee = Tee()
        self._cwd = os.getcwd()
        self._num_tickets = 0
        self._sinks: Sequence[Sink] = ()
        self.slots: Sequence[WorkerSlot] = ()

    def start(self, slots: Sequence[WorkerSlot], sinks: Sequence[Sink]) -> None:
        """Start a process for each slot, and copy to `sinks` the streams that are to be copied."""
        self.slots, self._sinks = slots, sinks
        for slot in slots:
            self._start(slot)

    def replace(self, slot: WorkerSlot, incarnation: int) -> None:
        """Put a new process in the place of one that has ended."""
        for stream in slot.logs.teed:
            self._tee.complete(slot.logs.path(stream))
        slot.incarnation = incarnation
        slot.logs = slot.first_logs.of_replacement(incarnation)
        slot.environ |= {"TORCHELASTIC_ERROR_FILE": slot.logs.error_file, **slot.replacement_environ}
        self._start(slot)

    def wait_started(self, inbox: SignalInbox, is_over: Callable[[], bool]) -> list[tuple[WorkerSlot, int]]:
        """Wait until every running slot has a pid, or the job is over; returns who has ended, as `wait` does.

        Raises:
            ConfigError: the zygote ended, or is not ready in time.
            SignalException: somebody wants the job to end.
        """
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        ended: list[tuple[WorkerSlot, int]] = []
        while any(slot.pid < 0 for slot in self.slots if slot.status is WorkerStatus.RUNNING):
            inbox.raise_pending()
            if is_over():
                break
            ended += self.wait(min(time.monotonic() + 0.2, deadline_s), inbox)
            if time.monotonic() > deadline_s:
                raise ConfigError(
                    f"the process that imports for the workers was not ready after {_START_TIMEOUT_S:.0f} s. It was "
                    f"to import {', '.join(self._options.preload)}. Is the file system they lie on reachable?"
                )
        return ended

    def wait(self, deadline_s: float, inbox: SignalInbox) -> list[tuple[WorkerSlot, int]]:
        """Wait until a process has ended, a signal came or `deadline_s` is over; returns who ended, and the code.

        Raises:
            ConfigError: the zygote ended before it could start anything.
        """
        descriptors = [inbox.fileno()] if self._fork_server.is_lost else [inbox.fileno(), self._fork_server.fileno()]
        wait_readable(descriptors, deadline_s)
        ended: list[tuple[WorkerSlot, int]] = []
        slots = {slot.ticket: slot for slot in self.slots if slot.status is WorkerStatus.RUNNING}
        for event in self._fork_server.news():
            slot = slots.get(event.ticket)
            if slot is None:
                continue
            if isinstance(event, Started):
                slot.pid, slot.started_s = event.pid, time.monotonic()
            else:
                slot.status = WorkerStatus.LOST if event.code else WorkerStatus.DONE
                ended.append((slot, event.code))
        if self._fork_server.is_lost:
            ended += self._after_fork_server(slot for slot in slots.values() if slot.status is WorkerStatus.RUNNING)
        return ended

    def send(self, slots: Iterable[WorkerSlot], number: signal.Signals, *, last: bool = False) -> None:
        """Send a signal to running slots; SIGKILL takes all that a worker has started with it."""
        group = number == signal.SIGKILL or self._program.kind == "executable"
        for slot in slots:
            if slot.status is WorkerStatus.RUNNING:
                self._fork_server.send_signal(slot.ticket, number, group=group, last=last)

    def stop(self, number: signal.Signals, timeout_s: float, inbox: SignalInbox) -> list[tuple[WorkerSlot, int]]:
        """Signal everybody, wait, kill those that are left; returns who ended, and the code."""
        if not self._fork_server.is_ready:  # it would hear of this when its imports are done; nobody runs yet
            self._fork_server.close()
            for slot in self.slots:
                slot.status = WorkerStatus.LOST if slot.status is WorkerStatus.RUNNING else slot.status
            return []
        self.send(self.slots, number, last=True)
        ended = self._wait_all(time.monotonic() + timeout_s, inbox)
        self.send(self.slots, signal.SIGKILL)
        return ended + self._wait_all(time.monotonic() + KILLED_S, inbox, patient=True)

    def close(self) -> None:
        """End the zygote and copy the last output; the crew is of no use afterwards."""
        self._fork_server.close()
        self._tee.close()

    def _wait_all(
        self, deadline_s: float, inbox: SignalInbox, *, patient: bool = False
    ) -> list[tuple[WorkerSlot, int]]:
        ended: list[tuple[WorkerSlot, int]] = []
        while any(slot.status is WorkerStatus.RUNNING for slot in self.slots) and time.monotonic() < deadline_s:
            if inbox.is_impatient and not patient:
                break
            ended += self.wait(min(deadline_s, time.monotonic() + 0.2), inbox)
            inbox.drain()
        return ended

    def _start(self, slot: WorkerSlot) -> None:
        if self._fork_server.is_lost:
            self._fork_server = ForkServerProcess(self._options, self._environ)
        self._num_tickets += 1
        slot.ticket, slot.pid, slot.status = self._num_tickets, -1, WorkerStatus.RUNNING
        slot.started_s = time.monotonic()
        slot.environ["HYPERPOD_INCARNATION"] = str(slot.incarnation)
        self._fork_server.start(
            SpawnRequest(
                ticket=slot.ticket,
                kind=self._program.kind,
                target=self._program.target,
                args=slot.args,
                environ=slot.environ,
                cwd=self._cwd,
                stdout=slot.logs.stdout,
                stderr=slot.logs.stderr,
            )
        )
        for sink in self._sinks:
            if sink.stream in slot.logs.teed:
                self._tee.follow(slot.logs.path(sink.stream), slot.prefix, sink)

    def _after_fork_server(self, slots: Iterable[WorkerSlot]) -> list[tuple[WorkerSlot, int]]:
        """The zygote is gone, and the kernel has killed its children; what they had started is killed here."""
        ended, was_ready, code = list(slots), self._fork_server.is_ready, self._fork_server.close()
        if ended and not was_ready and code >= 0:
            raise ConfigError(
                f"the process that imports for the workers ended with code {code} before it was ready; its error is "
                f"above. It was to import {', '.join(self._options.preload)}: change that with --preload."
            )
        for slot in ended:
            slot.status = WorkerStatus.LOST
            if slot.pid > 0:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(slot.pid, signal.SIGKILL)
        return [(slot, -signal.SIGKILL) for slot in ended]


# What is known of a worker that failed: one line for the job store, and the whole story for the console.

_NUM_LINES = 20


def cause(slot: WorkerSlot, code: int) -> str:
    """How the process of a slot ended, in one line; a negative code is that of a signal."""
    if code < 0:
        return f"killed by {signal_name(-code)}"
    match _error(slot.logs.error_file):
        case {"message": {"message": str(text)}}:
            return f"exit code {code} ({text.strip().splitlines()[0] if text.strip() else text})"
        case _:
            return f"exit code {code}"


def error_of(slot: WorkerSlot) -> str:
    """First line of the exception that ended the process of a slot, with its class; empty where none is known."""
    match _error(slot.logs.error_file):
        case {"message": message}:
            return _first_line(message)
        case _:
            return ""


def process_failure(slot: WorkerSlot, code: int) -> ProcessFailure:
    """The record of a failure as torch knows it: the program's own traceback, or the end of its error output."""
    whole = slot.logs.error_file if _error(slot.logs.error_file) is not None else ""
    record = ProcessFailure(local_rank=slot.local_rank, pid=slot.pid, exitcode=code, error_file=whole)
    if not whole and slot.logs.stderr:
        record.message = f"{record.message}\nLast lines of {slot.logs.stderr}:\n{_tail(slot.logs.stderr)}"
    return record


def causes(failures: dict[int, ProcessFailure]) -> dict[int, ProcessFailure]:
    """Failures that the end of another process has not caused; all where there is none of these."""
    own = {rank: each for rank, each in failures.items() if not is_of_peer(_first_line(each.message))}
    return own or failures


def story(error: ChildFailedError) -> str:
    """The traceback of the worker that failed first, then torch's summary of all that did by themselves."""
    error = ChildFailedError(error.name, causes(error.failures))
    rank, first = error.get_first_failure()
    told: Any = first.message
    if isinstance(told, dict):
        told = told.get("extraInfo", {}).get("py_callstack", told.get("message", ""))
    return f"Rank {rank} failed first:\n\n{told}\n{error.format_msg()}"


def _first_line(message: Any) -> str:
    match message:
        case {"message": str(text)} | str(text):
            return text.strip().partition("\n")[0]
        case _:
            return ""


def _error(path: str) -> dict[str, Any] | None:
    try:
        return json.loads(Path(path).read_text()) if path else None
    except (OSError, ValueError):  # none, or a program that was killed while it wrote
        return None


def _tail(path: str) -> str:
    try:
        lines = Path(path).read_bytes()[-(1 << 14) :].decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-_NUM_LINES:])
