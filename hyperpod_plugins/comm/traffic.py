"""Calls and bytes of every collective, counted per mesh axis.

[Note: what a byte is]
`payload_bytes` is the size of the whole buffer that a collective works on, as one member sees it, and the same on
every member. It does not depend on the algorithm; `wire_bytes` converts it to bytes on the wire.

    all_reduce, broadcast, reduce   the tensor
    all_gather                      the gathered output (group size x one member's input)
    reduce_scatter                  the whole input (group size x one member's output)
    all_to_all                      this member's input
    gather, scatter                 group size x one member's part, whether this member is the root or not
    send, recv                      the tensor
    barrier                         0
    coalesced                       0 (the end of a block of calls, each of which was counted)

A coalesced call counts once, with the sum of its tensors.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Collective = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
    "barrier",
    "coalesced",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Collectives that one rank has issued on one mesh axis since the last reset."""

    calls: Mapping[Collective, int]
    """Number of calls of each collective."""
    payload_bytes: Mapping[Collective, int]
    """Payload of each collective in bytes; see [Note: what a byte is]."""

    @property
    def num_calls(self) -> int:
        """Total number of calls."""
        return sum(self.calls.values())

    @property
    def num_bytes(self) -> int:
        """Total payload in bytes."""
        return sum(self.payload_bytes.values())


class AxisCounters:
    """The counters of one axis: two integer additions per call.

    Additions are not synchronized: a program that uses one axis from two threads at once can lose a count.
    """

    __slots__ = ("_calls", "_payload_bytes")

    def __init__(self) -> None:
        self._calls: defaultdict[Collective, int] = defaultdict(int)
        self._payload_bytes: defaultdict[Collective, int] = defaultdict(int)

    def add(self, kind: Collective, payload_bytes: int) -> None:
        """Count one call."""
        self._calls[kind] += 1
        self._payload_bytes[kind] += payload_bytes

    def snapshot(self) -> Traffic:
        """Return a copy of the present counts."""
        return Traffic(calls=dict(self._calls), payload_bytes=dict(self._payload_bytes))

    def reset(self) -> None:
        """Set all counts to zero."""
        self._calls.clear()
        self._payload_bytes.clear()


class TrafficCounters:
    """The counters of all axes of a process."""

    def __init__(self) -> None:
        self._axes: dict[str, AxisCounters] = {}

    def of_axis(self, axis: str) -> AxisCounters:
        """Return the counters of an axis, which all groups of this process along it share."""
        return self._axes.setdefault(axis, AxisCounters())

    def snapshot(self) -> dict[str, Traffic]:
        """Return what was issued on each mesh axis since the last reset; axes without calls are omitted."""
        snapshots = {axis: sums.snapshot() for axis, sums in self._axes.items()}
        return {axis: snapshot for axis, snapshot in snapshots.items() if snapshot.calls}

    def reset(self) -> None:
        """Set the counters of all axes to zero."""
        for sums in self._axes.values():
            sums.reset()


def wire_bytes(kind: Collective, payload_bytes: int, group_size: int) -> float:
    """Return the bytes that a member sends with ring algorithms, as the mean over the group.

    A ring all-reduce is a reduce-scatter followed by an all-gather, and each of those passes every block but one
    through every member (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009). Received bytes are the
    same. A receive sends nothing: its bytes belong to the sender.

    Args:
        kind: The collective.
        payload_bytes: Its payload; see [Note: what a byte is].
        group_size: Number of members, at least 1.
    """
    others = (group_size - 1) / group_size
    match kind:
        case "all_reduce":
            return 2 * others * payload_bytes
        case "all_gather" | "reduce_scatter" | "all_to_all" | "broadcast" | "reduce":
            return others * payload_bytes
        case "gather" | "scatter":  # every part but one travels once, from or to the root
            return others * payload_bytes / group_size
        case "send":
            return float(payload_bytes)
        case "recv" | "barrier" | "coalesced":
            return 0.0
