"""Small states as bytes: every value comes back, and nothing that would run code is read."""

import os
import pickle
import random
from collections import OrderedDict
from functools import partial

import pytest
import torch

from hyperpod_plugins.recovery.packing import are_same, pack, unpack
from hyperpod_plugins.session.state import Position

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 5), (4, 3)])
def test_tensors_come_back_to_the_last_bit(dtype, shape):
    values = torch.rand(shape).mul(100).to(dtype)
    state = {"values": values, "others": [values.clone(), {1: values.add(1)}]}
    data = pack(state)
    assert not data.startswith(b"PK")
    assert are_same(unpack(data), state)


def test_tensors_come_back_laid_out_and_shared_as_they_were():
    whole = torch.arange(12.0).view(3, 4)
    turned, gaps, images = whole.t(), whole.view(-1)[1::2], torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last)
    state = {"whole": whole, "again": whole, "turned": turned, "gaps": gaps, "images": images}
    found = unpack(pack(state))
    assert are_same(found, state)
    assert [each.stride() for each in found.values()] == [each.stride() for each in state.values()]
    found["whole"][0, 1] = 100
    assert found["again"][0, 1] == found["turned"][1, 0] == found["gaps"][0] == 100
    for each in (turned, gaps, images):
        assert unpack(pack([each]))[0].stride() == each.stride()


@pytest.mark.parametrize("read", [partial(unpack, map_location=None), lambda data: Position.from_bytes(data).result])
def test_tensors_of_another_ranks_device_come_to_that_of_this_rank(read, monkeypatch):
    """Written as by the rank of the fourth device of its kind, while this process has one."""
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cpu:3")
    data = Position(result=torch.arange(4.0)).to_bytes()
    found = read(data)
    found = found["result"] if isinstance(found, dict) else found
    assert torch.equal(found, torch.arange(4.0))


def test_plain_values_come_back():
    state = {"a": [1, -(2**80), 0.1, float("inf"), None, True], 7: ("text", b"bytes", {"set", "of", "words"}), "": {}}
    assert unpack(pack(state)) == state
    nan = torch.tensor([float("nan"), -0.0])
    assert are_same(unpack(pack([nan])), [nan])


@pytest.mark.parametrize(
    "value",
    [
        OrderedDict(b=1, a=torch.ones(2)),
        {"size": torch.Size([2, 3])},
        [torch.tensor([1 + 2j])],
        [torch.tensor([1 + 2j]).conj().imag],  # negated when it is read
        [torch.nn.Parameter(torch.ones(3))],
    ],
)
def test_other_values_that_torch_reads_safely_come_back(value):
    data = pack(value)
    found = unpack(data)
    assert data.startswith(b"PK")
    assert str(found) == str(value)
    assert type(found) is type(value)


class Attack:
    def __reduce__(self):
        return os._exit, (3,)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_no_code_runs(protocol):
    for value in (Attack(), [Attack()], os.system, OrderedDict(a=1)):
        with pytest.raises(pickle.UnpicklingError, match="a packed state names"):
            unpack(pickle.dumps(value, protocol=protocol))
    with pytest.raises(pickle.UnpicklingError):
        unpack(pack(Attack()) if protocol == 0 else pack({"deep": [Attack()]}))


def test_damaged_bytes_are_refused():
    data = pack({"values": torch.arange(5), "names": ["a", ("b", 2.5)], "large": 2**70})
    draw = random.Random(0)
    damaged = [data[:length] for length in range(len(data))]
    for _ in range(300):
        forged = bytearray(data)
        forged[draw.randrange(len(data))] = draw.randrange(256)
        damaged.append(bytes(forged))
    refused = 0
    for each in damaged:
        try:
            unpack(each)  # a changed number is a number
        except pickle.UnpicklingError:
            refused += 1
    assert refused > len(data)


class Forged(pickle.Pickler):
    def persistent_id(self, obj):
        return obj[1] if isinstance(obj, tuple) and obj[0] == "id" else None


@pytest.mark.parametrize(
    "pid",
    [
        ("torch.float32", (2,), b"1234"),
        ("torch.float32", (-1,), b"1234"),
        ("torch.complex64", (1,), b"12345678"),
        ("os.system", (1,), b"1"),
        ("torch.uint8", (1, "1"), b"1"),
        "torch.uint8",
    ],
)
def test_malformed_tensors_are_refused(pid, tmp_path):
    with open(tmp_path / "forged", "wb") as file:
        Forged(file, protocol=4).dump(["x", ("id", pid)])
    with pytest.raises(pickle.UnpicklingError, match="malformed tensor"):
        unpack((tmp_path / "forged").read_bytes())
