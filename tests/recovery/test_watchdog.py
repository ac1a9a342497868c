"""Who hangs: tables of what a rank that waits knows of the others, and whom it suspects."""

import json
import sys
from dataclasses import fields, replace

import pytest
import torch

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.recovery.watchdog import (
    HangPolicy,
    HangSuspect,
    Heartbeat,
    HeartbeatAges,
    StepTimes,
    diagnose,
    furthest_behind,
    is_loading,
    look_every_s,
)

LIMIT_S = 40.0
POLICY = HangPolicy(floor_s=30.0, factor=10.0, early_s=120.0, outside_s=900.0)
COMPUTES = Heartbeat(
    incarnation=0,
    generation=3,
    committed=7,
    activity="computing step 7",
    in_step=True,
    is_loading=False,
    waits_for="",
    waited_s=0.0,
    sequence=70,
)
WAITS = replace(COMPUTES, waits_for="shard", waited_s=41.0)
WAITS_OUTSIDE = replace(WAITS, in_step=False)
IS_OUTSIDE = replace(COMPUTES, in_step=False, activity="between steps 6 and 7")
LOADS = replace(IS_OUTSIDE, is_loading=True)


def causes(own, other, silent_s=0.0, limit_s=LIMIT_S):
    """What rank 0 says of rank 1."""
    return [each.cause for each in diagnose({0: own, 1: other}, own, limit_s, POLICY, {0: 0.0, 1: silent_s})]


@pytest.mark.parametrize(
    ("own", "other", "silent_s", "cause"),
    [
        pytest.param(WAITS, COMPUTES, 0.0, "for 41 s; it is computing step 7", id="in a step, and elsewhere"),
        pytest.param(WAITS, LOADS, 0.0, "for 41 s; it is between steps 6 and 7", id="loading data"),
        pytest.param(
            replace(WAITS, waited_s=901.0), IS_OUTSIDE, 0.0, "for 901 s; it is between", id="outside too long"
        ),
        pytest.param(replace(WAITS_OUTSIDE, waited_s=901.0), COMPUTES, 0.0, "for 901 s", id="waiting outside too long"),
        pytest.param(WAITS, COMPUTES, 4.0, "for 41 s", id="a beat that is late"),
    ],
)
def test_a_rank_that_does_not_come_is_suspected(own, other, silent_s, cause):
    [told] = causes(own, other, silent_s)
    assert told.startswith(f"did not come to the shard collective {cause}")


@pytest.mark.parametrize("own", [WAITS, replace(WAITS_OUTSIDE, waited_s=901.0)], ids=["in a step", "outside"])
@pytest.mark.parametrize(
    "other",
    [COMPUTES, LOADS, IS_OUTSIDE, WAITS, replace(COMPUTES, generation=2)],
    ids=["computes", "loads", "is outside", "waits", "of another generation"],
)
def test_a_rank_that_is_silent_is_suspected_wherever_it_was(own, other):
    limit_s = LIMIT_S if own.in_step else POLICY.outside_s
    assert causes(own, other, limit_s + 1.0) == [
        f"has not been heard of for {limit_s + 1.0:.0f} s; it was {other.activity}"
    ]
    assert causes(own, other, limit_s) == []


@pytest.mark.parametrize(
    ("own", "other", "silent_s"),
    [
        pytest.param(COMPUTES, COMPUTES, 0.0, id="no wait"),
        pytest.param(replace(WAITS, waited_s=LIMIT_S), COMPUTES, 0.0, id="a short wait"),
        pytest.param(WAITS_OUTSIDE, COMPUTES, 0.0, id="a short wait outside of a step"),
        pytest.param(WAITS_OUTSIDE, COMPUTES, 500.0, id="a short wait outside for one that is silent"),
        pytest.param(WAITS, WAITS, 0.0, id="it waits too"),
        pytest.param(WAITS, replace(COMPUTES, generation=2), 0.0, id="it is on its way to this generation"),
        pytest.param(WAITS, IS_OUTSIDE, 0.0, id="it is in a callback"),
        pytest.param(replace(WAITS, waited_s=900.0), IS_OUTSIDE, 0.0, id="it is in a long callback"),
        pytest.param(WAITS, COMPUTES, 6.0, id="where it is is not known"),
    ],
)
def test_nobody_is_suspected(own, other, silent_s):
    assert causes(own, other, silent_s) == []


def at(collective, group="shard"):
    return replace(WAITS, waits_for=group, collective=collective)


@pytest.mark.parametrize(
    ("others", "suspected"),
    [
        pytest.param([at(8), at(9)], [1], id="one has not completed what this rank has"),
        pytest.param([at(8), at(7)], [2], id="two have not: the other may wait for the one in the older collective"),
        pytest.param([at(8), at(8)], [1, 2], id="two in the oldest one"),
        pytest.param([at(9), at(12)], [], id="nobody is behind"),
        pytest.param([at(8), COMPUTES], [2], id="the one behind may wait for the one that computes"),
        pytest.param([at(8), IS_OUTSIDE], [], id="or for one that has leave to be late"),
        pytest.param([at(3, "replicate"), at(9)], [], id="another group counts its own"),
        pytest.param([at(0), at(9)], [], id="a receive has no number"),
        pytest.param([replace(at(8), generation=2), at(9)], [], id="of another generation"),
    ],
)
def test_of_ranks_that_all_wait_those_in_the_oldest_collective_are_suspected(others, suspected):
    heartbeats = dict(enumerate([at(9), *others]))
    silent_s = dict.fromkeys(heartbeats, 0.0)
    assert [each.worker_id for each in diagnose(heartbeats, at(9), LIMIT_S, POLICY, silent_s)] == suspected
    assert furthest_behind(heartbeats, at(0), {}, LIMIT_S) == frozenset()  # nothing to compare with


def test_nobody_counts_as_behind_while_a_rank_is_silent():
    """It was stopped in a collective of another group, and the one behind waits for it."""
    heartbeats = {0: at(9), 1: at(8), 2: at(3, "world")}
    assert [each.worker_id for each in diagnose(heartbeats, at(9), LIMIT_S, POLICY, {2: 0.0})] == [1]
    assert not diagnose(heartbeats, at(9), LIMIT_S, POLICY, {2: 21.0})
    assert [each.worker_id for each in diagnose(heartbeats, at(9), LIMIT_S, POLICY, {2: 41.0})] == [2]


def test_a_short_limit_leaves_time_for_some_beats():
    own = replace(WAITS, waited_s=3.0)
    assert causes(own, COMPUTES, 3.0, limit_s=2.0) == [
        "did not come to the shard collective for 3 s; it is computing step 7"
    ]
    assert causes(own, WAITS, 5.0, limit_s=2.0) == []
    assert causes(own, WAITS, 5.5, limit_s=2.0) != []


def test_all_that_hang_are_named_with_their_incarnations():
    heartbeats = {5: replace(COMPUTES, incarnation=2), 3: WAITS, 1: WAITS, 0: WAITS}
    assert diagnose(heartbeats, WAITS, LIMIT_S, POLICY, {5: 0.0, 3: 50.0, 1: 0.5, 0: 0.5}) == [
        HangSuspect(worker_id=3, incarnation=0, cause="has not been heard of for 50 s; it was computing step 7"),
        HangSuspect(
            worker_id=5, incarnation=2, cause="did not come to the shard collective for 41 s; it is computing step 7"
        ),
    ]


def test_silence_is_measured_by_the_clock_of_the_one_that_reads():
    ages = HeartbeatAges()
    assert ages.update({0: WAITS, 1: WAITS}, 1000.0) == {0: 0.0, 1: 0.0}  # however old they are
    later = replace(WAITS, sequence=71)
    assert ages.update({0: later, 1: WAITS}, 1030.0) == {0: 0.0, 1: 30.0}
    assert ages.update({0: replace(later, waited_s=9.0), 1: replace(WAITS, incarnation=1)}, 1040.0) == {0: 10.0, 1: 0.0}
    assert ages.update({1: replace(WAITS, incarnation=1), 2: WAITS}, 1041.0) == {1: 1.0, 2: 0.0}
    assert ages.update({0: later}, 1050.0) == {0: 20.0}  # also if it was not read in between


@pytest.mark.parametrize(
    ("limit_s", "world_size", "between_s"), [(3.0, 4, 1.0), (30.0, 4, 3.75), (900.0, 4, 112.5), (30.0, 4096, 20.48)]
)
def test_some_looks_come_before_the_limit(limit_s, world_size, between_s):
    assert look_every_s(limit_s, world_size) == between_s < limit_s


@pytest.mark.parametrize(
    ("durations_s", "limit_s"),
    [
        pytest.param([], 120.0, id="before the first step"),
        pytest.param([1.0] * 3, 120.0, id="the first steps warm up"),
        pytest.param([60.0] * 3 + [5.0], 50.0, id="those do not count"),
        pytest.param([5.0] * 4, 50.0, id="a multiple of a step"),
        pytest.param([1.0] * 4, 30.0, id="short steps"),
        pytest.param([5.0] * 9 + [500.0], 50.0, id="one long step"),
        pytest.param([500.0] * 9 + [5.0] * 20, 50.0, id="what was long ago"),
    ],
)
def test_the_limit_follows_the_pace(durations_s, limit_s):
    times, now_s = StepTimes(num_steps=20, num_before=3), 100.0
    times.record_commit(now_s)
    for duration_s in durations_s:
        now_s += duration_s
        times.record_commit(now_s)
    assert times.limit_s(POLICY) == limit_s


def test_the_early_limit_is_not_below_the_floor():
    assert StepTimes().limit_s(replace(POLICY, floor_s=200.0)) == 200.0


@pytest.mark.parametrize("name", [each.name for each in fields(HangPolicy)])
@pytest.mark.parametrize("value", [0.0, -1.0])
def test_impossible_limits_are_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        HangPolicy(**{name: value})


def test_a_heartbeat_survives_the_job_store():
    assert Heartbeat.from_dict(json.loads(json.dumps(WAITS.to_dict()))) == WAITS


class WhereItIsRead(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return is_loading(sys._getframe())


def test_a_thread_in_a_data_loader_loads():
    dataset = WhereItIsRead()
    assert [bool(each) for each in torch.utils.data.DataLoader(dataset)] == [True, True]
    assert not dataset[0]
    assert not is_loading(None)
