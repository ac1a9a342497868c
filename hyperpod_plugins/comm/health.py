"""What a process does with its groups once one of them is broken: all break together, and the phase says what follows.

    phase       a broken group's collectives                      when
    STRICT      raise PeerLost                                    outside a step
    TOLERANT    return at once, outputs untouched                 inside a step, until its vote
    DETACHED    return at once, and there are no connections      a newcomer that sets itself up

Breaking is one-way: only `Reform` in `generations.py` mends. No exception crosses autograd or a hook of FSDP2 in a
step, so no module is left half gathered; what the step computes after a break is thrown away.
"""

import enum
import threading
from collections.abc import Callable


class Phase(enum.Enum):
    """What collectives of broken groups do."""

    STRICT = "they raise PeerLost"
    TOLERANT = "they do nothing, and the vote at the end of the step tells"
    DETACHED = "they do nothing, for this process has not joined the others yet"


class Tolerance:
    """A block in which a breaker is tolerant, as long as it was strict before.

    A class, for a generator costs more, and each step enters two such blocks.
    """

    def __init__(self, health: "GroupHealth") -> None:
        self._health = health
        self._is_outermost = False

    def __enter__(self) -> None:
        self._is_outermost = self._health.phase is Phase.STRICT
        if self._is_outermost:
            self._health.phase = Phase.TOLERANT

    def __exit__(self, *_: object) -> None:
        if self._is_outermost and self._health.phase is Phase.TOLERANT:
            self._health.phase = Phase.STRICT


class GroupHealth:
    """The state of all groups of this process; thread-safe."""

    def __init__(self) -> None:
        self.phase = Phase.STRICT
        """What collectives do when the groups are broken; set here and in `Tolerance` alone."""
        self._cause: str | None = None
        self._lock = threading.Lock()
        self._listeners: list[Callable[[str], None]] = []
        self.refusal = ""
        """Why the main thread must not communicate now; empty where it may."""
        self.before_refusal: Callable[[], None] = lambda: None
        """Called before a collective is refused for that reason; may raise something else, or allow it."""

    @property
    def cause(self) -> str | None:
        """Why the groups are broken (the first reason), or None while they are whole."""
        return self._cause

    @property
    def suppresses_collectives(self) -> bool:
        """Whether collectives do nothing now."""
        return self.phase is Phase.DETACHED or (self._cause is not None and self.phase is Phase.TOLERANT)

    @property
    def is_open(self) -> bool:
        """Whether collectives do not reach the peers now, be it quietly or with an error."""
        return self._cause is not None or self.phase is Phase.DETACHED

    def forbid(self, why: str, before: Callable[[], None] = lambda: None) -> None:
        """Let the main thread's collectives raise `LoopError(why)` from now on, after a call of `before`."""
        self.refusal, self.before_refusal = why, before

    def allow(self) -> None:
        """Let the main thread communicate."""
        self.forbid("")

    def when_broken(self, listener: Callable[[str], None]) -> None:
        """Call `listener(cause)` at each break, in the thread that noticed it, after the connections were cut."""
        self._listeners.append(listener)

    def forget(self, listener: Callable[[str], None]) -> None:
        """Do not call a listener any more."""
        self._listeners = [each for each in self._listeners if each != listener]

    def mark_broken(self, cause: str, shutdown: Callable[[], None]) -> bool:
        """Break, unless broken already; `cut` ends the connections. Returns whether this call did it."""
        with self._lock:
            if self._cause is not None:
                return False
            self._cause = cause
        shutdown()
        for listener in self._listeners:
            listener(cause)
        return True

    def detach(self) -> None:
        """Begin as a newcomer."""
        self.phase = Phase.DETACHED

    def leave_others(self) -> None:
        """Go apart from the others after a break: collectives do nothing until the groups are mended."""
        self.phase = Phase.DETACHED

    def reset(self) -> None:
        """All groups have new connections."""
        with self._lock:
            self._cause = None
        self.phase = Phase.STRICT

    def tolerant(self) -> Tolerance:
        """Inside a step. A newcomer stays detached, and a break outlasts the block."""
        return Tolerance(self)


group_health = GroupHealth()
"""The one of this process: c10d's default group is one a process, too."""
