"""What `test_two_loops.py` runs under `hyperpodrun`: an elastic session with two loops, of which the second saves."""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

from hyperpod_plugins.elastic import JobStore
from hyperpod_plugins.elastic.store.entry_records import all_checkpoints
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.session import Session


def main(folder):
    session = Session(global_batch_size=4, elastic=True, checkpoint_folder=folder)
    torch.manual_seed(1)
    model = session.parallelize(nn.Linear(8, 8))
    session.train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = torch.utils.data.DataLoader(torch.randn(32, 8), batch_size=4)
    for number, max_steps in enumerate((2, 4)):
        if number == 1:
            print("begins with", [float(each.full_tensor().sum()).hex() for each in model.parameters()], flush=True)
        for step in session.steps(loader, max_steps=max_steps):
            with step:
                step.run(lambda batch: (model(batch) - batch).square().mean())
                print("loop", number, "step", step.index, flush=True)
                if number == 1 and step.index == 2:
                    session.save(Path(folder, "second.ckpt"))
                    print("known", all_checkpoints(JobStore.connect(JobEnv.from_environ())), flush=True)
                if (number, step.index) == (1, 3) and not Path(folder, "died").exists():
                    Path(folder, "died").touch()
                    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
