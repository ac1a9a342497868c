"""What the training state of a shard looks like, left in the job store for those that come: they make room beforehand.

A newcomer that waits for its turn has time; when its turn comes, all others wait for it. To make the optimizers'
tensors and to touch their memory for the first time may take longer than to fill them.
"""

from hyperpod_plugins.parallel.topology import Topology
from hyperpod_plugins.recovery.member import Member
from hyperpod_plugins.recovery.plan import NO_STATE
from hyperpod_plugins.recovery.state import TrainingState


class StateLayout:
    """Of the shard that one rank holds."""

    def __init__(self, member: Member, state: TrainingState, topology: Topology) -> None:
        here = topology.coordinates(member.rank)
        self._member = member
        self._state = state
        self._key = f"preview/{here.shard}/{here.tensor}"
        self._is_left = here.replicate > 0  # the first replica does it

    def publish(self) -> None:
        """Say once what there is, when the first step has made the optimizers' state."""
        if not self._is_left:
            self._member.job_store.set(self._key, self._state.header())
            self._is_left = True

    def preallocate(self) -> None:
        """In a newcomer, make room for what somebody has said there is, if anybody has."""
        header = self._member.job_store.try_get(self._key) if self._member.committed == NO_STATE else None
        if header is not None:
            self._state.make_room(header)
