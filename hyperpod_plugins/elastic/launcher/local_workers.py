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
    founder_logs: ProcessLogs
    prefix: str
    """Put before each line that is copied to the console."""
    args: tuple[str, ...] = ()
    successors_environ: Mapping[str, str] = field(default_factory=dict[str, str])
    """What is different for processes that take the place of a lost one."""
    incarnation: int = 0
    ticket: int = -1
    pid: int = -1
    started_s: float = 0.0
    phase: WorkerStatus = WorkerStatus.LOST

    @property
    def uptime_s(self) -> float:
        """Seconds since its process was forked."""
        return time.monotonic() - self.started_s


class LocalWorkers:
    """All posts of this node."""

    def __init__(self, program: Program, options: ForkServerOptions, environ: dict[str, str]) -> None:
        """Start the zygote; its imports run while the nodes find each other."""
        self._program = program
        self._options = options
        self._environ = environ
        self._zygote = ForkServerProcess(options, environ)
        self._tee = Tee()
        self._cwd = os.getcwd()
        self._num_tickets = 0
        self._sinks: Sequence[Sink] = ()
        self.slots: Sequence[WorkerSlot] = ()

    def start(self, posts: Sequence[WorkerSlot], sinks: Sequence[Sink]) -> None:
        """Start a process for each post, and copy to `sinks` the streams that are to be copied."""
        self.slots, self._sinks = posts, sinks
        for post in posts:
            self._start(post)

    def replace(self, post: WorkerSlot, incarnation: int) -> None:
        """Put a new process in the place of one that has ended."""
        for stream in post.logs.teed:
            self._tee.complete(post.logs.path(stream))
        post.incarnation = incarnation
        post.logs = post.founder_logs.of_replacement(incarnation)
        post.environ |= {"TORCHELASTIC_ERROR_FILE": post.logs.error_file, **post.successors_environ}
        self._start(post)

    def wait_started(self, inbox: SignalInbox, is_over: Callable[[], bool]) -> list[tuple[WorkerSlot, int]]:
        """Wait until every running post has a pid, or the job is over; returns who has ended, as `wait` does.

        Raises:
            ConfigError: the zygote ended, or is not ready in time.
            SignalException: somebody wants the job to end.
        """
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        ended: list[tuple[WorkerSlot, int]] = []
        while any(post.pid < 0 for post in self.slots if post.phase is WorkerStatus.RUNNING):
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
        descriptors = [inbox.fileno()] if self._zygote.is_lost else [inbox.fileno(), self._zygote.fileno()]
        wait_readable(descriptors, deadline_s)
        ended: list[tuple[WorkerSlot, int]] = []
        posts = {post.ticket: post for post in self.slots if post.phase is WorkerStatus.RUNNING}
        for event in self._zygote.news():
            post = posts.get(event.ticket)
            if post is None:
                continue
            if isinstance(event, Started):
                post.pid, post.started_s = event.pid, time.monotonic()
            else:
                post.phase = WorkerStatus.LOST if event.code else WorkerStatus.DONE
                ended.append((post, event.code))
        if self._zygote.is_lost:
            ended += self._after_zygote(post for post in posts.values() if post.phase is WorkerStatus.RUNNING)
        return ended

    def send(self, posts: Iterable[WorkerSlot], number: signal.Signals, *, last: bool = False) -> None:
        """Send a signal to running posts; SIGKILL takes all that a worker has started with it."""
        group = number == signal.SIGKILL or self._program.kind == "executable"
        for post in posts:
            if post.phase is WorkerStatus.RUNNING:
                self._zygote.send_signal(post.ticket, number, group=group, last=last)

    def stop(self, number: signal.Signals, timeout_s: float, inbox: SignalInbox) -> list[tuple[WorkerSlot, int]]:
        """Signal everybody, wait, kill those that are left; returns who ended, and the code."""
        if not self._zygote.is_ready:  # it would hear of this when its imports are done; nobody runs yet
            self._zygote.close()
            for post in self.slots:
                post.phase = WorkerStatus.LOST if post.phase is WorkerStatus.RUNNING else post.phase
            return []
        self.send(self.slots, number, last=True)
        ended = self._wait_all(time.monotonic() + timeout_s, inbox)
        self.send(self.slots, signal.SIGKILL)
        return ended + self._wait_all(time.monotonic() + KILLED_S, inbox, patient=True)

    def close(self) -> None:
        """End the zygote and copy the last output; the crew is of no use afterwards."""
        self._zygote.close()
        self._tee.close()

    def _wait_all(
        self, deadline_s: float, inbox: SignalInbox, *, patient: bool = False
    ) -> list[tuple[WorkerSlot, int]]:
        ended: list[tuple[WorkerSlot, int]] = []
        while any(post.phase is WorkerStatus.RUNNING for post in self.slots) and time.monotonic() < deadline_s:
            if inbox.is_impatient and not patient:
                break
            ended += self.wait(min(deadline_s, time.monotonic() + 0.2), inbox)
            inbox.drain()
        return ended

    def _start(self, post: WorkerSlot) -> None:
        if self._zygote.is_lost:
            self._zygote = ForkServerProcess(self._options, self._environ)
        self._num_tickets += 1
        post.ticket, post.pid, post.phase = self._num_tickets, -1, WorkerStatus.RUNNING
        post.started_s = time.monotonic()
        post.environ["HYPERPOD_INCARNATION"] = str(post.incarnation)
        self._zygote.start(
            SpawnRequest(
                ticket=post.ticket,
                kind=self._program.kind,
                target=self._program.target,
                args=post.args,
                environ=post.environ,
                cwd=self._cwd,
                stdout=post.logs.stdout,
                stderr=post.logs.stderr,
            )
        )
        for sink in self._sinks:
            if sink.stream in post.logs.teed:
                self._tee.follow(post.logs.path(sink.stream), post.prefix, sink)

    def _after_zygote(self, posts: Iterable[WorkerSlot]) -> list[tuple[WorkerSlot, int]]:
        """The zygote is gone, and the kernel has killed its children; what they had started is killed here."""
        ended, was_ready, code = list(posts), self._zygote.is_ready, self._zygote.close()
        if ended and not was_ready and code >= 0:
            raise ConfigError(
                f"the process that imports for the workers ended with code {code} before it was ready; its error is "
                f"above. It was to import {', '.join(self._options.preload)}: change that with --preload."
            )
        for post in ended:
            post.phase = WorkerStatus.LOST
            if post.pid > 0:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(post.pid, signal.SIGKILL)
        return [(post, -signal.SIGKILL) for post in ended]


# What is known of a worker that failed: one line for the job store, and the whole story for the console.

_NUM_LINES = 20


def cause(post: WorkerSlot, code: int) -> str:
    """How the process of a post ended, in one line; a negative code is that of a signal."""
    if code < 0:
        return f"killed by {signal_name(-code)}"
    match _error(post.logs.error_file):
        case {"message": {"message": str(text)}}:
            return f"exit code {code} ({text.strip().splitlines()[0] if text.strip() else text})"
        case _:
            return f"exit code {code}"


def error_of(post: WorkerSlot) -> str:
    """First line of the exception that ended the process of a post, with its class; empty where none is known."""
    match _error(post.logs.error_file):
        case {"message": message}:
            return _first_line(message)
        case _:
            return ""


def failure(post: WorkerSlot, code: int) -> ProcessFailure:
    """The record of a failure as torch knows it: the program's own traceback, or the end of its error output."""
    whole = post.logs.error_file if _error(post.logs.error_file) is not None else ""
    record = ProcessFailure(local_rank=post.local_rank, pid=post.pid, exitcode=code, error_file=whole)
    if not whole and post.logs.stderr:
        record.message = f"{record.message}\nLast lines of {post.logs.stderr}:\n{_tail(post.logs.stderr)}"
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
