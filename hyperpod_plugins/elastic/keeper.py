"""The thread of an agent that keeps its slot, and sees to it that vacant ones become known."""

import math
import os
import signal
import threading
import time

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.utils.logging import get_logger

from hyperpod_plugins.elastic.control import Controller
from hyperpod_plugins.elastic.endpoint import Endpoint
from hyperpod_plugins.elastic.inherited import Brood, Failed
from hyperpod_plugins.elastic.joining import takes_part, world_or_none
from hyperpod_plugins.elastic.ledger import RESTART_KEY, Ledger
from hyperpod_plugins.elastic.roster import Closing, Roster, name_of_round
from hyperpod_plugins.elastic.slots import Claim, Holding, Pulse, Seat, SlotPolicy, watched
from hyperpod_plugins.elastic.succession import can_absorb, end_unasked, renew, vacate

logger = get_logger(__name__)
_CUT_OFF_BEATS = 4
"""After how many times the silence that costs a node its slot a node that hears nothing may end, at the earliest."""
_REPORT_S = 10
"""How often the same trouble is reported."""
MALFORMED = (ValueError, TypeError, KeyError, IndexError, RecursionError)
"""What parsing raises for a value that no agent has written."""
_GRACE_S = 5.0


class Keeper:
    """Beats, looks at the beats of others, and listens to what concerns this node."""

    def __init__(self, node: str, endpoint: Endpoint, policy: SlotPolicy, run_id: str) -> None:
        """Nothing happens before `start`."""
        self.node = node
        self.seat: Seat | None = None
        self.error: Exception | None = None
        """Why the store cannot be reached any more."""
        self._endpoint = endpoint
        self._policy = policy
        self._run_id = run_id
        self._pulse = Pulse(policy.max_missed_beats)
        self._dead_end: Seat | None = None
        self._brood = Brood()
        self._failed: Failed | None = None
        self._controller: Controller | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hyperpod-slots", daemon=True)
        self._num_looks = 0
        self._next_report_s = 0.0
        self.number = 0
        """The round that is running, or about to begin, as of the last look."""
        self.closing: Closing | None = None
        """Why the job has ended, as of the last look."""
        self.ended_without_this_node = False
        """Whether it came to a good end while the workers of this node waited to be taken in, as of the last look."""

    def start(self) -> None:
        """Begin to beat."""
        self._roster = Roster(self._endpoint.connect())
        self._roster.beat(self.node)
        self._turn_to(self._roster.round())
        if self._endpoint.takes_requests:
            try:
                self._controller = Controller(self._endpoint.job(self._run_id))
            except OSError as error:
                logger.warning("nobody can ask this job for anything, for its ticket cannot be written: %s", error)
        self._thread.start()
        if not self._endpoint.answers_in_time:
            threading.Thread(target=self._end_when_cut_off, name="hyperpod-cut-off", daemon=True).start()

    def stop(self) -> None:
        """Beat no more."""
        self._end.set()
        self._brood.wake()
        if self._thread.is_alive():
            self._thread.join(2 * self._policy.beat_s)
        if self._controller is not None:
            self._controller.close()

    def is_lost(self, node: str) -> bool:
        """Whether another node has fallen silent."""
        return node != self.node and self._pulse.is_lost(node)

    def failure(self, seat: Seat) -> Failed | None:
        """The first of the workers of a seat to fail, as far as that is known."""
        return self._failed if self._failed is not None and self._failed.seat is seat else None

    @property
    def must_restart(self) -> bool:
        """Whether the workers of this node are to end, and the node to ask for a slot again."""
        return self.seat is not None and (self.error is not None or self._dead_end is self.seat)

    def _run(self) -> None:
        try:
            while not self._end.is_set():
                self._watch(time.monotonic() + self._policy.beat_s)
                try:
                    self._look()
                except MALFORMED as error:
                    self._report_malformed(error)
                self._num_looks += 1
        except (DistError, RendezvousConnectionError) as error:
            self.error = error

    def _report_malformed(self, error: Exception) -> None:
        """Say, once in a while, that somebody has written what no agent writes; the job goes on as before."""
        if time.monotonic() >= self._next_report_s:
            self._next_report_s = time.monotonic() + _REPORT_S
            logger.error("a value in the job's store is none that an agent writes, and is ignored: %s", error)

    def _end_when_cut_off(self) -> None:
        """End this node when the store does not answer any more: a request would wait until TCP gives up.

        Seconds are counted, not measured, so that a process that was stopped for a while is not taken for cut off.
        """
        silence_s = self._policy.beat_s * max(1.0, self._policy.max_missed_beats)
        limit_s = math.ceil(max(self._policy.answer_s, _CUT_OFF_BEATS * silence_s))
        num_looks, silent_s = -1, 0
        while self.error is None and not self._end.wait(1.0):
            if num_looks != self._num_looks and silent_s >= _REPORT_S:
                logger.warning("the store answers again after %d s, and this node goes on", silent_s)
            silent_s = silent_s + 1 if num_looks == self._num_looks else 0
            num_looks = self._num_looks
            if silent_s and silent_s % _REPORT_S == 0:
                logger.warning(
                    "the store has not answered for %d s: its machine may be frozen, or this one cut off. This node "
                    "waits for it, for %d s at most (read_timeout of --rdzv-conf)",
                    *(silent_s, limit_s),
                )
            if silent_s >= limit_s:
                logger.error("the store has not answered for %d s: this node is cut off, and ends", silent_s)
                os.kill(os.getpid(), signal.SIGTERM)
                if not self._end.wait(_GRACE_S):  # the main thread waits for the store, too
                    self._brood.kill_all()
                    os._exit(1)

    def _watch(self, until_s: float) -> None:
        """Spend the time until the next look on the workers, where they are torchrun's."""
        while time.monotonic() < until_s and not self._end.is_set():
            failed = self._brood.watch(until_s)
            if failed is None:
                continue
            before = self.failure(failed.seat)
            if before is None and can_absorb(self._ledger):
                self._brood.doom()
            if before is None or not before.how:
                self._failed = failed

    def _look(self) -> None:
        roster, seat = self._roster, self.seat
        roster.beat(self.node)
        number = roster.round(at_least=self.number)
        if number != self.number:
            self._turn_to(number)
        self._endpoint.tend(number, roster)
        claims = roster.claims(number)
        holders = [claim.node for claim in claims or () if claim.holding in (Holding.HELD, Holding.STAYS)]
        nodes = roster.candidates(number) if claims is None else holders
        self._pulse.look(roster.beats(watched(nodes, self.node)))
        if claims is not None:
            self._clear(number, claims)
        if self._controller is not None:
            self._controller.heed(name_of_round(self._run_id, number), self._ledger)
        self.closing = closing = roster.closing()
        if seat is None:
            return
        is_over = (number > seat.number and self._is_overtaken(seat)) or (
            closing is not None and not closing.is_success
        )
        if closing is not None and closing.is_success and seat.ranks:
            self.ended_without_this_node = not any(takes_part(self._ledger, place) for place in seat.ranks)
            if self.ended_without_this_node and self._brood.adopt(seat):
                is_over = True
                self._brood.doom()
        if claims is not None and closing is None and not is_over and self._waits_in_vain(seat, claims):
            cause = "all nodes that trained are gone, and those that are left only waited"
            logger.warning("round %d ends: %s", number, cause)
            end_unasked(roster, self._ledger, number, cause)
        if is_over or (claims is not None and not self._keep(seat, claims[seat.slot])):
            self._dead_end = seat
        elif seat.ranks:
            self._serve(seat)

    def _is_overtaken(self, seat: Seat) -> bool:
        """Whether all are to begin again. Where some are done already, a node that wants to take part is too late."""
        end = self._roster.round_end(seat.number)
        if end is None or end.step >= 0:
            return end is not None
        claims = self._roster.claims(seat.number) or ()
        return not any(claim.holding.is_done for claim in claims)

    def _turn_to(self, number: int) -> None:
        self.number = number
        self._ledger = Ledger.of(name_of_round(self._run_id, number), self._endpoint.connect())

    def _clear(self, number: int, claims: tuple[Claim, ...]) -> None:
        """Vacate the slots of nodes that have fallen silent; one whose workers were done is not to come back."""
        for slot, claim in enumerate(claims):
            if claim.holding is Holding.STAYS and self.is_lost(claim.node):
                self._roster.swap(number, slot, claim, claim.become(Holding.DONE))
            if claim.holding is Holding.HELD and self.is_lost(claim.node):
                seat = Seat(number=number, slot=slot, num_slots=len(claims), claim=claim)
                cause = f"nothing is heard of the agent {claim.node}"
                if vacate(self._roster, self._ledger, seat, cause, f"agent {self.node}"):
                    logger.warning("slot %d is vacant: %s", slot, cause)

    def _waits_in_vain(self, seat: Seat, claims: tuple[Claim, ...]) -> bool:
        """Whether the workers of this node wait for others to take them in, and none of those is left."""
        held = {slot for slot, claim in enumerate(claims) if claim.holding is not Holding.VACANT}
        if not seat.ranks or len(held) == len(claims):
            return False
        world = world_or_none(self._ledger)
        return world is not None and not any(place // len(seat.ranks) in held for place in world.places)

    def _keep(self, seat: Seat, last: Claim) -> bool:
        """Whether the slot is still this node's; one that others took for lost is taken back."""
        if (last.node, last.number) != (seat.claim.node, seat.claim.number):
            if self.seat is seat:
                logger.warning("slot %d went to %s, for this node was silent for too long", seat.slot, last.node)
            return False
        if last.holding is Holding.VACANT and self.seat is seat:
            return self._roster.swap(seat.number, seat.slot, last, last.become(Holding.HELD))
        return True

    def _serve(self, seat: Seat) -> None:
        """Do what members ask of agents, where the agent is torchrun's; ours has done it by now."""
        self._brood.adopt(seat)
        for rank, incarnation in self._ledger.new_kills():
            if rank in seat.ranks and incarnation == seat.incarnation:
                self._brood.kill(seat, rank)
        if self._dead_end is not seat and self._ledger.find(RESTART_KEY) is not None:
            renew(self._roster, self._ledger, seat.number, self.node)
            self._brood.doom()
            self._dead_end = seat
