"""User options for recovery, the same for all kinds of training loops."""

import logging
from dataclasses import dataclass
from functools import cache
from typing import Literal

from hyperpod_plugins.elastic.membership.quorum_policy import MembershipPolicy
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.parallel.topology import Topology
from hyperpod_plugins.recovery.protocols import RetryPolicy
from hyperpod_plugins.recovery.replica_comparison import Interval
from hyperpod_plugins.recovery.snapshot import MAX_COST, SnapshotPolicy
from hyperpod_plugins.recovery.watchdog import HangPolicy

log = logging.getLogger(__name__)
WITHOUT_AGENT = (
    "the loss of a process ends the job: no agent that replaces processes has started this one. Start the program "
    "with hyperpodrun, or with torchrun --rdzv-backend=hyperpod"
)
"""The cost of a loss where recovery is not possible."""


@cache
def log_once(cost_of_loss: str) -> None:
    """Log what the loss of a rank costs, once in this process."""
    log.warning("recovery: %s", cost_of_loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryOptions:
    """How a job is repaired in place when a process is lost or a step fails."""

    enabled: bool = True
    """Whether to repair faults in place. If False, the launcher restarts all processes after a fault."""
    replacement_timeout_s: float = 300.0
    """Longest wait for a replacement, in seconds; after that, the job ends with an error."""
    hang_timeout_s: float = 30.0
    """Wait in a collective of a step, in seconds, after which the other ranks have the rank they wait for replaced.

    The limit is ten times the job's median step time if that is longer. A rank that loads its batch counts as in a
    step. In the first steps of a process the limit is 300 s, and for a rank outside a step 900 s.
    """
    max_attempts: int = 3
    """Attempts at one step that may fail with an exception of the same rank before it is raised."""
    verify: bool = False
    """Whether to verify the state that a replacement receives with checksums."""
    step_keyed_random: bool = True
    """Whether random numbers are a function of the step, so that a repeated step and a replacement draw the same
    numbers. Otherwise the job recovers, but not bit for bit if it uses, say, dropout."""
    snapshot_every_steps: int | Literal["auto"] = "auto"
    """Steps between two buddy snapshots; 0 for none.

    Snapshots are for shards without a remaining replica: all ranks return to the newest complete snapshot and run at
    most this many steps again; up to twice as many if this is more than one and the fault interrupts the exchange of
    a snapshot. With `"auto"`, if each shard exists once (replicate degree 1), snapshots are taken as often as they
    cost less than 0.5 % of the time, which is measured in the first steps and printed. If shards have replicas,
    `"auto"` takes none: if all replicas of a shard are lost at once, all ranks return to the last checkpoint."""
    snapshot_memory_fraction: float = 0.5
    """Largest fraction of a node's memory for the snapshots of all its ranks."""
    rank_local_state: Literal["exact", "replica"] = "exact"
    """What to do if no rank has the rank-local state of a lost rank (buffers that its steps wrote, metrics, means of
    the epoch), because its buddy was lost too or the state is larger than 1 MiB.

    If there is a complete snapshot, all ranks return to it. Otherwise, `"exact"` restarts all processes from the last
    checkpoint, and `"replica"` continues with the state of a replica of the shard, and reports it: the results then
    differ from those of a run without faults."""
    rehearse: tuple[int, ...] = ()
    """Numbers of the steps to rehearse.

    Before each, the state of each rank is written and read back, and compared between replicas. The step is computed,
    discarded as after a fault, compared with its beginning, and computed again. If any state would not be restored
    (tensors, trainer, callbacks, rank-local state), the job ends with an error that names it."""

    compare_replicas_every: Interval = "auto"
    """Steps between two comparisons of replicas; 0 for none.

    Digests of parameters and optimizer state must be equal on all replicas of a shard. On a difference, the job ends
    with an error that names the rank and its host. `"auto"` compares samples of these tensors in steps 0, 1, 2, 4, ...,
    1024, 2048, 3072 and so on."""

    def __post_init__(self) -> None:
        """Check the values."""
        _ = self.membership, self.hangs, self.retries, self._snapshots
        if any(step < 0 for step in self.rehearse):
            raise ConfigError(f"rehearse must hold step numbers of at least 0, but is {self.rehearse}")
        if self.rank_local_state not in ("exact", "replica"):
            raise ConfigError(f'rank_local_state must be "exact" or "replica", but is {self.rank_local_state!r}')
        every = self.compare_replicas_every
        if every != "auto" and every < 0:
            raise ConfigError(
                f'compare_replicas_every must be a number of steps, 0 for none, or "auto", but is {every}'
            )

    @property
    def membership(self) -> MembershipPolicy:
        """How long to wait for replacements."""
        return MembershipPolicy(replacement_timeout_s=self.replacement_timeout_s)

    @property
    def hangs(self) -> HangPolicy:
        """When a rank counts as hanging."""
        return HangPolicy(floor_s=self.hang_timeout_s)

    @property
    def retries(self) -> RetryPolicy:
        """When to stop retrying a step."""
        return RetryPolicy(max_attempts=self.max_attempts, needs_rank_local_state=self.rank_local_state == "exact")

    def snapshots(self, topology: Topology) -> SnapshotPolicy:
        """How to take snapshots in a job with this topology."""
        is_needed = self.snapshot_every_steps != "auto" or topology.replicate_degree == 1
        return self._snapshots if is_needed and topology.world_size > 1 else SnapshotPolicy()

    def cost_of_loss(self, topology: Topology) -> str:
        """What the loss of one rank costs a job with this topology, and how to lose less: one line for the log."""
        if topology.replicate_degree > 1:
            return (
                "the loss of a rank costs no committed step: its replacement takes its state from another of the "
                f"{topology.replicate_degree} replicas of its shard"
            )
        policy, since = self.snapshots(topology), "the last checkpoint"
        if policy.is_measured:
            since = (
                f"the last buddy snapshot (one after each step, or as many as cost {100 * MAX_COST:g} % of the time)"
            )
        elif policy.every_steps:
            since = f"the last buddy snapshot (one after every {policy.every_steps} steps)"
        how = (
            "Use more ranks" if topology.shard_degree == 1 else f"Set hybrid_shard_degree below {topology.shard_degree}"
        )
        return f"the loss of a rank costs the steps since {since}, as each shard exists once. {how} to lose none"

    @property
    def _snapshots(self) -> SnapshotPolicy:
        every = self.snapshot_every_steps
        return SnapshotPolicy(
            every_steps=1 if every == "auto" else every,
            is_measured=every == "auto",
            memory_fraction=self.snapshot_memory_fraction,
            is_required=every != "auto",
        )
