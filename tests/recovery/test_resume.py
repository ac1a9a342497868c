"""Where a job stands: what joiners, and those that come again, read of those that have stopped."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from hyperpod_plugins.elastic import FailureRecord, JobStore
from hyperpod_plugins.elastic.membership.elastic_spec import ElasticPolicy, ElasticSpec, publish_elastic_spec
from hyperpod_plugins.elastic.membership.quorum_policy import QuorumPolicy
from hyperpod_plugins.elastic.store.world import WorldPlan
from hyperpod_plugins.errors import PeerLost, RecoveryTimeout, StateLost
from hyperpod_plugins.recovery.stop_reports import (
    ResumePoint,
    StopReport,
    StopReports,
    Survivors,
    furthest_worker,
    members_before,
)
from hyperpod_plugins.recovery.watchdog import Heartbeat
from hyperpod_plugins.recovery.world_view import WorldView

WORLD_SIZE = 3


@pytest.fixture
def store():
    return dist.HashStore()


@pytest.fixture
def job_store(store):
    job_store = JobStore(store)
    job_store.end(0, FailureRecord(kind="process", cause="lost", worker_id=2))
    return job_store


def stops(store, rank, incarnation=0, timeout_s=60.0, patience_s=60.0, outside_s=60.0, kind=JobStore):
    policy = QuorumPolicy(replacement_timeout_s=timeout_s)
    job_store = kind(store)
    return StopReports(
        job_store,
        WorldView(job_store, WorldPlan.initial(WORLD_SIZE)),
        worker_id=rank,
        incarnation=incarnation,
        policy=policy,
        survivors=Survivors(job_store, patience_s=lambda: patience_s, outside_s=outside_s),
    )


def note(committed, *, in_step=True, is_described=True, part=0):
    return StopReport(incarnation=0, committed=committed, in_step=in_step, has_trainer_state=is_described, part=part)


@pytest.mark.parametrize(
    ("notes", "rank"),
    [
        pytest.param({}, None, id="nobody"),
        pytest.param({0: note(3), 1: note(3)}, 0, id="the first"),
        pytest.param({0: note(3), 1: note(4)}, 1, id="the one that has committed most"),
        pytest.param({0: note(4, in_step=False), 1: note(4)}, 1, id="in a step rather than outside"),
        pytest.param({0: note(4, in_step=False), 1: note(3)}, 0, id="outside, but further"),
        pytest.param({0: note(4, in_step=False), 1: note(4, in_step=False, part=2)}, 1, id="in a later part"),
        pytest.param({0: note(4, in_step=False, part=1), 1: note(4)}, 1, id="in a step rather than at an epoch's end"),
        pytest.param({0: note(4, is_described=False), 1: note(3)}, None, id="the furthest cannot be described"),
        pytest.param({0: note(4, is_described=False), 1: note(4)}, 1, id="another one can"),
    ],
)
def test_furthest(notes, rank):
    assert furthest_worker(notes) == rank


def test_a_joiner_waits_for_all_survivors(store, job_store):
    job_store.next_incarnation(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(stops(store, 2, incarnation=1).wait, None, 0, None)
        stops(store, 0).tell(1, committed=7, in_step=True, trainer=b"seven")
        assert not waiting.done()
        stops(store, 1).tell(1, committed=8, in_step=True, trainer=b"eight")
        assert waiting.result(60) == ResumePoint(step=8, in_step=True, trainer=b"eight")


def test_what_is_said_first_counts(store, job_store):
    job_store.next_incarnation(2)
    first = stops(store, 0)
    first.tell(1, committed=7, in_step=True, trainer=b"seven")
    first.tell(1, committed=9, in_step=False, trainer=b"nine")
    stops(store, 1).tell(1, committed=7, in_step=True, trainer=b"")
    assert stops(store, 2).wait(1, 0, None) == ResumePoint(step=7, in_step=True, trainer=b"seven")
    assert job_store.try_get("outside/1") is None


def test_the_word_of_one_that_was_lost_since_is_void(store, job_store):
    job_store.next_incarnation(2)
    stops(store, 0).tell(1, committed=9, in_step=True, trainer=b"nine")
    stops(store, 1).tell(1, committed=8, in_step=True, trainer=b"eight")
    job_store.next_incarnation(0)
    assert stops(store, 2).wait(1, 0, None) == ResumePoint(step=8, in_step=True, trainer=b"eight")


def test_an_uncounted_word_is_heard(store, job_store):
    job_store.next_incarnation(2)
    for rank in (0, 1):
        stops(store, rank).tell(1, committed=7, in_step=True, trainer=b"seven")
        job_store.count("stopped/1", -1)
    assert stops(store, 2).wait(1, 0, None).step == 7


def test_whoever_waits_stops_too_in_each_generation(store, job_store):
    job_store.next_incarnation(2)
    tried = []

    def stopped(number):
        tried.append(number)
        if number == 1:
            job_store.end(1, FailureRecord(kind="process", cause="lost again", worker_id=0))
        else:
            for rank in (0, 1):
                stops(store, rank).tell(2, committed=7, in_step=False, trainer=b"seven")

    assert stops(store, 2).wait(None, 0, stopped) == ResumePoint(step=7, in_step=False, trainer=b"seven")
    assert tried == [1, 2]


def test_members_before(job_store):
    assert members_before(job_store, 2) == {}
    job_store.propose(1, {0: '{"incarnation": 0}', 1: '{"incarnation": 4}'})
    assert members_before(job_store, 2) == members_before(job_store, 5) == {0: 0, 1: 4}
    assert members_before(job_store, 1) == {}


def test_all_are_lost(store, job_store):
    for rank in range(WORLD_SIZE):
        job_store.next_incarnation(rank)
    with pytest.raises(StateLost):
        stops(store, 2).wait(None, 0, None)


def test_those_that_are_left_are_new_and_had_no_state_yet(store, job_store):
    members = {rank: json.dumps({"incarnation": int(rank == 1)}) for rank in range(WORLD_SIZE)}
    job_store.propose(1, members)  # rank 1 is in it as a joiner; those that were to give it their state are lost then
    for rank in range(WORLD_SIZE):
        job_store.next_incarnation(rank)
    job_store.next_incarnation(0)
    job_store.next_incarnation(2)
    job_store.end(1, FailureRecord(kind="process", cause="lost again", worker_id=0))
    stops(store, 1, incarnation=1).tell(2, committed=-1, in_step=True, trainer=b"")
    with pytest.raises(StateLost, match="are new"):
        stops(store, 2, incarnation=2).wait(None, 0, None)


def test_a_generation_that_ends_is_left(store, job_store):
    job_store.end(1, FailureRecord(kind="process", cause="lost again", worker_id=0))
    with pytest.raises(PeerLost):
        stops(store, 2).wait(1, 0, None)


def test_survivors_that_do_not_stop(store, job_store):
    with pytest.raises(RecoveryTimeout):
        stops(store, 2, timeout_s=0.1).wait(1, 0, None)


class Lively(JobStore):
    """Of a job whose rank 1 says something new whenever it is asked about."""

    def heartbeats(self, ranks):
        self.num_asked = getattr(self, "num_asked", 0) + 1
        heartbeat = Heartbeat(
            incarnation=0,
            generation=0,
            committed=7,
            activity="in a callback",
            in_step=False,
            is_loading=False,
            waits_for="",
            waited_s=0.0,
            sequence=self.num_asked,
        )
        return {rank: heartbeat.to_dict() for rank in ranks}


@pytest.mark.parametrize("is_lively", [False, True])
def test_a_survivor_that_does_not_stop_is_replaced(store, job_store, is_lively):
    """Soon where nothing is heard of it; else at the limit for what is outside of steps, and the others wait on."""
    job_store.next_incarnation(2)
    stops(store, 0).tell(1, committed=7, in_step=False, trainer=b"seven")
    kind, timeout_s = (Lively, 4.0) if is_lively else (JobStore, 60.0)
    waiting = stops(store, 2, incarnation=1, timeout_s=timeout_s, patience_s=0.2, outside_s=6.0, kind=kind)
    began_s = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(waiting.wait, None, 0, None)
        while not (kills := job_store.new_kills()):
            time.sleep(0.01)
            assert not found.done(), found.result()
        asked_s = time.monotonic() - began_s
        assert kills == [(1, 0)]
        job_store.next_incarnation(1)  # as its agent does
        assert found.result(60) == ResumePoint(step=7, in_step=False, trainer=b"seven")
    assert asked_s >= (6.0 if is_lively else 0.2)
    assert not job_store.new_kills()


def test_a_job_that_shrinks_goes_on_without_those_that_say_nothing(store, job_store):
    policy = ElasticPolicy(max_replicas=3, faulty_scale_down_timeout_s=0.1)
    publish_elastic_spec(job_store, ElasticSpec(policy=policy, replica_size=1, sizes=(1, 2, 3)))
    stops(store, 1).tell(
        1, committed=7, in_step=False, trainer=b"seven"
    )  # its node is gone since, as is that of rank 2
    waiting = stops(store, 0)
    waiting.tell(1, committed=7, in_step=True, trainer=b"seven")
    with pytest.raises(PeerLost):
        waiting.wait(1, 0, None)
    world = job_store.world(1)
    assert world is not None
    assert (world.worker_ids, world.num_lost) == ((0, 1), 1)
    ended = job_store.ended(1)
    assert ended is not None
    assert (ended.kind, ended.world) == ("resize", 1)
