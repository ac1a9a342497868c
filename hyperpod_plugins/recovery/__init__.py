"""Surviving faults in process: the step as a transaction, and the way back to a common step."""

from hyperpod_plugins.recovery.assembly import Generation, PeersOutside
from hyperpod_plugins.recovery.assign import NO_STATE, Arrival, RecoveryPlan, Rung, plan_recovery
from hyperpod_plugins.recovery.buddies import buddies
from hyperpod_plugins.recovery.checkpoints import SavedCheckpoints
from hyperpod_plugins.recovery.detect import HangPolicy
from hyperpod_plugins.recovery.member import Member
from hyperpod_plugins.recovery.options import RecoveryOptions
from hyperpod_plugins.recovery.random import seed_micro_step, stream_seed
from hyperpod_plugins.recovery.repair import SAVING_GROUP, Repair, RetryPolicy, Returned, Subject
from hyperpod_plugins.recovery.restore import TrainingState
from hyperpod_plugins.recovery.snapshot import Snapshot, SnapshotPolicy, Snapshots
from hyperpod_plugins.recovery.step import StepTransaction

__all__ = [
    "Arrival",
    "Generation",
    "HangPolicy",
    "Member",
    "NO_STATE",
    "PeersOutside",
    "RecoveryOptions",
    "RecoveryPlan",
    "Repair",
    "RetryPolicy",
    "Returned",
    "Rung",
    "SAVING_GROUP",
    "SavedCheckpoints",
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
