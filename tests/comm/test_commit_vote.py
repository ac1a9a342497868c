"""Votes over a tree of sockets: all ranks get the flags that any has set, and no rank waits for one that is gone."""

import socket
import struct
import threading
import time
from datetime import timedelta
from functools import reduce
from operator import or_

import pytest
import torch.distributed as dist
from harness import run_ranks

from hyperpod_plugins.comm.commit_vote import connect_vote

PATIENCE = timedelta(seconds=20)


def votes_of(size, numbers):
    """What each of `size` threads gets in each vote; `numbers[vote][rank]` is what it says."""
    store, found = dist.HashStore(), [[] for _ in range(size)]

    def take_part(rank):
        vote = connect_vote(store, rank, size, "127.0.0.1", PATIENCE)
        for said in numbers:
            found[rank].append(vote.all_or(said[rank]))

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 12])
def test_all_get_the_flags_that_any_has_set(size):
    numbers = [[(rank * step * 37) % 251 for rank in range(size)] for step in range(300)]  # past 256 votes
    wanted = [reduce(or_, said) for said in numbers]
    assert votes_of(size, numbers) == [wanted] * size


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
    from hyperpod_plugins.comm import break_groups, commit_vote, group_health

    dist.init_process_group("hyperpod")
    rank = dist.get_rank()
    with group_health.tolerate_breaks():
        results = [commit_vote(rank * (step % 2)) for step in range(4)]
        if rank == 3:
            time.sleep(0.3)
            break_groups("a test cuts the connections")
        last = commit_vote(1)
    is_broken, began_s = group_health.cause is not None, time.monotonic()
    again = commit_vote(1)
    return results, last, is_broken, again, time.monotonic() - began_s < 1


@pytest.mark.spawns
def test_a_rank_that_is_gone_breaks_the_groups_of_all():
    for found in run_ranks(vote_until_one_is_gone, world_size=5, timeout_s=40):
        assert found == ([0, 7, 0, 7], None, True, None, True)
