"""Custom training loops, in plain PyTorch or with Accelerate, that survive faults and can change their world size."""

from hyperpod_plugins.session.session import Session
from hyperpod_plugins.session.step import Step

__all__ = [
    "Session",
    "Step",
]
