"""Clock offset and bandwidth between two nodes, over one TCP connection: `--listen` on one, `--peer` on the other.

[Note: protocol] The listener greets with a random challenge, and the caller answers with its HMAC under the token that
the listener has printed: a stranger learns nothing and measures nothing. Then the caller asks and the listener
answers, in frames of a fixed size: the listener's times for an offset, a number of bytes to receive or to send, and at
last what the caller has found. Both close the connection at anything else. A deadline bounds the whole conversation on
either side, so that a stopped peer holds up no other process.

[Note: offset] As in NTP (RFC 5905): with the caller's times t0 and t3 and the listener's t1 and t2 the offset is
((t1 - t0) + (t2 - t3)) / 2, wrong by half of the round trip at most; the exchange with the shortest one counts.
"""

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from hyperpod_plugins.doctor.finding import MIB_BYTES, Finding
from hyperpod_plugins.errors import ConfigError

_MAGIC = b"HPDOC001"
_CHALLENGE_BYTES = 16
_DIGEST_BYTES = 32
TOKEN_BYTES = 16
_FRAME = struct.Struct("!4sqq")  # kind, and two numbers
_CLOCK, _UPLOAD, _DOWNLOAD, _RESULT = b"CLCK", b"UPLD", b"DNLD", b"RSLT"
_NUM_CLOCK_EXCHANGES = 16
_MAX_FRAMES = 64
_CHUNK_BYTES = MIB_BYTES
_PROBE_BYTES = MIB_BYTES // 4
_MAX_BYTES = 4 * 2**30
_TRANSFER_S = 0.7
_MAX_TRANSFERS = 4
_GREETING_S = 2.0
CONVERSATION_S = 15.0
_RETRY_S = 0.2
_WARNING_S, _ERROR_S = 0.5, 30.0
_SLOW_RATE = 1e9  # bytes a second


class _PeerError(Exception):
    """The other end does not follow the protocol, or is too slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFacts:
    """What was measured with another node, or why that failed."""

    peer: str
    """Its address."""
    error: str = ""
    """Why nothing was measured."""
    offset_s: float = 0.0
    """Its clock minus ours."""
    round_trip_s: float = 0.0
    upload: float = 0.0
    """Bytes a second to it."""
    download: float = 0.0
    """Bytes a second from it."""


def parse_endpoint(
    text: str, option: str, *, default_host: str = "", default_port: int | None = None
) -> tuple[str, int]:
    """Host and port of `HOST:PORT`, `HOST`, `PORT` or `[ADDRESS]:PORT`, of which defaults fill in what is missing.

    Raises:
        ConfigError: something is missing or not a port.
    """
    text = text.strip()
    if text.isascii() and text.isdigit():
        host, port = default_host, text
    elif text.startswith("["):
        host, _, port = text[1:].partition("]")
        port = port.removeprefix(":")
    elif text.count(":") > 1:
        host, port = text, ""
    else:
        host, _, port = text.partition(":")
        host = host or default_host
    number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else None if port else default_port
    if not host or number is None or number >= 2**16:
        raise ConfigError(f"{option} {text!r} must be HOST:PORT, or [ADDRESS]:PORT for IPv6, with a port up to 65535.")
    return host, number


def parse_token(text: str) -> bytes:
    """The token that `--listen` has printed.

    Raises:
        ConfigError: it is none.
    """
    try:
        token = bytes.fromhex(text)
    except ValueError:
        token = b""
    if len(token) != TOKEN_BYTES:
        raise ConfigError(
            f"--token must be the {2 * TOKEN_BYTES} hexadecimal digits that --listen on the other node prints."
        )
    return token


# -- the connection ---------------------------------------------------------------------------------------------------


class DeadlineConnection:
    """A connection on which every wait ends at one deadline."""

    def __init__(self, connection: socket.socket, duration_s: float) -> None:
        self._connection = connection
        self._until_s = time.monotonic() + duration_s
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def extend(self, duration_s: float) -> None:
        """Set another deadline."""
        self._until_s = time.monotonic() + duration_s

    def _set_timeout(self) -> None:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise _PeerError("it was too slow")
        self._connection.settimeout(left_s)

    def send(self, data: bytes | memoryview) -> None:
        """Send all bytes."""
        self._set_timeout()
        self._connection.sendall(data)

    def receive(self, num_bytes: int) -> bytes:
        """Receive exactly that many bytes."""
        buffer = bytearray(num_bytes)
        self._fill(memoryview(buffer))
        return bytes(buffer)

    def _fill(self, view: memoryview) -> None:
        while view:
            self._set_timeout()
            count = self._connection.recv_into(view)
            if count == 0:
                raise _PeerError("it closed the connection")
            view = view[count:]

    def send_frame(self, kind: bytes, first: int = 0, second: int = 0) -> None:
        """Send a kind and two numbers."""
        self.send(_FRAME.pack(kind, first, second))

    def receive_frame(self) -> tuple[bytes, int, int]:
        """Receive the same."""
        return _FRAME.unpack(self.receive(_FRAME.size))

    def expect(self, kind: bytes) -> tuple[int, int]:
        """Receive a frame of one kind."""
        found, first, second = self.receive_frame()
        if found != kind:
            raise _PeerError(f"it sent a frame of the kind {found!r} instead of {kind!r}")
        return first, second

    def send_many(self, num_bytes: int) -> None:
        """Send that many zeros."""
        chunk = memoryview(bytes(min(_CHUNK_BYTES, num_bytes)))
        for begin in range(0, num_bytes, _CHUNK_BYTES):
            self.send(chunk[: min(_CHUNK_BYTES, num_bytes - begin)])

    def receive_many(self, num_bytes: int) -> None:
        """Receive that many bytes and forget them."""
        view = memoryview(bytearray(min(_CHUNK_BYTES, num_bytes)))
        for begin in range(0, num_bytes, _CHUNK_BYTES):
            self._fill(view[: min(_CHUNK_BYTES, num_bytes - begin)])


# -- the listener -----------------------------------------------------------------------------------------------------


def open_listener(host: str, port: int) -> socket.socket:
    """Listen on an address, or on all.

    Raises:
        ConfigError: that is not possible.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=8)
    except OSError as error:
        raise ConfigError(
            f"--listen cannot use {host}:{port} ({error.strerror or error}). Give an address of this machine "
            "and a free port, or port 0 for any."
        ) from error


def serve_one(listener: socket.socket, token: bytes, wait_s: float) -> PeerFacts:
    """Serve the first caller that knows the token, and return what it has measured; others are turned away."""
    until_s, num_strangers = time.monotonic() + wait_s, 0
    while (left_s := until_s - time.monotonic()) > 0:
        listener.settimeout(left_s)
        try:
            accepted, address = listener.accept()
        except ConnectionError:  # the caller has gone before it was accepted
            continue
        except OSError:
            break
        with accepted:
            connection = DeadlineConnection(accepted, min(_GREETING_S, left_s))
            if not _knows_token(connection, token):
                num_strangers += 1
                continue
            connection.extend(CONVERSATION_S)
            try:
                return _serve(connection, str(address[0]))
            except (_PeerError, OSError) as error:
                return PeerFacts(peer=str(address[0]), error=_reason(error))
    strangers = f"; {num_strangers} callers did not know the token" if num_strangers else ""
    return PeerFacts(peer="the other node", error=f"no node connected within {wait_s:g} s{strangers}")


def _knows_token(connection: DeadlineConnection, token: bytes) -> bool:
    challenge = secrets.token_bytes(_CHALLENGE_BYTES)
    try:
        connection.send(_MAGIC + challenge)
        return hmac.compare_digest(connection.receive(_DIGEST_BYTES), _digest(token, challenge))
    except (_PeerError, OSError):
        return False


def _digest(token: bytes, challenge: bytes) -> bytes:
    return hmac.digest(token, _MAGIC + challenge, "sha256")


def _serve(connection: DeadlineConnection, address: str) -> PeerFacts:
    """Answer frames until the result arrives."""
    upload, download = 0.0, 0.0
    connection.send_frame(_CLOCK)  # welcome
    for _ in range(_MAX_FRAMES):
        kind, first, second = connection.receive_frame()
        received_ns = time.time_ns()
        if kind == _CLOCK:
            connection.send_frame(_CLOCK, received_ns, time.time_ns())
        elif kind == _RESULT:
            connection.send_frame(_RESULT)
            # The caller's clock minus ours is what it has found with the opposite sign.
            return PeerFacts(
                peer=address, offset_s=-first / 1e9, round_trip_s=second / 1e9, upload=upload, download=download
            )
        elif kind in (_UPLOAD, _DOWNLOAD) and 0 < first <= _MAX_BYTES:
            began_s = time.perf_counter()
            if kind == _UPLOAD:
                connection.receive_many(first)
                connection.send_frame(_UPLOAD, first)
                download = first / _elapsed(began_s)
            else:
                connection.send_many(first)
                connection.expect(_DOWNLOAD)
                upload = first / _elapsed(began_s)
        else:
            raise _PeerError(f"it sent a frame that is not allowed: {kind!r} {first}")
    raise _PeerError(f"it sent more than {_MAX_FRAMES} frames")


def _elapsed(began_s: float) -> float:
    return max(time.perf_counter() - began_s, 1e-9)


# -- the caller -------------------------------------------------------------------------------------------------------


def measure_peer(
    host: str, port: int, token: bytes, wait_s: float, sleep: Callable[[float], None] = time.sleep
) -> PeerFacts:
    """Call a node that listens, and measure; waits up to `wait_s` until it does."""
    peer, until_s = f"{host}:{port}", time.monotonic() + wait_s
    while True:
        try:
            connection = socket.create_connection((host, port), max(0.1, until_s - time.monotonic()))
            break
        except OSError as error:
            if time.monotonic() + _RETRY_S > until_s:
                return PeerFacts(peer=peer, error=f"no connection within {wait_s:g} s ({_reason(error)})")
        sleep(_RETRY_S)
    with connection:
        try:
            return _measure(DeadlineConnection(connection, CONVERSATION_S), peer, token)
        except (_PeerError, OSError) as error:
            return PeerFacts(peer=peer, error=_reason(error))


def _measure(connection: DeadlineConnection, peer: str, token: bytes) -> PeerFacts:
    greeting = connection.receive(len(_MAGIC) + _CHALLENGE_BYTES)
    if not greeting.startswith(_MAGIC):
        raise _PeerError("it is not a `hyperpod doctor --listen` of this version")
    connection.send(_digest(token, greeting[len(_MAGIC) :]))
    try:
        connection.expect(_CLOCK)
    except (_PeerError, ConnectionError):
        raise _PeerError("it rejected the token") from None
    offset_s, round_trip_s = best_offset([_exchange_times(connection) for _ in range(_NUM_CLOCK_EXCHANGES)])
    upload, download = _rate(connection, _upload), _rate(connection, _download)
    connection.send_frame(_RESULT, int(offset_s * 1e9), int(round_trip_s * 1e9))
    connection.expect(_RESULT)
    return PeerFacts(peer=peer, offset_s=offset_s, round_trip_s=round_trip_s, upload=upload, download=download)


_LATEST_NS = 1 << 62
"""Unix time in the year 2116; differences of earlier times fit a frame."""


def _exchange_times(connection: DeadlineConnection) -> tuple[int, int, int, int]:
    sent_ns = time.time_ns()
    connection.send_frame(_CLOCK)
    received_ns, answered_ns = connection.expect(_CLOCK)
    if not 0 <= received_ns <= answered_ns < _LATEST_NS:
        raise _PeerError("its clock returned impossible times")
    return sent_ns, received_ns, answered_ns, time.time_ns()


def best_offset(exchanges: list[tuple[int, int, int, int]]) -> tuple[float, float]:
    """Offset and round trip in seconds of the exchange with the shortest round trip; see [Note: offset].

    Args:
        exchanges: four times in nanoseconds each: sent and received back by the caller's clock at the ends, received
            and answered by the listener's between.
    """
    round_trip_ns, offset_ns = min(((t3 - t0) - (t2 - t1), ((t1 - t0) + (t2 - t3)) / 2) for t0, t1, t2, t3 in exchanges)
    return offset_ns / 1e9, max(round_trip_ns, 0) / 1e9


def _rate(connection: DeadlineConnection, transfer: Callable[[DeadlineConnection, int], float]) -> float:
    """Bytes a second of a transfer that takes a moment; smaller ones before it determine its size."""
    num_bytes, rate = _PROBE_BYTES, 0.0
    for _ in range(_MAX_TRANSFERS):
        rate = transfer(connection, num_bytes)
        if num_bytes / rate >= _TRANSFER_S / 2:
            break
        num_bytes = transfer_bytes(rate)
    return rate


def transfer_bytes(rate: float) -> int:
    """How many bytes to transfer at about that rate, so that it takes a moment and no more."""
    return min(max(int(rate * _TRANSFER_S), _PROBE_BYTES), _MAX_BYTES)


def _upload(connection: DeadlineConnection, num_bytes: int) -> float:
    began_s = time.perf_counter()
    connection.send_frame(_UPLOAD, num_bytes)
    connection.send_many(num_bytes)
    if connection.expect(_UPLOAD)[0] != num_bytes:
        raise _PeerError("it received another number of bytes")
    return num_bytes / _elapsed(began_s)


def _download(connection: DeadlineConnection, num_bytes: int) -> float:
    began_s = time.perf_counter()
    connection.send_frame(_DOWNLOAD, num_bytes)
    connection.receive_many(num_bytes)
    rate = num_bytes / _elapsed(began_s)
    connection.send_frame(_DOWNLOAD, num_bytes)
    return rate


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it was too slow, or packets are lost"
    return str(getattr(error, "strerror", None) or error)


# -- deciding ---------------------------------------------------------------------------------------------------------


def check_peer(facts: PeerFacts) -> list[Finding]:
    """All findings of this module."""
    if facts.error:
        return [
            Finding(
                name="peer",
                status="error",
                found=f"nothing was measured with {facts.peer}: {facts.error}",
                advice="start --listen on the other node first, use the address, port and token that it prints, and "
                "let firewalls and network policies pass all TCP ports between nodes.",
            )
        ]
    return [check_peer_clock(facts), check_peer_bandwidth(facts)]


def check_peer_clock(facts: PeerFacts) -> Finding:
    """Whether the clocks of two nodes agree."""
    off_s = abs(facts.offset_s)
    found = (
        f"the clock of {facts.peer} is {off_s * 1e3:.3g} ms {'ahead' if facts.offset_s > 0 else 'behind'}, "
        f"to {facts.round_trip_s * 500:.2g} ms"
    )
    if off_s < _WARNING_S + facts.round_trip_s / 2:
        return Finding(name="peer-clock", status="ok", found=found)
    return Finding(
        name="peer-clock",
        status="error" if off_s >= _ERROR_S else "warning",
        found=found,
        advice="start chrony or systemd-timesyncd on both nodes. Recovery uses no time of other nodes, but events and "
        "logs are compared by it, and munge and certificates refuse clocks that differ by minutes.",
    )


def check_peer_bandwidth(facts: PeerFacts) -> Finding:
    """Whether a single connection between two nodes is fast enough for snapshots."""
    rates = f"{facts.upload / 1e9:.2f} GB/s to {facts.peer}, {facts.download / 1e9:.2f} GB/s from it"
    found = f"{rates}, over one TCP connection; round trip {facts.round_trip_s * 1e3:.2g} ms"
    slow, fast = sorted((facts.upload, facts.download))
    if slow < _SLOW_RATE:
        return Finding(
            name="peer-bandwidth",
            status="warning",
            found=f"{found}: slow for snapshots and gradients",
            advice="see whether --peer was given the address of the fast interface (`interface`); then look at its MTU "
            "and at other traffic.",
        )
    if slow < fast / 3:
        return Finding(
            name="peer-bandwidth",
            status="warning",
            found=f"{found}: the directions differ",
            advice="look for errors of the slow direction: `ip -s link`, `ethtool -S`.",
        )
    return Finding(name="peer-bandwidth", status="ok", found=found)
