"""What `test_rehearsal.py` rehearses: a Session whose model may use what no replacement can restore, a global variable.

`LOOPS` in the environment is the number of its loops, `FAULT` what recovery does not restore.
"""

import contextlib
import os
import signal

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hyperpod_plugins.recovery import RecoveryOptions, engine
from hyperpod_plugins.recovery.rehearsal import Rehearsal
from hyperpod_plugins.session import Session

torch.set_num_threads(1)
FAULT, REHEARSE = os.environ.get("FAULT", ""), os.environ.get("REHEARSE", "")


CALLS = []


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 1)
        self.noted = nn.Linear(1, 1).requires_grad_(False)  # by each rank for itself

    def forward(self, x):
        CALLS.append(1)
        out = self.last(self.dropout(torch.relu(self.first(x))))
        return out * len(CALLS) if FAULT == "global" else out


class Seen:
    """Counts samples; a step that is computed again does not count them twice."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]


class Interrupted(Rehearsal):
    """Of a process that ends once, when ranks are about to compare what a rehearsal has found."""

    def _raise_differences(self, step, what, names):
        if what == os.environ["KILL_AT"]:
            with contextlib.suppress(FileExistsError), open(os.environ["MARKER"], "x"):
                os.kill(os.getpid(), signal.SIGKILL)
        super()._raise_differences(step, what, names)


if FAULT == "kill" and os.environ["RANK"] == "1":
    engine.Rehearsal = Interrupted
steps = (int(REHEARSE),) if REHEARSE else ()
COMPARE = os.environ.get("COMPARE", "0")
every = COMPARE if COMPARE == "auto" else int(COMPARE)
options = RecoveryOptions(rehearse=steps, compare_replicas_every=every)
num_ranks = int(os.environ["WORLD_SIZE"])
session = Session(hybrid_shard_degree=1, global_batch_size=2 * num_ranks, recovery=options)
torch.manual_seed(0)
model = session.parallelize(Net())
trained = [each for each in model.parameters() if each.requires_grad]
session.train(model, torch.optim.AdamW(trained, lr=1e-2))
seen, session.state["steps"] = Seen(), 0
session.register_rank_local("seen", seen)


def compute_loss(batch):
    seen.count += len(batch[0])
    if FAULT == "state":
        session.state["steps"] += 1
    return model(batch[0]).square().mean()


if FAULT == "drift" and session.rank == 1:
    with torch.no_grad():
        model.first.weight.to_local()[0, 0] += 1e-3
loader = DataLoader(TensorDataset(torch.randn(40, 8)), batch_size=2, shuffle=True)
for step in session.steps(loader, epochs=1):
    with step:
        loss = step.run(compute_loss)
        session.state["steps"] += 1
        if FAULT == "flip" and session.rank == 1 and step.index == 2:
            model.first.weight.detach().to_local().view(torch.int32)[0, 0] ^= 1 << 12
        if COMPARE == "auto":
            model.noted.weight.detach().fill_(session.rank)
        if FAULT == "redrawn" and step.index == 2:
            nn.init.normal_(model.first.weight)  # random numbers of each rank
for _ in range(1, int(os.environ.get("LOOPS", "1"))):
    session.train(model, torch.optim.AdamW(trained, lr=1e-3 * session.state["steps"]))
    session.register_rank_local("seen", seen)
    num_steps = 0
    for step in session.steps(loader, epochs=1):
        with step:
            loss = step.run(compute_loss)
            num_steps += 1
    assert num_steps <= 3 or "HYPERPOD_REHEARSAL" not in os.environ
print(f"trained to {float(loss).hex()}")
