"""Bodies of a session's steps that use Accelerate's loaders, and programs that are refused; run by `hyperpodrun`."""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent.parent / "recovery"))
from faults import Faults

from hyperpod_plugins.accelerate import HyperPodPlugin
from hyperpod_plugins.session import Session

WIDTH, NUM_EVALUATED = 8, 11
WHAT = os.environ["WHAT"]
torch.set_num_threads(1)
faults = Faults()
plugin = HyperPodPlugin(hybrid_shard_degree=2, random_seed=5)
session = Session(plugin.config, global_batch_size=8)
accelerator = plugin.accelerator(session=session, gradient_accumulation_steps=4 if WHAT == "accumulates" else 1)
torch.manual_seed(0)
model = nn.Linear(WIDTH, WIDTH)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 3) if "scheduler" in WHAT else None
session.train(
    model,
    optimizer if WHAT == "wrapped" else optimizer.optimizer,
    accelerator.prepare(scheduler) if WHAT == "wrapped scheduler" else (),
    backward=accelerator.backward,
)


def evaluated():
    data = TensorDataset(torch.arange(NUM_EVALUATED))
    return accelerator.prepare_data_loader(DataLoader(data, batch_size=2, shuffle=WHAT == "shuffled"))


ahead = evaluated() if WHAT == "shuffled" else None
if WHAT == "second model":
    other = nn.Linear(WIDTH, WIDTH)
    accelerator.prepare(other, torch.optim.SGD(other.parameters(), lr=1e-2))
if WHAT == "saved by Accelerate":
    accelerator.register_for_checkpointing(nn.Linear(1, 1))  # it has a state_dict
found = session.state["found"] = []
loader = DataLoader(TensorDataset(torch.randn(80, WIDTH, generator=torch.Generator().manual_seed(1))), batch_size=2)
for step in session.steps(loader, max_steps=10):
    with step:
        step.run(lambda batch: (model(batch[0]) - batch[0]).square().mean())
        ids = []
        for number, batch in enumerate(ahead or evaluated()):
            faults.at(f"batch {number}", step.index)
            ids += accelerator.gather_for_metrics(batch[0]).tolist()
        # In no loader: nothing of this pads a batch.
        session.state["found"].append([ids, accelerator.gather_for_metrics(torch.arange(2)).tolist()])
        if scheduler is not None:
            scheduler.step()
torch.save({"found": session.state["found"]}, faults.folder / f"result-{session.rank}.pt")
