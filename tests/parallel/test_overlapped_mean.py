"""Gradients averaged over replicas while the backward goes on: the bits of FSDP2, which waits for each unit."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from device import DEVICE
from torch import nn

WIDTH, NUM_STEPS = 8, 4
KINDS = {  # what a step does, and how many all-reduces of its three units are waited for later in four steps
    "plain": 12,
    "penalty before": None,  # its gradients come at any time
    "two backwards": 12,  # those of the second are added at once
    "accumulation": 0,
    "hook": 0,
    "interrupted": None,
    "unused": 12,
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, skips_head=False, is_interrupted=False):
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if is_interrupted and layer is self.layers[0]:
                x.register_hook(interrupt)  # when the second one has been reduced
        return x if skips_head else self.head(x)


class Interrupted(Exception):
    pass


def interrupt(gradient):
    raise Interrupted


def backward(model, kind, step):
    from hyperpod_plugins.parallel.hsdp import without_replica_sync

    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()), device=DEVICE)
    penalty = 0.0
    if kind == "penalty before":
        penalty = sum((each.to_local() ** 2).sum() for each in model.parameters())
    if kind == "accumulation":
        with without_replica_sync(model):
            model(-x).square().mean().backward()
    if kind == "two backwards":
        model(-x).square().mean().backward()
    if kind == "interrupted" and step % 2:
        with contextlib.suppress(Interrupted):
            model(x, is_interrupted=True).square().mean().backward()
        model.zero_grad()
        model.reset_iter_state()
    (model(x, skips_head=kind == "unused").square().mean() + penalty).backward()


def gradients_of(is_overlapped):
    from hyperpod_plugins.parallel import ParallelConfig, build_mesh, hsdp, overlapped_mean, parallelize

    if not dist.is_initialized():
        dist.init_process_group("hyperpod")
    later, told = overlapped_mean._PendingMeans.add, {}
    if not is_overlapped:
        hsdp.overlap_means = lambda units: None
    for degree in (1, 2):
        for kind in KINDS:
            counted = [0]

            def add(self, works, gradients, counted=counted):
                counted[0] += 1
                later(self, works, gradients)

            overlapped_mean._PendingMeans.add = add
            config = ParallelConfig(hybrid_shard_degree=degree)
            model = parallelize(Model(), build_mesh(config.topology(dist.get_world_size()), DEVICE), config)
            if kind == "hook":
                for each in model.parameters():
                    each.register_post_accumulate_grad_hook(lambda each: each.grad.mul_(2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            found = []
            for step in range(NUM_STEPS):
                backward(model, kind, step)
                found += [None if each.grad is None else each.grad.to_local().clone() for each in model.parameters()]
                optimizer.step()
                optimizer.zero_grad()
            told[degree, kind] = counted[0], found
    return told


@pytest.mark.spawns
def test_gradients_have_the_bits_of_fsdp2(run_ranks):
    overlapped, waiting = (run_ranks(gradients_of, each, world_size=4) for each in (True, False))
    for rank, (one, other) in enumerate(zip(overlapped, waiting, strict=True)):
        assert one.keys() == other.keys()
        for (degree, kind), (number, found) in one.items():
            told, wanted = other[degree, kind]
            assert told == 0
            if KINDS[kind] is not None:
                assert number == KINDS[kind], (degree, kind, number)
            for index, (gradient, expected) in enumerate(zip(found, wanted, strict=True)):
                is_same = (gradient is None) == (expected is None)
                is_same &= expected is None or torch.equal(gradient, expected)
                assert is_same, (rank, degree, kind, index, gradient, expected)
