"""Degrees of one replica that a job may have, and which it gets when all its processes start together; pure.

The number of replicas changes while a job runs, its degrees only with a restart of all processes. Which degrees there
may be is the user's word; of these the first that fits the ranks that are there is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hyperpod_plugins.errors import DegreeError


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
