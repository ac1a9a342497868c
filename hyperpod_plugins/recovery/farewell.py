"""The last rungs of the ladder: all processes begin again from a checkpoint, or the job ends."""

import logging
import time
from typing import NoReturn

from hyperpod_plugins.elastic import Incident, Ledger
from hyperpod_plugins.elastic.entries import restart_from_newest
from hyperpod_plugins.elastic.ledger import GAVE_UP_KEY, RESTART_KEY
from hyperpod_plugins.elastic.restarts import JobRestart
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.errors import RecoveryError, StateLost
from hyperpod_plugins.observability import Event, record
from hyperpod_plugins.recovery.assign import Rung

log = logging.getLogger(__name__)
_POLL_S = 0.02
_FAREWELL_S = 10.0


def start_again(ledger: Ledger, rank: int, restart: JobRestart, event: str, wrong: Exception) -> NoReturn:
    """Have the agents end all processes and start them again; who asks first is heard.

    Args:
        ledger: of the job.
        rank: of this process.
        restart: from where, and with which degrees.
        event: name of the event that tells of it.
        wrong: raised where the agents do nothing within 10 s.
    """
    ledger.put_first(RESTART_KEY, restart.to_json().encode())
    record(Event(name=event, at_s=time.time(), details={"cause": restart.incident.cause, "step": restart.step}))
    log.warning("rank %d: %s", rank, restart)
    time.sleep(_FAREWELL_S)
    raise wrong


def begin_again(ledger: Ledger, job: JobEnv, rank: int, lost: StateLost) -> NoReturn:
    """Have the agents end all processes and start them again, from the last checkpoint; who asks first is heard.

    Raises:
        StateLost: the agents did not within 10 s.
    """
    incident = Incident(kind="process", cause=str(lost), reporter=f"rank {rank}")
    restart = restart_from_newest(ledger, job, incident)
    if not restart.resume_from:
        log.error(
            "rank %d: ALL STEPS SO FAR ARE LOST, for this job has saved no checkpoint: use a ModelCheckpoint",
            rank,
        )
    start_again(ledger, rank, restart, Rung.CHECKPOINT.event, lost)


def follow(ledger: Ledger, patience_s: float = _FAREWELL_S) -> NoReturn:
    """End after the process that gives up, so that its own error is the one that the launcher shows.

    Raises:
        RecoveryError: always.
    """
    deadline_s = time.monotonic() + patience_s
    giver: Incident | None = None
    while time.monotonic() < deadline_s:
        given_up = ledger.find(GAVE_UP_KEY)
        giver = None if given_up is None else Incident.from_json(given_up)
        if giver is not None and ledger.exit_of(giver.rank, giver.incarnation) is not None:
            break
        time.sleep(_POLL_S)
    raise RecoveryError(f"the job has given up: {giver or 'another process was to say why, and has not'}")
