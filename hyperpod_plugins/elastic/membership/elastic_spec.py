"""What an elastic job may do: its policy, its spec of sizes and degrees, and pure decisions on its next size.

The initial world publishes the spec in the job store. The number of replicas changes while a job runs; its shard and
tensor degrees change only with a restart of all workers. The user says which degrees are allowed. When all workers
start together, they take the first allowed layout that the available ranks can form.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hyperpod_plugins.data.batch_split import fits
from hyperpod_plugins.elastic.store.job_store import JobStore
from hyperpod_plugins.elastic.store.records import JsonRecord
from hyperpod_plugins.errors import ConfigError, DegreeError, whole_number


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticPolicy:
    """Limits of the number of replicas of one job, and the times of its changes.

    Raises:
        ConfigError: limits that no size satisfies, or times that are negative; the message says what would fit.
    """

    min_replicas: int = 1
    """Below this, the job pauses."""
    max_replicas: int = 1
    """Replicas beyond this wait outside the job, as spares."""
    replica_increment: int = 1
    """The job has `min_replicas` plus a multiple of this."""
    replica_sizes: tuple[int, ...] = ()
    """The only allowed sizes; empty for every increment between the limits."""
    graceful_shutdown_timeout_s: float = 600.0
    """Longest time from a preemption notice until the replica has left, in seconds."""
    scaling_timeout_s: float = 60.0
    """How long to wait for more replicas after the last new one arrived before the job grows, in seconds."""
    faulty_scale_down_timeout_s: float = 30.0
    """How long to wait for the replacement of a lost replica before the job shrinks, in seconds."""
    min_stable_s: float = 0.0
    """Shortest time from any change of size until the job grows, in seconds."""
    max_backoff_s: float = 3600.0
    """Each loss soon after a growth doubles `min_stable_s`, up to this, in seconds."""

    def __post_init__(self) -> None:
        """Check the values; whole numbers of other types become integers."""
        for name in ("min_replicas", "max_replicas", "replica_increment"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        object.__setattr__(self, "replica_sizes", tuple(whole_number("replica_sizes", it) for it in self.replica_sizes))
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ConfigError(
                f"replicas must satisfy 1 <= min <= max, but min is {self.min_replicas} and max {self.max_replicas}."
            )
        if self.replica_increment < 1:
            raise ConfigError(f"replica_increment must be at least 1, but is {self.replica_increment}.")
        if self.replica_sizes and self.replica_increment != 1:
            raise ConfigError("give replica_increment or replica_sizes, not both.")
        span = self.max_replicas - self.min_replicas
        if span % self.replica_increment:
            low = self.max_replicas - span % self.replica_increment
            raise ConfigError(
                f"growing from {self.min_replicas} by {self.replica_increment} never reaches max_replicas="
                f"{self.max_replicas}. Use {low} or {low + self.replica_increment}."
            )
        outside = [size for size in self.replica_sizes if not self.min_replicas <= size <= self.max_replicas]
        if outside:
            raise ConfigError(
                f"the sizes {outside} of {list(self.replica_sizes)} lie outside {self.min_replicas} .. "
                f"{self.max_replicas}."
            )
        for name in ("graceful_shutdown_timeout_s", "scaling_timeout_s", "faulty_scale_down_timeout_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ConfigError(f"{name} must be a finite number of seconds >= 0, but is {getattr(self, name)}.")
        if not 0 <= self.min_stable_s <= self.max_backoff_s:
            raise ConfigError(
                f"min_stable_s must lie in 0 .. max_backoff_s ({self.max_backoff_s}), but is {self.min_stable_s}."
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Allowed numbers of replicas, ascending."""
        if self.replica_sizes:
            return tuple(sorted(set(self.replica_sizes)))
        return tuple(range(self.min_replicas, self.max_replicas + 1, self.replica_increment))

    def serving(self, *, global_batch_size: int, data_ranks_per_replica: int, max_micro_batch: int) -> tuple[int, ...]:
        """Return the allowed sizes at which all ranks get samples of the global batch.

        Args:
            global_batch_size: samples of one optimizer step.
            data_ranks_per_replica: ranks of one replica that read different samples.
            max_micro_batch: largest number of samples per rank in one forward and backward pass.

        Raises:
            ConfigError: there are none.
        """
        serving = [
            size for size in self.sizes if fits(global_batch_size, size * data_ranks_per_replica, max_micro_batch)
        ]
        if not serving:
            lowest = self.sizes[0] * data_ranks_per_replica
            raise ConfigError(
                f"a global batch of {global_batch_size} in micro-batches of {max_micro_batch} can be spread over none "
                f"of {list(self.sizes)} replicas of {data_ranks_per_replica} data-parallel ranks. Use a multiple of "
                f"{lowest}, or larger micro-batches."
            )
        return tuple(serving)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """The state of the job on which `next_size` decides."""

    now: int
    """Replicas that the job has, or had before the last loss."""
    healthy: int
    """How many of these are complete."""
    waiting: int = 0
    """Complete replicas that could join."""
    leaving: int = 0
    """Healthy replicas with a preemption notice."""
    requested: int = 0
    """Number of replicas requested with `hyperpod scale`; 0 without a request."""
    since_change_s: float = math.inf
    """Seconds since the number of replicas last changed."""
    since_arrival_s: float = math.inf
    """Seconds since the last candidate arrived."""
    since_loss_s: float = math.inf
    """Seconds since the loss of a replica that has not been replaced."""
    num_setbacks: int = 0
    """Consecutive losses within `min_stable_s` after a growth."""


def next_size(view: ReplicaView, policy: ElasticPolicy, sizes: tuple[int, ...] | None = None) -> int:
    """Return the number of replicas to continue with; `view.now` for no change, or to wait for a replacement.

    Args:
        view: the state of the job.
        policy: the limits.
        sizes: the sizes that can share the batch, from `ElasticPolicy.serving`; all allowed sizes if None.
    """
    sizes = policy.sizes if sizes is None else sizes
    staying = view.healthy - view.leaving
    available = staying + view.waiting
    if view.requested:
        available = min(available, view.requested)
    target = max((size for size in sizes if size <= available), default=0)
    if target == view.now and view.healthy == view.now and not view.leaving:
        return view.now
    if view.healthy < view.now or view.leaving:
        return _after_loss(view, policy, target)
    if target < view.now:  # a smaller size was requested
        return target or view.now
    backoff_s = min(policy.min_stable_s * 2**view.num_setbacks, policy.max_backoff_s)
    is_settled = view.since_arrival_s >= policy.scaling_timeout_s or target == sizes[-1]
    return target if is_settled and view.since_change_s >= backoff_s else view.now


def _after_loss(view: ReplicaView, policy: ElasticPolicy, target: int) -> int:
    """Replace a lost replica by a waiting one at once; without one, wait a while, then shrink."""
    if target >= view.now or not target:
        return view.now
    is_patient = view.healthy < view.now and view.since_loss_s < policy.faulty_scale_down_timeout_s
    return view.now if is_patient else target


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLayout:
    """Degrees of one replica, and the allowed numbers of such replicas."""

    shard_degree: int
    tensor_degree: int = 1
    sizes: tuple[int, ...]
    """Numbers of replicas, ascending, that the policy allows and that can share the global batch."""

    @property
    def replica_size(self) -> int:
        """Ranks of one replica."""
        return self.shard_degree * self.tensor_degree

    @property
    def degrees(self) -> tuple[int, int]:
        """Shard degree and tensor degree."""
        return self.shard_degree, self.tensor_degree

    def replicas_in(self, num_ranks: int) -> int:
        """Largest allowed number of replicas that `num_ranks` ranks can form; 0 if there is none."""
        return max((size for size in self.sizes if size * self.replica_size <= num_ranks), default=0)

    def __str__(self) -> str:
        """For messages."""
        tensor = f" x tensor degree {self.tensor_degree}" if self.tensor_degree > 1 else ""
        fewest = self.sizes[0] * self.replica_size
        return f"shard degree {self.shard_degree}{tensor} with {fewest} rank{'s' * (fewest > 1)} or more"


def sort_layouts(layouts: Sequence[ReplicaLayout], *, wanted: Sequence[tuple[int, int]]) -> tuple[ReplicaLayout, ...]:
    """Sort layouts into the order in which they are tried: the wanted ones first, then the largest replicas.

    Among replicas of equal size, the tensor degree of the last wanted entry comes first, then the larger shard
    degree, since splitting layers costs more.

    Args:
        layouts: all allowed layouts.
        wanted: pairs of shard and tensor degree, the most wanted first; a shard degree of 0 matches no layout.
    """
    tensor = wanted[-1][1] if wanted else 1

    def rank(layout: ReplicaLayout) -> tuple[int, int, bool, int]:
        place = wanted.index(layout.degrees) if layout.degrees in wanted else len(wanted)
        return place, -layout.replica_size, layout.tensor_degree != tensor, -layout.shard_degree

    return tuple(sorted(layouts, key=rank))


def first_that_fits(layouts: Sequence[ReplicaLayout], num_ranks: int) -> ReplicaLayout | None:
    """Return the first layout that `num_ranks` ranks can form; None if they are too few for all of them."""
    return next((layout for layout in layouts if layout.replicas_in(num_ranks)), None)


def what_would_fit(layouts: Sequence[ReplicaLayout], num_ranks: int) -> str:
    """Explain in a sentence why no layout fits `num_ranks` ranks, and what would fit."""
    allowed = ", or ".join(map(str, layouts)) or "only the degrees that it began with"
    return f"{num_ranks} ranks are left, and this job may have {allowed}"


def choose(layouts: Sequence[ReplicaLayout], num_ranks: int) -> ReplicaLayout:
    """Like `first_that_fits`, but raises if no layout fits.

    Raises:
        DegreeError: too few ranks for all layouts.
    """
    layout = first_that_fits(layouts, num_ranks)
    if layout is None:
        raise DegreeError(
            f"{what_would_fit(layouts, num_ranks).replace('are left', 'are here')}. Start more processes, or allow "
            "smaller degrees with shard_degrees of ElasticTraining or Session."
        )
    return layout


_SPEC_KEY = "elastic"  # value: `ElasticSpec`


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticSpec(JsonRecord):
    """The limits within which a job grows and shrinks."""

    policy: ElasticPolicy
    replica_size: int
    """Ranks of one replica: shard degree x tensor degree."""
    sizes: tuple[int, ...]
    """Numbers of replicas that the policy allows and that can share the global batch."""
    tensor_degree: int = 1
    layouts: tuple[ReplicaLayout, ...] = ()
    """Layouts with which all workers may restart, in the order in which they are tried."""

    @property
    def degrees(self) -> tuple[int, int]:
        """Shard degree and tensor degree of the present world."""
        return self.replica_size // self.tensor_degree, self.tensor_degree


def publish_elastic_spec(job_store: JobStore, spec: ElasticSpec) -> None:
    """Publish the spec, so that processes can join from now on; only the first call of a round has an effect."""
    job_store.set_if_absent(_SPEC_KEY, spec.to_json().encode())


def elastic_spec_of(job_store: JobStore) -> ElasticSpec | None:
    """The elastic spec of the job; None if the job does not change its size."""
    text = job_store.try_get(_SPEC_KEY)
    return None if text is None else ElasticSpec.from_json(text)
