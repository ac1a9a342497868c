"""torchft: each process is a replica group; a restarted one is healed by a live one over HTTP.

The data of a step are a function of the step and the replica, as torchft's own example has it only roughly: this is
the best case for it. The reaction to a failed collective is mended, see `TolerantDDP`.
"""

import os

from benchmarks.recovery_jobs.events import EventLog, Setting

setting = Setting.from_environ()
log = EventLog(setting, int(os.environ["REPLICA_GROUP_ID"]))

import time  # noqa: E402  (after the clock has been read)
from datetime import timedelta  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo  # noqa: E402  # pyright: ignore
from torchft.checkpointing.http_transport import HTTPTransport  # noqa: E402  # pyright: ignore
from torchft.manager import WorldSizeMode  # noqa: E402  # pyright: ignore

from benchmarks.recovery_jobs import workload  # noqa: E402

log.tell("imported")
IS_EXACT = os.environ["TORCHFT_EXACT"] == "1"


class TolerantDDP(DistributedDataParallel):
    """In 0.2.0 the hook asserts that the all-reduce built a future, which it did not when a peer died, and crashes."""

    @staticmethod
    def _comm_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = state.allreduce(bucket.buffer())
        inner = vars(work.get_future()).get("_fut") if work.wait() else None
        if inner is not None:
            return inner
        failed: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        failed.set_result(bucket.buffer())
        return failed


class SampledByStep:
    """Batch of any step of this replica, as the loader would yield it."""

    def __init__(self) -> None:
        loader = workload.make_loader(log.rank, setting.world_size)
        self._indices = list(loader.sampler)
        self._data = loader.dataset

    def __call__(self, step: int) -> torch.Tensor:
        chosen = self._indices[step * workload.BATCH : (step + 1) * workload.BATCH]
        return torch.stack([self._data[index] for index in chosen])


def wait_for_all() -> None:
    """A lone replica may begin where one is enough: all begin together, so that the steps before the fault agree."""
    folder = Path(setting.folder)
    (folder / f"ready-{log.rank}").touch()
    deadline_s = time.monotonic() + 60
    while not all((folder / f"ready-{rank}").exists() for rank in range(setting.world_size)):
        if time.monotonic() > deadline_s:
            raise TimeoutError("the other replica did not come within 60 s")
        time.sleep(0.01)


def main() -> None:
    torch.set_num_threads(1)
    group = ProcessGroupGloo(timeout=timedelta(seconds=5))
    model = workload.make_model()
    plain = workload.make_optimizer(model)
    wrapped: list[Optimizer] = []

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        wrapped[0].load_state_dict(state["optimizer"])
        log.tell("restored")

    manager = Manager(
        pg=group,
        min_replica_size=setting.world_size if IS_EXACT else 1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": wrapped[0].state_dict()},
        replica_id=f"replica_{log.rank}",
        timeout=timedelta(seconds=30),
        checkpoint_transport=HTTPTransport(timeout=timedelta(seconds=30), num_chunks=0),
        use_async_quorum=not IS_EXACT,
        init_sync=False,  # all build the same model from the same seed
        heartbeat_interval=timedelta(milliseconds=100),
        world_size_mode=WorldSizeMode.DYNAMIC,
    )
    log.tell("connected")
    parallel = TolerantDDP(manager, model)
    optimizer = Optimizer(manager, plain)
    wrapped.append(optimizer)
    batch = SampledByStep()
    wait_for_all()
    log.tell("ready")
    loss = torch.zeros(())
    while manager.current_step() < setting.steps:
        optimizer.zero_grad()  # asks for a quorum; where that is waited for, this replica may have been healed in it
        step = manager.current_step()
        loss = workload.loss_of(parallel, batch(step))
        workload.die_if_due(setting, log, step)
        loss.backward()
        optimizer.step()
        if manager.current_step() > step:
            log.tell("committed", step=manager.current_step() - 1, world=manager.num_participants())
        else:
            log.tell("not_committed", step=step)
    workload.tell_result(log, model, plain, loss.item())
    manager.shutdown(wait=False)


main()
os._exit(0)  # its threads would hold the process
