"""NVRx: a wrapper restarts the training function in every process that is left; a spare takes the lost one's place.

After its example `inprocess/advanced_example.py`. What is trained comes from the last checkpoint, as there.
"""

import os

from benchmarks.recovery_jobs.events import EventLog, Setting

setting = Setting.from_environ()
log = EventLog(setting, int(os.environ["RANK"]))

from datetime import timedelta  # noqa: E402  (after the clock has been read)
from typing import Optional  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from nvidia_resiliency_ext import inprocess  # noqa: E402  # pyright: ignore
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from benchmarks.recovery_jobs import workload  # noqa: E402
from benchmarks.recovery_jobs.checkpoints import load_checkpoint, save_checkpoint  # noqa: E402

log.tell("imported")
INTERVAL = timedelta(seconds=float(os.environ["NVRX_INTERVAL_S"]))
FIRST_RANK, NUM_PROCESSES = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def train(
    store: dist.Store,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    call_wrapper: Optional[inprocess.CallWrapper] = None,  # noqa: UP045  (NVRx reads it, and knows only this form)
) -> None:
    assert call_wrapper is not None
    log.rank = int(os.environ["RANK"])  # the wrapper gives active ranks anew
    here = dist.PrefixStore(str(call_wrapper.iteration), store)
    dist.init_process_group("gloo", store=here, rank=log.rank, world_size=int(os.environ["WORLD_SIZE"]))
    log.tell("connected")
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
        log.tell("committed", step=step, world=dist.get_world_size())
        save_checkpoint(setting, model, optimizer, step + 1, is_writer=log.rank == 0)
    workload.tell_result(log, model, optimizer, loss.item())
    dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    model = workload.make_model()
    optimizer = workload.make_optimizer(model)
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        NUM_PROCESSES,
        is_master=FIRST_RANK == 0,
        multi_tenant=True,
        wait_for_workers=True,
    )
    assignment = inprocess.Compose(
        inprocess.rank_assignment.MaxActiveWorldSize(setting.world_size), inprocess.rank_assignment.ShiftRanks()
    )
    wrapper = inprocess.Wrapper(
        store_kwargs={"port": int(os.environ["NVRX_STORE_PORT"])},
        rank_assignment=assignment,
        monitor_thread_interval=INTERVAL,
        monitor_process_interval=INTERVAL,
        heartbeat_interval=INTERVAL,
        progress_watchdog_interval=INTERVAL,
        last_call_wait=INTERVAL,
        soft_timeout=timedelta(seconds=60),
        hard_timeout=timedelta(seconds=90),
        heartbeat_timeout=timedelta(seconds=30),
        barrier_timeout=timedelta(seconds=120),
        monitor_process_logfile=f"{setting.folder}/monitor-{{rank}}.log",
    )
    wrapper(train)(store, model, optimizer)


main()
