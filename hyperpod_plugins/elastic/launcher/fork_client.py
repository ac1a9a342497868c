"""The agent's end of a zygote: starts it, asks it for processes, and hears how they end."""

import contextlib
import json
import os
import select
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

# What the agent and its zygote say to each other: one JSON object a line, over a stream socket.

ProgramKind = Literal[
    "script",  # a path, run as `python PATH` would
    "module",  # a dotted name, run as `python -m NAME` would
    "executable",  # anything else, started by exec
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnRequest:
    """One process to start, with all that a fresh interpreter would have got from whoever started it."""

    ticket: int
    """Number by which the agent knows this process; never used twice."""
    kind: ProgramKind
    target: str
    """Path, dotted name or command, as `kind` says."""
    args: Sequence[str]
    environ: dict[str, str]
    """The whole environment, not additions to one."""
    cwd: str
    stdout: str = ""
    """File that takes the output, or empty for that of the agent."""
    stderr: str = ""

    def to_message(self) -> dict[str, Any]:
        """What goes over the wire."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Self:
        """Inverse of `to_message`."""
        return cls(**message)


class JsonLines:
    """One end of a conversation."""

    def __init__(self, end: socket.socket) -> None:
        """Talk through `end`, which is closed with this object."""
        self._socket = end
        self._rest = b""
        self.is_over = False
        """Whether the other side has gone; what it said before is still delivered."""

    def fileno(self) -> int:
        """Descriptor to wait on."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Say one thing.

        Raises:
            OSError: nobody listens any more.
        """
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """All that has arrived by now; never waits."""
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
        """Hang up."""
        self.is_over = True
        self._socket.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkServerOptions:
    """How to start a zygote."""

    python: str
    """Interpreter."""
    preload: Sequence[str] = ()
    """Modules to import before the first worker is forked."""
    num_spares: int = 0
    """Forked children kept waiting."""
    title: Sequence[str] = ()
    """What `ps` and `pgrep -f` are to find in the command line of the zygote, and so in that of every worker."""


@dataclass(frozen=True, slots=True)
class Started:
    """A process runs."""

    ticket: int
    pid: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A process is gone."""

    ticket: int
    code: int
    """Exit code, or the negative number of the signal that killed it."""


class ForkServerProcess:
    """A running zygote. Start it from the main thread: the kernel ties its life to the thread that made it."""

    def __init__(self, options: ForkServerOptions, environ: Mapping[str, str]) -> None:
        """Start the process; requests are served once its imports are done."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(options.python, "-u", "-m", "hyperpod_plugins.elastic.launcher.fork_server"),
                    *(str(theirs.fileno()), str(os.getpid()), str(options.num_spares)),
                    *(",".join(options.preload), *options.title),
                ],
                # Lightning and torch then ask NVML for the number of GPUs, not CUDA.
                env={**environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a Ctrl-C at the terminal is the agent's to forward
            )
        self._lines = JsonLines(ours)
        self.is_ready = False
        """Whether its imports are done."""

    @property
    def is_lost(self) -> bool:
        """Whether it is gone, and with it every process it started."""
        return self._lines.is_over

    def fileno(self) -> int:
        """Descriptor to wait on."""
        return self._lines.fileno()

    def start(self, start: SpawnRequest) -> None:
        """Ask for a process; `Started` answers."""
        self._send({"start": start.to_message()})

    def send_signal(self, ticket: int, number: int, *, group: bool, last: bool) -> None:
        """Signal a process, or with `group` its process group, unless it has ended.

        With `last`, what it leaves behind is cleared even where it ends with code 0.
        """
        self._send({"signal": int(number), "ticket": ticket, "group": group, "last": last})

    def news(self) -> list[Started | Ended]:
        """What has happened since the last call; never waits."""
        news: list[Started | Ended] = []
        for message in self._lines.receive():
            match message:
                case {"started": ticket, "pid": pid}:
                    news.append(Started(ticket, pid))
                case {"ended": ticket, "code": code}:
                    news.append(Ended(ticket, code))
                case _:
                    self.is_ready = True
        return news

    def close(self, timeout_s: float = 5.0) -> int:
        """End it and whatever it still runs; returns its exit code."""
        self._lines.close()
        if not self.is_ready:  # it runs nothing yet, and would hear of this only when its imports are done
            self._process.kill()
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait(timeout_s)

    def _send(self, message: dict[str, object]) -> None:
        with contextlib.suppress(OSError):  # its loss shows in the next `news`
            self._lines.send(message)


def wait_readable(descriptors: Sequence[int], deadline_s: float) -> None:
    """Wait until one of `descriptors` has something to read, or `time.monotonic()` reaches `deadline_s`."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000)
