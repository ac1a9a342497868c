"""Where a job resumes after a fault: each survivor publishes where it stopped, and joiners read it.

`StopReports` publishes the report of one process and waits for those of the others; `Survivors` decides how long to
wait for survivors that do not arrive.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from enum import Enum, auto

from hyperpod_plugins.elastic import JobStore
from hyperpod_plugins.elastic.membership.quorum_policy import QuorumPolicy
from hyperpod_plugins.elastic.store.job_store import poll_interval_s, poll_until, scan_interval_s
from hyperpod_plugins.errors import PeerLost, RecoveryTimeout, StateLost
from hyperpod_plugins.recovery.plan import NO_STATE
from hyperpod_plugins.recovery.snapshot import Snapshots
from hyperpod_plugins.recovery.watchdog import HEARTBEATS_MISSED_S, Heartbeat, HeartbeatAges
from hyperpod_plugins.recovery.world_view import WorldView

log = logging.getLogger(__name__)
_OTHERS_S = 30.0
_POLL_S = 0.05


REPEATED_BODY = -1
"""The part in a stop report of a process that was interrupted in the rest of a loop's body, after the commit.

Others may have come to the end of that body already. All run it again: nobody else could run the rest for this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """The point at which the job resumes, known once all processes with state have stopped."""

    step: int
    """Number of steps that all ranks will have committed."""
    in_step: bool
    """Whether the process that provided `trainer` waits inside a step; if not, all processes were outside one."""
    trainer: bytes
    """Trainer state of the process furthest ahead: one inside a step, if there is one; see `furthest_worker`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReport:
    """What one process publishes when it has stopped."""

    incarnation: int
    committed: int
    in_step: bool
    has_trainer_state: bool
    """Whether it has published its trainer state, too."""
    part: int = 0
    """Outside steps: index of the part of the program it was in, in the order of the parts that follow a step; or
    `REPEATED_BODY`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopView:
    """What a process that waits for stop reports sees without reading them."""

    generation: int
    world_size: int
    num_reports: int
    """Count of published reports: a hint, as in `QuorumJoiner`."""
    lost: frozenset[int]
    """Worker ids whose processes were lost since the last generation."""


class StopAction(Enum):
    """What a process that waits for stop reports does next."""

    WAIT = auto()
    READ = auto()
    """Read all reports."""
    ALL_LOST = auto()
    """No process is left that could publish one."""


def next_stop_action(view: StopView, seen: StopView | None, *, is_due: bool) -> StopAction:
    """Decide whether to read all reports now, for each reads those of all processes.

    Args:
        view: What this process sees.
        seen: What it saw when it last read them.
        is_due: Whether it reads them whatever it sees.
    """
    if len(view.lost) == view.world_size:
        return StopAction.ALL_LOST
    may_be_complete = view != seen and view.num_reports + len(view.lost) >= view.world_size
    return StopAction.READ if is_due or may_be_complete else StopAction.WAIT


class Survivors:
    """Decides which late survivors get more time, and which are killed so that they are replaced."""

    def __init__(self, job_store: JobStore, *, patience_s: Callable[[], float], outside_s: float) -> None:
        """Use `job_store` only in the thread that waits.

        Args:
            job_store: A connection that no other thread uses.
            patience_s: Returns the seconds after which a rank that does not arrive is stuck, unless its heartbeats
                show that it is busy.
            outside_s: Seconds after which it is stuck in any case.
        """
        self._job_store = job_store
        self.patience_s = patience_s
        self._outside_s = outside_s
        self._ages = HeartbeatAges()
        self._ended = set[tuple[int, int]]()

    def busy(self, awaited: Mapping[int, int], waited_s: float) -> set[int]:
        """Worker ids of those whose recent heartbeats say that they are in code outside a step, such as a save.

        Silence is measured from the first call.

        Args:
            awaited: Incarnation of each worker that is waited for.
            waited_s: How long this process has waited, in seconds.
        """
        if not awaited or waited_s > self._outside_s:
            return set()
        heartbeats = {
            worker_id: Heartbeat.from_dict(each)
            for worker_id, each in self._job_store.heartbeats(list(awaited)).items()
        }
        silent_s = self._ages.update(heartbeats, time.monotonic())
        limit_s = max(self.patience_s(), HEARTBEATS_MISSED_S)
        return {
            worker_id
            for worker_id, heartbeat in heartbeats.items()
            if heartbeat.is_outside and heartbeat.is_alive(awaited[worker_id], silent_s[worker_id], limit_s)
        }

    def kill_stuck(self, number: int, awaited: Mapping[int, int], waited_s: float) -> None:
        """Ask the agents to kill workers that do not arrive, once each: they are stopped or stuck.

        Args:
            number: Number of the generation to be formed.
            awaited: Incarnation of each worker that is waited for, except busy ones.
            waited_s: How long this process has waited, in seconds.
        """
        if waited_s <= self.patience_s():
            return
        for worker_id, incarnation in awaited.items():
            if (worker_id, incarnation) in self._ended or has_stopped(self._job_store, number, worker_id):
                continue
            self._ended.add((worker_id, incarnation))
            log.warning(
                "the process in place %d does not come to be repaired within %.0f s: it is replaced",
                worker_id,
                waited_s,
            )
            self._job_store.ask_to_kill(worker_id, incarnation)


class StopReports:
    """Publishes the stop report of one process, and reads those of the others."""

    def __init__(
        self,
        job_store: JobStore,
        worlds: WorldView,
        *,
        worker_id: int,
        incarnation: int,
        policy: QuorumPolicy,
        survivors: Survivors,
    ) -> None:
        """Use `job_store` and `survivors` only in the thread that waits."""
        self.job_store = job_store
        self.worlds = worlds
        self.worker_id = worker_id
        self._incarnation = incarnation
        self.policy = policy
        self.survivors = survivors
        self._told: list[int] = []

    def tell(self, number: int, *, committed: int, in_step: bool, trainer: bytes, part: int = 0) -> None:
        """Publish this process's report once, before it arrives in generation `number`; see `Member.publish_stop`."""
        if number in self._told:
            return
        job_store, worker_id = self.job_store, self.worker_id
        if trainer:
            job_store.set(f"trainer/{number}/{worker_id}", trainer)
        note = StopReport(
            incarnation=self._incarnation,
            committed=committed,
            in_step=in_step,
            has_trainer_state=bool(trainer),
            part=part,
        )
        job_store.set(_note(number, worker_id), json.dumps(asdict(note)).encode())
        job_store.count(f"stopped/{number}", 1)
        if not in_step:
            job_store.set(f"outside/{number}", b"1")
        for old in self._told:
            job_store.delete(f"trainer/{old}/{worker_id}")
        self._told = [number]

    def wait(
        self,
        number: int | None,
        at_least: int,
        stopped: Callable[[int], None] | None,
        snapshots: Snapshots | None = None,
    ) -> ResumePoint:
        """Wait until every process that has state has stopped; see `Member.wait_for_stops`."""
        wait = _Wait(self, number, at_least, stopped, snapshots)
        resume_point = poll_until(
            wait.look, lambda found: found is not None, limit_s=lambda: wait.limit_s, every_s=wait.interval_s
        )
        if resume_point is None:
            raise RecoveryTimeout(
                f"rank {wait.rank} waited for the state of the other ranks, but they did not all stop within "
                f"{wait.limit_s:.0f} s. Check whether some of them hang."
            )
        return resume_point

    def trainer_of(self, number: int, worker_id: int) -> bytes | None:
        """Trainer state that a process published before generation `number`; None if it published none."""
        return self.job_store.try_get(f"trainer/{number}/{worker_id}")


class _Wait:
    """One wait of a process for the stop reports of the others; `look` is called again and again."""

    def __init__(
        self,
        reports: StopReports,
        number: int | None,
        at_least: int,
        stopped: Callable[[int], None] | None,
        snapshots: Snapshots | None,
    ) -> None:
        self._reports = reports
        self._job_store = reports.job_store
        self._number, self._at_least = number, at_least
        self._stopped = stopped
        self._snapshots = snapshots
        self._began_s = time.monotonic()
        self._generation, self._worker_ids = -1, reports.worlds.current.worker_ids
        self.rank = 0
        """Of this process, in the world of the generation that is waited for."""
        self.limit_s = reports.policy.replacement_timeout_s
        """Seconds to wait; extended while survivors are busy outside a step."""
        self._look_s = 0.0
        self._known: Mapping[int, int] = {}
        self._seen: StopView | None = None
        self._given_up = set[int]()

    def interval_s(self, waited_s: float) -> float:
        """Seconds until the next look."""
        return poll_interval_s(self.rank, len(self._worker_ids), waited_s)

    def look(self) -> ResumePoint | None:
        """Look once; the resume point, if all that are expected have published their reports.

        Raises:
            PeerLost: The generation ended before it was formed.
            StateLost: No process is left that holds the state, and no snapshot.
        """
        waited_s = time.monotonic() - self._began_s
        self._follow_generation(waited_s)
        incarnations = dict(zip(self._worker_ids, self._job_store.incarnations(self._worker_ids), strict=True))
        lost = {each for each, number in incarnations.items() if number != self._known.get(each, 0)} | self._given_up
        view = StopView(
            generation=self._generation,
            world_size=len(incarnations),
            num_reports=self._job_store.count(f"stopped/{self._generation}"),
            lost=frozenset(lost),
        )
        match next_stop_action(view, self._seen, is_due=waited_s >= min(self._look_s, self.limit_s)):
            case StopAction.WAIT:
                return None
            case StopAction.ALL_LOST:
                return self._without_survivors(
                    "all processes were lost, and with them the training state and its snapshots"
                )
            case StopAction.READ:
                self._seen, self._look_s = view, waited_s + scan_interval_s(self.rank, view.num_reports)
                resume_point = self._scan(incarnations, lost)
                if resume_point is None:
                    self._handle_silent(self._silent(incarnations, lost), waited_s)
                return resume_point

    def _follow_generation(self, waited_s: float) -> None:
        """Turn to the generation that is to be formed now, if that is another one."""
        job_store, former, worker_id = self._job_store, self._generation, self._reports.worker_id
        if self._number is None:
            self._generation = job_store.generation(at_least=max(self._at_least, former))
        else:
            self._generation = self._number
        if self._generation != former:
            if self._stopped is not None:
                self._stopped(self._generation)
            self._worker_ids = ids = self._reports.worlds.at(self._generation).worker_ids
            self.rank = ids.index(worker_id) if worker_id in ids else len(ids)
            self._known = members_before(job_store, self._generation)
            self._look_s = waited_s + scan_interval_s(self.rank, 1)
        if self._number is not None and job_store.ended(self._number) is not None:
            raise PeerLost(f"generation {self._number} ended before it was formed")

    def _handle_silent(self, silent: Mapping[int, int], waited_s: float) -> None:
        """Go on without silent processes if the world allows it; wait for the busy ones, and have stuck ones killed."""
        reports, generation = self._reports, self._generation
        try:
            reports.worlds.shrink_without(generation, silent, waited_s, f"rank {self.rank}")
        except StateLost:  # all processes restart; they save what they hold in the next generation
            self._given_up |= set(silent)
        busy = reports.survivors.busy(silent, waited_s)
        if busy:
            self.limit_s = waited_s + reports.policy.replacement_timeout_s
        stuck = {worker_id: each for worker_id, each in silent.items() if worker_id not in busy}
        reports.survivors.kill_stuck(generation, stuck, waited_s)

    def _silent(self, incarnations: Mapping[int, int], lost: AbstractSet[int]) -> dict[int, int]:
        """Processes without a stop report that do not count as lost: perhaps their node is gone."""
        number = self._generation
        said = self._job_store.try_get_all([_note(number, worker_id) for worker_id in incarnations])
        return {p: n for p, n in incarnations.items() if p not in lost and _note(number, p) not in said}

    def _without_survivors(self, cause: str) -> ResumePoint:
        """The resume point if all processes are new: that of any rank's snapshot that outlived its process.

        It only gets this process to where the others are; together they decide to which step all return.

        Raises:
            StateLost: There is none; the message is `cause`.
        """
        snapshots, prefix = self._snapshots, f"snapshot/{self._generation}"
        if snapshots is not None:
            snapshots.drop_damaged()
        newest = None if snapshots is None else snapshots.newest
        names = [f"{prefix}/{worker_id}" for worker_id in self._worker_ids]
        self._job_store.set(f"{prefix}/{self._reports.worker_id}", b"" if newest is None else newest.trainer)
        if newest is not None:
            return ResumePoint(step=newest.step, in_step=True, trainer=newest.trainer)
        if snapshots is not None:
            said = poll_until(
                lambda: self._job_store.try_get_all(names),
                lambda said: any(said.values()) or len(said) == len(names),
                limit_s=_OTHERS_S,
                every_s=_POLL_S,
            )
            trainer = next(filter(None, said.values()), b"")
            if trainer:
                return ResumePoint(step=0, in_step=True, trainer=trainer)
        raise StateLost(cause)

    def _scan(self, incarnations: Mapping[int, int], lost: AbstractSet[int]) -> ResumePoint | None:
        """Determine the resume point; None unless all processes that are not lost have published their reports."""
        job_store, number, worker_ids = self._job_store, self._generation, list(incarnations)
        if not job_store.has_all([_note(number, worker_id) for worker_id in worker_ids if worker_id not in lost]):
            return None
        found = job_store.try_get_all([_note(number, worker_id) for worker_id in worker_ids])
        said = {
            each: StopReport(**json.loads(found[_note(number, each)]))
            for each in worker_ids
            if _note(number, each) in found
        }
        notes = {
            worker_id: note for worker_id, note in said.items() if note.incarnation == incarnations[worker_id]
        }  # of processes that were not replaced since
        if any(worker_id not in notes and worker_id not in lost for worker_id in worker_ids):
            return None
        if notes and all(note.committed == NO_STATE for note in notes.values()):
            cause = "the remaining processes are new, and all that held the training state were lost"
            return self._without_survivors(cause)
        worker_id = furthest_worker(notes)
        trainer = None if worker_id is None else self._reports.trainer_of(number, worker_id)
        if worker_id is None or trainer is None:
            return None
        return ResumePoint(step=notes[worker_id].committed, in_step=notes[worker_id].in_step, trainer=trainer)


def furthest_worker(notes: Mapping[int, StopReport]) -> int | None:
    """Worker whose trainer state the others resume from: of those with the most committed steps, one inside a step.

    If none is inside a step, one that has reached the last part: the parts it has completed cannot be run again. But if
    one was interrupted in a body that can be repeated, that one. None if no worker with the most committed steps has
    published its trainer state.
    """
    step = max((note.committed for note in notes.values()), default=NO_STATE)
    best = [worker_id for worker_id, note in notes.items() if note.committed == step and note.has_trainer_state]

    def order(worker_id: int) -> tuple[bool, bool, int, int]:
        note = notes[worker_id]
        return note.part != REPEATED_BODY, not note.in_step, -note.part, worker_id

    return min(best, key=order, default=None)


def has_stopped(job_store: JobStore, number: int, worker_id: int) -> bool:
    """Whether a process has published its stop report for generation `number`."""
    return job_store.try_get(_note(number, worker_id)) is not None


def is_outside(job_store: JobStore, number: int) -> bool:
    """Whether any process that has stopped for generation `number` was outside a step."""
    return job_store.try_get(f"outside/{number}") is not None


def members_before(job_store: JobStore, number: int) -> dict[int, int]:
    """Incarnations in the last generation formed before `number`, by worker id; empty if there was none."""
    for earlier in range(number - 1, 0, -1):
        plan = job_store.plan(earlier)
        if plan is not None:
            incarnations = {text: json.loads(text)["incarnation"] for text in set(plan.values())}
            return {worker_id: incarnations[text] for worker_id, text in plan.items()}
    return {}


def _note(number: int, worker_id: int) -> str:
    return f"stopped/{number}/{worker_id}"
