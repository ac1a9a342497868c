"""What a user may choose about recovery in a Trainer."""

from typing import Literal

from hyperpod_plugins.lightning.flavour import Callback
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
            replica is left: all ranks return to the last one, and redo at most so many steps. `"auto"` takes one every
            20 steps where each shard exists once (replicate degree 1), and none where it has replicas.
        snapshot_memory_fraction: largest part of a node's memory for the snapshots of all its ranks.

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
        )
        self.repairs: list[Repair] = []
