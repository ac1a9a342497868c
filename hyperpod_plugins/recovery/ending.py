"""A job that must not go on saves what its ranks hold, and then ends."""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

from hyperpod_plugins.errors import PeerLost, RecoveryError
from hyperpod_plugins.observability import Event, record
from hyperpod_plugins.recovery.assembly import NobodyCame
from hyperpod_plugins.recovery.assign import Farewell, RecoveryPlan, Rung
from hyperpod_plugins.recovery.member import Member
from hyperpod_plugins.recovery.repair import Subject
from hyperpod_plugins.recovery.snapshot import Snapshot

log = logging.getLogger(__name__)
SAVE_S = 600.0
"""Longest wait for the last save of others."""


class Ending:
    """The last acts of one rank."""

    def __init__(self, member: Member, subject: Subject) -> None:
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

    def part(self, late: NobodyCame, plan: Farewell, error: Exception | None) -> NoReturn:
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
        record(Event(name=Rung.STOP.event, at_s=time.time(), details={"cause": cause, "step": step, "saved": path}))
        self._member.give_up(f"{cause}; step {step} was saved as {path}" if path else cause)
