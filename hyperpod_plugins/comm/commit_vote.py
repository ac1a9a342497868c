"""All-reduces of a few bytes over all ranks: the commit vote of a step (bitwise or), and `all_max`.

The threads of a collective library wake each other for each message of a group; for a few bytes per step this costs
more than all other bookkeeping of a step without failures. Here the ranks of a generation form a binary tree of TCP
connections, and a vote goes up and down it: a few system calls per rank, and 2 log2(n) sequential messages instead of
the 2 n of a ring. See docs/design/vote.md.

No rank gets the result before every rank has voted: the root answers only when it has heard from all of them. There is
no vote against a step: a rank without valid gradients does not vote, so the vote cannot complete. That it completes
means that all ranks may commit; the flags say something else (`recovery/step.py` defines them).
"""

import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from hyperpod_plugins.comm.process_group import ResilientProcessGroup
from hyperpod_plugins.comm.runtime import group_health
from hyperpod_plugins.comm.sockets import Listener, open_connection, receive_all, set_kernel_timeout
from hyperpod_plugins.comm.transport import InnerGroup
from hyperpod_plugins.comm.work import PeerWait, raise_peer_lost
from hyperpod_plugins.errors import CommError

_SLICE = timedelta(seconds=0.2)
_HEADER = struct.Struct("!BBI")
"""Number of the message and what it is; the flags of a vote; and the size of the bytes that follow."""
_WHAT = "a commit-vote connection"
_NUMBERS = 128
"""Messages are numbered modulo this; to the number of one that is not a vote, it is added."""


class CommitVote:
    """The connections of one rank to its neighbors in the tree; for one thread at a time."""

    def __init__(self, timeout: timedelta) -> None:
        """Start without connections; `timeout` is the longest wait for a neighbor in each vote."""
        self._timeout = timeout
        self._up: socket.socket | None = None
        self._down: list[socket.socket] = []
        self._number = 0

    def set_parent(self, connection: socket.socket) -> None:
        """Set the connection to the parent."""
        self._up = connection
        set_kernel_timeout(connection, self._timeout.total_seconds())

    def add_child(self, connection: socket.socket) -> None:
        """Add the connection to a child."""
        self._down.append(connection)
        set_kernel_timeout(connection, self._timeout.total_seconds())

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the longest wait for a neighbor from now on."""
        self._timeout = timeout
        for each in self.sockets:
            set_kernel_timeout(each, timeout.total_seconds())

    def __del__(self) -> None:
        """Close the connections together with the group that they belong to."""
        for each in self.sockets:
            each.close()

    @property
    def sockets(self) -> list[socket.socket]:
        """All connections, the parent's first."""
        return [*([] if self._up is None else [self._up]), *self._down]

    def all_or(self, mine: int, on_child_notified: Callable[[], object] | None = None) -> int:
        """Return the flags that any rank has set, as bits of one byte.

        Args:
            mine: this rank's flags.
            on_child_notified: called each time the result has been sent to one of this rank's children.

        Raises:
            OSError: a connection is lost, or a neighbor did not vote within the timeout.
        """
        for each in self._down:
            mine |= self._receive(each)
        if self._up is not None:
            self._send(self._up, mine)
            mine = self._receive(self._up)
        for each in self._down:
            self._send(each, mine)
            if on_child_notified is not None:
                on_child_notified()
        self._number = (self._number + 1) % _NUMBERS
        return mine

    def all_max(self, mine: bytes) -> bytes:
        """Return the largest of each byte of all ranks, each of which passes as many.

        Raises:
            OSError: see `all_or`; or a neighbor passed another number of bytes, or voted.
        """
        for each in self._down:
            mine = _maxima(mine, self._receive_bytes(each, len(mine)))
        if self._up is not None:
            self._send_bytes(self._up, mine)
            mine = self._receive_bytes(self._up, len(mine))
        for each in self._down:
            self._send_bytes(each, mine)
        self._number = (self._number + 1) % _NUMBERS
        return mine

    def _send(self, to: socket.socket, value: int) -> None:
        to.sendall(_HEADER.pack(self._number, value, 0))

    def _receive(self, of: socket.socket) -> int:
        return self._receive_header(of, self._number, 0)

    def _send_bytes(self, to: socket.socket, data: bytes) -> None:
        to.sendall(_HEADER.pack(_NUMBERS + self._number, 0, len(data)) + data)

    def _receive_bytes(self, of: socket.socket, num_bytes: int) -> bytes:
        self._receive_header(of, _NUMBERS + self._number, num_bytes)
        return receive_all(of, num_bytes, what=_WHAT)

    def _receive_header(self, of: socket.socket, number: int, num_bytes: int) -> int:
        """Receive a header, which must have this number and size; returns its flags."""
        found, flags, size = _HEADER.unpack(receive_all(of, _HEADER.size, what=_WHAT))
        if (found, size) != (number, num_bytes):
            raise ConnectionError(
                f"received message {found} with {size} bytes instead of message {number} with {num_bytes} bytes"
            )
        return flags


def _maxima(first: bytes, second: bytes) -> bytes:
    return np.maximum(np.frombuffer(first, np.uint8), np.frombuffer(second, np.uint8)).tobytes()


def commit_vote(mine: int, told: Callable[[], object] | None = None) -> int | None:
    """Return the flags that any rank has set; if a rank is lost before, break all groups and return None.

    All ranks call this once per step, inside the step. The first vote of a generation opens the connections. Returns
    None at once if the groups are broken or not connected. A number means that every rank has voted, even if the
    groups are broken by now.

    Args:
        mine: this rank's flags, as bits of one byte.
        told: see `CommitVote.all_or`.

    Raises:
        CommError: the default group is not of the backend `hyperpod`.
    """
    group = dist.group.WORLD
    if not isinstance(group, ResilientProcessGroup):
        raise CommError('a commit vote needs a default group of the backend "hyperpod"')
    inner = group.connected
    if group_health.is_unavailable or inner is None:
        return None
    if group.size() == 1:
        return mine
    try:
        with PeerWait(group.key):
            vote = inner.connections.get("vote")
            if not isinstance(vote, CommitVote):  # the first message of this generation
                vote = _open(group, inner)
            return vote.all_or(mine, told)
    except (OSError, dist.DistError) as error:
        group.mark_broken(error)
        return None


def all_max(values: torch.Tensor) -> bytes:
    """Return the largest of each value of all ranks: an all-reduce whose result the host reads.

    Values in host memory go over the tree of the commit vote, if the default group is of the backend `hyperpod`.

    Args:
        values: uint8 `(n,)`, the same `n` on all ranks.

    Returns:
        `n` bytes; if the groups are broken, inside a step, any.

    Raises:
        PeerLost: a rank is lost, outside a step.
    """
    group = dist.group.WORLD
    inner = group.connected if isinstance(group, ResilientProcessGroup) else None
    is_in_tree = values.is_cpu and not group_health.is_unavailable
    if (
        not (isinstance(group, ResilientProcessGroup) and is_in_tree)
        or inner is None
        or inner.queueing_device([values]) is not None
    ):
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return bytes(values.tolist())
    vote = inner.connections.get("vote")
    try:
        if not isinstance(vote, CommitVote):
            # The first time, on all ranks: a collective of the library notices a peer that is gone before it connects.
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
            if group_health.cause is None:
                _open(group, inner)
            return bytes(values.tolist())
        group.announce("all_reduce", values.nbytes)
        group.num_issued += 1
        with PeerWait(group.key, group.num_issued):
            return vote.all_max(bytes(values.tolist()))
    except (OSError, dist.DistError) as error:
        group.mark_broken(error)
        if not group_health.suppresses_collectives:
            raise_peer_lost(group_health.cause or str(error), error)
        return bytes(values.tolist())


def _open(group: ResilientProcessGroup, inner: InnerGroup) -> CommitVote:
    """Connect to the neighbors of this generation; a break shuts these connections down too."""
    store = PrefixStore(f"{group.store_prefix}/ballot", group.root_store)
    vote = connect_vote(store, group.rank(), group.size(), inner.sockets.own_address, group.timeout)
    inner.sockets.add([each.dup() for each in vote.sockets])
    if group_health.cause is not None:  # the break came first
        raise ConnectionAbortedError(group_health.cause)
    inner.connections["vote"] = vote
    return vote


def connect_vote(store: Store, rank: int, size: int, address: str, timeout: timedelta) -> CommitVote:
    """Connect one rank to its parent and its children.

    Args:
        store: store that only this generation uses.
        rank: in `0 .. size - 1`.
        size: number of ranks.
        address: address at which other ranks reach this machine.
        timeout: longest wait for another rank, here and in each vote.

    Raises:
        OSError: a neighbor did not connect in time, or the groups broke meanwhile.
    """
    children = [child for child in (2 * rank + 1, 2 * rank + 2) if child < size]
    deadline_s = time.monotonic() + timeout.total_seconds()
    listener = Listener(address)
    vote = CommitVote(timeout)
    try:
        if children:
            store.set(str(rank), listener.invitation)
        if rank:
            invitation = _wait_get(store, str((rank - 1) // 2), deadline_s)
            vote.set_parent(open_connection(invitation, rank, _left_s(deadline_s)))
        for connection in _accept(listener, children, deadline_s):
            vote.add_child(connection)
    finally:
        listener.close()
    return vote


def _accept(listener: Listener, children: Sequence[int], deadline_s: float) -> list[socket.socket]:
    """Accept the connections of the children; return them in order."""
    found: dict[int, socket.socket] = {}
    while len(found) < len(children):
        _check_deadline(deadline_s)
        select.select(listener.sockets, [], [], min(_SLICE.total_seconds(), _left_s(deadline_s)))
        found |= {rank: connection for rank, connection in listener.accept() if rank in children}
    return [found[child] for child in children]


def _wait_get(store: Store, key: str, deadline_s: float) -> str:
    while True:
        try:
            store.wait([key], _SLICE)
            return store.get(key).decode()
        except dist.DistError:  # not set yet
            _check_deadline(deadline_s)


def _check_deadline(deadline_s: float) -> None:
    if group_health.cause is not None:
        raise ConnectionAbortedError(group_health.cause)
    if time.monotonic() > deadline_s:
        raise TimeoutError("a neighbour did not come to vote")


def _left_s(deadline_s: float) -> float:
    return max(0.01, deadline_s - time.monotonic())
