"""How often snapshots are taken: pure."""

import pytest

from hyperpod_plugins.recovery.snapshot import MAX_COST_OF_RARE, SnapshotPace, agreed_interval, wanted_interval


@pytest.mark.parametrize(
    ("cost_s", "exchange_s", "step_s", "expected"),
    [
        (0.0002, 0.003, 0.1, 1),
        (0.0003, 0.003, 0.1, 2),
        (0.005, 0.01, 0.1, 20),
        (1.0, 20.0, 1.0, 400),
        (0.0, 20.0, 1.0, 20),  # nobody waits for an exchange
    ],
)
def test_the_interval_keeps_the_cost_small(cost_s, exchange_s, step_s, expected):
    assert wanted_interval(cost_s, exchange_s, step_s, 0.0025) == expected


@pytest.mark.parametrize(
    ("now", "wanted", "is_first", "expected"),
    [
        (1, [0, 0], True, 1),  # nobody knows yet
        (1, [0, 7], True, 7),
        (1, [3, 7], True, 7),  # the slowest rank decides
        (7, [9, 5], False, 7),  # about the same
        (7, [9, 14], False, 14),
        (8, [4, 3], False, 4),
    ],
)
def test_all_ranks_agree(now, wanted, is_first, expected):
    assert agreed_interval(now, wanted, is_first=is_first) == expected


def measured(pace):
    for step in range(30):
        pace.begin_step(step, 0.1 * step)
        if pace.is_due(step):
            pace.record_copy(0.0006)
            pace.record_exchange(0.01, 0.0001)
            pace.agree_on([pace.wanted_steps()])
            pace.adopt()
    return pace


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([3, 3], 3),
        ([3, 0], 3),  # one is new
        ([3, 0, 7], 1),  # some had heard of the next interval, and some not
        ([0, 0], 1),  # it was not measured yet
    ],
)
def test_after_a_fault_it_goes_on_where_all_know_the_same(told, expected):
    paces = [measured(SnapshotPace(1, is_measured=True)), SnapshotPace(1, is_measured=True)]
    assert [pace.adopted_steps for pace in paces] == [3, 0]
    for pace in paces:
        pace.reset(told)
        assert pace.every_steps == expected
        assert pace.adopted_steps == (0 if expected == 1 else expected)
    assert [step for step in range(9) if measured(paces[0]).is_due(step)] == [0, 3, 6]


def test_no_commit_waits_for_a_snapshot_of_every_step_before_its_cost_is_known():
    pace = SnapshotPace(1, is_measured=True)
    assert pace.is_due(1)
    assert not pace.is_every_step
    pace.reset([1, 0])
    assert pace.is_every_step
    assert SnapshotPace(1, is_measured=False).is_every_step
    assert not measured(SnapshotPace(1, is_measured=True)).is_every_step


@pytest.mark.parametrize(("options", "expected"), [({}, 73), ({"max_cost": MAX_COST_OF_RARE}, 182)])
def test_a_step_is_as_long_as_without_the_snapshots_of_the_first_steps(options, expected):
    """While each step has one, a step of 0.11 s takes 0.13 s: of these, 0.01 s for the copy and 0.01 s beside it."""
    pace = SnapshotPace(1, is_measured=True, **options)
    for step in range(10):
        pace.begin_step(step, 0.13 * step)
        pace.record_copy(0.01)
        pace.record_exchange(0.02, 0.01)
    assert pace.wanted_steps() == expected


def test_a_given_interval_stays():
    assert measured(SnapshotPace(5, is_measured=False)).every_steps == 5
    assert not any(SnapshotPace(0, is_measured=False).is_due(step) for step in range(5))
