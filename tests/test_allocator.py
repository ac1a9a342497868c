"""The allocator watch speaks of new flushes only."""

import torch

from hyperpod_plugins.events import AllocatorWatch


def test_only_new_retries_are_news():
    watch = AllocatorWatch(torch.device("cuda"), every_num_steps=10)
    assert watch.warning_for(0) == ""
    assert "3 times in the last 10 steps" in watch.warning_for(3)
    assert watch.warning_for(3) == ""
    assert "hybrid_shard_degree" in watch.warning_for(4)


def test_other_devices_are_not_asked():
    watch = AllocatorWatch(torch.device("cpu"), every_num_steps=1)
    watch.after_step()
