"""Group health: whether the groups of this process are broken, and what their collectives do then.

All groups of a process break together. The phase decides what a collective of a broken group does:

    phase       collectives of broken groups                      when
    STRICT      raise PeerLost                                    outside a step
    TOLERANT    return at once, outputs untouched                 inside a step, until its commit vote
    DETACHED    return at once; there are no connections          in a joiner that sets itself up, or after a break
                                                                  in a rank that has left the others

A break is final until `Reconfiguration` in `reconfigure.py` connects new groups. Inside a step no exception crosses
autograd or a hook of FSDP2, so no module is left partly gathered; what the step computes after a break is discarded.
"""

import enum
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from hyperpod_plugins.comm.options import GroupKey
from hyperpod_plugins.errors import PeerLost


class Phase(enum.Enum):
    """What the collectives of broken groups do."""

    STRICT = "collectives raise PeerLost"
    TOLERANT = "collectives do nothing; the commit vote reports the break"
    DETACHED = "collectives do nothing; this process has no connections"


class TolerantPhase:
    """Context manager that switches the phase from STRICT to TOLERANT; other phases stay as they are.

    A class because `@contextmanager` costs more, and each step enters two such blocks.
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


class HostRead:
    """Context manager for a collective whose result the host reads; raises `PeerLost` if the groups are broken.

    [Note: garbage that is read] Where collectives are queued on a device, a wait returns at once and raises nothing.
    What the host reads after an abort is what was in the memory before: a size of terabytes, or the value of an earlier
    broadcast. So an exception of the block counts as a consequence of the break, and a result is dropped.
    """

    def __init__(self, health: "GroupHealth") -> None:
        self._health = health

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        is_broken = self._health.cause is not None and self._health.phase is Phase.STRICT
        if is_broken and not isinstance(error, PeerLost) and (error is None or isinstance(error, Exception)):
            raise PeerLost(f"a rank was lost outside a step: {self._health.cause}") from error


class GroupHealth:
    """Health of all groups of this process; thread-safe."""

    def __init__(self) -> None:
        self.phase = Phase.STRICT
        """What collectives of broken groups do; set only in this file."""
        self._cause: str | None = None
        self._lock = threading.Lock()
        self._listeners: list[Callable[[str], None]] = []
        self.refusal_reason = ""
        """Why the main thread must not communicate now; empty if it may."""
        self.before_refusal: Callable[[], None] = lambda: None
        """Called before a collective is refused for that reason; may raise another error, or call `allow`."""

        self.on_set_up: Callable[[str, GroupKey, Any, dist.Work], object] | None = None
        """Called with kind, group, outputs and handle of each collective of the main thread in its set-up."""
        self.on_dropped: Callable[[str, GroupKey, Any, bool], object] | None = None
        """Called with kind, group, outputs, and whether this rank is the source of a broadcast, for each collective of
        the main thread that does nothing because this process is detached; may raise."""

    @property
    def cause(self) -> str | None:
        """First reason why the groups are broken; None while they are intact."""
        return self._cause

    @property
    def suppresses_collectives(self) -> bool:
        """Whether collectives do nothing at present."""
        return self.phase is Phase.DETACHED or (self._cause is not None and self.phase is Phase.TOLERANT)

    @property
    def is_unavailable(self) -> bool:
        """Whether collectives cannot reach the peers now, whether they do nothing or raise."""
        return self._cause is not None or self.phase is Phase.DETACHED

    def forbid_collectives(self, why: str, before: Callable[[], None] = lambda: None) -> None:
        """Make the main thread's collectives raise `LoopError(why)` from now on; `before` is called first."""
        self.refusal_reason, self.before_refusal = why, before

    def allow_collectives(self) -> None:
        """Let the main thread communicate again."""
        self.forbid_collectives("")

    @contextmanager
    def forbid(self, reason: str) -> Generator[None]:
        """Context in which the main thread's collectives raise `LoopError(reason)`; an inner reason hides the outer."""
        outer = self.refusal_reason, self.before_refusal
        self.forbid_collectives(reason)
        try:
            yield
        finally:
            self.forbid_collectives(*outer)

    def add_listener(self, listener: Callable[[str], None]) -> None:
        """Call `listener(cause)` at each break, in the thread that noticed it, after the sockets were shut down."""
        self._listeners.append(listener)

    def remove_listener(self, listener: Callable[[str], None]) -> None:
        """Remove a listener."""
        self._listeners = [each for each in self._listeners if each != listener]

    def mark_broken(self, cause: str, shutdown: Callable[[], None]) -> bool:
        """Mark the groups broken and call `shutdown`; return False if they were broken already."""
        with self._lock:
            if self._cause is not None:
                return False
            self._cause = cause
        shutdown()
        for listener in self._listeners:
            listener(cause)
        return True

    def detach(self) -> None:
        """Detach from the other ranks, in a joiner or after a break: collectives do nothing until `reset`."""
        self.phase = Phase.DETACHED

    def reset(self) -> None:
        """Mark the groups intact; call it when all of them have new connections."""
        with self._lock:
            self._cause = None
        self.phase = Phase.STRICT

    def checks_host_read(self) -> HostRead:
        """Return a context manager for a collective whose result the host reads, outside a step."""
        return HostRead(self)

    def tolerate_breaks(self) -> TolerantPhase:
        """Return a context manager for the inside of a step. A joiner stays detached; a break outlasts the block."""
        return TolerantPhase(self)
