"""Prefetching offload of the inputs of checkpointed blocks, against recomputation alone: the same bits, less memory."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.memory import ActivationOffload, HostPool, recompute_blocks
from hyperpod_plugins.memory.host_pool import parse_cpu_list

CPU = torch.device("cpu")
WIDTH, ROWS = 32, 64
INPUT_BYTES = WIDTH * ROWS * 4


class Block(nn.Module):
    def __init__(self, by=None):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        self.by = by

    def _compute(self, x):
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(x))))

    def forward(self, x, mask=None):
        x = x if mask is None else x * mask
        if self.by is None:
            return self._compute(x)
        return checkpoint(self._compute, x, use_reentrant=self.by == "reentrant")


class Chain(nn.Module):
    def __init__(self, num_blocks=6, by=None):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(by) for _ in range(num_blocks))

    def forward(self, x, mask=None):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, mask) if mask is not None else block(x)
        return x


class Queued:
    """Copies like those of a device: done when somebody waits for them, not before, and in order."""

    def __init__(self):
        self.queue = []

    def store(self, source, target, after):
        if after is not None:
            self.wait(after)
        return self._queue(source, target)

    load = store

    def _queue(self, source, target):
        target.fill_(float("nan"))
        self.queue.append(lambda: target.copy_(source))
        return len(self.queue) - 1

    def wait(self, mark):
        if self.queue[mark] is not None:
            self.queue[mark]()
            self.queue[mark] = None

    finish = wait


def batch(seed=1):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def gradients(model, *args):
    torch.manual_seed(7)
    model.zero_grad()
    model(*args).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def offloaded(model, **options):
    if model.blocks[0].by is None:
        recompute_blocks(model.blocks)
    offload = ActivationOffload(CPU, min_bytes=1024, **options)
    offload.attach(model.blocks)
    return offload


def on_device(offload):
    """Number of inputs of blocks on the device that backward still needs."""
    return sum(kept.is_on_device for call in offload._alive_calls() for kept in call.alive())


@pytest.mark.parametrize("by", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("horizon", [1, 2, 3, 20])
@pytest.mark.parametrize("copies", [None, Queued])
def test_gradients_are_those_of_recomputation_alone_bit_for_bit(by, horizon, copies):
    plain = Chain(by=by)
    if by is None:
        recompute_blocks(plain.blocks)
    model = Chain(by=by)
    offload = offloaded(model, horizon=horizon, copies=copies and copies())
    for step in range(3):
        wanted, found = gradients(plain, batch(step)), gradients(model, batch(step))
        assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))
    assert offload.stored_bytes == 3 * 5 * INPUT_BYTES  # of all blocks but the last
    assert offload.pool.used_bytes == 0


@pytest.mark.parametrize("horizon", [1, 2, 3])
def test_at_most_horizon_blocks_have_their_inputs_on_the_device(horizon):
    model, counts = Chain(8), []
    offload = offloaded(model, horizon=horizon)
    for block in model.blocks:
        block.up.register_forward_hook(lambda *_: counts.append(on_device(offload)))  # in forward and again in backward
    gradients(model, batch())
    assert len(counts) == 16
    assert max(counts[:8]) <= horizon
    assert max(counts[8:]) <= horizon - 1  # the input of the block that is being computed is out of our hands


def test_a_steady_step_allocates_no_host_memory():
    model = Chain()
    offload = offloaded(model)
    gradients(model, batch())
    num_allocations = offload.pool.num_allocations
    assert num_allocations == 5
    for seed in range(5):
        gradients(model, batch(seed))
    assert offload.pool.num_allocations == num_allocations


def test_micro_batches_may_overlap_in_either_order():
    for order in ((0, 1), (1, 0)):
        plain, model = Chain(), Chain()
        recompute_blocks(plain.blocks)
        offload = offloaded(model, copies=Queued())
        results = []
        for each in (plain, model):
            torch.manual_seed(3)
            losses = [each(batch(seed)).square().mean() for seed in range(2)]
            for index in order:
                losses[index].backward()
            results.append([parameter.grad for parameter in each.parameters()])
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
        assert offload.pool.used_bytes == 0


def test_a_graph_without_backward_gives_its_host_memory_back():
    model = Chain()
    offload = offloaded(model, copies=Queued())
    loss = model(batch()).mean()
    assert offload.pool.used_bytes == 5 * INPUT_BYTES
    del loss
    gc.collect()
    assert offload.pool.used_bytes == 0


def test_an_exception_in_a_block_leaves_nothing_behind():
    model = Chain()
    offload = offloaded(model)
    wanted = gradients(model, batch())

    def fail(*_):
        raise RuntimeError("in the block")

    handle = model.blocks[3].down.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="in the block"):
        model(batch())
    handle.remove()
    gc.collect()
    assert offload.pool.used_bytes == 0
    assert not offload._entered
    kept = torch.randn(ROWS, WIDTH, requires_grad=True)
    assert (kept * kept).grad_fn._saved_self is kept  # outside blocks, saved tensors are none of its business
    assert offload.pool.used_bytes == 0
    assert all(torch.equal(one, other) for one, other in zip(wanted, gradients(model, batch()), strict=True))


def test_what_the_budget_does_not_allow_stays_on_the_device(caplog):
    plain, model = Chain(), Chain()
    recompute_blocks(plain.blocks)
    offload = offloaded(model, pool=HostPool(CPU, budget_bytes=2 * INPUT_BYTES))
    wanted, found = gradients(plain, batch()), gradients(model, batch())
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))
    assert offload.stored_bytes == 2 * INPUT_BYTES
    assert offload.pool.num_refused == 3
    assert caplog.text.count("what does not fit stays on the device") == 1


def test_a_second_backward_finds_the_inputs_again():
    model = Chain(by="non-reentrant")
    offloaded(model, copies=Queued())
    torch.manual_seed(2)
    loss = model(batch()).square().mean()
    loss.backward(retain_graph=True)
    first = [parameter.grad.clone() for parameter in model.parameters()]
    loss.backward()
    assert all(torch.equal(2 * one, parameter.grad) for one, parameter in zip(first, model.parameters(), strict=True))


def test_what_all_blocks_share_is_stored_once_and_parameters_and_parts_never():
    model = Chain()
    offload = offloaded(model)
    mask = torch.ones(ROWS, WIDTH)
    gradients(model, batch(), mask)
    assert offload.stored_bytes == 6 * INPUT_BYTES  # the mask with the first block
    before = offload.stored_bytes
    model.blocks[0](nn.Parameter(batch())).mean().backward()
    model.blocks[0](torch.randn(2 * ROWS, WIDTH)[:ROWS]).mean().backward()
    model.blocks[0](torch.randn(4, WIDTH)).mean().backward()  # small
    assert offload.stored_bytes == before


class InPlace(nn.Module):
    """Changes the input of a block in place: before, within or after the block."""

    def __init__(self, where):
        super().__init__()
        self.where = where
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block() for _ in range(4))
        if where == "within":
            for block in self.blocks:
                block._compute = lambda x, block=block: x.mul_(0.5) + block.down(torch.tanh(block.up(x)))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            out = block(x)
            if self.where == "after":
                x.mul_(2.0)
            x = out
        return x


@pytest.mark.filterwarnings("ignore:module forward hook with")  # of torch's checkpoint, where a hook before it raises
@pytest.mark.parametrize("where", ["within", "after"])
@pytest.mark.parametrize("min_bytes", [1, 1 << 30])
@pytest.mark.parametrize("horizon", [1, 3])
def test_inputs_that_are_changed_in_place_are_refused(where, min_bytes, horizon):
    """torch refuses them, too, but not where its hooks for saved tensors are used."""
    for is_offloaded in (False, True):
        model = InPlace(where)
        recompute_blocks(model.blocks)
        if is_offloaded:
            ActivationOffload(CPU, min_bytes=min_bytes, horizon=horizon).attach(model.blocks)
        with pytest.raises((RuntimeError, ConfigError), match=r"in place|inplace"):
            model(batch()).square().mean().backward()


def test_host_memory_may_come_back_while_a_pool_is_used():
    """A finalizer runs where the garbage collector does, in the middle of `acquire`, too."""
    pool = HostPool(CPU)
    block = pool.acquire(4096)
    with pool._lock:
        pool.release(block)
    assert pool.used_bytes == 0
    assert pool.acquire(4096) is block


def test_an_evaluation_stores_nothing():
    model = Chain()
    offload = offloaded(model)
    with torch.no_grad():
        model(batch())
    assert offload.stored_bytes == 0


def test_a_pool_gives_blocks_of_former_sizes_away():
    pool = HostPool(CPU, budget_bytes=10 * 4096)
    for block in [pool.acquire(8 * 4096)]:
        pool.release(block)
    assert pool.acquire(9 * 4096) is not None
    assert pool.allocated_bytes == 9 * 4096
    assert pool.acquire(2 * 4096) is None
    assert pool.num_refused == 1


def test_the_lists_of_cpus_that_the_kernel_writes():
    assert parse_cpu_list("0-3,8\n") == {0, 1, 2, 3, 8}
