"""How often processes ask: seldom enough that a store serves thousands, often enough that small jobs lose nothing."""

import pytest

from hyperpod_plugins.elastic.store.job_store import poll_interval_s, poll_until, scan_interval_s
from hyperpod_plugins.recovery.stop_reports import StopAction, StopView, next_stop_action


@pytest.mark.parametrize("world_size", [1, 16, 256, 4096, 16384])
@pytest.mark.parametrize("waited_s", [0.0, 2.0, 300.0])
def test_all_processes_together_ask_a_few_thousand_times_a_second(world_size, waited_s):
    assert sum(1 / poll_interval_s(rank, world_size, waited_s) for rank in range(world_size)) < 4000


@pytest.mark.parametrize("world_size", [1, 4, 16])
def test_a_small_job_loses_little(world_size):
    for rank in range(world_size):
        assert poll_interval_s(rank, world_size, 0.0) < 0.02
        assert poll_interval_s(rank, world_size, 2.0) < 0.2
        assert poll_interval_s(rank, world_size, 1000.0) < 2.0


@pytest.mark.parametrize("waiting", [[0], [3], range(4), range(0, 64, 8), range(100, 4096)])
def test_a_few_of_those_that_wait_look_each_second(waiting):
    turns_s = [scan_interval_s(rank, len(waiting)) for rank in waiting]
    assert min(turns_s) <= len(waiting)
    assert 0 < sum(1 / each for each in turns_s) < 20
    assert scan_interval_s(0, 0) > 0


@pytest.mark.parametrize(("limit_s", "last"), [(60.0, 3), (0.0, 1), (-1.0, 1)])
def test_a_poll_ends_with_the_first_view_that_decides_or_at_its_deadline(limit_s, last):
    views = iter(range(1, 10))
    assert poll_until(lambda: next(views), lambda view: view == 3, limit_s=limit_s, every_s=0.0) == last


def test_a_look_may_extend_the_limit():
    views, limit_s = iter(range(1, 10)), [-1.0]

    def look():
        limit_s[0] = 60.0
        return next(views)

    assert poll_until(look, lambda view: view == 3, limit_s=lambda: limit_s[0], every_s=lambda waited_s: 0.0) == 3


def test_a_poll_that_is_not_decided_returns_the_last_view():
    assert poll_until(lambda: "nothing yet", lambda view: False, limit_s=0.02, every_s=0.005) == "nothing yet"


def view(num_reports=0, lost=(), generation=2):
    return StopView(generation=generation, world_size=4, num_reports=num_reports, lost=frozenset(lost))


@pytest.mark.parametrize(
    ("now", "seen", "is_due", "look"),
    [
        (view(), None, False, StopAction.WAIT),
        (view(), None, True, StopAction.READ),
        (view(num_reports=3), None, False, StopAction.WAIT),
        (view(num_reports=4), None, False, StopAction.READ),
        (view(num_reports=3, lost=[1]), None, False, StopAction.READ),
        (view(num_reports=3, lost=[1]), view(num_reports=3), False, StopAction.READ),
        (view(num_reports=3, lost=[1]), view(num_reports=3, lost=[1]), False, StopAction.WAIT),  # read already
        (view(num_reports=3, lost=[1]), view(num_reports=3, lost=[1], generation=1), False, StopAction.READ),
        (view(num_reports=3, lost=[1]), view(num_reports=3, lost=[1]), True, StopAction.READ),
        (view(lost=range(3)), None, False, StopAction.WAIT),
        (view(lost=range(4)), None, False, StopAction.ALL_LOST),
        (view(num_reports=4, lost=range(4)), None, True, StopAction.ALL_LOST),
    ],
)
def test_reports_are_read_when_they_may_be_complete(now, seen, is_due, look):
    assert next_stop_action(now, seen, is_due=is_due) is look
