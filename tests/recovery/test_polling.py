"""How often processes ask: seldom enough that a store serves thousands, often enough that small jobs lose nothing."""

import pytest

from hyperpod_plugins.recovery.polling import poll_interval_s, scan_interval_s


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
