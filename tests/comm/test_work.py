"""Which waits are said to whoever looks after hangs: those of the step's thread, and nobody else ends them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hyperpod_plugins.comm import WORLD, CommOptions, GroupKey, ResilientProcessGroup, current_wait, device_queue
from hyperpod_plugins.comm.runtime import QueuedCollective, runtime
from hyperpod_plugins.comm.transport import Gloo, InnerGroup
from hyperpod_plugins.comm.work import FinishedWork, PeerWait, ReduceScatterWork, ResilientWork, no_op_group

SHARD, SNAPSHOT = GroupKey("shard"), GroupKey("snapshot", is_strict=True)
INNER = InnerGroup(no_op_group(), Gloo())


class Seen(FinishedWork):
    """What is said while somebody waits for this collective."""

    wait_said = None

    def wait(self, timeout=None):
        self.wait_said = current_wait()
        return True


class Handle(dist.Work):
    """The same, of a collective that was issued."""

    seen = None

    def wait(self, timeout=None):
        self.seen = current_wait()
        return True


def wait_for(key, queued_on):
    """The key that is said while this thread waits for a collective."""
    inner = Seen()
    work = ResilientWork(inner, INNER, pytest.fail, key, number=7, in_slices=False, queued_on=queued_on)
    work.wait()
    return inner.wait_said and inner.wait_said[0]


@pytest.mark.parametrize("queued_on", [None, torch.device("cpu")], ids=["host waits", "queued"])
@pytest.mark.parametrize("key", [SHARD, SNAPSHOT], ids=["of the step", "strict"])
def test_a_thread_beside_the_step_leaves_its_wait_alone(key, queued_on):
    with ThreadPoolExecutor(1) as beside, PeerWait(WORLD):
        assert beside.submit(wait_for, key, queued_on).result(10) == WORLD
        assert current_wait()[0] == WORLD
    assert current_wait() is None


class Part(dist.Work):
    """A reduction that runs, has ended, or has failed."""

    def __init__(self, state):
        super().__init__()
        self.state = state

    def is_completed(self):
        return self.state != "runs"

    def wait(self, timeout=None):
        if self.state == "failed":
            raise RuntimeError("lost")
        return True


def test_a_reduction_that_has_failed_is_found_while_others_run():
    ReduceScatterWork([Part("ended"), Part("runs")], [], []).raise_failure()
    with pytest.raises(RuntimeError, match="lost"):
        ReduceScatterWork([Part("runs"), Part("failed")], [], []).raise_failure()
    ended = ReduceScatterWork([Part("ended"), Part("failed")], [], [])
    assert ResilientWork(ended, INNER, pytest.fail, SHARD, number=7, in_slices=True, queued_on=None).is_completed()


@pytest.fixture
def device():
    """A device with a queue that has come to a point, a number."""
    come = SimpleNamespace(at=0)
    device_queue.add(QueuedCollective(SHARD, 4, lambda: come.at >= 1, lambda: come.at >= 2))
    yield come
    device_queue.clear()


def test_the_device_s_older_collective_comes_before_the_one_in_which_the_host_waits(device):
    with PeerWait(WORLD):
        assert current_wait() is None  # the device computes, or hangs: the others may wait for this rank
        device.at = 1
        assert current_wait()[:2] == (SHARD, 4)
        device.at = 2
        assert current_wait()[:2] == (WORLD, 0)


def test_only_what_all_members_issue_alike_is_numbered():
    group = ResilientProcessGroup(
        INNER,
        rank=0,
        size=2,
        key=SHARD,
        options=CommOptions(),
        root_store=dist.HashStore(),
        timeout=timedelta(seconds=1),
    )
    seen = []
    for kind in ("all_reduce", "send", "recv", "coalesced", "barrier"):
        handle = Handle()
        group._issue(kind, 0, lambda handle=handle: handle).wait()
        seen.append(handle.seen[:2])
    assert seen == [(SHARD, 1), (SHARD, 0), (SHARD, 0), (SHARD, 0), (SHARD, 2)]


def test_only_a_collective_of_the_step_in_which_the_host_waits_is_said():
    assert threading.current_thread() is threading.main_thread()
    assert wait_for(SHARD, None) == SHARD
    assert wait_for(SNAPSHOT, None) is None
    assert wait_for(SHARD, torch.device("cpu")) is None
    assert current_wait() is None
    with PeerWait(WORLD):
        assert runtime.waiting.number == 0  # not that of the collective before
        assert wait_for(SNAPSHOT, None) == WORLD
        assert current_wait()[0] == WORLD
