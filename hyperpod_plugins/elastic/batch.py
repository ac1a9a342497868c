"""How many samples one optimizer step has in a world of any size: always the same number, or so many a replica."""

from dataclasses import dataclass, replace

from hyperpod_plugins.data import BatchSplit
from hyperpod_plugins.elastic.policy import ElasticPolicy
from hyperpod_plugins.elastic.rescale import fits, plan_batch
from hyperpod_plugins.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """What one optimizer step trains on.

    Raises:
        ConfigError: not exactly one of the two sizes was given, or a size is not positive.
    """

    global_batch_size: int = 0
    """Samples over all ranks, for every number of replicas; 0 with `samples_per_replica`."""
    samples_per_replica: int = 0
    """Samples of each replica, so that the batch follows the world; 0 with `global_batch_size`."""
    micro_batch_size: int
    """Most samples of one rank in one forward and backward pass."""
    num_logical_shards: int = 0
    """Parts of the step that are computed each by itself; 0 for none. See `in_logical_shards`."""

    def __post_init__(self) -> None:
        """Check the sizes."""
        sizes = (self.global_batch_size, self.samples_per_replica)
        if (sizes[0] != 0) == (sizes[1] != 0):
            raise ConfigError(
                "give global_batch_size, for a batch that is the same for every number of replicas, or "
                f"samples_per_replica, for one that follows it; they are {sizes[0]} and {sizes[1]}."
            )
        if max(sizes) < 1 or self.micro_batch_size < 1:
            name = "global_batch_size" if sizes[0] else "samples_per_replica"
            raise ConfigError(
                f"{name} and micro_batch_size must be at least 1, but are {sum(sizes)} and {self.micro_batch_size}."
            )

    @property
    def follows_world(self) -> bool:
        """Whether another number of replicas has another batch."""
        return self.samples_per_replica > 0

    def at(self, num_replicas: int) -> int:
        """Samples of one step, over all ranks of so many replicas."""
        return self.global_batch_size or num_replicas * self.samples_per_replica

    def split(self, num_replicas: int, ranks_per_replica: int) -> BatchSplit:
        """How the step is spread; of a batch that follows the world, the last step of an epoch is padded, not left out.

        Args:
            num_replicas: of the world.
            ranks_per_replica: those that read different samples: the shard degree.

        Raises:
            ConfigError: some rank would have no sample in some micro-step.
        """
        if self.num_logical_shards:
            return BatchSplit(
                global_batch_size=self.global_batch_size,
                micro_batch_size=self.global_batch_size // (self.num_logical_shards * ranks_per_replica),
                data_world_size=num_replicas * ranks_per_replica,
                num_logical_shards=self.num_logical_shards,
            )
        plan = plan_batch(self.at(num_replicas), num_replicas * ranks_per_replica, self.micro_batch_size)
        return replace(plan, pads=self.follows_world)

    def serving(self, policy: ElasticPolicy, ranks_per_replica: int) -> tuple[int, ...]:
        """Numbers of replicas that the policy allows, and whose ranks all get samples.

        Raises:
            ConfigError: there are none.
        """
        if self.num_logical_shards:
            return tuple(size for size in policy.sizes if self.num_logical_shards % size == 0)
        if not self.follows_world:
            return policy.serving(
                global_batch_size=self.global_batch_size,
                ranks_per_replica=ranks_per_replica,
                max_micro_batch=self.micro_batch_size,
            )
        if not fits(self.samples_per_replica, ranks_per_replica, self.micro_batch_size):
            raise ConfigError(
                f"samples_per_replica={self.samples_per_replica} in micro-batches of {self.micro_batch_size} cannot be "
                f"spread over the {ranks_per_replica} data-parallel ranks of a replica. Use a multiple of "
                f"{ranks_per_replica}, or larger micro-batches."
            )
        return policy.sizes

    def in_logical_shards(self, policy: ElasticPolicy, ranks_per_replica: int) -> "StepBatch":
        """The same batch, cut into parts that as many of the allowed numbers of replicas as possible can share evenly.

        Of the numbers of parts that serve equally many, the smallest is taken: the largest micro-batches.

        Args:
            policy: the limits.
            ranks_per_replica: those that read different samples: the shard degree.

        Raises:
            ConfigError: the batch follows the world, or cannot be cut into parts with as many samples for each rank.
        """
        if self.follows_world:
            raise ConfigError(
                "reproducible=True is for a global batch that stays the same: give global_batch_size, not "
                "samples_per_replica. Another batch is another computation."
            )
        share, rest = divmod(self.global_batch_size, ranks_per_replica)
        if rest:
            raise ConfigError(
                f"reproducible=True cuts a step into parts whose samples the {ranks_per_replica} data-parallel ranks "
                f"of a replica share evenly, which a global batch of {self.global_batch_size} does not allow. Use "
                + " or ".join(str(each * ranks_per_replica) for each in (share, share + 1) if each)
                + "."
            )
        parts = [n for n in range(1, share + 1) if share % n == 0 and share // n <= self.micro_batch_size]
        served = {n: sum(n % size == 0 for size in policy.sizes) for n in parts}
        most = max(served.values())
        if not most:
            raise ConfigError(
                f"no number of replicas in {list(policy.sizes)} can share a global batch of {self.global_batch_size} "
                f"evenly with {ranks_per_replica} data-parallel ranks each, as reproducible=True needs it. Numbers "
                f"that divide {share} can."
            )
        return replace(self, num_logical_shards=min(n for n in parts if served[n] == most))
