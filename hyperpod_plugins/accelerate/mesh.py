"""The device mesh, under the axis names that Accelerate expects."""

from dataclasses import dataclass
from typing import Self

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from hyperpod_plugins.accelerate.compat import Accelerator, ParallelismConfig
from hyperpod_plugins.errors import DegreeError
from hyperpod_plugins.parallel import Topology, build_mesh

AXIS_NAMES = ("dp_replicate", "dp_shard", "tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderAxis:
    """An axis of a `LoaderMesh`."""

    num_ranks: int

    def size(self) -> int:
        """Number of ranks."""
        return self.num_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderMesh:
    """What Accelerate asks of a mesh to divide samples: the sizes of axes by name, of which `cp` shares samples.

    Our own mesh has no such axis, because the ranks of a context group lie on the axis over which FSDP2 shards.
    """

    sizes: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, topology: Topology) -> Self:
        """Return the axes of a topology."""
        numbers = (
            topology.replicate_degree,
            topology.data_ranks_per_replica,
            topology.context_degree,
            topology.tensor_degree,
        )
        return cls(sizes=tuple(zip(("dp_replicate", "dp_shard", "cp", "tp"), numbers, strict=True)))

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        """Names of the axes."""
        return tuple(name for name, _ in self.sizes)

    def __getitem__(self, name: str) -> LoaderAxis:
        """Return an axis."""
        return LoaderAxis(num_ranks=dict(self.sizes)[name])


class HyperPodParallelism(ParallelismConfig):
    """Accelerate's `ParallelismConfig` over our mesh: all three axes exist, even those of size 1.

    Accelerate itself omits axes of size 1, and refuses tensor parallelism over replicas that are not sharded.
    """

    topology: Topology
    mesh: DeviceMesh | None = None
    """Mesh `("replicate", "shard", "tensor")`, once it is built; Accelerate's names refer to the same groups."""

    @classmethod
    def from_topology(cls, topology: Topology) -> Self:
        """Create the configuration for a topology."""
        replicate, shard, tensor = topology.shape
        sizes = cls(dp_replicate_size=replicate, dp_shard_size=shard, tp_size=tensor, cp_size=1, sp_size=1)
        sizes.topology = topology
        return sizes

    def move(self, topology: Topology, device_type: str) -> None:
        """Take over the sizes of another world, whose groups already exist."""
        self.topology, self.dp_replicate_size = topology, topology.replicate_degree
        self._sizes["dp_replicate"] = topology.replicate_degree
        self.mesh = build_mesh(topology, device_type)

    @override
    def __post_init__(self) -> None:
        """Take sizes as they are: `ParallelConfig` has checked them."""
        self.cp_backend, self.sp_backend = "torch", "deepspeed"
        self._sizes = {
            "dp_replicate": self.dp_replicate_size,
            "dp_shard": self.dp_shard_size,
            "tp": self.tp_size,
            "cp": self.cp_size,
            "sp": self.sp_size,
        }

    @property
    @override
    def fsdp_dim_names(self) -> list[str]:
        """Axes over which FSDP2 replicates and shards."""
        return list(AXIS_NAMES[:2])

    @override
    def build_device_mesh(self, device_type: str) -> DeviceMesh:
        """Build the mesh; each axis has its own group, which can change its size."""
        self.mesh = build_mesh(self.topology, device_type)
        groups = [self.mesh.get_group(axis) for axis in range(3)]
        return DeviceMesh.from_group(groups, device_type, mesh=self.mesh.mesh, mesh_dim_names=AXIS_NAMES)

    @override
    def _validate_accelerator(self, accelerator: Accelerator) -> None:
        """Raise `DegreeError` if mesh and process group have different sizes."""
        if self.topology.world_size != dist.get_world_size():
            raise DegreeError(
                f"the layout {self.topology} has {self.topology.world_size} ranks, but the process group has "
                f"{dist.get_world_size()}. Let the plugin join it, or give the launcher's variables for the same world."
            )
