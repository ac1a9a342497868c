"""What is written down when processes or nodes are gone, in an order that nobody can misread.

First that the places of processes are void, then how they ended, then that the generation is over: a reader of `exit`
or `end` finds the place void already.
"""

from collections.abc import Sequence
from dataclasses import replace

from hyperpod_plugins.elastic.entries import next_beginning
from hyperpod_plugins.elastic.incident import Incident
from hyperpod_plugins.elastic.joining import takes_part
from hyperpod_plugins.elastic.ledger import GAVE_UP_KEY, RESTART_KEY, Ledger
from hyperpod_plugins.elastic.restarts import JobRestart, JobRestartBudget, no_further
from hyperpod_plugins.elastic.roster import Closing, Roster, RoundEnd
from hyperpod_plugins.elastic.slots import Holding, Seat


def can_absorb(ledger: Ledger) -> bool:
    """Whether the members of a job take newcomers in: they say so, and have not given up since."""
    return ledger.is_armed and not any(map(ledger.find, (GAVE_UP_KEY, RESTART_KEY)))


def end_running(ledger: Ledger, incident: Incident, at_least: int = 0) -> int:
    """End the generation that is running, unless somebody has; returns the first that has not ended, or that one.

    One that is still being formed is left alone: those who form it know already.
    """
    generation = ledger.generation(at_least)
    if generation == 0 or ledger.plan(generation) is not None:
        ledger.end(generation, incident)
    return generation


def enroll(ledger: Ledger, places: Sequence[int]) -> int:
    """Count the first processes of a node that comes to a running job; returns the number that all of them get."""
    return max((ledger.next_incarnation(place) for place in places), default=0)


def write_up(ledger: Ledger, incident: Incident, at_least: int = 0) -> int:
    """Void the place of the process that `incident` is about; returns what `end_running` does."""
    ledger.next_incarnation(incident.rank)
    ledger.record_exit(incident)
    return end_running(ledger, incident, at_least) if takes_part(ledger, incident.rank) else at_least


def write_up_node(ledger: Ledger, ranks: Sequence[int], incident: Incident) -> int:
    """Void the places of all processes of a node; returns the number that all their successors get.

    Args:
        ledger: of the round.
        ranks: of the node.
        incident: what happened to it; the incarnation is filled in, and the rank where it is none of the node's.
    """
    before = ledger.incarnations(ranks)
    now, number = list(before), max(before) + 1
    while min(now) < number:
        now = [each if each >= number else ledger.next_incarnation(rank) for rank, each in zip(ranks, now, strict=True)]
        number = max(number, *now)  # the node that was silent may have counted one of its own just now
    for rank, incarnation in zip(ranks, before, strict=True):
        for gone in range(incarnation, number):
            ledger.record_exit(replace(incident, rank=rank, incarnation=gone))
    first = ranks.index(incident.rank) if incident.rank in ranks else 0
    if any(takes_part(ledger, place) for place in ranks):
        end_running(ledger, replace(incident, rank=ranks[first], incarnation=before[first]))
    return number


def vacate(roster: Roster, ledger: Ledger, seat: Seat, cause: str, reporter: str) -> bool:
    """Let others have a slot, and wake those who wait for its workers; False if the claim was no longer the last.

    The places of its ranks are void when somebody comes for them, so a node that was only slow loses nothing but the
    attempt at one step.
    """
    if not roster.swap(seat.number, seat.slot, seat.claim, seat.claim.become(Holding.VACANT)):
        return False
    size = roster.agreed_size(seat.number) or 0
    places = range(seat.slot * size, (seat.slot + 1) * size)
    if not can_absorb(ledger):
        return True
    if any(takes_part(ledger, place) for place in places):
        end_running(ledger, Incident(kind="agent", cause=cause, rank=places.start, reporter=reporter))
    else:
        enroll(ledger, places)  # nobody is to count on processes that only waited
    return True


def end_unasked(roster: Roster, ledger: Ledger, number: int, cause: str) -> None:
    """End a round though no member wants all to begin again; they go on from the newest checkpoint that there is.

    Args:
        roster: of the agents.
        ledger: of the round.
        number: of it.
        cause: why.
    """
    before = roster.round_end(number - 1) or RoundEnd(cause="")
    path, _ = next_beginning(ledger, before.resume_from)
    end = RoundEnd(
        cause=f"{cause}; all begin again from {path or 'the beginning'}",
        resume_from=path,
        shard_degree=before.shard_degree,  # what somebody has asked for holds on
        tensor_degree=before.tensor_degree,
    )
    roster.end_round(number, end)


def renew(roster: Roster, ledger: Ledger, number: int, node: str) -> None:
    """End a round: a member wants all to begin again, or `node` wants to take part and cannot do so otherwise.

    Where beginning again from the same checkpoint has not helped, the job ends. Where members can take the node in, by
    now, nothing happens.
    """
    wanted = ledger.find(RESTART_KEY)
    if wanted is None:
        if ledger.find(GAVE_UP_KEY) is not None or ledger.end_unarmed():
            end_unasked(roster, ledger, number, f"the agent {node} is to take part")
        return
    restart, most = JobRestart.from_json(wanted), JobRestartBudget().max_restarts
    end = RoundEnd.of(restart, roster.round_end(number - 1))
    if end.count <= most:
        roster.end_round(number, end)
    else:
        cause = f"{no_further(end.step, most)}; {restart.incident.cause}"
        roster.close(Closing(cause=cause, is_success=False))
