"""Votes and maxima over a tree of sockets: all get what any rank has set, and none waits for one that is gone."""

import socket
import struct
import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import reduce
from operator import or_

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

from hyperpod_plugins.comm.commit_vote import connect_vote

PATIENCE = timedelta(seconds=20)


def run_threads(take_part, arguments):
    """Call a function in a thread for each tuple of arguments."""
    threads = [threading.Thread(target=take_part, args=each) for each in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)


def votes_of(size, numbers):
    """What each of `size` threads gets in each vote; `numbers[vote][rank]` is what it says."""
    store, found = dist.HashStore(), [[] for _ in range(size)]

    def take_part(rank):
        vote = connect_vote(store, rank, size, "127.0.0.1", PATIENCE)
        for said in numbers:
            found[rank].append(vote.all_or(said[rank]))

    run_threads(take_part, [(rank,) for rank in range(size)])
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 12])
def test_all_get_the_flags_that_any_has_set(size):
    numbers = [[(rank * step * 37) % 251 for rank in range(size)] for step in range(300)]  # past 256 votes
    wanted = [reduce(or_, said) for said in numbers]
    assert votes_of(size, numbers) == [wanted] * size


def all_max_between_votes(size, values):
    """What each of `size` threads gets, in turn from a vote and from `all_max`."""
    store, found = dist.HashStore(), [[] for _ in range(size)]

    def take_part(rank):
        vote = connect_vote(store, rank, size, "127.0.0.1", PATIENCE)
        for said in values:
            found[rank] += [vote.all_or(1 << rank), vote.all_max(said[rank])]

    run_threads(take_part, [(rank,) for rank in range(size)])
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_all_get_the_largest_of_each_byte(size):
    values = [[bytes(rank * place * step % 256 for place in range(40)) for rank in range(size)] for step in range(9)]
    wanted = [each for said in values for each in (2**size - 1, bytes(map(max, zip(*said, strict=True))))]
    assert all_max_between_votes(size, values) == [wanted] * size


@pytest.mark.parametrize(
    ("of_parent", "of_child"),
    [("all_max", "all_or"), ("all_or", "all_max"), ("all_max", "more")],
    ids=["a vote", "bytes", "more bytes"],
)
def test_ranks_that_are_at_different_places_do_not_take_one_message_for_another(of_parent, of_child):
    store, found = dist.HashStore(), {}
    calls = {
        "all_max": lambda vote: vote.all_max(b"ab"),
        "more": lambda vote: vote.all_max(b"abc"),
        "all_or": lambda vote: vote.all_or(1),
    }

    def take_part(rank, call):
        vote = connect_vote(store, rank, 2, "127.0.0.1", PATIENCE)
        try:
            calls[call](vote)
        except OSError as error:
            found[rank] = str(error)
        with suppress(OSError):
            for each in vote.sockets:
                each.shutdown(socket.SHUT_RDWR)  # as a break does

    run_threads(take_part, [(0, of_parent), (1, of_child)])
    assert found.keys() == {0, 1}
    assert "received message" in found[0]


def test_whoever_calls_without_the_token_is_not_counted():
    store = dist.HashStore()
    found = {}

    def root():
        found[0] = connect_vote(store, 0, 2, "127.0.0.1", PATIENCE).all_or(1)

    thread = threading.Thread(target=root)
    thread.start()
    store.wait(["0"], PATIENCE)
    host, port, _ = store.get("0").decode().split()
    with socket.create_connection((host, int(port))) as hasty:
        hasty.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # it closes with a reset
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"x" * 16)
        found[1] = connect_vote(store, 1, 2, "127.0.0.1", PATIENCE).all_or(5)
    thread.join(30)
    assert found == {0: 5, 1: 5}


def test_a_neighbour_that_does_not_come_is_not_waited_for_long():
    with pytest.raises(TimeoutError, match="did not come to vote"):
        connect_vote(dist.HashStore(), 0, 2, "127.0.0.1", timedelta(seconds=0.3))
    with pytest.raises(TimeoutError, match="did not come to vote"):
        connect_vote(dist.HashStore(), 1, 2, "127.0.0.1", timedelta(seconds=0.3))


def vote_until_one_is_gone():
    from hyperpod_plugins.comm import all_max, break_groups, commit_vote, group_health
    from hyperpod_plugins.errors import PeerLost

    dist.init_process_group("hyperpod")
    rank = dist.get_rank()
    with group_health.tolerate_breaks():
        results = [commit_vote(rank * (step % 2)) for step in range(4)]
        results.append(all_max(torch.tensor([rank, 9 - rank], dtype=torch.uint8)))
        if rank == 3:
            time.sleep(0.3)
            break_groups("a test cuts the connections")
        last = commit_vote(1) if rank % 2 else all_max(torch.zeros(4, dtype=torch.uint8))
        is_broken, began_s = group_health.cause is not None, time.monotonic()
        any_bytes = all_max(torch.zeros(4, dtype=torch.uint8))
    again = commit_vote(1)
    try:
        all_max(torch.zeros(4, dtype=torch.uint8))
    except PeerLost:
        is_told = True
    return results, last in (None, bytes(4)), is_broken, len(any_bytes), again, is_told, time.monotonic() - began_s < 1


@pytest.mark.spawns
def test_a_rank_that_is_gone_breaks_the_groups_of_all():
    for found in run_ranks(vote_until_one_is_gone, world_size=5, timeout_s=40):
        assert found == ([0, 7, 0, 7, bytes([4, 9])], True, True, 4, None, True, True)


def compare_bytes():
    from hyperpod_plugins.comm import all_max, commit_vote, group_health, reset_traffic, traffic
    from hyperpod_plugins.errors import LoopError, PeerLost

    dist.init_process_group("hyperpod", timeout=timedelta(seconds=60))
    rank, group = dist.get_rank(), dist.group.WORLD
    mine = torch.tensor([rank, 1 - rank], dtype=torch.uint8)
    told = [all_max(mine.clone())]  # opens the tree
    reset_traffic()
    issued = group.num_issued
    if rank == 0:  # of this rank alone, as where its program is about to communicate between micro-steps
        group_health.forbid_collectives("not now", before=group_health.allow_collectives)
    told.append(all_max(mine))
    counts = group.num_issued - issued, {axis: dict(each.calls) for axis, each in traffic().items()}
    with group_health.forbid("not now"), pytest.raises(LoopError, match="not now"):
        all_max(mine)
    told += [commit_vote(rank + 1), all_max(mine)]
    group.set_timeout(timedelta(seconds=1))
    began_s = time.monotonic()
    if rank == 0:
        with pytest.raises(PeerLost):
            all_max(mine)
    else:
        time.sleep(4)
    return told, counts, time.monotonic() - began_s < 30


@pytest.mark.spawns
def test_all_max_is_a_collective_of_the_world():
    largest = bytes([1, 1])
    for told, counts, is_soon in run_ranks(compare_bytes, world_size=2, timeout_s=40):
        assert told == [largest, largest, 3, largest]
        assert counts == (1, {"world": {"all_reduce": 1}})
        assert is_soon


def compare_with_one_that_is_gone():
    from hyperpod_plugins.comm import all_max
    from hyperpod_plugins.errors import PeerLost

    dist.init_process_group("hyperpod", timeout=timedelta(seconds=120))
    dist.barrier()
    if dist.get_rank() == 0:
        with pytest.raises(PeerLost):
            all_max(torch.zeros(2, dtype=torch.uint8))


@pytest.mark.spawns
def test_a_rank_that_is_gone_before_the_first_message_is_noticed_at_once():
    run_ranks(compare_with_one_that_is_gone, world_size=2, timeout_s=40)
