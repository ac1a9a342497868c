"""State of one rank alone: which buffers are, and what a buddy keeps of it."""

import json

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn

from hyperpod_plugins.errors import CheckpointMismatch, PeerLost
from hyperpod_plugins.events import listen
from hyperpod_plugins.parallel.topology import Topology
from hyperpod_plugins.recovery.buffer_states import BufferStates, bytes_of
from hyperpod_plugins.recovery.local_objects import ProgramState
from hyperpod_plugins.recovery.local_state import LocalStates, _is_whole, _last_two, _unpacked
from hyperpod_plugins.recovery.packing import are_same


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("constant", torch.ones(10_000))
        self.register_buffer("scale", torch.zeros(1))
        self.register_buffer("empty", None)

    def forward(self, x):
        self.scale = self.scale + 1  # another tensor
        return self.norm(x)


def names(state):
    return [name for name, _, _ in json.loads(state.get("forms", "[]"))]


def test_buffers_that_steps_change_are_of_one_rank():
    net, other = Net(), Net()
    states = BufferStates(net)
    first = names(states.state_dict())
    net(torch.randn(4, 3))
    found = states.state_dict()
    assert names(found) == first == ["scale", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    taken = BufferStates(other)
    other.constant.copy_(torch.ones(10_000))  # from a replica
    assert "constant" in names(taken.state_dict())
    taken.load_state_dict(found)
    assert all(torch.equal(a, b) for a, b in zip(net.buffers(), other.buffers(), strict=True))
    assert names(taken.state_dict()) == first
    net.constant.add_(1)
    assert "constant" in names(states.state_dict())


DTYPES = [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
def test_buffers_of_all_types_come_back_to_the_last_bit(dtype):
    net, other = nn.Module(), nn.Module()
    for module in (net, other):
        for name, shape in (("whole", (3, 2)), ("none", (0, 2)), ("single", ())):
            module.register_buffer(name, torch.zeros(shape).to(dtype))
        module.register_buffer("turned", torch.zeros(2, 3).to(dtype).t())
        module.register_buffer("conjugated", torch.zeros(3).to(dtype).conj())
        module.register_buffer("negated", torch.zeros(3, dtype=torch.complex64).conj().imag)
    for buffer in net.buffers():
        buffer.copy_(torch.rand(buffer.shape).mul(9).to(buffer.dtype))
    other_states = BufferStates(other)
    other_states.load_state_dict(BufferStates(net).state_dict())
    assert all(map(are_same, net.buffers(), other.buffers()))
    assert not other_states.written(BufferStates(net).state_dict())


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("torch.float32", 2),
        ("torch.float32", -1),
        ("torch.float32", "1"),
        ("torch.save", 1),
        ("torch.quint8", 1),  # torch crashes where it makes one
        ("torch.bits8", 1),
    ],
)
def test_malformed_buffers_are_refused(kind, size):
    forms = json.dumps([("scale", kind, (size,))])
    with pytest.raises(CheckpointMismatch, match="has no values for 'scale'"):
        BufferStates(Net()).load_state_dict({"forms": forms, "data": bytes(4)})


@pytest.mark.parametrize("forms", [None, 5, "{", "[[1]]", '[["scale", "torch.float32"]]', "[" * 100_000])
def test_a_description_of_buffers_that_is_malformed_is_refused(forms):
    with pytest.raises(CheckpointMismatch, match="does not say what it holds"):
        BufferStates(Net()).load_state_dict({"forms": forms, "data": bytes(4)})


@pytest.mark.parametrize("name", ["none such", ["scale"], "constant"])
def test_values_that_fit_no_buffer_are_refused(name):
    forms = json.dumps([(name, "torch.float32", (1,))])
    with pytest.raises(CheckpointMismatch, match="has a buffer"):
        BufferStates(Net()).load_state_dict({"forms": forms, "data": bytes(4)})


def test_buffers_of_a_device_are_copied_at_once_and_to_the_same_bytes(monkeypatch):
    tensors = [torch.rand(3, 2), torch.arange(5), torch.tensor(True), torch.empty(0), torch.rand(2, 3).t().bfloat16()]
    wanted = bytes_of(tensors)
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda", 0))  # what is asked about, not where they lie
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, _: tensor)
    assert bytes_of(tensors) == wanted


class Table(nn.Module):
    """The program has been changed between two jobs, and with it what no checkpoint of the model has."""

    def __init__(self, *, size, factor, has_more):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("table", torch.zeros(size), persistent=False)
        self.register_buffer("factor", torch.tensor(factor), persistent=False)
        if has_more:
            self.register_buffer("more", torch.ones(()), persistent=False)


def test_another_job_takes_the_buffers_that_a_checkpoint_of_the_model_has():
    former, changed = Table(size=4, factor=1.0, has_more=True), Table(size=6, factor=2.0, has_more=False)
    former.norm(torch.randn(5, 3))
    saved, states = BufferStates(former).state_dict(), BufferStates(changed)
    states.load_state_dict(states.fitting(saved))
    assert torch.equal(changed.norm.running_mean, former.norm.running_mean)
    assert (float(changed.factor), changed.table.shape) == (2.0, (6,))
    again = Table(size=4, factor=2.0, has_more=True)  # the same program, in the same job
    BufferStates(again).load_state_dict(saved)
    assert float(again.factor) == 1.0


def test_the_state_of_a_step_and_of_the_one_before_are_kept():
    kept = {}
    for step in (5, 6, 6, 7, 3, 4):
        kept = _last_two(kept, step, b"%d" % step)
    assert kept == {3: b"3", 4: b"4"}
    assert _last_two({6: b"6", 7: b"7"}, 7, b"again") == {6: b"6", 7: b"again"}


class Total:
    """Registered by a program."""

    def state_dict(self):
        return {"value": 0.0}

    def load_state_dict(self, state):
        raise AssertionError(state)


def test_only_state_that_comes_with_the_parameters_counts_as_another_ranks():
    heard = []
    end = listen(heard.append)
    states = LocalStates(Topology(world_size=2), 1)
    states.register("buffers", BufferStates(Net()))
    states._take(5, b"", {}, [0, 1], False)
    states.register("registered 'total'", ProgramState("total", Total()))
    states._take(6, b"", {}, [0, 1], False)
    end()
    why = "rank 0, its buddy, was lost too"
    assert [event.details["cause"] for event in heard] == [
        f"rank 1 goes on after step 5 with another rank's buffers: {why}",
        f"rank 1 goes on after step 6 with another rank's buffers, and with registered 'total' as this process has "
        f"created it: {why}",
    ]


class Count:
    """Registered by a program."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Metric(Count):
    """As the classes of torchmetrics are recognized."""


Metric.__module__ = "torchmetrics.aggregation"


def registered(topology, rank, count, metric, **former):
    states = LocalStates(topology, rank, **former)
    states.register("registered 'count'", ProgramState("count", count))
    states.register("registered 'metric'", ProgramState("metric", metric))
    return states


def grow_from_two_to_four(*, are_equal, is_in_body):
    """Rank 1 of the former world is lost as the job grows; ranks 2 and 3 are new. What each has then, and heard."""
    if not dist.is_initialized():
        dist.init_process_group("hyperpod")
    rank, heard = dist.get_rank(), []
    former, world = Topology(world_size=2, shard_degree=1), Topology(world_size=4, shard_degree=1)
    count, metric = Count(), Metric()
    if rank < 2:
        before = registered(former, rank, count, metric)
        for step in (1, 2):
            count.value, metric.value = (10 * step, 0) if are_equal else (10 * step + rank, 5)
            before.note_equal(step, is_equal=not before.exchange(step))
            if step == 1:
                before.begin(step)
    if rank == 1:
        count, metric = Count(), Metric()
    of_before = {} if rank else {"former": before, "former_ranks": {0: 0, 1: 1}}
    states = registered(world, rank, count, metric, **of_before)
    known = states.unshared_ranks, states.equal_step
    if is_in_body:
        states.before = states.state()
        count.value += 1  # by code that precedes the step in its body
    end = listen(heard.append)
    sources = dict.fromkeys((1, 2, 3), 0)
    states.send_to_joiners(sources, bytes)
    states.restore(2, sources, are_equal=are_equal)
    end()
    found = count.value, metric.value
    states.return_to_before()
    began = count.value
    states.exchange(3)
    return known, found, began, states.unshared_ranks, [event.details["cause"] for event in heard]


def grow_in_several_jobs():
    return [
        grow_from_two_to_four(are_equal=are_equal, is_in_body=is_in_body)
        for are_equal, is_in_body in ((False, False), (False, True), (True, False))
    ]


@pytest.mark.spawns
def test_what_new_ranks_begin_with_and_what_is_lost_as_the_job_grows():
    """New ranks begin with the state of a replica, but for metrics; that of a rank that was there before is lost."""
    of_zero, *of_others = run_ranks(grow_in_several_jobs, world_size=4)
    known = [((0, 1), -1), ((0, 1), -1), ((0, 1), 2)]
    assert of_zero == [
        (of_first, found, began, (), [])
        for of_first, found, began in zip(known, [(20, 5), (21, 5), (20, 0)], [20, 20, 20], strict=True)
    ]
    for rank, of_rank in enumerate(of_others, start=1):
        lost = (
            [
                "rank 1 goes on after step 2 with another rank's registered 'count', and with registered 'metric' as "
                "this process has created it: rank 2, its buddy, was lost too"
            ]
            if rank == 1
            else []
        )
        assert of_rank == [
            (((), -1), (20, 0), 20, (), lost),
            (((), -1), (21, 0), 20, (), lost),
            (((), -1), (20, 0), 20, (), []),
        ], rank


def test_ranks_that_never_shared_a_state_in_a_world_are_new_in_the_next_one():
    def following(former, former_ranks):
        of_former = {"former": former, "former_ranks": former_ranks}
        return registered(Topology(world_size=3), 0, Count(), Metric(), **of_former)

    first = registered(Topology(world_size=2), 0, Count(), Metric())
    second = following(first, {0: 0, 1: 1})  # rank 2 is new
    third = following(second, {0: 0, 1: 2, 2: 1})
    assert (first.unshared_ranks, second.unshared_ranks, third.unshared_ranks) == ((), (0, 1), (0, 2))
    assert LocalStates(Topology(world_size=3), 0, former=first, former_ranks={0: 0}).unshared_ranks == ()


class Averaged(nn.Module):
    """A step writes `seen`, other values on each rank; what follows it writes `num_averaged` and `teacher`."""

    def __init__(self):
        super().__init__()
        for name in ("seen", "num_averaged", "teacher", "late"):
            self.register_buffer(name, torch.zeros(1))

    def step(self):
        self.seen += 1 + dist.get_rank()

    def follow(self):
        self.num_averaged += 1
        self.teacher.copy_(self.seen)

    def values(self):
        return [float(each) for each in self.buffers()]


def lose_rank_one(*, num_steps, is_followed, shared_at):
    """The values of both ranks where rank 1 would have been, and where a replacement is; and what `kept` then has."""
    if not dist.is_initialized():
        dist.init_process_group("hyperpod")
    topology, rank = Topology(world_size=2), dist.get_rank()
    model = Averaged()
    states = LocalStates(topology, rank)
    states.register("buffers", BufferStates(model))
    for step in range(1, num_steps + 1):
        model.step()
        states.exchange(step)
        model.follow()
        if step < num_steps or is_followed:
            states.begin(step)
    wanted, replica = model.values(), [torch.zeros(1) for _ in model.buffers()]
    for mine, of_zero in zip(model.buffers(), replica, strict=True):
        dist.broadcast(of_zero.copy_(mine), 0)
    usable = states.kept_steps
    if rank == 1:  # a new process, to which rank 0 has given what it holds
        model, states = Averaged(), LocalStates(topology, rank)
        for mine, of_zero in zip(model.buffers(), replica, strict=True):
            mine.copy_(of_zero)
        states.register("buffers", BufferStates(model))
    states.restore(shared_at, {1: 0})
    found = model.values()
    states.restore(3, {})  # a return to a snapshot: everybody has the state of an earlier step
    states.exchange(4)
    return wanted, found, sorted(states._kept), sorted(states._own), usable


def lose_rank_one_of_several_jobs():
    return [
        lose_rank_one(num_steps=5, is_followed=True, shared_at=5),
        lose_rank_one(num_steps=5, is_followed=False, shared_at=5),
        lose_rank_one(num_steps=1, is_followed=True, shared_at=1),
    ]


@pytest.mark.spawns
def test_what_follows_a_commit_is_not_overwritten_by_what_was_given_before_it():
    of_zero, of_one = run_ranks(lose_rank_one_of_several_jobs, world_size=2)
    for wanted, found, kept, own, _ in of_zero:
        assert (found, kept, own) == (wanted, [3, 4], [3, 4])
    # A state from before what hooks wrote, of which each rank has its own, is none to go on with.
    assert [usable for *_, usable in of_zero] == [(5,), (4,), (1,)]
    (wanted, found, *_), (in_hooks, found_in_hooks, kept, own, _), (first, found_first, *_) = of_one
    assert found == wanted == [10, 5, 10, 0]  # given at the beginning of each step
    assert found_first == first == [2, 1, 2, 0]  # of the first one, too
    # Nobody has what the lost rank's hooks wrote of its own: the replica's values agree with one another.
    assert found_in_hooks[:2] == in_hooks[:2]
    assert found_in_hooks[2] == in_hooks[2] / 2
    assert (kept, own) == ([3, 4], [3, 4])


def lose_rank_one_after_rare_writes(*, is_replaced):
    """What rank 0 can give a replacement of rank 1, which is lost in hooks that write to `seen` for once."""
    model, states, rank = Averaged(), LocalStates(Topology(world_size=2), dist.get_rank()), dist.get_rank()
    states.register("buffers", BufferStates(model))
    for step in range(1, 6):
        model.step()
        states.exchange(step)
        if step == 5 or (step == 2 and is_replaced):
            model.seen *= 2
        model.num_averaged += not is_replaced
        if step < 5:
            states.begin(step)
        if step == 3 and is_replaced:
            if rank == 1:
                states = LocalStates(Topology(world_size=2), rank)
                states.register("buffers", BufferStates(model))
            states.restore(step, {1: 0})
    if not is_replaced and rank == 0:  # it hears of the loss as it begins the next step
        states._channel.exchange = no_answer
        states.begin(5)
    return states.kept_steps


def no_answer(*_, **__):
    raise PeerLost("rank 1 is lost")


def lose_rank_one_after_each_kind_of_rare_writes():
    dist.init_process_group("hyperpod")
    return [lose_rank_one_after_rare_writes(is_replaced=True), lose_rank_one_after_rare_writes(is_replaced=False)]


@pytest.mark.spawns
def test_hooks_that_write_rarely_have_written_on_a_rank_that_is_lost_there():
    (after_a_loss, beside_others), _ = run_ranks(lose_rank_one_after_each_kind_of_rare_writes, world_size=2)
    assert after_a_loss == (4,)  # the one before that wrote in step 2, and the present process has not yet
    assert beside_others == (4,)  # each step wrote a counter, which is equal on both ranks


def lose_rank_one_after_a_first_write():
    """The same with hooks that write for the first time, each rank another value."""
    dist.init_process_group("hyperpod")
    model, states = Averaged(), LocalStates(Topology(world_size=2), dist.get_rank())
    states.register("buffers", BufferStates(model))
    for step in range(1, 6):
        states.exchange(step)
        if step == 5:
            model.seen.add_(dist.get_rank())
            model.late.add_(1)
        states.begin(step)
    return states.kept_steps


@pytest.mark.spawns
def test_what_hooks_write_for_the_first_time_may_differ_where_ranks_have_agreed():
    of_zero, _ = run_ranks(lose_rank_one_after_a_first_write, world_size=2)
    assert of_zero == (4,)


class Sized:
    """A state of so many bytes, which changes, or not, from step to step."""

    def __init__(self):
        self.values = torch.zeros(0, dtype=torch.uint8)

    def state_dict(self):
        return {"values": self.values.clone()}

    def load_state_dict(self, state_dict, leave=()):
        self.values = state_dict["values"].clone()

    def written(self, before, now=None):
        return set()


SIZES = [  # of each rank in each step: none, a few, around the largest that goes at once, what follows, too much
    [0, 0, 0],
    [10, 20_000, 10],
    [10, 20_000, 10],
    [20_000, 10, 100_000],
    [16_000, 16_384, 17_000],
    [3_000_000, 10, 20_000],
    [3_000_000, 3_000_001, 0],
    [5, 5, 5],
]


def share_states_of_all_sizes():
    dist.init_process_group("hyperpod")
    rank, sized = dist.get_rank(), Sized()
    states = LocalStates(Topology(world_size=3), rank)
    states.register("sized", sized)
    found = []
    for step, sizes in enumerate(SIZES, start=1):
        sized.values = torch.full((sizes[rank],), rank, dtype=torch.uint8)
        assert states.exchange(step)
        found.append(states._kept[step])
    return [_unpacked(each)["sized"]["values"].tolist() if _is_whole(each) else None for each in found]


@pytest.mark.spawns
def test_buddies_keep_states_of_all_sizes_beside_others():
    of_ranks = run_ranks(share_states_of_all_sizes, world_size=3, timeout_s=60)
    source_of = [found[-1][0] for found in of_ranks]
    assert sorted(source_of) == [0, 1, 2]
    for found, source_rank in zip(of_ranks, source_of, strict=True):
        wanted = [[source_rank] * sizes[source_rank] if sizes[source_rank] < 2**20 else None for sizes in SIZES]
        assert found == wanted


def lose_two_of_three(num_bytes):
    """Whether a rank found a difference, the step after which all were equal, and the sum of the state at the end."""
    if not dist.is_initialized():
        dist.init_process_group("hyperpod")
    topology, rank = Topology(world_size=3), dist.get_rank()
    sized, repeated = Sized(), Sized()

    def registered():
        states = LocalStates(topology, rank)
        states.register("sized", sized)
        states.register("repeated", repeated, is_repeated=True)
        return states

    states, differ = registered(), []
    for step, own in enumerate((rank, 1, 1, 1), start=1):
        sized.values = torch.full((num_bytes,), own if step < 4 else 2, dtype=torch.uint8)
        repeated.values = torch.full((10,), rank, dtype=torch.uint8)
        differ.append(states.exchange(step))
        states.note_equal(step, is_equal=not differ[-1])
        states.begin(step)
    equal_after = [states.equal_step]
    if rank:  # a new process
        sized.values, states = torch.zeros(0, dtype=torch.uint8), registered()
    states.restore(4, {1: 0, 2: 0}, are_equal=True)
    sized.values[0] = 7
    equal_after.append(states.equal_step)
    return differ, equal_after, int(sized.values.sum())


def lose_two_with_states_of_all_sizes():
    return [lose_two_of_three(num_bytes) for num_bytes in (10, 100_000, 3_000_000)]


@pytest.mark.spawns
def test_a_state_that_is_equal_on_all_ranks_outlives_a_rank_and_its_buddy():
    for rank, found in enumerate(run_ranks(lose_two_with_states_of_all_sizes, world_size=3, timeout_s=60)):
        for num_bytes, (differ, equal_after, total) in zip((10, 100_000, 3_000_000), found, strict=True):
            assert differ == [True, False, False, False]
            assert equal_after == [4, -1]  # what writes after the commit takes that back
            assert total == 2 * num_bytes + 5, rank


class Counted:
    """An object of the program that counts how often its state is read."""

    def __init__(self):
        self.value, self.num_read = 0, 0

    def state_dict(self):
        self.num_read += 1
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


@pytest.mark.parametrize("is_written", [False, True])
def test_the_beginning_of_a_step_reads_an_object_of_the_program_once(is_written):
    states, counted = LocalStates(Topology(world_size=2, shard_degree=1), 0), Counted()
    states.register("counted", ProgramState("counted", counted))
    states._last, states._own = states.state(), {1: b""}
    counted.value, counted.num_read = int(is_written), 0
    states.begin(1)
    assert counted.num_read == 1 + is_written  # once more where its parts are compared, which happens once ever
    assert ("counted" in states._written_after) == is_written
    counted.value = 7
    states.undo()
    assert counted.value == is_written
