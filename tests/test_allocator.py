"""The allocator watch speaks of new flushes only."""

import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hyperpod_plugins.events import AllocatorWatch
from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize


@pytest.fixture
def alone():
    dist.init_process_group("hyperpod", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_only_new_retries_are_news():
    watch = AllocatorWatch(torch.device("cuda"), every_num_steps=10)
    assert watch.warning_for(0) == ""
    assert "3 times in the last 10 steps" in watch.warning_for(3)
    assert watch.warning_for(3) == ""
    assert "hybrid_shard_degree" in watch.warning_for(4)


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_model_that_is_parallelized_is_watched(alone, monkeypatch, is_asked):
    """Whatever calls `parallelize`: SMP's `tsm.init`, a session, Accelerate."""
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_alloc_retries": 2})
    watch = lambda _: AllocatorWatch(torch.device("cuda"))  # noqa: E731
    monkeypatch.setattr(sys.modules["hyperpod_plugins.parallel.parallelize"], "AllocatorWatch", watch)
    config = ParallelConfig(fsdp_cache_flush_warnings=is_asked)
    model = parallelize(nn.Linear(4, 4), build_mesh(config.topology(1), "cpu"), config)
    parallelize(model, build_mesh(config.topology(1), "cpu"), config)  # changes nothing
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(50):
            model(torch.ones(1, 4))
        with torch.no_grad():
            model(torch.ones(1, 4))
    assert [str(each.message).count("flushed its cache 2 times") for each in caught] == [1] * is_asked


def test_other_devices_are_not_asked():
    watch = AllocatorWatch(torch.device("cpu"), every_num_steps=1)
    watch.after_step()
