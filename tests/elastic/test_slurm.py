"""`examples/slurm/elastic.sbatch` on a real Slurm: a node is set down and comes back, another gets notice."""

import json
import os
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from elastic.slurm import PATH, Cluster, why_not
from recovery.faults import left_processes

from hyperpod_plugins.data import write_tokens
from hyperpod_plugins.data.order import sample_order

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "examples" / "slurm" / "elastic.sbatch"
PROGRAM = ROOT / "tests" / "recovery" / "ranks_elastic.py"
NUM_SAMPLES, BATCH = 600, 12
PATIENCE_S = 60.0

pytestmark = [pytest.mark.spawns, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]
