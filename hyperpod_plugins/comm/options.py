"""Options and identity of a group of the `hyperpod` backend: `CommOptions` and `GroupKey`."""

import zlib
from dataclasses import dataclass
from typing import Literal, get_args

from hyperpod_plugins.errors import ConfigError

TransportName = Literal["auto", "gloo", "nccl", "smddp"]
SHARD_NODE, SHARD_ACROSS = "shard_node", "shard_across"
"""Axes of the groups of a shard axis that crosses nodes: its ranks on one node, and one of each node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommOptions:
    """User options of the backend: `init_process_group("hyperpod", pg_options=CommOptions(...))`.

    Groups created later inherit the options of the default group.

    Raises:
        ConfigError: `transport` is not one of `TransportName`.
    """

    transport: TransportName = "auto"
    """Collective library; `auto` selects nccl for CUDA and gloo otherwise, never smddp."""
    strict: bool = False
    """Raise if smddp is requested but not available, instead of warning and falling back."""

    def __post_init__(self) -> None:
        """Check the transport name."""
        if self.transport not in get_args(TransportName):
            raise ConfigError(
                f"transport={self.transport!r} is not known. Allowed are {', '.join(get_args(TransportName))}; "
                "'auto' fits every machine."
            )


@dataclass(frozen=True, slots=True)
class GroupKey:
    """Identity of a group, derived from its position in the device mesh.

    Processes that hold equal keys belong to the same group, even if one of them joined the job long after the other.
    c10d's group ids lack this property: they count the groups that a process has created so far.
    """

    axis: str
    """Mesh axis along which the members lie, such as `shard`; `world` for the default group."""
    coordinates: tuple[tuple[str, int], ...] = ()
    """Position on every other axis, as `(axis, index)` pairs; the same for all members."""
    group_id: str = ""
    """c10d's group id; set only for groups that were created without a key."""
    is_strict: bool = False
    """Whether a broken group raises even inside a step: for background threads, which take no part in the vote."""

    @property
    def name(self) -> str:
        """Readable and unique in the job: `world`, `shard[replicate=1,tensor=0]` or, without a key, `other#3`."""
        where = ",".join(f"{axis}={index}" for axis, index in self.coordinates)
        return self.axis + (f"[{where}]" if where else "") + (f"#{self.group_id}" if self.group_id else "")

    def short_name(self, generation: int) -> str:
        """Name of an inner group in torch's records, such as `shar5f0c21d4@0`: at most 15 characters.

        [Note: short names] Longer names made a step of a small Llama on gloo some 15 % slower
        (`benchmarks/throughput.py`), with plain gloo groups just as with ours; the steps also had more page faults.
        Our guess at the reason: a `std::string` holds up to 15 characters without an allocation.
        """
        return f"{self.axis[:4]}{zlib.crc32(self.name.encode()) & 0xFFFFFFF:07x}@{generation}"[:15]

    def store_prefix(self, generation: int) -> str:
        """Store prefix under which the members of one generation find each other."""
        return f"hyperpod/{generation}/{self.name}"


WORLD = GroupKey("world")


def key_of_unnamed_group(group_id: str) -> GroupKey:
    """Return the key of a group that was created by a plain `new_group` or `init_device_mesh`."""
    return GroupKey("other", group_id=group_id)
