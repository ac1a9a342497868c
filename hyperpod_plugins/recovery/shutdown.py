"""All processes start again with other degrees, from a checkpoint that those write that are left.

Somebody has asked for it, and all are there; or too few are left for a replica, and each brings what it holds.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

from hyperpod_plugins.elastic import FailureRecord
from hyperpod_plugins.elastic.membership.reshard import asked_degrees, forget_asked
from hyperpod_plugins.elastic.membership.restart_policy import JobRestart
from hyperpod_plugins.elastic.store.entries import from_present_entry
from hyperpod_plugins.elastic.store.job_store import RESTART_KEY
from hyperpod_plugins.errors import PeerLost, RecoveryError, StateLost
from hyperpod_plugins.events import Event, record
from hyperpod_plugins.parallel.topology import Topology
from hyperpod_plugins.recovery.abort import known_checkpoints, newest_checkpoint, request_restart
from hyperpod_plugins.recovery.member import Member
from hyperpod_plugins.recovery.plan import FinalSavePlan, RecoveryLevel, RecoveryPlan, plan_salvage
from hyperpod_plugins.recovery.protocols import RESHARD, TrainingLoop
from hyperpod_plugins.recovery.quorum import ReplacementTimeout
from hyperpod_plugins.recovery.snapshot import Snapshot, Snapshots

# A job that must not go on saves what its ranks hold, and then ends.

log = logging.getLogger(__name__)
SAVE_S = 600.0
"""Longest wait for the last save of others."""


class JobShutdown:
    """The last acts of one rank."""

    def __init__(self, member: Member, subject: TrainingLoop) -> None:
        self._member = member
        self._subject = subject

    def end(self, plan: RecoveryPlan, ends: str, error: Exception | None) -> NoReturn:
        """Save what all ranks hold, for they are complete once more, and end.

        Args:
            plan: what brought them together.
            ends: why, on the ranks that say so; empty on the others.
            error: what the program raised on this rank.

        Raises:
            PeerLost: somebody was lost meanwhile.
            RecoveryError: or the exception of the program that ends the job.
        """
        path = self.save(plan.step, "") if plan.step and not plan.is_return else ""
        if not ends:
            self._member.follow()
        self._give_up(ends, plan.step, path)
        if error is not None:
            raise error
        raise RecoveryError(f"{ends}. Look at the logs of the lost ranks; the step itself may kill them.")

    def leave_others(self, late: ReplacementTimeout, plan: FinalSavePlan, error: Exception | None) -> NoReturn:
        """Save what those that are left hold together, if that is everything, and end.

        Raises:
            RecoveryError: or the exception of the program, where there was one.
        """
        member, number = self._member, late.formed.number
        if plan.savers and member.rank not in plan.savers:
            member.follow(SAVE_S)
        path = self.save(plan.step, "", plan.savers, number) if plan.savers and plan.step > 0 else ""
        self._give_up(str(late), plan.step, path)
        raise late if error is None else error

    def save(
        self,
        step: int,
        path: str,
        among: Sequence[int] = (),
        number: int = 0,
        snapshots: Mapping[int, Snapshot] | None = None,
    ) -> str:
        """Write a checkpoint now that all have their state; returns its path, empty where that failed.

        Args:
            step: of the state.
            path: empty for the place of an emergency.
            among: ranks that are left and write it; empty for all.
            number: generation in which those meet.
            snapshots: what this rank writes in place of its present state, by the ranks whose it is.

        Raises:
            PeerLost: somebody was lost meanwhile, and all were to write.
        """
        try:
            if among:
                self._member.gather(number, self._subject.saving_group, among)
            return self._subject.save(path, is_alone=bool(among), snapshots=snapshots)
        except PeerLost:
            if not among:
                raise
            return ""
        except Exception:  # what the job goes on with, or ends with, is not this
            log.exception("the checkpoint of step %d could not be written", step)
            return ""

    def _give_up(self, cause: str, step: int, path: str) -> None:
        record(
            Event(
                name=RecoveryLevel.STOP.event, at_s=time.time(), details={"cause": cause, "step": step, "saved": path}
            )
        )
        self._member.give_up(f"{cause}; step {step} was saved as {path}" if path else cause)


_POLL_S = 0.05


def reshard_if_asked(member: Member, shutdown: JobShutdown, step: int) -> None:
    """Start again with other degrees, if somebody has asked for them; for all ranks to call between the same two steps.

    Where the checkpoint cannot be written the job goes on as it is.

    Args:
        member: this process.
        shutdown: writes the checkpoint.
        step: committed steps.

    Raises:
        PeerLost: somebody was lost meanwhile. The ranks come here again after the next step.
    """
    asked = asked_degrees(member.job_store)
    if asked is None:
        return
    member.activity = f"writing the checkpoint of step {step}, to start again with other degrees"
    path = shutdown.save(step, RESHARD)
    shard, tensor = asked
    cause = f"somebody asked for shard degree {shard} and tensor degree {tensor}"
    if not path:
        log.error("rank %d: %s, but without a checkpoint the job goes on as it is", member.rank, cause)
        if member.rank == 0:
            forget_asked(member.job_store)
        return
    failure = FailureRecord(kind="request", cause=cause, step=step, reporter=f"rank {member.rank}")
    restart = JobRestart(failure=failure, resume_from=path, step=step, shard_degree=shard, tensor_degree=tensor)
    restart = from_present_entry(member.job_store, restart)
    request_restart(
        member.job_store, member.rank, restart, "elastic.reshard", RecoveryError(f"{cause}; no agent acted on it")
    )


def start_again_without(
    late: ReplacementTimeout,
    plan: FinalSavePlan,
    member: Member,
    shutdown: JobShutdown,
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
        shutdown: writes.
        topology: of the world that was.
        snapshots: of this rank.

    Raises:
        StateLost: the agents did nothing.
    """
    lost = StateLost(str(late))
    writers, step, mine = plan.savers, plan.step, None
    if not writers or step <= 0:
        salvage = plan_salvage(late.formed.arrivals, topology)
        writers = ()
        if salvage is not None and salvage.step > newest_checkpoint(known_checkpoints(member.job_store))[1]:
            writers, step = tuple(salvage.owners), salvage.step
            if snapshots is not None and member.rank in writers:
                mine = {owner: snapshots.of(owner, step) for owner in salvage.owners[member.rank]}
    path = ""
    if member.rank in writers:
        member.activity = f"writing what is left of step {step}, before all start again"
        path = shutdown.save(step, RESHARD, writers, late.formed.number, mine)
    elif writers:
        member.activity = f"waiting for the ranks that write what is left of step {step}"
        _await_word(member)
    if not path:
        member.restart_all(lost)
    failure = FailureRecord(kind="process", cause=str(late), step=step, reporter=f"rank {member.rank}")
    restart = JobRestart(
        failure=failure,
        resume_from=path,
        step=step,
        shard_degree=member.job.shard_degree,
        tensor_degree=member.job.tensor_degree,
    )
    restart = from_present_entry(member.job_store, restart)
    request_restart(member.job_store, member.rank, restart, RecoveryLevel.CHECKPOINT.event, lost)


def _await_word(member: Member) -> None:
    """Wait until those that write have said where all begin again."""
    until_s = time.monotonic() + SAVE_S
    while member.job_store.try_get(RESTART_KEY) is None and time.monotonic() < until_s:
        time.sleep(_POLL_S)
