"""The elastic spec of a job: its limits of size and degrees, published in the job store by the initial world.

The number of replicas changes while a job runs; its shard and tensor degrees change only with a restart of all
workers. The user says which degrees are allowed. When all workers start together, they take the first allowed layout
that the available ranks can form.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hyperpod_plugins.elastic.membership.size_policy import ElasticPolicy
from hyperpod_plugins.elastic.store.job_store import JobStore
from hyperpod_plugins.elastic.store.records import JsonRecord
from hyperpod_plugins.errors import DegreeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
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


def sort_layouts(layouts: Sequence[Layout], *, wanted: Sequence[tuple[int, int]]) -> tuple[Layout, ...]:
    """Sort layouts into the order in which they are tried: the wanted ones first, then the largest replicas.

    Among replicas of equal size, the tensor degree of the last wanted entry comes first, then the larger shard
    degree, since splitting layers costs more.

    Args:
        layouts: all allowed layouts.
        wanted: pairs of shard and tensor degree, the most wanted first; a shard degree of 0 matches no layout.
    """
    tensor = wanted[-1][1] if wanted else 1

    def rank(layout: Layout) -> tuple[int, int, bool, int]:
        place = wanted.index(layout.degrees) if layout.degrees in wanted else len(wanted)
        return place, -layout.replica_size, layout.tensor_degree != tensor, -layout.shard_degree

    return tuple(sorted(layouts, key=rank))


def first_that_fits(layouts: Sequence[Layout], num_ranks: int) -> Layout | None:
    """Return the first layout that `num_ranks` ranks can form; None if they are too few for all of them."""
    return next((layout for layout in layouts if layout.replicas_in(num_ranks)), None)


def what_would_fit(layouts: Sequence[Layout], num_ranks: int) -> str:
    """Explain in a sentence why no layout fits `num_ranks` ranks, and what would fit."""
    allowed = ", or ".join(map(str, layouts)) or "only the degrees that it began with"
    return f"{num_ranks} ranks are left, and this job may have {allowed}"


def choose(layouts: Sequence[Layout], num_ranks: int) -> Layout:
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
    layouts: tuple[Layout, ...] = ()
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
