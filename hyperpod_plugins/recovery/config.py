"""User options for recovery, the same for all kinds of training loops."""

import logging
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from hyperpod_plugins.elastic.membership.quorum_policy import QuorumPolicy
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.parallel.topology import Topology
from hyperpod_plugins.recovery.protocols import RetryPolicy
from hyperpod_plugins.recovery.replica_comparison import Interval
from hyperpod_plugins.recovery.snapshot import MAX_COST, MAX_COST_OF_RARE, SnapshotPolicy
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


_MEASURED = "auto", "unreplicated"
"""Values of `snapshot_every_steps` with which the interval is measured."""


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
    snapshot_every_steps: int | Literal["auto", "unreplicated"] = "auto"
    """Steps between two buddy snapshots; 0 for none.

    Snapshots are for shards without a remaining replica: all ranks return to the newest complete snapshot and run at
    most this many steps again; up to twice as many if this is more than one and the fault interrupts the exchange of
    a snapshot. With `"auto"`, if all copies of a shard are on one node (each shard exists once, or all replicas share
    a node), snapshots are taken as often as they cost less than 0.5 % of the time, which is measured in the first
    steps and printed; or less than 0.2 %, if only the loss of all ranks at once needs them: all ranks are on one
    node, replicas of each shard among them, and its launcher replaces single ranks. If the copies of each shard are on
    several nodes, `"auto"` takes none: if all of them are lost at once, all ranks return to the last checkpoint.
    `"unreplicated"`: the same, but only while each shard exists once."""
    snapshot_memory_fraction: float = 0.5
    """Largest fraction of a node's memory for the snapshots of all its ranks."""
    rank_local_state: Literal["exact", "replica"] = "exact"
    """What to do if no rank has the rank-local state of a lost rank (buffers that its steps wrote, metrics, means of
    the epoch), because its buddy was lost too or the state is larger than 1 MiB.

    `"exact"`: all ranks return to a complete snapshot, or all processes restart from the last checkpoint. `"replica"`:
    the job continues with the state of a replica of the shard, and reports it: the results then differ from those of
    a run without faults."""
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
    def membership(self) -> QuorumPolicy:
        """How long to wait for replacements."""
        return QuorumPolicy(replacement_timeout_s=self.replacement_timeout_s)

    @property
    def hangs(self) -> HangPolicy:
        """When a rank counts as hanging."""
        return HangPolicy(floor_s=self.hang_timeout_s)

    @property
    def retries(self) -> RetryPolicy:
        """When to stop retrying a step."""
        return RetryPolicy(max_attempts=self.max_attempts, needs_rank_local_state=self.rank_local_state == "exact")

    def snapshots(self, topology: Topology, *, restarts_node: bool = False) -> SnapshotPolicy:
        """How to take snapshots in a job with this topology; `restarts_node`: see `cost_of_loss`."""
        every = self.snapshot_every_steps
        is_safe = not topology.has_shard_on_one_node or (every == "unreplicated" and topology.replicate_degree > 1)
        is_measured = every in _MEASURED
        if topology.world_size == 1 or (is_measured and is_safe):
            return SnapshotPolicy()
        needs_buddies = not is_measured or topology.replicate_degree == 1 or not topology.is_one_node
        is_rare = not needs_buddies and not restarts_node
        max_cost = MAX_COST_OF_RARE if is_rare else MAX_COST
        return replace(self._snapshots, needs_buddies=needs_buddies, max_cost=max_cost)

    def cost_of_loss(self, topology: Topology, *, restarts_node: bool = False, outlives: bool = True) -> str:
        """What losses cost a job with this topology, and how to lose less: one line for the log.

        Args:
            topology: of the job.
            restarts_node: whether the loss of one rank ends all ranks of its node, as under torchrun.
            outlives: whether snapshots are in shared memory, which outlives the ranks of a node.
        """
        replaced = (
            "costs no committed step: its replacement takes its state from another of the "
            f"{topology.replicate_degree} replicas of its shard"
        )
        if not topology.has_shard_on_one_node:
            return f"the loss of a rank, or of all ranks of a node, {replaced}"
        since_snapshot = self._since(topology, restarts_node=restarts_node)
        since_checkpoint = "since the last checkpoint"
        of_node = since_snapshot if outlives or not topology.is_one_node else since_checkpoint
        if topology.replicate_degree > 1 and not restarts_node:
            return (
                f"the loss of a rank {replaced}. The loss of all ranks of a node at once costs the steps {of_node}. "
                "Spread the replicas over several nodes to lose none"
            )
        if topology.replicate_degree > 1:
            return (
                f"the loss of a rank costs the steps {of_node}, as torchrun restarts all ranks of a node with the "
                "first that fails. Start the program with hyperpodrun, which replaces one rank alone, or spread the "
                "replicas over several nodes to lose none"
            )
        how = (
            "Use more ranks" if topology.shard_degree == 1 else f"Set hybrid_shard_degree below {topology.shard_degree}"
        )
        why = "as each shard exists once"
        if restarts_node:
            how += " and start the program with hyperpodrun, which replaces one rank alone,"
            why += " and torchrun restarts all ranks of a node with the first that fails"
        of_rank = of_node if restarts_node else since_snapshot
        also = "" if of_rank == of_node else f" The loss of all ranks at once costs those {of_node}."
        return f"the loss of a rank costs the steps {of_rank}, {why}.{also} {how} to lose none"

    def _since(self, topology: Topology, *, restarts_node: bool) -> str:
        """Since when steps are lost if all copies of a shard are: a clause for the log."""
        policy = self.snapshots(topology, restarts_node=restarts_node)
        if policy.is_measured:
            return (
                "since the last buddy snapshot (one after each step, or as many as cost "
                f"{100 * policy.max_cost:g} % of the time)"
            )
        if policy.every_steps:
            return f"since the last buddy snapshot (one after every {policy.every_steps} steps)"
        return "since the last checkpoint"

    @property
    def _snapshots(self) -> SnapshotPolicy:
        every = self.snapshot_every_steps
        return SnapshotPolicy(
            every_steps=1 if every in _MEASURED else every,
            is_measured=every in _MEASURED,
            memory_fraction=self.snapshot_memory_fraction,
            is_required=every not in _MEASURED,
        )
