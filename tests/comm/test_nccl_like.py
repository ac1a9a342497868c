"""The transport of the tests that behaves as nccl does: whether it has the traps for which it is there."""

import os
import threading
import time
from datetime import timedelta

import nccl_like
import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

from hyperpod_plugins.comm import CommOptions, break_groups, current_wait, join_world
from hyperpod_plugins.comm.transport import InnerSpec

DEADLINE_S = 60.0


def join(rank):
    nccl_like.install()
    join_world(CommOptions(), rank=rank, world_size=2, timeout_s=5.0)


def waits_are_queued():
    rank = int(os.environ["RANK"])
    join(rank)
    store = dist.distributed_c10d._get_default_store()
    value = torch.full((3,), float(rank + 1))
    if rank == 1:
        store.wait(["go"])  # the peer has gone on, though this rank has not come
    work = dist.all_reduce(value, async_op=True)
    work.wait()
    seen = current_wait()
    is_queued = rank == 1 or not work.is_completed()
    store.set("go", "1")
    total = float(value.sum())  # here the host blocks
    dist.destroy_process_group()
    return is_queued, total, None if seen is None else seen[0].name


def reads_of_memory_block():
    """`tolist` and `numpy` of a device's tensor copy it, which waits; here they read past the dispatcher."""
    rank = int(os.environ["RANK"])
    join(rank)
    found = []
    for read in (torch.Tensor.tolist, lambda tensor: tensor.numpy().tolist()):
        value = torch.full((3,), float(rank + 1))
        if rank == 1:
            time.sleep(0.3)
        dist.all_reduce(value)
        found.append(read(value))
    dist.destroy_process_group()
    return found


def errors_do_not_surface():
    from hyperpod_plugins.comm.runtime import runtime  # not a copy that came with this function

    rank = int(os.environ["RANK"])
    join(rank)
    dist.all_reduce(torch.ones(1))
    float(torch.ones(1).sum())
    if rank == 1:
        break_groups("this rank leaves")
        runtime.finish_aborts()
        return None
    time.sleep(0.3)
    value = torch.ones(1)
    work = dist.all_reduce(value, async_op=True)
    work.wait()  # no error
    time.sleep(7.0)  # longer than the timeout
    hangs = not work.is_completed()
    key = current_wait()[0].name
    break_groups("a test")
    runtime.finish_aborts()
    float(value.sum())  # does not block any more
    return hangs, key


@pytest.mark.spawns
def test_a_wait_returns_at_once_and_the_host_blocks_where_it_computes():
    (is_queued, total, key), (_, other_total, _) = run_ranks(waits_are_queued, world_size=2)
    assert is_queued
    assert key == "world"
    assert total == other_total == 9.0


@pytest.mark.spawns
def test_what_reads_memory_past_the_dispatcher_blocks_too():
    assert run_ranks(reads_of_memory_block, world_size=2) == [[[3.0] * 3] * 2] * 2


@pytest.mark.spawns
def test_a_lost_peer_shows_in_no_wait_and_hangs_the_queue_until_the_abort():
    results = run_ranks(errors_do_not_surface, world_size=2)
    assert results[0] == (True, "world")


def the_host_reads_after_a_break():
    from hyperpod_plugins.comm import group_health
    from hyperpod_plugins.comm.groups import default_group
    from hyperpod_plugins.comm.runtime import runtime
    from hyperpod_plugins.errors import PeerLost
    from hyperpod_plugins.parallel.checkpoint.files import any_rank

    rank = int(os.environ["RANK"])
    join(rank)
    shared = ["the first"]
    dist.broadcast_object_list(shared, src=0)
    if rank == 1:
        break_groups("this rank leaves")
        runtime.finish_aborts()
        return None
    outcomes = []

    def lost():
        with group_health.checks_host_read():
            dist.broadcast_object_list(shared, src=1)

    for read in (lambda: any_rank(False, default_group()), lost):
        breaking = threading.Timer(1.0, break_groups, ["a test"])
        breaking.start()
        try:
            outcomes.append(read())
        except PeerLost as error:
            outcomes.append(type(error).__name__)
        breaking.join()
        runtime.finish_aborts()
    return outcomes


@pytest.mark.spawns
def test_what_the_host_reads_after_a_break_is_no_result():
    """The flag of the first would be what this rank had put there, the size of the second what was in the memory."""
    assert run_ranks(the_host_reads_after_a_break, world_size=2)[0] == ["PeerLost", "PeerLost"]


def spec(store, rank, timeout_s=DEADLINE_S):
    """Of one of two members, both in this process."""
    timeout = timedelta(seconds=timeout_s)
    return InnerSpec(store=store, rank=rank, size=2, timeout=timeout, global_ranks=(0, 1), name="a test")


def test_a_group_connects_in_its_first_collective():
    store = dist.HashStore()
    first = nccl_like.QueuedGroup(spec(store, 0))  # the peer is not there yet: nothing waits for it
    values = [torch.ones(2), torch.full((2,), 2.0)]
    works = [first.allreduce([values[0]])]
    assert not works[0].is_completed()
    second = nccl_like.QueuedGroup(spec(store, 1))
    works.append(second.allreduce([values[1]]))
    assert all(work.done.wait(DEADLINE_S) for work in works)
    assert [value.tolist() for value in values] == [[3.0, 3.0], [3.0, 3.0]]
    for group in (first, second):
        group.shutdown()


def test_a_group_connects_at_once_if_it_is_asked_to():
    """As `Nccl.create` asks: without the peer there is no group."""
    with pytest.raises(RuntimeError):
        nccl_like.NcclLike().create(spec(dist.HashStore(), 0, timeout_s=0.3))
    store, groups = dist.HashStore(), {}

    def create(rank):
        groups[rank] = nccl_like.NcclLike().create(spec(store, rank))

    threads = [threading.Thread(target=create, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert all(group._gloo is not None for group in groups.values())
    assert len(groups) == 2
    for group in groups.values():
        group.shutdown()


class Sockets:
    """Of a group that is aborted; it has none."""

    def shutdown(self):
        pass


def test_aborts_take_their_time_one_after_another(monkeypatch):
    """Two groups hang, and are aborted at the same time; until its abort is over, the collective of each hangs."""
    hanging = [nccl_like.QueuedGroup(spec(dist.HashStore(), 0, timeout_s=0.3)) for _ in range(2)]
    works = [group.allreduce([torch.ones(1)]) for group in hanging]
    together, begun, permits = threading.Barrier(2), threading.Semaphore(0), threading.Semaphore(0)
    at_once = []

    def take_time():
        begun.release()
        try:
            together.wait(0.3)
            at_once.append(True)
        except threading.BrokenBarrierError:  # the other has not begun
            pass
        assert permits.acquire(timeout=DEADLINE_S)

    monkeypatch.setattr(nccl_like, "take_abort_time", take_time)
    aborts = [threading.Thread(target=group.abort, args=(Sockets(),), daemon=True) for group in hanging]
    for abort in aborts:
        abort.start()
    for num_over in range(2):
        assert begun.acquire(timeout=DEADLINE_S)
        assert sum(work.is_completed() for work in works) == num_over
        permits.release()
    for abort in aborts:
        abort.join(DEADLINE_S)
    assert all(work.is_completed() for work in works)
    assert at_once == []
