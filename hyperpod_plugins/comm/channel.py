"""Point-to-point transfers between the ranks of a group, over separate TCP connections.

    channel = Channel(group, "snapshots")
    received = channel.exchange("state", sends={buddy: [header, tensor]}, receives={source: [1 << 20, buffer]})

[Note: why not send and recv] gloo does not wake a send or receive whose payload is in flight when a peer dies, and
its point-to-point waits keep the timeout with which the group was connected, even after `set_timeout` (torch 2.13).
nccl ends a wait for a lost peer only by aborting the whole communicator. Here every wait ends within milliseconds of
a break of the groups, which shuts these sockets down (see `sockets.py`), or of the peer's death, when the kernel
resets the connection; otherwise it ends when no byte has moved for a while.

[Note: how long] Before its first large part a sender waits until the receiver is ready. So there are two limits:
`patience_s` for the other rank to start the transfer, and `stall_s` without a byte once it is under way. There is no
limit for a whole transfer, because that depends on its size. A rank with several targets serves them concurrently.
Small parts are sent at once (in MPI's terms, eagerly; large parts by rendezvous), so their sender does not know
whether they have arrived.
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

from hyperpod_plugins.comm.process_group import ResilientProcessGroup
from hyperpod_plugins.comm.runtime import group_health
from hyperpod_plugins.comm.sockets import Listener, connect_nonblocking, receive_all, set_kernel_timeout
from hyperpod_plugins.comm.transport import InnerGroup
from hyperpod_plugins.comm.work import PeerWait, raise_peer_lost
from hyperpod_plugins.errors import CommError

_FRAME = struct.Struct("!IIQ")  # type, message number, payload size in bytes
_READY = b"R"
_CHUNK_BYTES = 4 * 2**20
_SLICE_S = 0.2
_FIRST_LOOK_S, _LAST_LOOK_S = 0.001, 0.05

T = TypeVar("T")
Part = torch.Tensor | bytes
"""Data to send: a tensor on any device, or bytes."""
ReceiveBuffer = torch.Tensor | int
"""Where to receive a part: a contiguous tensor of its exact size, or the maximum size in bytes of a new tensor."""


class Channel:
    """Transfers between the ranks of a group; connects at its first use in each generation.

    Each channel has its own connections and runs one exchange at a time, in any thread. Threads that communicate at
    the same time, and kinds of transfer that may overlap, need separate channels.
    """

    SMALL_BYTES = 2**14
    """Largest part, in bytes, that is sent eagerly, together with its header."""

    def __init__(
        self, group: dist.ProcessGroup | None, name: str, *, stall_s: float = 60.0, patience_s: float | None = None
    ) -> None:
        """Create the channel without connecting; all ranks that use it must give it the same name.

        Args:
            group: group of the `hyperpod` backend; None for the default group.
            name: two channels with the same name share their connections.
            stall_s: longest time without a byte in a transfer that is under way, in seconds.
            patience_s: longest wait for another rank to start a transfer, in seconds; by default the group's timeout.
        """
        self._group = group
        self._name = name
        self._stall_s, self._patience_s = stall_s, patience_s

    def exchange(
        self, label: str, *, sends: Mapping[int, Sequence[Part]], receives: Mapping[int, Sequence[ReceiveBuffer]]
    ) -> dict[int, list[torch.Tensor]]:
        """Send to some ranks while receiving from others; return when all transfers are done.

        The ranks at the other ends call this too, with the same label and number of parts. A part for which only a
        maximum size was given is received into new host memory, as bytes.

        Args:
            label: name of what is transferred; it is an error if a peer sends under another label.
            sends: for each rank of the group to send to, the parts.
            receives: for each rank of the group to receive from, the places for its parts.

        Returns:
            For each rank in `receives`, its parts in order; a tensor passed as a place is returned itself.

        Raises:
            PeerLost: a peer is lost, stalled or sent something else, or the groups broke. All groups are broken then.
                This is raised inside a step too: transfers are never skipped.
            CommError: the group is not of the `hyperpod` backend, a rank is this process's own, or a receiving tensor
                is not contiguous.
        """
        rank = self._present_group().rank()
        if rank in sends or rank in receives:
            raise CommError(f"rank {rank} cannot transfer {label!r} to itself")
        if any(
            isinstance(place, torch.Tensor) and not place.is_contiguous()
            for each in receives.values()
            for place in each
        ):
            raise CommError(f"cannot receive {label!r} into a tensor that is not contiguous")
        return self._over_links(
            lambda links, patience_s: links.exchange(
                label, sends, receives, patience_s=patience_s, stall_s=self._stall_s
            )
        )

    def send_receive(self, label: str, data: bytes, *, to: int, of: int) -> bytes:
        """Send a few bytes to one rank and receive a few from one; takes a fraction of the CPU time of `exchange`.

        Args:
            label: see `exchange`.
            data: at most `Channel.SMALL_BYTES` bytes.
            to: rank of the group that receives `data`, by this method or by `exchange`.
            of: rank of the group that sends to this one, by either method.

        Returns:
            The bytes from rank `of`.

        Raises:
            PeerLost: see `exchange`. Here `patience_s` is the limit for a stalled transfer too.
            CommError: `data` is too large, or the group is not of the `hyperpod` backend.
        """
        if len(data) > Channel.SMALL_BYTES:
            raise CommError(
                f"{label!r} has {len(data):,} bytes, and send_receive takes {Channel.SMALL_BYTES:,} at most"
            )
        return self._over_links(
            lambda links, patience_s: links.send_receive(label, data, to, of, patience_s=patience_s)
        )

    def send(self, label: str, parts: Sequence[Part], ranks: Sequence[int]) -> None:
        """Send the same parts to several ranks concurrently; see `exchange`."""
        self.exchange(label, sends=dict.fromkeys(ranks, parts), receives={})

    def receive(self, label: str, places: Sequence[ReceiveBuffer], rank: int) -> list[torch.Tensor]:
        """Receive parts from one rank; see `exchange`."""
        return self.exchange(label, sends={}, receives={rank: places})[rank]

    def _present_group(self) -> ResilientProcessGroup:
        group = self._group or dist.group.WORLD
        if not isinstance(group, ResilientProcessGroup):
            raise CommError(f'the channel {self._name!r} needs a group of the backend "hyperpod"')
        return group

    def _over_links(self, transfer: "Callable[[ChannelConnections, float], T]") -> T:
        """Call `transfer` with this generation's links and patience; its transport errors break the groups."""
        group = self._present_group()
        inner = group.connected
        if group_health.is_unavailable or inner is None:
            raise_peer_lost(group_health.cause)
        patience_s = group.timeout.total_seconds() if self._patience_s is None else self._patience_s
        try:
            with PeerWait(group.key):
                return transfer(self._links_of(group, inner), patience_s)
        except (OSError, dist.DistError) as error:
            group.mark_broken(error)
            raise_peer_lost(group_health.cause or str(error), error)

    def _links_of(self, group: ResilientProcessGroup, inner: InnerGroup) -> "ChannelConnections":
        name = f"channel/{self._name}"
        links = inner.connections.get(name)
        if not isinstance(links, ChannelConnections):  # the first transfer of this generation
            store = PrefixStore(f"{group.store_prefix}/{name}", group.root_store)
            links = ChannelConnections(store, group.rank(), inner.sockets.own_address, _register_with(inner))
            inner.connections[name] = links
        return links


def _register_with(inner: InnerGroup) -> Callable[[socket.socket], None]:
    """Return a function that makes a break shut down new connections too."""
    reference = weakref.ref(inner)

    def keep(connection: socket.socket) -> None:
        present = reference()
        if present is None or group_health.cause is not None:
            raise ConnectionAbortedError(group_health.cause or "the group has ended")
        present.sockets.add([connection.dup()])
        if group_health.cause is not None:  # the break came first
            raise ConnectionAbortedError(group_health.cause)

    return keep


class ChannelConnections:
    """The connections of one rank for one channel in one generation; for one thread at a time."""

    def __init__(
        self, store: Store, rank: int, address: str, keep: Callable[[socket.socket], None] = lambda _: None
    ) -> None:
        """Start without connections.

        Args:
            store: store that only this channel uses, in this generation.
            rank: rank of this process.
            address: address at which other ranks reach this machine.
            keep: called with each new connection.
        """
        self._store = store
        self._rank = rank
        self._address = address
        self._keep = keep
        self._listener: Listener | None = None
        self._to: dict[int, _Link] = {}
        self._from: dict[int, _Link] = {}

    def __del__(self) -> None:
        """Close the connections together with the group that they belong to."""
        for link in (*self._to.values(), *self._from.values()):
            link.socket.close()

    def exchange(
        self,
        label: str,
        sends: Mapping[int, Sequence[Part]],
        receives: Mapping[int, Sequence[ReceiveBuffer]],
        *,
        patience_s: float,
        stall_s: float,
    ) -> dict[int, list[torch.Tensor]]:
        """See `Channel.exchange`.

        Raises:
            OSError: a peer is lost, stalled or sent something else, or the groups broke.
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
                transfer.check_timeout(now_s, patience_s=patience_s, stall_s=stall_s)
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
        if target is None or target.greeting or source is None:  # not connected yet
            places = {of: [Channel.SMALL_BYTES]}
            (received,) = self.exchange(label, {to: [data]}, places, patience_s=patience_s, stall_s=patience_s)[of]
            return received.numpy().tobytes()
        kind = zlib.crc32(label.encode())
        try:
            target.blocking_socket(patience_s).sendall(target.header(kind, len(data)) + data)
            connection = source.blocking_socket(patience_s)
            num_bytes = source.parse_header(receive_all(connection, _FRAME.size), kind, label, of)
            if num_bytes > Channel.SMALL_BYTES:
                raise ConnectionError(f"connection to rank {of}: {label!r} has {num_bytes:,} bytes")
            return receive_all(connection, num_bytes)
        except BlockingIOError:
            raise TimeoutError(
                f"transfer of {label!r} with ranks {to} and {of}: no byte moved for {patience_s:.0f} s, timed out"
            ) from None

    def _connect(self, sending: Sequence["_Sending"], receiving: Sequence["_Receiving"]) -> bool:
        """Connect to the peers that are ready; return whether all ranks to send to were found."""
        for transfer in sending:
            if transfer.link is None and self._store.check([str(transfer.rank)]):
                invitation = self._store.get(str(transfer.rank)).decode()
                connection, greeting = connect_nonblocking(invitation, self._rank)
                self._keep(connection)
                transfer.link = self._to[transfer.rank] = _Link(connection, greeting)
        if self._listener is not None and any(transfer.link is None for transfer in receiving):
            for rank, connection in self._listener.accept():
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
        """Wait until one of the transfers can make progress, at most `limit_s`."""
        poll = select.poll()
        if self._listener is not None and any(isinstance(each, _Receiving) and each.link is None for each in under_way):
            for each in self._listener.sockets:
                poll.register(each, select.POLLIN)
        for transfer in under_way:
            if transfer.link is not None:
                poll.register(transfer.link.socket, transfer.events)
        poll.poll(1000 * limit_s)


class _Link:
    """One connection, on which one side sends and the other reports when it is ready."""

    def __init__(self, connection: socket.socket, greeting: bytes) -> None:
        self.socket = connection
        self.greeting = greeting
        """Remaining bytes of the greeting, which must be sent first."""
        self._number = 0
        """Number of the next message."""
        self._patience_s = 0.0

    def header(self, kind: int, num_bytes: int) -> bytes:
        """Return the header of the next message."""
        self._number += 1
        return _FRAME.pack(kind, self._number - 1, num_bytes)

    def parse_header(self, header: bytes | bytearray, kind: int, label: str, rank: int) -> int:
        """Return the payload size in a message header; raise `ConnectionError` if it is not the expected message."""
        came, number, num_bytes = _FRAME.unpack(header)
        if (came, number) != (kind, self._number):
            raise ConnectionError(
                f"connection to rank {rank}: message {number} of type {came:08x} in the place of message "
                f"{self._number} of type {kind:08x} ({label!r})"
            )
        self._number += 1
        return num_bytes

    def blocking_socket(self, patience_s: float) -> socket.socket:
        """Return the socket in blocking mode with a kernel timeout; see `set_kernel_timeout`."""
        if self._patience_s != patience_s:
            set_kernel_timeout(self.socket, patience_s)
            self._patience_s = patience_s
        return self.socket


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
        """Move what can be moved without waiting; return whether anything moved."""
        raise NotImplementedError

    def check_timeout(self, now_s: float, *, patience_s: float, stall_s: float) -> None:
        """Raise `TimeoutError` if nothing has moved for longer than the limit."""
        limit_s = stall_s if self.has_begun else patience_s
        if not self.is_done and now_s - self.moved_s > limit_s:
            what = "no byte moved" if self.has_begun else "it did not come"
            raise TimeoutError(
                f"transfer of {self.label!r} with rank {self.rank}: {what} for {limit_s:.0f} s, timed out"
            )


class _Sending(_Transfer):
    """The sending side of a transfer."""

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
                        f"connection closed by rank {self.rank} before it received {self.label!r}"
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
        """Yield the bytes to send, in nonempty pieces of host memory."""
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
    """The receiving side of a transfer."""

    def __init__(self, rank: int, label: str, places: Sequence[ReceiveBuffer], link: _Link | None) -> None:
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
                raise ConnectionResetError(
                    f"connection closed by rank {self.rank} before it sent all of {self.label!r}"
                )
            self.has_begun = True
            self._view = self._view[num_bytes:]
            if not self._view:
                self._view = next(self._steps, None)
                self.is_done = self._view is None
            return True
        return False

    def _read(self) -> Generator[memoryview]:
        """Yield host memory for the next bytes; the caller fills each piece before it takes the next one."""
        for place in self._places:
            header = bytearray(_FRAME.size)
            yield memoryview(header)
            data = self._payload_view(place, header)
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

    def _payload_view(self, place: ReceiveBuffer, header: bytearray) -> torch.Tensor:
        """Return a byte tensor for the payload; raise `ConnectionError` if it does not fit or is unexpected."""
        assert self.link is not None
        num_bytes = self.link.parse_header(header, self._type, self.label, self.rank)
        size = place if isinstance(place, int) else place.nbytes
        if num_bytes > size or not (isinstance(place, int) or num_bytes == size):
            raise ConnectionError(
                f"connection to rank {self.rank}: a part of {self.label!r} has {num_bytes:,} bytes, and there is room "
                f"for {size:,}"
            )
        return torch.empty(num_bytes, dtype=torch.uint8) if isinstance(place, int) else _as_bytes(place)


def _as_bytes(part: Part) -> torch.Tensor:
    """Return a part as a one-dimensional byte tensor, which shares memory with a contiguous tensor."""
    if isinstance(part, bytes):
        return torch.frombuffer(bytearray(part), dtype=torch.uint8) if part else torch.empty(0, dtype=torch.uint8)
    return part.detach().reshape(-1).view(torch.uint8)


def _stage(data: torch.Tensor) -> torch.Tensor | None:
    """Return pinned host memory to stage the bytes of a device tensor; None for a CPU tensor."""
    if data.device.type == "cpu":
        return None
    return torch.empty(min(_CHUNK_BYTES, data.numel()), dtype=torch.uint8, pin_memory=True)


def _view(data: torch.Tensor) -> memoryview:
    return data.numpy().data
