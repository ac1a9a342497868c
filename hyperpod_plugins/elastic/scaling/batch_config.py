"""Batch of a step and limits of the number of replicas, as the user gave them, and what they mean for a topology."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

from hyperpod_plugins.elastic.membership.elastic_spec import ElasticPolicy
from hyperpod_plugins.elastic.scaling.batch import StepBatch, refuse_reproducible
from hyperpod_plugins.elastic.scaling.lr_scaling import LRScalingRule
from hyperpod_plugins.elastic.scaling.policy_formats import PolicyBlock, ScaleTable, batch_of, read_policy
from hyperpod_plugins.errors import ConfigError


class ReplicaShape(Protocol):
    """What the batch depends on besides the number of replicas; a `Topology` has it."""

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node."""
        ...

    @property
    def data_ranks_per_replica(self) -> int:
        """Ranks of a replica that read different samples."""
        ...

    @property
    def tensor_degree(self) -> int:
        """Ranks of a replica that read the same samples."""
        ...

    @property
    def replica_size(self) -> int:
        """Ranks of a replica."""
        ...

    @property
    def data_degree(self) -> int:
        """Ranks of the whole world that read different samples."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedBatch:
    """A `BatchConfig` for one topology."""

    policy: ElasticPolicy
    """Limits, counted in replicas."""
    batch: StepBatch
    """Batch of a step."""
    given: StepBatch
    """Batch before DeepSpeed's micro-batch for this world is chosen, and before it is cut into logical shards."""
    remarks: tuple[str, ...]
    """Remarks for the user about a recipe, one clause each: what is ignored, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """Batch of a step, and limits of the number of replicas, which may be counted in nodes or GPUs."""

    batch: StepBatch
    """Batch of a step; for a recipe, as if each replica were a node."""
    policy: ElasticPolicy | PolicyBlock
    """Limits."""
    scales: ScaleTable | None = None
    """Batches of a recipe, by the number of nodes."""
    reproducible: bool = False
    """Whether results are bitwise independent of the number of replicas."""

    @classmethod
    def of(
        cls,
        policy: ElasticPolicy | Mapping[str, Any] | str | Path | None,
        limits: Mapping[str, Any],
        *,
        global_batch_size: int,
        samples_per_replica: int,
        micro_batch_size: int,
        reproducible: bool,
    ) -> Self:
        """Read the policy, and combine it with the sizes.

        Args:
            policy: see `ElasticTraining`; None to make one of `limits`.
            limits: fields of `ElasticPolicy`.
            global_batch_size: samples over all ranks; 0 if given otherwise.
            samples_per_replica: samples of each replica; 0 if given otherwise.
            micro_batch_size: largest number of samples per rank in one forward and backward pass; 0 if the policy has
                it.
            reproducible: whether results must not depend on the number of replicas.

        Raises:
            ConfigError: an unknown policy, invalid limits or sizes, or some that do not go together.
        """
        if policy is not None and limits:
            raise ConfigError(f"give ElasticTraining a policy, or limits ({', '.join(limits)}), not both.")
        source = None if policy is None else read_policy(policy)
        block = source if isinstance(source, PolicyBlock) else None
        scales = (
            None if block is None or block.scales is None else block.scales.fill(global_batch_size, micro_batch_size)
        )
        sizes = (global_batch_size, samples_per_replica, micro_batch_size)
        batch = batch_of(None if block is None else block.deepspeed, *sizes, scales)
        if reproducible:
            refuse_reproducible(follows_world=batch.follows_world)
        if batch.follows_world and source is None and "max_replicas" not in limits:
            raise ConfigError("samples_per_replica needs max_replicas: nothing else limits the batch.")
        own: dict[str, Any] = {"max_replicas": global_batch_size, **limits}
        try:
            found = source or ElasticPolicy(**own)
        except TypeError as error:
            raise ConfigError(f"ElasticTraining: {error}. See ElasticPolicy for the available limits.") from None
        return cls(batch=batch, policy=found, scales=scales, reproducible=reproducible)

    def check_rule(self, rule: LRScalingRule) -> None:
        """Check that a learning-rate rule goes with the batch.

        Raises:
            ConfigError: it does not.
        """
        rule.check_batch(follows_world=self.batch.follows_world)
        if self.scales is not None and rule.is_adascale:
            raise ConfigError(
                "lr_scaling='adascale' compares gradients of replicas with the same number of samples each, which "
                "the batches of a recipe do not guarantee: give samples_per_replica, or a recipe without batch sizes."
            )

    def resolve(self, shape: ReplicaShape) -> ResolvedBatch:
        """Limits and batch for replicas of this shape; nodes and GPUs are converted to replicas.

        Raises:
            ConfigError: the nodes or GPUs of the policy do not form whole replicas, or do not match those of the job.
        """
        policy, given, scales = self.policy, self.batch, self.scales
        if scales is not None:
            node, replica = shape.ranks_per_node, shape.replica_size
            sharing = replica // shape.data_ranks_per_replica
            scales = scales.feasible_on(ranks_per_node=node, replica_size=replica, ranks_per_share=sharing)
            given = scales.batch(ranks_per_node=node, replica_size=replica)
        deepspeed, is_fixed = None, False
        if isinstance(policy, PolicyBlock):
            deepspeed, is_fixed = policy.deepspeed, policy.is_fixed
            policy = replace(policy, scales=scales).in_replicas(
                ranks_per_node=shape.ranks_per_node,
                replica_size=shape.replica_size,
                data_ranks_per_replica=shape.data_ranks_per_replica,
            )
        remarks = ("is_elastic: false, so the job keeps the recipe's number of nodes",) if is_fixed else ()
        remarks += () if scales is None else scales.remarks
        remarks += given.infeasible_reasons(policy, shape.data_ranks_per_replica)
        batch = given
        if deepspeed is not None:
            batch = replace(batch, micro_batch_size=deepspeed.micro_batch_at(shape.data_degree))
        if self.reproducible:
            batch = batch.in_logical_shards(policy, shape.data_ranks_per_replica)
        return ResolvedBatch(policy=policy, batch=batch, given=given, remarks=remarks)
