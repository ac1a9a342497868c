"""Gradients that are averaged in buckets while backward goes on are those of FSDP2 unit by unit, and of one process."""

import gc
import weakref
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyperpod_plugins.comm import ResilientProcessGroup
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.parallel import ParallelConfig, build_mesh, hsdp, parallelize, replica_buckets
from hyperpod_plugins.parallel.hsdp import fsdp_units, without_replica_sync
from hyperpod_plugins.parallel.unit_watch import clear_trace, reconcile_gradients

STEPS = 3
SMALL = 4096
"""Bytes of a bucket: a block is larger, so that there are several."""


class Block(nn.Module):
    recomputes = None

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24, bias=False)

    def forward(self, x):
        if self.recomputes is None:
            return x + self.computed(x)
        return x + checkpoint(self.computed, x, use_reentrant=self.recomputes)

    def computed(self, x):
        return self.down(torch.relu(self.up(x)))


class Chain(nn.Module):
    order = (0, 1, 2)

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(8, 24), nn.Linear(24, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.embed(x)
        for index in self.order:
            x = self.blocks[index](x)
        return self.head(x)


class Reading(Chain):
    """A chain whose source runs all blocks, so that each is a unit otherwise."""

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@contextmanager
def unit_by_unit():
    takes, hsdp.takes_buckets = hsdp.takes_buckets, lambda *_: False
    try:
        yield
    finally:
        hsdp.takes_buckets = takes


def made(kind=Chain, **options):
    torch.manual_seed(0)
    config = ParallelConfig(hybrid_shard_degree=1, **options)
    return parallelize(kind(), build_mesh(config.topology(dist.get_world_size()), "cpu"), config)


def batch(step, part=0, rank=None):
    seed = 100 * (dist.get_rank() if rank is None else rank) + 10 * step + part
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def loss_of(model, *where, **options):
    x = batch(*where, **options)
    return model(x.to(next(model.parameters()).dtype)).square().mean()


def plain_step(model, step):
    loss_of(model, step).backward()


def step_of_two_backwards(model, step):
    for part in range(2):
        loss_of(model, step, part).backward()


def step_of_two_forwards(model, step):
    (loss_of(model, step, 0) + loss_of(model, step, 1)).backward()


def step_that_keeps_its_graph(model, step):
    loss = loss_of(model, step)
    loss.backward(retain_graph=True)
    loss.backward()


def step_of_three_micro_steps(model, step):
    with without_replica_sync(model):
        for part in range(2):
            loss_of(model, step, part).backward()
    loss_of(model, step, 2).backward()


def step_without_sync_and_with_a_frozen_layer(model, step):
    plain_step(model, step)
    model.set_requires_gradient_sync(False)
    loss_of(model, step, 1).backward()
    model.set_requires_gradient_sync(True)
    model.blocks[1].up.requires_grad_(False)
    loss_of(model, step, 2).backward()
    model.blocks[1].up.requires_grad_(True)


def step_that_freezes_after_its_forward(model, step):
    loss = loss_of(model, step)
    model.blocks[1].up.requires_grad_(step != 1)
    loss.backward()
    model.blocks[1].up.requires_grad_(True)


def step_that_freezes_all_after_its_forward(model, step):
    loss = loss_of(model, step)
    model.requires_grad_(step != 1)
    loss.backward()
    model.requires_grad_(True)


def step_with_a_part_frozen(model, step):
    model.blocks[step % 3].requires_grad_(False)
    plain_step(model, step)
    model.blocks[step % 3].requires_grad_(True)


def step_with_an_input_that_needs_a_gradient(model, step):
    x = batch(step).requires_grad_()
    (model(x).square().mean() + model(2 * x).square().mean()).backward()
    with torch.no_grad():
        model.head.weight.grad.add_(x.grad.norm())


def step_after_a_failed_one(model, step, *, forgets=False):
    def fail(*_):
        raise ValueError("a test ends this backward")

    hook = model.blocks[0].up.register_full_backward_hook(fail)
    with pytest.raises(ValueError, match="a test ends"):
        loss_of(model, step, 1).backward()
    hook.remove()
    model.reset_iter_state()
    if forgets:
        clear_trace(model)
    for each in hsdp.fsdp_parameters(model):
        each._unsharded_param.grad = None
    model.zero_grad()
    plain_step(model, step)


def step_after_a_forgotten_one(model, step):
    step_after_a_failed_one(model, step, forgets=True)


def step_with_hooks(model, step):
    if step == 0:
        for each in model.parameters():
            each.register_post_accumulate_grad_hook(lambda shard: shard.grad.mul_(2))
    plain_step(model, step)


def step_with_checkpoints(model, step, *, reentrant=False):
    for each in model.blocks:
        each.recomputes = reentrant
    plain_step(model, step)


def step_with_reentrant_checkpoints(model, step):
    """Each block has a backward of its own, and one of them two."""
    model.order = (0, 1, 2, 1)
    step_with_checkpoints(model, step, reentrant=True)


def step_that_uses_a_block_twice(model, step):
    model.order = (0, 2, 2)
    plain_step(model, step)


def step_with_a_divisor(model, step):
    model.set_gradient_divide_factor(3.0)
    plain_step(model, step)


def step_with_an_evaluation_between(model, step):
    loss = loss_of(model, step)
    with torch.no_grad():
        loss_of(model, step, 1)
    loss.backward()


SCENARIOS = {
    "plain": (plain_step, {}),
    "bfloat16": (plain_step, {"precision": "bf16-true"}),
    "recomputed": (plain_step, {"activation_checkpointing": "full", "kind": Reading}),
    "two backwards": (step_of_two_backwards, {}),
    "two forwards": (step_of_two_forwards, {}),
    "a graph used twice": (step_that_keeps_its_graph, {}),
    "micro-steps": (step_of_three_micro_steps, {}),
    "without sync": (step_without_sync_and_with_a_frozen_layer, {}),
    "frozen after the forward": (step_that_freezes_after_its_forward, {}),
    "all frozen after the forward": (step_that_freezes_all_after_its_forward, {}),
    "a part frozen": (step_with_a_part_frozen, {}),
    "gradient of the input": (step_with_an_input_that_needs_a_gradient, {}),
    "a failed backward": (step_after_a_failed_one, {}),
    "a forgotten backward": (step_after_a_forgotten_one, {}),
    "hooks": (step_with_hooks, {}),
    "checkpoints": (step_with_checkpoints, {}),
    "reentrant checkpoints": (step_with_reentrant_checkpoints, {}),
    "a block used twice": (step_that_uses_a_block_twice, {}),
    "a divisor": (step_with_a_divisor, {}),
    "an evaluation between": (step_with_an_evaluation_between, {}),
}


def trained(name):
    run_step, options = SCENARIOS[name]
    model = made(**options)
    for step in range(STEPS):
        run_step(model, step)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach().to_local().clone() for each in model.parameters()]


def compare():
    dist.init_process_group("hyperpod")
    replica_buckets.BUCKET_BYTES = SMALL
    found = {}
    for name in SCENARIOS:
        with unit_by_unit():
            wanted = trained(name)
        got = trained(name)
        differs = max(float((a - b).abs().max()) for a, b in zip(got, wanted, strict=True))
        found[name] = differs
    return found


@pytest.mark.spawns
def test_the_bits_of_two_replicas_are_those_of_fsdp2():
    for found in run_ranks(compare, world_size=2, timeout_s=200):
        assert found == dict.fromkeys(SCENARIOS, 0.0)


def branches():
    """Ranks use different blocks, and none uses the last; gradients of one process, and of three replicas."""
    dist.init_process_group("hyperpod")
    replica_buckets.BUCKET_BYTES = SMALL
    model, rank = made(), dist.get_rank()
    torch.manual_seed(0)
    plain = Chain()
    names, differ, agreed = dict(plain.named_parameters()), [], []
    for step in range(STEPS):
        model.order = ((0,), (1,), ())[(rank + step) % 3]
        loss_of(model, step).backward()
        reconcile_gradients(model)
        for other in range(3):
            plain.order = ((0,), (1,), ())[(other + step) % 3]
            (loss_of(plain, step, rank=other) / 3).backward()
        agreed.append(all((each.grad is None) == (names[name].grad is None) for name, each in model.named_parameters()))
        for name, each in model.named_parameters():
            if each.grad is not None:
                wanted = names[name].grad
                differ.append(float((each.grad.to_local() - wanted).norm() / wanted.norm()))
        for each in (model, plain):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()
    own = torch.cat([each.detach().to_local().reshape(-1) for each in model.parameters()])
    theirs = [torch.empty_like(own) for _ in range(3)]
    dist.all_gather(theirs, own)
    return max(differ), agreed, all(torch.equal(own, each) for each in theirs), len(list(fsdp_units(model)))


@pytest.mark.spawns
def test_replicas_may_use_different_blocks():
    for differs, agreed, are_same, units in run_ranks(branches, world_size=3):
        assert differs < 5e-7
        assert agreed == [True] * STEPS
        assert are_same
        assert units == 1


def sent():
    """Bytes of each bucket, and how many parameters had their gradients when it was sent."""
    dist.init_process_group("hyperpod")
    replica_buckets.BUCKET_BYTES = SMALL
    model, found = made(), []
    model.order = (0, 1, 2)[: 3 - dist.get_rank()]
    allreduce = ResilientProcessGroup.allreduce
    computed = []

    def noted(group, tensors, *args):
        if group.key.axis == "replicate":
            found.append((tensors[0].nbytes, len(computed)))
        return allreduce(group, tensors, *args)

    loss = loss_of(model, 0)
    for each in hsdp.fsdp_parameters(model):
        torch.autograd.graph.get_gradient_edge(each._unsharded_param).node.register_hook(lambda *_: computed.append(1))
    ResilientProcessGroup.allreduce = noted
    loss.backward()
    ResilientProcessGroup.allreduce = allreduce
    return found, len(computed), sum(each.to_local().nbytes for each in model.parameters())


@pytest.mark.spawns
def test_buckets_are_sent_in_one_order_and_while_backward_goes_on():
    (found, computed, total), (of_other, computed_there, _) = run_ranks(sent, world_size=2)
    assert [size for size, _ in found] == [size for size, _ in of_other]
    assert len(found) > 3
    assert sum(size for size, _ in found) == total
    assert [number < computed for _, number in found[:2]] == [True, True]  # sent before the last gradient
    assert computed_there < computed


def without_a_way_to_the_loss():
    dist.init_process_group("hyperpod")
    replica_buckets.BUCKET_BYTES = SMALL

    class Keeps(Chain):
        def forward(self, x):
            self.kept = [super().forward(x)]
            return torch.zeros(())

    model = made(Keeps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch(0))
    model.kept[0].square().mean().backward()
    try:
        optimizer.step()
    except ConfigError as error:
        refused = str(error)
    else:
        refused = ""
    return refused


@pytest.mark.spawns
def test_gradients_that_backward_leaves_in_buckets_are_refused():
    for refused in run_ranks(without_a_way_to_the_loss, world_size=2):
        assert "that FSDP2 has not reduced" in refused


@pytest.fixture
def one_rank():
    dist.init_process_group("hyperpod", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def mixed_types():
    model = Reading()
    model.blocks[1].to(torch.bfloat16)
    return model


@pytest.mark.parametrize(
    ("kind", "options", "units"),
    [
        (Reading, {}, 1),
        (Reading, {"precision": "bf16-true"}, 1),
        (Reading, {"activation_checkpointing": "full"}, 1),
        (Reading, {"delayed_init": True}, 1),
        (Reading, {"block_classes": ("Block",)}, 4),
        (Reading, {"precision": "bf16-mixed"}, 4),
        (Reading, {"param_offload": True}, 4),
        (Reading, {"optimizer_offload": True}, 4),
        (mixed_types, {}, 4),
        (lambda: Reading().double(), {}, 4),
    ],
)
def test_what_buckets_cannot_serve_is_sharded_unit_by_unit(one_rank, kind, options, units):
    assert len(list(fsdp_units(made(kind, **options)))) == units


def test_a_model_that_becomes_another_type_is_left_to_fsdp2(one_rank):
    model = made()
    model.double()
    loss_of(model, 1).backward()
    torch.manual_seed(0)
    plain = Chain().double()
    loss_of(plain, 1).backward()
    wanted = dict(plain.named_parameters())
    for name, each in model.named_parameters():
        assert torch.equal(each.grad.to_local(), wanted[name].grad)


def test_a_model_is_freed(one_rank):
    model = made()
    plain_step(model, 0)
    seen = [weakref.ref(model.head.weight), weakref.ref(hsdp.fsdp_parameters(model)[0]._unsharded_param)]
    del model
    gc.collect()
    assert [each() for each in seen] == [None, None]
