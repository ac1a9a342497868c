"""From commits to what a change of size cost."""

import pytest

from benchmarks.resize import change_of, progress_of, step_time
from benchmarks.resize_jobs import reshard


def commit(at_s, step, world):
    return {"at_s": at_s, "step": step, "world": world}


BEFORE = [commit(float(step), step, 1) for step in range(10)]


def test_a_live_change_pauses_for_less_than_two_steps():
    commits = [*BEFORE, *(commit(step + 0.5, step, 2) for step in range(10, 15))]
    found = change_of(commits, began_s=5.2, size=2, step_s=1.0)
    assert found.pause_s == pytest.approx(0.5)
    assert found.until_s == pytest.approx(10.5 - 5.2)
    assert found.steps_again == 0


def test_steps_that_are_computed_again_are_in_the_pause():
    commits = [*BEFORE, *(commit(step + 8.0, step, 2) for step in range(6, 15))]
    found = change_of(commits, began_s=9.5, size=2, step_s=1.0)
    assert found.pause_s == pytest.approx(18.0 - 9.0 - 1.0)
    assert found.until_s == pytest.approx(14.0 - 9.5)
    assert found.steps_again == 4
    assert [step for _, step, _ in progress_of(commits)] == list(range(15))


def test_the_usual_step_leaves_out_the_first_few():
    assert step_time([commit(0.0, 0, 1), commit(9.0, 1, 1), commit(9.5, 2, 1), *BEFORE[3:]], 0.0, 20.0) == 1.0


def test_a_reshard_begins_with_the_request():
    commits = [{**commit(float(step), step, 2), "shards": 1} for step in range(10)]
    commits += [{**commit(12.5 + step, step, 2), "shards": 2} for step in range(10, 12)]
    assert reshard.has_resharded(commits)
    assert not reshard.has_resharded(commits[:10])
    found = reshard.reshard_of(commits, asked_s=8.8, step_s=1.0)
    assert (found.pause_s, found.steps_again) == (pytest.approx(22.5 - 9.0 - 1.0), 0)
    assert found.until_s == pytest.approx(22.5 - 8.8)
