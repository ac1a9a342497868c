"""A batch sampler whose place is counted in samples of the whole job, so that a job of another size can resume it."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

from torch.utils.data import Sampler

from hyperpod_plugins.data.batch_split import BatchSplit, Cursor, MicroStep, sample_weight
from hyperpod_plugins.data.permutation import ORDER_VERSION, sample_order
from hyperpod_plugins.errors import ConfigError, DatasetChanged

# What must be equal for a saved position to mean the same samples. Batch sizes, drop_last and the world may change.
_IDENTITY = ("order", "num_samples", "seed", "shuffle", "fingerprint")


class ElasticSampler(Sampler[list[int]]):
    """Yields the sample ids of one data-parallel rank, one list a micro-step; use it as a `batch_sampler`.

    Step s of an epoch consumes positions `s * G .. (s + 1) * G - 1` for the global batch size G, whatever the number of
    ranks. Where a job goes on with another G, its steps begin where the last one has ended. `cursor` is where the job
    stands: it moves when a list is handed out, and after the last list of an epoch it is already the start of the next
    one. A loader with worker processes takes lists ahead of training, so wrap it: see `StatefulLoader`.

    [Note: a position inside a step] A state that was saved between two micro-steps is continued there by a job with the
    same batch sizes and world, whose trainer counts micro-steps itself. A job that cuts the step differently starts the
    step again: the gradients of its first micro-steps died with the old processes, so nothing was learnt from those
    samples.

    Args:
        num_samples: number of samples in the data.
        split: the batch sizes and the data-parallel world.
        data_rank: this process's data-parallel rank; ranks of one tensor-parallel group share it.
        seed: the order depends on it and on the epoch.
        shuffle: False keeps the order of the data.
        drop_last: leave out the incomplete global batch at the end of an epoch, or run it as a smaller step.
        fingerprint: identifies the data; a state of other data is refused.

    Raises:
        ConfigError: the rank lies outside the world, or an epoch has no step, or its last step cannot serve all ranks
            and `split` does not allow idle ones, or is to be both padded and left out.
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
        if split.pads and drop_last:
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
        self._first = (0, 0)  # of the epoch's steps of this split: position, and number of the batch
        self._check_last_step()

    @property
    def cursor(self) -> Cursor:
        """Where the job stands."""
        return self._cursor

    @property
    def seed(self) -> int:
        """On which the order depends, and what samples draw."""
        return self._seed

    @property
    def identity(self) -> str:
        """Names the sequence of lists: equal for two samplers that hand out the same ids in the same order."""
        begin = self._first[0] % self.split.global_batch_size
        since = f", steps from {begin}" if begin else ""
        return f"{self._identity()}, {self.split}, drop_last {self.drop_last}, rank {self.data_rank}{since}"

    @property
    def micro_steps_left(self) -> int:
        """Number of lists from the cursor to the end of its epoch."""
        return self.split.count(self._cursor, self.num_samples, drop_last=self.drop_last)

    @property
    def micro_steps_done(self) -> int:
        """Number of the cursor's list in its epoch, for trainers that count: the present step begins at whole steps.

        Where the steps before had another global batch, it is not the number of lists that were handed out.
        """
        return self._number_of_step() + self._left_from(self._cursor.step_start) - self.micro_steps_left

    def __len__(self) -> int:
        """Number of lists in a whole epoch."""
        return self.split.count(Cursor(), self.num_samples, drop_last=self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        """Hand out the lists of this epoch: all of them, or after `load_state_dict` those that are left."""
        for micro_step in self.walk(self.begin()):
            self.advance(micro_step)
            yield self.ids(micro_step)

    def begin(self) -> Cursor:
        """Where a new iteration starts: at the restored position, once, and otherwise at the start of the epoch."""
        if not self._continues:
            self._cursor = Cursor(epoch=self._cursor.epoch)
        self._continues = False
        self._first = (self._cursor.step_start, self._number_of_step())
        return self._cursor

    def _number_of_step(self) -> int:
        before = len(self) - self._left_from(self._cursor.step_start)
        return before - before % self.split.micro_steps

    def _left_from(self, position: int) -> int:
        return self.split.count(replace(self._cursor, position=position), self.num_samples, drop_last=self.drop_last)

    def walk(self, cursor: Cursor) -> Iterator[MicroStep]:
        """The micro-steps of all ranks from `cursor` to the end of its epoch; moves nothing."""
        return self.split.walk(cursor, self.num_samples, drop_last=self.drop_last)

    def ids(self, micro_step: MicroStep) -> list[int]:
        """The sample ids of this rank in one micro-step."""
        mine = self.split.share(micro_step, self.data_rank)
        if (
            not mine
        ):  # of the last step, too small for all ranks; a batch cannot be empty, and this sample's weight is 0
            mine = range(micro_step.before.position, micro_step.before.position + 1)
        return sample_order(
            mine, num_samples=self.num_samples, seed=self._seed, epoch=micro_step.before.epoch, shuffle=self._shuffle
        ).tolist()

    def weight(self, batch_index: int) -> float:
        """Factor for the mean loss of this rank's batch of that number in an epoch, counted from 0.

        With it each sample of a step counts the same, where gradients are averaged over ranks, and over as many
        micro-steps as a whole step of this split has; see `sample_weight`.
        """
        split, step_size = self.split, self.step_size(batch_index)
        micro_step = (batch_index - self._first[1]) % split.micro_steps
        each, rest = divmod(split.micro_step_sizes(step_size)[micro_step], split.data_world_size)
        return sample_weight(
            each + (self.data_rank < rest),
            step_size=step_size,
            data_degree=split.data_world_size,
            num_micro_steps=split.micro_steps,
        )

    def step_size(self, batch_index: int) -> int:
        """Samples, over all ranks, of the step to which the batch of that number in the present epoch belongs."""
        position, number = self._first
        step_start = position + (batch_index - number) // self.split.micro_steps * self.split.global_batch_size
        return self.split.step_size_at(step_start, self.num_samples, drop_last=self.drop_last)

    def advance(self, micro_step: MicroStep) -> None:
        """Count `micro_step` as consumed."""
        self._cursor = micro_step.after

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`, or stay where the job stands if that is inside it.

        A restored position stays in any case until it was used, and the trainer's numbers then count on from it.

        [Note: whose epoch] A Lightning Trainer that was stopped by `max_steps` counts the epoch it was in as finished,
        and one that is resumed after the last batch passes through an epoch without batches. Its numbers would skip
        samples.
        """
        if self._continues:
            self._epoch_offset = self._cursor.epoch - epoch
        elif epoch + self._epoch_offset != self._cursor.epoch:
            self._cursor = Cursor(epoch=epoch + self._epoch_offset)

    def state_dict(self) -> dict[str, Any]:
        """Where the job stands: plain values, equal on all ranks."""
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
            DatasetChanged: the state belongs to other data, another order or another seed.
            ConfigError: with these batch sizes the rest of the epoch ends in a step that cannot serve all ranks, and
                `split` does not allow idle ones.
        """
        try:
            saved = {name: state_dict[name] for name in _IDENTITY}
            epoch, step_start, position = (int(state_dict[name]) for name in ("epoch", "step_start", "position"))
            is_same_split = list(state_dict["split"]) == self._split_key()
        except KeyError as error:
            raise DatasetChanged(
                f"the saved loader state has no entry {error}; it holds {sorted(state_dict)}. It was not written by an "
                "ElasticSampler of this release: start the epoch anew, or resume with the loader that wrote it."
            ) from None
        if saved != self._identity():
            differences = "; ".join(
                f"{name} was {saved[name]!r} and is {here!r}"
                for name, here in self._identity().items()
                if saved[name] != here
            )
            raise DatasetChanged(
                f"the saved position belongs to other data or another order: {differences}. Resume with the data and "
                "the seed of the saved run, or drop the loader state and start the epoch anew."
            )
        self._cursor = self._place(epoch, position if is_same_split else step_start, step_start)
        self._continues = True
        self._epoch_offset = 0
        self._check_last_step()

    def _place(self, epoch: int, position: int, step_start: int) -> Cursor:
        if not 0 <= step_start <= position <= self.num_samples:
            raise DatasetChanged(
                f"the saved position {position} (step from {step_start}) lies outside an epoch of {self.num_samples} "
                "samples. The state was altered: drop it and start the epoch anew."
            )
        step_size = self.split.step_size_at(step_start, self.num_samples, drop_last=self.drop_last)
        if not step_size:
            return Cursor(epoch=epoch + 1)
        if position - step_start not in accumulate(self.split.micro_step_sizes(step_size), initial=0):
            raise DatasetChanged(
                f"the saved position {position} lies inside a micro-step of the step from {step_start}. The state was "
                "altered: drop it and start the epoch anew."
            )
        return Cursor(epoch=epoch, position=position, step_start=step_start)

    def _check_last_step(self) -> None:
        _ = self.micro_steps_left  # counts the last step too, and raises if it leaves a rank without samples

    def _identity(self) -> dict[str, Any]:
        values = (ORDER_VERSION, self.num_samples, self._seed, self._shuffle, self._fingerprint)
        return dict(zip(_IDENTITY, values, strict=True))

    def _split_key(self) -> list[int]:
        split = self.split
        key = [split.global_batch_size, split.micro_batch_size, split.data_world_size]
        return [*key, split.num_logical_shards] if split.num_logical_shards else key
