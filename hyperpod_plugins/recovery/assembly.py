"""How processes agree on the members of the next generation: each arrives, and the first plan that is complete counts.

[Note: who looks] To see whether all are there, somebody must read what each has said. With thousands of processes not
all of them can, so each arrival is counted, and the one that finds the count full looks. The count says no more
than that: it is too high where a process was replaced after it had arrived, and too low for the moment between
an arrival and its count. Should nobody look who ought to (it died, it hangs), others do: whatever the count, a few
of all those that wait look each second. Everybody else waits for the plan; see `doorbell.py`.
"""

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from hyperpod_plugins.elastic import Incident, Ledger
from hyperpod_plugins.elastic.ledger import GAVE_UP_KEY
from hyperpod_plugins.elastic.membership import Action, MembershipPolicy, View, next_action
from hyperpod_plugins.elastic.world import World
from hyperpod_plugins.errors import PeerLost, RecoveryError, RecoveryTimeout, StateLost
from hyperpod_plugins.recovery.assign import NO_STATE, Arrival
from hyperpod_plugins.recovery.doorbell import Doorbell
from hyperpod_plugins.recovery.farewell import follow
from hyperpod_plugins.recovery.halt import Survivors, has_stopped, is_outside, members_before
from hyperpod_plugins.recovery.pace import pause_s, turn_s
from hyperpod_plugins.recovery.worlds import Worlds


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The members of a generation, as they arrived, by rank."""

    number: int
    arrivals: Mapping[int, Arrival]


class NobodyCame(RecoveryTimeout):
    """Those that are left know of each other, and that the others do not come."""

    def __init__(self, formed: Generation, cause: str, *, starts_again: bool) -> None:
        super().__init__(cause)
        self.formed = formed
        """Of some ranks only, whose groups have no connections."""
        self.starts_again = starts_again
        """Whether all processes start again with those that are left; the job ends otherwise."""


class PeersOutside(PeerLost):
    """Another rank was not inside a step when the fault came, so nobody can go on within one."""

    def __init__(self, number: int) -> None:
        super().__init__(
            f"generation {number} cannot begin within a step, for another rank was outside of one. The strategy enters "
            "the loops again from the last committed step; a loop of your own must do the same."
        )
        self.number = number


class WorldChanged(PeersOutside):
    """The next generation is of another world: ranks, sizes and shares of the data are others in it."""

    def __init__(self, number: int, world: World) -> None:
        super().__init__(number)
        self.world = world


class Assembly:
    """One process's way into generations."""

    def __init__(
        self,
        ledger: Ledger,
        worlds: Worlds,
        doorbell: Doorbell,
        *,
        place: int,
        policy: MembershipPolicy,
        survivors: Survivors,
    ) -> None:
        """Use `ledger` and `survivors` in the thread that waits."""
        self._ledger = ledger
        self._worlds = worlds
        self._doorbell = doorbell
        self._place = place
        self._policy = policy
        self._survivors = survivors
        self._granted_s = 0.0  # so long a wait is no reason to give up, for some were busy

    def meet(self, number: int, arrival: Arrival, began_s: float) -> Generation | None:
        """Wait until the plan of a generation names this process; None if it ends before.

        Args:
            number: of the generation, which is formed for the present world.
            arrival: what this process brings.
            began_s: when it began to wait, on the monotonic clock.

        Raises:
            NobodyCame: the others did not come in time.
            PeersOutside: this process waits in a step, and another one was outside.
            RecoveryError: another process has given up, or has taken this one's place.
        """
        ledger, size, rank = self._ledger, self._worlds.now.size, self._rank
        if ledger.incarnation(self._place) > arrival.incarnation:
            raise self._replaced()
        self._granted_s = 0.0
        count = ledger.arrive(number, self._place, to_text(arrival))
        look_s = time.monotonic() if count >= size else time.monotonic() + turn_s(rank, count)
        while ledger.ended(number) is None:
            plan = ledger.plan(number)
            now_s = time.monotonic()
            if plan is None:
                self._heed(number, arrival)
                if now_s >= look_s or now_s - began_s > self._policy.replacement_timeout_s:
                    plan = self._look(number, now_s - began_s)
                    look_s = now_s + turn_s(rank, ledger.num_arrived(number))
            if plan is not None:
                return self._accept(number, arrival, plan)
            self._doorbell.wait(number, pause_s(rank, size, now_s - began_s))
        ledger.void_plan(number)
        return None

    def _heed(self, number: int, arrival: Arrival) -> None:
        """Leave if there will be no generation, or none that begins in a step."""
        ledger = self._ledger
        if ledger.find(GAVE_UP_KEY) is not None:
            follow(ledger)
        if arrival.in_step and arrival.has_state and is_outside(ledger, number):
            # It comes again, and as another.
            ledger.withdraw(number, self._place, to_text(replace(arrival, incarnation=NO_STATE)))
            raise PeersOutside(number)

    def _look(self, number: int, waited_s: float) -> Mapping[int, str] | None:
        """Read who is there, if that may be all, or if it is time to do without somebody; the plan if all are."""
        ledger, places = self._ledger, self._worlds.now.places
        is_late = self._worlds.may_change or waited_s > min(
            self._policy.replacement_timeout_s, self._survivors.patience_s()
        )
        if not is_late and not ledger.all_arrived(number, places):
            return None
        expected = dict(zip(places, ledger.incarnations(places), strict=True))
        said = ledger.arrivals(number, places)
        arrived = {place: each.incarnation for place, each in from_texts(said).items()}
        view = View(expected=expected, arrived=arrived, waited_s=waited_s)
        survivors = self._missing_survivors(number, view)
        busy = self._survivors.busy(survivors, waited_s)
        if busy:
            self._granted_s = waited_s + self._policy.replacement_timeout_s
        match Action.WAIT if view.missing and waited_s <= self._granted_s else next_action(view, self._policy):
            case Action.FORM:
                return ledger.propose(number, said)
            case Action.GIVE_UP:
                cause = (
                    f"generation {number} could not be formed within {self._policy.replacement_timeout_s:.0f} s: "
                    f"nobody came for the ranks {self._ranks_of(view.missing)}. See why their agents could not start a "
                    "process, or allow more time with replacement_timeout_s."
                )
                missing = {place: view.expected[place] for place in view.missing}
                cause += self._worlds.what_would_fit(number, missing)
                return self._propose_end(number, view, said, cause, starts_again=False)
            case Action.WAIT:
                missing = {place: view.expected[place] for place in view.missing}
                try:
                    goes_on = self._worlds.go_on_without(number, missing, waited_s, f"rank {self._rank}")
                except StateLost as lost:
                    return self._propose_end(number, view, said, str(lost), starts_again=True)
                if not goes_on:
                    stuck = {place: each for place, each in survivors.items() if place not in busy}
                    self._survivors.end_stuck(number, stuck, waited_s)
                return None

    def _propose_end(
        self, number: int, view: View, said: Mapping[int, str], cause: str, *, starts_again: bool
    ) -> Mapping[int, str] | None:
        """Propose a generation of those that are here, which save what they hold and go apart."""
        there = {place: each for place, each in from_texts(said).items() if place not in view.missing}
        ends = {place: replace(each, ends=cause, starts_again=starts_again) for place, each in there.items()}
        return self._ledger.propose(number, {place: to_text(each) for place, each in ends.items()})

    def _accept(self, number: int, arrival: Arrival, plan: Mapping[int, str]) -> Generation | None:
        """Take part in a plan, unless it names what this process was before it came again."""
        world, brought = self._worlds.now, from_texts(plan)
        if self._place not in brought:
            raise RecoveryError("the job ends: the others have waited for this process for too long")
        mine = brought[self._place]
        if (mine.incarnation, mine.committed) == (arrival.incarnation, arrival.committed):
            arrivals = {rank: brought[place] for rank, place in enumerate(world.places) if place in brought}
            formed = Generation(number=number, arrivals=arrivals)
            if len(arrivals) < world.size:
                raise NobodyCame(formed, mine.ends, starts_again=mine.starts_again)
            self._look_for_losses(formed)
            return formed
        if mine.incarnation > arrival.incarnation:
            raise self._replaced()
        cause = "the plan names a process as it was before"
        self._ledger.end(number, Incident(kind="request", cause=cause, reporter=f"rank {self._rank}"))
        return None

    def _look_for_losses(self, formed: Generation) -> None:
        """End a generation one of whose members was lost while its plan was made.

        Its agent counts the loss before it looks for a plan, and this comes after the plan: one of the two must see it.
        """
        now = self._ledger.incarnations(self._worlds.now.places)
        if any(now[rank] != arrival.incarnation for rank, arrival in formed.arrivals.items()):
            cause = "a member was lost when it had just arrived"
            self._ledger.end(formed.number, Incident(kind="process", cause=cause, reporter=f"rank {self._rank}"))

    @property
    def _rank(self) -> int:
        rank = self._worlds.now.rank_of(self._place)
        assert rank is not None
        return rank

    def _ranks_of(self, places: Iterable[int]) -> list[int | None]:
        return [self._worlds.now.rank_of(place) for place in places]

    def _replaced(self) -> RecoveryError:
        return RecoveryError(
            f"another process has taken the place of rank {self._rank}, whose node was silent for too long. This one "
            "ends; nothing is to be done."
        )

    def _missing_survivors(self, number: int, view: View) -> dict[int, int]:
        """Those that are missing though they were not lost, and have not said where they stopped."""
        before, ledger = members_before(self._ledger, number) if view.missing else {}, self._ledger
        missing = {place: view.expected[place] for place in view.missing if place not in view.arrived}
        return {
            place: incarnation
            for place, incarnation in missing.items()
            if incarnation == before.get(place, 0) and not has_stopped(ledger, number, place)
        }


def to_text(arrival: Arrival) -> str:
    """For the ledger; what is equal has the same text."""
    return json.dumps(arrival.to_dict())


def from_texts(texts: Mapping[int, str]) -> dict[int, Arrival]:
    """Inverse of `to_text`; most are equal, and those are read once."""
    known = {text: Arrival.from_dict(json.loads(text)) for text in set(texts.values())}
    return {place: known[text] for place, text in texts.items()}
