"""Surviving faults in process: the step as a transaction, and the way back to a common step."""

from hyperpod_plugins.recovery.assign import NO_STATE, Arrival, RecoveryPlan, Rung, plan_recovery
from hyperpod_plugins.recovery.buddies import buddies
from hyperpod_plugins.recovery.detect import HangPolicy
from hyperpod_plugins.recovery.member import Generation, Member, PeersOutside
from hyperpod_plugins.recovery.random import seed_micro_step, stream_seed
from hyperpod_plugins.recovery.restore import TrainingState
from hyperpod_plugins.recovery.snapshot import Snapshot, SnapshotPolicy, Snapshots
from hyperpod_plugins.recovery.step import Repair, RetryPolicy, Returned, StepTransaction, Subject

__all__ = [
    "Arrival",
    "Generation",
    "HangPolicy",
    "Member",
    "NO_STATE",
    "PeersOutside",
    "RecoveryPlan",
    "Repair",
    "RetryPolicy",
    "Returned",
    "Rung",
    "Snapshot",
    "SnapshotPolicy",
    "Snapshots",
    "StepTransaction",
    "Subject",
    "TrainingState",
    "buddies",
    "plan_recovery",
    "seed_micro_step",
    "stream_seed",
]
