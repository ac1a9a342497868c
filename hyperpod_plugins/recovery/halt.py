"""Where the job stands while its processes come together: each survivor says where it stopped; newcomers read it."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass

from hyperpod_plugins.elastic import Ledger
from hyperpod_plugins.elastic.membership import MembershipPolicy
from hyperpod_plugins.errors import PeerLost, RecoveryTimeout, StateLost
from hyperpod_plugins.recovery.assign import NO_STATE
from hyperpod_plugins.recovery.pace import pause_s, turn_s


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


class Stops:
    """What one process says of where it stopped, and how it learns that of the others."""

    def __init__(
        self, ledger: Ledger, *, rank: int, incarnation: int, world_size: int, policy: MembershipPolicy
    ) -> None:
        self._ledger = ledger
        self._rank = rank
        self._incarnation = incarnation
        self._world_size = world_size
        self._policy = policy
        self._told: list[int] = []

    def tell(self, number: int, *, committed: int, in_step: bool, trainer: bytes) -> None:
        """Say once, before arriving in generation `number`, where this process is; `trainer` may be empty."""
        if number in self._told:
            return
        ledger, rank = self._ledger, self._rank
        if trainer:
            ledger.put(f"trainer/{number}/{rank}", trainer)
        note = Note(incarnation=self._incarnation, committed=committed, in_step=in_step, is_described=bool(trainer))
        ledger.put(_note(number, rank), json.dumps(asdict(note)).encode())
        ledger.count(f"stopped/{number}", 1)
        if not in_step:
            ledger.put(f"outside/{number}", b"1")
        for old in self._told:
            ledger.forget(f"trainer/{old}/{rank}")
        self._told = [number]

    def wait(self, number: int | None, at_least: int, stopped: Callable[[int], None] | None) -> Halt:
        """Wait until every process that has state has stopped; see `Member.wait_for_stops`."""
        ledger, ranks = self._ledger, range(self._world_size)
        began_s = time.monotonic()
        here, look_s = -1, 0.0
        known: Mapping[int, int] = {}
        seen: tuple[int, int, AbstractSet[int]] | None = None
        while (waited_s := time.monotonic() - began_s) < self._policy.replacement_timeout_s:
            former, here = here, ledger.generation(at_least=max(at_least, here)) if number is None else number
            if here != former:
                if stopped is not None:
                    stopped(here)
                known, look_s = members_before(ledger, here), waited_s + turn_s(self._rank, 1)
            if number is not None and ledger.ended(number) is not None:
                raise PeerLost(f"generation {number} ended before it was formed")
            incarnations = ledger.incarnations(ranks)
            lost = {rank for rank in ranks if incarnations[rank] != known.get(rank, 0)}
            if len(lost) == self._world_size:
                raise StateLost("all processes were lost, and with them the training state and its snapshots")
            # As in an assembly, a count tells whether it may be worth while to read what each has said.
            news = here, ledger.count(f"stopped/{here}"), lost
            if waited_s >= look_s or (news != seen and news[1] + len(lost) >= self._world_size):
                halt = self._look(here, incarnations, lost)
                if halt is not None:
                    return halt
                seen, look_s = news, waited_s + turn_s(self._rank, news[1])
            time.sleep(pause_s(self._rank, self._world_size, waited_s))
        raise RecoveryTimeout(
            f"rank {self._rank} waits for the state of the others, but they did not all stop within "
            f"{self._policy.replacement_timeout_s:.0f} s. Are some of them hanging?"
        )

    def trainer_of(self, number: int, rank: int) -> bytes | None:
        """State of the trainer that a rank has left before generation `number`."""
        return self._ledger.find(f"trainer/{number}/{rank}")

    def _look(self, number: int, incarnations: Sequence[int], lost: AbstractSet[int]) -> Halt | None:
        """Read what each has said, if all have that are not lost."""
        ledger, ranks = self._ledger, range(self._world_size)
        if not ledger.has_all([_note(number, rank) for rank in ranks if rank not in lost]):
            return None
        found = ledger.find_all([_note(number, rank) for rank in ranks])
        said = {rank: Note(**json.loads(found[_note(number, rank)])) for rank in ranks if _note(number, rank) in found}
        notes = {rank: note for rank, note in said.items() if note.incarnation == incarnations[rank]}  # still alive
        if any(rank not in notes and rank not in lost for rank in ranks):
            return None
        if notes and all(note.committed == NO_STATE for note in notes.values()):
            raise StateLost("those that are left are new, and all that had the training state were lost")
        rank = furthest(notes)
        trainer = None if rank is None else self.trainer_of(number, rank)
        if rank is None or trainer is None:
            return None
        return Halt(step=notes[rank].committed, in_step=notes[rank].in_step, trainer=trainer)


def furthest(notes: Mapping[int, Note]) -> int | None:
    """Rank whose trainer the others go on from: of those that have committed most, one in a step if there is one."""
    step = max((note.committed for note in notes.values()), default=NO_STATE)
    best = [rank for rank, note in notes.items() if note.committed == step and note.is_described]
    return min(best, key=lambda rank: (not notes[rank].in_step, rank), default=None)


def has_stopped(ledger: Ledger, number: int, rank: int) -> bool:
    """Whether a rank has said where it stopped before generation `number`."""
    return ledger.find(_note(number, rank)) is not None


def is_outside(ledger: Ledger, number: int) -> bool:
    """Whether one of those that have stopped before generation `number` was not in a step."""
    return ledger.find(f"outside/{number}") is not None


def members_before(ledger: Ledger, number: int) -> dict[int, int]:
    """Incarnations of the last generation that was formed before `number`; none where there were only founders."""
    for earlier in range(number - 1, 0, -1):
        plan = ledger.plan(earlier)
        if plan is not None:
            incarnations = {text: json.loads(text)["incarnation"] for text in set(plan.values())}
            return {rank: incarnations[text] for rank, text in plan.items()}
    return {}


def _note(number: int, rank: int) -> str:
    return f"stopped/{number}/{rank}"
