"""Two replicas of a loop in which a batch of rank 1 gives a loss that is not a number in step 2."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hyperpod_plugins.session import Session

torch.set_num_threads(1)


def main(policy, folder):
    session = Session(hybrid_shard_degree=1)
    torch.manual_seed(0)
    model = session.parallelize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    non_finite = "off" if policy == "raise" else policy
    session.train(model, torch.optim.AdamW(model.parameters(), lr=0.1), non_finite=non_finite)
    data = TensorDataset(torch.randn(48, 4))
    for step in session.steps(DataLoader(data, batch_size=4), epochs=1):
        with step:
            is_bad = step.index == 2 and session.rank == 1
            if is_bad and policy == "raise":
                raise KeyError("a mistake in the body")
            step.run(lambda batch, is_bad=is_bad: model(batch[0]).square().mean() * (torch.nan if is_bad else 1.0))
    state = {name: value.detach().to_local().clone() for name, value in model.named_parameters()}
    torch.save(state, folder / f"{session.rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
