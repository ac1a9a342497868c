"""`init` and `state`: the mesh that models are sharded over, and this process's ranks and groups in it."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hyperpod_plugins.comm.process_group import BACKEND, ResilientProcessGroup
from hyperpod_plugins.delayed_init.api import delay_transformers
from hyperpod_plugins.env import WorkerEnv, config_path
from hyperpod_plugins.errors import ConfigError, NotBuiltYetError
from hyperpod_plugins.parallel import ParallelConfig, Topology, build_mesh
from hyperpod_plugins.parallel.config import fields_given
from hyperpod_plugins.parallel.topology import AXES
from hyperpod_plugins.precision.transformer_engine import TE_RECIPES
from hyperpod_plugins.smp import torch_classes

# Warnings about behavior that may differ from what an SMP v2 script expects.


@cache
def warn_once(text: str) -> None:
    """Warn once in this process, and on rank 0 only."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        warnings.warn(text, stacklevel=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What `init` has set up."""

    config: ParallelConfig
    """The configuration as it was given; `hybrid_shard_degree` may be 0."""
    topology: Topology
    """The resulting degrees."""
    mesh: DeviceMesh
    """Mesh with axes `("replicate", "shard", "tensor")`."""
    ranks_per_node: int
    says_offload: bool
    """Whether the configuration says `sm_activation_offloading`; SMP's own default is true."""

    @property
    def config_in_wrapper(self) -> ParallelConfig:
        """The configuration inside a script's `offload_wrapper`, with SMP's default of `sm_activation_offloading`.

        Not with Transformer Engine, whose layers only this package's own recomputation computes again, nor with that.
        """
        is_settled = self.says_offload or self.config.activation_checkpointing != "none"
        if is_settled or self.config.float8_recipe in TE_RECIPES:
            return self.config
        return replace(self.config, sm_activation_offloading=True)

    @property
    def follows_fsdp(self) -> bool:
        """Whether FSDP's sharding strategy sets the shard degree, because the configuration does not."""
        return self.config.hybrid_shard_degree == 0 and self.config.tensor_parallel_degree == 1


_job: Job | None = None


def config_in_wrapper() -> ParallelConfig | None:
    """The configuration that counts inside a script's `offload_wrapper`; None before `init`.

    Warns where Transformer Engine excludes SMP's default of `sm_activation_offloading`.
    """
    if _job is None:
        return None
    recipe = _job.config.float8_recipe
    if recipe in TE_RECIPES and not _job.says_offload and _job.config.activation_checkpointing == "none":
        warn_once(
            f"sm_activation_offloading, SMP's default, does not go with float8_recipe={recipe!r} (fp8: true) and "
            "blocks that a script wraps: in offload_wrapper, all that backward needs is copied to the host, and back "
            "when it is needed, as torch does. To recompute blocks and offload their inputs, leave checkpoint_wrapper "
            'and offload_wrapper out, and add "activation_checkpointing": "full" and "sm_activation_offloading": true '
            'to the configuration; or add "sm_activation_offloading": false.'
        )
    return _job.config_in_wrapper


def init(config: ParallelConfig | Mapping[str, Any] | str | Path | None = None) -> None:
    """Set up degrees and process groups; from then on, `FullyShardedDataParallel(...)` is translated to FSDP2.

    Joins the default process group with the backend `hyperpod`, unless the script has created one.

    Args:
        config: the SMP v2 configuration, as a dict or the path of a JSON file. Default: the file named by
            `HYPERPOD_CONFIG`, else the default of every key.

    Raises:
        ConfigError: unknown keys, invalid values or combinations, or `init` was called before with others.
        NotBuiltYetError: an expert or context parallel degree in a process group that the script made of another
            backend.
    """
    global _job
    source = config_path() if config is None else config
    asked = ParallelConfig.of(source)
    if _job is not None:
        if asked != _job.config:
            raise ConfigError(f"init was called before with {_job.config}, and now asks for {asked}. Call it once.")
        return
    env = WorkerEnv.from_environ()
    if torch.cuda.is_available():
        torch.cuda.set_device(env.local_rank % torch.cuda.device_count())
    if not dist.is_initialized():
        dist.init_process_group(BACKEND)
    topology = asked.topology(dist.get_world_size(), ranks_per_node=env.local_world_size)
    if asked.delayed_init:
        delay_transformers()
    _job = Job(
        config=asked,
        topology=topology,
        mesh=_mesh(topology),
        ranks_per_node=env.local_world_size,
        says_offload="sm_activation_offloading" in fields_given(source),
    )
    torch_classes.set_translation(True)


def is_initialized() -> bool:
    """Whether `init` has been called."""
    return _job is not None


def current_job() -> Job:
    """Return what `init` has set up.

    Raises:
        ConfigError: `init` has not been called.
    """
    if _job is None:
        raise ConfigError("the model parallel library is not initialised: call torch.sagemaker.init(config) first.")
    return _job


def set_shard_degree(shard_degree: int) -> Job:
    """Set the shard degree that FSDP's sharding strategy asks for, and return the updated job; 0 for all ranks."""
    global _job
    job = current_job()
    topology = replace(job.config, hybrid_shard_degree=shard_degree).topology(
        job.topology.world_size, ranks_per_node=job.ranks_per_node
    )
    if topology != job.topology:
        _job = job = replace(job, topology=topology, mesh=_mesh(topology))
    return job


def reset() -> None:
    """Return to the state before `init`; process groups remain."""
    global _job
    _job = None


class Ranker:
    """`torch.sagemaker.state.ranker`: which ranks replicate each other."""

    def get_rep_groups(self) -> list[list[int]]:
        """Ranks that hold the same shard, one list per shard."""
        topology = current_job().topology
        return [
            list(topology.peers(rank, "replicate"))
            for rank in range(topology.world_size)
            if topology.coordinates(rank).replicate == 0
        ]

    def get_rep_rank(self, global_rank: int | None = None) -> int:
        """Index of a rank (default: this one) among those that hold the same shard."""
        return current_job().topology.coordinates(dist.get_rank() if global_rank is None else global_rank).replicate


_ABSENT = {
    "get_rng_state_tracker": (
        "recomputed blocks draw the same random numbers without a tracker. Leave Transformer Engine's checkpoint "
        'function out, and add "activation_checkpointing": "full" to the configuration, or, without fp8, use torch\'s '
        "checkpoint_wrapper"
    ),
}
"""Attributes that scripts for SMP use, and what to do without them."""


class State:
    """`torch.sagemaker.state`: degrees, ranks and process groups. Available after `init`."""

    ranker = Ranker()

    @property
    def rank(self) -> int:
        """Rank in the world."""
        current_job()
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """Number of ranks in the job."""
        return current_job().topology.world_size

    @property
    def local_rank(self) -> int:
        """Rank on this node."""
        return WorkerEnv.from_environ().local_rank

    @property
    def hybrid_shard_degree(self) -> int:
        """Number of ranks that one model state is sharded over; the actual number if the configuration says 0."""
        return current_job().topology.shard_degree

    @property
    def tensor_parallel_degree(self) -> int:
        """Number of ranks that each layer's matrices are split over."""
        return current_job().topology.tensor_degree

    @property
    def tp_size(self) -> int:
        """Same as `tensor_parallel_degree`."""
        return self.tensor_parallel_degree

    @property
    def tp_rank(self) -> int:
        """Index of this rank among those that split the same layers."""
        return current_job().topology.coordinates(dist.get_rank()).tensor

    @property
    def expert_parallel_degree(self) -> int:
        """Number of ranks that the experts of a layer are divided among."""
        return current_job().config.expert_parallel_degree

    @property
    def ep_size(self) -> int:
        """Same as `expert_parallel_degree`."""
        return self.expert_parallel_degree

    @property
    def ep_rank(self) -> int:
        """Index of this rank among those that the experts of a layer are divided among."""
        return current_job().topology.coordinates(dist.get_rank()).shard % self.expert_parallel_degree

    @property
    def context_parallel_degree(self) -> int:
        """Number of ranks that a sequence is split over."""
        return current_job().config.context_parallel_degree

    @property
    def cp_size(self) -> int:
        """Same as `context_parallel_degree`."""
        return self.context_parallel_degree

    @property
    def cp_rank(self) -> int:
        """Index of this rank among those that a sequence is split over."""
        return current_job().topology.coordinates(dist.get_rank()).shard % self.context_parallel_degree

    @property
    def dp_size(self) -> int:
        """Number of ranks that read different samples: `num_replicas` of a `DistributedSampler`."""
        return current_job().topology.data_degree

    @property
    def dp_rank(self) -> int:
        """Index of this rank among those: `rank` of a `DistributedSampler`."""
        return current_job().topology.data_rank(dist.get_rank())

    @property
    def tp_process_group(self) -> dist.ProcessGroup:
        """Group of the ranks that split the same layers."""
        return current_job().mesh.get_group("tensor")

    @property
    def rep_rank_process_group(self) -> dist.ProcessGroup:
        """Group of the ranks that hold the same shard."""
        return current_job().mesh.get_group("replicate")

    @property
    def shard_process_group(self) -> dist.ProcessGroup:
        """Group of the ranks that one model state is sharded over."""
        return current_job().mesh.get_group("shard")

    @property
    def world_process_group(self) -> dist.ProcessGroup:
        """Group of all ranks."""
        current_job()
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def __getattr__(self, name: str) -> Any:
        """Raise `AttributeError`, which says what to do instead of using an attribute that only SMP has."""
        known = ", ".join(sorted(each for each in dir(State) if not each.startswith("_")))
        why = _ABSENT.get(name, f"there are {known}")
        raise AttributeError(
            f"torch.sagemaker.state.{name} has no counterpart in hyperpod_plugins: {why}.",
            name=name,
            obj=self,
        )


state = State()


def _mesh(topology: Topology) -> DeviceMesh:
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(dist.group.WORLD, ResilientProcessGroup):
        return build_mesh(topology, device_type)
    for name, degree in (("context", topology.context_degree), ("expert", topology.expert_degree)):
        if degree > 1:
            raise NotBuiltYetError(
                f"{name}_parallel_degree={degree} needs groups of the backend {BACKEND!r}, but the script made its "
                f"process group of the backend {dist.get_backend()!r}. Leave the group to init(), or make it with "
                f"init_process_group({BACKEND!r})."
            )
    warn_once(
        f"the script made its process group of the backend {dist.get_backend()!r}, so nothing repairs it when a rank "
        f"is lost. Leave the group to init(), or make it with init_process_group({BACKEND!r})."
    )
    return init_device_mesh(device_type, topology.shape, mesh_dim_names=AXES)
