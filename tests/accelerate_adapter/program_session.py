"""A loop whose model and optimizer Accelerate has prepared, and whose steps are a session's; run by `hyperpodrun`."""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent.parent / "recovery"))
from faults import Faults

from hyperpod_plugins.accelerate import HyperPodPlugin
from hyperpod_plugins.elastic.membership.elastic_spec import ElasticPolicy
from hyperpod_plugins.session import Session

WIDTH, NUM_EVALUATED = 8, 11
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
    replicas = int(os.environ.get("REPLICAS", "0"))
    elastic = False
    if replicas:
        elastic = ElasticPolicy(max_replicas=replicas, scaling_timeout_s=0.0, faulty_scale_down_timeout_s=2.0)
    shards = int(os.environ.get("SHARDS", "2"))
    plugin = HyperPodPlugin(hybrid_shard_degree=shards, precision="bf16-mixed", random_seed=5)
    session = Session(plugin.config, global_batch_size=12, elastic=elastic)  # first: it joins the process group
    accelerator = plugin.accelerator(session=session)
    faults.note(kind="process", pid=os.getpid())
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    session.train(model, optimizer.optimizer, backward=accelerator.backward, max_grad_norm=0.5)
    data = TensorDataset(torch.randn(120, WIDTH, generator=torch.Generator().manual_seed(0)))
    losses = []
    for step in session.steps(DataLoader(data, batch_size=3), epochs=1000 if replicas else 1):
        with step:

            def compute_loss(batch, step=step):
                (x,) = batch
                faults.at("forward", step.index)
                loss = (model(x) - x).square().mean()
                faults.at("backward", step.index)
                return loss

            losses.append(float(step.run(compute_loss)))
            if replicas:
                faults.note(kind="step", step=step.index, rank=session.rank, size=session.world_size, loss=losses[-1])
            if step.index % 5 == 4:
                loader = accelerator.prepare_data_loader(DataLoader(torch.arange(NUM_EVALUATED), batch_size=2))
                ids = torch.cat([accelerator.gather_for_metrics(ids) for ids in loader])
                faults.note(kind="evaluated", size=accelerator.num_processes, ids=ids.tolist())
                faults.at("evaluated", step.index)
            time.sleep(0.03 if replicas else 0.0)
        if (faults.folder / "stop").exists() and step.index + 1 == int((faults.folder / "stop").read_text()):
            break
    state = {name: parameter.full_tensor() for name, parameter in model.state_dict().items()}
    result = {"state": state, "losses": losses, "types": [type(each).__name__ for each in model.parameters()]}
    torch.save(result, faults.folder / f"result-{session.rank}.pt")


if __name__ == "__main__":
    main()
