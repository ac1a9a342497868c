"""How processes agree on a generation: threads as members on one store, with the disturbances of a real job."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch.distributed as dist

from hyperpod_plugins.elastic import FailureRecord, JobStore
from hyperpod_plugins.elastic.membership.quorum_policy import QuorumPolicy
from hyperpod_plugins.elastic.store.job_store import GAVE_UP_KEY
from hyperpod_plugins.elastic.store.world import WorldPlan
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.errors import RecoveryError, RecoveryTimeout
from hyperpod_plugins.recovery import NO_STATE, Arrival, MustReenterLoop
from hyperpod_plugins.recovery.quorum import PlanWatcher, QuorumJoiner, from_texts, to_text
from hyperpod_plugins.recovery.stop_reports import StopReports, Survivors
from hyperpod_plugins.recovery.watchdog import Heartbeat
from hyperpod_plugins.recovery.world_view import WorldView

pytestmark = pytest.mark.slow_single  # threads that wait for each other

SURVIVOR = Arrival(incarnation=0, committed=7, voted_step=8)
JOINER = Arrival(incarnation=1)
DEADLINE_S = 60.0


@pytest.fixture(params=["tcp", "hash"])
def connect(request):
    """Makes one more connection to the job store of one job."""
    if request.param == "hash":
        shared = dist.HashStore()
        yield lambda: JobStore(shared)
    else:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        job = JobEnv(store_host="127.0.0.1", store_port=store.port, run_id="job")
        yield lambda: JobStore.connect(job)
        del store


@pytest.fixture
def play(connect):
    """Makes a process of some rank meet the others in generation 1, in a thread."""
    with ThreadPoolExecutor(16) as pool:

        def begin(rank, arrival=SURVIVOR, *, world_size=3, timeout_s=DEADLINE_S, patience_s=DEADLINE_S, outside_s=0.0):
            job_store = connect()
            joiner = QuorumJoiner(
                job_store,
                WorldView(job_store, WorldPlan.initial(world_size)),
                PlanWatcher(connect),
                worker_id=rank,
                policy=QuorumPolicy(replacement_timeout_s=timeout_s),
                survivors=Survivors(job_store, patience_s=lambda: patience_s, outside_s=outside_s),
            )
            return pool.submit(joiner.join, 1, arrival, time.monotonic())

        yield begin


def idle(job_store):
    """Of one that only says where it stopped."""
    return Survivors(job_store, patience_s=lambda: DEADLINE_S, outside_s=DEADLINE_S)


def until(condition):
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def plan_of(futures):
    """The plan that all of them have seen."""
    formed = [future.result(DEADLINE_S) for future in futures]
    assert all(each == formed[0] for each in formed)
    assert formed[0].number == 1
    return formed[0].arrivals


def test_arrivals_pass_through_the_job_store():
    arrivals = {0: SURVIVOR, 1: replace(SURVIVOR, snapshots=(4, 8), source_snapshots=(4,)), 2: JOINER, 3: SURVIVOR}
    assert from_texts({rank: to_text(each) for rank, each in arrivals.items()}) == arrivals


def test_all_arrive(play):
    arrivals = [replace(SURVIVOR, committed=rank) for rank in range(12)]
    plan = plan_of([play(rank, each, world_size=12) for rank, each in enumerate(arrivals)])
    assert plan == dict(enumerate(arrivals))


def test_whoever_arrives_after_the_plan_finds_it(play, connect):
    job_store = connect()
    for rank in (0, 2):
        job_store.arrive(1, rank, to_text(SURVIVOR))
    plan = plan_of([play(1)])
    assert plan_of([play(0)]) == plan


def test_a_process_is_replaced_after_it_arrived(play, connect):
    agent = connect()
    agent.arrive(1, 2, to_text(SURVIVOR))
    agent.next_incarnation(2)
    waiting = [play(0), play(1)]
    until(lambda: agent.num_arrived(1) == 3)  # full, and not complete
    plan = plan_of([*waiting, play(2, JOINER)])
    assert plan == {0: SURVIVOR, 1: SURVIVOR, 2: JOINER}


def test_a_process_is_replaced_while_the_others_come(play, connect):
    agent = connect()
    first = play(0)
    agent.arrive(1, 2, to_text(SURVIVOR))
    agent.next_incarnation(2)
    second = play(2, JOINER)
    until(lambda: agent.num_arrived(1) == 3)
    assert plan_of([first, second, play(1)])[2] == JOINER


def test_the_one_that_should_look_is_gone(play, connect):
    waiting = [play(0), play(1)]
    until(lambda: connect().num_arrived(1) == 2)
    assert connect().arrive(1, 2, to_text(SURVIVOR)) == 3  # and never looks
    assert plan_of(waiting) == dict.fromkeys(range(3), SURVIVOR)


def test_an_arrival_that_was_not_counted_is_seen(play, connect):
    connect().withdraw(1, 2, to_text(SURVIVOR))  # the count is one too low from here on
    assert plan_of([play(0), play(1)]) == dict.fromkeys(range(3), SURVIVOR)
    assert connect().num_arrived(1) == 1


def test_all_look_at_once(play, connect):
    ghost = connect()
    for _ in range(8):
        ghost.arrive(1, 0, to_text(SURVIVOR))
    assert plan_of([play(rank, world_size=8) for rank in range(8)]) == dict.fromkeys(range(8), SURVIVOR)


def test_survivors_in_a_step_come_again_where_one_is_outside(play, connect):
    waiting = [play(0), play(1)]
    job_store = connect()
    until(lambda: job_store.num_arrived(1) == 2)
    worlds = WorldView(job_store, WorldPlan.initial(3))
    StopReports(job_store, worlds, worker_id=2, incarnation=0, policy=QuorumPolicy(), survivors=idle(job_store)).tell(
        1, committed=7, in_step=False, trainer=b""
    )
    for each in waiting:
        with pytest.raises(MustReenterLoop) as caught:
            each.result(DEADLINE_S)
        assert caught.value.number == 1
    assert job_store.num_arrived(1) == 0
    assert {each.incarnation for each in from_texts(job_store.arrivals(1, range(3))).values()} == {NO_STATE}
    outside = replace(SURVIVOR, in_step=False, voted_step=NO_STATE)
    assert plan_of([play(rank, outside) for rank in range(3)]) == dict.fromkeys(range(3), outside)


def test_no_plan_while_one_in_a_step_has_not_noticed_that_another_is_outside(play, connect):
    job_store = connect()
    job_store.arrive(1, 0, to_text(SURVIVOR))  # and looks late
    job_store.set("outside/1", b"1")
    outside = replace(SURVIVOR, in_step=False, voted_step=NO_STATE)
    waiting = [play(1, outside), play(2, outside, patience_s=0.1)]
    until(lambda: (0, 0) in job_store.new_kills())  # it may be stuck
    assert job_store.plan(1) is None
    assert plan_of([*waiting, play(0, outside)]) == dict.fromkeys(range(3), outside)


def test_a_joiner_does_not_mind_who_is_outside(play, connect):
    job_store = connect()
    job_store.next_incarnation(2)
    job_store.set("outside/1", b"1")
    outside = replace(SURVIVOR, in_step=False)
    assert plan_of([play(0, outside), play(1, outside), play(2, JOINER)])[2] == JOINER


def test_a_plan_that_names_what_a_process_was_ends_the_generation(play, connect):
    job_store = connect()
    job_store.propose(1, dict.fromkeys(range(3), to_text(replace(SURVIVOR, committed=5))))
    assert play(0).result(DEADLINE_S) is None
    assert job_store.ended(1).reporter == "rank 0"


def test_a_process_whose_place_was_taken_ends_alone(play, connect):
    agent = connect()
    waiting = play(2)
    until(lambda: agent.num_arrived(1) == 1)
    agent.next_incarnation(2)
    plan = plan_of([play(0), play(1), play(2, JOINER)])
    assert plan[2] == JOINER
    for late in (waiting, play(2)):
        with pytest.raises(RecoveryError, match="taken the place of rank 2"):
            late.result(DEADLINE_S)
    assert agent.ended(1) is None


def test_a_generation_that_ends_is_left(play, connect):
    waiting = [play(0), play(1)]
    until(lambda: connect().num_arrived(1) == 2)
    connect().end(1, FailureRecord(kind="request", cause="test"))
    assert [each.result(DEADLINE_S) for each in waiting] == [None, None]


def test_a_job_that_has_given_up_is_left(play, connect):
    waiting = [play(0), play(1)]
    job_store = connect()
    until(lambda: job_store.num_arrived(1) == 2)
    giver = FailureRecord(kind="exception", cause="it is hopeless", worker_id=2)
    job_store.record_exit(giver)
    job_store.set(GAVE_UP_KEY, giver.to_json().encode())
    for each in waiting:
        with pytest.raises(RecoveryError, match="it is hopeless"):
            each.result(DEADLINE_S)


def test_who_did_not_come_is_named(play, connect):
    connect().next_incarnation(2)
    connect().arrive(1, 2, to_text(SURVIVOR))  # one that has been replaced
    with pytest.raises(RecoveryTimeout, match=r"ranks \[1, 2\]"):
        play(0, timeout_s=0.2).result(DEADLINE_S)


def test_only_survivors_that_do_not_come_are_chased(play, connect):
    job_store = connect()
    policy = QuorumPolicy()
    worlds = WorldView(job_store, WorldPlan.initial(4))
    stopped = StopReports(job_store, worlds, worker_id=1, incarnation=0, policy=policy, survivors=idle(job_store))
    stopped.tell(1, committed=7, in_step=True, trainer=b"")
    job_store.next_incarnation(2)
    waiting = play(0, world_size=4, patience_s=0.1)
    wanted = []
    until(lambda: wanted.extend(job_store.new_kills()) or wanted)
    job_store.end(1, FailureRecord(kind="request", cause="test"))
    assert waiting.result(DEADLINE_S) is None
    assert set(wanted + job_store.new_kills()) == {(3, 0)}


def test_a_survivor_that_is_busy_outside_of_a_step_is_waited_for(play, connect):
    """Longer than for lost ones to be replaced, as hang detection grants it; then it is stuck like any other."""
    job_store = connect()
    heartbeat = Heartbeat(
        incarnation=0,
        generation=0,
        committed=7,
        activity="saving a checkpoint",
        in_step=False,
        is_loading=False,
        waits_for="",
        waited_s=0.0,
        sequence=1,
    )
    job_store.heartbeat(1, heartbeat.to_dict())
    began_s = time.monotonic()
    waiting = play(0, world_size=2, timeout_s=0.5, patience_s=0.2, outside_s=4.0)
    until(lambda: job_store.new_kills() == [(1, 0)])
    assert time.monotonic() - began_s >= 4.0
    with pytest.raises(RecoveryTimeout, match=r"ranks \[1\]"):
        waiting.result(DEADLINE_S)


def test_the_watcher_returns_when_there_is_a_plan(connect):
    watcher, job_store = PlanWatcher(connect), connect()
    watcher.wait(1, timeout_s=0.05)  # there is none
    threading.Timer(0.2, lambda: connect().propose(1, {})).start()
    began_s = time.monotonic()
    watcher.wait(1, timeout_s=DEADLINE_S)
    assert time.monotonic() - began_s < DEADLINE_S
    assert job_store.plan(1) == {}
    watcher.wait(1, timeout_s=DEADLINE_S)  # there is one, so this is no wait


def test_the_watcher_returns_after_a_generation_that_was_never_formed(connect):
    watcher = PlanWatcher(connect)
    watcher.wait(1, timeout_s=0.2)
    for number in (2, 3):
        watcher.wait(number, timeout_s=0.05)
        connect().propose(number, {})
        began_s = time.monotonic()
        watcher.wait(number, timeout_s=DEADLINE_S)
        assert time.monotonic() - began_s < DEADLINE_S


def test_equal_arrivals_are_told_once():
    texts = {rank: to_text(SURVIVOR) for rank in range(100)}
    store = dist.HashStore()
    assert JobStore(store).propose(1, texts) == texts
    assert len(store.get("plan/1")) < 2 * len(json.dumps(list(range(100))))
