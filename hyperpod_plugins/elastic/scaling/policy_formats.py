"""Read elastic policies and batches from the formats of users: HyperPod manifests and recipes, and DeepSpeed's block.

`read_policy` accepts an `ElasticPolicy`, a mapping, or a JSON or YAML file. It reports unknown keys and impossible
limits at once. These formats count nodes (pods) or GPUs; ours counts replicas, complete copies of the training state.
Nodes are converted once the numbers of ranks per node and per replica are known.

A HyperPod recipe may also set the batch, with `scale_config` and `uneven_batch` for each number of nodes:

    elastic_policy: {min_nodes: 1, max_nodes: 4}
    training_config: {training_args: {train_batch_size: 128, micro_train_batch_size: 8, learning_rate: 0.0004}}
    scale_config:
      3: {training_config: {training_args: {micro_train_batch_size: 6, uneven_batch: {...}}}}

The relevant keys are found at any depth, since recipes put them in different places.
"""

import enum
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from hyperpod_plugins.elastic.membership.elastic_spec import ElasticPolicy
from hyperpod_plugins.elastic.scaling.batch import ReplicaBatch, StepBatch
from hyperpod_plugins.errors import ConfigError, MissingExtraError, UnknownKeyError, format_list

# Elastic limits: HyperPod manifests and recipes, and DeepSpeed's `elasticity` block.

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

# Numbers with more divisors than any smaller number (https://oeis.org/A002182), up to DeepSpeed's limit.
_HIGHLY_COMPOSITE = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160),
    *(25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720),
)


def policy_of_manifest(block: Mapping[str, Any], *, ranks_per_node: int, replica_size: int) -> ElasticPolicy:
    """Convert the `elasticPolicy` of a HyperPodPyTorchJob, whose replicas are pods; keys with a null value count as
    absent.

    Raises:
        UnknownKeyError: the block has an unknown key.
        ConfigError: impossible limits, or pods that do not make up whole replicas.
    """
    block = _without_nulls(block)
    _refuse_unknown(block, _MANIFEST, "elasticPolicy")
    if {"replicaIncrementStep", "replicaDiscreteValues"} <= block.keys():
        raise ConfigError("elasticPolicy takes replicaIncrementStep or replicaDiscreteValues, not both.")
    values = {_MANIFEST[key]: value for key, value in block.items()}
    return _in_replicas(values, ranks_per_node=ranks_per_node, replica_size=replica_size)


def policy_of_recipe(
    block: Mapping[str, Any],
    *,
    ranks_per_node: int,
    replica_size: int,
    nodes: Sequence[int] = (),
    num_nodes: int = 0,
) -> ElasticPolicy:
    """Convert the `elastic_policy` of a HyperPod recipe; keys with a null value count as absent.

    If it is not elastic, the only size is `num_nodes`.

    Args:
        block: its keys and values.
        ranks_per_node: number of ranks on each node.
        replica_size: number of ranks in each replica.
        nodes: the only allowed numbers of nodes, from a `scale_config`.
        num_nodes: `trainer.num_nodes`, for a recipe that is not elastic; 0 for `max_nodes`.

    Raises:
        UnknownKeyError: the block has an unknown key.
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
    return _in_replicas(values, ranks_per_node=ranks_per_node, replica_size=replica_size)


def _within_limits(nodes: Sequence[int], values: dict[str, Any]) -> tuple[int, ...]:
    """Return the numbers of nodes of a `scale_config` within the limits, which are removed from `values`."""
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
    """Return the recipe for a number of nodes: `scale_config.<nodes>` merged into it, key by key."""
    scales = {int(nodes): overrides for nodes, overrides in recipe.get("scale_config", {}).items()}
    plain = {key: value for key, value in recipe.items() if key != "scale_config"}
    return _merge(plain, scales.get(num_nodes, {}))


def uneven_batch_size(block: Mapping[str, Any], *, data_degree: int) -> int:
    """Global batch that an `uneven_batch` block describes: small x n + large x (ranks - n); 0 if it is not used.

    Raises:
        UnknownKeyError: the block has an unknown key.
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
    """The batch and world sizes that result from DeepSpeed's `elasticity` block."""

    global_batch_size: int
    """The batch that the most numbers of GPUs can share evenly."""
    world_sizes: tuple[int, ...]
    """These numbers of data-parallel GPUs, ascending."""
    micro_batch_sizes: tuple[int, ...]
    """Allowed micro-batch sizes, ascending."""
    prefers_larger_batch: bool
    """Whether to use the largest micro-batch that fits; else the smallest."""

    def micro_batch_at(self, world_size: int) -> int:
        """Return the micro-batch size for one of the `world_sizes`.

        Raises:
            ConfigError: `world_size` is not one of them.
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
    """Evaluate DeepSpeed's `elasticity` block by DeepSpeed's rule.

    Each micro-batch size, and their least common multiple, is multiplied by the largest highly composite number that
    keeps it within `max_train_batch_size`. Of these batches, it takes the one that the most numbers of GPUs share
    evenly. See https://www.deepspeed.ai/docs/config-json/#elastic-training-config-v01-and-v02.

    Raises:
        UnknownKeyError: the block has an unknown key.
        ConfigError: the block is not enabled, sizes are not positive, or no number of GPUs fits.
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
    """Return the numbers of ranks that share a batch evenly, in whole micro-batches of one of the sizes."""
    counts = {batch // size for size in micro_batch_sizes if batch % size == 0}
    return sorted({world for count in counts for world in range(1, count + 1) if count % world == 0})


def replicas_of_nodes(name: str, nodes: int, *, ranks_per_node: int, replica_size: int) -> int:
    """Return how many replicas a number of nodes makes up.

    Raises:
        ConfigError: it is not a whole number; the message begins with `name`.
    """
    replicas, rest = divmod(int(nodes) * ranks_per_node, replica_size)
    if rest or not replicas:
        whole = math.lcm(ranks_per_node, replica_size) // ranks_per_node
        raise ConfigError(
            f"{name} of {nodes} nodes of {ranks_per_node} ranks is no whole number of replicas of "
            f"{replica_size} ranks. Use a multiple of {whole} nodes, or other degrees."
        )
    return replicas


def _in_replicas(values: dict[str, Any], *, ranks_per_node: int, replica_size: int) -> ElasticPolicy:
    def count(name: str, nodes: int) -> int:
        return replicas_of_nodes(name, nodes, ranks_per_node=ranks_per_node, replica_size=replica_size)

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
    """Drop keys with a null value: some launchers render all keys, set or not."""
    return {key: value for key, value in block.items() if value is not None}


def _refuse_unknown(block: Mapping[str, Any], known: Iterable[str], name: str) -> None:
    unknown = sorted(set(block) - set(known))
    if unknown:
        raise UnknownKeyError(f"{name} has no key {', '.join(unknown)}; it has {', '.join(sorted(known))}.")


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        inner = merged.get(key)
        merged[key] = _merge(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return merged


_BATCH = ("train_batch_size", "global_batch_size")
_MICRO = ("micro_train_batch_size", "micro_batch_size")
_AS_WRITTEN = {"global_batch_size": _BATCH[0], "micro_batch_size": _MICRO[0]}
_RATE = ("learning_rate", "lr")
_UNEVEN_BATCH = "uneven_batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBatch:
    """The batch settings of a recipe for one number of nodes, or for all numbers without a `scale_config`."""

    num_nodes: int = 0
    """Number of nodes; 0 for all."""
    global_batch_size: int = 0
    """Samples of one step over all ranks; 0 if not set."""
    micro_batch_size: int = 0
    """Largest number of samples per rank in one forward and backward pass; 0 if not set."""
    learning_rate: float = 0.0
    """Learning rate; 0 if not set."""
    uneven: Mapping[str, Any] | None = None
    """The `uneven_batch` block; None if there is none, and uneven shares are allowed."""

    @property
    def is_even(self) -> bool:
        """Whether all ranks must have the same number of samples: the block has `use_uneven_batch: false`."""
        return self.uneven is not None and not self.uneven.get("use_uneven_batch", False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleTable:
    """The batches of a recipe by number of nodes.

    Raises:
        ConfigError: a batch size is set for some numbers of nodes only.
    """

    base: NodeBatch
    """The recipe's settings outside of `scale_config`, which apply where a scale sets nothing else."""
    scales: tuple[NodeBatch, ...] = ()
    """The settings by number of nodes, ascending; empty without `scale_config`."""
    dropped: tuple[str, ...] = ()
    """Why other entries of `scale_config` are impossible with the present ranks, one sentence each."""

    def __post_init__(self) -> None:
        """Check that each size is set in all scales, or in none."""
        for name in ("global_batch_size", "micro_batch_size"):
            silent = [each.num_nodes for each in self.scales if not getattr(each, name)]
            if 0 < len(silent) < len(self.scales):
                raise ConfigError(
                    f"scale_config says {_AS_WRITTEN[name]} for some numbers of nodes, and not for "
                    f"{format_list(map(str, silent))}. Set it for all, or once outside of scale_config."
                )

    @property
    def nodes(self) -> tuple[int, ...]:
        """The numbers of nodes in `scale_config`; empty if the policy alone sets them."""
        return tuple(each.num_nodes for each in self.scales)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Notes on the table for the user, one sentence each."""
        rates = {row.learning_rate for row in self.scales} - {0.0, self.base.learning_rate}
        if not rates:
            return self.dropped
        said = (
            f"scale_config says the learning rate {', '.join(f'{rate:g}' for rate in sorted(rates))}, and elsewhere it "
            f"is {self.base.learning_rate:g}: it is not set here, so give the one that you want to your optimizer"
        )
        return (*self.dropped, said)

    def fill(self, global_batch_size: int, micro_batch_size: int) -> "ScaleTable":
        """Return the table with sizes that were given elsewhere filled in where it has none.

        Raises:
            ConfigError: the table sets another size.
        """
        given = {"global_batch_size": global_batch_size, "micro_batch_size": micro_batch_size}
        rows = [self.base, *self.scales]
        for name, value in given.items():
            said = sorted({getattr(row, name) for row in rows[1:] or rows} - {0, value})
            if value and said:
                raise ConfigError(
                    f"{name}={value} is given, and the recipe says {', '.join(map(str, said))}. Leave one of them out."
                )
        filled = [replace(row, **{name: getattr(row, name) or value for name, value in given.items()}) for row in rows]
        return replace(self, base=filled[0], scales=tuple(filled[1:]))

    def batch(self, *, ranks_per_node: int, replica_size: int) -> StepBatch:
        """Return the batches by number of replicas.

        Raises:
            ConfigError: nodes that do not make up whole replicas, or a size that is not set.
        """
        rows = self.scales or (self.base,)
        if not all(row.global_batch_size and row.micro_batch_size for row in rows):
            raise ConfigError(
                "the recipe does not set train_batch_size or micro_train_batch_size. Give ElasticTraining "
                "global_batch_size and micro_batch_size."
            )
        ranks = {"ranks_per_node": ranks_per_node, "replica_size": replica_size}
        sizes = {row.global_batch_size for row in rows}
        return StepBatch(
            global_batch_size=sizes.pop() if len(sizes) == 1 else 0,
            micro_batch_size=max(row.micro_batch_size for row in rows),
            by_replicas=tuple(
                ReplicaBatch(
                    num_replicas=replicas_of_nodes("scale_config", row.num_nodes, **ranks),
                    global_batch_size=row.global_batch_size,
                    micro_batch_size=row.micro_batch_size,
                    is_even=row.is_even,
                )
                for row in self.scales
            ),
            is_even=self.base.is_even,
        )

    def feasible_on(self, *, ranks_per_node: int, replica_size: int, ranks_per_share: int) -> "ScaleTable":
        """Return the table with only those numbers of nodes that can be trained with the present ranks.

        A number of nodes is dropped if it does not make up whole replicas, or if its `uneven_batch` describes other
        shares than ours, which differ by at most one sample, the larger ones first.

        Raises:
            ConfigError: there is a `scale_config`, but none of its numbers is left.
        """
        kept: list[NodeBatch] = []
        dropped: list[str] = []
        for row in self.scales:
            try:
                replicas_of_nodes(
                    "scale_config",
                    row.num_nodes,
                    ranks_per_node=ranks_per_node,
                    replica_size=replica_size,
                )
                _check_shares(row, row.num_nodes * ranks_per_node // ranks_per_share)
            except ConfigError as error:
                dropped.append(f"{row.num_nodes} nodes are left out: {error}")
            else:
                kept.append(row)
        if dropped and not kept:
            raise ConfigError(
                f"scale_config has no number of nodes that can be trained as it says. {' '.join(dropped)}"
            )
        return replace(self, scales=tuple(kept), dropped=tuple(dropped))


def read_scales(recipe: Mapping[str, Any]) -> ScaleTable | None:
    """Read the batches of a recipe at every scale; None if it sets none.

    Raises:
        UnknownKeyError: an `uneven_batch` block with an unknown key.
        ConfigError: keys of `scale_config` that are not numbers of nodes, another number of nodes inside an entry, or
            a change that a running job cannot make: several learning rates, another model.
    """
    scales: Mapping[Any, Mapping[str, Any]] = recipe.get("scale_config") or {}
    plain = {key: value for key, value in recipe.items() if key not in ("scale_config", "elastic_policy")}
    base = _scale(0, plain)
    odd = [key for key in scales if not str(key).isdecimal() or int(key) < 1]
    if odd:
        raise ConfigError(
            f"the keys of scale_config must be numbers of nodes, but include {format_list(map(repr, odd))}."
        )
    rows: list[NodeBatch] = []
    for key in sorted(scales, key=int):
        _check_changes(int(key), dict(_leaves(scales[key])), dict(_leaves(plain)))
        rows.append(_scale(int(key), recipe_at(plain | {"scale_config": scales}, int(key))))
    limits: Mapping[str, Any] = recipe.get("elastic_policy") or {}
    low, high = (limits.get(name) or default for name, default in (("min_nodes", 1), ("max_nodes", math.inf)))
    _check_rates({key: value for key, value in scales.items() if low <= int(key) <= high}, plain)
    if not rows and not (base.global_batch_size or base.micro_batch_size or base.uneven):
        return None
    return ScaleTable(base=base, scales=tuple(rows))


def _scale(num_nodes: int, recipe: Mapping[str, Any]) -> NodeBatch:
    uneven = _find(recipe, (_UNEVEN_BATCH,))
    if uneven is not None:
        uneven_batch_size({**uneven, "use_uneven_batch": False}, data_degree=1)  # only to check its keys
    return NodeBatch(
        num_nodes=num_nodes,
        global_batch_size=int(_find(recipe, _BATCH) or 0),
        micro_batch_size=int(_find(recipe, _MICRO) or 0),
        learning_rate=float(_find(recipe, _RATE) or 0.0),
        uneven=uneven,
    )


def _check_shares(row: NodeBatch, data_degree: int) -> None:
    """Raise if `uneven_batch` describes other shares than ours."""
    if row.uneven is None or not row.uneven.get("use_uneven_batch", False):
        return
    total = uneven_batch_size(row.uneven, data_degree=data_degree)
    each, rest = divmod(row.global_batch_size, data_degree)
    wanted = {int(row.uneven["small_local_batch_size"]), int(row.uneven["large_local_batch_size"])}
    ours = {each, each + 1} if rest else {each}
    num_small = int(row.uneven["num_dp_groups_with_small_batch_size"])
    if total != row.global_batch_size or not (wanted == ours and (not rest or num_small == data_degree - rest)):
        raise ConfigError(
            f"uneven_batch at {row.num_nodes} nodes describes a step of {total} samples with shares of "
            f"{' and '.join(map(str, sorted(wanted)))}, but train_batch_size is {row.global_batch_size}. On "
            f"{data_degree} data-parallel ranks it is shared out as {data_degree - rest} x {each} + {rest} x "
            f"{each + 1}: use these shares, or leave uneven_batch out."
        )


def _check_changes(num_nodes: int, above: Mapping[str, Any], below: Mapping[str, Any]) -> None:
    for path, value in above.items():
        name = path.rpartition(".")[2]
        if name == "num_nodes" and value != num_nodes:
            raise ConfigError(f"scale_config.{num_nodes} sets {path}: {value}. It must be {num_nodes}, or left out.")
        known = (*_BATCH, *_MICRO, *_RATE, "num_nodes")
        if name not in known and f".{_UNEVEN_BATCH}." not in f".{path}." and below.get(path) != value:
            raise ConfigError(
                f"scale_config.{num_nodes} sets {path} to {value!r}, which a running job cannot change. It can change "
                f"{', '.join((_BATCH[0], _MICRO[0], _UNEVEN_BATCH))}; take the rest out."
            )


def _check_rates(scales: Mapping[Any, Mapping[str, Any]], plain: Mapping[str, Any]) -> None:
    merged = [recipe_at({**plain, "scale_config": scales}, int(key)) for key in scales]
    rates = {float(rate) for each in merged if (rate := _find(each, _RATE)) is not None}
    if len(rates) > 1:
        raise ConfigError(
            f"scale_config sets the learning rates {', '.join(f'{rate:g}' for rate in sorted(rates))}. A program has "
            "only one: take them out, and use lr_scaling='linear' or 'sqrt' if the batch changes."
        )


def _find(recipe: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """Return the value of a key, at any depth.

    Raises:
        ConfigError: the key occurs several times, with different values.
    """
    found = [value for name, value in _entries(recipe) if name in names and value is not None]
    if any(value != found[0] for value in found):
        raise ConfigError(f"the recipe says {names[0]} several times, differently: {format_list(map(str, found))}.")
    return found[0] if found else None


def _entries(recipe: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in recipe.items():
        yield str(key), value
        if isinstance(value, Mapping) and key != _UNEVEN_BATCH:
            yield from _entries(cast("Mapping[str, Any]", value))


def _leaves(recipe: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in recipe.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _leaves(cast("Mapping[str, Any]", value), f"{path}.")
        else:
            yield path, value


# Recognition of the formats.

_MINUTE_S = 60.0


class PolicyFormat(enum.Enum):
    """Format of a policy block; the value is the key that holds the block in a larger document."""

    MANIFEST = "elasticPolicy"
    RECIPE = "elastic_policy"
    DEEPSPEED = "elasticity"


_KEYS_BY_FORMAT = {
    PolicyFormat.MANIFEST: ("minReplicas", "maxReplicas", "replicaIncrementStep", "replicaDiscreteValues"),
    PolicyFormat.RECIPE: ("is_elastic", "min_nodes", "max_nodes", "replica_increment_step"),
    PolicyFormat.DEEPSPEED: ("max_train_batch_size", "micro_batch_sizes", "min_gpus", "max_gpus"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyBlock:
    """A policy in one of the foreign formats, with its keys and numbers checked."""

    format: PolicyFormat
    block: Mapping[str, Any]
    scales: ScaleTable | None = None
    """The batches of the recipe around the block; without `scale_config` if the recipe is not elastic."""
    num_nodes: int = 0
    """`trainer.num_nodes` of a recipe that is not elastic; 0 if not set."""

    @property
    def is_fixed(self) -> bool:
        """Whether it is a recipe with `is_elastic: false`."""
        return self.format is PolicyFormat.RECIPE and not self.block.get("is_elastic", True)

    @property
    def deepspeed(self) -> DeepSpeedElasticity | None:
        """The batches of a DeepSpeed block; None for the other formats, which set none."""
        return read_deepspeed(self.block) if self.format is PolicyFormat.DEEPSPEED else None

    def in_replicas(self, *, ranks_per_node: int, replica_size: int, data_ranks_per_replica: int) -> ElasticPolicy:
        """Convert the policy to replicas.

        Args:
            ranks_per_node: number of ranks on each node.
            replica_size: number of ranks in each replica.
            data_ranks_per_replica: those ranks of a replica that read different samples.

        Raises:
            ConfigError: nodes, or numbers of GPUs, that do not make up whole replicas; the message says which would.
        """
        if self.format is PolicyFormat.MANIFEST:
            return policy_of_manifest(self.block, ranks_per_node=ranks_per_node, replica_size=replica_size)
        if self.format is PolicyFormat.RECIPE:
            nodes = () if self.scales is None else self.scales.nodes
            return policy_of_recipe(
                self.block,
                ranks_per_node=ranks_per_node,
                replica_size=replica_size,
                nodes=nodes,
                num_nodes=self.num_nodes,
            )
        worlds = read_deepspeed(self.block).world_sizes
        sizes = tuple(each // data_ranks_per_replica for each in worlds if each % data_ranks_per_replica == 0)
        if not sizes:
            raise ConfigError(
                f"none of the numbers of GPUs that share DeepSpeed's batch evenly is a multiple of the "
                f"{data_ranks_per_replica} data-parallel ranks of a replica: {list(worlds)}. Use another degree of "
                "sharding, or other micro_batch_sizes."
            )
        stable_s = float(self.block.get("min_time", 0)) * _MINUTE_S
        policy = ElasticPolicy(min_replicas=sizes[0], max_replicas=sizes[-1], replica_sizes=sizes)
        return replace(policy, min_stable_s=stable_s, max_backoff_s=max(policy.max_backoff_s, stable_s))


def read_policy(given: ElasticPolicy | Mapping[str, Any] | str | Path) -> ElasticPolicy | PolicyBlock:
    """Recognize the format of a policy by its keys, alone or inside a manifest, a recipe or a DeepSpeed
    configuration.

    Args:
        given: a policy, a mapping, or the path of a JSON or YAML file.

    Raises:
        UnknownKeyError: no known format, or a block with an unknown key.
        ConfigError: an unreadable file, blocks of several formats, wrong types, or impossible limits.
    """
    if isinstance(given, ElasticPolicy):
        return given
    source = "the policy" if isinstance(given, Mapping) else str(given)
    document = given if isinstance(given, Mapping) else _read_file(Path(given))
    found = _find_block(document)
    if found is None:
        wanted = "; ".join(f"{each.value}: {', '.join(keys)}" for each, keys in _KEYS_BY_FORMAT.items())
        raise UnknownKeyError(
            f"{source} has the keys {', '.join(map(str, sorted(document, key=str))) or '(none)'}, which tell no known "
            f"format. Known are {wanted}."
        )
    try:
        found.in_replicas(ranks_per_node=1, replica_size=1, data_ranks_per_replica=1)
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{found.format.value} of {source} holds a value of a wrong type: {error}.") from None
    return found


def batch_of(
    deepspeed: DeepSpeedElasticity | None,
    global_batch_size: int,
    samples_per_replica: int,
    micro_batch_size: int,
    scales: ScaleTable | None = None,
) -> StepBatch:
    """Return the batch that was given, or the one from DeepSpeed's block or a recipe; a recipe's counts nodes.

    Raises:
        ConfigError: two sources give the batch, or its sizes are impossible.
    """
    if scales is not None:
        if samples_per_replica:
            raise ConfigError("the recipe sets the batch. Leave out samples_per_replica, or the batch in the recipe.")
        return scales.batch(ranks_per_node=1, replica_size=1)
    if deepspeed is None:
        return StepBatch(
            global_batch_size=global_batch_size,
            samples_per_replica=samples_per_replica,
            micro_batch_size=micro_batch_size,
        )
    if global_batch_size or samples_per_replica or micro_batch_size:
        raise ConfigError(
            f"DeepSpeed's elasticity block says the batch: {deepspeed.global_batch_size} in micro-batches of "
            f"{list(deepspeed.micro_batch_sizes)}. Leave out global_batch_size, samples_per_replica and "
            "micro_batch_size."
        )
    return StepBatch(global_batch_size=deepspeed.global_batch_size, micro_batch_size=max(deepspeed.micro_batch_sizes))


def _find_block(document: Mapping[str, Any]) -> PolicyBlock | None:
    holders = [document, _inner(document, "spec")]
    inside = [
        _inside(each, block, holder)
        for holder in holders
        for each in PolicyFormat
        if (block := _inner(holder, each.value))
    ]
    alone = [
        PolicyBlock(format=each, block=document) for each, keys in _KEYS_BY_FORMAT.items() if set(keys) & set(document)
    ]
    found = inside + alone
    if len(found) > 1:
        names = ", ".join(each.format.value for each in found)
        raise ConfigError(f"the policy holds blocks of several formats: {names}. Give one of them.")
    return found[0] if found else None


def _inside(format: PolicyFormat, block: Mapping[str, Any], holder: Mapping[str, Any]) -> PolicyBlock:
    """Return the block, with the batches of the recipe around it."""
    found = PolicyBlock(format=format, block=block)
    if format is not PolicyFormat.RECIPE:
        return found
    if not found.is_fixed:
        return replace(found, scales=read_scales(holder))
    num_nodes = _inner(holder, "trainer").get("num_nodes") or 0
    plain = {key: value for key, value in holder.items() if key != "scale_config"}
    return replace(found, scales=read_scales(plain), num_nodes=int(num_nodes))


def _inner(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = document.get(key)
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _read_file(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"the policy file {path} cannot be read: {error.strerror}.") from None
    values: Any
    if path.suffix in (".yaml", ".yml"):
        try:
            import yaml
        except ModuleNotFoundError:
            raise MissingExtraError("yaml", "lightning", "a policy in YAML") from None
        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"the policy file {path} is no YAML: {error}") from None
    else:
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"the policy file {path} is not JSON: {error}. YAML must be named .yaml or .yml."
            ) from None
    if not isinstance(values, Mapping):
        raise ConfigError(f"the policy file {path} holds no table of keys and values at its top.")
    return cast("Mapping[str, Any]", values)
