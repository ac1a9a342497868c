"""How a world changes: who waits, who is missing, and what is planned; over a real store."""

import time
from dataclasses import replace

import pytest
import torch.distributed as dist

from hyperpod_plugins.elastic import Incident, Ledger
from hyperpod_plugins.elastic.joining import (
    find_world,
    found,
    give_notice,
    heed,
    present_world,
    stand,
    takes_part,
    wanted_world,
    world_or_none,
    world_without,
)
from hyperpod_plugins.elastic.ledger import ARMED_KEY
from hyperpod_plugins.elastic.policy import ElasticPolicy
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


def change(ledger, world, at_s=0.0):
    """Let a planned world take over."""
    number = ledger.generation()
    ledger.end(number, Incident(kind="resize", cause=world.cause, world=world.number, at_s=at_s))


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
    ledger.put(ARMED_KEY, b"1")
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
    ledger.put(ARMED_KEY, b"1")
    now_s = time.time()
    ledger.propose_world(World(places=(0, 5, 6), number=1))  # never begun
    change(ledger, ledger.propose_world(World(places=(0, 5), number=2)), at_s=now_s - 3.0)
    change(ledger, ledger.propose_world(World(places=(0,), number=3, num_lost=1)), at_s=now_s - 2.0)
    slept = []

    def sleep(seconds):
        """Instead of `time.sleep`: the clock goes on by a second."""
        slept.append(seconds)
        monkeypatch.setattr(time, "time", lambda: now_s + len(slept))

    monkeypatch.setattr(time, "sleep", sleep)
    assert find_world(ledger, 7, ledger.next_incarnation(7)).places == (0, 7)
    assert len(slept) == 14  # 15 s after the change, for 10 s are doubled, and bounded


def test_a_part_of_the_state_that_is_lost_is_said(ledger):
    world = begin(ledger, 4)
    wait_as_candidate(ledger, 7)
    wait_as_candidate(ledger, 8)
    with pytest.raises(StateLost, match=r"the part \[1\]"):
        world_without(ledger, TERMS, world, {1: 0, 3: 0}, waited_s=4.0)
