"""A batch comes back as it was, with the same types, and without pickle."""

import collections
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperpod_plugins.data.batch_cache import decode_batch, encode_batch
from hyperpod_plugins.errors import DataError

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8,
          torch.bool, torch.complex64]  # fmt: skip


def back(batch):
    return decode_batch(bytearray(encode_batch(batch)))


def equal(left, right):
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        same_kind = left.dtype == right.dtype and left.shape == right.shape
        return same_kind and left.contiguous().reshape(-1).view(torch.uint8).equal(right.reshape(-1).view(torch.uint8))
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        return list(left) == list(right) and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(equal, left, right))
    return left == right or (isinstance(left, float) and math.isnan(left) and math.isnan(right))


shapes = st.lists(st.integers(0, 4), max_size=3)
tensors = st.builds(
    lambda shape, dtype, seed: (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 9).abs().to(dtype),
    shapes, st.sampled_from(DTYPES), st.integers(0, 99),
)  # fmt: skip
arrays = st.builds(lambda shape, dtype: (np.arange(math.prod(shape)) * 0.7).reshape(shape).astype(dtype), shapes,
                   st.sampled_from(["f4", "f8", "i2", "u8", "?", ">i4", "c8"]))  # fmt: skip
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=8), tensors, arrays
)
batches = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=5), st.integers()), inner, max_size=3),
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(batches)
def test_any_batch_comes_back(batch):
    assert equal(batch, back(batch))


@pytest.mark.parametrize(
    "tensor", [torch.arange(12).reshape(3, 4).t(), torch.arange(10)[::3], torch.randn(2, 3, requires_grad=True),
               torch.ones(3, dtype=torch.complex64).conj(), torch.ones(1).expand(5)]
)  # fmt: skip
def test_views_come_back_as_plain_tensors(tensor):
    assert torch.equal(back(tensor), tensor.detach())
    back(tensor).add_(1)  # memory of its own, writable


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        ({"a": [1, {2, 3}]}, r"batch\['a'\]\[1\] is a builtins.set"),
        (collections.OrderedDict(a=1), "OrderedDict"),
        (torch.zeros(2).to_sparse(), "Tensor"),
        (torch.zeros(2, device="meta"), "Tensor"),
        (np.array(["text"]), "ndarray"),
        ({(1, 2): 3}, "dict"),
        (len, "builtin"),
    ],
)
def test_what_would_come_back_as_something_else_is_refused(batch, named):
    with pytest.raises(DataError, match=named):
        encode_batch(batch)
