"""The rendezvous `hyperpod`: each node holds a slot, and a node that takes over a vacant one joins the running job.

    torchrun --rdzv-backend=hyperpod --rdzv-endpoint=HOST:PORT --nnodes=2 --nproc-per-node=8 train.py
    hyperpodrun                      --rdzv-endpoint=HOST:PORT --nnodes=2 --nproc-per-node=8 train.py

To torch's agent this is a rendezvous like any other, except that it does not report changes that the running workers
can absorb. Under torchrun no other code of ours runs in the agent, so the handler also passes the address of the job
store to the workers, and its keep-alive thread kills workers that others report as hanging.

    joiner.py        how a node gets a slot            slots.py               the decisions about slots; pure
    keep_alive.py    how it keeps the slot, and how    store.py               the keys that agents share
                     lost ones are recorded            backends.py            the store: served by an agent, or etcd
    control.py       `hyperpod scale` and `status`     torchrun_workers.py    workers of torchrun's own agent
"""

import atexit
import contextlib
import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.utils.logging import get_logger

from hyperpod_plugins.elastic.membership.admission import is_in_world, world_or_none
from hyperpod_plugins.elastic.process import set_snapshot_folder
from hyperpod_plugins.elastic.rendezvous.backends import StoreBackend, open_etcd, open_served
from hyperpod_plugins.elastic.rendezvous.joiner import RendezvousJoiner
from hyperpod_plugins.elastic.rendezvous.keep_alive import (
    KeepAlive,
    can_take_joiners,
    expire_slot,
    record_node_exit,
    register_workers,
)
from hyperpod_plugins.elastic.rendezvous.slots import (
    LeaseState,
    LivenessTracker,
    NodeAssignment,
    SlotPolicy,
    policy_from,
)
from hyperpod_plugins.elastic.rendezvous.store import RendezvousClosing, RendezvousStore, name_of_round
from hyperpod_plugins.elastic.rendezvous.torchrun_workers import FailedWorker, prepare_agent_environ, set_worker_environ
from hyperpod_plugins.elastic.store.entry_records import EntryRecords, check_checkpoint, existing_folder
from hyperpod_plugins.elastic.store.etcd import SCHEME
from hyperpod_plugins.elastic.store.job_store import GAVE_UP_KEY, JobStore
from hyperpod_plugins.elastic.store.records import FailureRecord
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.ledger import TimeCategory, ledger

# -- the store for torch's agent ------------------------------------------------------------------------------------

_ROLE = "torchelastic/role_info/"
_RANKS = "torchelastic/assigned_ranks/"
_DONE = "torchelastic/agent/terminal_state"


class AgentStoreShim(PrefixStore):
    """The agents' store of a round, with ranks computed from slots and callbacks for two events of torch's agent.

    torch's agents report their number of workers to the first agent and wait until it assigns ranks. Here ranks
    follow from slots, so no agent waits for a node that has been lost meanwhile.
    """

    def __init__(
        self,
        store: Store,
        number: int,
        num_slots: int,
        *,
        on_size: Callable[[int], None],
        on_done: Callable[[], None],
    ) -> None:
        """Use `store`, a connection on which no other thread waits.

        Args:
            store: the store at the rendezvous endpoint.
            number: number of the round.
            num_slots: number of slots in the round.
            on_size: called with the number of this node's workers, before they are started.
            on_done: called when they have succeeded.
        """
        super().__init__(f"hyperpod/agents/{number}", store)
        self._num_slots = num_slots
        self._on_size = on_size
        self._on_done = on_done
        self._role: str | bytes = ""

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value for other agents; the role info of this node also triggers `on_size`."""
        if key.startswith(_ROLE):
            self._role = value
            self._on_size(self._num_workers)
        super().set(key, value)  # pyright: ignore[reportArgumentType]: bytes are taken, too

    def get(self, key: str) -> bytes:
        """Read a value of another agent; the ranks of this node's workers are computed."""
        if not key.startswith(_RANKS):
            return super().get(key)
        first = int(key.removeprefix(_RANKS)) * self._num_workers
        world_size = self._num_slots * self._num_workers
        return json.dumps([first, world_size, first, world_size]).encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Read several values; the role info of all nodes is that of this node."""
        if not all(key.startswith(_ROLE) for key in keys):
            return super().multi_get(keys)
        return [json.dumps(json.loads(self._role)).encode()] * len(keys)

    def add(self, key: str, value: int) -> int:
        """Add to a counter; the counter of finished agents also triggers `on_done`."""
        if key.startswith(_DONE):
            self._on_done()
        return super().add(key, value)

    @property
    def _num_workers(self) -> int:
        return json.loads(self._role)["local_world_size"]


logger = get_logger(__name__)

NAME = "hyperpod"
_POLL_S = 0.1
_CLOSING_S = 3.0
"""Minimum time for the other agents to leave first, if the store needs this agent until then."""
_CLOSING_HEARTBEATS = 2
"""Heartbeats added to those that show a loss, so that the wait ends early for a killed agent."""


class HyperPodRendezvousHandler(RendezvousHandler):
    """Rendezvous handler that gives this node a slot. Use it from the agent's main thread."""

    def __init__(self, endpoint: StoreBackend, policy: SlotPolicy, run_id: str) -> None:
        """Create the handler; the store is first used by `next_rendezvous`.

        Args:
            endpoint: access to the stores of the job.
            policy: number of nodes, and timeouts.
            run_id: name of the job (`--rdzv-id`).
        """
        self._backend = endpoint
        self._policy = policy
        self._run_id = run_id
        self._node = f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex[:8]}"
        self._keep_alive = KeepAlive(self._node, endpoint, policy, run_id)
        self._joiner: RendezvousJoiner | None = None
        self._is_done = self._can_restart = self._is_shut = False
        self._failed: FailedWorker | None = None
        self.job: JobEnv | None = None
        """Address of this round's job store, with the incarnation of this node's workers; None before they start."""

    # -- the interface of torch's agent -----------------------------------------------------------------------

    def get_backend(self) -> str:
        """Name of this rendezvous backend."""
        return NAME

    def get_run_id(self) -> str:
        """Name of the job."""
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        """Whether an agent serves the workers' store; True, as a store hosted by a worker would be lost with it."""
        return True

    @ledger.phase(TimeCategory.CAPACITY_WAIT)
    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for a slot, and take it.

        Raises:
            RendezvousTimeoutError: too few nodes joined in time.
            RendezvousClosedError: the job has failed, or is nearly done.
            SystemExit: the job is done, and this node was not needed.
            RendezvousConnectionError: the store cannot be reached, or serves another job.
        """
        former, self._keep_alive.assignment = self._keep_alive.assignment, None
        self._is_done = False  # a restart of all workers includes those that were done
        self._failed = None if former is None else self._keep_alive.failure(former)
        try:
            assignment = self._get_joiner().acquire_slot(former)
            host, port = self._backend.workers_store(assignment, self._get_joiner().rdzv_store)
        except (DistError, RendezvousConnectionError) as error:
            self._report_unexpected_end()
            if isinstance(error, RendezvousConnectionError):
                raise
            raise self._backend.loss(error) from error
        self._keep_alive.assignment = assignment
        store = AgentStoreShim(
            self._backend.connect(),
            assignment.round_number,
            assignment.num_slots,
            on_size=self._open,
            on_done=self.finish,
        )
        return RendezvousInfo(store, assignment.slot, assignment.num_slots, RendezvousStoreInfo(host, port))

    def num_nodes_waiting(self) -> int:
        """1 if the workers of this node must restart; 0 while the running ones can take joiners in."""
        return int(self._keep_alive.must_restart)

    def is_closed(self) -> bool:
        """Whether the job has ended."""
        return self._get_joiner().rdzv_store.closing() is not None

    def set_closed(self) -> None:
        """End the job."""
        self._get_joiner().rdzv_store.close(
            RendezvousClosing(cause=f"the agent {self._node} closed it", is_success=True)
        )

    def shutdown(self) -> bool:
        """Leave for good. This ends the job if the workers of all nodes are done, or if those of this node failed.

        The state that was kept after entries of the program is deleted when the job has succeeded.
        """
        atexit.unregister(self._release)
        if self._joiner is None or self._is_shut:
            return True
        self._is_shut, kept = True, None
        with contextlib.suppress(DistError):  # the agent that serves the store may have left first
            assignment = self._keep_alive.assignment
            if self._is_done and self._can_restart and assignment is not None and self.unfinished():
                self._swap_lease(assignment, LeaseState.DONE)  # others still train, or are about to restart
            elif self._is_done:
                kept = None if self.unfinished() else existing_folder(self._joiner.job_store, self._run_id)
                self._joiner.rdzv_store.close(RendezvousClosing(cause="its workers are done", is_success=True))
            elif assignment is not None:
                job_store = self._joiner.job_store
                if (
                    can_take_joiners(job_store)
                    and assignment.worker_ids
                    and not any(is_in_world(job_store, worker_id) for worker_id in assignment.worker_ids)
                ):
                    self.withdraw("its workers failed before the job had taken them in")
                else:
                    self._give_up(assignment)
            self._joiner.rdzv_store.leave(self._node)
            self._await_others_leaving()
        if kept is not None:  # the job is closed, so no restart can need it
            shutil.rmtree(kept, ignore_errors=True)
        self._keep_alive.stop()
        return True

    # -- additional interface for `HyperPodAgent` -------------------------------------------------------------

    def connect(self) -> Store:
        """Open a new connection to the job's store.

        Raises:
            SystemExit: the job is done, and this node was not needed.
            RendezvousConnectionError: the store is no longer served.
        """
        try:
            return self._backend.connect()
        except RendezvousConnectionError:
            self._report_unexpected_end()
            raise

    @property
    def closing(self) -> RendezvousClosing | None:
        """Why the job has ended, as of the last look of the keep-alive thread; None while it lasts."""
        return self._keep_alive.closing

    @property
    def is_over(self) -> bool:
        """Whether the job has ended or its store is lost, as of the last look of the keep-alive thread."""
        return self._keep_alive.closing is not None or self._keep_alive.error is not None

    @property
    def is_done(self) -> bool:
        """Whether the workers of this node have trained to the end of the job."""
        return self._is_done

    def _report_unexpected_end(self) -> None:
        """Exit with code 0 if the store is gone because the job has succeeded."""
        if self._keep_alive.closing is not None and self._keep_alive.closing.is_success:
            logger.warning("the job is done and its store is gone; this node was not needed")
            raise SystemExit(0)

    @property
    def round_number(self) -> int:
        """Number of the present round: how many rounds there were before."""
        return self._get_joiner().round_number

    @property
    def serves_store(self) -> bool:
        """Whether this node serves the store that all agents and workers use."""
        return self._backend.serves_store

    @property
    def closing_s(self) -> float:
        """Longest time in seconds that `shutdown` waits for the others to leave first."""
        return max(_CLOSING_S, (self._policy.max_missed_heartbeats + _CLOSING_HEARTBEATS) * self._policy.heartbeat_s)

    @property
    def joiners_store(self) -> tuple[str, int] | None:
        """Host and port of torch's store for replacements; None if they use that of the initial workers."""
        return self._backend.joiners_store(self.round_number)

    def withdraw(self, cause: str) -> None:
        """Give the slot back: another node can take it, and the job continues without this one."""
        assignment, self._keep_alive.assignment = self._keep_alive.assignment, None
        if assignment is not None:
            joiner = self._get_joiner()
            expire_slot(joiner.rdzv_store, joiner.job_store, assignment, cause, assignment.reporter)

    def finish(self, *, stays: bool = False) -> None:
        """Record that the workers of this node have succeeded, so that no node takes its slot over.

        If these workers were not part of the world, the slot becomes vacant instead.

        Args:
            stays: whether this agent would restart its workers when all nodes restart; torchrun's does not.
        """
        assignment, joiner = self._keep_alive.assignment, self._get_joiner()
        if assignment is None or self._is_done:
            return
        self._is_done, self._can_restart = (
            all(is_in_world(joiner.job_store, worker_id) for worker_id in assignment.worker_ids),
            stays,
        )
        if not self._is_done:
            self._keep_alive.assignment = None
        done = LeaseState.DONE_RESTARTABLE if stays else LeaseState.DONE
        self._swap_lease(assignment, done if self._is_done else LeaseState.VACANT)

    def _swap_lease(self, assignment: NodeAssignment, state: LeaseState) -> None:
        """Change the state of this node's lease, unless another node has taken the slot over."""
        rdzv_store = self._get_joiner().rdzv_store
        leases = rdzv_store.leases(assignment.round_number)
        last = assignment.lease if leases is None else leases[assignment.slot]
        if (last.node, last.number) == (assignment.lease.node, assignment.lease.number):
            rdzv_store.swap(assignment.round_number, assignment.slot, last, last.with_state(state))

    @property
    def is_any_gone(self) -> bool:
        """Whether a node whose workers are done has left, or would not restart them."""
        leases = self._get_joiner().rdzv_store.leases(self.round_number) or ()
        return self.is_closed() or any(lease.state is LeaseState.DONE for lease in leases)

    def unfinished(self) -> set[int]:
        """Slots of the nodes that still train; {-1} if a new round runs without this node."""
        if self.has_new_round:
            return {-1}
        joiner = self._get_joiner()
        leases, size = (
            joiner.rdzv_store.leases(self.round_number),
            joiner.rdzv_store.workers_per_node(self.round_number),
        )
        held = {slot for slot, lease in enumerate(leases or ()) if lease.state is LeaseState.HELD}
        world = world_or_none(joiner.job_store)
        if world is None or not size:
            return held
        return held.intersection(worker_id // size for worker_id in world.worker_ids)

    def heartbeats_of(self, slots: Collection[int]) -> dict[int, dict[str, Any]] | None:
        """Last heartbeats of the workers in these slots, by worker_id; None if the program sends none.

        Slot -1, which stands for nodes of a later round, has none.
        """
        joiner = self._get_joiner()
        size = joiner.rdzv_store.workers_per_node(self.round_number)
        if world_or_none(joiner.job_store) is None or not size:
            return None
        return joiner.job_store.heartbeats(
            [slot * size + index for slot in slots if slot >= 0 for index in range(size)]
        )

    @property
    def has_new_round(self) -> bool:
        """Whether other nodes have started a new round without this one."""
        return self._keep_alive.round_number > self.round_number

    @property
    def ended_without_this_node(self) -> bool:
        """Whether the job has succeeded while the workers of this node waited to be taken in."""
        return self._keep_alive.ended_without_this_node

    # -- joining ------------------------------------------------------------------------------------------------

    def loss(self, error: DistError) -> RendezvousConnectionError:
        """The error to raise when the store no longer answers."""
        return self._backend.loss(error)

    def _get_joiner(self) -> RendezvousJoiner:
        if self._joiner is None:
            self._joiner = RendezvousJoiner(self._keep_alive, self._backend, self._policy, self._run_id)
            atexit.register(self._release)
        return self._joiner

    def _open(self, num_workers: int) -> None:
        """Void the former workers of this slot, and set the environment of the workers that are about to start.

        Raises:
            ConfigError: other nodes start another number of workers, or the checkpoint to resume from is not trusted.
        """
        assignment, joiner = self._keep_alive.assignment, self._get_joiner()
        assert assignment is not None
        agreed = joiner.rdzv_store.agree_workers_per_node(assignment.round_number, num_workers)
        if agreed != num_workers:
            cause = (
                f"the agent {self._node} starts {num_workers} workers, but the others start {agreed} each. Ranks "
                "follow from slots: give all nodes the same --nproc-per-node."
            )
            if not can_take_joiners(joiner.job_store):
                joiner.rdzv_store.close(RendezvousClosing(cause=cause, is_success=False))
            self._release()
            raise ConfigError(cause)
        end = joiner.rdzv_store.round_end(assignment.round_number - 1)
        if end is not None:
            self._former_entries(assignment).hand_over(joiner.job_store, end.entry)
        resume_from = self._checked(end.resume_from) if end is not None and end.resume_from else ""
        first = assignment.slot * num_workers
        worker_ids, incarnation = range(first, first + num_workers), 0
        if assignment.is_new:
            logger.warning("this node takes the new slot %d and waits until the job grows", assignment.slot)
            incarnation = register_workers(joiner.job_store, worker_ids)
        elif assignment.predecessor:
            logger.warning("this node takes over slot %d from %s", assignment.slot, assignment.predecessor)
            incarnation = record_node_exit(joiner.job_store, worker_ids, self._loss(assignment))
        self.job = replace(
            self._backend.job(name_of_round(self._run_id, assignment.round_number)),
            incarnation=incarnation,
            resume_from=resume_from,
            shard_degree=0 if end is None else end.shard_degree,
            tensor_degree=0 if end is None else end.tensor_degree,
        )
        self._keep_alive.assignment = replace(assignment, worker_ids=worker_ids, incarnation=incarnation)
        set_worker_environ(replace(self.job, agent_pid=os.getpid()))
        set_snapshot_folder()

    def _former_entries(self, assignment: NodeAssignment) -> EntryRecords:
        """Records of the entries that ended before this round, in which they are not run again."""
        former = name_of_round(self._run_id, assignment.round_number - 1)
        return EntryRecords.read(JobStore.from_store(former, self._backend.connect()))

    def _checked(self, checkpoint: str) -> str:
        """Return a checkpoint of this job that only this user can have written; end the job if it is not one.

        Raises:
            ConfigError: another job has written it, or another user may have.
        """
        try:
            return check_checkpoint(checkpoint, self._run_id)
        except ConfigError as error:
            self._get_joiner().rdzv_store.close(RendezvousClosing(cause=str(error), is_success=False))
            self._release()
            raise

    def _loss(self, assignment: NodeAssignment) -> FailureRecord:
        if assignment.predecessor == self._node:
            failed = self._failed if self._failed is not None and self._failed.how else None
            how = "one of them failed" if failed is None else f"worker {failed.worker_id} {failed.how}"
            cause = f"torchrun ended all workers of node {assignment.slot}: {how}"
            worker_id = -1 if failed is None else failed.worker_id
            return FailureRecord(kind="process", cause=cause, worker_id=worker_id, reporter=assignment.reporter)
        return FailureRecord(
            kind="agent", cause=f"the agent {assignment.predecessor} is gone", reporter=assignment.reporter
        )

    # -- leaving ------------------------------------------------------------------------------------------------

    def _give_up(self, assignment: NodeAssignment) -> None:
        """End the job: the workers of this node failed and are not restarted."""
        joiner = self._get_joiner()
        cause = f"workers of node {assignment.slot} failed, and its agent does not restart them"
        joiner.rdzv_store.close(RendezvousClosing(cause=cause, is_success=False))
        if assignment.worker_ids:
            failure = FailureRecord(
                kind="agent",
                cause=cause,
                worker_id=assignment.worker_ids[0],
                incarnation=assignment.incarnation,
                reporter=assignment.reporter,
            )
            joiner.job_store.record_exit(failure)
            joiner.job_store.set(GAVE_UP_KEY, failure.to_json().encode())

    def _await_others_leaving(self) -> None:
        """Wait until all users of the store have left, if this node must outlast them."""
        is_over = self._get_joiner().rdzv_store.closing() is not None
        if not self._backend.must_outlast_others(job_is_over=is_over):
            return
        store = self._backend.connect()
        store.set_timeout(timedelta(seconds=self.closing_s))  # the keys may have been deleted by now
        rdzv_store, liveness, heartbeat_s = (
            RendezvousStore(store),
            LivenessTracker(self._policy.max_missed_heartbeats),
            self._policy.heartbeat_s,
        )
        nodes, next_look_s = self._others(rdzv_store), 0.0
        deadline_s = time.monotonic() + self.closing_s
        while nodes and time.monotonic() < deadline_s:
            if time.monotonic() >= next_look_s:
                liveness.update(rdzv_store.heartbeats(nodes))
                next_look_s = time.monotonic() + heartbeat_s
            time.sleep(_POLL_S)
            nodes = {node for node in nodes.difference(rdzv_store.left()) if not liveness.is_lost(node)}
        if not nodes:
            self._backend.clear()

    def _others(self, rdzv_store: RendezvousStore) -> set[str]:
        """The other nodes that may still use the store."""
        number = self._get_joiner().round_number
        leases = rdzv_store.leases(number) or ()
        vacated = {lease.node for lease in leases if lease.state is LeaseState.VACANT}
        nodes = {*rdzv_store.candidates(number), *(lease.node for lease in leases)}
        return nodes.difference(vacated, rdzv_store.left(), {self._node})

    def _release(self) -> None:
        """Give the slot up at once; called when this process ends without `shutdown`."""
        assignment, self._keep_alive.assignment = self._keep_alive.assignment, None
        if assignment is not None and not self._is_done and self._joiner is not None:
            with contextlib.suppress(DistError):
                rdzv_store = self._joiner.rdzv_store
                expire_slot(rdzv_store, self._joiner.job_store, assignment, "its agent has left", assignment.reporter)
                rdzv_store.leave(self._node)
                if not self._others(rdzv_store):
                    self._backend.clear()


def create_rendezvous(parameters: RendezvousParameters) -> HyperPodRendezvousHandler:
    """Create the rendezvous handler of this node from torchrun's arguments.

    Raises:
        ConfigError: `--rdzv-conf`, `--nnodes` or the etcd URL is invalid.
        RendezvousConnectionError: this node was told to serve the store and cannot, or etcd does not answer.
    """
    prepare_agent_environ()
    policy = policy_from(parameters.config, parameters.min_nodes, parameters.max_nodes)
    is_etcd = parameters.endpoint.startswith(SCHEME)
    endpoint = open_etcd(parameters) if is_etcd else open_served(parameters, policy.join_timeout_s, policy.answer_s)
    return HyperPodRendezvousHandler(endpoint, policy, parameters.run_id)
