"""What a rank keeps when a fault makes it leave the loops of a fit; see `fit_recovery`."""

from dataclasses import dataclass, field
from typing import Any

from hyperpod_plugins.lightning.accumulation_window import PartStart
from hyperpod_plugins.recovery import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedPart:
    """Rank-local state after a part of the fit, which all ranks run again unless another rank is already past it."""

    part: PartStart
    """State when the part began."""
    own: bytes
    """Description of the trainer."""
    metrics: dict[str, dict[str, Any]]
    local: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class LeftLoops:
    """Where this rank left the loops, until it has joined the others again."""

    returned: Snapshot | None = None
    """Snapshot to which all ranks return, if this rank has just been put back to one."""
    description: bytes = b""
    """Where this rank can continue; empty without a valid state."""
    own: bytes = b""
    """Description of this rank's trainer, whose callbacks and loaders may differ from those of other ranks."""
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    local: dict[str, Any] = field(default_factory=dict[str, Any])
    """Rank-local state from when this rank first left the loops."""
    ended: EndedPart | None = None
    """The part at whose end this rank waited for the others, if any."""
