"""Faults on purpose: schedules, and a command that makes them in a running job."""

from hyperpod_plugins.fault_injection.faults import Fault, InjectedFault, parse_faults, random_faults

__all__ = [
    "Fault",
    "InjectedFault",
    "parse_faults",
    "random_faults",
]
