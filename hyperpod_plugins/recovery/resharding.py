"""All processes start again with other degrees, from a checkpoint that those write that are left.

Somebody has asked for it, and all are there; or too few are left for a replica, and each brings what it holds.
"""

import logging
import time
from typing import NoReturn

from hyperpod_plugins.elastic import Incident
from hyperpod_plugins.elastic.entries import from_present_entry
from hyperpod_plugins.elastic.ledger import RESTART_KEY
from hyperpod_plugins.elastic.resharding import asked_degrees, forget_asked
from hyperpod_plugins.elastic.restarts import JobRestart
from hyperpod_plugins.errors import RecoveryError, StateLost
from hyperpod_plugins.parallel.topology import Topology
from hyperpod_plugins.recovery.assembly import NobodyCame
from hyperpod_plugins.recovery.assign import Farewell, Rung
from hyperpod_plugins.recovery.checkpoints import known_checkpoints, newest_checkpoint
from hyperpod_plugins.recovery.ending import SAVE_S, Ending
from hyperpod_plugins.recovery.farewell import start_again
from hyperpod_plugins.recovery.member import Member
from hyperpod_plugins.recovery.repair import RESHARD
from hyperpod_plugins.recovery.rescue import plan_rescue
from hyperpod_plugins.recovery.snapshot import Snapshots

log = logging.getLogger(__name__)
_POLL_S = 0.05


def reshard_if_asked(member: Member, ending: Ending, step: int) -> None:
    """Start again with other degrees, if somebody has asked for them; for all ranks to call between the same two steps.

    Where the checkpoint cannot be written the job goes on as it is.

    Args:
        member: this process.
        ending: writes the checkpoint.
        step: committed steps.

    Raises:
        PeerLost: somebody was lost meanwhile. The ranks come here again after the next step.
    """
    asked = asked_degrees(member.ledger)
    if asked is None:
        return
    member.whereabouts = f"writing the checkpoint of step {step}, to start again with other degrees"
    path = ending.save(step, RESHARD)
    shard, tensor = asked
    cause = f"somebody asked for shard degree {shard} and tensor degree {tensor}"
    if not path:
        log.error("rank %d: %s, but without a checkpoint the job goes on as it is", member.rank, cause)
        if member.rank == 0:
            forget_asked(member.ledger)
        return
    incident = Incident(kind="request", cause=cause, step=step, reporter=f"rank {member.rank}")
    restart = JobRestart(incident=incident, resume_from=path, step=step, shard_degree=shard, tensor_degree=tensor)
    restart = from_present_entry(member.ledger, restart)
    start_again(member.ledger, member.rank, restart, "elastic.reshard", RecoveryError(f"{cause}; no agent acted on it"))


def start_again_without(
    late: NobodyCame,
    plan: Farewell,
    member: Member,
    ending: Ending,
    topology: Topology,
    snapshots: Snapshots | None,
) -> NoReturn:
    """Save what those hold together that are left, and start again from it, or from the last checkpoint.

    Their present state is taken if it is whole, else the newest snapshot that is, unless there is a checkpoint of a
    later step.

    Args:
        late: who is left, and why the others are not waited for any more.
        plan: who has the state after the last step, if that is whole.
        member: this process, which has committed that step if it could.
        ending: writes.
        topology: of the world that was.
        snapshots: of this rank.

    Raises:
        StateLost: the agents did nothing.
    """
    lost = StateLost(str(late))
    writers, step, mine = plan.savers, plan.step, None
    if not writers or step <= 0:
        rescue = plan_rescue(late.formed.arrivals, topology)
        writers = ()
        if rescue is not None and rescue.step > newest_checkpoint(known_checkpoints(member.ledger))[1]:
            writers, step = tuple(rescue.owners), rescue.step
            if snapshots is not None and member.rank in writers:
                mine = {owner: snapshots.of(owner, step) for owner in rescue.owners[member.rank]}
    path = ""
    if member.rank in writers:
        member.whereabouts = f"writing what is left of step {step}, before all start again"
        path = ending.save(step, RESHARD, writers, late.formed.number, mine)
    elif writers:
        member.whereabouts = f"waiting for the ranks that write what is left of step {step}"
        _await_word(member)
    if not path:
        member.begin_again(lost)
    incident = Incident(kind="process", cause=str(late), step=step, reporter=f"rank {member.rank}")
    restart = JobRestart(
        incident=incident,
        resume_from=path,
        step=step,
        shard_degree=member.job.shard_degree,
        tensor_degree=member.job.tensor_degree,
    )
    restart = from_present_entry(member.ledger, restart)
    start_again(member.ledger, member.rank, restart, Rung.CHECKPOINT.event, lost)


def _await_word(member: Member) -> None:
    """Wait until those that write have said where all begin again."""
    until_s = time.monotonic() + SAVE_S
    while member.ledger.find(RESTART_KEY) is None and time.monotonic() < until_s:
        time.sleep(_POLL_S)
