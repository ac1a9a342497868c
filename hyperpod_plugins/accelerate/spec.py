"""`AcceleratorSpec`: configuration of a job, and the equivalent objects of Accelerate.

One of these is its `ParallelismConfig`: `HyperPodParallelism` is the device mesh, under the axis names that Accelerate
expects.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy
from typing_extensions import override

from hyperpod_plugins.accelerate.compat import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    KwargsHandler,
    ParallelismConfig,
)
from hyperpod_plugins.accelerate.launch_config import AccelerateSettings
from hyperpod_plugins.comm import CommOptions
from hyperpod_plugins.env import WorkerEnv
from hyperpod_plugins.errors import DegreeError
from hyperpod_plugins.parallel import ParallelConfig, Topology, build_mesh
from hyperpod_plugins.parallel.finite import NonFinitePolicy
from hyperpod_plugins.parallel.hsdp import mixed_precision_policy, offload_policy
from hyperpod_plugins.precision.float8 import check_float8_library

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


@dataclass(frozen=True)
class AcceleratorSpec:
    """Configuration from which a `HyperPodAccelerator` is created."""

    config: ParallelConfig
    """Degrees and policies."""
    settings: AccelerateSettings
    """Settings of Accelerate besides parallel degrees."""
    comm: CommOptions
    """Collective library to use."""
    timeout_s: float
    """Seconds after which a collective that does not complete fails."""
    non_finite: NonFinitePolicy
    """What to do about a step that is not finite."""

    @property
    def topology(self) -> Topology:
        """Degrees and rank arithmetic for the process group or, before it is joined, for the launcher's world.

        Raises:
            DegreeError: the degrees do not fit the world size.
        """
        env = WorkerEnv.from_environ()
        world_size = dist.get_world_size() if dist.is_initialized() else env.world_size
        return self.config.topology(world_size, ranks_per_node=env.local_world_size)

    @property
    def mixed_precision(self) -> str:
        """Accelerate's name of the precision; `bf16-true` is not mixed, and float8 is not done by Accelerate."""
        return "bf16" if self.config.precision == "bf16-mixed" else "no"

    @property
    def parallelism_config(self) -> HyperPodParallelism:
        """Accelerate's mesh sizes, and the mesh, whose groups can lose members and be rebuilt."""
        return HyperPodParallelism.from_topology(self.topology)

    @property
    def fsdp_plugin(self) -> FullyShardedDataParallelPlugin:
        """Accelerate's FSDP2 plugin; reduces gradients in float32, whereas Accelerate's default is bfloat16."""
        return FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=self.config.reshard_after_forward,
            mixed_precision_policy=mixed_precision_policy(self.config),
            cpu_offload=self.offload_policy,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=list(self.config.block_classes) or None,
            state_dict_type=self.settings.state_dict_type,
            activation_checkpointing=self.config.activation_checkpointing != "none",
            cpu_ram_efficient_loading=False,  # True: only rank 0 loads values, which come from rank 0 in any case
        )

    @property
    def offload_policy(self) -> OffloadPolicy:
        """Where parameters live between uses; memory is pinned only if there is a GPU that copies from it."""
        return offload_policy(self.config, "cuda" if torch.cuda.is_available() else "cpu")

    @property
    def process_group_kwargs(self) -> InitProcessGroupKwargs:
        """The backend `hyperpod` and its timeout."""
        return InitProcessGroupKwargs(backend="hyperpod", timeout=timedelta(seconds=self.timeout_s))

    @property
    def kwargs_handlers(self) -> list[KwargsHandler]:
        """All handlers, for `Accelerator(kwargs_handlers=...)`.

        Raises:
            MissingExtraError: the library of float8 is not installed.
        """
        check_float8_library(self.config.float8_recipe)
        return [self.process_group_kwargs]
