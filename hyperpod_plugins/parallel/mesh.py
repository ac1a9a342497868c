"""From a topology to a `DeviceMesh`."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hyperpod_plugins.comm import GroupRole, new_axis_group
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
    # With these two the names of another layout's groups differ; the number of replicas may change under a name.
    degrees = (("of_shards", topology.shard_degree), ("of_tensors", topology.tensor_degree))
    groups: list[dist.ProcessGroup] = [
        new_axis_group(
            GroupRole(axis=axis, coordinates=(*((other, place[other]) for other in AXES if other != axis), *degrees)),
            topology.peers(global_rank, axis),
        )
        for axis in AXES
    ]
    ranks = torch.arange(topology.world_size).view(topology.shape)
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=AXES)
