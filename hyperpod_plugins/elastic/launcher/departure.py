"""How a node leaves: while the job continues (`NodeDeparture`), or when all workers are done (`ExitBarrier`)."""

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Mapping
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.utils.logging import get_logger

from hyperpod_plugins.elastic.launcher.agent_state import STOPPED_KEY, AgentState, NodeStatus
from hyperpod_plugins.elastic.launcher.local_workers import LocalWorkers, WorkerStatus
from hyperpod_plugins.elastic.membership.admission import announce_preemption, world_or_none
from hyperpod_plugins.elastic.membership.elastic_spec import elastic_spec_of
from hyperpod_plugins.elastic.membership.quorum_policy import ExitWait
from hyperpod_plugins.elastic.membership.restart_policy import JobRestart
from hyperpod_plugins.elastic.rendezvous.handler import HyperPodRendezvousHandler
from hyperpod_plugins.elastic.rendezvous.keep_alive import MALFORMED
from hyperpod_plugins.elastic.store.entry_records import existing_folder
from hyperpod_plugins.elastic.store.job_store import RESTART_KEY

logger = get_logger(__name__)

PART_FOR_LEAVING = 1 / 3
"""Fraction of the time from SIGTERM to SIGKILL that an elastic job gets to continue without this node."""
_KILL_S = 5.0
"""Time from SIGTERM to SIGKILL for workers that the job no longer needs."""
_LEAVE_S = 5.0
"""How long nodes whose workers are done wait for each other to leave."""
_REPORT_S = 30.0
"""How often a node whose workers are done reports the nodes it waits for."""
_OUTSIDE_S = 900.0
"""How long a worker outside of a step may show no progress before the node that serves the store stops waiting."""
DONE_KEY = "agent/done"  # key .../NODE: all workers of that node have succeeded
_LEFT = "agent/left"  # key .../NODE: that node no longer needs the rendezvous


class NodeDeparture:
    """Announces that this node leaves, and ends its workers once the job continues without them."""

    def __init__(self, node: NodeStatus, workers: LocalWorkers) -> None:
        """Stay until a notice comes."""
        self._node, self._workers = node, workers
        self._next_signal, self._next_signal_s = signal.SIGTERM, 0.0

    def announce(self, notice: signal.Signals) -> None:
        """Request that the job shrink, so that this node can leave.

        A job that cannot change its size gets the notice instead: it is passed on to the workers.
        """
        node = self._node
        if node.leave_by_s is not None:
            return
        try:
            spec = elastic_spec_of(node.job_store)
            if spec is None or node.handler is None:
                self._workers.send(self._workers.slots, notice)
                return
            if node.handler.serves_store:
                logger.warning("%s: this node serves the store of the job, and cannot leave it", notice.name)
                return
            self.announce_preemption()
        except DistError as error:
            node.lose_store(error)
            return
        timeout_s = spec.policy.graceful_shutdown_timeout_s
        logger.warning("%s: this node leaves the job, between two steps, within %.0f s", notice.name, timeout_s)
        node.drain(time.monotonic() + timeout_s)

    def announce_preemption(self) -> None:
        """Record that the workers of this node get no replacements."""
        for slot in self._workers.slots:  # none before the first round
            if slot.status is not WorkerStatus.DONE:
                announce_preemption(self._node.job_store, slot.worker_id, slot.incarnation)

    def begin(self, shutdown_timeout_s: float) -> bool:
        """Begin to leave after a signal that ends the agent; False if the job cannot continue without this node."""
        node = self._node
        own = {slot.worker_id for slot in self._workers.slots if slot.status is WorkerStatus.RUNNING}
        if not own or node.handler is None or node.handler.serves_store:
            return False
        spec, world = elastic_spec_of(node.job_store), world_or_none(node.job_store)
        if spec is None or world is None or own.issuperset(world.worker_ids):
            return False
        grace_s = min(spec.policy.graceful_shutdown_timeout_s, shutdown_timeout_s * PART_FOR_LEAVING)
        node.drain(time.monotonic() + grace_s)
        return True

    def advance(self) -> None:
        """End the workers of this node that are no longer part of the world, if it leaves.

        Raises:
            SignalException: the job did not continue without this node in time; the node leaves anyway.
        """
        node = self._node
        if node.leave_by_s is None:
            return
        if time.monotonic() > node.leave_by_s:
            cause = f"process {os.getpid()} got notice, and the job did not continue without it in time"
            raise SignalException(cause, signal.SIGTERM)
        world = world_or_none(node.job_store)
        if world is None:
            return
        aside = [slot for slot in self._workers.slots if slot.worker_id not in world.worker_ids]
        if node.state in (AgentState.DRAINING, AgentState.RELEASED):
            are_all_aside = len(aside) == len(self._workers.slots)
            node.state = AgentState.RELEASED if are_all_aside else AgentState.DRAINING
        if aside and time.monotonic() >= self._next_signal_s:
            self._workers.send(aside, self._next_signal, last=True)
            self._next_signal, self._next_signal_s = signal.SIGKILL, time.monotonic() + _KILL_S


class ExitBarrier:
    """Waits for the workers of all nodes, and leaves the rendezvous. Use it from the main thread."""

    def __init__(self, node: NodeStatus, handler: RendezvousHandler, *, limit_s: float, poll_interval_s: float) -> None:
        """Wait for at most `limit_s` without progress of the other nodes."""
        self._node, self._handler = node, handler
        self._limit_s, self._poll_interval_s = limit_s, poll_interval_s
        self._has_left = False

    def wait(self) -> None:
        """Wait until the workers of all nodes are done, then leave; return early if all workers restart."""
        node, kept = self._node, None
        if node.handler is not None:
            with contextlib.suppress(DistError):  # the node that serves the store ended it, as no node needs it
                node.handler.finish(stays=True)
                if node.handler.is_done or node.handler.serves_store:  # else the others continue without this node
                    self._await_members(node.handler)
                    if node.handler.is_done and node.state is AgentState.RESTARTING:
                        return
            self.leave()
            return
        with contextlib.suppress(DistError):  # the node that serves the store may have timed out and left first
            if self._await_all_nodes(DONE_KEY, self._limit_s) and node.round.node == 0:
                run_id = self._handler.get_run_id()
                kept = existing_folder(node.job_store, run_id) if node.stopped is None else None
            self.leave()
            self._await_all_nodes(_LEFT, _LEAVE_S)
        if kept is not None:  # the state after each entry of the program, which has succeeded
            shutil.rmtree(kept, ignore_errors=True)
        if node.round.node == 0 and node.round.num_nodes > 1:
            time.sleep(2 * self._poll_interval_s)  # the others still poll for the last `_LEFT`

    def leave(self) -> None:
        """Leave the rendezvous for good; only the first call has an effect."""
        if not self._has_left:
            self._has_left = True
            self._handler.shutdown()

    def _await_members(self, handler: HyperPodRendezvousHandler) -> None:
        """Wait until the workers of all nodes that train are done; the slots of silent nodes expire meanwhile.

        The wait is limited, as no other rank would notice a worker that hangs after the program's last call.
        """
        now_s, limit_s = time.monotonic(), self._limit_s
        if handler.serves_store:
            limit_s = max(limit_s, _OUTSIDE_S)  # the remaining nodes cannot continue without the store
        wait, look_s = ExitWait(limit_s, now_s), min(_REPORT_S, limit_s / 4)
        next_look_s, next_report_s, job_store = now_s, now_s + _REPORT_S, self._node.job_store
        while job_store.try_get(STOPPED_KEY) is None and not handler.is_closed() and (left := handler.unfinished()):
            now_s = time.monotonic()
            if handler.is_done and self._follows_restart():
                return
            if now_s >= next_look_s:
                next_look_s = now_s + look_s
                if wait.is_over(left, _heartbeats_of(handler, left), now_s) and not self._follows_restart():
                    logger.warning(
                        "the workers of this node are done, and it stops waiting for nodes %s: their workers have "
                        "shown no progress for %.0f s",
                        *(sorted(left), limit_s),
                    )
                    return
            if now_s > next_report_s:
                next_report_s = now_s + _REPORT_S
                logger.warning("the workers of this node are done; waiting for nodes %s", sorted(left))
            time.sleep(self._poll_interval_s)

    def _follows_restart(self) -> bool:
        """Whether a restart of all workers is requested. It includes those that are done: they skip what they ran."""
        wanted = self._node.job_store.try_get(RESTART_KEY)
        if wanted is not None:
            with contextlib.suppress(*MALFORMED):  # the keep-alive thread reports such values
                self._node.restart_all(JobRestart.from_json(wanted))
        return self._node.state is AgentState.RESTARTING

    def _await_all_nodes(self, what: str, timeout_s: float) -> bool:
        job_store, nodes = self._node.job_store, range(self._node.round.num_nodes)
        job_store.set(f"{what}/{self._node.round.node}", b"1")
        deadline_s = time.monotonic() + timeout_s
        there = set[int]()
        while time.monotonic() < deadline_s and job_store.try_get(STOPPED_KEY) is None:
            there |= {node for node in nodes if node not in there and job_store.try_get(f"{what}/{node}") is not None}
            if there.issuperset(nodes):
                return True
            time.sleep(self._poll_interval_s)
        return False


def _heartbeats_of(handler: HyperPodRendezvousHandler, left: set[int]) -> Mapping[int, Mapping[str, Any]] | None:
    """Last heartbeats of the workers of other nodes; None if unknown while a new round still needs the store."""
    if handler.has_new_round:
        return None if handler.serves_store else {}
    return handler.heartbeats_of(left)
