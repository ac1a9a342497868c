"""A batch sampler whose position is counted in samples of the whole job, so that a job of another size can resume.

The order of an epoch is a keyed bijection from positions to sample ids, computed and not stored: a table would cost 8
bytes per sample and take seconds to build. So a restart in the middle of an epoch of a billion samples costs no more
than the first batch.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from hyperpod_plugins.data.batch_split import BatchSplit, Cursor, MicroStep, sample_weight
from hyperpod_plugins.errors import ConfigError, DatasetChanged

ORDER_VERSION = "feistel-1"
"""Name of the algorithm; a saved position is only valid for the same order."""

_NUM_ROUNDS = 8
# A saved position is valid only if these are equal. Batch sizes, drop_last and the world may change.
_IDENTITY = ("order", "num_samples", "seed", "shuffle", "fingerprint")


class ElasticSampler(Sampler[list[int]]):
    """Yields the sample ids of one data-parallel rank, one list per micro-step; use it as a `batch_sampler`.

    Step s of an epoch consumes positions `s * G .. (s + 1) * G - 1` for the global batch size G, for any number of
    ranks. If a job continues with another G, its steps begin where the last step ended. `cursor` is the position of
    the job: it moves when a list is handed out, and after the last list of an epoch it is the start of the next
    epoch. A loader with worker processes takes lists ahead of training; `StatefulLoader` accounts for that.

    [Note: a position inside a step] From a state saved between two micro-steps, a job with the same batch sizes and
    world continues at that micro-step, and its trainer counts micro-steps itself. A job that splits the step
    differently runs the step again from its start: the gradients of its first micro-steps were lost with the old
    processes, so the model has not learnt from these samples.

    Args:
        num_samples: number of samples in the data.
        split: the batch sizes and the data-parallel world size.
        data_rank: data-parallel rank of this process; ranks of one tensor-parallel group share it.
        seed: seed of the order, which also depends on the epoch.
        shuffle: False keeps the order of the data.
        drop_last: whether to drop the incomplete global batch at the end of an epoch, or run it as a smaller step.
        fingerprint: identifier of the data; a state saved with other data is rejected.

    Raises:
        ConfigError: the rank lies outside the world; an epoch has no step; the last step leaves a rank without
            samples and `split` does not allow idle ranks; or `split` pads the last step and `drop_last` is True.
    """

    def __init__(
        self,
        num_samples: int,
        split: BatchSplit,
        *,
        data_rank: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        fingerprint: str = "",
    ) -> None:
        if not 0 <= data_rank < split.data_world_size:
            raise ConfigError(
                f"data_rank={data_rank} does not lie in a data-parallel world of {split.data_world_size}."
            )
        if not split.step_size_at(0, num_samples, drop_last=drop_last):
            raise ConfigError(
                f"the data has {num_samples} samples, fewer than one global batch of {split.global_batch_size}, so an "
                "epoch would have no step. Use a smaller global_batch_size, more data, or drop_last=False."
            )
        if split.pads_last_step and drop_last:
            raise ConfigError("a BatchSplit with pads=True is for the last step that drop_last=True leaves out.")
        self.split = split
        self.num_samples = num_samples
        self.data_rank = data_rank
        self.drop_last = drop_last
        self._seed = seed
        self._shuffle = shuffle
        self._fingerprint = fingerprint
        self._cursor = Cursor()
        self._continues = False
        self._epoch_offset = 0
        self._first = (0, 0)  # position and batch number at which this iteration's steps begin
        self._check_last_step()

    @property
    def cursor(self) -> Cursor:
        """Position of the job."""
        return self._cursor

    @property
    def seed(self) -> int:
        """Seed of the order and of the random numbers that samples draw."""
        return self._seed

    @property
    def identity(self) -> str:
        """Identifier of the sequence of lists: equal for samplers that yield the same ids in the same order."""
        begin = self._first[0] % self.split.global_batch_size
        since = f", steps from {begin}" if begin else ""
        return f"{self._identity()}, {self.split}, drop_last {self.drop_last}, rank {self.data_rank}{since}"

    @property
    def micro_steps_left(self) -> int:
        """Number of lists from the cursor to the end of its epoch."""
        return self.split.count(self._cursor, self.num_samples, drop_last=self.drop_last)

    @property
    def micro_steps_done(self) -> int:
        """Index of the cursor's list in its epoch, for trainers that count batches.

        The current step always begins at a multiple of `split.num_micro_steps`. If earlier steps of the epoch had
        another global batch size, the index is not the number of lists handed out.
        """
        return self._number_of_step() + self._left_from(self._cursor.step_start) - self.micro_steps_left

    def __len__(self) -> int:
        """Number of lists in a whole epoch."""
        return self.split.count(Cursor(), self.num_samples, drop_last=self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the lists of this epoch: all of them, or after `load_state_dict` the remaining ones."""
        for micro_step in self.micro_steps_from(self.start_iteration()):
            self.advance(micro_step)
            yield self.ids(micro_step)

    def start_iteration(self) -> Cursor:
        """Start an iteration and return its first position: the restored one, once, else the start of the epoch."""
        if not self._continues:
            self._cursor = Cursor(epoch=self._cursor.epoch)
        self._continues = False
        self._first = (self._cursor.step_start, self._number_of_step())
        return self._cursor

    def _number_of_step(self) -> int:
        before = len(self) - self._left_from(self._cursor.step_start)
        return before - before % self.split.num_micro_steps

    def _left_from(self, position: int) -> int:
        return self.split.count(replace(self._cursor, position=position), self.num_samples, drop_last=self.drop_last)

    def micro_steps_from(self, cursor: Cursor) -> Iterator[MicroStep]:
        """Yield the micro-steps of all ranks from `cursor` to the end of its epoch, without moving the position."""
        return self.split.walk(cursor, self.num_samples, drop_last=self.drop_last)

    def ids(self, micro_step: MicroStep) -> list[int]:
        """Sample ids of this rank in one micro-step."""
        mine = self.split.share(micro_step, self.data_rank)
        if (
            not mine
        ):  # the last step has too few samples for all ranks; a batch cannot be empty, so take one with weight 0
            mine = range(micro_step.before.position, micro_step.before.position + 1)
        return sample_order(
            mine, num_samples=self.num_samples, seed=self._seed, epoch=micro_step.before.epoch, shuffle=self._shuffle
        ).tolist()

    def weight(self, batch_index: int) -> float:
        """Factor for the mean loss of this rank's batch `batch_index` of the current epoch, from 0.

        With it each sample of a step counts the same if gradients are averaged over ranks, and over as many
        micro-steps as a full step has; see `sample_weight`.
        """
        split, step_size = self.split, self.step_size(batch_index)
        each, rest = divmod(self._micro_step_size(batch_index, step_size), split.data_world_size)
        return sample_weight(
            each + (self.data_rank < rest),
            step_size=step_size,
            data_degree=split.data_world_size,
            num_micro_steps=split.num_micro_steps,
        )

    def micro_step_size(self, batch_index: int) -> int:
        """Number of samples, over all ranks, of batch `batch_index` of the current epoch."""
        return self._micro_step_size(batch_index, self.step_size(batch_index))

    def _micro_step_size(self, batch_index: int, step_size: int) -> int:
        sizes = self.split.micro_step_sizes(step_size)
        return sizes[(batch_index - self._first[1]) % self.split.num_micro_steps]

    def step_size(self, batch_index: int) -> int:
        """Number of samples, over all ranks, of the step that batch `batch_index` of the current epoch belongs to."""
        position, number = self._first
        step_start = position + (batch_index - number) // self.split.num_micro_steps * self.split.global_batch_size
        return self.split.step_size_at(step_start, self.num_samples, drop_last=self.drop_last)

    def advance(self, micro_step: MicroStep) -> None:
        """Count `micro_step` as consumed."""
        self._cursor = micro_step.after

    def end_epoch(self) -> None:
        """Go to the start of the next epoch, as after the last list: the trainer ends epochs before that."""
        self._cursor = Cursor(epoch=self._cursor.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`, or keep the position if it is inside that epoch.

        A restored position is always kept until an iteration has used it; the trainer's epoch numbers are then offset
        to match it.

        [Note: whose epoch] A Lightning Trainer that was stopped by `max_steps` counts its current epoch as finished,
        and one that resumes after the last batch runs an epoch without batches. Following its epoch numbers would
        skip samples.
        """
        if self._continues:
            self._epoch_offset = self._cursor.epoch - epoch
        elif epoch + self._epoch_offset != self._cursor.epoch:
            self._cursor = Cursor(epoch=epoch + self._epoch_offset)

    def state_dict(self) -> dict[str, Any]:
        """Position of the job: plain values, equal on all ranks."""
        return {
            **self._identity(),
            "epoch": self._cursor.epoch,
            "position": self._cursor.position,
            "step_start": self._cursor.step_start,
            "split": self._split_key(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was saved, possibly by a job of another size.

        Raises:
            DatasetChanged: the state belongs to other data, another order or another seed, or is malformed.
            ConfigError: with these batch sizes, the epoch's last step leaves a rank without samples, and `split` does
                not allow idle ranks.
        """
        try:
            saved = {name: state_dict[name] for name in _IDENTITY}
            epoch, step_start, position = (int(state_dict[name]) for name in ("epoch", "step_start", "position"))
            is_same_split = list(state_dict["split"]) == self._split_key()
        except KeyError as error:
            raise DatasetChanged(
                f"the saved loader state has no entry {error}; it holds {sorted(state_dict)}. It was not written by an "
                "ElasticSampler of this release: restart the epoch, or resume with the loader that wrote it."
            ) from None
        if saved != self._identity():
            differences = "; ".join(
                f"{name} was {saved[name]!r} and is {here!r}"
                for name, here in self._identity().items()
                if saved[name] != here
            )
            raise DatasetChanged(
                f"the saved position belongs to other data or another order: {differences}. Resume with the data and "
                "the seed of the saved run, or drop the loader state and restart the epoch."
            )
        self._cursor = self._validated_cursor(epoch, position if is_same_split else step_start, step_start)
        self._continues = True
        self._epoch_offset = 0
        self._check_last_step()

    def _validated_cursor(self, epoch: int, position: int, step_start: int) -> Cursor:
        if not 0 <= step_start <= position <= self.num_samples:
            raise DatasetChanged(
                f"the saved position {position} (step from {step_start}) lies outside an epoch of {self.num_samples} "
                "samples. The state was altered: drop it and restart the epoch."
            )
        step_size = self.split.step_size_at(step_start, self.num_samples, drop_last=self.drop_last)
        if not step_size:
            return Cursor(epoch=epoch + 1)
        if position - step_start not in accumulate(self.split.micro_step_sizes(step_size), initial=0):
            raise DatasetChanged(
                f"the saved position {position} lies inside a micro-step of the step from {step_start}. The state was "
                "altered: drop it and restart the epoch."
            )
        return Cursor(epoch=epoch, position=position, step_start=step_start)

    def _check_last_step(self) -> None:
        _ = self.micro_steps_left  # includes the last step, so raises if that leaves a rank without samples

    def _identity(self) -> dict[str, Any]:
        values = (ORDER_VERSION, self.num_samples, self._seed, self._shuffle, self._fingerprint)
        return dict(zip(_IDENTITY, values, strict=True))

    def _split_key(self) -> list[int]:
        split = self.split
        key = [split.global_batch_size, split.micro_batch_size, split.data_world_size]
        return [*key, split.num_logical_shards] if split.num_logical_shards else key


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
