"""The order of samples in an epoch: a keyed bijection from positions to sample ids, so no permutation is stored.

A table of a shuffled epoch costs 8 bytes per sample and takes seconds to build. Here every position is computed on
its own, so a restart in the middle of an epoch of a billion samples costs no more than the first batch.
"""

import hashlib
import math

import numpy as np
import numpy.typing as npt

from hyperpod_plugins.errors import ConfigError

ORDER_VERSION = "feistel-1"
"""Name of the algorithm; a saved position is only valid for the same order."""

_NUM_ROUNDS = 8


def sample_order(
    positions: npt.ArrayLike, *, num_samples: int, seed: int, epoch: int, shuffle: bool = True
) -> npt.NDArray[np.int64]:
    """Map positions of an epoch to sample ids: a permutation of `0 .. num_samples - 1`.

    A generalised Feistel network on pairs of digits in base `ceil(sqrt(num_samples))`, applied repeatedly until the
    value lies inside the range (cycle walking). The square of the base exceeds the range by at most
    `2 * sqrt(num_samples) + 1`, so few positions need a second pass.

    Source: J. Black, P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002 (both constructions). Round
    function: the SplitMix64 finaliser, G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom Number Generators",
    OOPSLA 2014.

    Args:
        positions: whole numbers in `0 .. num_samples - 1`, shape (count,).
        num_samples: number of samples in the data.
        seed: seed of the order.
        epoch: number of the epoch; each has its own order.
        shuffle: False for the identity.

    Returns:
        Sample ids, shape (count,).

    Raises:
        ConfigError: a position lies outside the data.
    """
    wanted = np.atleast_1d(np.asarray(positions, dtype=np.int64))
    if wanted.size and not 0 <= wanted.min() <= wanted.max() < num_samples:
        raise ConfigError(
            f"positions {wanted.min()} to {wanted.max()} were asked for, but an epoch of this data has the positions "
            f"0 to {num_samples - 1}. Count positions from the start of the epoch."
        )
    if not shuffle:
        return wanted.copy()
    base = math.isqrt(max(num_samples - 1, 0)) + 1
    keys = _round_keys(seed, epoch)
    ids = _encrypt(wanted.astype(np.uint64), base, keys)
    outside = np.flatnonzero(ids >= num_samples)
    while outside.size:
        ids[outside] = _encrypt(ids[outside], base, keys)
        outside = outside[ids[outside] >= num_samples]
    return ids.astype(np.int64)


def _round_keys(seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    digest = hashlib.blake2b(f"{ORDER_VERSION}:{seed}:{epoch}".encode(), digest_size=8 * _NUM_ROUNDS)
    return np.frombuffer(digest.digest(), dtype="<u8")


def _encrypt(values: npt.NDArray[np.uint64], base: int, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """One pass of the network: a bijection on `0 .. base**2 - 1`, because each round only adds to one digit."""
    modulus = np.uint64(base)
    left, right = np.divmod(values, modulus)
    for key in keys:
        left, right = right, (left + _mix(right + key) % modulus) % modulus
    return left * modulus + right


def _mix(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
