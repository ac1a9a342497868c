"""How processes agree on the members of the next generation: each arrives, and the first plan that is complete counts.

[Note: who looks] To see whether all are there, somebody must read what each has said. With thousands of processes not
all of them can, so each arrival is counted, and the one that finds the count full looks. The count says no more
than that: it is too high where a process was replaced after it had arrived, and too low for the moment between
an arrival and its count. Should nobody look who ought to (it died, it hangs), others do: whatever the count, a few
of all those that wait look each second. Everybody else waits for the plan; see `watcher.py`.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch.distributed as dist

from hyperpod_plugins.elastic import FailureRecord, JobStore
from hyperpod_plugins.elastic.membership.quorum import Action, MembershipPolicy, QuorumView, next_action
from hyperpod_plugins.elastic.store.job_store import GAVE_UP_KEY
from hyperpod_plugins.elastic.store.world import WorldPlan
from hyperpod_plugins.errors import PeerLost, RecoveryError, RecoveryTimeout, StateLost
from hyperpod_plugins.recovery.abort import follow_final_save
from hyperpod_plugins.recovery.plan import NO_STATE, Arrival
from hyperpod_plugins.recovery.polling import poll_interval_s, scan_interval_s
from hyperpod_plugins.recovery.resume import Survivors, has_stopped, is_outside, members_before
from hyperpod_plugins.recovery.world_view import Worlds

# Waking a process when a generation gets its plan, without anybody asking for it again and again.

_FOREVER_S = 365 * 86400.0  # the wait costs nothing, and torch warns of each one that times out


class PlanWatcher:
    """A thread that waits in the store, so that the main thread can be interrupted, and can look at its clock.

    It may fail to ring: whoever waits looks for the plan itself from time to time.
    """

    def __init__(self, connect: Callable[[], JobStore]) -> None:
        """Make a connection of one's own with `connect`, in good time: a server is slow while it takes in new ones."""
        self._connect = connect
        self._changed = threading.Condition()
        self._wanted = self._rung = self._awaited = 0
        self._turn = 0
        self._begin()

    def wait(self, generation: int, timeout_s: float) -> None:
        """Until there is a plan of a generation, from 1 on, or for `timeout_s` seconds."""
        with self._changed:
            self._wanted = generation
            if self._awaited not in (0, generation):  # that one has ended without a plan
                self._begin()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._rung == generation, timeout_s)

    def _begin(self) -> None:
        self._turn, self._awaited = self._turn + 1, 0
        threading.Thread(target=self._run, args=(self._turn,), name="hyperpod_bell", daemon=True).start()

    def _run(self, turn: int) -> None:
        try:
            job_store = self._connect()
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._turn != turn or self._wanted != self._rung)
                    if self._turn != turn:
                        return
                    generation = self._awaited = self._wanted
                while not job_store.wait_planned(generation, timeout_s=_FOREVER_S):
                    pass
                with self._changed:
                    if self._turn != turn:
                        return
                    self._rung, self._awaited = generation, 0
                    self._changed.notify_all()
        except dist.DistError:
            return  # the main thread finds out by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The members of a generation, as they arrived, by rank."""

    number: int
    arrivals: Mapping[int, Arrival]


class ReplacementTimeout(RecoveryTimeout):
    """Those that are left know of each other, and that the others do not come."""

    def __init__(self, formed: Generation, cause: str, *, starts_again: bool) -> None:
        super().__init__(cause)
        self.formed = formed
        """Of some ranks only, whose groups have no connections."""
        self.starts_again = starts_again
        """Whether all processes start again with those that are left; the job ends otherwise."""


class MustReenterLoop(PeerLost):
    """Another rank was not inside a step when the fault came, so nobody can go on within one."""

    def __init__(self, number: int) -> None:
        super().__init__(
            f"generation {number} cannot begin within a step, for another rank was outside of one. The strategy enters "
            "the loops again from the last committed step; a loop of your own must do the same."
        )
        self.number = number


class WorldChanged(MustReenterLoop):
    """The next generation is of another world: ranks, sizes and shares of the data are others in it."""

    def __init__(self, number: int, world: WorldPlan) -> None:
        super().__init__(number)
        self.world = world


class QuorumJoiner:
    """One process's way into generations."""

    def __init__(
        self,
        job_store: JobStore,
        worlds: Worlds,
        watcher: PlanWatcher,
        *,
        worker_id: int,
        policy: MembershipPolicy,
        survivors: Survivors,
    ) -> None:
        """Use `job_store` and `survivors` in the thread that waits."""
        self._job_store = job_store
        self._worlds = worlds
        self._doorbell = watcher
        self._worker_id = worker_id
        self._policy = policy
        self._survivors = survivors
        self._granted_s = 0.0  # so long a wait is no reason to give up, for some were busy

    def join(self, number: int, arrival: Arrival, began_s: float) -> Generation | None:
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
        job_store, size, rank = self._job_store, self._worlds.now.size, self._rank
        if job_store.incarnation(self._worker_id) > arrival.incarnation:
            raise self._replaced()
        self._granted_s = 0.0
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
            self._doorbell.wait(number, poll_interval_s(rank, size, now_s - began_s))
        job_store.void_plan(number)
        return None

    def _check_aborted(self, number: int, arrival: Arrival) -> None:
        """Leave if there will be no generation, or none that begins in a step."""
        job_store = self._job_store
        if job_store.try_get(GAVE_UP_KEY) is not None:
            follow_final_save(job_store)
        if arrival.in_step and arrival.has_state and is_outside(job_store, number):
            # It comes again, and as another.
            job_store.withdraw(number, self._worker_id, to_text(replace(arrival, incarnation=NO_STATE)))
            raise MustReenterLoop(number)

    def _scan(self, number: int, waited_s: float) -> Mapping[int, str] | None:
        """Read who is there, if that may be all, or if it is time to do without somebody; the plan if all are."""
        job_store, worker_ids = self._job_store, self._worlds.now.worker_ids
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
        match Action.WAIT if view.missing and waited_s <= self._granted_s else next_action(view, self._policy):
            case Action.FORM:
                return job_store.propose(number, said)
            case Action.GIVE_UP:
                cause = (
                    f"generation {number} could not be formed within {self._policy.replacement_timeout_s:.0f} s: "
                    f"nobody came for the ranks {self._ranks_of(view.missing)}. See why their agents could not start a "
                    "process, or allow more time with replacement_timeout_s."
                )
                missing = {worker_id: view.expected[worker_id] for worker_id in view.missing}
                cause += self._worlds.what_would_fit(number, missing)
                return self._propose_end(number, view, said, cause, starts_again=False)
            case Action.WAIT:
                missing = {worker_id: view.expected[worker_id] for worker_id in view.missing}
                try:
                    goes_on = self._worlds.go_on_without(number, missing, waited_s, f"rank {self._rank}")
                except StateLost as lost:
                    return self._propose_end(number, view, said, str(lost), starts_again=True)
                if not goes_on:
                    stuck = {worker_id: each for worker_id, each in survivors.items() if worker_id not in busy}
                    self._survivors.end_stuck(number, stuck, waited_s)
                return None

    def _propose_end(
        self, number: int, view: QuorumView, said: Mapping[int, str], cause: str, *, starts_again: bool
    ) -> Mapping[int, str] | None:
        """Propose a generation of those that are here, which save what they hold and go apart."""
        there = {worker_id: each for worker_id, each in from_texts(said).items() if worker_id not in view.missing}
        ends = {
            worker_id: replace(each, abort_reason=cause, starts_again=starts_again) for worker_id, each in there.items()
        }
        return self._job_store.propose(number, {worker_id: to_text(each) for worker_id, each in ends.items()})

    def _accept(self, number: int, arrival: Arrival, plan: Mapping[int, str]) -> Generation | None:
        """Take part in a plan, unless it names what this process was before it came again."""
        world, brought = self._worlds.now, from_texts(plan)
        if self._worker_id not in brought:
            raise RecoveryError("the job ends: the others have waited for this process for too long")
        mine = brought[self._worker_id]
        if (mine.incarnation, mine.committed) == (arrival.incarnation, arrival.committed):
            arrivals = {
                rank: brought[worker_id] for rank, worker_id in enumerate(world.worker_ids) if worker_id in brought
            }
            formed = Generation(number=number, arrivals=arrivals)
            if len(arrivals) < world.size:
                raise ReplacementTimeout(formed, mine.abort_reason, starts_again=mine.starts_again)
            self._look_for_losses(formed)
            return formed
        if mine.incarnation > arrival.incarnation:
            raise self._replaced()
        cause = "the plan names a process as it was before"
        self._job_store.end(number, FailureRecord(kind="request", cause=cause, reporter=f"rank {self._rank}"))
        return None

    def _look_for_losses(self, formed: Generation) -> None:
        """End a generation one of whose members was lost while its plan was made.

        Its agent counts the loss before it looks for a plan, and this comes after the plan: one of the two must see it.
        """
        now = self._job_store.incarnations(self._worlds.now.worker_ids)
        if any(now[rank] != arrival.incarnation for rank, arrival in formed.arrivals.items()):
            cause = "a member was lost when it had just arrived"
            self._job_store.end(
                formed.number, FailureRecord(kind="process", cause=cause, reporter=f"rank {self._rank}")
            )

    @property
    def _rank(self) -> int:
        rank = self._worlds.now.rank_of(self._worker_id)
        assert rank is not None
        return rank

    def _ranks_of(self, worker_ids: Iterable[int]) -> list[int | None]:
        return [self._worlds.now.rank_of(worker_id) for worker_id in worker_ids]

    def _replaced(self) -> RecoveryError:
        return RecoveryError(
            f"another process has taken the place of rank {self._rank}, whose node was silent for too long. This one "
            "ends; nothing is to be done."
        )

    def _missing_survivors(self, number: int, view: QuorumView) -> dict[int, int]:
        """Those that are missing though they were not lost, and have not said where they stopped."""
        before, job_store = members_before(self._job_store, number) if view.missing else {}, self._job_store
        missing = {worker_id: view.expected[worker_id] for worker_id in view.missing if worker_id not in view.arrived}
        return {
            worker_id: incarnation
            for worker_id, incarnation in missing.items()
            if incarnation == before.get(worker_id, 0) and not has_stopped(job_store, number, worker_id)
        }


def to_text(arrival: Arrival) -> str:
    """For the job store; what is equal has the same text."""
    return json.dumps(arrival.to_dict())


def from_texts(texts: Mapping[int, str]) -> dict[int, Arrival]:
    """Inverse of `to_text`; most are equal, and those are read once."""
    known = {text: Arrival.from_dict(json.loads(text)) for text in set(texts.values())}
    return {worker_id: known[text] for worker_id, text in texts.items()}
