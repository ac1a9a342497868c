"""This process as a member of the job: what it tells the others, and what it hears from them while it computes."""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from hyperpod_plugins.comm import break_groups, breaker, reform, waiting
from hyperpod_plugins.elastic import Incident, Ledger
from hyperpod_plugins.elastic.incident import IncidentKind
from hyperpod_plugins.elastic.ledger import GAVE_UP_KEY
from hyperpod_plugins.elastic.membership import Action, MembershipPolicy, View, next_action
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.errors import PeerLost, RecoveryError, RecoveryTimeout, StateLost
from hyperpod_plugins.recovery.assign import NO_STATE, Arrival
from hyperpod_plugins.recovery.detect import Beat, HangPolicy, StepTimes, diagnose

log = logging.getLogger(__name__)
_POLL_S = 0.004
_REFORM_TIMEOUT_S = 20.0
_BEAT_S = 1.0
_FAREWELL_S = 10.0
_LISTEN_S = 365 * 86400.0  # the wait costs nothing, and torch warns of each one that times out


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The members of a generation, as they arrived."""

    number: int
    arrivals: Mapping[int, Arrival]


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """Where the job stands when all that have state have stopped."""

    step: int
    """Steps that all will have committed."""
    in_step: bool
    """Whether the trainer below waits in a step; it was outside of one otherwise, and so was everybody else."""
    trainer: bytes
    """State of one trainer that has committed the steps: of one in a step if there is one, for it has come furthest."""


class PeersOutside(PeerLost):
    """Another rank was not inside a step when the fault came, so nobody can go on within one."""

    def __init__(self, number: int) -> None:
        super().__init__(
            f"generation {number} cannot begin within a step, for another rank was outside of one. The strategy enters "
            "the loops again from the last committed step; a loop of your own must do the same."
        )
        self.number = number


class Member:
    """One process in one rank's place. A thread listens for the end of the generation and breaks the groups then."""

    def __init__(
        self,
        job: JobEnv,
        *,
        rank: int,
        world_size: int,
        policy: MembershipPolicy,
        hangs: HangPolicy,
    ) -> None:
        self.job = job
        self.rank = rank
        self.world_size = world_size
        self.policy = policy
        self.hangs = hangs
        self.step_times = StepTimes()
        self.generation = 0
        self.committed = NO_STATE
        self.place = "setting up"
        """Where the main thread is, in words; the others hear it once a second."""
        self.in_step = False
        """Whether that is inside a step."""
        self.ledger = Ledger.connect(job)
        self._reports = Ledger.connect(job)
        self._reporting = threading.Lock()
        self._told: Incident | None = None
        self._stops: list[int] = []
        self._next_chase_s = 0.0
        self._changed = threading.Condition()
        self._is_leaving = self._is_joining = False
        self._threads = [
            threading.Thread(target=target, name=f"hyperpod{target.__name__}", daemon=True)
            for target in (self._listen, self._tell)
        ]

    def start(self) -> None:
        """Begin to listen. A newcomer's groups stay detached until it has joined."""
        if self.job.is_newcomer:
            breaker.detach()
        breaker.when_broken(self._report)
        for thread in self._threads:
            thread.start()

    def leave(self) -> None:
        """Stop listening; the job goes on without this process's word, or has ended."""
        with self._changed:
            self._is_leaving = True
            self._changed.notify_all()
        breaker.forget(self._report)

    def fail(self, kind: IncidentKind, cause: str) -> None:
        """End the generation because of something that this rank did, and break its groups."""
        self._told = Incident(
            kind=kind, cause=cause, rank=self.rank, incarnation=self.job.incarnation, step=self.committed
        )
        break_groups(cause)

    def give_up(self, cause: str) -> None:
        """Tell the agents that nobody is to be replaced any more: the job ends with an error."""
        log.error("rank %d gives up: %s", self.rank, cause)
        mine = Incident(kind="exception", cause=cause, rank=self.rank, incarnation=self.job.incarnation)
        self.ledger.put(GAVE_UP_KEY, mine.to_json().encode())

    def _follow(self, giver: Incident) -> NoReturn:
        """End after the process that gave up, so that its own error is the one that the launcher shows."""
        deadline_s = time.monotonic() + _FAREWELL_S
        while self.ledger.exit_of(giver.rank, giver.incarnation) is None and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        raise RecoveryError(f"the job has given up: {giver}")

    def join_next(self, arrival: Arrival, stopped: Callable[[int], None]) -> Generation:
        """Wait for all members of the next generation, connect to them, and mend the groups.

        A member that is lost meanwhile makes everybody try again, with a higher number.

        Args:
            arrival: what this process brings.
            stopped: called with the number of each generation that is tried, before this process arrives there.

        Raises:
            RecoveryTimeout: somebody did not come in time.
            PeersOutside: this process waits in a step, and another one was outside.
            RecoveryError: another process has given up.
        """
        began_s = time.monotonic()
        self.in_step = False
        with self._changed:
            self._is_joining = True  # from here on an old generation's end is no news
        while True:
            number = self.ledger.generation(at_least=self.generation)
            stopped(number)
            formed = self._assemble(number, arrival, began_s)
            if formed is None:
                continue
            try:
                reform(number, store=self.meeting_store(), timeout_s=_REFORM_TIMEOUT_S)
            except PeerLost:
                self.generation = number
                self._report(breaker.cause or "")
                continue
            with self._changed:
                self.generation = number
                self._told, self._is_joining = None, False
                self._changed.notify_all()
            return formed

    def stop(self, number: int, *, in_step: bool, trainer: bytes) -> None:
        """Tell newcomers of a generation that this process has stopped, and what its trainer knew then.

        Newcomers wait for everybody's word, also for that of one that has no state, or none that can be described:
        such a one gives no bytes. What counts is what was said first.
        """
        if number in self._stops:
            return
        if trainer:
            self.ledger.put(f"trainer/{number}/{self.rank}", trainer)
        note = {
            "incarnation": self.job.incarnation,
            "committed": self.committed,
            "in_step": in_step,
            "is_described": bool(trainer),
        }
        self.ledger.put(f"stopped/{number}/{self.rank}", json.dumps(note).encode())
        if not in_step:
            self.ledger.put(f"outside/{number}", b"1")
        for old in self._stops:
            if old != number:
                self.ledger.forget(f"trainer/{old}/{self.rank}")
        self._stops = [number]

    def wait_for_stops(self, number: int | None = None, stopped: Callable[[int], None] | None = None) -> Halt:
        """Wait until every process that has state has stopped.

        Args:
            number: the generation that they are forming; None for the first that lasts.
            stopped: called with the number of each generation that is tried, where this process has stopped too.

        Returns:
            Where the job stands.

        Raises:
            RecoveryTimeout: they did not stop in time.
            PeerLost: the generation ended meanwhile (where `number` was given).
            StateLost: all processes are new, and none has state.
        """
        deadline_s = time.monotonic() + self.policy.replacement_timeout_s
        told = -1
        while time.monotonic() < deadline_s:
            here = self.ledger.generation(at_least=max(self.generation, told)) if number is None else number
            if stopped is not None and here != told:
                stopped(here)
            told = here
            if number is not None and self.ledger.ended(number) is not None:
                raise PeerLost(f"generation {number} ended before it was formed")
            stops = self._stops_of(here)
            known = self._members_before(here)
            lost = {r for r in range(self.world_size) if self.ledger.incarnation(r) != known.get(r, 0)}
            if len(lost) == self.world_size:
                cause = "all processes were lost, and with them the training state and its snapshots"
                self.give_up(cause)
                raise StateLost(f"{cause}. The job ends: start it again from the last persistent checkpoint.")
            if stops and all(rank in stops or rank in lost for rank in range(self.world_size)):
                step = max(each["committed"] for each in stops.values())
                best = [r for r, each in stops.items() if each["committed"] == step and each["is_described"]]
                outside, rank = min(((not stops[r]["in_step"], r) for r in best), default=(True, -1))
                trainer = self.ledger.find(f"trainer/{here}/{rank}")
                if trainer is not None:
                    return Halt(step=step, in_step=not outside, trainer=trainer)
            time.sleep(_POLL_S)
        raise RecoveryTimeout(
            f"rank {self.rank} waits for the state of the others, but they did not all stop within "
            f"{self.policy.replacement_timeout_s:.0f} s. Are some of them hanging?"
        )

    def _stops_of(self, number: int) -> dict[int, dict[str, Any]]:
        """Notes of those that have stopped and are still alive."""
        notes = {rank: self.ledger.find(f"stopped/{number}/{rank}") for rank in range(self.world_size)}
        found = {rank: json.loads(note) for rank, note in notes.items() if note is not None}
        return {rank: note for rank, note in found.items() if self.ledger.incarnation(rank) == note["incarnation"]}

    def _members_before(self, number: int) -> dict[int, int]:
        """Incarnations of the last generation that was formed before `number`; all founders where there was none."""
        for earlier in range(number - 1, 0, -1):
            plan = self.ledger.plan(earlier)
            if plan is not None:
                return {int(rank): each["incarnation"] for rank, each in plan.items()}
        return {}

    def meeting_store(self) -> Store:
        """Where members of a generation find each other."""
        return self.ledger.store("groups")

    def end_generation(self) -> Incident:
        """Make sure that the present generation has ended, and tell what ended it."""
        if self.committed == NO_STATE and self.generation == 0 and self.job.is_newcomer:
            return self.ledger.ended(0) or Incident(kind="request", cause="a newcomer joins")
        return self._end(self.generation, Incident(kind="collective", cause=breaker.cause or "", step=self.committed))

    def first_cause(self, incident: Incident, lost: Iterable[int]) -> Incident:
        """What an agent says of a process that is gone, rather than what a peer saw of it."""
        if incident.kind != "collective":
            return incident
        exits = [self.ledger.exit_of(rank, self.ledger.incarnation(rank) - 1) for rank in sorted(lost)]
        return next((replace(known, at_s=min(known.at_s, incident.at_s)) for known in exits if known), incident)

    def _assemble(self, number: int, arrival: Arrival, began_s: float) -> Generation | None:
        """Wait until the plan of a generation names this process; None if it ends before."""
        ranks = range(self.world_size)
        self.ledger.arrive(number, self.rank, arrival.to_dict())
        while True:
            if self.ledger.ended(number) is not None:
                return None
            plan = self.ledger.plan(number)
            if plan is None:
                self._chase(number, time.monotonic() - began_s)
                if (given_up := self.ledger.find(GAVE_UP_KEY)) is not None:
                    self._follow(Incident.from_json(given_up))
                if arrival.in_step and arrival.has_state and self.ledger.find(f"outside/{number}") is not None:
                    gone = replace(arrival, incarnation=NO_STATE)  # it comes again, and as another
                    self.ledger.arrive(number, self.rank, gone.to_dict())
                    raise PeersOutside(number)
                expected = dict(zip(ranks, self.ledger.incarnations(ranks), strict=True))
                arrived = self.ledger.arrivals(number, ranks)
                view = View(
                    expected=expected,
                    arrived={rank: each["incarnation"] for rank, each in arrived.items()},
                    waited_s=time.monotonic() - began_s,
                )
                action = next_action(view, self.policy)
                if action is Action.FORM:
                    plan = self.ledger.propose(number, {str(rank): arrived[rank] for rank in ranks})
                elif action is Action.GIVE_UP:
                    raise RecoveryTimeout(
                        f"generation {number} could not be formed within {self.policy.replacement_timeout_s:.0f} s: "
                        f"nobody came for the ranks {list(view.missing)}. See why their agents could not start a "
                        "process, or allow more time with replacement_timeout_s."
                    )
            if plan is not None:
                arrivals = {int(rank): Arrival.from_dict(each) for rank, each in plan.items()}
                mine = arrivals[self.rank]
                if (mine.incarnation, mine.committed) == (arrival.incarnation, arrival.committed):
                    return Generation(number=number, arrivals=arrivals)
                self._end(number, Incident(kind="request", cause="the plan names a process as it was before"))
                return None
            time.sleep(_POLL_S)

    def _report(self, cause: str) -> None:
        """Tell the others; called in whatever thread noticed the break."""
        told = self._told or Incident(kind="collective", cause=cause, step=self.committed)
        self._end(self.generation, told)

    def _end(self, generation: int, incident: Incident) -> Incident:
        with self._reporting:
            return self._reports.end(generation, replace(incident, reporter=f"rank {self.rank}"))

    def _listen(self) -> None:
        """Wait for the end of each generation in turn, and break the groups then."""
        try:
            ledger = Ledger.connect(self.job)
            while not self._is_leaving:
                generation = self.generation
                incident = ledger.wait_ended(generation, timeout_s=_LISTEN_S)
                if incident is None:
                    continue
                with self._changed:
                    if generation == self.generation and not self._is_joining:
                        self._told = self._told or incident
                        break_groups(str(incident))
                    self._changed.wait_for(lambda g=generation: self._is_leaving or self.generation != g)
        except dist.DistError as error:
            self._lost_store(error)

    def _tell(self) -> None:
        """Say about once a second where this process is, and look whether somebody keeps it waiting."""
        try:
            ledger = Ledger.connect(self.job)
            while not self._is_leaving:
                own = self._beat()
                ledger.beat(self.rank, own.to_dict())
                self._look_after(ledger, own)
                time.sleep(_BEAT_S)
        except dist.DistError as error:
            self._lost_store(error)

    def _beat(self) -> Beat:
        role = waiting.role
        return Beat(
            incarnation=self.job.incarnation,
            generation=self.generation,
            committed=self.committed,
            place=self.place,
            in_step=self.in_step,
            waits_for="" if role is None else role.name,
            waited_s=0.0 if role is None else time.monotonic() - waiting.since_s,
            at_s=time.time(),
        )

    def _look_after(self, ledger: Ledger, own: Beat) -> None:
        """End the generation, and the process that hangs, if this rank has waited for it too long."""
        limit_s = self.step_times.limit_s(self.hangs)
        if not own.waits_for or own.waited_s <= min(limit_s, self.hangs.outside_s):
            return
        beats = {rank: Beat.from_dict(each) for rank, each in ledger.beats(range(self.world_size)).items()}
        for suspect in diagnose(beats, own, limit_s, self.hangs, time.time()):
            incident = Incident(
                kind="hang", cause=suspect.cause, rank=suspect.rank, incarnation=suspect.incarnation, step=own.committed
            )
            if self._end(own.generation, incident).reporter == f"rank {self.rank}":
                ledger.ask_to_kill(suspect.rank, suspect.incarnation)

    def _chase(self, number: int, waited_s: float) -> None:
        """Ask for the end of survivors that do not come to be repaired: stopped, or stuck where nothing wakes them."""
        limit_s = max(self.step_times.limit_s(self.hangs), self.hangs.floor_s)
        if waited_s < limit_s or time.monotonic() < self._next_chase_s:
            return
        self._next_chase_s = time.monotonic() + limit_s
        before = self._members_before(number)
        arrived = self.ledger.arrivals(number, range(self.world_size))
        for rank in range(self.world_size):
            incarnation = self.ledger.incarnation(rank)
            is_survivor = incarnation == before.get(rank, 0)
            if is_survivor and rank not in arrived and self.ledger.find(f"stopped/{number}/{rank}") is None:
                log.warning("rank %d does not come to be repaired within %.0f s: it is replaced", rank, limit_s)
                self.ledger.ask_to_kill(rank, incarnation)

    def _lost_store(self, error: Exception) -> None:
        if not self._is_leaving:
            log.error("rank %d lost the job's store, which an agent serves: %s", self.rank, error)
            break_groups(f"the job's store is gone: {error}")
