"""Ranks that run different modules of a model: the result of one process, or an error before anything is written."""

import pytest
import torch
import torch.distributed as dist
from device import DEVICE
from torch import nn

from hyperpod_plugins.errors import LoopError, UnitsDiffer
from hyperpod_plugins.parallel.unit_watch import reconcile_gradients

WIDTH, NUM_STEPS, LATE = 4, 6, 5


class Routed(nn.Module):
    """Each sample goes through the expert of its sign; sizes of the experts may differ."""

    def __init__(self, kind="experts"):
        super().__init__()
        torch.manual_seed(1)
        sizes = (WIDTH, 3 * WIDTH) if kind == "sizes" else (WIDTH, WIDTH)
        self.kind = kind
        self.step = 0
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, s), nn.Linear(s, WIDTH)) for s in sizes)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        to = (x[:, 0] > 0).long()
        if self.kind == "exit":
            for expert in self.experts:
                x = expert(x)
                if (to == 0).all():
                    break
            return self.head(x)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            if self.kind == "late" and self.step < LATE:
                out = out + expert(x)
            elif (to == i).any():
                at = (to == i).nonzero()[:, 0]
                out = out.index_add(0, at, expert(x[at]))
        return self.head(out)


class Unused(nn.Module):
    """A layer that only the first micro-step runs, and a parameter that none uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.unused = nn.Parameter(torch.ones(WIDTH))
        self.is_first = True

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            if i == 1 and not self.is_first:
                continue
            x = torch.tanh(layer(x))
        return x


def batch_of(step):
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
    x[:, 0] = torch.tensor([1.0, 1.0, -1.0, -1.0])  # the first rank's half takes the second expert
    return x


def train(model, share, *, micro_steps=1):
    """Losses of some steps, each of whose micro-steps gets a half of `share` of the batch; plain loop, AdamW."""
    from contextlib import nullcontext

    from hyperpod_plugins.parallel.hsdp import without_replica_sync

    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.05), []
    for step in range(NUM_STEPS):
        model.step = step
        parts = batch_of(step)[share].chunk(micro_steps)
        total = torch.zeros(())
        for index, part in enumerate(parts):
            model.is_first = index == 0
            with nullcontext() if index == micro_steps - 1 else without_replica_sync(model):
                loss = (model(part) - part).square().mean() / micro_steps
                loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return torch.stack(losses), {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for name, p in model.named_parameters()
    }


def train_in_units(is_replicated):
    from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize

    if not dist.is_initialized():
        dist.init_process_group("hyperpod")
    rank = dist.get_rank()
    share, results, errors = slice(2 * rank, 2 * rank + 2), {}, {}
    degree = {"hybrid_shard_degree": 1} if is_replicated else {}
    for name, make in {"experts": Routed, "sizes": lambda: Routed("sizes"), "unused": Unused}.items():
        classes = ("Linear",) if name == "unused" else ()
        config = ParallelConfig(block_classes=classes, **degree)
        model = parallelize(make(), build_mesh(config.topology(2), DEVICE), config)
        results[name] = train(model, share, micro_steps=2 if name == "unused" else 1)
    for kind in ("experts", "sizes", "exit", "late"):
        config = ParallelConfig(block_classes=("Sequential",), **degree)
        model = parallelize(Routed(kind), build_mesh(config.topology(2), DEVICE), config)
        try:
            train(model, share)
        except UnitsDiffer as error:
            errors[kind] = model.step, str(error)
    return results, errors


def train_alone(name):
    if name != "unused":
        return train(Routed(name), slice(None))
    model, optimizer_steps = Unused(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(NUM_STEPS):
        batch = batch_of(step)
        loss = 0.0
        for index in range(2):
            model.is_first, part = index == 0, batch[[index, index + 2]]
            loss = loss + (model(part) - part).square().mean() / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer_steps.append(loss.detach())
    return torch.stack(optimizer_steps), {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.spawns
def test_in_one_process_an_accumulation_window_keeps_what_its_last_part_does_not_use(run_ranks):
    (result,) = run_ranks(accumulate_alone, world_size=1)
    for name, value in train_alone("unused")[1].items():
        torch.testing.assert_close(result[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def accumulate_alone():
    from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize

    dist.init_process_group("hyperpod")
    config = ParallelConfig(block_classes=("Linear",))
    model = parallelize(Unused(), build_mesh(config.topology(1), DEVICE), config)
    return train(model, [0, 2, 1, 3], micro_steps=2)[1]


@pytest.mark.spawns
@pytest.mark.parametrize("is_replicated", [False, True], ids=["sharded", "replicated"])
def test_ranks_that_run_different_modules_get_the_result_of_one_process_or_are_told(run_ranks, is_replicated):
    by_rank = run_ranks(train_in_units, is_replicated, world_size=2)
    for name in ("experts", "sizes", "unused"):
        losses_alone, parameters_alone = train_alone(name)
        losses = torch.stack([results[name][0] for results, _ in by_rank]).mean(0)
        torch.testing.assert_close(losses, losses_alone, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        for results, _ in by_rank:
            for key, value in parameters_alone.items():
                torch.testing.assert_close(
                    results[name][1][key], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=(name, key): f"{n}: {m}"
                )
    for _, errors in by_rank:
        assert {kind: step for kind, (step, _) in errors.items()} == {"experts": 0, "sizes": 0, "exit": 0, "late": LATE}
        for _, text in errors.values():
            assert "experts.1" in text
            assert "block_classes" in text


def evaluate_in_units():
    """What four ranks are told, of which 0 and 1 have the shards of one replica, 2 and 3 those of the other."""
    from hyperpod_plugins.comm import group_health
    from hyperpod_plugins.parallel import ParallelConfig, build_mesh, gather_trace, parallelize
    from hyperpod_plugins.parallel.unit_watch import _watches_of
    from hyperpod_plugins.recovery.program_collectives import program_frames
    from hyperpod_plugins.recovery.undo import end_iteration

    gather_trace._NUM_CHECKED = 8
    dist.init_process_group("hyperpod")
    rank, told, values = dist.get_rank(), {}, []
    config = ParallelConfig(block_classes=("Sequential",), hybrid_shard_degree=2)

    def evaluate(model, *, kind="late", times=1):
        model.kind = kind
        with torch.no_grad():
            for _ in range(times):
                value = model(batch_of(0)[rank % 2 * 2 :][:2]).sum()
        model.kind = "late"
        return value

    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(2):
            model(batch_of(step)[2:]).square().mean().backward()
            optimizer.step()
            model.to(DEVICE)  # as when a fit begins again
            optimizer.zero_grad()

    def differ_at_once(model):
        evaluate(model, kind="experts")

    def differ_between_steps(model):
        evaluate(model, times=4)
        train(model)
        evaluate(model, kind="experts" if rank > 1 else "late")
        train(model)

    def differ_for_long(model):
        evaluate(model, times=4)
        evaluate(model, kind="experts", times=8)

    def differ_between_replicas(model):
        values.append(evaluate(model, times=1 + 5 * (rank > 1)))
        train(model)
        evaluate(model, times=1 + rank // 2)
        train(model)

    def begin_again(model):
        teacher = parallelize(Routed("late"), build_mesh(config.topology(4), DEVICE), config)
        for each in (model, teacher):
            evaluate(each, times=2)
            if rank == 3:  # a replacement that runs the rest of an evaluation has gathered nothing
                for watch in _watches_of(each):
                    watch.without_gradients.clear()
        end_iteration(model)
        for each in (model, teacher):
            evaluate(each, times=4)
        train(model)

    def is_looked_at(model):
        found = []
        group_health.on_set_up = lambda kind, *_: found.append((kind, bool(program_frames())))
        evaluate(model)
        model(batch_of(0)[2:])
        group_health.on_set_up = None
        values.append(sorted(set(found)))

    for case in (
        is_looked_at,
        differ_at_once,
        differ_between_steps,
        differ_for_long,
        differ_between_replicas,
        begin_again,
    ):
        model = parallelize(Routed("late"), build_mesh(config.topology(4), DEVICE), config)
        try:
            case(model)
        except UnitsDiffer as error:
            told[case.__name__] = str(error)
        dist.barrier()
    return told, values


@pytest.mark.spawns
def test_ranks_of_a_replica_that_evaluate_different_modules_are_told(run_ranks):
    for rank, (told, values) in enumerate(run_ranks(evaluate_in_units, world_size=4)):
        found, value = values
        assert [kind for kind, is_of_program in found if is_of_program] == ["all_gather"], found
        assert ("all_reduce", False) in found  # a comparison, which a replacement does not repeat
        assert told.keys() == {"differ_at_once", "differ_between_steps", "differ_for_long"}
        for case, text in told.items():
            replica = rank // 2 if case != "differ_between_steps" else 1  # where only the second one differs
            assert f"rank {2 * replica} gathers experts.1, but rank {2 * replica + 1} gathers experts.0" in text
            assert "block_classes" in text
        with torch.no_grad():
            torch.testing.assert_close(value, Routed("late")(batch_of(0)[rank % 2 * 2 :][:2]).sum())


def train_with_a_look(shard, share):
    """Losses of two networks that are also run without gradients before each of their optimizers steps."""
    torch.manual_seed(1)
    nets = [shard(nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.2) for net in nets]
    looks = []
    for step in range(3):
        x = batch_of(step)[share]
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            hidden = nets[0](x)
            nets[1](hidden).square().mean().backward()
            with torch.no_grad():
                looks.append(nets[1](x).square().mean())
                looks.append(net(x).square().mean())
            optimizer.step()
    return torch.stack(looks)


def look_in_ranks():
    from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize

    dist.init_process_group("hyperpod")
    share, losses = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2), []
    for config in (ParallelConfig(), ParallelConfig(hybrid_shard_degree=1)):
        mesh = build_mesh(config.topology(2), DEVICE)
        losses.append(train_with_a_look(lambda net, c=config, m=mesh: parallelize(net, m, c), share))
    return losses


@pytest.mark.spawns
def test_a_forward_before_the_optimizer_steps_does_not_keep_its_parameters(run_ranks):
    by_rank = run_ranks(look_in_ranks, world_size=2)
    wanted = train_with_a_look(lambda net: net, slice(None))
    for layout in range(2):
        found = torch.stack([losses[layout] for losses in by_rank]).mean(0)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_plain_model_has_nothing_to_reconcile():
    assert not reconcile_gradients(nn.Linear(2, 2))
    assert reconcile_gradients(nn.Linear(2, 2), torch.tensor(0, dtype=torch.uint8)) == 0
    assert reconcile_gradients(nn.Linear(2, 2), torch.tensor(2, dtype=torch.uint8)) == 2


class Kept(nn.Module):
    """Two layers, of which FSDP2 keeps the second one gathered between forward and backward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.block, self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.late = nn.Parameter(torch.ones(WIDTH))
        self.is_late_used = True

    def forward(self, x):
        x = self.head(self.block(x))
        return x * self.late if self.is_late_used else x


def drop_nothing(model, optimizer):
    pass


def drop_in_model(model, optimizer):
    model.zero_grad()


def drop_in_place(model, optimizer):
    optimizer.zero_grad(set_to_none=False)


def drop_in_optimizer(model, optimizer):
    optimizer.zero_grad()


def drop_nothing_with_recovery(model, optimizer):
    from hyperpod_plugins.recovery.undo import StepStart

    StepStart(model, [optimizer])


DROPS = drop_nothing, drop_in_model, drop_in_place, drop_in_optimizer, drop_nothing_with_recovery


def drop_between_forward_and_backward():
    from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize

    if not dist.is_initialized():
        dist.init_process_group("hyperpod")
    rank, told = dist.get_rank(), {}
    config = ParallelConfig(block_classes=("Sequential",))
    for drop in DROPS:
        model = parallelize(Kept(), build_mesh(config.topology(2), DEVICE), config)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        try:
            for step in range(NUM_STEPS):
                loss = model(batch_of(step)[2 * rank : 2 * rank + 2]).square().mean()
                drop(model, optimizer)
                loss.backward()
                optimizer.step()
            told[drop.__name__] = model.head.weight.full_tensor().detach()
        except LoopError as error:
            told[drop.__name__] = step, str(error)
    return told


def weight_of_one_process(drop):
    model = Kept()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(NUM_STEPS):
        loss = model(batch_of(step)).square().mean()
        drop(model, optimizer)
        loss.backward()
        optimizer.step()
    return model.head.weight.detach()


@pytest.mark.spawns
def test_gradients_that_were_dropped_while_their_parameters_were_gathered_are_not_added_to(run_ranks):
    """Those that a program adds up over its steps are, as in one process."""
    for told in run_ranks(drop_between_forward_and_backward, world_size=2):
        step, text = told["drop_in_model"]
        assert step == 1
        assert "head.weight" in text
        assert "block" not in text
        step, text = told["drop_nothing_with_recovery"]
        assert step == 1
        assert "a process that replaces a lost one would not have them" in text
        for drop in (drop_nothing, drop_in_place, drop_in_optimizer):
            torch.testing.assert_close(told[drop.__name__], weight_of_one_process(drop))


def accumulate_in_bfloat16():
    from hyperpod_plugins.parallel import ParallelConfig, build_mesh, parallelize

    if not dist.is_initialized():
        dist.init_process_group("hyperpod")
    rank, results = dist.get_rank(), []
    for used_in in ((True, True), (False, True), (True, False), (False, False)):
        config = ParallelConfig(block_classes=("Sequential",), precision="bf16-mixed")
        model = parallelize(Kept(), build_mesh(config.topology(2), DEVICE), config)
        for index, model.is_late_used in enumerate(used_in):
            model.set_requires_gradient_sync(index == 1)
            model(batch_of(0)[2 * rank : 2 * rank + 2]).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.05).step()
        gradient = model.late.grad
        results.append(None if gradient is None else (gradient.dtype, gradient.full_tensor()))
    return results


@pytest.mark.spawns
def test_micro_steps_of_mixed_precision_may_use_different_parameters(run_ranks):
    for both, second, first, none in run_ranks(accumulate_in_bfloat16, world_size=2):
        assert none is None
        assert both[0] == second[0] == first[0] == torch.float32
        torch.testing.assert_close(both[1], first[1] + second[1], rtol=0.02, atol=0.02)


def train_before_a_critic(is_frozen):
    """Gradients flow through a network that no optimizer has: what is kept and sent, and what ranks are told."""
    from hyperpod_plugins.parallel import ParallelConfig, build_mesh, gather_trace, parallelize, unit_watch
    from hyperpod_plugins.parallel.unit_watch import _watches_of

    gather_trace._NUM_CHECKED, unit_watch._NUM_CHECKED_EVENTS, unit_watch._EVERY = 8, 8, 4
    dist.init_process_group("hyperpod")
    rank = dist.get_rank()
    config = ParallelConfig(block_classes=("Sequential",))
    model, critic = (parallelize(Routed("late"), build_mesh(config.topology(2), DEVICE), config) for _ in range(2))
    critic.requires_grad_(not is_frozen)
    (watch,) = _watches_of(critic)
    optimizer, calls, lengths, sent = torch.optim.SGD(model.parameters(), lr=0.05), [], [], []
    all_reduce = dist.all_reduce
    dist.all_reduce = lambda *args, **more: calls.append(more.get("op")) or all_reduce(*args, **more)

    def step():
        calls.clear()
        x = batch_of(0)[2 * rank :][:2]
        critic(x + 0.01 * model(x)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        lengths.append(len(watch.trace) + sum(len(each._events) for each in watch.without_gradients.values()))
        sent.append(calls.count(dist.ReduceOp.MAX))

    for _ in range(20):
        step()
    shard = optimizer.param_groups[0]["params"][-1]
    weight = shard.to_local().detach().clone()
    try:
        for number in range(20):
            if number == 1:  # units of one size: without the check, shards of both would be joined
                critic.kind = "experts"
            step()
            weight = shard.to_local().detach().clone()
    except UnitsDiffer as error:
        told = str(error)
    else:
        told = ""
    return lengths[:20], sent[4:20], number, told, torch.equal(weight, shard.to_local())


@pytest.mark.spawns
@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_network_that_no_optimizer_has(run_ranks, is_frozen):
    for lengths, sent, number, told, is_unchanged in run_ranks(train_before_a_critic, is_frozen, world_size=2):
        assert max(lengths) < 20, lengths
        assert max(sent) <= 3, sent  # it gathers five times and more
        assert "ranks ran different modules" in told
        assert number == 1 or not is_frozen
        assert is_unchanged
