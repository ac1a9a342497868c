"""How a world changes: who waits, who is missing, and what is planned; over a real store."""

import time
from dataclasses import replace

import pytest
import torch.distributed as dist
from elastic.stores import Counted

from hyperpod_plugins.elastic import FailureRecord, JobStore
from hyperpod_plugins.elastic.membership.admission import (
    Admission,
    AdmissionView,
    add_candidate,
    announce_preemption,
    await_turn,
    find_world,
    is_in_world,
    job_status,
    pending_world,
    plan_growth,
    plan_scale_down,
    plan_without_missing,
    present_world,
    publish_initial_world,
    request_replicas,
    turn_poll_s,
    world_or_none,
)
from hyperpod_plugins.elastic.membership.elastic_spec import (
    ElasticPolicy,
    ElasticSpec,
    elastic_spec_of,
    publish_elastic_spec,
)
from hyperpod_plugins.elastic.rendezvous.store import name_of_round
from hyperpod_plugins.elastic.store.world import WorldPlan
from hyperpod_plugins.errors import StateLost

POLICY = ElasticPolicy(min_replicas=1, max_replicas=4, faulty_scale_down_timeout_s=30.0)
TERMS = ElasticSpec(policy=POLICY, replica_size=2, sizes=(1, 2, 4))


@pytest.fixture
def job_store():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return JobStore.from_store("job", server)


def begin(job_store, world_size):
    publish_initial_world(job_store, WorldPlan.initial(world_size))
    return WorldPlan.initial(world_size)


def change(job_store, world):
    """Let a planned world take over."""
    number = job_store.generation()
    job_store.end(number, FailureRecord(kind="resize", cause=world.cause, world=world.number))


def wait_as_candidate(job_store, worker_id):
    add_candidate(job_store, worker_id, job_store.next_incarnation(worker_id), present_world(job_store))


def test_the_world_is_that_of_the_last_change(job_store):
    assert world_or_none(job_store) is None
    assert is_in_world(job_store, 9)  # nobody knows better
    assert begin(job_store, 4) == present_world(job_store) == WorldPlan.initial(4)
    assert not is_in_world(job_store, 9)
    job_store.end(0, FailureRecord(kind="process", cause="a test"))
    planned = job_store.propose_world(WorldPlan(worker_ids=(0, 1), number=1, cause="smaller"))
    assert present_world(job_store).number == 0  # planned, and not begun
    change(job_store, planned)
    assert present_world(job_store) == planned
    assert not is_in_world(job_store, 3)


def test_worlds_are_counted_from_what_has_ended(job_store):
    begin(job_store, 2)
    assert job_store.world_number() == 0
    for number in (1, 2):
        job_store.end(job_store.generation(), FailureRecord(kind="process", cause="a test"))
        change(job_store, job_store.propose_world(WorldPlan(worker_ids=(0,), number=number)))
        assert job_store.world_number() == number
        assert job_store.world_number(2 * number - 1) == number  # a connection remembers


def test_a_plan_comes_after_all_that_were_made(job_store):
    world = begin(job_store, 4)
    announce_preemption(job_store, 3, 0)
    announce_preemption(job_store, 2, 0)
    job_store.propose_world(WorldPlan(worker_ids=(0, 1, 2, 3, 4, 5), number=1, cause="growth"))
    assert Admission(job_store, TERMS).world_without(world, {2: 1, 3: 1}, waited_s=0.0).number == 2


def test_of_several_who_plan_the_same_one_is_heard(job_store):
    world = begin(job_store, 4)
    for worker_id in (2, 3):
        announce_preemption(job_store, worker_id, 0)
    first = Admission(job_store, TERMS).world_without(world, {2: 1, 3: 1}, waited_s=0.0)
    assert Admission(job_store, TERMS).world_without(world, {2: 1, 3: 1}, waited_s=0.0) == first
    assert job_store.world(2) is None


def test_a_plan_that_brings_in_nobody_and_did_not_begin_stands_in_nobodys_way(job_store):
    publish_elastic_spec(
        job_store, ElasticSpec(policy=replace(POLICY, scaling_timeout_s=0.0), replica_size=1, sizes=(1, 2, 4))
    )
    begin(job_store, 2)
    job_store.arm()
    job_store.propose_world(WorldPlan(worker_ids=(0,), number=1, num_lost=1))
    wait_as_candidate(job_store, 5)
    assert find_world(job_store, 7, job_store.next_incarnation(7)).worker_ids == (0, 1, 5, 7)


def test_the_first_terms_hold(job_store):
    assert elastic_spec_of(job_store) is None
    publish_elastic_spec(job_store, TERMS)
    publish_elastic_spec(job_store, ElasticSpec(policy=POLICY, replica_size=1, sizes=(1,)))
    assert elastic_spec_of(job_store) == TERMS


def test_the_job_waits_for_replacements_before_it_shrinks(job_store):
    world = begin(job_store, 4)
    assert Admission(job_store, TERMS).world_without(world, {3: 0}, waited_s=0.1) is None
    assert Admission(job_store, TERMS).world_without(world, {3: 0}, waited_s=29.0) is None
    smaller = Admission(job_store, TERMS).world_without(world, {3: 0}, waited_s=31.0)
    assert smaller.worker_ids == (0, 1)
    assert smaller.cause == "the job shrinks from 2 to 1 replicas"


def test_nobody_waits_for_those_that_gave_notice(job_store):
    world = begin(job_store, 4)
    announce_preemption(job_store, 2, 0)
    assert Admission(job_store, TERMS).world_without(world, {2: 1, 3: 1}, waited_s=0.0) is None  # 3 has not
    announce_preemption(job_store, 3, 0)
    assert Admission(job_store, TERMS).world_without(world, {2: 1, 3: 1}, waited_s=0.0).worker_ids == (0, 1)
    assert (
        Admission(job_store, TERMS).world_without(world, {2: 2, 3: 2}, waited_s=0.0) is None
    )  # those that came after them


def test_the_job_shrinks_by_those_that_got_notice(job_store):
    publish_elastic_spec(job_store, TERMS)
    world = begin(job_store, 8)
    Admission(job_store, elastic_spec_of(job_store)).scale_down(world)
    assert pending_world(job_store) == 0
    announce_preemption(job_store, 2, 0)
    job_store.next_incarnation(5)
    announce_preemption(job_store, 5, 0)  # that process is gone, and another has come
    Admission(job_store, elastic_spec_of(job_store)).scale_down(world)
    planned = job_store.world(pending_world(job_store))
    assert planned.worker_ids == (0, 1, 4, 5)  # 3 replicas are not allowed
    assert planned.num_lost == 1
    Admission(job_store, elastic_spec_of(job_store)).scale_down(world)
    assert pending_world(job_store) == planned.number == 1  # it is on its way
    change(job_store, planned)
    announce_preemption(job_store, 0, 0)
    announce_preemption(job_store, 4, 0)
    Admission(job_store, elastic_spec_of(job_store)).scale_down(planned)
    assert pending_world(job_store) == 1  # nobody would hold that part of the state


def test_a_joiner_that_is_late_does_not_bring_back_a_plan_that_was_superseded(job_store):
    """It has seen that all are ready for world 1, and is about to say so, while a notice has world 2 planned."""
    publish_elastic_spec(
        job_store, ElasticSpec(policy=replace(POLICY, scaling_timeout_s=0.0), replica_size=1, sizes=(1, 2, 3, 4))
    )
    world = begin(job_store, 2)
    job_store.arm()
    grown = find_world(job_store, 2, 0)
    assert grown.worker_ids == (0, 1, 2)
    late = JobStore(job_store._store)

    class Slow:
        """Its store, where the notice comes just before it writes."""

        def __getattr__(self, name):
            if name == "compare_set" and not pending_world(job_store):
                announce_preemption(job_store, 1, 0)
                Admission(job_store, elastic_spec_of(job_store)).scale_down(world)
                assert job_store.world(pending_world(job_store)).worker_ids == (0,)
            return getattr(job_store._store, name)

    late._store = Slow()
    with pytest.raises(SystemExit):  # another process comes in this place, and waits
        await_turn(late, grown, 2, 0)
    assert pending_world(job_store) == 2


def test_what_somebody_asked_for_outlives_a_start_of_all_processes():
    store = dist.HashStore()
    rounds = [JobStore.from_store(name_of_round("job", number), store) for number in range(3)]
    request_replicas(rounds[0], 2)
    assert [job_status(job_store)["asked"] for job_store in rounds] == [2, 2, 2]
    request_replicas(rounds[1], 3)
    assert job_status(rounds[2])["asked"] == 3


@pytest.mark.parametrize(("num_others", "most"), [(0, 25), (63, 25)])
def test_one_that_waits_for_long_asks_seldom(job_store, monkeypatch, num_others, most):
    publish_elastic_spec(job_store, ElasticSpec(policy=ElasticPolicy(max_replicas=2), replica_size=1, sizes=(1, 2)))
    world, clock_s = begin(job_store, 2), [0.0]
    job_store.arm()
    for worker_id in range(3, 3 + num_others):
        add_candidate(job_store, worker_id, 0, world)
    spare = JobStore(job_store._store)
    spare._store = Counted(job_store._store)

    def sleep(seconds):
        """Instead of `time.sleep`: the clock goes on."""
        clock_s[0] += seconds
        if clock_s[0] > 120.0:
            job_store.disarm()

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: clock_s[0])
    with pytest.raises(SystemExit):
        find_world(spare, 2, 0)
    assert spare._store.num_requests / clock_s[0] < most


@pytest.mark.parametrize(
    ("size", "num_joiners", "waited_s", "is_ready", "expected_s"),
    [
        (4, 2, 0.0, False, 0.05),
        (1024, 8, 0.0, False, 0.05),
        (1024, 8, 10.0, False, 0.5),
        (1024, 400, 0.0, False, 2.0),
        (1024, 400, 60.0, True, 0.05),
    ],
)
def test_joiners_ask_as_often_as_their_number_allows_and_at_once_when_others_wait(
    job_store, size, num_joiners, waited_s, is_ready, expected_s
):
    before = begin(job_store, size - num_joiners)
    world = WorldPlan(worker_ids=tuple(range(size)), number=1)
    if is_ready:
        job_store.raise_to("wanted_world", 1)
    assert turn_poll_s(job_store, world, before, waited_s) == pytest.approx(expected_s)


def test_one_that_got_notice_does_not_wait_to_come_in(job_store):
    world = begin(job_store, 4)
    wait_as_candidate(job_store, 7)
    announce_preemption(job_store, 7, 1)
    assert Admission(job_store, TERMS).world_without(world, {1: 0}, waited_s=4.0) is None


def test_processes_that_wait_take_the_places_of_lost_ones(job_store):
    world = begin(job_store, 4)
    wait_as_candidate(job_store, 7)
    assert Admission(job_store, TERMS).world_without(world, {1: 0}, waited_s=1.0) is None  # its agent may replace it
    assert Admission(job_store, TERMS).world_without(world, {1: 0}, waited_s=4.0).worker_ids == (0, 7, 2, 3)


def test_a_candidate_that_was_lost_is_none(job_store):
    world = begin(job_store, 4)
    wait_as_candidate(job_store, 7)
    job_store.next_incarnation(7)
    assert Admission(job_store, TERMS).world_without(world, {1: 0}, waited_s=4.0) is None


def test_a_process_that_came_in_and_was_lost_with_its_node_does_not_wait_any_more(job_store):
    begin(job_store, 4)
    wait_as_candidate(job_store, 7)
    wait_as_candidate(job_store, 8)
    for number, worker_ids in ((1, (0, 1, 2, 3, 7, 8)), (2, (0, 1, 2, 3))):
        change(job_store, job_store.propose_world(WorldPlan(worker_ids=worker_ids, number=number)))
    world = present_world(job_store)
    assert Admission(job_store, TERMS).world_without(world, {1: 0}, waited_s=4.0) is None
    job_store.next_incarnation(8)
    add_candidate(job_store, 8, 2, world)  # another process in one of these places
    assert Admission(job_store, TERMS).world_without(world, {1: 0}, waited_s=4.0).worker_ids == (0, 8, 2, 3)


def test_the_job_is_stable_for_a_while_before_it_grows_again(job_store, monkeypatch):
    policy = ElasticPolicy(max_replicas=2, scaling_timeout_s=0.0, min_stable_s=10.0, max_backoff_s=15.0)
    publish_elastic_spec(job_store, ElasticSpec(policy=policy, replica_size=1, sizes=(1, 2)))
    begin(job_store, 1)
    job_store.arm()
    job_store.propose_world(WorldPlan(worker_ids=(0, 5, 6), number=1))  # never begun
    change(job_store, job_store.propose_world(WorldPlan(worker_ids=(0, 5), number=2, previous_lasted_s=99.0)))
    change(job_store, job_store.propose_world(WorldPlan(worker_ids=(0,), number=3, num_lost=1, previous_lasted_s=1.0)))
    age_s = [2.0]

    def sleep(seconds):
        """Instead of `time.sleep`: a second passes, and the member says so. Its clock is all that counts."""
        age_s.append(age_s[-1] + 1.0)
        job_store.heartbeat(0, {"world_number": 3, "in_world_s": age_s[-1]})

    monkeypatch.setattr(time, "sleep", sleep)
    planned = find_world(job_store, 7, job_store.next_incarnation(7))
    assert planned.worker_ids == (0, 7)
    assert planned.previous_lasted_s == 15.0  # since the change, for 10 s are doubled, and bounded


def test_a_part_of_the_state_that_is_lost_is_said(job_store):
    world = begin(job_store, 4)
    wait_as_candidate(job_store, 7)
    wait_as_candidate(job_store, 8)
    with pytest.raises(StateLost, match=r"the part \[1\]"):
        Admission(job_store, TERMS).world_without(world, {1: 0, 3: 0}, waited_s=4.0)


def seen(size=4, replica_size=2, sizes=(1, 2, 4), policy=POLICY, **rest):
    """Of a world of `size` ranks."""
    spec = ElasticSpec(policy=policy, replica_size=replica_size, sizes=sizes)
    return AdmissionView(spec=spec, world=WorldPlan.initial(size), **rest)


STABLE = replace(POLICY, min_stable_s=10.0, max_backoff_s=40.0)


@pytest.mark.parametrize(
    ("view", "target"),
    [
        (seen(), None),
        (seen(candidates=(8, 9, 10)), None),  # 3 replicas are not allowed
        (seen(candidates=(8, 9, 10, 11)), 4),
        (seen(candidates=(8, 9, 10, 11), leaving={1}), None),
        (seen(candidates=(8, 9, 10, 11), requested=2), None),
        (seen(2, candidates=(8, 9, 10, 11), requested=2), 2),
        (seen(2, candidates=(8, 9), since_arrival_s=0.0), None),  # more may come
        (seen(candidates=(8, 9, 10, 11), since_arrival_s=0.0), 4),  # no more could be taken in
        (seen(candidates=(8, 9, 10, 11), policy=STABLE, since_change_s=9.0), None),
        (seen(candidates=(8, 9, 10, 11), policy=STABLE, since_change_s=11.0), 4),
        (seen(candidates=(8, 9, 10, 11), policy=STABLE, since_change_s=11.0, num_setbacks=1), None),
    ],
)
def test_when_the_job_grows(view, target):
    planned, known = plan_growth(view), (*range(view.world.size), *view.candidates)
    assert (None if planned is None else planned.worker_ids) == (target and known[: 2 * target])


@pytest.mark.parametrize(
    ("view", "target", "num_lost"),
    [
        (seen(8), None, None),
        (seen(6, sizes=(1, 2, 4)), None, None),  # a size that is not allowed stays until something is asked for
        (seen(8, requested=4), None, None),
        (seen(8, requested=3), 2, 0),
        (seen(8, leaving={2}), 2, 1),
        (seen(8, leaving={0, 2, 4, 6}), None, None),  # nobody would hold their part of the state
        (seen(2, leaving={0}), None, None),
    ],
)
def test_when_the_job_shrinks_on_request(view, target, num_lost):
    planned = plan_scale_down(view)
    assert (None if planned is None else (planned.size, planned.num_lost)) == (target and (2 * target, num_lost))
    assert planned is None or not view.leaving.intersection(planned.worker_ids)


@pytest.mark.parametrize(
    ("view", "target"),
    [
        (seen(missing={3}, since_loss_s=5.0), None),
        (seen(missing={3}, since_loss_s=31.0), 1),
        (seen(missing={3}), 1),  # it had got notice
        (seen(missing={3}, candidates=(8,), since_loss_s=5.0), 2),
        (seen(missing={2, 3}, candidates=(8,), since_loss_s=5.0), None),
        (seen(missing={2, 3}, candidates=(8,), since_loss_s=31.0), 1),
        (seen(missing={0, 1, 2, 3}, since_loss_s=31.0), None),
    ],
)
def test_how_the_job_goes_on_without_those_it_misses(view, target):
    planned = plan_without_missing(view)
    assert (None if planned is None else planned.size) == (target and 2 * target)
    assert planned is None or not view.missing.intersection(planned.worker_ids)
