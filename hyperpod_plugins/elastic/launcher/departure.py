"""`Departure`: how a node leaves a job that continues without it, between two steps."""

import os
import signal
import time

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.utils.logging import get_logger

from hyperpod_plugins.elastic.launcher.agent_policy import AgentState
from hyperpod_plugins.elastic.launcher.local_workers import LocalWorkers, WorkerStatus
from hyperpod_plugins.elastic.launcher.node_status import NodeStatus
from hyperpod_plugins.elastic.membership.admission import announce_preemption, world_or_none
from hyperpod_plugins.elastic.membership.elastic_spec import elastic_spec_of

logger = get_logger(__name__)

PART_FOR_LEAVING = 1 / 3
"""Fraction of the time from SIGTERM to SIGKILL that an elastic job gets to continue without this node."""
_KILL_S = 5.0
"""Time from SIGTERM to SIGKILL for workers that the job no longer needs."""


class Departure:
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
