"""All-reduces of gradients that run while backward goes on give the bits of those that are waited for."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn

from hyperpod_plugins.comm import ResilientProcessGroup
from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize
from hyperpod_plugins.parallel.hsdp import without_replica_sync
from hyperpod_plugins.parallel.overlapped_reduction import OverlappedReduction
from hyperpod_plugins.parallel.unit_watch import clear_trace

STEPS = 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Chain(nn.Sequential):
    order = (0, 1, 2, 3, 4)

    def forward(self, x):
        for index in self.order:
            x = self[index](x)
        return x


def made(config):
    torch.manual_seed(0)
    model = Chain(nn.Linear(8, 24), Block(), Block(), Block(), nn.Linear(24, 8))
    return parallelize(model, build_mesh(config.topology(dist.get_world_size()), "cpu"), config)


@contextmanager
def as_fsdp2_does():
    """Every all-reduce is waited for."""
    replicas, OverlappedReduction._replicas = OverlappedReduction._replicas, lambda _: None
    try:
        yield
    finally:
        OverlappedReduction._replicas = replicas


@contextmanager
def slowly(put_off):
    """The result of an all-reduce whose wait is put off is there only when somebody has waited."""
    allreduce = ResilientProcessGroup.allreduce

    class Late(dist.Work):
        def __init__(self, work, results, tensors):
            super().__init__()
            self.work, self.results, self.tensors = work, results, tensors

        def wait(self, timeout=None):
            put_off.append(1)
            self.work.wait()
            for tensor, result in zip(self.tensors, self.results, strict=True):
                tensor.copy_(result)
            return True

    def late(group, tensors, *args):
        if group._deferred is None:
            return allreduce(group, tensors, *args)
        results, (_, works) = [each.clone() for each in tensors], group._deferred
        found = allreduce(group, results, *args)
        works[-1] = Late(works[-1], results, tensors)
        return found

    ResilientProcessGroup.allreduce = late
    try:
        yield
    finally:
        ResilientProcessGroup.allreduce = allreduce


def batch(step, part=0):
    seed = 100 * dist.get_rank() + 10 * step + part
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def plain_step(model, step):
    model(batch(step)).square().mean().backward()


def step_of_two_backwards(model, step):
    for part in range(2):
        model(batch(step, part)).square().mean().backward()


def step_of_two_micro_steps(model, step):
    with without_replica_sync(model):
        model(batch(step, 0)).square().mean().backward()
    model(batch(step, 1)).square().mean().backward()


def step_after_a_failed_one(model, step):
    """A backward that ends with an exception after the last unit was reduced, on all ranks."""

    def fail(_):
        raise ValueError("a test ends this backward")

    hook = model[1].up.register_full_backward_hook(lambda *_: fail(None))
    try:
        model(batch(step, 1)).square().mean().backward()
    except ValueError:
        model.reset_iter_state()
        model.zero_grad()
    hook.remove()
    model(batch(step)).square().mean().backward()


def step_with_hooks(model, step):
    """Hooks of the shards see reduced gradients, also before backward ends."""
    if step == 0:
        for each in model.parameters():
            each.register_post_accumulate_grad_hook(lambda shard: shard.grad.mul_(2))
    plain_step(model, step)


def step_that_uses_a_unit_twice(model, step):
    model.order = (0, 1, 2, 2, 3, 2, 4)
    plain_step(model, step)


def step_that_scales_within_backward(model, step):
    """A hook of a module reads and writes gradients that were reduced before in the same backward."""

    def scale(*_):
        for each in model[3].parameters():
            each.grad.mul_(0.5)
        norms.append(sum(each.grad.to_local().square().sum() for each in model[3].parameters()))

    norms, hook = [], model[1].register_full_backward_hook(scale)
    plain_step(model, step)
    hook.remove()
    with torch.no_grad():
        model[3].down.weight.grad.add_(norms[0])


def step_that_reads_memory_within_backward(model, step):
    def read(*_):
        found.append(float(np.abs(model[3].down.weight.grad.to_local().numpy()).sum()))
        kept.append(model[3].up.weight.grad.to_local())

    found, kept = [], []
    hook = model[1].register_full_backward_hook(read)
    plain_step(model, step)
    hook.remove()
    with torch.no_grad():
        model[3].down.weight.grad.add_(found[0])
        model[3].up.weight.grad.add_(float(kept[0].numpy().sum()))


def step_after_a_forgotten_one(model, step):
    """As where a step is undone: reductions are dropped, with their gradients."""

    def fail(*_):
        raise ValueError("a test ends this backward")

    hook = model[1].up.register_full_backward_hook(fail)
    with pytest.raises(ValueError, match="a test ends"):
        plain_step(model, step)
    hook.remove()
    model.reset_iter_state()
    clear_trace(model)
    for each in model.parameters():
        each.grad = None if each.grad is None else each.grad.zero_()
    plain_step(model, step)


def step_with_an_optimizer_within_backward(model, step):
    def update(*_):
        torch.optim.SGD(model[3].parameters(), lr=0.1).step()

    hook = model[1].register_full_backward_hook(update)
    plain_step(model, step)
    hook.remove()


def step_that_freezes_between_micro_steps(model, step):
    plain_step(model, step)
    model.set_requires_gradient_sync(False)
    plain_step(model, step)
    model.set_requires_gradient_sync(True)
    model[2].up.requires_grad_(False)
    plain_step(model, step)
    model[2].up.requires_grad_(True)


SCENARIOS = {
    "plain": (plain_step, {}, True),
    "bf16-mixed": (plain_step, {"precision": "bf16-mixed"}, True),
    "accumulates in a backward": (step_of_two_backwards, {}, True),
    "micro-steps": (step_of_two_micro_steps, {}, True),
    "a failed backward": (step_after_a_failed_one, {}, True),
    "hooks": (step_with_hooks, {}, False),
    "a unit used twice": (step_that_uses_a_unit_twice, {}, True),
    "hooks within backward": (step_that_scales_within_backward, {}, True),
    "memory read within backward": (step_that_reads_memory_within_backward, {}, True),
    "a forgotten backward": (step_after_a_forgotten_one, {}, True),
    "an optimizer within backward": (step_with_an_optimizer_within_backward, {}, True),
    "frozen between micro-steps": (step_that_freezes_between_micro_steps, {}, True),
    "two shards": (plain_step, {"hybrid_shard_degree": 2}, True),
}


def trained(scenario):
    run_step, options, _ = SCENARIOS[scenario]
    model, put_off = made(ParallelConfig(block_classes=("Block",), **({"hybrid_shard_degree": 1} | options))), []
    with slowly(put_off):
        for step in range(STEPS):
            run_step(model, step)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            optimizer.step()
            optimizer.zero_grad()
    return [each.detach().to_local().clone() for each in model.parameters()], sum(put_off)


def compare():
    dist.init_process_group("hyperpod")
    found = {}
    for scenario in SCENARIOS:
        with as_fsdp2_does():
            wanted, none = trained(scenario)
        got, number = trained(scenario)
        same = len(got) == len(wanted) and all(map(torch.equal, got, wanted))
        found[scenario] = same, none, number > 0
    return found


@pytest.mark.spawns
def test_the_bits_are_those_of_fsdp2():
    for found in run_ranks(compare, world_size=4, timeout_s=150):
        assert found == {name: (True, 0, puts_off) for name, (_, _, puts_off) in SCENARIOS.items()}
