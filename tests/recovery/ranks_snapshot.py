"""`ranks_lightning.py` with buddy snapshots every few steps, and with one more layout: full sharding."""

import os
from functools import partial

import ranks_lightning
from ranks_lightning import LAYOUTS, CheckpointlessRecovery, faults, main

from hyperpod_plugins.recovery import Snapshots

if os.environ.get("PRIVATE_SNAPSHOTS"):  # in the memory of the processes, as where there is no shared memory
    os.environ.pop("HYPERPOD_SNAPSHOTS", None)
LAYOUTS["full"] = {"hybrid_shard_degree": 4}
every_steps = int(os.environ["SNAPSHOT_EVERY"])
ranks_lightning.CheckpointlessRecovery = partial(CheckpointlessRecovery, snapshot_every_steps=every_steps)


def instrument():
    """Points on the way back to a snapshot."""
    hand_over, load = Snapshots._hand_over, Snapshots.load

    def handing_over(self, step, given, to, taken, source):
        if to is not None:
            faults.at("give", step)
        if source is not None:
            faults.at("take", step)
        hand_over(self, step, given, to, taken, source)

    def loading(self, step):
        faults.at("load", step)
        load(self, step)

    Snapshots._hand_over, Snapshots.load = handing_over, loading


if __name__ == "__main__":
    instrument()
    main()
