"""All ranks return to a snapshot: each gets its own, and then enters the loops again where that was taken."""

from hyperpod_plugins.elastic import Incident
from hyperpod_plugins.elastic.entries import ended_entries
from hyperpod_plugins.errors import PeerLost, RecoveryError
from hyperpod_plugins.recovery.assign import RecoveryPlan
from hyperpod_plugins.recovery.member import Member
from hyperpod_plugins.recovery.snapshot import Snapshots


def take_snapshots_back(plan: RecoveryPlan, snapshots: Snapshots, member: Member, generation: int) -> None:
    """Give each rank its snapshot, and load it.

    Raises:
        PeerLost: somebody was lost before all had theirs.
    """
    try:
        snapshots.deliver(plan.step, plan.sources)
    except PeerLost:
        # Whoever ends the generation for the return knows that all ranks have their snapshots.
        ended = member.ledger.ended(generation)
        if ended is None or ended.cause != _cause(plan):
            raise
    snapshots.load(plan.step)


def end_for_return(plan: RecoveryPlan, member: Member, max_losses: int) -> None:
    """End the generation, since all ranks enter the loops again.

    Raises:
        RecoveryError: the same state was lost `max_losses` times: another return would not help.
    """
    lost_at = plan.step + plan.steps_lost
    # Counted by all ranks together, and where it outlives them: each return may be of new processes alone. A program
    # with several fits comes to a step of the same number in each.
    number = len(ended_entries(member.ledger))
    if member.ledger.count(f"returns/{number}/{lost_at}", 1) >= max_losses * member.world.size:
        cause = f"the state after step {lost_at} was lost {max_losses} times"
        member.give_up(cause)
        raise RecoveryError(f"{cause}. Look at the logs of the lost ranks; the step itself may kill them.")
    wish = Incident(kind="request", cause=_cause(plan), step=plan.step, reporter=f"rank {member.rank}")
    member.ledger.end(member.generation, wish)


def _cause(plan: RecoveryPlan) -> str:
    return f"all ranks return to the snapshot of step {plan.step}"
