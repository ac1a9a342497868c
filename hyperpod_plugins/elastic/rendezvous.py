"""The rendezvous `hyperpod`: nodes hold slots, and whoever takes a vacant one over joins the running job.

    torchrun --rdzv-backend=hyperpod --rdzv-endpoint=HOST:PORT --nnodes=2 --nproc-per-node=8 train.py
    hyperpodrun                      --rdzv-endpoint=HOST:PORT --nnodes=2 --nproc-per-node=8 train.py

To torch's agent this is a rendezvous like others, except that it never hears of a change that the running members can
absorb. Under torchrun nothing else of ours runs in the agent, so the handler also hands the way to the ledger down to
the workers, and its thread ends those that others found hanging.

    application.py    how a node comes to a slot        slots.py     what it decides, and who counts as lost; pure
    keeper.py         how it keeps it                   roster.py    what the agents write down about each other
"""

import atexit
import contextlib
import os
import socket
import time
import uuid
from dataclasses import replace
from datetime import timedelta

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.utils.logging import get_logger

from hyperpod_plugins.elastic.agents_store import AgentsStore
from hyperpod_plugins.elastic.application import Application
from hyperpod_plugins.elastic.endpoint import Endpoint, open_served
from hyperpod_plugins.elastic.etcd_endpoint import open_etcd
from hyperpod_plugins.elastic.etcd_gateway import SCHEME
from hyperpod_plugins.elastic.incident import Incident
from hyperpod_plugins.elastic.inherited import Failed, hand_down, prepare
from hyperpod_plugins.elastic.joining import takes_part
from hyperpod_plugins.elastic.keeper import Keeper
from hyperpod_plugins.elastic.ledger import GAVE_UP_KEY
from hyperpod_plugins.elastic.roster import Closing, Roster, name_of_round
from hyperpod_plugins.elastic.slots import Holding, Pulse, Seat, SlotPolicy, policy_from
from hyperpod_plugins.elastic.succession import can_absorb, enroll, vacate, write_up_node
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.errors import ConfigError

logger = get_logger(__name__)

NAME = "hyperpod"
_POLL_S = 0.1
_FAREWELL_S = 5.0
"""Longest that an agent waits for the others to leave before it, where the store needs it so long."""


class SlotRendezvous(RendezvousHandler):
    """Gives this node a slot."""

    def __init__(self, endpoint: Endpoint, policy: SlotPolicy, run_id: str) -> None:
        """Nobody is asked before `next_rendezvous`."""
        self._endpoint = endpoint
        self._policy = policy
        self._run_id = run_id
        self._node = f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex[:8]}"
        self._keeper = Keeper(self._node, endpoint, policy, run_id)
        self._application: Application | None = None
        self._is_done = self._is_shut = False
        self._failed: Failed | None = None
        self.job: JobEnv | None = None
        """Where the ledger of this round is, and the number of this node's workers in their places."""

    # -- what torch's agent calls -----------------------------------------------------------------------------

    def get_backend(self) -> str:
        """Name of this rendezvous."""
        return NAME

    def get_run_id(self) -> str:
        """Name of the job."""
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        """An agent serves the workers' store: a worker that did would take it along when it dies."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for a slot, and take it.

        Raises:
            RendezvousTimeoutError: too few nodes came.
            RendezvousClosedError: the job has failed, or is nearly done.
            SystemExit: the job is done, and this node was not needed.
            RendezvousConnectionError: the store is not served, or serves another job.
        """
        former, self._keeper.seat = self._keeper.seat, None
        self._failed = None if former is None else self._keeper.failure(former)
        try:
            seat = self._apply().find_seat(former)
            host, port = self._endpoint.workers_store(seat, self._apply().roster)
        except DistError as error:
            raise self._endpoint.loss(error) from error
        self._keeper.seat = seat
        store = AgentsStore(
            self._endpoint.connect(), seat.number, seat.num_slots, on_size=self._open, on_done=self.finish
        )
        return RendezvousInfo(store, seat.slot, seat.num_slots, RendezvousStoreInfo(host, port))

    def num_nodes_waiting(self) -> int:
        """1 where the workers of this node must start again; 0 as long as those that run can take newcomers in."""
        return int(self._keeper.must_restart)

    def is_closed(self) -> bool:
        """Whether the job has ended."""
        return self._apply().roster.closing() is not None

    def set_closed(self) -> None:
        """End the job."""
        self._apply().roster.close(Closing(cause=f"the agent {self._node} closed it", is_success=True))

    def shutdown(self) -> bool:
        """Leave for good; the job is over if the workers of this node are done, or failed and are not started again."""
        atexit.unregister(self._release)
        if self._application is None or self._is_shut:
            return True
        self._is_shut = True
        with contextlib.suppress(DistError):  # whoever served the store may have left first
            if self._is_done:
                self._application.roster.close(Closing(cause="its workers are done", is_success=True))
            elif self._keeper.seat is not None:
                self._give_up(self._keeper.seat)
            self._application.roster.leave(self._node)
            self._see_others_off()
        self._keeper.stop()
        return True

    # -- what our own agent uses beside -------------------------------------------------------------------------------

    @property
    def round_number(self) -> int:
        """How often all workers have been started together before."""
        return self._apply().number

    @property
    def serves_store(self) -> bool:
        """Whether this node serves the store that all agents and workers use."""
        return self._endpoint.serves_store

    @property
    def newcomers_store(self) -> tuple[str, int] | None:
        """Where processes find torch's store that take the places of lost ones, if that is not where founders do."""
        return self._endpoint.newcomers_store(self.round_number)

    def finish(self) -> None:
        """Say that the workers of this node have come to a good end, so that nobody need take their place.

        A node that the job has done without leaves its slot to others.
        """
        seat, application = self._keeper.seat, self._apply()
        if seat is None or self._is_done:
            return
        self._is_done = all(takes_part(application.ledger, place) for place in seat.ranks)
        if not self._is_done:
            self._keeper.seat = None
        after = Holding.DONE if self._is_done else Holding.VACANT
        application.roster.swap(seat.number, seat.slot, seat.claim, seat.claim.become(after))

    def nodes(self) -> list[int]:
        """Slots of the nodes that take part, or are done."""
        claims = self._apply().roster.claims(self.round_number) or ()
        return [slot for slot, claim in enumerate(claims) if claim.holding is not Holding.VACANT]

    # -- the beginning ------------------------------------------------------------------------------------------

    def _apply(self) -> Application:
        if self._application is None:
            self._application = Application(self._keeper, self._endpoint, self._policy, self._run_id)
            atexit.register(self._release)
        return self._application

    def _open(self, num_workers: int) -> None:
        """Void the places of those who were here before, and tell the workers that are about to start.

        Raises:
            ConfigError: other nodes start another number of workers.
        """
        seat, application = self._keeper.seat, self._apply()
        assert seat is not None
        agreed = application.roster.size(seat.number, num_workers)
        if agreed != num_workers:
            cause = (
                f"the agent {self._node} is to start {num_workers} workers, but the others start {agreed} each. Ranks "
                "follow from slots: give all nodes the same --nproc-per-node."
            )
            if not can_absorb(application.ledger):
                application.roster.close(Closing(cause=cause, is_success=False))
            self._release()
            raise ConfigError(cause)
        first = seat.slot * num_workers
        ranks, incarnation = range(first, first + num_workers), 0
        if seat.is_new:
            logger.warning("this node takes the new slot %d, and waits until the job grows", seat.slot)
            incarnation = enroll(application.ledger, ranks)
        elif seat.predecessor:
            logger.warning("this node takes slot %d over from %s", seat.slot, seat.predecessor)
            incarnation = write_up_node(application.ledger, ranks, self._loss(seat))
        end = application.roster.round_end(seat.number - 1)
        self.job = replace(
            self._endpoint.job(name_of_round(self._run_id, seat.number)),
            incarnation=incarnation,
            resume_from="" if end is None else end.resume_from,
            shard_degree=0 if end is None else end.shard_degree,
            tensor_degree=0 if end is None else end.tensor_degree,
        )
        self._keeper.seat = replace(seat, ranks=ranks, incarnation=incarnation)
        hand_down(replace(self.job, agent_pid=os.getpid()))

    def _loss(self, seat: Seat) -> Incident:
        if seat.predecessor == self._node:
            failed = self._failed if self._failed is not None and self._failed.how else None
            how = "one of them failed" if failed is None else f"rank {failed.rank} {failed.how}"
            cause = f"torchrun ended all workers of node {seat.slot}: {how}"
            rank = -1 if failed is None else failed.rank
            return Incident(kind="process", cause=cause, rank=rank, reporter=seat.reporter)
        return Incident(kind="agent", cause=f"the agent {seat.predecessor} is gone", reporter=seat.reporter)

    # -- the end ------------------------------------------------------------------------------------------------

    def _give_up(self, seat: Seat) -> None:
        """Tell everybody that the workers of this node failed and are not started again."""
        application = self._apply()
        cause = f"workers of node {seat.slot} failed, and its agent does not start them again"
        application.roster.close(Closing(cause=cause, is_success=False))
        if seat.ranks:
            incident = Incident(
                kind="agent", cause=cause, rank=seat.ranks[0], incarnation=seat.incarnation, reporter=seat.reporter
            )
            application.ledger.record_exit(incident)
            application.ledger.put(GAVE_UP_KEY, incident.to_json().encode())

    def _see_others_off(self) -> None:
        """Wait until all that use the store have left, where that is this node's business."""
        is_over = self._apply().roster.closing() is not None
        if not self._endpoint.must_outlast_others(job_is_over=is_over):
            return
        store = self._endpoint.connect()
        store.set_timeout(timedelta(seconds=_FAREWELL_S))  # what is asked for may have been cleared away by now
        roster, pulse, beat_s = Roster(store), Pulse(self._policy.max_missed_beats), self._policy.beat_s
        nodes, next_look_s = self._others(roster), 0.0
        deadline_s = time.monotonic() + max(_FAREWELL_S, (self._policy.max_missed_beats + 2) * beat_s)
        while nodes and time.monotonic() < deadline_s:
            if time.monotonic() >= next_look_s:
                pulse.look(roster.beats(nodes))
                next_look_s = time.monotonic() + beat_s
            time.sleep(_POLL_S)
            nodes = {node for node in nodes.difference(roster.left()) if not pulse.is_lost(node)}
        if not nodes:
            self._endpoint.clear()

    def _others(self, roster: Roster) -> set[str]:
        """Nodes that may still use the store."""
        number = self._apply().number
        claims = roster.claims(number) or ()
        vacated = {claim.node for claim in claims if claim.holding is Holding.VACANT}
        nodes = {*roster.candidates(number), *(claim.node for claim in claims)}
        return nodes.difference(vacated, roster.left(), {self._node})

    def _release(self) -> None:
        """Let others have the slot at once; called when this process ends without `shutdown`."""
        seat, self._keeper.seat = self._keeper.seat, None
        if seat is not None and not self._is_done and self._application is not None:
            with contextlib.suppress(DistError):
                roster = self._application.roster
                vacate(roster, self._application.ledger, seat, "its agent has left", seat.reporter)
                roster.leave(self._node)
                if not self._others(roster):
                    self._endpoint.clear()


def create_rendezvous(parameters: RendezvousParameters) -> SlotRendezvous:
    """The rendezvous of this node, from torchrun's arguments.

    Raises:
        ConfigError: `--rdzv-conf` holds something impossible.
        RendezvousConnectionError: this node is told to serve the store, and cannot; or etcd does not answer.
    """
    prepare()
    policy = policy_from(parameters.config, parameters.min_nodes, parameters.max_nodes)
    is_etcd = parameters.endpoint.startswith(SCHEME)
    endpoint = open_etcd(parameters) if is_etcd else open_served(parameters, policy.join_timeout_s)
    return SlotRendezvous(endpoint, policy, parameters.run_id)
