"""How a world changes: who waits, who is missing, and what is planned; over a real store."""

import time
from dataclasses import replace

import pytest
import torch.distributed as dist
from elastic.stores import Counted

from hyperpod_plugins.elastic import Incident, Ledger
from hyperpod_plugins.elastic.joining import (
    ask_for,
    await_turn,
    describe,
    find_world,
    found,
    give_notice,
    heed,
    present_world,
    stand,
    takes_part,
    turn_poll_s,
    wanted_world,
    world_or_none,
    world_without,
)
from hyperpod_plugins.elastic.policy import ElasticPolicy
from hyperpod_plugins.elastic.roster import name_of_round
from hyperpod_plugins.elastic.terms import Terms, leave_terms, terms_of
from hyperpod_plugins.elastic.world import World
from hyperpod_plugins.errors import StateLost

POLICY = ElasticPolicy(min_replicas=1, max_replicas=4, faulty_scale_down_timeout_s=30.0)
TERMS = Terms(policy=POLICY, replica_size=2, sizes=(1, 2, 4))


@pytest.fixture
def ledger():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return Ledger.of("job", server)


def begin(ledger, world_size):
    found(ledger, World.of_founders(world_size))
    return World.of_founders(world_size)


def change(ledger, world):
    """Let a planned world take over."""
    number = ledger.generation()
    ledger.end(number, Incident(kind="resize", cause=world.cause, world=world.number))


def wait_as_candidate(ledger, place):
    stand(ledger, place, ledger.next_incarnation(place), present_world(ledger))


def test_the_world_is_that_of_the_last_change(ledger):
    assert world_or_none(ledger) is None
    assert takes_part(ledger, 9)  # nobody knows better
    assert begin(ledger, 4) == present_world(ledger) == World.of_founders(4)
    assert not takes_part(ledger, 9)
    ledger.end(0, Incident(kind="process", cause="a test"))
    planned = ledger.propose_world(World(places=(0, 1), number=1, cause="smaller"))
    assert present_world(ledger).number == 0  # planned, and not begun
    change(ledger, planned)
    assert present_world(ledger) == planned
    assert not takes_part(ledger, 3)


def test_worlds_are_counted_from_what_has_ended(ledger):
    begin(ledger, 2)
    assert ledger.world_number() == 0
    for number in (1, 2):
        ledger.end(ledger.generation(), Incident(kind="process", cause="a test"))
        change(ledger, ledger.propose_world(World(places=(0,), number=number)))
        assert ledger.world_number() == number
        assert ledger.world_number(2 * number - 1) == number  # a connection remembers


def test_a_plan_comes_after_all_that_were_made(ledger):
    world = begin(ledger, 4)
    give_notice(ledger, 3, 0)
    give_notice(ledger, 2, 0)
    ledger.propose_world(World(places=(0, 1, 2, 3, 4, 5), number=1, cause="growth"))
    assert world_without(ledger, TERMS, world, {2: 1, 3: 1}, waited_s=0.0).number == 2


def test_of_several_who_plan_the_same_one_is_heard(ledger):
    world = begin(ledger, 4)
    for place in (2, 3):
        give_notice(ledger, place, 0)
    first = world_without(ledger, TERMS, world, {2: 1, 3: 1}, waited_s=0.0)
    assert world_without(ledger, TERMS, world, {2: 1, 3: 1}, waited_s=0.0) == first
    assert ledger.world(2) is None


def test_a_plan_that_brings_in_nobody_and_did_not_begin_stands_in_nobodys_way(ledger):
    leave_terms(ledger, Terms(policy=replace(POLICY, scaling_timeout_s=0.0), replica_size=1, sizes=(1, 2, 4)))
    begin(ledger, 2)
    ledger.arm()
    ledger.propose_world(World(places=(0,), number=1, num_lost=1))
    wait_as_candidate(ledger, 5)
    assert find_world(ledger, 7, ledger.next_incarnation(7)).places == (0, 1, 5, 7)


def test_the_first_terms_hold(ledger):
    assert terms_of(ledger) is None
    leave_terms(ledger, TERMS)
    leave_terms(ledger, Terms(policy=POLICY, replica_size=1, sizes=(1,)))
    assert terms_of(ledger) == TERMS


def test_the_job_waits_for_replacements_before_it_shrinks(ledger):
    world = begin(ledger, 4)
    assert world_without(ledger, TERMS, world, {3: 0}, waited_s=0.1) is None
    assert world_without(ledger, TERMS, world, {3: 0}, waited_s=29.0) is None
    smaller = world_without(ledger, TERMS, world, {3: 0}, waited_s=31.0)
    assert smaller.places == (0, 1)
    assert smaller.cause == "the job shrinks from 2 to 1 replicas"


def test_nobody_waits_for_those_that_gave_notice(ledger):
    world = begin(ledger, 4)
    give_notice(ledger, 2, 0)
    assert world_without(ledger, TERMS, world, {2: 1, 3: 1}, waited_s=0.0) is None  # 3 has not
    give_notice(ledger, 3, 0)
    assert world_without(ledger, TERMS, world, {2: 1, 3: 1}, waited_s=0.0).places == (0, 1)
    assert world_without(ledger, TERMS, world, {2: 2, 3: 2}, waited_s=0.0) is None  # those that came after them


def test_the_job_shrinks_by_those_that_got_notice(ledger):
    leave_terms(ledger, TERMS)
    world = begin(ledger, 8)
    heed(ledger, world)
    assert wanted_world(ledger) == 0
    give_notice(ledger, 2, 0)
    ledger.next_incarnation(5)
    give_notice(ledger, 5, 0)  # that process is gone, and another has come
    heed(ledger, world)
    planned = ledger.world(wanted_world(ledger))
    assert planned.places == (0, 1, 4, 5)  # 3 replicas are not allowed
    assert planned.num_lost == 1
    heed(ledger, world)
    assert wanted_world(ledger) == planned.number == 1  # it is on its way
    change(ledger, planned)
    give_notice(ledger, 0, 0)
    give_notice(ledger, 4, 0)
    heed(ledger, planned)
    assert wanted_world(ledger) == 1  # nobody would hold that part of the state


def test_a_newcomer_that_is_late_does_not_bring_back_a_plan_that_was_superseded(ledger):
    """It has seen that all are ready for world 1, and is about to say so, while a notice has world 2 planned."""
    leave_terms(ledger, Terms(policy=replace(POLICY, scaling_timeout_s=0.0), replica_size=1, sizes=(1, 2, 3, 4)))
    world = begin(ledger, 2)
    ledger.arm()
    grown = find_world(ledger, 2, 0)
    assert grown.places == (0, 1, 2)
    late = Ledger(ledger._store)

    class Slow:
        """Its store, where the notice comes just before it writes."""

        def __getattr__(self, name):
            if name == "compare_set" and not wanted_world(ledger):
                give_notice(ledger, 1, 0)
                heed(ledger, world)
                assert ledger.world(wanted_world(ledger)).places == (0,)
            return getattr(ledger._store, name)

    late._store = Slow()
    with pytest.raises(SystemExit):  # another process comes in this place, and waits
        await_turn(late, grown, 2, 0)
    assert wanted_world(ledger) == 2


def test_what_somebody_asked_for_outlives_a_start_of_all_processes():
    store = dist.HashStore()
    rounds = [Ledger.of(name_of_round("job", number), store) for number in range(3)]
    ask_for(rounds[0], 2)
    assert [describe(ledger)["asked"] for ledger in rounds] == [2, 2, 2]
    ask_for(rounds[1], 3)
    assert describe(rounds[2])["asked"] == 3


@pytest.mark.parametrize(("num_others", "most"), [(0, 25), (63, 25)])
def test_one_that_waits_for_long_asks_seldom(ledger, monkeypatch, num_others, most):
    leave_terms(ledger, Terms(policy=ElasticPolicy(max_replicas=2), replica_size=1, sizes=(1, 2)))
    world, clock_s = begin(ledger, 2), [0.0]
    ledger.arm()
    for place in range(3, 3 + num_others):
        stand(ledger, place, 0, world)
    spare = Ledger(ledger._store)
    spare._store = Counted(ledger._store)

    def sleep(seconds):
        """Instead of `time.sleep`: the clock goes on."""
        clock_s[0] += seconds
        if clock_s[0] > 120.0:
            ledger.disarm()

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: clock_s[0])
    with pytest.raises(SystemExit):
        find_world(spare, 2, 0)
    assert spare._store.num_requests / clock_s[0] < most


@pytest.mark.parametrize(
    ("size", "num_newcomers", "waited_s", "is_ready", "expected_s"),
    [
        (4, 2, 0.0, False, 0.05),
        (1024, 8, 0.0, False, 0.05),
        (1024, 8, 10.0, False, 0.5),
        (1024, 400, 0.0, False, 2.0),
        (1024, 400, 60.0, True, 0.05),
    ],
)
def test_newcomers_ask_as_often_as_their_number_allows_and_at_once_when_others_wait(
    ledger, size, num_newcomers, waited_s, is_ready, expected_s
):
    before = begin(ledger, size - num_newcomers)
    world = World(places=tuple(range(size)), number=1)
    if is_ready:
        ledger.raise_to("wanted_world", 1)
    assert turn_poll_s(ledger, world, before, waited_s) == pytest.approx(expected_s)


def test_one_that_got_notice_does_not_wait_to_come_in(ledger):
    world = begin(ledger, 4)
    wait_as_candidate(ledger, 7)
    give_notice(ledger, 7, 1)
    assert world_without(ledger, TERMS, world, {1: 0}, waited_s=4.0) is None


def test_processes_that_wait_take_the_places_of_lost_ones(ledger):
    world = begin(ledger, 4)
    wait_as_candidate(ledger, 7)
    assert world_without(ledger, TERMS, world, {1: 0}, waited_s=1.0) is None  # its agent may replace it
    assert world_without(ledger, TERMS, world, {1: 0}, waited_s=4.0).places == (0, 7, 2, 3)


def test_a_candidate_that_was_lost_is_none(ledger):
    world = begin(ledger, 4)
    wait_as_candidate(ledger, 7)
    ledger.next_incarnation(7)
    assert world_without(ledger, TERMS, world, {1: 0}, waited_s=4.0) is None


def test_a_process_that_came_in_and_was_lost_with_its_node_does_not_wait_any_more(ledger):
    begin(ledger, 4)
    wait_as_candidate(ledger, 7)
    wait_as_candidate(ledger, 8)
    for number, places in ((1, (0, 1, 2, 3, 7, 8)), (2, (0, 1, 2, 3))):
        change(ledger, ledger.propose_world(World(places=places, number=number)))
    world = present_world(ledger)
    assert world_without(ledger, TERMS, world, {1: 0}, waited_s=4.0) is None
    ledger.next_incarnation(8)
    stand(ledger, 8, 2, world)  # another process in one of these places
    assert world_without(ledger, TERMS, world, {1: 0}, waited_s=4.0).places == (0, 8, 2, 3)


def test_the_job_is_stable_for_a_while_before_it_grows_again(ledger, monkeypatch):
    policy = ElasticPolicy(max_replicas=2, scaling_timeout_s=0.0, min_stable_s=10.0, max_backoff_s=15.0)
    leave_terms(ledger, Terms(policy=policy, replica_size=1, sizes=(1, 2)))
    begin(ledger, 1)
    ledger.arm()
    ledger.propose_world(World(places=(0, 5, 6), number=1))  # never begun
    change(ledger, ledger.propose_world(World(places=(0, 5), number=2, lasted_s=99.0)))
    change(ledger, ledger.propose_world(World(places=(0,), number=3, num_lost=1, lasted_s=1.0)))
    age_s = [2.0]

    def sleep(seconds):
        """Instead of `time.sleep`: a second passes, and the member says so. Its clock is all that counts."""
        age_s.append(age_s[-1] + 1.0)
        ledger.beat(0, {"world": 3, "in_world_s": age_s[-1]})

    monkeypatch.setattr(time, "sleep", sleep)
    planned = find_world(ledger, 7, ledger.next_incarnation(7))
    assert planned.places == (0, 7)
    assert planned.lasted_s == 15.0  # since the change, for 10 s are doubled, and bounded


def test_a_part_of_the_state_that_is_lost_is_said(ledger):
    world = begin(ledger, 4)
    wait_as_candidate(ledger, 7)
    wait_as_candidate(ledger, 8)
    with pytest.raises(StateLost, match=r"the part \[1\]"):
        world_without(ledger, TERMS, world, {1: 0, 3: 0}, waited_s=4.0)
