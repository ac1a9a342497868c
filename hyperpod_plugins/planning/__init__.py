"""Planning: how much memory a rank needs, before anything is allocated."""

from hyperpod_plugins.planning.memory_plan import (
    GIB,
    MemoryPlan,
    plan_memory,
    smallest_degrees,
)
from hyperpod_plugins.planning.tracked_memory import TrackedMemory, UncountedPool
from hyperpod_plugins.planning.training_shape import TrainingShape

__all__ = ["GIB", "MemoryPlan", "TrackedMemory", "TrainingShape", "UncountedPool", "plan_memory", "smallest_degrees"]
