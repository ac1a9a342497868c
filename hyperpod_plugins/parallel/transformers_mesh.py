"""The meshes over which transformers shards a model while it loads it, with groups that need no other rank.

transformers makes them by `torch.distributed.init_device_mesh`, which numbers groups and waits until all ranks have
made each of them. A process that replaces a lost rank, or joins a job that grows, loads its model while the others
train: it would wait for ranks that never come. With `serve_meshes`, these groups have keys, as all of ours: a process
without connections makes them alone (see docs/design/resilient-group.md). They serve until the model is adopted.
"""

from collections.abc import Sequence
from math import prod
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hyperpod_plugins.comm import GroupKey, new_axis_group
from hyperpod_plugins.comm.process_group import ResilientProcessGroup

DENSE_AXES = ("pp", "dp_replicate", "fsdp", "tp")
"""Axes of transformers' mesh of most parameters."""
EXPERT_AXES = ("pp", "dp_replicate", "efsdp", "ep")
"""Axes of its mesh of parameters of experts."""
_init_device_mesh_of_torch = dist.init_device_mesh
_made: list["ref[DeviceMesh]"] = []


def serve_meshes() -> None:
    """Have `torch.distributed.init_device_mesh` make transformers' meshes by `new_axis_group`; others as before."""
    dist.init_device_mesh = _init_device_mesh


def _init_device_mesh(device_type: str, mesh_shape: Sequence[int], *args: Any, **kwargs: Any) -> DeviceMesh:
    names = tuple(kwargs.get("mesh_dim_names") or ())
    is_ours = isinstance(dist.group.WORLD, ResilientProcessGroup)
    if names not in (DENSE_AXES, EXPERT_AXES) or not is_ours or prod(mesh_shape) != dist.get_world_size():
        return _init_device_mesh_of_torch(device_type, tuple(mesh_shape), *args, **kwargs)
    ranks = torch.arange(dist.get_world_size()).view(*mesh_shape)
    here = [int(index) for index in (ranks == dist.get_rank()).nonzero()[0]]
    groups: list[dist.ProcessGroup] = []
    for axis, name in enumerate(names):
        row = tuple(slice(None) if each == axis else index for each, index in enumerate(here))
        place = [(other, index) for other, index in zip(names, here, strict=True) if other != name]
        sizes = [(f"of_{other}", size) for other, size in zip(names, mesh_shape, strict=True)]
        key = GroupKey(axis=f"transformers_{name}", coordinates=(*place, *sizes))
        groups.append(new_axis_group(key, ranks[row].tolist()))
    mesh = DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)
    _made.append(ref(mesh))
    return mesh


def destroy_groups(meshes: Sequence[DeviceMesh]) -> None:
    """Destroy the groups of meshes, except those that another mesh has: of a model that transformers sharded alike."""
    alive = [each for each in (made() for made in _made) if each is not None]
    kept = {id(dist.group.WORLD)}
    kept |= {id(group) for other in alive if all(other is not each for each in meshes) for group in _groups(other)}
    found = {id(group): group for mesh in meshes for group in _groups(mesh)}
    for key, group in found.items():
        if key not in kept:
            dist.destroy_process_group(group)
    _made[:] = [made for made in _made if (mesh := made()) is not None and all(mesh is not each for each in meshes)]


def _groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    return [mesh.get_group(axis) for axis in range(mesh.ndim)]
