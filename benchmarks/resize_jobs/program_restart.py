"""torchrun restarts everybody when a node comes or goes; each process loads the last DCP checkpoint."""

import os
from pathlib import Path

from benchmarks.recovery_jobs.events import EventLog, Setting

setting = Setting.from_environ()
log = EventLog(setting, int(os.environ["RANK"]))

import torch  # noqa: E402  (after the clock has been read)
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.utils.data import default_collate  # noqa: E402

from benchmarks.resize_jobs import workload  # noqa: E402
from hyperpod_plugins.data import TokenDataset  # noqa: E402

log.tell("imported")


def checkpoint_of(step: int) -> Path:
    return Path(setting.folder) / f"checkpoint-{step}"


def newest() -> int:
    """Steps in the newest checkpoint that is complete; 0 for none."""
    found = [int(path.parent.name.split("-")[1]) for path in Path(setting.folder).glob("checkpoint-*/.metadata")]
    return max(found, default=0)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
    model = workload.make_model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = workload.make_optimizer(model)
    begin = newest()
    if begin:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=checkpoint_of(begin))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    log.tell("restored", step=begin)
    data, share = TokenDataset(workload.tokens_of(setting), workload.SEQUENCE), workload.GLOBAL_BATCH // world
    for step in range(begin, setting.steps):
        first = step * workload.GLOBAL_BATCH % workload.SAMPLES + rank * share
        optimizer.zero_grad()
        workload.loss_of(model, default_collate([data[first + each] for each in range(share)])).backward()
        optimizer.step()
        log.tell("committed", step=step, world=world, first=rank == 0)
        if (step + 1) % setting.checkpoint_every == 0:
            model_state, optimizer_state = get_state_dict(model, optimizer)
            dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=checkpoint_of(step + 1))
    dist.destroy_process_group()


main()
