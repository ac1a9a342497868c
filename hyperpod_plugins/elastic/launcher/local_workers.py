"""The worker processes of a node: start, replace, signal and stop them, and describe how they failed.

Neither policy nor the job store is known here.
"""

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

from hyperpod_plugins.elastic.launcher.failure_messages import first_cause
from hyperpod_plugins.elastic.launcher.fork_client import (
    ForkServerOptions,
    ForkServerProcess,
    ProcessStarted,
    ProgramKind,
    SpawnRequest,
    wait_readable,
)
from hyperpod_plugins.elastic.launcher.logs import ProcessLogs, Sink, Tee
from hyperpod_plugins.elastic.launcher.signal_queue import SignalQueue
from hyperpod_plugins.elastic.membership.restart_policy import is_of_peer
from hyperpod_plugins.elastic.process import OutOfMemoryKills, signal_name
from hyperpod_plugins.errors import ConfigError

_START_TIMEOUT_S = 600.0
"""How long imports may take before the first worker is forked, for example from a slow network file system."""
KILLED_S = 5.0
"""How long to wait for a killed process to end; one that is stuck in a driver never does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The program that every worker runs."""

    kind: ProgramKind
    target: str
    args: tuple[str, ...] = ()


class WorkerStatus(enum.Enum):
    """State of a worker slot."""

    RUNNING = "its process runs, and its end will be reported"
    DONE = "its program succeeded"
    LOST = "its process failed and has not been replaced"


@dataclass(slots=True, kw_only=True)
class WorkerSlot:
    """A worker slot of this node and the process that fills it; `global_rank` is its worker_id."""

    local_rank: int
    worker_id: int
    environ: dict[str, str]
    logs: ProcessLogs
    first_logs: ProcessLogs
    prefix: str
    """Prefix of each line that is copied to the console."""
    args: tuple[str, ...] = ()
    replacement_environ: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables that replacements get in addition to `environ`, or with another value."""
    incarnation: int = 0
    request_id: int = -1
    """Number of the process in requests to the fork server; -1 before the first start."""
    pid: int = -1
    """-1 until the fork server reports it."""
    started_s: float = 0.0
    status: WorkerStatus = WorkerStatus.LOST

    @property
    def uptime_s(self) -> float:
        """Seconds since its process was forked, or requested if it is not forked yet."""
        return time.monotonic() - self.started_s


class LocalWorkers:
    """The workers of this node, with their fork server. Use it from the main thread."""

    def __init__(self, program: Program, options: ForkServerOptions, environ: dict[str, str]) -> None:
        """Start the fork server; its imports run during the rendezvous."""
        self._program = program
        self._options = options
        self._environ = environ
        self._fork_server = ForkServerProcess(options, environ)
        self._tee = Tee()
        self._cwd = os.getcwd()
        self._num_requests = 0
        self._sinks: Sequence[Sink] = ()
        self.slots: Sequence[WorkerSlot] = ()

    def start(self, slots: Sequence[WorkerSlot], sinks: Sequence[Sink]) -> None:
        """Start a process for each slot, and copy its teed streams to `sinks`."""
        self.slots, self._sinks = slots, sinks
        for slot in slots:
            self._start(slot)

    def replace(self, slot: WorkerSlot, incarnation: int) -> None:
        """Start a new process in a slot whose process has ended."""
        for stream in slot.logs.teed:
            self._tee.complete(slot.logs.path(stream))
        slot.incarnation = incarnation
        slot.logs = slot.first_logs.of_replacement(incarnation)
        slot.environ |= {"TORCHELASTIC_ERROR_FILE": slot.logs.error_file, **slot.replacement_environ}
        self._start(slot)

    def wait_started(self, inbox: SignalQueue, is_over: Callable[[], bool]) -> list[tuple[WorkerSlot, int]]:
        """Wait until every running slot has a pid or the job is over; returns the slots that ended, as `wait` does.

        Raises:
            ConfigError: the fork server ended, or was not ready in time.
            SignalException: a signal that ends the agent arrived.
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
                    f"the fork server was not ready after {_START_TIMEOUT_S:.0f} s. It imports "
                    f"{', '.join(self._options.preload)}. Is their file system reachable?"
                )
        return ended

    def wait(self, deadline_s: float, inbox: SignalQueue) -> list[tuple[WorkerSlot, int]]:
        """Wait for an event of the fork server, a signal or the deadline; returns the slots that ended, with codes.

        Args:
            deadline_s: time of `time.monotonic()`.
            inbox: wakes this call when a signal arrives.

        Returns:
            Each slot whose process ended, with its exit code or the negative number of the signal that killed it.

        Raises:
            ConfigError: the fork server ended before it was ready.
        """
        descriptors = [inbox.fileno()] if self._fork_server.is_lost else [inbox.fileno(), self._fork_server.fileno()]
        wait_readable(descriptors, deadline_s)
        ended: list[tuple[WorkerSlot, int]] = []
        slots = {slot.request_id: slot for slot in self.slots if slot.status is WorkerStatus.RUNNING}
        for event in self._fork_server.poll_events():
            slot = slots.get(event.request_id)
            if slot is None:
                continue
            if isinstance(event, ProcessStarted):
                slot.pid, slot.started_s = event.pid, time.monotonic()
            else:
                slot.status = WorkerStatus.LOST if event.code else WorkerStatus.DONE
                ended.append((slot, event.code))
        if self._fork_server.is_lost:
            ended += self._after_fork_server(slot for slot in slots.values() if slot.status is WorkerStatus.RUNNING)
        return ended

    def send(self, slots: Iterable[WorkerSlot], number: signal.Signals, *, last: bool = False) -> None:
        """Send a signal to running slots; SIGKILL goes to the whole process group of each worker.

        With `last`, processes that a worker leaves behind are killed even if it ends with code 0.
        """
        group = number == signal.SIGKILL or self._program.kind == "executable"
        for slot in slots:
            if slot.status is WorkerStatus.RUNNING:
                self._fork_server.send_signal(slot.request_id, number, group=group, last=last)

    def stop(self, number: signal.Signals, timeout_s: float, inbox: SignalQueue) -> list[tuple[WorkerSlot, int]]:
        """Signal all workers, wait up to `timeout_s`, kill the rest; returns the slots that ended, with codes."""
        if not self._fork_server.is_ready:  # it would read requests only after its imports; no worker runs yet
            self._fork_server.close()
            for slot in self.slots:
                slot.status = WorkerStatus.LOST if slot.status is WorkerStatus.RUNNING else slot.status
            return []
        self.send(self.slots, number, last=True)
        ended = self._wait_all(time.monotonic() + timeout_s, inbox)
        self.send(self.slots, signal.SIGKILL)
        return ended + self._wait_all(time.monotonic() + KILLED_S, inbox, patient=True)

    def running_pids(self) -> list[int]:
        """Processes of running slots that exist; any thread may call this."""
        pids = [slot.pid for slot in self.slots if slot.status is WorkerStatus.RUNNING and slot.pid > 0]
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()]

    def close(self) -> None:
        """End the fork server and copy the remaining output; this object cannot be used afterwards."""
        self._fork_server.close()
        self._tee.close()

    def _wait_all(
        self, deadline_s: float, inbox: SignalQueue, *, patient: bool = False
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
        self._num_requests += 1
        slot.request_id, slot.pid, slot.status = self._num_requests, -1, WorkerStatus.RUNNING
        slot.started_s = time.monotonic()
        slot.environ["HYPERPOD_INCARNATION"] = str(slot.incarnation)
        self._fork_server.start(
            SpawnRequest(
                request_id=slot.request_id,
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
                self._tee.tail(slot.logs.path(sink.stream), slot.prefix, sink)

    def _after_fork_server(self, slots: Iterable[WorkerSlot]) -> list[tuple[WorkerSlot, int]]:
        """Handle the loss of the fork server: the kernel has killed its children; kill their process groups here."""
        ended, was_ready, code = list(slots), self._fork_server.is_ready, self._fork_server.close()
        if ended and not was_ready and code >= 0:
            raise ConfigError(
                f"the fork server ended with exit code {code} before it was ready; its error is above. It imports "
                f"{', '.join(self._options.preload)}: change the list with --preload."
            )
        for slot in ended:
            slot.status = WorkerStatus.LOST
            if slot.pid > 0:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(slot.pid, signal.SIGKILL)
        return [(slot, -signal.SIGKILL) for slot in ended]


# -- descriptions of a failed worker: one line for the job store, a full report for the console ---------------------

_NUM_LINES, _NUM_SEARCHED = 20, 500


oom_kills = OutOfMemoryKills()
"""Of this node; its agent looks at the count in each poll."""


def describe_exit(slot: WorkerSlot, code: int) -> str:
    """How the process of a slot ended, in one line; a negative code is the number of a signal."""
    told = _message(slot) if code > 0 else ""
    cause = first_cause(code, f"{_tail(slot.logs.stderr, _NUM_SEARCHED)}\n{told}", pid=slot.pid, began_s=slot.started_s)
    if code < 0:
        ended = f"killed by {signal_name(-code)}"
        if code == -signal.SIGKILL and not cause and oom_kills.is_victim(slot.pid):
            cause = "probably by the kernel for lack of memory"
        return f"{ended}, {cause}" if cause else ended
    first = told.strip().partition("\n")[0]
    notes = [each for each in (first, "" if cause in first else cause) if each]
    return f"exit code {code} ({'; '.join(notes)})" if notes else f"exit code {code}"


def _message(slot: WorkerSlot) -> str:
    """The text of the exception that ended the process of a slot; empty if none is known."""
    match _error(slot.logs.error_file):
        case {"message": {"message": str(text)}}:
            return text
        case _:
            return ""


def error_of(slot: WorkerSlot) -> str:
    """First line of the exception that ended the process of a slot, with its class; empty if none is known."""
    match _error(slot.logs.error_file):
        case {"message": message}:
            return _first_line(message)
        case _:
            return ""


def process_failure(slot: WorkerSlot, code: int) -> ProcessFailure:
    """The failure as torch's record, with the program's traceback or else the last lines of its error output."""
    whole = slot.logs.error_file if _error(slot.logs.error_file) is not None else ""
    record = ProcessFailure(local_rank=slot.local_rank, pid=slot.pid, exitcode=code, error_file=whole)
    if not whole and slot.logs.stderr:
        record.message = f"{record.message}\nLast lines of {slot.logs.stderr}:\n{_tail(slot.logs.stderr)}"
    return record


def root_failures(failures: dict[int, ProcessFailure]) -> dict[int, ProcessFailure]:
    """The failures that were not caused by the loss of a peer; all of them if there are none such."""
    own = {rank: each for rank, each in failures.items() if not is_of_peer(_first_line(each.message))}
    return own or failures


def failure_report(error: ChildFailedError) -> str:
    """The traceback of the worker that failed first, then torch's summary of all root failures."""
    error = ChildFailedError(error.name, root_failures(error.failures))
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
    except (OSError, ValueError):  # missing, or incomplete as the program was killed while writing
        return None


def _tail(path: str, num_lines: int = _NUM_LINES) -> str:
    """The last lines of a file; empty if there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 14)))
            lines = file.read(1 << 14).decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-num_lines:])
