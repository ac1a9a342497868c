"""TCP connections between ranks, opened by those who know a token that lies in the job's store."""

import os
import secrets
import socket
import struct
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

# The connections under a group, and how to cut them: the only way to wake whoever is blocked in gloo.
#
# [Note: cutting] gloo's abort, shutdown and destruction wake nobody (torch 2.13). A collective that waits for a lost
# peer ends when a socket of its group is shut down, on this side or on the other. So the sockets that appear while a
# group connects are remembered, as duplicates: a descriptor's number may belong to something else by the time it is
# needed. Cutting our side ends our peers' waits too, so that one rank that knows of a fault tells all it is connected
# to.
#
# Only connected sockets are taken: shutting down a listener makes gloo abort the process. The store's connections,
# which recovery needs, are known by the ports of its servers.

_DESCRIPTORS = Path("/proc/self/fd")


class GroupSockets:
    """Sockets of one inner group."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def add(self, sockets: list[socket.socket]) -> None:
        """Take ownership of duplicates."""
        self._sockets += sockets

    @property
    def own_address(self) -> str:
        """Of this machine, as the other members see it; of this host by its name where there is no connection."""
        for each in self._sockets:
            with suppress(OSError):
                return each.getsockname()[0]
        return socket.gethostbyname(socket.gethostname())

    def shutdown(self) -> None:
        """Shut down every connection, at both ends; harmless when they are gone already."""
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the duplicates; the group keeps its own descriptors."""
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            each.close()


_wires: WeakKeyDictionary[dist.ProcessGroup, GroupSockets] = WeakKeyDictionary()


@contextmanager
def recording(store: Store) -> Generator[GroupSockets]:
    """Remember the sockets that are connected inside the block, apart from those of `store`.

    Two blocks at once cannot tell their sockets apart. That happens only beside a thread that was left to itself (see
    `generations.Reform`), whose sockets may be cut, and which cuts none that it found.
    """
    sockets, before = GroupSockets(), _open_sockets()
    try:
        yield sockets
    finally:
        sockets.add(_connected(_open_sockets() - before, server_ports(store)))


def keep(group: dist.ProcessGroup, sockets: GroupSockets) -> None:
    """Remember whose sockets these are."""
    _wires[group] = sockets


def add(group: dist.ProcessGroup, sockets: list[socket.socket]) -> None:
    """Let duplicates be cut with the sockets of an inner group."""
    _wires.setdefault(group, GroupSockets()).add(sockets)


def own_address(group: dist.ProcessGroup) -> str:
    """Address of this machine, as the other members of an inner group see it."""
    return _wires.get(group, GroupSockets()).own_address


def shutdown(group: dist.ProcessGroup) -> None:
    """Wake everybody who waits in a gloo collective of this inner group, here and at its other members."""
    sockets = _wires.get(group)
    if sockets is not None:
        sockets.shutdown()


def release(group: dist.ProcessGroup) -> None:
    """Close the remembered sockets of an inner group that is not used any more."""
    sockets = _wires.pop(group, None)
    if sockets is not None:
        sockets.close()


@runtime_checkable
class ServedStore(Protocol):
    """A store in Python that says where its servers are."""

    @property
    def server_ports(self) -> frozenset[int]:
        """Ports of the servers."""
        ...


def server_ports(store: Store) -> frozenset[int]:
    """Ports of the servers behind a store; none where it has none."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return frozenset([store.port])
    return store.server_ports if isinstance(store, ServedStore) else frozenset()


def _open_sockets() -> set[tuple[int, str]]:
    """Descriptor and inode of each socket of this process; empty where there is no /proc."""
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
