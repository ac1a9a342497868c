"""The agent's side of the fork server: start it, request processes, receive how they end; and the messages of both.

Both sides exchange JSON objects, one per line, over a stream socket; `fork_server.py` lists them.
"""

import contextlib
import json
import os
import select
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

ProgramKind = Literal[
    "script",  # a path, run as `python PATH` would
    "module",  # a dotted name, run as `python -m NAME` would
    "executable",  # anything else, started by exec
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnRequest:
    """One process to start, with all that a fresh interpreter would inherit from its parent."""

    request_id: int
    """Number by which the agent identifies this process; never reused."""
    kind: ProgramKind
    target: str
    """Path, dotted name or command, depending on `kind`."""
    args: Sequence[str]
    environ: dict[str, str]
    """The whole environment."""
    cwd: str
    stdout: str = ""
    """File for the output, or empty to inherit the agent's; the same for `stderr`."""
    stderr: str = ""


class JsonLines:
    """One end of a connection that carries JSON objects, one per line."""

    def __init__(self, end: socket.socket) -> None:
        """Take over `end`, which `close` closes."""
        self._socket = end
        self._rest = b""
        self.is_over = False
        """Whether the peer has gone; its earlier messages are still delivered."""

    def fileno(self) -> int:
        """Descriptor to wait on."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send one message.

        Raises:
            OSError: the peer has gone.
        """
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived; never blocks."""
        while not self.is_over:
            try:
                data = self._socket.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionError:
                data = b""
            self._rest += data
            self.is_over = not data
        *whole, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in whole]

    def close(self) -> None:
        """Close the connection."""
        self.is_over = True
        self._socket.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkServerOptions:
    """How to start a fork server."""

    python: str
    """Path of the interpreter."""
    preload: Sequence[str] = ()
    """Modules to import before the first worker is forked."""
    title: Sequence[str] = ()
    """Text for `ps` and `pgrep -f` in the command line of the fork server, which every worker inherits."""


@dataclass(frozen=True, slots=True)
class ProcessStarted:
    """A process has been started."""

    request_id: int
    pid: int


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """A process has ended."""

    request_id: int
    code: int
    """Exit code, or the negative number of the signal that killed it."""


class ForkServerProcess:
    """A running fork server. Create it in the main thread: the kernel ties its life to the thread that creates it."""

    def __init__(self, options: ForkServerOptions, environ: Mapping[str, str]) -> None:
        """Start the process; it serves requests once its imports are done."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(options.python, "-u", "-m", "hyperpod_plugins.elastic.launcher.fork_server"),
                    *(str(theirs.fileno()), str(os.getpid())),
                    *(",".join(options.preload), *options.title),
                ],
                # Makes Lightning and torch ask NVML, not CUDA, for the number of GPUs.
                env={**environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C at the terminal reaches the agent alone, which forwards it
            )
        self._lines = JsonLines(ours)
        self.is_ready = False
        """Whether its imports are done."""

    @property
    def is_lost(self) -> bool:
        """Whether it has ended, and with it every process it started."""
        return self._lines.is_over

    def fileno(self) -> int:
        """Descriptor to wait on."""
        return self._lines.fileno()

    def start(self, start: SpawnRequest) -> None:
        """Request a process; the answer is a `ProcessStarted`."""
        self._send({"start": asdict(start)})

    def send_signal(self, request_id: int, number: int, *, group: bool, last: bool) -> None:
        """Signal a process, or with `group` its process group, unless it has ended.

        With `last`, processes that it leaves behind are killed even if it ends with code 0.
        """
        self._send({"signal": int(number), "request_id": request_id, "group": group, "last": last})

    def poll_events(self) -> list[ProcessStarted | ProcessEnded]:
        """Return the events since the last call; never blocks."""
        news: list[ProcessStarted | ProcessEnded] = []
        for message in self._lines.receive():
            match message:
                case {"started": request_id, "pid": pid}:
                    news.append(ProcessStarted(request_id, pid))
                case {"ended": request_id, "code": code}:
                    news.append(ProcessEnded(request_id, code))
                case _:
                    self.is_ready = True
        return news

    def close(self, timeout_s: float = 5.0) -> int:
        """End the fork server and its processes; returns its exit code."""
        self._lines.close()
        if not self.is_ready:  # it runs nothing yet, and would notice the closed connection only after its imports
            self._process.kill()
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait(timeout_s)

    def _send(self, message: dict[str, object]) -> None:
        with contextlib.suppress(OSError):  # the next `news` shows that it is lost
            self._lines.send(message)


def wait_readable(descriptors: Sequence[int], deadline_s: float) -> None:
    """Wait until one of `descriptors` is readable or `time.monotonic()` reaches `deadline_s`."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000)
