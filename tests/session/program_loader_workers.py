"""What `test_loader_workers.py` runs: a loop whose loader has workers, one of which is killed."""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "recovery"))

import torch
from faults import Faults
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

from hyperpod_plugins.session import Session

torch.set_num_threads(1)
faults = Faults()
DIES = os.environ["DIES"]
"""Where a worker of rank 1's loader is killed, once in a job, or `always` as it fetches one sample."""
INDEX = 37
"""Of the sample that a worker fetches when it is killed."""


def may_die(place):
    """Whether a worker is to be killed here."""
    mark = faults.folder / "fault-worker"
    if faults.rank != 1 or (DIES != "always" and (place != DIES or mark.exists())):
        return False
    mark.touch()
    return True


def kill_workers(place):
    """Kill this rank's workers while the program is here."""
    if place == DIES and may_die(place):
        for worker in multiprocessing.active_children():
            os.kill(worker.pid, signal.SIGKILL)
        time.sleep(10)  # torch's handler of SIGCHLD raises


class Samples(Dataset):
    """Samples with noise."""

    def __init__(self):
        self.x = torch.randn(80, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if index == INDEX and get_worker_info() is not None and may_die("fetch"):
            os.kill(os.getpid(), signal.SIGKILL)
        return self.x[index] + 0.1 * torch.randn(8)


def main():
    session = Session(hybrid_shard_degree=1, global_batch_size=8)
    faults.note(kind="process", pid=os.getpid())
    torch.manual_seed(0)
    net = session.parallelize(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8)))
    session.train(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    loader = DataLoader(Samples(), batch_size=2, shuffle=True, num_workers=2)
    for step in session.steps(loader, epochs=2):
        with step:

            def loss_of(batch, step=step):
                if step.index == 3:
                    kill_workers("step")
                return (net(batch) - batch).square().mean()

            step.run(loss_of)
            if step.index == 3:
                kill_workers("body")
    state = {name: each.full_tensor().detach() for name, each in net.named_parameters()}
    torch.save({"state": state}, faults.folder / f"result-{session.rank}.pt")


if __name__ == "__main__":
    main()
