"""Split an epoch into steps, a step into micro-steps, and a micro-step into one share per rank.

    epoch       |---- step 0 ----|---- step 1 ----|---- ...      a step is one global batch, for any world size
    step        | micro 0 | micro 1 |                            every rank takes part in every micro-step
    micro-step  | r0 | r1 | r2 | r3 |                            contiguous shares, in order of data-parallel rank

After any micro-step, the ranks together have therefore consumed a prefix of the epoch, so one number is the position.

Alternatively, a step is split into logical shards. Each is computed separately, in one micro-step of one replica, for
any number of replicas. A replica gets a contiguous run of logical shards, so the consumed samples are a prefix of the
epoch only between steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from hyperpod_plugins.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A position in the sequence of epochs, counted in samples over all ranks."""

    epoch: int = 0
    """Number of the epoch, from 0."""
    position: int = 0
    """Number of samples of this epoch consumed."""
    step_start: int = 0
    """Position at which the current step began; equal to `position` between steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroStep:
    """One forward and backward pass of all ranks: the `size` samples that follow `before.position`."""

    before: Cursor
    """Position before the micro-step."""
    size: int
    """Number of samples over all ranks."""
    after: Cursor
    """Position after the micro-step; after the last one of an epoch, the start of the next epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSplit:
    """How a global batch is split over ranks and micro-steps."""

    global_batch_size: int
    """Samples of one optimizer step, over all ranks."""
    micro_batch_size: int
    """Maximum number of samples of one rank in one micro-step."""
    data_world_size: int
    """Number of data-parallel ranks."""
    pads_last_step: bool = False
    """Whether an incomplete last step has as many micro-steps as any other, however few samples it has. A rank
    without a sample in a micro-step runs a sample of another rank with weight 0."""
    allows_idle_ranks: bool = False
    """Whether a rank may have no sample in the last micro-step of a step. It then runs a sample of another rank with
    weight 0. For programs that multiply losses by `ElasticSampler.weight`; otherwise such a step is an error."""
    num_logical_shards: int = 0
    """Number of parts of a step that are computed separately; 0 to derive the shares from the number of ranks.

    With logical shards, every micro-batch has exactly `micro_batch_size` samples, and a replica computes one shard at
    a time.
    """

    def __post_init__(self) -> None:
        """Check that a full step can be split."""
        if min(self.global_batch_size, self.micro_batch_size, self.data_world_size) < 1 or self.num_logical_shards < 0:
            raise ConfigError(f"every number of {self} must be at least 1.")
        if self.num_logical_shards and self.num_replicas * self.data_ranks_per_replica != self.data_world_size:
            raise ConfigError(
                f"a step of {self.global_batch_size} samples in {self.num_logical_shards} logical shards of "
                f"micro-batches of {self.micro_batch_size} cannot be spread over {self.data_world_size} ranks: each "
                "replica must have the same number of logical shards, and each of its ranks one micro-batch of each."
            )
        self.micro_step_sizes(self.global_batch_size)

    @property
    def data_ranks_per_replica(self) -> int:
        """Number of data-parallel ranks that compute one logical shard together."""
        return self.global_batch_size // (self.num_logical_shards * self.micro_batch_size)

    @property
    def num_replicas(self) -> int:
        """Number of replicas of `data_ranks_per_replica` ranks; 0 if they cannot share the logical shards evenly."""
        replicas = self.data_world_size // max(1, self.data_ranks_per_replica)
        is_even = replicas > 0 and self.num_logical_shards % replicas == 0
        is_whole = (
            self.num_logical_shards * self.micro_batch_size * self.data_ranks_per_replica == self.global_batch_size
        )
        return replicas if is_even and is_whole else 0

    @property
    def num_micro_steps(self) -> int:
        """Number of micro-steps in a full step, over which gradients are accumulated."""
        return len(self.micro_step_sizes(self.global_batch_size))

    def micro_step_sizes(self, step_size: int) -> list[int]:
        """Sizes of the micro-steps of a step of `step_size` samples, over all ranks.

        Ranks differ by at most one sample per step, in the last micro-step; the first ranks have more.

        Raises:
            ConfigError: a rank would have no sample in some micro-step, so collectives would hang; or the step cannot
                be split into logical shards.
        """
        if self.pads_last_step and step_size < self.global_batch_size:
            count = self.num_micro_steps
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

    def random_stream(self, micro_step: int, compute_rank: int) -> tuple[int, int]:
        """The two numbers that key the random stream of a rank's micro-step, numbered from 0 within its step.

        For logical shards they do not depend on the number of replicas.
        """
        if not self.num_logical_shards:
            return micro_step, compute_rank
        replica, place = divmod(compute_rank, self.data_ranks_per_replica)
        return replica * self.num_micro_steps + micro_step, place

    def step_size_at(self, step_start: int, num_samples: int, *, drop_last: bool) -> int:
        """Number of samples of the step that starts at `step_start`; 0 if the epoch ends there."""
        left = num_samples - step_start
        if left >= self.global_batch_size:
            return self.global_batch_size
        return 0 if drop_last else left

    def walk(self, cursor: Cursor, num_samples: int, *, drop_last: bool) -> Iterator[MicroStep]:
        """Yield the micro-steps from `cursor` to the end of its epoch."""
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
        """Number of micro-steps that `walk` would yield, without walking."""
        full, last = divmod(num_samples - cursor.step_start, self.global_batch_size)
        total = full * self.num_micro_steps
        if last and not drop_last:
            total += len(self.micro_step_sizes(last))
        return total - self._micro_steps_done(cursor, num_samples, drop_last=drop_last)

    def share(self, micro_step: MicroStep, rank: int) -> range:
        """The contiguous positions of a micro-step that belong to a data-parallel rank."""
        if not self.num_logical_shards:
            return rank_positions(micro_step, rank=rank, world_size=self.data_world_size)
        replica, place = divmod(rank, self.data_ranks_per_replica)
        index = (micro_step.before.position - micro_step.before.step_start) // micro_step.size
        logical = replica * self.num_micro_steps + index
        first = micro_step.before.step_start + (logical * self.data_ranks_per_replica + place) * self.micro_batch_size
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


def rank_positions(micro_step: MicroStep, *, rank: int, world_size: int) -> range:
    """The contiguous positions of a micro-step that belong to `rank`; the first ranks get one more if uneven."""
    each, rest = divmod(micro_step.size, world_size)
    first = micro_step.before.position + rank * each + min(rank, rest)
    return range(first, first + each + (rank < rest))


def sample_weight(num_samples: int, *, step_size: int, data_degree: int, num_micro_steps: int) -> float:
    """Factor for a rank's mean loss over `num_samples`, so that the step's gradient is the mean over all its samples.

    Gradients are averaged over ranks, and over micro-steps by gradient accumulation. With uneven shares, a mean of
    means is biased: a sample of a small share counts more. The factor is exactly 1 if all shares are equal.

    Args:
        num_samples: number of samples of this rank in this micro-step.
        step_size: number of samples of the whole step, over all ranks and micro-steps.
        data_degree: number of ranks over which gradients are averaged.
        num_micro_steps: number by which accumulated losses are divided.
    """
    return num_samples * data_degree * num_micro_steps / step_size


def plan_batch(
    global_batch_size: int, data_degree: int, max_micro_batch: int, *, allows_idle_ranks: bool = False
) -> BatchSplit:
    """Split one global batch over the data-parallel ranks, each sample exactly once.

    The shares are equal if the ranks divide the batch. Otherwise they differ by one sample, and gradients must be
    weighted by `sample_weight`. A rank accumulates gradients if its share is larger than a micro-batch.

    Args:
        global_batch_size: samples of one optimizer step, over all ranks.
        data_degree: ranks that read different samples: replicas x shards.
        max_micro_batch: largest number of samples per rank in one forward and backward pass.
        allows_idle_ranks: whether a rank may have no sample in the last micro-step of a step.

    Raises:
        ConfigError: some rank would have no sample in some micro-step; the message names what would fit.
    """
    if data_degree > global_batch_size > 0:
        raise ConfigError(
            f"a global batch of {global_batch_size} samples cannot feed {data_degree} data-parallel ranks: each needs "
            f"one sample a step. Use at least {data_degree} samples, or fewer replicas."
        )
    return BatchSplit(
        global_batch_size=global_batch_size,
        micro_batch_size=max_micro_batch,
        data_world_size=data_degree,
        allows_idle_ranks=allows_idle_ranks,
    )


def fits(global_batch_size: int, data_degree: int, max_micro_batch: int, *, allows_idle_ranks: bool = False) -> bool:
    """Whether `plan_batch` would succeed."""
    try:
        plan_batch(global_batch_size, data_degree, max_micro_batch, allows_idle_ranks=allows_idle_ranks)
    except ConfigError:
        return False
    return True
