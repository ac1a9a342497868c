"""Transfers over our own connections: exact, several at a time, and none that nobody ends."""

import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

from hyperpod_plugins.comm.channel import Channel, ChannelConnections
from hyperpod_plugins.errors import CommError, PeerLost

MIB = 2**20
PATIENCE = {"patience_s": 20.0, "stall_s": 20.0}


def in_threads(*calls):
    """What each call returns or raises, all at the same time."""
    found = [None] * len(calls)

    def run(index):
        try:
            found[index] = calls[index]()
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def links(size):
    store = dist.HashStore()
    return [ChannelConnections(store, rank, "127.0.0.1") for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_ring_passes_everything_on_again_and_again(size):
    ring = links(size)

    def take_part(rank):
        source_rank, kept = (rank - 1) % size, []
        for turn in range(20):
            mine = torch.full((turn * 4099,), float(rank))
            place = torch.empty(turn * 4099)
            parts = ring[rank].exchange(
                "state",
                {(rank + 1) % size: [b"step %d" % turn, mine, torch.tensor(rank + turn)]},
                {source_rank: [100, place, torch.empty((), dtype=torch.int64)]},
                **PATIENCE,
            )[source_rank]
            assert parts[1] is place
            kept.append((parts[0].numpy().tobytes(), bool((place == source_rank).all()), int(parts[2])))
        return kept

    found = in_threads(*(lambda rank=rank: take_part(rank) for rank in range(size)))
    for rank in range(size):
        source_rank = (rank - 1) % size
        assert found[rank] == [(b"step %d" % turn, True, source_rank + turn) for turn in range(20)]


def test_a_slow_target_delays_no_other():
    source, quick, slow = links(3)
    state = [torch.arange(4 * MIB, dtype=torch.int32)]
    done_s = {}

    def receive(link, rank, after_s):
        time.sleep(after_s)
        (part,) = link.exchange("state", {}, {0: [state[0].nbytes]}, **PATIENCE)[0]
        done_s[rank] = time.monotonic()
        return torch.equal(part.view(torch.int32), state[0])

    found = in_threads(
        lambda: source.exchange("state", {1: state, 2: state}, {}, **PATIENCE),
        lambda: receive(quick, 2, 0.0),
        lambda: receive(slow, 1, 1.0),
    )
    assert found == [{}, True, True]
    assert done_s[2] < done_s[1]


@pytest.mark.parametrize(
    ("parts", "label", "places", "message"),
    [
        ([b"12345"], "state", [4], "has 5 bytes, and there is room for 4"),
        ([torch.zeros(3)], "state", [torch.empty(4)], "has 12 bytes, and there is room for 16"),
        ([b"12345"], "sizes", [100], "in the place of message 0"),
    ],
)
def test_what_does_not_fit_is_refused(parts, label, places, message):
    sender, receiver = links(2)
    found = in_threads(
        lambda: sender.exchange("state", {1: parts}, {}, **PATIENCE),
        lambda: receiver.exchange(label, {}, {0: places}, **PATIENCE),
    )
    assert isinstance(found[1], ConnectionError)
    assert message in str(found[1])


def test_limits():
    """Of the wait for a rank that does not come, and of a transfer that stands still."""
    sender, receiver = links(2)
    limits = {"patience_s": 0.3, "stall_s": 60.0}
    with pytest.raises(TimeoutError, match="rank 0: it did not come"):
        receiver.exchange("state", {}, {0: [10]}, **limits)
    sender.exchange("state", {1: [b"a few"]}, {}, **limits)  # is there before its receiver is
    with pytest.raises(TimeoutError, match="rank 1: it did not come"):  # it listens, and says nothing
        sender.exchange("state", {1: [b"many" * MIB]}, {}, **limits)

    store = dist.HashStore()
    receiver, began = ChannelConnections(store, 1, "127.0.0.1"), threading.Event()

    def stand_still():
        store.wait(["1"])
        from hyperpod_plugins.comm.sockets import open_connection

        with open_connection(store.get("1").decode(), 0, 5.0) as connection:
            connection.sendall(b"\0" * 7)
            began.wait(10)

    thread = threading.Thread(target=stand_still)
    thread.start()
    with pytest.raises(TimeoutError, match="no byte moved"):
        receiver.exchange("state", {}, {0: [10]}, patience_s=60.0, stall_s=0.3)
    began.set()
    thread.join()


@pytest.mark.parametrize("size", [2, 3])
def test_few_bytes_go_round_at_once_also_to_those_that_exchange(size):
    ring = links(size)
    states = [bytes([turn]) * (turn * Channel.SMALL_BYTES // 20) for turn in range(21)]

    def take_part(rank):
        to, of, kept = (rank + 1) % size, (rank - 1) % size, []
        for turn, state in enumerate(states):
            if rank == 0 and turn % 3 == 1:
                (part,) = ring[rank].exchange("state", {to: [state]}, {of: [Channel.SMALL_BYTES]}, **PATIENCE)[of]
                kept.append(part.numpy().tobytes())
            else:
                kept.append(ring[rank].send_receive("state", state, to, of, patience_s=20.0))
        return kept

    assert in_threads(*(lambda rank=rank: take_part(rank) for rank in range(size))) == [states] * size


def test_few_bytes_that_do_not_come_and_those_that_are_not_awaited():
    one, other = links(2)

    def pass_on(link, label, rank):
        return link.send_receive(label, b"x", 1 - rank, 1 - rank, patience_s=0.5)

    assert in_threads(lambda: pass_on(one, "state", 0), lambda: pass_on(other, "state", 1)) == [b"x", b"x"]
    with pytest.raises(TimeoutError, match="no byte moved for 0 s"):
        pass_on(one, "state", 0)
    with pytest.raises(ConnectionError, match="in the place of message 1 of type"):
        pass_on(other, "sizes", 1)


def test_strangers_are_refused_and_delay_nobody():
    store = dist.HashStore()
    sender, receiver = ChannelConnections(store, 0, "127.0.0.1"), ChannelConnections(store, 1, "127.0.0.1")
    result = []
    thread = threading.Thread(target=lambda: result.append(receiver.exchange("state", {}, {0: [10]}, **PATIENCE)))
    thread.start()
    store.wait(["1"])
    host, port, token = store.get("1").decode().split()
    strangers = [socket.create_connection((host, int(port))) for _ in range(70)]  # more than are listened to at once
    for each in strangers[::2]:
        each.sendall(b"x" * 20)
    strangers[1].sendall(bytes.fromhex(token)[:-1])
    began_s = time.monotonic()
    sender.exchange("state", {1: [b"hello"]}, {}, **PATIENCE)
    thread.join(10)
    assert result[0][0][0].numpy().tobytes() == b"hello"
    assert time.monotonic() - began_s < 5
    for each in strangers:
        each.close()


def transfer_until_a_break():
    from hyperpod_plugins.comm import break_groups

    dist.init_process_group("hyperpod")
    rank = dist.get_rank()
    channel = Channel(None, "test")
    big = torch.zeros(64 * MIB, dtype=torch.uint8)
    for text in (b"first", b"second"):  # over the same connections
        told = channel.exchange("text", sends={(rank + 1) % 3: [text]}, receives={(rank + 2) % 3: [100]})
        assert told[(rank + 2) % 3][0].numpy().tobytes() == text
    with pytest.raises(CommError, match="to itself"):
        channel.send("text", [b""], [rank])
    with pytest.raises(CommError, match="16,385 bytes, and send_receive takes 16,384 at most"):
        channel.send_receive("text", bytes(2**14 + 1), to=(rank + 1) % 3, of=(rank + 2) % 3)
    if rank == 2:  # stays in the middle of both of its transfers
        from hyperpod_plugins.comm import channel as module

        module._CHUNK_BYTES = 2**16

        def slowed(advance):
            def slowly(self):
                time.sleep(0.01)
                return advance(self)

            return slowly

        for kind in (module._Sending, module._Receiving):  # either may be the only one that can move
            kind.advance = slowed(kind.advance)
    if rank == 1:
        threading.Timer(0.5, lambda: break_groups("a test")).start()
    began_s = time.monotonic()
    try:
        channel.exchange("state", sends={(rank + 1) % 3: [big]}, receives={(rank + 2) % 3: [big.clone()]})
    except PeerLost:
        with pytest.raises(PeerLost):
            channel.receive("state", [10], (rank + 1) % 3)
        return "broken" if time.monotonic() - began_s < 10 else "late"
    return "done"


def pass_round_until_a_break():
    from hyperpod_plugins.comm import break_groups

    dist.init_process_group("hyperpod")
    rank = dist.get_rank()
    channel = Channel(None, "test")
    for turn in range(3):
        assert channel.send_receive("state", b"%d" % turn, to=(rank + 1) % 3, of=(rank + 2) % 3) == b"%d" % turn
    if rank == 2:  # never comes again
        time.sleep(1.0)
        break_groups("a test")
    began_s = time.monotonic()
    try:
        channel.send_receive("state", b"last", to=(rank + 1) % 3, of=(rank + 2) % 3)
    except PeerLost:
        return "broken" if time.monotonic() - began_s < 10 else "late"
    return "done"


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("body", "ends"),
    [
        (transfer_until_a_break, ["broken"] * 3),
        (pass_round_until_a_break, ["broken", "done", "broken"]),  # rank 1 has all that it was to get
    ],
)
def test_a_break_ends_a_transfer_whose_payload_is_under_way(body, ends):
    assert run_ranks(body, world_size=3, timeout_s=40) == ends
