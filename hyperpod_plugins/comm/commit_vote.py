"""The vote of a step: a small number from every rank, and the largest of them to all.

A collective library has threads that wake each other for each message of a group; for two numbers in every step they
cost more than all the rest of a healthy step's bookkeeping. Here the ranks of a generation form a binary tree of TCP
connections, and a vote goes up and down it: a few system calls a rank, and 2 log2(n) messages one after the other where
a ring has 2 n. See docs/design/vote.md.

Nobody gets a result before every rank has given its number: the root answers when it has heard of all.
"""

import select
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from hyperpod_plugins.comm import sockets
from hyperpod_plugins.comm.health import group_health
from hyperpod_plugins.comm.process_group import ResilientProcessGroup
from hyperpod_plugins.comm.sockets import Listener, limit_waits
from hyperpod_plugins.comm.sockets import connect as open_connection
from hyperpod_plugins.comm.work import PeerWait
from hyperpod_plugins.errors import CommError

_SLICE = timedelta(seconds=0.2)
_MESSAGE_BYTES = 2  # number of the vote, modulo 256, and the value


class CommitVote:
    """The connections of one rank to its neighbours in the tree."""

    def __init__(self, timeout: timedelta) -> None:
        """Begin without any; `timeout` is the longest wait for a neighbour in each vote."""
        self._timeout = timeout
        self._up: socket.socket | None = None
        self._down: list[socket.socket] = []
        self._number = 0

    def set_parent(self, connection: socket.socket) -> None:
        """Have a parent."""
        self._up = connection
        limit_waits(connection, self._timeout.total_seconds())

    def add_child(self, connection: socket.socket) -> None:
        """Have one more child."""
        self._down.append(connection)
        limit_waits(connection, self._timeout.total_seconds())

    def __del__(self) -> None:
        """Close them with the group that they belong to."""
        for each in self.sockets:
            each.close()

    @property
    def sockets(self) -> list[socket.socket]:
        """All of them."""
        return [*([] if self._up is None else [self._up]), *self._down]

    def all_max(self, mine: int, told: Callable[[], object] | None = None) -> int:
        """The largest of all ranks' numbers, each in `0 .. 255`.

        Args:
            mine: this rank's.
            told: called each time that one of this rank's children has been sent the result.

        Raises:
            OSError: a connection is gone, or a neighbour did not vote within the timeout.
        """
        for each in self._down:
            mine = max(mine, self._receive(each))
        if self._up is not None:
            self._send(self._up, mine)
            mine = self._receive(self._up)
        for each in self._down:
            self._send(each, mine)
            if told is not None:
                told()
        self._number = (self._number + 1) % 256
        return mine

    def _send(self, to: socket.socket, value: int) -> None:
        to.sendall(bytes((self._number, value)))

    def _receive(self, of: socket.socket) -> int:
        data = of.recv(_MESSAGE_BYTES, socket.MSG_WAITALL)
        if len(data) < _MESSAGE_BYTES:
            raise ConnectionResetError("a connection for votes was closed by its peer")
        if data[0] != self._number:
            raise ConnectionError(f"a vote has number {data[0]} in the place of {self._number}")
        return data[1]


_ballots: "WeakKeyDictionary[dist.ProcessGroup, CommitVote]" = WeakKeyDictionary()


def commit_vote(mine: int, told: Callable[[], object] | None = None) -> int:
    """The largest of all ranks' numbers; 0 and a break of all groups if one is missing.

    All ranks call this once a step, inside of it. The first vote of a generation connects.

    Args:
        mine: this rank's, in `0 .. 255`.
        told: see `Ballot.largest`.

    Raises:
        CommError: the default group is not of the backend `hyperpod`.
    """
    group = dist.group.WORLD
    if not isinstance(group, ResilientProcessGroup):
        raise CommError('a vote needs a default group of the backend "hyperpod"')
    inner = group.connected
    if group_health.is_open or inner is None:
        return 0
    if group.size() == 1:
        return mine
    try:
        with PeerWait(group.role):
            vote = _ballots.get(inner)
            if vote is None:
                vote = _open(group, inner)
            return vote.all_max(mine, told)
    except (OSError, dist.DistError) as error:
        group.mark_broken(error)
        return 0


def _open(group: ResilientProcessGroup, inner: dist.ProcessGroup) -> CommitVote:
    """Connect to the neighbours of this generation, and let a break cut these connections, too."""
    store = PrefixStore(f"{group.store_prefix}/ballot", group.root_store)
    vote = connect(store, group.rank(), group.size(), sockets.own_address(inner), group.timeout)
    sockets.add(inner, [each.dup() for each in vote.sockets])
    if group_health.cause is not None:  # the cut came before
        raise ConnectionAbortedError(group_health.cause)
    _ballots[inner] = vote
    return vote


def connect(store: Store, rank: int, size: int, address: str, timeout: timedelta) -> CommitVote:
    """Connect one rank to its parent and its children.

    Args:
        store: of this generation alone.
        rank: in `0 .. size - 1`.
        size: number of ranks.
        address: by which others reach this machine.
        timeout: longest wait for another rank, here and in each vote.

    Raises:
        OSError: a neighbour did not come, or the groups broke meanwhile.
    """
    children = [child for child in (2 * rank + 1, 2 * rank + 2) if child < size]
    deadline_s = time.monotonic() + timeout.total_seconds()
    listener = Listener(address)
    vote = CommitVote(timeout)
    try:
        if children:
            store.set(str(rank), listener.invitation)
        if rank:
            invitation = _find(store, str((rank - 1) // 2), deadline_s)
            vote.set_parent(open_connection(invitation, rank, _left_s(deadline_s)))
        for connection in _accept(listener, children, deadline_s):
            vote.add_child(connection)
    finally:
        listener.close()
    return vote


def _accept(listener: Listener, children: Sequence[int], deadline_s: float) -> list[socket.socket]:
    """The connections of the children, in order."""
    found: dict[int, socket.socket] = {}
    while len(found) < len(children):
        _refuse_late(deadline_s)
        select.select(listener.sockets, [], [], min(_SLICE.total_seconds(), _left_s(deadline_s)))
        found |= {rank: connection for rank, connection in listener.take() if rank in children}
    return [found[child] for child in children]


def _find(store: Store, key: str, deadline_s: float) -> str:
    while True:
        try:
            store.wait([key], _SLICE)
            return store.get(key).decode()
        except dist.DistError:  # it is not there yet
            _refuse_late(deadline_s)


def _refuse_late(deadline_s: float) -> None:
    if group_health.cause is not None:
        raise ConnectionAbortedError(group_health.cause)
    if time.monotonic() > deadline_s:
        raise TimeoutError("a neighbour did not come to vote")


def _left_s(deadline_s: float) -> float:
    return max(0.01, deadline_s - time.monotonic())
