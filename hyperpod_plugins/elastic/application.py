"""How a node that wants a slot comes to one: look, decide (`slots.py`), act, until there is one."""

import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.utils.logging import get_logger

from hyperpod_plugins.elastic.endpoint import Endpoint
from hyperpod_plugins.elastic.joining import takes_part
from hyperpod_plugins.elastic.keeper import Keeper
from hyperpod_plugins.elastic.ledger import RESTART_KEY, Ledger
from hyperpod_plugins.elastic.roster import Roster, name_of_round
from hyperpod_plugins.elastic.slots import Claim, Decision, Holding, Seat, SlotPolicy, Step, View, founders, next_step
from hyperpod_plugins.elastic.succession import can_absorb, renew
from hyperpod_plugins.elastic.terms import terms_of

logger = get_logger(__name__)

_POLL_S = 0.1
_POLL_PER_NODE_S = 0.001
"""The same where there are many nodes, which share one store: 1,000 look once a second each."""


class Application:
    """One node's wish for a slot, round after round."""

    number: int
    """The round that the node wants to take part in."""
    ledger: Ledger
    """What the members of that round write down."""

    def __init__(self, keeper: Keeper, endpoint: Endpoint, policy: SlotPolicy, run_id: str) -> None:
        """Connect, and begin to beat.

        Raises:
            RendezvousConnectionError: nobody answers, or the endpoint serves another job.
        """
        self._keeper = keeper
        self._endpoint = endpoint
        self._policy = policy
        self._run_id = run_id
        self.roster = Roster(endpoint.connect())
        served = self.roster.job(run_id)
        if served != run_id:
            raise RendezvousConnectionError(
                f"{endpoint} serves the job {served!r}, not {run_id!r} (--rdzv-id). Choose "
                "another port with --rdzv-endpoint, for each job needs its own."
            )
        self._check_open(None)  # before others count on this node, or wait for it
        keeper.start()
        self._stand(self.roster.round())

    def find_seat(self, former: Seat | None) -> Seat:
        """Wait for a slot, and take it.

        Args:
            former: where workers of this node have run before.

        Raises:
            RendezvousTimeoutError: too few nodes came.
            RendezvousClosedError: the job has failed, or is nearly done.
            SystemExit: the job is done, and this node was not needed.
        """
        while True:
            self._check_open(former)
            number = self.roster.round(at_least=self.number)
            if number != self.number:
                self._stand(number)
            view = self._look(has_entered=former is not None and former.number == number)
            decision = next_step(view, self._policy)
            if decision.step is Step.WAIT:
                self._wait(view)
                continue
            seat = self._act(decision, view)
            if seat is not None:
                return seat

    def _stand(self, number: int) -> None:
        """Turn to a round, and say that this node wants to take part."""
        self.number = number
        self._stood_s, self._enough_s, self._is_spare = time.monotonic(), None, False
        self.ledger = Ledger.of(name_of_round(self._run_id, number), self._endpoint.connect())
        self._endpoint.tend(number, self.roster)
        self.roster.stand(number, self._keeper.node)

    def _look(self, *, has_entered: bool) -> View:
        claims = self.roster.claims(self.number)
        gone = set(self.roster.left()) if claims is None else set[str]()
        candidates = self.roster.candidates(self.number) if claims is None else ()
        here = tuple(name for name in candidates if not (name in gone or self._keeper.is_lost(name)))
        if self._enough_s is None and len(here) >= self._policy.min_nodes:
            self._enough_s = time.monotonic()
        can_absorb_others = claims is not None and can_absorb(self.ledger)
        return View(
            node=self._keeper.node,
            candidates=here,
            called_s=0.0 if self._enough_s is None else time.monotonic() - self._enough_s,
            are_all_back=claims is None and self._are_all_back(here, gone),
            claims=claims,
            has_entered=has_entered,
            can_absorb=can_absorb_others,
            has_trained=claims is not None and not can_absorb_others and self.ledger.was_armed,
            can_grow=claims is not None and terms_of(self.ledger) is not None,
            is_ending=claims is not None and self.ledger.find(RESTART_KEY) is not None,
        )

    def _are_all_back(self, here: Sequence[str], gone: AbstractSet[str]) -> bool:
        """Whether there is nobody to wait for, since all start again together."""
        end = self.roster.round_end(self.number - 1)
        if end is None or end.step < 0:
            return False
        before, waited_for = self.roster.claims(self.number - 1) or (), (Holding.HELD, Holding.STAYS)
        return all(claim.node in here or claim.node in gone for claim in before if claim.holding in waited_for)

    def _act(self, decision: Decision, view: View) -> Seat | None:
        """Do what was decided; a seat where that led to one."""
        claims, slot = view.claims or (), decision.slot
        match decision.step:
            case Step.ENTER:
                return self._seat(slot, claims[slot], claims)
            case Step.CLAIM:
                claim = claims[slot].next(self._keeper.node)
                if self.roster.swap(self.number, slot, claims[slot], claim):
                    return self._seat(slot, claim, claims)  # nobody was faster
            case Step.ADD:
                claim = Claim(node=self._keeper.node, number=1)
                if self.roster.add_slot(self.number, slot, claim):
                    return Seat(number=self.number, slot=slot, num_slots=slot + 1, claim=claim, is_new=True)
            case Step.PROPOSE:
                self.roster.settle(self.number, founders(view.candidates, self._policy))
            case Step.RENEW:
                renew(self.roster, self.ledger, self.number, self._keeper.node)
            case _:
                raise RendezvousClosedError("the workers of other nodes are done: a newcomer is in vain")
        return None

    def _seat(self, slot: int, claim: Claim, claims: tuple[Claim, ...]) -> Seat:
        predecessor = claims[slot].node if claim.number > 0 else ""
        return Seat(number=self.number, slot=slot, num_slots=len(claims), claim=claim, predecessor=predecessor)

    def _check_open(self, former: Seat | None) -> None:
        if self._keeper.error is not None:
            raise self._keeper.error
        closing = self.roster.closing()
        if closing is None:
            return
        claims = None if former is None else self.roster.claims(former.number)
        is_needed = former is not None and claims is not None and claims[former.slot].node == self._keeper.node
        if former is not None and former.ranks:
            ledger = Ledger.of(name_of_round(self._run_id, former.number), self._endpoint.connect())
            is_needed &= any(takes_part(ledger, place) for place in former.ranks)
        if closing.is_success and not is_needed:
            logger.warning("the job is done, and this node was not needed")
            raise SystemExit(0)  # torch 2.13 has an error for this case, and then stumbles over the missing result
        raise RendezvousClosedError(f"the job has ended: {closing.cause}")

    def _wait(self, view: View) -> None:
        waited_s = time.monotonic() - self._stood_s
        if view.claims is None and waited_s > self._policy.join_timeout_s:
            raise RendezvousTimeoutError(
                f"only {len(view.candidates)} of {self._policy.min_nodes} nodes came within {waited_s:.0f} s. Start "
                "the others, or allow more time with --rdzv-conf=join_timeout=SECONDS."
            )
        if view.claims is not None and not self._is_spare:
            self._is_spare = True
            logger.warning("all %d slots are held: this node waits as a spare", len(view.claims))
        time.sleep(max(_POLL_S, _POLL_PER_NODE_S * max(len(view.candidates), len(view.claims or ()))))
