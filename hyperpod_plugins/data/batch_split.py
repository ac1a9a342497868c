"""How an epoch is cut into steps, a step into micro-steps and a micro-step into one share a rank.

    epoch       |---- step 0 ----|---- step 1 ----|---- ...      a step is one global batch, whatever the world
    step        | micro 0 | micro 1 |                            every rank takes part in every micro-step
    micro-step  | r0 | r1 | r2 | r3 |                            contiguous shares, in order of data-parallel rank

What the ranks together have consumed after any micro-step is therefore a prefix of the epoch, and one number tells it.

A step can be cut into logical shards instead, each computed by itself, in one micro-step of one replica, whatever the
number of replicas. These get contiguous runs of logical shards, so the prefix holds between steps only.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from hyperpod_plugins.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A place in the endless sequence of epochs, counted in samples of all ranks together."""

    epoch: int = 0
    """Number of the epoch, from 0."""
    position: int = 0
    """Samples of this epoch that were consumed."""
    step_start: int = 0
    """Position at which the unfinished step began; equal to `position` between steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroStep:
    """One forward and backward pass of all ranks: the `size` samples that follow `before.position`."""

    before: Cursor
    """Where the job stands when it begins."""
    size: int
    """Samples of all ranks together."""
    after: Cursor
    """Where the job stands when it was consumed; the start of the next epoch after the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSplit:
    """How one global batch is spread over ranks and micro-steps."""

    global_batch_size: int
    """Samples of one optimizer step, over all ranks."""
    micro_batch_size: int
    """Most samples of one rank in one micro-step."""
    data_world_size: int
    """Number of data-parallel ranks."""
    pads: bool = False
    """Whether an incomplete last step has as many micro-steps as any other, however few its samples are; a rank that
    gets none in a micro-step runs another rank's, with weight 0."""
    allows_idle_ranks: bool = False
    """Whether a rank may be left without a sample in the last micro-step of a step: it runs another rank's then, with
    weight 0. For programs that multiply losses by `ElasticSampler.weight`; such a step is refused otherwise."""
    num_logical_shards: int = 0
    """Parts of a step that are computed each by itself; 0 where the shares follow from the number of ranks.

    Then every micro-batch has exactly `micro_batch_size` samples, and a replica computes one such part at a time.
    """

    def __post_init__(self) -> None:
        """Check that every rank gets a sample in every micro-step."""
        if min(self.global_batch_size, self.micro_batch_size, self.data_world_size) < 1 or self.num_logical_shards < 0:
            raise ConfigError(f"every number of {self} must be at least 1.")
        if self.num_logical_shards and self.num_replicas * self.replica_size != self.data_world_size:
            raise ConfigError(
                f"a step of {self.global_batch_size} samples in {self.num_logical_shards} logical shards of "
                f"micro-batches of {self.micro_batch_size} cannot be spread over {self.data_world_size} ranks: each "
                "replica must have as many logical shards, and each of its ranks one micro-batch of each."
            )
        self.micro_step_sizes(self.global_batch_size)

    @property
    def replica_size(self) -> int:
        """Data-parallel ranks that compute one logical shard together."""
        return self.global_batch_size // (self.num_logical_shards * self.micro_batch_size)

    @property
    def num_replicas(self) -> int:
        """Replicas of that many ranks that each have as many logical shards; 0 if there is no such number."""
        replicas = self.data_world_size // max(1, self.replica_size)
        is_even = replicas > 0 and self.num_logical_shards % replicas == 0
        is_whole = self.num_logical_shards * self.micro_batch_size * self.replica_size == self.global_batch_size
        return replicas if is_even and is_whole else 0

    @property
    def micro_steps(self) -> int:
        """Micro-steps in one step: the number of gradient accumulations."""
        return len(self.micro_step_sizes(self.global_batch_size))

    def micro_step_sizes(self, step_size: int) -> list[int]:
        """Sizes of the micro-steps of a step, over all ranks.

        Ranks differ by at most one sample a step, the first ones having more, and all that inequality lies in the last
        micro-step.

        Raises:
            ConfigError: some rank would be left without a sample in some micro-step, and collectives would hang.
        """
        if self.pads and step_size < self.global_batch_size:
            count = self.micro_steps
            each, rest = divmod(step_size, count)
            return [each + (index >= count - rest) for index in range(count)]
        world = self.data_world_size
        if self.num_logical_shards:
            if step_size != self.global_batch_size:
                raise ConfigError(
                    f"a step of {step_size} samples cannot be cut into {self.num_logical_shards} logical shards of "
                    f"{self.global_batch_size // self.num_logical_shards}. Use drop_last=True."
                )
            return [world * self.micro_batch_size] * (self.num_logical_shards // self.num_replicas)
        each, rest = divmod(step_size, world)
        count = -(-(each + (rest > 0)) // self.micro_batch_size)
        if each < count and not self.allows_idle_ranks:
            lower = step_size - rest
            raise ConfigError(
                f"a step of {step_size} samples cannot be spread over {world} data-parallel ranks in micro-batches of "
                f"{self.micro_batch_size}: some rank would have no sample in some micro-step. Use a global batch of "
                f"{' or '.join(str(size) for size in (lower, lower + world) if size)}, or a larger micro_batch_size; "
                "for the incomplete last step of an epoch, use drop_last=True."
            )
        sizes = [world * (each // count + (index < each % count)) for index in range(count)]
        sizes[-1] += rest
        return sizes

    def step_size_at(self, step_start: int, num_samples: int, *, drop_last: bool) -> int:
        """Samples of the step that starts at `step_start`; 0 if the epoch ends there."""
        left = num_samples - step_start
        if left >= self.global_batch_size:
            return self.global_batch_size
        return 0 if drop_last else left

    def walk(self, cursor: Cursor, num_samples: int, *, drop_last: bool) -> Iterator[MicroStep]:
        """The micro-steps from `cursor` to the end of its epoch."""
        step_start = cursor.step_start
        num_skipped = self._micro_steps_done(cursor, num_samples, drop_last=drop_last)
        while size := self.step_size_at(step_start, num_samples, drop_last=drop_last):
            step_end = step_start + size
            is_last_step = not self.step_size_at(step_end, num_samples, drop_last=drop_last)
            before = Cursor(epoch=cursor.epoch, position=step_start, step_start=step_start)
            for index, micro_size in enumerate(self.micro_step_sizes(size)):
                end = before.position + micro_size
                after = Cursor(epoch=cursor.epoch, position=end, step_start=step_start if end < step_end else end)
                if end == step_end and is_last_step:
                    after = Cursor(epoch=cursor.epoch + 1)
                if index >= num_skipped:
                    yield MicroStep(before=before, size=micro_size, after=after)
                before = after
            step_start, num_skipped = step_end, 0

    def cursor_at(self, position: int, start: Cursor) -> Cursor:
        """The cursor at a later `position` of the epoch in which `start` lies."""
        offset = (position - start.step_start) % self.global_batch_size
        return Cursor(epoch=start.epoch, position=position, step_start=position - offset)

    def count(self, cursor: Cursor, num_samples: int, *, drop_last: bool) -> int:
        """Number of micro-steps that `walk` would give, without walking."""
        full, last = divmod(num_samples - cursor.step_start, self.global_batch_size)
        total = full * self.micro_steps
        if last and not drop_last:
            total += len(self.micro_step_sizes(last))
        return total - self._micro_steps_done(cursor, num_samples, drop_last=drop_last)

    def share(self, micro_step: MicroStep, rank: int) -> range:
        """The positions of a micro-step that belong to a data-parallel rank; they are contiguous."""
        if not self.num_logical_shards:
            return share(micro_step, rank=rank, world_size=self.data_world_size)
        replica, place = divmod(rank, self.replica_size)
        index = (micro_step.before.position - micro_step.before.step_start) // micro_step.size
        logical = replica * self.micro_steps + index
        first = micro_step.before.step_start + (logical * self.replica_size + place) * self.micro_batch_size
        return range(first, first + self.micro_batch_size)

    def _micro_steps_done(self, cursor: Cursor, num_samples: int, *, drop_last: bool) -> int:
        begun = cursor.position - cursor.step_start
        if not begun:
            return 0
        size = self.step_size_at(cursor.step_start, num_samples, drop_last=drop_last)
        done, consumed = 0, 0
        for micro_size in self.micro_step_sizes(size):
            if consumed >= begun:
                break
            done, consumed = done + 1, consumed + micro_size
        return done


def share(micro_step: MicroStep, *, rank: int, world_size: int) -> range:
    """The contiguous part of a micro-step's positions that belongs to `rank`; the first ranks get one more."""
    each, rest = divmod(micro_step.size, world_size)
    first = micro_step.before.position + rank * each + min(rank, rest)
    return range(first, first + each + (rank < rest))


def sample_weight(num_samples: int, *, step_size: int, data_degree: int, num_micro_steps: int) -> float:
    """Factor for a rank's mean loss over `num_samples`, so that the step's gradient is the mean over all its samples.

    Gradients are averaged over ranks, and over micro-steps by whoever accumulates. A mean of means is biased where the
    shares are uneven: a sample of a small share counts more. The factor is exactly 1 where all shares are equal.

    Args:
        num_samples: samples of this rank in this micro-step.
        step_size: samples of the whole step, over all ranks and micro-steps.
        data_degree: ranks that gradients are averaged over.
        num_micro_steps: the number by which accumulated losses are divided.
    """
    return num_samples * data_degree * num_micro_steps / step_size
