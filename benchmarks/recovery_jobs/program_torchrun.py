"""torchrun restarts everybody; each process loads the last checkpoint and repeats the steps since."""

import os

from benchmarks.recovery_jobs.events import EventLog, Setting

setting = Setting.from_environ()
log = EventLog(setting, int(os.environ["RANK"]))

import torch  # noqa: E402  (after the clock has been read)
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from benchmarks.recovery_jobs import workload  # noqa: E402
from benchmarks.recovery_jobs.checkpoints import load_checkpoint, save_checkpoint  # noqa: E402

log.tell("imported")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    log.tell("connected")
    model = workload.make_model()
    optimizer = workload.make_optimizer(model)
    begin = load_checkpoint(setting, model, optimizer)
    log.tell("restored", step=begin)
    parallel = DistributedDataParallel(model)
    batches = workload.batches_from(begin, log.rank, setting.world_size)
    log.tell("ready")
    loss = torch.zeros(())
    for step in range(begin, setting.steps):
        rows = next(batches)
        optimizer.zero_grad()
        loss = workload.loss_of(parallel, rows)
        workload.die_if_due(setting, log, step)
        loss.backward()
        optimizer.step()
        log.tell("committed", step=step, world=setting.world_size)
        save_checkpoint(setting, model, optimizer, step + 1, is_writer=log.rank == 0)
    workload.tell_result(log, model, optimizer, loss.item())
    dist.destroy_process_group()


main()
