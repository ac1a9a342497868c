"""The `CheckpointlessRecovery` callback: a user's recovery options for a Trainer."""

from collections.abc import Sequence
from typing import Literal

from hyperpod_plugins.elastic.membership.admission import withdraw_announcement
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.lightning.compat import Callback, Trainer
from hyperpod_plugins.recovery import RecoveryOptions, Repair


class CheckpointlessRecovery(Callback):
    """Repair the job in place when a process is lost or a step fails, without reading a checkpoint.

    Recovery needs an agent that replaces lost processes: start the program with `hyperpodrun`. Under this launcher,
    recovery is on even without this callback, with the defaults below. Under another launcher, this callback only
    warns.

    Args:
        enabled: whether to recover in place. If False, the launcher restarts all processes after a failure.
        replacement_timeout_s: longest wait for a replacement, in seconds. After it, the job ends with an error.
        hang_timeout_s: seconds that other ranks wait for a rank in a collective of a step before that rank is
            replaced, or ten times the job's median step time if that is longer. A rank that loads its batch counts as
            inside a step. The limit is 300 s in the first steps of a process, and 900 s for a rank outside a step.
        max_attempts: attempts at one step that may fail with an exception on the same rank before it is raised.
        verify: compare checksums of the state that a replacement receives.
        step_keyed_random: derive random numbers from the step, so that a repeated step and a replacement draw the
            same numbers as before. Otherwise the job still recovers, but with dropout its results are not bitwise
            identical.
        snapshot_every_steps: steps between buddy snapshots, 0 for none. Snapshots are for shards without a surviving
            replica: all ranks return to the newest complete snapshot and redo at most this many steps, or up to twice
            as many if the interval is longer than one step and the fault interrupts the exchange of a snapshot. If
            each shard exists once (replicate degree 1), `"auto"` takes snapshots as often as they cost less than
            0.5 % of the time; it measures the cost in the first steps and prints the interval. If shards have
            replicas, `"auto"` takes none: when all replicas of a shard are lost at once, all ranks return to the last
            checkpoint.
        snapshot_memory_fraction: largest fraction of a node's memory for the snapshots of all its ranks.
        rank_local_state: what to do when the rank-local state of a lost rank (buffers written by its steps, metrics,
            means of the epoch) is lost, because its buddy was lost too or the state was larger than 1 MiB. If there
            is a complete snapshot, all ranks return to it. Otherwise `"exact"` restarts all ranks from the last
            checkpoint, and `"replica"` continues with the state of a replica of the shard and logs that.
        rehearse: numbers of steps to rehearse: each is computed, discarded as after a fault, and computed again. The
            job ends with an error that names any state that differs or that cannot be written and read back.
        compare_replicas_every: steps between comparisons of replicas, 0 for none. The digests of each rank's
            parameters and optimizer state must be the same on all replicas of a shard. A difference ends the job with
            an error that names rank and host.

    Attributes:
        repairs: every repair that this process has taken part in, in order.
    """

    def __init__(
        self,
        *,
        enabled: bool = True,
        replacement_timeout_s: float = 300.0,
        hang_timeout_s: float = 30.0,
        max_attempts: int = 3,
        verify: bool = False,
        step_keyed_random: bool = True,
        snapshot_every_steps: int | Literal["auto"] = "auto",
        snapshot_memory_fraction: float = 0.5,
        rank_local_state: Literal["exact", "replica"] = "replica",
        rehearse: Sequence[int] = (),
        compare_replicas_every: int = 0,
    ) -> None:
        self.options = RecoveryOptions(
            enabled=enabled,
            replacement_timeout_s=replacement_timeout_s,
            hang_timeout_s=hang_timeout_s,
            max_attempts=max_attempts,
            verify=verify,
            step_keyed_random=step_keyed_random,
            snapshot_every_steps=snapshot_every_steps,
            snapshot_memory_fraction=snapshot_memory_fraction,
            rank_local_state=rank_local_state,
            rehearse=tuple(rehearse),
            compare_replicas_every=compare_replicas_every,
        )
        self.repairs: list[Repair] = []
        job = None if enabled else JobEnv.from_environ()
        if job is not None:
            withdraw_announcement(job)


def recovers(trainer: Trainer) -> bool:
    """Whether the trainer's callbacks leave in-place recovery enabled."""
    chosen = [each for each in vars(trainer)["callbacks"] if isinstance(each, CheckpointlessRecovery)]
    return not chosen or chosen[0].options.enabled
