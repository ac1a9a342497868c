"""The state of one rank on its way to another: the same bits arrive, whatever the tensors are like, or an error."""

import itertools
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn

from hyperpod_plugins.comm import Channel, break_groups
from hyperpod_plugins.errors import PeerLost, RecoveryError
from hyperpod_plugins.recovery import TrainingState
from hyperpod_plugins.recovery.state_transfer import (
    ALONE_BYTES,
    MESSAGE_BYTES,
    _batches,
    _message_of,
    _room_for,
    frozen_parameters,
)

FIRST_LARGE, FIRST_TURNED, SMALL_ONES = 0, 1, 6
"""Numbers of messages after the header."""


class Parts(nn.Module):
    """Tensors of every kind; the state of their optimizer has as many."""

    def __init__(self):
        super().__init__()
        self.narrow = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))  # the next one in its message is not aligned
        self.small = nn.Parameter(torch.randn(3, 7))
        self.large = nn.Parameter(torch.randn(ALONE_BYTES // 4 + 1))
        self.turned = nn.Parameter(torch.randn(5, 3).t())
        self.large_turned = nn.Parameter(torch.randn(300, 400).t())
        self.empty = nn.Parameter(torch.randn(0, 7))  # a shard of a parameter with fewer rows than ranks
        self.register_buffer("num_calls", torch.randint(100, ()))


def build(seed, rate=0.1, change=lambda model: None):
    torch.manual_seed(seed)
    model = Parts()
    change(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    return model, optimizer, TrainingState(model, [optimizer], verify=True)


def train(model, optimizer):
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.step()


def values(model, optimizer):
    found = dict(model.state_dict())
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{key}": value for key, value in state.items()}
    return {name: value.clone() for name, value in found.items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def flipped(number):
    """One bit of this message changes on the way."""
    send = Channel.send

    def altered(self, label, parts, ranks):
        if label == "tensors" and number >= 0:
            parts[number] = parts[number].clone()
            parts[number][-1] ^= 1
        send(self, label, parts, ranks)

    return patch.object(Channel, "send", altered)


def hand_over(state, number=-1):
    """Rank 0 gives its state to rank 1; returns why that was refused."""
    if dist.get_rank() == 0:
        with flipped(number):
            state.send(1)
        return ""
    try:
        state.receive(0)
    except RecoveryError as error:
        return str(error)
    return ""


def exchange():
    """State goes over in peace, with a bit that flips, once more, with nothing in it, and to another model."""
    torch.set_num_threads(1)
    dist.init_process_group("hyperpod")
    rank = dist.get_rank()
    model, optimizer, state = build(seed=rank, rate=0.1 * (rank + 1))
    if rank == 0:
        train(model, optimizer)  # the other one has no optimizer state yet
    found = {"said": [hand_over(state)], "arrived": values(model, optimizer)}
    train(model, optimizer)
    found["trained on"] = values(model, optimizer)
    found["said"] += [hand_over(state, number) for number in (FIRST_LARGE, FIRST_TURNED, SMALL_ONES)]
    found["said"].append(hand_over(state))
    found["arrived again"] = values(model, optimizer)
    nothing = nn.ParameterList([nn.Parameter(torch.empty(0, 4))])
    found["said"].append(hand_over(TrainingState(nothing, [torch.optim.SGD(nothing.parameters())], verify=True)))
    if rank == 0:
        with pytest.raises(PeerLost):  # the other one does not take what it cannot use
            hand_over(state)
    else:
        found["said"].append(hand_over(build(seed=0, change=widen)[2]))
        break_groups("a test")
    return found


@pytest.fixture(scope="module")
def exchanged():
    return run_ranks(exchange, world_size=2, timeout_s=60.0)


@pytest.mark.spawns
@pytest.mark.parametrize("when", ["arrived", "trained on", "arrived again"])
def test_the_same_bits_arrive_and_train_on(exchanged, when):
    giver, taker = exchanged
    assert_same(taker[when], giver[when])


@pytest.mark.spawns
def test_flipped_bits_and_other_models_are_refused(exchanged):
    peace, *struck, again, nothing, other = exchanged[1]["said"]
    assert peace == again == nothing == ""
    assert all("rank 0 arrived with other bits" in each for each in struck)
    assert "rank 0 holds other tensors" in other
    assert "parameter.small" in other


# -- without ranks: the way of snapshots ---------------------------------------------------------------------------


def recorded(state):
    data = torch.empty(state.num_bytes(), dtype=torch.uint8)
    state.copy_to(data)
    return state.header(), data


def test_a_record_is_taken_as_it_was_or_not_at_all():
    model, optimizer, state = build(seed=0)
    train(model, optimizer)
    header, data = recorded(state)
    other_model, other_optimizer, other = build(seed=1)
    before = values(other_model, other_optimizer)
    data[-1] ^= 1
    with pytest.raises(RecoveryError, match="arrived with other bits"):
        other.copy_from(header, data, "a test")
    assert_same(values(other_model, other_optimizer), before)
    data[-1] ^= 1
    other.copy_from(header, data, "a test")
    assert_same(values(other_model, other_optimizer), values(model, optimizer))


def test_sender_and_receiver_form_the_same_messages_wherever_tensors_lie():
    sizes = [8, 8, ALONE_BYTES, 8, 8, ALONE_BYTES - 1, *[ALONE_BYTES - 1] * (MESSAGE_BYTES // ALONE_BYTES)]
    ways = [itertools.repeat("cpu"), itertools.repeat("meta"), itertools.cycle(["cpu", "meta"])]
    messages = [
        [[tensor.nbytes for tensor in batch] for batch in _batches(map(of_bytes, sizes, devices))] for devices in ways
    ]
    assert messages[0] == messages[1] == messages[2]
    assert list(map(len, messages[0])) == [1, 4 + MESSAGE_BYTES // ALONE_BYTES, 1]
    mixed = [of_bytes(8, "cpu"), of_bytes(4, "meta"), of_bytes(2, "cpu")]
    for tensors in (mixed, mixed[::-1]):
        for message in (_message_of(tensors), _room_for(tensors)):
            assert (message.nbytes, message.device.type) == (14, "meta")


def of_bytes(size, device):
    return torch.empty(size, dtype=torch.uint8, device=device)


def test_room_that_was_made_before_is_filled():
    model, optimizer, giver = build(1)
    train(model, optimizer)
    other, its_optimizer, taker = build(2)
    taker.preallocate(giver.header())
    room = {key: value for state in its_optimizer.state.values() for key, value in state.items() if value.numel()}
    assert room
    assert not any(value.any() for value in room.values())
    train(model, optimizer)
    taker.copy_from(*recorded(giver), "a peer")
    assert_same(values(other, its_optimizer), values(model, optimizer))
    kept = [value for state in its_optimizer.state.values() for value in state.values()]
    assert all(any(value is each for each in kept) for value in room.values())


def test_room_in_a_compiled_module():
    """Its parameters have longer names than they are saved under."""
    (model, optimizer), (other, others) = (
        (model, torch.optim.AdamW(model.parameters()))
        for model in (nn.Sequential(torch.compile(nn.Linear(3, 2))) for _ in range(2))
    )
    train(model, optimizer)
    state, taken = TrainingState(model, [optimizer]), TrainingState(other, [others])
    data = torch.empty(state.num_bytes(), dtype=torch.uint8)
    state.copy_to(data)
    taken.copy_from(state.header(), data, "rank 0")
    assert_same(values(other, others), values(model, optimizer))


def test_parameters_that_a_program_has_frozen_or_trains_by_now():
    (model, _, state), (other, _, taken) = build(1), build(2)
    model.small.requires_grad_(False)
    other.large.requires_grad_(False)
    data = torch.empty(state.num_bytes(), dtype=torch.uint8)
    state.copy_to(data)
    taken.copy_from(state.header(), data, "rank 0")
    assert frozen_parameters(other) == ["small"]


def widen(model):
    model.small = nn.Parameter(torch.randn(4, 7))


def retype(model):
    model.narrow = nn.Parameter(torch.randn(5, dtype=torch.float16))


def leave_out(model):
    del model.small


def add(model):
    model.more = nn.Parameter(torch.randn(3))


def rename(model):
    model.renamed = model.small
    del model.small


def reorder(model):
    small = model.small
    del model.small
    model.small = small


@pytest.mark.parametrize("change", [widen, retype, leave_out, add, rename, reorder])
def test_the_record_of_another_model_is_refused(change):
    model, optimizer, state = build(seed=0)
    train(model, optimizer)
    header, data = recorded(state)
    other_model, other_optimizer, other = build(seed=1, change=change)
    train(other_model, other_optimizer)
    before = values(other_model, other_optimizer)
    with pytest.raises(RecoveryError, match="a test holds other tensors"):
        other.copy_from(header, data, "a test")
    assert_same(values(other_model, other_optimizer), before)
