"""An elastic policy from whatever a user has: ours, a HyperPod manifest or recipe, DeepSpeed's block, or a file of one.

Unknown keys and impossible limits are found at once. What others count in nodes becomes replicas once it is known how
many ranks a node and a replica have.
"""

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from hyperpod_plugins.elastic.batch import StepBatch
from hyperpod_plugins.elastic.policy import ElasticPolicy
from hyperpod_plugins.elastic.policy_formats import (
    DeepSpeedElasticity,
    policy_of_manifest,
    policy_of_recipe,
    read_deepspeed,
)
from hyperpod_plugins.elastic.scales import ScaleTable, read_scales
from hyperpod_plugins.errors import ConfigError, MissingExtraError, UnknownKeyError

_MINUTE_S = 60.0


class PolicyFormat(enum.Enum):
    """Who wrote a block; the value is the key that holds it in a larger document."""

    MANIFEST = "elasticPolicy"
    RECIPE = "elastic_policy"
    DEEPSPEED = "elasticity"


_TELLTALE = {
    PolicyFormat.MANIFEST: ("minReplicas", "maxReplicas", "replicaIncrementStep", "replicaDiscreteValues"),
    PolicyFormat.RECIPE: ("is_elastic", "min_nodes", "max_nodes", "replica_increment_step"),
    PolicyFormat.DEEPSPEED: ("max_train_batch_size", "micro_batch_sizes", "min_gpus", "max_gpus"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyBlock:
    """A policy in somebody else's words, whose keys and numbers have been checked."""

    format: PolicyFormat
    block: Mapping[str, Any]
    scales: ScaleTable | None = None
    """What a recipe around the block says of batches; without `scale_config` where it is not elastic."""
    num_nodes: int = 0
    """`trainer.num_nodes` of a recipe that is not elastic; 0 where it does not say."""

    @property
    def is_fixed(self) -> bool:
        """Whether it is a recipe that says `is_elastic: false`."""
        return self.format is PolicyFormat.RECIPE and not self.block.get("is_elastic", True)

    @property
    def deepspeed(self) -> DeepSpeedElasticity | None:
        """What a block of DeepSpeed says of batches; None for the others, which say nothing of them."""
        return read_deepspeed(self.block) if self.format is PolicyFormat.DEEPSPEED else None

    def in_replicas(self, *, ranks_per_node: int, ranks_per_replica: int, data_ranks_per_replica: int) -> ElasticPolicy:
        """The policy for replicas and nodes of so many ranks.

        Args:
            ranks_per_node: all of them.
            ranks_per_replica: all of them.
            data_ranks_per_replica: of these, those that read different samples: the shard degree.

        Raises:
            ConfigError: nodes, or numbers of GPUs, that do not make up whole replicas; the message says which would.
        """
        if self.format is PolicyFormat.MANIFEST:
            return policy_of_manifest(self.block, ranks_per_node=ranks_per_node, ranks_per_replica=ranks_per_replica)
        if self.format is PolicyFormat.RECIPE:
            nodes = () if self.scales is None else self.scales.nodes
            return policy_of_recipe(
                self.block,
                ranks_per_node=ranks_per_node,
                ranks_per_replica=ranks_per_replica,
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
    """Find out what was given: told apart by keys, alone or inside of a manifest, a recipe or a configuration.

    Raises:
        UnknownKeyError: a key that such a block does not have.
        ConfigError: nothing that is known, or impossible limits.
    """
    if isinstance(given, ElasticPolicy):
        return given
    source = "the policy" if isinstance(given, Mapping) else str(given)
    document = given if isinstance(given, Mapping) else _read_file(Path(given))
    found = _find_block(document)
    if found is None:
        wanted = "; ".join(f"{each.value}: {', '.join(keys)}" for each, keys in _TELLTALE.items())
        raise UnknownKeyError(
            f"{source} has the keys {', '.join(map(str, sorted(document, key=str))) or '(none)'}, which tell no known "
            f"format. Known are {wanted}."
        )
    try:
        found.in_replicas(ranks_per_node=1, ranks_per_replica=1, data_ranks_per_replica=1)
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
    """The batch that was given, or the one that DeepSpeed's block or a recipe comes to, counted in nodes.

    Raises:
        ConfigError: both were given, or impossible sizes.
    """
    if scales is not None:
        if samples_per_replica:
            raise ConfigError("the recipe says the batch. Leave out samples_per_replica, or what it says.")
        return scales.batch(ranks_per_node=1, ranks_per_replica=1)
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
    alone = [PolicyBlock(format=each, block=document) for each, keys in _TELLTALE.items() if set(keys) & set(document)]
    found = inside + alone
    if len(found) > 1:
        names = ", ".join(each.format.value for each in found)
        raise ConfigError(f"the policy holds blocks of several formats: {names}. Give one of them.")
    return found[0] if found else None


def _inside(format: PolicyFormat, block: Mapping[str, Any], holder: Mapping[str, Any]) -> PolicyBlock:
    """A block, and what a recipe around it says."""
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
                f"the policy file {path} is no JSON: {error}. YAML must be named .yaml or .yml."
            ) from None
    if not isinstance(values, Mapping):
        raise ConfigError(f"the policy file {path} holds no table of keys and values at its top.")
    return cast("Mapping[str, Any]", values)
