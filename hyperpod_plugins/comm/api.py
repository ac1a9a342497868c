"""What a group of the backend `hyperpod` is given: what a user may ask of it, and what it is for."""

import zlib
from dataclasses import dataclass
from typing import Literal, get_args

from hyperpod_plugins.errors import ConfigError

TransportName = Literal["auto", "gloo", "nccl", "smddp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommOptions:
    """What a user may ask of the backend: `init_process_group("hyperpod", pg_options=CommOptions(...))`.

    Groups that are made later inherit the options of the default group.
    """

    transport: TransportName = "auto"
    """Library that moves the bytes; `auto` takes nccl for CUDA and gloo otherwise, and never smddp."""
    strict: bool = False
    """Raise when smddp was asked for and is not available, instead of warning and falling back."""

    def __post_init__(self) -> None:
        """Check the name."""
        if self.transport not in get_args(TransportName):
            raise ConfigError(
                f"transport={self.transport!r} is not known. Allowed are {', '.join(get_args(TransportName))}; "
                "'auto' fits every machine."
            )


@dataclass(frozen=True, slots=True)
class GroupKey:
    """The place of a group in the mesh.

    Two processes that hold equal roles belong to the same group, also when one of them joined the job long after
    the other. c10d's group ids lack this property: they count the groups that a process has made so far.
    """

    axis: str
    """Mesh axis along which the members lie, such as `shard`; `world` for the group of everybody."""
    coordinates: tuple[tuple[str, int], ...] = ()
    """Position on every other axis, as `(axis, index)` pairs, the same for all members."""
    group_id: str = ""
    """c10d's id, only for groups that somebody made without giving them a role."""
    is_strict: bool = False
    """Whether a broken group raises also inside a step: for threads beside the step, which take no part in its vote."""

    @property
    def name(self) -> str:
        """Readable and unique in the job: `world`, `shard[replicate=1,tensor=0]`, or `other#3` without a role."""
        where = ",".join(f"{axis}={index}" for axis, index in self.coordinates)
        return self.axis + (f"[{where}]" if where else "") + (f"#{self.group_id}" if self.group_id else "")

    def short_name(self, generation: int) -> str:
        """What an inner group calls itself in torch's records, such as `shar5f0c21d4@0`: at most 15 characters.

        [Note: short names] Longer names made a step of a small Llama on gloo some 15 % slower (`throughput.py` in
        benchmarks), with plain gloo groups just as with ours; the steps also had more page faults. Up to 15
        characters fit into a `std::string` without an allocation, which is our guess at the reason.
        """
        return f"{self.axis[:4]}{zlib.crc32(self.name.encode()) & 0xFFFFFFF:07x}@{generation}"[:15]

    def store_prefix(self, generation: int) -> str:
        """Key prefix under which the members of one generation find each other in a store."""
        return f"hyperpod/{generation}/{self.name}"


WORLD = GroupKey("world")


def without_key(group_id: str) -> GroupKey:
    """The role of a group that was made by a plain `new_group` or `init_device_mesh`."""
    return GroupKey("other", group_id=group_id)
