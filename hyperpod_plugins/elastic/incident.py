"""What went wrong, as the one who knew it first tells it."""

import time
from dataclasses import dataclass, field
from typing import Literal

from hyperpod_plugins.elastic.line import Line

IncidentKind = Literal[
    "process",  # a worker process ended before its work was done
    "exception",  # a rank's own code raised
    "collective",  # a rank saw a collective fail, and knows no more than that
    "hang",  # a rank did not arrive where the others waited for it
    "agent",  # the agent of a node is gone, and all workers of that node with it
    "resize",  # the job goes on as another world
    "request",  # somebody asked for it: a test, a return to a snapshot
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident(Line):
    """The end of a generation: who failed, how, and who says so."""

    kind: IncidentKind
    cause: str
    """One line: an exit code, a signal's name, an exception's text."""
    rank: int = -1
    """Place of the process that failed (its rank, as long as the job has not been resized); -1 if that is not known."""
    incarnation: int = 0
    """Which process in that place: 0 for the founder."""
    reporter: str = ""
    """Who wrote this, such as `rank 2` or `agent of node 0`."""
    step: int = -1
    """Number of steps committed by the reporter, or -1 where it does not count them."""
    world: int = 0
    """Number of the world that takes over, where this ends a generation for that."""
    at_s: float = field(default_factory=time.time)
    """Unix time of the report, in seconds."""

    def __str__(self) -> str:
        """One sentence part: `rank 2 (process): killed by SIGKILL`."""
        who = f"rank {self.rank}" if self.rank >= 0 else self.reporter or "unknown rank"
        return f"{who} ({self.kind}): {self.cause}"
