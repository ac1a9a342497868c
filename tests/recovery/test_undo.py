"""What a process remembers of its last iteration must not tell it from one that has just come."""

import contextlib
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from device import DEVICE
from harness import run_ranks
from torch import nn

from hyperpod_plugins.comm import reset_traffic, traffic
from hyperpod_plugins.parallel import ParallelConfig, build_mesh, gathered_parameters, parallelize
from hyperpod_plugins.parallel.hsdp import fsdp_units, without_replica_sync
from hyperpod_plugins.parallel.unit_watch import parameter_groups
from hyperpod_plugins.recovery import undo
from hyperpod_plugins.recovery.packing import pack, unpack
from hyperpod_plugins.recovery.undo import OutsideWrites, StepStart, _sums_of_bits, drop_gradients, end_iteration


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


class Fails(nn.Module):
    """Does nothing but raise in one backward."""

    is_next = False

    def forward(self, x):
        if not self.is_next:
            return x
        self.is_next, x = False, x.clone()
        x.register_hook(lambda _: 1 / 0)
        return x


def gradients_after_an_undo(can_reset):
    """Gradients of a step of two micro-steps, and again after its first micro-step was undone: run, and interrupted."""
    undo.CAN_RESET = can_reset
    dist.init_process_group("hyperpod")
    config = ParallelConfig(hybrid_shard_degree=1)
    torch.manual_seed(0)
    fails = Fails()
    blocks = (nn.Sequential(nn.Linear(8, 8), fails, nn.Linear(8, 8), nn.ReLU()) for _ in range(3))
    model = parallelize(nn.Sequential(*blocks), build_mesh(config.topology(2), DEVICE), config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, last = torch.randn(2, 4, 8, device=DEVICE).unbind()

    def run_first():
        with without_replica_sync(model):
            model(first).square().sum().backward()

    def run_step():
        run_first()
        model(last).square().sum().backward()
        gradients = [parameter.grad.to_local().clone() for parameter in model.parameters()]
        drop_gradients(model, [optimizer])
        return gradients

    wanted = run_step()
    run_first()
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in fsdp_units(model)]
    has_part = any(group is not None and group._partial_reduce_output is not None for group in groups)
    drop_gradients(model, [optimizer])
    after_one = run_step()
    if not can_reset:  # before torch 2.13, a process in which backward has raised is replaced
        return has_part, wanted, after_one
    fails.is_next = True
    with contextlib.suppress(ZeroDivisionError):
        run_first()
    gathered = [each._unsharded_param for unit in fsdp_units(model) for each in fsdp_parameters(unit)]
    has_part = has_part and any(each.grad is not None for each in gathered)
    drop_gradients(model, [optimizer])
    return has_part, wanted, after_one, run_step()


def fsdp_parameters(unit):
    return [each for group in parameter_groups(unit) for each in group.fsdp_params]


@pytest.mark.spawns
@pytest.mark.parametrize("can_reset", [False, True][: 1 + undo.CAN_RESET])
def test_a_micro_step_that_was_undone_adds_nothing(can_reset):
    """FSDP2 keeps what is reduced within a replica until the last micro-step reduces it between replicas, too.

    And it keeps what backward has added up for the gathered parameters of a unit, until the unit's backward ends.
    """
    for has_part, wanted, *found in run_ranks(gradients_after_an_undo, can_reset, world_size=2):
        assert has_part  # or there is nothing to test
        for each in found:
            assert all(map(torch.equal, wanted, each))


def add_a_layer(model, optimizer):
    model.append(nn.Linear(2, 2))


def replace_a_parameter(model, optimizer):
    model[1].weight = nn.Parameter(model[1].weight.detach().clone())


def replace_a_layer(model, optimizer):
    model[1] = nn.Linear(2, 2)


def give_up_a_parameter(model, optimizer):
    del optimizer.param_groups[0]["params"][2]


@pytest.mark.parametrize("change", [add_a_layer, replace_a_parameter, replace_a_layer, give_up_a_parameter])
def test_parameters_without_an_optimizer_are_found_whenever_they_come(change):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    beginning = StepStart(model, [optimizer])
    for _ in range(2):
        beginning.begin()
        assert beginning.is_within_reach
    change(model, optimizer)
    owned = {id(each) for group in optimizer.param_groups for each in group["params"]}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    beginning.begin()
    assert set(beginning.parts) == set(model.modules())
    assert [each.grad is not None for each in model.parameters()] == [id(each) in owned for each in model.parameters()]
    with torch.no_grad():
        next(each for each in model.parameters() if id(each) not in owned).mul_(2)
    assert not beginning.is_within_reach
    beginning.end()
    beginning.begin()
    assert beginning.is_within_reach


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.uint8])
@pytest.mark.parametrize("shape", [(1,), (3,), (4, 4), (5, 7)])
def test_sums_of_bits_tell_of_each_element(dtype, shape):
    whole = torch.arange(2 * math.prod(shape)).remainder(100).to(dtype).view(2, *shape)
    for tensor in (whole[0], whole[1], whole[:, 0], whole[1].t()):  # some begin at no multiple of eight bytes
        before = _sums_of_bits([tensor, whole])
        for place in itertools.product(*map(range, tensor.shape)):
            tensor[place] += 1
            after = _sums_of_bits([tensor, whole])
            assert after[0] != before[0]
            assert after[1] != before[1]
            tensor[place] -= 1
            assert _sums_of_bits([tensor, whole]) == before
            if place[0] == 0:  # all of a column, which an addition of whole words would not see
                column = tensor[(slice(None), *place[1:])]
                column.mul_(2).add_(1)
                assert _sums_of_bits([tensor, whole])[0] != before[0]
                column.sub_(1).div_(2, rounding_mode=None if dtype.is_complex else "trunc")
                assert _sums_of_bits([tensor, whole]) == before


def write_all(model):
    for parameter in model.parameters():
        parameter.data.mul_(2)


def write_a_large_one(model):
    model[1].weight.data[100].add_(1)


@pytest.mark.parametrize(("write", "later"), [(write_all, 0), (write_a_large_one, 5 * 6)])
def test_writes_that_no_counter_tells_of_are_found_long_after_the_first_steps(write, later):
    """At once where all parameters are written to, and within as many steps as there are pieces otherwise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(200, 200), nn.Linear(3, 2))
    beginning = StepStart(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    for _ in range(70):  # past the first steps, and past one of those in which all is looked at
        beginning.begin()
        assert beginning.is_within_reach
        beginning.end()
    missed = 0
    while True:
        beginning.begin()
        write(model)
        is_noticed = not beginning.is_within_reach
        beginning.end()
        if is_noticed:
            break
        missed += 1
    assert missed <= later
    beginning.begin()
    write(model)
    beginning.end()  # by now all are known
    before = [parameter.detach().clone() for parameter in model.parameters()]
    beginning.begin()
    write(model)
    assert beginning.is_within_reach
    beginning.put_back()
    assert all(map(torch.equal, model.parameters(), before))


def test_a_replacement_can_undo_in_its_first_step_what_its_replica_has_found_to_be_written():
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(200, 200), nn.Linear(3, 2))
        return model, StepStart(model, [torch.optim.SGD(model.parameters(), lr=0.1)])

    survivor, its_start = make()
    for _ in range(3):
        its_start.begin()
        write_a_large_one(survivor)
        its_start.end()
    known = its_start.known_writes()
    assert unpack(pack(known)) == known  # travels with the state
    assert known["written"] == ["1.weight"]
    assert known["steps"] == 2  # the third is not committed: both run it again
    for takes in (True, False):
        replacement, start = make()
        if takes:
            start.load_known_writes(known)
        before = [parameter.detach().clone() for parameter in replacement.parameters()]
        start.begin()
        write_a_large_one(replacement)
        assert start.is_within_reach is takes
        start.put_back()
        assert all(map(torch.equal, replacement.parameters(), before)) is takes


def test_a_replacement_compares_no_bits_that_its_replica_has_compared_in_as_many_steps(monkeypatch):
    counts = []
    monkeypatch.setattr("hyperpod_plugins.recovery.undo._sums_of_bits", lambda each: counts.append(1) or [])
    _, beginning, commit = trained()
    for step in range(9):
        if step:
            commit()
        beginning.begin()
        beginning.end()
    assert counts
    counts.clear()
    _, replaced, _ = trained()
    replaced.load_known_writes(beginning.known_writes())
    replaced.begin()
    replaced.end()
    assert not counts


def sharded_by_one_rank():
    """A model of FSDP2, and what its step may change; needs a process group of one rank."""
    config = ParallelConfig()
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    parallelize(model, build_mesh(config.topology(1), DEVICE), config)
    return model, StepStart(model, [torch.optim.SGD(model.parameters(), lr=0.1)])


@pytest.fixture
def one_rank():
    dist.init_process_group("hyperpod", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def gathers(monkeypatch):
    """Grows with each comparison of a gathered parameter's bits."""
    sums, of_bits = [], gathered_parameters._sum_of_bits
    monkeypatch.setattr(gathered_parameters, "_sum_of_bits", lambda each: sums.append(each) or of_bits(each))
    return sums


def run_step(model, beginning, *, micro_steps=1, ends=True):
    beginning.begin()
    for _ in range(micro_steps):
        model(torch.ones(1, 2, device=DEVICE)).sum().backward()
    beginning.end()
    if ends:
        beginning.close()
    else:
        drop_gradients(model, beginning._optimizers)
        beginning.put_back()


def test_a_replacement_compares_no_gathered_parameters_that_its_replica_has_compared(one_rank, gathers):
    (model, beginning), (replacement, its_beginning) = sharded_by_one_rank(), sharded_by_one_rank()
    while True:
        gathers.clear()
        run_step(model, beginning)
        if not gathers:
            break
    its_beginning.load_known_writes(unpack(pack(beginning.known_writes())))
    run_step(replacement, its_beginning)
    assert not gathers


def test_comparisons_of_a_step_that_is_undone_do_not_count(one_rank, gathers):
    """Otherwise the writes that they have found would be accepted when the step runs again."""
    (model, beginning), (replacement, its_beginning) = sharded_by_one_rank(), sharded_by_one_rank()
    run_step(model, beginning, micro_steps=8, ends=False)
    num_compared = len(gathers)
    assert num_compared >= 8
    its_beginning.load_known_writes(beginning.known_writes())
    for each in ((model, beginning), (replacement, its_beginning)):
        gathers.clear()
        run_step(*each, micro_steps=8)
        assert len(gathers) == num_compared


@pytest.mark.parametrize("is_known", [True, False])
def test_a_write_to_a_local_part_that_the_first_forward_replaces_is_undone_or_counts_as_lost(one_rank, is_known):
    """As FSDP2's first forward does where shards lie in pinned host memory, or where a module has been moved."""
    (model, beginning), (replacement, its_beginning) = sharded_by_one_rank(), sharded_by_one_rank()
    for _ in range(9):
        beginning.begin()
        if is_known:
            model[1].weight._local_tensor.data.mul_(2)
        beginning.end()
        beginning.close()
    its_beginning.load_known_writes(beginning.known_writes())
    weight = replacement[1].weight
    before = weight._local_tensor.detach().clone()
    its_beginning.begin()
    weight._local_tensor = weight._local_tensor.clone()
    weight._local_tensor.data.mul_(2)
    is_within_reach = its_beginning.is_within_reach
    its_beginning.put_back()
    assert is_within_reach is is_known
    assert torch.equal(weight._local_tensor, before) is is_known


def test_writes_to_a_parameter_that_is_gone_are_not_told():
    parameters, beginning, _ = trained()
    for _ in range(2):
        beginning.begin()
        parameters[0].data.mul_(2)
        beginning.end()
    assert beginning.known_writes()["written"] == ["0.weight"]
    beginning._model[0].weight = nn.Parameter(torch.zeros(3, 2))
    assert beginning.known_writes() is None


@pytest.mark.parametrize(
    "change",
    [
        {"written": ["other.weight"]},
        {"written": [["0.weight"]]},
        {"written": "0.weight"},
        {"steps": "1"},
        {"more_sums": 10**30},
        {"compared": []},
        None,
    ],
)
def test_what_another_rank_knows_is_not_used_if_it_is_of_no_use_here(change, caplog):
    _, beginning, commit = trained()
    for step in range(9):
        if step:
            commit()
        beginning.begin()
        beginning.end()
    known = beginning.known_writes()
    _, replaced, _ = trained()
    replaced.load_known_writes(None if change is None else known | change)
    assert "is not used" in caplog.text
    assert replaced.known_writes()["steps"] == 0
    replaced.load_known_writes(known)
    assert replaced.known_writes()["steps"] == 8


def trained():
    """Four parameters, and what follows a computed step until it counts: the optimizer writes to all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    beginning = StepStart(model, [optimizer])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)

    def commit():
        beginning.close()
        optimizer.step()

    return list(model.parameters()), beginning, commit


@pytest.mark.parametrize("every", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("place", range(4))
def test_counted_writes_to_one_parameter_that_begin_late_are_found(place, every):
    parameters, beginning, commit = trained()
    parameter, missed = parameters[place], 0
    for step in range(20 + 60 * every):
        if step:
            commit()
        beginning.begin()
        before = parameter.detach().clone()
        if step >= 20 and step % every == 0:
            with torch.no_grad():
                parameter.mul_(-1)
            missed += not beginning.is_within_reach  # never taken for what can be put back
        else:
            assert beginning.is_within_reach
        beginning.end()
    assert 1 <= missed < 40
    beginning.put_back()
    assert torch.equal(parameter, before)


def test_writes_are_counted_where_fsdp_has_replaced_the_local_part():
    """As its first forward does where shards lie in pinned host memory."""
    dist.init_process_group("hyperpod", store=dist.HashStore(), rank=0, world_size=1)
    try:
        config = ParallelConfig()
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        parallelize(model, build_mesh(config.topology(1), DEVICE), config)
        parameters = list(model.parameters())
        beginning = StepStart(model, [torch.optim.SGD(parameters, lr=0.1)])
        for step in range(20):  # past the steps in which all bits are compared
            beginning.begin()
            if step == 0:
                for each in parameters:
                    each._local_tensor = each._local_tensor.clone()
            beginning.end()
        for each in parameters:
            beginning.begin()
            assert beginning.is_within_reach
            each._local_tensor.mul_(2)
            assert not beginning.is_within_reach
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("where", ["in the model", "in a layer", "in a late layer"])
def test_buffers_of_modules_that_come_late_are_kept(where):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    start = StepStart(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    start.begin()
    start.present_buffers()
    late = nn.Sequential(nn.BatchNorm1d(2)) if where == "in a late layer" else nn.BatchNorm1d(2)
    (model[0] if where == "in a layer" else model).add_module("late", late)
    kept = start.present_buffers()
    for each in model.modules():
        if isinstance(each, nn.BatchNorm1d):
            each.running_mean += 1
            each.register_buffer("another", torch.ones(1))
    kept.put_back()
    assert all(not buffer.any() for name, buffer in model.named_buffers() if "mean" in name)
    assert not any("another" in name for name, _ in model.named_buffers())


@pytest.mark.parametrize(
    "write", [lambda p, v: p.detach().copy_(v), lambda p, v: p.data.copy_(v)], ids=["seen", "data"]
)
@pytest.mark.parametrize("num_earlier", [0, 9])
@pytest.mark.parametrize("swaps_earlier", [False, True])
def test_parameters_that_an_evaluation_has_written_are_put_back(write, num_earlier, swaps_earlier):
    """They cannot be if many parts have left them alone before; that is told."""
    model = nn.Linear(3, 3)
    outside, begun = OutsideWrites(model), model.weight.detach().clone()
    for _ in range(num_earlier):
        outside.begin()
        if swaps_earlier:
            write(model.weight, begun + 1)
            outside.notice()
            write(model.weight, begun)
        outside.end()
    assert outside.put_back()  # no part has begun
    outside.begin()
    outside.notice()
    assert outside.put_back()  # nothing was written
    write(model.weight, begun + 1)
    can_put_back = num_earlier == 0 or swaps_earlier
    assert outside.put_back() == can_put_back
    assert torch.equal(model.weight, begun) == can_put_back


def test_a_compiled_block_keeps_which_buffers_are_not_saved():
    block = nn.Module()
    block.register_buffer("table", torch.ones(3), persistent=False)
    model = nn.Sequential(nn.Linear(3, 3), torch.compile(block, backend="eager"))
    saved = [*model.state_dict()]

    undo.Buffers(model.modules()).put_back()

    assert [*model.state_dict()] == saved
