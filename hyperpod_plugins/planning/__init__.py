"""Planning: how much memory a rank needs, before anything is allocated, and what failures cost a job.

The formulas are in `hyperpod_plugins.planning.closed_forms`.
"""

from hyperpod_plugins.planning.estimate import Estimate
from hyperpod_plugins.planning.expected_time import Forecast, forecast
from hyperpod_plugins.planning.failures import (
    ExponentialFailures,
    FailureModel,
    LemonNodes,
    TraceFailures,
    WeibullFailures,
)
from hyperpod_plugins.planning.memory_plan import (
    GIB,
    MemoryPlan,
    plan_memory,
    smallest_degrees,
)
from hyperpod_plugins.planning.plan import JobPlan, make_plan
from hyperpod_plugins.planning.scenario import RECOVERY_POLICIES, RecoveryPolicy, RetryChain, Scenario, StageTimes
from hyperpod_plugins.planning.simulation import SimulatedRuns, simulate
from hyperpod_plugins.planning.state_memory import TrainingShape
from hyperpod_plugins.planning.tracked_memory import TrackedMemory, UncountedPool

__all__ = [
    "Estimate",
    "ExponentialFailures",
    "FailureModel",
    "Forecast",
    "GIB",
    "JobPlan",
    "LemonNodes",
    "MemoryPlan",
    "RECOVERY_POLICIES",
    "RecoveryPolicy",
    "RetryChain",
    "Scenario",
    "SimulatedRuns",
    "StageTimes",
    "TraceFailures",
    "TrackedMemory",
    "TrainingShape",
    "UncountedPool",
    "WeibullFailures",
    "forecast",
    "make_plan",
    "plan_memory",
    "simulate",
    "smallest_degrees",
]
