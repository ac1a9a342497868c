"""The layout of a shard's training state, published in the job store so that joiners can preallocate memory for it.

A joiner that waits for its turn has time to spare; when its turn comes, all others wait for it. Allocating the
optimizer's tensors and touching their memory for the first time may take longer than filling them.
"""

from hyperpod_plugins.parallel.topology import Topology
from hyperpod_plugins.recovery.member import Member
from hyperpod_plugins.recovery.plan import NO_STATE
from hyperpod_plugins.recovery.state import TrainingState


class StateLayout:
    """The layout of the shard that one rank holds."""

    def __init__(self, member: Member, state: TrainingState, topology: Topology) -> None:
        here = topology.coordinates(member.rank)
        self._member = member
        self._state = state
        self._key = f"preview/{here.shard}/{here.tensor}"
        self._is_published = here.replicate > 0  # only the first replica publishes it

    def publish(self) -> None:
        """Publish the layout once; call this after the first step, which creates the optimizer state."""
        if not self._is_published:
            self._member.job_store.set(self._key, self._state.header())
            self._is_published = True

    def preallocate(self) -> None:
        """In a joiner, allocate memory for the published layout, if there is one."""
        header = self._member.job_store.try_get(self._key) if self._member.committed == NO_STATE else None
        if header is not None:
            self._state.preallocate(header)
