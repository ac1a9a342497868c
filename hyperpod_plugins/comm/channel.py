"""Point-to-point transfers between the ranks of a group, over TCP connections of their own.

    channel = Channel(group, "snapshots")
    received = channel.exchange("state", sends={buddy: [header, tensor]}, receives={ward: [1 << 20, place]})

[Note: why not send and recv] gloo does not wake a send or a receive whose payload is under way when a peer dies, and
its point-to-point waits keep the timeout with which the group was connected, whatever `set_timeout` says (torch 2.13).
nccl's wait for a lost peer ends with an abort of the whole communicator. Here every wait ends within milliseconds of a
break of the groups (the break shuts these sockets down, see `wires`) or of the peer's end (the kernel resets the
connection), and otherwise when nothing has moved for a while.

[Note: how long] A sender waits before its first large part until its receiver has said that it is ready, so there are
two limits: `patience_s` for the other rank to come to the transfer, and `stall_s` without a byte once it is under way.
There is none for a whole transfer, for that depends on its size. A rank with several targets serves them at the same
time. Small parts are sent at once (in MPI's terms: eagerly, and the others by rendezvous): a rank that has sent those
does not know that they have arrived.
"""

import select
import socket
import struct
import time
import weakref
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from hyperpod_plugins.comm import sockets
from hyperpod_plugins.comm.health import group_health
from hyperpod_plugins.comm.process_group import ResilientProcessGroup
from hyperpod_plugins.comm.sockets import Listener, begin_connecting, limit_waits
from hyperpod_plugins.comm.work import PeerWait, raise_peer_lost
from hyperpod_plugins.errors import CommError

_FRAME = struct.Struct("!IIQ")  # type, number of the message, bytes of payload
_READY = b"R"
_CHUNK_BYTES = 4 * 2**20
_SLICE_S = 0.2
_FIRST_LOOK_S, _LAST_LOOK_S = 0.001, 0.05

T = TypeVar("T")
Part = torch.Tensor | bytes
"""What is sent: a tensor on any device, or bytes."""
Place = torch.Tensor | int
"""Where a part is received: a contiguous tensor, which it must fill, or the largest size in bytes of a new one."""


class Channel:
    """Transfers between the ranks of a group in its present generation; connects when it is first used in each.

    Each channel has its own connections: one exchange at a time on each, from whatever thread. Two threads that
    communicate at the same time, and each kind of transfer that may overlap with another, need a channel each.
    """

    SMALL_BYTES = 2**14
    """Largest part that goes out at once, together with its header."""

    def __init__(
        self, group: dist.ProcessGroup | None, name: str, *, stall_s: float = 60.0, patience_s: float | None = None
    ) -> None:
        """Connect to nobody yet; all ranks that use the channel give it the same name.

        Args:
            group: of the backend `hyperpod`; None for the default group.
            name: two of the same name use the same connections.
            stall_s: longest time without a byte in a transfer that is under way, in seconds.
            patience_s: longest wait for another rank to come to a transfer; by default the timeout of the group.
        """
        self._group = group
        self._name = name
        self._stall_s, self._patience_s = stall_s, patience_s

    def exchange(
        self, label: str, *, sends: Mapping[int, Sequence[Part]], receives: Mapping[int, Sequence[Place]]
    ) -> dict[int, list[torch.Tensor]]:
        """Send to some ranks while receiving from others; returns when all of it is done.

        The ranks at the other ends call this too, with the same label and as many parts. A part of which only a limit
        was given is received into new host memory, as bytes.

        Args:
            label: what is transferred; a peer that sends something else is an error.
            sends: parts for each rank of the group.
            receives: places for the parts of each rank of the group.

        Returns:
            The parts from each rank in `receives`, in order; a place that was given is returned itself.

        Raises:
            PeerLost: a peer is gone, stalled or sent something else, or the groups broke. All groups are broken then.
                Also inside a step: no transfer is skipped quietly.
            CommError: the group is not of the backend `hyperpod`, or a rank is this process's own.
        """
        rank = self._present_group().rank()
        if rank in sends or rank in receives:
            raise CommError(f"rank {rank} cannot transfer {label!r} to itself")
        if any(
            isinstance(place, torch.Tensor) and not place.is_contiguous()
            for each in receives.values()
            for place in each
        ):
            raise CommError(f"{label!r} is to be received into a tensor that is not contiguous")
        return self._over_links(
            lambda links, patience_s: links.exchange(
                label, sends, receives, patience_s=patience_s, stall_s=self._stall_s
            )
        )

    def send_receive(self, label: str, data: bytes, *, to: int, of: int) -> bytes:
        """Send a few bytes to one rank, and receive a few from one: `exchange` in a fraction of its processor time.

        Args:
            label: see `exchange`.
            data: at most `Channel.SMALL_BYTES`.
            to: rank of the group that receives them, with this method or with `exchange`.
            of: rank of the group that sends some.

        Returns:
            What that rank has sent.

        Raises:
            PeerLost: see `exchange`. Here a rank that does not come is waited for as long as one that stalls.
            CommError: there are too many bytes, or the group is not of the backend `hyperpod`.
        """
        if len(data) > Channel.SMALL_BYTES:
            raise CommError(
                f"{label!r} has {len(data):,} bytes, and send_receive takes {Channel.SMALL_BYTES:,} at most"
            )
        return self._over_links(
            lambda links, patience_s: links.send_receive(label, data, to, of, patience_s=patience_s)
        )

    def send(self, label: str, parts: Sequence[Part], ranks: Sequence[int]) -> None:
        """Send the same parts to several ranks at the same time; see `exchange`."""
        self.exchange(label, sends=dict.fromkeys(ranks, parts), receives={})

    def receive(self, label: str, places: Sequence[Place], rank: int) -> list[torch.Tensor]:
        """Receive parts from one rank; see `exchange`."""
        return self.exchange(label, sends={}, receives={rank: places})[rank]

    def _present_group(self) -> ResilientProcessGroup:
        group = self._group or dist.group.WORLD
        if not isinstance(group, ResilientProcessGroup):
            raise CommError(f'the channel {self._name!r} needs a group of the backend "hyperpod"')
        return group

    def _over_links(self, transfer: "Callable[[Links, float], T]") -> T:
        """Call it with this generation's connections and the patience in seconds; what it raises breaks the groups."""
        group = self._present_group()
        inner = group.connected
        if group_health.is_open or inner is None:
            raise_peer_lost(group_health.cause or "it has not joined the others yet")
        patience_s = group.timeout.total_seconds() if self._patience_s is None else self._patience_s
        try:
            with PeerWait(group.role):
                return transfer(self._links_of(group, inner), patience_s)
        except (OSError, dist.DistError) as error:
            group.mark_broken(error)
            raise_peer_lost(group_health.cause or str(error), error)

    def _links_of(self, group: ResilientProcessGroup, inner: dist.ProcessGroup) -> "Links":
        links = _links.setdefault(inner, {})
        if self._name not in links:
            store = PrefixStore(f"{group.store_prefix}/channel/{self._name}", group.root_store)
            links[self._name] = Links(store, group.rank(), sockets.own_address(inner), _shutdown_with(inner))
        return links[self._name]


_links: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Links]]" = weakref.WeakKeyDictionary()


def _shutdown_with(inner: dist.ProcessGroup) -> Callable[[socket.socket], None]:
    """What lets a break cut new connections, too."""
    reference = weakref.ref(inner)

    def keep(connection: socket.socket) -> None:
        present = reference()
        if present is None or group_health.cause is not None:
            raise ConnectionAbortedError(group_health.cause or "the group has ended")
        sockets.add(present, [connection.dup()])
        if group_health.cause is not None:  # the cut came before
            raise ConnectionAbortedError(group_health.cause)

    return keep


class Links:
    """The connections of one rank to others, for one channel in one generation; for one thread at a time."""

    def __init__(
        self, store: Store, rank: int, address: str, keep: Callable[[socket.socket], None] = lambda _: None
    ) -> None:
        """Connect to nobody yet.

        Args:
            store: of this channel in this generation alone.
            rank: of this process.
            address: by which others reach this machine.
            keep: told of each new connection.
        """
        self._store = store
        self._rank = rank
        self._address = address
        self._keep = keep
        self._listener: Listener | None = None
        self._to: dict[int, _Link] = {}
        self._from: dict[int, _Link] = {}

    def __del__(self) -> None:
        """Close them with the group that they belong to."""
        for link in (*self._to.values(), *self._from.values()):
            link.socket.close()

    def exchange(
        self,
        label: str,
        sends: Mapping[int, Sequence[Part]],
        receives: Mapping[int, Sequence[Place]],
        *,
        patience_s: float,
        stall_s: float,
    ) -> dict[int, list[torch.Tensor]]:
        """See `Channel.exchange`.

        Raises:
            OSError: a peer is gone, stalled or sent something else, or the groups broke.
        """
        if receives and self._listener is None:
            self._listener = Listener(self._address)
            self._store.set(str(self._rank), self._listener.invitation)
        sending = [_Sending(rank, label, parts, self._to.get(rank)) for rank, parts in sorted(sends.items())]
        receiving = [_Receiving(rank, label, places, self._from.get(rank)) for rank, places in sorted(receives.items())]
        under_way: list[_Transfer] = [*sending, *(each for each in receiving if not each.is_done)]
        look_s = _FIRST_LOOK_S
        while under_way:
            is_all_there = self._connect(sending, receiving)
            if group_health.cause is not None:
                raise ConnectionAbortedError(group_health.cause)
            now_s, has_moved = time.monotonic(), False
            for transfer in under_way:
                if transfer.link is not None and transfer.advance():
                    transfer.moved_s, has_moved = now_s, True
                transfer.refuse_late(now_s, patience_s=patience_s, stall_s=stall_s)
            under_way = [transfer for transfer in under_way if not transfer.is_done]
            if under_way and not has_moved:
                look_s = min(look_s * 1.5, _LAST_LOOK_S)
                self._wait(under_way, _SLICE_S if is_all_there else look_s)
        return {transfer.rank: transfer.received for transfer in receiving}

    def send_receive(self, label: str, data: bytes, to: int, of: int, *, patience_s: float) -> bytes:
        """See `Channel.send_receive`.

        Raises:
            OSError: see `exchange`.
        """
        target, source = self._to.get(to), self._from.get(of)
        if target is None or target.greeting or source is None:  # the first time: connect
            places = {of: [Channel.SMALL_BYTES]}
            (received,) = self.exchange(label, {to: [data]}, places, patience_s=patience_s, stall_s=patience_s)[of]
            return received.numpy().tobytes()
        kind = zlib.crc32(label.encode())
        try:
            target.blocks(patience_s).sendall(target.header(kind, len(data)) + data)
            connection = source.blocks(patience_s)
            num_bytes = source.size_in(_receive_all(connection, _FRAME.size), kind, label, of)
            if num_bytes > Channel.SMALL_BYTES:
                raise ConnectionError(f"connection to rank {of}: {label!r} has {num_bytes:,} bytes")
            return _receive_all(connection, num_bytes)
        except BlockingIOError:
            raise TimeoutError(
                f"transfer of {label!r} with ranks {to} and {of}: no byte moved for {patience_s:.0f} s, timed out"
            ) from None

    def _connect(self, sending: Sequence["_Sending"], receiving: Sequence["_Receiving"]) -> bool:
        """Whether no more peers have to be looked for in the store."""
        for transfer in sending:
            if transfer.link is None and self._store.check([str(transfer.rank)]):
                invitation = self._store.get(str(transfer.rank)).decode()
                connection, greeting = begin_connecting(invitation, self._rank)
                self._keep(connection)
                transfer.link = self._to[transfer.rank] = _Link(connection, greeting)
        if self._listener is not None and any(transfer.link is None for transfer in receiving):
            for rank, connection in self._listener.take():
                if rank in self._from:
                    connection.close()
                    continue
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._from[rank] = _Link(connection, b"")
                self._keep(connection)
        for transfer in receiving:
            if transfer.link is None and transfer.rank in self._from:
                transfer.link = self._from[transfer.rank]
        return all(transfer.link is not None for transfer in sending)

    def _wait(self, under_way: Sequence["_Transfer"], limit_s: float) -> None:
        """Until one of them may go on."""
        poll = select.poll()
        if self._listener is not None and any(isinstance(each, _Receiving) and each.link is None for each in under_way):
            for each in self._listener.sockets:
                poll.register(each, select.POLLIN)
        for transfer in under_way:
            if transfer.link is not None:
                poll.register(transfer.link.socket, transfer.events)
        poll.poll(1000 * limit_s)


class _Link:
    """One connection, on which one side sends and the other says when it is ready."""

    def __init__(self, connection: socket.socket, greeting: bytes) -> None:
        self.socket = connection
        self.greeting = greeting
        """What is still to be sent before anything else."""
        self._number = 0
        """Of the next message."""
        self._patience_s = 0.0

    def header(self, kind: int, num_bytes: int) -> bytes:
        """What goes before the next message."""
        self._number += 1
        return _FRAME.pack(kind, self._number - 1, num_bytes)

    def size_in(self, header: bytes | bytearray, kind: int, label: str, rank: int) -> int:
        """Bytes of a message from `rank`, if it is the one that was to come."""
        came, number, num_bytes = _FRAME.unpack(header)
        if (came, number) != (kind, self._number):
            raise ConnectionError(
                f"connection to rank {rank}: message {number} of type {came:08x} in the place of message "
                f"{self._number} of type {kind:08x} ({label!r})"
            )
        self._number += 1
        return num_bytes

    def blocks(self, patience_s: float) -> socket.socket:
        """The connection as one whose waits the kernel limits: one system call for each message, not two."""
        if self._patience_s != patience_s:
            limit_waits(self.socket, patience_s)
            self._patience_s = patience_s
        return self.socket


def _receive_all(connection: socket.socket, num_bytes: int) -> bytes:
    """So many bytes, or `BlockingIOError` where they do not come in time."""
    data = b""
    while len(data) < num_bytes:
        more = connection.recv(num_bytes - len(data), socket.MSG_WAITALL)
        if not more:
            raise ConnectionResetError("a connection was closed by its peer")
        data += more
    return data


class _Transfer:
    """All parts from one rank to another."""

    def __init__(self, rank: int, label: str, link: _Link | None) -> None:
        self.rank = rank
        self.label = label
        self.link = link
        self.is_done = self.has_begun = False
        self.moved_s = time.monotonic()
        self._type = zlib.crc32(label.encode())

    @property
    def events(self) -> int:
        raise NotImplementedError

    def advance(self) -> bool:
        """Move what can be moved without waiting; whether there was anything."""
        raise NotImplementedError

    def refuse_late(self, now_s: float, *, patience_s: float, stall_s: float) -> None:
        """Raise `TimeoutError` if nothing has moved for too long."""
        limit_s = stall_s if self.has_begun else patience_s
        if not self.is_done and now_s - self.moved_s > limit_s:
            what = "no byte moved" if self.has_begun else "it did not come"
            raise TimeoutError(
                f"transfer of {self.label!r} with rank {self.rank}: {what} for {limit_s:.0f} s, timed out"
            )


class _Sending(_Transfer):
    """This rank's side of what it gives."""

    def __init__(self, rank: int, label: str, parts: Sequence[Part], link: _Link | None) -> None:
        super().__init__(rank, label, link)
        self._views = self._make_views(parts)
        self._view: memoryview | None = None
        self._awaits_ready = False

    @property
    def events(self) -> int:
        return select.POLLIN if self._awaits_ready else select.POLLOUT

    def advance(self) -> bool:
        link = self.link
        assert link is not None
        if self._view is None:
            self._next()
        with suppress(BlockingIOError):
            if link.greeting:
                link.greeting = link.greeting[link.socket.send(link.greeting, socket.MSG_DONTWAIT) :]
            elif self._awaits_ready:
                if link.socket.recv(1, socket.MSG_DONTWAIT) != _READY:
                    raise ConnectionResetError(
                        f"connection closed by rank {self.rank}, which was to take {self.label!r}"
                    )
                self.has_begun, self._awaits_ready = True, False
            elif self._view:
                self._view = self._view[link.socket.send(self._view, socket.MSG_DONTWAIT) :]
                if not self._view:
                    self._next()
            return True
        return False

    def _next(self) -> None:
        self._view = next(self._views, None)
        self.is_done = self._view is None

    def _make_views(self, parts: Sequence[Part]) -> Generator[memoryview]:
        """What goes over the wire, in pieces of host memory, none of them empty."""
        for part in parts:
            data = _as_bytes(part)
            assert self.link is not None
            header = self.link.header(self._type, data.numel())
            if data.numel() <= Channel.SMALL_BYTES:
                yield memoryview(header + data.cpu().numpy().tobytes())
                continue
            yield memoryview(header)
            self._awaits_ready = not self.has_begun
            stage = _stage(data)
            for chunk in data.split(_CHUNK_BYTES):
                if stage is not None:
                    stage = stage[: chunk.numel()].copy_(chunk)
                yield _view(chunk if stage is None else stage)


class _Receiving(_Transfer):
    """This rank's side of what it takes."""

    def __init__(self, rank: int, label: str, places: Sequence[Place], link: _Link | None) -> None:
        super().__init__(rank, label, link)
        self.received: list[torch.Tensor] = []
        self._is_ready_said = self._is_asked = False
        self._places = list(places)
        self._steps = self._read()
        self._view = next(self._steps, None)
        self.is_done = self._view is None

    @property
    def events(self) -> int:
        return select.POLLOUT if self._is_asked else select.POLLIN

    def advance(self) -> bool:
        link = self.link
        assert link is not None
        with suppress(BlockingIOError):
            if self._is_asked:
                self._is_asked = link.socket.send(_READY, socket.MSG_DONTWAIT) == 0
                return True
            assert self._view is not None
            num_bytes = link.socket.recv_into(self._view, 0, socket.MSG_DONTWAIT)
            if num_bytes == 0:
                raise ConnectionResetError(f"connection closed by rank {self.rank}, which was to give {self.label!r}")
            self.has_begun = True
            self._view = self._view[num_bytes:]
            if not self._view:
                self._view = next(self._steps, None)
                self.is_done = self._view is None
            return True
        return False

    def _read(self) -> Generator[memoryview]:
        """Memory for what comes next; each is full when the next one is asked for."""
        for place in self._places:
            header = bytearray(_FRAME.size)
            yield memoryview(header)
            data = self._room(place, header)
            self.received.append(data if isinstance(place, int) else place)
            if data.numel() > Channel.SMALL_BYTES and not self._is_ready_said:
                self._is_asked = self._is_ready_said = True
            stage = _stage(data)
            for chunk in data.split(_CHUNK_BYTES):
                if chunk.numel() == 0:
                    continue
                if stage is None:
                    yield _view(chunk)
                else:
                    yield _view(stage[: chunk.numel()])
                    chunk.copy_(stage[: chunk.numel()])

    def _room(self, place: Place, header: bytearray) -> torch.Tensor:
        """Where the payload goes, if it is what was to come."""
        assert self.link is not None
        num_bytes = self.link.size_in(header, self._type, self.label, self.rank)
        size = place if isinstance(place, int) else place.nbytes
        if num_bytes > size or not (isinstance(place, int) or num_bytes == size):
            raise ConnectionError(
                f"connection to rank {self.rank}: a part of {self.label!r} has {num_bytes:,} bytes, and there is room "
                f"for {size:,}"
            )
        return torch.empty(num_bytes, dtype=torch.uint8) if isinstance(place, int) else _as_bytes(place)


def _as_bytes(part: Part) -> torch.Tensor:
    """All bytes of a part, one-dimensional; of a contiguous tensor the very same memory."""
    if isinstance(part, bytes):
        return torch.frombuffer(bytearray(part), dtype=torch.uint8) if part else torch.empty(0, dtype=torch.uint8)
    return part.detach().reshape(-1).view(torch.uint8)


def _stage(data: torch.Tensor) -> torch.Tensor | None:
    """Host memory through which the bytes of a device go; None for bytes in host memory."""
    if data.device.type == "cpu":
        return None
    return torch.empty(min(_CHUNK_BYTES, data.numel()), dtype=torch.uint8, pin_memory=True)


def _view(data: torch.Tensor) -> memoryview:
    return data.numpy().data
