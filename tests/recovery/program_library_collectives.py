"""What `test_library_collectives.py` runs: loops whose set-up loads or shares objects as libraries do, collectively."""

import dataclasses
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from faults import Faults
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.utils.data import DataLoader, TensorDataset

from hyperpod_plugins.session import Session

torch.set_num_threads(1)
WIDTH = 8
SAVED = Path(os.environ["SAVED"])


@dataclasses.dataclass
class Settings:
    """A class of the program, which a rank sends."""

    name: str
    scale: float


class Rogue:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return eval, ("1 + 1",)


def state_of(model, optimizer):
    parts = get_state_dict(model, optimizer)
    return {"model": parts[0], "optimizer": parts[1], "epoch": 7, "scale": torch.tensor(1.5)}


def checkpoint(session, model, optimizer):
    """Load a distributed checkpoint, with values of the program beside model and optimizer."""
    state = state_of(model, optimizer) | {"epoch": 0, "scale": torch.zeros(())}
    dcp.load(state, checkpoint_id=SAVED / "dcp")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return float(state["epoch"] * state["scale"])


def rank0(session, model, optimizer):
    """Load a file that rank 0 alone reads, also into a model that is not trained."""
    teacher = nn.Linear(WIDTH, WIDTH, bias=False)
    full = torch.load(SAVED / "full.pt", weights_only=True) if session.rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, {**full}, options=options)
    set_model_state_dict(teacher, {"weight": full["0.weight"]} if full else {}, options=options)
    return float(teacher.weight.detach().sum())


def objects(session, model, optimizer):
    """Share objects by each of torch's functions."""
    rank, size = session.rank, session.world_size
    sent = [Settings("sent", 0.25) if rank == 0 else None, Path("here") if rank == 0 else None]
    dist.broadcast_object_list(sent)
    gathered = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "size": torch.Size([rank])})
    mine = [None]
    dist.scatter_object_list(mine, [0.5 * (each + 1) for each in range(size)] if rank == 0 else None)
    collected = [None] * size if rank == 0 else None
    dist.gather_object(rank + 1, collected)
    assert sent[1] == Path("here")
    assert collected in (None, [each + 1 for each in range(size)])
    return sent[0].scale + sum(each["rank"] + each["size"].numel() for each in gathered) + mine[0]


def differs(session, model, optimizer):
    """Share a value that is another one in each process."""
    sent = [os.getpid()]
    dist.broadcast_object_list(sent)
    everyone = [None] * session.world_size
    dist.all_gather_object(everyone, sent[0])
    assert len({*everyone}) == 1
    return float(sent[0] == everyone[0])


def code(session, model, optimizer):
    """Share what runs code when it is unpickled."""
    sent = [None] * session.world_size
    dist.all_gather_object(sent, Rogue())
    return float(sum(sent)) / (2.0 * session.world_size)


def writes(session, model, optimizer):
    """Write a checkpoint in the set-up."""
    dcp.save({"model": model.state_dict()}, checkpoint_id=Path(os.environ["FAULTS_FOLDER"]) / "written")
    return 1.0


def loads(*trained):
    """Load and share in all ways that a replacement can repeat."""
    return checkpoint(*trained) + rank0(*trained) + objects(*trained)


SET_UPS = {each.__name__: each for each in (loads, differs, code, writes)}


def main(kind):
    faults = Faults()
    session = Session(hybrid_shard_degree=2, global_batch_size=8, checkpoint_folder=faults.folder)
    torch.manual_seed(0)
    model = session.parallelize(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    factor = SET_UPS[kind](session, model, optimizer) if kind in SET_UPS else 1.0
    session.train(model, optimizer)
    data = TensorDataset(torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(1)))
    for step in session.steps(DataLoader(data, batch_size=2), epochs=1):
        with step:

            def loss_of(batch, step=step):
                faults.at("forward", step.index)
                return factor * (model(batch[0]) - batch[0]).square().mean()

            step.run(loss_of)
    state = {name: each.full_tensor().detach() for name, each in model.named_parameters()}
    if kind == "saves":
        dcp.save(state_of(model, optimizer), checkpoint_id=SAVED / "dcp")
        if session.rank == 0:
            torch.save(state, SAVED / "full.pt")
    torch.save({"state": state, "factor": factor}, faults.folder / f"result-{session.rank}.pt")


if __name__ == "__main__":
    main(os.environ["KIND"])
