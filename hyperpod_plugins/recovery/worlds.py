"""The worlds of a job, as one of its processes learns of them from the ledger."""

from collections.abc import Mapping

from hyperpod_plugins.elastic import Incident, Ledger
from hyperpod_plugins.elastic.joining import Terms, terms_of, world_without
from hyperpod_plugins.elastic.world import World
from hyperpod_plugins.errors import RecoveryError, StateLost


class Worlds:
    """The present world, and those that follow it."""

    def __init__(self, ledger: Ledger, now: World) -> None:
        """Begin with the world `now`; `ledger` is the connection of the thread that calls."""
        self._ledger = ledger
        self.now = now
        """The world for which this process has been set up."""
        self._terms: Terms | None = None

    @property
    def may_change(self) -> bool:
        """Whether the job grows and shrinks."""
        self._terms = self._terms or terms_of(self._ledger)
        return self._terms is not None

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

    def go_on_without(self, generation: int, missing: Mapping[int, int], waited_s: float, reporter: str) -> bool:
        """End a generation that is being formed, if the job goes on in a world without those that do not come to it.

        Args:
            generation: its number.
            missing: places of its world without a process, and the number of the process that is to come.
            waited_s: how long this process has waited for them, in seconds.
            reporter: who says so.
        """
        if not missing or not self.may_change:
            return False
        assert self._terms is not None
        try:
            world = world_without(self._ledger, self._terms, self.at(generation), missing, waited_s)
        except StateLost:  # only their replacements can go on, from a snapshot
            return False
        if world is None:
            return False
        incident = Incident(kind="resize", cause=world.cause, reporter=reporter, world=world.number)
        self._ledger.end(generation, incident)
        return True
