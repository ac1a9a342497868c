"""Fault injection: fault schedules for a program, and `hyperpod chaos`, which injects faults into a running job."""

from hyperpod_plugins.fault_injection.faults import Fault, InjectedFault, Injector, parse_faults, random_faults

__all__ = [
    "Fault",
    "InjectedFault",
    "Injector",
    "parse_faults",
    "random_faults",
]
