"""What a process remembers of its last iteration must not tell it from one that has just come."""

import pytest
import torch
import torch.distributed as dist
from device import DEVICE
from harness import run_ranks
from torch import nn

from hyperpod_plugins.comm import reset_traffic, traffic
from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize
from hyperpod_plugins.recovery.undo import end_iteration


def gathers_of_a_step(prepare, **options):
    """All-gathers of one training step, after `prepare(model, x)`."""
    if not dist.is_initialized():
        dist.init_process_group("hyperpod")
    config = ParallelConfig(hybrid_shard_degree=2, **options)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))
    parallelize(model, build_mesh(config.topology(2), DEVICE), config)
    x = torch.randn(2, 8)
    prepare(model, x)
    reset_traffic()
    model(x).sum().backward()
    return sum(calls for kind, calls in traffic()["shard"].calls.items() if "gather" in kind)


def evaluate(model, x):
    with torch.no_grad():
        model(x)


def evaluate_and_end(model, x):
    evaluate(model, x)
    end_iteration(model)


def count_gathers(options):
    return [gathers_of_a_step(each, **options) for each in (lambda *_: None, evaluate, evaluate_and_end)]


@pytest.mark.spawns
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=str)
def test_an_evaluation_leaves_no_trace(options):
    for fresh, after_evaluation, ended in run_ranks(count_gathers, options, world_size=2):
        assert after_evaluation != fresh  # or there is nothing to test
        assert ended == fresh
