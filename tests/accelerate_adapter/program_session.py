"""A loop whose model and optimizer Accelerate has prepared, and whose steps are a session's; run by `hyperpodrun`."""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent.parent / "recovery"))
from faults import Faults

from hyperpod_plugins.accelerate import HyperPodPlugin
from hyperpod_plugins.loops import Session

WIDTH = 8
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.dropout = nn.Dropout(0.25)

    def forward(self, x):
        for layer in self.layers:
            x = self.dropout(torch.relu(layer(x)))
        return x


def main():
    faults = Faults()
    plugin = HyperPodPlugin(hybrid_shard_degree=2, precision="bf16-mixed", random_seed=5)
    session = Session(plugin.config, global_batch_size=12)  # first: it joins the process group
    accelerator = plugin.accelerator()
    faults.note(kind="process", pid=os.getpid())
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    session.train(model, optimizer.optimizer, backward=accelerator.backward, max_grad_norm=0.5)
    data = TensorDataset(torch.randn(120, WIDTH, generator=torch.Generator().manual_seed(0)))
    losses = []
    for step in session.steps(DataLoader(data, batch_size=3), epochs=1):
        with step:

            def compute_loss(batch, step=step):
                (x,) = batch
                faults.at("forward", step.index)
                loss = (model(x) - x).square().mean()
                faults.at("backward", step.index)
                return loss

            losses.append(float(step.run(compute_loss)))
    state = {name: parameter.full_tensor() for name, parameter in model.state_dict().items()}
    result = {"state": state, "losses": losses, "types": [type(each).__name__ for each in model.parameters()]}
    torch.save(result, faults.folder / f"result-{session.rank}.pt")


if __name__ == "__main__":
    main()
