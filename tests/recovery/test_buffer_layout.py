"""A state is taken over by a model whose buffers have other shapes, or that lacks or has some."""

import copy

import pytest
import torch
from torch import nn

from hyperpod_plugins.errors import CheckpointMismatch, ModelsDiffer
from hyperpod_plugins.recovery import TrainingState
from hyperpod_plugins.recovery.buffer_states import BufferStates
from hyperpod_plugins.recovery.packing import pack, unpack
from hyperpod_plugins.recovery.undo import Buffers


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("grown", torch.zeros(2))
        self.register_buffer("deleted", torch.ones(3))
        self.register_buffer("unset", torch.ones(1))
        self.register_buffer("set", None)
        self.register_buffer("tied", self.grown)
        self.register_buffer("untied", self.grown)
        self.last = None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.act = Inner(), nn.ReLU()


def train(net):
    """Change every buffer in another way, as a program may while it trains."""
    inner = net.inner
    inner.grown = inner.tied = torch.arange(5.0)
    inner.untied = torch.arange(5.0)
    del inner.deleted, inner.last
    inner.unset, inner.set = None, torch.tensor([True, False])
    inner.register_buffer("last", torch.tensor(7, dtype=torch.int16), persistent=False)
    net.act.register_buffer("new", torch.rand(2, 3).t())
    inner._buffers["grown"] = inner._buffers.pop("grown")


def buffers_of(net):
    return {name: (each.dtype, each.tolist()) for name, each in net.named_buffers(remove_duplicate=False)}


def assert_same(taken, given):
    assert buffers_of(taken) == buffers_of(given)
    assert taken.state_dict().keys() == given.state_dict().keys()
    assert [*taken.inner._buffers] == [*given.inner._buffers]
    assert (taken.inner.unset is None) is (given.inner.unset is None)
    assert (taken.inner.grown is taken.inner.tied) is (given.inner.grown is given.inner.tied)
    assert (taken.inner.grown is taken.inner.untied) is (given.inner.grown is given.inner.untied)


def recorded(state):
    data = torch.empty(state.num_bytes(), dtype=torch.uint8)
    state.copy_to(data)
    return state.header(), data


def state_of(net, average=None):
    return TrainingState(net, [torch.optim.AdamW(net.parameters())], average=average, verify=True)


def test_a_model_takes_over_the_buffers_of_a_later_and_of_an_earlier_step():
    given, taken = Net(), Net()
    averages = [torch.optim.swa_utils.AveragedModel(each) for each in (given, taken)]
    states = [state_of(each, average) for each, average in zip((given, taken), averages, strict=True)]
    earlier, before = recorded(states[0]), copy.deepcopy(given)
    train(given)
    train(averages[0].module)
    states[1].preallocate(states[0].header())
    states[1].copy_from(*recorded(states[0]), "a test")
    assert_same(taken, given)
    assert_same(averages[1].module, averages[0].module)
    assert recorded(states[1])[0] == recorded(states[0])[0]
    states[1].copy_from(*earlier, "the snapshot of step 0")
    assert_same(taken, before)


def test_tensors_that_fit_stay():
    given, taken = Net(), Net()
    train(given)
    train(taken)
    tensors = [*taken.buffers()]
    state_of(taken).copy_from(*recorded(state_of(given)), "a test")
    assert [*map(id, taken.buffers())] == [*map(id, tensors)]


def no_such_module(rows):
    rows[0][0] = rows[0][1] = "other.grown"


def hides_a_method(rows):
    rows[0][0] = rows[0][1] = "inner.forward"


def hides_a_table(rows):
    rows[0][0] = rows[0][1] = "inner._parameters"


def hides_a_parameter(rows):
    rows[0][0] = rows[0][1] = "inner.layer"


def has_no_tensor(rows):
    rows[0][1] = "inner.none"


@pytest.mark.parametrize("change", [no_such_module, hides_a_method, hides_a_table, hides_a_parameter, has_no_tensor])
def test_a_description_names_only_buffers_that_can_be(change):
    given, taken = Net(), Net()
    header, data = recorded(state_of(given))
    described = unpack(header)
    change(described["buffers"][""])
    before = buffers_of(taken)
    with pytest.raises(ModelsDiffer, match="a test holds other tensors"):
        state_of(taken).copy_from(pack(described), data, "a test")
    assert buffers_of(taken) == before


def test_buffers_of_one_rank_are_taken_over_by_its_replacement():
    """It has those of another rank at first."""
    given, other = Net(), Net()
    states, taken = BufferStates(given), BufferStates(other)
    train(given)
    other.inner.grown, other.inner.tied = torch.zeros(9), torch.zeros(9)
    other.act.register_buffer("alone", torch.ones(1))
    taken.load_state_dict(states.state_dict())
    other.inner.tied = other.inner.grown
    assert buffers_of(other) == buffers_of(given)
    assert other.state_dict().keys() == given.state_dict().keys()
    assert not taken.written(states.state_dict())
    other.inner.register_buffer("more", torch.ones(1))
    assert taken.written(states.state_dict()) == {"inner.more"}
    assert taken.state_dict() != states.state_dict()


def test_buffers_that_a_hook_has_written_stay():
    given, other = Net(), Net()
    found = BufferStates(given).state_dict()
    train(other)
    before = buffers_of(other)
    BufferStates(other).load_state_dict(found, leave=before.keys() | buffers_of(given).keys())
    assert buffers_of(other) == before


def test_a_large_buffer_that_no_step_wrote_and_that_is_gone_here_is_missed():
    given, other = (nn.BatchNorm1d(2) for _ in range(2))
    for each in (given, other):
        each.register_buffer("large", torch.zeros(10_000))
    states = BufferStates(given)
    del other.large
    with pytest.raises(CheckpointMismatch, match="lacks the values of its buffer 'large'"):
        BufferStates(other).load_state_dict(states.state_dict())


@pytest.mark.parametrize("layout", ["{", "[[1]]", '[["x.y", false, true, true]]', '[["forward", false, true, true]]'])
def test_a_malformed_layout_is_refused(layout):
    net = nn.BatchNorm1d(2)
    found = BufferStates(net).state_dict()
    with pytest.raises(CheckpointMismatch):
        BufferStates(net).load_state_dict({**found, "layout": layout})


def test_an_undone_step_leaves_buffers_as_they_were():
    net = Net()
    net.inner.register_buffer("scratch", torch.ones(4), persistent=False)
    before, tensors, kept = copy.deepcopy(net), [*net.buffers()], Buffers(net.modules())
    net.inner.deleted.resize_(1)
    del net.inner.scratch
    train(net)
    kept.put_back()
    assert_same(net, before)
    assert [*map(id, net.buffers())] == [*map(id, tensors)]
