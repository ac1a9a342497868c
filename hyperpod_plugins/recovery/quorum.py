"""How processes agree on the members of the next generation.

Each process publishes its arrival in the job store. When all members have arrived, one of them proposes a plan that
lists all arrivals, and the first plan to be written counts. `QuorumJoiner` runs this protocol for one process, and
`PlanWatcher` wakes it when the plan is there.

[Note: who looks] To see whether all members have arrived, a process must read all arrivals. With thousands of
processes not all of them can, so arrivals are counted, and the process that completes the count scans them. The
count is only a hint: it is too high if a process was replaced after it had arrived, and too low between an arrival
and its count. If the process that should scan does not (it died or hangs), others do: whatever the count, a few of
the waiting processes scan each second. All others wait for the plan.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch.distributed as dist

from hyperpod_plugins.elastic import FailureRecord, JobStore
from hyperpod_plugins.elastic.membership.quorum_policy import QuorumAction, QuorumPolicy, QuorumView, next_action
from hyperpod_plugins.elastic.store.job_store import GAVE_UP_KEY, poll_interval_s, scan_interval_s
from hyperpod_plugins.elastic.store.world import WorldPlan
from hyperpod_plugins.errors import PeerLost, RecoveryError, RecoveryTimeout, StateLost
from hyperpod_plugins.recovery.plan import NO_STATE, Arrival
from hyperpod_plugins.recovery.restart_all import follow_final_save
from hyperpod_plugins.recovery.stop_reports import Survivors, has_stopped, is_outside, members_before
from hyperpod_plugins.recovery.world_view import WorldView

_FOREVER_S = 365 * 86400.0  # waiting costs nothing, while torch logs a warning for each wait that times out


class PlanWatcher:
    """A thread that waits in the store for a plan, so that the main thread is interruptible and can check timeouts.

    A wake-up may be missed, so the waiting thread must also look for the plan itself from time to time.
    """

    def __init__(self, connect: Callable[[], JobStore]) -> None:
        """Start the thread, with its own connection made by `connect`: early, since a busy server accepts slowly."""
        self._connect = connect
        self._changed = threading.Condition()
        self._wanted = self._planned = self._awaited = 0
        self._turn = 0
        self._begin()

    def wait(self, generation: int, timeout_s: float) -> None:
        """Wait until a generation, from 1 on, has a plan, for at most `timeout_s` seconds."""
        with self._changed:
            self._wanted = generation
            if self._awaited not in (0, generation):  # the awaited generation ended without a plan
                self._begin()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._planned == generation, timeout_s)

    def _begin(self) -> None:
        self._turn, self._awaited = self._turn + 1, 0
        threading.Thread(target=self._run, args=(self._turn,), name="hyperpod_bell", daemon=True).start()

    def _run(self, turn: int) -> None:
        try:
            job_store = self._connect()
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._turn != turn or self._wanted != self._planned)
                    if self._turn != turn:
                        return
                    generation = self._awaited = self._wanted
                while not job_store.wait_planned(generation, timeout_s=_FOREVER_S):
                    pass
                with self._changed:
                    if self._turn != turn:
                        return
                    self._planned, self._awaited = generation, 0
                    self._changed.notify_all()
        except dist.DistError:
            return  # the main thread notices the lost store itself


@dataclass(frozen=True, slots=True, kw_only=True)
class FormedGeneration:
    """A generation and the arrivals of its members, by rank."""

    number: int
    arrivals: Mapping[int, Arrival]


class ReplacementTimeout(RecoveryTimeout):
    """Survivors agree that the missing ranks will not be replaced."""

    def __init__(self, formed: FormedGeneration, cause: str, *, restarts_all: bool) -> None:
        super().__init__(cause)
        self.formed = formed
        """The generation of the survivors only; its groups have no connections."""
        self.restarts_all = restarts_all
        """Whether all processes restart with the survivors; otherwise the job ends."""


class MustReenterLoop(PeerLost):
    """Another rank was outside a step when the fault came, so no rank can resume inside one."""

    def __init__(self, number: int) -> None:
        super().__init__(
            f"generation {number} cannot begin inside a step, because another rank was outside one. The strategy "
            "re-enters the loops at the last committed step; a custom loop must do the same."
        )
        self.number = number


class WorldChanged(MustReenterLoop):
    """The next generation is formed for another world, with other ranks, world size and shares of the data."""

    def __init__(self, number: int, world: WorldPlan) -> None:
        super().__init__(number)
        self.world = world


class QuorumJoiner:
    """Joins generations on behalf of one process."""

    def __init__(
        self,
        job_store: JobStore,
        worlds: WorldView,
        watcher: PlanWatcher,
        *,
        worker_id: int,
        policy: QuorumPolicy,
        survivors: Survivors,
    ) -> None:
        """Use `job_store` and `survivors` only in the thread that calls `join`."""
        self._job_store = job_store
        self._worlds = worlds
        self._plan_watcher = watcher
        self._worker_id = worker_id
        self._policy = policy
        self._survivors = survivors
        self._granted_s = 0.0  # wait at least this long before giving up: some survivors were busy
        self._unaware_since_s = math.inf  # when others were first seen that should have left their step

    def join(self, number: int, arrival: Arrival, began_s: float) -> FormedGeneration | None:
        """Wait until a plan makes this process a member of a generation; None if the generation ends first.

        Args:
            number: Number of the generation, which is formed for the present world.
            arrival: What this process brings.
            began_s: When this process began to wait, on the monotonic clock.

        Raises:
            ReplacementTimeout: Lost ranks were not replaced in time.
            MustReenterLoop: This process waits inside a step, and another rank was outside one.
            RecoveryError: Another process has given up or has replaced this one.
        """
        job_store, size, rank = self._job_store, self._worlds.current.size, self._rank
        if job_store.incarnation(self._worker_id) > arrival.incarnation:
            raise self._replaced()
        self._granted_s, self._unaware_since_s = 0.0, math.inf
        count = job_store.arrive(number, self._worker_id, to_text(arrival))
        look_s = time.monotonic() if count >= size else time.monotonic() + scan_interval_s(rank, count)
        while job_store.ended(number) is None:
            plan = job_store.plan(number)
            now_s = time.monotonic()
            if plan is None:
                self._check_aborted(number, arrival)
                if now_s >= look_s or now_s - began_s > self._policy.replacement_timeout_s:
                    plan = self._scan(number, now_s - began_s)
                    look_s = now_s + scan_interval_s(rank, job_store.num_arrived(number))
            if plan is not None:
                return self._accept(number, arrival, plan)
            self._plan_watcher.wait(number, poll_interval_s(rank, size, now_s - began_s))
        job_store.void_plan(number)
        return None

    def _check_aborted(self, number: int, arrival: Arrival) -> None:
        """Raise if recovery was abandoned or cannot resume inside a step."""
        job_store = self._job_store
        if job_store.try_get(GAVE_UP_KEY) is not None:
            follow_final_save(job_store)
        if _resumes_in_step(arrival) and is_outside(job_store, number):
            # This process will arrive again with another arrival.
            job_store.withdraw(number, self._worker_id, to_text(replace(arrival, incarnation=NO_STATE)))
            raise MustReenterLoop(number)

    def _scan(self, number: int, waited_s: float) -> Mapping[int, str] | None:
        """Read the arrivals if they may be complete or a timeout has passed; the plan, if one was made."""
        job_store, worker_ids = self._job_store, self._worlds.current.worker_ids
        is_late = self._worlds.may_change or waited_s > min(
            self._policy.replacement_timeout_s, self._survivors.patience_s()
        )
        if not is_late and not job_store.all_arrived(number, worker_ids):
            return None
        expected = dict(zip(worker_ids, job_store.incarnations(worker_ids), strict=True))
        said = job_store.arrivals(number, worker_ids)
        arrived = {worker_id: each.incarnation for worker_id, each in from_texts(said).items()}
        view = QuorumView(expected=expected, arrived=arrived, waited_s=waited_s)
        survivors = self._missing_survivors(number, view)
        busy = self._survivors.busy(survivors, waited_s)
        if busy:
            self._granted_s = waited_s + self._policy.replacement_timeout_s
        match QuorumAction.WAIT if view.missing and waited_s <= self._granted_s else next_action(view, self._policy):
            case QuorumAction.FORM:
                unaware = {p: each.incarnation for p, each in from_texts(said).items() if _resumes_in_step(each)}
                if unaware and is_outside(job_store, number):  # these have yet to notice, and to arrive again
                    self._unaware_since_s = min(self._unaware_since_s, waited_s)
                    self._survivors.kill_stuck(number, unaware, waited_s - self._unaware_since_s)
                    return None
                return job_store.propose(number, said)
            case QuorumAction.GIVE_UP:
                cause = (
                    f"generation {number} could not be formed within {self._policy.replacement_timeout_s:.0f} s: "
                    f"no process joined for the ranks {self._ranks_of(view.missing)}. See why their agents could "
                    "not start a process, or allow more time with replacement_timeout_s."
                )
                missing = {worker_id: view.expected[worker_id] for worker_id in view.missing}
                cause += self._worlds.what_would_fit(number, missing)
                return self._propose_end(number, view, said, cause, starts_again=False)
            case QuorumAction.WAIT:
                missing = {worker_id: view.expected[worker_id] for worker_id in view.missing}
                try:
                    goes_on = self._worlds.shrink_without(number, missing, waited_s, f"rank {self._rank}")
                except StateLost as lost:
                    return self._propose_end(number, view, said, str(lost), starts_again=True)
                if not goes_on:
                    stuck = {worker_id: each for worker_id, each in survivors.items() if worker_id not in busy}
                    self._survivors.kill_stuck(number, stuck, waited_s)
                return None

    def _propose_end(
        self, number: int, view: QuorumView, said: Mapping[int, str], cause: str, *, starts_again: bool
    ) -> Mapping[int, str] | None:
        """Propose a generation of the ranks that have arrived, which save their state and leave it."""
        there = {worker_id: each for worker_id, each in from_texts(said).items() if worker_id not in view.missing}
        ends = {
            worker_id: replace(each, abort_reason=cause, restarts_all=starts_again) for worker_id, each in there.items()
        }
        return self._job_store.propose(number, {worker_id: to_text(each) for worker_id, each in ends.items()})

    def _accept(self, number: int, arrival: Arrival, plan: Mapping[int, str]) -> FormedGeneration | None:
        """Become a member of the plan; end the generation if it holds an outdated arrival of this process."""
        world, brought = self._worlds.current, from_texts(plan)
        if self._worker_id not in brought:
            raise RecoveryError("the job ends: the other ranks have waited too long for this process")
        mine = brought[self._worker_id]
        if (mine.incarnation, mine.committed) == (arrival.incarnation, arrival.committed):
            arrivals = {
                rank: brought[worker_id] for rank, worker_id in enumerate(world.worker_ids) if worker_id in brought
            }
            formed = FormedGeneration(number=number, arrivals=arrivals)
            if len(arrivals) < world.size:
                raise ReplacementTimeout(formed, mine.abort_reason, restarts_all=mine.restarts_all)
            self._look_for_losses(formed)
            return formed
        if mine.incarnation > arrival.incarnation:
            raise self._replaced()
        cause = "the plan holds an outdated arrival"
        self._job_store.end(number, FailureRecord(kind="request", cause=cause, reporter=f"rank {self._rank}"))
        return None

    def _look_for_losses(self, formed: FormedGeneration) -> None:
        """End the generation if a member was lost while the plan was made.

        The agent counts the loss before it looks for a plan, and this check follows the plan: one of the two sees it.
        """
        now = self._job_store.incarnations(self._worlds.current.worker_ids)
        if any(now[rank] != arrival.incarnation for rank, arrival in formed.arrivals.items()):
            cause = "a member was lost just after it arrived"
            self._job_store.end(
                formed.number, FailureRecord(kind="process", cause=cause, reporter=f"rank {self._rank}")
            )

    @property
    def _rank(self) -> int:
        rank = self._worlds.current.rank_of(self._worker_id)
        assert rank is not None
        return rank

    def _ranks_of(self, worker_ids: Iterable[int]) -> list[int | None]:
        return [self._worlds.current.rank_of(worker_id) for worker_id in worker_ids]

    def _replaced(self) -> RecoveryError:
        return RecoveryError(
            f"another process has taken the place of rank {self._rank}, whose node was silent for too long. This one "
            "ends; nothing is to be done."
        )

    def _missing_survivors(self, number: int, view: QuorumView) -> dict[int, int]:
        """Members that are missing although they were not lost, and have not published a stop report."""
        before, job_store = members_before(self._job_store, number) if view.missing else {}, self._job_store
        missing = {worker_id: view.expected[worker_id] for worker_id in view.missing if worker_id not in view.arrived}
        return {
            worker_id: incarnation
            for worker_id, incarnation in missing.items()
            if incarnation == before.get(worker_id, 0) and not has_stopped(job_store, number, worker_id)
        }


def _resumes_in_step(arrival: Arrival) -> bool:
    return arrival.in_step and arrival.may_have_state


def to_text(arrival: Arrival) -> str:
    """Serialize for the job store; equal arrivals have equal text."""
    return json.dumps(arrival.to_dict())


def from_texts(texts: Mapping[int, str]) -> dict[int, Arrival]:
    """Inverse of `to_text`; parses equal texts, which are the rule, only once."""
    known = {text: Arrival.from_dict(json.loads(text)) for text in set(texts.values())}
    return {worker_id: known[text] for worker_id, text in texts.items()}
