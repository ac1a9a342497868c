"""Where the job stands while its processes come together: each survivor says where it stopped; newcomers read it."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hyperpod_plugins.elastic import Ledger
from hyperpod_plugins.elastic.membership import MembershipPolicy
from hyperpod_plugins.errors import PeerLost, RecoveryTimeout, StateLost

_POLL_S = 0.004


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """Where the job stands when all that have state have stopped."""

    step: int
    """Steps that all will have committed."""
    in_step: bool
    """Whether the trainer below waits in a step; it was outside of one otherwise, and so was everybody else."""
    trainer: bytes
    """State of one trainer that has committed the steps: of one in a step if there is one, for it has come furthest."""


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
        note = {
            "incarnation": self._incarnation,
            "committed": committed,
            "in_step": in_step,
            "is_described": bool(trainer),
        }
        ledger.put(f"stopped/{number}/{rank}", json.dumps(note).encode())
        if not in_step:
            ledger.put(f"outside/{number}", b"1")
        for old in self._told:
            ledger.forget(f"trainer/{old}/{rank}")
        self._told = [number]

    def wait(self, number: int | None, at_least: int, stopped: Callable[[int], None] | None) -> Halt:
        """Wait until every process that has state has stopped; see `Member.wait_for_stops`."""
        ledger, ranks = self._ledger, range(self._world_size)
        deadline_s = time.monotonic() + self._policy.replacement_timeout_s
        told = -1
        while time.monotonic() < deadline_s:
            here = ledger.generation(at_least=max(at_least, told)) if number is None else number
            if stopped is not None and here != told:
                stopped(here)
            told = here
            if number is not None and ledger.ended(number) is not None:
                raise PeerLost(f"generation {number} ended before it was formed")
            stops = self._stops_of(here)
            known = members_before(ledger, here)
            lost = {rank for rank in ranks if ledger.incarnation(rank) != known.get(rank, 0)}
            if len(lost) == self._world_size:
                raise StateLost("all processes were lost, and with them the training state and its snapshots")
            if stops and all(rank in stops or rank in lost for rank in ranks):
                step = max(each["committed"] for each in stops.values())
                best = [r for r, each in stops.items() if each["committed"] == step and each["is_described"]]
                outside, rank = min(((not stops[r]["in_step"], r) for r in best), default=(True, -1))
                trainer = ledger.find(f"trainer/{here}/{rank}")
                if trainer is not None:
                    return Halt(step=step, in_step=not outside, trainer=trainer)
            time.sleep(_POLL_S)
        raise RecoveryTimeout(
            f"rank {self._rank} waits for the state of the others, but they did not all stop within "
            f"{self._policy.replacement_timeout_s:.0f} s. Are some of them hanging?"
        )

    def _stops_of(self, number: int) -> dict[int, dict[str, Any]]:
        """Notes of those that have stopped and are still alive."""
        ledger = self._ledger
        notes = {rank: ledger.find(f"stopped/{number}/{rank}") for rank in range(self._world_size)}
        found = {rank: json.loads(note) for rank, note in notes.items() if note is not None}
        return {rank: note for rank, note in found.items() if ledger.incarnation(rank) == note["incarnation"]}


def has_stopped(ledger: Ledger, number: int, rank: int) -> bool:
    """Whether a rank has said where it stopped before generation `number`."""
    return ledger.find(f"stopped/{number}/{rank}") is not None


def members_before(ledger: Ledger, number: int) -> dict[int, int]:
    """Incarnations of the last generation that was formed before `number`; none where there were only founders."""
    for earlier in range(number - 1, 0, -1):
        plan = ledger.plan(earlier)
        if plan is not None:
            return {int(rank): each["incarnation"] for rank, each in plan.items()}
    return {}
