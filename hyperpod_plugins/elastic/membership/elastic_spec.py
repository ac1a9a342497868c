"""On which terms a job changes its size: its founders leave them in the job store, and everybody reads them there."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hyperpod_plugins.elastic.scaling.policy import ElasticPolicy
from hyperpod_plugins.elastic.store.job_store import JobStore
from hyperpod_plugins.errors import DegreeError

# Degrees of one replica that a job may have, and which it gets when all its processes start together; pure.
#
# The number of replicas changes while a job runs, its degrees only with a restart of all processes. Which degrees
# there may be is the user's word; of these the first that fits the ranks that are there is taken.


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees of one replica, and how many replicas of them there may be."""

    shard_degree: int
    tensor_degree: int = 1
    sizes: tuple[int, ...]
    """Numbers of replicas that the policy allows and that can share the global batch, ascending."""

    @property
    def replica_size(self) -> int:
        """Ranks of one replica."""
        return self.shard_degree * self.tensor_degree

    @property
    def degrees(self) -> tuple[int, int]:
        """Shard degree and tensor degree."""
        return self.shard_degree, self.tensor_degree

    def replicas_in(self, num_ranks: int) -> int:
        """Most replicas that so many ranks make up; 0 if they make up no allowed number."""
        return max((size for size in self.sizes if size * self.replica_size <= num_ranks), default=0)

    def __str__(self) -> str:
        """For messages."""
        tensor = f" x tensor degree {self.tensor_degree}" if self.tensor_degree > 1 else ""
        fewest = self.sizes[0] * self.replica_size
        return f"shard degree {self.shard_degree}{tensor} with {fewest} rank{'s' * (fewest > 1)} or more"


def in_order(layouts: Sequence[Layout], *, wanted: Sequence[tuple[int, int]]) -> tuple[Layout, ...]:
    """The order in which layouts are tried: those that are wanted first, then the largest replicas.

    Of equally large ones the one with the tensor degree of the last that is wanted comes first, and then the one with
    the larger shard degree: splitting layers costs more.

    Args:
        layouts: all that are allowed.
        wanted: shard and tensor degrees, the most wanted first; a shard degree of 0 is nobody's wish.
    """
    tensor = wanted[-1][1] if wanted else 1

    def rank(layout: Layout) -> tuple[int, int, bool, int]:
        place = wanted.index(layout.degrees) if layout.degrees in wanted else len(wanted)
        return place, -layout.replica_size, layout.tensor_degree != tensor, -layout.shard_degree

    return tuple(sorted(layouts, key=rank))


def first_that_fits(layouts: Sequence[Layout], num_ranks: int) -> Layout | None:
    """The layout that so many ranks begin with; None if there are too few for all of them."""
    return next((layout for layout in layouts if layout.replicas_in(num_ranks)), None)


def what_would_fit(layouts: Sequence[Layout], num_ranks: int) -> str:
    """Why none of the layouts fits so many ranks, and what would, in a sentence."""
    allowed = ", or ".join(map(str, layouts)) or "only the degrees that it began with"
    return f"{num_ranks} ranks are left, and this job may have {allowed}"


def choose(layouts: Sequence[Layout], num_ranks: int) -> Layout:
    """`first_that_fits`.

    Raises:
        DegreeError: none does.
    """
    layout = first_that_fits(layouts, num_ranks)
    if layout is None:
        raise DegreeError(
            f"{what_would_fit(layouts, num_ranks).replace('are left', 'are here')}. Start more processes, or allow "
            "smaller degrees with ElasticTraining(shard_degrees=...)."
        )
    return layout


_TERMS = "elastic"  # value: `Terms`


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticSpec:
    """On which a job grows and shrinks."""

    policy: ElasticPolicy
    replica_size: int
    """Ranks of one replica: shard degree x tensor degree."""
    sizes: tuple[int, ...]
    """Numbers of replicas that the policy allows and that can share the global batch."""
    tensor_degree: int = 1
    layouts: tuple[Layout, ...] = ()
    """Degrees in which all processes may start again, in the order in which they are tried."""

    @property
    def degrees(self) -> tuple[int, int]:
        """Shard degree and tensor degree of the present world."""
        return self.replica_size // self.tensor_degree, self.tensor_degree

    def to_json(self) -> bytes:
        """For the job store."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "ElasticSpec":
        """Inverse of `to_json`."""
        values: dict[str, Any] = json.loads(text)
        policy = values["policy"] | {"replica_sizes": tuple(values["policy"]["replica_sizes"])}
        layouts = tuple(Layout(**each | {"sizes": tuple(each["sizes"])}) for each in values["layouts"])
        whole: dict[str, Any] = {"policy": ElasticPolicy(**policy), "sizes": tuple(values["sizes"]), "layouts": layouts}
        return cls(**values | whole)


def publish_elastic_spec(job_store: JobStore, spec: ElasticSpec) -> None:
    """Let others come in from now on; the first word counts."""
    job_store.set_if_absent(_TERMS, spec.to_json())


def elastic_spec_of(job_store: JobStore) -> ElasticSpec | None:
    """The terms of the job; None for one that does not change its size."""
    text = job_store.try_get(_TERMS)
    return None if text is None else ElasticSpec.from_json(text)
