"""TCP connections between ranks, opened by those who know a token that lies in the job's store."""

import secrets
import socket
import struct
import time
from contextlib import suppress

_TOKEN_BYTES = 16
_GREETING = struct.Struct(f"!{_TOKEN_BYTES}sI")  # the token, and the caller's rank
_GREETING_S = 5.0
_MAX_CALLERS = 64


class Listener:
    """Accepts connections, all of them at once: a caller that says nothing, or not the token, delays nobody.

    Nothing here blocks. `take` is called when one of `sockets` is readable, or now and then.
    """

    def __init__(self, address: str) -> None:
        """Listen on a port of `address`, by which the other ranks reach this machine."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family)
        self._socket.setblocking(False)
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._callers: dict[socket.socket, tuple[float, bytes]] = {}
        self.invitation = f"{address} {self._socket.getsockname()[1]} {self._token.hex()}"
        """What `connect` needs."""

    def __del__(self) -> None:
        """Close all that has not been given away."""
        self.close()

    @property
    def sockets(self) -> list[socket.socket]:
        """Those that are to be watched until they are readable."""
        return [self._socket, *self._callers]

    def take(self) -> list[tuple[int, socket.socket]]:
        """Rank and non-blocking socket of those who have said the token since the last call."""
        with suppress(BlockingIOError, ConnectionError):
            while True:
                caller, _ = self._socket.accept()
                caller.setblocking(False)
                self._callers[caller] = time.monotonic() + _GREETING_S, b""
                if len(self._callers) > _MAX_CALLERS:
                    self._refuse(next(iter(self._callers)))
        welcome: list[tuple[int, socket.socket]] = []
        for caller, (until_s, said) in list(self._callers.items()):
            try:
                more = caller.recv(_GREETING.size - len(said))
            except BlockingIOError:
                if time.monotonic() > until_s:
                    self._refuse(caller)
                continue
            except OSError:
                self._refuse(caller)
                continue
            said += more
            self._callers[caller] = until_s, said
            if not more:
                self._refuse(caller)
            elif len(said) == _GREETING.size:
                token, rank = _GREETING.unpack(said)
                if secrets.compare_digest(token, self._token):
                    del self._callers[caller]
                    welcome.append((rank, caller))
                else:
                    self._refuse(caller)
        return welcome

    def close(self) -> None:
        """Accept nobody any more."""
        self._socket.close()
        for caller in list(self._callers):
            self._refuse(caller)

    def _refuse(self, caller: socket.socket) -> None:
        del self._callers[caller]
        caller.close()


def connect(invitation: str, rank: int, timeout_s: float) -> socket.socket:
    """Connect to a `Listener`, as `rank`.

    Raises:
        OSError: nothing listens there, or not in time.
    """
    host, port, token = invitation.split()
    connection = socket.create_connection((host, int(port)), timeout_s)
    connection.sendall(_GREETING.pack(bytes.fromhex(token), rank))
    return connection


def begin_connecting(invitation: str, rank: int) -> tuple[socket.socket, bytes]:
    """Connect to a `Listener`, as `rank`, without blocking.

    Returns:
        The socket, which is writable once it is connected, and what is to be sent first.

    Raises:
        OSError: nothing listens there.
    """
    host, port, token = invitation.split()
    connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with suppress(BlockingIOError):
        connection.connect((host, int(port)))
    return connection, _GREETING.pack(bytes.fromhex(token), rank)


def limit_waits(connection: socket.socket, timeout_s: float) -> None:
    """Make it a blocking socket whose waits the kernel limits: one system call for each message, not two.

    A send or a receive that nothing moves for so long raises `BlockingIOError`.
    """
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    limit = struct.pack("ll", *divmod(max(1000, int(timeout_s * 1e6)), 1_000_000))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
