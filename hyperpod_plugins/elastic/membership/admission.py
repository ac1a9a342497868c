"""How processes join a running job, and how the job continues without those it has lost.

The initial world publishes the elastic spec. A process that comes later registers as a candidate. Once there are
enough candidates for whole replicas and the policy lets the job grow, one of the candidates plans the next world. The
joiners in the plan set themselves up while training continues. When all of them are ready they announce it, and the
present world hands over to the planned one between two steps.
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from torch.distributed import DistError

from hyperpod_plugins.elastic.launcher.signal_queue import ended_by_sigterm
from hyperpod_plugins.elastic.membership.elastic_spec import ElasticSpec, ReplicaView, elastic_spec_of, next_size
from hyperpod_plugins.elastic.membership.restart_policy import NOT_NEEDED
from hyperpod_plugins.elastic.store.job_store import JobStore
from hyperpod_plugins.elastic.store.world import WorldPlan, num_setbacks, replan_world
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.errors import RecoveryError

log = logging.getLogger(__name__)

_RECOVERS = "recovers"  # value: 1 while a program with recovery is being set up, 0 if recovery is switched off
_INITIAL_WORLD = "founders"  # value: size of the initial world
_CANDIDATES = "candidates"  # list: worker_id and incarnation of a candidate, and the world it saw
_LEAVING = "leaving"  # value per worker_id: incarnation of the process that got a preemption notice
_NOTICES = "notices"  # number of preemption notices
_SCALE = "scale"  # lasting value: number of replicas asked for
_PENDING_WORLD = "wanted_world"  # value: number of the planned world whose joiners are ready; only grows
_POLL_S = 0.05
_LONGEST_POLL_S = 1.0
_PART_OF_WAIT = 0.05
_POLLS_A_SECOND = 200.0
"""Polls per second of all candidates together; each poll makes about ten requests to the store."""
_RESTART_WAIT_S = 300.0
"""How long a process waits for its agent to end it; longer than agents wait before they kill. If it has not been
ended by then, the agent that decided to restart all workers was lost before it could say so, and no other node has
come."""
_CANDIDATE_TAKEOVER_S = 3.0
"""An agent replaces a lost process faster than this; afterwards a candidate takes its place."""
_SET_UP_S = 120.0
"""Time from a plan until all of its joiners must be ready; then those that are ready plan again."""


def publish_initial_world(job_store: JobStore, world: WorldPlan) -> None:
    """Publish the size of the job's initial world; called by its ranks."""
    job_store.set_if_absent(_INITIAL_WORLD, str(world.size).encode())


def announce(job: JobEnv) -> None:
    """Announce that the program takes part in recovery, before its initial world exists."""
    if not job.is_joining:
        with contextlib.suppress(DistError):  # whatever needs the store reports its loss
            JobStore.connect(job).set_if_absent(_RECOVERS, b"1")


def withdraw_announcement(job: JobEnv) -> None:
    """Withdraw `announce`: the program takes no part in recovery."""
    with contextlib.suppress(DistError):
        JobStore.connect(job).set(_RECOVERS, b"0")


def arm(job_store: JobStore, is_ending: Callable[[], bool] = lambda: False) -> bool:
    """Announce that there is state to recover from now on, so that lost processes are replaced.

    If an agent has just decided to restart all workers because no process had armed the job, this process waits to be
    ended: any work it did now would be repeated. While it waits, SIGTERM ends it, whatever handler the program has.

    Args:
        job_store: of the job.
        is_ending: whether the program has already received SIGTERM and deferred it.

    Returns:
        False if `is_ending()` while all workers are about to restart.
    """
    if job_store.arm():
        return True
    until_s = time.monotonic() + _RESTART_WAIT_S
    with ended_by_sigterm():
        while not job_store.arm():
            if is_ending():
                return False
            if time.monotonic() > until_s:
                log.warning(
                    "all workers were to restart, but have not within %.0f s: the job continues", _RESTART_WAIT_S
                )
                job_store.void_restart_all()
            time.sleep(_POLL_S)
    return True


def uses_recovery(job_store: JobStore) -> bool:
    """Whether the program has announced that it takes part in recovery."""
    return job_store.try_get(_RECOVERS) == b"1" or world_or_none(job_store) is not None


def present_world(job_store: JobStore) -> WorldPlan:
    """The world of the running generation, or of the one that is being formed.

    Raises:
        RecoveryError: the store holds no initial world.
    """
    world = world_or_none(job_store)
    if world is None:
        raise RecoveryError("the job's store holds no initial world to join. Was the store restarted?")
    return world


def is_in_world(job_store: JobStore, worker_id: int) -> bool:
    """Whether the loss of this worker affects the job: it belongs to the present world, or no world is known."""
    world = world_or_none(job_store)
    return world is None or worker_id in world.worker_ids


def world_or_none(job_store: JobStore) -> WorldPlan | None:
    """Like `present_world`, but None if the program takes no part in recovery."""
    number = job_store.world_number()
    size = None if number else job_store.try_get(_INITIAL_WORLD)
    return job_store.world(number) if number else None if size is None else WorldPlan.initial(int(size))


def poll_s(num_waiting: int, waited_s: float) -> float:
    """Seconds until a candidate polls again: a small fraction of the time since it last saw a change.

    Args:
        num_waiting: number of candidates; with thousands of them each polls less often.
        waited_s: seconds since this process came, or last saw a change.
    """
    return max(_POLL_S, min(_LONGEST_POLL_S, waited_s * _PART_OF_WAIT), num_waiting / _POLLS_A_SECOND)


def turn_poll_s(job_store: JobStore, world: WorldPlan, before: WorldPlan, waited_s: float) -> float:
    """Like `poll_s`, for a joiner that is set up and waits for its planned world to take over.

    Once all joiners are ready, the poll is short: the members of the world `before` stop and wait for each of them to
    notice.
    """
    if pending_world(job_store) >= world.number:
        return _POLL_S
    return poll_s(len(set(world.worker_ids).difference(before.worker_ids)), waited_s)


def await_turn(job_store: JobStore, world: WorldPlan, worker_id: int, incarnation: int) -> None:
    """Announce that this process is ready for a planned world, and wait until that world takes over.

    Raises:
        SystemExit: the job has ended, or the plan is void; in the latter case a new process of this worker_id waits
            again.
    """
    if present_world(job_store).number >= world.number:
        return
    job_store.set(_ready(world, worker_id), str(incarnation).encode())
    began_s = time.monotonic()
    while (before := present_world(job_store)).number < world.number:
        if not job_store.is_armed:
            raise SystemExit(0)
        newest = _newest_plan(job_store, world.number)
        is_superseded = newest is not None and newest.number > world.number
        if is_superseded or not _can_begin(job_store, world, before):
            log.warning("the plan of world %d is void: one of its joiners was lost", world.number)
            raise SystemExit(NOT_NEEDED)
        if pending_world(job_store) < world.number and _are_ready(job_store, world, before):
            job_store.raise_to(_PENDING_WORLD, world.number)
        time.sleep(turn_poll_s(job_store, world, before, time.monotonic() - began_s))


def pending_world(job_store: JobStore) -> int:
    """Number of the planned world whose joiners are all ready; 0 for none."""
    return int(job_store.try_get(_PENDING_WORLD) or 0)


def announce_preemption(job_store: JobStore, worker_id: int, incarnation: int) -> None:
    """Record a preemption notice, so that the job does not wait for a replacement of the process."""
    job_store.set(_leaving(worker_id), str(incarnation).encode())
    job_store.count(_NOTICES, 1)


def all_preempted(job_store: JobStore, missing: Mapping[int, int]) -> bool:
    """Whether all missing workers had preemption notices, so that the job need not wait for replacements."""
    noticed = job_store.try_get_all([_leaving(worker_id) for worker_id in missing])
    return all(int(noticed.get(_leaving(worker_id), "-2")) >= number - 1 for worker_id, number in missing.items())


def request_replicas(job_store: JobStore, num_replicas: int) -> None:
    """Ask for a number of replicas, to which the job grows or shrinks.

    The request holds until another number is asked for, also across a restart of all workers.
    """
    job_store.set_lasting(_SCALE, str(num_replicas).encode())


def job_status(job_store: JobStore) -> dict[str, int]:
    """The size of the job, for status output."""
    world, spec = world_or_none(job_store), elastic_spec_of(job_store)
    size = 0 if world is None else world.size
    return {
        "ranks": size,
        "replicas": size // spec.replica_size if spec is not None else 0,
        "shard_degree": spec.degrees[0] if spec is not None else 0,
        "tensor_degree": spec.degrees[1] if spec is not None else 0,
        "waiting": 0 if world is None else len(candidates(job_store, world)),
        "asked": _requested_replicas(job_store),
        "generation": job_store.generation(),
    }


def _requested_replicas(job_store: JobStore) -> int:
    return int(job_store.try_get_lasting(_SCALE) or 0)


def _leaving(worker_id: int) -> str:
    return f"{_LEAVING}/{worker_id}"


def preempted_workers(job_store: JobStore, worker_ids: Sequence[int]) -> set[int]:
    """Return the `worker_ids` whose living process has a preemption notice."""
    if not job_store.count(_NOTICES):
        return set()
    noticed, living = (
        job_store.try_get_all([_leaving(worker_id) for worker_id in worker_ids]),
        job_store.incarnations(worker_ids),
    )
    return {
        worker_id
        for worker_id, now in zip(worker_ids, living, strict=True)
        if int(noticed.get(_leaving(worker_id), "-1")) >= now
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionView:
    """What a process sees of an elastic job when it plans the next world."""

    spec: ElasticSpec
    world: WorldPlan
    """The present one."""
    candidates: Sequence[int] = ()
    """worker_ids that wait to be taken in."""
    leaving: AbstractSet[int] = frozenset()
    """worker_ids of the world that have a preemption notice."""
    missing: AbstractSet[int] = frozenset()
    """worker_ids of the world that have no process."""
    requested: int = 0
    """Number of replicas asked for; 0 without a request."""
    since_loss_s: float = math.inf
    """Seconds since `missing` were lost; infinite if all of them had preemption notices."""
    since_arrival_s: float = math.inf
    """Seconds since the last candidate came."""
    since_change_s: float = math.inf
    """Seconds since the world began."""
    num_setbacks: int = 0
    """As returned by the function `num_setbacks`."""

    @property
    def num_replicas(self) -> int:
        """Number of replicas in the present world."""
        return self.world.size // self.spec.replica_size

    def next_size(self, *, healthy: int | None = None, leaving: int = 0, waiting: int = 0) -> int:
        """The number of replicas for which the policy decides; all are healthy if `healthy` is None."""
        view = ReplicaView(
            now=self.num_replicas,
            healthy=self.num_replicas if healthy is None else healthy,
            leaving=leaving,
            waiting=waiting,
            requested=self.requested,
            since_loss_s=self.since_loss_s,
            since_arrival_s=self.since_arrival_s,
            since_change_s=self.since_change_s,
            num_setbacks=self.num_setbacks,
        )
        return next_size(view, self.spec.policy, self.spec.sizes)


def plan_growth(view: AdmissionView) -> WorldPlan | None:
    """Plan a larger world if the policy lets the job grow now, and no worker is about to leave."""
    now, target = view.num_replicas, view.next_size(waiting=len(view.candidates) // view.spec.replica_size)
    if view.leaving or target <= now:
        return None
    cause = f"the job grows from {now} to {target} replicas"
    return _next_world(view, target, cause, set(view.world.worker_ids))


def plan_scale_down(view: AdmissionView) -> WorldPlan | None:
    """Plan a smaller world if fewer replicas were asked for, or if workers have preemption notices."""
    if not (view.requested or view.leaving):
        return None
    now, staying = view.num_replicas, set(view.world.worker_ids) - view.leaving
    target = view.next_size(leaving=now - num_complete_replicas(view.world, staying, view.spec.replica_size))
    if target >= now:
        return None
    many = len(view.leaving)
    why = (
        f"{many} process{'es have' if many > 1 else ' has'} got notice"
        if many
        else f"{view.requested} replicas were asked for"
    )
    return _next_world(view, target, f"{why}: the job shrinks from {now} to {target}", staying)


def plan_without_missing(view: AdmissionView) -> WorldPlan | None:
    """Plan the world without missing workers: candidates replace them, or the job shrinks; None to wait.

    Raises:
        StateLost: no survivor holds a part of the state.
    """
    now, staying = view.num_replicas, set(view.world.worker_ids) - view.missing
    target, cause = now, f"waiting processes replace {len(view.missing)} lost ones"
    if len(view.candidates) < len(view.missing):
        target = view.next_size(healthy=num_complete_replicas(view.world, staying, view.spec.replica_size))
        if target >= now:
            return None
        cause = f"the job shrinks from {now} to {target} replicas"
    return _next_world(view, target, cause, staying)


def _next_world(view: AdmissionView, num_replicas: int, cause: str, staying: AbstractSet[int]) -> WorldPlan:
    planned = replan_world(
        view.world,
        healthy=staying,
        joining=view.candidates,
        num_replicas=num_replicas,
        replica_size=view.spec.replica_size,
        cause=cause,
    )
    return replace(planned, num_lost=view.world.size - len(staying))


class Admission:
    """Plans the next world of an elastic job, as one of its processes or candidates. Use it from one thread."""

    def __init__(self, job_store: JobStore, spec: ElasticSpec) -> None:
        """Use the thread's own connection; `spec` is that of the job."""
        self._job_store, self._spec = job_store, spec

    def await_world(self, world: WorldPlan, worker_id: int, incarnation: int) -> WorldPlan:
        """Register a process outside of the present world as a candidate, and wait for a plan that includes it.

        Raises:
            SystemExit: the job ended without needing this process.
        """
        job_store = self._job_store
        add_candidate(job_store, worker_id, incarnation, world)
        log.warning("worker %d waits until the job grows", worker_id)
        came_s = changed_s = quiet_s = time.monotonic()
        num_waiting, number = 0, world.number
        seen: tuple[int, ...] = ()
        while True:
            if not job_store.is_armed:
                log.warning("the job has ended; worker %d was not needed", worker_id)
                raise SystemExit(0)
            world, planned = present_world(job_store), _newest_plan(job_store, number)
            number = world.number if planned is None else planned.number
            if planned is not None and worker_id in planned.worker_ids:
                return planned
            now_s, waiting = time.monotonic(), candidates(job_store, world)
            if len(waiting) != num_waiting:
                num_waiting, came_s = len(waiting), now_s
            if planned is None or _is_void(job_store, planned, world) or now_s - changed_s > _SET_UP_S:
                self._grow(world, waiting, now_s - came_s, after=max(number, world.number))
                changed_s = now_s
            if seen != (len(waiting), number, world.number):
                seen, quiet_s = (len(waiting), number, world.number), now_s
            time.sleep(poll_s(len(waiting), now_s - quiet_s))

    def world_without(self, world: WorldPlan, missing: Mapping[int, int], waited_s: float) -> WorldPlan | None:
        """Plan the world that continues without the missing workers; None means: wait and call again.

        Candidates take over the ranks of lost workers if the agents have not replaced those within
        `_CANDIDATE_TAKEOVER_S`. Otherwise the job shrinks as soon as the policy allows it, or at once if all missing
        workers had preemption notices.

        Args:
            world: the present one.
            missing: worker_ids without a process, each with the incarnation that is awaited there.
            waited_s: how long they have been missing, in seconds.

        Raises:
            StateLost: no survivor holds a part of the state.
        """
        are_leaving = all_preempted(self._job_store, missing)
        if waited_s < _CANDIDATE_TAKEOVER_S and not are_leaving:
            return None
        view = AdmissionView(
            spec=self._spec,
            world=world,
            candidates=candidates(self._job_store, world),
            missing=missing.keys(),
            since_loss_s=math.inf if are_leaving else waited_s,
        )
        planned = plan_without_missing(view)
        return None if planned is None else self._propose(world, planned)

    def scale_down(self, world: WorldPlan) -> None:
        """Plan a smaller world if one was asked for, or if processes have preemption notices.

        One member calls this about once a second.
        """
        requested, leaving = _requested_replicas(self._job_store), preempted_workers(self._job_store, world.worker_ids)
        view = AdmissionView(spec=self._spec, world=world, leaving=leaving, requested=requested)
        planned = plan_scale_down(view)
        if planned is None or pending_world(self._job_store) > world.number:
            return
        smaller = self._propose(world, planned)
        if smaller is not None:
            self._job_store.raise_to(_PENDING_WORLD, smaller.number)

    def _grow(self, world: WorldPlan, waiting: Sequence[int], since_arrival_s: float, *, after: int) -> None:
        """Plan a larger world if the policy lets the job grow now."""
        job_store, min_stable_s = self._job_store, self._spec.policy.min_stable_s
        view = AdmissionView(
            spec=self._spec,
            world=world,
            candidates=waiting,
            leaving=preempted_workers(job_store, world.worker_ids),
            requested=_requested_replicas(job_store),
            since_arrival_s=since_arrival_s,
        )
        planned = plan_growth(view)
        history = job_store.history() if planned is not None and min_stable_s else []
        if history:
            initial = WorldPlan.initial(int(job_store.try_get(_INITIAL_WORLD) or 0))
            setbacks = num_setbacks([initial, *history], min_stable_s)
            planned = plan_growth(replace(view, since_change_s=self._age_s(world), num_setbacks=setbacks))
        if planned is not None:
            self._propose(world, planned, after=after)

    def _propose(self, world: WorldPlan, planned: WorldPlan, *, after: int | None = None) -> WorldPlan | None:
        """Propose the next world; returns the plan if it is the accepted one, by whichever process, else None.

        Args:
            world: the present one.
            planned: the next one; its number is assigned here.
            after: number of the newest plan known when this was decided, so that only one of several processes that
                decide the same is accepted; None to come after all plans.
        """
        newest = _newest_plan(self._job_store, world.number) or world
        number = (newest.number if after is None else after) + 1
        age_s = self._age_s(world) if self._spec.policy.min_stable_s else math.inf
        planned = replace(planned, number=number, previous_lasted_s=age_s)
        if newest.number > world.number and replace(planned, number=newest.number) == newest:
            return newest
        return planned if self._job_store.propose_world(planned) == planned else None

    def _age_s(self, world: WorldPlan) -> float:
        """Age of the present world in seconds, by its members' own clocks; 0 before their first heartbeat."""
        said = self._job_store.heartbeats(world.worker_ids).values()
        ages_s = (heartbeat["in_world_s"] for heartbeat in said if heartbeat["world_number"] == world.number)
        return max(ages_s, default=0.0)


def find_world(job_store: JobStore, worker_id: int, incarnation: int) -> WorldPlan:
    """Return the world that a joiner is to set itself up for.

    A replacement of a lost process gets the present world at once. Any other joiner waits until a planned world
    includes it.

    Raises:
        RecoveryError: the job does not change its size.
        SystemExit: the job ended without needing this process.
    """
    world = present_world(job_store)
    if worker_id in world.worker_ids:
        return world
    spec = elastic_spec_of(job_store)
    if spec is None:
        raise RecoveryError(
            f"worker {worker_id} lies outside of a world of {world.size} ranks, and the job does not change its size. "
            "To let it, use the callback ElasticTraining."
        )
    return Admission(job_store, spec).await_world(world, worker_id, incarnation)


def num_complete_replicas(world: WorldPlan, staying: AbstractSet[int], replica_size: int) -> int:
    """How many complete replicas the workers in `staying` can form."""
    return min(
        sum(worker_id in staying for worker_id in world.worker_ids[index::replica_size])
        for index in range(replica_size)
    )


def _newest_plan(job_store: JobStore, at_least: int) -> WorldPlan | None:
    newest, number = job_store.world(at_least), at_least
    while (later := job_store.world(number + 1)) is not None:
        newest, number = later, number + 1
    return newest


def add_candidate(job_store: JobStore, worker_id: int, incarnation: int, world: WorldPlan) -> None:
    """Register a process outside of the world as a candidate."""
    job_store.append(_CANDIDATES, lambda _: f"{worker_id} {incarnation} {world.number}")


def candidates(job_store: JobStore, world: WorldPlan) -> list[int]:
    """worker_ids outside of the world whose living process is a candidate and has not been in a world since."""
    said: dict[tuple[int, int], int] = {}
    for text in job_store.read_list(_CANDIDATES):
        worker_id, incarnation, since = map(int, text.split())
        said[worker_id, incarnation] = since
    worker_ids = sorted({worker_id for worker_id, _ in said} - set(world.worker_ids))
    living = job_store.incarnations(worker_ids)
    leaving = preempted_workers(job_store, worker_ids)
    waiting = [each for each in zip(worker_ids, living, strict=True) if each in said and each[0] not in leaving]
    first = min((said[each] for each in waiting), default=world.number)
    former = {n: known for n in range(first + 1, world.number) if (known := job_store.world(n)) is not None}
    return [
        worker_id
        for worker_id, incarnation in waiting
        if not any(worker_id in known.worker_ids for n, known in former.items() if n > said[worker_id, incarnation])
    ]


def _can_begin(job_store: JobStore, planned: WorldPlan, before: WorldPlan) -> bool:
    """Whether all joiners of a planned world are still waiting."""
    waiting = candidates(job_store, before)
    return all(worker_id in before.worker_ids or worker_id in waiting for worker_id in planned.worker_ids)


def _is_void(job_store: JobStore, planned: WorldPlan, world: WorldPlan) -> bool:
    """Whether a plan will not be carried out: it is outdated, or some of its joiners are gone.

    A plan without joiners takes over at once or never.
    """
    if planned.number <= world.number or not _can_begin(job_store, planned, world):
        return True
    return set(planned.worker_ids) <= set(world.worker_ids) and pending_world(job_store) < planned.number


def _are_ready(job_store: JobStore, world: WorldPlan, before: WorldPlan) -> bool:
    joining = [worker_id for worker_id in world.worker_ids if worker_id not in before.worker_ids]
    said = job_store.try_get_all([_ready(world, worker_id) for worker_id in joining])
    living = job_store.incarnations(joining)
    return all(
        said.get(_ready(world, worker_id)) == str(now).encode() for worker_id, now in zip(joining, living, strict=True)
    )


def _ready(world: WorldPlan, worker_id: int) -> str:
    return f"ready/{world.number}/{worker_id}"
