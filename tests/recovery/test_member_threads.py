"""The two threads beside training, each alone in one process: what they do when a generation ends or a rank hangs."""

import time
from types import SimpleNamespace

import pytest
from torch._C._distributed_c10d import HashStore

from hyperpod_plugins.comm import group_health
from hyperpod_plugins.elastic import FailureRecord, JobStore
from hyperpod_plugins.elastic.store.world import WorldPlan
from hyperpod_plugins.recovery import HangPolicy, watchdog
from hyperpod_plugins.recovery.member import GenerationWatcher
from hyperpod_plugins.recovery.watchdog import Heartbeat, Status, StepTimes, Watchdog

ENDED = FailureRecord(kind="process", cause="killed by SIGKILL", worker_id=1, reporter="rank 1")


def wait_until(condition, timeout_s=10.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the thread has not reacted"
        time.sleep(0.005)


@pytest.fixture
def watcher():
    store = HashStore()
    watcher = GenerationWatcher(lambda: JobStore(store), lambda error: None)
    watcher.job_store = JobStore(store)
    watcher.start()
    yield watcher
    watcher.stop()
    watcher.job_store.end(watcher._watched, ENDED)  # ends the wait in the store
    group_health.reset()


def test_the_end_of_a_generation_breaks_the_groups(watcher):
    watcher.job_store.end(0, ENDED)
    wait_until(lambda: group_health.cause is not None)
    assert "killed by SIGKILL" in group_health.cause
    assert watcher.failure == watcher.job_store.ended(0)


def test_while_groups_are_formed_the_end_cancels_the_attempt_and_later_breaks_them(watcher):
    cancelled = []
    attempt = SimpleNamespace(cancel=cancelled.append)
    watcher.begin_forming()
    watcher.job_store.end(0, ENDED)  # the old one: nothing happens
    watcher.watch(1, attempt)
    watcher.job_store.end(1, ENDED)
    wait_until(lambda: cancelled)
    assert group_health.cause is None
    assert watcher.failure is None
    watcher.watch(2, attempt)
    watcher.end_forming()
    watcher.job_store.end(2, ENDED)
    wait_until(lambda: group_health.cause is not None)
    assert len(cancelled) == 1


class Waiting:
    """A member of two, rank 0, which waits in a collective for rank 1."""

    worker_id, rank, is_elastic = 0, 0, True
    job = SimpleNamespace(incarnation=0)
    world = WorldPlan.initial(2)
    hangs = HangPolicy(floor_s=0.5, early_s=0.5, outside_s=1.0)
    step_times = StepTimes()
    status = Status(activity="computing step 3", in_step=True, committed=3, generation=2)

    def __init__(self):
        self.ended, self.num_polls = [], 0

    def end(self, generation, failure):
        self.ended.append((generation, failure))
        return FailureRecord(kind=failure.kind, cause=failure.cause, reporter="rank 0")

    def poll_worlds(self):
        self.num_polls += 1


def test_the_watchdog_sends_heartbeats_and_has_a_rank_that_hangs_killed(monkeypatch):
    monkeypatch.setattr(watchdog, "_HEARTBEAT_S", 0.01)
    monkeypatch.setattr(watchdog, "current_wait", lambda: (SimpleNamespace(name="shard"), 7, 2.0))
    job_store, asked, member = JobStore(HashStore()), [], Waiting()
    job_store.ask_to_kill = lambda *which: asked.append(which)
    own = Heartbeat(
        incarnation=4, generation=2, committed=3, activity="sleeping", in_step=True, is_loading=False, waits_for="",
        waited_s=0.0, sequence=1,
    )  # fmt: skip
    job_store.heartbeat(1, own.to_dict())
    thread = Watchdog(member, job_store)
    thread.start()
    try:
        wait_until(lambda: asked and member.num_polls > 2)
    finally:
        thread.stop()
    assert asked[0] == (1, 4)
    generation, failure = member.ended[0]
    assert (generation, failure.kind, failure.worker_id, failure.step) == (2, "hang", 1, 3)
    sent = Heartbeat.from_dict(job_store.heartbeats([0])[0])
    assert (sent.activity, sent.in_step, sent.committed, sent.generation) == ("computing step 3", True, 3, 2)
    assert (sent.waits_for, sent.collective, sent.waited_s) == ("shard", 7, 2.0)
    assert sent.sequence > 2
