"""What blocks do with their activations when `activation_offload="auto"`: by sizes and room, and measured in steps."""

import logging
import re
import sys

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.memory import ActivationOffload, recompute_blocks
from hyperpod_plugins.memory.activation_plan import MARGIN, AutomaticPlan, DeviceSpeed, plan_activations
from hyperpod_plugins.memory.recompute import is_in_backward
from hyperpod_plugins.parallel import ParallelConfig
from hyperpod_plugins.parallel.parallelize import save_activation_memory
from hyperpod_plugins.planning import TrackedMemory, UncountedPool

GIB = 2**30
CPU = torch.device("cpu")
H100 = DeviceSpeed(flops=400e12, bytes_per_s=50e9)
SLOW_LINK = DeviceSpeed(flops=1.0, bytes_per_s=1e-9)
FAST_LINK = DeviceSpeed(flops=1.0, bytes_per_s=1.0)
WIDTH, ROWS, NUM_BLOCKS = 64, 256, 6
INPUT_BYTES = 4 * WIDTH * ROWS


def test_the_width_from_which_copies_hide():
    assert H100.least_width == pytest.approx(667, abs=0.5)  # 400 TFLOP/s over 12 times 50 GB/s


@pytest.mark.parametrize(
    ("room_gib", "hides", "ways"),
    [
        (168, True, (0, 0, 32)),  # everything fits, with the inputs that were on the host: nothing is done
        (160, False, (0, 0, 32)),
        (47.3, True, (23, 0, 9)),
        (50, True, (12, 11, 9)),  # what is left serves inputs
        (50, False, (0, 22, 10)),
        (4, True, (16, 16, 0)),
        (0, True, (32, 0, 0)),
        (-3, True, (32, 0, 0)),
        (0, False, (0, 32, 0)),
        (-3, False, (12, 20, 0)),  # slower, but it fits
        (-30, False, (32, 0, 0)),
    ],
)
def test_room_is_shared_out(room_gib, hides, ways):
    """32 blocks, inputs of 0.25 GiB, activations of 5 GiB."""
    plan = plan_activations(32, GIB // 4, 5 * GIB, room_gib * GIB, hides=hides, most_kept=32)
    assert (plan.num_offloaded, plan.num_recomputed, plan.num_kept) == ways
    assert [plan.way(index) for index in range(32)] == [
        *["offload"] * ways[0],
        *["recompute"] * ways[1],
        *["keep"] * ways[2],
    ]


@pytest.mark.parametrize(
    ("most_kept", "room_gib", "ways"),
    [(0, 160, (0, 32, 0)), (7, 160, (0, 25, 7)), (7, 38, (20, 5, 7)), (40, 47.3, (23, 0, 9))],
)
def test_no_more_are_kept_than_may_be(most_kept, room_gib, ways):
    plan = plan_activations(32, GIB // 4, 5 * GIB, room_gib * GIB, hides=True, most_kept=most_kept)
    assert (plan.num_offloaded, plan.num_recomputed, plan.num_kept) == ways
    if not most_kept:
        assert str(plan) == "blocks computed again: 32; 160.00 GiB are free at the peak, a block keeps 5.00 GiB"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        self.num_recomputed = 0

    def forward(self, x):
        self.num_recomputed += is_in_backward()
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(x))))


class Device:
    """Memory of the CPU's tensors, of which a device would have `bytes`."""

    def __init__(self, tracker):
        self.tracker, self.bytes = tracker, 0

    def total(self):
        return self.bytes

    def allocated(self):
        return self.tracker.current

    def peak(self):
        return self.tracker.peak


class Job:
    """A chain of blocks, trained with memory that is counted."""

    def __init__(self, speed=None, **options):
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*[Block() for _ in range(NUM_BLOCKS)])
        self.optimizer = torch.optim.Adam(self.blocks.parameters())
        self.tracker = TrackedMemory()
        self.device, self.offload = Device(self.tracker), None
        if speed is not None:
            recompute_blocks([*self.blocks])
            plan = AutomaticPlan(CPU, measure=lambda: speed, memory=self.device, **options)
            pool = UncountedPool(CPU, self.tracker)
            self.offload = ActivationOffload(CPU, pool=pool, min_bytes=1, goes_to_host=plan.goes_to_host)
            self.offload.attach([*self.blocks])
            plan.attach([*self.blocks])

    def step(self, rows=ROWS):
        """Train a step; returns the number of blocks that were computed again, and of those that were offloaded."""
        before, stored = self._counts()
        torch.manual_seed(rows)
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
        with self.tracker:
            self.blocks(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        num_recomputed, stored_now = self._counts()
        return num_recomputed - before, (stored_now - stored) // (4 * WIDTH * rows)

    def _counts(self):
        stored = 0 if self.offload is None else self.offload.stored_bytes
        return sum(block.num_recomputed for block in self.blocks), stored


def kept_bytes_of_a_block():
    """The peak of a step in which one more block keeps its activations, against one in which none does."""
    peaks = []
    for num_kept in (2, 3):
        job = Job()
        recompute_blocks([*job.blocks][: NUM_BLOCKS - num_kept])
        for _ in range(3):
            job.step()
        peaks.append(job.tracker.peak)
    return peaks[1] - peaks[0] + INPUT_BYTES


def test_blocks_keep_what_the_device_has_room_for_and_the_bits_are_the_same(caplog):
    job, plain = Job(FAST_LINK), Job()
    plain_steps = [plain.step() for _ in range(5)]
    for _ in range(2):  # everything is computed again, and all inputs but the last go to the host
        assert job.step() == (NUM_BLOCKS, NUM_BLOCKS - 1)
    conservative = job.tracker.peak
    room = 2.15 * (kept_bytes_of_a_block() + INPUT_BYTES)
    job.device.bytes = int((conservative + room) / (1 - MARGIN))
    with caplog.at_level(logging.WARNING):
        steps = [job.step() for _ in range(3)]
    [(num_recomputed, num_offloaded)] = {*steps}
    assert num_recomputed == NUM_BLOCKS - 2
    assert 0 < num_offloaded < num_recomputed
    assert conservative < job.tracker.peak <= (1 - MARGIN) * job.device.bytes
    assert plain_steps == [(0, 0)] * 5
    assert all(map(torch.equal, job.blocks.parameters(), plain.blocks.parameters()))
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("activation_offload='auto': blocks kept: 2, computed again: ")
    assert line.endswith("copies hide behind the computation (width 64, and from 0 on they do)")


def test_a_roomy_device_keeps_everything_and_a_tight_one_nothing():
    roomy, tight = Job(FAST_LINK), Job(FAST_LINK)
    roomy.device.bytes = 1 << 40
    for _ in range(2):
        assert roomy.step() == tight.step() == (NUM_BLOCKS, NUM_BLOCKS - 1)
    tight.device.bytes = tight.tracker.peak
    assert roomy.step() == (0, 0)
    assert tight.step() == (NUM_BLOCKS, NUM_BLOCKS - 1)


def test_copies_that_do_not_hide_are_made_only_if_nothing_else_fits():
    job, short = Job(SLOW_LINK), Job(SLOW_LINK)
    for _ in range(2):
        assert job.step() == short.step() == (NUM_BLOCKS, 0)
    job.device.bytes = int(1.001 * job.tracker.peak / (1 - MARGIN))
    short.device.bytes = int((short.tracker.peak - 1.5 * INPUT_BYTES) / (1 - MARGIN))
    assert job.step() == (NUM_BLOCKS, 0)
    assert short.step() == (NUM_BLOCKS, 2)


def test_why_all_blocks_are_computed_again_is_told(caplog):
    job = Job(FAST_LINK, recomputes_all="something forbids it")
    job.device.bytes = 1 << 40
    assert [job.step() for _ in range(3)] == [(NUM_BLOCKS, NUM_BLOCKS - 1)] * 2 + [(NUM_BLOCKS, 0)]
    assert "; none is kept, since something forbids it; copies hide behind" in caplog.text


@pytest.mark.parametrize(("tensor_degree", "num_offloaded"), [(1, NUM_BLOCKS - 1), (2, NUM_BLOCKS - 1), (4, 0)])
def test_copies_hide_behind_this_ranks_part_of_the_computation(tensor_degree, num_offloaded):
    """Half of a block of width 64 takes as long as one of width 32, and its input is copied as a whole."""
    speed = DeviceSpeed(flops=12 * 30.0, bytes_per_s=1.0)  # copies hide from width 30 on
    assert Job(speed, tensor_degree=tensor_degree).step() == (NUM_BLOCKS, num_offloaded)


class Peers:
    """Other ranks, of which the fullest has room for some blocks."""

    def __init__(self, least=NUM_BLOCKS):
        self.generation, self.most, self.asked = 0, least, []

    def formed(self):
        return self.generation

    def least(self, number):
        self.asked.append(number)
        return min(number, self.most)


def test_ranks_that_communicate_in_blocks_keep_as_many_as_the_fullest_and_begin_again_after_a_repair(caplog):
    peers = Peers(least=2)
    job = Job(FAST_LINK, peers=peers)
    job.device.bytes = 1 << 40
    wanted = [(NUM_BLOCKS, NUM_BLOCKS - 1)] * 2 + [(NUM_BLOCKS - 2, 0)] * 2
    assert [job.step() for _ in range(4)] == wanted
    assert peers.asked == [NUM_BLOCKS]
    assert "blocks kept: 2, computed again: 4; " in caplog.text
    assert "of the ranks that compute a block together, one has room for fewer" in caplog.text
    job.device.bytes = 0  # that blocks were kept since leaves less of it, and is no reason to keep fewer
    peers.generation = 1
    assert [job.step() for _ in range(4)] == wanted
    assert peers.asked == [NUM_BLOCKS] * 2


def test_ranks_that_communicate_in_blocks_do_not_ask_which_graphs_are_alive():
    """A graph may be garbage on one of them, and not yet on another one."""
    peers = Peers()
    alone, job = Job(FAST_LINK), Job(FAST_LINK, peers=peers)
    for each in (alone, job):
        each.device.bytes = 1 << 40
        for _ in range(2):
            each.step()
        assert each.step() == (0, 0)
        each.blocks(torch.randn(ROWS, WIDTH))  # and no backward
    assert alone.step() == (0, 0)
    assert job.step() == (NUM_BLOCKS, NUM_BLOCKS - 1)
    peers.generation = 1
    assert [job.step() for _ in range(3)] == [(NUM_BLOCKS, NUM_BLOCKS - 1)] * 2 + [(0, 0)]


def test_each_size_is_measured_and_a_smaller_one_takes_the_plan_of_a_larger_one():
    job = Job(FAST_LINK)
    job.device.bytes = 1 << 40
    for _ in range(2):
        job.step()
    assert job.step() == (0, 0)
    assert job.step(ROWS // 2) == (0, 0)
    assert job.step(2 * ROWS) == (NUM_BLOCKS, NUM_BLOCKS - 1)


def test_accumulation_decides_when_the_optimizer_has_its_state():
    job = Job(FAST_LINK)
    job.device.bytes = 1 << 40
    step = job.optimizer.step
    job.optimizer.step = lambda: None
    for _ in range(4):
        assert job.step() == (NUM_BLOCKS, NUM_BLOCKS - 1)
    job.optimizer.step = step
    for _ in range(2):
        assert job.step() == (NUM_BLOCKS, NUM_BLOCKS - 1)
    assert job.step() == (0, 0)


def test_evaluations_and_their_sizes_decide_nothing():
    job = Job(FAST_LINK)
    job.device.bytes = 1 << 40
    for _ in range(2):
        job.step()
        with torch.no_grad():
            job.blocks(torch.zeros(8 * ROWS, WIDTH))
    assert job.step() == (0, 0)


def test_two_forwards_before_a_backward_keep_nothing_from_then_on(caplog):
    job = Job(FAST_LINK)
    job.device.bytes = 1 << 40
    for _ in range(2):
        job.step()
    assert job.step() == (0, 0)
    before, _ = job._counts()
    x = torch.randn(ROWS, WIDTH)
    (job.blocks(x).mean() + job.blocks(x).mean()).backward()
    assert job._counts()[0] - before == NUM_BLOCKS  # the second forward
    assert job.step() == (NUM_BLOCKS, NUM_BLOCKS - 1)
    assert "all blocks are computed again, since another forward follows" in caplog.text


def test_a_forward_that_was_dropped_is_no_second_one():
    """As a step that a fault has interrupted, and that is run again."""
    job = Job(FAST_LINK)
    job.device.bytes = 1 << 40
    job.step()
    job.blocks(torch.randn(ROWS, WIDTH))
    job.step()
    assert job.step() == (0, 0)


def test_blocks_with_inputs_of_different_shapes_keep_nothing(caplog):
    job = Job(FAST_LINK)
    job.device.bytes = 1 << 40
    for _ in range(2):
        job.step()
    x = job.blocks[:2](torch.randn(ROWS, WIDTH))
    job.blocks[2:](torch.cat([x, x])).mean().backward()
    assert job.step() == (NUM_BLOCKS, NUM_BLOCKS - 1)
    assert "its blocks have inputs of different shapes" in caplog.text


def test_the_peak_is_known_also_if_the_program_resets_it():
    job, same = Job(FAST_LINK), Job(FAST_LINK)
    for each in (job, same):
        for _ in range(2):
            each.step()
            if each is job:
                each.tracker.peak = each.tracker.current
        each.device.bytes = int((same.tracker.peak or job.device.bytes) / (1 - MARGIN)) if each is same else 0
    job.device.bytes = same.device.bytes
    assert same.step() == job.step() == (NUM_BLOCKS, NUM_BLOCKS - 1)


def test_once_there_is_a_plan_the_device_is_not_asked_again():
    job = Job(FAST_LINK)
    job.device.bytes = 1 << 40
    for _ in range(3):
        job.step()
    asked = []
    job.device.peak = job.device.allocated = job.device.total = lambda: asked.append(1) or 0
    for rows in (ROWS, ROWS // 2):  # the smaller one takes the plan of the larger one
        for _ in range(4):
            assert job.step(rows) == (0, 0)
    assert not asked


def test_frozen_blocks_have_a_plan_too():
    job = Job(FAST_LINK)
    job.device.bytes = 1 << 40
    job.blocks.requires_grad_(False)
    x = nn.Parameter(torch.randn(ROWS, WIDTH))
    optimizer = torch.optim.SGD([x], 0.1)
    for wanted in (NUM_BLOCKS, NUM_BLOCKS, 0):
        before, _ = job._counts()
        with job.tracker:
            job.blocks(x).square().mean().backward()
            optimizer.step()
        assert job._counts()[0] - before == wanted


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x):
        return self.blocks(x)


OF_STAGES = {"block_classes": ("Stage",)}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (OF_STAGES, ""),
        # In their backward, FSDP2 would gather the parts in another order than on ranks that compute them again.
        ({"block_classes": ("Stage", "Block")}, "parts of blocks are sharded by themselves"),
        (OF_STAGES | {"tensor_parallel_degree": 2, "tensor_plan": {"*.up": "colwise", "*.down": "rowwise"}}, ""),
        (
            OF_STAGES | {"tensor_parallel_degree": 2, "tensor_plan": {"*.up": ColwiseParallel()}},
            "styles of the program",
        ),
        (OF_STAGES | {"context_parallel_degree": 2}, ""),
        (OF_STAGES | {"expert_parallel_degree": 2}, r"depends on the tokens .* \(expert_parallel_degree\)"),
    ],
)
def test_models_of_which_no_block_can_keep_its_activations(options, why, monkeypatch):
    seen = []

    def noted(device, **options):
        seen.append(options)
        return AutomaticPlan(device)

    monkeypatch.setattr(sys.modules["hyperpod_plugins.parallel.parallelize"], "AutomaticPlan", noted)
    config = ParallelConfig.of(activation_offload="auto", **options)
    save_activation_memory(nn.Sequential(Stage(), Stage()), config, CPU)
    [given] = seen
    assert re.search(why, given["recomputes_all"])
    assert bool(given["recomputes_all"]) == bool(why)
    assert given["tensor_degree"] == config.tensor_parallel_degree


def train_ranks_that_differ():
    """Blocks of a sharded model, of which this rank keeps as many as its device has room for."""
    import torch.distributed as dist

    from hyperpod_plugins.parallel import build_mesh, parallelize
    from hyperpod_plugins.parallel.hsdp import local_part

    dist.init_process_group("hyperpod")
    tracker, found = TrackedMemory(), {}
    device = Device(tracker)

    def with_device(kind, **options):
        return AutomaticPlan(kind, measure=lambda: FAST_LINK, memory=device, **options)

    sys.modules[parallelize.__module__].AutomaticPlan = with_device
    for name in ("full", "auto"):
        torch.manual_seed(0)
        options = {"activation_offload": "auto"} if name == "auto" else {"activation_checkpointing": "full"}
        config = ParallelConfig.of(block_classes=("Block",), **options)
        chain = nn.Sequential(*[Block() for _ in range(NUM_BLOCKS)])
        chain = parallelize(chain, build_mesh(config.topology(2), "cpu"), config)
        optimizer = torch.optim.Adam(chain.parameters())
        device.bytes = (1 << 40) * dist.get_rank()
        counts = []
        for step in range(4):
            torch.manual_seed(10 * step + dist.get_rank())
            with tracker:
                chain(torch.randn(ROWS, WIDTH)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            counts.append(sum(block.num_recomputed for block in chain))
        found[name] = counts, [local_part(each).detach().clone() for each in chain.parameters()]
    return found


@pytest.mark.spawns
def test_ranks_may_keep_different_blocks(run_ranks):
    """The order of FSDP2's gathers is the same, and so are the bits."""
    for rank, found in enumerate(run_ranks(train_ranks_that_differ, world_size=2)):
        everything = [NUM_BLOCKS * number for number in (1, 2, 3, 4)]
        assert found["full"][0] == everything
        assert found["auto"][0] == (everything[:2] + [2 * NUM_BLOCKS] * 2 if rank else everything)
        assert all(map(torch.equal, found["full"][1], found["auto"][1]))


TOGETHER = {
    "tensors 2, shards 2": {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2},
    "tensors 2, split stream": {"tensor_parallel_degree": 2, "sequence_parallel": True},
    "contexts 2, tensors 2": {"tensor_parallel_degree": 2, "context_parallel_degree": 2},
}


def train_together(name, kind):
    """Losses, parameters and numbers of recomputed blocks of a Llama; only the device of rank 3 is nearly full."""
    import torch.distributed as dist
    import transformers

    from hyperpod_plugins.parallel import build_mesh, parallelize
    from hyperpod_plugins.parallel.hsdp import local_part

    tracker, plans = TrackedMemory(), []
    device = Device(tracker)
    device.bytes = 1 << 40

    def with_device(kind, **options):
        plans.append(AutomaticPlan(kind, measure=lambda: SLOW_LINK, memory=device, **options))
        return plans[-1]

    sys.modules[parallelize.__module__].AutomaticPlan = with_device
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4, use_cache=False))
    own = {"activation_offload": "auto"} if kind == "auto" else {"activation_checkpointing": "full"}
    config = ParallelConfig.of(TOGETHER[name] | own)
    topology = config.topology(4)
    parallelize(model, build_mesh(topology, "cpu"), config)
    optimizer, counts, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), [0], []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: counts.append(counts.pop() + is_in_backward()))
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + topology.data_rank(dist.get_rank()))
        tokens = torch.randint(50, (2, 15 + step % 2), generator=generator)  # two sizes, one of which is not divisible
        with tracker:
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        counts.append(0)
        if kind == "auto" and dist.get_rank() == 3:
            kept = max(each.kept_bytes for each in plans[-1]._sizes.values())
            device.bytes = int((tracker.peak + 2.5 * kept) / (1 - MARGIN))
    return losses, [local_part(each).detach().clone() for each in model.parameters()], counts[:-1]


def train_all_together():
    import torch.distributed as dist

    dist.init_process_group("hyperpod")
    return {name: [train_together(name, kind) for kind in ("full", "auto")] for name in TOGETHER}


@pytest.mark.spawns
def test_ranks_that_compute_a_block_together_keep_the_same_ones(run_ranks):
    pytest.importorskip("transformers")
    for rank, found in enumerate(run_ranks(train_all_together, world_size=4, timeout_s=240)):
        for name, (wanted, kept) in found.items():
            assert kept[0] == wanted[0], name
            assert all(map(torch.equal, kept[1], wanted[1])), name
            assert wanted[2] == [4, 4, 4]
            computes_with_rank_3 = rank >= 2 or name.startswith("contexts")
            assert kept[2] == [4, 4, 2 if computes_with_rank_3 else 0], (name, rank)


def test_a_cpu_is_the_host(caplog):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=256,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    asked = ParallelConfig.of(activation_offload="auto")
    with caplog.at_level(logging.WARNING):
        offload = save_activation_memory(model, asked, CPU)
    tokens = torch.randint(50, (2, 64))
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert offload.stored_bytes == 0
    assert "blocks are computed again; the device (cpu) is the host" in caplog.text
    with pytest.raises(ConfigError, match="sm_activation_offloading must be true or false or auto, but is 'maybe'"):
        ParallelConfig.of(activation_offload="maybe")
