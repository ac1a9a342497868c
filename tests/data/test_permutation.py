"""The order of samples is a permutation, the same on every machine, and looks random."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperpod_plugins.data import sample_order
from hyperpod_plugins.errors import ConfigError


def whole(num_samples, seed=0, epoch=0, **options):
    return sample_order(np.arange(num_samples), num_samples=num_samples, seed=seed, epoch=epoch, **options)


@pytest.mark.parametrize("num_samples", [*range(1, 70), 255, 256, 257, 4096, 10_007])
def test_is_a_permutation(num_samples):
    assert np.array_equal(np.sort(whole(num_samples, seed=num_samples)), np.arange(num_samples))


@settings(max_examples=60, deadline=None)
@given(
    num_samples=st.integers(1, 2**62),
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 2**40),
    data=st.data(),
)
def test_any_positions_of_any_size_stay_distinct_and_inside(num_samples, seed, epoch, data):
    positions = data.draw(st.lists(st.integers(0, num_samples - 1), unique=True, min_size=1, max_size=50))
    ids = sample_order(positions, num_samples=num_samples, seed=seed, epoch=epoch)
    assert len(set(ids.tolist())) == len(positions)
    assert ids.min() >= 0
    assert ids.max() < num_samples


@settings(max_examples=30, deadline=None)
@given(num_samples=st.integers(1, 3000), cut=st.integers(0, 3000), seed=st.integers(0, 9))
def test_a_position_does_not_depend_on_what_is_asked_with_it(num_samples, cut, seed):
    positions = np.arange(num_samples)
    parts = [p for p in np.split(positions, [min(cut, num_samples)]) if p.size]
    pieces = [sample_order(part, num_samples=num_samples, seed=seed, epoch=3) for part in parts]
    assert np.array_equal(np.concatenate(pieces), whole(num_samples, seed=seed, epoch=3))


def test_the_order_never_changes():
    """Written down once: checkpoints in the field rely on it. A new order needs a new ORDER_VERSION."""
    assert whole(12, seed=1, epoch=2).tolist() == [0, 10, 6, 1, 5, 9, 11, 7, 2, 4, 8, 3]
    assert sample_order([0, 10**9 - 1], num_samples=10**9, seed=7, epoch=0).tolist() == [929004100, 214201170]


def test_seeds_and_epochs_give_unrelated_orders():
    orders = [whole(1000, seed=seed, epoch=epoch) for seed in range(6) for epoch in range(6)]
    agreements = [int((a == b).sum()) for i, a in enumerate(orders) for b in orders[:i]]
    assert 0.7 < np.mean(agreements) < 1.3  # 1 is expected of independent permutations
    assert max(agreements) < 10


@pytest.mark.parametrize("num_samples", [2, 3, 7, 10, 30])
def test_every_sample_is_equally_likely_everywhere(num_samples):
    """Chi-square over positions and samples; the bound lies 6 standard deviations above the mean."""
    draws = 4000
    counts = np.zeros((num_samples, num_samples))
    for seed in range(draws):
        counts[np.arange(num_samples), whole(num_samples, seed=seed)] += 1
    chi_square = ((counts - draws / num_samples) ** 2 / (draws / num_samples)).sum()
    freedom = (num_samples - 1) ** 2
    assert chi_square < freedom + 6 * np.sqrt(2 * freedom)


def test_neighbours_do_not_stay_together():
    """Successive ids differ by one as rarely as in a random order (2 such pairs are expected in any)."""
    gaps = [int((np.abs(np.diff(whole(10_000, seed=seed))) == 1).sum()) for seed in range(50)]
    assert 1.2 < np.mean(gaps) < 2.8


def test_without_shuffling_it_is_the_identity():
    assert np.array_equal(whole(100, seed=5, epoch=9, shuffle=False), np.arange(100))


@pytest.mark.parametrize("positions", [[-1], [10], [3, 99]])
def test_positions_outside_are_refused(positions):
    with pytest.raises(ConfigError, match="0 to 9"):
        sample_order(positions, num_samples=10, seed=0, epoch=0)


@pytest.mark.slow_single
def test_importing_the_data_package_needs_neither_lightning_nor_transformers():
    program = "import sys, hyperpod_plugins.data; print([m for m in ('lightning', 'transformers') if m in sys.modules])"
    environ = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environ)
    assert done.stdout.strip() == "[]", done.stderr
