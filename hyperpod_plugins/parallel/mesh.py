"""From a topology to a `DeviceMesh`."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hyperpod_plugins.comm import GroupKey, live_groups, new_axis_group
from hyperpod_plugins.errors import CommError
from hyperpod_plugins.parallel.topology import AXES, Topology


def build_mesh(topology: Topology, device_type: str) -> DeviceMesh:
    """Make the 3-axis mesh `("replicate", "shard", "tensor")` over the initialised default process group.

    Every axis gets a group of its own, also an axis of size 1 or one that spans the world. `init_device_mesh` would
    reuse the default group for the latter; then the world could not grow without changing that axis.

    Returns:
        A mesh of shape `topology.shape` whose groups know their role and coordinates.
    """
    global_rank = dist.get_rank()
    here = topology.coordinates(global_rank)
    place = {"replicate": here.replicate, "shard": here.shard, "tensor": here.tensor}
    groups: list[dist.ProcessGroup] = [
        new_axis_group(
            _role(topology, axis, {other: place[other] for other in AXES if other != axis}),
            topology.peers(global_rank, axis),
        )
        for axis in AXES
    ]
    ranks = torch.arange(topology.world_size).view(topology.shape)
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=AXES)


def build_data_group(topology: Topology) -> dist.ProcessGroup:
    """Make the group of this rank and those that read other samples: `replicate x shard`, one of each tensor group.

    Losses and metrics are reduced over it, so that what tensor peers hold in common counts once. Without tensor
    parallelism it is the default group.
    """
    if topology.tensor_degree == 1:
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    global_rank = dist.get_rank()
    tensor = topology.coordinates(global_rank).tensor
    ranks = range(tensor, topology.world_size, topology.tensor_degree)
    return new_axis_group(_role(topology, "data", {"tensor": tensor}), ranks)


def move_groups(topology: Topology, global_rank: int) -> None:
    """Give the groups of this process, which are not connected, the members that they have in another topology.

    The mesh is the same object afterwards, and what FSDP2 and DTensor hold of it; they ask its groups for their sizes.

    Args:
        topology: with the same degrees, and another number of replicas.
        global_rank: this process's rank in it, with the same coordinates on `shard` and `tensor`.

    Raises:
        CommError: there is a group of which nobody knows what it is for.
    """
    here = topology.coordinates(global_rank)
    place = {"replicate": here.replicate, "shard": here.shard, "tensor": here.tensor}
    for name, group in live_groups().items():
        axis = group.role.axis
        if axis in AXES:
            role = _role(topology, axis, {other: place[other] for other in AXES if other != axis})
            members = topology.peers(global_rank, axis)
        elif axis == "data":
            role = _role(topology, axis, {"tensor": here.tensor})
            members = tuple(range(here.tensor, topology.world_size, topology.tensor_degree))
        elif not group.role.coordinates and not group.role.group_id:  # of all ranks
            role, members = group.role, tuple(range(topology.world_size))
        else:
            raise CommError(
                f"the process group {name!r} was made by torch.distributed.new_group, so nobody knows its members in "
                "a world of another size. Make groups with hyperpod_plugins.comm.new_axis_group, or none of your own, "
                "in a job that grows and shrinks."
            )
        group.move(role, members, members.index(global_rank))


def _role(topology: Topology, axis: str, place: Mapping[str, int]) -> GroupKey:
    """Name a group by where it lies. With the degrees in it the names of another layout's groups differ; the number of
    replicas is not in it, for it may change while the group lives.
    """
    degrees = (("of_shards", topology.shard_degree), ("of_tensors", topology.tensor_degree))
    return GroupKey(axis=axis, coordinates=(*place.items(), *degrees))
