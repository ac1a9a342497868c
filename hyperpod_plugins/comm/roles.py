"""What a process group is for: its axis and coordinates in the mesh, which outlive members and generations."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupRole:
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

    @property
    def name(self) -> str:
        """Readable and unique in the job: `world`, `shard[replicate=1,tensor=0]`, or `other#3` without a role."""
        where = ",".join(f"{axis}={index}" for axis, index in self.coordinates)
        return self.axis + (f"[{where}]" if where else "") + (f"#{self.group_id}" if self.group_id else "")

    def store_prefix(self, generation: int) -> str:
        """Key prefix under which the members of one generation find each other in a store."""
        return f"hyperpod/{generation}/{self.name}"


WORLD = GroupRole("world")


def without_role(group_id: str) -> GroupRole:
    """The role of a group that was made by a plain `new_group` or `init_device_mesh`."""
    return GroupRole("other", group_id=group_id)
