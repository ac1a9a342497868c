"""Moving this process from one world of an elastic job to the next."""

import logging

from hyperpod_plugins.elastic.membership.restart_policy import NOT_NEEDED
from hyperpod_plugins.recovery.member import NO_STATE, Member

log = logging.getLogger(__name__)


def move_to_next_world(member: Member) -> bool:
    """Move this process to the next world; returns whether that differs from the present one.

    Raises:
        SystemExit: This process is not part of the next world, or had not yet joined the present one.
    """
    world = member.next_world()
    if world.number == member.world.number:
        return False
    if member.is_joining and member.committed == NO_STATE:
        log.warning("the world changed before this process joined it; another process starts in its worker slot")
        raise SystemExit(NOT_NEEDED)
    if world.rank_of(member.worker_id) is None:
        log.warning("%s; the job continues without this process", world.cause)
        member.leave()
        raise SystemExit(NOT_NEEDED)
    member.move(world)
    return True
