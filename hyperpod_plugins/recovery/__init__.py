"""In-process fault recovery: the step as a transaction, and the return of all ranks to a common step."""

from hyperpod_plugins.recovery.config import RecoveryOptions
from hyperpod_plugins.recovery.member import Member, NullMember
from hyperpod_plugins.recovery.plan import NO_STATE, Arrival, RecoveryLevel, RecoveryPlan, buddies, plan_recovery
from hyperpod_plugins.recovery.protocols import SAVING_GROUP, Repair, RetryPolicy, ReturnedToSnapshot, TrainingLoop
from hyperpod_plugins.recovery.quorum import FormedGeneration, MustReenterLoop
from hyperpod_plugins.recovery.restart_all import SavedCheckpoints
from hyperpod_plugins.recovery.rng import seed_micro_step, stream_seed
from hyperpod_plugins.recovery.snapshot import Snapshot, SnapshotPolicy, Snapshots
from hyperpod_plugins.recovery.state_transfer import TrainingState
from hyperpod_plugins.recovery.step import StepTransaction
from hyperpod_plugins.recovery.watchdog import HangPolicy

__all__ = [
    "Arrival",
    "FormedGeneration",
    "HangPolicy",
    "Member",
    "MustReenterLoop",
    "NO_STATE",
    "NullMember",
    "RecoveryLevel",
    "RecoveryOptions",
    "RecoveryPlan",
    "Repair",
    "RetryPolicy",
    "ReturnedToSnapshot",
    "SAVING_GROUP",
    "SavedCheckpoints",
    "Snapshot",
    "SnapshotPolicy",
    "Snapshots",
    "StepTransaction",
    "TrainingLoop",
    "TrainingState",
    "buddies",
    "plan_recovery",
    "seed_micro_step",
    "stream_seed",
]
