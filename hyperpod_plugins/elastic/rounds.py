"""The beginning of a round, in which all nodes start all their workers: where the ledger is, what each worker gets."""

import uuid
from dataclasses import dataclass
from string import Template

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup
from torch.distributed.elastic.multiprocessing import LogsDest
from torch.distributed.elastic.rendezvous import RendezvousStoreInfo
from torch.distributed.elastic.utils.api import macros

from hyperpod_plugins.elastic.crew import Post
from hyperpod_plugins.elastic.logs import ProcessLogs
from hyperpod_plugins.elastic.options import AgentOptions
from hyperpod_plugins.elastic.rendezvous import SlotRendezvous
from hyperpod_plugins.elastic.worker_environ import worker_environ
from hyperpod_plugins.env import JobEnv


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What all nodes of a round have agreed on."""

    job: JobEnv
    """Where the ledger is."""
    number: int
    """Rounds before this one."""
    node: int
    """Index of this node."""
    num_nodes: int
    master: tuple[str, int] | None = None
    """Host and port of the workers' own store; None where that of the ledger serves both ends."""
    successors_master: tuple[str, int] | None = None
    """The same for processes that take the places of lost ones."""


class Meeting:
    """Brings the nodes of a round together at one store; node 0 serves it where the rendezvous does not."""

    def __init__(self) -> None:
        self._server: TCPStore | None = None
        self._former_server: TCPStore | None = None
        self._num_rounds = 0

    def begin(self, group: WorkerGroup, resume_from: str) -> Round:
        """Agree on the store, the name of the job and the number of the round; call it on all nodes, once a round.

        Args:
            group: what the rendezvous has settled.
            resume_from: checkpoint to begin from, empty for none; what node 0 says counts.
        """
        handler, node = group.spec.rdzv_handler, group.group_rank
        if group.store is None or node is None or group.master_addr is None or group.master_port is None:
            raise AssertionError("torch's agent asked for workers before its rendezvous was complete")
        if isinstance(handler, SlotRendezvous) and handler.job is not None:
            return Round(
                job=handler.job,
                number=handler.round_number,
                node=node,
                num_nodes=group.group_world_size or 1,
                master=(group.master_addr, group.master_port),
                successors_master=handler.newcomers_store,
            )
        store = PrefixStore("hyperpod", group.store)
        host, port = group.master_addr, group.master_port
        if not handler.use_agent_store:
            # One server a round: neither workers nor the ledger meet keys of an earlier one. Other nodes may still read
            # in the former one why it ended.
            self._former_server = self._server
            self._server = TCPStore(host, 0, is_master=True, wait_for_workers=False) if node == 0 else None
            served = self._server.port if self._server is not None else None
            info = RendezvousStoreInfo.build(node, store, group.spec.local_addr, served)
            host, port = info.master_addr, info.master_port
        if node == 0:
            # Where the store outlives the round, its ledger must be another: generations begin at 0 again.
            again = f".{uuid.uuid4().hex[:8]}" if self._num_rounds and handler.use_agent_store else ""
            store.set("run_id", f"{handler.get_run_id()}{again}")
            store.set("round", str(self._num_rounds))
            store.set("resume_from", resume_from)
        number = int(store.get("round"))
        self._num_rounds = number + 1
        job = JobEnv(
            store_host=host,
            store_port=port,
            run_id=store.get("run_id").decode(),
            resume_from=store.get("resume_from").decode(),
        )
        return Round(job=job, number=number, node=node, num_nodes=group.group_world_size or 1)


def posts_of(group: WorkerGroup, settled: Round, options: AgentOptions) -> tuple[list[Post], LogsDest]:
    """The posts of this node, and where torch wants their output."""
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
    host, port = settled.successors_master or ("", 0)
    successors = {"MASTER_ADDR": host, "MASTER_PORT": str(port)} if host else {}
    destination = options.logs.reify(environs)
    posts: list[Post] = []
    for worker in group.workers:
        logs = ProcessLogs.of(destination, worker.local_rank)
        post = Post(
            local_rank=worker.local_rank,
            global_rank=worker.global_rank,
            args=tuple(macros.substitute(list(options.program.args), str(worker.local_rank))),
            environ=environs[worker.local_rank],
            successors_environ=successors,
            incarnation=settled.job.incarnation,
            prefix=_prefix(group, worker, options.log_line_prefix_template),
            founder_logs=logs,
            logs=logs,
        )
        posts.append(post)
    return posts, destination


def _prefix(group: WorkerGroup, worker: Worker, template: str | None) -> str:
    if template is None:
        return f"[{group.spec.role}{worker.local_rank}]:"
    names = {"role_name": group.spec.role, "rank": worker.global_rank, "local_rank": worker.local_rank}
    return Template(template).safe_substitute(names)
