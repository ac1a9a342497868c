"""How a process that is no part of the world comes into it, and how the world goes on without those it has lost.

The founders leave the terms on which the job may grow. Whoever comes later says so, and as soon as there are enough for
whole replicas, and the policy lets the job grow, one of those that wait plans the next world. Those in the plan set
themselves up while the job goes on. When all of them are ready they say that too, and the members of the present world
make way between two steps.
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from torch.distributed import DistError

from hyperpod_plugins.elastic.launcher.signal_queue import ended_by_sigterm
from hyperpod_plugins.elastic.membership.elastic_spec import ElasticSpec, elastic_spec_of
from hyperpod_plugins.elastic.membership.restart_policy import NOT_NEEDED
from hyperpod_plugins.elastic.scaling.policy import ReplicaView, next_size
from hyperpod_plugins.elastic.store.job_store import JobStore
from hyperpod_plugins.elastic.store.world import WorldPlan, num_setbacks, replan_world
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.errors import RecoveryError

log = logging.getLogger(__name__)

_RECOVERS = "recovers"  # value: 1 where a program that recovers is being set up, 0 where it has been told not to
_FOUNDERS = "founders"  # value: the size of the first world
_CANDIDATES = "candidates"  # list: place and number of a process that wants to come in, and the world
_LEAVING = "leaving"  # value PLACE: the number of the process there, which has got notice
_NOTICES = "notices"  # count of those
_SCALE = "scale"  # lasting value: replicas that somebody has asked for
_WANTED = "wanted_world"  # value: number of the planned world that is ready; it only grows
_POLL_S = 0.05
_LONGEST_POLL_S = 1.0
_PART_OF_WAIT = 0.05
_POLLS_A_SECOND = 200.0
"""Of all processes that wait together; each takes about ten requests."""
_ENDED_S = 300.0
"""How long a process waits for its agent to end it; longer than agents wait before they kill. After that, whoever has
decided that all begin again was lost before it could say so, and no other node has come."""
_SPARE_AFTER_S = 3.0
"""An agent replaces a process within less; after that, one that waits takes its place."""
_SET_UP_S = 120.0
"""Time from a plan until all in it must be ready; then those that are plan again."""


def publish_initial_world(job_store: JobStore, world: WorldPlan) -> None:
    """Say, as a founder, how large the first world of the job is."""
    job_store.set_if_absent(_FOUNDERS, str(world.size).encode())


def announce(job: JobEnv) -> None:
    """Say that the program is to take part in recovery, before its first world is there."""
    if not job.is_joining:
        with contextlib.suppress(DistError):  # whoever needs the store says so
            JobStore.connect(job).set_if_absent(_RECOVERS, b"1")


def renounce(job: JobEnv) -> None:
    """Say that the program takes no part in recovery, though it may have announced itself."""
    with contextlib.suppress(DistError):
        JobStore.connect(job).set(_RECOVERS, b"0")


def arm(job_store: JobStore, is_ending: Callable[[], bool] = lambda: False) -> bool:
    """Say that there is something to recover from now on, so that lost processes are replaced.

    Where an agent has just decided that all begin again, since no process had said so, this one waits to be ended: what
    it did now would be done twice. While it waits, SIGTERM ends it, whatever handler the program has.

    Args:
        job_store: of the job.
        is_ending: whether SIGTERM has come already, and the program has only taken a note of it.

    Returns:
        False if it has, and all begin again.
    """
    if job_store.arm():
        return True
    until_s = time.monotonic() + _ENDED_S
    with ended_by_sigterm():
        while not job_store.arm():
            if is_ending():
                return False
            if time.monotonic() > until_s:
                log.warning("all were to begin again, and have not within %.0f s: the job goes on", _ENDED_S)
                job_store.arm_again()
            time.sleep(_POLL_S)
    return True


def is_known(job_store: JobStore) -> bool:
    """Whether the program has said that it takes part in recovery."""
    return job_store.try_get(_RECOVERS) == b"1" or world_or_none(job_store) is not None


def present_world(job_store: JobStore) -> WorldPlan:
    """The world for which the running generation was formed, or the next one is being formed.

    Raises:
        RecoveryError: the founders have left nothing.
    """
    world = world_or_none(job_store)
    if world is None:
        raise RecoveryError("the job has no founders whom a newcomer could join. Was its store restarted?")
    return world


def takes_part(job_store: JobStore, worker_id: int) -> bool:
    """Whether the loss of the process in a place concerns the job: it is one of the present world."""
    world = world_or_none(job_store)
    return world is None or worker_id in world.worker_ids


def world_or_none(job_store: JobStore) -> WorldPlan | None:
    """`present_world`; None where the program takes no part in recovery."""
    number = job_store.world_number()
    size = None if number else job_store.try_get(_FOUNDERS)
    return job_store.world(number) if number else None if size is None else WorldPlan.initial(int(size))


def find_world(job_store: JobStore, worker_id: int, incarnation: int) -> WorldPlan:
    """The world that a newcomer is to set itself up for: at once where it replaces somebody, or when there is a plan.

    Raises:
        RecoveryError: the job does not grow.
        SystemExit: the job has come to its end without this process.
    """
    world = present_world(job_store)
    if worker_id in world.worker_ids:
        return world
    spec = elastic_spec_of(job_store)
    if spec is None:
        raise RecoveryError(
            f"worker {worker_id} lies outside of a world of {world.size} ranks, and the job does not change its size. "
            "Use the callback ElasticTraining where it should."
        )
    add_candidate(job_store, worker_id, incarnation, world)
    log.warning("worker %d waits until the job grows", worker_id)
    came_s = changed_s = quiet_s = time.monotonic()
    num_waiting, number = 0, world.number
    seen: tuple[int, ...] = ()
    while True:
        if not job_store.is_armed:
            log.warning("the job has come to its end, and worker %d was not needed", worker_id)
            raise SystemExit(0)
        world, planned = present_world(job_store), _newest_plan(job_store, number)
        number = world.number if planned is None else planned.number
        if planned is not None and worker_id in planned.worker_ids:
            return planned
        now_s, waiting = time.monotonic(), candidates(job_store, world)
        if len(waiting) != num_waiting:
            num_waiting, came_s = len(waiting), now_s
        if planned is None or _is_void(job_store, planned, world) or now_s - changed_s > _SET_UP_S:
            _plan(job_store, spec, world, waiting, now_s - came_s, after=max(number, world.number))
            changed_s = now_s
        if seen != (len(waiting), number, world.number):
            seen, quiet_s = (len(waiting), number, world.number), now_s
        time.sleep(poll_s(len(waiting), now_s - quiet_s))


def poll_s(num_waiting: int, waited_s: float) -> float:
    """Seconds until a process that waits to come in asks again: a small part of the time for which nothing has changed.

    Args:
        num_waiting: processes that wait like this one; with thousands of them each asks less often.
        waited_s: seconds since this process came, or last saw something change.
    """
    return max(_POLL_S, min(_LONGEST_POLL_S, waited_s * _PART_OF_WAIT), num_waiting / _POLLS_A_SECOND)


def turn_poll_s(job_store: JobStore, world: WorldPlan, before: WorldPlan, waited_s: float) -> float:
    """The same for a process that waits for its turn, as all newcomers of a planned world do.

    When all of them are ready the members of the world before stop, and wait for each of them to notice.
    """
    if pending_world(job_store) >= world.number:
        return _POLL_S
    return poll_s(len(set(world.worker_ids).difference(before.worker_ids)), waited_s)


def await_turn(job_store: JobStore, world: WorldPlan, worker_id: int, incarnation: int) -> None:
    """Say that a process is set up for a planned world, and wait until that world takes over.

    Raises:
        SystemExit: the job has come to its end, or the plan is void; then another process begins again in this place.
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
            log.warning("the plan of world %d is void, for a process that was to come in was lost", world.number)
            raise SystemExit(NOT_NEEDED)
        if pending_world(job_store) < world.number and _are_ready(job_store, world, before):
            job_store.raise_to(_WANTED, world.number)
        time.sleep(turn_poll_s(job_store, world, before, time.monotonic() - began_s))


def pending_world(job_store: JobStore) -> int:
    """Number of the planned world whose newcomers are all ready; 0 for none."""
    return int(job_store.try_get(_WANTED) or 0)


def announce_preemption(job_store: JobStore, worker_id: int, incarnation: int) -> None:
    """Say that a process is about to leave for good, so that nobody waits for its replacement."""
    job_store.set(_leaving(worker_id), str(incarnation).encode())
    job_store.count(_NOTICES, 1)


def world_without(
    job_store: JobStore, spec: ElasticSpec, world: WorldPlan, missing: Mapping[int, int], waited_s: float
) -> WorldPlan | None:
    """Plan the world that goes on without those of its places that are missing; None to wait, and to look again.

    Processes that wait to come in take the places of lost ones, if no agent has replaced those within moments.
    Otherwise the job shrinks, as soon as the policy allows it, or at once where all that are missing had given notice.

    Args:
        job_store: of the job.
        spec: of the job.
        world: the present one.
        missing: places of it without a process, and the number of the process that is to come.
        waited_s: how long they have been missing, in seconds.

    Raises:
        StateLost: nobody that is left holds a part of the state.
    """
    are_leaving = have_left(job_store, missing)
    if waited_s < _SPARE_AFTER_S and not are_leaving:
        return None
    size, now = spec.replica_size, world.size // spec.replica_size
    healthy = set(world.worker_ids).difference(missing)
    waiting = candidates(job_store, world)
    if len(waiting) >= len(missing):
        target, cause = now, f"processes that waited take the places of {len(missing)} lost ones"
    else:
        whole = num_whole(world, healthy, size)
        view = ReplicaView(now=now, healthy=whole, since_loss_s=math.inf if are_leaving else waited_s)
        target = next_size(view, spec.policy, spec.sizes)
        cause = f"the job shrinks from {now} to {target} replicas"
        if target >= now:
            return None
    return _propose(job_store, spec, world, target, cause, healthy=healthy, joining=waiting)


def have_left(job_store: JobStore, missing: Mapping[int, int]) -> bool:
    """Whether all that are missing had got notice, so that nobody need wait for them."""
    noticed = job_store.try_get_all([_leaving(worker_id) for worker_id in missing])
    return all(int(noticed.get(_leaving(worker_id), "-2")) >= number - 1 for worker_id, number in missing.items())


def ask_for(job_store: JobStore, num_replicas: int) -> None:
    """Have the job grow or shrink to so many replicas; it stays there until somebody asks for another number.

    That holds when all processes start again, too.
    """
    job_store.set_lasting(_SCALE, str(num_replicas).encode())


def plan_scale_down(job_store: JobStore, world: WorldPlan) -> None:
    """Plan a smaller world, where somebody has asked for one, or processes have got notice; for one member to call
    about once a second.
    """
    asked, leaving, spec = _asked(job_store), leaving_of(job_store, world.worker_ids), elastic_spec_of(job_store)
    if spec is None or not (asked or leaving) or pending_world(job_store) > world.number:
        return
    now, staying = world.size // spec.replica_size, set(world.worker_ids) - leaving
    view = ReplicaView(
        now=now,
        healthy=now,
        leaving=now - num_whole(world, staying, spec.replica_size),
        wanted=asked,
    )
    target = next_size(view, spec.policy, spec.sizes)
    if target >= now:
        return
    why = f"{len(leaving)} processes have got notice" if leaving else f"somebody asked for {asked} replicas"
    cause = f"{why}: the job shrinks from {now} to {target}"
    smaller = _propose(job_store, spec, world, target, cause, healthy=staying)
    if smaller is not None:
        job_store.raise_to(_WANTED, smaller.number)


def describe(job_store: JobStore) -> dict[str, int]:
    """The size of the job, for people."""
    world, spec = world_or_none(job_store), elastic_spec_of(job_store)
    size = 0 if world is None else world.size
    return {
        "ranks": size,
        "replicas": size // spec.replica_size if spec is not None else 0,
        "shard_degree": spec.degrees[0] if spec is not None else 0,
        "tensor_degree": spec.degrees[1] if spec is not None else 0,
        "waiting": 0 if world is None else len(candidates(job_store, world)),
        "asked": _asked(job_store),
        "generation": job_store.generation(),
    }


def _asked(job_store: JobStore) -> int:
    return int(job_store.try_get_lasting(_SCALE) or 0)


def _leaving(worker_id: int) -> str:
    return f"{_LEAVING}/{worker_id}"


def leaving_of(job_store: JobStore, worker_ids: Sequence[int]) -> set[int]:
    """Those of some places whose living process has got notice."""
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


def num_whole(world: WorldPlan, staying: AbstractSet[int], replica_size: int) -> int:
    """How many replicas can be put together of some places of a world."""
    return min(
        sum(worker_id in staying for worker_id in world.worker_ids[index::replica_size])
        for index in range(replica_size)
    )


def _plan(
    job_store: JobStore,
    spec: ElasticSpec,
    world: WorldPlan,
    waiting: Sequence[int],
    since_arrival_s: float,
    *,
    after: int,
) -> None:
    """Plan the world that comes next, if the policy lets the job grow now, and nobody is about to leave it."""
    if leaving_of(job_store, world.worker_ids):
        return
    now = world.size // spec.replica_size
    view = ReplicaView(
        now=now,
        healthy=now,
        waiting=len(waiting) // spec.replica_size,
        wanted=_asked(job_store),
        since_arrival_s=since_arrival_s,
    )
    if next_size(view, spec.policy, spec.sizes) <= now:
        return
    history = job_store.history() if spec.policy.min_stable_s else []
    if history:
        founders = WorldPlan.initial(int(job_store.try_get(_FOUNDERS) or 0))
        setbacks = num_setbacks([founders, *history], spec.policy.min_stable_s)
        view = replace(view, since_change_s=_age_s(job_store, world), num_setbacks=setbacks)
    target = next_size(view, spec.policy, spec.sizes)
    if target > now:
        cause = f"the job grows from {now} to {target} replicas"
        _propose(job_store, spec, world, target, cause, after=after, joining=waiting)


def _propose(
    job_store: JobStore,
    spec: ElasticSpec,
    world: WorldPlan,
    num_replicas: int,
    cause: str,
    *,
    after: int | None = None,
    healthy: AbstractSet[int] | None = None,
    joining: Sequence[int] = (),
) -> WorldPlan | None:
    """Plan the world that comes next; returns the plan that counts if it is the same, whoever made it.

    Args:
        job_store: of the job.
        spec: of the job.
        world: the present one.
        num_replicas: of the next one.
        cause: for the record.
        after: number of the newest plan that was known when this was decided, so that of several who decide the same
            one is heard; None to come after all plans.
        healthy: places of the present world that go on; all of them if None.
        joining: places that come in.
    """
    newest = _newest_plan(job_store, world.number) or world
    staying = set(world.worker_ids) if healthy is None else healthy
    planned = replan_world(
        replace(world, number=newest.number if after is None else after),
        healthy=staying,
        joining=joining,
        num_replicas=num_replicas,
        replica_size=spec.replica_size,
        cause=cause,
    )
    age_s = _age_s(job_store, world) if spec.policy.min_stable_s else math.inf
    planned = replace(planned, num_lost=world.size - len(staying), lasted_s=age_s)
    if newest.number > world.number and replace(planned, number=newest.number) == newest:
        return newest
    return planned if job_store.propose_world(planned) == planned else None


def _age_s(job_store: JobStore, world: WorldPlan) -> float:
    """Seconds for which the present world has lasted, by its members' own clocks; 0 before they have said anything."""
    said = job_store.heartbeats(world.worker_ids).values()
    return max((heartbeat["in_world_s"] for heartbeat in said if heartbeat["world"] == world.number), default=0.0)


def _newest_plan(job_store: JobStore, at_least: int) -> WorldPlan | None:
    newest, number = job_store.world(at_least), at_least
    while (later := job_store.world(number + 1)) is not None:
        newest, number = later, number + 1
    return newest


def add_candidate(job_store: JobStore, worker_id: int, incarnation: int, world: WorldPlan) -> None:
    """Say that a process outside of a world wants to come in."""
    job_store.append(_CANDIDATES, lambda _: f"{worker_id} {incarnation} {world.number}")


def candidates(job_store: JobStore, world: WorldPlan) -> list[int]:
    """Places outside of a world whose living process has said that it wants to come in, and was not in since."""
    said: dict[tuple[int, int], int] = {}
    for text in job_store.listed(_CANDIDATES):
        worker_id, incarnation, since = map(int, text.split())
        said[worker_id, incarnation] = since
    worker_ids = sorted({worker_id for worker_id, _ in said} - set(world.worker_ids))
    living = job_store.incarnations(worker_ids)
    leaving = leaving_of(job_store, worker_ids)
    waiting = [each for each in zip(worker_ids, living, strict=True) if each in said and each[0] not in leaving]
    first = min((said[each] for each in waiting), default=world.number)
    former = {n: known for n in range(first + 1, world.number) if (known := job_store.world(n)) is not None}
    return [
        worker_id
        for worker_id, incarnation in waiting
        if not any(worker_id in known.worker_ids for n, known in former.items() if n > said[worker_id, incarnation])
    ]


def _can_begin(job_store: JobStore, planned: WorldPlan, before: WorldPlan) -> bool:
    """Whether all that are to come in with a planned world still wait."""
    waiting = candidates(job_store, before)
    return all(worker_id in before.worker_ids or worker_id in waiting for worker_id in planned.worker_ids)


def _is_void(job_store: JobStore, planned: WorldPlan, world: WorldPlan) -> bool:
    """Whether a plan will not be carried out: it is of the past, or some of its newcomers are gone.

    One that brings in nobody takes over at once, or never.
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
