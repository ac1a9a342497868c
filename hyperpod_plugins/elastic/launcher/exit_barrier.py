"""`ExitBarrier`: how a node whose workers are done waits for the others, as the stores are needed until then."""

import contextlib
import shutil
import time
from collections.abc import Mapping
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.utils.logging import get_logger

from hyperpod_plugins.elastic.launcher.agent_policy import AgentState
from hyperpod_plugins.elastic.launcher.node_status import STOPPED_KEY, NodeStatus
from hyperpod_plugins.elastic.membership.quorum_policy import ExitWait
from hyperpod_plugins.elastic.membership.restart_policy import JobRestart
from hyperpod_plugins.elastic.rendezvous.handler import HyperPodRendezvousHandler
from hyperpod_plugins.elastic.rendezvous.keep_alive import MALFORMED
from hyperpod_plugins.elastic.store.entries import existing_folder
from hyperpod_plugins.elastic.store.job_store import RESTART_KEY

logger = get_logger(__name__)

_LEAVE_S = 5.0
"""How long nodes whose workers are done wait for each other to leave."""
_REPORT_S = 30.0
"""How often a node whose workers are done reports the nodes it waits for."""
_OUTSIDE_S = 900.0
"""How long a worker outside of a step may show no progress before the node that serves the store stops waiting."""
DONE_KEY = "agent/done"  # key .../NODE: all workers of that node have succeeded
_LEFT = "agent/left"  # key .../NODE: that node no longer needs the rendezvous


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
                kept = existing_folder(node.job_store) if node.stopped is None else None
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
