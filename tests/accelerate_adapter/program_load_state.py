"""A loop of a session over an Accelerator, whose set-up loads a state with `accelerator.load_state`."""

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

WIDTH = 8
torch.set_num_threads(1)


class Counter:
    """State of the program, which Accelerate saves."""

    def __init__(self):
        self.value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def main(folder, state_dict_type):
    faults = Faults()
    plugin = HyperPodPlugin(hybrid_shard_degree=2, state_dict_type=state_dict_type)
    session = Session(plugin.config, global_batch_size=8)
    accelerator = plugin.accelerator(session=session)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    is_loaded = folder.exists()
    if is_loaded:
        accelerator.load_state(str(folder))
    ranks = accelerator.gather(torch.tensor([session.rank + 1.0]))
    names = accelerator.gather_for_metrics([f"rank {session.rank}"], use_gather_object=True)
    assert names == ["rank 0", "rank 1"]
    session.train(model, optimizer.optimizer, backward=accelerator.backward)
    session.register_rank_local("counter", counter)
    data = TensorDataset(torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(1)))
    for step in session.steps(DataLoader(data, batch_size=2), epochs=1):
        with step:

            def loss_of(batch, step=step):
                faults.at("forward", step.index)
                return (ranks.sum() + counter.value) * (model(batch[0]) - batch[0]).square().mean()

            step.run(loss_of)
    if not is_loaded:
        counter.value = 7
        accelerator.save_state(str(folder))
    state = {name: each.full_tensor().detach() for name, each in model.named_parameters()}
    torch.save({"state": state, "factor": counter.value}, faults.folder / f"result-{session.rank}.pt")


if __name__ == "__main__":
    main(Path(os.environ["SAVED"]), os.environ["STATE_DICT_TYPE"])
