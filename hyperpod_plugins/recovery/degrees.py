"""Shard and tensor degrees of an elastic job: which ones it allows, and which one it has."""

from collections.abc import Sequence
from itertools import product
from typing import Protocol

from hyperpod_plugins.elastic import JobStore
from hyperpod_plugins.elastic.membership.elastic_spec import (
    ElasticPolicy,
    ElasticSpec,
    ReplicaLayout,
    choose,
    sort_layouts,
)
from hyperpod_plugins.elastic.membership.reshard import exit_surplus
from hyperpod_plugins.elastic.process import exit_with_agent
from hyperpod_plugins.elastic.scaling.batch import StepBatch
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.errors import ConfigError, DegreeError
from hyperpod_plugins.parallel import ParallelConfig, Topology


class DegreeOptions(Protocol):
    """What the choice of degrees depends on, such as `ElasticTraining`."""

    @property
    def shard_degrees(self) -> tuple[int, ...]:
        """Allowed shard degrees besides those of the configuration."""
        ...

    @property
    def tensor_degrees(self) -> tuple[int, ...]:
        """Allowed tensor degrees besides those of the configuration."""
        ...

    def resolve(self, topology: Topology) -> tuple[ElasticPolicy, StepBatch]:
        """Limits and batch in a world of replicas with this topology."""
        ...


def as_degrees(
    shard_degrees: Sequence[int], tensor_degrees: Sequence[int], *, reproducible: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Validate the user's degrees and return them as tuples.

    Raises:
        DegreeError: a degree is not an integer, or below 1.
        ConfigError: the job is reproducible, and allows other degrees.
    """
    for name, degrees in (("shard_degrees", shard_degrees), ("tensor_degrees", tensor_degrees)):
        if any(type(degree) is not int or degree < 1 for degree in degrees):
            raise DegreeError(f"{name} must be whole numbers from 1 on, but are {list(degrees)}")
    if reproducible and (shard_degrees or tensor_degrees):
        raise ConfigError(
            "reproducible=True promises the same bits for any number of replicas, but other degrees add up "
            "otherwise: leave out shard_degrees and tensor_degrees, or it."
        )
    return tuple(shard_degrees), tuple(tensor_degrees)


def layouts_of(options: DegreeOptions, config: ParallelConfig, ranks_per_node: int) -> tuple[ReplicaLayout, ...]:
    """All layouts that a start of the job may use, in the order in which they are tried.

    Empty if neither list of degrees is given, so that the configuration's degrees are the only ones.

    Raises:
        ConfigError: for some degrees the model cannot be parallelized, the batch cannot be split, or the policy
            cannot be met; or there are tensor degrees but no shard degree.
    """
    if not options.shard_degrees and not options.tensor_degrees:
        return ()
    own = (config.hybrid_shard_degree, config.tensor_parallel_degree)
    shards = {*options.shard_degrees, own[0]} - {0}
    if not shards:
        raise ConfigError(
            "tensor_degrees needs to know the shard degrees that go with them: give shard_degrees too, or the "
            "hybrid_shard_degree of the configuration."
        )
    layouts: list[ReplicaLayout] = []
    for shard, tensor in product(shards, {*options.tensor_degrees, own[1]}):
        replica = ParallelConfig.of(config, hybrid_shard_degree=shard, tensor_parallel_degree=tensor)
        policy, batch = options.resolve(replica.topology(shard * tensor, ranks_per_node=ranks_per_node))
        layouts.append(
            ReplicaLayout(shard_degree=shard, tensor_degree=tensor, sizes=batch.feasible_sizes(policy, shard))
        )
    job = JobEnv.from_environ()
    asked = (0, 0) if job is None else (job.shard_degree, job.tensor_degree)
    return sort_layouts(layouts, wanted=[asked, own])


def with_degrees(
    config: ParallelConfig, known: ElasticSpec | None, layouts: Sequence[ReplicaLayout], world_size: int
) -> ParallelConfig:
    """The configuration with the degrees that the job has, or starts with.

    Args:
        config: as the user gave it.
        known: elastic spec of the job that this process joins; None if the job is starting.
        layouts: see `layouts_of`.
        world_size: of the present world.

    Raises:
        DegreeError: no layout fits the world.
    """
    if not layouts:
        return config
    shard, tensor = choose(layouts, world_size).degrees if known is None else known.degrees
    return ParallelConfig.of(config, hybrid_shard_degree=shard, tensor_parallel_degree=tensor)


def initial_world_size(options: DegreeOptions, config: ParallelConfig, world_size: int, ranks_per_node: int) -> int:
    """How many of the `world_size` processes that start together form whole replicas.

    Raises:
        DegreeError: no layout fits them.
    """
    layouts = layouts_of(options, config, ranks_per_node)
    if not layouts:
        return world_size
    layout = choose(layouts, world_size)
    return layout.replicas_in(world_size) * layout.replica_size


def form_initial_world(
    options: DegreeOptions,
    config: ParallelConfig,
    job: JobEnv,
    *,
    worker_id: int,
    world_size: int,
    ranks_per_node: int,
) -> int:
    """Return the size of the initial world, and end this process if it is not part of it.

    Args:
        options: limits of the job.
        config: as the user gave it.
        job: of this process, which starts together with the others.
        worker_id: of this process, from its launcher.
        world_size: number of processes that start together.
        ranks_per_node: of this node.

    Raises:
        DegreeError: no layout fits them.
        SystemExit: this process is left over after whole replicas have been formed.
    """
    size = initial_world_size(options, config, world_size, ranks_per_node)
    if worker_id >= size:
        if job.agent_pid:
            exit_with_agent(job.agent_pid)
        exit_surplus(JobStore.connect(job), worker_id, is_replaced=not job.agent_pid)
    return size
