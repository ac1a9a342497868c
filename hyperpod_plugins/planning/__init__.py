"""Planning: how much memory a rank needs, before anything is allocated."""

from hyperpod_plugins.planning.memory_plan import (
    GIB,
    MemoryPlan,
    TrackedMemory,
    TrainingShape,
    UncountedPool,
    plan_memory,
    smallest_degrees,
)

__all__ = ["GIB", "MemoryPlan", "TrackedMemory", "TrainingShape", "UncountedPool", "plan_memory", "smallest_degrees"]
