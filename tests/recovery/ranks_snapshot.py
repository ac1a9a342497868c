"""`ranks_lightning.py` with buddy snapshots every few steps, and with one more layout: full sharding."""

import os
from functools import partial

import ranks_lightning
from ranks_lightning import LAYOUTS, CheckpointlessRecovery, main

LAYOUTS["full"] = {"hybrid_shard_degree": 4}
every_steps = int(os.environ["SNAPSHOT_EVERY"])
ranks_lightning.CheckpointlessRecovery = partial(CheckpointlessRecovery, snapshot_every_steps=every_steps)

if __name__ == "__main__":
    main()
