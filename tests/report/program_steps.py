"""What `test_top.py` runs under `hyperpodrun`: two replicas that make steps until a file says stop."""

import sys
import time
from pathlib import Path

import torch
from torch import nn

from hyperpod_plugins.session import Session

torch.set_num_threads(1)


def main(stop):
    torch.manual_seed(1)
    session = Session(hybrid_shard_degree=1)
    model = session.parallelize(nn.Linear(8, 8))
    session.train(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    loader = torch.utils.data.DataLoader(torch.randn(200_000, 8), batch_size=2)
    for step in session.steps(loader):
        is_over = torch.zeros(())
        with step:
            step.run(lambda batch: (model(batch) - batch).square().mean())
            if step.index % 10 == 9:
                is_over.fill_(Path(stop).exists())
                torch.distributed.broadcast(is_over, 0)
        if is_over:
            break
        time.sleep(0.05)


if __name__ == "__main__":
    main(*sys.argv[1:])
