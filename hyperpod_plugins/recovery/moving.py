"""From one world of an elastic job to the next, for a process that is apart from the others."""

import logging

from hyperpod_plugins.elastic.membership.restart_policy import NOT_NEEDED
from hyperpod_plugins.recovery.member import NO_STATE, Member

log = logging.getLogger(__name__)


def move_to_next_world(member: Member) -> bool:
    """Belong to the next world; returns whether it is another one than until now.

    Raises:
        SystemExit: this process is no part of it, or was not yet part of the one before.
    """
    world = member.next_world()
    if world.number == member.world.number:
        return False
    if member.is_joining and member.committed == NO_STATE:
        log.warning("the world has changed before this process was part of it: another begins in its place")
        raise SystemExit(NOT_NEEDED)
    if world.rank_of(member.worker_id) is None:
        log.warning("%s, and goes on without this process", world.cause)
        member.leave()
        raise SystemExit(NOT_NEEDED)
    member.move(world)
    return True
