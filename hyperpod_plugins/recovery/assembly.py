"""How processes agree on the members of the next generation: each arrives, and the first plan that is complete counts."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

from hyperpod_plugins.elastic import Incident, Ledger
from hyperpod_plugins.elastic.ledger import GAVE_UP_KEY
from hyperpod_plugins.elastic.membership import Action, MembershipPolicy, View, next_action
from hyperpod_plugins.errors import PeerLost, RecoveryError, RecoveryTimeout
from hyperpod_plugins.recovery.assign import NO_STATE, Arrival
from hyperpod_plugins.recovery.halt import has_stopped, members_before

log = logging.getLogger(__name__)
_POLL_S = 0.004
_FAREWELL_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The members of a generation, as they arrived."""

    number: int
    arrivals: Mapping[int, Arrival]


class PeersOutside(PeerLost):
    """Another rank was not inside a step when the fault came, so nobody can go on within one."""

    def __init__(self, number: int) -> None:
        super().__init__(
            f"generation {number} cannot begin within a step, for another rank was outside of one. The strategy enters "
            "the loops again from the last committed step; a loop of your own must do the same."
        )
        self.number = number


class Assembly:
    """One process's way into generations."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        rank: int,
        world_size: int,
        policy: MembershipPolicy,
        patience_s: Callable[[], float],
    ) -> None:
        """Use `ledger`; a survivor that does not come within `patience_s()` seconds is taken for stuck."""
        self._ledger = ledger
        self._rank = rank
        self._world_size = world_size
        self._policy = policy
        self._patience_s = patience_s
        self._next_chase_s = 0.0

    def meet(self, number: int, arrival: Arrival, began_s: float) -> Generation | None:
        """Wait until the plan of a generation names this process; None if it ends before.

        Args:
            number: of the generation.
            arrival: what this process brings.
            began_s: when it began to wait, on the monotonic clock.

        Raises:
            RecoveryTimeout: somebody did not come in time.
            PeersOutside: this process waits in a step, and another one was outside.
            RecoveryError: another process has given up.
        """
        ledger, ranks = self._ledger, range(self._world_size)
        ledger.arrive(number, self._rank, arrival.to_dict())
        while True:
            if ledger.ended(number) is not None:
                return None
            plan = ledger.plan(number)
            if plan is None:
                self._chase(number, time.monotonic() - began_s)
                if (given_up := ledger.find(GAVE_UP_KEY)) is not None:
                    self._follow(Incident.from_json(given_up))
                if arrival.in_step and arrival.has_state and ledger.find(f"outside/{number}") is not None:
                    gone = replace(arrival, incarnation=NO_STATE)  # it comes again, and as another
                    ledger.arrive(number, self._rank, gone.to_dict())
                    raise PeersOutside(number)
                expected = dict(zip(ranks, ledger.incarnations(ranks), strict=True))
                arrived = ledger.arrivals(number, ranks)
                view = View(
                    expected=expected,
                    arrived={rank: each["incarnation"] for rank, each in arrived.items()},
                    waited_s=time.monotonic() - began_s,
                )
                action = next_action(view, self._policy)
                if action is Action.FORM:
                    plan = ledger.propose(number, {str(rank): arrived[rank] for rank in ranks})
                elif action is Action.GIVE_UP:
                    raise RecoveryTimeout(
                        f"generation {number} could not be formed within {self._policy.replacement_timeout_s:.0f} s: "
                        f"nobody came for the ranks {list(view.missing)}. See why their agents could not start a "
                        "process, or allow more time with replacement_timeout_s."
                    )
            if plan is not None:
                arrivals = {int(rank): Arrival.from_dict(each) for rank, each in plan.items()}
                mine = arrivals[self._rank]
                if (mine.incarnation, mine.committed) == (arrival.incarnation, arrival.committed):
                    return Generation(number=number, arrivals=arrivals)
                cause = "the plan names a process as it was before"
                ledger.end(number, Incident(kind="request", cause=cause, reporter=f"rank {self._rank}"))
                return None
            time.sleep(_POLL_S)

    def _follow(self, giver: Incident) -> NoReturn:
        """End after the process that gave up, so that its own error is the one that the launcher shows."""
        deadline_s = time.monotonic() + _FAREWELL_S
        while self._ledger.exit_of(giver.rank, giver.incarnation) is None and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        raise RecoveryError(f"the job has given up: {giver}")

    def _chase(self, number: int, waited_s: float) -> None:
        """Ask for the end of survivors that do not come to be repaired: stopped, or stuck where nothing wakes them."""
        limit_s, ledger = self._patience_s(), self._ledger
        if waited_s < limit_s or time.monotonic() < self._next_chase_s:
            return
        self._next_chase_s = time.monotonic() + limit_s
        before = members_before(ledger, number)
        arrived = ledger.arrivals(number, range(self._world_size))
        for rank in range(self._world_size):
            incarnation = ledger.incarnation(rank)
            is_survivor = incarnation == before.get(rank, 0)
            if is_survivor and rank not in arrived and not has_stopped(ledger, number, rank):
                log.warning("rank %d does not come to be repaired within %.0f s: it is replaced", rank, limit_s)
                ledger.ask_to_kill(rank, incarnation)
