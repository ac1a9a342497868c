"""Build the `DeviceMesh` and process groups of a topology, and update them when the number of replicas changes."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hyperpod_plugins.comm import GroupKey, live_groups, new_axis_group
from hyperpod_plugins.comm.process_group import ResilientProcessGroup
from hyperpod_plugins.errors import CommError, ConfigError
from hyperpod_plugins.parallel.topology import AXES, Topology

CONTEXT = "context"
"""Name of the group of ranks that hold the parts of the same sequences."""


def build_mesh(topology: Topology, device_type: str) -> DeviceMesh:
    """Build the 3-axis mesh `("replicate", "shard", "tensor")` over the initialized default process group.

    Every axis gets its own group, even an axis of size 1 or one that spans the world. `init_device_mesh` would
    reuse the default group for the latter; then the world could not grow without changing that axis.

    With context parallelism there is a further group, `context_group(...)`, which is no axis of the mesh.

    Returns:
        A mesh of shape `topology.shape` whose groups know their `GroupKey`.
    """
    groups: list[dist.ProcessGroup] = [new_axis_group(*_group_of(topology, axis, dist.get_rank())) for axis in AXES]
    if topology.context_degree > 1:
        new_axis_group(*_group_of(topology, CONTEXT, dist.get_rank()))
    ranks = torch.arange(topology.world_size).view(topology.shape)
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=AXES)


def build_data_group(topology: Topology) -> dist.ProcessGroup:
    """Build the data-parallel group of this rank: one rank of each tensor group and of each context group.

    Losses and metrics are reduced over it, so that values shared by tensor and context peers count once. Without tensor
    and context parallelism it is the default group.
    """
    if topology.tensor_degree == topology.context_degree == 1:
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    return new_axis_group(*_group_of(topology, "data", dist.get_rank()))


def context_group(shard_degree: int, context_degree: int) -> ResilientProcessGroup:
    """Return the group of the ranks that hold the parts of this rank's sequences, which `build_mesh` has created.

    Raises:
        ConfigError: there is none with these degrees.
    """
    asked = {("of_shards", shard_degree), ("of_contexts", context_degree)}
    for group in live_groups().values():
        if group.key.axis == CONTEXT and asked <= set(group.key.coordinates):
            return group
    raise ConfigError(
        f"there is no process group for context_parallel_degree={context_degree}. Build the mesh with "
        "build_mesh(config.topology(world_size), ...) of the same configuration, over a default group of the backend "
        "'hyperpod'."
    )


def update_group_members(topology: Topology, global_rank: int) -> None:
    """Set the members of this process's groups for a new topology. The groups must be disconnected.

    The mesh, and what FSDP2 and DTensor hold of it, stay the same objects; they ask the groups for their sizes.

    Args:
        topology: the new topology: same degrees, different number of replicas.
        global_rank: rank of this process in it, with the same `shard` and `tensor` coordinates.

    Raises:
        CommError: a group was not made by this package, so its members in the new world are unknown.
    """
    for name, group in live_groups().items():
        axis = group.key.axis
        if axis in (*AXES, CONTEXT, "data"):
            key, members = _group_of(topology, axis, global_rank)
        elif not group.key.coordinates and not group.key.group_id:  # all ranks
            key, members = group.key, tuple(range(topology.world_size))
        else:
            raise CommError(
                f"the process group {name!r} was made by torch.distributed.new_group, so its members in a world of "
                "another size are unknown. In an elastic job, make groups with hyperpod_plugins.comm.new_axis_group, "
                "or make none of your own."
            )
        group.reassign(key, members, members.index(global_rank))


def _group_of(topology: Topology, axis: str, global_rank: int) -> tuple[GroupKey, Sequence[int]]:
    """Return key and members of a rank's group along an axis of the mesh, along `context` or along `data`.

    The key contains the degrees, so that groups of different layouts have different names, but not the number of
    replicas, which may change during the group's lifetime.
    """
    here = topology.coordinates(global_rank)
    place = {"replicate": here.replicate, "shard": here.shard, "tensor": here.tensor}
    if axis in AXES:
        members: Sequence[int] = topology.peers(global_rank, axis)
        del place[axis]
    elif axis == CONTEXT:
        members = topology.context_peers(global_rank)
        place["shard"] //= topology.context_degree
    else:
        members = topology.data_peers(global_rank)
        place = {"tensor": here.tensor}
    degrees = [("of_shards", topology.shard_degree), ("of_tensors", topology.tensor_degree)]
    if topology.context_degree > 1 and axis not in AXES:
        degrees.append(("of_contexts", topology.context_degree))
        if axis != CONTEXT:
            place[CONTEXT] = here.shard % topology.context_degree
    return GroupKey(axis=axis, coordinates=(*place.items(), *degrees)), members
