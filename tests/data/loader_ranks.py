"""One rank of `test_loader_ranks.py`, started by torchrun: reads some micro-steps with worker processes.

    loader_ranks.py FOLDER MICRO_STEPS [STATE]

Rank 0 writes to FOLDER the ids that each rank was given, one list a micro-step, and the state behind them.
"""

import json
import os
import signal
import sys
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from hyperpod_plugins.data import BatchSplit, ElasticSampler, StatefulLoader
from hyperpod_plugins.env import WorkerEnv

NUM_SAMPLES = 40


class Ids(Dataset):
    """Each sample is its own number, and the process that read it."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return torch.tensor([index, os.getpid()])


def make_loader(rank, world_size, num_workers):
    split = BatchSplit(global_batch_size=8, micro_batch_size=2, data_world_size=world_size)
    sampler = ElasticSampler(NUM_SAMPLES, split, data_rank=rank, seed=3)
    return StatefulLoader(Ids(), sampler, num_workers=num_workers)


def main(folder, num_micro_steps, state=None):
    signal.alarm(60)  # whatever happens to torchrun, this process ends
    worker = WorkerEnv.from_environ()
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    loader = make_loader(worker.global_rank, worker.world_size, num_workers=2)
    if state is not None:
        loader.load_state_dict(json.loads(state))
    batches = list(islice(iter(loader), int(num_micro_steps)))
    assert os.getpid() not in {pid for batch in batches for pid in batch[:, 1].tolist()}
    ids = [batch[:, 0].tolist() for batch in batches]
    given = [None] * worker.world_size
    dist.all_gather_object(given, (ids, loader.state_dict()))
    if worker.global_rank == 0:
        assert all(part[1] == given[0][1] for part in given), "the ranks do not agree on the position"
        result = {"ids": [part[0] for part in given], "state": given[0][1]}
        (Path(folder) / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
