"""What a user may choose about recovery, whoever writes the loop."""

from dataclasses import dataclass
from typing import Literal

from hyperpod_plugins.elastic.membership.quorum import MembershipPolicy
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.parallel.topology import Topology
from hyperpod_plugins.recovery.protocols import RetryPolicy
from hyperpod_plugins.recovery.snapshot import SnapshotPolicy
from hyperpod_plugins.recovery.watchdog import HangPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryOptions:
    """How a job is repaired in place when a process is lost or a step fails."""

    enabled: bool = True
    """False leaves everything to the launcher, which restarts all processes."""
    replacement_timeout_s: float = 300.0
    """Longest wait for a replacement, in seconds; then the job ends with an error."""
    hang_timeout_s: float = 30.0
    """Shortest wait of the other ranks, in a collective of a step, after which the rank that they wait for is replaced.

    Ten times the job's median step time if that is longer. A rank that loads its batch counts as in a step. In the
    first steps of a process 300 s hold, and for a rank that is outside of a step 900 s.
    """
    max_attempts: int = 3
    """Attempts at one step that may end with the same rank's exception before it is raised."""
    verify: bool = False
    """Compare checksums of the state that a replacement receives."""
    step_keyed_random: bool = True
    """Draw random numbers as a function of the step, so that a repeated step and a replacement draw what was drawn
    before. Without it the job recovers, but not to the same bits where there is dropout."""
    snapshot_every_steps: int | Literal["auto"] = "auto"
    """Steps from one buddy snapshot to the next, 0 for none. They are for shards of which no replica is left: all ranks
    return to the newest that is complete, and redo at most so many steps; up to twice as many where that is more than
    one and the fault interrupts the exchange of a snapshot. `"auto"` takes one as often as it costs less than 0.5 % of
    the time where each shard exists once (replicate degree 1), which is measured in the first steps and printed. Where
    shards have replicas it takes none: if all replicas of a shard are lost at once, all ranks return to the last
    checkpoint."""
    snapshot_memory_fraction: float = 0.5
    """Largest part of a node's memory for the snapshots of all its ranks."""
    rank_local_state: Literal["exact", "replica"] = "replica"
    """What to do where no rank has what a lost one had alone (buffers that its steps wrote, metrics, means of the
    epoch), for its buddy was lost with it, or there was more than 1 MiB of it. All ranks return to a snapshot, where
    one is whole. Otherwise `"exact"` has all start again from the last checkpoint, and `"replica"` goes on with what
    the replica of its shard has, which is said."""
    rehearse: tuple[int, ...] = ()
    """Steps that are rehearsed: each is computed, thrown away as after a fault, and computed again; the state of each
    rank is written and read back, and compared between replicas. What would not come back ends the job by name."""

    compare_replicas_every: int = 0
    """Steps from one comparison of replicas to the next, 0 for none: digests of each rank's parameters and optimizer
    state must be the same on all replicas of a shard. A difference ends the job and names rank and host."""

    def __post_init__(self) -> None:
        """Check the values."""
        _ = self.membership, self.hangs, self.retries, self._snapshots
        if any(step < 0 for step in self.rehearse):
            raise ConfigError(f"rehearse takes numbers of steps, from 0 on, but was given {self.rehearse}")
        if self.rank_local_state not in ("exact", "replica"):
            raise ConfigError(f'rank_local_state must be "exact" or "replica", but is {self.rank_local_state!r}')
        every = self.compare_replicas_every
        if every < 0:
            raise ConfigError(f"compare_replicas_every takes a number of steps, 0 for never, but was given {every}")

    @property
    def membership(self) -> MembershipPolicy:
        """How long to wait for whom."""
        return MembershipPolicy(replacement_timeout_s=self.replacement_timeout_s)

    @property
    def hangs(self) -> HangPolicy:
        """When a rank counts as hanging."""
        return HangPolicy(floor_s=self.hang_timeout_s)

    @property
    def retries(self) -> RetryPolicy:
        """When to stop trying."""
        return RetryPolicy(max_attempts=self.max_attempts, needs_local=self.rank_local_state == "exact")

    def snapshots(self, topology: Topology) -> SnapshotPolicy:
        """Which snapshots to take in a job of this topology."""
        is_needed = self.snapshot_every_steps != "auto" or topology.replicate_degree == 1
        return self._snapshots if is_needed and topology.world_size > 1 else SnapshotPolicy()

    @property
    def _snapshots(self) -> SnapshotPolicy:
        every = self.snapshot_every_steps
        return SnapshotPolicy(
            every_steps=1 if every == "auto" else every,
            is_measured=every == "auto",
            memory_fraction=self.snapshot_memory_fraction,
            is_required=every != "auto",
        )
