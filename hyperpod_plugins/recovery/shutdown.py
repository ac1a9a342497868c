"""Saving state before the job ends, or before all processes restart.

`JobShutdown` saves what the ranks of a job hold before it ends. `reshard_if_asked` and `restart_without_missing`
restart all processes from a checkpoint: with other degrees that were requested, or with the survivors if lost ranks are
not replaced.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

from hyperpod_plugins.elastic import FailureRecord
from hyperpod_plugins.elastic.membership.reshard import drop_request, requested_degrees
from hyperpod_plugins.elastic.membership.restart_policy import JobRestart
from hyperpod_plugins.elastic.store.entry_records import from_present_entry
from hyperpod_plugins.elastic.store.job_store import RESTART_KEY, poll_until
from hyperpod_plugins.errors import PeerLost, RecoveryError, StateLost
from hyperpod_plugins.events import Event, record
from hyperpod_plugins.parallel.topology import Topology
from hyperpod_plugins.recovery.member import Member
from hyperpod_plugins.recovery.plan import FinalSavePlan, RecoveryLevel, RecoveryPlan, plan_salvage
from hyperpod_plugins.recovery.protocols import RESHARD, TrainingLoop
from hyperpod_plugins.recovery.quorum import ReplacementTimeout
from hyperpod_plugins.recovery.restart_all import known_checkpoints, newest_checkpoint, request_restart
from hyperpod_plugins.recovery.snapshot import Snapshot, Snapshots

log = logging.getLogger(__name__)
SAVE_S = 600.0
"""Longest wait for the final save of other ranks, in seconds."""


class JobShutdown:
    """Final saves of one rank, and its exit."""

    def __init__(self, member: Member, subject: TrainingLoop) -> None:
        self._member = member
        self._subject = subject

    def end_job(self, plan: RecoveryPlan, ends: str, error: Exception | None) -> NoReturn:
        """Save the state of all ranks, which is complete again, and end.

        Args:
            plan: The recovery plan that restored the ranks.
            ends: Why the job ends, on the ranks that decided so; empty on the others.
            error: Exception of the program on this rank.

        Raises:
            PeerLost: A rank was lost meanwhile.
            RecoveryError: The job has ended; if `error` is given, that is raised instead.
        """
        path = self.save(plan.step, "") if plan.step and not plan.is_return else ""
        if not ends:
            self._member.follow_final_save()
        self._give_up(ends, plan.step, path)
        if error is not None:
            raise error
        raise RecoveryError(f"{ends}. Check the logs of the lost ranks; the step itself may be killing them.")

    def end_without_missing(self, late: ReplacementTimeout, plan: FinalSavePlan, error: Exception | None) -> NoReturn:
        """End without the missing ranks, after the survivors have saved their state, if it is complete.

        Args:
            late: The survivors, and why the missing ranks are no longer waited for.
            plan: Which ranks save which step.
            error: Exception of the program on this rank.

        Raises:
            RecoveryError: Always, unless `error` is given; that is raised instead.
        """
        member, number = self._member, late.formed.number
        if plan.savers and member.rank not in plan.savers:
            member.follow_final_save(SAVE_S)
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
        """Write a checkpoint.

        Args:
            step: Step of the state.
            path: Path of the checkpoint, or empty to choose one; see `TrainingLoop.save`.
            among: Survivors that write it; empty for all ranks.
            number: Generation in which the survivors connect.
            snapshots: Snapshots that this rank writes instead of its present state, by owner.

        Returns:
            The path; empty if writing failed.

        Raises:
            PeerLost: A rank was lost meanwhile, and all ranks had to write.
        """
        try:
            if among:
                self._member.connect_survivors(number, self._subject.saving_group, among)
            return self._subject.save(path, is_alone=bool(among), snapshots=snapshots)
        except PeerLost:
            if not among:
                raise
            return ""
        except Exception:  # a failed save must not change how the job continues or ends
            log.exception("the checkpoint of step %d could not be written", step)
            return ""

    def finish_saves(self, plan: RecoveryPlan) -> None:
        """Finish what was being saved after the committed step as peers were lost.

        Args:
            plan: The recovery plan that restored the ranks.

        Raises:
            PeerLost: A rank was lost meanwhile.
        """
        try:
            self._subject.finish_saves(plan.pending_saves)
        except PeerLost:
            raise
        except Exception:  # as in `save`
            log.exception("a checkpoint of step %d could not be written", plan.step)

    def _give_up(self, cause: str, step: int, path: str) -> None:
        record(
            Event(
                name=RecoveryLevel.STOP.event, at_s=time.time(), details={"cause": cause, "step": step, "saved": path}
            )
        )
        self._member.give_up(f"{cause}; step {step} was saved as {path}" if path else cause)


_POLL_S = 0.05


def reshard_if_asked(member: Member, shutdown: JobShutdown, step: int) -> None:
    """Restart with other degrees if these were requested. All ranks call this between the same two steps.

    If the checkpoint cannot be written, the job continues unchanged.

    Args:
        member: This process.
        shutdown: Writes the checkpoint.
        step: Number of committed steps.

    Raises:
        PeerLost: A rank was lost meanwhile. The ranks try again after the next step.
        RecoveryError: The agents did not restart the job.
    """
    asked = requested_degrees(member.job_store)
    if asked is None:
        return
    member.activity = f"writing the checkpoint of step {step}, to restart with other degrees"
    path = shutdown.save(step, RESHARD)
    shard, tensor = asked
    cause = f"shard degree {shard} and tensor degree {tensor} were requested"
    if not path:
        log.error(
            "rank %d: %s, but the checkpoint could not be written, so the job continues unchanged", member.rank, cause
        )
        if member.rank == 0:
            drop_request(member.job_store)
        return
    failure = FailureRecord(kind="request", cause=cause, step=step, reporter=f"rank {member.rank}")
    restart = JobRestart(failure=failure, resume_from=path, step=step, shard_degree=shard, tensor_degree=tensor)
    restart = from_present_entry(member.job_store, restart)
    request_restart(member.job_store, restart, "elastic.reshard", RecoveryError(f"{cause}; no agent acted on it"))


def restart_without_missing(
    late: ReplacementTimeout,
    plan: FinalSavePlan,
    member: Member,
    shutdown: JobShutdown,
    topology: Topology,
    snapshots: Snapshots | None,
) -> NoReturn:
    """Save what the survivors hold, and restart all processes from it or from the last checkpoint.

    The survivors save their present state if it is complete, otherwise the newest complete snapshot, unless there is
    a checkpoint of a later step.

    Args:
        late: The survivors, and why the missing ranks are no longer waited for.
        plan: Which ranks hold the state after the last step, if it is complete.
        member: This process, which has committed that step if it could.
        shutdown: Writes the checkpoint.
        topology: Topology of the former world.
        snapshots: Snapshots of this rank.

    Raises:
        StateLost: The agents did not restart the job.
    """
    lost = StateLost(str(late))
    writers, step, mine = plan.savers, plan.step, None
    if not writers or step <= 0:
        salvage = plan_salvage(late.formed.arrivals, topology)
        writers = ()
        if salvage is not None and salvage.step > newest_checkpoint(known_checkpoints(member.job_store))[1]:
            writers, step = tuple(salvage.owners), salvage.step
            if snapshots is not None and member.rank in writers:
                if not snapshots.is_intact(step):
                    member.restart_all(lost)
                mine = {owner: snapshots.find(owner, step) for owner in salvage.owners[member.rank]}
    path = ""
    if member.rank in writers:
        member.activity = f"writing what is left of step {step}, before all processes restart"
        path = shutdown.save(step, RESHARD, writers, late.formed.number, mine)
    elif writers:
        member.activity = f"waiting for the ranks that write what is left of step {step}"
        _await_restart_request(member)
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
    request_restart(member.job_store, restart, RecoveryLevel.CHECKPOINT.event, lost)


def _await_restart_request(member: Member) -> None:
    """Wait until the ranks that write have published the checkpoint to restart from."""
    poll_until(
        lambda: member.job_store.try_get(RESTART_KEY), lambda found: found is not None, limit_s=SAVE_S, every_s=_POLL_S
    )
