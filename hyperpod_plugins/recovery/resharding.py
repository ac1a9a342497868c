"""Somebody has asked for other degrees: all ranks write a checkpoint between two steps, and start again from it."""

import logging

from hyperpod_plugins.elastic import Incident
from hyperpod_plugins.elastic.resharding import asked_degrees, forget_asked
from hyperpod_plugins.elastic.restarts import JobRestart
from hyperpod_plugins.errors import RecoveryError
from hyperpod_plugins.recovery.ending import Ending
from hyperpod_plugins.recovery.farewell import start_again
from hyperpod_plugins.recovery.member import Member
from hyperpod_plugins.recovery.repair import RESHARD

log = logging.getLogger(__name__)


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
    start_again(member.ledger, member.rank, restart, "elastic.reshard", RecoveryError(f"{cause}; no agent acted on it"))
