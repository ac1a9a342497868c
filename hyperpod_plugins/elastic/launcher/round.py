"""The start of a round, in which all nodes start all their workers: the job store, and the environment of workers.

It also holds `AgentOptions`, the user's options for the agent.
"""

import signal
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from string import Template

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousStoreInfo
from torch.distributed.elastic.utils.api import macros

from hyperpod_plugins.elastic.launcher.fork_client import ForkServerOptions
from hyperpod_plugins.elastic.launcher.local_workers import Program, WorkerSlot
from hyperpod_plugins.elastic.launcher.logs import ProcessLogs
from hyperpod_plugins.elastic.membership.restart_policy import RestartPolicy
from hyperpod_plugins.elastic.process import RESOLVER_OPTIONS
from hyperpod_plugins.elastic.rendezvous.handler import HyperPodRendezvousHandler
from hyperpod_plugins.elastic.store.entry_records import check_checkpoint
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """Options of the agent that torch's `WorkerSpec` does not hold."""

    program: Program
    """The program of every worker."""
    fork_server: ForkServerOptions
    """How workers are forked."""
    restarts: RestartPolicy
    """How often workers are replaced."""
    logs: LogsSpecs
    """Where the output of workers goes."""
    environ: Mapping[str, str]
    """Environment that every worker inherits."""
    ending_signals: tuple[signal.Signals, ...]
    """Signals that end this agent; each is passed on to the workers first."""
    shutdown_timeout_s: float = 30.0
    """Seconds from that signal to SIGKILL."""
    monitor_interval_s: float = 0.1
    """Interval in seconds at which the rendezvous is polled for new rounds; a worker's exit is noticed at once."""
    log_line_prefix_template: str | None = None
    """Prefix of each line copied to the console, with ${role_name}, ${rank} and ${local_rank}."""
    stdout_filters: tuple[str, ...] = ()
    """Lines of teed output that contain one of these also go to a separate file."""
    stderr_filters: tuple[str, ...] = ()
    """The same for teed error output."""
    virtual_local_rank: bool = False
    """Make only its own GPU visible to each worker, as device 0."""


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
    """The whole environment of one worker: torchrun's variables, and those for reaching the job store. Pure.

    Args:
        group: the worker group, with the result of the rendezvous.
        worker: the worker of that group.
        job: address of the job store, and the incarnation of the worker.
        inherited: environment of the agent.
        num_rounds: number of earlier rounds.
        max_restarts: the user's limit, for programs that read it.
        virtual: make only its own GPU visible to each worker, as device 0 (`--virtual-local-rank`).
        master: host and port of the workers' own store; None if they share the job store's.
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
        # Counts restarts of all workers. Replacements of single workers are counted in HYPERPOD_INCARNATION.
        "TORCHELASTIC_RESTART_COUNT": str(num_rounds),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": group.spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # a store hosted by a worker would be lost with it
        # torchrun sets 1: the NCCL watchdog then ends every process that loses a peer, but these must survive.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": inherited.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),
        # torch's TCPStore resolves the name of each client; a lost DNS answer would block all of them for 5 s.
        "RES_OPTIONS": inherited.get("RES_OPTIONS", RESOLVER_OPTIONS),
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
            f"rank {local_rank}. Start at most {len(devices)} workers on this node, or make more GPUs visible."
        )
    return devices[local_rank].strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRound:
    """What the nodes of a round have agreed on."""

    job: JobEnv
    """Address of the job store."""
    number: int
    """Number of earlier rounds."""
    node: int
    """Index of this node."""
    num_nodes: int
    world_size: int
    master: tuple[str, int] | None = None
    """Host and port of the workers' own store; None if they share the job store's."""
    replacements_master: tuple[str, int] | None = None
    """The same for replacements of lost workers; None if it does not differ."""


class RoundStarter:
    """Connects the nodes of each round to one store; node 0 serves it unless the rendezvous does."""

    def __init__(self) -> None:
        self._server: TCPStore | None = None
        self._former_server: TCPStore | None = None
        self._num_rounds = 0

    def begin(self, group: WorkerGroup, resume_from: str) -> RestartRound:
        """Agree on the store, the name of the job and the number of the round. Call it on all nodes, once per round.

        Args:
            group: the worker group, with the result of the rendezvous.
            resume_from: checkpoint to resume from, empty for none; node 0's value is used on all nodes.

        Raises:
            ConfigError: another job has written that checkpoint, or another user may have.
        """
        handler, node = group.spec.rdzv_handler, group.group_rank
        if group.store is None or node is None or group.master_addr is None or group.master_port is None:
            raise AssertionError("torch's agent asked for workers before its rendezvous was complete")
        if isinstance(handler, HyperPodRendezvousHandler) and handler.job is not None:
            return RestartRound(
                job=handler.job,
                number=handler.round_number,
                node=node,
                num_nodes=group.group_world_size or 1,
                world_size=group.workers[0].world_size,
                master=(group.master_addr, group.master_port),
                replacements_master=handler.joiners_store,
            )
        store = PrefixStore("hyperpod", group.store)
        host, port = group.master_addr, group.master_port
        if not handler.use_agent_store:
            host, port = self._serve(host, node, store, group.spec.local_addr)
        if node == 0:
            # If the store outlives the round, the job store needs a new name: generations start at 0 again.
            again = f".{uuid.uuid4().hex[:8]}" if self._num_rounds and handler.use_agent_store else ""
            store.set("run_id", f"{handler.get_run_id()}{again}")
            store.set("round", str(self._num_rounds))
            store.set("resume_from", resume_from)
        number, resume_from = int(store.get("round")), store.get("resume_from").decode()
        self._num_rounds = number + 1
        job = JobEnv(
            store_host=host,
            store_port=port,
            run_id=store.get("run_id").decode(),
            resume_from=check_checkpoint(resume_from, handler.get_run_id()) if resume_from else "",
        )
        return RestartRound(
            job=job,
            number=number,
            node=node,
            num_nodes=group.group_world_size or 1,
            world_size=group.workers[0].world_size,
        )

    def _serve(self, host: str, node: int, store: Store, local_addr: str | None) -> tuple[str, int]:
        """Serve a store for a round if this is node 0; returns its host and port.

        Each round has its own, so that neither workers nor the job store see keys of an earlier round. The former
        server is kept, as other nodes may still read there why its round ended.
        """
        self._former_server = self._server
        self._server = TCPStore(host, 0, is_master=True, wait_for_workers=False) if node == 0 else None
        served = self._server.port if self._server is not None else None
        info = RendezvousStoreInfo.build(node, store, local_addr, served)
        return info.master_addr, info.master_port


def worker_slots(group: WorkerGroup, settled: RestartRound, options: AgentOptions) -> tuple[list[WorkerSlot], LogsDest]:
    """The worker slots of this node, and torch's destination of their output."""
    environs = {
        worker.local_rank: worker_environ(
            group,
            worker,
            settled.job,
            options.environ,
            num_rounds=settled.number,
            max_restarts=options.restarts.max_restarts,
            virtual=options.virtual_local_rank,
            master=settled.master,
        )
        for worker in group.workers
    }
    host, port = settled.replacements_master or ("", 0)
    successors = {"MASTER_ADDR": host, "MASTER_PORT": str(port)} if host else {}
    destination = options.logs.reify(environs)
    slots: list[WorkerSlot] = []
    for worker in group.workers:
        logs = ProcessLogs.of(destination, worker.local_rank)
        slot = WorkerSlot(
            local_rank=worker.local_rank,
            worker_id=worker.global_rank,
            args=tuple(macros.substitute(list(options.program.args), str(worker.local_rank))),
            environ=environs[worker.local_rank],
            replacement_environ=successors,
            incarnation=settled.job.incarnation,
            prefix=_prefix(group, worker, options.log_line_prefix_template),
            first_logs=logs,
            logs=logs,
        )
        slots.append(slot)
    return slots, destination


def _prefix(group: WorkerGroup, worker: Worker, template: str | None) -> str:
    if template is None:
        return f"[{group.spec.role}{worker.local_rank}]:"
    names = {"role_name": group.spec.role, "rank": worker.global_rank, "local_rank": worker.local_rank}
    return Template(template).safe_substitute(names)
