"""What a user may choose about recovery in a Trainer."""

from collections.abc import Sequence
from typing import Literal

from hyperpod_plugins.elastic.membership.admission import renounce
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.lightning.compat import Callback, Trainer
from hyperpod_plugins.recovery import RecoveryOptions, Repair


class CheckpointlessRecovery(Callback):
    """Repair the job in place when a process is lost or a step fails, without reading a checkpoint.

    Needs an agent that replaces lost processes: start the program with `hyperpodrun`. There, recovery is on without
    this callback too, with the defaults below. Under another launcher this callback does nothing but warn.

    Args:
        enabled: False leaves everything to the launcher, which restarts all processes.
        replacement_timeout_s: longest wait for a replacement, in seconds; then the job ends with an error.
        hang_timeout_s: shortest wait of the other ranks, in a collective of a step, after which the rank that they wait
            for is replaced; ten times the job's median step time if that is longer. A rank that loads its batch counts
            as in a step. In the first steps of a process 300 s hold, and for a rank that is outside of a step 900 s.
        max_attempts: attempts at one step that may end with the same rank's exception before it is raised.
        verify: compare checksums of the state that a replacement receives.
        step_keyed_random: draw random numbers as a function of the step, so that a repeated step and a replacement
            draw what was drawn before. Without it the job recovers, but not to the same bits where there is dropout.
        snapshot_every_steps: steps from one buddy snapshot to the next, 0 for none. They are for shards of which no
            replica is left: all ranks return to the newest that is complete, and redo at most so many steps; up to
            twice as many where that is more than one and the fault interrupts the exchange of a snapshot. `"auto"`
            takes one as often as it costs less than 0.5 % of the time where each shard exists once (replicate degree
            1), which is measured in the first steps and printed. Where shards have replicas it takes none: if all
            replicas of a shard are lost at once, all ranks return to the last checkpoint.
        snapshot_memory_fraction: largest part of a node's memory for the snapshots of all its ranks.
        rank_local_state: what to do where no rank has what a lost one had alone (buffers that its steps wrote, metrics,
            means of the epoch), for its buddy was lost with it, or there was more than 1 MiB of it. All ranks return to
            a snapshot, where one is whole. Otherwise `"exact"` has all start again from the last checkpoint, and
            `"replica"` goes on with what the replica of its shard has, which is said.
        rehearse: numbers of steps that are computed, thrown away as after a fault, and computed again; what differs, or
            what of the state can not be written and read back, ends the job by name.
        compare_replicas_every: steps from one comparison of replicas to the next, 0 for none: digests of the parameters
            and the optimizer state that each rank holds must be the same on all replicas of a shard. A difference ends
            the job, naming rank and host.

    Attributes:
        repairs: every fault that this process has seen repaired, in order.
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
            renounce(job)


def recovers(trainer: Trainer) -> bool:
    """Whether a trainer's job is to be repaired in place, as far as its program says."""
    chosen = [each for each in vars(trainer)["callbacks"] if isinstance(each, CheckpointlessRecovery)]
    return not chosen or chosen[0].options.enabled
