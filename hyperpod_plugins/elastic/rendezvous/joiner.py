"""How a node gets a slot: it looks, decides (`slots.py`) and acts until it has one."""

import time

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.utils.logging import get_logger

from hyperpod_plugins.elastic.membership.admission import is_in_world
from hyperpod_plugins.elastic.membership.elastic_spec import elastic_spec_of
from hyperpod_plugins.elastic.rendezvous.backends import StoreBackend
from hyperpod_plugins.elastic.rendezvous.keep_alive import KeepAlive, can_take_joiners, request_new_round
from hyperpod_plugins.elastic.rendezvous.slots import (
    Decision,
    JoinStep,
    NodeAssignment,
    RendezvousView,
    SlotLease,
    SlotPolicy,
    initial_nodes,
    members_of,
    next_step,
)
from hyperpod_plugins.elastic.rendezvous.store import RendezvousStore, name_of_round
from hyperpod_plugins.elastic.store.job_store import RESTART_KEY, JobStore

logger = get_logger(__name__)

_POLL_S = 0.1
_POLL_PER_NODE_S = 0.001
"""Minimum of that interval per node, as all nodes share one store: each of 1,000 nodes looks once a second."""


class RendezvousJoiner:
    """Gets slots for one node, in one round after the other."""

    round_number: int
    """The round that the node wants to take part in."""
    job_store: JobStore
    """Job store of that round."""

    def __init__(self, keep_alive: KeepAlive, endpoint: StoreBackend, policy: SlotPolicy, run_id: str) -> None:
        """Connect, start the keep-alive thread, and become a candidate of the present round.

        Raises:
            RendezvousConnectionError: the store does not answer, or the endpoint serves another job.
            RendezvousClosedError: the job has failed.
            SystemExit: the job is done.
        """
        self._keep_alive = keep_alive
        self._endpoint = endpoint
        self._policy = policy
        self._run_id = run_id
        self.rdzv_store = RendezvousStore(endpoint.connect())
        served = self.rdzv_store.job(run_id)
        if served != run_id:
            raise RendezvousConnectionError(
                f"{endpoint} serves the job {served!r}, not {run_id!r} (--rdzv-id). Choose "
                "another port with --rdzv-endpoint: each job needs its own."
            )
        self._check_open(None)  # before other nodes count on this one or wait for it
        keep_alive.start()
        self._add_candidate(self.rdzv_store.round())

    def acquire_slot(self, former: NodeAssignment | None) -> NodeAssignment:
        """Wait for a slot, and take it.

        Args:
            former: the last assignment of this node; None if its workers have not run yet.

        Raises:
            RendezvousTimeoutError: too few nodes joined in time.
            RendezvousClosedError: the job has failed, or is nearly done.
            SystemExit: the job is done, and this node was not needed.
        """
        while True:
            self._check_open(former)
            number = self.rdzv_store.round(at_least=self.round_number)
            if number != self.round_number:
                self._add_candidate(number)
            view = self._view(has_entered=former is not None and former.round_number == number)
            decision = next_step(view, self._policy)
            if decision.step is JoinStep.WAIT:
                self._wait(view)
                continue
            assignment = self._act(decision, view)
            if assignment is not None:
                return assignment

    def _add_candidate(self, number: int) -> None:
        """Switch to a round, and become a candidate."""
        self.round_number = number
        self._stood_s, self._enough_s, self._is_spare = time.monotonic(), None, False
        self.job_store = JobStore.from_store(name_of_round(self._run_id, number), self._endpoint.connect())
        self._endpoint.keep_alive(number, self.rdzv_store)
        self.rdzv_store.add_candidate(number, self._keep_alive.node)

    def _view(self, *, has_entered: bool) -> RendezvousView:
        leases = self.rdzv_store.leases(self.round_number)
        gone = set(self.rdzv_store.left()) if leases is None else set[str]()
        candidates = self.rdzv_store.candidates(self.round_number) if leases is None else ()
        here = tuple(name for name in candidates if not (name in gone or self._keep_alive.is_lost(name)))
        former = members_of(self.rdzv_store.leases(self.round_number - 1)) if leases is None else ()
        away = {name for name in former if not (name in here or name in gone or self._keep_alive.is_lost(name))}
        end = self.rdzv_store.round_end(self.round_number - 1) if leases is None else None
        if self._enough_s is None and len(here) >= self._policy.min_nodes:
            self._enough_s = time.monotonic()
        can_absorb_others = leases is not None and can_take_joiners(self.job_store)
        return RendezvousView(
            node=self._keep_alive.node,
            candidates=here,
            called_s=0.0 if self._enough_s is None else time.monotonic() - self._enough_s,
            are_all_back=end is not None and end.step >= 0 and not away,
            awaits_former=bool(away),
            leases=leases,
            has_entered=has_entered,
            can_absorb=can_absorb_others,
            has_trained=leases is not None and not can_absorb_others and self.job_store.was_armed,
            can_grow=leases is not None and elastic_spec_of(self.job_store) is not None,
            restart_requested=leases is not None and self.job_store.try_get(RESTART_KEY) is not None,
        )

    def _act(self, decision: Decision, view: RendezvousView) -> NodeAssignment | None:
        """Carry out a decision; returns the assignment if it led to one."""
        leases, slot = view.leases or (), decision.slot
        match decision.step:
            case JoinStep.ENTER:
                return self._assignment(slot, leases[slot], leases)
            case JoinStep.TAKE_OVER:
                lease = leases[slot].next(self._keep_alive.node)
                if self.rdzv_store.swap(self.round_number, slot, leases[slot], lease):
                    return self._assignment(slot, lease, leases)  # no other node was faster
            case JoinStep.ADD:
                lease = SlotLease(node=self._keep_alive.node, number=1)
                if self.rdzv_store.add_slot(self.round_number, slot, lease):
                    return NodeAssignment(
                        round_number=self.round_number, slot=slot, num_slots=slot + 1, lease=lease, is_new=True
                    )
            case JoinStep.PROPOSE:
                self.rdzv_store.start_round(self.round_number, initial_nodes(view.candidates, self._policy))
            case JoinStep.NEW_ROUND:
                request_new_round(self.rdzv_store, self.job_store, self.round_number, self._keep_alive.node)
            case _:
                raise RendezvousClosedError("the workers of other nodes are done: a joiner would hang")
        return None

    def _assignment(self, slot: int, lease: SlotLease, leases: tuple[SlotLease, ...]) -> NodeAssignment:
        predecessor = leases[slot].node if lease.number > 0 else ""
        return NodeAssignment(
            round_number=self.round_number, slot=slot, num_slots=len(leases), lease=lease, predecessor=predecessor
        )

    def _check_open(self, former: NodeAssignment | None) -> None:
        if self._keep_alive.error is not None:
            raise self._keep_alive.error
        closing = self.rdzv_store.closing()
        if closing is None:
            return
        leases = None if former is None else self.rdzv_store.leases(former.round_number)
        is_needed = former is not None and leases is not None and leases[former.slot].node == self._keep_alive.node
        if former is not None and former.worker_ids:
            job_store = JobStore.from_store(name_of_round(self._run_id, former.round_number), self._endpoint.connect())
            is_needed &= any(is_in_world(job_store, worker_id) for worker_id in former.worker_ids)
        if closing.is_success and not is_needed:
            logger.warning("the job is done, and this node was not needed")
            raise SystemExit(0)  # torch 2.13 has an error for this case, but then fails on the missing result
        raise RendezvousClosedError(f"the job has ended: {closing.cause}")

    def _wait(self, view: RendezvousView) -> None:
        waited_s = time.monotonic() - self._stood_s
        if view.leases is None and waited_s > self._policy.join_timeout_s:
            raise RendezvousTimeoutError(
                f"only {len(view.candidates)} of {self._policy.min_nodes} nodes joined within {waited_s:.0f} s. "
                "Start the others, or allow more time with --rdzv-conf=join_timeout=SECONDS."
            )
        if view.leases is not None and not self._is_spare:
            self._is_spare = True
            logger.warning("all %d slots are held: this node waits as a spare", len(view.leases))
        time.sleep(max(_POLL_S, _POLL_PER_NODE_S * max(len(view.candidates), len(view.leases or ()))))
