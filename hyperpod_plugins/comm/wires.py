"""The connections under a group, and how to cut them: the only way to wake whoever is blocked in gloo.

[Note: cutting] gloo's abort, shutdown and destruction wake nobody (torch 2.13). A collective that waits for a lost peer
ends when a socket of its group is shut down, on this side or on the other. So the sockets that appear while a group
connects are remembered, as duplicates: a descriptor's number may belong to something else by the time it is needed.
Cutting our side ends our peers' waits too, so that one rank that knows of a fault tells all it is connected to.

Only connected sockets are taken: shutting down a listener makes gloo abort the process. The store's connections, which
recovery needs, are known by the ports of its servers.
"""

import os
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

_DESCRIPTORS = Path("/proc/self/fd")


class Wires:
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

    def cut(self) -> None:
        """Shut down every connection, at both ends; harmless when they are gone already."""
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the duplicates; the group keeps its own descriptors."""
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            each.close()


_wires: WeakKeyDictionary[dist.ProcessGroup, Wires] = WeakKeyDictionary()


@contextmanager
def recording(store: Store) -> Generator[Wires]:
    """Remember the sockets that are connected inside the block, apart from those of `store`.

    Two blocks at once cannot tell their sockets apart. That happens only beside a thread that was left to itself (see
    `generations.Reform`), whose sockets may be cut, and which cuts none that it found.
    """
    wires, before = Wires(), _open_sockets()
    try:
        yield wires
    finally:
        wires.add(_connected(_open_sockets() - before, server_ports(store)))


def keep(group: dist.ProcessGroup, wires: Wires) -> None:
    """Remember whose wires these are."""
    _wires[group] = wires


def add(group: dist.ProcessGroup, sockets: list[socket.socket]) -> None:
    """Let duplicates be cut with the wires of an inner group."""
    _wires.setdefault(group, Wires()).add(sockets)


def own_address(group: dist.ProcessGroup) -> str:
    """Address of this machine, as the other members of an inner group see it."""
    return _wires.get(group, Wires()).own_address


def cut(group: dist.ProcessGroup) -> None:
    """Wake everybody who waits in a gloo collective of this inner group, here and at its other members."""
    wires = _wires.get(group)
    if wires is not None:
        wires.cut()


def release(group: dist.ProcessGroup) -> None:
    """Close the remembered sockets of an inner group that is not used any more."""
    wires = _wires.pop(group, None)
    if wires is not None:
        wires.close()


@runtime_checkable
class Served(Protocol):
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
    return store.server_ports if isinstance(store, Served) else frozenset()


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
