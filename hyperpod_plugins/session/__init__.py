"""Loops written by hand, in plain torch or with Accelerate, that survive faults and change their size."""

from hyperpod_plugins.session.session import Session
from hyperpod_plugins.session.step import Step

__all__ = [
    "Session",
    "Step",
]
