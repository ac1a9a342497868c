"""A worker that computes on its device and reduces there; says whether it was forked, and from what."""

import json
import os
import sys
from pathlib import Path

WAS_LOADED = "torch" in sys.modules

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

sys.path.append(str(Path(__file__).parents[1]))

from device import own_device  # noqa: E402

from hyperpod_plugins.comm import CommOptions, join_world  # noqa: E402

was_initialised = torch.cuda.is_initialized()
device = own_device(0)
join_world(CommOptions(), rank=0, world_size=1, timeout_s=20.0)
value = torch.ones(8, device=device)
dist.all_reduce(value)
found = {
    "is_forked": WAS_LOADED,
    "was_initialised": was_initialised,
    "device": value.device.type,
    "total": float(value.sum()),
}
Path(os.environ["FAULTS_FOLDER"], "found.json").write_text(json.dumps(found))
dist.destroy_process_group()
