"""Which degrees a job may have, from what its program says of them, and which it has."""

from collections.abc import Sequence
from itertools import product
from typing import Protocol

from hyperpod_plugins.elastic.batch import StepBatch
from hyperpod_plugins.elastic.layouts import Layout, choose, in_order
from hyperpod_plugins.elastic.policy import ElasticPolicy
from hyperpod_plugins.elastic.terms import Terms
from hyperpod_plugins.env import JobEnv
from hyperpod_plugins.errors import ConfigError, DegreeError
from hyperpod_plugins.parallel import ParallelConfig, Topology


class AllowsDegrees(Protocol):
    """What `ElasticTraining` says of them."""

    shard_degrees: tuple[int, ...]
    tensor_degrees: tuple[int, ...]

    def settle(self, topology: Topology) -> tuple[ElasticPolicy, StepBatch]:
        """Limits and batch, in a world of such replicas."""
        ...


def as_degrees(shard_degrees: Sequence[int], tensor_degrees: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Check what the user says.

    Raises:
        DegreeError: a degree below 1.
    """
    for name, degrees in (("shard_degrees", shard_degrees), ("tensor_degrees", tensor_degrees)):
        if any(type(degree) is not int or degree < 1 for degree in degrees):
            raise DegreeError(f"{name} must be whole numbers from 1 on, but are {list(degrees)}")
    return tuple(shard_degrees), tuple(tensor_degrees)


def layouts_of(options: AllowsDegrees, config: ParallelConfig, ranks_per_node: int) -> tuple[Layout, ...]:
    """All degrees that a start may have, in the order in which they are tried; empty where only the strategy's count.

    Raises:
        ConfigError: degrees with which the model cannot be parallelised, the batch not be shared, or the policy not be
            followed; or a list of tensor degrees and no shard degree.
    """
    if not options.shard_degrees and not options.tensor_degrees:
        return ()
    own = (config.hybrid_shard_degree, config.tensor_parallel_degree)
    shards = {*options.shard_degrees, own[0]} - {0}
    if not shards:
        raise ConfigError(
            "tensor_degrees needs to know the shard degrees that go with them: give shard_degrees too, or the "
            "strategy's hybrid_shard_degree."
        )
    layouts: list[Layout] = []
    for shard, tensor in product(shards, {*options.tensor_degrees, own[1]}):
        replica = ParallelConfig.of(config, hybrid_shard_degree=shard, tensor_parallel_degree=tensor)
        policy, batch = options.settle(replica.topology(shard * tensor, ranks_per_node=ranks_per_node))
        layouts.append(Layout(shard_degree=shard, tensor_degree=tensor, sizes=batch.serving(policy, shard)))
    job = JobEnv.from_environ()
    asked = (0, 0) if job is None else (job.shard_degree, job.tensor_degree)
    return in_order(layouts, wanted=[asked, own])


def with_degrees(
    config: ParallelConfig, known: Terms | None, layouts: Sequence[Layout], world_size: int
) -> ParallelConfig:
    """The configuration with the degrees that the job has, or begins with.

    Args:
        config: of the strategy.
        known: terms of the job that this process comes to; None for one that begins.
        layouts: see `layouts_of`.
        world_size: of the present world.

    Raises:
        DegreeError: no layout fits the world.
    """
    if not layouts:
        return config
    shard, tensor = choose(layouts, world_size).degrees if known is None else known.degrees
    return ParallelConfig.of(config, hybrid_shard_degree=shard, tensor_parallel_degree=tensor)


def num_founders(options: AllowsDegrees, config: ParallelConfig, world_size: int, ranks_per_node: int) -> int:
    """Of the processes that start together, how many make up whole replicas.

    Raises:
        DegreeError: no layout fits them.
    """
    layouts = layouts_of(options, config, ranks_per_node)
    if not layouts:
        return world_size
    layout = choose(layouts, world_size)
    return layout.replicas_in(world_size) * layout.replica_size
