"""Loops with random faults and delays end with the same bits: some schedules that once did not."""

import pytest
from session.random_faults import NUM_RANKS, run_loop, schedule
from session.test_loops_with_faults import assert_equal

pytestmark = pytest.mark.spawns


@pytest.mark.parametrize("number", [4, 26])
def test_a_schedule(number, tmp_path):
    chosen = schedule(number)
    wanted = run_loop(tmp_path / "wanted", chosen.loop)
    found = run_loop(tmp_path / "found", chosen.loop, chosen.faults)
    assert (wanted.code, found.code) == (0, 0), found.output[-6000:]
    assert_equal(wanted, found, NUM_RANKS)
