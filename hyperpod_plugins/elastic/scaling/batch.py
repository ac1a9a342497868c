"""Batch of an optimizer step at each number of replicas: constant, proportional to the replicas, or from a table."""

from dataclasses import dataclass, replace

from hyperpod_plugins.data import BatchSplit
from hyperpod_plugins.data.batch_split import fits, plan_batch
from hyperpod_plugins.elastic.membership.elastic_spec import ElasticPolicy
from hyperpod_plugins.errors import ConfigError


def refuse_reproducible(*, follows_world: bool) -> None:
    """Refuse the reproducible mode for a global batch that depends on the number of replicas.

    Raises:
        ConfigError: it does.
    """
    if follows_world:
        raise ConfigError(
            "reproducible=True is for a global batch that stays the same: give global_batch_size, not "
            "samples_per_replica. Another batch is another computation."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaBatch:
    """Batch of an optimizer step for one number of replicas."""

    num_replicas: int
    """Number of replicas to which this applies."""
    global_batch_size: int
    """Samples over all ranks."""
    micro_batch_size: int
    """Largest number of samples per rank in one forward and backward pass."""
    is_even: bool = False
    """Whether all ranks must have the same number of samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Batch of an optimizer step for all numbers of replicas.

    Raises:
        ConfigError: not exactly one of the two sizes was given, or a size is not positive.
    """

    global_batch_size: int = 0
    """Samples over all ranks, for every number of replicas; 0 with `samples_per_replica`."""
    samples_per_replica: int = 0
    """Samples of each replica, so that the batch follows the world; 0 with `global_batch_size`."""
    micro_batch_size: int
    """Largest number of samples per rank in one forward and backward pass."""
    num_logical_shards: int = 0
    """Number of parts of the step that are computed separately; 0 for none. See `in_logical_shards`."""
    by_replicas: tuple[ReplicaBatch, ...] = ()
    """The only allowed numbers of replicas, each with its batch; empty if any number is allowed. If their global
    batches differ, `global_batch_size` is 0."""
    is_even: bool = False
    """Whether all ranks must have the same number of samples; for numbers in `by_replicas`, their own setting
    counts."""

    def __post_init__(self) -> None:
        """Check the sizes."""
        sizes = (self.global_batch_size, self.samples_per_replica)
        if self.by_replicas and sizes == (0, 0):
            sizes = (min(row.global_batch_size for row in self.by_replicas), 0)
        if (sizes[0] != 0) == (sizes[1] != 0):
            raise ConfigError(
                "give global_batch_size, for a batch that is the same for every number of replicas, or "
                f"samples_per_replica, for one that follows it; they are {sizes[0]} and {sizes[1]}."
            )
        of_batch = "global_batch_size" if sizes[0] else "samples_per_replica"
        for name, value in ((of_batch, sum(sizes)), ("micro_batch_size", self.micro_batch_size)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, but is {value}.")

    @property
    def follows_world(self) -> bool:
        """Whether the global batch depends on the number of replicas."""
        return not self.global_batch_size

    def global_batch_at(self, num_replicas: int) -> int:
        """Return the global batch size for a number of replicas.

        Raises:
            ConfigError: the batches come from a table that does not have this number.
        """
        if self.global_batch_size or self.samples_per_replica:
            return self.global_batch_size or num_replicas * self.samples_per_replica
        row = self._row(num_replicas)
        if row is None:
            sizes = ", ".join(str(each.num_replicas) for each in self.by_replicas)
            raise ConfigError(f"the batch is known for {sizes} replicas, and there are {num_replicas}.")
        return row.global_batch_size

    def split(self, num_replicas: int, data_ranks_per_replica: int) -> BatchSplit:
        """Return how the step is split over ranks and micro-steps, for losses weighted by `ElasticSampler.weight`.

        If the batch follows the world, the last step of an epoch is padded instead of dropped. Ranks that get no
        sample of an incomplete last step take part in it with weight 0, so such a step ends no job that has changed
        its size.

        Args:
            num_replicas: number of replicas in the world.
            data_ranks_per_replica: ranks of one replica that read different samples.

        Raises:
            ConfigError: some rank would have no sample in some micro-step.
        """
        if self.num_logical_shards:
            return BatchSplit(
                global_batch_size=self.global_batch_size,
                micro_batch_size=self.global_batch_size // (self.num_logical_shards * data_ranks_per_replica),
                data_world_size=num_replicas * data_ranks_per_replica,
                num_logical_shards=self.num_logical_shards,
            )
        row, size = self._row(num_replicas), self.global_batch_at(num_replicas)
        may_idle = row is not None and not row.is_even
        plan = plan_batch(
            size, num_replicas * data_ranks_per_replica, self._micro_at(num_replicas), allows_idle_ranks=may_idle
        )
        return replace(plan, pads_last_step=self.follows_world, allows_idle_ranks=True)

    def feasible_sizes(self, policy: ElasticPolicy, data_ranks_per_replica: int) -> tuple[int, ...]:
        """Return the numbers of replicas that the policy allows and at which all ranks get samples.

        Raises:
            ConfigError: there are none.
        """
        if self.num_logical_shards:
            return tuple(size for size in policy.sizes if self.num_logical_shards % size == 0)
        if self.by_replicas or self.is_even:
            return self._serving_as_said(policy, data_ranks_per_replica)
        if not self.follows_world:
            return policy.serving(
                global_batch_size=self.global_batch_size,
                data_ranks_per_replica=data_ranks_per_replica,
                max_micro_batch=self.micro_batch_size,
            )
        if not fits(self.samples_per_replica, data_ranks_per_replica, self.micro_batch_size):
            raise ConfigError(
                f"samples_per_replica={self.samples_per_replica} in micro-batches of {self.micro_batch_size} cannot be "
                f"spread over the {data_ranks_per_replica} data-parallel ranks of a replica. Use a multiple of "
                f"{data_ranks_per_replica}, or larger micro-batches."
            )
        return policy.sizes

    def infeasible_reasons(self, policy: ElasticPolicy, data_ranks_per_replica: int) -> tuple[str, ...]:
        """Explain, one sentence each, why numbers of replicas that policy and table allow are not among `serving`."""
        if not self.by_replicas:
            return ()
        said: list[str] = []
        for row in self.by_replicas:
            degree = row.num_replicas * data_ranks_per_replica
            if row.num_replicas in policy.sizes and not self._can_share(row.num_replicas, degree):
                how = " evenly, as use_uneven_batch: false requires" if row.is_even else ""
                said.append(
                    f"{row.num_replicas} replicas are left out: their {degree} data-parallel ranks cannot share a step "
                    f"of {row.global_batch_size} samples in micro-batches of {row.micro_batch_size}{how}"
                )
        return tuple(said)

    def in_logical_shards(self, policy: ElasticPolicy, data_ranks_per_replica: int) -> "StepBatch":
        """Return the same batch, cut into parts that most of the allowed numbers of replicas can share evenly.

        Of the numbers of parts that serve equally many sizes, it takes the smallest, which gives the largest
        micro-batches.

        Args:
            policy: the limits.
            data_ranks_per_replica: ranks of one replica that read different samples.

        Raises:
            ConfigError: the batch follows the world, or cannot be cut into parts of equal size for all ranks.
        """
        refuse_reproducible(follows_world=self.follows_world)
        share, rest = divmod(self.global_batch_size, data_ranks_per_replica)
        if rest:
            raise ConfigError(
                f"reproducible=True cuts a step into parts whose samples the {data_ranks_per_replica} data-parallel "
                f"ranks of a replica share evenly, which a global batch of {self.global_batch_size} does not allow. "
                "Use " + " or ".join(str(each * data_ranks_per_replica) for each in (share, share + 1) if each) + "."
            )
        micro = min((row.micro_batch_size for row in self.by_replicas), default=self.micro_batch_size)
        parts = [n for n in range(1, share + 1) if share % n == 0 and share // n <= micro]
        served = {n: sum(n % size == 0 for size in policy.sizes) for n in parts}
        most = max(served.values(), default=0)
        if not most:
            raise ConfigError(
                f"no number of replicas in {list(policy.sizes)} can share a global batch of {self.global_batch_size} "
                f"evenly with {data_ranks_per_replica} data-parallel ranks each, as reproducible=True needs it. "
                f"Numbers that divide {share} can."
            )
        num_logical_shards = min(n for n in parts if served[n] == most)
        return replace(self, num_logical_shards=num_logical_shards, by_replicas=())

    def _row(self, num_replicas: int) -> ReplicaBatch | None:
        return next((row for row in self.by_replicas if row.num_replicas == num_replicas), None)

    def _micro_at(self, num_replicas: int) -> int:
        row = self._row(num_replicas)
        return self.micro_batch_size if row is None else row.micro_batch_size

    def _serving_as_said(self, policy: ElasticPolicy, data_ranks_per_replica: int) -> tuple[int, ...]:
        known = [row.num_replicas for row in self.by_replicas] or list(policy.sizes)
        sizes = [size for size in policy.sizes if size in known]
        serving = [size for size in sizes if self._can_share(size, size * data_ranks_per_replica)]
        if not serving:
            batches = (
                ", ".join(f"{self.global_batch_at(size)} samples on {size} replicas" for size in sizes)
                or "nothing of them"
            )
            raise ConfigError(
                f"none of {list(policy.sizes)} replicas of {data_ranks_per_replica} data-parallel ranks can share its "
                f"batch: the recipe says {batches}. Change the batches, or set use_uneven_batch: true."
            )
        return tuple(serving)

    def _can_share(self, num_replicas: int, data_degree: int) -> bool:
        row, size = self._row(num_replicas), self.global_batch_at(num_replicas)
        is_even = self.is_even if row is None else row.is_even
        may_idle = row is not None and not is_even  # a recipe sets the shares; ranks may idle in a micro-step
        is_possible = fits(size, data_degree, self._micro_at(num_replicas), allows_idle_ranks=may_idle)
        return is_possible and not (is_even and size % data_degree)
