"""TCP sockets: those of a group, which a break shuts down, and authenticated connections between ranks.

[Note: cutting] gloo's abort, shutdown and destruction do not wake a waiting thread (torch 2.13). A collective that
waits for a lost peer ends when a socket of its group is shut down, on this side or on the other. So `recording` keeps
duplicates of the sockets that appear while a group connects; the original descriptors may be closed and their numbers
reused by the time they are needed. Shutting down this side also ends the peers' waits, so one rank that knows of a
fault informs every rank it is connected to.

Only connected sockets are recorded, because shutting down a listener makes gloo abort the process. The connections to
the store, which recovery needs, are recognized by the ports of its servers and left out.

`Listener`, `connect` and `connect_nonblocking` open the connections of `Channel` and `CommitVote`. A caller must
present a token that the listening rank has published in the job's store.
"""

import os
import secrets
import socket
import struct
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

_DESCRIPTORS = Path("/proc/self/fd")


class GroupSockets:
    """Duplicates of the sockets of one inner group."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def add(self, sockets: list[socket.socket]) -> None:
        """Take ownership of duplicated sockets."""
        self._sockets += sockets

    @property
    def own_address(self) -> str:
        """Address of this machine as the other members see it; without a connection, the address of its host name."""
        for each in self._sockets:
            with suppress(OSError):
                return each.getsockname()[0]
        return socket.gethostbyname(socket.gethostname())

    def shutdown(self) -> None:
        """Shut down every connection at both ends; does nothing for those that are closed already."""
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the duplicates; the group keeps its own descriptors."""
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            each.close()


@contextmanager
def recording(store: Store) -> Generator[GroupSockets]:
    """Record the sockets that are connected inside the block, except those of `store`.

    Two blocks at the same time cannot tell their sockets apart. That happens only next to a thread that a cancelled
    `Reconfiguration` has abandoned: its sockets may be shut down here, and it does not shut down those it has
    recorded.
    """
    sockets, before = GroupSockets(), _open_sockets()
    try:
        yield sockets
    finally:
        sockets.add(_connected(_open_sockets() - before, server_ports(store)))


@runtime_checkable
class ServedStore(Protocol):
    """A Python store that reports the ports of its servers."""

    @property
    def server_ports(self) -> frozenset[int]:
        """Ports of the servers."""
        ...


def server_ports(store: Store) -> frozenset[int]:
    """Return the ports of the servers behind a store; empty if it has none."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return frozenset([store.port])
    return store.server_ports if isinstance(store, ServedStore) else frozenset()


def _open_sockets() -> set[tuple[int, str]]:
    """Descriptor and inode of each socket of this process; empty on systems without /proc."""
    found: set[tuple[int, str]] = set()
    if not _DESCRIPTORS.is_dir():
        return found
    for name in os.listdir(_DESCRIPTORS):
        with suppress(OSError):  # closed meanwhile
            target = os.readlink(_DESCRIPTORS / name)
            if target.startswith("socket:"):
                found.add((int(name), target))
    return found


def _connected(descriptors: set[tuple[int, str]], excluded_ports: frozenset[int]) -> list[socket.socket]:
    kept: list[socket.socket] = []
    for descriptor, _ in descriptors:
        try:
            copy = os.dup(descriptor)
        except OSError:
            continue
        try:
            candidate = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue
        if _is_data_socket(candidate, excluded_ports):
            kept.append(candidate)
        else:
            candidate.close()
    return kept


def _is_data_socket(candidate: socket.socket, excluded_ports: frozenset[int]) -> bool:
    if candidate.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        ports = {candidate.getsockname()[1], candidate.getpeername()[1]}
    except OSError:  # a listener has no peer
        return False
    return ports.isdisjoint(excluded_ports)


_TOKEN_BYTES = 16
_GREETING = struct.Struct(f"!{_TOKEN_BYTES}sI")  # the token, and the caller's rank
_GREETING_S = 5.0
_MAX_CALLERS = 64
_LOOK_S = 0.0002
"""How long `receive_all` looks for a message before it sleeps."""


class Listener:
    """Accepts connections concurrently: a caller that sends nothing, or a wrong token, does not delay the others.

    No method blocks. Call `accept` when one of `sockets` is readable, or periodically.
    """

    def __init__(self, address: str) -> None:
        """Listen on a free port of `address`, at which the other ranks reach this machine."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family)
        self._socket.setblocking(False)
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._callers: dict[socket.socket, tuple[float, bytes]] = {}
        self.invitation = f"{address} {self._socket.getsockname()[1]} {self._token.hex()}"
        """Address, port and token, as `connect` and `connect_nonblocking` take them."""

    def __del__(self) -> None:
        """Close the listener and the callers that `accept` has not returned."""
        self.close()

    @property
    def sockets(self) -> list[socket.socket]:
        """Sockets to poll for readability."""
        return [self._socket, *self._callers]

    def accept(self) -> list[tuple[int, socket.socket]]:
        """Return rank and non-blocking socket of each caller that has sent the token since the last call."""
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
        """Stop listening, and close the callers that `accept` has not returned."""
        self._socket.close()
        for caller in list(self._callers):
            self._refuse(caller)

    def _refuse(self, caller: socket.socket) -> None:
        del self._callers[caller]
        caller.close()


def open_connection(invitation: str, rank: int, timeout_s: float) -> socket.socket:
    """Connect to a `Listener` as `rank`.

    Raises:
        OSError: nothing listens there, or the connection was not made in time.
    """
    host, port, token = invitation.split()
    connection = socket.create_connection((host, int(port)), timeout_s)
    connection.sendall(_GREETING.pack(bytes.fromhex(token), rank))
    return connection


def connect_nonblocking(invitation: str, rank: int) -> tuple[socket.socket, bytes]:
    """Start connecting to a `Listener` as `rank`, without blocking.

    Returns:
        The socket, which is writable once it is connected, and the greeting that must be sent first.

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


def receive_all(connection: socket.socket, num_bytes: int, *, what: str = "the connection") -> bytes:
    """Receive exactly `num_bytes` from a blocking socket, and look for them for a moment before sleeping.

    Waking a thread that sleeps in a receive takes several times as long as the message itself.

    Args:
        connection: see `set_kernel_timeout`.
        num_bytes: size of the message.
        what: what an error calls the connection.

    Raises:
        BlockingIOError: no byte has come within the socket's kernel timeout.
        ConnectionResetError: the peer has closed the connection.
    """
    data = _receive_at_once(connection, num_bytes)
    while len(data) < num_bytes:
        more = connection.recv(num_bytes - len(data), socket.MSG_WAITALL)
        if not more:
            raise ConnectionResetError(f"{what} was closed by its peer")
        data += more
    return data


def _receive_at_once(connection: socket.socket, num_bytes: int) -> bytes:
    """What comes within `_LOOK_S`, at most `num_bytes`; empty if nothing does, or the connection was closed."""
    until_s = time.monotonic() + _LOOK_S
    while True:
        try:
            return connection.recv(num_bytes, socket.MSG_DONTWAIT)
        except BlockingIOError:
            if time.monotonic() > until_s:
                return b""
            os.sched_yield()  # the peer may be waiting for this core


def set_kernel_timeout(connection: socket.socket, timeout_s: float) -> None:
    """Make a socket blocking, with a timeout in the kernel: one system call per message instead of two.

    A send or receive in which no byte moves for `timeout_s` raises `BlockingIOError`.
    """
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    limit = struct.pack("ll", *divmod(max(1000, int(timeout_s * 1e6)), 1_000_000))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
