"""The environment of a worker: what torchrun sets, and how to reach the ledger; pure."""

from collections.abc import Mapping

from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup

from hyperpod_plugins.elastic.leash import RESOLVER
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.errors import ConfigError


def worker_environ(
    group: WorkerGroup,
    worker: Worker,
    job: JobEnv,
    inherited: Mapping[str, str],
    *,
    num_rounds: int,
    max_restarts: int,
    virtual: bool,
    master: tuple[str, int] | None = None,
) -> dict[str, str]:
    """The whole environment of one worker.

    Args:
        group: what the rendezvous has settled.
        worker: the place in it.
        job: where the ledger is; `incarnation` counts the processes in this place.
        inherited: environment of the agent.
        num_rounds: how often all workers have been started together before.
        max_restarts: what the user allows, for programs that look.
        virtual: show each worker its own GPU alone, as number 0 (`--virtual-local-rank`).
        master: host and port of the workers' own store; None where that of the ledger serves both ends.
    """
    host, port = master or (job.store_host, job.store_port)
    environ = {
        **inherited,
        "RANK": str(worker.global_rank),
        "GROUP_RANK": str(group.group_rank),
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_NAME": group.spec.role,
        "LOCAL_RANK": str(worker.local_rank),
        "LOCAL_WORLD_SIZE": str(group.spec.local_world_size),
        "WORLD_SIZE": str(worker.world_size),
        "GROUP_WORLD_SIZE": str(group.group_world_size),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        # Counts restarts of all workers together, which replacing one is not; HYPERPOD_INCARNATION tells those.
        "TORCHELASTIC_RESTART_COUNT": str(num_rounds),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": group.spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # a worker that hosted the store would take it along when it dies
        # torchrun says 1: nccl's watchdog then ends every process whose peer is lost, and these are to live on.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": inherited.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),
        # torch's TCPStore asks for the name of whoever connects; a lost answer would stop everybody for 5 s.
        "RES_OPTIONS": inherited.get("RES_OPTIONS", RESOLVER),
        **job.to_environ(),
    }
    if virtual:
        environ["LOCAL_RANK"] = "0"
        environ["CUDA_VISIBLE_DEVICES"] = _own_device(worker.local_rank, inherited.get("CUDA_VISIBLE_DEVICES"))
    return environ


def _own_device(local_rank: int, visible: str | None) -> str:
    if visible is None:
        return str(local_rank)
    devices = visible.split(",")
    if local_rank >= len(devices):
        raise ConfigError(
            f"--virtual-local-rank needs one GPU a worker, but CUDA_VISIBLE_DEVICES={visible!r} names none for local "
            f"rank {local_rank}. Start at most {len(devices)} workers on this node, or show them more GPUs."
        )
    return devices[local_rank].strip()
