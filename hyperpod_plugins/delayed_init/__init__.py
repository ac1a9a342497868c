"""Delayed initialisation: build a model without memory, shard it, then allocate and initialise each rank's part."""

from hyperpod_plugins.delayed_init.api import delayed_init
from hyperpod_plugins.delayed_init.materialize import copy_shard_, local_slice, materialize
from hyperpod_plugins.delayed_init.tape import ReplayReport, Tape, tapes_of

__all__ = [
    "ReplayReport",
    "Tape",
    "copy_shard_",
    "delayed_init",
    "local_slice",
    "materialize",
    "tapes_of",
]
