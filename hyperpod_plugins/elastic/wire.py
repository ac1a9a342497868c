"""What the agent and its zygote say to each other: one JSON object a line, over a stream socket."""

import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

ProgramKind = Literal[
    "script",  # a path, run as `python PATH` would
    "module",  # a dotted name, run as `python -m NAME` would
    "executable",  # anything else, started by exec
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
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


class Lines:
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
