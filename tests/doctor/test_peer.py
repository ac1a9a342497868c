"""Another node: the arithmetic of clocks, strangers on the socket, and two real processes."""

import re
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest

from hyperpod_plugins.doctor import peer
from hyperpod_plugins.doctor.peer import (
    PeerFacts,
    best_offset,
    check_peer,
    measure_peer,
    open_listener,
    parse_endpoint,
    parse_token,
    serve_one,
    transfer_bytes,
)
from hyperpod_plugins.errors import ConfigError

TOKEN = bytes(range(16))
FRAME = struct.Struct("!4sqq")
GOOD = PeerFacts(peer="n2:7", offset_s=0.001, round_trip_s=0.0001, upload=5e9, download=5e9)


@pytest.mark.parametrize(
    ("changes", "name", "status", "words"),
    [
        ({"error": "it was too slow"}, "peer", "error", "n2:7: it was too slow"),
        ({}, "peer-clock", "ok", "1 ms ahead"),
        ({"offset_s": -0.6}, "peer-clock", "warning", "600 ms behind"),
        ({"offset_s": -0.6, "round_trip_s": 0.4}, "peer-clock", "ok", "to 2e+02 ms"),
        ({"offset_s": 60.0}, "peer-clock", "error", "6e+04 ms ahead"),
        ({}, "peer-bandwidth", "ok", "5.00 GB/s to n2:7"),
        ({"upload": 1e8}, "peer-bandwidth", "warning", "slow"),
        ({"upload": 1.5e9}, "peer-bandwidth", "warning", "directions differ"),
    ],
)
def test_what_was_measured(changes, name, status, words):
    found = {each.name: each for each in check_peer(replace(GOOD, **changes))}[name]
    assert found.status == status
    assert words in found.found


def exchange(offset, there, back, answer=10, start=1000):
    """Times of an exchange with a listener whose clock is `offset` ahead."""
    received = start + there
    return start, received + offset, received + answer + offset, received + answer + back


@pytest.mark.parametrize(
    ("exchanges", "offset_ns", "round_trip_ns"),
    [
        ([exchange(0, 50, 50)], 0, 100),
        ([exchange(7_000, 50, 50)], 7_000, 100),
        ([exchange(-7_000, 50, 50)], -7_000, 100),
        ([exchange(7_000, 900, 50), exchange(7_000, 20, 20), exchange(7_000, 50, 900)], 7_000, 40),
        ([exchange(0, 80, 20)], 30, 100),  # uneven ways: wrong by less than half of the round trip
    ],
)
def test_the_offset_of_the_shortest_round_trip_counts(exchanges, offset_ns, round_trip_ns):
    assert best_offset(exchanges) == pytest.approx((offset_ns / 1e9, round_trip_ns / 1e9))


def test_transfers_are_bounded():
    assert transfer_bytes(0.0) == transfer_bytes(10.0) == 2**18
    assert transfer_bytes(1e12) == 2**32
    assert transfer_bytes(1e9) == 700_000_000


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("n2:7", ("n2", 7)),
        ("7", ("", 7)),
        ("[::1]:7", ("::1", 7)),
        (":7", ("", 7)),
        ("n2", None),
        ("n2:", None),
        ("n2:70000", None),
        ("n2:x", None),
        ("::1", None),
        ("", None),
    ],
)
def test_endpoints(text, wanted):
    if wanted is None or not wanted[0]:
        with pytest.raises(ConfigError, match="--peer"):
            parse_endpoint(text, "--peer")
    else:
        assert parse_endpoint(text, "--peer") == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("0", ("all", 0)), ("n2", ("n2", 0)), ("n2:7", ("n2", 7)), (":7", ("all", 7)), ("::1", ("::1", 0))],
)
def test_endpoints_with_defaults(text, wanted):
    assert parse_endpoint(text, "--listen", default_host="all", default_port=0) == wanted


@pytest.mark.parametrize("text", ["", "00", "x" * 32, "00" * 17])
def test_a_token_has_32_digits(text):
    with pytest.raises(ConfigError, match="32 hexadecimal digits"):
        parse_token(text)
    assert parse_token(TOKEN.hex()) == TOKEN


# -- one process ------------------------------------------------------------------------------------------------------


@contextmanager
def listening(wait_s=20.0):
    """A listener in a thread; yields its port, and a list that gets what it has measured."""
    found: list[PeerFacts] = []
    with open_listener("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=lambda: found.append(serve_one(listener, TOKEN, wait_s)))
        thread.start()
        try:
            yield port, found
        finally:
            thread.join(30)
            assert not thread.is_alive()


@pytest.fixture
def short_transfers(monkeypatch):
    monkeypatch.setattr(peer, "_TRANSFER_S", 0.001)


@pytest.mark.usefixtures("short_transfers")
def test_both_ends_agree():
    with listening() as (port, found):
        ours = measure_peer("127.0.0.1", port, TOKEN, 10.0)
    (theirs,) = found
    assert (ours.error, theirs.error) == ("", "")
    assert abs(ours.offset_s) < 0.1  # it is the same clock
    assert theirs.offset_s == pytest.approx(-ours.offset_s, abs=1e-8)
    assert min(ours.upload, ours.download, theirs.upload, theirs.download) > 0


@pytest.mark.usefixtures("short_transfers")
@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(32),
        secrets.token_bytes(4096),
    ],
    ids=["nothing", "http", "zeros", "noise"],
)
def test_strangers_are_turned_away_and_the_peer_is_served(said):
    with listening() as (port, found):
        with socket.create_connection(("127.0.0.1", port), 5) as stranger:
            stranger.settimeout(10)
            with suppress(OSError):
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
            heard = b""
            while more := receive(stranger):
                heard += more
        assert len(heard) in (0, 24)  # the greeting, which a reset may discard, and nothing of the token
        assert TOKEN not in heard
        assert measure_peer("127.0.0.1", port, TOKEN, 10.0).error == ""
    assert found[0].error == ""


def receive(connection):
    try:
        return connection.recv(4096)
    except ConnectionResetError:
        return b""


@pytest.mark.usefixtures("short_transfers")
def test_a_silent_stranger_holds_up_the_peer_for_a_moment_only(monkeypatch):
    monkeypatch.setattr(peer, "_GREETING_S", 0.2)
    with listening() as (port, found), socket.create_connection(("127.0.0.1", port), 5):
        assert measure_peer("127.0.0.1", port, TOKEN, 10.0).error == ""
    assert found[0].error == ""


def test_a_wrong_token_is_told():
    with listening(3.0) as (port, found):
        assert measure_peer("127.0.0.1", port, bytes(16), 5.0).error == "it rejected the token"
    assert found[0].error == "no node connected within 3 s; 1 callers did not know the token"


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([FRAME.pack(b"EVIL", 1, 1)], "not allowed: b'EVIL'"),
        ([FRAME.pack(b"UPLD", -1, 0)], "not allowed"),
        ([FRAME.pack(b"DNLD", 2**40, 0)], "not allowed"),
        ([FRAME.pack(b"DNLD", 0, 0)], "not allowed"),
        ([FRAME.pack(b"CLCK", 0, 0)] * 65, "more than 64 frames"),
        ([FRAME.pack(b"UPLD", 2**20, 0), b"x"], "closed"),
        ([b"short"], "closed"),
    ],
)
def test_a_peer_that_breaks_the_protocol_is_dropped(frames, words):
    with listening() as (port, found), socket.create_connection(("127.0.0.1", port), 5) as connection:
        connection.settimeout(10)
        greeting = connection.recv(24, socket.MSG_WAITALL)
        connection.sendall(peer._digest(TOKEN, greeting[8:]))
        assert connection.recv(FRAME.size, socket.MSG_WAITALL)[:4] == b"CLCK"
        with suppress(OSError):  # it may have closed already
            connection.sendall(b"".join(frames))
            connection.shutdown(socket.SHUT_WR)
        while receive(connection):
            pass
    assert words in found[0].error


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([b"SSH-2.0-OpenSSH_9.2p1 and more than that\r\n"], "not a `hyperpod doctor --listen`"),
        ([b"HPDOC001"], "closed the connection"),
        ([b"HPDOC001" + bytes(16), FRAME.pack(b"EVIL", 0, 0)], "rejected the token"),
        ([b"HPDOC001" + bytes(16), FRAME.pack(b"CLCK", 0, 0), FRAME.pack(b"EVIL", 0, 0)], "b'EVIL'"),
    ],
)
def test_a_listener_that_breaks_the_protocol_is_left(answers, words):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found: list[PeerFacts] = []
        port = listener.getsockname()[1]
        thread = threading.Thread(target=lambda: found.append(measure_peer("127.0.0.1", port, TOKEN, 10.0)))
        thread.start()
        listener.settimeout(10)
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(10)
            with suppress(OSError):
                connection.sendall(b"".join(answers))
                connection.shutdown(socket.SHUT_WR)
            while receive(connection):
                pass
        thread.join(20)
    assert words in found[0].error


def test_a_listener_that_says_nothing_is_left_at_the_deadline(monkeypatch):
    monkeypatch.setattr(peer, "CONVERSATION_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        began_s = time.monotonic()
        found = measure_peer("127.0.0.1", listener.getsockname()[1], TOKEN, 10.0)
    assert "too slow" in found.error
    assert time.monotonic() - began_s < 5


def test_waits_for_nobody_end():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = listener.getsockname()[1]
    began_s = time.monotonic()
    assert "no connection within 0.3 s" in measure_peer("127.0.0.1", free, TOKEN, 0.3).error
    with open_listener("127.0.0.1", 0) as waiting:
        assert serve_one(waiting, TOKEN, 0.2).error == "no node connected within 0.2 s"
    assert time.monotonic() - began_s < 5


def test_an_address_of_another_machine_cannot_be_listened_on():
    with pytest.raises(ConfigError, match=r"--listen cannot use 192\.0\.2\.250:0"):
        open_listener("192.0.2.250", 0)


# -- two processes ----------------------------------------------------------------------------------------------------


@pytest.mark.spawns
def test_two_processes_measure_each_other():
    command = [sys.executable, "-m", "hyperpod_plugins.cli", "doctor", "--port", "0"]
    listener = subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        first = listener.stdout.readline()
        invited = re.search(r"hyperpod doctor (--peer 127\.0\.0\.1:\d+ --token [0-9a-f]{32})$", first.strip())
        assert invited, first
        caller = subprocess.run([*command, *invited[1].split()], capture_output=True, text=True, timeout=120)
        said, _ = listener.communicate(timeout=120)
    finally:
        listener.kill()
    for text in (caller.stdout, said):
        assert re.search(r"^ok +peer-clock +the clock of 127\.0\.0\.1", text, re.MULTILINE), text
        assert re.search(r"^\w+ +peer-bandwidth +\d+\.\d+ GB/s to 127\.0\.0\.1", text, re.MULTILINE), text


@pytest.mark.parametrize("times", [(-1, 0), (5, 4), (0, 2**63 - 1), (-(2**63), 2**63 - 1)])
def test_a_clock_that_says_what_cannot_be_is_told(times):
    class Answers:
        def send_frame(self, *_):
            pass

        def expect(self, _):
            return times

    with pytest.raises(peer._PeerError, match="impossible times"):
        peer._exchange_times(Answers())
