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

from hyperpod_plugins.elastic.ledger import Ledger
from hyperpod_plugins.elastic.policy import ReplicaView, next_size
from hyperpod_plugins.elastic.restarts import NOT_NEEDED
from hyperpod_plugins.elastic.signals import ended_by_sigterm
from hyperpod_plugins.elastic.terms import Terms, terms_of
from hyperpod_plugins.elastic.world import World, num_setbacks, regroup
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


def found(ledger: Ledger, world: World) -> None:
    """Say, as a founder, how large the first world of the job is."""
    ledger.put_first(_FOUNDERS, str(world.size).encode())


def announce(job: JobEnv) -> None:
    """Say that the program is to take part in recovery, before its first world is there."""
    if not job.is_newcomer:
        with contextlib.suppress(DistError):  # whoever needs the store says so
            Ledger.connect(job).put_first(_RECOVERS, b"1")


def renounce(job: JobEnv) -> None:
    """Say that the program takes no part in recovery, though it may have announced itself."""
    with contextlib.suppress(DistError):
        Ledger.connect(job).put(_RECOVERS, b"0")


def arm(ledger: Ledger, is_ending: Callable[[], bool] = lambda: False) -> bool:
    """Say that there is something to recover from now on, so that lost processes are replaced.

    Where an agent has just decided that all begin again, since no process had said so, this one waits to be ended: what
    it did now would be done twice. While it waits, SIGTERM ends it, whatever handler the program has.

    Args:
        ledger: of the job.
        is_ending: whether SIGTERM has come already, and the program has only taken a note of it.

    Returns:
        False if it has, and all begin again.
    """
    if ledger.arm():
        return True
    until_s = time.monotonic() + _ENDED_S
    with ended_by_sigterm():
        while not ledger.arm():
            if is_ending():
                return False
            if time.monotonic() > until_s:
                log.warning("all were to begin again, and have not within %.0f s: the job goes on", _ENDED_S)
                ledger.arm_again()
            time.sleep(_POLL_S)
    return True


def is_known(ledger: Ledger) -> bool:
    """Whether the program has said that it takes part in recovery."""
    return ledger.find(_RECOVERS) == b"1" or world_or_none(ledger) is not None


def present_world(ledger: Ledger) -> World:
    """The world for which the running generation was formed, or the next one is being formed.

    Raises:
        RecoveryError: the founders have left nothing.
    """
    world = world_or_none(ledger)
    if world is None:
        raise RecoveryError("the job has no founders whom a newcomer could join. Was its store restarted?")
    return world


def takes_part(ledger: Ledger, place: int) -> bool:
    """Whether the loss of the process in a place concerns the job: it is one of the present world."""
    world = world_or_none(ledger)
    return world is None or place in world.places


def world_or_none(ledger: Ledger) -> World | None:
    """`present_world`; None where the program takes no part in recovery."""
    number = ledger.world_number()
    size = None if number else ledger.find(_FOUNDERS)
    return ledger.world(number) if number else None if size is None else World.of_founders(int(size))


def find_world(ledger: Ledger, place: int, incarnation: int) -> World:
    """The world that a newcomer is to set itself up for: at once where it replaces somebody, or when there is a plan.

    Raises:
        RecoveryError: the job does not grow.
        SystemExit: the job has come to its end without this process.
    """
    world = present_world(ledger)
    if place in world.places:
        return world
    terms = terms_of(ledger)
    if terms is None:
        raise RecoveryError(
            f"place {place} lies outside of a world of {world.size} ranks, and the job does not change its size. Use "
            "the callback ElasticTraining where it should."
        )
    stand(ledger, place, incarnation, world)
    log.warning("place %d waits until the job grows", place)
    came_s = changed_s = quiet_s = time.monotonic()
    num_waiting, number = 0, world.number
    seen: tuple[int, ...] = ()
    while True:
        if not ledger.is_armed:
            log.warning("the job has come to its end, and place %d was not needed", place)
            raise SystemExit(0)
        world, planned = present_world(ledger), _newest_plan(ledger, number)
        number = world.number if planned is None else planned.number
        if planned is not None and place in planned.places:
            return planned
        now_s, waiting = time.monotonic(), candidates(ledger, world)
        if len(waiting) != num_waiting:
            num_waiting, came_s = len(waiting), now_s
        if planned is None or _is_void(ledger, planned, world) or now_s - changed_s > _SET_UP_S:
            _plan(ledger, terms, world, waiting, now_s - came_s, after=max(number, world.number))
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


def turn_poll_s(ledger: Ledger, world: World, before: World, waited_s: float) -> float:
    """The same for a process that waits for its turn, as all newcomers of a planned world do.

    When all of them are ready the members of the world before stop, and wait for each of them to notice.
    """
    if wanted_world(ledger) >= world.number:
        return _POLL_S
    return poll_s(len(set(world.places).difference(before.places)), waited_s)


def await_turn(ledger: Ledger, world: World, place: int, incarnation: int) -> None:
    """Say that a process is set up for a planned world, and wait until that world takes over.

    Raises:
        SystemExit: the job has come to its end, or the plan is void; then another process begins again in this place.
    """
    if present_world(ledger).number >= world.number:
        return
    ledger.put(_ready(world, place), str(incarnation).encode())
    began_s = time.monotonic()
    while (before := present_world(ledger)).number < world.number:
        if not ledger.is_armed:
            raise SystemExit(0)
        newest = _newest_plan(ledger, world.number)
        is_superseded = newest is not None and newest.number > world.number
        if is_superseded or not _can_begin(ledger, world, before):
            log.warning("the plan of world %d is void, for a process that was to come in was lost", world.number)
            raise SystemExit(NOT_NEEDED)
        if wanted_world(ledger) < world.number and _are_ready(ledger, world, before):
            ledger.raise_to(_WANTED, world.number)
        time.sleep(turn_poll_s(ledger, world, before, time.monotonic() - began_s))


def wanted_world(ledger: Ledger) -> int:
    """Number of the planned world whose newcomers are all ready; 0 for none."""
    return int(ledger.find(_WANTED) or 0)


def give_notice(ledger: Ledger, place: int, incarnation: int) -> None:
    """Say that a process is about to leave for good, so that nobody waits for its replacement."""
    ledger.put(_leaving(place), str(incarnation).encode())
    ledger.count(_NOTICES, 1)


def world_without(
    ledger: Ledger, terms: Terms, world: World, missing: Mapping[int, int], waited_s: float
) -> World | None:
    """Plan the world that goes on without those of its places that are missing; None to wait, and to look again.

    Processes that wait to come in take the places of lost ones, if no agent has replaced those within moments.
    Otherwise the job shrinks, as soon as the policy allows it, or at once where all that are missing had given notice.

    Args:
        ledger: of the job.
        terms: of the job.
        world: the present one.
        missing: places of it without a process, and the number of the process that is to come.
        waited_s: how long they have been missing, in seconds.

    Raises:
        StateLost: nobody that is left holds a part of the state.
    """
    are_leaving = have_left(ledger, missing)
    if waited_s < _SPARE_AFTER_S and not are_leaving:
        return None
    size, now = terms.replica_size, world.size // terms.replica_size
    healthy = set(world.places).difference(missing)
    waiting = candidates(ledger, world)
    if len(waiting) >= len(missing):
        target, cause = now, f"processes that waited take the places of {len(missing)} lost ones"
    else:
        whole = num_whole(world, healthy, size)
        view = ReplicaView(now=now, healthy=whole, since_loss_s=math.inf if are_leaving else waited_s)
        target = next_size(view, terms.policy, terms.sizes)
        cause = f"the job shrinks from {now} to {target} replicas"
        if target >= now:
            return None
    return _propose(ledger, terms, world, target, cause, healthy=healthy, joining=waiting)


def have_left(ledger: Ledger, missing: Mapping[int, int]) -> bool:
    """Whether all that are missing had got notice, so that nobody need wait for them."""
    noticed = ledger.find_all([_leaving(place) for place in missing])
    return all(int(noticed.get(_leaving(place), "-2")) >= number - 1 for place, number in missing.items())


def ask_for(ledger: Ledger, num_replicas: int) -> None:
    """Have the job grow or shrink to so many replicas; it stays there until somebody asks for another number.

    That holds when all processes start again, too.
    """
    ledger.put_lasting(_SCALE, str(num_replicas).encode())


def heed(ledger: Ledger, world: World) -> None:
    """Plan a smaller world, where somebody has asked for one, or processes have got notice; for one member to call
    about once a second.
    """
    asked, leaving, terms = _asked(ledger), leaving_of(ledger, world.places), terms_of(ledger)
    if terms is None or not (asked or leaving) or wanted_world(ledger) > world.number:
        return
    now, staying = world.size // terms.replica_size, set(world.places) - leaving
    view = ReplicaView(
        now=now,
        healthy=now,
        leaving=now - num_whole(world, staying, terms.replica_size),
        wanted=asked,
    )
    target = next_size(view, terms.policy, terms.sizes)
    if target >= now:
        return
    why = f"{len(leaving)} processes have got notice" if leaving else f"somebody asked for {asked} replicas"
    cause = f"{why}: the job shrinks from {now} to {target}"
    smaller = _propose(ledger, terms, world, target, cause, healthy=staying)
    if smaller is not None:
        ledger.raise_to(_WANTED, smaller.number)


def describe(ledger: Ledger) -> dict[str, int]:
    """The size of the job, for people."""
    world, terms = world_or_none(ledger), terms_of(ledger)
    size = 0 if world is None else world.size
    return {
        "ranks": size,
        "replicas": size // terms.replica_size if terms is not None else 0,
        "shard_degree": terms.degrees[0] if terms is not None else 0,
        "tensor_degree": terms.degrees[1] if terms is not None else 0,
        "waiting": 0 if world is None else len(candidates(ledger, world)),
        "asked": _asked(ledger),
        "generation": ledger.generation(),
    }


def _asked(ledger: Ledger) -> int:
    return int(ledger.find_lasting(_SCALE) or 0)


def _leaving(place: int) -> str:
    return f"{_LEAVING}/{place}"


def leaving_of(ledger: Ledger, places: Sequence[int]) -> set[int]:
    """Those of some places whose living process has got notice."""
    if not ledger.count(_NOTICES):
        return set()
    noticed, living = ledger.find_all([_leaving(place) for place in places]), ledger.incarnations(places)
    return {place for place, now in zip(places, living, strict=True) if int(noticed.get(_leaving(place), "-1")) >= now}


def num_whole(world: World, staying: AbstractSet[int], replica_size: int) -> int:
    """How many replicas can be put together of some places of a world."""
    return min(sum(place in staying for place in world.places[index::replica_size]) for index in range(replica_size))


def _plan(
    ledger: Ledger, terms: Terms, world: World, waiting: Sequence[int], since_arrival_s: float, *, after: int
) -> None:
    """Plan the world that comes next, if the policy lets the job grow now, and nobody is about to leave it."""
    if leaving_of(ledger, world.places):
        return
    now = world.size // terms.replica_size
    view = ReplicaView(
        now=now,
        healthy=now,
        waiting=len(waiting) // terms.replica_size,
        wanted=_asked(ledger),
        since_arrival_s=since_arrival_s,
    )
    if next_size(view, terms.policy, terms.sizes) <= now:
        return
    history = ledger.history() if terms.policy.min_stable_s else []
    if history:
        founders = World.of_founders(int(ledger.find(_FOUNDERS) or 0))
        setbacks = num_setbacks([founders, *history], terms.policy.min_stable_s)
        view = replace(view, since_change_s=_age_s(ledger, world), num_setbacks=setbacks)
    target = next_size(view, terms.policy, terms.sizes)
    if target > now:
        cause = f"the job grows from {now} to {target} replicas"
        _propose(ledger, terms, world, target, cause, after=after, joining=waiting)


def _propose(
    ledger: Ledger,
    terms: Terms,
    world: World,
    num_replicas: int,
    cause: str,
    *,
    after: int | None = None,
    healthy: AbstractSet[int] | None = None,
    joining: Sequence[int] = (),
) -> World | None:
    """Plan the world that comes next; returns the plan that counts if it is the same, whoever made it.

    Args:
        ledger: of the job.
        terms: of the job.
        world: the present one.
        num_replicas: of the next one.
        cause: for the record.
        after: number of the newest plan that was known when this was decided, so that of several who decide the same
            one is heard; None to come after all plans.
        healthy: places of the present world that go on; all of them if None.
        joining: places that come in.
    """
    newest = _newest_plan(ledger, world.number) or world
    staying = set(world.places) if healthy is None else healthy
    planned = regroup(
        replace(world, number=newest.number if after is None else after),
        healthy=staying,
        joining=joining,
        num_replicas=num_replicas,
        replica_size=terms.replica_size,
        cause=cause,
    )
    age_s = _age_s(ledger, world) if terms.policy.min_stable_s else math.inf
    planned = replace(planned, num_lost=world.size - len(staying), lasted_s=age_s)
    if newest.number > world.number and replace(planned, number=newest.number) == newest:
        return newest
    return planned if ledger.propose_world(planned) == planned else None


def _age_s(ledger: Ledger, world: World) -> float:
    """Seconds for which the present world has lasted, by its members' own clocks; 0 before they have said anything."""
    said = ledger.beats(world.places).values()
    return max((beat["in_world_s"] for beat in said if beat["world"] == world.number), default=0.0)


def _newest_plan(ledger: Ledger, at_least: int) -> World | None:
    newest, number = ledger.world(at_least), at_least
    while (later := ledger.world(number + 1)) is not None:
        newest, number = later, number + 1
    return newest


def stand(ledger: Ledger, place: int, incarnation: int, world: World) -> None:
    """Say that a process outside of a world wants to come in."""
    ledger.append(_CANDIDATES, lambda _: f"{place} {incarnation} {world.number}")


def candidates(ledger: Ledger, world: World) -> list[int]:
    """Places outside of a world whose living process has said that it wants to come in, and was not in since."""
    said: dict[tuple[int, int], int] = {}
    for text in ledger.listed(_CANDIDATES):
        place, incarnation, since = map(int, text.split())
        said[place, incarnation] = since
    places = sorted({place for place, _ in said} - set(world.places))
    living = ledger.incarnations(places)
    leaving = leaving_of(ledger, places)
    waiting = [each for each in zip(places, living, strict=True) if each in said and each[0] not in leaving]
    first = min((said[each] for each in waiting), default=world.number)
    former = {n: known for n in range(first + 1, world.number) if (known := ledger.world(n)) is not None}
    return [
        place
        for place, incarnation in waiting
        if not any(place in known.places for n, known in former.items() if n > said[place, incarnation])
    ]


def _can_begin(ledger: Ledger, planned: World, before: World) -> bool:
    """Whether all that are to come in with a planned world still wait."""
    waiting = candidates(ledger, before)
    return all(place in before.places or place in waiting for place in planned.places)


def _is_void(ledger: Ledger, planned: World, world: World) -> bool:
    """Whether a plan will not be carried out: it is of the past, or some of its newcomers are gone.

    One that brings in nobody takes over at once, or never.
    """
    if planned.number <= world.number or not _can_begin(ledger, planned, world):
        return True
    return set(planned.places) <= set(world.places) and wanted_world(ledger) < planned.number


def _are_ready(ledger: Ledger, world: World, before: World) -> bool:
    joining = [place for place in world.places if place not in before.places]
    said = ledger.find_all([_ready(world, place) for place in joining])
    living = ledger.incarnations(joining)
    return all(said.get(_ready(world, place)) == str(now).encode() for place, now in zip(joining, living, strict=True))


def _ready(world: World, place: int) -> str:
    return f"ready/{world.number}/{place}"
