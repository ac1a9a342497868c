"""The worlds of a job, as one of its processes learns of them from the ledger."""

from hyperpod_plugins.elastic import Ledger
from hyperpod_plugins.elastic.world import World
from hyperpod_plugins.errors import RecoveryError


class Worlds:
    """The present world, and those that follow it."""

    def __init__(self, ledger: Ledger, now: World) -> None:
        """Begin with the world `now`; `ledger` is the connection of the thread that calls."""
        self._ledger = ledger
        self.now = now
        """The world for which this process has been set up."""

    def at(self, generation: int) -> World:
        """The world that a generation is formed for.

        Raises:
            RecoveryError: the ledger does not hold it.
        """
        number = self._ledger.world_number(generation)
        if number <= self.now.number:
            return self.now
        world = self._ledger.world(number)
        if world is None:
            raise RecoveryError(f"the ledger of the job lacks the world {number} that generation {generation} is for")
        return world
