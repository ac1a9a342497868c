"""Elastic limits as others write them: HyperPod manifests and recipes, and DeepSpeed's elasticity block.

They count nodes (pods) or GPUs; we count replicas, complete copies of the training state.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyperpod_plugins.elastic.policy import ElasticPolicy
from hyperpod_plugins.errors import ConfigError, UnknownKeyError

_MANIFEST = {
    "minReplicas": "min_replicas",
    "maxReplicas": "max_replicas",
    "replicaIncrementStep": "replica_increment",
    "replicaDiscreteValues": "replica_sizes",
    "gracefulShutdownTimeoutInSeconds": "graceful_shutdown_timeout_s",
    "scalingTimeoutInSeconds": "scaling_timeout_s",
    "faultyScaleDownTimeoutInSeconds": "faulty_scale_down_timeout_s",
}
_RECIPE = {
    "min_nodes": "min_replicas",
    "max_nodes": "max_replicas",
    "replica_increment_step": "replica_increment",
    "graceful_shutdown_timeout": "graceful_shutdown_timeout_s",
    "scaling_timeout": "scaling_timeout_s",
    "faulty_timeout": "faulty_scale_down_timeout_s",
}
_RECIPE_SWITCHES = ("is_elastic", "use_graceful_shutdown")
_UNEVEN = (
    "use_uneven_batch",
    "num_dp_groups_with_small_batch_size",
    "small_local_batch_size",
    "large_local_batch_size",
)

# More divisors than every smaller number has (https://oeis.org/A002182), as far as DeepSpeed knows them.
_HIGHLY_COMPOSITE = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160),
    *(25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720),
)


def policy_of_manifest(block: Mapping[str, Any], *, ranks_per_node: int, ranks_per_replica: int) -> ElasticPolicy:
    """The `elasticPolicy` of a HyperPodPyTorchJob, whose replicas are pods; a key whose value is null is absent.

    Raises:
        UnknownKeyError: a key that such a block does not have.
        ConfigError: impossible limits, or pods that do not make up whole replicas.
    """
    block = _without_nulls(block)
    _refuse_unknown(block, _MANIFEST, "elasticPolicy")
    if {"replicaIncrementStep", "replicaDiscreteValues"} <= block.keys():
        raise ConfigError("elasticPolicy takes replicaIncrementStep or replicaDiscreteValues, not both.")
    values = {_MANIFEST[key]: value for key, value in block.items()}
    return _in_replicas(values, ranks_per_node=ranks_per_node, ranks_per_replica=ranks_per_replica)


def policy_of_recipe(
    block: Mapping[str, Any],
    *,
    ranks_per_node: int,
    ranks_per_replica: int,
    nodes: Sequence[int] = (),
    num_nodes: int = 0,
) -> ElasticPolicy:
    """The `elastic_policy` of a HyperPod recipe; a key whose value is null is absent.

    One that is not elastic has the size `num_nodes` only.

    Args:
        block: its keys and values.
        ranks_per_node: all of them.
        ranks_per_replica: all of them.
        nodes: the only numbers of nodes, where there is a `scale_config`.
        num_nodes: `trainer.num_nodes`, for a recipe that is not elastic; 0 for `max_nodes`.

    Raises:
        UnknownKeyError: a key that such a block does not have.
        ConfigError: impossible limits, or nodes that do not make up whole replicas.
    """
    block = _without_nulls(block)
    _refuse_unknown(block, (*_RECIPE, *_RECIPE_SWITCHES), "elastic_policy")
    values = {_RECIPE[key]: value for key, value in block.items() if key in _RECIPE}
    if nodes and block.get("is_elastic", True):
        values["replica_sizes"] = _within_limits(nodes, values)
    if not block.get("is_elastic", True):
        fixed = num_nodes or values.get("max_replicas", 1)
        values |= {"min_replicas": fixed, "max_replicas": fixed, "replica_increment": 1}
    if not block.get("use_graceful_shutdown", True):
        values["graceful_shutdown_timeout_s"] = 0.0
    return _in_replicas(values, ranks_per_node=ranks_per_node, ranks_per_replica=ranks_per_replica)


def _within_limits(nodes: Sequence[int], values: dict[str, Any]) -> tuple[int, ...]:
    """Numbers of nodes in a `scale_config` that lie within the limits, which they replace."""
    if "replica_increment" in values:
        raise ConfigError(
            f"the recipe has scale_config for {', '.join(map(str, nodes))} nodes, and replica_increment_step="
            f"{values['replica_increment']}: both say which numbers of nodes are allowed. Leave one of them out."
        )
    low, high = values.pop("min_replicas", min(nodes)), values.pop("max_replicas", max(nodes))
    sizes = tuple(each for each in nodes if low <= each <= high)
    if not sizes:
        raise ConfigError(f"scale_config has {', '.join(map(str, nodes))} nodes, and none lies in {low} .. {high}.")
    return sizes


def recipe_at(recipe: Mapping[str, Any], num_nodes: int) -> dict[str, Any]:
    """A recipe as it holds on so many nodes: `scale_config.<nodes>` laid over it, key by key."""
    scales = {int(nodes): overrides for nodes, overrides in recipe.get("scale_config", {}).items()}
    plain = {key: value for key, value in recipe.items() if key != "scale_config"}
    return _laid_over(plain, scales.get(num_nodes, {}))


def uneven_batch_size(block: Mapping[str, Any], *, data_degree: int) -> int:
    """Global batch that an `uneven_batch` block describes: small x n + large x (ranks - n); 0 if it is not used.

    Raises:
        UnknownKeyError: a key that such a block does not have.
        ConfigError: more ranks with small batches than there are ranks.
    """
    _refuse_unknown(block, _UNEVEN, "uneven_batch")
    if not block.get("use_uneven_batch", False):
        return 0
    num_small, small, large = (int(block[key]) for key in _UNEVEN[1:])
    if not 0 <= num_small <= data_degree:
        raise ConfigError(
            f"uneven_batch gives {num_small} ranks the small batch, but there are {data_degree} data-parallel ranks."
        )
    return small * num_small + large * (data_degree - num_small)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedElasticity:
    """What DeepSpeed's `elasticity` block comes to."""

    global_batch_size: int
    """The batch that most numbers of GPUs can share evenly."""
    world_sizes: tuple[int, ...]
    """These numbers of data-parallel GPUs, ascending."""
    micro_batch_sizes: tuple[int, ...]
    """Allowed micro-batches, ascending."""
    prefers_larger_batch: bool
    """Whether the largest micro-batch that fits is taken; else the smallest."""

    def micro_batch_at(self, world_size: int) -> int:
        """Micro-batch for one of the `world_sizes`.

        Raises:
            ConfigError: it is none of them.
        """
        if world_size not in self.world_sizes:
            nearest = min(self.world_sizes, key=lambda size: (abs(size - world_size), size))
            raise ConfigError(
                f"{world_size} GPUs cannot share a batch of {self.global_batch_size} evenly in micro-batches of "
                f"{list(self.micro_batch_sizes)}; the nearest number that can is {nearest}."
            )
        share = self.global_batch_size // world_size
        fitting = [size for size in self.micro_batch_sizes if share % size == 0]
        return fitting[-1] if self.prefers_larger_batch else fitting[0]


_DEEPSPEED = {
    "enabled": False,
    "max_train_batch_size": 2000,
    "micro_batch_sizes": (2, 4, 6),
    "min_gpus": 1,
    "max_gpus": 10000,
    "min_time": 0,
    "prefer_larger_batch": True,
    "ignore_non_elastic_batch_info": False,
    "version": 0.2,
    "num_gpus_per_node": 1,
    "model_parallel_size": 1,
}


def read_deepspeed(block: Mapping[str, Any]) -> DeepSpeedElasticity:
    """DeepSpeed's `elasticity` block, by DeepSpeed's rule.

    Each micro-batch size, and their least common multiple, is multiplied by the largest highly composite number that
    keeps it within `max_train_batch_size`; of these batches the one is taken that most numbers of GPUs share evenly.
    See https://www.deepspeed.ai/docs/config-json/#elastic-training-config-v01-and-v02.

    Raises:
        UnknownKeyError: a key that such a block does not have.
        ConfigError: not enabled, sizes that are not positive, or no number of GPUs that fits.
    """
    _refuse_unknown(block, _DEEPSPEED, "elasticity")
    values: dict[str, Any] = {**_DEEPSPEED, **block}
    if not values["enabled"]:
        raise ConfigError("the elasticity block is not enabled: set enabled to true, or do not pass it.")
    micro = tuple(sorted({int(size) for size in values["micro_batch_sizes"]}))
    largest = int(values["max_train_batch_size"])
    if not micro or micro[0] < 1 or micro[-1] > largest:
        raise ConfigError(
            f"micro_batch_sizes must lie in 1 .. max_train_batch_size ({largest}), but are {list(micro)}."
        )
    per_model = int(values["model_parallel_size"])
    step = max(1, int(values["num_gpus_per_node"]) // per_model)
    low, high = -(-int(values["min_gpus"]) // per_model), int(values["max_gpus"]) // per_model
    best: tuple[int, tuple[int, ...]] = (0, ())
    prefers_larger = bool(values["prefer_larger_batch"])
    for base in sorted({*micro, math.lcm(*micro)}):
        if base > largest:
            continue
        batch = base * max(each for each in _HIGHLY_COMPOSITE if each * base <= largest)
        worlds = tuple(size for size in _even_worlds(batch, micro) if low <= size <= high and size % step == 0)
        is_preferred = batch > best[0] if prefers_larger else batch < best[0]
        if len(worlds) > len(best[1]) or (len(worlds) == len(best[1]) and is_preferred):
            best = (batch, worlds)
    if not best[1]:
        raise ConfigError(
            f"no number of GPUs in {values['min_gpus']} .. {values['max_gpus']} shares a batch of at most {largest} "
            f"evenly in micro-batches of {list(micro)}. Allow fewer GPUs, or a larger max_train_batch_size."
        )
    return DeepSpeedElasticity(
        global_batch_size=best[0], world_sizes=best[1], micro_batch_sizes=micro, prefers_larger_batch=prefers_larger
    )


def _even_worlds(batch: int, micro_batch_sizes: Sequence[int]) -> list[int]:
    """Numbers of ranks that share a batch evenly, in whole micro-batches of one of the sizes."""
    counts = {batch // size for size in micro_batch_sizes if batch % size == 0}
    return sorted({world for count in counts for world in range(1, count + 1) if count % world == 0})


def replicas_of_nodes(name: str, nodes: int, *, ranks_per_node: int, ranks_per_replica: int) -> int:
    """How many replicas so many nodes make up.

    Raises:
        ConfigError: no whole number of them; the message begins with `name`.
    """
    replicas, rest = divmod(int(nodes) * ranks_per_node, ranks_per_replica)
    if rest or not replicas:
        whole = math.lcm(ranks_per_node, ranks_per_replica) // ranks_per_node
        raise ConfigError(
            f"{name} of {nodes} nodes of {ranks_per_node} ranks is no whole number of replicas of "
            f"{ranks_per_replica} ranks. Use a multiple of {whole} nodes, or other degrees."
        )
    return replicas


def _in_replicas(values: dict[str, Any], *, ranks_per_node: int, ranks_per_replica: int) -> ElasticPolicy:
    def count(name: str, nodes: int) -> int:
        return replicas_of_nodes(name, nodes, ranks_per_node=ranks_per_node, ranks_per_replica=ranks_per_replica)

    sizes = values.get("replica_sizes", ())
    if sizes:
        values = {"min_replicas": min(sizes), "max_replicas": max(sizes), **values}
    elif "max_replicas" not in values:
        raise ConfigError("the policy does not say how far the job may grow: give it maxReplicas (max_nodes).")
    for name in ("min_replicas", "max_replicas"):
        if name in values:
            values[name] = count(name, values[name])
    if sizes:
        values["replica_sizes"] = tuple(count("replica_sizes", nodes) for nodes in values["replica_sizes"])
    else:
        values["replica_increment"] = count("replica_increment", values.get("replica_increment", 1))
    return ElasticPolicy(**values)


def _without_nulls(block: Mapping[str, Any]) -> dict[str, Any]:
    """What a launcher that renders all keys has filled in."""
    return {key: value for key, value in block.items() if value is not None}


def _refuse_unknown(block: Mapping[str, Any], known: Iterable[str], name: str) -> None:
    unknown = sorted(set(block) - set(known))
    if unknown:
        raise UnknownKeyError(f"{name} has no key {', '.join(unknown)}; it has {', '.join(sorted(known))}.")


def _laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        inner = merged.get(key)
        merged[key] = _laid_over(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return merged
