"""Prefetching offload of the inputs of checkpointed blocks, against recomputation alone: the same bits, less memory."""

import gc
import sys
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from device import DEVICE
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.memory import ActivationOffload, HostPool, recompute_blocks
from hyperpod_plugins.memory.host_pool import block_size, parse_cpu_list
from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize
from hyperpod_plugins.parallel.parallelize import attach_offload

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
        if self.by in (None, "not at all"):
            return self._compute(x)
        return checkpoint(self._compute, x, use_reentrant=self.by == "reentrant")


class Called(Block):
    """Its checkpoint function surrounds its hooks, as that of layers of transformers 5.0.0 does."""

    gradient_checkpointing = True

    def __call__(self, *args, **kwargs):
        return checkpoint(partial(super().__call__, **kwargs), *args, use_reentrant=self.by == "call, reentrant")

    def forward(self, x, mask=None):
        return self._compute(x if mask is None else x * mask)


class Chain(nn.Module):
    def __init__(self, num_blocks=6, by=None):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList((Called if by and "call" in by else Block)(by) for _ in range(num_blocks))

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


@pytest.mark.parametrize("by", [None, "reentrant", "non-reentrant", "call, reentrant", "call, non-reentrant"])
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


class Cheap(nn.Module):
    """Computes faster than its input is copied."""

    def __init__(self, width):
        super().__init__()
        self.scale, self.by = nn.Parameter(torch.randn(width)), None

    def forward(self, x):
        return x + torch.tanh(x * self.scale)


class Racing(Queued):
    """Copies that the computation does not wait for."""

    def wait(self, mark):
        pass

    finish = Queued.wait


def cheap_chain(width):
    torch.manual_seed(0)
    model = nn.Sequential(*(Cheap(width) for _ in range(8))).to(DEVICE)
    recompute_blocks([*model])
    return model


@pytest.mark.gpu
@pytest.mark.parametrize("horizon", [1, 2, 4])
@pytest.mark.parametrize("copies", [None, Racing])
def test_no_step_computes_before_its_copies_have_ended(horizon, copies):
    """Steps of several lengths, each with other values: what is on the host from the one before would be noticed."""
    if copies is not None and DEVICE != "cpu":
        pytest.skip("copies that do not wait show on the CPU that this test can fail")
    width, lengths = (4096, (4096, 512, 8192, 2048)) if DEVICE != "cpu" else (WIDTH, (64, 16, 128, 32))
    plain, model = cheap_chain(width), cheap_chain(width)
    offload = ActivationOffload(torch.device(DEVICE), min_bytes=1024, horizon=horizon, copies=copies and copies())
    offload.attach([*model])
    are_equal = []
    for step, length in enumerate(lengths * 3):
        generator = torch.Generator().manual_seed(step)
        x, found = torch.randn(length, width, generator=generator).to(DEVICE), []
        for each in (plain, model):
            each.zero_grad()
            each(x.clone().requires_grad_()).square().mean().backward()
            found.append([parameter.grad.clone() for parameter in each.parameters()])
        are_equal.append(all(map(torch.equal, *found)))
    assert all(are_equal) == (copies is None)
    assert offload.stored_bytes == 3 * 7 * sum(lengths) * width * 4


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


@pytest.mark.parametrize("budget_bytes", [1 << 30, 5 * 512 * WIDTH * 4])
def test_steps_of_all_lengths_share_a_few_blocks_of_host_memory(budget_bytes):
    """The smaller budget is what the longest step needs."""
    model = Chain()
    offload = offloaded(model, pool=HostPool(CPU, budget_bytes=budget_bytes))
    lengths = torch.randint(32, 513, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    for length in lengths:
        model(torch.randn(length, WIDTH)).square().mean().backward()
    assert offload.stored_bytes == 5 * sum(lengths) * WIDTH * 4  # nothing was refused
    assert offload.pool.num_allocations <= 40  # of 500 that are needed
    assert offload.pool.allocated_bytes <= min(budget_bytes, 5 * 5 * 512 * WIDTH * 4)
    assert offload.pool.used_bytes == 0


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


def test_the_configuration_sets_the_budget():
    model = Chain()
    recompute_blocks(model.blocks)
    config = ParallelConfig(sm_activation_offloading=True, activation_host_memory_gib=2.5)
    assert attach_offload([*model.blocks], config, CPU).pool.budget_bytes == 2.5 * 2**30


def test_a_second_backward_finds_the_inputs_again():
    model = Chain(by="non-reentrant")
    offloaded(model, copies=Queued())
    torch.manual_seed(2)
    loss = model(batch()).square().mean()
    loss.backward(retain_graph=True)
    first = [parameter.grad.clone() for parameter in model.parameters()]
    loss.backward()
    assert all(torch.equal(2 * one, parameter.grad) for one, parameter in zip(first, model.parameters(), strict=True))


@pytest.mark.parametrize("horizon", [1, 2, 20])
def test_what_all_blocks_share_is_stored_once_and_parameters_and_parts_never(horizon):
    model = Chain()
    offload = offloaded(model, horizon=horizon)
    mask = torch.ones(ROWS, WIDTH)
    gradients(model, batch(), mask)
    assert offload.stored_bytes == 6 * INPUT_BYTES  # the mask with the first block
    before = offload.stored_bytes
    model.blocks[0](nn.Parameter(batch())).mean().backward()
    model.blocks[0](torch.randn(2 * ROWS, WIDTH)[:ROWS]).mean().backward()
    model.blocks[0](torch.randn(4, WIDTH)).mean().backward()  # small
    assert offload.stored_bytes == before


def test_a_tensor_is_stored_once_until_it_changes():
    """Once its copy on the host is complete, it may."""
    model = Chain()
    offload, mask = offloaded(model, horizon=1), torch.ones(ROWS, WIDTH)
    x = model.blocks[0](mask, mask)
    assert offload.stored_bytes == INPUT_BYTES
    x = model.blocks[1](x)
    mask.add_(1)
    x = model.blocks[2](x, mask)
    model.blocks[3](x, mask).square().mean().backward()
    assert offload.stored_bytes == 5 * INPUT_BYTES  # the mask twice, and three inputs

    plain = Chain()
    x = plain.blocks[1](plain.blocks[0](torch.ones(ROWS, WIDTH), torch.ones(ROWS, WIDTH)))
    plain.blocks[3](plain.blocks[2](x, mask), mask).square().mean().backward()
    for block, other in zip(plain.blocks[:4], model.blocks, strict=False):
        assert torch.equal(block.up.weight.grad, other.up.weight.grad)


class Loop(Chain):
    """Runs its blocks several times in a forward, as models with shared layers do."""

    def forward(self, x):
        x = self.first(x)
        for block in [*self.blocks] * 3:
            x = block(x)
        return x


@pytest.mark.parametrize("num_blocks", [1, 2])
@pytest.mark.parametrize("horizon", [1, 2, 20])
@pytest.mark.parametrize("copies", [None, Queued])
def test_of_a_block_that_runs_several_times_the_last_call_alone_keeps_its_input(num_blocks, horizon, copies):
    plain, model = Loop(num_blocks), Loop(num_blocks)
    recompute_blocks(plain.blocks)
    offload, counts = offloaded(model, horizon=horizon, copies=copies and copies()), []
    model.blocks[0].up.register_forward_hook(lambda *_: counts.append(on_device(offload)))
    for step in range(2):
        wanted, found = gradients(plain, batch(step)), gradients(model, batch(step))
        assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))
    assert offload.stored_bytes == 2 * (3 * num_blocks - 1) * INPUT_BYTES
    assert max(counts) <= horizon
    assert offload.pool.used_bytes == 0


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


class Outer(Chain):
    """The model calls the checkpoint function of its blocks, as old models did."""

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.is_reentrant)
        return x


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of the evaluation
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_checkpoint_around_a_block_is_refused_in_the_first_step(is_reentrant):
    """The offload would take all that the checkpoint drops, or nothing."""
    model = Outer(by="not at all")
    model.is_reentrant = is_reentrant
    ActivationOffload(CPU, min_bytes=1).attach(model.blocks)
    x = batch().requires_grad_()
    with torch.no_grad():
        model(x)
    with pytest.raises(ConfigError, match="Block is called within a checkpoint function of its model"):
        model(x).sum().backward()


@pytest.fixture
def alone():
    """A process group of one rank."""
    dist.init_process_group("hyperpod", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def llama(is_reentrant, **options):
    """Options are those of `activation_checkpointing_enable`."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        vocab_size=101,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of its newer name
        model.gradient_checkpointing_enable({"use_reentrant": is_reentrant}, **options)
    return model, {"input_ids": torch.arange(2 * 37).view(2, 37)}


def called(is_reentrant):
    return Chain(num_blocks=4, by="call, reentrant" if is_reentrant else "call, non-reentrant"), {"x": batch()}


@pytest.fixture
def offloads(alone, monkeypatch):
    """Those that models have, of tensors of all sizes."""
    module, found = sys.modules["hyperpod_plugins.parallel.parallelize"], []
    attach = module.attach_offload
    monkeypatch.setattr(module, "attach_offload", lambda *args, **more: found.append(attach(*args, **more)))
    monkeypatch.setattr("hyperpod_plugins.memory.offload.MIN_BYTES", 1)
    return found


LLAMA_INPUT_BYTES = 2 * 37 * 32 * 4


@pytest.mark.parametrize("horizon", [1, 3])
@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize(("make", "input_bytes"), [(llama, LLAMA_INPUT_BYTES), (called, INPUT_BYTES)])
def test_models_that_checkpoint_themselves(make, input_bytes, is_reentrant, horizon, offloads):
    found = []
    for options in ({}, {"sm_activation_offloading": True, "activation_loading_horizon": horizon}):
        model, kwargs = make(is_reentrant)
        config = ParallelConfig(**options)
        parallelize(model, build_mesh(config.topology(1), "cpu"), config)
        for _ in range(2):
            torch.manual_seed(7)
            model.zero_grad()
            output = model(**kwargs)
            (output if isinstance(output, torch.Tensor) else output.logits).square().mean().backward()
        found.append([each.grad.to_local() for each in model.parameters()])
    assert all(map(torch.equal, *found))
    (offload,) = offloads
    assert offload.stored_bytes == 2 * 3 * input_bytes
    assert offload.pool.used_bytes == 0


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize(
    ("options", "is_training", "num_stored"), [({"every_n_layers": 2}, True, 2), ({}, False, 0), ({}, True, 3)]
)
def test_what_blocks_that_recompute_nothing_keep_stays_on_the_device(
    options, is_training, num_stored, is_reentrant, offloads, caplog
):
    """Layers of transformers recompute in training mode only: all that they save would be copied, not their inputs."""
    gradients = []
    for is_offloaded in (False, True):
        model, batch = llama(is_reentrant, **options)
        config = ParallelConfig(sm_activation_offloading=is_offloaded)
        parallelize(model.train(is_training), build_mesh(config.topology(1), "cpu"), config)
        for _ in range(2):
            model(**batch).logits.square().mean().backward()
        gradients.append([each.grad.to_local() for each in model.parameters()])
    assert all(map(torch.equal, *gradients))
    assert offloads[0].stored_bytes == 2 * num_stored * LLAMA_INPUT_BYTES
    assert caplog.text.count("LlamaDecoderLayer recomputes nothing in this forward") == (num_stored < 3)


@pytest.mark.parametrize("is_offloaded", [True, "auto"])
def test_the_offload_of_transformers_is_refused_beside_ours(is_offloaded, alone):
    model, _ = llama(False, offload=True)
    config = ParallelConfig(sm_activation_offloading=is_offloaded)
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM keeps .*Leave offload=True out"):
        parallelize(model, build_mesh(config.topology(1), "cpu"), config)
    model, _ = llama(False, offload=True)
    model.activation_checkpointing_disable()
    parallelize(model, build_mesh(config.topology(1), "cpu"), config)


@pytest.mark.slow_single
@pytest.mark.filterwarnings("ignore")  # of dynamo, many
def test_compiled_blocks_that_checkpoint_themselves(offloads):
    """Their graphs have the checkpoint within them."""
    model, batch = llama(False)
    config = ParallelConfig(sm_activation_offloading=True)
    parallelize(model, build_mesh(config.topology(1), "cpu"), config)
    for block in model.model.layers:
        block.compile(backend="aot_eager")
    model(**batch).logits.square().mean().backward()
    [offload] = offloads
    assert 3 * LLAMA_INPUT_BYTES <= offload.stored_bytes < 4 * LLAMA_INPUT_BYTES  # and the angles of positions


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


def test_sizes_of_blocks_are_eighths_of_powers_of_two():
    for num_bytes in (1, 4096, 4097, 9 * 4096, 1 << 20, (1 << 20) + 1, 1_200_000, 3 << 30):
        size = block_size(num_bytes)
        assert size % 4096 == 0
        assert num_bytes <= size < max(num_bytes * 9 / 8, num_bytes + 4096)
    assert len({block_size(num_bytes) for num_bytes in range((1 << 20) + 1, 2 << 20, 1000)}) == 8


def test_a_tensor_takes_the_free_block_that_fits_best():
    pool, page = HostPool(CPU, budget_bytes=14 * 4096), 4096
    small, middle, large = [pool.acquire(num_pages * page) for num_pages in (2, 4, 8)]
    for block in (large, middle, small):
        pool.release(block)
    assert pool.acquire(3 * page) is middle
    assert pool.acquire(3 * page) is large  # rather than another one, for which there is no room
    assert pool.used_bytes == 12 * page
    pool.release(large)
    pool.release(middle)
    assert pool.acquire(9 * page) is not None  # in place of the others, which were returned earlier
    assert pool.acquire(4 * page) is middle
    assert (pool.allocated_bytes, pool.num_refused) == (13 * page, 0)


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
