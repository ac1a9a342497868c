"""`ranks_lightning.py` with buddy snapshots every few steps, and with one more layout: full sharding."""

import os
from functools import partial

import ranks_lightning
from ranks_lightning import LAYOUTS, CheckpointlessRecovery, faults, main

from hyperpod_plugins.recovery import Snapshots

LAYOUTS["full"] = {"hybrid_shard_degree": 4}
every_steps = int(os.environ["SNAPSHOT_EVERY"])
ranks_lightning.CheckpointlessRecovery = partial(CheckpointlessRecovery, snapshot_every_steps=every_steps)


def instrument():
    """Points on the way back to a snapshot."""
    give, take, load = Snapshots._send, Snapshots._receive, Snapshots.load

    def giving(self, shelf, step, rank):
        faults.at("give", step)
        give(self, shelf, step, rank)

    def taking(self, shelf, step, rank):
        faults.at("take", step)
        take(self, shelf, step, rank)

    def loading(self, step):
        faults.at("load", step)
        load(self, step)

    Snapshots._send, Snapshots._receive, Snapshots.load = giving, taking, loading


if __name__ == "__main__":
    instrument()
    main()
