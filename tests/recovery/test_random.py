"""Random streams are functions of the step, and of nothing that a lost process took with it."""

import random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyperpod_plugins.recovery import seed_micro_step, stream_seed

KEYS = st.tuples(st.integers(0, 2**40), st.integers(0, 10**7), st.integers(0, 4096), st.integers(0, 10**5))


def draw():
    return torch.rand(3).tolist(), random.random(), np.random.rand(2).tolist()


@given(KEYS, KEYS)
def test_a_stream_depends_on_each_of_its_four_numbers(one, other):
    assert (stream_seed(*one) == stream_seed(*other)) == (one == other)
    assert 0 <= stream_seed(*one) < 2**63


def test_digits_do_not_run_together():
    assert stream_seed(1, 23, 4, 5) != stream_seed(12, 3, 4, 5)
    places = [(step, micro, rank) for step in range(20) for micro in range(4) for rank in range(8)]
    assert len({stream_seed(0, *place) for place in places}) == len(places) == 640


def test_all_generators_begin_again():
    seed_micro_step(1, 2, 0, 3)
    first = draw()
    assert draw() != first
    seed_micro_step(1, 2, 0, 3)
    assert draw() == first
    seed_micro_step(1, 2, 1, 3)
    assert all(a != b for a, b in zip(draw(), first, strict=True))
