"""What `test_life.py` runs under `hyperpodrun`: a session with two loops and evaluation after each, and faults."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from hyperpod_plugins.recovery import TrainingState
from hyperpod_plugins.session import Session

torch.set_num_threads(1)
RANK = int(os.environ["RANK"])


def main(folder, wanted):
    def at(place, step=0):
        with open(Path(folder, f"places-{RANK}"), "a") as file:
            print(place, step, file=file)
        mark = Path(folder, f"done-{place}-{step}")
        for rank, where, when in (fault.split(":") for fault in wanted.split()):
            if (int(rank), where, int(when)) == (RANK, place, step) and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(1)
    session = Session(hybrid_shard_degree=2, checkpoint_folder=folder)
    at("made")
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 8))
    model = session.parallelize(model)
    result = {}

    def train(name, seed, rate):
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
        session.train(model, optimizer, schedule)
        data = torch.randn(48, 8, generator=torch.Generator().manual_seed(seed))
        loader = torch.utils.data.DataLoader(data, batch_size=2)
        session.state.setdefault("losses", [])
        at(f"before-{name}")
        for step in session.steps(loader, max_steps=5):
            with step:
                at(name, step.index)
                loss = step.run(lambda batch: (model(batch) - batch).square().mean())
                session.state["losses"].append(float(loss))
                at(f"{name}-tail", step.index)
                if step.index == 2:
                    session.save(f"{folder}/{name}.ckpt")
        at(f"after-{name}")
        result[name] = {"state": TrainingState(model, [optimizer]).checksum(), "losses": list(session.state["losses"])}
        result[name]["rate"] = schedule.get_last_lr()

    def evaluate(name):
        batch = torch.ones(4, 8, device=session.device) * RANK
        with torch.no_grad():
            loss = model(batch).square().mean()
        dist.all_reduce(loss)
        at(f"evaluation-{name}")
        dist.barrier()
        result[name] = float(loss)

    train("first", 1, 1e-2)
    result["drawn"] = float(torch.rand(()))
    train("second", 2, 3e-3)  # whoever is lost there is replaced in place
    evaluate("one")
    session.save(f"{folder}/between.ckpt")
    train("third", 3, 1e-3)  # whoever is lost there cannot come in, past these collectives: all start again
    evaluate("two")
    at("end")
    Path(folder, f"rank{RANK}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
