"""Where the job stands while its processes come together: each survivor says where it stopped; newcomers read it."""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass

from hyperpod_plugins.elastic import Ledger
from hyperpod_plugins.elastic.membership import MembershipPolicy
from hyperpod_plugins.errors import PeerLost, RecoveryTimeout, StateLost
from hyperpod_plugins.recovery.assign import NO_STATE
from hyperpod_plugins.recovery.detect import BEATS_MISSED_S, Beat, BeatAges
from hyperpod_plugins.recovery.pace import pause_s, turn_s
from hyperpod_plugins.recovery.snapshot import Snapshots
from hyperpod_plugins.recovery.worlds import Worlds

log = logging.getLogger(__name__)
_OTHERS_S = 30.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """Where the job stands when all that have state have stopped."""

    step: int
    """Steps that all will have committed."""
    in_step: bool
    """Whether the trainer below waits in a step; it was outside of one otherwise, and so was everybody else."""
    trainer: bytes
    """State of one trainer that has committed the steps: of one in a step if there is one, for it has come furthest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What one process says when it has stopped."""

    incarnation: int
    committed: int
    in_step: bool
    is_described: bool
    """Whether it has left the state of its trainer, too."""
    part: int = 0
    """Outside of steps: place of the part of the program in which it was, in the order of those that follow a step."""


class Survivors:
    """Ranks that the others wait for, to be repaired together: which of them get more time, and which are replaced."""

    def __init__(self, ledger: Ledger, *, patience_s: Callable[[], float], outside_s: float) -> None:
        """Use `ledger` in the thread that waits.

        Args:
            ledger: a connection of one's own.
            patience_s: says after how many seconds a rank that does not come is stuck, unless it says that it is busy.
            outside_s: seconds after which it is stuck, whatever it says.
        """
        self._ledger = ledger
        self.patience_s = patience_s
        self._outside_s = outside_s
        self._ages = BeatAges()
        self._ended = set[tuple[int, int]]()

    def busy(self, awaited: Mapping[int, int], waited_s: float) -> set[int]:
        """Places of those that say each second that they are in code outside of a step, such as a save.

        Silence is counted from the first time that this is asked.

        Args:
            awaited: number of the process in each place.
            waited_s: for how long, in seconds.
        """
        if not awaited or waited_s > self._outside_s:
            return set()
        beats = {place: Beat.from_dict(each) for place, each in self._ledger.beats(list(awaited)).items()}
        silent_s = self._ages.look(beats, time.monotonic())
        limit_s = max(self.patience_s(), BEATS_MISSED_S)
        return {
            place
            for place, beat in beats.items()
            if beat.is_outside and beat.is_alive(awaited[place], silent_s[place], limit_s)
        }

    def end_stuck(self, number: int, awaited: Mapping[int, int], waited_s: float) -> None:
        """Ask for the end of those that do not come, once each: stopped, or stuck where nothing wakes them.

        Args:
            number: of the generation that is to be formed.
            awaited: number of the process in each place, without those that are busy.
            waited_s: for how long, in seconds.
        """
        if waited_s <= self.patience_s():
            return
        for place, incarnation in awaited.items():
            if (place, incarnation) in self._ended or has_stopped(self._ledger, number, place):
                continue
            self._ended.add((place, incarnation))
            log.warning(
                "the process in place %d does not come to be repaired within %.0f s: it is replaced", place, waited_s
            )
            self._ledger.ask_to_kill(place, incarnation)


class Stops:
    """What one process says of where it stopped, and how it learns that of the others."""

    def __init__(
        self,
        ledger: Ledger,
        worlds: Worlds,
        *,
        place: int,
        incarnation: int,
        policy: MembershipPolicy,
        survivors: Survivors,
    ) -> None:
        """Use `ledger` and `survivors` in the thread that waits."""
        self._ledger = ledger
        self._worlds = worlds
        self._place = place
        self._incarnation = incarnation
        self._policy = policy
        self._survivors = survivors
        self._told: list[int] = []

    def tell(self, number: int, *, committed: int, in_step: bool, trainer: bytes, part: int = 0) -> None:
        """Say once, before arriving in generation `number`, where this process is; `trainer` may be empty."""
        if number in self._told:
            return
        ledger, place = self._ledger, self._place
        if trainer:
            ledger.put(f"trainer/{number}/{place}", trainer)
        note = Note(
            incarnation=self._incarnation,
            committed=committed,
            in_step=in_step,
            is_described=bool(trainer),
            part=part,
        )
        ledger.put(_note(number, place), json.dumps(asdict(note)).encode())
        ledger.count(f"stopped/{number}", 1)
        if not in_step:
            ledger.put(f"outside/{number}", b"1")
        for old in self._told:
            ledger.forget(f"trainer/{old}/{place}")
        self._told = [number]

    def wait(
        self,
        number: int | None,
        at_least: int,
        stopped: Callable[[int], None] | None,
        snapshots: Snapshots | None = None,
    ) -> Halt:
        """Wait until every process that has state has stopped; see `Member.wait_for_stops`."""
        ledger, places, rank = self._ledger, self._worlds.now.places, 0
        began_s = time.monotonic()
        here, look_s = -1, 0.0
        known: Mapping[int, int] = {}
        seen: tuple[int, int, AbstractSet[int]] | None = None
        given_up = set[int]()
        limit_s = self._policy.replacement_timeout_s
        is_last_look = False
        while not is_last_look:
            waited_s = time.monotonic() - began_s
            is_last_look = waited_s >= limit_s
            former, here = here, ledger.generation(at_least=max(at_least, here)) if number is None else number
            if here != former:
                if stopped is not None:
                    stopped(here)
                places = self._worlds.at(here).places
                rank = places.index(self._place) if self._place in places else len(places)
                known, look_s = members_before(ledger, here), waited_s + turn_s(rank, 1)
            if number is not None and ledger.ended(number) is not None:
                raise PeerLost(f"generation {number} ended before it was formed")
            incarnations = dict(zip(places, ledger.incarnations(places), strict=True))
            lost = {place for place in places if incarnations[place] != known.get(place, 0)} | given_up
            if len(lost) == len(places):
                cause = "all processes were lost, and with them the training state and its snapshots"
                return self._without_survivors(here, places, snapshots, cause)
            # As in an assembly, a count tells whether it may be worth while to read what each has said.
            news = here, ledger.count(f"stopped/{here}"), lost
            if is_last_look or waited_s >= look_s or (news != seen and news[1] + len(lost) >= len(places)):
                halt = self._look(here, incarnations, lost, snapshots)
                if halt is not None:
                    return halt
                silent = self._silent(here, incarnations, lost)
                try:
                    self._worlds.go_on_without(here, silent, waited_s, f"rank {rank}")
                except StateLost:  # all are to start again; where they meet next they save what they hold
                    given_up |= set(silent)
                busy = self._survivors.busy(silent, waited_s)
                if busy:
                    limit_s, is_last_look = waited_s + self._policy.replacement_timeout_s, False
                stuck = {place: each for place, each in silent.items() if place not in busy}
                self._survivors.end_stuck(here, stuck, waited_s)
                seen, look_s = news, waited_s + turn_s(rank, news[1])
            time.sleep(pause_s(rank, len(places), waited_s))
        raise RecoveryTimeout(
            f"rank {rank} waits for the state of the others, but they did not all stop within "
            f"{limit_s:.0f} s. Are some of them hanging?"
        )

    def trainer_of(self, number: int, place: int) -> bytes | None:
        """State of the trainer that a process has left before generation `number`."""
        return self._ledger.find(f"trainer/{number}/{place}")

    def _silent(self, number: int, incarnations: Mapping[int, int], lost: AbstractSet[int]) -> dict[int, int]:
        """Those that have said nothing, and whose loss nobody has counted: perhaps their node is gone."""
        said = self._ledger.find_all([_note(number, place) for place in incarnations])
        return {p: n for p, n in incarnations.items() if p not in lost and _note(number, p) not in said}

    def _without_survivors(self, number: int, places: Sequence[int], snapshots: Snapshots | None, cause: str) -> Halt:
        """Where to begin when all processes are new: with a snapshot that outlived those before, of whatever rank.

        It brings this process to where the others are; there they see to which step all of them return.

        Raises:
            StateLost: there is none, for the reason `cause`.
        """
        newest = None if snapshots is None else snapshots.newest
        names = [f"snapshot/{number}/{place}" for place in places]
        self._ledger.put(f"snapshot/{number}/{self._place}", b"" if newest is None else newest.trainer)
        if newest is not None:
            return Halt(step=newest.step, in_step=True, trainer=newest.trainer)
        deadline_s = time.monotonic() + _OTHERS_S
        while snapshots is not None and time.monotonic() < deadline_s:
            said = self._ledger.find_all(names)
            trainer = next(filter(None, said.values()), b"")
            if trainer:
                return Halt(step=0, in_step=True, trainer=trainer)
            if len(said) == len(names):
                break
            time.sleep(_POLL_S)
        raise StateLost(cause)

    def _look(
        self, number: int, incarnations: Mapping[int, int], lost: AbstractSet[int], snapshots: Snapshots | None
    ) -> Halt | None:
        """Read what each has said, if all have that are not lost."""
        ledger, places = self._ledger, list(incarnations)
        if not ledger.has_all([_note(number, place) for place in places if place not in lost]):
            return None
        found = ledger.find_all([_note(number, place) for place in places])
        said = {each: Note(**json.loads(found[_note(number, each)])) for each in places if _note(number, each) in found}
        notes = {place: note for place, note in said.items() if note.incarnation == incarnations[place]}  # still alive
        if any(place not in notes and place not in lost for place in places):
            return None
        if notes and all(note.committed == NO_STATE for note in notes.values()):
            cause = "those that are left are new, and all that had the training state were lost"
            return self._without_survivors(number, places, snapshots, cause)
        place = furthest(notes)
        trainer = None if place is None else self.trainer_of(number, place)
        if place is None or trainer is None:
            return None
        return Halt(step=notes[place].committed, in_step=notes[place].in_step, trainer=trainer)


def furthest(notes: Mapping[int, Note]) -> int | None:
    """Place whose trainer the others go on from: of those that have committed most, one in a step if there is one.

    Otherwise one that has come to the last part: what it had ended is not there to be run again.
    """
    step = max((note.committed for note in notes.values()), default=NO_STATE)
    best = [place for place, note in notes.items() if note.committed == step and note.is_described]
    return min(best, key=lambda place: (not notes[place].in_step, -notes[place].part, place), default=None)


def has_stopped(ledger: Ledger, number: int, place: int) -> bool:
    """Whether a process has said where it stopped before generation `number`."""
    return ledger.find(_note(number, place)) is not None


def is_outside(ledger: Ledger, number: int) -> bool:
    """Whether one of those that have stopped before generation `number` was not in a step."""
    return ledger.find(f"outside/{number}") is not None


def members_before(ledger: Ledger, number: int) -> dict[int, int]:
    """Incarnations of the last generation that was formed before `number`; none where there were only founders."""
    for earlier in range(number - 1, 0, -1):
        plan = ledger.plan(earlier)
        if plan is not None:
            incarnations = {text: json.loads(text)["incarnation"] for text in set(plan.values())}
            return {place: incarnations[text] for place, text in plan.items()}
    return {}


def _note(number: int, place: int) -> str:
    return f"stopped/{number}/{place}"
